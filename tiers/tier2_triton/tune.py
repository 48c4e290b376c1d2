"""Choose the tiles of the decode for the GPU at hand, and where expanding begins, and keep both in tuned.json.

    python -m tiers.tier2_triton.tune

Each candidate that fits is timed with its own work list, in turns with the others, as a graph behind a cold L2. A tile
replaces the default only where it is faster by more than the spread; how far the default is from the best is kept too.

Axes: B requests, N heads, L KV rank, R rope, M rows of a tile.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from mla.conformance.cases import DIMS, Case
from mla.conformance.specs import spec
from mla.need import arch_of
from mla.tier import Tier
from mla.timing import lap_of, turns
from tiers.tier2_triton.absorbed import parts_at_once, programs
from tiers.tier2_triton.launch import NAMES, TUNED, Tile, decode_tile, fits
from tiers.tier2_triton.schedule import Piece, schedule

DEVICE = "cuda:0"
CANDIDATES: dict[int, list[Tile]] = {
    16: [(16, 32, 4, 3), (16, 64, 4, 2), (16, 64, 4, 3), (16, 32, 8, 3), (16, 32, 4, 2), (16, 16, 4, 3)],
    64: [(64, 64, 8, 2), (64, 32, 8, 3), (64, 32, 8, 2), (32, 32, 4, 3), (32, 64, 8, 2), (64, 16, 8, 3)],
}
SHAPES = {16: (64, 16384, 16), 64: (64, 8192, 128)}  # requests, keys, heads
QUERIES = (16, 32, 48, 64, 96, 128, 192, 256)
CONTEXT = 8192


def decode_call(
    tile: Tile, B: int, S: int, N: int, dtype: torch.dtype, L: int = 512, R: int = 64
) -> Callable[[], None]:
    """Return a call that decodes one token of B requests over S keys of L + R numbers with `tile`, and merges."""
    from tiers.tier2_triton.kernels.combine import combine
    from tiers.tier2_triton.kernels.decode import decode

    page, new = 64, lambda *shape: torch.randn(*shape, device=DEVICE, dtype=dtype)
    cache = new(B * S // page, page, L + R)
    table = torch.randperm(B * S // page, device=DEVICE).to(torch.int32).view(B, -1)
    at_once = programs(Case(spec(f"{B}q1s{S}")).need(DEVICE), tile)
    work = schedule([Piece(b, b, 1, S, True) for b in range(B)], N, tile[:2], at_once)
    upload = lambda x: torch.as_tensor(x, device=DEVICE)
    items, merges = upload(work.items), upload(work.merges)
    counts = torch.tensor([len(items), len(merges)], dtype=torch.int32, device=DEVICE)
    bounds = torch.full((B,), S, dtype=torch.int32, device=DEVICE)
    part = torch.empty(work.slots, tile[0], L, device=DEVICE)
    part_lse = torch.empty(work.slots, tile[0], device=DEVICE)
    query, out, lse = new(B, N, L + R), new(B, N, L), torch.empty(B, N, device=DEVICE)

    def call() -> None:
        queries = query[..., :L], query[..., L:]
        decode(*queries, None, cache, table, bounds, items, counts, part, part_lse, 0.1, tile)
        combine(part, part_lse, merges, counts[1:], out, lse, parts_at_once(work.parts))

    return call


def tune_tiles(dtype: torch.dtype, repeats: int = 30) -> dict[str, Any]:
    """Return {key: {"tile", "default", "default_over_best", "ms"}} for both sizes of tile, (16, ...) and (64, ...)."""
    arch, found = arch_of(DEVICE), {}
    for size, shape in SHAPES.items():
        default = decode_tile(arch, dtype, 512, 64, size, tuned_too=False)
        tiles = [t for t in dict.fromkeys([default, *CANDIDATES[size]]) if t and fits(arch, t, dtype.itemsize, 512, 64)]
        times = turns([lap_of(decode_call(tile, *shape, dtype), DEVICE, graph=True) for tile in tiles], repeats)
        best = min(range(len(tiles)), key=lambda i: times[i].median_ms)
        if times[best].high_ms >= times[0].low_ms:
            best = 0  # no faster than the spread
        ms = {"x".join(map(str, tile)): round(t.median_ms, 4) for tile, t in zip(tiles, times, strict=True)}
        ratio = round(times[0].median_ms / min(t.median_ms for t in times), 3)
        key = f"decode/{arch}/{NAMES[dtype]}/512+64/{size}"
        found[key] = {"tile": tiles[best], "default": tiles[0], "default_over_best": ratio, "ms": ms}
        torch.cuda.empty_cache()
    return found


def tune_forms(repeats: int = 10) -> dict[str, Any]:
    """Return the shortest query length, in tokens, at which expanding is faster than absorbing, over 8192 keys."""
    from mla.bench import attend_calls
    from tiers.tier2_triton.tier import TritonTier

    ms: dict[str, list[float]] = {}
    for q in QUERIES:
        case = Case(spec(f"4q{q}s{CONTEXT}"), DIMS["v3_n128"], page_size=64)
        tiers: list[Tier] = [TritonTier("mqa"), TritonTier("cudnn"), TritonTier("mha")]
        able = [t for t in tiers if not t.why_not(case.need(DEVICE))]
        times = turns([lap_of(call, DEVICE) for call in attend_calls(able, case, DEVICE)], repeats)
        ms[str(q)] = [round(t.median_ms, 4) for t in times]
    first = next((int(q) for q, (absorbed, *others) in ms.items() if min(others) < absorbed), QUERIES[-1] * 2)
    return {f"expand_from/{arch_of(DEVICE)}": first, "ms": ms}


def main() -> int:
    """Tune both dtypes of 16 bits and the forms, write tuned.json, print it; exit code 2 without a GPU."""
    if not torch.cuda.is_available():
        print("tune: no GPU here; the defaults of launch.py stay.", file=sys.stderr)
        return 2
    record: dict[str, Any] = json.loads(TUNED.read_text()) if TUNED.exists() else {"tiles": {}, "measured": {}}
    measured = tune_tiles(torch.bfloat16) | tune_tiles(torch.float16)
    forms = tune_forms()
    record["tiles"] |= {key: list(value["tile"]) for key, value in measured.items()}
    record["tiles"] |= {key: value for key, value in forms.items() if key != "ms"}
    where = f"{torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}"
    record["measured"] |= {arch_of(DEVICE): {"device": where, **measured, "forms_ms": forms["ms"]}}
    text = json.dumps(record, indent=1, default=str)
    TUNED.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
