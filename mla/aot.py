"""Compile the Triton kernels of a file ahead of time, with no GPU: registers, spills and shared memory per target.

A kernel's argument types cannot be guessed, so the file says what to compile, in a list or a function `aot`:

```python
from mla.aot import Compile

def aot():                                  # a function, where triton is imported inside functions only
    kernel = make_kernel()                  # a @triton.jit function; autotune and heuristics are looked through
    return [Compile(kernel, {"x": "*bf16", "out": "*fp32", "n": "i32:16"}, {"BLOCK": 128}, num_warps=8)]
```

Types are Triton's: i32, i64, fp32, ..., `*bf16` for a pointer to bfloat16. ":16" after an integer says that it is a
multiple of 16, as the compiler finds out by itself at run time; pointers are taken to be, since torch's memory is. This
module needs the extra `triton`, and imports it inside functions only.
"""

import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from mla.errors import bad
from mla.sass import LOCAL_LOAD, LOCAL_STORE, PRODUCT, instructions, resources

# Bytes of shared memory that a program may take. The compiler itself does not refuse more.
SHARED_LIMIT = {
    "sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "sm_120": 101_376, "gfx942": 65_536, "gfx950": 163_840,
}  # fmt: skip
TYPES = (
    "i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64", "fp16", "bf16", "fp32", "fp64", "fp8e4nv",
    "fp8e4b8", "fp8e4b15", "fp8e5", "fp8e5b16",
)  # fmt: skip
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950")
EXAMPLE = 'aot = [mla.aot.Compile(kernel, {"x": "*bf16", "out": "*fp32", "n": "i32"}, {"BLOCK": 128}, num_warps=4)]'
EXTRA = 'run pip install "mla-tiers[triton]"'


@dataclass(frozen=True)
class Compile:
    """What to compile: a kernel, the types of its arguments by name, and the values of its constants.

    `targets` limits it to some targets (default: all), `name` tells two entries of one kernel apart in reports, and
    `options` go to the compiler as they are.
    """

    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    targets: tuple[str, ...] = ()
    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Compiled:
    """One kernel on one target; `registers` and `spilled` (bytes of stack) are per thread, `shared` bytes per program.

    `products` (wgmma), `local_loads` and `local_stores` count instructions of code for sm_90, None on other targets.
    `status` is "ok", "too_large" (more shared memory than a program gets), "failed" or "not_run"; `detail` says why.
    """

    kernel: str
    target: str
    status: str
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    shared_limit: int | None = None
    seconds: float = 0.0
    detail: str = ""
    products: int | None = None
    local_loads: int | None = None
    local_stores: int | None = None

    @property
    def ok(self) -> bool:
        """True where the kernel was compiled and fits."""
        return self.status == "ok"


def compile_file(
    path: str | os.PathLike[str], targets: Sequence[str] = TARGETS, tick: Callable[[int, int], None] | None = None
) -> list[Compiled]:
    """Compile all that a file declares for every target; a kernel that does not compile is a row, not the end.

    `tick(done, total)` is told of progress. Raises ImportError where triton is not installed, ValueError or TypeError
    where a target is unknown or the file declares nothing that can be compiled.
    """
    _require_triton(targets)
    with _compiler():
        entries = declared(path)
    return compile_entries(entries, targets, tick)


def compile_entries(
    entries: Sequence[Compile], targets: Sequence[str] = TARGETS, tick: Callable[[int, int], None] | None = None
) -> list[Compiled]:
    """Compile entries for every target, as `compile_file` does; their kernels were made without TRITON_INTERPRET."""
    _require_triton(targets)
    results: list[Compiled] = []
    with _compiler():
        for entry in entries:
            for target in targets:
                if tick is not None:
                    tick(len(results), len(entries) * len(targets))
                results.append(compile_one(entry, target))
    return results


