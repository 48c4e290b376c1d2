"""The sheet that the figures are drawn on, and those figures that are boxes and arrows; `figures.py` writes them.

A sheet is 360 units wide, as a phone is, and every text has one size; colours are the site's CSS variables.
"""

import math
import re
from collections.abc import Sequence

import torch
from pages_benchmarks import tag
from pages_capabilities import MACHINES, answers
from pieces import ROOT, escape

from mla.batch import AttentionBatch
from mla.cache import slots_of
from mla.oracle import oracle
from mla.presets import preset
from mla.state import AttentionState, merge

WIDTH, SIZE, STEP = 360, 12.5, 16
Point = tuple[float, float]


class Sheet:
    """One figure under construction: `text`, `box`, `line` and `arrow` add to it, `svg` returns it."""

    def __init__(self, name: str, title: str, desc: str, height: int) -> None:
        """Start a figure; name, title and desc say what it is to those who do not see it."""
        self.name, self.title, self.desc, self.height = name, title, desc, height
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, at: str = "start", bold: bool = False, **more: object) -> None:
        """Write one line, " x " as a sign of multiplication; `at` says what x is: the start, middle or end of it."""
        weight = {"font_weight": "bold"} if bold else {}
        said = escape(words.replace(" x ", " \u00d7 "))
        self.parts.append(tag("text", said, x=float(x), y=float(y), text_anchor=at, **weight, **more))

    def link(self, x: float, y: float, words: str, anchor: str) -> None:
        """Write a line in its middle that leads to a section of the page."""
        self.text(x, y, words, "middle", bold=True, text_decoration="underline")
        self.parts[-1] = tag("a", self.parts[-1], href=f"#{anchor}")

    def rect(self, x: float, y: float, w: float, h: float, colour: str, fill: float = 0.2, **more: object) -> None:
        """Draw a rectangle in a colour of the site, its inside at opacity `fill`."""
        paint = f"var(--mla-{colour})"
        place = dict(x=float(x), y=float(y), width=float(w), height=float(h))
        self.parts.append(tag("rect", **place, fill=paint, fill_opacity=str(fill), stroke=paint, **more))

    def box(self, x: float, y: float, w: float, h: float, colour: str, lines: Sequence[str], fill: float = 0.2) -> None:
        """Draw a box with lines in its middle, the first of several in bold."""
        self.rect(x, y, w, h, colour, fill, rx="4")
        first = y + h / 2 + 4.5 - (len(lines) - 1) * STEP / 2
        for i, words in enumerate(lines):
            self.text(x + w / 2, first + i * STEP, words, "middle", bold=i == 0 and len(lines) > 1)

    def line(self, points: Sequence[Point], colour: str = "grey", width: float = 1.5, **more: object) -> None:
        """Draw a line through points."""
        where = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        stroke = f"var(--mla-{colour})"
        self.parts.append(tag("polyline", points=where, fill="none", stroke=stroke, stroke_width=width, **more))

    def arrow(self, points: Sequence[Point], colour: str = "grey", width: float = 1.5, **more: object) -> None:
        """Draw a line that ends in a head."""
        (x0, y0), (x, y) = points[-2:]
        length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
        u, v = 7 * (x - x0) / length, 7 * (y - y0) / length
        self.line([*points[:-1], (x - u / 2, y - v / 2)], colour, width, **more)
        corners = [(x, y), (x - u - v / 2, y - v + u / 2), (x - u + v / 2, y - v - u / 2)]
        where = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
        self.parts.append(tag("polygon", points=where, fill=f"var(--mla-{colour})"))

    def svg(self) -> str:
        """Return the figure."""
        ids = f"{self.name}-title {self.name}-desc"
        said = [
            tag("title", escape(self.title), id=f"{self.name}-title"),
            tag("desc", escape(self.desc), id=f"{self.name}-desc"),
        ]
        box = dict(viewBox=f"0 0 {WIDTH} {self.height}", width="100%", style="max-width: 460px")
        words = dict(font_size=SIZE, fill="currentColor", role="img", aria_labelledby=ids)
        inside = "\n".join(["", *said, *self.parts, ""])
        return tag("svg", inside, xmlns="http://www.w3.org/2000/svg", **{"class": "figure"}, **box, **words) + "\n"


