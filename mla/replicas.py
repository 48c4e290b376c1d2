"""How much error must a kernel have that stores its intermediates in a given dtype? Roll the dice and see.

The float64 computation runs K times for each form; every intermediate that such a kernel stores is rounded up or down
at random, with probability proportional to the distance. The RMS over the replicas is the error to be expected.
Axes: K replicas, T query rows, S keys, N heads, L KV rank, P nope, R rope, V value.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mla.errors import bad

SCORES_AT_ONCE = 2_000_000
UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
_DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 29}


@dataclass(frozen=True)
class Problem:
    """One request's attention with sampled query rows: the tensors that the oracle and the replicas share.

    q_nope (T, N, P), q_pe (T, N, R), kv_c (S, L), k_pe (S, R), W_UK (L, N, P), W_UV (L, N, V), row_kv_lens (T,) >= 1;
    every value already rounded to what the tier is given.
    """

    q_nope: Tensor
    q_pe: Tensor
    kv_c: Tensor
    k_pe: Tensor
    W_UK: Tensor
    W_UV: Tensor
    row_kv_lens: Tensor
    softmax_scale: float

    def rows(self, start: int, stop: int) -> "Problem":
        """The same problem for query rows start .. stop - 1 only, with q_nope (stop - start, N, P) and so on."""
        part = slice(start, stop)
        rows = {name: getattr(self, name)[part] for name in ("q_nope", "q_pe", "row_kv_lens")}
        return dataclasses.replace(self, **rows)

    def roundings(self, replicas: int) -> int:
        """K * S * N * (P + V + 2 T): what the expected error of this problem costs to estimate."""
        T, N, P = self.q_nope.shape
        return replicas * self.kv_c.shape[0] * N * (P + self.W_UV.shape[2] + 2 * T)


class Noise:
    """Seeded random low bits for stochastic rounding, on any device."""

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        """Start the stream of `seed`; the CPU's stream is the same on every machine."""
        self.device = torch.device(device)
        self._numpy = np.random.Generator(np.random.SFC64(seed))
        self._torch = None if self.device.type == "cpu" else torch.Generator(self.device).manual_seed(seed)

    def bits(self, shape: torch.Size, count: int) -> Tensor:
        """Return int32 numbers of `shape`, uniform in 0 .. 2^count - 1."""
        if self._torch is not None:
            return torch.randint(0, 1 << count, shape, dtype=torch.int32, device=self.device, generator=self._torch)
        dtype = np.uint16 if count <= 16 else np.int32
        return torch.from_numpy(self._numpy.integers(0, 1 << count, size=tuple(shape), dtype=dtype).astype(np.int32))

    def round(self, x: Tensor, dtype: torch.dtype, copies: int | None = None) -> Tensor:
        """Round x, of any shape, to a neighbour on dtype's grid, up or down in proportion; the result keeps x.dtype.

        float32 values are rounded to a 16-bit dtype, float64 values to float32 (in dtype's normal range). `copies`
        independent draws come stacked in front: (copies, *x.shape).
        """
        drop = _DROPPED_BITS[dtype]
        integers = x.contiguous().view(torch.int64 if x.dtype == torch.float64 else torch.int32)
        shape = x.shape if copies is None else (copies, *x.shape)
        noisy = self.bits(torch.Size(shape), drop).to(integers.dtype)
        return noisy.add_(integers).bitwise_and_(-(1 << drop)).view(x.dtype)


