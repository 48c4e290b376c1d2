"""What a kernel's story needs beside the kernel: arguments for its wrapper, its reference and its benchmark."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One call: keyword `arguments` of wrapper and reference, and the bytes and operations that it cannot avoid.

    `outputs` names the arguments that the call writes. `nbytes` counts each input read once and each output written
    once; `flops` counts a multiplication and an addition as two.
    """

    arguments: dict[str, Any]
    outputs: tuple[str, ...]
    nbytes: int
    flops: int = 0
