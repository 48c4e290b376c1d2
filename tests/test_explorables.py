"""The explorables of the site: their JavaScript against the Python that it restates.

The pure functions run in Node, or in Chromium where there is none. Then, with the page around them, in a browser:
MLA_SITE=1 as in tests/test_site.py.
"""

import functools
import http.server
import importlib.util
import json
import math
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mla.batch import AttentionBatch
from mla.cli import app
from mla.config import MLAConfig
from mla.cost import count_batch, kv_bytes_per_token
from mla.presets import PRESETS, preset
from mla.roofline import GPUS, break_even_roofline, cost_report
from mla.serving.pool import OutOfPages, PagePool
from mla.state import AttentionState, merge

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "explorables"
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
# JSON has no infinities.
CALL = """({ module, name, calls }) => import(module).then((m) => JSON.stringify(
  calls.map((given) => typeof m[name] === "function" ? m[name](...given) : m[name]),
  (_, x) => (x === Infinity ? "inf" : x === -Infinity ? "-inf" : x)))"""
Js = Callable[..., list[Any]]


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A file server that does not write down requests."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def in_node(node: str, folder: Path) -> Js:
    """Run modules of a folder in Node, which wants to be told that they are modules."""
    (folder / "package.json").write_text('{"type": "module"}')
    for file in FOLDER.glob("*.js"):
        shutil.copy(file, folder)
    (folder / "call.mjs").write_text(
        'import { readFileSync } from "node:fs";\n'
        f'console.log(await ({CALL})(JSON.parse(readFileSync(0, "utf8"))));\n'
    )

    def call(module: str, name: str, *calls: list[Any]) -> list[Any]:
        asked = json.dumps({"module": f"./{module}", "name": name, "calls": calls})
        done = subprocess.run([node, "call.mjs"], cwd=folder, input=asked, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return call


@pytest.fixture(scope="module")
def js(tmp_path_factory) -> Iterator[Js]:
    """js(module, name, arguments, ...) -> what the function returns for each list of arguments."""
    if node := shutil.which("node"):
        yield in_node(node, tmp_path_factory.mktemp("modules"))
        return
    if CHROMIUM is None:
        pytest.skip("neither node nor Chromium is here to run JavaScript")
    sync_api = pytest.importorskip("playwright.sync_api", reason="neither node nor playwright is here")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(FOLDER)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.server_address[1]}/start.js")
        yield lambda module, name, *calls: json.loads(
            page.evaluate(CALL, {"module": f"/{module}", "name": name, "calls": list(calls)})
        )
        browser.close()
    server.shutdown()
    server.server_close()


# Data


