"""What a planted fault is: a name, a kind, and a tier that is wrong in that one way.

Axes: T new tokens (packed over requests), N heads, L KV rank, R rope.
"""

import linecache
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from mla.adapters import LatentKernel, from_latent
from mla.conformance.zoo import kernel as correct
from mla.errors import bad
from mla.tier import Tier

KINDS = (
    "scale", "rope", "mask", "tail", "page", "split", "merge", "lse", "empty", "head", "value", "batch", "write",
    "precision", "form", "memory", "offset",
)  # fmt: skip
SUITES = ("smoke", "full", "large")
KERNEL_TEXT = Path(correct.__file__).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Fault:
    """A planted fault: what is wrong, of which of `KINDS`, and the id of the report that it comes from.

    `suite` is the smallest suite that can show it. A fault of kernel arithmetic is an `edit` (old, new) of the text of
    the correct kernel; any other one is `wrap`, a function from a correct tier to a broken one. Raises ValueError for a
    kind or suite that does not exist, or unless exactly one of the two is given.
    """

    name: str
    kind: str
    about: str
    source: str = ""
    suite: str = "smoke"
    edit: tuple[str, str] | None = None
    wrap: Callable[[Tier], Tier] | None = None

    def __post_init__(self) -> None:
        for field, value, known in (("kind", self.kind, KINDS), ("suite", self.suite, SUITES)):
            if value not in known:
                raise bad(field, expected=f"one of {', '.join(known)}", got=repr(value), fix="see Fault")
        if (self.edit is None) == (self.wrap is None):
            raise bad(self.name, expected="an edit or a wrapper", got="both or none", fix="give one of them")

    @property
    def level(self) -> str:
        """ "latent" where the fault exists as an inner kernel too, else "attend"."""
        return "attend" if self.edit is None else "latent"

    def kernel(self) -> LatentKernel:
        """Return the broken kernel: q_latent (T, N, L), q_pe (T, N, R), ... -> out (T, N, L), lse (T, N).

        Compiled anew each time, so that nothing it keeps survives. Raises ValueError for a fault without a kernel, or
        where the edit's old text is not in the correct kernel exactly once.
        """
        if self.edit is None:
            raise bad(self.name, expected="a fault of the kernel", got="a wrapper", fix="use tier()")
        return compiled(self.name, edited(self.name, *self.edit)).attend

    def tier(self, base: Tier | None = None) -> Tier:
        """Return a new broken tier; a wrapper takes `base`, a correct tier (default: the correct kernel)."""
        if self.wrap is not None:
            return self.wrap(base or from_latent("kernel", correct.attend))
        return from_latent(self.name, self.kernel())


def edited(name: str, old: str, new: str) -> str:
    """Return the kernel's text with one edit; raises ValueError where `old` is not there exactly once."""
    count = KERNEL_TEXT.count(old)
    if count != 1:
        raise bad(name, expected=f"{old!r} exactly once in zoo/kernel.py", got=f"{count} times", fix="mend the edit")
    return KERNEL_TEXT.replace(old, new)


def compiled(name: str, text: str) -> ModuleType:
    """Return a new module of a kernel's text; tracebacks show the edited lines."""
    path = f"<fault {name}>"
    module = ModuleType(f"mla.conformance.zoo.{name}")
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    exec(compile(text, path, "exec"), vars(module))
    return module
