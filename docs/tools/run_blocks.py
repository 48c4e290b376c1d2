"""Run the code blocks of a page, and hold what they print against the page.

    python docs/tools/run_blocks.py docs/explanation/absorption.md          # report what differs
    python docs/tools/run_blocks.py --write docs/explanation/absorption.md  # put the output into the page

Blocks of a page share one namespace and one folder, in order:

- ```python runs. A ```text block right after it is what it prints.
- ```sh holds commands, one a line: `mla` runs in this process, `cp` copies; others are only known by name. A comment
  `# exit 2` names the exit code that is right in place of 0. A ```text block after it is their output.
- ```toml, ```json and others followed by `<!-- file: NAME -->` before them are written to that file.
- A block without a language is read: its `mla` commands must parse. It may need a GPU, or minutes.

In an expected output, `...` stands for anything, such as a time.
"""

import contextlib
import doctest
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(
    r"(?:^[ ]*<!-- file: (?P<file>\S+) -->\n)?"
    r"^(?P<indent>[ ]*)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)
INCLUDED = re.compile(r'^--8<-- "([^"]+)"$', re.MULTILINE)
KNOWN = ("make", "pip", "git", "cd", ".", "export", "python", "pytest", "jupyter", "for", "done", "nvidia-smi")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True)
class Block:
    """A fenced block: language, text without its indent, the file that it is written to, where its text stands."""

    language: str
    text: str
    file: str
    start: int
    end: int
    indent: str


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    found = []
    for m in BLOCK.finditer(text):
        body = "".join(line.removeprefix(m["indent"]) for line in m["body"].splitlines(keepends=True))
        body = INCLUDED.sub(lambda part: (ROOT / part[1]).read_text(encoding="utf-8"), body)
        language = re.sub(r"[{}.]", " ", m["info"]).split()[:1]
        found.append(Block("".join(language), body, m["file"] or "", m.start("body"), m.end("body"), m["indent"]))
    return found


def commands(text: str) -> Iterator[tuple[dict[str, str], list[str], int]]:
    """Yield the commands of a block: variables set for it, words, and the exit code that is right."""
    for line in text.replace("\\\n", " ").splitlines():
        command, _, comment = line.partition("  #")
        words = shlex.split(command)
        if not words:
            continue
        variables = {}
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        code = re.search(r"exit (\d+)", comment)
        yield variables, words, int(code[1]) if code else 0


def check_words(words: list[str]) -> None:
    """Raise where an `mla` command has a flag or a value that the parser does not know, or another is not expected."""
    from mla.cli import app

    name = words[0].strip("$ ") if words else ""
    if name == "mla":
        group: Any = typer.main.get_command(app)
        if words[1:] and words[1] not in ("--help", "COMMAND"):
            group.commands[words[1]].make_context(words[1], words[2:])
    elif name not in (*KNOWN, "cp"):
        raise ValueError(f"{' '.join(words)!r} is no command that the documentation may name")


def run_command(variables: dict[str, str], words: list[str], code: int) -> str:
    """Run one command of a ```sh block and return what it prints; raises where the exit code is another."""
    from mla.cli import app

    check_words(words)
    if words[0] == "cp":
        shutil.copy(words[1], words[2])
    if words[0] != "mla":
        return ""
    result = CliRunner(env=variables).invoke(app, words[1:], catch_exceptions=False)
    if result.exit_code != code:
        raise ValueError(f"{' '.join(words)}: exit code {result.exit_code}, not {code}\n{result.output}")
    return result.output


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """Enter a folder like a clone of this repository, in which nothing is kept."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("mla", "tiers", "tests", "tutorials"):
            if (ROOT / name).exists():
                os.symlink(ROOT / name, Path(folder) / name)
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


def run(text: str) -> list[tuple[Block, str, str]]:
    """Run a page; return (block of the expected output, what it says, what was printed) for each that differs."""
    namespace: dict[str, object] = {"__name__": "__page__"}
    found, differ, printed, last = blocks(text), [], None, 0
    with workplace():
        for block in found:
            right_after = not text[last : block.start].replace("```text", "").replace("```", "").strip()
            if block.file:
                Path(block.file).write_text(block.text, encoding="utf-8")
            if block.language == "text" and printed is not None and right_after:
                if not doctest.OutputChecker().check_output(block.text, printed, FLAGS):
                    differ.append((block, block.text, printed))
                printed = None
            elif block.language == "python":
                out = io.StringIO()
                with contextlib.redirect_stdout(out):
                    exec(compile(block.text, "<page>", "exec"), namespace)
                printed = out.getvalue()
            elif block.language == "sh":
                printed = "".join(run_command(*command) for command in commands(block.text))
            elif block.language == "":
                for _, words, _ in commands(block.text):
                    check_words(words)
            last = block.end
    return differ


def update(text: str) -> str:
    """Return the page with outputs replaced by what was printed, where no `...` was put by hand."""
    for block, expected, printed in reversed(run(text)):
        if "..." in expected:
            print(f"differs, and has a ... in it:\n{expected}printed\n{printed}")
            continue
        body = "".join(f"{block.indent}{line}".rstrip() + "\n" for line in printed.rstrip("\n").splitlines())
        text = text[: block.start] + body + text[block.end :]
    return text


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = str(ROOT)
    for name in sys.argv[1:]:
        if name == "--write":
            continue
        page = Path(name).resolve()
        if "--write" in sys.argv:
            page.write_text(update(page.read_text(encoding="utf-8")), encoding="utf-8")
        else:
            for _, expected, printed in run(page.read_text(encoding="utf-8")):
                print(f"{name}: expected\n{expected}printed\n{printed}")