@pytest.fixture(scope="module")
def writer():
    spec = importlib.util.spec_from_file_location("explorables_data", ROOT / "docs" / "tools" / "explorables_data.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_presets_and_gpus_are_those_of_the_package(writer):
    assert writer.FILE.read_text(encoding="utf-8") == writer.script(), "run python docs/tools/explorables_data.py"
    assert set(writer.MEMORY) == set(GPUS)


def test_what_is_written_is_javascript_with_every_preset(js):
    found = js("data.js", "PRESETS", [])[0]
    assert set(found) == set(PRESETS)
    assert (found["toy"]["N"], found["toy"]["Lq"], found["moonlight-16b"]["Lq"]) == (3, 20, None)


# Calculator

AXES = ("H", "N", "Lq", "L", "P", "R", "V")
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


def axes_of(config: MLAConfig) -> dict[str, Any]:
    return {**{axis: getattr(config, axis) for axis in AXES}, "layers": config.num_hidden_layers}


def gpu_for(draw: random.Random, itemsize: int) -> dict[str, Any]:
    if itemsize == 2 and draw.random() < 0.8:
        gpu = GPUS[draw.choice(sorted(GPUS))]
        return {"name": gpu.name, "flops": gpu.flops, "bandwidth": gpu.bandwidth, "itemsize": 2}
    tflops, gbps = draw.choice([67, 989.4, 163.5]), draw.choice([4800, 864, 2039.5])
    rates = {"flops": tflops * 1e12, "bandwidth": gbps * 1e9, "itemsize": itemsize}
    return {"name": "own", "own": f"{tflops}:{gbps}", **rates}


def setting(seed: int) -> dict[str, Any]:
    """Draw a setting: every fifth with typed dimensions, the others of a preset."""
    draw = random.Random(seed)
    if seed % 5 == 4:
        heads, rank = draw.choice([4, 12, 24, 40]), draw.choice([None, 96, 384])
        config = {"H": 520, "N": heads, "Lq": rank, "L": draw.choice([64, 384]), "P": 48, "R": 32, "V": 80, "layers": 7}
        model = None
    else:
        model = draw.choice(sorted(PRESETS))
        config = axes_of(preset(model))
    dtype, rows = draw.choice(sorted(ITEMSIZE)), draw.choice(["dtype", "dtype", *sorted(ITEMSIZE)])
    query, ranks = draw.choice([1, 1, 4, 17, 512]), [r for r in (1, 2, 4, 8, 16) if config["N"] % r == 0]
    return {
        "model": model, "config": config, "requests": draw.choice([1, 3, 16, 64]), "query": query,
        "keys": query + draw.choice([0, 1, 1000, 4095, 32768]), "dtype": dtype, "rows": rows,
        "ranks": draw.choice(ranks), "gpu": gpu_for(draw, ITEMSIZE[dtype]),
    }  # fmt: skip


SETTINGS = [setting(seed) for seed in range(50)]


@pytest.fixture(scope="module")
def counted(js) -> list[tuple[Any, Any, Any, Any]]:
    """(record, command, config.json, faults) of every setting, from JavaScript."""
    records = js("cost.js", "costRecord", *([one] for one in SETTINGS))
    commands = js("cost.js", "command", *([one] for one in SETTINGS))
    files = js("cost.js", "configJson", *([one["config"]] for one in SETTINGS))
    return list(zip(records, commands, files, js("cost.js", "faults", *([one, 1e9] for one in SETTINGS)), strict=True))


def test_the_settings_reach_every_choice():
    assert {one["dtype"] for one in SETTINGS} == set(ITEMSIZE)
    assert {one["rows"] for one in SETTINGS} == {"dtype", *ITEMSIZE}
    assert len({one["model"] for one in SETTINGS}) > 15
    assert {one["ranks"] for one in SETTINGS} >= {1, 2, 4, 8}
    assert {"own", "h200"} < {one["gpu"]["name"] for one in SETTINGS}
    assert None in {one["config"]["Lq"] for one in SETTINGS}


@pytest.mark.parametrize("seed", range(50))
def test_the_calculator_says_what_mla_cost_says(counted, seed, tmp_path, monkeypatch):
    """Whole numbers are equal, and so are times and ratios: the same operations on the same float64 numbers."""
    record, words, file, faults = counted[seed]
    assert faults == []
    assert words[:2] == ["mla", "cost"]
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(file))
    monkeypatch.setattr("mla.commands.flags.environment", lambda device: {})
    monkeypatch.setattr("mla.commands.flags.take_threads", lambda threads: None)
    done = CliRunner().invoke(app, [*words[1:], "--json", "cost.json"])
    assert done.exit_code == 0, done.output
    said = json.loads(Path("cost.json").read_text())
    name = SETTINGS[seed]["gpu"]["name"]
    assert max(row["flops"] for row in record["rows"]) < 2**53
    assert record["batch"] == {key: value for key, value in said["batch"].items() if key != "text"}
    assert record["cache_bytes_per_token"] == said["cache_bytes_per_token"]
    rows = [{"gpu": name, **{key: row[key] for key in row}} for row in record["rows"]]
    assert rows == said["rows"]
    assert record["winner"] == said["winner"][name]
    assert record["break_even"]["roofline"] == said["break_even"]["roofline"][name]
    flops = record["break_even"]["flops"]
    assert flops == said["break_even"]["flops"] or flops == "inf" == str(float(said["break_even"]["flops"]))


