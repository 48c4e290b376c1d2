"""The stand-in for FlashInfer: right by itself, as strict as the library's memory, and the same as the library.

Axes: T new tokens (packed over requests), S cached tokens, N heads, L KV rank, R rope, D any width.
"""

import importlib.util
import inspect
import math
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import flashinfer_standin as standin
import pytest
import torch

from mla.state import AttentionState, merge

ROOT = Path(__file__).parents[1]
REAL = torch.cuda.is_available() and find_spec("flashinfer") is not None
BF16, INF = torch.bfloat16, float("inf")
NAMES = (
    "mla.BatchMLAPagedAttentionWrapper.__init__", "mla.BatchMLAPagedAttentionWrapper.plan",
    "mla.BatchMLAPagedAttentionWrapper.run", "BatchPrefillWithRaggedKVCacheWrapper.__init__",
    "BatchPrefillWithRaggedKVCacheWrapper.plan", "BatchPrefillWithRaggedKVCacheWrapper.run",
    "mla.trtllm_batch_decode_with_kv_cache_mla", "page.append_paged_mla_kv_cache",
    "merge_state", "merge_state_in_place", "merge_states",
)  # fmt: skip


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("standin_tool", ROOT / "docs" / "tools" / "flashinfer_standin.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def bytes_of(n: int = 64) -> torch.Tensor:
    return torch.empty(n, dtype=torch.int8)


def planned(**changes: Any) -> dict[str, Any]:
    """Arguments of a plan for two requests of 1 and 2 tokens over 5 and 9 keys, in pages of 4."""
    given = {"qo_indptr": ints(0, 1, 3), "kv_indptr": ints(0, 2, 5), "kv_indices": ints(4, 2, 0, 5, 1)}
    given |= {"kv_len_arr": ints(5, 9), "num_heads": 2, "head_dim_ckv": 6, "head_dim_kpe": 3, "page_size": 4}
    return given | {"causal": True, "sm_scale": 0.2, "q_data_type": BF16, "kv_data_type": BF16} | changes


def tensors() -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=random).to(BF16)
    return {"q_nope": draw(3, 2, 6), "q_pe": draw(3, 2, 3), "ckv_cache": draw(6, 4, 6), "kpe_cache": draw(6, 4, 3)}


def wrapper(**changes: Any) -> Any:
    made = standin.mla.BatchMLAPagedAttentionWrapper(bytes_of())
    made.plan(**planned(**changes))
    return made


def softmax64(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """scores (S,) and values (S, D) in float64: out (D,), natural LSE."""
    lse = torch.logsumexp(scores, 0)
    return (scores - lse).exp() @ values, lse


@pytest.mark.parametrize("causal", [True, False])
def test_paged_attention_is_attention_over_the_pages_in_order(causal):
    given = tensors()
    out, base2 = wrapper(causal=causal).run(**given, return_lse=True)
    _, natural = wrapper(causal=causal).run(**given, return_lse=True, return_lse_base_on_e=True)
    pages, starts, keys = [[4, 2], [0, 5, 1]], [0, 1, 3], [5, 9]
    for b in range(2):
        c, r = (given[n][pages[b]].flatten(0, 1)[: keys[b]].double() for n in ("ckv_cache", "kpe_cache"))
        for i, row in enumerate(range(starts[b], starts[b + 1])):
            sees = keys[b] - (starts[b + 1] - starts[b]) + i + 1 if causal else keys[b]
            for n in range(2):
                query = (given["q_nope"][row, n].double(), given["q_pe"][row, n].double())
                want, lse = softmax64(0.2 * (c[:sees] @ query[0] + r[:sees] @ query[1]), c[:sees])
                # weights and output round to bfloat16, 2^-8 each, of numbers up to the largest value
                assert (out[row, n].double() - want).abs().max() <= 2 * 2.0**-8 * c.abs().max()
                assert abs(natural[row, n].double() - lse) <= 1e-5
                assert abs(base2[row, n].double() - lse / math.log(2)) <= 1e-5


def test_a_request_without_keys_is_empty_and_the_others_are_as_alone():
    given = tensors()
    made = wrapper(kv_indptr=ints(0, 0, 3), kv_indices=ints(0, 5, 1), kv_len_arr=ints(0, 9))
    out, lse = made.run(**given, return_lse=True)
    assert bool((out[0] == 0).all())
    assert bool((lse[0] == -INF).all())
    assert torch.equal(out[1:], wrapper().run(**given)[1:])


@pytest.mark.parametrize("causal", [True, False])
def test_ragged_attention_is_attention_of_every_head_with_a_base_2_logarithm(causal):
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 2, w, generator=random).to(BF16) for n, w in ((3, 5), (7, 5), (7, 4)))
    made = standin.BatchPrefillWithRaggedKVCacheWrapper(bytes_of(), "NHD")
    made.plan(ints(0, 1, 3), ints(0, 3, 7), 2, 2, 5, head_dim_vo=4, causal=causal, sm_scale=0.4, q_data_type=BF16)
    out, lse = made.run(q, k, v, return_lse=True)
    for row, first, last in ((0, 0, 3), (1, 3, 6 if causal else 7), (2, 3, 7)):
        for n in range(2):
            keys, values = k[first:last, n].double(), v[first:last, n].double()
            want, natural = softmax64(0.4 * keys @ q[row, n].double(), values)
            assert (out[row, n].double() - want).abs().max() <= 2 * 2.0**-8 * v.abs().max()
            assert abs(lse[row, n].double() - natural / math.log(2)) <= 1e-5


