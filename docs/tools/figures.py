"""Draw the figures of the site into docs/figures/, every number computed here.

    python docs/tools/figures.py

The figures are committed, so building the site does not run this; a test holds that they are what this draws. Pages
take one in with the snippet "figures/NAME.svg".
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs" / "figures"
for place in (ROOT, Path(__file__).resolve().parent):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

from figures_flow import Sheet, data_flow, decision_tree, merge_tree, pages, tier_ladder  # noqa: E402
from figures_hopper import schedule, shared_memory  # noqa: E402
from pages_benchmarks import tag  # noqa: E402
from pieces import record  # noqa: E402

from mla.cache import FloatRows  # noqa: E402
from mla.cost import (  # noqa: E402
    BatchCounts,
    absorbed_cost,
    break_even_flops,
    cache_bytes_per_token,
    count_batch,
    expanded_cost,
    grouped_cost,
    kv_bytes_per_token,
    latent_cost,
)
from mla.presets import preset  # noqa: E402
from mla.roofline import find_gpu  # noqa: E402
from mla.rope import apply_rope, rope_cos_sin  # noqa: E402

V3 = preset("deepseek-v3")
LONG = 131072


def cache_bars() -> Sheet:
    """Bytes of cache a token, to scale, and the last three again, enlarged."""
    rows = (
        (f"MHA, {V3.N} KV heads", kv_bytes_per_token(V3, V3.N)),
        ("GQA, 8 KV heads", kv_bytes_per_token(V3, 8)),
        ("MLA, one latent row", cache_bytes_per_token(V3)),
        ("MQA, 1 KV head", kv_bytes_per_token(V3, 1)),
    )
    most, second = rows[0][1], rows[1][1]
    s = Sheet(
        "cache-bars",
        "Cache of one token in one layer of DeepSeek-V3's widths",
        "; ".join(f"{name}: {size:,} bytes" for name, size in rows) + ". Bars are to scale.",
        392,
    )

    def bar(name: str, y: float, size: int, scale: float) -> None:
        if not name.startswith("MLA"):
            s.rect(4, y, size * scale, 13, "per-head", 0.75, stroke_width="0.5")
            return
        latent = size * scale * V3.L / (V3.L + V3.R)
        s.rect(4, y, latent, 13, "latent", 0.85, stroke_width="0.5")
        s.rect(4 + latent, y, size * scale - latent, 13, "rope", 0.85, stroke_width="0.5")

    s.text(256, 16, "bytes a token", "end", bold=True)
    s.text(356, 16, f"GB at {LONG // 1024}k", "end", bold=True)
    for i, (name, size) in enumerate(rows):
        y = 36.0 + 40 * i
        s.text(4, y, name, bold=name.startswith("MLA"))
        s.text(256, y, f"{size:,}", "end")
        s.text(356, y, f"{size * V3.num_hidden_layers * LONG / 1e9:.1f}", "end")
        bar(name, y + 6, size, 352 / most)
    s.line([(4, 200), (356, 200)], width=0.7)
    s.text(4, 220, f"The last three, {most // second} times larger", bold=True)
    for i, (name, size) in enumerate(rows[1:]):
        y = 240.0 + 38 * i
        s.text(4, y, f"{name.split(',')[0]}: {most / size:.0f} times less than MHA", bold=name.startswith("MLA"))
        bar(name, y + 6, size, 352 / second)
    s.rect(4, 356, 11, 11, "latent", 0.85)
    s.text(20, 366, f"latent, {V3.L} numbers")
    s.rect(150, 356, 11, 11, "rope", 0.85)
    s.text(166, 366, f"position key, {V3.R}")
    s.rect(276, 356, 11, 11, "per-head", 0.75)
    s.text(292, 366, "K and V")
    s.text(4, 386, f"bfloat16; GB: {V3.num_hidden_layers} layers, {LONG:,} tokens")
    return s


def per_head(cost: Callable, tokens: int, keys: int, pairs: int) -> int:
    """Return the FLOPs of one head of DeepSeek-V3."""
    return cost(V3, BatchCounts(tokens, keys, pairs)).flops // V3.N


def two_orders() -> Sheet:
    """Both orders of multiplication with their FLOPs, and where they cross."""
    keys = 4096
    once = {"absorbed": per_head(absorbed_cost, 1, 0, 0), "expanded": per_head(expanded_cost, 0, 1, 0)}
    pair = {"absorbed": per_head(absorbed_cost, 0, 0, 1), "expanded": per_head(expanded_cost, 0, 0, 1)}
    one = {"absorbed": per_head(absorbed_cost, 1, keys, keys), "expanded": per_head(expanded_cost, 1, keys, keys)}
    even = break_even_flops(V3)
    s = Sheet(
        "two-orders",
        "Two orders of one product, and what they cost",
        f"Absorbed: {once['absorbed']:,} FLOPs once a query and {pair['absorbed']:,} a pair. Expanded: "
        f"{once['expanded']:,} once a key and {pair['expanded']:,} a pair. They cross at {even:.1f} new tokens.",
        540,
    )
    w, h = V3.L / 8, V3.P / 8  # eight numbers are one unit
    for y, name, ends in ((28, "absorbed", (4, 108)), (160, "expanded", (36, 356))):
        first = f"the query meets W_UK first: q_latent, 1 x {V3.L}"
        second = f"W_UK meets the keys first: k_nope, S x {V3.P}"
        s.text(4, y - 12, f"{name}: {first if name == 'absorbed' else second}")
        mid = y + w / 2
        s.rect(4, mid - 2, h, 4, "query", 0.7)
        s.text(28, mid + 4, "·", "middle", bold=True)
        s.rect(40, mid - h / 2, w, h, "per-head", 0.3)
        s.text(40 + w / 2, mid + 4.5, "W_UK", "middle")
        s.text(113, mid + 4, "·", "middle", bold=True)
        s.rect(124, y, 232, w, "latent", 0.3)
        s.text(240, mid + 4.5, f"latents, {V3.L} x S", "middle")
        s.line([(ends[0], y + w + 2), (ends[0], y + w + 7), (ends[1], y + w + 7), (ends[1], y + w + 2)], width=2)
        what = "a query" if name == "absorbed" else "a key"
        s.text(4, y + w + 23, f"{once[name]:,} FLOPs {what}, then {pair[name]:,} a pair", bold=True)
    s.text(4, 278, f"1 token over {keys:,} keys, one head, MFLOPs:", bold=True)
    s.text(4, 295, f"absorbed {one['absorbed'] / 1e6:.1f}, expanded {one['expanded'] / 1e6:,.0f}")
    left, bottom, top, most = 44, 496, 338, 400
    ceiling = pair["absorbed"] * most
    at = lambda q, flops: (left + q / most * (356 - left), bottom - flops / ceiling * (bottom - top))
    s.text(4, 328, "kFLOPs for each cached token and head")
    for k in (0, 200, 400, 600, 800):
        x, y = at(0, k * 1e3)
        s.line([(x, y), (356, y)], width=0.4)
        s.text(left - 6, y + 4, str(k), "end")
    for q in (0, 100, 200, 300, 400):
        s.text(at(q, 0)[0] - (8 if q == most else 0), bottom + 16, str(q), "middle")
    s.text((left + 356) / 2, bottom + 34, "new tokens of a request, over a long cache", "middle")
    s.line([at(0, 0), at(most, pair["absorbed"] * most)], "latent", 2.5)
    s.line([at(0, once["expanded"]), at(most, once["expanded"] + pair["expanded"] * most)], "per-head", 2.5)
    x, y = at(even, even * pair["absorbed"])
    s.line([(x, y), (x, bottom)], "error", stroke_dasharray="4 3")
    s.parts.append(tag("circle", cx=x, cy=y, r="4", fill="var(--mla-error)"))
    s.text(x + 6, bottom - 8, f"{even:.1f}", bold=True)
    s.text(at(365, 0)[0], at(0, 840e3)[1], "absorbed", "end")
    s.text(at(385, 0)[0], at(0, 375e3)[1], "expanded", "end")
    return s


def roofline_points() -> list[tuple[str, str, float]]:
    """Return (name, colour, FLOP per byte) of a decode step of 16 requests over 32k tokens."""
    lens = [32768] * 16
    step, drafts = count_batch([1] * 16, lens), count_batch([2] * 16, lens)
    heads = lambda n: V3.replace(num_attention_heads=n)
    return [
        ("MHA", "per-head", grouped_cost(V3, step, V3.N).intensity),
        ("GQA, 8 KV heads", "per-head", grouped_cost(V3, step, 8).intensity),
        *((f"MLA, {n} heads", "latent", latent_cost(heads(n), step).intensity) for n in (16, 32, 64, 128)),
        ("128 heads, 2 tokens", "latent", latent_cost(V3, drafts).intensity),
    ]


def roofline() -> Sheet:
    """Both ceilings of an H200, and decode with more and more heads."""
    gpu, points = find_gpu("h200"), roofline_points()
    s = Sheet(
        "roofline",
        "Decode under the roofline of an H200",
        "; ".join(f"{name}: {x:.1f} FLOP per byte" for name, _, x in points) + f". The ridge is at {gpu.ridge:.0f}.",
        334,
    )
    left, right, top, bottom = 40, 356, 34, 292
    at = lambda x, y: (
        left + math.log2(x) / 10 * (right - left),
        bottom - (math.log2(y) - 1.5) / (math.log2(1500) - 1.5) * (bottom - top),
    )
    for power in range(0, 11, 2):
        x, _ = at(2**power, 10)
        s.line([(x, top), (x, bottom)], width=0.4)
        s.text(x - (13 if power == 10 else 0), bottom + 16, str(2**power), "middle")
    for rate in (3, 10, 30, 100, 300, 1000):
        _, y = at(1, rate)
        s.line([(left, y), (right, y)], width=0.4)
        s.text(left - 5, y + 4, str(rate), "end")
    s.text(4, 16, "TFLOP/s that can be reached")
    s.text((left + right) / 2, bottom + 34, "FLOPs for each byte moved", "middle")
    roof = lambda x: min(gpu.flops, x * gpu.bandwidth) / 1e12
    ridge = at(gpu.ridge, roof(gpu.ridge))
    s.line([at(1, roof(1)), ridge, at(1024, roof(1024))], "grey", 2.5)
    s.line([ridge, (ridge[0], bottom)], "error", stroke_dasharray="4 3")
    s.text(ridge[0] - 5, bottom - 8, f"ridge {gpu.ridge:.0f}", "end", bold=True)
    s.text(right, ridge[1] + 19, f"peak {gpu.flops / 1e12:.0f}", "end")
    x, y = at(4, roof(4))
    s.text(x + 9, y + 11, f"{gpu.bandwidth / 1e12:.1f} TB/s")
    for i, (name, colour, x) in enumerate(points):
        place = at(x, roof(x))
        s.parts.append(tag("circle", cx=place[0], cy=place[1], r="5", fill=f"var(--mla-{colour})"))
        if colour == "per-head":
            s.text(place[0] + 9, place[1] + 13, name)
        elif i < len(points) - 1:
            s.text(place[0] - 8, place[1] - 5, name if i == 2 else name.removeprefix("MLA, "), "end")
        else:
            s.text(place[0], place[1] - 11, name.removeprefix("128 heads, "), "middle")
    return s


def turned(R: int, position: int, seed: int | None) -> tuple[torch.Tensor, ...]:
    """Return x, x W, rotate(x), rotate(x W) and rotate(x) W, each (1, R), float64, at a position."""
    toy = preset("toy")
    if seed is None:  # plane enough to be drawn
        W = torch.tensor([[1.1, 0.3], [-0.2, -0.6]], dtype=torch.float64)
        x = torch.tensor([[0.9, 0.25]], dtype=torch.float64)
    else:
        generator = torch.Generator().manual_seed(seed)
        W, x = (torch.randn(n, R, dtype=torch.float64, generator=generator) for n in (R, 1))
    cos, sin = rope_cos_sin(torch.tensor([position]), toy.rope, R)
    turn = lambda y: apply_rope(y, cos, sin, toy.rope.interleaved)
    return x, x @ W, turn(x), turn(x @ W), turn(x) @ W


def apart(vectors: tuple[torch.Tensor, ...]) -> float:
    """Return how far the two ways around the square end from each other, relative to x W; vectors are (1, R)."""
    _, product, _, after, before = vectors
    return float((after - before).norm() / product.norm())


def non_commuting_square() -> Sheet:
    """A vector through W_UK and a rotation, in both orders."""
    toy, vectors = preset("toy"), turned(2, 1, None)
    here, there = apart(vectors), apart(turned(toy.R, 5, 0))
    s = Sheet(
        "non-commuting-square",
        "Rotating does not commute with W_UK",
        f"Two ways around a square end at two vectors that differ by {here:.0%} of their size.",
        372,
    )
    x, product, rotated, after, before = vectors
    side = 124.0

    def plot(left: float, top: float, label: str, *arrows: tuple[torch.Tensor, str, str]) -> None:
        cx, cy, scale = left + side / 2, top + side / 2, 52.0
        s.rect(left, top, side, side, "grey", 0.05, rx="4")
        s.line([(left + 4, cy), (left + side - 4, cy)], width=0.4)
        s.line([(cx, top + 4), (cx, top + side - 4)], width=0.4)
        for vector, colour, dash in arrows:
            a, b = (float(v) * scale for v in vector[0])
            more = {"stroke_dasharray": dash} if dash else {}
            s.arrow([(cx, cy), (cx + a, cy - b)], colour, 2.5, **more)
        if label:
            s.text(left + 8, top + side - 8, label)

    plot(4, 4, "x", (x, "latent", ""))
    plot(232, 4, "x W_UK", (product, "per-head", ""))
    plot(4, 196, "rotate(x)", (rotated, "rope", ""))
    plot(232, 196, "", (after, "per-head", ""), (before, "error", "5 3"))
    for y, colour in ((66, "per-head"), (258, "error")):
        s.arrow([(134, y), (226, y)], colour)
        s.text(180, y - 7, "times W_UK", "middle")
    for left, colour in ((66, "rope"), (294, "per-head")):
        s.arrow([(left, 134), (left, 190)], colour)
        s.text(left + (9 if left < 180 else -9), 166, "rotate", "start" if left < 180 else "end")
    s.line([(4, 339), (34, 339)], "per-head", 2.5)
    s.text(40, 343, "rotate(x W_UK)")
    s.line([(180, 339), (210, 339)], "error", 2.5, stroke_dasharray="5 3")
    s.text(216, 343, "rotate(x) W_UK")
    s.text(180, 364, f"apart by {here:.0%} of their size; with R = {toy.R}, below: {there:.0%}", "middle")
    return s


def packed_row(L: int, R: int, group: int = 128) -> tuple[int, int, int]:
    """Return bytes of an 8-bit latent, of its float32 scales, one for each group, and of a 16-bit position key."""
    return L, L // group * 4, 2 * R


def latent_row() -> Sheet:
    """One cached row, byte by byte, in bfloat16 and packed."""
    plain, packed = FloatRows(V3.L, V3.R).row_bytes, packed_row(V3.L, V3.R)
    total = sum(packed)
    s = Sheet(
        "latent-row",
        f"One latent row in {plain:,} and in {total} bytes",
        f"bfloat16: {2 * V3.L} bytes of latent, then {2 * V3.R} of position key. Packed: {packed[0]} bytes of 8-bit "
        f"latent, {packed[1]} of scales, {packed[2]} of position key.",
        268,
    )
    scale = 352 / plain

    def bar(y: float, parts: tuple[tuple[int, str], ...]) -> None:
        start = 0
        for size, colour in parts:
            x = 4 + start * scale
            s.rect(x, y, size * scale, 30, colour, 0.35)
            s.line([(x, y + 30), (x, y + 36)], width=0.8)
            start += size
        end = 4 + start * scale
        s.line([(end, y + 30), (end, y + 36)], width=0.8)

    s.text(4, 18, f"{plain:,} bytes: plain bfloat16", bold=True)
    bar(28, ((2 * V3.L, "latent"), (2 * V3.R, "rope")))
    s.text(4 + V3.L * scale, 47, f"kv_c, {V3.L} x 2 B", "middle")
    s.text(356 - V3.R * scale, 47, "k_pe", "middle")
    for offset, where in ((0, "start"), (2 * V3.L, "end"), (plain, "end")):
        s.text(4 + offset * scale, 77, f"{offset:,}", where)
    s.text(356, 95, f"k_pe: {V3.R} x 2 B", "end")
    y = 136
    s.text(4, y - 10, f"{total} bytes: latent in 8 bits", bold=True)
    bar(y, ((packed[0], "latent"), (packed[1], "grey"), (packed[2], "rope")))
    s.text(4 + packed[0] * scale / 2, y + 19, f"kv_c, {V3.L} x 1 B", "middle")
    s.text(4 + (total - V3.R) * scale, y + 19, "k_pe", "middle")
    s.text(4, y + 49, "0")
    s.text(4 + packed[0] * scale, y + 49, f"{packed[0]}", "end")
    s.text(4 + total * scale, y + 49, f"{total}", "end")
    s.text(4, y + 72, f"between: {packed[1] // 4} float32 scales, {packed[1]} B, one for 128 numbers")
    s.text(4, y + 90, f"k_pe stays bfloat16, {V3.R} x 2 B")
    s.text(4, y + 116, f"{total} / {plain:,} = {total / plain:.0%} of the bytes", bold=True)
    return s


def budget_bins(dtype: str) -> tuple[dict[int, int], dict[int, int], float, int]:
    """Return counts of error/budget by fifths of a decade: right kernels, faults; worst right one; faults below 1."""
    rec = record("accuracy.json")
    used = {
        kind: [max(float(r["out"]), float(r["lse"])) for r in rec[kind] if r["dtype"] == dtype]
        for kind in ("correct", "faults")
    }
    bin_of = lambda x: 31 if math.isinf(x) else max(-15, min(29, math.floor(5 * math.log10(max(x, 1e-9)))))
    counts = []
    for kind in ("correct", "faults"):
        bins = [bin_of(x) for x in used[kind]]
        counts.append({b: bins.count(b) for b in sorted(set(bins))})
    return counts[0], counts[1], max(used["correct"]), sum(x <= 1 for x in used["faults"])


def error_budget() -> Sheet:
    """How much of its budget every right kernel uses, and how far planted faults exceed it."""
    dtypes = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
    found = {name: budget_bins(name) for name in dtypes}
    s = Sheet(
        "error-budget",
        "Error over budget: right kernels and planted faults",
        "; ".join(
            f"{dtypes[name]}: right kernels use at most {worst:.2f}; within it {below} of {sum(faults.values())} faults"
            for name, (_, faults, worst, below) in found.items()
        ),
        420,
    )
    left, unit = 4.0, 352 / 47
    at = lambda bin: left + (bin + 15) * unit
    s.rect(at(-15), 24, at(0) - at(-15), 336, "per-head", 0.06, stroke_opacity="0")
    for i, name in enumerate(dtypes):
        right, faults, worst, below = found[name]
        base = 134.0 + 113 * i
        tallest = max(right.get(bin, 0) + faults.get(bin, 0) for bin in (*right, *faults))
        for counts, below_it, colour, fill in ((right, {}, "per-head", 0.8), (faults, right, "error", 0.45)):
            for bin, count in counts.items():
                h, under = 72 * count / tallest, 72 * below_it.get(bin, 0) / tallest
                s.rect(at(bin) + 0.5, base - under - h, unit - 1, h, colour, fill, stroke_width="0.6")
        s.line([(left, base), (356, base)], width=0.8)
        s.text(8, base - 92, dtypes[name], bold=True)
        s.text(8, base - 76, f"worst right {worst:.2f}")
        s.text(at(0) + 8, base - 76, f"faults: {sum(faults.values()) - below} of {sum(faults.values())} exceed it")
    s.line([(at(0), 18), (at(0), 360)], "error", 2, stroke_dasharray="5 3")
    s.text(at(0), 13, "limit", "middle", bold=True)
    for power in (-2, -1, 0, 2, 4):
        s.text(at(5 * power), 376, f"{10.0**power:g}", "middle")
    s.text(at(31) + unit / 2 - 4, 376, "∞", "middle")
    s.text(180, 394, "largest error / budget, output or LSE", "middle")
    s.rect(64, 403, 11, 11, "per-head", 0.8)
    s.text(80, 413, "right kernels")
    s.rect(190, 403, 11, 11, "error", 0.45)
    s.text(206, 413, "planted faults")
    return s


FIGURE_MAKERS = (
    cache_bars, data_flow, two_orders, roofline, non_commuting_square, latent_row, pages, merge_tree, error_budget,
    tier_ladder, decision_tree, schedule, shared_memory,
)  # fmt: skip


def figures() -> dict[str, str]:
    """Return name -> SVG of every figure."""
    return {sheet.name: sheet.svg() for sheet in (maker() for maker in FIGURE_MAKERS)}


def main() -> None:
    """Write what has changed."""
    FIGURES.mkdir(exist_ok=True)
    for name, text in figures().items():
        path = FIGURES / f"{name}.svg"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
