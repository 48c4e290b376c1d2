"""What the tools that judge the judging share: kernels that are right, the zoo's that are not, cases, and answers.

Axes: T new tokens (packed over requests), S cached tokens, N heads, L KV rank, P nope, R rope, V value.
"""

import copy
import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import tiers  # noqa: E402
from mla.accuracy import Reference, latent_reference, reference  # noqa: E402
from mla.adapters import from_attend, from_latent  # noqa: E402
from mla.batch import AttentionBatch  # noqa: E402
from mla.cache import CacheSpec, PagedLatentCache, slots_of  # noqa: E402
from mla.conformance.cases import DIMS, NEEDLES, Case  # noqa: E402
from mla.conformance.guards import check_form, fill_cache  # noqa: E402
from mla.conformance.inputs import Inputs, make_inputs  # noqa: E402
from mla.conformance.specs import spec  # noqa: E402
from mla.conformance.zoo import kernel  # noqa: E402
from mla.need import Need  # noqa: E402
from mla.projections import Query, UpProjection, absorb_query  # noqa: E402
from mla.state import AttentionState  # noqa: E402
from mla.tier import Tier  # noqa: E402

FAMILIES = ("randn", "peaked", "needle", "equal_keys", "large_logits")
DTYPES = ("bf16", "f16", "f32")


@dataclass(frozen=True, eq=False)
class Scene:
    """A case with its inputs and the truth of all its rows and heads.

    A `tame` one is as the field has them: q and rows divided by 10, zeros in slots and table entries of nobody.
    """

    case: Case
    given: Inputs
    need: Need
    truth: Reference
    tame: bool = False


def scene(case: Case, tame: bool = False) -> Scene:
    """Make inputs and truth of a case."""
    given, need = make_inputs(case), case.need()
    if tame:
        given = tamed(given)
    keys = [case.cache_layout.round_trip(*pair) for pair in given.keys]
    options: dict[str, Any] = {"dtype": case.torch_dtype, "seed": case.random_seed}
    truth = reference(given.q, keys, given.up, given.batch, need.softmax_scale, **options)
    return Scene(case, given, need, truth, tame)


