"""Take the keys of many requests through a workspace of bounded size: how large, in which chunks, or side by side."""

from collections.abc import Sequence
from dataclasses import dataclass

from mla.checks import check_int, lengths
from mla.cost import default_workspace_tokens
from mla.need import Need

DEFAULT_WORKSPACE_TOKENS = 65536


@dataclass(frozen=True)
class Span:
    """Keys start .. stop - 1 of one request, at row `at` of the workspace."""

    request: int
    start: int
    stop: int
    at: int


def workspace_rows(need: Need, asked: int | None) -> int:
    """Return the rows (tokens) of a workspace: `asked`, else by the serving formula from Need.capacity, else 65536.

    More rows than all requests of the capacity have are not reserved.
    """
    if asked is not None:
        return asked
    c = need.capacity
    if c is None:
        return max(DEFAULT_WORKSPACE_TOKENS, need.page_size)
    whole = c.max_requests * -(-c.max_seq_len // need.page_size) * need.page_size
    return min(whole, default_workspace_tokens(c.max_seq_len, c.max_requests, need.page_size))


def refuse_workspace(need: Need, rows: int) -> list[str]:
    """Return a sentence where a workspace of `rows` rows cannot hold one page, else []."""
    if rows >= need.page_size:
        return []
    found = f"max_workspace_tokens = {rows} is below one page of {need.page_size} rows"
    return [f"{found}; allow at least {need.page_size}, or use smaller pages."]


def pack_chunks(key_counts: Sequence[int], cap: int, page_size: int) -> list[list[Span]]:
    """Pack all keys greedily, in request order, into chunks of at most `cap` rows.

    A request that does not fit is split at a multiple of page_size; only the first span of a chunk may continue an
    earlier one; requests without keys never appear. Every key is in exactly one span, in order. Raises ValueError for a
    cap below one page, which could not hold a split.
    """
    page_size = check_int("page_size", page_size, 1, "use the cache's page size")
    cap = check_int("max_workspace_tokens", cap, page_size, "allow at least one page of rows, or use smaller pages")
    chunks: list[list[Span]] = []
    used = cap
    for request, count in enumerate(lengths("key_counts", key_counts)):
        start = 0
        while start < count:
            room = cap - used
            take = count - start if count - start <= room else room // page_size * page_size
            if take == 0:
                chunks.append([])
                used = 0
                continue
            chunks[-1].append(Span(request, start, start + take, used))
            start, used = start + take, used + take
    return chunks


def sweep_strides(key_counts: Sequence[int], room: int, least: int) -> list[tuple[int, int, int]]:
    """Walk through the keys of several requests side by side: strides (start, stop, active) of at most `room` keys.

    `key_counts` are sorted, longest first; in a stride the first `active` requests take keys start .. stop - 1, clipped
    to what they have. A stride ends where the shortest active request does, so that little is gathered for nothing, but
    is not shorter than `least` keys while room and the longest request allow.
    """
    strides, start, active = [], 0, len(key_counts)
    while key_counts and start < key_counts[0]:
        while key_counts[active - 1] <= start:
            active -= 1
        width = max(1, room // active)
        stop = min(start + width, max(key_counts[active - 1], start + min(width, least)), key_counts[0])
        strides.append((start, stop, active))
        start = stop
    return strides
