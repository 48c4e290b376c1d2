"""Pad query heads to a number that AITER has kernels for, and take the real ones back.

Heads are independent of each other over one shared key, so what a padding head computes changes nothing. Padding heads
hold copies of real ones, never zeros or garbage, so no kernel meets a number that a real head could not have.

Axes: t rows of a call, N heads, M padded heads, D width.
"""

from dataclasses import dataclass

from torch import Tensor

from mla.errors import bad

HEAD_GROUP = 16  # heads of one tile of the assembly kernels
MOST_HEADS = 128


@dataclass(frozen=True)
class HeadPadding:
    """N real heads inside M padded ones: N of 1, 2, 4, 8 stand M / N apart, others are the first N of M."""

    heads: int
    padded: int

    def __post_init__(self) -> None:
        if not 1 <= self.heads <= self.padded:
            expected, fix = f"1 .. {self.padded} heads", "pad to a larger number"
            raise bad("heads", expected=expected, got=str(self.heads), fix=fix)

    @property
    def step(self) -> int:
        """Distance between two real heads: M / N where N divides a group of 16 and M, else 1."""
        small = self.heads < HEAD_GROUP and HEAD_GROUP % self.heads == 0 and self.padded % self.heads == 0
        return self.padded // self.heads if small else 1

    def fill(self, padded: Tensor) -> None:
        """Copy the real heads of `padded` (t, M, D), written where `real` shows them, over the padding heads."""
        if self.step > 1:
            groups = padded.unflatten(1, (self.heads, self.step))
            groups[:, :, 1:] = groups[:, :, :1]
            return
        for start in range(self.heads, self.padded, self.heads):
            padded[:, start : start + self.heads] = padded[:, : min(self.heads, self.padded - start)]

    def real(self, padded: Tensor) -> Tensor:
        """Return the real heads of `padded` (t, M, ...) as a view (t, N, ...)."""
        return padded[:, :: self.step] if self.step > 1 else padded[:, : self.heads]
