"""A stand-in for AMD's AITER that computes its documented arithmetic on a CPU and checks every argument.

Written from a description of `ROCm/aiter` at commit e4048607 (2026-08-22). Not run on AMD hardware, and no promise
that the hardware does the same: it shows that a caller keeps the documented contract.
"""

from types import MethodType, ModuleType
from typing import Any

from . import decode, metadata, prefill, reduce, triton_ops
from .checks import FP8, SENTINEL, AiterAbort, Machine, poison, poisoned_allocations

__all__ = ["SENTINEL", "AiterAbort", "Machine", "fake_aiter", "poison", "poisoned_allocations"]


def fake_aiter(arch: str = "gfx942", cu_num: int = 80, **machine: Any) -> ModuleType:
    """Return a module tree with AITER's names for one simulated device; `machine` are further fields of Machine.

    The tree's attribute `machine` tells what ran (`machine.calls`). Nothing enters sys.modules.
    """
    if arch not in FP8:
        raise ValueError(f"arch: expected one of {sorted(FP8)}, got {arch!r}. Fix: other devices are not simulated.")
    device = Machine(arch, cu_num, **machine)
    root = ModuleType("aiter")
    root.__dict__.update(__version__="0.1.7+simulated.e4048607", machine=device)
    functions = {
        "mla": (
            decode.mla_decode_fwd,
            reduce.mla_reduce_v1,
            prefill.mla_prefill_fwd,
            prefill.mla_prefill_ps_fwd,
        ),
        "": (
            metadata.get_mla_metadata_info_v1,
            metadata.get_mla_metadata_v1,
            metadata.get_ps_metadata_info_v1,
            metadata.get_ps_metadata_v1,
            reduce.mla_reduce_v1,
            prefill.mla_prefill_ps_asm_fwd,
            prefill.flash_attn_varlen_func,
            triton_ops.concat_and_cache_mla,
        ),
        "ops.triton.attention.mla_decode": (triton_ops.decode_attention_fwd,),
        "ops.triton.attention.mla": (triton_ops.mla_decode_fwd, triton_ops.mla_prefill_fwd),
        "ops.triton.gluon.mla_gluon": (triton_ops.mla_gluon,),
    }
    for path, members in functions.items():
        for function in members:
            setattr(module(root, path), function.__name__, MethodType(function, device))
    module(root, "ops.mha").ENABLE_CK = device.ck
    module(root, "dtypes").fp8 = device.fp8
    chip = module(root, "jit.utils.chip_info")
    chip.get_gfx, chip.get_cu_num = lambda: device.arch, lambda: device.cu_num
    return root


def module(root: ModuleType, path: str) -> Any:
    """The submodule of root at a dotted path, made on first use."""
    for name in filter(None, path.split(".")):
        if not hasattr(root, name):
            setattr(root, name, ModuleType(f"{root.__name__}.{name}"))
        root = getattr(root, name)
    return root