def shape(*sizes: object) -> str:
    """Return sizes as a reader writes them."""
    return " x ".join(str(size) for size in sizes)


def data_flow() -> Sheet:
    """Every matrix and shape of one layer of DeepSeek-V3, and both orders in its middle."""
    c = preset("deepseek-v3")
    s = Sheet(
        "data-flow",
        "One layer of DeepSeek-V3, every matrix and shape",
        "Hidden states become a query latent, a KV latent and a position key; the last two are cached. The absorbed "
        "and the expanded form lead to the same output.",
        680,
    )
    s.box(4, 4, 352, 26, "grey", [f"hidden, {shape('T', c.H)}"])
    for x, name, width, then in ((24, "W_DQ", c.Lq, "norm"), (160, "W_DKV", c.L, "norm"), (278, "W_KR", c.R, "rotate")):
        s.arrow([(x, 30), (x, 94)])
        for i, words in enumerate((name, shape(c.H, width), then)):
            s.text(x + 7, 48 + i * STEP, words, bold=i == 0)
    s.rect(130, 86, 226, 68, "grey", 0.0, rx="4", stroke_dasharray="4 3")
    s.text(243, 148, f"cached: {c.L} + {c.R} numbers a token", "middle")
    s.box(4, 94, 104, 38, "query", ["q_c", shape("T", c.Lq)])
    s.box(138, 94, 112, 38, "latent", ["kv_c", shape("S", c.L)])
    s.box(258, 94, 90, 38, "rope", ["k_pe", shape("S", c.R)])
    s.arrow([(16, 132), (16, 208)])
    s.arrow([(92, 132), (92, 164), (140, 164), (140, 208)])
    for x, name, width, then in ((23, "W_UQ", c.P, ""), (147, "W_QR", c.R, ", rotate")):
        s.text(x, 182, name + then, bold=True)
        s.text(x, 198, shape(c.Lq, c.N, width))
    s.box(4, 208, 112, 38, "query", ["q_nope", shape("T", c.N, c.P)])
    s.box(124, 208, 112, 38, "query", ["q_pe", shape("T", c.N, c.R)])
    for x, top in ((60, 246), (180, 246), (300, 154)):
        s.arrow([(x, top), (x, 268)])
    s.text(180, 284, "two orders, the same numbers", "middle", bold=True)
    s.text(180, 301, f"W_UK {shape(c.L, c.N, c.P)}, W_UV {shape(c.L, c.N, c.V)}", "middle")
    rows, out = shape("T", c.N, c.L), shape("T", c.N, c.V)
    absorbed = [
        ("query", ["q_latent = q_nope W_UK", rows]),
        ("grey", [f"score, {c.L} + {c.R} wide", "q_latent·kv_c + q_pe·k_pe"]),
        ("latent", ["weighted sum of kv_c", rows]),
        ("per-head", ["out = sum W_UV", out]),
    ]
    expanded = [
        ("per-head", ["k_nope = kv_c W_UK", shape("S", c.N, c.P)]),
        ("per-head", ["v = kv_c W_UV", shape("S", c.N, c.V)]),
        ("grey", [f"score, {c.P} + {c.R} wide", "q_nope·k_nope + q_pe·k_pe"]),
        ("per-head", ["out = weighted sum of v", out]),
    ]
    for x, name, steps in ((4, "absorbed", absorbed), (183, "expanded", expanded)):
        s.text(x + 86, 326, f"{name} form", "middle", bold=True)
        for i, (colour, lines) in enumerate(steps):
            s.box(x, 334 + i * 60, 173, 42, colour, lines)
            if i < len(steps) - 1:
                s.arrow([(x + 86, 376 + i * 60), (x + 86, 394 + i * 60)])
    s.text(180, 590, f"W_O {shape(c.N, c.V, c.H)}", "middle", bold=True)
    s.line([(90, 556), (90, 600), (269, 600), (269, 556)])
    s.arrow([(180, 600), (180, 622)])
    s.box(4, 622, 352, 26, "grey", [f"hidden, {shape('T', c.H)}"])
    s.text(180, 670, "T new tokens, S cached ones", "middle")
    return s


