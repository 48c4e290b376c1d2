"""Which form is faster for a request? A small table of measured times, with its provenance, or a rule without it.

Axes: N heads, L KV rank, P nope, R rope, V value.
"""

import bisect
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from mla.bench import attend_calls, timed_together
from mla.conformance.cases import DTYPES, Case, Dims
from mla.conformance.specs import spec
from mla.errors import bad
from mla.need import Need
from mla.tier import Tier

# What a step costs beside its matrix products, in FLOPs per element: writing expanded rows, and exp over the scores.
EXPAND_EXTRA, SCORE_EXTRA = 30.0, 60.0
QUERY_LENS = (1, 4, 16, 64, 128, 256, 512)
CONTEXTS = (1, 64, 256, 512, 1024, 4096, 8192)
SECONDS_A_PAIR = 0.5  # short calls are repeated so long: a median of three of them is noise


@dataclass(frozen=True)
class FormTable:
    """Measured milliseconds of both forms for one size and dtype: mha[i][j] is query_lens[i] over contexts[j].

    A context counts the keys cached before the new tokens.
    """

    size: tuple[int, int, int, int, int]
    dtype: str
    query_lens: tuple[int, ...]
    contexts: tuple[int, ...]
    mha: tuple[tuple[float, ...], ...]
    mqa: tuple[tuple[float, ...], ...]
    provenance: str

    def log_ratio(self, query_len: int, context: int) -> float:
        """Return ln(mha time / mqa time), bilinear in the logarithms of both lengths and constant beyond the grid."""
        i, x = _locate(self.query_lens, query_len)
        j, y = _locate(self.contexts, context)
        along = lambda a: (1 - y) * self._log(a, j) + y * self._log(a, j + 1)
        return (1 - x) * along(i) + x * along(i + 1)

    def _log(self, i: int, j: int) -> float:
        i, j = min(i, len(self.query_lens) - 1), min(j, len(self.contexts) - 1)
        return math.log(self.mha[i][j] / self.mqa[i][j])


