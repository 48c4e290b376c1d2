"""What attention costs before anything runs: FLOPs and bytes, form by form and part by part.

Axes: T new tokens (packed over requests), S cached tokens, N heads, H hidden, Lq query rank, L KV rank, P nope,
R rope, V value. All of it is host arithmetic on whole numbers. One multiply-add is 2 FLOPs; softmax, norms and rotation
are left out. Bytes are the compulsory ones: what has to pass through memory is written once and read once.
`mla.roofline` turns both into time on a machine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mla.config import MLAConfig
from mla.errors import bad


@dataclass(frozen=True)
class BatchCounts:
    """All that the cost of attention asks of a batch, summed over its requests.

    `tokens` is T; `keys` the cached rows that are read, new ones included; `pairs` the keys that each query row sees,
    summed over the rows.
    """

    tokens: int
    keys: int
    pairs: int


def count_batch(query_lens: Sequence[int], seq_lens: Sequence[int], *, mask: str = "causal") -> BatchCounts:
    """Count a ragged batch: query_lens and seq_lens are host lists, one entry per request, in tokens.

    seq_lens include the new tokens; 0 is padding. Causal is bottom-right: q tokens over s keys make
    q (s - q) + q (q + 1) / 2 pairs; "full" makes q s. Requests without new tokens read no keys. Raises ValueError for
    lists of different lengths, a negative length, 0 < seq_len < query_len, another mask.
    """
    if len(query_lens) != len(seq_lens):
        expected = f"{len(query_lens)} entries, one per query_len"
        raise bad("seq_lens", expected=expected, got=str(len(seq_lens)), fix="give both per request")
    if mask not in ("causal", "full"):
        raise bad(
            "mask", expected="'causal' or 'full'", got=repr(mask), fix="for other masks build BatchCounts yourself"
        )
    tokens = keys = pairs = 0
    for i, (q, s) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if q < 0 or s < 0:
            name, value = ("query_lens", q) if q < 0 else ("seq_lens", s)
            raise bad(f"{name}[{i}]", expected="at least 0", got=str(value), fix="lengths are counts of tokens")
        if 0 < s < q:
            expected = f"0, or at least query_lens[{i}] = {q}"
            raise bad(f"seq_lens[{i}]", expected=expected, got=str(s), fix="count the new tokens too")
        tokens += q
        keys += s if q else 0
        if s:
            pairs += q * s if mask == "full" else q * (s - q) + q * (q + 1) // 2
    return BatchCounts(tokens, keys, pairs)


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes of one form in one layer, by part; `itemsize` is the width in bytes of what is computed."""

    form: str
    flop_parts: dict[str, int]
    byte_parts: dict[str, int]
    itemsize: int

    @property
    def flops(self) -> int:
        """FLOPs of all parts."""
        return sum(self.flop_parts.values())

    @property
    def bytes(self) -> int:
        """Bytes read and written by all parts."""
        return sum(self.byte_parts.values())

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOP per byte; 0 when nothing moves."""
        return self.flops / self.bytes if self.bytes else 0.0


def cache_bytes_per_token(
    config: MLAConfig, *, itemsize: int = 2, row_bytes: int | None = None, layers: int = 1
) -> int:
    """Bytes of cache per token: layers (L + R) itemsize, or layers row_bytes for a packed layout.

    All heads share the row, so slicing the heads over ranks does not shrink it. Source: DeepSeek-V2 (arXiv 2405.04434),
    section 2.1.4, table 1.
    """
    return layers * ((config.L + config.R) * itemsize if row_bytes is None else row_bytes)


def kv_bytes_per_token(config: MLAConfig, kv_heads: int, *, itemsize: int = 2, layers: int = 1) -> int:
    """Bytes of keys and values per token when each of `kv_heads` keeps its own: layers kv_heads (P + R + V) itemsize.

    kv_heads is N for MHA and for MLA with keys and values materialised, 1 for MQA, the number of groups for GQA. Raises
    ValueError when it does not divide N. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.4, table 1.
    """
    if kv_heads < 1 or config.N % kv_heads:
        divisors = [n for n in range(1, config.N + 1) if config.N % n == 0]
        raise bad(
            "kv_heads", expected=f"a divisor of {config.N} heads", got=str(kv_heads), fix=f"use one of {divisors}"
        )
    return layers * kv_heads * (config.P + config.R + config.V) * itemsize


def projection_cost(config: MLAConfig, counts: BatchCounts, *, itemsize: int = 2, row_bytes: int | None = None) -> Cost:
    """Cost of the layer around attention, the same in every form: query projections, KV down-projection and W_O."""
    c, t, width = config, counts.tokens, config.N * (config.P + config.R)
    query = c.H * c.Lq + c.Lq * width if c.Lq else c.H * width
    kv_down, output = c.H * (c.L + c.R), c.N * c.V * c.H
    moved = {
        "weights": (query + kv_down + output) * itemsize if t else 0,
        "hidden": 2 * t * c.H * itemsize,
        "query": t * (2 * (c.Lq or 0) + width) * itemsize,
        "cache": t * cache_bytes_per_token(c, itemsize=itemsize, row_bytes=row_bytes),
        "output": t * c.N * c.V * itemsize,
    }
    return Cost(
        "projections", {"query": 2 * t * query, "kv_down": 2 * t * kv_down, "output": 2 * t * output}, moved, itemsize
    )


def expanded_cost(config: MLAConfig, counts: BatchCounts, *, itemsize: int = 2, row_bytes: int | None = None) -> Cost:
    """Cost of attention that expands every key row through W_UK and W_UV and then runs as MHA.

    FLOPs: 2 L N (P + V) per key row, 2 (P + R + V) per visible (query, key, head). k_nope and v are written and read.
    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2, eq. 10 and 11.
    """
    c = config
    flops = {"up_projection": 2 * counts.keys * _up(c), **_pair_flops(c, counts, c.P + c.R, c.V)}
    moved = _attend_bytes(c, counts, itemsize, row_bytes)
    moved["expanded"] = 2 * counts.keys * c.N * (c.P + c.V) * itemsize
    return Cost("expanded", flops, moved, itemsize)


def absorbed_cost(config: MLAConfig, counts: BatchCounts, *, itemsize: int = 2, row_bytes: int | None = None) -> Cost:
    """Cost of attention that multiplies W_UK into the query and W_UV into the output and runs as MQA over latent rows.

    FLOPs: 2 L N (P + V) per new token, 2 (2 L + R) per visible (query, key, head). The latent part of the query and
    the latent output are written and read. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2.
    """
    c = config
    flops = {"absorption": 2 * counts.tokens * _up(c), **_pair_flops(c, counts, c.L + c.R, c.L)}
    moved = _attend_bytes(c, counts, itemsize, row_bytes)
    moved["latents"] = 2 * counts.tokens * c.N * 2 * c.L * itemsize
    return Cost("absorbed", flops, moved, itemsize)


def latent_cost(config: MLAConfig, counts: BatchCounts, *, itemsize: int = 2, row_bytes: int | None = None) -> Cost:
    """Cost of a raw MQA kernel alone: absorbed query (T, N, L + R) in, latent output (T, N, L) out.

    In 16 bits its intensity tends to query_len N (2 L + R) / (L + R) FLOP per byte as contexts grow.
    """
    c = config
    moved = {
        "cache": counts.keys * cache_bytes_per_token(c, itemsize=itemsize, row_bytes=row_bytes),
        "query": counts.tokens * c.N * (c.L + c.R) * itemsize,
        "output": counts.tokens * c.N * c.L * itemsize,
    }
    return Cost("latent", _pair_flops(c, counts, c.L + c.R, c.L), moved, itemsize)


def grouped_cost(config: MLAConfig, counts: BatchCounts, kv_heads: int, *, itemsize: int = 2) -> Cost:
    """Cost of MHA (kv_heads N), GQA or MQA (1) attention of the same query and value widths over its own cache."""
    c = config
    moved = {
        "cache": counts.keys * kv_bytes_per_token(c, kv_heads, itemsize=itemsize),
        "query": counts.tokens * c.N * (c.P + c.R) * itemsize,
        "output": counts.tokens * c.N * c.V * itemsize,
    }
    return Cost(grouped_name(c.N, kv_heads), _pair_flops(c, counts, c.P + c.R, c.V), moved, itemsize)


def grouped_name(heads: int, kv_heads: int) -> str:
    """Return "mha" for a KV head per head, "mqa" for one, "gqa-<groups>" between."""
    return "mha" if kv_heads == heads else "mqa" if kv_heads == 1 else f"gqa-{kv_heads}"


def _up(c: MLAConfig) -> int:
    return c.L * c.N * (c.P + c.V)


def _pair_flops(c: MLAConfig, counts: BatchCounts, key_width: int, value_width: int) -> dict[str, int]:
    pairs = 2 * counts.pairs * c.N
    return {"scores": pairs * key_width, "values": pairs * value_width}


def _attend_bytes(c: MLAConfig, counts: BatchCounts, itemsize: int, row_bytes: int | None) -> dict[str, int]:
    return {
        "cache": counts.keys * cache_bytes_per_token(c, itemsize=itemsize, row_bytes=row_bytes),
        "query": counts.tokens * c.N * (c.P + c.R) * itemsize,
        "output": counts.tokens * c.N * c.V * itemsize,
        "weights": _up(c) * itemsize if counts.tokens else 0,
    }


def break_even_flops(config: MLAConfig) -> float:
    """Query tokens per request at which both forms need equal FLOPs over a long context: L (P + V) / (2 L - P - V).

    Expanding costs 2 L N (P + V) once per key; absorbing costs 2 N (2 L - P - V) more per (query, key). So a key that
    one decode token looks at is not worth expanding, and one that hundreds of prefill tokens look at is. 170.7 for V3;
    inf when 2 L <= P + V. It knows no memory and no short context: `mla.roofline.break_even_roofline` does.
    """
    extra = 2 * config.L - config.P - config.V
    return config.L * (config.P + config.V) / extra if extra > 0 else math.inf


def merged_sizes(config: MLAConfig) -> dict[str, tuple[int, int]]:
    """Count the numbers in two weights multiplied into one beforehand, and in the same two kept apart.

    "W_UQ W_UK": N Lq L against N P (Lq + L), with H for Lq where queries have no rank. "W_UV W_O": N L H against
    N V (L + H). For V3 the product is 3.0x and 3.7x larger, so absorption is only an order of multiplication.
    """
    c, rank = config, config.Lq or config.H
    return {
        "W_UQ W_UK": (c.N * rank * c.L, c.N * c.P * (rank + c.L)),
        "W_UV W_O": (c.N * c.L * c.H, c.N * c.V * (c.L + c.H)),
    }


def default_workspace_tokens(max_model_len: int, max_num_seqs: int, page_size: int, *, multiple: int = 1) -> int:
    """Key rows to gather or expand at once: min(max(8 max_model_len, 4 max_num_seqs page_size), 65536).

    Rounded down to whole pages (to lcm(page_size, multiple) under context parallelism), but at least
    max_num_seqs page_size, so that every request gets a page. Raises ValueError unless all arguments are at least 1.
    """
    limits = {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs}
    for name, value in {**limits, "page_size": page_size, "multiple": multiple}.items():
        if value < 1:
            raise bad(name, expected="at least 1", got=str(value), fix="give the serving limits as positive counts")
    step = math.lcm(page_size, multiple)
    rows = min(max(8 * max_model_len, 4 * max_num_seqs * page_size), 65536)
    return max(rows // step, -(-max_num_seqs * page_size // step)) * step


class Sizes(Protocol):
    """The widths of one layer that a workspace follows from; MLAConfig and Need both have them."""

    @property
    def N(self) -> int:
        """Heads."""

    @property
    def L(self) -> int:
        """KV rank."""

    @property
    def P(self) -> int:
        """Nope width."""

    @property
    def R(self) -> int:
        """Rope width."""

    @property
    def V(self) -> int:
        """Value width."""


def expanded_workspace_bytes(config: Sizes, cap: int, *, itemsize: int, q_block: int, k_block: int, tokens: int) -> int:
    """Peak extra bytes of the expanded form with `cap` key rows gathered at once, whatever the context.

    Rows, k_nope and v: cap (L + R) b + cap N (P + V) b. One block in float32 (scores; keys and values; query, output
    and the product added to it; rows): 4 N (q_block k_block + k_block (P + V) + q_block (P + R + 2 V))
    + 4 k_block (L + R). States of `tokens` rows: 4 tokens N (V + 1).
    """
    c = config
    gathered = cap * (c.L + c.R) * itemsize + cap * c.N * (c.P + c.V) * itemsize
    block = c.N * (q_block * k_block + k_block * (c.P + c.V) + q_block * (c.P + c.R + 2 * c.V)) + k_block * (c.L + c.R)
    return gathered + 4 * block + 4 * tokens * c.N * (c.V + 1)


def absorbed_workspace_bytes(
    config: Sizes, rows: int, q_rows: int, *, itemsize: int, k_block: int | None = None, tokens: int = 0
) -> int:
    """Peak extra bytes of the absorbed form with `rows` latent rows gathered at once for q_rows query rows in flight.

    Rows as stored and in float32: rows (L + R) (b + 4). In float32 scores, 4 N q_rows k_block (k_block None: all
    `rows`), and latent states, 4 N q_rows (L + R + 2 L + 2): the absorbed query, the output, the product added to it,
    maximum and sum. States of `tokens` rows: 4 tokens N (V + 1).
    """
    c = config
    scores = c.N * q_rows * (rows if k_block is None else k_block)
    latent = c.N * q_rows * (c.L + c.R + 2 * c.L + 2)
    return rows * (c.L + c.R) * (itemsize + 4) + 4 * (scores + latent) + 4 * tokens * c.N * (c.V + 1)
