"""AITER's own kernels where they run: its Triton kernels interpreted or on a GPU, all of it on an AMD GPU.

The Triton kernels of the package `amd-aiter` need no AMD GPU. They are loaded beside the package's own start, which
builds HIP modules, and get the lists, the layout of the LSE and the merge from the adapter; the oracle judges. They
run in a child process, since Triton's interpreter takes a process for good: this file is its program too.
Axes: T new tokens (packed over requests), t rows of a call, s sequences, N heads, L KV rank, P nope, R rope, V value.
"""

import importlib
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from simulated_aiter import SimulatedAiter
from small_case import Case, make_case

import tiers
from mla.accuracy import compare
from mla.attention import AttentionState
from mla.conformance import SPECS, run_case
from mla.conformance import Case as Conformance
from mla.conformance.cases import DIMS
from mla.need import Need
from mla.projections import absorb_query, project_values
from mla.ragged import attend_ragged, plan_ragged, prepare_ragged
from mla.tier import Plan
from tiers.tier2_aiter.library import TRITON_DECODE
from tiers.tier2_aiter.pages import kernel_rows, running_sums, sequences_of, slots_of_keys
from tiers.tier2_aiter.prefill import flash_kernel, heads_first
from tiers.tier2_aiter.tier import AiterTier

SIZES: dict[str, Any] = {"L": 512, "R": 64, "page_size": 16, "dtype": torch.float32}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = {"decode": "mla_decode_rope", "flash": "mha", "paged": "mla_decode"}


def case_of(kernel: str) -> Case:
    """Rows of 512 + 64 over scattered pages, ragged, with padding; float32, which the interpreter computes right."""
    if kernel == "flash":
        return make_case([5, 9], [17, 9], N=3, P=128, V=128, **SIZES)
    half = {"dtype": torch.float16} if kernel == "paged" else {}
    return make_case([1, 3, 1], [7, 33, 18], N=16, P=8, V=12, **SIZES | half)


class Mi350:
    """What Triton's driver would say of an MI350, for modules that ask when they are imported."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("hip", "gfx950", 64)

    def get_current_device(self) -> int:
        return 0


@cache
def load(name: str) -> ModuleType:
    """Import a module of aiter.ops.triton without starting aiter; ImportError where this build has none."""
    from triton.runtime import driver

    spec = find_spec("aiter")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    root = Path(next(iter(spec.submodule_search_locations)))
    for package in ("aiter", "aiter.ops", "aiter.ops.triton", "aiter.ops.triton.attention"):
        folder = root.joinpath(*package.split(".")[1:])
        if folder.is_dir():
            stub = ModuleType(package)
            stub.__path__ = [str(folder)]
            sys.modules[package] = stub
    arch = ModuleType("aiter.ops.triton.utils._triton.arch_info")  # asks Triton's driver for an AMD GPU
    answers = {"get_arch": "gfx950", "get_device": "MI350X", "is_fp4_avail": True, "is_fp8_avail": True}
    for function, answer in answers.items():
        setattr(arch, function, lambda answer=answer: answer)
    if DEVICE == "cpu":
        driver.set_active(Mi350())
    package = importlib.import_module("aiter.ops.triton.utils._triton")
    sys.modules[arch.__name__] = package.arch_info = arch  # type: ignore[attr-defined]
    try:
        return importlib.import_module(f"aiter.ops.triton.attention.{name}")
    except ModuleNotFoundError:  # older builds have it one folder higher
        return importlib.import_module(f"aiter.ops.triton.{name}")


def run_decode(case: Case) -> AttentionState:
    """The per-row indices of the adapter in AITER's grouped decode: out (T, N, V), no LSE."""
    decode = load(NAMES["decode"]).decode_attention_fwd_grouped_rope
    need, rows = case.need, sequences_of(case.batch, [0, 1, 2]).single_rows(causal=True)
    kv_indptr = torch.from_numpy(running_sums(rows)[1])
    slots = slots_of_keys(case.batch.block_table, torch.from_numpy(rows.owners), kv_indptr, rows.keys, need.page_size)
    kv, indices = kernel_rows(case.cache, slots)
    q = torch.cat([absorb_query(case.q.nope, case.up.W_UK), case.q.pe], -1)
    o, splits = q.new_empty(len(q), need.N, need.L), 2
    logits = q.new_full((len(q), need.N, splits, need.L + 1), float("nan"))
    kv = kv[:, 0]
    placed = [x.to(DEVICE) for x in (q, kv, kv[..., : need.L], o, kv_indptr, indices)]
    positions = torch.zeros(len(q), 1, dtype=torch.int64, device=DEVICE)
    decode(*placed, None, need.L, need.R, None, positions, logits.to(DEVICE), splits, need.softmax_scale, 0.0, False)
    return AttentionState(project_values(placed[3].cpu(), case.up.W_UV), None)