@pytest.mark.parametrize(("name", "row"), [("deepseek-v3", 656), ("mistral-small-4", 256 + 8 + 128)])
def test_fp8_rows_are_those_of_row_bytes(js, name, row):
    config, gpu = preset(name), GPUS["h200"]
    asked = {
        "model": name, "config": axes_of(config), "requests": 8, "query": 2, "keys": 5000, "dtype": "bfloat16",
        "rows": "fp8", "ranks": 1,
        "gpu": {"name": "h200", "flops": gpu.flops, "bandwidth": gpu.bandwidth, "itemsize": 2},
    }  # fmt: skip
    record, words = js("cost.js", "costRecord", [asked])[0], js("cost.js", "command", [asked])[0]
    assert (record["cache_bytes_per_token"][0]["bytes"], words) == (row, None)
    report = cost_report(config, count_batch([2] * 8, [5000] * 8), [gpu], row_bytes=row)
    said = {r.form: (r.flops, r.bytes, r.intensity, r.time_us, r.bound) for r in report.rows}
    found = {r["form"]: (r["flops"], r["bytes"], r["intensity"], r["time_us"], r["bound"]) for r in record["rows"]}
    assert {form: found[form] for form in said} == said
    assert record["break_even"]["roofline"] == break_even_roofline(config, gpu, 4998, 8, row_bytes=row)


def test_what_fits_shares_heads_but_not_the_latent_row(js):
    """DeepSeek-V3 in bfloat16 on 16 GPUs with 70 GB each, by hand: 61 layers, 640 numbers to a baseline's head."""
    config = preset("deepseek-v3")
    gpu = {"name": "h200", "flops": 1e15, "bandwidth": 4.8e12, "itemsize": 2}
    asked = {
        "model": "deepseek-v3", "config": axes_of(config), "requests": 300, "query": 1, "keys": 4096,
        "dtype": "bfloat16", "rows": "dtype", "ranks": 16, "gpu": gpu,
    }  # fmt: skip
    found = {one["name"]: one for one in js("cost.js", "fits", [asked, 70e9])[0]}
    head = kv_bytes_per_token(config, 1)
    assert {name: one["rank"] for name, one in found.items()} == {
        "mla": 61 * 1152, "mha": 61 * 8 * head, "gqa-8": 61 * head, "mqa": 61 * head,
    }  # fmt: skip
    assert found["mla"]["tokens"] == 70 * 10**9 // (61 * 1152)
    assert found["mla"]["requests"] == 70 * 10**9 // (61 * 1152) // 4096 == 243
    assert [found[name]["holds"] for name in ("mla", "mha", "mqa")] == [False, False, True]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"keys": 3}, "keys"),
        ({"requests": 1.5}, "requests"),
        ({"ranks": 3}, "ranks"),
        ({"dtype": "float32"}, "gpu"),
        ({"query": 0}, "query"),
        ({"config": {**axes_of(preset("deepseek-v3")), "R": 63}}, "R"),
        ({"config": {**axes_of(preset("deepseek-v3")), "L": 500}, "rows": "fp8"}, "rows"),
    ],
)
def test_a_wrong_field_is_named(js, change, field):
    gpu = {"name": "h200", "flops": 1e15, "bandwidth": 4.8e12, "itemsize": 2}
    right = {
        "model": "deepseek-v3", "config": axes_of(preset("deepseek-v3")), "requests": 2, "query": 4, "keys": 100,
        "dtype": "bfloat16", "rows": "dtype", "ranks": 1, "gpu": gpu,
    }  # fmt: skip
    none, found = js("cost.js", "faults", [right, 1e9], [{**right, **change}, 1e9])
    assert none == []
    assert [name for name, _ in found] == [field]


# Merge

UNIT = 2.0**-53


def tensors(scores: list[float], values: list[list[float]]) -> AttentionState:
    """Attention of one query row and head over keys, in float64."""
    s, v = torch.tensor(scores, dtype=torch.float64), torch.tensor(values, dtype=torch.float64).reshape(-1, 3)
    if not scores:
        return AttentionState.empty(1, 1, 3, dtype=torch.float64)
    return AttentionState((s.softmax(0) @ v).reshape(1, 1, 3), s.logsumexp(0).reshape(1, 1))


