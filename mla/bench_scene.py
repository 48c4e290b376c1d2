"""What is timed, and whether it is right: the inputs of a case on the device, the truth of some rows, and the verdict.

A case of usual size takes the inputs, the truth and the gate of the conformance suite. For one whose inputs count more
than BIG numbers the suite's inputs, float64 noise of one host thread, would take longer than all the rest: those are
drawn on the device, and the gate holds the first and last row of as many requests as MOST roundings pay for, in four
heads, against the oracle. Rows that are not sampled must be finite.
Axes: T new tokens (packed over requests), S cached tokens, N heads, L KV rank, P nope, R rope, V value.
"""

import dataclasses
import math
import random
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mla.accuracy import Reference, latent_reference, reference
from mla.batch import AttentionBatch
from mla.conformance.cases import Case, roundings
from mla.conformance.guards import Wrong, check_form
from mla.conformance.inputs import SPARE_PAGES, Inputs, make_inputs
from mla.conformance.latent import latent_truth, run_latent_case
from mla.conformance.runner import Result, run_case, truth, weigh
from mla.conformance.specs import BatchSpec
from mla.projections import Query, UpProjection, absorb_query
from mla.state import AttentionState
from mla.tier import Tier

BIG = 1 << 26  # numbers of queries and cached rows
MOST = {"cpu": 200_000_000, "cuda": 20_000_000_000}  # roundings of the replicas that make a budget
ROWS = 32
Truth = tuple[Reference, tuple[int, ...] | None]


@dataclass(frozen=True, eq=False)
class Scene:
    """A case on a device at a level: its inputs, q.nope (T, N, P) and so on, shared by all tiers, and the truth.

    `truth` is the oracle's rows and budget, out (n, N, V) or (n, N, L), and the heads that they cover, None for all.
    At level "latent" `q_latent` (T, N, L) and `q_pe` (T, N, R) are the kernel's queries.
    """

    case: Case
    device: str
    level: str
    inputs: Inputs
    big: bool
    truth: Truth
    q_latent: Tensor | None = None
    q_pe: Tensor | None = None

    def gate(self, tier: Tier, state: AttentionState) -> Result:
        """Say what a tier is worth: by the conformance suite, or, in a big case, by a state that it returned.

        state.out (T, N, V), or (T, N, L) at level "latent".
        """
        if not self.big and self.level == "attend":
            return run_case(tier, self.case, device=self.device)
        kernel = getattr(tier, "latent", None)
        if not self.big and kernel is not None:
            return run_latent_case(kernel, self.case, device=self.device, name=tier.name, why_not=tier.why_not)
        return self.judged(tier, state)

    def judged(self, tier: Tier, state: AttentionState) -> Result:
        """Hold a state, out (T, N, V) or (T, N, L) and lse (T, N), against the truth; its form is looked at first."""
        result = Result(self.case, tier.name, "ok", level=self.level)
        try:
            if self.level == "attend":
                check_form(state, self.case.need(self.device), self.case.batch.num_tokens)
        except Wrong as wrong:
            return dataclasses.replace(result, status=wrong.status, detail=wrong.detail, used_out=math.inf)
        return weigh(result, [state], *self.truth)[0]


def scene_of(case: Case, device: str, level: str = "attend") -> Scene:
    """Make the inputs, q.nope (T, N, P) and so on, and the truth of a case, once for all tiers that are timed on it."""
    big = is_big(case)
    inputs = drawn_inputs(case, device) if big else make_inputs(case, device)
    if level == "attend":
        return Scene(case, device, level, inputs, big, drawn_truth(case, inputs) if big else truth(case, device))
    both = torch.cat([absorb_query(inputs.q.nope, inputs.up.W_UK).to(case.torch_dtype), inputs.q.pe], -1)
    q_latent, q_pe = both[..., : case.dims.L], both[..., case.dims.L :]
    made = drawn_latent_truth(case, inputs, q_latent, q_pe) if big else latent_truth(case, device)
    return Scene(case, device, level, inputs, big, made, q_latent, q_pe)


def is_big(case: Case) -> bool:
    """Return whether a plain case has more than BIG numbers in its query and its cached rows."""
    d, b = case.dims, case.batch
    plain = b.mask in ("causal", "full") and not b.pad_tokens and not b.unwritten and case.earlier is None
    numbers = b.num_tokens * d.N * (d.P + d.R) + sum(b.seq_lens) * (d.L + d.R)
    return plain and case.family == "randn" and case.slots == "shuffled" and case.cache == "plain" and numbers > BIG


