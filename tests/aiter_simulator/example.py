"""One decode step as a careful caller makes it, and what attention says about it in float64.

Axes: B requests, T query rows, H heads, W = rank + rope.
"""

from dataclasses import dataclass, field
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import fake_aiter
from .checks import fresh, poison

BUFFERS = (
    "work_meta_data",
    "work_indptr",
    "work_info_set",
    "reduce_indptr",
    "reduce_final_map",
    "reduce_partial_map",
)


def offsets(lengths: list[int]) -> Tensor:
    """(B + 1,) int32 cumulative lengths."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@dataclass
class Step:
    """Inputs of one decode step: qlens and lens per request, formats "bf16" or "fp8", and the library to call.

    Rows of the cache that belong to no request hold NaN. `call` are the keywords of mla_decode_fwd, `buffers` the six
    metadata buffers by name: change one of them to make a mistake.
    """

    library: ModuleType
    heads: int
    qlens: list[int]
    lens: list[int]
    q_format: str = "bf16"
    kv_format: str = "bf16"
    scale: float = 0.3
    q_scale: float = 0.5
    kv_scale: float = 2.0
    buffers: dict[str, Tensor] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        machine, generator = self.library.machine, torch.Generator().manual_seed(0)
        rows, keys = sum(self.qlens), sum(self.lens)
        q = torch.randn(rows, self.heads, machine.width, generator=generator)
        kv = torch.full((keys + 5, 1, 1, machine.width), float("nan"))
        indices = torch.randperm(keys + 5, generator=generator)[:keys].int()
        kv[indices.long()] = torch.randn(keys, 1, 1, machine.width, generator=generator)
        self.call |= {
            "q": q.to(self.dtype(self.q_format)),
            "kv_buffer": kv.to(self.dtype(self.kv_format)),
            "o": fresh((rows, self.heads, machine.rank), torch.bfloat16),
            "qo_indptr": offsets(self.qlens),
            "kv_indptr": offsets(self.lens),
            "kv_indices": indices,
            "kv_last_page_lens": torch.ones(len(self.lens), dtype=torch.int32),
            "max_seqlen_q": max(self.qlens),
            "sm_scale": self.scale,
        }
        scales = {"q_scale": (self.q_format, self.q_scale), "kv_scale": (self.kv_format, self.kv_scale)}
        self.call |= {name: torch.tensor([value]) for name, (f, value) in scales.items() if f == "fp8"}

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a format on this machine."""
        return self.library.machine.fp8 if name == "fp8" else torch.bfloat16

    @property
    def uniform(self) -> bool:
        """Whether every request has the same number of query rows."""
        return len(set(self.qlens)) == 1

    def plan(self, **changes: Any) -> "Step":
        """Make the metadata; `changes` replace arguments of get_mla_metadata_v1, info_heads the heads of the sizes."""
        dtypes = self.dtype(self.q_format), self.dtype(self.kv_format)
        sized_for = changes.pop("info_heads", self.heads)
        most = max(self.qlens)
        sizes = self.library.get_mla_metadata_info_v1(len(self.lens), most, sized_for, *dtypes, is_sparse=False)
        self.buffers = {name: poison(torch.empty(s, dtype=d)) for name, (s, d) in zip(BUFFERS, sizes, strict=True)}
        arguments: dict[str, Any] = {
            "seqlens_qo_indptr": self.call["qo_indptr"],
            "seqlens_kv_indptr": self.call["kv_indptr"],
            "kv_last_page_lens": self.call["kv_last_page_lens"],
            "num_heads_per_head_k": self.heads,
            "num_heads_k": 1,
            "is_causal": True,
            **{("work_metadata_ptrs" if n == "work_meta_data" else n): b for n, b in self.buffers.items()},
            "page_size": 1,
            "kv_granularity": 16,
            "max_seqlen_qo": most,
            "uni_seqlen_qo": most if self.uniform else -1,
            "dtype_q": dtypes[0],
            "dtype_kv": dtypes[1],
        }
        self.library.get_mla_metadata_v1(**(arguments | changes))
        self.call |= self.buffers
        return self

    def run(self, **changes: Any) -> tuple[Tensor, Tensor | None]:
        """Call mla_decode_fwd and return (o, lse)."""
        call = self.call | changes
        _, lse = self.library.mla.mla_decode_fwd(**call)
        return call["o"], lse

    def expected(self) -> tuple[Tensor, Tensor]:
        """(out (T, H, rank), lse (T, H)) in float64: plain attention on the stored values, scales applied."""
        rank, starts, kv = self.library.machine.rank, self.call["qo_indptr"].tolist(), self.call["kv_indptr"].tolist()
        factor = self.scale * (self.q_scale if self.q_format == "fp8" else 1)
        kv_factor = self.kv_scale if self.kv_format == "fp8" else 1
        outs, lses = [], []
        for b, (n, s) in enumerate(zip(self.qlens, self.lens, strict=True)):
            keys = self.call["kv_buffer"].flatten(0, 2)[self.call["kv_indices"][kv[b] : kv[b + 1]].long()]
            keys = keys.double() * kv_factor
            scores = torch.einsum("nhw,sw->hns", self.call["q"][starts[b] : starts[b] + n].double(), keys) * factor
            hidden = torch.arange(s) > torch.arange(n)[:, None] + s - n
            scores = scores.masked_fill(hidden, float("-inf"))
            outs.append(torch.einsum("hns,sv->nhv", scores.softmax(-1), keys[:, :rank]))
            lses.append(scores.logsumexp(-1).T)
        return torch.cat(outs), torch.cat(lses)

    def allowed(self, expected: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, float]:
        """Largest error of out, elementwise, and of lse; `expected` spares computing it again.

        Values are computed in float64, merged from partials in float32 (u = 2**-24), stored in bf16 (u = 2**-8). Where
        exp(score - max) is rounded to 8 bits: 2**-4 of every term, and half the spacing 2**-9 below the normal range.
        """
        out, lse = expected or self.expected()
        kv_factor = self.kv_scale if self.kv_format == "fp8" else 1
        keys = self.call["kv_buffer"].flatten(0, 2).double().nan_to_num()[:, : out.shape[-1]].abs() * kv_factor
        merged = (4 + 2 * lse.abs().max().item()) * 2**-24
        bound = out.abs() * 2**-8 + merged * keys.max()
        if self.q_format == "fp8":
            bound = bound + keys.max() * 2**-4 + 2**-10 * keys.sum(0)
        return bound * (1 + 2**-7), merged


def toy(arch: str = "gfx942", cu_num: int = 8, **machine: Any) -> ModuleType:
    """A library whose kernels are compiled for rank 32 and rope 8."""
    return fake_aiter(arch, cu_num, rank=32, rope=8, **machine)
