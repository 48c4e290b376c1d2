"""The AITER simulator's prefill and Triton routes: plain attention in float64, and vectors made by real kernels."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiter_simulator import AiterAbort, fake_aiter
from aiter_simulator.checks import fresh
from aiter_simulator.example import Step, offsets, toy
from torch import Tensor

GOLDEN = Path(__file__).parent / "data" / "aiter_golden"
VECTORS = sorted(path.stem for path in GOLDEN.glob("*.npz"))
BF16 = torch.bfloat16
U32 = 2**-24


def load(name: str) -> dict[str, Any]:
    """The arrays of one golden file as tensors, scalars as numbers."""
    with np.load(GOLDEN / f"{name}.npz") as file:
        return {k: torch.from_numpy(file[k].copy()) if file[k].ndim else file[k].item() for k in file.files}


def float32_error(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[float, float]:
    """How far two float32 evaluations of out and lse may lie apart.

    A score is a sum of D products: each evaluation errs by (D + 2) u times its largest absolute sum; exp turns that
    into a relative error of every weight, and the sums over s keys add s u each.
    """
    score = (q.shape[-1] + 2) * U32 * scale * q.abs().flatten(0, -2).sum(-1).max().item() * k.abs().max().item()
    relative = 2 * (score + (len(k.flatten(0, -2)) + 4) * U32)
    return 2 * relative * v.abs().max().item(), relative


def near(got: Tensor, wanted: Tensor, bound: float) -> bool:
    """Whether all elements are within bound."""
    return bool((got.double() - wanted.double()).abs().max() <= bound)


def test_there_are_15_vectors() -> None:
    assert len(VECTORS) == 15


@pytest.mark.parametrize("name", [n for n in VECTORS if "mla_decode_fwd" in n or "mla_prefill_fwd" in n])
def test_golden_mla_on_block_tables(name: str) -> None:
    g = load(name)
    function = getattr(fake_aiter().ops.triton.attention.mla, "_".join(name.split("_")[1:4]))
    out = fresh(tuple(g["out"].shape))
    lens = g["seqused_k"].int()
    function(
        *(g["q"], g["kv"], out, g["cu_seqlens_q"], lens, int(lens.max()), g["block_tables"], g["scale"]),
        *(g["r"], g["p"], True, None, None),
    )
    assert near(out, g["out"], float32_error(g["q"], g["kv"], g["kv"], g["scale"])[0])


@pytest.mark.parametrize("name", [n for n in VECTORS if "decode_attention_fwd" in n])
def test_golden_split_decode_with_lse(name: str) -> None:
    g = load(name)
    kv, rank = g["kv"].flatten(0, 1), g["r"]
    out, lse = fresh(tuple(g["out"].shape)), fresh(tuple(g["lse"].shape))
    logits = fresh((*lse.shape, g["splits"], rank + 1))
    fake_aiter().ops.triton.attention.mla_decode.decode_attention_fwd(
        *(g["q"], kv, kv[..., :rank], out, lse, g["block_tables"], g["seqlens"].int(), logits, g["splits"]),
        *(g["scale"], g["page_size"]),
    )
    out_bound, lse_bound = float32_error(g["q"], kv, kv, g["scale"])
    assert near(out, g["out"], out_bound)
    assert near(lse, g["lse"], lse_bound + U32 * g["lse"].abs().max().item())


@pytest.mark.parametrize("name", [n for n in VECTORS if "flash_varlen" in n])
def test_golden_flash_attention_with_lse(name: str) -> None:
    g = load(name)
    lens = [int(g[c].diff().max()) for c in ("cu_q", "cu_k")]
    out, lse = fake_aiter(ck=False).flash_attn_varlen_func(
        *(g["q"], g["k"], g["v"], g["cu_q"], g["cu_k"], *lens),
        softmax_scale=g["scale"],
        causal=g["causal"],
        return_lse=True,
    )
    out_bound, lse_bound = float32_error(g["q"], g["k"], g["v"], g["scale"])
    assert near(out, g["out"], out_bound)
    wanted = g["lse_total_q_by_heads"]
    assert near(lse, wanted, lse_bound + U32 * wanted.abs().max().item())


@pytest.mark.parametrize("name", [n for n in VECTORS if "decode" in n and "r512" in n])
def test_golden_decode_through_the_persistent_kernel(name: str) -> None:
    """The same numbers in bf16 through mla_decode_fwd: inputs are rounded to 8 bits, scores move with them."""
    g = load(name)
    table, length = g["block_tables"][0], int(g.get("seqlens", g.get("seqused_k"))[0])
    page = g["kv"].shape[1]
    rows = (table[torch.arange(length) // page] * page + torch.arange(length) % page).int()
    step = Step(fake_aiter("gfx950", 8), 16, [1], [length], scale=g["scale"])
    step.call |= {"q": g["q"].to(BF16), "kv_buffer": g["kv"].view(-1, 1, 1, 576).to(BF16), "kv_indices": rows}
    out, lse = step.plan().run(return_lse=True)
    assert ((out.double() - step.expected()[0]).abs() <= step.allowed()[0]).all()
    used = g["kv"].view(-1, 576)[rows.long()]
    moved = 2 * 2**-8 * g["scale"] * (g["q"].abs()[0] @ used.abs().T).max().item()
    assert near(out, g["out"], (4 * moved + 2 * 2**-8) * used.abs().max().item())
    if "lse" in g:
        assert near(lse, g["lse"], 2 * moved)


def reference(
    q: Tensor, k: Tensor, v: Tensor, qlens: list[int], lens: list[int], scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Ragged attention in float64: out (T, H, V) and lse (T, H); rows that see nothing are 0 and -inf."""
    outs, lses = [], []
    for b, (n, s) in enumerate(zip(qlens, lens, strict=True)):
        q0, k0 = sum(qlens[:b]), sum(lens[:b])
        scores = torch.einsum("nhd,shd->hns", q[q0 : q0 + n].double(), k[k0 : k0 + s].double()) * scale
        if causal:
            scores = scores.masked_fill(torch.arange(s) > torch.arange(n)[:, None] + s - n, float("-inf"))
        outs.append(torch.einsum("hns,shv->nhv", scores.softmax(-1).nan_to_num(), v[k0 : k0 + s].double()))
        lses.append(scores.logsumexp(-1).T)
    return torch.cat(outs), torch.cat(lses)


