"""Which AITER kernel serves a call, or why none does: a pure function of shapes, dtypes and the architecture.

AITER's assembly kernels exist for certain head counts, query lengths and dtypes only, and a call without its kernel
ends the process: nothing is called before `plan_route` has found a row of these tables. Persistent kernels work from a
plan made ahead; the others ("splits") from a grid of splits.

Source: AITER at commit e4048607 (2026-08-22), its kernel list and the dispatch around it. Not run on AMD hardware.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tiers.tier2_aiter.heads import HEAD_GROUP, MOST_HEADS

L, R = 512, 64  # the one row width that the kernels read: 512 latent columns, then 64 rotated ones
WINDOW = 2**32  # some kernels reach rows by 32-bit byte offsets from the first one
ARCHES = ("gfx942", "gfx950")
FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
FLASH_DTYPES, FLASH_WIDTH = (torch.bfloat16, torch.float16), 256
REDUCED_128 = (1, 2, 4, 8, 10, 16, 32, 40, 48, 64, 96, 128)  # head counts of the merge at value width 128
MOST_SPLITS = 16

_GROUPS = tuple(range(HEAD_GROUP, MOST_HEADS + 1, HEAD_GROUP))
_TO_4, _TO_8 = (1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7, 8)
_Kernels = dict[int, tuple[int, ...]]  # heads -> query lengths

# What exists, by (arch, query, cache): persistent kernels, those that also write the LSE, and those over splits.
# Head counts that AITER serves by folding heads to groups of 16 are listed like its own. "byte" is the arch's fp8.
PERSISTENT: dict[tuple[str, str, str], _Kernels] = {
    ("gfx942", "bf16", "bf16"): dict.fromkeys(_GROUPS, _TO_4) | {8: (2,)},
    ("gfx942", "bf16", "byte"): dict.fromkeys(_GROUPS, _TO_4),
    ("gfx942", "byte", "byte"): dict.fromkeys(_GROUPS, _TO_4),
    ("gfx950", "bf16", "bf16"): dict.fromkeys((*_GROUPS, 24), _TO_8) | {8: (8,)},
    ("gfx950", "bf16", "byte"): dict.fromkeys(_GROUPS, _TO_4),
    ("gfx950", "byte", "byte"): dict.fromkeys(_GROUPS, _TO_8) | {8: (4,)},
}
PERSISTENT_LSE: dict[tuple[str, str, str], _Kernels] = {
    ("gfx942", "byte", "byte"): {64: (1,)},
    ("gfx950", "bf16", "bf16"): PERSISTENT["gfx950", "bf16", "bf16"],
    ("gfx950", "byte", "byte"): {
        heads: tuple(q for q in _TO_8 if q != 2 or heads in (32, 64, 128)) for heads in _GROUPS
    },
}
# With two splits or more, so that the merge runs, which writes the LSE; with one it may stay unwritten.
SPLITS_LSE: dict[tuple[str, str, str], _Kernels] = {
    ("gfx942", "bf16", "bf16"): dict.fromkeys((16, 32, 128), (1,)),
    ("gfx942", "byte", "byte"): dict.fromkeys((16, 128), (1,)),
}
KV_GRANULARITY, KV_GRANULARITY_BYTE_64 = 16, 32


class AiterUnsupported(ValueError):
    """No AITER kernel serves the call; `reason` is a whole sentence, ready for `why_not`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Route:
    """How one call is made.

    `kernel` is "persistent" (a work plan), "splits" (a grid of `splits`), "triton" (AITER's own Triton decode), "flash"
    (varlen flash attention over expanded keys) or "byte_prefill" (fp8 prefill with a merge of its own). The call has
    `heads` padded heads and `query_len` rows a request, -1 where they differ; `flatten` makes every row a request.
    `quantise_query` turns a bf16 query into the arch's fp8. `zero` says that rows of the output may stay unwritten.
    """

    kernel: str
    heads: int
    query_len: int = 1
    flatten: bool = False
    splits: int | None = None
    granularity: int = KV_GRANULARITY
    quantise_query: bool = False
    zero: bool = False


def plan_route(
    arch: str,
    heads: int,
    query_lens: Sequence[int],
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    lse: bool,
    kv_rows: int,
    cu_count: int,
    *,
    prefill: bool = False,
    context: bool = False,
    widths: tuple[int, int] = (L + R, L),
    served: tuple[int, int] = (L, R),
    window: int = WINDOW,
) -> Route:
    """Return how AITER attends requests of `query_lens` new tokens, all of at least one, over a pool of `kv_rows` rows.

    `widths` are those of a key and a value: of the cached row, (576, 512), or with `prefill` of expanded heads, (P + R,
    V); `context` says that some request of a prefill has keys before its new tokens. `served` are the L and R of the
    library's decode kernels, `window` the bytes that they reach. Raises AiterUnsupported with the reason where no
    kernel serves the call.
    """
    if arch not in ARCHES:
        raise AiterUnsupported(f"arch {arch!r} has no MLA kernels in aiter, which has them for {_either(ARCHES)}.")
    if not 1 <= heads <= MOST_HEADS:
        raise AiterUnsupported(f"N = {heads} heads are not served by aiter, which takes 1 to {MOST_HEADS}; use triton.")
    if prefill:
        return _prefill(arch, heads, q_dtype, kv_dtype, lse, context, widths)
    if (widths[1], widths[0] - widths[1]) != served:
        found = f"rows of L + R = {widths[1]} + {widths[0] - widths[1]} are not read by aiter"
        raise AiterUnsupported(f"{found}, whose decode kernels read {served[0]} + {served[1]}; use triton or paged.")
    size = kv_rows * widths[0] * kv_dtype.itemsize
    if size >= window:
        found = f"a pool of {kv_rows:,} rows spans {size:,} bytes, and aiter's decode reaches {window:,}"
        raise AiterUnsupported(f"{found} from its first row; give the layer fewer pages, or use triton.")
    if q_dtype == kv_dtype == torch.float16:
        return Route("triton", heads, flatten=True)
    query, cache = _short(arch, q_dtype), _short(arch, kv_dtype)
    if query is None or cache is None or (query, cache) == ("byte", "bf16"):
        found = f"a query of {_name(q_dtype)} over rows of {_name(kv_dtype)} has no decode kernel in aiter on {arch}"
        fix = "pass bfloat16 for both" if q_dtype not in FP8.values() else f"{_name(FP8[arch])} is the fp8 of {arch}"
        raise AiterUnsupported(f"{found}, whose assembly takes bfloat16 or {_name(FP8[arch])}; {fix}.")
    return _decode(arch, heads, query_lens, query, cache, lse, cu_count)