def declared(path: str | os.PathLike[str]) -> list[Compile]:
    """Return what a Python file declares as `aot`, checked: a list of `Compile`, or a function that returns one.

    Raises ValueError or TypeError that says what is missing.
    """
    found = getattr(_module_from(Path(path)), "aot", None)
    if found is None:
        fix = f"say what to compile, for example {EXAMPLE}"
        raise bad("file", expected="a file that defines `aot`", got=f"{path} without it", fix=fix)
    try:
        entries = found() if callable(found) else found
    except (Exception, SystemExit) as error:  # a stranger's code
        got = f"{path}: {type(error).__name__}: {error}"
        raise bad("aot", expected="a function that returns a list of Compile", got=got, fix="mend the file") from error
    if not isinstance(entries, Iterable) or isinstance(entries, str | Mapping):
        raise bad("aot", expected="a list of Compile", got=repr(entries), fix=f"write {EXAMPLE}", kind=TypeError)
    entries = list(entries)
    if not entries:
        raise bad("aot", expected="at least one Compile", got="an empty list", fix=f"write {EXAMPLE}")
    for i, entry in enumerate(entries):
        _check(f"aot[{i}]", entry)
    return entries


def compile_one(entry: Compile, target: str) -> Compiled:
    """Compile one entry for one target such as "sm_90" or "gfx942" and read what the compiled code takes."""
    kernel, limit = kernel_of(entry), SHARED_LIMIT.get(target)
    name, start = entry.name or kernel.__name__, time.perf_counter()
    if entry.targets and target not in entry.targets:
        return Compiled(name, target, "not_run", detail=f"declared for {', '.join(entry.targets)} only.")
    try:
        compiled = _compile(entry, kernel, target)
        registers, spilled = _resources(compiled, kernel.__name__)
        counts = _counts(compiled, target)
    except Exception as error:  # whatever a compiler raises is what is wrong with the kernel
        said = " ".join(f"{type(error).__name__}: {error}".split())
        return Compiled(name, target, "failed", seconds=time.perf_counter() - start, detail=said)
    shared = int(compiled.metadata.shared)
    fits = limit is None or shared <= limit
    detail = "" if fits else f"takes {shared:,} bytes of shared memory; {target} gives a program {limit:,}."
    if limit is None:
        detail = f"what {target} gives a program is not known here, so whether it fits was not checked."
    status, seconds = "ok" if fits else "too_large", time.perf_counter() - start
    return Compiled(name, target, status, registers, spilled, shared, limit, seconds, detail, *counts)


def kernel_of(entry: Compile) -> Any:
    """Return the jit function of an entry, below autotune and heuristics; raises TypeError where there is none."""
    kernel = entry.kernel
    while type(kernel).__name__ in ("Autotuner", "Heuristics"):
        kernel = kernel.fn
    if "Interpreted" in type(kernel).__name__:
        fix = "start without TRITON_INTERPRET"
        raise bad("kernel", expected="a @triton.jit function", got="an interpreted one", fix=fix, kind=TypeError)
    if not hasattr(kernel, "arg_names"):
        got, fix = repr(kernel), "decorate it with triton.jit"
        raise bad("kernel", expected="a @triton.jit function", got=got, fix=fix, kind=TypeError)
    return kernel


def _require_triton(targets: Sequence[str]) -> None:
    if find_spec("triton") is None:
        raise bad("triton", expected="triton >= 3.6", got="none", fix=EXTRA, kind=ImportError)
    for target in targets:
        _target(target)