def packed(qlens: list[int], lens: list[int], heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Random q (T, H, 24), k (S, H, 24), v (S, H, 16)."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((sum(qlens), heads, 24), (sum(lens), heads, 24), (sum(lens), heads, 16))
    return tuple(torch.randn(s, generator=generator).to(dtype) for s in shapes)  # type: ignore[return-value]


@pytest.mark.parametrize("ck", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_flash_attention_is_attention(ck: bool, causal: bool, dtype: torch.dtype) -> None:
    qlens, lens, heads = [5, 1, 7], [9, 30, 7], 3
    q, k, v = packed(qlens, lens, heads, dtype)
    call = (q, k, v, offsets(qlens), offsets(lens), 7, 30)
    library = fake_aiter(ck=ck)
    out, lse = library.flash_attn_varlen_func(*call, causal=causal, return_lse=True, softmax_scale=0.4)
    expected, expected_lse = reference(q, k, v, qlens, lens, 0.4, causal)
    unit = torch.finfo(dtype).eps / 2
    assert ((out.double() - expected).abs() <= unit * expected.abs() * (1 + 2**-10) + 2**-25).all()
    lse = lse.T if ck else lse
    assert lse.shape == (13, heads)
    assert ((lse.double() - expected_lse).abs() <= 2 * U32 * expected_lse.abs() + U32).all()
    assert torch.equal(library.flash_attn_varlen_func(*call, causal=causal, softmax_scale=0.4), out)
    default = library.flash_attn_varlen_func(*call, causal=causal)
    assert torch.equal(default, library.flash_attn_varlen_func(*call, causal=causal, softmax_scale=24**-0.5))


def test_flash_attention_of_hidden_rows_is_zero_and_their_lse_is_unspecified() -> None:
    q, k, v = packed([4, 2], [2, 0], 3, BF16)
    out, lse = fake_aiter().flash_attn_varlen_func(
        *(q, k, v, offsets([4, 2]), offsets([2, 0]), 4, 2), causal=True, return_lse=True
    )
    blind = [True, True, False, False, True, True]
    assert (out == 0).flatten(1).all(1).tolist() == blind
    assert lse.isnan().all(0).tolist() == blind


def test_flash_attention_shares_kv_heads() -> None:
    q, k, v = packed([5], [6], 4, BF16)
    shared = fake_aiter().flash_attn_varlen_func(q, k[:, :2], v[:, :2], offsets([5]), offsets([6]), 5, 6)
    expected = reference(q, k[:, [0, 0, 1, 1]], v[:, [0, 0, 1, 1]], [5], [6], 24**-0.5, False)[0]
    assert ((shared.double() - expected).abs() <= 2**-8 * expected.abs() + 2**-25).all()


def test_flash_attention_of_one_fp16_row_is_wrong_on_gfx942() -> None:
    """aiter #2229."""
    q, k, v = packed([1, 1], [6, 7], 3, torch.float16)
    call = (q, k, v, offsets([1, 1]), offsets([6, 7]), 1, 7)
    assert fake_aiter("gfx942").flash_attn_varlen_func(*call).isnan().all()
    assert not fake_aiter("gfx950").flash_attn_varlen_func(*call).isnan().any()


def test_flash_attention_needs_the_true_maxima() -> None:
    q, k, v = packed([3, 5], [6, 7], 3, BF16)
    starts = (offsets([3, 5]), offsets([6, 7]))
    short = fake_aiter().flash_attn_varlen_func(q, k, v, *starts, 4, 7)
    assert short.isnan().flatten(1).all(1).tolist() == [False] * 7 + [True]
    short = fake_aiter().flash_attn_varlen_func(q, k, v, *starts, 5, 6)
    assert short.isnan().flatten(1).all(1).tolist() == [False] * 3 + [True] * 5


def test_flash_attention_refuses() -> None:
    q, k, v = packed([3], [6], 3, BF16)
    starts = (offsets([3]), offsets([6]), 3, 6)
    flash = fake_aiter().flash_attn_varlen_func
    wrong: list[tuple[type[BaseException], str, tuple[Any, ...], dict[str, Any]]] = [
        (RuntimeError, "fp16 or bf16", (q.float(), k.float(), v.float(), *starts), {}),
        (RuntimeError, "fp16 or bf16", (q, k.half(), v, *starts), {}),
        (RuntimeError, "stride 1", (q.mT.contiguous().mT, k, v, *starts), {}),
        (RuntimeError, "last axis", (q[None], k, v, *starts), {}),
        (RuntimeError, "fit together", (q, k[..., :16], v, *starts), {}),
        (RuntimeError, "fit together", (q, k, v[:5], *starts), {}),
        (RuntimeError, "no multiple", (q, k[:, :2], v[:, :2], *starts), {}),
        (RuntimeError, "head widths", (q[..., :20], k[..., :20], v, *starts), {}),
        (RuntimeError, "head widths", (q, k, v[..., :12], *starts), {}),
        (RuntimeError, "head widths", (*(x.repeat(1, 1, 11) for x in (q, k)), v, *starts), {}),
        (RuntimeError, "int32", (q, k, v, offsets([3]).long(), *starts[1:]), {}),
        (RuntimeError, "in length", (q, k, v, offsets([1, 2]), *starts[1:]), {}),
        (AiterAbort, "cu_seqlens_q: ends", (q, k, v, offsets([4]), *starts[1:]), {}),
        (AiterAbort, "cu_seqlens_k: ends", (q, k, v, starts[0], offsets([7]), 3, 7), {}),
        (RuntimeError, "another form", (q, k, v, *starts), {"out": torch.empty(3, 3, 24, dtype=BF16)}),
        (RuntimeError, "another form", (q, k, v, *starts), {"out": torch.empty(3, 3, 16)}),
    ]
    for kind, message, arguments, keywords in wrong:
        with pytest.raises(kind, match=message):
            flash(*arguments, **keywords)
    others = dict(window_size=(4, 0, 0), block_table=offsets([3]), dropout_p=0.1, logits_soft_cap=30.0)
    for name, value in (others | {"return_attn_probs": True}).items():
        with pytest.raises(NotImplementedError):
            flash(q, k, v, *starts, **{name: value})


@pytest.mark.parametrize("heads", [16, 128])
def test_absorbed_prefill_is_attention(heads: int) -> None:
    step = Step(toy(), heads, [5, 1, 9], [12, 7, 9])
    names = ("q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens", "max_seqlen_q")
    out, lse = step.library.mla.mla_prefill_fwd(*(step.call[n] for n in names), sm_scale=step.scale)
    expected, expected_lse = step.expected()
    assert out is step.call["o"]
    assert ((out.double() - expected).abs() <= step.allowed()[0]).all()
    assert lse.shape == (15, 1, heads, 1)
    assert ((lse[:, 0, :, 0] - expected_lse).abs() <= step.allowed()[1] + U32 * expected_lse.abs()).all()


def test_absorbed_prefill_refuses() -> None:
    names = ("q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens", "max_seqlen_q")
    for heads, name, message in ((32, "bf16", "nheads"), (16, "fp8", "mandatory")):
        step = Step(toy(), heads, [5], [12], name, name)
        with pytest.raises(AiterAbort, match=message):
            step.library.mla.mla_prefill_fwd(*(step.call[n] for n in names))
    step = Step(toy(), 16, [5], [12])
    with pytest.raises(AssertionError, match="logit_cap"):
        step.library.mla.mla_prefill_fwd(*(step.call[n] for n in names), logit_cap=1.0)
    with pytest.raises(AiterAbort, match="kv_indices: int32"):
        step.library.mla.mla_prefill_fwd(
            **{n: step.call[n].long() if n == "kv_indices" else step.call[n] for n in names}
        )


def fp8_prefill(cu: int, heads: int, qlens: list[int], lens: list[int], causal: bool = True) -> dict[str, Any]:
    """Inputs and metadata of an 8-bit prefill on gfx950 with widths 24 and 16."""
    library = fake_aiter("gfx950", cu, expanded=(24, 16))
    q, k, v = packed(qlens, lens, heads, library.dtypes.fp8)
    most = max(qlens)
    sizes = library.get_ps_metadata_info_v1(len(qlens), heads, most)
    buffers = [torch.empty(s, dtype=d) for s, d in sizes]
    context = torch.tensor(lens, dtype=torch.int32)
    lists = (offsets(qlens), offsets(lens))
    library.get_ps_metadata_v1(
        *(*lists, context, 1, heads, *buffers), kvlen_granularity=128, block_size=1, is_causal=causal
    )
    scales = [torch.tensor([s]) for s in (0.5, 0.25, 2.0)]
    call = dict(
        *(),
        Q=q,
        K=k,
        V=v,
        output=fresh((sum(qlens), heads, 16), BF16),
        qo_indptr=lists[0],
        kv_indptr=lists[1],
        kv_page_indices=torch.arange(sum(lens), dtype=torch.int32),
        max_seqlen_q=most,
        is_causal=causal,
        softmax_scale=0.8,
        **dict(zip(("work_indptr", "work_info_set"), buffers[1:3], strict=True)),
        **dict(zip(("reduce_indptr", "reduce_final_map", "reduce_partial_map"), buffers[3:], strict=True)),
        **dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True)),
    )
    return {"library": library, "call": call, "buffers": buffers}


