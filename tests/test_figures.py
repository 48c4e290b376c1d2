"""The figures of the site: what the script draws, with the numbers of mla, in colours that both palettes have."""

import importlib
import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mla.cache import FloatRows
from mla.conformance.zoo import KINDS
from mla.cost import break_even_flops, cache_bytes_per_token, count_batch, kv_bytes_per_token, latent_cost
from mla.presets import preset
from mla.roofline import find_gpu

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NAMES = {
    "cache-bars", "data-flow", "two-orders", "roofline", "non-commuting-square", "latent-row", "pages", "merge-tree",
    "error-budget", "tier-ladder", "decision-tree", "hopper-schedule", "hopper-shared-memory",
}  # fmt: skip
V3 = preset("deepseek-v3")
SVG = "{http://www.w3.org/2000/svg}"
PAINTS = re.compile(r"none|currentColor|var\(--mla-[a-z-]+\)")


@pytest.fixture(scope="module")
def tools():
    """The modules that draw, by name."""
    sys.path.insert(0, str(DOCS / "tools"))
    try:
        names = ("figures", "figures_flow", "figures_hopper", "pages_capabilities")
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def drawn(tools) -> dict[str, str]:
    return tools["figures"].figures()


def committed(name: str) -> str:
    return (DOCS / "figures" / f"{name}.svg").read_text(encoding="utf-8")


def words(name: str) -> list[str]:
    """The texts that a reader sees in a figure."""
    return ["".join(node.itertext()) for node in ElementTree.fromstring(committed(name)).iter(f"{SVG}text")]


def colour_faults(text: str) -> list[str]:
    """Paints of a figure that no palette of the site knows."""
    css = (DOCS / "stylesheets" / "site.css").read_text(encoding="utf-8")
    named = set(re.findall(r"(--mla-[a-z-]+):", css))
    paints = re.findall(r'(?:fill|stroke|color)="([^"]*)"', text)
    faults = [p for p in paints if not PAINTS.fullmatch(p)] + re.findall(r"#[0-9a-fA-F]{3,8}\b(?!-)|rgba?\(", text)
    return faults + [v for v in re.findall(r"var\((--[a-z-]+)\)", text) if v not in named]


def test_the_figures_are_those_of_the_script(drawn):
    lie = {path.stem for path in (DOCS / "figures").glob("*.svg")}
    assert set(drawn) == lie == NAMES
    stale = [name for name in drawn if drawn[name] != committed(name)]
    assert not stale, f"run python docs/tools/figures.py: {stale}"


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_figure_is_small_valid_named_and_painted_in_the_sites_colours(name):
    text = committed(name)
    svg = ElementTree.fromstring(text)
    assert svg.tag == f"{SVG}svg"
    assert len(text.encode()) < 40_000
    assert (svg[0].tag, svg[1].tag) == (f"{SVG}title", f"{SVG}desc")
    assert all(len(node.text or "") > 20 for node in svg[:2])
    assert svg.get("aria-labelledby") == f"{svg[0].get('id')} {svg[1].get('id')}"
    assert svg.get("viewBox", "").startswith("0 0 360 ")
    assert (svg.get("width"), svg.get("fill")) == ("100%", "currentColor")
    assert not colour_faults(text)
    assert "\n\n" not in text, "a blank line would end the HTML block that takes it in"


@pytest.mark.parametrize("bad", ['fill="#2a6fbb"', 'stroke="red"', 'fill="var(--mla-pink)"', 'style="fill: #fff"'])
def test_a_colour_of_no_palette_is_found(bad):
    assert colour_faults(f"<rect {bad}/>")


def test_no_two_figures_share_an_id():
    ids = [i for name in NAMES for i in re.findall(r'\bid="([^"]+)"', committed(name))]
    assert len(ids) == len(set(ids)) == 2 * len(NAMES)


