"""Checks of notebook 03, position. Axes: P nope, R rope, L KV rank."""

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from check.verdict import checker, judge
from mla.rope import apply_rope

Answer = Callable[..., Any]


def _turn(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    return apply_rope(x[None], angles.cos()[None], angles.sin()[None], interleaved)[0]


@checker
def rotate_neighbours(answer: Answer) -> tuple[bool, str]:
    """Judge `rotate_neighbours(x, angles)`: (R,) and (R/2,) to (R,)."""
    R = random.choice([6, 10])
    x, angles = torch.randn(R, dtype=torch.float64), torch.rand(R // 2, dtype=torch.float64) * 2.4 + 0.2
    right = _turn(x, angles, True)
    a, b = x[0::2], x[1::2]
    pairs = torch.stack([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()])
    mixed = torch.stack([a * angles.cos() + b * angles.sin(), a * angles.sin() + b * angles.cos()], -1).flatten()
    wrong = {
        "these are halves (i, i + R/2); pairs are neighbours here": _turn(x, angles, False),
        "the right numbers in the wrong places: a pair stays where it was": pairs.flatten(),
        "turned the other way: the sign of sin": _turn(x, -angles, True),
        "cos and sin are swapped": _turn(x, math.pi / 2 - angles, True),
        "one of the two sines needs a minus": mixed,
        "a and b are swapped": torch.stack([pairs[1], pairs[0]], -1).flatten(),
        "the pairs turn in the wrong order: the first pair gets the first angle": _turn(x, angles.flip(0), True),
    }
    return judge(answer(x, angles), right, wrong, "and the length of every pair stays")


@checker
def column_order(answer: Answer) -> tuple[bool, str]:
    """Judge `column_order(R)` -> the order of columns that makes halves of neighbours."""
    R = random.choice([6, 10, 16])
    order = answer(R)
    order = [int(i) for i in (order.tolist() if isinstance(order, Tensor) else order)]
    if sorted(order) != list(range(R)):
        return False, f"{order} is no order of the {R} columns: each once"
    q, k = torch.randn(R, dtype=torch.float64), torch.randn(R, dtype=torch.float64)
    m, n = torch.rand(R // 2, dtype=torch.float64) * 3, torch.rand(R // 2, dtype=torch.float64) * 3
    want = _turn(q, m, True) @ _turn(k, n, True)
    got = _turn(q[order], m, False) @ _turn(k[order], n, False)
    inverse = [half * R // 2 + i for i in range(R // 2) for half in (0, 1)]
    known = {
        tuple(range(R)): "that is the old order: halves on weights for neighbours",
        tuple(inverse): "that is the way back, from halves to neighbours",
        (*range(1, R, 2), *range(0, R, 2)): "even columns first: (b, a) turns the other way than (a, b)",
    }
    right = "even columns, then odd ones, in W_QR and W_KR alike"
    return judge(got, want, {known.get(tuple(order), "scores change: which column meets which as a pair?"): got}, right)


@checker
def blend(answer: Answer) -> tuple[bool, str]:
    """Judge `blend(plain, keep, factor)` -> YaRN's frequencies."""
    n, factor = 8, random.choice([4.0, 16.0, 40.0])
    plain = 100.0 ** (-torch.arange(n, dtype=torch.float64) / n)
    keep = torch.linspace(1.3, -0.4, n, dtype=torch.float64).clamp(0, 1)
    wrong = {
        "keep is the wrong way round: 1 means as trained": plain * (1 - keep) + plain / factor * keep,
        "every pair is divided: fast ones stay as trained": plain / factor,
        "nothing is divided": plain,
        "multiplied: a longer context needs slower pairs": plain * keep + plain * factor * (1 - keep),
        "the divisor is blended, and not the frequency": plain / (keep + (1 - keep) * factor),
        "that is wavelengths blended; frequencies are": 1 / (keep / plain + (1 - keep) * factor / plain),
        "the divided part is missing": plain * keep,
    }
    right = plain * keep + plain / factor * (1 - keep)
    return judge(answer(plain, keep, factor), right, wrong, "the length of the prompt is nowhere in it")


@checker
def softmax_scale(answer: Answer) -> tuple[bool, str]:
    """Judge `softmax_scale(P, R, L, factor, mscale_all_dim)`."""
    for P, R, L, factor, mscale in (
        (128, 64, 512, 40.0, 1.0),
        (random.choice([112, 192]), 64, 512, random.choice([8.0, 40.0]), 0.707),
        (192, 64, 512, None, 0.0),
    ):
        m = 1.0 if factor is None else 0.1 * mscale * math.log(factor) + 1
        base = (P + R) ** -0.5
        wrong = {
            "the YaRN term is missing": base,
            "m once: it is squared, one for the query and one for the key": base * m,
            "L + R: the width of the absorbed query never enters": (L + R) ** -0.5 * m**2,
            "L + R, and the YaRN term is missing": (L + R) ** -0.5,
            "only P: the position part belongs to a query's width": P**-0.5 * m**2,
            "only P, and the YaRN term is missing": P**-0.5,
            "divided by m squared": base / m**2,
            "the square root is missing": m**2 / (P + R),
        }
        if factor is not None:
            wrong["the decimal logarithm: ln is natural"] = base * (0.1 * mscale * math.log10(factor) + 1) ** 2
            wrong["mscale_all_dim is missing in m"] = base * (0.1 * math.log(factor) + 1) ** 2
        right = base * m**2
        wrong = {why: value for why, value in wrong.items() if abs(value - right) > 1e-6}
        ok, why = judge(answer(P, R, L, factor, mscale), right, wrong)
        if not ok:
            return False, f"P={P}, R={R}, L={L}, factor={factor}, mscale_all_dim={mscale}: {why}"
    return True, "0.13523378 for V3"
