"""Two small questions that several checkers ask before `judge`: is this a pair, is this a wrong answer we know?"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def pair(answer: Any, what: str) -> str:
    """Return a sentence where an answer is no tuple of two, described as `what`, else ""."""
    if isinstance(answer, tuple | list) and len(answer) == 2:
        return ""
    return f"return two things, {what}, not a {type(answer).__name__}"


def by_name(got: Any, wrong: Mapping[str, Any], digits: float = 1e-6) -> str:
    """Return the reason whose value agrees with an answer, of any shape, or "" where none does.

    `wrong` maps a reason to a number or tensor; NaN and infinity agree with themselves.
    """
    if not isinstance(got, Tensor | int | float):
        return ""
    got = torch.as_tensor(got, dtype=torch.float64)
    for reason, value in wrong.items():
        value = torch.as_tensor(value, dtype=torch.float64)
        if got.shape == value.shape and torch.allclose(got, value, rtol=digits, atol=digits, equal_nan=True):
            return reason
    return ""
