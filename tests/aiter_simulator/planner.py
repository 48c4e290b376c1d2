"""Both planners as pure functions on lists: who computes which rows over which keys, and who merges what.

Restated from the description of `get_mla_metadata_v1` (fast mode) and `get_ps_metadata_v1` in `ROCm/aiter` e4048607;
equal to 150 decode and 60 prefill plans that the original C++ planners made (tests/data/aiter_golden/metadata.json).
A work row is (batch, partial row or -1, first and last+1 query row, first and last+1 key, keys behind it, extra).
"""

from dataclasses import dataclass, field
from math import gcd

from . import kernels


def ceil_div(a: int, b: int) -> int:
    """The smallest integer >= a / b."""
    return -(-a // b)


@dataclass
class WorkPlan:
    """Work rows, work_indptr per worker, and reduce groups: per tile a list of partial rows, and its query rows."""

    work: list[list[int]] = field(default_factory=list)
    work_indptr: list[int] = field(default_factory=lambda: [0])
    reduce_indptr: list[int] = field(default_factory=lambda: [0])
    partial_map: list[int] = field(default_factory=list)
    final_map: dict[int, tuple[int, int]] = field(default_factory=dict)


def pack_rows(arch: str, q: str, kv: str, heads: int, qlen: int) -> int:
    """Query rows times heads that one decode tile holds: 128, or 64 for some gfx950 kernels."""
    rows = heads * qlen
    if arch == "gfx950" and q == kv == "bf16" and ((64 <= rows < 128 and heads <= 64) or heads == 48):
        return 64
    return 64 if (arch, q, kv, heads, qlen) == ("gfx950", "fp8", "fp8", 32, 3) else 128


def query_tiles(heads: int, qlen: int, pack: int) -> int:
    """Tiles that the query rows of one request are cut into."""
    if qlen * heads <= pack:
        return 1
    return qlen if 2 * heads > pack else ceil_div(qlen * heads, pack)


def fold_ratio(arch: str, q: str, kv: str, heads: int, qlen: int) -> int:
    """Groups of 16 heads that become batches of their own: 1 where a native kernel takes all heads."""
    return 1 if kernels.is_native(arch, q, kv, heads, qlen) else max(1, heads // 16)


@dataclass(frozen=True)
class DecodeCase:
    """Arguments of the decode planner; `heads` is after the fold, `ratio` the number of folded batches per request."""

    qo_indptr: list[int]
    kv_indptr: list[int]
    last_page: list[int]
    heads: int
    workers: int
    max_qlen: int
    uni_qlen: int = -1
    ratio: int = 1
    pack: int = 128
    page_size: int = 1
    granularity: int = 16
    causal: bool = True

    def queries(self, batch: int) -> tuple[int, int]:
        """Query rows of a (folded) batch. Ragged and folded, the original reads past its list; here: no rows."""
        if self.uni_qlen > 0:
            return batch * self.uni_qlen, (batch + 1) * self.uni_qlen
        last = len(self.qo_indptr) - 1
        return self.qo_indptr[min(batch, last)], self.qo_indptr[min(batch + 1, last)]

    def keys(self, batch: int) -> tuple[int, int]:
        """First and last+1 page of the request that a (folded) batch belongs to."""
        return self.kv_indptr[batch // self.ratio], self.kv_indptr[batch // self.ratio + 1]

    def behind(self, batch: int, end: int) -> int:
        """Tokens between page `end` and the end of the request."""
        stop = self.keys(batch)[1]
        missing = self.page_size - self.last_page[batch] if self.page_size > 1 else 0
        return (stop - end) * self.page_size - missing if end != stop else 0


def plan_decode(case: DecodeCase) -> WorkPlan:
    """Deal the key blocks of every (batch, query tile) to the workers in order."""
    batches = (len(case.qo_indptr) - 1) * case.ratio
    tiles = query_tiles(case.heads, case.max_qlen, case.pack)
    overhead = max(1, ceil_div(16, case.page_size))
    blocks = [ceil_div(stop - start, case.granularity) for start, stop in map(case.keys, range(batches))]
    # Ragged queries cut into tiles: the original sums a shared array that nobody filled. Zeros are what was measured.
    filled = case.uni_qlen > 0 or case.max_qlen * case.heads * case.ratio <= case.pack
    total = sum((n + overhead) * tiles for n in blocks) if filled else 0
    payload = ceil_div(total, case.workers) + overhead

    plan, room, next_partial = WorkPlan(), payload, 0
    for batch in range(batches):
        for tile in range(tiles):
            first, last = case.queries(batch)
            height = ceil_div(case.max_qlen, tiles)
            q0, q1 = first + tile * height, min(last, first + (tile + 1) * height)
            start, stop = case.keys(batch)
            tail = tiles - 1 - tile if case.ratio == 1 else tiles - 1 - q0 // case.ratio % case.max_qlen
            end = min(stop, stop - tail) if case.causal and case.page_size == 1 else stop
            pieces, left = [], ceil_div(stop - start, case.granularity)
            while len(plan.work_indptr) <= case.workers:
                cut = start + (room - overhead) * case.granularity
                too_short = case.causal and case.page_size == 1 and stop - cut < case.max_qlen
                if room >= left + overhead or (room > overhead and too_short):
                    pieces.append([batch, -1, q0, q1, start, end, case.behind(batch, end), 0])
                    plan.work.append(pieces[-1])
                    room -= left + overhead
                    break
                if room > overhead:
                    pieces.append([batch, -1, q0, q1, start, min(cut, end), case.behind(batch, min(cut, end)), 0])
                    plan.work.append(pieces[-1])
                    start, left = cut, ceil_div(stop - cut, case.granularity)
                plan.work_indptr.append(len(plan.work))
                room = payload
            if len(pieces) > 1:
                step = ceil_div(last - first, tiles)
                for number, piece in enumerate(pieces):
                    piece[1] = next_partial + number * step
                next_partial += len(pieces) * step
                plan.partial_map += [piece[1] for piece in pieces]
                plan.final_map[len(plan.reduce_indptr) - 1] = (q0, q1)
            plan.reduce_indptr.append(len(plan.partial_map))
    plan.work_indptr += [len(plan.work)] * (case.workers + 1 - len(plan.work_indptr))
    return plan


@dataclass(frozen=True)
class PrefillCase:
    """Arguments of the prefill planner; context_lens counts every key of a request, the new ones too."""

    qo_indptr: list[int]
    kv_indptr: list[int]
    context_lens: list[int]
    heads: int
    workers: int
    rows: int = 256
    granularity: int = 128
    causal: bool = True


def visiting_order(tiles: int) -> list[int]:
    """First, last, second, second-last, ...: long and short causal tiles alternate."""
    ends = [tile for pair in zip(range(tiles), reversed(range(tiles)), strict=True) for tile in pair]
    return ends[:tiles]


def plan_prefill(case: PrefillCase) -> WorkPlan:
    """Deal units of keys evenly to the workers of a cluster, then repeat for every head."""
    clusters = gcd(case.heads, case.workers)
    workers, heads = case.workers // clusters, case.heads // clusters
    tiles = []
    for batch, length in enumerate(case.context_lens):
        first, last = case.qo_indptr[batch : batch + 2]
        for tile in visiting_order(ceil_div(last - first, case.rows)):
            q0, q1 = first + tile * case.rows, min(last, first + (tile + 1) * case.rows)
            seen = min(length - (last - q1), length) if case.causal else length
            tiles.append((batch, q0, q1, ceil_div(seen, case.granularity)))

    average, more = divmod(sum(tile[3] for tile in tiles), workers)
    quota = [average + (worker < more) for worker in range(workers)]
    mine: list[list[list[int]]] = [[] for _ in range(workers)]
    groups: dict[tuple[int, int], list[int]] = {}
    worker = next_partial = 0
    for batch, q0, q1, units in tiles:
        key, length, pieces, done = case.kv_indptr[batch], case.context_lens[batch], [], 0
        while units:
            while quota[worker] == 0:
                worker += 1
            take = min(units, quota[worker])
            end = min(done + take * case.granularity, length)
            pieces.append([batch, -1, q0, q1, key + done, key + end, length - end])
            mine[worker].append(pieces[-1])
            quota[worker] -= take
            units, done = units - take, end
        if pieces:
            pieces[-1][6] = 0
        if len(pieces) > 1:
            for piece in pieces:
                piece[1] = next_partial
                groups.setdefault((q0, q1), []).append(next_partial)
                next_partial += case.rows

    plan = WorkPlan()
    for cluster in range(clusters):
        for works in mine:
            for head in range(cluster * heads, (cluster + 1) * heads):
                plan.work += [[*work, head | (head + 1) << 16] for work in works]
            plan.work_indptr.append(len(plan.work))
    for number, rows in enumerate(sorted(groups)):
        plan.final_map[number] = rows
        plan.partial_map += groups[rows]
        plan.reduce_indptr.append(len(plan.partial_map))
    return plan
