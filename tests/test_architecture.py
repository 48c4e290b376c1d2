"""The rules of the house, held by `ast`: imports, sizes, docstrings, names, what lies in the tree.

Each rule is a function (path, text) -> faults. `PLANTED` holds, for each rule, snippets that it must refuse and
neighbours of them that it must let pass, so that no rule can rot into one that always says yes.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = {"torch", "numpy", "safetensors", "typer", "rich", "pydantic", "pydantic_settings"}
OPTIONAL = (
    "triton",
    "flashinfer",
    "aiter",
    "flash_mla",
    "transformers",
    "matplotlib",
    "IPython",
    "pytest",
    "hypothesis",
)
TOP_LEVEL = {
    *("pyproject.toml", "constraints.txt", "Makefile", "mkdocs.yml", "README.md", "CONTRIBUTING.md", "LICENSE"),
    *("mla", "tiers", "tutorials", "tests", "docs", ".ci", ".gitignore"),
}
FUNCTION_LINES = 80
TERM = r"[\w.]+(?: ?[-+*/] ?[\w.]+)*"
SHAPE = re.compile(rf"\((?:>= )?({TERM}), ?((?:{TERM}(?:, ?)?)*)\)")
AXIS = re.compile(r"[A-Z](?![a-z]{2})|\d|\.\.\.|n\b|pages?\b|\w+(_| ?[-+*/])")


def tree_files() -> list[str]:
    """Every file that git tracks or would track, relative to the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip(f"not a git work tree: {listed.stderr.strip()}")
    return sorted(name for name in set(listed.stdout.splitlines()) if (ROOT / name).is_file())


