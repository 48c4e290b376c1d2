"""The concatenation of content and position parts: bit for bit, shared by heads or not, nothing around it.

Axes: n rows (new tokens or keys), N heads, P nope, R rope.
"""

from triton_here import DEVICE, DTYPES, require_triton

require_triton()

import pytest  # noqa: E402
import torch  # noqa: E402

from tiers.tier2_triton.kernels.concat import concat, concat_reference, problem  # noqa: E402

NAN = float("nan")
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def bits(x):
    return x.contiguous().view(BITS[x.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("what", ["keys", "queries"])
def test_bits_are_moved_as_they_are(what, dtype):
    a = problem("toy", dtype, DEVICE).arguments
    if what == "queries":  # parts of one tensor, with a NaN
        q = torch.randn(11, 3, 18, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
        q[3] = NAN
        a |= {"nope": q[..., :12], "pe": q[..., 12:]}
    wanted = torch.full_like(a["out"], 0)
    concat_reference(a["nope"], a["pe"], wanted)
    a["out"].fill_(NAN)
    concat(**a)
    assert torch.equal(bits(a["out"]), bits(wanted))


@pytest.mark.parametrize(("P", "R"), [(12, 0), (16, 16), (1, 3)])
def test_widths_and_a_part_that_is_not_there(P, R):
    nope, pe = torch.arange(5 * 2 * P).view(5, 2, P).float(), -torch.arange(5 * R).view(5, R).float() - 1
    out = torch.full((5, 2, P + R), NAN)
    concat(nope.to(DEVICE), pe.to(DEVICE), out := out.to(DEVICE))
    for s in range(5):
        for n in range(2):
            assert out[s, n].tolist() == nope[s, n].tolist() + pe[s].tolist()


def test_F4_nothing_is_written_around_an_output_of_any_strides():
    a = problem("toy", torch.float32, DEVICE).arguments
    n, N, width = a["out"].shape
    around = torch.full((N + 1, n + 2, width + 5), NAN, device=DEVICE)
    out = around.transpose(0, 1)[1:-1, :N, :width]
    concat(a["nope"], a["pe"], out)
    concat(**a)
    assert torch.equal(out, a["out"])
    for rest in (around[N], around[:, 0], around[:, -1], around[..., width:]):
        assert rest.isnan().all()


def test_no_rows_no_launch():
    a = problem("toy", torch.float32, DEVICE).arguments
    concat(**{k: x[:0] for k, x in a.items()})
