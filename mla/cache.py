"""The paged latent cache: one row of L + R numbers per token, shared by all heads.

Axes: T new tokens, S cached tokens, L KV rank, R rope. A slot is page * page_size + position in page.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mla.errors import bad

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class CacheLayout(Protocol):
    """How one latent row is stored: a frozen, hashable object that owns the split, the bytes, write, read, round_trip."""

    L: int
    R: int

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
        """Split stored rows (..., storage_width) into kv_c (..., L) and k_pe (..., R); views where nothing is decoded."""
        ...

    def round_trip(self, kv_c: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a cache of this layout gives back for kv_c (S, L) and k_pe (S, R)."""
        ...


@dataclass(frozen=True)
class FloatRows:
    """Rows of plain floats, [kv_c, k_pe]: row_bytes = (L + R) * itemsize; dtype is float64, float32, bfloat16 or float16."""

    L: int
    R: int
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.L < 1 or self.R < 0:
            raise bad("layout", expected="L >= 1 and R >= 0", got=f"L={self.L}, R={self.R}", fix="take both from MLAConfig")
        if self.dtype not in FLOAT_DTYPES:
            raise bad("layout.dtype", expected=f"one of {FLOAT_DTYPES}", got=str(self.dtype), fix="pick a float row dtype", kind=TypeError)

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
        """Store kv_c (T, L) and k_pe (T, R), rounded to the row dtype, at slots (T,) of rows (pages, page_size, L+R)."""
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
        for name, low in (("pages", 0), ("page_size", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < low:
                raise bad(name, expected=f"an int >= {low}", got=repr(value), fix=f"pass {name}={max(low, 64)}")


@dataclass(frozen=True, eq=False)
class PagedLatentCache:
    """One layer's latent rows in pages: `data` is (pages, page_size, storage_width) of the layout's dtype, any page stride.

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
        """Adopt a tensor (pages, page_size, storage_width) of any page stride without a copy, such as one layer of an engine's cache.

        Raises ValueError or TypeError where the shape, the dtype or the stride inside a row is not the layout's.
        """
        if tensor.dim() != 3 or tensor.shape[2] != layout.storage_width:
            expected = f"(pages, page_size, {layout.storage_width})"
            raise bad("tensor", expected=expected, got=str(tuple(tensor.shape)), fix="slice out one layer and view it as pages of rows")
        if tensor.dtype != layout.storage_dtype:
            raise bad("tensor", expected=str(layout.storage_dtype), got=str(tensor.dtype), fix="choose the layout of that dtype", kind=TypeError)
        if tensor.stride(2) != 1 and layout.storage_width > 1:
            raise bad("tensor", expected="rows contiguous in memory", got=f"stride {tensor.stride(2)} in a row", fix="keep the row axis last")
        return cls(tensor, layout, tensor.shape[1])

    @property
    def num_pages(self) -> int:
        """Pages in the pool."""
        return self.data.shape[0]

    def write(self, kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor) -> None:
        """Store row i of kv_c (>= T, L) and k_pe (>= T, R) at slot_mapping[i] of (T,); -1 is skipped; later rows are ignored.

        Raises ValueError or TypeError naming the argument for shapes, dtypes or slots that do not fit; then nothing is written.
        """
        T = slot_mapping.shape[0]
        for name, x, width in (("kv_c", kv_c, self.layout.L), ("k_pe", k_pe, self.layout.R)):
            if x.dim() != 2 or x.shape[0] < T or x.shape[1] != width:
                raise bad(name, expected=f"(>= {T}, {width})", got=str(tuple(x.shape)), fix="one row per slot, the layout's width")
            if x.device != self.data.device:
                raise bad(name, expected=f"device {self.data.device}", got=str(x.device), fix="move it to the cache's device")
            if not x.is_floating_point():
                raise bad(name, expected="a float dtype", got=str(x.dtype), fix="pass unquantised rows", kind=TypeError)
        if slot_mapping.dtype != torch.int64:
            raise bad("slot_mapping", expected="torch.int64", got=str(slot_mapping.dtype), fix="slot_mapping.long()", kind=TypeError)
        keep = slot_mapping >= 0
        slots = slot_mapping[keep]
        if slots.device.type == "cpu" and slots.numel() and int(slots.max()) >= self.num_pages * self.page_size:
            expected = f"slots below {self.num_pages * self.page_size}"
            raise bad("slot_mapping", expected=expected, got=str(int(slots.max())), fix="write inside the pool")
        self.layout.write(self.data, slots, kv_c[:T][keep], k_pe[:T][keep], self.page_size)

    def gather(self, slots: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the stored rows at slots (n,) int64 >= 0 as (n, storage_width), into `out` (>= n, storage_width) if given."""
        n = slots.shape[0]
        target = self.data.new_empty(n, self.layout.storage_width) if out is None else out[:n]
        if self.data.is_contiguous():
            return torch.index_select(self.data.view(-1, self.data.shape[2]), 0, slots, out=target)
        page, offset = slots // self.page_size, slots % self.page_size
        target.copy_(self.data[page, offset])
        return target

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return kv_c (n, L) and k_pe (n, R) as stored at slots (n,) int64."""
        return self.layout.read(self.gather(slots))

    def copy_page(self, source: int, target: int) -> None:
        """Copy all rows of page `source` over page `target` (copy-on-write of a shared tail)."""
        self.data[target].copy_(self.data[source])


def slots_of(block_table_row: Tensor, start: int, stop: int, page_size: int) -> Tensor:
    """Return the slots (stop - start,) int64 of positions start .. stop - 1 of one request; block_table_row is (max_pages,)."""
    at = torch.arange(start, stop, device=block_table_row.device)
    return block_table_row[at // page_size].to(torch.int64) * page_size + at % page_size