def drawn_inputs(case: Case, device: str) -> Inputs:
    """Return a case's inputs drawn on the device, q.nope (T, N, P) and so on: family randn, pages shuffled.

    The same numbers on one kind of device, not those of `make_inputs`.
    """
    d, b, page, dtype = case.dims, case.batch, case.page_size, case.torch_dtype
    source = torch.Generator(device).manual_seed(case.random_seed)
    z = lambda *shape: torch.randn(shape, generator=source, device=device, dtype=dtype)
    up = (z(d.N * (d.P + d.V), d.L).float() / d.L**0.5).to(dtype).view(d.N, d.P + d.V, d.L).permute(2, 0, 1)
    q, rows = z(b.num_tokens, d.N, d.P + d.R), z(sum(b.seq_lens), d.L + d.R)
    pages = [-(-s // page) for s in b.seq_lens]
    num_pages, starts = sum(pages) + SPARE_PAGES, [0, *accumulate(pages)]
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(case.random_seed))
    table = torch.full((len(pages), max(pages) + 1), num_pages, dtype=torch.int64)
    for i, n in enumerate(pages):
        table[i, :n] = order[starts[i] : starts[i] + n]
    batch = AttentionBatch.bottom_right(
        b.query_lens, b.seq_lens, table, mask=b.mask, page_size=page, num_pages=num_pages, device=device
    )
    each = list(zip(rows.split(list(b.seq_lens)), b.query_lens, b.seq_lens, strict=True))
    keys = tuple((r[:, : d.L], r[:, d.L :]) for r, _, _ in each)
    new = torch.cat([r[s - n :] if s else rows.new_zeros(n, rows.shape[1]) for r, n, s in each])
    history = tuple(torch.arange(max(s - n, 0), device=device) for _, n, s in each)
    query, weights = Query(q[..., : d.P], q[..., d.P :]), UpProjection(up[..., : d.P], up[..., d.P :])
    return Inputs(query, weights, keys, new[:, : d.L], new[:, d.L :], batch, history, num_pages)


def sample(case: Case, most: int) -> tuple[list[int], list[int]]:
    """Return the rows and the heads to compare: as many requests as cost at most `most` roundings, but two at least.

    Of a request the first row, the last and random ones, ROWS in all where requests are few; first, last and two random
    heads. The first, the last and the longest request come before random ones.
    """
    chance, batch, N = random.Random(case.random_seed), case.batch, case.dims.N
    heads = sorted({0, N - 1, *chance.sample(range(N), min(N, 2))})
    starts = [0, *accumulate(batch.query_lens)]
    asked = [b for b, n in enumerate(batch.query_lens) if n]
    first = [asked[0], asked[-1], max(asked, key=lambda b: batch.seq_lens[b])]
    rest = [b for b in asked if b not in first]
    rows: set[int] = set()
    spent = 0
    for i, b in enumerate(dict.fromkeys([*first, *chance.sample(rest, len(rest))])):
        inside = range(starts[b], starts[b + 1])
        mine = {inside[0], inside[-1], *chance.sample(inside, min(len(inside), max(2, ROWS // len(asked))))}
        spent += roundings(dataclasses.replace(case, batch=_alone(case, b)), [r - inside[0] for r in mine], len(heads))
        if i > 1 and spent > most:
            break
        rows |= mine
    return sorted(rows), heads


def drawn_truth(case: Case, given: Inputs) -> Truth:
    """Return oracle and budget of the sampled rows of a big case, out (n, N, V), and the heads that they cover."""
    rows, heads = sample(case, _most(given))
    q, up = Query(*(x[:, heads] for x in given.q)), UpProjection(*(x[:, heads] for x in given.up))
    keys = [case.cache_layout.round_trip(*pair) for pair in given.keys]
    scale = case.dims.softmax_scale
    made = reference(q, keys, up, given.batch, scale, dtype=case.torch_dtype, seed=case.random_seed, rows=rows)
    return made, tuple(heads)


def drawn_latent_truth(case: Case, given: Inputs, q_latent: Tensor, q_pe: Tensor) -> Truth:
    """Return oracle and budget at the inner level, q_latent (T, N, L) and q_pe (T, N, R), out (n, N, L), and heads."""
    rows, heads = sample(case, _most(given))
    owners = [b for b, n in enumerate(case.batch.query_lens) for _ in range(n)]
    visible, parts = given.batch.row_kv_lens, []
    for b in sorted({owners[i] for i in rows}):
        index = torch.tensor([i for i in rows if owners[i] == b])
        at = index.to(q_pe.device)
        seen = visible[at]
        kv_c, k_pe = (x[: int(seen.max())] for x in case.cache_layout.round_trip(*given.keys[b]))
        made = latent_reference(
            q_latent[at][:, heads], q_pe[at][:, heads], kv_c, k_pe, seen, case.dims.softmax_scale,
            dtype=case.torch_dtype, seed=case.random_seed + b,
        )  # fmt: skip
        parts.append(dataclasses.replace(made, rows=index))
    names = [field.name for field in dataclasses.fields(Reference)]
    return Reference(*(torch.cat([getattr(part, name) for part in parts]) for name in names)), tuple(heads)


def _most(given: Inputs) -> int:
    return MOST["cuda" if given.new_kv_c.is_cuda else "cpu"]


def _alone(case: Case, b: int) -> BatchSpec:
    """The batch of one request."""
    batch = case.batch
    return dataclasses.replace(batch, query_lens=(batch.query_lens[b],), seq_lens=(batch.seq_lens[b],))
