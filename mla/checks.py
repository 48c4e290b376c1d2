"""Checks of what comes from outside, made on the host before anything is built, written or uploaded.

Axes: T new tokens (packed over requests), B requests, S cached tokens. A slot is page * page_size + position in page.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mla.errors import bad

INT32_MAX = 2**31 - 1


def check_int(name: str, value: Any, low: int, fix: str) -> int:
    """Return `value` as an int; raises TypeError for another type (bool is one), ValueError below `low`."""
    expected, got = f"an int >= {low}", repr(value)
    if isinstance(value, bool | np.bool_ | Tensor):
        raise bad(name, expected=expected, got=got, fix=fix, kind=TypeError)
    try:
        number = operator.index(value)
    except TypeError:
        raise bad(name, expected=expected, got=got, fix=fix, kind=TypeError) from None
    if number < low:
        raise bad(name, expected=expected, got=got, fix=fix)
    return number


def check_device(device: Any) -> None:
    """Raise ValueError or TypeError unless torch can put a tensor on `device`."""
    kind = ValueError if isinstance(device, str | int | torch.device) else TypeError
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        raise bad("device", expected="a device of this machine", got=repr(device), fix="'cpu'", kind=kind) from error


def check_type(name: str, got: object, expected: type, fix: str) -> None:
    """Raise TypeError, naming `name`, unless `got` is an `expected`."""
    if not isinstance(got, expected):
        kind = f"a {expected.__name__}"
        raise bad(name, expected=kind, got=repr(got)[:80], fix=fix, kind=TypeError)


def check_equal(name: str, got: object, expected: object, fix: str, kind: type[Exception] = ValueError) -> None:
    """Raise `kind`, naming `name`, unless `got` equals `expected`."""
    if got != expected:
        raise bad(name, expected=str(expected), got=str(got), fix=fix, kind=kind)


def check_aligned(data: Tensor) -> None:
    """Raise ValueError where rows of a cache's data (pages, page_size, width) do not begin at multiples of 16 bytes."""
    apart = [s for s, n in zip(data.stride()[:2], data.shape[:2], strict=True) if n > 1]
    if data.data_ptr() % 16 or any(s * data.element_size() % 16 for s in apart):
        expected, got = "rows aligned to 16 bytes", f"strides {data.stride()} of {data.dtype}"
        raise bad("cache.data", expected=expected, got=got, fix="pad rows to a multiple of 8 numbers, or use triton")


def integer_tensor(name: str, x: Tensor | np.ndarray, axes: str) -> Tensor:
    """Return `x`, integers of shape `axes` such as (B, max_pages), as int64 on the host.

    Raises TypeError for floats and booleans, ValueError for another number of axes.
    """
    try:
        x = torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError) as error:
        expected, got = f"integers of shape {axes}", str(error).splitlines()[0]
        raise bad(name, expected=expected, got=got, fix="pass ints", kind=TypeError) from error
    if x.dtype == torch.bool or x.is_floating_point() or x.is_complex():
        raise bad(
            name, expected=f"integers of shape {axes}", got=str(x.dtype), fix=f"pass {name}.int()", kind=TypeError
        )
    if x.dim() != axes.count(",") + (not axes.endswith(",)")):
        fix = f"pass {name}.flatten()" if axes.endswith(",)") else "one row for each request"
        raise bad(name, expected=f"integers of shape {axes}", got=f"shape {tuple(x.shape)}", fix=fix)
    return x.detach().cpu().to(torch.int64)


def lengths(name: str, values: Sequence[int] | np.ndarray | Tensor, axes: str = "(B,)") -> list[int]:
    """Return counts of tokens, given as a sequence or an integer tensor (B,), as ints in 0 .. 2^31 - 1.

    Raises TypeError for floats, booleans and other types, ValueError for another shape or a count out of range, with
    the index of the first wrong entry.
    """
    if isinstance(values, Tensor | np.ndarray):
        values = integer_tensor(name, values, axes).tolist()
    out = _listed(name, values, f"ints of shape {axes}")
    if set(map(type, out)) <= {int} and min(out, default=0) >= 0 and max(out, default=0) <= INT32_MAX:
        return out
    out = [check_int(f"{name}[{i}]", v, 0, "lengths are counts of tokens") for i, v in enumerate(out)]
    if out and max(out) > INT32_MAX:
        i = out.index(max(out))
        raise bad(f"{name}[{i}]", expected=f"at most {INT32_MAX}", got=str(out[i]), fix="lengths are stored as int32")
    return out


