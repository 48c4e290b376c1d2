"""The record of what the kernels take: it is that of the sources, it is within its budgets, and each check can fail.

Kernels are compiled in child processes without TRITON_INTERPRET; here nothing imports triton.
"""

import copy
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import tiers.tier2_triton.aot_table as table
from mla.aot import TARGETS
from tiers.tier2_triton.aot_table import broken, cheapest, dumps, kernel_names, page, sources_of, stale, updated

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install 'mla-tiers[triton]'"
)
OTHER = next(Path(sys.prefix).glob("triton-*[0-9]"), None)  # of this environment, which `make test` made
COUNTED = {"products": table.PRODUCTS["hopper.seesaw"], "local_loads": 4, "local_stores": 4}
ROW = {"status": "ok", "registers": 40, "spilled": 0, "shared": 1024, "detail": "", "seconds": 0.5}


@pytest.fixture(scope="module")
def record():
    return json.loads(table.RECORD.read_text(encoding="utf-8"))


def child(*words: str, path: Path | None = None, cache: Path | None = None) -> tuple[int, str]:
    """Run Python in a process that compiles instead of interpreting; return its exit code and all its output.

    `path` is where packages are looked for first, `cache` where Triton keeps what it compiles.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(path)} if path else {}
    environment |= {"TRITON_CACHE_DIR": str(cache)} if cache else {}
    done = subprocess.run([sys.executable, *words], cwd=table.ROOT, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def made(**rows):
    """A record of one variant of one kernel; `rows` by target, or by kernel with `kernel=`."""
    kernel = rows.pop("kernel", "decode")
    variant = {"digest": "d", "rows": {target: {**ROW, **rows.get(target, {})} for target in TARGETS}}
    return {"triton": "3", "kernels": {kernel: {"sources": {"t/kernels/a.py": "1"}, "variants": {"v": variant}}}}


# The record is the present one


@needs_triton
def test_the_record_is_that_of_the_sources_and_within_its_budgets():
    code, said = child("-m", "tiers.tier2_triton.aot_table", "--check")
    assert code == 0, f"{said}\nRun `make aot`."


@needs_triton
def test_one_variant_of_each_kernel_compiles_for_every_target():
    code, said = child("-m", "tiers.tier2_triton.aot_table", "--cheapest")
    assert code == 0, said
    assert f"each of {len(kernel_names())} kernels" in said


@needs_triton
@pytest.mark.skipif(OTHER is None, reason="`make test` installs the other version of triton, on Linux")
def test_the_hopper_kernels_compile_with_the_other_version_of_triton_too(tmp_path):
    """The version that a GPU ran, and that of this environment; one shim has the names that differ."""
    hopper = [kernel for kernel in kernel_names() if kernel.startswith("hopper.")]
    before = table.RECORD.read_bytes(), table.PAGE.read_bytes()
    code, said = child("-m", "tiers.tier2_triton.aot_table", "--dry", *hopper, path=OTHER, cache=tmp_path)
    assert code == 0, said
    assert f"{len(hopper)} kernels compile within their budgets by {OTHER.name.replace('-', ' ')}." in said
    assert (table.RECORD.read_bytes(), table.PAGE.read_bytes()) == before


@needs_triton
def test_a_kernel_that_is_not_there_is_told():
    code, said = child("-m", "tiers.tier2_triton.aot_table", "--dry", "hopper.shedule")
    assert code == 1
    assert said.startswith("error: kernel: expected one of combine, ")
    assert said.endswith("got 'hopper.shedule'. Fix: ask for one of them.\n")


@needs_triton
def test_the_command_exits_with_1_and_names_what_breaks_a_budget():
    program = (
        "import sys, tiers.tier2_triton.aot_table as t\n"
        "t.REGISTERS['write'] = 1\n"
        "sys.exit(t.main(['--check', 'write']))"
    )
    code, said = child("-c", program)
    assert code == 1
    assert "write, variant 'write bf16 to bf16', sm_90:" in said
    assert "registers, at most 1." in said


def test_the_page_is_that_of_the_record(record):
    assert table.PAGE.read_text(encoding="utf-8") == page(record)
    assert json.loads(dumps(record)) == record


def test_every_kernel_has_been_compiled_for_every_target_by_some_variant(record):
    for kernel, found in record["kernels"].items():
        targets = {target for variant in found["variants"].values() for target in variant["rows"]}
        assert targets == ({"sm_90"} if kernel.startswith("hopper.") else set(TARGETS)), kernel


# Each budget is seen to break


@pytest.mark.parametrize(("variant", "pages"), [("seesaw, pages of 64", ""), ("seesaw, pages of 16", ", small pages")])
def test_a_kernel_that_may_spill_a_little_may_not_spill_more(variant, pages):
    most = table.MOST_SPILLED[f"hopper.seesaw{pages}"]
    few, many = (made(kernel="hopper.seesaw", sm_90={**COUNTED, "spilled": most + n, "registers": 255}) for n in (0, 1))
    for record in (few, many):
        variants = record["kernels"]["hopper.seesaw"]["variants"]
        variants[variant] = variants.pop("v")
    assert broken(few) == []
    (sentence,) = broken(many)
    assert sentence.endswith(f"{most + 1} bytes spilled, at most {most}.")


@pytest.mark.parametrize(("change", "said"), [
    ({"products": COUNTED["products"] + 1}, f"wgmma instructions, not {COUNTED['products']}."),
    ({"products": COUNTED["products"] - 1}, f"wgmma instructions, not {COUNTED['products']}."),
    ({"local_loads": table.MOST_LOCAL["hopper.seesaw"] + 1}, "local loads, at most"),
    ({"local_stores": table.MOST_LOCAL["hopper.seesaw"] + 1}, "local stores, at most"),
])  # fmt: skip
def test_other_counts_of_instructions_break_a_budget(change, said):
    assert broken(made(kernel="hopper.seesaw", sm_90=COUNTED)) == []
    (sentence,) = broken(made(kernel="hopper.seesaw", sm_90={**COUNTED, **change}))
    assert said in sentence


def test_a_hopper_kernel_whose_instructions_were_not_counted_breaks_a_budget():
    counted = {name: n for name, n in COUNTED.items() if name != "local_loads"}
    (sentence,) = broken(made(kernel="hopper.swap", sm_90={**counted, "products": table.PRODUCTS["hopper.swap"]}))
    assert sentence.endswith("no local_loads counted; run `make aot`.")


def test_the_page_has_the_counts_of_hopper_kernels_where_they_are_known():
    record = made(kernel="hopper.seesaw", sm_90=COUNTED) | {"limits": dict.fromkeys(TARGETS, 1)}
    variants = record["kernels"]["hopper.seesaw"]["variants"]
    variants["w"] = {"digest": "d", "rows": {"sm_90": {**ROW, **COUNTED, "local_loads": 2}}}
    assert f"| hopper.seesaw | {COUNTED['products']} | 2 to 4 | 4 |" in page(record)
    del variants["w"]["rows"]["sm_90"]["products"]
    assert "wgmma" not in page(record)


@needs_triton
def test_counts_are_kept_in_the_rows_of_sm_90():
    program = (
        "import json, tiers.tier2_triton.aot_table as t\n"
        "variant = next(iter(t.declared('write')))\n"
        "print(json.dumps(t.compile_variant('write', variant, ['sm_80', 'sm_90'])))"
    )
    code, said = child("-c", program)
    assert code == 0, said
    rows = json.loads(said.splitlines()[-1])
    assert set(table.COUNTS) <= set(rows["sm_90"])
    assert not set(table.COUNTS) & set(rows["sm_80"])


def test_a_record_within_its_budgets_breaks_none():
    assert broken(made()) == []
    assert broken(made(sm_80={"registers": 255, "spilled": 8}, gfx942={"spilled": 8})) == []
    assert broken(made(kernel="prefill", sm_90={"spilled": 8})) == []


@pytest.mark.parametrize(("doctored", "said"), [
    (made(sm_90={"spilled": 8}), "decode, variant 'v', sm_90: 8 bytes spilled, none allowed."),
    (made(gfx942={"shared": 65_537}), "decode, variant 'v', gfx942: 65,537 bytes of shared memory, at most 65,536."),
    (made(sm_100={"shared": 232_449, "status": "too_large"}), "sm_100: 232,449 bytes of shared memory, at most"),
    (made(kernel="write", sm_90={"registers": 81}), "write, variant 'v', sm_90: 81 registers, at most 80."),
    (made(kernel="new"), "new, variant 'v', sm_90: no register budget; add new to REGISTERS."),
    (made(gfx950={"status": "failed", "detail": "no such op"}), "decode, variant 'v', gfx950: failed. no such op"),
])  # fmt: skip
def test_a_doctored_record_breaks_its_budget(doctored, said):
    assert len(broken(doctored)) == 1
    assert said in broken(doctored)[0]


# Each kind of staleness is seen


def now_of(record):
    now = copy.deepcopy(record["kernels"])
    for kernel in now.values():
        for variant in kernel["variants"].values():
            variant["targets"] = tuple(variant.pop("rows"))
    return now


def test_a_record_of_what_there_is_is_not_stale(record):
    assert stale(record, now_of(record)) == []


@pytest.mark.parametrize(("change", "said"), [
    (lambda now: now["decode"]["sources"].update({"t/kernels/a.py": "2"}), "decode: t/kernels/a.py has changed."),
    (lambda now: now["decode"]["sources"].update({"t/launch.py": "2"}), "decode: t/launch.py has changed."),
    (lambda now: now["decode"]["sources"].clear(), "decode: t/kernels/a.py has changed."),
    (lambda now: now["decode"]["variants"].update(w={"digest": "d", "targets": TARGETS}), "'w' is not in the record."),
    (lambda now: now["decode"]["variants"].clear(), "decode: the variant 'v' is in the record only."),
    (lambda now: now["decode"]["variants"]["v"].update(digest="e"), "the variant 'v' is declared in another way."),
    (lambda now: now["decode"]["variants"]["v"].update(targets=TARGETS[1:]), "'v' is declared in another way."),
    (lambda now: now.clear(), "decode is in the record only."),
    (lambda now: now.update(merge=now["decode"]), "merge is not in the record."),
])  # fmt: skip
def test_a_change_makes_the_record_stale(change, said):
    now = now_of(made())
    change(now)
    assert len(found := stale(made(), now)) == 1
    assert found[0].endswith(said)


def test_sources_are_followed_through_the_imports_of_the_tier(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "ROOT", tmp_path)
    folder = tmp_path / "tiers" / "tier2_triton" / "kernels"
    folder.mkdir(parents=True)
    (tmp_path / "mla").mkdir()
    files = {
        "one": "from tiers.tier2_triton.kernels.two import (\n    thing,\n)\nfrom mla.state import merge\n",
        "two": "def f():\n    from tiers.tier2_triton import launch\n",
        "other": "",
    }
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    (folder.parent / "launch.py").write_text("import tiers.tier2_triton.kernels.one\n")
    (tmp_path / "mla" / "aot.py").write_text("x = 1\n")
    (tmp_path / "mla" / "sass.py").write_text("y = 1\n")
    found = sources_of("one")
    ours = "tiers/tier2_triton/"
    assert list(found) == [
        "mla/aot.py",
        "mla/sass.py",
        f"{ours}kernels/one.py",
        f"{ours}kernels/two.py",
        f"{ours}launch.py",
    ]
    assert found["mla/aot.py"] == hashlib.sha256(b"x = 1\n").hexdigest()
    (folder / "two.py").write_text(files["two"] + "# changed\n")
    changed = sources_of("one")
    assert [path for path in found if found[path] != changed[path]] == [f"{ours}kernels/two.py"]


def test_kernels_are_found_by_file():
    found = kernel_names()
    assert {"write", "hopper.seesaw", "hopper.swap", "hopper.schedule", "hopper.combine"} <= set(found)
    assert not {"problem", "hopper.device", "hopper.decode"} & set(found)


# What is compiled again


@needs_triton
def test_only_what_changed_is_compiled_again(monkeypatch):
    monkeypatch.setattr(table, "version", lambda name: "3")
    monkeypatch.setattr(table, "sources_of", lambda kernel: now[kernel]["sources"])
    old = made()
    now = now_of(old)
    now["decode"]["variants"]["w"] = {"digest": "x", "targets": TARGETS}
    asked = []
    fake = lambda wanted: asked.extend(wanted) or [(key, {"sm_90": ROW}) for key in wanted]
    record = updated(old, now, fake)
    assert asked == [("decode", "w", TARGETS)]
    assert record["kernels"]["decode"]["variants"]["v"] == old["kernels"]["decode"]["variants"]["v"]
    assert record["kernels"]["decode"]["variants"]["w"] == {"digest": "x", "rows": {"sm_90": ROW}}
    monkeypatch.setattr(table, "sources_of", lambda kernel: {"t/kernels/a.py": "edited meanwhile"})
    assert updated(old, now, fake)["kernels"]["decode"]["sources"] == {}
    for change in (
        lambda now, old: now["decode"]["sources"].update({"t/kernels/a.py": "2"}),
        lambda now, old: now["decode"]["variants"]["v"].update(digest="e"),
        lambda now, old: old.update(triton="2"),
    ):
        again, before = now_of(old), copy.deepcopy(old)
        change(again, before)
        asked.clear()
        updated(before, again, fake)
        assert asked == [("decode", "v", TARGETS)]


@needs_triton
def test_another_tile_table_with_the_same_tiles_compiles_nothing_and_is_in_the_record(monkeypatch):
    monkeypatch.setattr(table, "version", lambda name: "3")
    old = made()
    now = now_of(old)
    now["decode"]["sources"]["t/launch.py"] = "5"
    record = updated(old, now, lambda wanted: pytest.fail("compiled") if wanted else [])
    assert record["kernels"]["decode"]["sources"] == {"t/kernels/a.py": "1", "t/launch.py": "5"}
    assert stale(record, now) == []


def test_the_cheapest_variant_took_the_least_time_for_a_target():
    record = made()
    variants = record["kernels"]["decode"]["variants"]
    variants["w"] = {"digest": "d", "rows": {target: {**ROW, "seconds": 0.4} for target in TARGETS}}
    variants["x"] = {"digest": "d", "rows": {"sm_90": {**ROW, "seconds": 0.1}}}
    now = now_of(record)
    others = tuple(target for target in TARGETS if target != "sm_90")
    assert sorted(cheapest(record, now)) == [("decode", "w", others), ("decode", "x", ("sm_90",))]
    del now["decode"]["variants"]["x"]
    assert cheapest(record, now) == [("decode", "w", TARGETS)]


def test_variants_of_one_name_are_told_apart_by_what_differs(monkeypatch):
    one = lambda *targets, warps=4: table.Compile(None, {}, {}, warps, 3, targets, "v")
    module = SimpleNamespace(aot=lambda: [one("sm_90"), one("sm_80", warps=8), replace(one(), name="w")])
    monkeypatch.setattr(table.importlib, "import_module", lambda name: module)
    found = ["v, 4 warps, 3 stages for sm_90", "v, 8 warps, 3 stages for sm_80", "w"]
    assert list(table.declared("x")) == found
    module.aot = lambda: [one(), one()]
    with pytest.raises(
        ValueError, match=r"x.aot: expected variants of different names, got 'v, 4 warps, 3 stages' twice"
    ):
        table.declared("x")
    module.aot = list
    with pytest.raises(ValueError, match=r"x.aot: expected variants of different names, got 'none'"):
        table.declared("x")
    module.aot = lambda: 1 / 0
    with pytest.raises(ValueError, match=r"x.aot: expected a list of Compile, got ZeroDivisionError"):
        table.declared("x")


COMPILED = """
import tiers.tier2_triton.aot_table as t, mla.aot as aot
entry = next(iter(t.declared('{kernel}').values()))
with aot._compiler(): asm = aot._compile(entry, aot.kernel_of(entry), 'sm_90').asm
"""
OVERWRITTEN = {"even", "odd", "m"}  # made anew in every turn, or used by one of the two warpgroups alone


@needs_triton
@pytest.mark.parametrize(
    ("kernel", "known"),
    [
        ("hopper.swap", {"entry", "block", "last"}),
        ("hopper.seesaw", {"entry", "block", "last"}),
        ("hopper.prefill", {"turn", "base", "at"}),
    ],
)
def test_no_loop_forgets_what_it_carries(kernel, known):
    """Triton drops a carried number that only bounds a loop within, which keeps its first value then."""
    code, said = child("-c", COMPILED.format(kernel=kernel) + "print(asm['source'], '\\n=====\\n', asm['ttgir'])")
    assert code == 0, said
    source, compiled = (carried(text) for text in said.split("====="))
    assert known <= compiled
    assert source - compiled <= OVERWRITTEN


def carried(text: str) -> set[str]:
    """Names of all numbers that loops of this intermediate code carry, without what tells them apart."""
    lists = re.findall(r"scf\.for .*?iter_args\((.*?)\) ->", text)
    return {re.sub(r"_\d+$", "", name) for names in lists for name in re.findall(r"%(\w+) =", names)}


@needs_triton
@pytest.mark.parametrize(("kernel", "own", "table_entries"), [("hopper.swap", 18, 0), ("hopper.seesaw", 24, 2)])
def test_what_a_part_without_work_reads(kernel, own, table_entries):
    """Its own entry, and in `seesaw` one of the table, in each warpgroup: `plan_hopper` makes one where none is."""
    code, said = child("-c", COMPILED.format(kernel=kernel) + "print(asm['ttgir'])")
    assert code == 0, said
    assert Counter(unconditional(said)) == Counter({"%part": own, "%table": table_entries})


def unconditional(text: str) -> list[str]:
    """What each load is from that stands in no loop and behind no condition, as an argument of the kernel."""
    given = re.search(r"ttg\.warp_specialize\((.*?)\)", text)[1].split(", ")
    taken = re.findall(r"(%\w+): ", re.search(r"partition0\((.*?)\) num_warps", text)[1])
    origin, loops, depth, found = dict(zip(taken, given, strict=True)), [], 0, []
    for line in text.splitlines():
        depth += line.count("{") - line.count("}")
        while loops and depth < loops[-1]:
            loops.pop()
        if " = tt.addptr " in line:
            name, base = re.match(r"\s*(%\w+) = tt\.addptr (%\w+)", line).groups()
            origin[name] = base
        elif not loops and (load := re.match(r"\s*%\w+ = tt\.load (%\w+) :", line)):
            place = load[1]
            while place in origin:
                place = origin[place]
            found.append(place)
        if "scf.for" in line or "scf.while" in line:
            loops.append(depth)
    return found