@pytest.mark.parametrize("cu", [1, 8, 80])
@pytest.mark.parametrize(("heads", "causal"), [(2, True), (4, True), (2, False)])
def test_fp8_prefill_is_attention(cu: int, heads: int, causal: bool) -> None:
    qlens, lens = [300, 40], [300, 170]
    case = fp8_prefill(cu, heads, qlens, lens, causal)
    call = case["call"]
    out, _ = case["library"].mla.mla_prefill_ps_fwd(**call)
    q, k, v = (call[n].float() for n in "QKV")
    expected, _ = reference(q, k, v * 2, qlens, lens, 0.8 * 0.5 * 0.25, causal)
    # every exp(score - max) is rounded to 4 bits, or by half of 2**-9; out once more to 8 bits
    weights = reference(q, k, v.abs() * 2, qlens, lens, 0.8 * 0.5 * 0.25, causal)[0]
    keys = torch.repeat_interleave(
        torch.tensor([v[:300].abs().sum(0).max(), v[300:].abs().sum(0).max()]), offsets(qlens).diff()
    )
    bound = 2**-4 * weights + 2**-10 * 2 * keys[:, None, None] + 2**-8 * expected.abs()
    assert ((out.double() - expected).abs() <= bound * (1 + 2**-6)).all()


def test_fp8_prefill_writes_the_lse_of_split_tiles_only() -> None:
    """Rows of a tile that one worker takes whole have no lse; the wrapper's second value is the partial one."""
    case = fp8_prefill(8, 2, [300, 40], [300, 40])
    call, library, buffers = case["call"], case["library"], case["buffers"]
    rows = len(call["reduce_partial_map"]) * 256
    data, lse = fresh((rows, 2, 16)), fresh((rows, 2))
    first = {k: v for k, v in call.items() if not k.startswith("reduce")}
    library.mla_prefill_ps_asm_fwd(**first, splitData=data, splitLse=lse)
    final_lse = fresh((340, 2))
    library.mla_reduce_v1(data, lse, *buffers[3:], 256, 0, call["output"], final_lse)
    groups = int((buffers[3].diff() > 0).sum())
    split = sum(b - a for a, b in buffers[4][:groups].tolist())
    assert int(final_lse.isnan().all(1).sum()) == 340 - split > 0
    wanted = reference(*(call[n].float() for n in "QKV"), [300, 40], [300, 40], 0.8 * 0.5 * 0.25, True)[1]
    done = ~final_lse.isnan()
    assert (final_lse[done] - wanted[done]).abs().max() < 2**-20
    with pytest.raises(AiterAbort, match="partial row"):
        library.mla_prefill_ps_asm_fwd(**first, splitData=data[:256], splitLse=lse)
    with pytest.raises(AiterAbort, match="float32"):
        library.mla_prefill_ps_asm_fwd(**first, splitData=data, splitLse=lse.double())
    _, partial = library.mla.mla_prefill_ps_fwd(**call)
    assert partial.shape == (rows, 2)


