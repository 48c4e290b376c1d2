"""Suite `large`: caches and queries so long that a 32-bit offset overflows, at the price of the few rows that are used.

Axes: T new tokens (packed over requests), S cached tokens, B requests, N heads, L KV rank, P nope, R rope, V value.

A kernel that counts elements in int32 is right up to element 2^31: page 58,254 of pages of 64 rows of 576, page 7,767
of 480 rows, slot 3,728,270, query row 29,127 of 128 absorbed heads. Far cases own pages on both sides of that border,
near half of it (where 2-byte rows end int32 counts of bytes) and low ones. Where an overflowed offset comes out
inside the pool lie decoys, finite rows that are wrong. The rest of the pool is touched by nobody and costs nothing on
a CPU; a GPU allocates it, and a case without room there is not run, which is not the same as right.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from mla.cache import CacheSpec, PagedLatentCache, slots_of
from mla.conformance.cases import DIMS, Case
from mla.conformance.guards import Wrong, fill_cache, memory_of
from mla.conformance.inputs import Inputs, make_inputs, poison
from mla.conformance.specs import spec
from mla.tier import Tier

BORDER = 2**31  # elements
ZONES = ("high", "low", "high", "middle")
DECOY = 4.0
ROWS_BATCH = "464q64"  # 29,696 rows, of which the last 568 begin behind element 2^31
SMALL = 1 << 30


@dataclass(frozen=True)
class Care:
    """How a case's memory is handled: make the inputs, fill a tier's cache, copy what must stay, (n, page, width)."""

    inputs: Callable[[Case, str], Inputs]
    fill: Callable[[Tier, Case, Inputs, str], PagedLatentCache]
    seen: Callable[[PagedLatentCache, Inputs], Tensor]


def large() -> list[Case]:
    """Return the cases of the suite: far pages of 64, 480 and 1 rows, and 29,696 query rows of 128 heads."""
    few, some, many = DIMS["v3_n3"], DIMS["v3_n16"], DIMS["v3_n128"]
    decode, mixed = spec("3q1s330"), spec("2q1s300_1q3s700_1q70s70")
    far = [
        Case(decode, some, "bf16", "", "needle_end", "shuffled", 64, cache="far"),
        Case(decode, few, "f16", "", "needle_middle", "shuffled", 64, cache="far"),
        Case(mixed, few, "bf16", "", "needle_first", "shuffled", 64, cache="far"),
        Case(mixed, some, "bf16", "", "randn", "shuffled", 64, cache="far"),
        Case(spec("2q1s500_1q2s1500"), few, "bf16", "", "needle_end", "shuffled", 480, cache="far"),
        Case(spec("2q1s15_1q4s33"), few, "bf16", "", "peaked", "shuffled", 1, cache="far"),
    ]
    return [*far, Case(spec(ROWS_BATCH), many, "bf16", "", "peaked", "shuffled", 64)]


def care_of(case: Case) -> Care:
    """Return how the memory of a case is handled: that of a far pool by the pages in use, any other as a whole."""
    if case.cache == "far":
        return Care(far_inputs, far_fill, far_seen)
    return Care(make_inputs, fill_cache, lambda cache, given: memory_of(cache))


def border_page(case: Case) -> int:
    """Return the page inside which the element 2^31 of the pool lies; the next page begins behind it."""
    return BORDER // (case.page_size * case.cache_layout.storage_width)


def bytes_needed(case: Case, device: str = "cpu") -> dict[str, int]:
    """Return the bytes that a case is sure to take, by device: its pool, or its queries, latents and outputs.

    Far pools come whole on a GPU and by the page in use elsewhere, but room for the whole is asked for in both.
    Queries are made of float64 noise in the host's memory.
    """
    d, rows, itemsize = case.dims, case.batch.num_tokens * case.dims.N, case.torch_dtype.itemsize
    needed = {"cpu": 16 * rows * (d.P + d.R)}
    there = rows * (itemsize * (3 * (d.P + d.R) + d.L + d.R + 2 * d.V) + 4 * d.L)
    if case.cache == "far":
        there += far_pages(case)[1] * case.page_size * case.cache_layout.row_bytes
    needed[device] = needed.get(device, 0) + there
    return needed


def no_room(case: Case, device: str = "cpu") -> str | None:
    """Return a sentence where a device has less free memory than the case is sure to take, else None."""
    for where, needed in bytes_needed(case, device).items():
        free = free_bytes(where) if needed > SMALL else None
        if free is not None and free < needed:
            fix = "free some, or run it on a larger machine"
            return f"{where} has {free:,} bytes free and the case takes {needed:,}; {fix}."
    return None


def free_bytes(device: str) -> int | None:
    """Return the bytes that can be allocated on a device, None where that cannot be known."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None


