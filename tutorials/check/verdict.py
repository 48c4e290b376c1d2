"""What an exercise check says: "not yet", "ok" or "no: <why>", in one line, and never an exception.

A check is a function with `@checker`; it gets the reader's answer, asks it with inputs of its own and returns
`(ok, why)`. An answer that returns nothing yet, or `...`, ends it with "not yet".
"""

import functools
import numbers
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """What a check found: `ok` is True, False, or None while there is no answer; `text` says why."""

    ok: bool | None
    text: str = ""

    def __str__(self) -> str:
        word = {None: "not yet", True: "ok", False: "no"}[self.ok]
        return f"{word}: {self.text}" if self.text else word

    def _ipython_display_(self) -> None:
        """Show nothing: `verdict` has printed the line already."""


def verdict(ok: bool | None, text: str = "") -> Verdict:
    """Print the verdict as one line and return it."""
    found = Verdict(ok, " ".join(text.split()))
    print(found)
    return found


class NoAnswer(Exception):
    """The reader's function returned nothing: the exercise is not solved yet."""


class AnswerRaised(Exception):
    """The reader's function raised; the text says what and in which of its lines."""


def checker(body: Callable[..., tuple[bool, str]]) -> Callable[..., Verdict]:
    """Make a check from `body(answer, ...) -> (ok, why)`: it prints one line whatever the answer is or does.

    A function is handed on as one that copies its tensors, so that writing to them does no harm. None and `...` are no
    answer, from a function or in its place. What follows the answer comes from the notebook and is handed on as it is.
    """

    @functools.wraps(body)
    def check(answer: Any, *given: Any) -> Verdict:
        try:
            ok, text = body(_asked(answer), *given)
        except NoAnswer:
            return verdict(None)
        except AnswerRaised as error:
            return verdict(False, str(error))
        except Exception as error:  # an answer of a kind that the check did not think of
            return verdict(False, f"this answer cannot be read ({type(error).__name__}: {_short(error)})")
        return verdict(ok, text)

    return check


def judge(got: Any, want: Any, wrong: Mapping[str, Any] | None = None, right: str = "") -> tuple[bool, str]:
    """Compare an answer with the truth, and with wrong answers by name: `wrong` maps a reason to its value.

    Whole numbers must be equal. Floats must agree to half of the digits of the answer's own dtype, relative to the
    largest number of the truth: rounding is far below that, another formula far above. Any shape.
    """
    if isinstance(want, bool | str):
        return _match(got == want, got, want, wrong, lambda value: got == value, right)
    if _whole(want):
        if not _whole(got):
            return False, f"a whole number was asked for, this is {_short(got)}"
        return _match(int(got) == int(want), got, want, wrong, lambda value: int(got) == value, right)
    want = torch.as_tensor(want, dtype=torch.float64)
    if not isinstance(got, numbers.Real | Tensor) or isinstance(got, bool):
        return False, f"a {'tensor' if want.dim() else 'number'} was asked for, this is a {type(got).__name__}"
    eps = torch.finfo(got.dtype).eps if isinstance(got, Tensor) and got.is_floating_point() else 2.0**-52
    got = got.to(torch.float64) if isinstance(got, Tensor) else torch.tensor(float(got), dtype=torch.float64)
    if got.shape != want.shape:
        return False, f"the shape is {tuple(got.shape)}, {tuple(want.shape)} was asked for"
    if not bool(torch.isfinite(got).all()) and bool(torch.isfinite(want).all()):
        return False, f"{int((~torch.isfinite(got)).sum())} of {got.numel()} numbers are NaN or infinite"

    def same(value: Any) -> bool:
        value = torch.as_tensor(value, dtype=torch.float64)
        size = value[torch.isfinite(value)].abs().max().item() if torch.isfinite(value).any() else 1.0
        return value.shape == got.shape and torch.allclose(got, value, rtol=0.0, atol=eps**0.5 * (size or 1.0))

    if same(want):
        return True, right
    for reason, value in (wrong or {}).items():
        if same(value):
            return False, reason
    if want.dim() == 0:
        return False, f"{got.item():.6g} instead of {want.item():.6g}"
    worst = int((got - want).abs().nan_to_num(float("inf")).argmax())
    at = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), want.shape))
    return False, f"at {at} it is {got.flatten()[worst]:.6g} instead of {want.flatten()[worst]:.6g}"


def _match(
    ok: bool, got: Any, want: Any, wrong: Mapping[str, Any] | None, same: Callable[[Any], bool], right: str
) -> tuple[bool, str]:
    if ok:
        return True, right
    for reason, value in (wrong or {}).items():
        if same(value):
            return False, reason
    return False, f"{_short(got)} is not it"


def _asked(answer: Any) -> Any:
    if answer is None or answer is ...:
        raise NoAnswer
    if not callable(answer) or isinstance(answer, Tensor):
        return answer

    def ask(*arguments: Any, **named: Any) -> Any:
        copy = lambda x: x.clone() if isinstance(x, Tensor) else x
        try:
            result = answer(*(copy(x) for x in arguments), **{name: copy(x) for name, x in named.items()})
        except Exception as error:
            raise AnswerRaised(f"it raised {type(error).__name__}: {_short(error)}") from error
        parts = result if isinstance(result, tuple) else (result,)
        if any(part is None or part is ... for part in parts):
            raise NoAnswer
        return result

    return ask


def _whole(x: Any) -> bool:
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def _short(thing: Any) -> str:
    text = re.sub(r"\s+", " ", str(thing))
    return text if len(text) <= 120 else text[:117] + "..."