def test_fp8_prefill_refuses() -> None:
    case = fp8_prefill(8, 2, [30, 40], [30, 40])
    call, run = case["call"], case["library"].mla.mla_prefill_ps_fwd
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("Q, K, V", {"Q": call["Q"].to(BF16)}),
        ("Q, K, V", {"K": call["K"].mT.contiguous().mT}),
        ("as many heads", {"V": call["V"][:, :1].contiguous()}),
        ("as many heads", {"K": call["K"][:, :1].contiguous()}),
        ("widths", {"K": call["K"][..., :16].contiguous()}),
        ("widths", {"V": call["V"][..., :8].contiguous()}),
        ("output must be bf16", {"output": torch.empty(70, 2, 16)}),
        ("q_scale", {"q_scale": None}),
        ("v_scale", {"v_scale": torch.ones(2)}),
        ("k_scale", {"k_scale": torch.ones(1, dtype=torch.float64)}),
        ("kv_page_indices: int32", {"kv_page_indices": call["kv_page_indices"].long()}),
        ("memory fault", {"kv_page_indices": call["kv_page_indices"] + 70}),
        ("memory fault", {"kv_page_indices": call["kv_page_indices"] - 70}),
        ("kv_indptr: ends", {"kv_indptr": offsets([30, 41])}),
        ("qo_indptr: ends", {"qo_indptr": offsets([30, 41])}),
        ("work_indptr: ends", {"work_indptr": torch.arange(9, dtype=torch.int32) * 100}),
        ("work item", {"kv_indptr": offsets([20, 40])}),
        ("work item", {"qo_indptr": offsets([20, 40])}),
    ]
    for message, change in wrong:
        with pytest.raises(AiterAbort, match=message):
            run(**(call | change))
    for name in ("reduce_indptr", "reduce_final_map", "reduce_partial_map"):
        with pytest.raises(AssertionError):
            run(**(call | {name: None}))
    call["work_info_set"][0, 7] = 9 << 16
    with pytest.raises(AiterAbort, match="work item"):
        run(**call)
    old = fake_aiter("gfx942", 8, expanded=(24, 16)).mla.mla_prefill_ps_fwd
    with pytest.raises(AiterAbort, match="gfx942"):
        old(**call)


