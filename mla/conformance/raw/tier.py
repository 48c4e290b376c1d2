"""A tier around one raw kernel: which calls a batch becomes, and what is converted on the way.

Axes: T new tokens (packed over requests), B requests, s new tokens of each, N heads, L KV rank, R rope, V value.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mla.adapters import from_latent
from mla.batch import AttentionBatch
from mla.cache import FloatRows, PagedLatentCache
from mla.conformance.raw.arguments import CACHE_AXES, Call, packed_lse, run
from mla.conformance.raw.convention import Convention, find
from mla.errors import bad
from mla.need import Need
from mla.projections import Query, UpProjection
from mla.state import AttentionState
from mla.tier import Plan, Prepared, Tier, plan, prepare

LSE_AXES = ("B N s", "B s N", "T N", "N T")


@dataclass(frozen=True)
class Declared:
    """What the author of a kernel says about it; None is: not said, ask the kernel, or try it.

    lse_base "e" or "2", lse_axes such as "B N s", empty_lse ("-inf", "+inf", "0", "nan") and `cache` axes such as
    "page slot head row" are conventions: the probe has to agree. `lse` False: there is none. The rest are limits:
    max_query_len new tokens a call take (longer queries go in as several requests), empty_rows False keeps requests
    without keys from the kernel, flat True shows it the pool as pages of one row. What is outside of dtypes,
    page_sizes, heads and widths (L, R) is refused, and so are rows of another dtype than the query without other_rows.
    """

    lse_base: str | None = None
    lse_axes: str | None = None
    empty_lse: str | None = None
    cache: str | None = None
    lse: bool = True
    max_query_len: int | None = None
    empty_rows: bool = True
    flat: bool = False
    other_rows: bool = False
    dtypes: tuple[torch.dtype, ...] | None = None
    page_sizes: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    widths: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        known = {"lse_base": ("e", "2"), "lse_axes": LSE_AXES, "cache": CACHE_AXES}
        for name, values in known.items():
            if getattr(self, name) not in (None, *values):
                got, fix = repr(getattr(self, name)), "or leave it out and let the probe find it"
                raise bad(name, expected=f"one of {values}", got=got, fix=fix)

    def refusals(self, name: str, need: Need) -> list[str]:
        """Return a sentence for each field of `need` that is outside of what was declared."""
        asked = {"dtype": need.dtype, "page_size": need.page_size, "N": need.N, "(L, R)": (need.L, need.R)}
        taken = (self.dtypes, self.page_sizes, self.heads, self.widths)
        sentences = [
            f"{field} = {value} is not taken by {name}, declared for {', '.join(map(str, allowed))}; take one of these."
            for (field, value), allowed in zip(asked.items(), taken, strict=True)
            if allowed is not None and value not in allowed
        ]
        if not isinstance(need.layout, FloatRows) or (need.layout.dtype != need.dtype and not self.other_rows):
            taken_rows = "rows of floats" if self.other_rows else f"rows of the query's {need.dtype}"
            sentences.append(
                f"Rows of {need.layout.name} are not taken by {name}, which reads {taken_rows}; change them."
            )
        return sentences


@dataclass(frozen=True)
class RawTier(Tier):
    """A tier around a raw kernel; make it with `dense` or `ragged`. `roles` says which parameter gets what."""

    name: str
    kernel: Callable
    style: str
    roles: dict[str, str]
    declared: Declared
    found: dict[tuple, Convention] = field(default_factory=dict, repr=False)

    def convention(self, need: Need) -> Convention:
        """Return what the probe finds for the sizes of `need`, asked once; raises what the kernel raises.

        Raises ValueError where the LSE has another base than it had for the sizes of an earlier Need.
        """
        key = (need.device, need.dtype, need.layout, need.N, need.P, need.page_size, need.softmax_scale)
        if key not in self.found:
            axes = CACHE_AXES if self.declared.cache is None else (self.declared.cache,)
            made = find(self._ask, need, self.style, axes, self.declared.max_query_len, self.declared.empty_rows)
            others = {c.lse_base for c in self.found.values()} - {made.lse_base}
            if others:
                expected = f"{sorted(others)[0]!r}, as for other sizes"
                raise bad("lse_base", expected=expected, got=repr(made.lse_base), fix="use one base for all sizes")
            self.found[key] = made
        return self.found[key]

    def notes(self, need: Need) -> list[str]:
        """Return what the probe found and what the adapter does about it, in sentences for a report."""
        said, d = self.convention(need).sentences(), self.declared
        if self.converted_scale(need) != 1.0:
            said.append(f"The query is multiplied by {self.converted_scale(need):.6g} to make up for the scale.")
        if d.max_query_len is not None:
            said.append(f"Longer queries than {d.max_query_len} go in as several requests, as declared.")
        if not d.empty_rows:
            said.append("Requests without keys are kept from the kernel, as declared.")
        if d.flat:
            said.append("The pool is shown as pages of one row, as declared.")
        return said

    def converted_scale(self, need: Need) -> float:
        """Return what the query is multiplied with: 1, or softmax_scale / own where no parameter takes the scale."""
        if "softmax_scale" in self.roles.values():
            return 1.0
        found = self.convention(need)
        return math.nan if found.scale_name == "unknown" else need.softmax_scale / found.scale

    def why_not(self, need: Need) -> list[str]:
        """Return sentences for what is outside of the declared limits, and for an LSE that the kernel lacks."""
        sentences = self._inner().why_not(need) + self.declared.refusals(self.name, need)
        if sentences or not need.lse:
            return sentences
        try:
            found = self.convention(need)
        except Exception:  # a kernel that fails is not one that refuses: `prepare` raises it
            return []
        none = f"lse = True is refused: {self.name} returns no LSE; ask with lse = False (mla check --no-lse)."
        return [none] if found.lse_base == "none" else []

    def prepare(self, up: UpProjection, need: Need) -> Prepared:
        """Check the declared conventions against the kernel, W_UK (L, N, P) and W_UV (L, N, V) against `need`.

        Raises ValueError where the probe found another convention than was declared, or one that cannot be converted.
        """
        prepared = prepare(self, up, need)
        found, d = self.convention(need), self.declared
        given = ", ".join(f"{lse:.6g} for {n} keys of score 0" for n, lse in found.seen)
        checked = {"lse_base": found.lse_base, "lse_axes": found.lse_axes, "empty_lse": found.empty_lse}
        for name, got in checked.items():
            said = getattr(d, name)
            if said is not None and d.lse and got not in (said, ""):
                fix = f"mend the kernel, or declare {name}={got!r}"
                raise bad(name, expected=f"{said!r}, as declared", got=f"{got!r} ({given})", fix=fix)
        if need.lse and found.lse_base in ("maximum", "sum"):
            fix = "return the log-sum-exp, or declare lse=False"
            raise bad("kernel's lse", expected="an LSE in base e or 2", got=f"the {found.lse_base} ({given})", fix=fix)
        if not math.isfinite(self.converted_scale(need)):
            fix = "give the kernel a parameter softmax_scale"
            raise bad("softmax scale", expected="one that can be named", got=f"about {found.scale:.4g}", fix=fix)
        return prepared

    def plan(self, need: Need, batch: AttentionBatch, into: Plan | None = None) -> Plan:
        """Plan as any tier; the report holds what the probe found."""
        result = plan(self, need, batch, into)
        result.report = {"probe": self.notes(need)}
        return result

    def attend(
        self, q: Query, cache: PagedLatentCache, prepared: Prepared, plan: Plan, out: AttentionState | None = None
    ) -> AttentionState:
        """Absorb, run the kernel, project: out (T, N, V) and lse (T, N)."""
        return self._inner().attend(q, cache, prepared, plan, out)

    def latent(
        self, q_latent: Tensor, q_pe: Tensor, cache: PagedLatentCache, batch: AttentionBatch, need: Need
    ) -> AttentionState:
        """Run the kernel on q_latent (T, N, L) and q_pe (T, N, R), absorbed: out (T, N, L) and natural lse (T, N)."""
        found, wide = self.convention(need), need.compute_dtype
        factor = self.converted_scale(need)
        if factor != 1.0:
            q_latent, q_pe = ((x.to(wide) * factor).to(x.dtype) for x in (q_latent, q_pe))
        state = AttentionState.empty(*q_latent.shape, dtype=wide, device=q_latent.device)
        for rows, call in self._calls(q_latent, q_pe, cache, batch, need):
            out, lse = self._ask(call, found.cache)
            state.out[rows] = out.to(wide)
            if lse is not None and need.lse:
                given = packed_lse(lse, call, found.lse_axes).to(wide)
                state.parts()[1][rows] = self._natural(given, call, found)
        return state if need.lse else AttentionState(state.out, None)

    def _inner(self) -> Tier:
        return from_latent(self.name, self.latent)

    def _ask(self, call: Call, axes: str) -> tuple[Tensor, Tensor | None]:
        out, lse = run(self.kernel, self.roles, call.flat() if self.declared.flat else call, axes)
        return out, lse if self.declared.lse else None

    def _calls(
        self, q_latent: Tensor, q_pe: Tensor, cache: PagedLatentCache, batch: AttentionBatch, need: Need
    ) -> Iterator[tuple[Tensor | slice, Call]]:
        """Yield the rows of each call and the call; what belongs to no request is in none of them."""
        full = need.mask == "full" and "causal" in self.roles.values()
        pieces = self._pieces(batch, 0 if full else 1)
        lengths = [None] if self.style == "ragged" else sorted({q for _, _, q, _ in pieces})
        for length in lengths:
            chosen = [piece for piece in pieces if length in (None, piece[2])]
            if not chosen:
                continue
            at = [first + i for _, first, q, _ in chosen for i in range(q)]
            whole = at == list(range(at[0], at[-1] + 1))  # then strided views stay what they are
            rows = slice(at[0], at[-1] + 1) if whole else torch.tensor(at, device=q_latent.device)
            yield rows, Call(
                q_latent[rows], q_pe[rows], cache.data, batch.block_table[[b for b, *_ in chosen]],
                [q for _, _, q, _ in chosen], [s for *_, s in chosen], need.softmax_scale,
                lse=need.lse, causal=not full, style=self.style,
            )  # fmt: skip

    def _pieces(self, batch: AttentionBatch, step: int) -> list[tuple[int, int, int, int]]:
        """Cut the batch into (request, first row, new tokens, keys): a row sees `step` keys more than the one before.

        A causal request is one piece where the kernel takes so many tokens; rows without keys are pieces of 0 keys.
        """
        most = self.declared.max_query_len or batch.num_tokens
        visible, pieces, row = batch.row_kv_lens.tolist(), [], 0
        for b, query_len in enumerate(batch.query_lens_host):
            stop, first = row + query_len, row
            while first < stop:
                last = first
                while last + 1 < stop and last + 1 - first < most and _follows(visible[last], visible[last + 1], step):
                    last += 1
                pieces.append((b, first, last + 1 - first, visible[last]))
                first = last + 1
            row = stop
        return pieces if self.declared.empty_rows else [piece for piece in pieces if piece[3]]

    def _natural(self, lse: Tensor, call: Call, found: Convention) -> Tensor:
        """Return an LSE (T, N) as natural log, -inf in the rows of requests without keys that bear the kernel's mark.

        NaN is nobody's mark unless it is declared to be.
        """
        empty = torch.tensor([s == 0 for q, s in zip(call.query_lens, call.seq_lens, strict=True) for _ in range(q)])
        word = found.empty_lse if found.empty_lse != "nan" else self.declared.empty_lse or ""
        marked = torch.isnan(lse) if word == "nan" else lse == (float(word) if _is_number(word) else math.nan)
        natural = lse * math.log(2) if found.lse_base == "2" else lse
        return natural.masked_fill(marked & empty.to(lse.device)[:, None], -math.inf)


def _follows(visible: int, after: int, step: int) -> bool:
    return after == visible + step if visible else after == 0


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