def pages() -> Sheet:
    """Two requests, their block tables, and the pool with every slot."""
    lens, table, size, pool = {"A": 6, "B": 3}, {"A": [3, 1], "B": [4, 0]}, 4, 5
    batch = AttentionBatch.bottom_right(
        [*lens.values()], [*lens.values()], [*table.values()], page_size=size, num_pages=pool
    )
    names = [f"{request}{i}" for request, n in lens.items() for i in range(n)]
    owner = dict(zip(batch.slot_mapping.tolist(), names, strict=True))
    s = Sheet(
        "pages",
        "Tokens, block tables, pages and slots",
        "; ".join(f"{token} lies in slot {slot}" for slot, token in owner.items()) + ". All other slots hold NaN.",
        388,
    )
    fill = {"A": 0.5, "B": 0.12}
    column = lambda page: 8 + page * 70.0
    for (request, n), left in zip(lens.items(), (8.0, 254.0), strict=True):
        s.text(left, 16, f"request {request}", bold=True)
        for i in range(n):
            s.rect(left + 30 * i, 24, 30, 24, "latent", fill[request])
            s.text(left + 15 + 30 * i, 40.5, f"{request}{i}", "middle")
        s.text(left, 74, "block table")
        used = -(-n // size)
        for i, page in enumerate(table[request]):
            x, live = left + 34 * i, i < used
            s.rect(x, 82, 34, 24, "latent" if live else "grey", fill[request] if live else 0.0,
                   **({} if live else {"stroke_dasharray": "3 3"}))  # fmt: skip
            s.text(x + 17, 98.5, str(page) if live else "-", "middle", bold=live)
            if live:
                s.arrow([(x + 17, 106), (column(page) + 32, 164)], "latent")
    for page in range(pool):
        x = column(page)
        s.text(x + 32, 180, f"page {page}", "middle", bold=True)
        for place in range(size):
            slot, y = page * size + place, 188.0 + 32 * place
            token = owner.get(slot)
            s.rect(x, y, 64, 32, "latent" if token else "grey", fill[token[0]] if token else 0.0)
            s.text(x + 7, y + 20.5, token or "NaN", bold=bool(token), **({} if token else {"opacity": "0.75"}))
            s.text(x + 58, y + 20.5, str(slot), "end", **({} if token else {"opacity": "0.75"}))
    i = lens["A"] - 1
    slot = slots_of(batch.block_table[0], i, i + 1, size).item()
    page, place = table["A"][i // size], i % size
    s.text(8, 340, f"A{i}: block table entry {i} // {size} = {i // size} says page {page},")
    s.text(8, 357, f"place {i} % {size} = {place}, so slot {page} · {size} + {place} = {slot}")
    s.text(8, 380, "right in a cell: its slot; NaN: never written", opacity="0.8")
    return s


def tree_states() -> list[list[tuple[str, AttentionState]]]:
    """Return the levels of the merge tree: four states over 3 of 12 keys each, two of them, one; and all keys at once.

    A state has out (1, 1, V) and lse (1, 1), float64. Raises AssertionError where the tree misses the whole by 1e-12.
    """
    c, keys, rows = preset("toy"), 12, 3
    g = torch.Generator().manual_seed(0)
    draw = lambda *sizes: torch.randn(*sizes, dtype=torch.float64, generator=g)
    q, cache, up = (
        (draw(1, 1, c.P), draw(1, 1, c.R)),
        (draw(keys, c.L), draw(keys, c.R)),
        (draw(c.L, 1, c.P), draw(c.L, 1, c.V)),
    )

    def over(first: int, last: int) -> AttentionState:
        part = [x[first:last] for x in cache]
        return AttentionState(
            *oracle(*q, *part, up[0] / c.L**0.5, up[1], torch.tensor([last - first]), c.softmax_scale)
        )

    level = [(f"keys {a} to {a + rows - 1}", over(a, a + rows)) for a in range(0, keys, rows)]
    levels = [level]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=True)
        level = [(f"{a.rsplit(' ', 1)[0]} {b.rsplit(' ', 1)[1]}", merge(x, y)) for (a, x), (b, y) in pairs]
        levels.append(level)
    whole = over(0, keys)
    assert float((whole.out - level[0][1].out).abs().max()) < 1e-12
    assert float((whole.lse - level[0][1].lse).abs().max()) < 1e-12
    return [*levels, [("all at once", whole)]]


def merge_tree() -> Sheet:
    """Twelve keys in four splits, merged pair by pair, with the logarithms and weights of one head."""
    levels = tree_states()
    lse = lambda state: float(state.lse.item())
    s = Sheet(
        "merge-tree",
        "Four partial states become one",
        f"Twelve keys in four parts. Their logarithms {', '.join(f'{lse(x):.2f}' for _, x in levels[0])}"
        f" weigh them; the merged one, {lse(levels[2][0][1]):.2f}, is that of all keys at once.",
        370,
    )
    for k in range(12):
        x = 4 + 90 * (k // 3) + 27.3 * (k % 3)
        s.rect(x, 22, 27.3, 24, "latent", 0.35)
        s.text(x + 13.6, 38.5, str(k), "middle")
    s.text(4, 14, "12 keys in 4 splits")
    centres = [[45 + 90 * i for i in range(4)], [90, 270], [180]]
    for depth, (level, y) in enumerate(zip(levels[:3], (74, 176, 278), strict=True)):
        for i, (name, state) in enumerate(level):
            x, w = centres[depth][i], 82 if depth == 0 else 104
            s.box(x - w / 2, y, w, 42, "per-head", [name, f"lse {lse(state):.2f}"])
            if depth == 0:
                s.arrow([(x, 46), (x, 72)])
                continue
            for side, at in ((0, -1), (1, 1)):
                share = math.exp(lse(levels[depth - 1][2 * i + side][1]) - lse(state))
                top = centres[depth - 1][2 * i + side]
                s.arrow([(top, y - 60), (top, y - 34), (x + at * 14, y - 34), (x + at * 14, y - 1)])
                s.text(x + at * 20, y - 15, f"{share:.2f}", "end" if at < 0 else "start", bold=True)
    s.text(244, 296, "all 12 at once:")
    s.text(244, 312, f"lse {lse(levels[3][0][1]):.2f}", bold=True)
    s.text(4, 344, "On the arrows: the weight of a state when merged,")
    s.text(4, 361, "e to its lse minus the merged lse. A pair adds up to 1.")
    return s


def tier_ladder() -> Sheet:
    """The tiers over one truth, and the machines whose question each answers with yes."""
    s = Sheet(
        "tier-ladder",
        "The tiers, from slow and plain to fast",
        "Every tier stands on the same contract and is held against the same float64 oracle. Chips name machines: "
        "solid where the tier takes a DeepSeek-V3 layer, dashed where it refuses.",
        474,
    )
    takes = {m.name: {tier: not no for tier, (no, _) in answers(m, {}).items()} for m in MACHINES}
    rungs = (
        ("tier 2: kernels of other libraries", "the same contract around them", ("flashinfer", "flashmla", "aiter")),
        ("tier 2: triton", "GPU kernels for both forms", ("triton",)),
        ("tier 1: paged", "mixed batches over pages, plain PyTorch", ("paged",)),
        ("tier 0: naive", "each form as the paper writes it", ("naive",)),
    )
    y = 4.0
    for head, about, names in rungs:
        h = 44 + 28 * len(names) + (0 if len(names) > 1 else -2)
        s.rect(4, y, 304, h, "per-head", 0.08, rx="4")
        s.text(12, y + 18, head, bold=True)
        s.text(12, y + 35, about)
        for i, name in enumerate(names):
            x = 12.0
            if len(names) > 1:
                s.text(x, y + 59 + 28 * i, name)
                x = 78.0
            for machine in MACHINES:
                label = machine.name.removeprefix("Laptop ")
                w, yes = 9 + 7.8 * len(label), takes[machine.name][name]
                s.rect(x, y + 44 + 28 * i, w, 21, "per-head" if yes else "grey", 0.3 if yes else 0.0, rx="4",
                       **({} if yes else {"stroke_dasharray": "3 3"}))  # fmt: skip
                s.text(x + w / 2, y + 59 + 28 * i, label, "middle", **({} if yes else {"opacity": "0.65"}))
                x += w + 3
        s.arrow([(330, y + h / 2), (309, y + h / 2)], "error")
        y += h + 10
    s.rect(330, 4, 26, y - 14, "error", 0.15, rx="4")
    s.text(0, 0, "float64 oracle, error budget", "middle", transform=f"translate(347.5 {(y - 6) / 2}) rotate(-90)")
    s.box(4, y, 352, 42, "latent", ["mla: what MLA is", "configuration, both forms, cache, batch, contract"], 0.15)
    s.text(4, y + 62, "solid: takes a layer of DeepSeek-V3 on that machine")
    s.text(4, y + 79, "dashed: refuses, and says why")
    s.height = int(y + 88)
    return s


# question, section of the page, kinds of fault that it is about
QUESTIONS = (
    (("raised, or a wrong", "shape or dtype?"), "", ("form",)),
    (("not finite, in rows", "without keys only?"), "Empty rows", ("empty",)),
    (("not finite", "elsewhere?"), "Memory that is not yours", ("memory", "write")),
    (("out right,", "LSE wrong?"), "The logarithm", ("lse", "merge")),
    (("float32 right,", "16 bits wrong?"), "Precision", ("precision",)),
    (("only with several", "requests?"), "Batch", ("batch",)),
    (("in all families, also", "over two keys?"), "Scale, rotation, heads", ("scale", "rope", "head", "value")),
    (("needle_last or", "needle_end lost?"), "Tails and masks", ("tail", "mask")),
    (("needle_middle or", "needle_first lost?"), "Pages and splits", ("page", "split", "offset")),
)


def sections(page: str) -> dict[str, str]:
    """Return heading -> anchor of a page's sections."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    slug = lambda head: re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower())
    return {head: slug(head) for head in re.findall(r"^## (.+)$", text, re.M)}


def decision_tree() -> Sheet:
    """What to ask first when numbers are wrong, with a link to the section that goes on."""
    s = Sheet(
        "decision-tree",
        "What to ask first when the numbers are wrong",
        "Nine questions from top to bottom; the first yes names the section to read and the kinds of fault "
        "that it is about.",
        0,
    )
    anchors = sections("how-to/debug-a-mismatch.md")
    s.box(4, 4, 150, 28, "grey", ["mla check mine.py"])
    for i, (lines, section, kinds) in enumerate(QUESTIONS):
        y = 52.0 + 66 * i
        s.arrow([(79, y - 20), (79, y)])
        s.rect(4, y, 150, 46, "query", 0.15, rx="4")
        for j, words in enumerate(lines):
            s.text(79, y + 20 + STEP * j, words, "middle")
        s.arrow([(154, y + 23), (190, y + 23)], "error")
        s.text(169, y + 17, "yes", "middle")
        s.rect(190, y, 166, 46, "error", 0.1, rx="4")
        s.text(273, y + 36, ", ".join(kinds), "middle")
        if section:
            s.link(273, y + 19, section, anchors[section])
        else:
            s.text(273, y + 19, "Read the sentence", "middle", bold=True)
    y = 52.0 + 66 * len(QUESTIONS)
    s.arrow([(79, y - 20), (79, y)])
    s.rect(4, y, 150, 28, "grey", 0.1, rx="4")
    s.link(79, y + 18, "When nothing fits", anchors["When nothing fits"])
    s.text(190, y + 12, "2nd line: kinds of fault, in")
    s.text(190, y + 28, "the words of mla check")
    s.height = int(y + 36)
    return s