def tamed(given: Inputs) -> Inputs:
    """Return the inputs with q.nope (T, N, P), q.pe and all rows divided by 10, and 0 in unused table entries."""
    batch, table = given.batch, given.batch.block_table.clone()
    for b, S in enumerate(batch.seq_lens_host):
        table[b, -(-S // batch.page_size) :] = 0
    keys = tuple((kv_c / 10, k_pe / 10) for kv_c, k_pe in given.keys)
    q, new_kv_c, new_k_pe = Query(given.q.nope / 10, given.q.pe / 10), given.new_kv_c / 10, given.new_k_pe / 10
    batch = dataclasses.replace(batch, block_table=table)
    return dataclasses.replace(given, q=q, keys=keys, new_kv_c=new_kv_c, new_k_pe=new_k_pe, batch=batch)


def filled(tier: Tier, s: Scene, given: Inputs) -> PagedLatentCache:
    """Return a tier's cache, data (pages, page_size, L+R), written its way over poison, or zeros if tame."""
    if not s.tame:
        return fill_cache(tier, s.case, given, "cpu")
    cache, page = tier.new_cache(CacheSpec(given.num_pages, s.case.page_size, s.case.cache_layout)), s.case.page_size
    cache.data.zero_()
    for b, (old, (kv_c, k_pe)) in enumerate(zip(given.history, given.keys, strict=True)):
        tier.write(cache, kv_c[old], k_pe[old], slots_of(given.batch.block_table[b], 0, kv_c.shape[0], page)[old])
    tier.write(cache, given.new_kv_c, given.new_k_pe, given.batch.slot_mapping)
    return cache


def latent_truth(s: Scene) -> Reference:
    """The truth of a case at the level of raw kernels, out (T, N, L) and lse (T, N), request by request."""
    batch, parts, start = s.given.batch, [], 0
    q_latent = absorb_query(s.given.q.nope, s.given.up.W_UK).to(s.need.dtype)
    options: dict[str, Any] = {"dtype": s.need.dtype, "seed": s.case.random_seed}
    for query_len, pair in zip(batch.query_lens_host, s.given.keys, strict=True):
        rows = slice(start, start + query_len)
        rounded, seen = s.case.cache_layout.round_trip(*pair), batch.row_kv_lens[rows]
        part = latent_reference(q_latent[rows], s.given.q.pe[rows], *rounded, seen, s.need.softmax_scale, **options)
        parts.append((part.rows + start, part.out, part.lse, part.out_limit, part.lse_limit, part.empty))
        start += query_len
    return Reference(*(torch.cat(column) for column in zip(*parts, strict=True)))


def answer(tier: Tier, s: Scene) -> AttentionState | None:
    """What a tier answers, out (T, N, V) and lse (T, N), to inputs and a cache of its own.

    None where it raises, or returns something of another form: that is found, whatever the rule.
    """
    try:
        given = copy.deepcopy(s.given)
        cache = filled(tier, s, given)
        state = tier.attend(given.q, cache, tier.prepare(given.up, s.need), tier.plan(s.need, given.batch))
        check_form(state, s.need, given.batch.num_tokens)
        return state
    except Exception:
        return None


def latent_answer(raw: Any, s: Scene) -> AttentionState | None:
    """What a raw kernel answers, out (T, N, L) rounded to the query's dtype and lse (T, N); None where it raises."""
    try:
        given = copy.deepcopy(s.given)
        cache = fill_cache(tiers.get("naive"), s.case, given, "cpu")
        q_latent = absorb_query(given.q.nope, given.up.W_UK).to(s.need.dtype)
        state = raw(q_latent, given.q.pe, cache, given.batch, s.need)
        return AttentionState(state.out.to(s.need.dtype), state.lse)
    except Exception:
        return None


def storing_latent(
    q_latent: Tensor, q_pe: Tensor, cache: PagedLatentCache, batch: AttentionBatch, need: Need
) -> AttentionState:
    """Attend as absorbed kernels do: probabilities and the latent output stored in the query's dtype, scores float32.

    q_latent (T, N, L), q_pe (T, N, R) -> out (T, N, L), lse (T, N). About as inexact as a right kernel gets.
    """
    stored = lambda x: x.to(need.dtype).float()
    out, lse = AttentionState.empty(batch.num_tokens, need.N, need.L).parts()
    query = torch.cat([q_latent, q_pe], -1).float()
    for b, rows in batch.row_blocks(need.N):
        kv_c, k_pe = _rows(cache, batch, b)
        weights, total, lse[rows] = _softmax(query[rows] @ torch.cat([kv_c, k_pe], -1).T, batch.row_kv_lens[rows], need)
        out[rows] = stored(torch.where(total > 0, stored(weights) @ kv_c / total, 0))
    return AttentionState(out, lse)


def storing_mha(
    q: Query, cache: PagedLatentCache, batch: AttentionBatch, up: UpProjection, need: Need
) -> AttentionState:
    """Attend as expanded kernels do: k_nope, v and probabilities stored in the query's dtype, scores in float32.

    q.nope (T, N, P), q.pe (T, N, R) -> out (T, N, V), lse (T, N).
    """
    stored = lambda x: x.to(need.dtype).float()
    out, lse = AttentionState.empty(batch.num_tokens, need.N, need.V).parts()
    for b, rows in batch.row_blocks(need.N):
        kv_c, k_pe = _rows(cache, batch, b)
        k_nope, v = (stored(torch.einsum("sl,lnd->nsd", kv_c, W.float())) for W in (up.W_UK, up.W_UV))
        nope, pe = q.nope[rows].float().transpose(0, 1), q.pe[rows].float().transpose(0, 1)
        scores = (nope @ k_nope.mT + pe @ k_pe.T).transpose(0, 1)  # (rows, N, S)
        weights, total, lse[rows] = _softmax(scores, batch.row_kv_lens[rows], need)
        mixed = (stored(weights).transpose(0, 1) @ v).transpose(0, 1)
        out[rows] = torch.where(total > 0, mixed / total, 0)
    return AttentionState(out, lse)


def _rows(cache: PagedLatentCache, batch: AttentionBatch, b: int) -> tuple[Tensor, Tensor]:
    slots = slots_of(batch.block_table[b], 0, batch.seq_lens_host[b], batch.page_size)
    kv_c, k_pe = cache.read(slots)
    return kv_c.float(), k_pe.float()


def _softmax(scores: Tensor, row_kv_lens: Tensor, need: Need) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (rows, N, S), their sum (rows, N, 1) and the LSE (rows, N) of unscaled scores (rows, N, S)."""
    S = scores.shape[-1]
    hidden = torch.arange(S) >= row_kv_lens[:, None, None]
    scores = (scores * need.softmax_scale).masked_fill(hidden, float("-inf"))
    top = scores.amax(-1, keepdim=True) if S else scores.new_full((*scores.shape[:2], 1), float("-inf"))
    weights = torch.exp(scores - top.masked_fill(top == float("-inf"), 0.0))
    total = weights.sum(-1, keepdim=True)
    return weights, total, (top + total.log())[..., 0]


def correct_kernels() -> dict[str, tuple[str, Tier]]:
    """Every kernel that is right, with its form: tiers, which keep intermediates in float32, and what stores them."""
    return {
        "naive:mha": ("mha", tiers.get("naive", form="mha")),
        "paged:mha": ("mha", tiers.get("paged", form="mha")),
        "storing:mha": ("mha", from_attend("storing:mha", storing_mha)),
        "naive:mqa": ("mqa", tiers.get("naive", form="mqa")),
        "paged:mqa": ("mqa", tiers.get("paged", form="mqa")),
        "template": ("mqa", tiers.get(ROOT / "tiers" / "template.py")),
        "zoo kernel": ("mqa", from_latent("zoo kernel", kernel.attend)),
        "storing:mqa": ("mqa", from_latent("storing:mqa", storing_latent)),
    }


def cases(dims: str, batches: Sequence[str], dtypes: Sequence[str], seeds: int, page: int = 16) -> Iterator[Case]:
    """Every family on every batch and dtype; the needle takes its places in turn."""
    for seed in range(seeds):
        for i, name in enumerate(batches):
            for family in FAMILIES:
                place = NEEDLES[(seed + i) % len(NEEDLES)] if family == "needle" else family
                for dtype in dtypes:
                    yield Case(spec(name), DIMS[dims], dtype, "", place, "shuffled", page, seed)


def raw_kernels() -> dict[str, Any]:
    """Every raw kernel that is right: (q_latent (T, N, L), q_pe (T, N, R), cache, batch, need) -> AttentionState."""
    return {"zoo kernel": kernel.attend, "storing": storing_latent}


def progress(task: str, things: Sequence[Any]) -> Iterator[Any]:
    """Yield the things, and say on standard error how far that is."""
    for i, thing in enumerate(things, 1):
        print(f"\r{task}: {i} of {len(things)}", end="\n" if i == len(things) else "", file=sys.stderr, flush=True)
        yield thing


def family_of(case: Case) -> str:
    """The case's family, all places of the needle as one."""
    return "needle" if case.family.startswith("needle") else case.family


def put_between(page: Path, mark: str, text: str) -> None:
    """Replace what stands between `<!-- mark -->` and `<!-- /mark -->` of a page; raises ValueError without marks."""
    old = page.read_text(encoding="utf-8")
    new, count = re.subn(
        rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)", lambda m: m[1] + text + m[2], old, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"{page}: expected one pair of marks {mark!r}, got {count}. Fix: put them in.")
    page.write_text(new, encoding="utf-8")


def save(path: Path, record: dict[str, Any]) -> None:
    """Write a record as JSON, one line for each row of its tables."""
    body = json.dumps(record, indent=1)
    body = re.sub(r"\n {3,}", " ", body)
    path.write_text(re.sub(r"\n {2}([\]}])", r" \1", body) + "\n", encoding="utf-8")


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
