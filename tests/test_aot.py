"""`mla aot`: kernels compiled with no GPU. What needs the compiler is skipped where the extra `triton` is missing."""

import importlib.util
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mla import aot as module
from mla.aot import EXAMPLE, SHARED_LIMIT, TARGETS, Compile, compile_file, compile_one, declared, kernel_of
from mla.commands.aot import aot, aot_blocks
from mla.commands.output import Grid
from mla.sass import counted, instructions, resources

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason='triton is not installed, so nothing can be compiled; run pip install "mla-tiers[triton]"',
)

KERNELS = """
import triton
import triton.language as tl
from mla.aot import Compile


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, i < n) + tl.load(y + i, i < n), i < n)


@triton.jit
def outer(a, b, out, K, M: tl.constexpr, N: tl.constexpr):
    i, j = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    acc = tl.zeros((M, N), tl.float32)
    for k in range(K):
        acc += tl.load(a + k * M + i) * tl.load(b + k * N + j)
    tl.store(out + i * N + j, acc)


@triton.jit
def product(a, b, out, K, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK):
        acc += tl.dot(tl.load(a + i[:, None] * K + k + i[None, :]), tl.load(b + (k + i[:, None]) * BLOCK + i[None, :]))
    tl.store(out + i[:, None] * BLOCK + i[None, :], acc)


@triton.jit
def broken(x, BLOCK: tl.constexpr):
    tl.store(x, no_such_name)


tuned = triton.autotune([triton.Config({"BLOCK": 64})], key=["n"])(add)
"""
ADD = 'Compile(add, {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32:16"}, {"BLOCK": 1024})'
OUTER = '{"a": "*fp32", "b": "*fp32", "out": "*fp32", "K": "i32"}'
PRODUCT = '{"a": "*bf16", "b": "*bf16", "out": "*fp32", "K": "i32:16"}'


@pytest.fixture
def file(tmp_path):
    """Make a file of the kernels above and the given lines, and return its path."""

    def write(lines, kernels=KERNELS):
        path = tmp_path / "kernels.py"
        path.write_text(f"{kernels}\n{lines}\n")
        return path

    return write


def plain_kernel(*names):
    """As much of a jit function as is looked at before anything is compiled."""
    return SimpleNamespace(arg_names=list(names), __name__="plain")


# What compiled code takes


@needs_triton
@pytest.mark.parametrize("target", TARGETS)
def test_a_vector_kernel_fits_in_registers_everywhere(file, target):
    (found,) = compile_file(file(f"aot = [{ADD}]"), [target])
    assert (found.kernel, found.target, found.status, found.detail) == ("add", target, "ok", "")
    assert 4 <= found.registers <= 64
    assert (found.spilled, found.shared, found.shared_limit) == (0, 0, SHARED_LIMIT[target])
    assert found.seconds > 0


@needs_triton
def test_a_kernel_with_more_accumulators_than_registers_spills_what_does_not_fit(file):
    path = file(f'aot = [Compile(outer, {OUTER}, {{"M": 256, "N": 256}}, name="wide", num_warps=4)]')
    nvidia, amd = compile_file(path, ["sm_90", "gfx942"])
    # 256 * 256 float32 over 4 warps of 32 are 512 for a thread, of 255 registers; over 4 waves of 64 are 256, of 512
    assert nvidia.spilled >= 4 * (512 - 255)
    assert nvidia.registers <= 255
    assert (amd.spilled, 256 <= amd.registers <= 512) == (0, True)
    assert {nvidia.kernel, amd.kernel} == {"wide"}


@needs_triton
def test_spills_are_found_on_amd_too(file):
    path = file(f'aot = [Compile(outer, {OUTER}, {{"M": 128, "N": 512}}, num_warps=2)]')
    (amd,) = compile_file(path, ["gfx942"])  # 512 accumulators for a thread fill all of its registers
    assert amd.spilled > 0
    assert amd.registers == 512


@needs_triton
def test_more_shared_memory_than_a_program_gets_is_no_success(file):
    stages = lambda n: f'Compile(product, {PRODUCT}, {{"BLOCK": 128}}, num_warps=8, num_stages={n})'
    path = file(f"aot = [{stages(4)}, {stages(2)}]")
    four, two = compile_file(path, ["sm_90"])
    tiles = 2 * 128 * 128 * 2  # bytes of both bfloat16 tiles of one stage
    assert (four.status, four.shared) == ("too_large", 4 * tiles)
    assert (two.status, two.shared) == ("ok", 2 * tiles)
    assert 4 * tiles > SHARED_LIMIT["sm_90"] > 2 * tiles
    assert four.detail == "takes 262,144 bytes of shared memory; sm_90 gives a program 232,448."
    assert aot(None, str(path), ["sm_90"]).exit == 1