def ragged_fits(arch: str, heads: int, most: int) -> bool:
    """Whether persistent kernels plan requests of unequal lengths up to `most` right.

    The planner reads memory that it has not written where it cuts a request's rows into tiles, of 128 row-heads or
    64, and where it folds heads: neither may happen.
    """
    return heads == HEAD_GROUP and heads * most <= (128 if arch == "gfx942" else 64)


def _decode(
    arch: str, heads: int, query_lens: Sequence[int], query: str, cache: str, lse: bool, cu_count: int
) -> Route:
    most, lens = max(query_lens, default=1), set(query_lens) or {1}
    wanted = most if len(lens) == 1 else -1
    tables = ((PERSISTENT_LSE, "persistent"), (SPLITS_LSE, "splits")) if lse else ((PERSISTENT, "persistent"),)
    ways = [(query, False)] if (query, cache) != ("bf16", "byte") else [("bf16", False), ("byte", True)]
    for (way, quantise), (table, kernel) in ((w, t) for w in ways for t in tables):
        found = table.get((arch, way, cache), {})
        padded = next((h for h in sorted(found) if h >= heads and 1 in found[h]), None)
        if padded is None:
            continue
        length = 1
        if kernel == "persistent" and heads >= HEAD_GROUP and most > 1:
            served = most in found[padded] and (wanted > 0 or ragged_fits(arch, padded, most))
            length = wanted if served else 1
        granularity = KV_GRANULARITY_BYTE_64 if way == cache == "byte" and padded == 64 else KV_GRANULARITY
        splits = None
        if kernel == "splits":
            rows = max(1, sum(query_lens))
            splits = min(MOST_SPLITS, max(2, cu_count // rows))
        # AITER takes its kernel over splits by itself for this one, from some number of requests on
        downgraded = arch == "gfx950" and way == cache == "bf16" and padded == HEAD_GROUP and length == 1
        return Route(
            kernel,
            padded,
            length,
            length == 1 and most > 1,
            splits,
            granularity,
            quantise,
            splits is not None or downgraded,
        )
    what = f"a query of {query} over rows of {cache} with lse = {lse}"
    raise AiterUnsupported(
        f"{what} has no decode kernel for {heads} heads in aiter on {arch}; unset lse or use triton."
    )


def _prefill(
    arch: str,
    heads: int,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    lse: bool,
    context: bool,
    widths: tuple[int, int],
) -> Route:
    if q_dtype in FP8.values():
        return _byte_prefill(arch, heads, q_dtype, kv_dtype, lse, context, widths)
    if q_dtype not in FLASH_DTYPES or q_dtype != kv_dtype:
        found = f"a query of {_name(q_dtype)} over keys of {_name(kv_dtype)} is not served by aiter's flash attention"
        raise AiterUnsupported(f"{found}, which takes {_either(map(_name, FLASH_DTYPES))} for both; use one of them.")
    if any(w % 8 or not 8 <= w <= FLASH_WIDTH for w in widths):
        found = f"heads of P + R = {widths[0]} and V = {widths[1]} are not served by aiter's flash attention"
        raise AiterUnsupported(f"{found}, which takes multiples of 8 up to {FLASH_WIDTH}; use form = 'mqa' or paged.")
    return Route("flash", heads, -1)


def _byte_prefill(
    arch: str,
    heads: int,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    lse: bool,
    context: bool,
    widths: tuple[int, int],
) -> Route:
    what = f"an fp8 prefill of {_name(q_dtype)} over {_name(kv_dtype)}"
    if arch != "gfx950" or not q_dtype == kv_dtype == FP8["gfx950"]:
        raise AiterUnsupported(f"{what} on {arch} has no kernel in aiter, only float8_e4m3fn on gfx950; use bfloat16.")
    if widths != (192, 128) or heads not in REDUCED_128:
        found = f"{what} of {heads} heads with widths {widths} is not merged by aiter"
        raise AiterUnsupported(f"{found}, which takes 192 and 128 and {_either(map(str, REDUCED_128))} heads.")
    if lse or context:
        found = f"{what} with lse = {lse} and context = {context} is wrong in aiter"
        raise AiterUnsupported(f"{found}, whose kernel leaves the LSE of whole tiles unwritten; use bfloat16.")
    return Route("byte_prefill", heads, -1)


def _short(arch: str, dtype: torch.dtype) -> str | None:
    return {torch.bfloat16: "bf16", FP8[arch]: "byte"}.get(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _either(names) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
