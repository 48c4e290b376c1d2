"""Share the keys of all units out over the GPU, on the device: one launch a step, whatever the lengths are.

Motivation. A captured graph is replayed for other lengths, so who works on which keys may not be decided on the host.
A unit is some tiles of rows that share their keys, a part one place on the GPU. There are two ways to share, and the
one whose fullest part has less to do is taken, in blocks of 64 keys with COST for starting a unit:

    even    n > parts: each part takes k = ceil(n / parts) whole units; else a unit is cut into j = parts // n pieces
    line    units lie on a line, part p takes the stretch [p pay, (p + 1) pay), pay = ceil(sum of all / parts)

Even is best where lengths are alike, the line where they are not; a cut counts SPLIT, a second piece PIECE. Units are
cut at even blocks, since the kernels take blocks in pairs. A part has at most two pieces of units that others work on
too: its first, which began elsewhere, and its last, which ends elsewhere; their states lie in slots
2 p and 2 p + 1.

Axes: T tokens, N heads, B requests, U units, n units with keys, p parts.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mla.aot import Compile
from tiers.tier2_triton.kernels.problem import Problem

FIELDS = tl.constexpr(16)  # of an entry, see `device`
COST = 5  # blocks' worth of time that starting a unit takes
SPLIT = 6  # blocks' worth of time that the first cut costs, since it makes a merge necessary
PIECE = 3  # the same for a second piece of a cut unit, which a part has on the line only
FAR = 1 << 29
SEARCH = tl.constexpr(16)  # units that are looked through at once


@triton.jit
def cut(x, blocks):
    """The block at which a unit is cut, `x` blocks after its first: an even one, or its end."""
    return tl.where(x >= blocks, blocks, tl.maximum(x, 0) // 2 * 2)


@triton.jit
def page_of(table, stride, request, block, PAGE: tl.constexpr, there):
    """The page that a block of 64 keys of a request lies in; 0 where it lies in several, which are looked up later."""
    if PAGE < 64:
        return block * 0
    return tl.load(table + request.to(tl.int64) * stride + block // (PAGE // 64), mask=there, other=0)


@triton.jit
def entries(
    units, bounds, table, stride, work, merges, U, tokens, N, PAGE: tl.constexpr, COST: tl.constexpr,
    FAR: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """List the units with keys; return the length of their line, how many there are, and the most blocks of one."""
    total = 0
    n = 0
    longest = 0
    for c in range(0, U, CHUNK):
        u = c + tl.arange(0, CHUNK)
        rows = tl.load(units + 4 * u + 2, mask=u < U, other=0)
        there = rows > 0  # a unit without rows fills the list of a captured graph up
        request = tl.load(units + 4 * u, mask=there, other=0)
        row = tl.load(units + 4 * u + 1, mask=there, other=0)
        first = row // N
        last = (row + rows - 1) // N
        most = tl.zeros([CHUNK], tl.int32)
        least = tl.full([CHUNK], FAR, tl.int32)
        for t in range(tokens):
            mine = there & (first + t <= last)
            seen = tl.load(bounds + first + t, mask=mine, other=0)
            most = tl.maximum(most, seen)
            least = tl.minimum(least, tl.where(mine, seen, FAR))
        blocks = (most + 63) // 64
        busy = blocks > 0
        cost = tl.where(busy, blocks + COST, 0)
        start = total + tl.cumsum(cost, 0) - cost
        i = n + tl.cumsum(busy.to(tl.int32), 0) - 1
        at = work + FIELDS * i
        tl.store(at, request, mask=busy)
        tl.store(at + 1, row, mask=busy)
        tl.store(at + 2, rows, mask=busy)
        tl.store(at + 3, blocks, mask=busy)
        tl.store(at + 4, start + COST, mask=busy)
        tl.store(at + 5, most, mask=busy)
        tl.store(at + 6, least, mask=busy)
        tl.store(at + 7, page_of(table, stride, request, 0 * i, PAGE, busy), mask=busy)
        tl.store(at + 8, page_of(table, stride, request, tl.minimum(1, blocks - 1), PAGE, busy), mask=busy)
        tl.store(merges + 4 * u, i, mask=u < U)
        tl.store(merges + 4 * u + 1, blocks, mask=u < U)
        tl.store(merges + 4 * u + 2, start + COST, mask=u < U)
        total += tl.sum(cost, 0)
        n += tl.sum(busy.to(tl.int32), 0)
        longest = tl.maximum(longest, tl.max(blocks, 0))
    return total, n, longest


@triton.jit
def merges_of(units, merges, U, even, whole, pieces, pay, CHUNK: tl.constexpr):
    """List the units that `combine` has something to do for, over what `entries` left there."""
    listed = 0
    for c in range(0, U, CHUNK):
        u = c + tl.arange(0, CHUNK)
        there = u < U
        row = tl.load(units + 4 * u + 1, mask=there, other=0)
        rows = tl.load(units + 4 * u + 2, mask=there, other=0)
        i = tl.load(merges + 4 * u, mask=there, other=0)
        blocks = tl.load(merges + 4 * u + 1, mask=there, other=0)
        start = tl.load(merges + 4 * u + 2, mask=there, other=0)
        step = 2 * ((blocks + 2 * pieces - 1) // (2 * pieces))
        own = tl.where(whole > 1, i // tl.maximum(whole, 1), i * pieces)
        first = tl.where(even, own, (start + tl.minimum(blocks, 2) + pay - 1) // pay - 1)
        last = tl.where(even, first + (blocks - 1) // tl.maximum(step, 1), (start + blocks + pay - 1) // pay - 1)
        first = tl.where(blocks > 0, first, 0)
        last = tl.where(blocks > 0, last, -1)
        merged = (rows > 0) & (last != first)
        at = merges + 4 * (listed + tl.cumsum(merged.to(tl.int32), 0) - 1)
        tl.debug_barrier()  # the list grows over entries that have been read
        tl.store(at, row, mask=merged)
        tl.store(at + 1, rows, mask=merged)
        tl.store(at + 2, first, mask=merged)
        tl.store(at + 3, last, mask=merged)
        listed += tl.sum(merged.to(tl.int32), 0)
    for c in range(0, U, CHUNK):
        u = c + tl.arange(0, CHUNK)
        for k in tl.static_range(4):
            tl.store(merges + 4 * u + k, 0, mask=(u < U) & (u >= listed))


@triton.jit
def line_search(work, n, low, pay, PARTS: tl.constexpr):
    """Count for each part the units that end before it begins, and those that begin before it ends."""
    done = tl.zeros([PARTS], tl.int32)
    begun = tl.zeros([PARTS], tl.int32)
    for c in range(0, n, SEARCH):
        w = c + tl.arange(0, SEARCH)
        there = (w < n)[None, :]
        blocks = tl.load(work + FIELDS * w + 3, mask=w < n, other=0)
        start = tl.load(work + FIELDS * w + 4, mask=w < n, other=0)
        x = low[:, None] - start[None, :]
        done += tl.sum(((x >= blocks[None, :]) & there).to(tl.int32), 1)
        begun += tl.sum(((x + pay >= tl.minimum(blocks, 2)[None, :]) & there).to(tl.int32), 1)
    return done, begun


@triton.jit(do_not_specialize=["U", "parts", "stride", "tokens", "N"])
def _schedule_kernel(
    units, bounds, table, stride, work, merges, part, U, parts, tokens, N,
    PARTS: tl.constexpr, PAGE: tl.constexpr, COST: tl.constexpr, SPLIT: tl.constexpr, PIECE: tl.constexpr,
    FAR: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    total, n, longest = entries(units, bounds, table, stride, work, merges, U, tokens, N, PAGE, COST, FAR, CHUNK)
    k = tl.arange(0, FIELDS)
    tl.store(work + FIELDS * n + k, k * 0)  # whoever looks one unit ahead finds one that does nothing
    pay = tl.maximum((total + parts - 1) // parts, 2 + COST)
    whole = (n + parts - 1) // parts  # k, units of a part
    pieces = tl.maximum(1, parts // tl.maximum(n, 1))  # j, parts of a unit
    of_even = tl.where(whole > 1, whole * (longest + COST), (longest + pieces - 1) // pieces + COST)
    even = of_even <= pay + COST + tl.where(pieces == 1, SPLIT, PIECE)
    tl.debug_barrier()
    merges_of(units, merges, U, even, whole, pieces, pay, CHUNK)
    p = tl.arange(0, PARTS)
    mine = p < parts
    low = p * pay
    if even:
        done = tl.where(whole > 1, p * whole, p // pieces)
        begun = tl.minimum(done + tl.maximum(whole, 1), n)
    else:
        done, begun = line_search(work, n, low, pay, PARTS)
    busy = mine & (done < begun)
    entry = work + FIELDS * done
    request = tl.load(entry, mask=busy, other=0)
    blocks = tl.load(entry + 3, mask=busy, other=0)
    start = tl.load(entry + 4, mask=busy, other=0)
    step = 2 * ((blocks + 2 * pieces - 1) // (2 * pieces))
    a = tl.where(even, tl.where(whole > 1, 0, p % pieces * step), cut(low - start, blocks))
    b = tl.where(even, tl.where(whole > 1, blocks, tl.minimum(a + step, blocks)), cut(low + pay - start, blocks))
    busy = busy & (a < b)
    at = part + FIELDS * p
    tl.store(at, request, mask=mine)
    tl.store(at + 1, tl.load(entry + 1, mask=busy, other=0), mask=mine)
    tl.store(at + 2, tl.load(entry + 2, mask=busy, other=0), mask=mine)
    tl.store(at + 3, blocks, mask=mine)
    tl.store(at + 4, start, mask=mine)
    tl.store(at + 5, tl.load(entry + 5, mask=busy, other=0), mask=mine)
    tl.store(at + 6, tl.load(entry + 6, mask=busy, other=0), mask=mine)
    tl.store(at + 7, page_of(table, stride, request, a, PAGE, busy), mask=mine)
    tl.store(at + 8, page_of(table, stride, request, tl.minimum(a + 1, b - 1), PAGE, busy), mask=mine)
    tl.store(at + 9, tl.where(busy, done, n), mask=mine)
    tl.store(at + 10, tl.where(busy, begun - done, 0), mask=mine)
    tl.store(at + 11, a, mask=mine)
    tl.store(at + 12, b, mask=mine)
    tl.store(at + 13, tl.where(even, FAR, low + pay), mask=mine)


def schedule(
    units: Tensor,
    bounds: Tensor,
    table: Tensor,
    work: Tensor,
    merges: Tensor,
    part: Tensor,
    N: int,
    page_size: int,
    most_rows: int,
) -> None:
    """Fill work (U + 1, 16), merges (U, 4) and part (p, 16) for units (U, 4) = request, first row, rows, unused; int32.

    Row r is head r % N of token r // N, `bounds` (T,) int32 are the keys that each token sees, `table` (B, max_pages)
    int32 the pages of a request. An entry of work is a unit with keys, in order: request, first row, rows, blocks,
    where on the line its first block lies, most and least keys that a row sees, pages of its first and second block.
    A part has these of its first unit, the pages from its own first block on, then: which entry that is, how many it
    takes, its first block, the one after its last, and where its stretch ends. merges is the list that `combine` goes
    through: first row, rows, first and last part of each unit that is cut or has rows and no keys (then the last is
    before the first); rows are 0 past its end. A unit has at most `most_rows` rows; one without rows does nothing, one
    without keys is no entry. Pages of less than 64 rows are not looked up: 0.
    """
    U, parts, tokens = units.shape[0], part.shape[0], (most_rows - 1) // N + 2
    _schedule_kernel[(1,)](
        units, bounds, table, table.stride(0), work, merges, part, U, parts, tokens, N,
        256, page_size, COST, SPLIT, PIECE, FAR, 256, num_warps=4,
    )  # fmt: skip


def schedule_reference(
    units: Tensor,
    bounds: Tensor,
    table: Tensor,
    work: Tensor,
    merges: Tensor,
    part: Tensor,
    N: int,
    page_size: int,
    most_rows: int,
) -> None:
    """What `schedule` writes, unit after unit and part after part: work (U + 1, 16), merges (U, 4) and part (p, 16)."""
    page_of = lambda request, block: int(table[request, block * 64 // page_size]) if page_size >= 64 else 0
    entries: list[tuple[int, ...]] = []
    found_units: list[tuple[int, int, int]] = []  # first row, rows, entry or -1
    at, parts = 0, part.shape[0]
    for request, row, rows, _ in units.tolist():
        seen = [int(x) for x in bounds[row // N : (row + rows - 1) // N + 1]] if rows else [0]
        blocks = -(-max(seen) // 64)
        found_units.append((row, rows, len(entries) if blocks else -1))
        if blocks:
            pages = (page_of(request, 0), page_of(request, min(1, blocks - 1)))
            entries.append((request, row, rows, blocks, at + COST, max(seen), min(seen), *pages))
            at += COST + blocks
    n = len(entries)
    pay, whole, pieces = max(-(-at // parts), 2 + COST), -(-n // parts), max(1, parts // max(n, 1))
    longest = max((e[3] for e in entries), default=0)
    even = (whole * (longest + COST) if whole > 1 else -(-longest // pieces) + COST) <= pay + COST + (
        SPLIT if pieces == 1 else PIECE
    )
    held: dict[int, list[int]] = {}
    for i, entry in enumerate(entries):
        work[i, :9] = torch.tensor(entry)
    work[n] = 0
    for p in range(parts):
        found = [(i, *_piece(e, i, p, even, whole, pieces, pay)) for i, e in enumerate(entries)]
        found = [(i, a, b) for i, a, b in found if a < b]
        for i, _, _ in found:
            held.setdefault(i, []).append(p)
        part[p, 9:11] = torch.tensor([found[0][0] if found else n, len(found)])
        if found:
            i, a, b = found[0]
            pages = (page_of(entries[i][0], a), page_of(entries[i][0], min(a + 1, b - 1)))
            part[p] = torch.tensor([*entries[i][:7], *pages, i, len(found), a, b, FAR if even else (p + 1) * pay, 0, 0])
    spans = {-1: (0, -1)} | {i: (mine[0], mine[-1]) for i, mine in held.items()}
    listed = [(row, rows, *spans[i]) for row, rows, i in found_units if rows and spans[i][0] != spans[i][1]]
    merges.zero_()
    merges[: len(listed)] = torch.tensor(listed, dtype=torch.int32).view(-1, 4)


def _piece(entry: tuple, i: int, p: int, even: bool, whole: int, pieces: int, pay: int) -> tuple[int, int]:
    """First block and the one after the last of what part p does of entry i."""
    blocks, start = entry[3], entry[4]
    if even and whole > 1:
        return (0, blocks) if i // whole == p else (0, 0)
    if even:
        step, k = 2 * -(-blocks // (2 * pieces)), p - i * pieces
        return (min(k * step, blocks), min((k + 1) * step, blocks)) if 0 <= k < pieces else (0, 0)
    at = lambda x: blocks if x >= blocks else max(x, 0) // 2 * 2
    return at(p * pay - start), at((p + 1) * pay - start)


def problem(size: str, dtype: torch.dtype, device: str, seed: int = 0) -> Problem:
    """Ragged requests, one without keys, for 9 parts ("toy"), or 128 requests of 128 heads over 8192 keys ("real")."""
    toy = size == "toy"
    random = torch.Generator().manual_seed(seed)
    N, M, parts, page = (24, 64, 9, 192) if toy else (128, 128, 66, 64)
    lens = [70, 0, 3000, 64, 1, 777, 500] if toy else [8192] * 128
    query_lens = [3, 2, 1, 5, 1, 4, 2] if toy else [1] * 128
    units, bounds, row = [], [], 0
    for b, (q, S) in enumerate(zip(query_lens, lens, strict=True)):
        bounds += [max(0, S - q + 1 + i) for i in range(q)] if S else [0] * q
        units += [(b, row + m, min(M, q * N - m), 0) for m in range(0, q * N, M)]
        row += q * N
    units += [(0, 0, 0, 0)] * (3 if toy else 0)
    U, width = len(units), -(-max(lens) // page) + 1
    ints = lambda x: torch.tensor(x, dtype=torch.int32, device=device)
    empty = lambda *shape: torch.zeros(*shape, dtype=torch.int32, device=device)
    arguments: dict[str, Any] = {
        "units": ints(units),
        "bounds": ints(bounds),
        "table": torch.randint(0, 10**6, (len(lens), width), generator=random).to(device, torch.int32),
        "work": empty(U + 1, 16),
        "merges": empty(U, 4),
        "part": empty(parts, 16),
        "N": N,
        "page_size": page,
        "most_rows": M,
    }
    return Problem(arguments, ("work", "merges", "part"), U * 64 + parts * 64)


def aot() -> list[Compile]:
    """One variant for a page size: lengths, parts, heads are no constants, the page size is."""
    lists = dict.fromkeys(("units", "bounds", "table", "work", "merges", "part"), "*i32")
    numbers = dict.fromkeys(("stride", "U", "parts", "tokens", "N"), "i32")
    constants = {"PARTS": 256, "PAGE": 64, "COST": COST, "SPLIT": SPLIT, "PIECE": PIECE, "FAR": FAR}
    constants |= {"CHUNK": 256}
    return [Compile(_schedule_kernel, lists | numbers, constants, 4, targets=("sm_90",), name="schedule")]
