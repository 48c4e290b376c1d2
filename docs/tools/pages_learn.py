"""The notebooks of tutorials/ as pages: cells, outputs, pictures, and the solutions folded away."""

import base64
import json
import re
from typing import Any

from pieces import ROOT, escape, table

TUTORIALS = ROOT / "tutorials"
SLUGS = (
    "00-one-layer", "01-the-cache-is-the-bill", "02-latents", "03-position", "04-two-orders", "05-how-wrong-is-right",
    "06-pages-splits-merges", "07-roofline", "08-a-decode-kernel", "09-bring-your-own-tier",
)  # fmt: skip
WIDGET = "application/vnd.jupyter.widget-view+json"
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def text_of(value: str | list[str]) -> str:
    """Return the text of a notebook field."""
    return value if isinstance(value, str) else "".join(value)


def fence(language: str, text: str) -> str:
    """Return a fenced block that is longer than any fence within."""
    ticks = "`" * max(3, *(len(run) + 1 for run in re.findall(r"`+", text)), 3)
    return f"{ticks}{language}\n{text.rstrip()}\n{ticks}\n"


LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
ITEM = re.compile(r"\s*([-*+]|\d+\.)\s")


def link(match: re.Match[str]) -> str:
    """Return a link as the site has it; of a file that the site does not hold, the name stays."""
    said, target = match[1], match[2]
    if re.match(r"https?:|#|mailto:", target):
        return match[0]
    if notebook := re.fullmatch(r"(?:\./)?(\d\d-[\w-]+)\.ipynb(#[\w-]*)?", target):
        return f"[{said}]({notebook[1]}.md{notebook[2] or ''})"
    if page := re.fullmatch(r"(?:\.\./)+docs/([\w/-]+\.(?:md|svg))(#[\w-]*)?", target):
        return f"[{said}](../{page[1]}{page[2] or ''})"
    return said


def prose(text: str) -> str:
    """Return a Markdown cell for the site: links that work there, and an empty line before each list."""
    lines: list[str] = []
    fenced = False
    for line in LINK.sub(link, text).replace("<details>", '<details markdown="1">').splitlines():
        fenced ^= line.startswith("```")
        starts = not fenced and ITEM.match(line) and lines and lines[-1].strip()
        if starts and not ITEM.match(lines[-1]) and not lines[-1].startswith((" ", "|")):
            lines.append("")
        nested = re.match(r"( {2,3})[-*+\d]", line)
        lines.append("    " + line.lstrip() if nested and not fenced else line)
    return "\n".join(lines)


def output(cell: dict[str, Any], slug: str, pictures: dict[str, bytes]) -> str:
    """Return the outputs of a code cell; pictures are added to `pictures`."""
    parts = []
    for out in cell.get("outputs", []):
        if out["output_type"] == "stream":
            parts.append(fence("text", ANSI.sub("", text_of(out["text"]))))
            continue
        if out["output_type"] == "error":
            parts.append(fence("text", ANSI.sub("", "\n".join(out["traceback"]))))
            continue
        data = out.get("data", {})
        if WIDGET in data:
            parts.append(
                '!!! info "Here the notebook has something to move"\n\n'
                "    Controls need a running kernel: open the notebook. The figure beside it shows the same.\n"
            )
        elif "image/svg+xml" in data:
            name = f"learn/{slug}-{len(pictures)}.svg"
            pictures[name] = text_of(data["image/svg+xml"]).encode("utf-8")
            parts.append(picture(name, out, "image/svg+xml"))
        elif "image/png" in data:
            name = f"learn/{slug}-{len(pictures)}.png"
            pictures[name] = base64.b64decode(text_of(data["image/png"]))
            parts.append(picture(name, out, "image/png"))
        elif "text/markdown" in data:
            parts.append(prose(text_of(data["text/markdown"])) + "\n")
        elif "text/latex" in data:
            parts.append(text_of(data["text/latex"]) + "\n")
        elif "text/html" in data:
            parts.append(f'<div class="records">\n{text_of(data["text/html"]).strip()}\n</div>\n')
        elif "text/plain" in data:
            parts.append(fence("text", ANSI.sub("", text_of(data["text/plain"]))))
    return "\n".join(parts)