def test_merges_are_those_of_this_repository_in_base_2():
    random = torch.Generator().manual_seed(0)
    v = torch.randn(5, 3, 2, 8, generator=random).to(BF16)
    s = 3 * torch.randn(5, 3, 2, generator=random)
    states = [AttentionState(v[:, i].float(), s[:, i] * math.log(2)) for i in range(3)]
    two, three = merge(*states[:2]), merge(merge(*states[:2]), states[2])
    parts = [x.contiguous() for i in (0, 1) for x in (v[:, i], s[:, i])]
    for (out, lse), want in ((standin.merge_state(*parts), two), (standin.merge_states(v, s), three)):
        assert (out.float() - want.out).abs().max() <= 2.0**-8 * v.abs().max()
        assert (lse * math.log(2) - want.lse).abs().max() <= 1e-5
    before = [x.clone() for x in parts]
    standin.merge_state_in_place(*parts, mask=torch.arange(5) > 2)
    assert torch.equal(parts[0][3:], standin.merge_state(*before)[0][3:])
    assert torch.equal(parts[0][:3], before[0][:3])


def test_C2_two_empty_states_give_NaN_here_as_in_the_library():
    v, s = torch.zeros(1, 2, 8, dtype=BF16), torch.full((1, 2), -INF)
    assert bool(torch.isnan(standin.merge_state(v, s, v, s)[1]).all())


def test_append_writes_positions_of_a_request_through_its_pages():
    cache, rows = torch.zeros(4, 2, 9, dtype=BF16), torch.arange(1, 28, dtype=torch.float32).view(3, 9).to(BF16)
    paged = (cache[..., :6], cache[..., 6:], ints(3, 1, 2), ints(0, 2, 3), ints(2, 1))
    standin.page.append_paged_mla_kv_cache(rows[:, :6], rows[:, 6:], ints(0, 0, 1), ints(1, 2, 0), *paged)
    want = torch.zeros_like(cache)
    want[3, 1], want[1, 0], want[2, 0] = rows
    assert torch.equal(cache, want)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"qo_indptr": ints(0, 1, 3).long()}, "qo_indptr must be a contiguous int32 vector"),
        ({"kv_len_arr": ints(5, 9)[:, None]}, "kv_len_arr must be a contiguous int32 vector"),
        ({"kv_indptr": ints(0, 2, 1)}, "kv_indptr must start with 0 and never fall"),
        ({"kv_indices": ints(4, 2, 0)}, "kv_indices has 3 pages, kv_indptr asks for 5"),
        ({"kv_len_arr": ints(9, 9)}, r"kv_len_arr\[0\] = 9 does not lie in its 2 pages of 4"),
        ({"kv_len_arr": ints(5, 1)}, "causal rows without a key, 2 new tokens over 1 keys"),
        ({"kv_data_type": torch.float32}, "dtypes must be float16 or bfloat16"),
        ({"num_heads": 400000}, "overrun the library's list of 16384 work items"),
    ],
)
def test_a_plan_that_the_library_would_take_silently_is_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        wrapper(**changes)