@pytest.mark.parametrize("kind", ["mixed", "equal", "peaked"])
@pytest.mark.parametrize("handed", ["natural", "second", "both"])
def test_the_playground_merges_as_mla_state_does(js, kind, handed):
    """Equal up to rounding: fewer than 64 roundings of numbers below 8 on either side (12 keys, 3 passes)."""
    drawn = js("state.js", "draw", [7, 12, 3, kind])[0]
    scores, values = drawn["scores"], drawn["values"]
    found = js("state.js", "split", *([scores, values, at, handed] for at in range(13)))
    bases = {"natural": (1.0, 1.0), "second": (1.0, math.log(2)), "both": (math.log(2), math.log(2))}[handed]
    for at, shown in enumerate(found):
        parts = (tensors(scores[:at], values[:at]), tensors(scores[at:], values[at:]))
        a, b = (AttentionState(part.out, part.lse / base) for part, base in zip(parts, bases, strict=True))
        expected = merge(a, b)
        out = torch.tensor(shown["merged"]["out"], dtype=torch.float64)
        assert (out - expected.out.flatten()).abs().max() < 64 * 8 * UNIT
        assert abs(float(shown["merged"]["lse"]) - expected.lse.item()) < 64 * 8 * UNIT


def test_only_the_natural_logarithm_gives_attention_over_all_keys(js):
    drawn = js("state.js", "draw", [1, 12, 3, "mixed"])[0]
    ask = lambda handed: js("state.js", "split", *([*drawn.values(), at, handed] for at in range(13)))
    assert max(one["off"] for one in ask("natural")) < 1e-14
    assert all(one["off"] > 1e-3 for handed in ("second", "both", "none") for one in ask(handed)[1:-1])
    ends = [ask("both")[at] for at in (0, 12)]
    assert max(one["off"] for one in ends) < 1e-14
    assert all(abs(one["merged"]["lse"] / one["whole"]["lse"] * math.log(2) - 1) < 1e-14 for one in ends)


# Paging


def replay(story: list[dict[str, Any]], pages: int, size: int) -> Iterator[dict[str, Any]]:
    """Play a story on the pool of mla.serving: what each step writes where, by request."""
    pool, live, ids = PagePool(pages, size), {}, {}
    for number, action in enumerate(story):
        pool.begin_step()
        step, copies = [], []
        if action["kind"] == "leave":
            pool.release(live.pop(action["name"])["table"])
        elif action["kind"] == "arrive":
            name, prompt = chr(65 + sum(a["kind"] == "arrive" for a in story[:number])), action["prompt"]
            prefix = pool.prefix([ids.setdefault(word, len(ids)) for word in prompt], 1, len(prompt))
            # Blocks of one token would name every length; those of a page and the prompt are kept here.
            prefix = Whole(prefix.chain, 1, len(prompt))
            table, hit = pool.match(prefix, len(prompt))
            pool.acquire(table)
            live[name] = request = {"table": list(table), "length": len(prompt)}
            written = range(hit, len(prompt))
            grow(pool, request, written, copies)
            pool.remember(prefix, request["table"], hit, len(prompt))
            step.append((name, written or range(len(prompt) - 1, len(prompt)), bool(written)))
        else:
            for name, request in live.items():
                written = range(request["length"], request["length"] + 1)
                try:
                    grow(pool, request, written, copies)
                except OutOfPages:
                    continue
                request["length"] += 1
                step.append((name, written, True))
        pool.check(request["table"] for request in live.values())
        yield {"step": step, "copies": copies, "live": live, "evictions": pool.evictions, "size": size, "pages": pages}