def picture(name: str, out: dict[str, Any], kind: str) -> str:
    """Return the Markdown of a picture, with the words that the notebook has for readers who do not see it."""
    said = escape(out.get("metadata", {}).get(kind, {}).get("alt", "")).replace("[", "(").replace("]", ")")
    return f"![{said}]({name.removeprefix('learn/')})\n"


def solutions(slug: str) -> dict[str, str]:
    """Return the solutions of a notebook by exercise tag, from `# %% ex1` sections."""
    path = TUTORIALS / "solutions" / f"{slug}.py"
    if not path.exists():
        return {}
    parts = re.split(r"^# %% (ex\d+).*\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], (p.strip("\n") for p in parts[2::2]), strict=True))


def folded(name: str, text: str) -> str:
    """Return a solution that opens on a click; `name` is what its section calls the exercise."""
    inner = "\n".join(f"    {line}".rstrip() for line in fence("python", text).splitlines())
    return f'??? success "A solution of {name}"\n\n{inner}\n'


def page(slug: str) -> dict[str, str | bytes]:
    """Return the page of one notebook and its pictures, and the notebook itself to download."""
    source = (TUTORIALS / f"{slug}.ipynb").read_bytes()
    cells = json.loads(source)["cells"]
    pictures: dict[str, bytes] = {}
    answers, parts = solutions(slug), []
    named: dict[str, str] = {}
    for i, cell in enumerate(cells):
        text = text_of(cell["source"]).strip("\n")
        tags = cell.get("metadata", {}).get("tags", [])
        if cell["cell_type"] == "markdown":
            parts.append(prose(text) + "\n")
            heads = re.findall(r"^#+ (\w+) (\d+)\b", text, re.MULTILINE)
            named |= {f"ex{number}": f"{word.lower()} {number}" for word, number in heads}
            if i == 0:
                parts.append(
                    f"[Download this notebook]({slug}.ipynb){{ .md-button }} or, in a clone, "
                    f"`jupyter lab tutorials/{slug}.ipynb`.\n"
                )
        elif cell["cell_type"] == "code" and text and "hide" not in tags:
            parts += [fence("python", text), output(cell, slug, pictures)]
            names = {tag: named.get(tag, f"exercise {tag.removeprefix('ex')}") for tag in tags if tag in answers}
            parts += [folded(name, answers[tag]) for tag, name in names.items()]
    text = "\n".join(part for part in parts if part.strip()) + "\n"
    return {f"learn/{slug}.md": text, f"learn/{slug}.ipynb": source, **pictures}


def title_and_gain(slug: str) -> tuple[str, list[str]]:
    """Return the title of a notebook and what its reader can do afterwards: the first list of its first cell."""
    cells = json.loads((TUTORIALS / f"{slug}.ipynb").read_text(encoding="utf-8"))["cells"]
    lines = text_of(cells[0]["source"]).splitlines()
    title = next(line.lstrip("# ").strip() for line in lines if line.startswith("#"))
    items: list[str] = []
    for line in lines:
        if match := ITEM.match(line):
            items.append(line[match.end() :].strip())
        elif items and line.startswith(" ") and line.strip():
            items[-1] += f" {line.strip()}"
        elif items:
            break
    return title, [item.rstrip(".;,") for item in items]


INDEX = """
# Learn

Ten notebooks, in order. Each runs on a laptop's CPU in under half a minute, shows one figure that carries its idea,
has something to move, and ends with exercises that answer at once whether you are right. Read them here, or run them:

```
make tutorials
. .venv/bin/activate
jupyter lab tutorials
```

"""


def pages() -> dict[str, str | bytes]:
    """Return a page for each notebook and their index."""
    found: dict[str, str | bytes] = {}
    rows = []
    for slug in SLUGS:
        found |= page(slug)
        title, gain = title_and_gain(slug)
        rows.append((f"[{title}]({slug}.md)", f"<ul>{''.join(f'<li>{item}</li>' for item in gain)}</ul>"))
    found["learn/index.md"] = INDEX + table(("notebook", "after it you can"), rows)
    return found
