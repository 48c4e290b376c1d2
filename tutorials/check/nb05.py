"""Checkers of notebook 05: how wrong is right.

Axes: K replicas, T query rows, N heads, V value.
"""

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tiers
from check.known import by_name
from check.verdict import checker, judge
from mla.adapters import from_latent
from mla.conformance.zoo import fault, kernel
from mla.conformance.zoo.broken import Broken
from mla.tier import Tier

Answer = Callable[..., Any]
RIGHT = ("naive:mha", "naive:mqa", "paged", "paged:mha", "paged:mqa", "template")
# What a fault needs to be seen, and faults that need it: one of each is planted.
HIDDEN = {
    "any input shows it; did you look at used_out and used_lse, or at `ok`?": (
        "scale_one_percent", "rope_halves_swapped", "value_wrong_columns", "head_off_by_one", "lse_base_2",
        "page_off_by_one", "merge_base_2_as_natural",
    ),
    "it needs a request with several new tokens: try mixed_small, verify_4 or small_prefill": (
        "mask_one_key_more", "mask_first_row_for_all", "mask_heads_and_tokens_swapped", "mask_missing",
    ),
    "it shows only where softmax is not flat and the scores are large: try the families peaked and large_logits": (
        "precision_scores_in_16_bits",
    ),
    "it needs rows or requests without keys: try zero_rows or zero_rows_prefill": (
        "empty_lse_zero", "empty_divides_by_zero", "empty_plus_infinity",
    ),
}  # fmt: skip


@checker
def bf16_error(fn: Answer) -> tuple[bool, str]:
    """Judge `bf16_error(x)`: the most that rounding to bf16 moves a number in the binade of x > 0."""
    for x in (1.0, 1.9, 100.0, 0.3, random.uniform(3, 5000), random.uniform(1e-4, 0.1)):
        power = 2.0 ** math.floor(math.log2(x))
        hints = {
            "that is the whole spacing; rounding goes to the nearer neighbour, so half of it": power * 2**-7,
            "a quarter of that: 8 bits count the leading 1, seven are stored; the spacing is 2^-7, its half 2^-8": power
            * 2**-6,
            "twice that: seven bits stand behind the leading 1": power * 2**-9,
            "that is fp16, with ten bits behind the leading 1": power * 2**-11,
            "the spacing is the same from one power of two to the next, it does not grow with x in between": x * 2**-8,
            "2^-8 is relative to the power of two below x": 2**-8,
        }
        answer = fn(x)
        ok, why = judge(answer, power * 2**-8, {k: w for k, w in hints.items() if w != power * 2**-8})
        if not ok:
            return False, f"x = {x:.5g}: {why}"
    return True, "2^floor(log2 x) * 2^-8"


@checker
def rms_error(fn: Answer) -> tuple[bool, str]:
    """Judge `rms_error(out, truth)`: RMS over V of a bf16 result's distance from a float64 truth, (T, N)."""
    T, N, V = 3, 4, 16
    truth = torch.randn(T, N, V, dtype=torch.float64)
    out = (truth * (1 + 2e-3 * torch.randn(T, N, V, dtype=torch.float64))).bfloat16()
    difference = out.double() - truth
    right = difference.square().mean(-1).sqrt()
    wrong = {
        "you rounded the truth to bf16 before subtracting, so your ruler is as coarse as what you measure: "
        "convert out to float64": (out - truth.bfloat16()).double().square().mean(-1).sqrt(),
        "that is the largest error, not the root of the mean square": difference.abs().amax(-1),
        "that is the mean error: square, mean, root": difference.abs().mean(-1),
        "that is relative to the truth: leave the division to the budget": right / truth.square().mean(-1).sqrt(),
        "the root is missing": difference.square().mean(-1),
        "that is the sum over V, not the mean": difference.square().sum(-1).sqrt(),
        "one number for all rows would hide one bad head: mean over V only": difference.square().mean().sqrt(),
        "the mean goes over V, the last axis": difference.square().mean(0).sqrt(),
    }
    answer = fn(out, truth)
    if isinstance(answer, Tensor) and answer.dtype == torch.bfloat16:
        return False, "the answer is bf16: convert out to float64 before subtracting"
    known = by_name(answer, wrong, 1e-9)
    return (False, known) if known else judge(answer, right, right="RMS over V, in float64")