def test_texts_are_not_below_11_pixels_on_a_phone():
    narrowest = 360 - 2 * 16  # a phone's width without the theme's margins
    for name in NAMES:
        sizes = [float(size) for size in re.findall(r'font-size="([\d.]+)"', committed(name))]
        assert sizes
        assert all(size * narrowest / 360 >= 11 for size in sizes)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_figure_stands_on_one_page_with_its_caption(name):
    pages = [path.read_text(encoding="utf-8") for folder in ("", "explanation", "how-to") for path in
             (DOCS / folder).glob("*.md")]  # fmt: skip
    taken = re.compile(rf'<figure markdown="0">\n--8<-- "figures/{name}\.svg"\n<figcaption>.+</figcaption></figure>')
    assert sum(len(taken.findall(page)) for page in pages) == 1
    assert not any(f"<!-- figure: {name}" in page for page in pages)


# Their numbers are those of mla


def test_cache_bars_have_the_bytes_of_the_cost_module_and_their_lengths():
    sizes = [
        kv_bytes_per_token(V3, V3.N),
        kv_bytes_per_token(V3, 8),
        cache_bytes_per_token(V3),
        kv_bytes_per_token(V3, 1),
    ]
    seen = words("cache-bars")
    assert all(f"{size:,}" in seen for size in sizes)
    assert all(f"{size * V3.num_hidden_layers * 131072 / 1e9:.1f}" in seen for size in sizes)
    rects = list(ElementTree.fromstring(committed("cache-bars")).iter(f"{SVG}rect"))
    widths = [float(rect.get("width", "0")) for rect in rects if rect.get("height") == "13.0"][:5]
    drawn_bars = [widths[0], widths[1], widths[2] + widths[3], widths[4]]
    # lengths have one place, and one bar has two parts: 2 * 0.05
    assert all(abs(bar - 352 * size / sizes[0]) <= 0.1 for bar, size in zip(drawn_bars, sizes, strict=True))


def test_data_flow_has_every_matrix_and_its_shape():
    seen = [word.replace("\u00d7", "x") for word in words("data-flow")]
    c = V3
    for shape in ((c.H, c.Lq), (c.H, c.L), (c.H, c.R), (c.Lq, c.N, c.P), (c.Lq, c.N, c.R)):
        assert " x ".join(map(str, shape)) in seen
    assert f"W_UK {c.L} x {c.N} x {c.P}, W_UV {c.L} x {c.N} x {c.V}" in seen
    assert f"W_O {c.N} x {c.V} x {c.H}" in seen
    assert f"cached: {c.L} + {c.R} numbers a token" in seen


def test_two_orders_has_the_hand_counted_flops_and_crosses_at_the_break_even(tools):
    seen = " ".join(words("two-orders"))
    once = 2 * V3.L * (V3.P + V3.V)
    assert f"{once:,} FLOPs a query, then {2 * (2 * V3.L + V3.R):,} a pair" in seen
    assert f"{once:,} FLOPs a key, then {2 * (V3.P + V3.R + V3.V):,} a pair" in seen
    assert f" {break_even_flops(V3):.1f} " in f" {seen} "
    svg = ElementTree.fromstring(committed("two-orders"))
    lines = [line.get("points", "").split() for line in svg.iter(f"{SVG}polyline") if line.get("stroke-width") == "2.5"]
    (a, b), (c, d) = [[tuple(map(float, point.split(","))) for point in line] for line in lines]
    slope = lambda p, q: (q[1] - p[1]) / (q[0] - p[0])
    x = a[0] + (c[1] - a[1]) / (slope(a, b) - slope(c, d))
    q = (x - a[0]) / (b[0] - a[0]) * 400
    # ends are rounded to 0.05 units of 312, 400 tokens wide; the lines meet at a slant of 2176 - 640 of 2176 a token
    assert abs(q - break_even_flops(V3)) < 1