def test_split_decode_takes_any_heads_and_page_size() -> None:
    generator = torch.Generator().manual_seed(0)
    lens, heads = [7, 0, 33], 5
    cache = torch.randn(12, 4, 1, 40, generator=generator).to(BF16)
    table = torch.randperm(12, generator=generator)[:12].int().repeat(3, 1)
    q = torch.randn(3, heads, 40, generator=generator).to(BF16)
    flat = cache.view(-1, 1, 40)
    out, lse = fresh((3, heads, 32), BF16), fresh((3, heads))
    decode = fake_aiter().ops.triton.attention.mla_decode.decode_attention_fwd
    call = dict(
        *(),
        q=q,
        k_buffer=flat,
        v_buffer=flat[..., :32],
        o=out,
        lse=lse,
        req_to_token=table,
        b_seq_len=torch.tensor(lens, dtype=torch.int32),
        attn_logits=fresh((3, heads, 4, 33)),
        num_kv_splits=4,
        sm_scale=0.3,
        page_size=4,
    )
    decode(**call)
    assert out[1].isnan().all()
    assert lse[1].isnan().all()
    for b in (0, 2):
        keys = cache[table[b].long()].view(-1, 40)[: lens[b]].double()
        scores = q[b].double() @ keys.T * 0.3
        wanted = scores.softmax(-1) @ keys[:, :32]
        assert ((out[b].double() - wanted).abs() <= 2**-8 * wanted.abs() + 2**-25).all()
        assert near(lse[b], scores.logsumexp(-1), 2**-20)
    wrong: list[tuple[type[BaseException], str, dict[str, Any]]] = [
        (AssertionError, "splits", {"num_kv_splits": 5}),
        (AiterAbort, "flattened", {"k_buffer": cache}),
        (AiterAbort, "flattened", {"v_buffer": cache}),
        (AiterAbort, "cache width", {"k_buffer": flat[..., :32]}),
        (AiterAbort, "cache width", {"k_buffer": flat.expand(-1, 2, -1)}),
        (AiterAbort, "cache width", {"v_buffer": flat[..., :32].expand(-1, 2, -1)}),
        (AiterAbort, "o .B", {"lse": torch.empty(heads, 3)}),
        (AiterAbort, "o .B", {"o": torch.empty(3, heads, 40)}),
        (AiterAbort, "float32", {"lse": torch.empty(3, heads, dtype=BF16)}),
        (AiterAbort, "attn_logits: .B", {"attn_logits": torch.empty(3, heads, 4, 32)}),
        (AiterAbort, "pages.* int32", {"req_to_token": table.long()}),
        (AiterAbort, "pages.* int32", {"req_to_token": table[:2]}),
        (AiterAbort, "b_seq_len", {"b_seq_len": call["b_seq_len"][:2]}),
        (AiterAbort, "do not fit", {"req_to_token": table[:, :8]}),
        (AiterAbort, "memory fault", {"req_to_token": table + 12}),
        (AiterAbort, "memory fault", {"req_to_token": table - 12}),
        (NotImplementedError, "logit_cap", {"logit_cap": 30.0}),
    ]
    for kind, message, change in wrong:
        with pytest.raises(kind, match=message):
            decode(**(call | change))