@checker
def random_round(fn: Answer) -> tuple[bool, str]:
    """Judge `random_round(x, step)`: to a multiple of step next to x, up or down at random, right on average."""
    step, many = random.choice((0.25, 0.5, 2.0)), 40_000
    for where in (0.3, -1.8, 2.0):
        x = torch.full((many,), where * step, dtype=torch.float64)
        answer = fn(x, step)
        if not isinstance(answer, Tensor) or answer.shape != x.shape:
            return False, "return a tensor of x's shape"
        grid = answer / step
        low, high = math.floor(where), math.ceil(where)
        at = f"x = {where * step:g}, step = {step:g}"
        if not torch.allclose(grid, grid.round(), atol=1e-9):
            return False, f"{at}: {float(answer[0]):g} is no multiple of the step"
        if bool((grid.round() < low).any() or (grid.round() > high).any()):
            return False, f"{at}: {float(answer[(grid < low - 0.5) | (grid > high + 0.5)][0]):g} is not a neighbour"
        up, want = float((grid.round() > low).double().mean()), where - low
        if low == high:
            continue
        if up in (0.0, 1.0):
            why = "Rounding to the nearest gives one answer, and one draw for all of x moves it as a whole"
            return False, f"{at}: always the same neighbour. {why}: each number draws its own"
        spread = 5 * math.sqrt(want * (1 - want) / many)
        if abs(up - want) > spread:
            coin = " A fair coin is not fair to x" if abs(up - 0.5) < spread else ""
            why = f"{at}: went up in {up:.0%} of the draws, {want:.0%} would be right on average.{coin}"
            return False, why
    return True, "a neighbour each time, right on average"


@checker
def out_limit(fn: Answer) -> tuple[bool, str]:
    """Judge `out_limit(errors, truth, u)`: 3 (e + u rms(truth)), e the RMS over replicas, at least the heads' mean."""
    K, T, N, V, u = 16, 3, 5, 8, 2.0**-8
    errors = torch.rand(K, T, N, dtype=torch.float64) ** 3 / 100
    errors[:, 1, 2] = 0  # a row that happened to round well
    truth = torch.randn(T, N, V, dtype=torch.float64)
    size, e = truth.square().mean(-1).sqrt(), errors.square().mean(0).sqrt()
    floor = torch.maximum(e, e.mean(1, keepdim=True))
    wrong = {
        "no floor: a row whose replicas rounded luckily gets no room. Take at least the mean over the token's heads": 3
        * (e + u * size),
        "that is the mean over replicas; errors add as squares: root of the mean square": 3
        * (torch.maximum(errors.mean(0), errors.mean(0).mean(1, keepdim=True)) + u * size),
        "that is the largest replica: a budget that grows with K": 3
        * (torch.maximum(errors.amax(0), floor) + u * size),
        "the factor 3 is missing": floor + u * size,
        "the factor 3 and the floor are missing": e + u * size,
        "the last rounding, u rms(truth), is missing": 3 * floor,
        "the 3 belongs to both parts": 3 * floor + u * size,
        "the 3 belongs to both parts: 3 (e + u rms)": floor + 3 * u * size,
        "the floor is the mean over heads (axis 1), not over tokens": 3
        * (torch.maximum(e, e.mean(0, keepdim=True)) + u * size),
        "the mean over heads is a floor, not the answer: keep e where it is larger": 3
        * (e.mean(1, keepdim=True) + u * size),
    }
    answer = fn(errors, truth, u)
    known = by_name(answer, wrong, 1e-9)
    return (False, known) if known else judge(answer, 3 * (floor + u * size), right="3 (e + u rms), with the floor")


def ten(name: str = "", seed: int | None = None) -> tuple[list[Tier], int]:
    """Return ten tiers without names that tell, and the index of the broken one; `name` chooses the fault."""
    chance = random.Random(seed)
    bad = fault(name or chance.choice([f for faults in HIDDEN.values() for f in faults]))
    bases = [tiers.get(chance.choice(RIGHT)) for _ in range(6)]
    bases += [from_latent("kernel", kernel.attend) for _ in range(3)] + [bad.tier()]
    chance.shuffle(bases)
    at = next(i for i, base in enumerate(bases) if base.name == bad.name)
    return [Broken(f"kernel {i}", base) for i, base in enumerate(bases)], at


@checker
def find_broken(fn: Answer) -> tuple[bool, str]:
    """Judge `find_broken(kernels)`: the index of the broken one of ten, for one fault of each sort in `HIDDEN`."""
    for round_, (hint, names) in enumerate(HIDDEN.items()):
        name = random.choice(names)
        kernels, at = ten(name)
        answer = fn(kernels)
        if not isinstance(answer, int):
            return False, f"an index was asked for, 0 to 9, or -1; this is a {type(answer).__name__}"
        if answer != at:
            said = "found none" if answer == -1 else f"said {answer}"
            why = f"{round_} of {len(HIDDEN)} found; then kernel {at} was broken and you {said}."
            return False, f"{why} {fault(name).about} {hint[0].upper()}{hint[1:]}"
    return True, f"{len(HIDDEN)} of {len(HIDDEN)} broken kernels found among ten"
