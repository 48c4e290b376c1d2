"""The paged latent cache: one row of L + R numbers per token, shared by all heads.

Axes: T new tokens, S cached tokens, L KV rank, R rope. A slot is page * page_size + position in page.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mla.checks import check_device, check_int
from mla.errors import bad

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class CacheLayout(Protocol):
    """How one latent row is stored: a frozen, hashable object that owns the split, the bytes, reading and writing."""

    @property
    def L(self) -> int:
        """KV rank: elements of kv_c in a row."""
        ...

    @property
    def R(self) -> int:
        """Rope width: elements of k_pe in a row."""
        ...

    @property
    def name(self) -> str:
        """Short name for reports, such as 'float32'."""
        ...

    @property
    def row_bytes(self) -> int:
        """Bytes of one cached token."""
        ...

    @property
    def storage_dtype(self) -> torch.dtype:
        """dtype of the cache tensor."""
        ...

    @property
    def storage_width(self) -> int:
        """Elements of `storage_dtype` in one row."""
        ...

    def write(self, rows: Tensor, slots: Tensor, kv_c: Tensor, k_pe: Tensor, page_size: int) -> None:
        """Store kv_c (T, L) and k_pe (T, R) at slots (T,) >= 0 of rows (pages, page_size, storage_width)."""
        ...

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Split stored rows (..., storage_width) into kv_c (..., L) and k_pe (..., R), views if they can be."""
        ...

    def round_trip(self, kv_c: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a cache of this layout gives back for kv_c (S, L) and k_pe (S, R)."""
        ...


@dataclass(frozen=True)
class FloatRows:
    """Rows of plain floats, [kv_c, k_pe], of float64, float32, bfloat16 or float16."""

    L: int
    R: int
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        check_int("layout.L", self.L, 1, "take it from MLAConfig")
        check_int("layout.R", self.R, 0, "take it from MLAConfig")
        if self.dtype not in FLOAT_DTYPES:
            expected, fix = f"one of {FLOAT_DTYPES}", "pick a float row dtype"
            raise bad("layout.dtype", expected=expected, got=repr(self.dtype), fix=fix, kind=TypeError)

    @property
    def name(self) -> str:
        """The dtype's name, such as 'bfloat16'."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def row_bytes(self) -> int:
        """(L + R) * itemsize bytes for each token and layer."""
        return (self.L + self.R) * self.dtype.itemsize

    @property
    def storage_dtype(self) -> torch.dtype:
        """The row dtype itself."""
        return self.dtype

    @property
    def storage_width(self) -> int:
        """L + R elements."""
        return self.L + self.R

    def write(self, rows: Tensor, slots: Tensor, kv_c: Tensor, k_pe: Tensor, page_size: int) -> None:
        """Store kv_c (T, L) and k_pe (T, R), rounded to the dtype, at slots (T,) of rows (pages, page_size, L+R)."""
        page, offset = slots // page_size, slots % page_size
        rows[page, offset] = torch.cat([kv_c, k_pe], dim=-1).to(self.dtype)

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Split rows (..., L+R) into views kv_c (..., L) and k_pe (..., R) of the row dtype."""
        return rows[..., : self.L], rows[..., self.L :]

    def round_trip(self, kv_c: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        """Return kv_c (S, L) and k_pe (S, R) rounded to the row dtype."""
        return kv_c.to(self.dtype), k_pe.to(self.dtype)


@dataclass(frozen=True)
class CacheSpec:
    """What `Tier.new_cache` needs: how many pages of how many rows, in which layout, on which device."""

    pages: int
    page_size: int
    layout: CacheLayout
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_int("pages", self.pages, 0, "pass the pages of the pool")
        check_int("page_size", self.page_size, 1, "pass page_size=64")
        if not hasattr(self.layout, "storage_width"):
            got, fix = repr(self.layout), "FloatRows(L, R, dtype)"
            raise bad("layout", expected="a cache layout", got=got, fix=fix, kind=TypeError)
        check_device(self.device)


@dataclass(frozen=True, eq=False)
class PagedLatentCache:
    """One layer's latent rows in pages: `data` is (pages, page_size, storage_width) of the layout's dtype.

    Block tables and slots are shared by all layers. The cache is uninitialised memory where nothing was written, and
    nobody may read it there.
    """

    data: Tensor
    layout: CacheLayout
    page_size: int

    @classmethod
    def new(cls, spec: CacheSpec) -> "PagedLatentCache":
        """Allocate an uninitialised cache of spec.pages pages; data is (pages, page_size, storage_width)."""
        shape = (spec.pages, spec.page_size, spec.layout.storage_width)
        return cls(torch.empty(shape, dtype=spec.layout.storage_dtype, device=spec.device), spec.layout, spec.page_size)

    @classmethod
    def wrap(cls, tensor: Tensor, layout: CacheLayout) -> "PagedLatentCache":
        """Adopt a tensor (pages, page_size, storage_width) without a copy, such as one layer of an engine's cache.

        Pages and rows may lie apart in memory, the numbers of a row may not. Raises ValueError or TypeError where the
        shape or the dtype is not the layout's, or where rows share memory.
        """
        if tensor.dim() != 3 or tensor.shape[2] != layout.storage_width or tensor.shape[1] < 1:
            expected, fix = (
                f"(pages, page_size, {layout.storage_width})",
                "slice out one layer, view it as pages of rows",
            )
            raise bad("tensor", expected=expected, got=str(tuple(tensor.shape)), fix=fix)
        if tensor.dtype != layout.storage_dtype:
            expected, fix = str(layout.storage_dtype), "choose the layout of that dtype"
            raise bad("tensor", expected=expected, got=str(tensor.dtype), fix=fix, kind=TypeError)
        strides, got = tensor.stride(), f"strides {tensor.stride()}"
        if strides[2] != 1 and layout.storage_width > 1:
            raise bad("tensor", expected="rows contiguous in memory", got=got, fix="keep the row axis last")
        reach = layout.storage_width
        for stride, n in sorted((stride, n) for stride, n in zip(strides[:2], tensor.shape[:2], strict=True) if n > 1):
            if stride < reach:
                raise bad("tensor", expected="rows that share no memory", got=got, fix="do not expand or overlap pages")
            reach += (n - 1) * stride
        return cls(tensor, layout, tensor.shape[1])

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return self.data.shape[0]

    def write(self, kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor) -> None:
        """Store row i of kv_c (>= T, L) and k_pe (>= T, R) at slot_mapping[i] of (T,) int64; -1 means: not written.

        Rows past the last slot are ignored. Raises ValueError or TypeError naming the argument for shapes, dtypes,
        devices or slots that do not fit; then nothing is written.
        """
        if slot_mapping.dim() != 1 or slot_mapping.dtype != torch.int64:
            got, fix = f"{slot_mapping.dtype} of shape {tuple(slot_mapping.shape)}", "slot_mapping.flatten().long()"
            raise bad("slot_mapping", expected="torch.int64 of shape (T,)", got=got, fix=fix, kind=TypeError)
        T = slot_mapping.shape[0]
        for name, x, width in (("kv_c", kv_c, self.layout.L), ("k_pe", k_pe, self.layout.R)):
            if x.dim() != 2 or x.shape[0] < T or x.shape[1] != width:
                fix = "one row per slot, the layout's width"
                raise bad(name, expected=f"(>= {T}, {width})", got=str(tuple(x.shape)), fix=fix)
            if x.dtype not in FLOAT_DTYPES:
                fix = "pass unquantised rows"
                raise bad(name, expected=f"one of {FLOAT_DTYPES}", got=str(x.dtype), fix=fix, kind=TypeError)
        for name, x in (("kv_c", kv_c), ("k_pe", k_pe), ("slot_mapping", slot_mapping)):
            if x.device != self.data.device:
                fix = "move it to the cache's device"
                raise bad(name, expected=f"device {self.data.device}", got=str(x.device), fix=fix)
        outside = (slot_mapping < -1) | (slot_mapping >= self.num_pages * self.page_size)
        if bool(outside.any()):
            wrong, last = int(slot_mapping[outside][0]), self.num_pages * self.page_size - 1
            raise bad("slot_mapping", expected=f"-1 .. {last}", got=str(wrong), fix="write inside the pool")
        keep = slot_mapping >= 0
        self.layout.write(self.data, slot_mapping[keep], kv_c[:T][keep], k_pe[:T][keep], self.page_size)

    def gather(self, slots: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the stored rows at slots (n,) as (n, storage_width), into `out` (>= n, storage_width) if given.

        `slots` are int64 inside the pool, and trusted: to look at them here would make a GPU wait.
        """
        target = None if out is None else out[: slots.shape[0]]
        if self.data.is_contiguous():
            return torch.index_select(self.data.view(-1, self.data.shape[2]), 0, slots, out=target)
        where = [slots // self.page_size, slots % self.page_size]
        if target is None:
            return self.data[where[0], where[1]]
        # not target.copy_(...), which would hold the rows twice
        return torch.ops.aten.index.Tensor_out(self.data, where, out=target)

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return kv_c (n, L) and k_pe (n, R) as stored at slots (n,) int64."""
        return self.layout.read(self.gather(slots))

    def copy_page(self, source: int, target: int) -> None:
        """Copy all rows of page `source` over page `target`, such as a shared tail before it is written.

        Raises ValueError for a page outside the pool.
        """
        for name, page in (("source", source), ("target", target)):
            if not 0 <= page < self.num_pages:
                raise bad(name, expected=f"a page in 0 .. {self.num_pages - 1}", got=str(page), fix="stay in the pool")
        self.data[target].copy_(self.data[source])


def slots_of(block_table_row: Tensor, start: int, stop: int, page_size: int) -> Tensor:
    """Return the slots (stop - start,) int64 of positions start .. stop - 1 of one request with pages (max_pages,)."""
    at = torch.arange(start, stop, device=block_table_row.device)
    return block_table_row[at // page_size].to(torch.int64) * page_size + at % page_size