@dataclass(frozen=True)
class FormCosts:
    """Chooses the form of a request, by the table of its size and dtype, else by counted work (see `provenance`)."""

    tables: tuple[FormTable, ...] = ()
    provenance: str = "default: counted work, no table"

    @classmethod
    def default(cls) -> "FormCosts":
        """Return the rule that needs no measurement."""
        return cls()

    @classmethod
    def load(cls, path: Path | str) -> "FormCosts":
        """Read the tables that `mla tune` wrote; raises ValueError naming the file where it is not such a file."""
        path = Path(path)
        try:
            raw = json.loads(path.read_text())["tables"]
            tables = tuple(FormTable(**{k: _tuples(v) for k, v in table.items()}) for table in raw)
        except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise bad(
                "tune_file", expected="a table written by `mla tune`", got=f"{path}: {error}", fix="run `mla tune`"
            ) from error
        return cls(tables, f"measured: {path.name}, {'; '.join(t.provenance for t in tables)}")

    def save(self, path: Path | str) -> None:
        """Write the tables as JSON."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"tables": [asdict(t) for t in self.tables]}, indent=1) + "\n")

    def form(self, need: Need, query_len: int, seen: int) -> str:
        """Return "mha" (expanded) or "mqa" (absorbed) for query_len new tokens that see `seen` keys, own included."""
        if query_len == 0 or seen == 0:
            return "mqa"
        size, dtype = (need.N, need.L, need.P, need.R, need.V), str(need.dtype).removeprefix("torch.")
        for table in self.tables:
            if (table.size, table.dtype) == (size, dtype):
                return "mha" if table.log_ratio(query_len, max(1, seen - query_len)) < 0 else "mqa"
        mha, mqa = counted_work(*size, query_len, seen)
        return "mha" if mha < mqa else "mqa"


def counted_work(N: int, L: int, P: int, R: int, V: int, query_len: int, seen: int) -> tuple[float, float]:
    """Return the work (mha, mqa) of one causal request in FLOPs, memory-bound elements weighed in.

    mha = S N (2 L + extra) (P + V) + pairs N (2 (P + R + V) + extra)
    mqa = 2 q N L (P + V) + pairs N (2 (2 L + R) + extra)
    with S = seen, the keys that the last of query_len rows sees.
    """
    S, pairs = seen, query_len * max(1.0, seen - (query_len - 1) / 2)
    mha = S * N * (2 * L + EXPAND_EXTRA) * (P + V) + pairs * N * (2 * (P + R + V) + SCORE_EXTRA)
    return mha, 2 * query_len * N * L * (P + V) + pairs * N * (2 * (2 * L + R) + SCORE_EXTRA)


def measure(
    mha: Tier, mqa: Tier, dims: Dims, dtype: str, provenance: str,
    query_lens: tuple[int, ...] = QUERY_LENS, contexts: tuple[int, ...] = CONTEXTS, repeats: int = 3,
    progress: Callable[[int, int], None] | None = None,
) -> FormTable:  # fmt: skip
    """Time both forms of a tier on every pair of query length and context, turn by turn; return the medians.

    `mha` and `mqa` are the same tier with its form forced; `dtype` is a case's short name (f32, bf16, f16).
    `progress(done, total)` is called after each pair.
    """
    expanded, absorbed = time_grid([mha, mqa], dims, dtype, query_lens, contexts, repeats, progress)
    size, name = (dims.N, dims.L, dims.P, dims.R, dims.V), str(DTYPES[dtype]).removeprefix("torch.")
    return FormTable(size, name, query_lens, contexts, expanded, absorbed, provenance)


def regret(
    auto: Tier, mha: Tier, mqa: Tier, dims: Dims, dtype: str,
    query_lens: tuple[int, ...] = QUERY_LENS, contexts: tuple[int, ...] = CONTEXTS, repeats: int = 3,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[tuple[float, ...], ...]:  # fmt: skip
    """Time the tier that chooses beside both forced forms; return auto time / the better form's time for each pair.

    1 is a right choice, less is noise. Arguments as in `measure`.
    """
    chosen, a, b = time_grid([auto, mha, mqa], dims, dtype, query_lens, contexts, repeats, progress)
    cells = lambda x, y, z: tuple(u / min(v, w) for u, v, w in zip(x, y, z, strict=True))
    return tuple(cells(*rows) for rows in zip(chosen, a, b, strict=True))


def time_grid(
    tiers: list[Tier], dims: Dims, dtype: str, query_lens: tuple[int, ...], contexts: tuple[int, ...], repeats: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[tuple[tuple[float, ...], ...]]:  # fmt: skip
    """Return, for each tier, its median milliseconds by query length and context; the tiers take turns in each pair."""
    medians: list[list[list[float]]] = [[[] for _ in query_lens] for _ in tiers]
    for i, query_len in enumerate(query_lens):
        for j, context in enumerate(contexts):
            case = Case(spec(f"1q{query_len}s{query_len + context}"), dims, dtype, page_size=64)
            timings = timed_together(attend_calls(tiers, case), repeats, warmup=1, seconds=SECONDS_A_PAIR)
            for rows, timing in zip(medians, timings, strict=True):
                rows[i].append(timing.median_ms)
            if progress is not None:
                progress(i * len(contexts) + j + 1, len(query_lens) * len(contexts))
    return [_tuples(m) for m in medians]


def _locate(grid: tuple[int, ...], value: int) -> tuple[int, float]:
    """Return the cell of `value` on a sorted grid and how far it is to the next point, in logarithms, in 0 .. 1."""
    if value <= grid[0] or len(grid) == 1:
        return 0, 0.0
    if value >= grid[-1]:
        return len(grid) - 1, 0.0
    i = bisect.bisect_right(grid, value) - 1
    return i, math.log(value / grid[i]) / math.log(grid[i + 1] / grid[i])


def _tuples(value):
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
