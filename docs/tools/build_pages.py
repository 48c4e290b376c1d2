"""Write every generated page of the site, as plain Markdown beside the hand-written ones.

    python docs/tools/build_pages.py

MkDocs runs the same through the hook at the end; another generator can take docs/ as it lies afterwards. What is
written is named in docs/.gitignore.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FOLDERS = ("learn", "reference/api")  # hold nothing but generated files


def pages() -> dict[str, str | bytes]:
    """Return path below docs/ -> content of every generated file."""
    for place in (ROOT, Path(__file__).resolve().parent):  # not at import: MkDocs puts sys.path back
        if str(place) not in sys.path:
            sys.path.insert(0, str(place))
    import pages_api
    import pages_benchmarks
    import pages_capabilities
    import pages_commands
    import pages_dashboard
    import pages_errors
    import pages_glossary
    import pages_learn

    makers = (
        pages_learn, pages_api, pages_capabilities, pages_commands, pages_errors, pages_glossary, pages_dashboard,
        pages_benchmarks,
    )  # fmt: skip
    found: dict[str, str | bytes] = {}
    for maker in makers:
        mark = f"\n<!-- Written by docs/tools/{maker.__name__}.py: change that, not this. -->\n"
        for name, content in maker.pages().items():
            found[name] = content + mark if name.endswith(".md") else content
    return found


def write(found: dict[str, str | bytes]) -> list[str]:
    """Write what is new or changed, delete what is left from earlier in the generated folders; return the paths."""
    changed = []
    for name, content in found.items():
        path = DOCS / name
        data = content if isinstance(content, bytes) else content.encode("utf-8")
        if not path.exists() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            changed.append(name)
    for folder in FOLDERS:
        for path in (DOCS / folder).rglob("*"):
            if path.is_file() and path.relative_to(DOCS).as_posix() not in found:
                path.unlink()
                changed.append(f"{path.relative_to(DOCS).as_posix()} (deleted)")
    return changed


def on_startup(**_: object) -> None:
    """Hook of MkDocs: once before a build, and once before serving."""
    write(pages())


if __name__ == "__main__":
    print(*(write(pages()) or ["nothing changed"]), sep="\n")
