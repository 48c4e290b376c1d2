"""What every decode kernel of the simulator starts from: the checked call, and how cells are read and stored.

Axes: T query rows, H heads, n query rows of one work item, s keys; W = rank + rope columns of a cache row.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .attention import attend, bottom_right
from .checks import Machine, abort_unless, check_indptr, check_int32

NAN = float("nan")


@dataclass
class Call:
    """One decode call after its checks, as the kernels see it; q and o may be folded."""

    machine: Machine
    q: Tensor
    kv: Tensor
    o: Tensor
    qo: list[int]
    kv_indptr: list[int]
    indices: Tensor
    last_page: list[int]
    qlen: int
    scale: float
    kv_scale: float = 1.0
    causal: bool = True
    ratio: int = 1

    @classmethod
    def checked(
        cls,
        machine: Machine,
        q: Tensor,
        kv: Tensor,
        o: Tensor,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        last_page: Tensor,
        qlen: int,
        **rest: Any,
    ) -> "Call":
        """Read the index lists; abort on those that would send a kernel out of bounds."""
        batch = qo_indptr.numel() - 1
        check_int32("kv_indices", kv_indices)
        check_int32("kv_last_page_lens", last_page)
        abort_unless(kv_indptr.numel() == batch + 1, f"kv_indptr: {batch + 1} values wanted, got {kv_indptr.numel()}")
        abort_unless(last_page.numel() >= batch, f"kv_last_page_lens: {batch} values wanted")
        qo = check_indptr("qo_indptr", qo_indptr, q.shape[0])
        ends = check_indptr("kv_indptr", kv_indptr, kv_indices.numel())
        return cls(machine, q, kv, o, qo, ends, kv_indices, last_page.tolist(), qlen, **rest)

    def keys(self, request: int, start: int, end: int) -> Tensor:
        """(s, W) float32 cache rows of kv_indices[start:end]; NaN where the hardware would read something else."""
        if self.kv.shape[1] != 1 or self.last_page[request] != 1:
            return torch.full((max(0, end - start), self.machine.width), NAN)
        rows = self.indices[start:end].long()
        data = self.kv.reshape(-1, self.kv.shape[-1])
        abort_unless(rows.numel() == 0 or (rows.min() >= 0 and rows.max() < len(data)), "kv_indices: memory fault")
        keys = data[rows].float() * self.kv_scale
        lost = (rows + 1) * data.shape[1] * data.itemsize > self.machine.window
        return keys.masked_fill(lost[:, None], NAN)

    def attend(self, q: Tensor, request: int, start: int, end: int, diagonal: int) -> tuple[Tensor, Tensor]:
        """Rows q (n, H, W) over keys start:end (positions in kv_indices); row t sees t + diagonal + 1 of them."""
        if q.shape[-1] != self.machine.width:
            return torch.full((*q.shape[:2], self.o.shape[-1]), NAN), torch.full(q.shape[:2], NAN)
        keys = self.keys(request, start, end)[:, None]
        seen = bottom_right(len(q), len(keys), diagonal) if self.causal else None
        p_dtype = self.q.dtype if self.q.itemsize == 1 else None
        return attend(q.float(), keys, keys[..., : self.machine.rank], self.scale, seen, p_dtype)


def store(o: Tensor, rows: slice, out: Tensor) -> None:
    """Write bf16 rows; into another dtype their raw bits would land, which is NaN here."""
    o[rows] = out.to(o.dtype) if o.dtype == torch.bfloat16 else NAN
