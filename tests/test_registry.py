"""Finding a tier: by name, by file, by entry point, by itself; and what is said when there is none."""

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from small_case import TIERS, make_need, mean_case, shared_case

import tiers
from mla.adapters import from_attend
from mla.batch import AttentionBatch

ROOT = Path(__file__).parents[1]
FEATURES = {
    "window": 4,
    "sinks": True,
    "softcap": 30.0,
    "alibi": True,
    "kv_sharing": True,
    "output_quantisation": "float8_e4m3fn",
    "batch_invariant": True,
    "graph_capture": True,
}
ATTEND = "from tiers.template import attend\n"
NO_GPU = (
    "device 'cpu' is not served by triton, which compiles for GPUs; use a GPU, or start the process with"
    " TRITON_INTERPRET=1 to interpret the kernels (slow, for tests)."
)
NO_TRITON = (
    'triton is not installed; triton needs triton >= 3.6; run pip install "mla-tiers[triton]" or choose another tier.'
)


@pytest.fixture(autouse=True)
def laptop(monkeypatch):
    """A process that interprets no kernels and has some triton, whatever is installed here; call it for one without."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = {"triton": "3.7.1"}

    def version(name: str) -> str:
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr("mla.need.version", version)
    return found


def distribution(folder: Path, name: str, entries: dict[str, str], module: str) -> None:
    """Lay out an installed distribution called `name` with one module and its entry points of our group."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    points = "".join(f"{entry} = {value}\n" for entry, value in entries.items())
    (info / "entry_points.txt").write_text(f"[{tiers.ENTRY_POINTS}]\n{points}")
    (folder / f"{name}.py").write_text(module)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install distributions for one test."""

    def put(name: str, entries: dict[str, str], module: str) -> None:
        distribution(tmp_path / name, name, entries, module)
        monkeypatch.syspath_prepend(str(tmp_path / name))

    yield put
    for name in [n for n in sys.modules if n.startswith("fake_")]:
        del sys.modules[name]


OURS = ["naive", "paged", "triton", "flashinfer", "flashmla", "aiter", "template"]


# by name


@pytest.mark.parametrize("name", TIERS)
def test_every_name_gives_a_tier_that_says_its_name(name):
    tier = tiers.get(name)
    assert tier.name == {"paged": "paged", "template": "template"}.get(name, name)
    assert tier.why_not(make_need()) == []


def test_names_of_our_tiers():
    assert tiers.names()[: len(OURS)] == OURS
    assert tiers.get("naive").name == "naive:mha"


def test_options_go_to_the_tier():
    assert tiers.get("naive", form="mqa").name == "naive:mqa"
    assert tiers.get("paged:mha", max_workspace_tokens=64).max_workspace_tokens == 64
    assert tiers.get({"decode": "naive", "prefill": "paged"}, form="mqa").name == "decode=naive:mqa+prefill=paged:mqa"


def test_two_names_give_a_composed_tier():
    tier = tiers.get({"decode": "naive:mqa", "prefill": "paged:mha"})
    assert tier.name == "decode=naive:mqa+prefill=paged:mha"
    case = shared_case((1, 9), (5, 12))
    case.check(case.run(tier))


@pytest.mark.parametrize(
    ("spec", "options", "kind", "text"),
    [
        (
            "pagd",
            {},
            ValueError,
            "tier: expected one of naive, paged, triton, flashinfer, flashmla, aiter, template, or a path, "
            "got 'pagd'. Fix: did you mean 'paged'",
        ),
        ("nave:mha", {}, ValueError, "tier: expected one of .*got 'nave:mha'. Fix: did you mean 'naive'"),
        ("Naive", {}, ValueError, "tier: .*did you mean 'naive'"),
        ("zzz", {}, ValueError, "tier: .*got 'zzz'. Fix: a path must end in .py"),
        ("", {}, ValueError, "tier: expected one of"),
        (None, {}, TypeError, r"tier: expected a name, a path or \{decode=..., prefill=...\}, got None"),
        ("naive:gqa", {}, ValueError, "form: expected 'mha' or 'mqa', got 'gqa'"),
        (
            "naive",
            {"forn": "mqa"},
            TypeError,
            "tier options: expected those of naive: form, got forn. Fix: did you mean 'form'",
        ),
        ("naive", {"max_workspace_tokens": 64}, TypeError, "tier options: expected those of naive: form"),
        ("paged", {"max_workspace_tokens": True}, TypeError, "max_workspace_tokens: expected an int >= 1, got True"),
        ("paged", {"max_workspace_tokens": 0}, ValueError, "max_workspace_tokens: expected an int >= 1, got 0"),
        ("paged", {"costs": 3}, TypeError, "costs: expected FormCosts, got 3"),
        ("template", {"form": "mha"}, TypeError, "tier options: expected none for template, got form"),
        ("template:mha", {}, TypeError, "tier options: expected none for template:mha, got form"),
        ({"decode": "naive"}, {}, ValueError, r"tier: expected the keys decode and prefill, got \['decode'\]"),
        ({"decode": "naive", "prefil": "paged"}, {}, ValueError, "tier: expected the keys decode and prefill"),
        ({"decode": "naive", "prefill": "pagd"}, {}, ValueError, "tier: .*did you mean 'paged'"),
        ("no/such/file.py", {}, ValueError, "tier: expected the path of a Python file, got no/such/file.py"),
    ],
)
def test_what_is_unknown_is_named_with_the_nearest(spec, options, kind, text):
    with pytest.raises(kind, match=f"^{text}"):
        tiers.get(spec, **options)


def test_an_error_inside_a_tier_is_not_taken_for_a_wrong_option(install):
    install("fake_broken", {"broken": "fake_broken:make"}, "def make(form='x'):\n    raise TypeError('of its own')\n")
    text = r"^tier: expected a tier that can be made, got broken: TypeError: of its own\."
    with pytest.raises(ValueError, match=text) as caught:
        tiers.get("broken")
    assert str(caught.value.__cause__) == "of its own"


# from a file


@pytest.mark.parametrize("as_path", [str, Path])
@pytest.mark.parametrize(
    ("text", "name"),
    [
        (ATTEND, "mine"),
        (ATTEND + "def why_not(need):\n    return ['N = 3; no.'] if need.N == 3 else []\n", "mine"),
        ("from tiers import from_attend\n" + ATTEND + "tier = from_attend('other', attend)\n", "other"),
        ("from tiers import from_attend\n" + ATTEND + "def tier():\n    return from_attend('made', attend)\n", "made"),
    ],
)
def test_a_file_is_a_tier(tmp_path, text, name, as_path):
    (tmp_path / "mine.py").write_text(text)
    tier = tiers.get(as_path(tmp_path / "mine.py"))
    assert tier.name == name
    if "why_not" in text:
        assert tier.why_not(make_need()) == ["N = 3; no."]
        assert tier.why_not(make_need(N=5)) == []
    else:
        case = shared_case((3, 1), (9, 6))
        case.check(case.run(tier))


def test_a_file_with_a_class_takes_options(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom mla.tier import Tier\n"
        "@dataclass(frozen=True)\nclass tier(Tier):\n    block: int = 64\n    name: str = 'mine'\n"
    )
    assert tiers.get(str(tmp_path / "mine.py"), block=16).block == 16


def test_the_template_runs_from_its_file():
    case = shared_case((3, 1), (9, 6))
    case.check(case.run(tiers.get(str(ROOT / "tiers" / "template.py"))))


def test_two_files_of_one_name_do_not_mix(tmp_path):
    loaded = []
    for i in range(2):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "mine.py").write_text(
            ATTEND + f"def why_not(need):\n    return [NUMBER]\nNUMBER = 'from {i}.'\n"
        )
        loaded.append(tiers.get(tmp_path / str(i) / "mine.py"))
    assert [tier.why_not(make_need()) for tier in loaded] == [["from 0."], ["from 1."]]


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("x = 1\n", ValueError, "tier: expected a file that defines `tier` or `attend`, got .*mine.py with neither"),
        ("tier = 3\n", TypeError, "tier: expected a tier, got .*mine.py without name, why_not, prepare, plan, attend"),
        ("attend = 3\n", TypeError, "attend: expected a function, got 3"),
        ("def attend(\n", ValueError, "tier: expected a file that can be imported, got .*mine.py: SyntaxError"),
        (
            "import no_such_module\n",
            ValueError,
            "tier: expected a file .*ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("1 / 0\n", ValueError, "tier: expected a file that can be imported, got .*ZeroDivisionError"),
    ],
)
def test_a_file_that_is_no_tier_is_named(tmp_path, text, kind, message):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(kind, match=f"^{message}"):
        tiers.get(tmp_path / "mine.py")
    assert "mla_user_tier_mine" not in sys.modules or "import" not in message


# from another distribution


def test_an_entry_point_is_a_tier_by_name(install):
    module = "from tiers import from_attend\n" + ATTEND + "tier = from_attend('fast', attend)\n"
    install("fake_fast", {"fast": "fake_fast:tier"}, module)
    assert tiers.names() == [*OURS, "fast"]
    case = shared_case((3, 1), (9, 6))
    case.check(case.run("fast"))
    table = tiers.why_not(case.need)
    assert list(table) == [*OURS, "fast"]
    assert table["triton"] == [NO_GPU]
    assert [name for name, reasons in table.items() if not reasons] == ["naive", "paged", "template", "fast"]
    with pytest.raises(ValueError, match="did you mean 'fast'"):
        tiers.get("fasst")


def test_an_entry_point_may_be_a_class_with_options(install):
    module = (
        "from dataclasses import dataclass\nfrom mla.tier import Tier\n"
        "@dataclass(frozen=True)\nclass Fast(Tier):\n    block: int = 64\n    name: str = 'fast'\n"
    )
    install("fake_class", {"fast": "fake_class:Fast"}, module)
    assert tiers.get("fast", block=32).block == 32
    text = r"^tier options: expected those of fast: block, name, got blok\. Fix: did you mean 'block'"
    with pytest.raises(TypeError, match=text):
        tiers.get("fast", blok=32)


@pytest.mark.parametrize("taken", ["paged", "fast"])
def test_two_tiers_of_one_name_are_an_error_and_never_a_choice(install, taken):
    for name in ("fake_one", "fake_two"):
        install(name, {taken: f"{name}:tier"}, "tier = None\n")
    with pytest.raises(ValueError, match=f"^tier: expected one tier called '{taken}', got also fake_.*:tier of fake_"):
        tiers.get(taken)
    assert "one tier called" in tiers.why_not(make_need())[taken][0]
    assert tiers.names().count(taken) == 1


def test_T5_a_tier_that_needs_another_machine_refuses_in_one_line_and_the_reference_works(install):
    module = (
        "from tiers import from_attend\n" + ATTEND + "def why_not(need):\n"
        "    fast = need.arch == 'sm_90'\n"
        "    return [] if fast else [f'arch = {need.arch}; fast needs sm_90 and CUDA 12.3; run it there.']\n"
        "tier = from_attend('fast', attend, why_not)\n"
    )
    install("fake_arch", {"fast": "fake_arch:tier"}, module)
    with pytest.raises(ValueError, match=r"^tier 'fast' refuses: arch = cpu; fast needs sm_90 and CUDA") as caught:
        tiers.select(make_need(), "fast")
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("These tiers serve it: naive, paged, template.")
    assert tiers.select(make_need())[0].name == "paged"


def test_T6_a_tier_without_its_package_says_found_and_needed_version(install, monkeypatch):
    module = (
        "from mla.need import refuse_package\nfrom tiers import from_attend\n" + ATTEND + "def why_not(need):\n"
        "    return refuse_package('fast', 'fake-kernels', '0.6.18', 'flashinfer')\n"
        "tier = from_attend('fast', attend, why_not)\n"
    )
    install("fake_tier", {"fast": "fake_tier:tier"}, module)
    assert tiers.why_not(make_need())["fast"] == [
        "fake-kernels is not installed; fast needs fake-kernels >= 0.6.18;"
        ' run pip install "mla-tiers[flashinfer]" or choose another tier.'
    ]
    install("fake_kernels", {}, "")
    monkeypatch.setattr("mla.need.version", lambda name: "0.2.1")
    with pytest.raises(ValueError, match=r"fake-kernels 0\.2\.1 is too old; fast needs fake-kernels >= 0\.6\.18"):
        tiers.select(make_need(), "fast")


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("import no_such_kernels\n", "ModuleNotFoundError: No module named 'no_such_kernels'"),
        ("raise OSError('libcuda.so.1 is missing')\n", "OSError: libcuda.so.1 is missing"),
        ("x = 1\n", "AttributeError: "),
        ("tier = 3\n", "TypeError: tier: expected a tier"),
    ],
)
def test_a_tier_that_cannot_load_has_that_as_its_reason(install, module, reason):
    install("fake_bad", {"bad": "fake_bad:tier"}, module)
    table = tiers.why_not(make_need())
    assert table["bad"][0].startswith(f"bad cannot be loaded: {reason}")
    assert table["paged"] == []
    assert tiers.select(make_need())[0].name == "paged"


# choosing


def test_auto_says_which_and_why():
    tier, why = tiers.select(make_need())
    assert (tier.name, why) == (
        "paged",
        f"paged: the first tier without a reason against it. triton refuses: {NO_GPU}",
    )
    tier, why = tiers.select(make_need(), "naive:mqa")
    assert (tier.name, why) == ("naive:mqa", "naive:mqa: asked for by name.")


def test_auto_without_triton_is_still_one_sentence_and_the_table_names_the_extra(laptop):
    del laptop["triton"]
    reasons = tiers.why_not(make_need())["triton"]
    assert reasons == [NO_GPU, NO_TRITON]  # to install it would not help here
    tier, why = tiers.select(make_need())
    assert (tier.name, why) == (
        "paged",
        f"paged: the first tier without a reason against it. triton refuses, 2 reasons, the first: {NO_GPU}",
    )


def test_options_of_auto_are_given_on_and_never_dropped():
    tier, _ = tiers.select(make_need(), form="mqa", max_workspace_tokens=64)
    assert (tier.name, tier.max_workspace_tokens) == ("paged:mqa", 64)
    with pytest.raises(ValueError, match=r"^no tier that 'auto' may take .* paged refuses: max_workspace_tokens = 16"):
        tiers.select(make_need(page_size=64), max_workspace_tokens=16)


def test_auto_takes_the_second_where_the_first_refuses(monkeypatch):
    refusing = from_attend("paged", lambda *a: None, lambda need: ["page_size = 4; it takes 64 only; use 64."])
    monkeypatch.setattr("tiers.tier1_paged.PagedTier", lambda: refusing)
    tier, why = tiers.select(make_need())
    assert tier.name == "naive:mha"
    assert why == (
        f"naive: the first tier without a reason against it. triton refuses: {NO_GPU}"
        " paged refuses: page_size = 4; it takes 64 only; use 64."
    )


def test_T3_no_tier_left_lists_every_tier_with_its_reason():
    need = make_need(window=4, sinks=True)
    text = (
        r"^no tier that 'auto' may take serves this Need\. triton refuses: .* paged refuses: window .* naive refuses: "
    )
    with pytest.raises(ValueError, match=text) as caught:
        tiers.select(need)
    for name, reasons in tiers.why_not(need).items():
        found = {reason.split(" ")[0] for reason in reasons}
        assert found >= {"window", "sinks"}
        assert found == {"window", "sinks"} or name in ("triton", "flashinfer", "flashmla", "aiter")  # no GPU here
        assert f"{name}: {' '.join(reasons)}" in str(caught.value)


def test_T3_an_explicit_tier_that_refuses_says_why_and_who_would_do():
    with pytest.raises(ValueError, match="refuses: ") as caught:
        tiers.select(make_need(page_size=64), "paged", max_workspace_tokens=16)
    text = str(caught.value)
    assert "max_workspace_tokens = 16 is below one page of 64 rows; allow at least 64, or use smaller pages." in text
    assert text.endswith("These tiers serve it: naive, paged, template.")
    text = r"No tier serves it\. naive: window = 4 .* paged: window = 4 .* template: window = 4"
    with pytest.raises(ValueError, match=text):
        tiers.select(make_need(window=4), "naive")


@pytest.mark.parametrize(("feature", "value"), FEATURES.items())
@pytest.mark.parametrize("name", TIERS)
def test_T1_a_feature_is_refused_in_a_sentence_and_never_dropped(name, feature, value):
    need, tier = make_need(**{feature: value}), tiers.get(name)
    [reason] = tier.why_not(need)
    assert reason.startswith(f"{feature} = {value!r} ")
    assert re.search(r"(unset|set it to False|choose)", reason)
    assert reason.endswith(".")
    with pytest.raises(ValueError, match=f"^tier '{tier.name}' refuses: {feature} = "):
        mean_case([1], [[1.0] * 10], **{feature: value}).run(tier)


def test_T5_the_registry_imports_no_tier_before_it_is_asked_and_auto_no_kernel_without_a_gpu():
    program = (
        "import sys, tiers\n"
        "print(*sorted(m for m in sys.modules if m.startswith('tiers.')))\n"
        "tiers.get('naive')\n"
        "print(*sorted(m for m in sys.modules if m.startswith('tiers.')))\n"
        "sys.path.insert(0, 'tests')\n"
        "from small_case import make_need\n"
        "print(tiers.select(make_need())[0].name, {'triton', 'tiers.tier2_triton.kernels'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    lines = result.stdout.split("\n")[:3]
    assert (result.returncode, lines) == (0, ["", "tiers.tier0_naive", "paged set()"]), result.stderr


def test_T8_lengths_of_shape_B_1_are_named_with_the_shape_to_pass():
    text = r"^seq_lens: expected integers of shape \(B,\), got shape \(2, 1\)\. Fix: pass seq_lens\.flatten\(\)"
    with pytest.raises(ValueError, match=text):
        AttentionBatch.bottom_right([1, 1], torch.tensor([[3], [4]]), [[0], [1]], page_size=4, num_pages=2)


@pytest.mark.parametrize(
    ("spec", "options", "text"),
    [
        (
            "paged:mha",
            {"form": "mqa"},
            r"^form: expected 'mha' or 'auto' beside the tier 'paged:mha', got 'mqa'\. Fix: ",
        ),
        (
            "naive:mqa",
            {"form": "mha"},
            r"^form: expected 'mqa' or 'auto' beside the tier 'naive:mqa', got 'mha'\. Fix: ",
        ),
        ("naive:", {}, r"^tier: expected a form after the colon, got 'naive:'\. Fix: write naive:mha"),
    ],
)
def test_a_form_that_is_asked_for_twice_or_not_at_all_is_refused(spec, options, text):
    with pytest.raises(ValueError, match=text):
        tiers.get(spec, **options)
    assert tiers.get("paged:mha", form="auto").form == tiers.get("paged:mha", form="mha").form == "mha"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise SystemExit(0)", "a file that can be imported, got .*: SystemExit: 0"),
        ("class tier:\n    def __init__(self): 1 / 0", "a tier that can be made, got .*: ZeroDivisionError: division"),
        ("def tier(): raise SystemExit(0)", "a tier that can be made, got .*: SystemExit: 0"),
    ],
)
def test_a_file_that_ends_the_program_or_raises_is_a_sentence(tmp_path, text, message):
    path = tmp_path / "leaves.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^tier: expected {message}") as caught:
        tiers.get(path)
    assert "leaves.py" in str(caught.value)