class Whole:
    """A prefix that others can share at ends of pages and of the prompt, whatever its blocks."""

    def __init__(self, chain: tuple[int, ...], block_size: int, length: int) -> None:
        self.chain, self.length = chain, length

    def key(self, tokens: int) -> tuple[int, int]:
        return self.chain[tokens - 1], tokens

    def ends(self, start: int, stop: int, page_size: int) -> Iterator[int]:
        yield from (n for n in range(start + 1, stop + 1) if n % page_size == 0 or n == self.length)


def grow(pool: PagePool, request: dict[str, Any], written: range, copies: list[list[int]]) -> None:
    table = request["table"]
    for position in written:
        index = position // pool.page_size
        if index == len(table):
            table.append(pool.allocate())
        elif (page := pool.writable(table[index], position)) != table[index]:
            copies.append([table[index], page])
            table[index] = page


def worlds(js: Js, story: list[dict[str, Any]], pages: int = 8, size: int = 4) -> list[dict[str, Any]]:
    """The world after each action of a story, from JavaScript."""
    found = [js("pages.js", "newWorld", [pages, size])[0]]
    for action in story:
        found += js("pages.js", "step", [found[-1], action])
    return found[1:]


def test_the_story_is_what_the_pool_and_the_batch_make_of_it(js):
    story = js("pages.js", "STORY", [])[0]
    found = worlds(js, story)
    for world, said in zip(found, replay(story, 8, 4), strict=True):
        assert {one["name"]: one["table"] for one in world["requests"]} == {
            name: request["table"] for name, request in said["live"].items()
        }
        assert world["copies"] == said["copies"]
        if not said["step"]:
            assert world["step"] == []
            continue
        lens = [len(written) for _, written, _ in said["step"]]
        tables = [said["live"][name]["table"] for name, _, _ in said["step"]]
        width = max(map(len, tables))
        batch = AttentionBatch.bottom_right(
            lens, [written[-1] + 1 for _, written, _ in said["step"]], [t + [0] * (width - len(t)) for t in tables],
            page_size=4, num_pages=8, slots=None if all(w for *_, w in said["step"]) else [-1],
        )  # fmt: skip
        shown = js("pages.js", "metadata", [world["step"]])[0]
        assert shown["slot_mapping"] == batch.slot_mapping.tolist()
        assert shown["query_start_loc"] == batch.query_start_loc.tolist() == [0, *accumulate(lens)]
        assert shown["seq_lens"] == batch.seq_lens.tolist()
        assert shown["block_table"] == tables
    assert sum(len(world["evicted"]) for world in found) == said["evictions"] > 0
    assert any(world["copies"] for world in found)
    assert any("waiting" in world["said"] for world in found)
    assert any(-1 in one["slots"] for world in found for one in world["step"])
    assert any(world["requests"][0]["table"][0] == world["requests"][-1]["table"][0] for world in found[2:5])


def test_a_full_pool_lets_a_request_wait_and_changes_nothing(js):
    long = [f"w{i}" for i in range(8)]
    story = [{"kind": "arrive", "prompt": long}, {"kind": "arrive", "prompt": [*"abcde"]}, {"kind": "decode"}]
    found = worlds(js, story, pages=2, size=4)
    assert "wait" in found[1]["said"]
    assert [one["name"] for one in found[1]["requests"]] == ["A"]
    assert found[1]["pages"] == found[0]["pages"]
    assert "A: waiting" in found[2]["said"]
    assert len(found[2]["requests"][0]["tokens"]) == 8
    pool = PagePool(2, 4)
    pool.allocate(), pool.allocate()
    with pytest.raises(OutOfPages):
        pool.allocate()


# The pages, in a browser: a bare page with the same elements and scripts, and a document$ like the theme's

BARE = """<!doctype html><meta charset=utf-8><link rel=icon href="data:,">
<link rel=stylesheet href="/stylesheets/site.css">
<link rel=stylesheet href="/explorables/explorables.css">
<body class=md-typeset data-md-color-scheme=default>
<main></main><script>
  const told = []; window.document$ = { subscribe(f) { told.push(f); f(document); } };
  window.visit = (name) => {
    document.querySelector("main").innerHTML = `<div class=explorable data-explorable=${name}></div>`;
    told.forEach((f) => f(document));
  };
</script><script type=module src="/explorables/start.js"></script>"""