def test_an_empty_batch_is_what_ends_a_process_in_the_library():
    with pytest.raises(ZeroDivisionError):
        wrapper(qo_indptr=ints(0), kv_indptr=ints(0), kv_indices=ints(), kv_len_arr=ints())


def test_a_run_that_differs_from_its_plan_or_from_what_kernels_read_is_refused():
    good, made = tensors(), wrapper()
    wide = torch.zeros(3, 2, 12, dtype=BF16)
    for change, text in (
        ({"q_nope": good["q_nope"].half()}, "does not match the planned"),
        ({"kpe_cache": good["kpe_cache"].half()}, "does not match the planned"),
        ({"q_pe": wide[..., ::4]}, "q_pe must be contiguous along its last axis"),
        ({"q_nope": good["q_nope"][:2], "q_pe": good["q_pe"][:2]}, "the plan has 3 rows, q_nope 2"),
        ({"ckv_cache": good["ckv_cache"][:, :3]}, "ckv_cache must be"),
        ({"out": wide}, "out must be"),
        ({"lse": torch.zeros(2, 3).T}, "lse must be contiguous"),
        ({"ckv_scale": 1.0}, "scales are for fp8 rows"),
    ):
        with pytest.raises(ValueError, match=text):
            made.run(**good | change)
    made = wrapper(head_dim_kpe=64)
    far = torch.zeros(3, 2, 65, dtype=BF16)[..., :64]
    with pytest.raises(ValueError, match="q_pe must be aligned to 16 bytes"):
        made.run(**good | {"q_pe": far, "kpe_cache": torch.zeros(6, 4, 64, dtype=BF16)})


def test_a_graph_fixes_the_batch_size_and_copies_lists_when_it_is_planned():
    buffers = {"qo_indptr": ints(0, 0, 0), "kv_indptr": ints(0, 0, 0), "kv_len_arr": ints(0, 0)}
    given = {"use_cuda_graph": True, "kv_indices": torch.zeros(9, dtype=torch.int32), **buffers}
    made = standin.mla.BatchMLAPagedAttentionWrapper(bytes_of(), **given)
    made.plan(**planned())
    assert torch.equal(given["kv_indices"], ints(4, 2, 0, 5, 1, 0, 0, 0, 0))
    assert torch.equal(given["kv_len_arr"], ints(5, 9))
    with pytest.raises(ValueError, match="qo_indptr has 2 entries, its buffer 3, fixed for the graph"):
        made.plan(**planned(qo_indptr=ints(0, 1), kv_indptr=ints(0, 2), kv_len_arr=ints(5)))


def test_append_and_merge_refuse_what_kernels_would_read_wrong():
    cache, rows = torch.zeros(4, 2, 9, dtype=BF16), torch.zeros(1, 9, dtype=BF16)
    lists = (ints(3, 1), ints(0, 2), ints(2))
    for row, at, kind, text in (
        (rows.float(), ints(1), ValueError, "the kernel would reinterpret it"),
        (rows, ints(-1), ValueError, "a position outside its request's pages"),
        (rows, ints(4), ValueError, "a position outside its request's pages"),
        (rows[:0], ints(), RuntimeError, "a launch of no blocks"),
    ):
        with pytest.raises(kind, match=text):
            standin.page.append_paged_mla_kv_cache(
                row[:, :6], row[:, 6:], torch.zeros_like(at), at, cache[..., :6], cache[..., 6:], *lists
            )
    v, s = torch.zeros(1, 128, 128, dtype=BF16), torch.zeros(1, 128)
    with pytest.raises(RuntimeError, match="too many threads for one block"):
        standin.merge_state(v, s, v, s)
    with pytest.raises(ValueError, match="float16 or bfloat16"):
        standin.merge_state(v.float(), s, v.float(), s)


