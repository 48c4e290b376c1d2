"""A tier from a raw kernel in one of the field's usual signatures: three lines in a file, then `mla check` on it.

```python
from mla.conformance.raw import dense
from somewhere import kernel  # kernel(q, kv_cache, block_table, seq_lens, softmax_scale) -> out, lse

tier = dense(kernel, page_sizes=(64,))
```

dense   q (B, s, N, L+R) or q_nope (B, s, N, L) and q_pe (B, s, N, R): one call for each number s of new tokens
ragged  q (T, N, L+R) or q_nope (T, N, L) and q_pe (T, N, R) with qo_indptr (B+1,): one call

Both take the query absorbed and return the latent output and the LSE. Parameters are known by name, see
`mla.conformance.raw.arguments.NAMES`. Where kernels differ, the kernel is asked (`probe`), and `notes` says what is
converted.
Axes: T new tokens (packed over requests), B requests, s new tokens of each of them, N heads, L KV rank, R rope.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from mla.cache import FloatRows
from mla.conformance.raw.arguments import STYLES, match, name_of
from mla.conformance.raw.convention import Convention
from mla.conformance.raw.tier import Declared, RawTier
from mla.errors import bad
from mla.need import Need

__all__ = ["Convention", "Declared", "RawTier", "dense", "probe", "ragged"]


def _tier(kernel: Callable, style: str, name: str, declared: dict[str, Any]) -> RawTier:
    if not callable(kernel):
        raise bad("kernel", expected="a function", got=repr(kernel), fix="dense(kernel)", kind=TypeError)
    known = [f.name for f in dataclasses.fields(Declared)]
    unknown = [word for word in declared if word not in known]
    if unknown:
        expected, fix = f"some of {', '.join(known)}", "see mla.conformance.raw.Declared"
        raise bad("declared", expected=expected, got=", ".join(unknown), fix=fix, kind=TypeError)
    return RawTier(name or name_of(kernel), kernel, style, match(kernel, style), Declared(**declared))


def dense(kernel: Callable, name: str = "", **declared: Any) -> RawTier:
    """Make a tier of a kernel whose query is q (B, s, N, L+R), absorbed: out (B, s, N, L) and an LSE or None.

    `declared` are fields of `Declared`. Requests of different numbers of new tokens go in by one call for each number.
    Raises TypeError for a parameter that is not known and has no default, ValueError for an unknown convention.
    """
    return _tier(kernel, "dense", name, declared)


def ragged(kernel: Callable, name: str = "", **declared: Any) -> RawTier:
    """Make a tier of a kernel whose query is packed, q_nope (T, N, L) and q_pe (T, N, R): out (T, N, L), lse (T, N).

    `declared` and errors are those of `dense`.
    """
    return _tier(kernel, "ragged", name, declared)


def probe(kernel: Callable, need: Need | None = None, style: str = "dense", **declared: Any) -> Convention:
    """Return what a kernel does where kernels differ: LSE base and axes, scale, rows without keys, causal alignment.

    Asked with the sizes of `need`, by default those of DeepSeek-V3 with 16 heads, pages of 64, in float32 on the CPU.
    """
    if style not in STYLES:
        raise bad("style", expected=f"one of {STYLES}", got=repr(style), fix="'dense' for q (B, s, N, L+R)")
    if need is None:
        layout = FloatRows(512, 64, torch.float32)
        need = Need(
            N=16, L=512, P=128, R=64, V=128, softmax_scale=0.1352, layout=layout, page_size=64, dtype=torch.float32
        )  # fmt: skip
    return _tier(kernel, style, "", declared).convention(need)