def _listed(name: str, values: Any, expected: str = "a row of page ids for each request") -> list[Any]:
    # A text is a sequence too, and a mapping would give its keys.
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise bad(name, expected=expected, got=repr(values)[:80], fix="pass a list or a tensor", kind=TypeError)
    return list(values)


def page_table(
    table: Sequence[Sequence[int]] | np.ndarray | Tensor, seq_lens: list[int], page_size: int, num_pages: int
) -> Tensor:
    """Return the block table as int32 (B, max_pages); what stands past a request's last page is kept, but never judged.

    Raises ValueError or TypeError where a request has fewer pages than keys, or a page id is not in 0 .. num_pages - 1.
    """
    if not isinstance(table, Tensor | np.ndarray):
        rows = [
            _listed(f"block_table[{i}]", r, "a row of page ids") for i, r in enumerate(_listed("block_table", table))
        ]
        width = max(map(len, rows), default=0)
        padded = [row + [-1] * (width - len(row)) for row in rows]
        try:
            # without a dtype: with one, torch would cut 1.5 to 1
            table = torch.tensor(padded) if width else torch.zeros(len(rows), 0, dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError) as error:
            expected = "rows of ints that fit in 64 bits"
            raise bad("block_table", expected=expected, got=str(error), fix="list page ids", kind=TypeError) from error
    host = integer_tensor("block_table", table, "(B, max_pages)")
    if host.shape[0] != len(seq_lens):
        got = str(host.shape[0])
        raise bad("block_table", expected=f"{len(seq_lens)} rows, one per request", got=got, fix="add or drop rows")
    for i, s in enumerate(seq_lens):
        pages = -(-s // page_size)
        own = host[i, :pages]
        if own.shape[0] < pages:
            got = f"{host.shape[1]} for {s} keys of page_size {page_size}"
            fix = "allocate more pages to the request"
            raise bad(f"block_table[{i}]", expected=f"at least {pages} pages", got=got, fix=fix)
        if pages and (int(own.min()) < 0 or int(own.max()) >= num_pages):
            wrong = int(own[(own < 0) | (own >= num_pages)][0])
            expected = f"page ids 0 .. {num_pages - 1}"
            raise bad(f"block_table[{i}]", expected=expected, got=str(wrong), fix="use pages of this pool")
    return host.clamp(-INT32_MAX - 1, INT32_MAX).to(torch.int32).contiguous()  # kernels read it row by row


def own_slots(owners: list[int], positions: list[int], complete: list[bool], table: Tensor, page_size: int) -> Tensor:
    """Return the slots (T,) int64 of new tokens at their own positions; -1 where not `complete[owner]`.

    `owners` and `positions` have T entries; `complete` (B,) says whose keys include all its new tokens; `table` is
    (B, max_pages) int32, already checked.
    """
    owner, at = torch.tensor(owners, dtype=torch.int64), torch.tensor(positions, dtype=torch.int64)
    held = torch.tensor(complete, dtype=torch.bool)[owner]
    result = torch.full_like(at, -1)
    result[held] = table[owner[held], at[held] // page_size].to(torch.int64) * page_size + at[held] % page_size
    return result


def given_slots(slots: Sequence[int] | np.ndarray | Tensor, rows: int, capacity: int) -> Tensor:
    """Return the caller's slots (T,) as int64; raises ValueError or TypeError unless each is -1 .. capacity - 1."""
    if not isinstance(slots, Tensor | np.ndarray):
        given = _listed("slots", slots, "ints of shape (T,)")
        ints = [check_int(f"slots[{i}]", s, -1, "-1: not written") for i, s in enumerate(given)]
        slots = torch.tensor([min(s, 2**63 - 1) for s in ints], dtype=torch.int64)  # too large is judged below
    host = integer_tensor("slots", slots, "(T,)")
    if host.shape[0] != rows:
        got = str(tuple(host.shape))
        raise bad("slots", expected=f"({rows},), one per new token", got=got, fix="use -1 for rows not written")
    outside = (host < -1) | (host >= capacity)
    if bool(outside.any()):
        wrong = int(host[outside][0])
        raise bad("slots", expected=f"-1 .. {capacity - 1}", got=str(wrong), fix="write inside the pool")
    return host


def check_written_once(slot_mapping: Tensor) -> None:
    """Raise ValueError where two rows of slot_mapping (T,) would be written to one slot."""
    used = slot_mapping[slot_mapping >= 0]
    found, counts = used.unique(return_counts=True)
    if found.numel() != used.numel():
        slot = int(found[counts > 1][0])
        expected, got = "each slot at most once", f"slot {slot} more than once"
        raise bad("slots", expected=expected, got=got, fix="copy a shared page before writing, or pass -1")