def sources() -> dict[str, str]:
    """Path -> text of every module of mla and tiers."""
    paths = sorted(path for package in ("mla", "tiers") for path in (ROOT / package).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


# Imports


def imported(path: str, text: str) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, absolute dotted name, runs at import time) of each import; `from a import b` yields a and a.b."""
    package = path.removesuffix("/__init__.py").removesuffix(".py").split("/")
    package = package if path.endswith("/__init__.py") else package[:-1]

    def walk(node: ast.AST, at_import: bool) -> Iterator[tuple[int, str, bool]]:
        for child in ast.iter_child_nodes(node):
            now = at_import and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
                now = False
            if isinstance(child, ast.Import):
                yield from ((child.lineno, alias.name, now) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = package[: len(package) - child.level + 1] if child.level else []
                module = ".".join([*base, *([child.module] if child.module else [])])
                yield from (
                    (child.lineno, name, now) for name in (module, *(f"{module}.{a.name}" for a in child.names))
                )
            elif isinstance(child, ast.Call) and re.search(r"\b(import_module|__import__)$", ast.unparse(child.func)):
                literal = child.args[0] if child.args else None
                if isinstance(literal, ast.Constant) and isinstance(literal.value, str):
                    yield child.lineno, literal.value, now
            yield from walk(child, now)

    yield from walk(ast.parse(text), True)


def tier_of(path_or_name: str) -> str | None:
    """The tier that a path or dotted name lies in, `tier1_paged` for tiers/tier1_paged.py; None outside of one."""
    parts = re.split(r"[./]", path_or_name.removesuffix(".py"))
    is_tier = parts[0] == "tiers" and len(parts) > 1 and re.match(r"tier\d|template$", parts[1])
    return parts[1] if is_tier else None


def import_rule(path: str, text: str) -> list[str]:
    """tiers may import mla; mla never tiers, except mla/cli.py inside functions; no tier imports another."""
    faults = []
    for line, name, at_import in imported(path, text):
        root = name.split(".")[0]
        if path.startswith("mla/") and root == "tiers" and (path != "mla/cli.py" or at_import):
            faults.append(f"{path}:{line}: mla imports {name}; only mla/cli.py may, inside a function")
        if path == "mla/oracle.py" and root in ("mla", "tiers"):
            faults.append(f"{path}:{line}: the oracle imports {name}; it shares no code with what it judges")
        other = tier_of(name)
        if path.startswith("tiers/") and other and other != tier_of(path):
            if path != "tiers/__init__.py":
                faults.append(f"{path}:{line}: a tier imports {name}; code shared by two tiers moves to mla")
            elif at_import:
                faults.append(f"{path}:{line}: the registry imports {name} at import time; do it inside a function")
    return faults


def optional_rule(path: str, text: str) -> list[str]:
    """At import time only the standard library, the core dependencies and our own packages.

    The folders `kernels` and `hopper` of a tier may import triton, and nobody else imports them at import time.
    """
    inside = re.match(r"tiers/tier2_\w+/(kernels|hopper)/", path) is not None
    allowed = CORE | {"mla", "tiers"} | set(sys.stdlib_module_names) | ({"triton"} if inside else set())
    found = {(line, name) for line, name, at_import in imported(path, text) if at_import}
    kernels = [n for n in sorted(found) if not inside and re.match(r"tiers\.tier2_\w+\.(kernels|hopper)\b", n[1])]
    others = sorted({(line, name.split(".")[0]) for line, name in found})
    outside = [n for n in others if n[1] not in allowed] + kernels
    return [f"{path}:{line}: imports {name} at import time" for line, name in outside]


# Sizes and shapes of the code


def line_limit(path: str) -> int:
    """Hard limit of lines of a module."""
    limits = {"tiers/template.py": 60, "tiers/tier0": 120, "tiers/tier2": 450}
    return next((limit for start, limit in limits.items() if path.startswith(start)), 300)


def size_rule(path: str, text: str) -> list[str]:
    """Modules and functions keep their line budgets."""
    lines, limit = len(text.splitlines()), line_limit(path)
    faults = [f"{path}: {lines} lines, at most {limit}"] if lines > limit else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                faults.append(f"{path}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES}")
    return faults


def classes_of(text: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)}


def base_names(node: ast.ClassDef) -> list[str]:
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return [ast.unparse(base).split(".")[-1] for base in bases]


def inheritance_rule(files: dict[str, str]) -> list[str]:
    """A class is an interface (Protocol) or a leaf: none inherits from one of ours that is no Protocol."""
    concrete = {
        name for text in files.values() for name, node in classes_of(text).items() if "Protocol" not in base_names(node)
    }
    faults = []
    for path, text in files.items():
        outside = {n.split(".")[-1] for _, n, _ in imported(path, text) if n.split(".")[0] not in ("mla", "tiers")}
        for name, node in classes_of(text).items():
            wrong = sorted((set(base_names(node)) & concrete) - outside)
            faults += [f"{path}:{node.lineno}: {name} inherits from {base}, which is no Protocol" for base in wrong]
    return faults


# Docstrings and names


def public_definitions(text: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    """Yield every public function, class and method at module or class level; overloads and dunders are left out."""

    def walk(body: list[ast.stmt], prefix: str) -> Iterator:
        for node in body:
            if isinstance(node, ast.If | ast.Try):
                yield from walk(node.body + node.orelse, prefix)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name[0] != "_":
                if any(ast.unparse(mark).endswith(("overload", ".setter")) for mark in node.decorator_list):
                    continue
                yield prefix + node.name, node
                if isinstance(node, ast.ClassDef):
                    yield from walk(node.body, f"{prefix}{node.name}.")

    yield from walk(ast.parse(text).body, "")


def annotations(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> list[ast.expr]:
    if isinstance(node, ast.ClassDef):
        fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
        return [field.annotation for field in fields if not ast.unparse(field.target).startswith("_")]
    every = ast.walk(node.args)
    found = [arg.annotation for arg in every if isinstance(arg, ast.arg) and arg.annotation]
    return found + ([node.returns] if node.returns else [])


def shows_shape(docstring: str) -> bool:
    """Whether a shape such as (T, N, P), (B+1,) or (pages, page, row) stands in the text; (this, that) is none."""
    terms = (term.strip() for shape in SHAPE.findall(docstring) for term in ",".join(shape).split(","))
    return any(AXIS.match(term) for term in terms) or re.search(r"\bany shape\b|`shape`", docstring) is not None


def docstring_rule(path: str, text: str) -> list[str]:
    """Every public function, class and method has a docstring; where tensors go in or out, it shows a shape."""
    faults = [] if ast.get_docstring(ast.parse(text)) or not text.strip() else [f"{path}: no module docstring"]
    for name, node in public_definitions(text):
        docstring = ast.get_docstring(node)
        has_tensor = any(re.search(r"\bTensor\b", ast.unparse(note)) for note in annotations(node))
        if not docstring:
            faults.append(f"{path}:{node.lineno}: {name} has no docstring")
        elif has_tensor and not shows_shape(docstring):
            faults.append(f"{path}:{node.lineno}: {name} no shape such as (T, N, P) in its docstring")
    return faults


FORBIDDEN = {
    r"\b576\s*\*\*\s*\(?-\s*(?:0?\.5|1\s*/\s*2)": "the scale comes from MLAConfig.softmax_scale",
    r"\bsoftmax_scale\s*(?::[^=,\n]*)?=\s*None\b": "softmax_scale is required",
    r"\bsoftmax_scale\s*:\s*(?:float\s*\|\s*None|Optional\b)": "softmax_scale is required",
    r"(?i)(?<![a-z])(?:de)?compressed(?![a-z]|-tensors)": "say absorbed or expanded",
}


def name_rule(path: str, text: str) -> list[str]:
    """No forbidden name in code, comment or docstring."""
    return [
        f"{path}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()!r}: {reason}"
        for pattern, reason in FORBIDDEN.items()
        for match in re.finditer(pattern, text)
    ]


# What lies in the tree

# Put together from pieces, so that this file does not hold what it forbids.
MACHINE_PATHS = "|".join(rf"(?<![\w.])/{name}/" for name in ("work", "farm", "root", "tmp", r"home/\w+", r"Users/\w+"))
HOSTS = "|".join(rf"\b{name}\." for name in ("pythonhosted", "npmjs", "debian")) + "|" + "pypi" + r"\.org"
PLACES = re.compile(f"{MACHINE_PATHS}|{HOSTS}|/[.]library")


def place_rule(path: str, text: str) -> list[str]:
    """No path of one machine and no registry host in a tracked file."""
    lines = enumerate(text.splitlines(), 1)
    return [f"{path}:{i}: {found.group()!r}" for i, line in lines if (found := PLACES.search(line))]


def top_level_rule(names: list[str]) -> list[str]:
    """Only the agreed names stand at the top of the tree."""
    return sorted({name.split("/")[0] for name in names} - TOP_LEVEL)


# The tree keeps the rules


MODULE_RULES = [import_rule, optional_rule, size_rule, docstring_rule, name_rule]


@pytest.mark.parametrize("rule", MODULE_RULES, ids=lambda rule: rule.__name__)
def test_every_module_keeps(rule):
    faults = [fault for path, text in sources().items() for fault in rule(path, text)]
    assert not faults, "\n" + "\n".join(faults)


def test_classes_are_interfaces_or_leaves():
    assert inheritance_rule(sources()) == []


def test_top_level_names_are_the_agreed_ones():
    assert top_level_rule(tree_files()) == []


def test_no_machine_path_or_registry_host_in_the_tree():
    faults = []
    for name in tree_files():
        data = (ROOT / name).read_bytes()
        if b"\0" not in data:
            faults += place_rule(name, data.decode("utf-8"))
    assert not faults, "\n" + "\n".join(faults)


def test_import_mla_and_tiers_brings_no_optional_package():
    program = (
        "import importlib, pkgutil, sys, mla, tiers\n"
        "for package in (mla, tiers):\n"
        "    for found in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        if not found.name.endswith('__main__') and not {'kernels', 'hopper'} & set(found.name.split('.')):\n"
        "            importlib.import_module(found.name)\n"
        f"print(*sorted(set({OPTIONAL!r}) & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr


# The rules refuse what they must

LONG_FUNCTION = "def f():\n" + "    pass\n" * FUNCTION_LINES
PLANTED = [
    # rule, path, refused text, neighbour that passes
    (import_rule, "mla/a.py", "import tiers", "import mla.cache"),
    (import_rule, "mla/a.py", "def f():\n    from tiers import get", "def f():\n    from mla import cache"),
    (import_rule, "mla/a.py", "import importlib\nimportlib.import_module('tiers.tier1_paged')", "import importlib"),
    (import_rule, "mla/serving/a.py", "from ...tiers import x", "from ..cache import x"),
    (import_rule, "mla/cli.py", "import tiers", "def f():\n    import tiers"),
    (import_rule, "mla/oracle.py", "from mla.state import merge", "import torch"),
    (import_rule, "mla/oracle.py", "from .state import merge", "from math import log"),
    (import_rule, "tiers/tier1_paged.py", "import tiers.tier0_naive", "import mla"),
    (import_rule, "tiers/tier1_paged.py", "from tiers import tier0_naive", "from tiers import from_attend"),
    (import_rule, "tiers/tier2_triton/a.py", "from ..tier1_paged import x", "from . import kernels"),
    (import_rule, "tiers/template.py", "def f():\n    from . import tier0_naive", "def f():\n    import tiers"),
    (import_rule, "tiers/__init__.py", "from . import tier1_paged", "def f():\n    from . import tier1_paged"),
    (optional_rule, "tiers/a.py", "import triton.language as tl", "def f():\n    import triton"),
    (optional_rule, "tiers/a.py", "try:\n    import aiter\nexcept ImportError:\n    pass", "import torch"),
    (optional_rule, "tiers/tier2_a/b.py", "import triton", "def f():\n    from tiers.tier2_a.kernels import x"),
    (optional_rule, "tiers/tier2_a/b.py", "from tiers.tier2_a.kernels import x", "from tiers.tier2_a.launch import x"),
    (optional_rule, "tiers/tier2_a/kernels/b.py", "import aiter", "import triton.language as tl"),
    (optional_rule, "mla/a.py", "class A:\n    import scipy", "import numpy, os, mla"),
    (
        optional_rule,
        "mla/a.py",
        "if True:\n    from transformers import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from transformers import x",
    ),
    (size_rule, "mla/a.py", "x = 1\n" * 301, "x = 1\n" * 300),
    (size_rule, "tiers/tier0_naive.py", "x = 1\n" * 121, "x = 1\n" * 120),
    (size_rule, "tiers/tier1_paged.py", "x = 1\n" * 301, "x = 1\n" * 300),
    (size_rule, "tiers/template.py", "x = 1\n" * 61, "x = 1\n" * 60),
    (size_rule, "tiers/tier2_triton/decode.py", "x = 1\n" * 451, "x = 1\n" * 450),
    (size_rule, "mla/a.py", LONG_FUNCTION, LONG_FUNCTION.removesuffix("    pass\n")),
    (docstring_rule, "mla/a.py", "x = 1", '"""Doc."""'),
    (docstring_rule, "mla/a.py", '"""D."""\ndef f(): pass', '"""D."""\ndef _f(): pass'),
    (docstring_rule, "mla/a.py", '"""D."""\nclass A: pass', '"""D."""\nclass A:\n    """D."""'),
    (
        docstring_rule,
        "mla/a.py",
        '"""D."""\nclass A:\n    """D."""\n    def f(self): pass',
        '"""D."""\nclass A:\n    """D."""\n    def __len__(self): pass',
    ),
    (
        docstring_rule,
        "mla/a.py",
        '"""D."""\ndef f(x: Tensor):\n    """Of f(x)."""',
        '"""D."""\ndef f(x: Tensor):\n    """Of x (T,)."""',
    ),
    (
        docstring_rule,
        "mla/a.py",
        '"""D."""\ndef f() -> "tuple[torch.Tensor, int]":\n    """Makes it (in place, or not), (this, that)."""',
        '"""D."""\ndef f() -> "tuple[torch.Tensor, int]":\n    """Makes (T, N, P + R), (B+1,)."""',
    ),
    (
        docstring_rule,
        "mla/a.py",
        '"""D."""\nclass A:\n    """D."""\n    x: Tensor | None',
        '"""D."""\nclass A:\n    """x (pages, page_size, L+R)."""\n    x: Tensor | None',
    ),
    (name_rule, "mla/a.py", "scale = 576 ** -0.5", "scale = (P + R) ** -0.5"),
    (name_rule, "mla/a.py", "def f(softmax_scale: float | None = None): ...", "def f(softmax_scale: float): ..."),
    (name_rule, "mla/a.py", "def f(x, softmax_scale=None): ...", "def f(x=None, softmax_scale=1.0): ..."),
    (name_rule, "mla/a.py", "decompressed_k = 1", "expanded_k = 1"),
    (name_rule, "mla/a.py", "# the compressed rows", "# quant_method compressed-tensors"),
    (place_rule, "a.md", "see /" + "work/x", "see ../shared/traces and network/x"),
    (place_rule, "a.md", "files.python" + "hosted.org", "the Python package index"),
]


@pytest.mark.parametrize(("rule", "path", "refused", "passes"), PLANTED)
def test_rule_refuses_the_planted_fault_and_passes_its_neighbour(rule, path, refused, passes):
    assert rule(path, refused) != []
    assert rule(path, passes) == []


@pytest.mark.parametrize(
    ("refused", "passes"),
    [
        ("class A: pass\nclass B(A): pass", "class A(Protocol): pass\nclass B(A): pass"),
        (
            "class A(Protocol): pass\nclass B(A): pass\nclass C(B): pass",
            "class A(nn.Module): pass\nclass B(NamedTuple): pass",
        ),
        ("class A(Generic[T]): pass\nclass B(mod.A[int]): pass", "from torch import A\nclass B(A): pass"),
    ],
)
def test_inheritance_rule_refuses_a_class_in_between(refused, passes):
    assert inheritance_rule({"mla/a.py": refused}) != []
    assert inheritance_rule({"mla/a.py": passes}) == []


def test_inheritance_rule_sees_across_modules():
    assert inheritance_rule({"mla/a.py": "class A: pass", "tiers/b.py": "from mla.a import A\nclass B(A): pass"}) != []


def test_top_level_rule_refuses_a_stray_file():
    assert top_level_rule(["mla/a.py", "notes.txt", "scratch/x.py"]) == ["notes.txt", "scratch"]


def test_pages_and_readme_hold_no_placeholder():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    assert [p.name for p in pages if re.search(r"@@|TODO|FIXME", p.read_text(encoding="utf-8"))] == []