def expected_error(
    problem: Problem,
    truth: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    replicas: int,
    noise: Noise,
    forms=("mha", "mqa"),
):
    """Return (e_out, e_lse), both (T, N) float64: the RMS error over replicas, the larger of the two forms.

    e = max over forms of sqrt(mean_k |replica_k - truth|^2); `truth` is (out (T, N, V), lse (T, N)) of the oracle.
    Rounded in each replica: q_latent, or k_nope and v; the probabilities; the latent output; the output; and scores to
    float32. Form "latent" rounds the probabilities and the output only (the inner kernel of an absorbed tier).
    Raises ValueError for a dtype that replicas cannot round to.
    """
    if dtype not in UNIT_ROUNDOFF:
        raise bad(
            "dtype",
            expected=f"one of {tuple(UNIT_ROUNDOFF)}",
            got=str(dtype),
            fix="float64 needs no replicas: compare to 1e-10",
        )
    T, N, _ = problem.q_nope.shape
    S = problem.kv_c.shape[0]
    row_step = max(1, SCORES_AT_ONCE // max(1, N * S))
    work = torch.float64 if dtype == torch.float32 else torch.float32
    parts = []
    for start in range(0, T, row_step):
        stop = min(T, start + row_step)
        part, target = problem.rows(start, stop), tuple(x[start:stop].transpose(0, 1) for x in truth)
        errors = [_form_error(part, target, form, dtype, work, replicas, noise) for form in forms]
        parts.append([torch.stack(e).amax(0).T for e in zip(*errors, strict=True)])
    return tuple(torch.cat(e) for e in zip(*parts, strict=True))


def _form_error(problem: Problem, truth, form: str, dtype, work, replicas: int, noise: Noise) -> tuple[Tensor, Tensor]:
    """RMS errors (N, T) of one form; heads come first, so that every product is a batched matrix product."""
    names = ("q_nope", "q_pe", "kv_c", "k_pe", "W_UK", "W_UV")
    q_nope, q_pe, kv_c, k_pe, W_UK, W_UV = (getattr(problem, n).to(torch.float64) for n in names)
    q_nope, q_pe = q_nope.transpose(0, 1), q_pe.transpose(0, 1)  # (N, T, P), (N, T, R)
    rope = (q_pe @ k_pe.T).to(work)  # (N, T, S)
    hidden = torch.arange(kv_c.shape[0], device=kv_c.device) >= problem.row_kv_lens[:, None]  # (T, S)
    if form == "mha":
        query, keys, values = q_nope, (kv_c @ W_UK.permute(1, 0, 2)).transpose(1, 2), kv_c @ W_UV.permute(1, 0, 2)
    else:
        query, keys, values = q_nope @ W_UK.permute(1, 2, 0), kv_c.T, kv_c  # (N, T, L), (L, S), (S, L)
    query, keys, values, up = (x.to(work) for x in (query, keys, values, W_UV.permute(1, 0, 2)))
    sum_out, sum_lse = torch.zeros_like(truth[1]), torch.zeros_like(truth[1])
    step = max(1, SCORES_AT_ONCE // max(1, rope.numel()))
    for start in range(0, replicas, step):
        k = min(step, replicas - start)
        fresh = lambda x, k=k: noise.round(x, dtype, copies=k)
        if form == "mha":
            scores = query @ fresh(keys)
        else:
            scores = (query.repeat(k, 1, 1, 1) if form == "latent" else fresh(query)) @ keys
        scores = scores.add_(rope).mul_(problem.softmax_scale).float().to(work).masked_fill_(hidden, float("-inf"))
        top = scores.amax(-1, keepdim=True)
        weights = scores.sub_(top).exp_()  # (k, N, T, S)
        total = weights.sum(-1, keepdim=True, dtype=torch.float64)
        stored = noise.round(weights, dtype)
        out = (stored @ (fresh(values) if form == "mha" else values)) / total.to(work)
        if form == "mqa":
            folded = noise.round(out, dtype).transpose(0, 1).flatten(1, 2)  # (N, k*T, L): W_UV is not copied k times
            out = (folded @ up).unflatten(1, (k, -1)).transpose(0, 1)
        out = noise.round(out, dtype).to(torch.float64)
        sum_out += (out - truth[0]).square().mean(-1).sum(0)
        sum_lse += (top[..., 0].to(torch.float64) + total[..., 0].log() - truth[1]).square().sum(0)
    return (sum_out / replicas).sqrt(), (sum_lse / replicas).sqrt()
