"""What may go wrong on the device, and memory whose unwritten cells show.

`ROCm/aiter` at e4048607 reaches its assembly kernels through ctypes: a failed check there calls `std::abort()` and no
`except` sees it. Checks in pybind modules raise RuntimeError; Python ones AssertionError or KeyError.
"""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

SENTINEL = -777
FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}


class AiterAbort(BaseException):
    """The process would be dead: a failed check in a kernel launcher, or a memory access fault."""


@dataclass
class Machine:
    """One simulated device and build.

    cu_num: compute units of the (possibly partitioned) device. window: bytes of a cache that the kernels can address,
    2**32 on hardware. rank, rope: widths that the decode was compiled for, and expanded: those of the 8-bit prefill;
    toy widths only shorten tests. ck: the varlen flash attention is CK's, lse (H, T), else Triton's, lse (T, H).
    persistent_max_batch: the gate of AITER_MLA_DECODE_PERSISTENT_MAX_BATCH. planned: what each work list was made for.
    calls: names of the kernels that ran, in order.
    """

    arch: str = "gfx942"
    cu_num: int = 80
    window: int = 2**32
    rank: int = 512
    rope: int = 64
    expanded: tuple[int, int] = (192, 128)
    ck: bool = True
    persistent_max_batch: int = 32
    planned: dict[int, tuple] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    @property
    def fp8(self) -> torch.dtype:
        """The 8-bit float of this arch: e4m3fnuz (largest 240) on gfx942, e4m3fn (largest 448) on gfx950."""
        return FP8[self.arch]

    @property
    def width(self) -> int:
        """Columns of a cache row: rank + rope."""
        return self.rank + self.rope


def abort_unless(ok: Any, message: str) -> None:
    """Raise AiterAbort(message) unless ok."""
    if not ok:
        raise AiterAbort(message)


def runtime_unless(ok: Any, message: str) -> None:
    """Raise RuntimeError(message), as a pybind check does, unless ok."""
    if not ok:
        raise RuntimeError(message)


def check_indptr(name: str, indptr: Tensor, total: int | None = None) -> list[int]:
    """Return a contiguous int32 (B+1,) list of offsets; aborts where it would send a kernel out of bounds."""
    check_int32(name, indptr)
    values = indptr.tolist()
    abort_unless(values and values[0] == 0, f"{name}: must start at 0, got {values[:1]}")
    abort_unless(all(a <= b for a, b in pairwise(values)), f"{name}: not monotone: {values}")
    abort_unless(total is None or values[-1] <= total, f"{name}: ends at {values[-1]}, memory ends at {total}")
    return values


def check_int32(name: str, tensor: Tensor) -> None:
    """Abort unless the tensor is one-dimensional, contiguous int32."""
    abort_unless(tensor.dtype == torch.int32, f"{name}: int32 wanted, got {tensor.dtype}")
    abort_unless(tensor.dim() == 1 and tensor.is_contiguous(), f"{name}: one contiguous row wanted")


def poison(tensor: Tensor) -> Tensor:
    """Fill with NaN (floats), -777 (signed integers) or 119 (others), and return the tensor."""
    if tensor.dtype.is_floating_point:
        return tensor.fill_(float("nan"))
    return tensor.fill_(SENTINEL) if tensor.itemsize > 1 and tensor.dtype.is_signed else tensor.fill_(119)


def fresh(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """What torch.empty would give, with every cell poisoned."""
    return poison(torch.empty(shape, dtype=dtype))


class poisoned_allocations(TorchFunctionMode):
    """Within it torch.empty, empty_like and new_empty return poisoned tensors: a cell nobody wrote shows."""

    makers = (torch.empty, torch.empty_like, torch.Tensor.new_empty)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return poison(made) if func in self.makers and made.dtype != torch.bool else made