def test_a_tape_runs_operators_again_on_the_same_memory():
    a, b = torch.tensor([1.0, 2.0]), torch.zeros(2)
    with standin.Tape() as tape:
        c = a * 2
        b.add_(c[1:])
    assert (c.tolist(), b.tolist()) == ([2.0, 4.0], [4.0, 4.0])
    a.copy_(torch.tensor([5.0, 7.0]))
    b.zero_()
    tape.replay()
    assert (c.tolist(), b.tolist()) == ([10.0, 14.0], [14.0, 14.0])


# the comparison with the library


@pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer is not installed: its signatures are not here")
def test_signatures_are_those_of_the_installed_library():
    from tiers.tier2_flashinfer.library import find_library, library_version

    if "not tested" in library_version(None):
        pytest.skip(f"flashinfer {library_version(None)}: the stand-in has the signatures of another version")
    for path in NAMES:
        ours, theirs = standin, find_library(None)
        for part in path.split("."):
            ours, theirs = getattr(ours, part), getattr(theirs, part)
        a, b = ({n: (p.kind, p.default) for n, p in inspect.signature(x).parameters.items()} for x in (ours, theirs))
        assert list(a.items()) == list(b.items()), path


def test_the_tool_finds_the_stand_in_the_same_as_itself_and_no_other(tool):
    sizes = tool.Sizes(heads=(3, 5), L=16, R=8, qk=12, V=8)
    without = ("long request", "page 64", "many heads", "fp16")
    rows = tool.compare(tool.load_standin(), "cpu", sizes, without)
    assert len(rows) > 30
    assert all(row["ok"] and row.get("out", 0) == 0 for row in rows)


class Wrong(standin.BatchMLAPagedAttentionWrapper):
    """Base e where base 2 was asked for, one key too many without a mask, and NaN for requests without keys."""

    def _kernel(self, q_nope, q_pe, ckv, kpe, out, lse, natural):
        q, pages, kv = self._lists
        more = [k + (not self._causal and k % self._page_size > 0) for k in kv]
        self._lists = q, pages, more
        super()._kernel(q_nope, q_pe, ckv, kpe, out, lse, True)
        self._lists = q, pages, kv
        for b, keys in enumerate(kv):
            if keys == 0:
                out[q[b] : q[b + 1]] = float("nan")


def test_the_tool_notices_a_library_that_differs(tool):
    module = ModuleType("different")
    module.mla = SimpleNamespace(BatchMLAPagedAttentionWrapper=Wrong)  # type: ignore[attr-defined]
    sizes = tool.Sizes(heads=(3,), L=16, R=8, qk=12, V=8)
    without = ("long request", "many heads", "fp16", "prefill", "append", "merge", "fa3", "graph", "decode", "no rope")
    rows = {row["name"]: row for row in tool.compare(module, "cpu", sizes, without)}
    assert not any(row["ok"] for name, row in rows.items() if "verify" not in name), rows
    assert rows["fa2 base 2 bf16"]["lse"] > 1
    assert rows["fa2 without a mask bf16"]["out"] > 1
    assert rows["fa2 verify of 4 bf16"]["ok"]
    missing = tool.compare(ModuleType("empty"), "cpu", sizes, (*without, "ragged", "mask", "base"))
    assert all("AttributeError" in row["error"] for row in missing)


@pytest.mark.skipif(not REAL, reason="needs a GPU with flashinfer; docs/tools/flashinfer_standin.py writes the record")
def test_the_library_gives_what_the_stand_in_gives(tool):
    rows = tool.compare(tool.load_library(), "cuda", tool.Sizes(heads=(16,)), ("prefill", "fp16", "no rope"))
    assert [row for row in rows if not row["ok"]] == []
