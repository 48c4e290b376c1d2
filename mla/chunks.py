"""Pack the keys of many requests into a workspace of bounded size, one chunk after the other."""

from collections.abc import Sequence
from dataclasses import dataclass

from mla.checks import check_int, lengths


@dataclass(frozen=True)
class Span:
    """Keys start .. stop - 1 of one request, at row `at` of the workspace."""

    request: int
    start: int
    stop: int
    at: int


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