@pytest.mark.parametrize("name", ["mla_decode_fwd", "mla_prefill_fwd"])
def test_mla_on_block_tables_refuses(name: str) -> None:
    run = getattr(fake_aiter().ops.triton.attention.mla, name)
    call = dict(
        q=torch.zeros(2, 3, 40),
        kv_buffer=torch.zeros(4, 16, 1, 40),
        out=fresh((2, 3, 32)),
        cu_seqlens_q=offsets([1, 1]),
        seqused_k=torch.tensor([5, 17], dtype=torch.int32),
        max_seqlen_kv=17,
        block_tables=torch.tensor([[3, 0], [2, 1]], dtype=torch.int32),
        softmax_scale=0.3,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        causal=True,
        q_descale=None,
        kv_descale=None,
    )
    assert (run(**call) == 0).all()
    wrong: list[tuple[type[BaseException], str, dict[str, Any]]] = [
        (AssertionError, "causal", {"causal": False}),
        (AssertionError, "width", {"kv_lora_rank": 24}),
        (AssertionError, "width", {"kv_buffer": torch.zeros(4, 16, 1, 48)}),
        (AssertionError, "block size", {"kv_buffer": torch.zeros(8, 8, 1, 40)}),
        (AiterAbort, "int32", {"block_tables": torch.tensor([[3, 0], [2, 1]])}),
        (AiterAbort, "memory fault", {"block_tables": torch.tensor([[3, 0], [2, 4]], dtype=torch.int32)}),
        (AiterAbort, "memory fault", {"block_tables": torch.tensor([[-1, 0], [2, 1]], dtype=torch.int32)}),
        (AiterAbort, "do not fit", {"seqused_k": torch.tensor([5, 33]), "max_seqlen_kv": 33}),
        (NotImplementedError, "scales", {"q_descale": torch.ones(1)}),
        (NotImplementedError, "scales", {"shuffled_kv_cache": True}),
    ]
    if name == "mla_decode_fwd":
        wrong += [
            (AssertionError, "max_seqlen_kv", {"max_seqlen_kv": 16}),
            (NotImplementedError, "scales", {"skip_reduce": True}),
        ]
    for kind, message, change in wrong:
        with pytest.raises(kind, match=message):
            run(**(call | change))


