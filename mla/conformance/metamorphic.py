"""What must not change a result, or must change it by a known amount: relations that every right tier keeps.

Each relation takes a tier, a case and a source of chance, turns the case's inputs over, runs the tier on them and
compares with the truth of the case as it was: the float64 oracle and its budget, never another run of the tier. Only
where a result must be the same in bits are two runs compared.
Axes: T new tokens (packed over requests), S cached tokens, B requests, N heads, L KV rank, P nope, R rope, V value.
"""

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from random import Random

import torch
from torch import Tensor

from mla.accuracy import Comparison, Reference, compare, reference
from mla.batch import AttentionBatch
from mla.conformance.cases import Case
from mla.conformance.guards import fill_cache, uninitialised_memory_is_nan
from mla.conformance.inputs import Inputs, make_inputs
from mla.conformance.runner import truth
from mla.errors import bad
from mla.need import Need
from mla.projections import Query, UpProjection
from mla.state import AttentionState
from mla.tier import Tier

Relation = Callable[[Tier, Case, Random], Comparison]
LOWEST, HIGHEST = -3, 7  # powers of two of a constant added to scores, before the softmax scale
WIDEST = 10  # powers of two by which V is scaled


def pages_permuted(tier: Tier, case: Case, chance: Random) -> Comparison:
    """Move the pages of the pool and the table's entries with them: every row keeps its result."""
    given = make_inputs(case)
    to = torch.tensor(shuffled(given.num_pages, chance))
    batch, page = given.batch, case.page_size
    table, slots = batch.block_table.clone(), batch.slot_mapping.clone()
    for b, s in enumerate(batch.seq_lens_host):
        own = -(-s // page)
        table[b, :own] = to[table[b, :own].long()].int()
    written = slots >= 0
    slots[written] = to[slots[written] // page] * page + slots[written] % page
    moved = dataclasses.replace(batch, block_table=table, slot_mapping=slots)
    return _same_result(tier, case, dataclasses.replace(given, batch=moved), torch.arange(batch.num_tokens))


def requests_reordered(tier: Tier, case: Case, chance: Random) -> Comparison:
    """Put the requests into another order: every row keeps its result. Padding is left out."""
    given = make_inputs(case)
    order = shuffled(given.batch.num_requests, chance)
    batch, rows = given.batch.select(order)
    turned = dataclasses.replace(
        _with_rows(given, rows, batch),
        keys=tuple(given.keys[b] for b in order),
        history=tuple(given.history[b] for b in order),
    )
    return _same_result(tier, case, turned, rows)


def prefill_split(tier: Tier, case: Case, chance: Random) -> Comparison:
    """Send the new tokens of each request in two steps, cut anywhere: every row keeps its result.

    The second step's rows are not in the cache while the first attends. Raises ValueError for another mask than causal.
    """
    if case.batch.mask != "causal":
        fix = "other masks let a row see keys of a later step"
        raise bad("case.batch.mask", expected="'causal'", got=repr(case.batch.mask), fix=fix)
    given, need = make_inputs(case), case.need()
    ends = given.batch.query_start_loc.tolist()
    firsts = [chance.randint(0, b - a) for a, b in pairwise(ends)]
    seen = [max(s - (q - c), 0) for s, q, c in zip(case.batch.seq_lens, case.batch.query_lens, firsts, strict=True)]
    spans = [(range(a, a + c), range(a + c, b)) for (a, b), c in zip(pairwise(ends), firsts, strict=True)]
    steps = []
    for k, seq_lens in enumerate((seen, case.batch.seq_lens)):
        rows = torch.tensor([i for pair in spans for i in pair[k]], dtype=torch.int64)
        table, slots = given.batch.block_table, given.batch.slot_mapping[rows]
        batch = AttentionBatch.bottom_right(
            [len(pair[k]) for pair in spans],
            seq_lens,
            table,
            page_size=case.page_size,
            num_pages=given.num_pages,
            slots=slots,
        )
        steps.append((_with_rows(given, rows, batch), rows))
    states = []
    with uninitialised_memory_is_nan(need.device):
        cache, prepared = fill_cache(tier, case, steps[0][0], need.device), tier.prepare(given.up, need)
        for k, (step, _) in enumerate(steps):
            if k:
                tier.write(cache, step.new_kv_c, step.new_k_pe, step.batch.slot_mapping)
            states.append(tier.attend(step.q, cache, prepared, tier.plan(need, step.batch)))
    made = _truth(case)
    return compare(_put_back(states, [rows for _, rows in steps], need, given.batch.num_tokens), made)


def scores_shifted(tier: Tier, case: Case, chance: Random) -> Comparison:
    """Add a constant to all scores of a row: its LSE grows by that constant, its output stays.

    The last rope component of every key becomes 1 and that of the query of each row and head 0, then x: the scores
    grow by softmax_scale * x. Raises ValueError where there is no rope part.
    """
    if case.dims.R == 0:
        raise bad("case.dims.R", expected="a rope part", got="0", fix="take sizes with R >= 1")
    before, after = with_constant_key(make_inputs(case)), with_constant_key(make_inputs(case))
    T, N = before.batch.num_tokens, case.dims.N
    x = torch.tensor([chance.choice((-1, 1)) * 2.0 ** chance.randint(LOWEST, HIGHEST) for _ in range(T * N)])
    x = x.view(T, N)
    after.q.pe[..., -1] += x.to(after.q.pe.dtype)
    old, new = _reference(case, before), _reference(case, after)
    grown = old.lse + case.dims.softmax_scale * x[old.rows].double()
    return compare(outcome(tier, case, after), dataclasses.replace(new, out=old.out, lse=grown))


def values_scaled(tier: Tier, case: Case, chance: Random) -> Comparison:
    """Scale W_UV by a power of two: the output scales with it, in bits unless float16 is too narrow; the LSE stays."""
    power = 2.0 ** chance.randint(0, WIDEST)
    given, made = make_inputs(case), _truth(case)
    up = UpProjection(given.up.W_UK, given.up.W_UV * power)
    first, scaled = outcome(tier, case, given), outcome(tier, case, dataclasses.replace(given, up=up))
    if case.torch_dtype != torch.float16 or power == 1:
        expected = AttentionState(first.out * power, first.lse)
        return _compare_bits(scaled, expected, f"the result with W_UV * {power}") or compare(first, made)
    larger = dataclasses.replace(made, out=made.out * power, out_limit=made.out_limit * power)
    return compare(scaled, larger)


RELATIONS: dict[str, Relation] = {
    f.__name__: f for f in (pages_permuted, requests_reordered, prefill_split, scores_shifted, values_scaled)
}


def outcome(tier: Tier, case: Case, given: Inputs, need: Need | None = None) -> AttentionState:
    """Write and attend some inputs as a case would, q.nope (T, N, P) and so on: out (T, N, V) and lse (T, N)."""
    need = need or case.need()
    with uninitialised_memory_is_nan(need.device):
        cache = fill_cache(tier, case, given, need.device)
        return tier.attend(given.q, cache, tier.prepare(given.up, need), tier.plan(need, given.batch))


def with_constant_key(given: Inputs) -> Inputs:
    """Return inputs whose last rope component is 1 in every key, k_pe (S, R), and 0 in every query, pe (T, N, R)."""
    keys = tuple((kv_c, k_pe.clone()) for kv_c, k_pe in given.keys)
    new, q = given.new_k_pe.clone(), Query(given.q.nope, given.q.pe.clone())
    for k_pe in (new, *(k_pe for _, k_pe in keys)):
        k_pe[..., -1] = 1
    q.pe[..., -1] = 0
    return dataclasses.replace(given, q=q, keys=keys, new_k_pe=new)


def shuffled(count: int, chance: Random) -> list[int]:
    """Return 0 .. count - 1 in some order."""
    order = list(range(count))
    chance.shuffle(order)
    return order


def _same_result(tier: Tier, case: Case, moved: Inputs, rows: Tensor) -> Comparison:
    """Compare the result of moved inputs, whose row i is row rows[i] of the case, with the case's truth.

    Where the tier promises results that do not depend on such moves, they must be those of the case in bits.
    """
    need, T = case.need(), case.batch.num_tokens
    found = compare(_put_back([outcome(tier, case, moved)], [rows], need, T), _truth(case))
    promised = dataclasses.replace(need, batch_invariant=True)
    if not found.ok or tier.why_not(promised):
        return found
    here, there = outcome(tier, case, make_inputs(case), promised), outcome(tier, case, moved, promised)
    right = AttentionState(here.out[rows], None if here.lse is None else here.lse[rows])
    return _compare_bits(there, right, "the result, which batch_invariant promises to be the same,") or found


def _compare_bits(state: AttentionState, right: AttentionState, what: str) -> Comparison | None:
    """None where out (T, N, V) and lse (T, N) are equal, else a mismatch with a sentence; NaN is equal to nothing."""
    for name, x, y in zip(("out", "lse"), state, right, strict=True):
        if x is not None and (y is None or not torch.equal(x, y)):
            return Comparison("mismatch", float("inf"), 0.0, detail=f"{name} of {what} differs in bits")
    return None


def _put_back(states: list[AttentionState], rows: list[Tensor], need: Need, T: int) -> AttentionState:
    """Return out (T, N, V) and lse (T, N) with every state's rows where they belong; other rows are empty."""
    whole = AttentionState.empty(T, need.N, need.V, dtype=need.compute_dtype, device=need.device)
    for state, at in zip(states, rows, strict=True):
        whole.out[at] = state.out.to(whole.out.dtype)
        if state.lse is not None and whole.lse is not None:
            whole.lse[at] = state.lse
    return whole if need.lse else AttentionState(whole.out, None)


def _with_rows(given: Inputs, rows: Tensor, batch: AttentionBatch) -> Inputs:
    """The inputs of some rows (n,) of a batch."""
    q = Query(given.q.nope[rows], given.q.pe[rows])
    return dataclasses.replace(given, q=q, new_kv_c=given.new_kv_c[rows], new_k_pe=given.new_k_pe[rows], batch=batch)


def _truth(case: Case) -> Reference:
    """The oracle and budget of all rows and heads of a case; raises ValueError for one that is too large for that."""
    made, heads = truth(case)
    if heads is not None or made.rows.shape[0] != case.batch.num_tokens:
        raise bad("case", expected="a case that is compared as a whole", got=case.id, fix="take a smaller batch")
    return made


def _reference(case: Case, given: Inputs) -> Reference:
    keys = [case.cache_layout.round_trip(*pair) for pair in given.keys]
    scale, dtype, seed = case.dims.softmax_scale, case.torch_dtype, case.random_seed
    return reference(given.q, keys, given.up, given.batch, scale, dtype=dtype, seed=seed)
