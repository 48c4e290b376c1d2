"""How close is close enough: the error budget, and the comparison that tests, CLI, notebooks and dashboard share.

Axes: T query rows, S keys, N heads, L KV rank, P nope, R rope, V value.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla.batch import AttentionBatch
from mla.errors import bad
from mla.oracle import oracle
from mla.projections import Query, UpProjection
from mla.replicas import UNIT_ROUNDOFF, Noise, Problem, expected_error
from mla.state import AttentionState

REPLICAS, MORE_REPLICAS, FEW_ROUNDINGS = 16, 64, 1_000_000
OUT_LIMIT_16, LSE_LIMIT_16, LIMIT_32 = 3.0, 6.0, 32.0
LSE_UNIT, ADDED_UNIT = 2.0**-22, 2.0**-23


@dataclass(frozen=True, eq=False)
class Reference:
    """The truth of some rows of a batch and the error that is allowed there, made once and shared by all tiers.

    rows (n,) int64 are the batch rows that were computed; out (n, N, V) and lse (n, N) float64 come from the oracle;
    out_limit (n, N) bounds rms(out - oracle) over V, lse_limit (n, N) bounds |lse - oracle|; empty (n,) marks rows that
    see no key, where the only right answer is 0 and -inf.
    """

    rows: Tensor
    out: Tensor
    lse: Tensor
    out_limit: Tensor
    lse_limit: Tensor
    empty: Tensor


@dataclass(frozen=True)
class Comparison:
    """How much of its budget a result uses: error / limit for out and LSE, the worst over rows and heads, and where.

    `status` is "ok", "mismatch", "not_finite", "wrong_shape" or "wrong_dtype"; used_lse is 0 without an LSE.
    """

    status: str
    used_out: float
    used_lse: float
    out_at: tuple[int, int] | None = None
    lse_at: tuple[int, int] | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        """True where every compared row is within its budget."""
        return self.status == "ok"


def limits(
    dtype: torch.dtype,
    out: Tensor,
    lse: Tensor,
    e_out: Tensor,
    e_lse: Tensor,
    row_kv_lens: Tensor,
    added: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Turn expected errors (T, N) into limits (T, N) for rms(out - oracle) and |lse - oracle|.

    16 bits: 3 (e_out + u rms(out)) and 6 (e_lse + 2^-22 (1 + |lse|)).
    float32: 32 (e_out + u (1 + |lse|) rms(out)) + row_kv_lens / 4 * u rms(out), and the LSE rule with 32.
    Level "latent", where the `magnitudes` B and A (T, N) are given as `added`: the output has 2^-23 B more, and the LSE
    1e-5 + 8e-5 |lse| + 2^-23 A instead. out (T, N, V), lse (T, N), row_kv_lens (T,).
    """
    u, size = UNIT_ROUNDOFF[dtype], out.square().mean(-1).sqrt()
    slack = e_lse + LSE_UNIT * (1 + lse.abs())
    if dtype == torch.float32:
        out_limit = LIMIT_32 * (e_out + u * (1 + lse.abs()) * size) + row_kv_lens[:, None] / 4 * u * size
        lse_limit = LIMIT_32 * slack
    else:
        out_limit, lse_limit = OUT_LIMIT_16 * (e_out + u * size), LSE_LIMIT_16 * slack
    if added is None:
        return out_limit, lse_limit
    return out_limit + ADDED_UNIT * added[0], 1e-5 + 8e-5 * lse.abs() + ADDED_UNIT * added[1]


