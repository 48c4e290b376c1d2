"""Which tile a kernel runs with: by architecture, dtype and size, from a small table, within the shared memory.

Axes: L KV rank, R rope, M rows of a tile. A tile is (rows, keys, warps, stages).
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mla.aot import SHARED_LIMIT, TARGETS
from mla.need import Need

Tile = tuple[int, int, int, int]
EXPAND_FROM = 64
TUNED = Path(__file__).with_name("tuned.json")
NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
TARGET_DTYPES = [(target, dtype) for target in TARGETS for dtype in NAMES]
# Rows of a tile -> tile, for rows of 576 numbers; `decode_tile` takes fewer keys where wider rows would not fit.
HALVES: dict[str, dict[int, Tile]] = {
    "sm_80": {16: (16, 32, 4, 3), 64: (64, 32, 8, 2)},
    "sm_90": {16: (16, 32, 4, 3), 64: (64, 64, 8, 2)},
    "sm_100": {16: (16, 32, 4, 3), 64: (64, 32, 8, 2)},
    "sm_120": {16: (16, 32, 4, 2), 64: (32, 16, 8, 2)},
    "gfx942": {16: (16, 32, 4, 1), 64: (32, 16, 8, 1)},
    "gfx950": {16: (16, 32, 4, 2), 64: (64, 16, 8, 1)},
    "cpu": {16: (16, 64, 1, 1), 64: (64, 64, 1, 1)},  # the interpreter
}
FLOATS: dict[str, Tile] = {
    arch: (16, 16, 4, 1) if arch.startswith("gfx") else (16, 16, 8, 2) for arch in HALVES if arch != "cpu"
}


@cache
def processors(device: str) -> int:
    """Return the multiprocessors of the device "cuda:0"; the interpreter's stand-in for "cpu" has two."""
    return 2 if device == "cpu" else torch.cuda.get_device_properties(torch.device(device)).multi_processor_count


def shared_bytes(arch: str, tile: Tile, itemsize: int, L: int, R: int) -> int:
    """Return the bytes of shared memory that a decode program with this tile takes at most.

    (M + buffers * keys) * (L + R, each rounded up to a power of two) * itemsize + 4 KiB for reductions. Tensor cores
    that read from shared memory (64 rows on sm_90 and later) need `stages` buffers, others one less; AMD keeps the
    query in registers. With 64 rows and 64 keys or more the weights pass through shared memory, M * keys * itemsize,
    and reductions take 2 KiB. sm_100, with 64 rows, and AMD bring the output into order there, M * L * itemsize, and
    float32 holds the query twice, for its partial sums of 256 products.
    """
    BM, BN, _, stages = tile
    amd, width, output = arch.startswith("gfx"), power(L) + (power(R) if R else 0), BM * power(L) * itemsize
    buffers = stages if BM >= 64 and not amd else max(1, stages - 1)
    tiles = (buffers * BN + (0 if amd else BM)) * width * itemsize
    if amd:
        return max(tiles + 4096, output)
    extra = BM * BN * itemsize + 2048 if BM >= 64 and BN >= 64 else 4096
    again = (arch == "sm_100" and BM >= 64) or (itemsize == 4 and L > 256)
    return tiles + extra + (output if again else 0)


def fits(arch: str, tile: Tile, itemsize: int, L: int, R: int) -> bool:
    """Whether a decode program with this tile fits the shared memory of `arch`; the interpreter has no limit."""
    return arch == "cpu" or shared_bytes(arch, tile, itemsize, L, R) <= SHARED_LIMIT[arch]


def decode_tile(arch: str, dtype: torch.dtype, L: int, R: int, rows: int, tuned_too: bool = True) -> Tile | None:
    """Return the tile for `rows` (row, head) pairs of a request, tuned or by default; None where none fits."""
    if arch not in HALVES or dtype not in NAMES:
        return None
    size = 16 if rows <= 16 else 64
    found = tuned().get(f"decode/{arch}/{NAMES[dtype]}/{L}+{R}/{size}") if tuned_too else None
    tile = FLOATS[arch] if dtype.itemsize == 4 and arch in FLOATS else HALVES[arch][size]
    BM, BN, warps, stages = tile if found is None else found
    while BN >= 16:
        if fits(arch, (BM, BN, warps, stages), dtype.itemsize, L, R):
            return BM, BN, warps, stages
        BN //= 2
    return decode_tile(arch, dtype, L, R, 16, tuned_too) if size == 64 else None


def decode_tiles(arch: str, dtype: torch.dtype, L: int, R: int) -> list[Tile]:
    """Return all tiles that a decode of this dtype and size may take on `arch`, each once."""
    found = (decode_tile(arch, dtype, L, R, rows) for rows in (16, 64))
    return list(dict.fromkeys(tile for tile in found if tile is not None))


def expand_from(need: Need) -> int:
    """Return the query length, in tokens, from which a request is expanded: where both forms take the same time."""
    return int(tuned().get(f"expand_from/{need.arch}", EXPAND_FROM))


@cache
def tuned() -> dict[str, Any]:
    """Return the tuning table, key -> tile, that `python -m tiers.tier2_triton.tune` wrote; empty without the file."""
    return json.loads(TUNED.read_text())["tiles"] if TUNED.exists() else {}


def power(width: int) -> int:
    """Return the power of two, at least 16, that holds `width` columns: what a dot takes."""
    return max(16, 1 << (width - 1).bit_length())