class WithRealTriton(SimulatedAiter):
    """The simulated AITER with the real Triton decode in its place."""

    def find(self, name: str, need: Need) -> Any:
        """Return the real function, on this machine's device, or a simulated one."""
        if name != TRITON_DECODE:
            return super().find(name, need)
        real = load(NAMES["paged"]).decode_attention_fwd

        def decode(**asked: Any) -> None:
            placed = {k: x.to(DEVICE) if isinstance(x, Tensor) else x for k, x in asked.items()}
            real(**placed)
            for k in ("o", "lse"):
                asked[k].copy_(placed[k])

        decode.__signature__ = signature(real)  # type: ignore[attr-defined]
        return decode


def run_paged(case: Case) -> AttentionState:
    """The whole tier in float16, whose route is AITER's paged decode: out (T, N, V) and lse (T, N)."""
    return case.run(AiterTier(library=WithRealTriton()))


def run_flash(case: Case) -> AttentionState:
    """AITER's varlen flash attention under the adapter's kernel and the project's merge: out (T, N, V), lse (T, N)."""
    real, need = load(NAMES["flash"]).flash_attn_varlen_func, case.need

    def flash(*tensors: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **how: Any) -> Any:
        given = [x.to(DEVICE) for x in (*tensors, cu_seqlens_q, cu_seqlens_k)]
        return [x.cpu() for x in real(*given, **how)]

    steps = plan_ragged(need, case.batch, [0, 1], 16)  # a chunk ends inside the first request
    plan = Plan(need, case.batch, sizes=steps.sizes)
    kernel = flash_kernel(flash, need, heads_first(flash, need))
    out, lse = torch.full((case.batch.num_tokens, need.N, need.V), float("nan")), torch.zeros(14, need.N)
    attend_ragged(steps, case.q, case.cache, prepare_ragged(case.up, need), plan, kernel, out, lse)
    return AttentionState(out, lse)


@cache
def why_not_here() -> str:
    """Why AITER's Triton kernels cannot run on this machine, "" where they can."""
    for package, fix in (("aiter", "pip install --no-deps amd-aiter"), ("triton", "pip install 'mla-tiers[triton]'")):
        if find_spec(package) is None:
            return f"{package} is not installed: {fix}"
    return ""


@pytest.mark.parametrize("kernel", NAMES)
def test_aiters_own_triton_kernels_agree_with_the_oracle(kernel, tmp_path):
    if why_not_here():
        pytest.skip(why_not_here())
    result = tmp_path / "state.pt"
    env = os.environ | ({"TRITON_INTERPRET": "1"} if DEVICE == "cpu" else {})
    command = [sys.executable, __file__, kernel, str(result)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    if done.returncode == 3:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stderr[-3000:]
    case = case_of(kernel)
    state = AttentionState(*torch.load(result))
    assert (state.lse is None) == (kernel == "decode")
    found = compare(state, case.truth())
    assert found.ok, found


@pytest.mark.parametrize("batch", ["small_decode", "verify_4", "query_17", "padded_tail"])
def test_the_installed_aiter_is_within_the_budget_on_an_AMD_gpu(batch):
    for lse in (True, False):
        case = Conformance(SPECS[batch], DIMS["v3_n16"], "bf16", family="needle", lse=lse)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        reasons = AiterTier().why_not(case.need(device))
        if reasons:
            pytest.skip(" ".join(reasons))
        for form in ("auto", "mqa"):
            result = run_case(AiterTier(form), case, device=device)
            assert result.ok, result


def test_tiers_lists_what_is_missing_here_in_sentences():
    if torch.version.hip is not None:
        pytest.skip("this PyTorch is a ROCm build: the tests above run AITER itself")
    reasons = AiterTier().why_not(case_of("flash").need)
    assert reasons
    assert all(r[0] != " " and r.endswith(".") for r in reasons)
    assert tiers.names()


if __name__ == "__main__":
    run = {"decode": run_decode, "paged": run_paged, "flash": run_flash}[sys.argv[1]]
    try:
        with torch.no_grad():
            torch.save(tuple(run(case_of(sys.argv[1]))), sys.argv[2])
    except ImportError as error:
        print(f"this build of amd-aiter does not give it here: {error}")
        sys.exit(3)
    sys.exit(0)