def test_roofline_points_are_the_intensities_of_the_cost_module_and_lie_on_the_roof(tools):
    gpu, step = find_gpu("h200"), count_batch([1] * 16, [32768] * 16)
    points = {name: x for name, _, x in tools["figures"].roofline_points()}
    for heads in (16, 32, 64, 128):
        assert points[f"MLA, {heads} heads"] == latent_cost(V3.replace(num_attention_heads=heads), step).intensity
    assert points["MLA, 64 heads"] < gpu.ridge < points["MLA, 128 heads"]
    assert f"ridge {gpu.ridge:.0f}" in words("roofline")
    circles = [
        tuple(float(node.get(k, "0")) for k in ("cx", "cy"))
        for node in ElementTree.fromstring(committed("roofline")).iter(f"{SVG}circle")
    ]
    assert len(circles) == len(points)
    above = [y for (_, y), x in zip(circles, points.values(), strict=True) if x > gpu.ridge]
    assert len(above) == 2
    assert len(set(above)) == 1, "compute bound: one height"


def test_latent_row_has_the_bytes_of_the_layout(tools):
    plain, packed = FloatRows(512, 64).row_bytes, sum(tools["figures"].packed_row(512, 64))
    assert (plain, packed) == (1152, 512 + 4 * 4 + 64 * 2) == (1152, 656)
    seen = words("latent-row")
    assert f"{packed} / {plain:,} = 57% of the bytes" in seen


def test_pages_shows_the_slots_that_the_page_prints():
    page = (DOCS / "explanation" / "paged-latents.md").read_text(encoding="utf-8")
    slots = json.loads(re.findall(r"^slots (\[.+\])$", page, re.M)[0])
    tokens = [f"A{i}" for i in range(6)] + [f"B{i}" for i in range(3)]
    said = ElementTree.fromstring(committed("pages"))[1].text
    assert (
        said
        == "; ".join(f"{token} lies in slot {slot}" for token, slot in zip(tokens, slots, strict=True))
        + ". All other slots hold NaN."
    )
    assert words("pages").count("NaN") == 5 * 4 - len(tokens)


def test_square_says_how_far_the_page_says(tools):
    page = (DOCS / "explanation" / "decoupled-rope.md").read_text(encoding="utf-8")
    share = re.findall(r"^rotate\(x W\) and rotate\(x\) W differ by (\d+%) of their size$", page, re.M)[0]
    assert f"with R = 8, below: {share}" in " ".join(words("non-commuting-square"))


def test_merge_tree_weights_add_up_and_end_at_the_whole(tools):
    levels = tools["figures_flow"].tree_states()
    assert [len(level) for level in levels] == [4, 2, 1, 1]
    shares = [float(word) for word in words("merge-tree") if re.fullmatch(r"0\.\d\d", word)]
    assert len(shares) == 6
    assert all(abs(a + b - 1) < 0.011 for a, b in zip(shares[::2], shares[1::2], strict=True))  # two places each
    assert f"lse {levels[3][0][1].lse.item():.2f}" in words("merge-tree")


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_error_budget_counts_every_row_of_the_record(tools, dtype):
    record = json.loads((DOCS / "results" / "accuracy.json").read_text(encoding="utf-8"))
    right, faults, worst, below = tools["figures"].budget_bins(dtype)
    rows = {kind: [r for r in record[kind] if r["dtype"] == dtype] for kind in ("correct", "faults")}
    assert sum(right.values()) == len(rows["correct"])
    assert sum(faults.values()) == len(rows["faults"])
    assert worst == max(max(r["out"], r["lse"]) for r in rows["correct"])
    assert f"faults: {len(rows['faults']) - below} of {len(rows['faults'])} exceed it" in words("error-budget")
    assert f"worst right {worst:.2f}" in words("error-budget")


def test_tier_ladder_chips_are_the_tiers_answers(tools):
    capabilities = tools["pages_capabilities"]
    takes = {m.name: {t: not no for t, (no, _) in capabilities.answers(m, {}).items()} for m in capabilities.MACHINES}
    names = ("flashinfer", "flashmla", "aiter", "triton", "paged", "naive")
    expected = [takes[m.name][name] for name in names for m in capabilities.MACHINES]
    chips = [
        r for r in ElementTree.fromstring(committed("tier-ladder")).iter(f"{SVG}rect") if r.get("height") == "21.0"
    ]
    assert [chip.get("stroke-dasharray") is None for chip in chips] == expected