@needs_triton
def test_pointers_and_marked_integers_are_compiled_as_multiples_of_16(file, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (entry,) = declared(file(f"aot = [{ADD}]"))
    ptx = module._compile(entry, kernel_of(entry), "sm_90").asm["ptx"]
    assert re.search(r"ld\.global\.v4", ptx)
    plain = Compile(entry.kernel, {**entry.signature, "n": "i32"}, entry.constexprs)
    ptx = module._compile(plain, kernel_of(plain), "sm_90").asm["ptx"]
    assert not re.search(r"ld\.global\.v4", ptx), "a bound that is no multiple of 16 forbids wide masked loads"


@needs_triton
def test_a_kernel_that_does_not_compile_is_a_row_and_the_rest_goes_on(file):
    path = file(f'aot = [Compile(broken, {{"x": "*fp32"}}, {{"BLOCK": 1}}), {ADD}]')
    outcome = aot(None, str(path), ["sm_80"])
    bad_row, good_row = outcome.record["kernels"]
    assert (bad_row["status"], good_row["status"], outcome.exit) == ("failed", "ok", 1)
    assert "no_such_name" in bad_row["detail"]
    blocks = aot_blocks(outcome.record)
    (grid,) = [block for block in blocks if isinstance(block, Grid)]
    assert grid.rows[0][:6] == ("broken", "sm_80", "failed", "-", "-", "-")
    assert grid.rows[1][:3] == ("add", "sm_80", "ok")
    assert any("no_such_name" in block for block in blocks if isinstance(block, str))


@needs_triton
def test_an_unknown_architecture_of_a_known_kind_is_a_row(file):
    (found,) = compile_file(file(f"aot = [{ADD}]"), ["sm_13"])
    assert found.status == "failed"
    assert found.detail


@needs_triton
def test_all_that_fits_ends_with_exit_0_and_tells_of_progress(file):
    path = file(f"def aot():\n    return [{ADD}]")
    assert aot(None, str(path), ["sm_90"]).exit == 0
    seen = []
    compile_file(path, ["sm_80", "sm_90"], lambda done, total: seen.append((done, total)))
    assert seen == [(0, 2), (1, 2)]


@needs_triton
def test_an_entry_for_some_targets_is_not_run_on_others_and_says_so(file):
    path = file(f"aot = [{ADD[:-1]}, targets=('gfx942',))]")
    outcome = aot(None, str(path), ["sm_90", "gfx942"])
    assert [(k["target"], k["status"]) for k in outcome.record["kernels"]] == [("sm_90", "not_run"), ("gfx942", "ok")]
    assert outcome.record["kernels"][0]["detail"] == "declared for gfx942 only."
    assert outcome.exit == 0


@needs_triton
def test_autotune_is_looked_through(file):
    (entry,) = declared(file(f"aot = [{ADD.replace('add', 'tuned', 1)}]"))
    assert type(entry.kernel).__name__ == "Autotuner"
    assert kernel_of(entry).__name__ == "add"
    assert compile_one(entry, "sm_90").ok


@needs_triton
def test_the_users_cache_and_variables_are_left_alone(file, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "mine"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert compile_file(file(f"aot = [{ADD}]"), ["sm_90"])[0].ok
    assert (os.environ["TRITON_CACHE_DIR"], os.environ["TRITON_INTERPRET"]) == (str(tmp_path / "mine"), "1")
    assert not (tmp_path / "mine").exists()


@needs_triton
def test_a_target_that_is_none_is_refused_with_the_known_ones(file):
    with pytest.raises(ValueError, match=r"target.*got 'h100'.*sm_80, sm_90"):
        compile_file(file(f"aot = [{ADD}]"), ["h100"])


# What its instructions are


@needs_triton
def test_products_and_local_memory_are_counted_in_code_for_sm_90(file):
    wide = f'Compile(outer, {OUTER}, {{"M": 256, "N": 256}}, name="wide", num_warps=4)'
    dot = f'Compile(product, {PRODUCT}, {{"BLOCK": 128}}, num_warps=8, num_stages=2)'
    spilling, multiplying, plain = compile_file(file(f"aot = [{wide}, {dot}, {ADD}]"), ["sm_90"])
    assert spilling.products == plain.products == 0
    # Warpgroups of 4 warps take 64 rows each, an instruction 16 terms: 128 terms are 8, and both run the same code
    assert multiplying.products == 128 // 16
    # 1028 bytes at least do not fit, and an instruction moves at most 16
    assert min(spilling.local_loads, spilling.local_stores) >= 4 * (512 - 255) // 16
    assert (plain.local_loads, plain.local_stores) == (multiplying.local_loads, multiplying.local_stores) == (0, 0)


@needs_triton
def test_other_targets_have_no_counts(file):
    found = compile_file(file(f"aot = [{ADD}]"), ["sm_80", "gfx942"])
    assert {(f.products, f.local_loads, f.local_stores) for f in found} == {(None, None, None)}


@needs_triton
def test_what_the_tool_does_not_show_is_said(file, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (entry,) = declared(file(f"aot = [{ADD}]"))
    cubin = module._compile(entry, kernel_of(entry), "sm_90").asm["cubin"]
    assert resources(cubin, "add")[0] > 0
    with pytest.raises(RuntimeError, match="says nothing of subtract"):
        resources(cubin, "subtract")
    monkeypatch.setattr("mla.sass._said_of", lambda cubin, option: "")
    with pytest.raises(RuntimeError, match="no instructions"):
        instructions(cubin)


def test_instructions_of_a_listing_are_counted_by_name():
    listing = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;            /* 0x00000a00ff017b82 */
                                                                     /* 0x000e220000000800 */
        /*0010*/              @!P0 LDL.64 R2, [R1+0x8] ;             /* 0x0000000000007919 */
        /*0020*/             @UP1 HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ; /* 0x0000 */
        /*00a0*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24 ; /* 0x0000 */
    .L_x_0:
        /*1000*/                   STL [R1], R2 ;                    /* LDL */
"""
    assert counted(listing) == {"LDC": 1, "LDL": 1, "HGMMA": 2, "STL": 1}


# What a file must say; no compiler needed


def test_without_triton_the_sentence_names_the_extra(file, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"triton.*got none.*mla-tiers\[triton\]"):
        compile_file(file("aot = []", ""))


def test_a_file_that_says_nothing_gets_an_example(file):
    with pytest.raises(ValueError, match=re.escape(EXAMPLE)):
        declared(file("x = 1", ""))


@pytest.mark.parametrize(
    ("lines", "kind", "said"),
    [
        ("aot = []", ValueError, "an empty list"),
        ("aot = 3", TypeError, "a list of Compile.*got 3"),
        ("aot = [3]", TypeError, r"aot\[0\].*a Compile.*got 3"),
        ("def aot():\n    raise RuntimeError('no luck')", ValueError, "RuntimeError: no luck"),
        ("def aot():\n    raise SystemExit(0)", ValueError, "SystemExit"),
        ("1 / 0", ValueError, "ZeroDivisionError"),
    ],
)
def test_what_is_no_declaration_is_refused(file, lines, kind, said):
    with pytest.raises(kind, match=said):
        declared(file(lines, ""))


def test_a_missing_file_is_a_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.py"):
        declared(tmp_path / "nowhere.py")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (Compile(plain_kernel("x", "n"), {"x": "*bf16"}), "the arguments x, n, got nothing for n"),
        (Compile(plain_kernel("x"), {"x": "*bf16", "y": "i32"}), "unknown y"),
        (Compile(plain_kernel("x"), {"x": 16}), r"signature\['x'\].*got 16"),
        (Compile(plain_kernel("x"), {"x": "*bf16:8"}), r"\*bf16:8"),
    ],
)
def test_each_argument_has_a_type_or_a_value(entry, said):
    with pytest.raises(ValueError, match=said):
        module._check("aot[0]", entry)


def test_what_is_no_kernel_is_refused():
    with pytest.raises(TypeError, match=r"triton\.jit"):
        kernel_of(Compile(len, {}))
    interpreted = type("InterpretedFunction", (), {"arg_names": []})()
    with pytest.raises(TypeError, match="TRITON_INTERPRET"):
        kernel_of(Compile(interpreted, {}))


def test_every_default_target_has_a_known_limit():
    assert set(TARGETS) <= set(SHARED_LIMIT)


@needs_triton
def test_a_target_without_a_known_limit_says_that_the_fit_was_not_checked(file):
    (found,) = compile_file(file(f"aot = [{ADD}]"), ["sm_89"])
    assert (found.status, found.shared_limit) == ("ok", None)
    assert found.detail == "what sm_89 gives a program is not known here, so whether it fits was not checked."


@needs_triton
def test_the_interpreter_and_unknown_types_are_sentences(file):
    with pytest.raises(ValueError, match=r"expected a Triton type, got '\*bf17'. Fix: did you mean 'bf16'"):
        module._check("aot[0]", Compile(plain_kernel("x"), {"x": "*bf17"}))
    path = str(file(f"aot = [{ADD}]"))
    code = f"import triton.language; from mla.aot import compile_file; compile_file({path!r}, ['sm_90'])"
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert "TRITON_INTERPRET: expected unset, to compile, got 1. Fix: start this command without" in run.stderr