def _check(where: str, entry: Any) -> None:
    if not isinstance(entry, Compile):
        raise bad(where, expected="a Compile", got=repr(entry), fix=f"write {EXAMPLE}", kind=TypeError)
    wanted, given = list(kernel_of(entry).arg_names), {**entry.signature, **entry.constexprs}
    missing, extra = [n for n in wanted if n not in given], [n for n in given if n not in wanted]
    if missing or extra:
        got = "; ".join(
            f"{what} {', '.join(names)}" for what, names in (("nothing for", missing), ("unknown", extra)) if names
        )
        fix = "give each argument a type in signature or a value in constexprs"
        raise bad(where, expected=f"the arguments {', '.join(wanted)}", got=got, fix=fix)
    for name, kind in entry.signature.items():
        if not isinstance(kind, str) or not re.fullmatch(r"\*?[a-z]\w*(:16)?|tensordesc<.*>", kind):
            fix = "write a type such as '*bf16', 'i32' or 'i32:16'; values go to constexprs"
            raise bad(f"{where}.signature[{name!r}]", expected="a Triton type", got=repr(kind), fix=fix)
        plain = kind.removeprefix("*").removesuffix(":16")
        if not plain.startswith("tensordesc<") and plain not in TYPES:
            near = get_close_matches(plain, TYPES, 1)
            fix = f"did you mean {near[0]!r}" if near else f"one of {', '.join(TYPES)}"
            raise bad(f"{where}.signature[{name!r}]", expected="a Triton type", got=repr(kind), fix=fix)
    for target in entry.targets:
        _target(target)


def _compile(entry: Compile, kernel: Any, target: str) -> Any:
    import triton

    if type(kernel).__name__ == "GluonJITFunction":
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler import ASTSource as Source

    types = {n: entry.signature.get(n, "constexpr") for n in kernel.arg_names}
    aligned = [i for i, kind in enumerate(types.values()) if kind.startswith("*") or kind.endswith(":16")]
    source = Source(
        fn=kernel,
        signature={n: kind.removesuffix(":16") for n, kind in types.items()},
        constexprs=dict(entry.constexprs),
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": entry.num_warps, "num_stages": entry.num_stages, **entry.options}
    return triton.compile(source, target=_target(target), options=options)


def _target(name: str) -> Any:
    from triton.backends.compiler import GPUTarget

    if match := re.fullmatch(r"sm_(\d{2,3})", name):
        return GPUTarget("cuda", int(match[1]), 32)
    if re.fullmatch(r"gfx[0-9a-f]{3,4}", name):
        return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)
    raise bad("target", expected="sm_ or gfx and a number", got=repr(name), fix=f"one of {', '.join(SHARED_LIMIT)}")


def _resources(compiled: Any, name: str) -> tuple[int, int]:
    """Registers and bytes of stack, which are spills, of a thread."""
    if "amdgcn" in compiled.asm:
        number = lambda key: int(re.findall(rf"\.{key}:\s*(\d+)", compiled.asm["amdgcn"])[0])
        return number("vgpr_count"), number("private_segment_fixed_size")
    return resources(compiled.asm["cubin"], name)


def _counts(compiled: Any, target: str) -> tuple[int, int, int] | tuple[None, None, None]:
    """Products, local loads and local stores in the code for sm_90, which is where products are single instructions."""
    if target != "sm_90":
        return None, None, None
    found = instructions(compiled.asm["cubin"])
    return found[PRODUCT], found[LOCAL_LOAD], found[LOCAL_STORE]


@contextmanager
def _compiler() -> Iterator[None]:
    """Compile, do not interpret, and keep what is compiled out of the user's cache."""
    names = ("TRITON_INTERPRET", "TRITON_CACHE_DIR")
    before = {name: os.environ.pop(name, None) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            _refuse_interpreter()
            yield
        finally:
            for name in names:
                os.environ.pop(name, None)
            os.environ |= {name: value for name, value in before.items() if value is not None}


def _refuse_interpreter() -> None:
    import triton.language

    if "Interpreted" in type(triton.language.sum).__name__:  # triton itself was imported as something to interpret
        fix = "start this command without TRITON_INTERPRET, which triton reads once, when it is imported"
        raise bad("TRITON_INTERPRET", expected="unset, to compile", got="1", fix=fix)


def _module_from(path: Path) -> ModuleType:
    if not path.is_file():
        raise bad("file", expected="the path of a Python file", got=str(path), fix="check the path")
    module = ModuleType(f"mla_aot_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    try:
        SourceFileLoader(module.__name__, str(path)).exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        got = f"{path}: {type(error).__name__}: {error}"
        raise bad("file", expected="a file that can be imported", got=got, fix="mend the file") from error
    return module