def test_decision_tree_leads_to_sections_of_its_page_and_names_kinds_of_the_suite(tools):
    flow = tools["figures_flow"]
    anchors = set(flow.sections("how-to/debug-a-mismatch.md").values())
    links = [node.get("href", "") for node in ElementTree.fromstring(committed("decision-tree")).iter(f"{SVG}a")]
    assert len(links) == 9
    assert {link.removeprefix("#") for link in links} <= anchors
    assert sorted(kind for _, _, kinds in flow.QUESTIONS for kind in kinds) == sorted(KINDS)


def test_the_schedule_never_does_two_things_at_once_and_multiplies_all_that_there_is(tools):
    hopper = tools["figures_hopper"]
    spans, length = hopper.of_two_pairs()
    for row in ("even", "odd", "tensor cores"):
        mine = sorted((start, stop) for name, _, start, stop in spans if name == row)
        assert mine
        assert all(a[1] <= b[0] for a, b in pairwise(mine)), row
    busy = sum(stop - start for row, _, start, stop in spans if row == "tensor cores")
    # two pairs are 4 blocks of 64 keys, 64 rows, 576 columns of scores and 512 of values, at 2048 multiply-adds a cycle
    assert busy == 4 * 64 * 64 * (576 + 512) // 2048
    assert busy < length < 2 * busy
    assert f"a pair: {length // 2:,} cycles, tensor cores busy {busy / length:.0%}" in words("hopper-schedule")


def test_the_schedule_repeats_and_keeps_the_order_of_the_model(tools):
    hopper = tools["figures_hopper"]
    spans = hopper.timed(hopper.seesaw((12,)))
    starts = [start for row, what, start, _ in spans if what == "scores of even"][::6]
    assert starts[8] - starts[6] == starts[10] - starts[8] == hopper.of_two_pairs()[1]
    copies = [span for span in spans if span[:2] == ("copies", "right0")]
    assert min(stop - start for _, _, start, stop in copies[4:]) >= hopper.LATENCY + 64 * 64 * 2 // hopper.BYTES_A_CYCLE
    stuck = {name: events[:-1] for name, events in hopper.seesaw((1,)).items()}
    stuck["odd"] = [e for e in stuck["odd"] if getattr(e, "barrier", "") != "max1"]
    with pytest.raises(ValueError, match=r"all wait.*max1"):
        hopper.timed(stuck)


def test_shared_memory_adds_up_to_what_is_compiled(tools):
    sizes = tools["figures_hopper"].shared_bytes()
    assert sizes["query"] == sizes["block 0"] == sizes["block 1"] == 64 * 576 * 2
    assert (sizes["rows"], sizes["barriers"]) == (6 * 64 * 4, 15 * 8)
    variants = json.loads((DOCS / "results" / "aot.json").read_text(encoding="utf-8"))["kernels"]["hopper.seesaw"]
    compiled = {v["rows"]["sm_90"]["shared"] for v in variants["variants"].values()}
    assert sum(sizes.values()) == max(compiled)
    # beside its tiles the compiler takes scratch for a change of layout of 64 x 256 numbers, a quarter at a time
    assert 0 <= sizes["compiler"] < 12_288
    assert f"{max(compiled):,} of 232,448 B" in words("hopper-shared-memory")


def test_the_schedule_is_as_long_as_the_clock_says_to_one_percent(tools):
    hopper = tools["figures_hopper"]
    for latency, clock in zip((hopper.LATENCY, hopper.LATENCY_FROM_L2), hopper.MEASURED, strict=True):
        assert abs(hopper.of_two_pairs(latency)[1] / 2 / clock - 1) < 0.01
