"""Checkers of notebook 07: roofline. All of it is arithmetic on whole sizes.

Axes: N heads, L KV rank, P nope, R rope, V value; q new tokens of a request.
"""

import math
import random
from collections.abc import Callable
from typing import Any

from check.known import pair
from check.verdict import checker, judge
from mla.cost import BatchCounts, cache_bytes_per_token, latent_cost
from mla.presets import preset

Answer = Callable[..., Any]


@checker
def intensity(fn: Answer) -> tuple[bool, str]:
    """Judge `intensity(q, N, L, R, row_bytes)`: FLOP per byte of absorbed decode over a long context."""
    for q, N, L, R, row in (
        (1, 128, 512, 64, 1152),
        (1, 16, 512, 64, 656),
        (random.choice((3, 5)), 20, 256, 32, 576),
    ):
        right = q * N * 2 * (2 * L + R) / row
        config = preset("deepseek-v3").replace(num_attention_heads=N, kv_lora_rank=L, qk_rope_head_dim=R)
        counted = latent_cost(config, BatchCounts(q, 10**9, q * 10**9), row_bytes=row).intensity
        assert math.isclose(counted, right, rel_tol=1e-4)
        hints = {
            "half of it: a multiply and an add are 2 FLOPs": right / 2,
            "the heads are missing: a row is read once and used by all of them": right / N,
            "the row is counted once per head, but it is read once for all": right / N,
            "the new tokens are missing: all q of a request use the row that is read": right / q if q > 1 else None,
            "a score is L + R wide, a value L: 2 L + R together": q * N * 2 * (L + R) / row,
            "the value part has no rope: 2 L + R, not 2 (L + R)": q * N * 4 * (L + R) / row,
            "a row is row_bytes large, whatever its numbers are": q * N * 2 * (2 * L + R) / ((L + R) * 2),
            "upside down: FLOP per byte": 1 / right,
        }
        known = {why: x for why, x in hints.items() if x is not None and not math.isclose(x, right)}
        ok, why = judge(fn(q, N, L, R, row), right, known)
        if not ok:
            return False, f"q={q}, N={N}, L={L}, R={R}, {row} bytes a row: {why}"
    return True, "equal to mla.cost.latent_cost over a billion keys"


@checker
def roof(fn: Answer) -> tuple[bool, str]:
    """Judge `roof(flops, bytes, peak, bandwidth)` -> seconds and "memory" or "compute"."""
    for _ in range(4):
        peak, bandwidth = random.uniform(100, 900) * 1e12, random.uniform(1, 5) * 1e12
        moved = random.uniform(0.1, 9) * 1e9
        flops = moved * peak / bandwidth * random.choice((0.2, 0.7, 1.5, 6))
        answer = fn(flops, moved, peak, bandwidth)
        if pair(answer, 'seconds and "memory" or "compute"'):
            return False, pair(answer, 'seconds and "memory" or "compute"')
        by_flops, by_bytes = flops / peak, moved / bandwidth
        hints = {
            "a roofline lets moving and arithmetic overlap: the larger of the two times, not their sum": by_flops
            + by_bytes,
            "the smaller time: but the slower of the two sets the pace": min(by_flops, by_bytes),
            "upside down: work divided by rate": peak / flops if by_flops > by_bytes else bandwidth / moved,
        }
        at = f"{flops / 1e12:.2f} TFLOP, {moved / 1e9:.2f} GB, {peak / 1e12:.0f} TFLOP/s, {bandwidth / 1e12:.1f} TB/s"
        ok, why = judge(answer[0], max(by_flops, by_bytes), hints)
        if not ok:
            return False, f"{at}: {why}"
        bound = "compute" if by_flops > by_bytes else "memory"
        if answer[1] != bound:
            return False, f"{at}: {bound} takes longer, so it is {bound} bound, not {answer[1]!r}"
    return True, "four kernels, two ceilings"


@checker
def per_rank(fn: Answer) -> tuple[bool, str]:
    """Judge `per_rank(N, L, R, tp, context)` -> FLOPs and cache bytes of one decode token on one rank, bf16."""
    for tp in (1, 2, random.choice((4, 8))):
        N, L, R, context = random.choice((64, 128)), 512, 64, random.choice((4096, 9000))
        config = preset("deepseek-v3").replace(num_attention_heads=N // tp, kv_lora_rank=L, qk_rope_head_dim=R)
        right = (
            latent_cost(config, BatchCounts(1, context, context)).flops,
            context * cache_bytes_per_token(config),
        )
        answer = fn(N, L, R, tp, context)
        if pair(answer, "FLOPs and bytes"):
            return False, pair(answer, "FLOPs and bytes")
        flops = {
            "half of it: a multiply and an add are 2 FLOPs": right[0] // 2,
            "a rank has N / tp of the heads": right[0] * tp if tp > 1 else None,
            "the context is missing": right[0] // context,
            "a score is L + R wide, a value L": 2 * (N // tp) * context * (L + R),
        }
        size = {
            "the row has no head axis: every rank reads, and holds, all of it. tp does not divide it": right[1] // tp
            if tp > 1
            else None,
            "bf16 is 2 bytes a number": right[1] // 2,
            "keys and values are one row: L + R numbers, not 2 L + R": context * (2 * L + R) * 2,
            "the rope part is cached too: L + R": context * L * 2,
            "the row serves all heads: do not multiply with them": right[1] * (N // tp),
        }
        for name, got, want, hints in zip(("FLOPs", "bytes"), answer, right, (flops, size), strict=True):
            if isinstance(got, float) and got.is_integer():
                got = int(got)
            ok, why = judge(got, want, {k: v for k, v in hints.items() if v is not None and v != want})
            if not ok:
                return False, f"N={N}, tp={tp}, {context} keys, {name}: {why}"
    return True, "the FLOPs are divided, the bytes are not"


@checker
def free_tokens(fn: Answer) -> tuple[bool, str]:
    """Judge `free_tokens(N, L, R, ridge)`: the most new tokens a request can bring while decode is memory bound."""
    for N, L, R, ridge in ((16, 512, 64, 185.0), (128, 512, 64, 185.0), (random.choice((5, 6, 8)), 256, 32, 300.0)):
        one = N * (2 * L + R) / (L + R)  # bf16: 2 FLOPs and 2 bytes cancel
        right = math.floor(ridge / one)
        hints = {
            "at least one token is decoded, but with this many heads even that is compute bound: 0": 1
            if not right
            else -1,
            "one too many: that is the first that is compute bound": right + 1 if right else -1,
            "rows are heads times tokens: divide by N": math.floor(ridge / one * N),
            "bf16 has 2 bytes a number, and 2 FLOPs a multiply-add: they cancel": math.floor(ridge / one / 2),
            "a score is L + R wide and a value L: 2 L + R": math.floor(ridge / N),
        }
        answer = fn(N, L, R, ridge)
        if isinstance(answer, float) and answer.is_integer():
            answer = int(answer)
        ok, why = judge(answer, right, {k: v for k, v in hints.items() if v != right})
        if not ok:
            return False, f"N={N}, L={L}, R={R}, ridge {ridge:g}: {why}"
    return True, "also where even one token is compute bound"
