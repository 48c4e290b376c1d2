"""The AITER tier over a simulator of AITER's contract, on a CPU: `mla check tests/simulated_aiter.py`.

It shows that the tier's metadata, padding and conversions keep the documented contract. Nothing of AMD runs here.
Toy rows are simulated at their own width, which the hardware has no kernels for; the installed AITER refuses them.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

if str(Path(__file__).parent) not in sys.path:  # as a tier file it is loaded from anywhere
    sys.path.insert(0, str(Path(__file__).parent))

from aiter_simulator import fake_aiter

from mla.need import Need
from tiers.tier2_aiter.route import WINDOW, L, R
from tiers.tier2_aiter.tier import AiterTier


@lru_cache
def simulated(arch: str, cu_num: int, window: int, ck: bool, L: int, R: int) -> ModuleType:
    """One simulated build, kept: what it planned is known to it by address."""
    return fake_aiter(arch, cu_num, window=window, ck=ck, rank=L, rope=R)


@dataclass(frozen=True)
class SimulatedAiter:
    """An `arch` with `cu_num` compute units; `ck` False is a build whose flash attention is Triton's.

    Its decode reaches `window` bytes. `toy` False refuses rows of other widths, as the hardware does.
    """

    name: str = "gfx942"
    cu_num: int = 20
    ck: bool = True
    window: int = WINDOW
    toy: bool = True
    label: str = "aiter (simulated)"
    version: str = "e4048607, simulated"

    def why_not(self, need: Need) -> list[str]:
        """Return a sentence for other devices than the CPU."""
        if need.device == "cpu":
            return []
        return [f"device {need.device!r} is not served by {self.label}, which computes on the CPU; use device 'cpu'."]

    def arch(self, need: Need) -> str:
        """Return the simulated architecture."""
        return self.name

    def cu_count(self, need: Need) -> int:
        """Return the simulated compute units."""
        return self.cu_num

    def widths(self, need: Need) -> tuple[int, int]:
        """Return L and R: those of the need for toy rows."""
        return (need.L, need.R) if self.toy and need.R else (L, R)

    def module(self, need: Need) -> ModuleType:
        """Return the simulated build for the need's widths."""
        return simulated(self.name, self.cu_num, self.window, self.ck, *self.widths(need))

    def find(self, name: str, need: Need) -> Callable[..., Any] | None:
        """Return the simulator's function of that dotted name, None where it has none."""
        found: Any = self.module(need)
        for part in name.split("."):
            found = getattr(found, part, None)
        return found


tier = AiterTier(library=SimulatedAiter())