class Bare(Quiet):
    """The files of docs/, and a page at /bare."""

    def do_GET(self) -> None:
        """Serve."""
        if self.path != "/bare":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(BARE.encode())


@pytest.fixture(scope="module")
def visit() -> Iterator[Callable[[str], Any]]:
    """visit(name) -> a phone's page with that explorable started; faults in `page.faults`."""
    if os.environ.get("MLA_SITE") != "1":
        pytest.skip("the browser tests run with MLA_SITE=1 only")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Bare, directory=str(ROOT / "docs")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))

        def go(name: str) -> Any:
            page = browser.new_page(viewport={"width": 390, "height": 844})
            page.faults = []
            page.on("console", lambda m: page.faults.append(m.text) if m.type in ("error", "warning") else None)
            page.on("pageerror", lambda e: page.faults.append(str(e)))
            page.goto(f"http://127.0.0.1:{server.server_address[1]}/bare")
            page.evaluate("name => visit(name)", name)
            page.wait_for_selector(".said:not(:empty)")
            return page

        yield go
        browser.close()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name", ["calculator", "merge", "paging"])
def test_it_starts_again_when_the_page_comes_again_and_fits_a_phone(visit, name):
    page = visit(name)
    first = page.locator(".said").inner_text()
    page.evaluate("name => visit(name)", name)
    page.wait_for_selector(".said:not(:empty)")
    assert page.locator(".said").inner_text() == first
    assert page.locator(".said").count() == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.faults == []
    page.close()


def test_the_calculator_answers_and_names_a_wrong_field(visit):
    page = visit("calculator")
    said = page.locator(".said")
    assert "1,152 bytes in a layer and 70,272 bytes in all" in said.inner_text()
    assert "expanding wins from 168 new tokens on" in said.inner_text()
    page.get_by_label("new tokens of each").fill("512")
    page.get_by_label("keys of each").fill("8192")
    assert "faster expanded" in said.inner_text()
    page.get_by_label("GPUs that share the heads").fill("3")
    assert "a number that divides the 128 heads" in page.locator("#fault-ranks").inner_text()
    assert page.locator("svg").count() == 0
    page.get_by_label("model", exact=True).select_option("moonlight-16b")
    page.get_by_label("GPUs that share the heads").fill("2")
    page.wait_for_selector(".plot svg")
    assert "--model moonlight-16b --batch 16q512s8192 --gpu h200 --heads 8" in page.locator(".answer").inner_text()
    assert page.faults == []
    page.close()


def test_the_split_moves_by_key_and_by_drag_and_the_base_goes_wrong(visit):
    page = visit("merge")
    slider, said = page.get_by_role("slider"), page.locator(".said")
    slider.focus()
    page.keyboard.press("ArrowRight")
    assert slider.get_attribute("aria-valuetext") == "first part keys 0 to 5, second part keys 6 to 11"
    box = page.locator(".columns").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + 20, steps=4)
    page.mouse.up()
    assert slider.input_value() == "3"
    assert said.inner_text().startswith("Merged is attention over all keys at once")
    page.get_by_label("both to base 2").check()
    assert said.inner_text().startswith("Off by")
    slider.focus()
    page.keyboard.press("Home")
    assert "a single split never shows the wrong base" in said.inner_text()
    assert page.faults == []
    page.close()


def test_the_animator_goes_by_keyboard_and_back(visit):
    page = visit("paging")
    forward, said = page.get_by_role("button", name="next"), page.locator(".said")
    forward.focus()
    for _ in range(6):
        page.keyboard.press("Enter")
    assert "Page 2 is shared, so it is copied to page 6" in said.inner_text()
    assert page.locator("li.shared").count() == 2
    page.get_by_role("button", name="back").click()
    assert "slot \u22121" in said.inner_text()
    page.get_by_role("button", name="A leaves").click()
    assert said.inner_text().startswith("A leaves.")
    assert page.faults == []
    page.close()