def far_pages(case: Case) -> tuple[list[list[int]], int]:
    """Return the pages of every request and the size of the pool.

    The pages of a request lie by turns at the border, low, at the border and at half of it. The first two high pages
    are the one that holds element 2^31 and the next. Low ones keep clear of where overflowed offsets come out.
    """
    border = border_page(case)
    wanted = [[ZONES[i % len(ZONES)] for i in range(-(-s // case.page_size))] for s in case.batch.seq_lens]
    total = sum(map(len, wanted))
    high, middle, low = count(border), count(border // 2), count(4 * total + 16)
    zones = {"high": high, "middle": middle, "low": low}
    tables = [[next(zones[zone]) for zone in request] for request in wanted]
    return tables, border + 2 * total + 2


def far_inputs(case: Case, device: str = "cpu") -> Inputs:
    """Return the case's inputs, q.nope (T, N, P) and so on, with its pages moved to the far pool."""
    given = make_inputs(dataclasses.replace(case, cache="plain"), device)
    tables, num_pages = far_pages(case)
    batch, page = given.batch, case.page_size
    table, slots = batch.block_table.clone(), batch.slot_mapping.clone()
    starts = batch.query_start_loc.tolist()
    for b, row in enumerate(tables):
        table[b, : len(row)] = torch.tensor(row, dtype=table.dtype, device=device)
        mine = slice(starts[b], starts[b + 1])
        at = batch.positions[mine].clamp_max(max(case.batch.seq_lens[b] - 1, 0))
        moved = table[b, at // page].long() * page + at % page
        slots[mine] = torch.where(slots[mine] < 0, slots[mine], moved)
    moved_batch = dataclasses.replace(batch, block_table=table, slot_mapping=slots, num_pages=num_pages)
    return dataclasses.replace(given, batch=moved_batch, num_pages=num_pages)


def watched_pages(given: Inputs) -> Tensor:
    """Return the pages (n,) int64 of a far pool that are looked at: the owned ones, their neighbours and the decoys."""
    page, device = given.batch.page_size, given.batch.seq_lens.device
    owned = (given.owned_slots() // page).unique()
    low = torch.arange(_decoys(given), device=device)
    near = torch.cat([owned - 1, owned, owned + 1, low]).unique()
    return near[(near >= 0) & (near < given.num_pages)]


def far_fill(tier: Tier, case: Case, given: Inputs, device: str) -> PagedLatentCache:
    """Return a far pool of the tier's own, its pages poisoned that are looked at, the rows written the tier's way.

    What `guards.fill_cache` does for a pool that can be poisoned whole. Raises Wrong for a pool of another form.
    """
    page, layout = case.page_size, case.cache_layout
    expected = (given.num_pages, page, layout.storage_width), layout.storage_dtype
    with _memory_as_it_comes():
        cache = tier.new_cache(CacheSpec(given.num_pages, page, layout, device))
    if (tuple(cache.data.shape), cache.data.dtype) != expected or cache.layout != layout:
        found = f"new_cache gave {cache.layout} {tuple(cache.data.shape)} of {cache.data.dtype}"
        raise Wrong("wrong_shape", f"{found}, expected {layout} {expected[0]}", "form")
    watched = watched_pages(given)
    cache.data[watched] = _at_first(case, given, watched)
    tables = given.batch.block_table
    for b, (old, (kv_c, k_pe)) in enumerate(zip(given.history, given.keys, strict=True)):
        tier.write(cache, kv_c[old], k_pe[old], slots_of(tables[b], 0, kv_c.shape[0], page)[old])
    tier.write(cache, given.new_kv_c, given.new_k_pe, given.batch.slot_mapping)
    return cache


def far_seen(cache: PagedLatentCache, given: Inputs) -> Tensor:
    """Return a copy (n, page_size, storage_width) of the watched pages."""
    return cache.data[watched_pages(given)]


def far_check(case: Case, given: Inputs, seen: Tensor) -> None:
    """Raise Wrong unless the watched pages (n, page_size, storage_width) are right after the writes.

    Owned slots must hold what the plain layout gives back for the case's own rows, all others what they held at first.
    """
    page, layout, watched = case.page_size, case.cache_layout, watched_pages(given)
    slots = given.owned_slots()
    at = torch.searchsorted(watched, slots // page), slots % page
    packed = [torch.cat(parts) for parts in zip(*given.keys, strict=True)]
    for name, stored, right in zip(("kv_c", "k_pe"), layout.read(seen[at]), layout.round_trip(*packed), strict=True):
        wrong = (stored != right).any(-1)
        if bool(wrong.any()):
            where = _place(int(slots[wrong][0]), page)
            raise Wrong("mismatch", f"{name} read back from {where} is not what was written", "write")
    first = _at_first(case, given, watched)
    first[at] = seen[at]
    changed = (_bits(seen) != _bits(first)).any(-1)
    if bool(changed.any()):
        i, row = changed.nonzero()[0].tolist()
        where = _place(int(watched[i]) * page + row, page)
        raise Wrong("mismatch", f"write changed {where}, which no request owns", "write")


def _decoys(given: Inputs) -> int:
    """The pages from 0 on that hold decoys: as many as lie below every owned page."""
    slots = given.owned_slots()
    return int(slots.min()) // given.batch.page_size if slots.numel() else 0


def _at_first(case: Case, given: Inputs, watched: Tensor) -> Tensor:
    """Return what the watched pages hold at first (n, page_size, storage_width): decoys below, poison elsewhere."""
    layout, page, device = case.cache_layout, case.page_size, watched.device
    shape = (len(watched), page, layout.storage_width)
    rows = torch.empty(shape, dtype=layout.storage_dtype, device=device)
    poison(PagedLatentCache(rows, layout, page))
    noise = torch.Generator().manual_seed(case.random_seed)
    slots = torch.arange(_decoys(given) * page)
    kv_c, k_pe = (DECOY * torch.randn(len(slots), width, generator=noise) for width in (layout.L, layout.R))
    layout.write(rows, slots.to(device), kv_c.to(device), k_pe.to(device), page)
    return rows


def _place(slot: int, page: int) -> str:
    return f"slot {slot} (page {slot // page}, row {slot % page})"


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@contextmanager
def _memory_as_it_comes() -> Iterator[None]:
    """Leave torch.empty uninitialised: to fill a far pool with NaN would touch gigabytes."""
    was = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(was)