def test_gluon_refuses() -> None:
    gluon = toy("gfx950").ops.triton.gluon.mla_gluon.mla_gluon

    def call(batch: int = 1, heads: int = 8, **changes: Any) -> Any:
        q, pe = torch.zeros(batch, heads, 32).to(BF16), torch.zeros(batch, heads, 8).to(BF16)
        table, lens = torch.zeros(batch, 5, dtype=torch.int32), torch.full((batch,), 5, dtype=torch.int32)
        arguments = dict(q_nope=q, q_pe=pe, kv_c=torch.zeros(9, 40).to(BF16), o=q.clone(), page_table=table)
        return gluon(**(arguments | dict(seq_info=lens, sm_scale=0.3, kv_pe_offset=32) | changes))

    assert (call()[0] == 0).all()
    assert (call(64, 64, min_kv_seq_len=194)[0] == 0).all()
    wrong: list[tuple[type[BaseException], str, dict[str, Any]]] = [
        (AssertionError, "bf16", {"q_nope": torch.zeros(1, 8, 32)}),
        (AssertionError, "multiple of 64", {"heads": 64, "min_kv_seq_len": 10**6}),
        (AssertionError, "too small", {"batch": 64, "heads": 64, "min_kv_seq_len": 193}),
        (AssertionError, "112 heads", {"heads": 112}),
        (AiterAbort, "kv_c", {"kv_c": torch.zeros(9, 1, 40).to(BF16)}),
        (AiterAbort, "kv_c", {"kv_c": torch.zeros(9, 48).to(BF16)}),
        (AiterAbort, "kv_pe_offset", {"kv_pe_offset": 512}),
        (AiterAbort, "kv_pe_offset", {"o": torch.zeros(1, 8, 40).to(BF16)}),
        (AiterAbort, "memory fault", {"page_table": torch.full((1, 5), 9, dtype=torch.int32)}),
        (AiterAbort, "memory fault", {"page_table": torch.full((1, 5), -1, dtype=torch.int32)}),
        (NotImplementedError, "scale", {"kv_scale": 2.0}),
        (NotImplementedError, "sinks", {"attn_sink": torch.zeros(8)}),
        (NotImplementedError, "one cache", {"k_pe": torch.zeros(9, 8)}),
        (NotImplementedError, "one cache", {"has_pe": False}),
    ]
    for kind, message, changes in wrong:
        with pytest.raises(kind, match=message):
            call(**changes)


