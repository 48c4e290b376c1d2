"""The page of errors: every complaint that `mla.errors.bad` makes, read from the code without running it."""

import ast
import re
from collections.abc import Iterator

from pages_api import PARTS, part_of
from pieces import ROOT, table

Complaint = tuple[str, str, str, str]  # argument, expected, fix, kind


def words(node: ast.expr | None, known: dict[str, ast.expr]) -> str:
    """Return a string expression as a reader sees it, what is filled in at run time between angle marks."""
    if node is None:
        return ""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(words(part, known) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return f"«{ast.unparse(node.value)}»"
    if isinstance(node, ast.Name) and node.id in known:
        return words(known[node.id], {n: v for n, v in known.items() if n != node.id})
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return words(node.left, known) + words(node.right, known)
    if isinstance(node, ast.IfExp):
        return f"{words(node.body, known)}, or {words(node.orelse, known)}"
    return f"«{ast.unparse(node)}»"


def assigned(assignments: list[ast.Assign], before: int) -> dict[str, ast.expr]:
    """Return what each name was last assigned above a line."""
    known: dict[str, ast.expr] = {}
    for node in assignments:
        for target in node.targets if node.lineno < before else ():
            several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            pairs = zip(target.elts, node.value.elts, strict=False) if several else [(target, node.value)]
            known |= {t.id: v for t, v in pairs if isinstance(t, ast.Name)}
    return known


def complaints(text: str) -> Iterator[Complaint]:
    """Yield every call of `bad` in a module, in order."""
    nodes = list(ast.walk(ast.parse(text)))
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef)]
    assignments = sorted((n for n in nodes if isinstance(n, ast.Assign)), key=lambda n: n.lineno)
    calls = [n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "bad"]
    for call in sorted((c for c in calls if c.args), key=lambda n: n.lineno):
        starts = [f.lineno for f in functions if f.lineno <= call.lineno <= (f.end_lineno or f.lineno)]
        known = assigned([n for n in assignments if n.lineno >= max(starts, default=0)], call.lineno)
        given = {k.arg: k.value for k in call.keywords}
        kind = words(given.get("kind"), known).strip("«»") or "ValueError"
        yield words(call.args[0], known), words(given.get("expected"), known), words(given.get("fix"), known), kind


def code(text: str) -> str:
    """Return text as inline code, or nothing."""
    return f"`{text}`" if text else ""


INTRO = """
# Errors

Wrong input raises `ValueError`, or `TypeError` for a wrong type, before anything is written. Every such error reads
alike: the argument, what was expected, what came, and the way out. A command prints it as one sentence and ends with
exit code 2:

```sh
mla cost --batch 4q0  # exit 2
```

```text
error: --batch: expected at least one new token, got '4q0'. Fix: write COUNTqNEWsKEYS, NEW > 0.
```

Three other things look like errors and are not:

- A **refusal** is a tier's answer to what it cannot serve: sentences of `why_not`, exit code 2. See [Pick a
  tier](../how-to/pick-a-tier.md) and the sentences of the [capability table](capabilities.md).
- A **mismatch** is a wrong number: exit code 1. See [Debug a mismatch](../how-to/debug-a-mismatch.md).
- **Not run** is a conformance case that this machine has no room for: exit code 2, and never counted as right.

The tables hold every complaint of the code by the module that raises it. Between « and » stands what is filled in
when it happens.
"""


def pages() -> dict[str, str]:
    """Return reference/errors.md."""
    by_part: dict[str, list[str]] = {part: [] for part in PARTS}
    for package in ("mla", "tiers"):
        for path in sorted((ROOT / package).rglob("*.py")):
            found = sorted(set(complaints(path.read_text(encoding="utf-8"))))
            if not found:
                continue
            name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
            rows = [
                (code(argument), expected + (" (TypeError)" if kind == "TypeError" else ""), fix)
                for argument, expected, fix, kind in found
            ]
            head = ("argument", "expected", "the way out")
            by_part[part_of(name)].append(f"### `{name}`\n\n{table(head, [escaped(r) for r in rows])}")
    parts = [f"## {PARTS[part][0]}\n\n" + "\n".join(blocks) for part, blocks in by_part.items() if blocks]
    return {"reference/errors.md": INTRO + "\n" + "\n".join(parts)}


def escaped(row: tuple[str, str, str]) -> tuple[str, ...]:
    """Return cells in which nothing but code is markup: names, and what the sentence itself has between ticks."""
    first, *others = row
    plain = lambda text: "".join("&lt;" if c == "<" else f"\\{c}" if c in "\\`*_[]>$" else c for c in text)
    cells = lambda text: "".join(part if i % 2 else plain(part) for i, part in enumerate(re.split(r"(`[^`]+`)", text)))
    return first, *map(cells, others)
