"""Inputs by formula, and memory that must not be read: what a tier is given in a case.

Axes: T new tokens (packed over requests), S cached tokens, B requests, N heads, L KV rank, P nope, R rope, V value.

With z standard normal and independent, W_UK and W_UV are z / sqrt(L), and every logit of

    randn         q = z, row = z                                        has standard deviation m(40, 1)^2 = 1.87
    peaked        q = 8 z, row = z                                      has 15: few keys matter, scattered anywhere
    needle*       q = z + a k_j, row = z, row_j = 2 z                   key j holds e/(1+e) = 73 % of the softmax
    equal_keys    q = z, row_s = z for all s                            is the same: lse = logit + ln S exactly
    large_logits  q = z + a W_UK^T u, row = u + z/16, u of random signs lies near +200 (even heads), -200 (odd heads)

`peaked` and `large_logits` find scores kept in few bits, `large_logits` a softmax without its maximum, `equal_keys` a
wrong count or base, and a needle a key, page or split that is lost, read twice or read elsewhere. All is computed in
float64 and rounded to the case's dtype once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mla.batch import AttentionBatch
from mla.cache import PagedLatentCache, slots_of
from mla.conformance.cases import Case
from mla.projections import Query, UpProjection

PEAK, LARGE = 8.0, 200.0
NEWTON_STEPS, CLOSE = 50, 1e-3
SPARE_PAGES, SPARE_COLUMNS = 3, 64
ABSURD_PAGES = (2**31 - 1, -1, -(2**31), 10**6, -7)
POISON = (float("nan"), float("inf"), float("-inf"))


@dataclass(frozen=True, eq=False)
class Inputs:
    """What one case gives a tier, on one device.

    q.nope (T, N, P), q.pe (T, N, R) and up, W_UK (L, N, P) and W_UV (L, N, V), are strided views of the tensors that a
    model's projections would return; in a third of the cases q.pe, in another third W_UV is one of a tensor of its own,
    with other strides, and in two ninths q.nope or q.pe has NaN between its numbers, a stride of 2 along its last axis.
    In a quarter of all cases the block table is just as wide as the longest request needs. `keys[b]` is
    kv_c (S, L), k_pe (S, R) of request b before they are cached; new_kv_c (T, L), new_k_pe (T, R) are the rows that
    this step writes at batch.slot_mapping. `history[b]` holds the positions of request b written before. Rows that see
    no key have NaN queries, padding has NaN rows.
    """

    q: Query
    up: UpProjection
    keys: tuple[tuple[Tensor, Tensor], ...]
    new_kv_c: Tensor
    new_k_pe: Tensor
    batch: AttentionBatch
    history: tuple[Tensor, ...]
    num_pages: int

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor that a tier is given, by name: (T, N, P), (T, N, R) and so on."""
        yield from (("q.nope", self.q.nope), ("q.pe", self.q.pe), ("W_UK", self.up.W_UK), ("W_UV", self.up.W_UV))
        yield from (("kv_c", self.new_kv_c), ("k_pe", self.new_k_pe))
        names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping", "positions", "row_kv_lens")
        yield from ((f"batch.{name}", getattr(self.batch, name)) for name in names)

    def owned_slots(self) -> Tensor:
        """Return the slots (n,) int64 that hold a key of some request."""
        tables, page = self.batch.block_table, self.batch.page_size
        parts = [slots_of(tables[b], 0, s, page) for b, s in enumerate(self.batch.seq_lens_host)]
        return torch.cat(parts) if parts else self.batch.slot_mapping[:0]


def make_inputs(case: Case, device: str = "cpu") -> Inputs:
    """Return new tensors for a case, q.nope (T, N, P) and so on: the same numbers on every machine."""
    d, batch = case.dims, case.batch
    random = np.random.Generator(np.random.SFC64(case.random_seed))
    z = lambda *shape: torch.from_numpy(random.standard_normal(shape))
    up = z(d.N * (d.P + d.V), d.L) / d.L**0.5
    W_UK = up.view(d.N, d.P + d.V, d.L)[:, : d.P]  # (N, P, L)
    drawn = [
        (z(q, d.N, d.P + d.R), z(S, d.L + d.R), z(d.L).sign())
        for q, S in zip(batch.query_lens, batch.seq_lens, strict=True)
    ]
    lender, shared = shared_keys(case)
    needles = [needle_position(case, b) for b in range(len(drawn))]
    lent = [j for j, n in zip(needles, shared, strict=True) if j is not None and j < n]
    queries, keys, bounds = [], [], iter(batch.visible())
    for b, (q, rows, u) in enumerate(drawn):
        if shared[b]:
            rows[: shared[b]], u = drawn[lender][1][: shared[b]], drawn[lender][2]
        twice = {*(j for j in lent if j < shared[b]), *(j for j in (needles[b],) if j is not None)}
        visible = torch.tensor([next(bounds) for _ in range(q.shape[0])], dtype=torch.int64)
        q, rows = _family(case, q, rows.clone(), u, visible, W_UK, needles[b], sorted(twice))
        q[visible == 0] = float("nan")
        queries.append(q)
        keys.append(rows)
    queries.append(torch.full((batch.pad_tokens, d.N, d.P + d.R), float("nan"), dtype=torch.float64))
    return _place(case, torch.cat(queries), keys, up, random, device)