@pytest.mark.parametrize("qlen", [1, 3])
def test_gluon_decode_is_attention(qlen: int) -> None:
    step = Step(toy("gfx950"), 8, [qlen] * 3, [12, 7, 30])
    q = step.call["q"].view(3, qlen, 8, 40)
    out = fresh((3, qlen, 8, 32), BF16)
    call = [q[..., :32], q[..., 32:], step.call["kv_buffer"].flatten(0, 2), out]
    if qlen == 1:
        call = [call[0][:, 0], call[1][:, 0], call[2], out[:, 0]]
    gluon = step.library.ops.triton.gluon.mla_gluon.mla_gluon
    lists = (step.call["kv_indices"], step.call["kv_indptr"])
    keywords = dict(kv_pe_offset=32, use_2d_view=False, return_lse=True)
    _, lse = gluon(*call, *lists, step.scale, **keywords)
    expected, expected_lse = step.expected()
    assert ((out.flatten(0, 1).double() - expected).abs() <= step.allowed()[0]).all()
    assert near(lse.flatten(0, 1), expected_lse, 2**-19)
    with pytest.raises(AiterAbort):
        gluon(*call[:2], call[2].to(torch.float8_e4m3fn), call[3], *lists, step.scale, **keywords)
    with pytest.raises(AssertionError):
        toy("gfx942").ops.triton.gluon.mla_gluon.mla_gluon(*call, *lists, step.scale, **keywords)


def test_cache_write_skips_negative_slots() -> None:
    library = toy()
    cache = torch.zeros(3, 4, 40, dtype=BF16)
    kv_c, k_pe = torch.randn(3, 32).to(BF16), torch.randn(3, 8).to(BF16)
    slots = torch.tensor([9, -1, 2])
    library.concat_and_cache_mla(kv_c, k_pe, cache, slots, "auto", torch.ones(1))
    flat = cache.view(12, 40)
    assert torch.equal(flat[9], torch.cat((kv_c[0], k_pe[0])))
    assert torch.equal(flat[2], torch.cat((kv_c[2], k_pe[2])))
    assert int((flat != 0).any(1).sum()) == 2
    small = torch.zeros(3, 4, 40, dtype=library.dtypes.fp8)
    library.concat_and_cache_mla(kv_c, k_pe, small, slots, "fp8", torch.tensor([0.5]))
    assert torch.equal(small.view(12, 40)[9, :32], (kv_c[0].float() / 0.5).to(small.dtype))
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("int64", {"slot_mapping": slots.int()}),
        ("memory fault", {"slot_mapping": slots + 3}),
        ("kv_cache is", {"kv_cache": small}),
        ("width", {"kv_cache": torch.zeros(3, 4, 41, dtype=BF16)}),
        ("contiguous", {"kv_cache": cache.repeat(1, 1, 2)[..., :40]}),
        ("wanted, got", {"kv_cache_dtype": "fp8"}),
    ]
    call = dict(kv_c=kv_c, k_pe=k_pe, kv_cache=cache, slot_mapping=slots, kv_cache_dtype="auto", scale=torch.ones(1))
    for message, change in wrong:
        with pytest.raises(AiterAbort, match=message):
            library.concat_and_cache_mla(**(call | change))
