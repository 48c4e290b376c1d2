"""The Hopper decode kernels on a GPU of sm_90: every length, every number of parts, the same bits again and again.

The conformance suite is the larger test (`mla check triton:hopper`); here is what it does not go through one by one.
"""

import pytest
import torch
from triton_here import DEVICE, require_triton

require_triton()
if DEVICE == "cpu" or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("the Hopper kernels need a GPU of sm_90", allow_module_level=True)

from small_case import Case, make_case  # noqa: E402

import tiers  # noqa: E402
from tiers.tier2_triton import hopper_rounds  # noqa: E402

SIZES = {"L": 512, "P": 128, "R": 64, "V": 128, "page_size": 64, "device": DEVICE}
MOST_PARTS = 132


def case_of(query_lens: list[int], seq_lens: list[int], N: int, **fields) -> Case:
    """A case of DeepSeek-V3's sizes in bf16."""
    return make_case(query_lens, seq_lens, **(SIZES | {"N": N, "dtype": torch.bfloat16} | fields))


@pytest.mark.parametrize("page_size", [16, 64, 192])
@pytest.mark.parametrize("N", [3, 20, 64, 128])
def test_every_length_from_1_to_300(N, page_size):
    lengths = list(range(1, 301))
    case = case_of([1] * 300, lengths, N, page_size=page_size)
    case.check(case.run("triton:hopper"))


@pytest.mark.parametrize("N", [3, 64, 128])
def test_padding_alone_is_nothing_to_do(N):
    """There is no block table then, and what reads its first entry anyway ends the process."""
    case = case_of([], [], N, pad_tokens=3)
    state = case.run("triton:hopper")
    assert state.out.eq(0).all()
    assert state.lse.eq(float("-inf")).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("N", "query_len"), [(16, 1), (5, 5), (64, 1), (70, 3), (128, 2)])
def test_every_number_of_parts(N, query_len, dtype, monkeypatch):
    case = case_of([query_len, 1, query_len], [9000, 0, 129], N, dtype=dtype)  # bounds around 128
    tier = tiers.get("triton:hopper")
    prepared, wrong = tier.prepare(case.up, case.need), []
    for parts in range(1, MOST_PARTS + 1):
        tiles = max(1, hopper_rounds.rows_of_a_unit(N, [query_len, query_len]) // 64)
        monkeypatch.setattr(hopper_rounds, "processors", lambda device, n=parts * tiles: n)
        plan = tier.plan(case.need, case.batch)
        assert plan.steps.rounds[0].part.shape[0] == parts
        state = tier.attend(case.q, case.cache, prepared, plan)
        try:
            case.check(state)
        except AssertionError as error:
            wrong.append((parts, error))
    assert not wrong


@pytest.mark.parametrize(
    ("N", "seq_lens"), [(16, [4096, 1, 777, 0, 20000]), (128, [4096, 1, 777, 0, 20000]), (64, [300] * 200)]
)
def test_200_repeats_have_the_same_bits(N, seq_lens):
    case = case_of([1] * len(seq_lens), seq_lens, N)
    tier = tiers.get("triton:hopper")
    prepared, plan = tier.prepare(case.up, case.need), tier.plan(case.need, case.batch)
    first = tier.attend(case.q, case.cache, prepared, plan)
    case.check(first)
    for _ in range(200):
        again = tier.attend(case.q, case.cache, prepared, plan)
        assert torch.equal(again.out, first.out)
        assert torch.equal(again.lse, first.lse)
