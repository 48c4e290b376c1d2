"""The prefill kernel against its reference in float64: every mask a bound can say, spans that go on, poison, strides.

Axes: T new tokens (packed over requests), n keys in the workspace, N heads, P nope, R rope, V value.
"""

from triton_here import DEVICE, DTYPES, require_triton

require_triton()

import pytest  # noqa: E402
import torch  # noqa: E402

from tiers.tier2_triton.kernels import prefill as kernel  # noqa: E402
from tiers.tier2_triton.kernels.prefill import (  # noqa: E402
    CONTINUES,
    LEAVES,
    TOY,
    PrefillTile,
    prefill,
    prefill_reference,
    prefill_tile,
    shared_bytes,
    spans_problem,
)

NAN, INF, U = float("nan"), float("inf"), 2.0**-24
ODD, NO_ROPE, TWO_BLOCKS = (3, 24, 8, 10), (3, 20, 0, 10), (2, 48, 16, 16)  # N, P, R, V
PLAIN, AHEAD = PrefillTile(16, 16, 4, 1, 0), PrefillTile(16, 16, 4, 3, 1)


def run(arguments, **changes):
    """Kernel and reference, in float64, on copies: {name: result} of each. What is not written keeps its NaN."""
    arguments = arguments | changes
    floats = {k: x for k, x in arguments.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    exact = arguments | {k: x.double() for k, x in floats.items()}
    exact["out"] = torch.full_like(exact["out"], NAN)
    exact["acc"], exact["lse"] = exact["acc"].clone(), exact["lse"].clone()
    got = {k: x.clone() for k, x in arguments.items() if k in ("acc", "lse")}
    got["out"] = torch.full_like(arguments["out"], NAN)
    prefill_reference(**exact)
    prefill(**(arguments | got))
    return got, {k: exact[k] for k in got}


def check(arguments, **changes):
    """Every result within what rounding can do, and exactly equal where nothing was seen or nothing is written.

    A score is a sum of P + R products: off by (P + R) u sum |q k| at most, some 8 u |score| for scale, exp2 and the
    change of base. A weight is off by that of its score and of the largest; sums over n keys add n u. 16-bit weights
    are rounded to u16, and so is the output. `|q| |k|` bounds sum |q k|.
    """
    got, exact = run(arguments, **changes)
    a, dtype = arguments | changes, arguments["out"].dtype
    low = torch.finfo(dtype).eps / 2
    size = lambda *parts: float(torch.cat([x.nan_to_num(0).double() for x in parts], -1).norm(dim=-1).max())
    pe = a["k_pe"][:, None].expand(*a["k_nope"].shape[:2], a["k_pe"].shape[-1])
    score = a["softmax_scale"] * size(a["q_nope"], a["q_pe"]) * size(a["k_nope"], pe)
    width, keys = a["q_nope"].shape[2] + a["q_pe"].shape[2], a["k_nope"].shape[0]
    off = (width + 8) * U * max(score, 1) + (keys + 16) * U
    value = max(float(a[name].nan_to_num(0).abs().max()) for name in ("v", "acc"))
    for name in ("acc", "out", "lse"):
        there = exact[name].isfinite()
        assert torch.equal(got[name].double()[~there].nan_to_num(7), exact[name][~there].nan_to_num(7)), name
        bound = off if name == "lse" else value * (2 * off + (low if dtype.itemsize == 2 else 0) + low)
        assert not there.any() or (got[name].double() - exact[name])[there].abs().max() <= bound, name
    return got, exact


@pytest.mark.parametrize("tile", [PLAIN, AHEAD], ids=["plain", "ahead"])
@pytest.mark.parametrize(
    ("sizes", "dtype"), [*((ODD, dtype) for dtype in DTYPES), (NO_ROPE, DTYPES[0]), (TWO_BLOCKS, DTYPES[-1])]
)
def test_the_kernel_is_its_reference_in_float64(sizes, tile, dtype):
    got, exact = check(spans_problem(TOY, sizes, tile, dtype, DEVICE).arguments)
    assert got["out"][26:45].isnan().all()  # left to go on from: in acc only
    assert (got["out"][45:] == 0).all()
    assert (got["lse"][45:] == -INF).all()
    assert exact["lse"][:45].isfinite().all()


def bounds_problem(bounds, keys, tile=AHEAD, first_key=0, flags=0):
    p = spans_problem(((0, len(bounds), 0, keys, first_key, 0, flags),), ODD, tile, torch.float32, DEVICE).arguments
    q = torch.randn(len(bounds), 3, 32, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    bounds = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    q[bounds == 0] = NAN
    return p | {"q_nope": q[..., :24], "q_pe": q[..., 24:], "row_kv_lens": bounds}


@pytest.mark.parametrize("tile", [PLAIN, AHEAD], ids=["plain", "ahead"])
@pytest.mark.parametrize("bounds", [[40] * 5, [0, 40, 0, 3, 17], [16, 32, 33, 48, 1], [0, 0], [48, 0, 47], [100, 48]])
def test_explicit_bounds_of_rows(bounds, tile):
    got, _ = check(bounds_problem(bounds, 48, tile))
    for row, bound in enumerate(bounds):
        assert (got["lse"][row] == -INF).all() == (bound == 0)
        assert (got["out"][row] == 0).all() == (bound == 0)


@pytest.mark.parametrize("bounds", [[20, 32, 33, 79, 80, 200], [20, 32, 80, 80]])
def test_a_context_chunk_is_unmasked_and_a_later_span_may_be_unseen(bounds):
    # keys 32 .. 79: rows of bounds below 33 see none of them, and keep the state that they came with, also where the
    # others see whole blocks
    p = bounds_problem(bounds, 48, first_key=32, flags=CONTINUES)
    got, _ = check(p)
    for row in (0, 1):
        assert (got["out"][row] - p["acc"][row]).abs().max() <= 2 * U * p["acc"][row].abs().max()
        assert (got["lse"][row] - p["lse"][row]).abs().max() <= 4 * U * p["lse"][row].abs().max()


def test_a_row_without_earlier_keys_goes_on_from_nothing():
    p = bounds_problem([10, 0, 48], 48, flags=CONTINUES)
    p["lse"].fill_(-INF)
    p["acc"].fill_(NAN)
    got, _ = check(p)
    alone, _ = run(bounds_problem([10, 0, 48], 48))
    assert torch.equal(got["out"], alone["out"])
    assert torch.equal(got["lse"], alone["lse"])


def test_B1_a_prefix_of_zeros_and_a_suffix_of_tens_by_their_count():
    # 60 keys of value 0, 4 of value 10, a zero query: 40 / 64, in two spans as in one
    p = bounds_problem([64, 64], 64)
    for name in ("q_nope", "q_pe", "v"):
        p[name].zero_()
    p["v"][60:64] = 10
    tiles = lambda *item: torch.tensor([item], dtype=torch.int32, device=DEVICE)
    acc, out, lse = torch.full_like(p["acc"], NAN), torch.full_like(p["out"], NAN), torch.full_like(p["lse"], NAN)
    common = p | {"acc": acc, "out": out, "lse": lse}
    prefill(**(common | {"tiles": tiles(0, 2, 0, 60, 0, 0, LEAVES)}))
    assert out.isnan().all()
    prefill(**(common | {"tiles": tiles(0, 2, 60, 4, 60, 0, CONTINUES)}))
    assert (out - 0.625).abs().max() <= 16 * U
    assert (lse - torch.tensor(64.0).log()).abs().max() <= 16 * U * 4.2


def test_F4_outputs_of_any_strides_and_nothing_around_them():
    p = spans_problem(TOY, ODD, AHEAD, torch.float32, DEVICE).arguments
    T, N, V = p["out"].shape
    plain, _ = run(p)
    around = torch.full((N, T + 2, V + 3), NAN, device=DEVICE)
    out, lse_around = around.transpose(0, 1)[1:-1, :, :V], torch.full((N + 1, T + 2), NAN, device=DEVICE)
    lse = lse_around.T[1:-1, :N]
    lse.copy_(p["lse"])
    acc_around = torch.full((T, N, V + 2), NAN, device=DEVICE)
    acc = acc_around[..., :V]
    acc.copy_(p["acc"])
    before = {k: p[k].clone() for k in ("q_nope", "q_pe", "k_nope", "k_pe", "v", "row_kv_lens", "tiles")}
    prefill(**(p | {"out": out, "lse": lse, "acc": acc}))
    for name, x in (("out", out), ("lse", lse), ("acc", acc)):
        assert torch.equal(x.nan_to_num(7), plain[name].nan_to_num(7)), name
    for rest in (around[:, 0], around[:, -1], around[..., V:], lse_around[N], lse_around[:, 0], lse_around[:, -1]):
        assert rest.isnan().all()
    assert acc_around[..., V:].isnan().all()
    assert all(torch.equal(p[k].nan_to_num(7), x.nan_to_num(7)) for k, x in before.items())


def test_no_tiles_no_launch():
    p = spans_problem(TOY, ODD, AHEAD, torch.float32, DEVICE).arguments
    prefill(**(p | {"tiles": p["tiles"][:0]}))


def test_tiles_of_released_sizes_fit_and_match_what_the_kernel_says():
    limit = {"sm_90": 232448, "sm_80": 166912, "gfx942": 65536}
    assert prefill_tile(torch.bfloat16, 128, 64, 128, limit["sm_90"]) == (128, 64, 8, 3, 1)
    assert prefill_tile(torch.bfloat16, 128, 64, 128, limit["sm_80"]) == (128, 64, 8, 2, 0)
    # 128 rows of 192, four blocks of 64 keys of 192 and three of values of 128, in two bytes
    bytes_ = 2 * (128 * 192 + 64 * (4 * 192 + 3 * 128))
    assert shared_bytes(kernel.TILES[0], torch.bfloat16, 128, 64, 128) == bytes_
    for most in limit.values():
        for dtype in (torch.bfloat16, torch.float32):
            for P, R, V in kernel.SHAPES:
                assert shared_bytes(prefill_tile(dtype, P, R, V, most), dtype, P, R, V) <= most
    with pytest.raises(ValueError, match=r"at most 1,000 bytes, got .* bytes for a tile of .*absorbed form"):
        prefill_tile(torch.bfloat16, 128, 64, 128, 1000)