def magnitudes(
    q: Tensor, keys: Tensor, truth: tuple[Tensor, Tensor], row_kv_lens: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Return B and A, both (T, N) float64: what the sums of the scores add, sign apart, as it moves output and LSE.

    a_s = softmax_scale sum_d |q_d k_sd|, p = exp(score - lse), A = sum_s p_s a_s, B = sum_s p_s a_s rms(k_s - out)

    q (T, N, K) is absorbed, keys (S, K) are rows as cached, K = L + R, `truth` is (out (T, N, L), lse (T, N)) of the
    oracle; row t sees keys 0 .. row_kv_lens[t] - 1, at least one; in rms(k_s - out) k_s is its first L numbers. Scores
    off by at most u a_s move the LSE by at most u A and the output by at most u B (first order). Where products cancel,
    the error of a score belongs to its partial sums x_1 .. x_n and not to what is left of them:

    - A float32 accumulator that is cut off after each step (tensor cores: 16 products a step) loses less than
      2^-23 (|x_1| + .. + |x_n|). In random order, x_k has mean square (k/n)^2 x_n^2 + (k/n) (1 - k/n) sum_d t_d^2 for
      the products t_d (large K), and the sum of |x_k| is at most n |x_n| / 2 + n pi/8 sqrt(sum_d t_d^2) in the mean. Of
      the first part, 36/2 2^-23 |x_n| is 2e-6 |x_n|: inside 8e-5 |lse|. For products of normal numbers,
      sqrt(sum_d t_d^2) is pi/2 sum_d |t_d| / sqrt(K), so the second is 0.62 n / sqrt(K) a: 0.93 a for K = 576, n = 36.
    - Products added one by one and rounded to nearest, by 2^-24 |x_k| at most and with random signs, are off by an RMS
      of 2^-24 sqrt(sum_k x_k^2 / 3), by the same means 0.19 of 2^-23 a, whatever K is.

    So 2^-23 a allows for all that is cut off in steps of 16 and for five sigma of rounding one by one. The bound that
    leaves nothing to chance is n 2^-23 a (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1), 36
    times as much: faults would hide there.
    """
    q, keys, (out, lse) = q.to(torch.float64), keys.to(torch.float64), truth
    hidden = torch.arange(len(keys), device=keys.device) >= row_kv_lens.to(keys.device)[:, None]  # (T, S)
    scores = (q @ keys.T * softmax_scale).masked_fill(hidden[:, None], float("-inf"))  # (T, N, S)
    weighted = torch.exp(scores - lse[..., None]) * (q.abs() @ keys.abs().T) * softmax_scale
    values = keys[:, : out.shape[-1]]
    size = lambda x: x.square().mean(-1)
    square = size(values) - 2 / values.shape[1] * out @ values.T + size(out)[..., None]  # of rms(k_s - out)
    return (weighted * square.clamp(min=0).sqrt()).sum(-1), weighted.sum(-1)


def reference(
    q: Query,
    keys: Sequence[tuple[Tensor, Tensor]],
    up: UpProjection,
    batch: AttentionBatch,
    softmax_scale: float,
    *,
    dtype: torch.dtype,
    seed: int,
    rows: Sequence[int] | None = None,
) -> Reference:
    """Compute the oracle and the budget for `rows` of a batch (default: all rows).

    q.nope (T, N, P) and q.pe (T, N, R); `keys[b]` is (kv_c (>= seq_len, L), k_pe (>= seq_len, R)) of request b as the
    cache layout gives them back (`layout.round_trip`, made from the inputs and never read from a tier); up is W_UK
    (L, N, P) and W_UV (L, N, V); `dtype` is the query's, the one that intermediates are stored in. Raises ValueError
    where the budget itself is not finite. Source: docs/explanation/design.md, "When is a result right".
    """
    owners = _owners(batch)
    visible = batch.row_kv_lens.cpu()
    chosen = list(range(batch.num_tokens)) if rows is None else sorted(set(rows))
    noise = Noise(seed, q.nope.device)
    parts = []
    for b in sorted({owners[i] for i in chosen}):
        index = torch.tensor([i for i in chosen if owners[i] == b])
        lens = visible[index]
        S = int(lens.max()) if b >= 0 else 0
        kv_c, k_pe = (
            x[:S]
            for x in (keys[b] if b >= 0 else (q.nope.new_empty(0, up.W_UK.shape[0]), q.pe.new_empty(0, q.pe.shape[-1])))
        )
        at = index.to(q.nope.device)
        problem = Problem(q.nope[at], q.pe[at], kv_c, k_pe, up.W_UK, up.W_UV, lens.to(q.nope.device), softmax_scale)
        parts.append((index, *_solve(problem, dtype, noise, "attend")))
    return _assemble(parts, q.nope.shape[1], up.W_UV.shape[2])


def latent_reference(
    q_latent: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    row_kv_lens: Tensor,
    softmax_scale: float,
    *,
    dtype: torch.dtype,
    seed: int,
) -> Reference:
    """Compute oracle and budget of one request at the level of raw kernels: absorbed query in, latent output out.

    q_latent (T, N, L) and q_pe (T, N, R) as the kernel is given them, kv_c (S, L), k_pe (S, R), row_kv_lens (T,). With
    the identity as up-projection and heads as rows of a single head this is the same attention.
    """
    T, N, L = q_latent.shape
    eye = torch.eye(L, dtype=torch.float64, device=q_latent.device)[:, None, :]
    one_head = (q_latent.reshape(T * N, 1, L), q_pe.reshape(T * N, 1, q_pe.shape[-1]))
    problem = Problem(*one_head, kv_c, k_pe, eye, eye, row_kv_lens.repeat_interleave(N), softmax_scale)
    out, lse, out_limit, lse_limit, empty = _solve(problem, dtype, Noise(seed, q_latent.device), "latent", heads=N)
    shape = lambda x: x.reshape(T, N, *x.shape[2:])
    return Reference(
        torch.arange(T), shape(out), shape(lse), shape(out_limit), shape(lse_limit), empty.view(T, N)[:, 0]
    )


def compare(state: AttentionState, truth: Reference) -> Comparison:
    """Say how much of the budget a result uses: state.out (T, N, V) and state.lse (T, N) or None, against a Reference.

    All rows of the state are checked for finite values, the reference's rows against their limits; empty rows must be
    exactly 0 and -inf. The state may be of any device and float dtype.
    """
    n, N, V = truth.out.shape
    if state.out.dim() != 3 or state.out.shape[1:] != (N, V) or (n and state.out.shape[0] <= int(truth.rows.max())):
        return Comparison(
            "wrong_shape", float("inf"), 0.0, detail=f"out is {tuple(state.out.shape)}, expected (T, {N}, {V})"
        )
    if state.lse is not None and tuple(state.lse.shape) != tuple(state.out.shape[:2]):
        return Comparison(
            "wrong_shape",
            0.0,
            float("inf"),
            detail=f"lse is {tuple(state.lse.shape)}, expected {tuple(state.out.shape[:2])}",
        )
    if not bool(torch.isfinite(state.out).all()):
        row, head = _first(~torch.isfinite(state.out).all(-1))
        return Comparison(
            "not_finite", float("inf"), 0.0, (row, head), detail=f"out of row {row}, head {head} is not finite"
        )
    if state.lse is not None and bool((torch.isnan(state.lse) | (state.lse == float("inf"))).any()):
        row, head = _first(torch.isnan(state.lse) | (state.lse == float("inf")))
        return Comparison(
            "not_finite", 0.0, float("inf"), None, (row, head), detail=f"lse of row {row}, head {head} is NaN or +inf"
        )
    rows = truth.rows.to(state.out.device)
    out = state.out[rows].to(truth.out.device, torch.float64)
    error = (out - truth.out).square().mean(-1).sqrt()
    used_out, out_at = _worst(_ratio(error, truth.out_limit, truth.empty), truth.rows)
    used_lse, lse_at = 0.0, None
    if state.lse is not None:
        lse = state.lse[rows].to(truth.lse.device, torch.float64)
        wrong = torch.where(truth.empty[:, None], (lse != float("-inf")).double(), (lse - truth.lse).abs())
        used_lse, lse_at = _worst(_ratio(wrong, truth.lse_limit, truth.empty), truth.rows)
    status = "ok" if used_out <= 1 and used_lse <= 1 else "mismatch"
    return Comparison(status, used_out, used_lse, out_at, lse_at)


def _solve(problem: Problem, dtype: torch.dtype, noise: Noise, level: str, heads: int | None = None):
    """Truth and limits of the rows of one request, empty ones included: out, lse, out_limit, lse_limit, empty."""
    fields = (problem.q_nope, problem.q_pe, problem.kv_c, problem.k_pe, problem.W_UK, problem.W_UV, problem.row_kv_lens)
    empty = problem.row_kv_lens == 0
    clean = torch.where(empty[:, None, None], 0, problem.q_nope), torch.where(empty[:, None, None], 0, problem.q_pe)
    out, lse = oracle(*clean, *fields[2:], problem.softmax_scale)
    out_limit, lse_limit = torch.zeros_like(lse), torch.zeros_like(lse)
    if bool(empty.all()):
        return out, lse, out_limit, lse_limit, empty
    live = ~empty
    some = Problem(clean[0][live], clean[1][live], *fields[2:6], problem.row_kv_lens[live], problem.softmax_scale)
    replicas = MORE_REPLICAS if some.roundings(MORE_REPLICAS) < FEW_ROUNDINGS else REPLICAS
    forms = ("latent",) if level == "latent" else ("mha", "mqa")
    errors = expected_error(some, (out[live], lse[live]), dtype, replicas, noise, forms)
    tokens = lambda e: e if heads is None else e.view(-1, heads)  # at the latent level heads came in as rows
    e_out, e_lse = (torch.maximum(tokens(e), tokens(e).mean(1, keepdim=True)).view_as(e) for e in errors)
    added = None
    if level == "latent":  # W_UK is the identity: q_nope is the absorbed query
        q, keys = torch.cat([some.q_nope, some.q_pe], -1), torch.cat([some.kv_c, some.k_pe], -1)
        added = magnitudes(q, keys, (out[live], lse[live]), some.row_kv_lens, some.softmax_scale)
    a, b = limits(dtype, out[live], lse[live], e_out, e_lse, some.row_kv_lens, added)
    if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise bad(
            "case", expected="a finite budget", got="NaN or inf", fix="give the oracle finite queries, rows and weights"
        )
    out_limit[live], lse_limit[live] = a, b
    return out, lse, out_limit, lse_limit, empty


def _assemble(parts, N: int, V: int) -> Reference:
    if not parts:
        nothing = torch.zeros(0, N, dtype=torch.float64)
        return Reference(
            torch.zeros(0, dtype=torch.int64),
            torch.zeros(0, N, V, dtype=torch.float64),
            nothing,
            nothing,
            nothing,
            torch.zeros(0, dtype=torch.bool),
        )
    return Reference(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _owners(batch: AttentionBatch) -> list[int]:
    owners = [b for b, q in enumerate(batch.query_lens_host) for _ in range(q)]
    return owners + [-1] * (batch.num_tokens - len(owners))


def _ratio(error: Tensor, limit: Tensor, empty: Tensor) -> Tensor:
    """error / limit, where an empty row (limit 0) allows nothing: 0 if exact, else inf."""
    exact = torch.where(error == 0, 0.0, float("inf"))
    return torch.where(empty[:, None] | (limit == 0), exact, error / limit)


def _worst(ratio: Tensor, rows: Tensor) -> tuple[float, tuple[int, int] | None]:
    if ratio.numel() == 0:
        return 0.0, None
    flat = int(ratio.argmax())
    return float(ratio.flatten()[flat]), (int(rows[flat // ratio.shape[1]]), flat % ratio.shape[1])


def _first(bad_rows: Tensor) -> tuple[int, int]:
    row, head = bad_rows.nonzero()[0].tolist()
    return row, head
