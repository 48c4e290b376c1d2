"""Small attention problems for the tests of the core: poisoned pages, the tiers of this repository, and the truth."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

import tiers
from mla.accuracy import Comparison, Reference, compare, reference
from mla.batch import AttentionBatch
from mla.cache import CacheSpec, FloatRows, PagedLatentCache, slots_of
from mla.need import Need
from mla.projections import Query, UpProjection
from mla.state import AttentionState
from mla.tier import Tier

N, L, P, R, V, PAGE = 3, 32, 12, 8, 10, 4
SCALE = (P + R) ** -0.5
TIERS = ("naive:mha", "naive:mqa", "template", "paged", "paged:mha", "paged:mqa")
INF, NAN = float("inf"), float("nan")


def make_need(**fields: Any) -> Need:
    """A Need of the toy sizes in float32, with the LSE; `fields` change it."""
    sizes = {name: fields.pop(name, size) for name, size in (("N", N), ("L", L), ("P", P), ("R", R), ("V", V))}
    rest = {"softmax_scale": SCALE, "page_size": PAGE, "lse": True, "dtype": torch.float32} | fields
    if "layout" not in rest:
        rest["layout"] = FloatRows(sizes["L"], sizes["R"], rest["dtype"])
    return Need(**sizes, **rest)


def make_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    need: Need,
    *,
    row_kv_lens: Sequence[int] | None = None,
    **options: Any,
) -> AttentionBatch:
    """A batch over shuffled pages; two pages belong to nobody, and the table's unused entries are absurd."""
    counts = [-(-s // need.page_size) for s in seq_lens]
    shuffled = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(len(counts))).tolist()
    table, width = [], max(counts, default=0) + 1
    for count in counts:
        own, shuffled = shuffled[:count], shuffled[count:]
        table.append([*own, *[(-7, 2**31 - 1)[i % 2] for i in range(width - count)]])
    common = {"page_size": need.page_size, "num_pages": sum(counts) + 2, "mask": need.mask, "device": need.device}
    common |= options
    if row_kv_lens is not None:
        return AttentionBatch.rows(query_lens, seq_lens, table, row_kv_lens, **common)
    return AttentionBatch.bottom_right(query_lens, seq_lens, table, **common)


@dataclass
class Case:
    """One call of a tier and what it should give back; `keys` are (kv_c, k_pe) of each request before the cache."""

    need: Need
    batch: AttentionBatch
    q: Query
    up: UpProjection
    keys: list[tuple[Tensor, Tensor]]
    cache: PagedLatentCache
    _truth: Reference | None = field(default=None, repr=False)

    def run(self, tier: Tier | str, out: AttentionState | None = None, **options: Any) -> AttentionState:
        """Prepare, plan and attend with a tier or the tier of that name."""
        tier = tiers.get(tier, **options) if isinstance(tier, str) else tier
        plan = tier.plan(self.need, self.batch)
        return tier.attend(self.q, self.cache, tier.prepare(self.up, self.need), plan, out)

    def truth(self) -> Reference:
        """Oracle and budget, from the inputs alone."""
        if self._truth is None:
            rows = [self.need.layout.round_trip(*key) for key in self.keys]
            self._truth = reference(
                self.q, rows, self.up, self.batch, self.need.softmax_scale, dtype=self.need.dtype, seed=0
            )
        return self._truth

    def check(self, state: AttentionState) -> Comparison:
        """Compare with the truth, and assert that the budget is kept."""
        result = compare(state, self.truth())
        assert result.ok, result
        assert state.out.dtype == self.need.out_dtype
        assert state.lse is not None
        assert state.lse.dtype == self.need.compute_dtype
        return result


def make_case(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    keys: list[tuple[Tensor, Tensor]] | None = None,
    seed: int = 0,
    row_kv_lens: Sequence[int] | None = None,
    pad_tokens: int = 0,
    **fields: Any,
) -> Case:
    """Random inputs of unit scale; NaN in every slot that no request owns and in the query of every empty row."""
    need, random = make_need(**fields), torch.Generator().manual_seed(seed)
    batch = make_batch(query_lens, seq_lens, need, row_kv_lens=row_kv_lens, pad_tokens=pad_tokens)
    T = batch.num_tokens

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(need.device, need.dtype)

    q = Query(draw(T, need.N, need.P), draw(T, need.N, need.R))
    up = UpProjection(draw(need.L, need.N, need.P) / need.L**0.5, draw(need.L, need.N, need.V) / need.L**0.5)
    if keys is None:
        keys = [(draw(s, need.L), draw(s, need.R)) for s in seq_lens]
    for part in q:
        part[batch.row_kv_lens == 0] = NAN
    return Case(need, batch, q, up, keys, fill_cache(need, batch, keys))


@cache
def shared_case(query_lens: tuple[int, ...], seq_lens: tuple[int, ...], **fields: Any) -> Case:
    """`make_case`, made once for all tiers, with its truth: nobody may change it."""
    return make_case(query_lens, seq_lens, **fields)


def fill_cache(need: Need, batch: AttentionBatch, keys: list[tuple[Tensor, Tensor]]) -> PagedLatentCache:
    """A new cache, NaN everywhere but in the slots of the requests' keys."""
    cache = PagedLatentCache.new(CacheSpec(batch.num_pages or 0, need.page_size, need.layout, need.device))
    cache.data.fill_(NAN)
    for b, (kv_c, k_pe) in enumerate(keys):
        cache.write(kv_c, k_pe, slots_of(batch.block_table[b], 0, kv_c.shape[0], need.page_size))
    return cache


def mean_case(query_lens: Sequence[int], values: list[list[float]], **fields: Any) -> Case:
    """A case with a zero query, in which every output channel is the mean of the visible `values` of the request."""
    case = make_case(query_lens, [len(v) for v in values], **fields)
    for part in case.q:
        part[case.batch.row_kv_lens > 0] = 0
    case.up.W_UV.zero_()
    case.up.W_UV[0] = 1
    for (kv_c, _), column in zip(case.keys, values, strict=True):
        kv_c[:, 0] = torch.tensor(column, dtype=kv_c.dtype)
    case.cache = fill_cache(case.need, case.batch, case.keys)
    return case


def assert_rows(state: AttentionState, expected: Sequence[float], keys: int, largest: float) -> None:
    """Every channel of row i is expected[i].

    A mean of `keys` numbers: each weight exp(-lse) has a relative error of (ln keys + 3) u from rounding lse, log and
    exp, each product and each sum adds u, and so does the cast to the output's dtype: below (2 keys + 6) u largest.
    """
    want = torch.tensor(expected, dtype=torch.float64)[:, None, None].expand_as(state.out)
    u = torch.finfo(state.out.dtype).eps / 2
    assert (state.out.double().cpu() - want).abs().max() <= (2 * keys + 6) * u * largest