def shared_keys(case: Case) -> tuple[int, list[int]]:
    """Return the request whose first pages others share, and how many keys each request has in such pages.

    The longest prefix is lent, as whole pages that no request writes in this step; without slots "shared" none is.
    """
    batch, page = case.batch, case.page_size
    prefixes = [max(s - q, 0) for q, s in zip(batch.query_lens, batch.seq_lens, strict=True)]
    most = sorted(prefixes)[-2:]
    if case.slots != "shared" or len(most) < 2:
        return 0, [0] * len(prefixes)
    return prefixes.index(most[1]), [min(p, most[0]) // page * page for p in prefixes]


def poison(cache: PagedLatentCache) -> None:
    """Fill a cache, data (pages, page_size, storage_width), with NaN, +inf and -inf in turn; bytes become 255."""
    data = cache.data
    if not data.is_floating_point() or data.dtype.itemsize < 2:
        data.view(torch.uint8).fill_(255)
        return
    turn = torch.arange(data.shape[0] * data.shape[1], device=data.device).view(data.shape[:2]) % len(POISON)
    data.copy_(data.new_tensor(POISON)[turn][..., None].expand_as(data))


def needle_position(case: Case, b: int) -> int | None:
    """Return the position of the needle of request b, None where there is none.

    Its page is (7 b + seed) mod pages, or the one that the family's name forces, its offset (3 b + 5 seed) mod rows of
    the page; "needle_end" is the last key.
    """
    S, page = case.batch.seq_lens[b], case.page_size
    if not case.family.startswith("needle") or S == 0:
        return None
    if case.family == "needle_end":
        return S - 1
    pages = -(-S // page)
    forced = {
        "needle": (7 * b + case.seed) % pages,
        "needle_first": 0,
        "needle_middle": pages // 2,
        "needle_last": pages - 1,
    }
    first = forced[case.family] * page
    return first + (3 * b + 5 * case.seed) % min(page, S - first)


def _family(
    case: Case, q: Tensor, rows: Tensor, u: Tensor, visible: Tensor, W_UK: Tensor, needle: int | None, twice: list[int]
) -> tuple[Tensor, Tensor]:
    """Turn noise q (T, N, P+R) and rows (S, L+R) of one request into those of the case's family.

    `needle` is the request's own needle; the rows `twice` hold it and those of requests that share pages with this one.
    """
    d, scale = case.dims, case.dims.softmax_scale
    if case.family == "peaked":
        return q * PEAK, rows
    if case.family == "equal_keys":
        return q, rows[:1].expand_as(rows).clone()
    if case.family == "large_logits":
        rows = rows / 16
        rows[:, : d.L] += u
        toward = W_UK @ u  # (N, P)
        sign = 1.0 - 2.0 * (torch.arange(d.N) % 2)
        q[..., : d.P] += toward * (sign * LARGE / (scale * toward.square().sum(-1)))[:, None]
        return q, rows
    rows[twice] *= 2
    if needle is None:
        return q, rows
    k_nope = torch.einsum("sl,npl->snp", rows[:, : d.L], W_UK)
    keys = torch.cat([k_nope, rows[:, None, d.L :].expand(-1, d.N, -1)], -1)  # (S, N, P+R)
    sees = visible > max(needle, 1)
    q[sees] = _toward_needle(q[sees], keys, visible[sees], needle, scale)
    return q, rows


def _toward_needle(q: Tensor, keys: Tensor, visible: Tensor, j: int, scale: float) -> Tensor:
    """Return q + a k_j (T, N, P+R) such that key j of keys (S, N, P+R) has weight e / (1 + e) in every row and head.

    Its logit is then ln(S - 1) + 1 above the log-mean-exp of the rest: logit_j = 1 + lse of the others. That difference
    is concave in a, and Newton's method on a concave function comes to its root from the left without passing it.
    """
    T, N, _ = q.shape
    logits = scale * (q.transpose(0, 1) @ keys.permute(1, 2, 0))  # (N, T, S)
    others = torch.arange(keys.shape[0]) >= visible[:, None]
    others[:, j] = True
    logits_j, slopes = logits[..., j : j + 1].clone(), scale * torch.einsum("np,snp->ns", keys[j], keys)[:, None]
    logits = logits.masked_fill_(others, float("-inf"))
    a = logits.new_zeros(N, T, 1)
    for _ in range(NEWTON_STEPS):
        now = logits + a * slopes
        top = now.amax(-1, keepdim=True)
        weights = (now - top).exp_()
        total = weights.sum(-1, keepdim=True)
        gap = logits_j + a * slopes[..., j : j + 1] - top - total.log() - 1
        if gap.numel() == 0 or float(gap.abs().max()) < CLOSE:
            break
        a = a - gap / (slopes[..., j : j + 1] - weights @ slopes.transpose(1, 2) / total)
    return q + (a * keys[j][:, None]).transpose(0, 1)


def _place(case: Case, q: Tensor, keys: list[Tensor], up: Tensor, random: np.random.Generator, device: str) -> Inputs:
    """Round to the case's dtype, lay the requests out over pages, and split old rows from new ones."""
    d, s, dtype, page = case.dims, case.batch, case.torch_dtype, case.page_size
    tables, num_pages = _tables(case.slots, [-(-n // page) for n in s.seq_lens], random)
    lender, shared = shared_keys(case)
    tables = [tables[lender][: n // page] + row[n // page :] for n, row in zip(shared, tables, strict=True)]
    width = max(map(len, tables), default=0) + (2 if case.random_seed // 3 % 4 else 0)
    absurd = lambda b, i: (*ABSURD_PAGES, num_pages)[(b + i) % (len(ABSURD_PAGES) + 1)]
    full = [[*row, *(absurd(b, i) for i in range(width - len(row)))] for b, row in enumerate(tables)]
    table = torch.tensor(full, dtype=torch.int64).view(len(tables), width)
    build: dict[str, Any] = {
        "page_size": page,
        "num_pages": num_pages,
        "pad_tokens": s.pad_tokens,
        "device": device,
    }
    if s.mask == "rows":
        batch = AttentionBatch.rows(s.query_lens, s.seq_lens, table, s.visible(), **build)
    else:
        batch = AttentionBatch.bottom_right(s.query_lens, s.seq_lens, table, mask=s.mask, **build)
    batch.slot_mapping[list(s.unwritten)] = -1
    q, up = q.to(device, dtype), up.to(device, dtype).view(d.N, d.P + d.V, d.L).permute(2, 0, 1)
    rounded = [x.to(device, dtype) for x in keys]
    new, history, starts = q.new_full((s.num_tokens, d.L + d.R), float("nan")), [], [0, *accumulate(s.query_lens)]
    for b, S in enumerate(s.seq_lens):
        mine = slice(starts[b], starts[b + 1])
        at = batch.positions[mine]
        local = at < S
        new[mine][local] = rounded[b][at[local]]
        written = at[batch.slot_mapping[mine] >= 0]
        old = torch.ones(S, dtype=torch.bool, device=device)
        old[written] = False
        history.append(old.nonzero()[:, 0])
    split = lambda rows: (rows[:, : d.L], rows[:, d.L :])
    query, weights = Query(q[..., : d.P], q[..., d.P :]), UpProjection(up[..., : d.P], up[..., d.P :])
    if case.random_seed % 3 == 0:
        query = query._replace(pe=_apart(query.pe))
    elif case.random_seed % 3 == 1:
        weights = weights._replace(W_UV=_apart(weights.W_UV))
    elif case.random_seed // 3 % 3 == 0:
        query = query._replace(nope=_every_second(query.nope))
    elif case.random_seed // 3 % 3 == 1:
        query = query._replace(pe=_every_second(query.pe))
    return Inputs(query, weights, tuple(split(r) for r in rounded), *split(new), batch, tuple(history), num_pages)


def _apart(x: Tensor) -> Tensor:
    """Return x (A, N, C) as a view of a tensor of its own: heads first, and NaN behind each row."""
    A, N, C = x.shape
    whole = x.new_full((N, A, C + SPARE_COLUMNS), float("nan"))
    return whole[..., :C].transpose(0, 1).copy_(x)


def _every_second(x: Tensor) -> Tensor:
    """Return x (A, N, C) as every second column of a tensor of its own, with NaN between them."""
    whole = x.new_full((*x.shape[:2], 2 * x.shape[2]), float("nan"))
    return whole[..., ::2].copy_(x)


def _tables(slots: str, pages: list[int], random: np.random.Generator) -> tuple[list[list[int]], int]:
    """Give every request its pages in the named order; some pages of the pool belong to nobody."""
    total = sum(pages) + SPARE_PAGES
    starts = [0, *accumulate(pages)]
    if slots == "contiguous":
        order = list(range(sum(pages)))
    elif slots in ("shuffled", "shared"):
        order = random.permutation(total).tolist()
    else:
        each = [(b, i) for b, n in enumerate(pages) for i in range(n)]
        if slots == "interleaved":  # requests take turns
            turns = sorted(each, key=lambda page: page[1])
        else:  # extended: what a request was given later lies below its first half
            turns = sorted(each, key=lambda page: 2 * page[1] < pages[page[0]])
        rank = {page: k for k, page in enumerate(turns, 1)}
        order = [rank[page] for page in each]
    return [order[a : a + n] for a, n in zip(starts, pages, strict=False)], total
