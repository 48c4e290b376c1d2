"""The merge of partial attention states: golden values, empty sides, and its algebra."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla.state import AttentionState, merge

INF, NAN = float("inf"), float("nan")
U = 2.0**-24


def state(out: list[list[float]], lse: list[float], dtype: torch.dtype = torch.float32) -> AttentionState:
    """One head; out is one list of V values for each row, lse one number for each row."""
    return AttentionState(torch.tensor(out, dtype=dtype)[:, None, :], torch.tensor(lse, dtype=dtype)[:, None])


def bound(states: list[AttentionState], merges: int) -> tuple[float, float]:
    """Error bounds (out, lse) of a chain of float32 merges.

    One merge rounds lse to u (|lse| + 1), log and exp to 2 u: at most u (|lse| + 3). An error d of an lse changes a
    share by at most d; exp, sum, quotient, product and sum round it by 6 u more, and |lse - max| u exp(lse - max) < u.
    """
    top = max((abs(x) for s in states for x in s.lse.flatten().tolist() if math.isfinite(x)), default=0.0)
    largest = max((abs(x) for s in states for x in s.out.flatten().tolist()), default=0.0)
    lse = merges * U * (top + math.log(len(states)) + 3)
    return merges * (7 * U + 2 * lse) * largest, lse


def exact(states: list[AttentionState]) -> tuple[torch.Tensor, torch.Tensor]:
    """The union in float64, from the definition: out = sum Z_i out_i / sum Z_i, lse = ln sum Z_i."""
    lse = torch.stack([s.lse.double() for s in states])
    total = torch.logsumexp(lse, dim=0)
    shares = torch.exp(lse - torch.where(total == -INF, 0, total))
    return (shares[..., None] * torch.stack([s.out.double() for s in states])).sum(0), total


def test_merge_weighs_by_the_sums_of_exponentials():
    # Z = 1 and 9, outputs 0 and 1: 0.9; 0.8210 and 0.9597 are the two mix-ups with base 2
    merged = merge(state([[0.0]], [math.log(1)]), state([[1.0]], [math.log(9)]))
    assert merged.out.item() == pytest.approx(0.9, abs=8 * U)
    assert merged.lse.item() == pytest.approx(math.log(10), abs=8 * U)


def test_merge_weights_and_lse_of_two_and_eight():
    merged = merge(state([[1.0, 0.0]], [math.log(2)]), state([[0.0, 1.0]], [math.log(8)]))
    assert merged.out[0, 0].tolist() == pytest.approx([0.2, 0.8], abs=8 * U)
    assert merged.lse.item() == pytest.approx(2.302585092994046, abs=8 * U)


def test_B1_long_prefix_and_short_suffix():
    # 4096 keys of mean 0 and 4 of mean 10 under a zero query: 40 / 4100, not 0.000454 and not 0.081260
    merged = merge(state([[0.0]], [math.log(4096)]), state([[10.0]], [math.log(4)]))
    assert merged.out.item() == pytest.approx(0.0097560976, abs=10 * 8 * U * math.log(4100))
    assert merged.lse.item() == pytest.approx(math.log(4100), abs=8 * U * math.log(4100))


@pytest.mark.parametrize("empty_first", [True, False])
@pytest.mark.parametrize("held", [0.0, NAN, INF])
@pytest.mark.parametrize("mark", [INF, -INF])
def test_A5_an_empty_side_marked_with_plus_or_minus_infinity_changes_nothing(mark, held, empty_first):
    x, empty = state([[3.25, -1.5]], [1.0]), state([[held, held]], [mark])
    merged = merge(empty, x) if empty_first else merge(x, empty)
    assert torch.equal(merged.out, x.out)
    assert torch.equal(merged.lse, x.lse)


@pytest.mark.parametrize("held", [0.0, NAN, 7.0])
def test_C2_two_empty_sides_are_empty(held):
    merged = merge(state([[held, held]], [-INF]), state([[held, held]], [INF]))
    assert merged.out.flatten().tolist() == [0.0, 0.0]
    assert merged.lse.item() == -INF


def test_a_nan_that_is_not_of_an_empty_side_is_never_hidden():
    x = state([[1.0]], [200.0])
    assert merge(state([[1.0]], [NAN]), x).out.isnan().all()
    assert merge(x, state([[1.0]], [NAN])).lse.isnan().all()
    # its weight exp(-200) is 0 in float32, but the row does see keys
    assert merge(state([[NAN]], [0.0]), x).out.isnan().all()


def test_large_lse_do_not_overflow():
    merged = merge(state([[1.0], [1.0]], [1e4, -1e4]), state([[3.0], [3.0]], [1e4, -1e4]))
    assert merged.out.flatten().tolist() == [2.0, 2.0]
    assert merged.lse.flatten().tolist() == pytest.approx([1e4 + math.log(2), -1e4 + math.log(2)], abs=1e4 * 2 * U)


def test_inputs_of_unequal_strides():
    torch.manual_seed(0)
    T, N, V = 5, 3, 10
    a = AttentionState(torch.randn(N, T, V).transpose(0, 1), torch.randn(N, T).T)
    b = AttentionState(torch.randn(T, N, 2 * V)[..., ::2], torch.randn(T, 2 * N)[:, ::2])
    merged, plain = merge(a, b), merge(*(AttentionState(s.out.contiguous(), s.lse.contiguous()) for s in (a, b)))
    assert torch.equal(merged.out, plain.out)
    assert torch.equal(merged.lse, plain.lse)
    out, lse = exact([a, b])
    limit_out, limit_lse = bound([a, b], 1)
    assert (merged.out - out).abs().max() <= limit_out
    assert (merged.lse - lse).abs().max() <= limit_lse


def test_results_are_float32_or_float64():
    for a, b, expected in [
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float16, torch.float32, torch.float32),
        (torch.float32, torch.float64, torch.float64),
    ]:
        merged = merge(state([[1.0]], [0.0], a), state([[2.0]], [0.0], b))
        assert (merged.out.dtype, merged.lse.dtype) == (expected, expected)
        assert merged.out.item() == 1.5


def test_method_is_the_function():
    a, b = state([[1.0]], [0.5]), state([[2.0]], [0.25])
    assert torch.equal(a.merge(b).out, merge(a, b).out)
    assert torch.equal(a.merge(b).lse, merge(a, b).lse)


def test_no_rows():
    nothing = AttentionState.empty(0, 3, 10)
    merged = merge(nothing, nothing)
    assert (merged.out.shape, merged.lse.shape) == ((0, 3, 10), (0, 3))


ONE = state([[1.0]], [0.0])
WIDE = AttentionState(torch.zeros(2, 3, 4), torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        (AttentionState(ONE.out, None), ONE, r"^lse: .*Need\(lse=True\)"),
        (ONE, state([[1.0, 2.0]], [0.0]), r"^merge: .*\(1, 1, 1\) and \(1, 1, 2\)"),
        (WIDE, AttentionState(WIDE.out, torch.zeros(1, 3)), "^merge"),
        (AttentionState(WIDE.out, WIDE.lse.T), AttentionState(WIDE.out, WIDE.lse.T), "^merge"),
        (ONE, AttentionState(ONE.out.to("meta"), ONE.lse.to("meta")), "^merge: expected both on cpu, got meta"),
    ],
)
def test_states_that_cannot_be_merged_are_named(a, b, text):
    with pytest.raises(ValueError, match=text):
        merge(a, b)


lses = st.one_of(st.just(-INF), st.floats(-100, 100, width=32))
rows = st.tuples(lses, st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=2))


def from_rows(drawn: list[tuple[float, list[float]]]) -> AttentionState:
    # an empty side holds anything
    return state([[NAN if lse == -INF else x for x in out] for lse, out in drawn], [lse for lse, _ in drawn])


@given(st.lists(rows, min_size=3, max_size=3), st.lists(rows, min_size=3, max_size=3))
def test_merge_is_commutative_bit_for_bit(a, b):
    left, right = merge(from_rows(a), from_rows(b)), merge(from_rows(b), from_rows(a))
    assert torch.equal(left.out, right.out)
    assert torch.equal(left.lse, right.lse)


@given(st.lists(rows, min_size=1, max_size=4))
def test_the_empty_state_is_the_identity(drawn):
    x = from_rows(drawn)
    clean = torch.where(x.lse[..., None] == -INF, 0, x.out)
    empty = AttentionState.empty(len(drawn), 1, 2)
    for merged in (merge(x, empty), merge(empty, x)):
        assert torch.equal(merged.out, clean)
        assert torch.equal(merged.lse, x.lse)


@given(st.lists(rows, min_size=2, max_size=7), st.randoms(use_true_random=False))
def test_any_order_and_bracketing_gives_the_union_within_rounding(drawn, random):
    parts = [from_rows([row]) for row in drawn]
    clean = [AttentionState(torch.where(p.lse[..., None] == -INF, 0, p.out), p.lse) for p in parts]
    out, lse = exact(clean)
    limit_out, limit_lse = bound(clean, len(parts) - 1)
    while len(parts) > 1:
        a, b = (parts.pop(random.randrange(len(parts))) for _ in range(2))
        parts.append(merge(a, b))
    merged = parts[0]
    if lse.item() == -INF:
        assert merged.lse.item() == -INF
        assert merged.out.abs().max() == 0
        return
    assert abs(merged.lse.item() - lse.item()) <= limit_lse
    assert (merged.out.double() - out).abs().max() <= limit_out
