"""The built site in a real browser. Only with MLA_SITE=1: it takes minutes, Chromium, Playwright and the extra `docs`.

Every page loads without an error or a request to the outside; formulas and diagrams are drawn; search finds; the dark
palette holds; nothing is wider than a phone.
"""

import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}

if os.environ.get("MLA_SITE") != "1":
    pytest.skip("the browser tests run with MLA_SITE=1 only", allow_module_level=True)
if CHROMIUM is None:
    pytest.skip("no Chromium on this machine: apt-get install chromium", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
pytest.importorskip("mkdocs", reason="mkdocs is not installed: it comes with the extra docs")


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A file server that does not write down requests."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def build(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder), *words]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with sync_api.sync_playwright() as play:
        opened = play.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield opened
        opened.close()


@pytest.fixture
def page(browser, address):
    """A page on a desk that writes down what goes wrong on it, in `page.faults`."""
    context = browser.new_context(viewport=DESK, color_scheme="light")
    opened = context.new_page()
    opened.faults = []
    opened.on("console", lambda m: opened.faults.append(m.text) if m.type in ("error", "warning") else None)
    opened.on("pageerror", lambda e: opened.faults.append(str(e)))
    ours = (address, "data:", "blob:")
    opened.on("request", lambda r: None if r.url.startswith(ours) else opened.faults.append(f"asks {r.url}"))
    opened.on("response", lambda r: opened.faults.append(f"{r.status} {r.url}") if r.status >= 400 else None)
    yield opened
    context.close()


def drawn(page) -> None:
    """Wait until all formulas and diagrams of the page are drawn."""
    page.wait_for_function(
        "() => !document.querySelector('pre.diagram') && "
        "[...document.querySelectorAll('.arithmatex')].every(e => e.querySelector('mjx-container svg'))",
        timeout=30_000,
    )


def names(site: Path) -> list[str]:
    found = [path.parent.relative_to(site).as_posix() for path in sorted(site.rglob("index.html"))]
    return ["" if name == "." else f"{name}/" for name in found]


def test_every_page_loads_without_errors_and_asks_nobody_else(page, site, address):
    pages = names(site)
    assert len(pages) > 40
    faults = {}
    for name in pages:
        page.goto(address + name)
        drawn(page)
        if page.faults:
            faults[name], page.faults = page.faults, []
    assert faults == {}


def test_no_page_is_wider_than_a_phone(browser, site, address):
    context = browser.new_context(viewport=PHONE, color_scheme="dark")
    page, wide = context.new_page(), {}
    for name in names(site):
        page.goto(address + name)
        drawn(page)
        width = page.evaluate("document.documentElement.scrollWidth")
        if width > PHONE["width"]:
            wide[name] = width
    context.close()
    assert wide == {}


def test_formulas_are_drawn_in_readable_size_on_a_phone(browser, address):
    context = browser.new_context(viewport=PHONE)
    page = context.new_page()
    page.goto(f"{address}explanation/absorption/")
    drawn(page)
    box = page.locator("div.arithmatex svg").first.bounding_box()
    context.close()
    assert box["width"] > 80
    assert box["height"] > 20


def test_diagrams_have_their_text_and_the_colours_of_the_palette(page, address):
    page.goto(f"{address}reference/contract/")
    drawn(page)
    diagram = page.locator("div.diagram svg").first
    assert "pages of latent rows" in diagram.text_content()
    strokes = diagram.evaluate("s => [...s.querySelectorAll('.latent > *')].map(e => getComputedStyle(e).stroke)")
    assert "rgb(42, 111, 187)" in strokes
    assert page.faults == []


def test_search_finds_merge(page, address):
    page.goto(address)
    page.keyboard.press("/")
    page.keyboard.type("merge", delay=30)
    page.wait_for_selector(".md-search-result__link", timeout=20_000)
    found = page.locator(".md-search-result__link").evaluate_all("links => links.map(a => a.href)")
    assert any("explanation/merging-states" in link for link in found), found
    assert page.faults == []


def test_dark_mode_toggles_and_stays(page, address):
    scheme = lambda: page.evaluate("document.body.dataset.mdColorScheme")
    colour = lambda: page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = lambda: sum(map(int, re.findall(r"\d+", colour())[:3]))
    page.goto(f"{address}reference/contract/")
    drawn(page)
    assert (scheme(), brightness() > 600) == ("default", True)
    page.locator("label[title='Dark']").click()
    page.wait_for_function("document.body.dataset.mdColorScheme === 'slate'")
    assert brightness() < 200
    page.wait_for_function(
        "() => [...document.querySelectorAll('div.diagram .latent > *')]"
        ".some(e => getComputedStyle(e).stroke === 'rgb(111, 177, 242)')"
    )
    page.goto(f"{address}results/dashboard/")
    assert scheme() == "slate"
    assert page.faults == []


def test_cells_of_the_dashboard_look_different(page, address):
    page.goto(f"{address}results/dashboard/")
    looks = """e => ['color', 'backgroundColor', 'backgroundImage'].map(k => getComputedStyle(e)[k]).join()"""
    kinds = ("cell-ok", "cell-failed", "cell-refused", "cell-not-run")
    assert len({page.locator(f"td.{kind}").first.evaluate(looks) for kind in kinds}) == 4


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ("[x](nowhere.md)", "nowhere.md"),
        ("[x](glossary.md#no-such-anchor)", "no-such-anchor"),
        ("[x](/glossary/)", "absolute"),
    ],
)
def test_a_broken_link_or_anchor_fails_the_build(tmp_path, link, said):
    """A small site with this configuration's checks, and one page with a broken link."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    checks = re.search(r"^validation:\n(?:[ ].*\n)+", text, re.MULTILINE)[0]
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "glossary.md").write_text("# Glossary\n")
    config = tmp_path / "mkdocs.yml"
    config.write_text(f"site_name: x\nstrict: true\n{checks}")
    for body, code in (("[x](glossary.md#glossary)", 0), (link, 1)):
        (tmp_path / "docs" / "index.md").write_text(f"# Home\n\n{body}\n")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
        assert (done.returncode, said in done.stderr) == (code, code == 1), done.stderr
