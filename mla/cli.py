"""The commands: `mla` and `python -m mla`. The only module here that looks up tiers, and only inside functions.

Imports are inside functions, so that `mla --help` does not wait for torch.
"""

from typing import Annotated, Any

import typer

from mla.commands import options
from mla.commands.flags import Outcome, Run, command
from mla.errors import bad
from mla.settings import RunSettings, TierPair, parse_tier

app = typer.Typer(
    name="mla", no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)

EXIT = {"ok": 0, "mismatch": 1, "raised": 1, "failed": 1, "refused": 2}
SETTINGS = tuple(RunSettings.model_fields)
SIZES = ("model", "heads", "dtype", "cache_dtype")
LIMITS = ("page_size", "token_budget", "max_running", "max_model_len")
TIER_OPTIONS = ("form", "max_workspace_tokens", "tune_file")
MACHINE = ("device", "threads")


def _version(wanted: bool) -> None:
    if wanted:
        from mla.commands.environment import own_version

        typer.echo(f"mla-tiers {own_version()}")
        raise typer.Exit


VERSION = typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")


@app.callback()
def main(version: Annotated[bool, VERSION] = False) -> None:
    """Multi-head Latent Attention: run, check and time its tiers."""


def tier_of(spec: str | TierPair, settings: RunSettings) -> Any:
    """Return the tier that a setting names, with the options that are meant for it."""
    import tiers
    from mla.tune import FormCosts

    if isinstance(spec, TierPair):
        return tiers.compose(tier_of(spec.decode, settings), tier_of(spec.prefill, settings))
    options: dict[str, Any] = {}
    name = spec.partition(":")[0]
    if name in ("paged", "triton"):
        options = {"form": settings.form, "max_workspace_tokens": settings.max_workspace_tokens}
        if name == "paged" and settings.tune_file is not None:
            options["costs"] = FormCosts.load(settings.tune_file)
    return tiers.get(spec, **options)


def tiers_of(settings: RunSettings) -> dict[str, Any]:
    """Return every tier of the settings by the name for reports; raises ValueError where two have one name."""
    named: dict[str, tuple[str, Any]] = {}
    for spec in settings.tiers:
        tier = tier_of(spec, settings)
        if tier.name in named:
            got, fix = (
                f"{named[tier.name][0]} and {spec}, both named {tier.name}",
                "drop one, or rename the one in a file",
            )
            raise bad("tiers", expected="tiers of different names", got=got, fix=fix)
        named[tier.name] = str(spec), tier
    return {name: tier for name, (_, tier) in named.items()}


@command(app, SETTINGS)
def compare(run: Run, html: Annotated[str | None, options.HTML] = None) -> Outcome:
    """Replay a request trace through the tiers and hold every step against the float64 oracle.

    Exit code 0: all right; 1: a tier is wrong; 2: a tier refused, or bad usage.
    """
    from mla.commands.output import check_target, progress
    from mla.commands.page import write_page
    from mla.commands.records import model_record, replay_record
    from mla.commands.report import compare_blocks
    from mla.commands.resolve import model_of, replay_spec_of, requests_of
    from mla.serving.replay import replay

    check_target(html, "--html")
    spec = replay_spec_of(run.settings, model_of(run.settings))
    (name, requests), found = requests_of(run.settings), tiers_of(run.settings)
    with progress("replay", "tokens") as tick:
        report = replay(spec, requests, list(found.values()), tick)
    record = replay_record(name, requests, model_record(run.settings, spec.config, spec.layout), report, list(found))
    write_page(record, run.settings.device, html)
    return Outcome(record, compare_blocks, EXIT[record["status"]])


@command(app, (*TIER_OPTIONS, *MACHINE))
def check(
    run: Run,
    tiers: Annotated[list[str] | None, options.TIERS] = None,
    suite: Annotated[str, options.SUITE] = "smoke",
    case: Annotated[list[str] | None, options.CASE] = None,
    seed: Annotated[int, options.SEED] = 0,
    level: Annotated[str | None, options.LEVEL] = None,
    lse: Annotated[bool, options.LSE] = True,
    faults: Annotated[bool, options.FAULTS] = False,
    isolate: Annotated[bool | None, options.ISOLATE] = None,
    jobs: Annotated[int, options.JOBS] = 1,
    timeout: Annotated[float, options.TIMEOUT] = 60.0,
    stop: Annotated[bool, options.STOP] = False,
    every: Annotated[bool, options.ALL] = False,
    junit: Annotated[str | None, options.JUNIT] = None,
    baseline: Annotated[str | None, options.BASELINE] = None,
    watch: Annotated[bool, options.WATCH] = False,
    pin: Annotated[list[str] | None, options.PIN] = None,
) -> Outcome:
    """Run the conformance cases on tiers: error/budget, the memory around the result, and what a failure looks like.

    Exit code 0: all right; 1: a case failed; 2: a tier refused all cases, a case was not run, or bad usage.
    """
    from mla.commands.check import run_check

    asked = options.Asked(
        tuple(tiers or ()), suite, tuple(case or ()), seed, level, lse, faults, isolate, timeout, stop, every, junit,
        baseline, watch, tuple(pin or ()), jobs,
    )  # fmt: skip
    return run_check(run, asked, tier_of)


@app.command(hidden=True)
def child(folder: str, descriptor: int) -> None:
    """Hold a tier for `mla check`: the other end of mla.conformance.isolate."""
    from mla.commands.check import serve_child

    serve_child(folder, descriptor, tier_of)


@command(app, ("device",))
def aot(
    run: Run, file: Annotated[str, options.AOT_FILE], target: Annotated[list[str] | None, options.TARGET] = None
) -> Outcome:
    """Compile the Triton kernels of a file with no GPU: registers, spills and shared memory for each target.

    Exit code 0: all compile and fit; 1: one does not; 2: triton is missing, or bad usage.
    """
    from mla.commands.aot import aot as body

    return body(run, file, target)


@command(app, (*SIZES, *LIMITS, *TIER_OPTIONS, "tiers", "device"))
def tiers(run: Run, ask: Annotated[list[str] | None, options.ASK] = None) -> Outcome:
    """Say which tiers can run here for a model, and every reason of those that cannot."""
    import tiers as registry
    from mla.commands.records import model_record
    from mla.commands.report import tiers_blocks
    from mla.commands.resolve import asked_of, model_of, need_of

    s, config, asked = run.settings, model_of(run.settings), asked_of(ask or [])
    need = need_of(s, config, asked)
    given = () if run.sources["tiers"] == "default" else s.tiers
    reasons = {str(spec): _reasons(spec, s, need) for spec in [*registry.names(), *given]}
    try:
        auto = registry.select(need)[1]
    except ValueError:  # with the sentences that are in the table
        auto = "none of them can."
    found = [{"name": name, "status": "no" if why else "yes", "reasons": why} for name, why in reasons.items()]
    where = {"device": need.device, "arch": need.arch, "asked": asked}
    return Outcome({"model": model_record(s, config, need.layout), **where, "tiers": found, "auto": auto}, tiers_blocks)


def _reasons(spec: str | TierPair, settings: RunSettings, need: Any) -> list[str]:
    try:
        return tier_of(spec, settings).why_not(need)
    except (Exception, SystemExit) as error:  # a tier of another distribution may fail in any way; the list goes on
        return [f"cannot be loaded: {'' if isinstance(error, ValueError) else f'{type(error).__name__}: '}{error}"]


@command(app, SIZES, model="deepseek-v3", dtype="bfloat16")
def cost(
    run: Run, batch: Annotated[str, options.BATCH] = "16q1s4k", gpu: Annotated[list[str] | None, options.GPU] = None
) -> Outcome:
    """Count the bytes and FLOPs of attention before anything runs: which form wins, and from where on."""
    from mla.batch import parse_batch
    from mla.commands.figures import cost_blocks
    from mla.commands.records import cost_record, model_record
    from mla.commands.resolve import dtype_of, gpu_of, layout_of, model_of, require_tokens

    require_tokens(batch, parse_batch(batch)[0])
    config = model_of(run.settings)
    layout, itemsize = layout_of(run.settings, config), dtype_of(run.settings).itemsize
    gpus = [gpu_of(text, itemsize) for text in gpu or ["h200"]]
    record = cost_record(model_record(run.settings, config, layout), config, batch, gpus, itemsize)
    return Outcome(record, cost_blocks)


@command(app, (*SIZES, "page_size", *TIER_OPTIONS, *MACHINE), model="deepseek-v2-lite", threads=None)
def bench(
    run: Run,
    tiers: Annotated[list[str] | None, options.TIERS] = None,
    batches: Annotated[list[str] | None, options.BATCHES] = None,
    repeats: Annotated[int, options.REPEATS] = 10,
    level: Annotated[str, options.TIMED] = "attend",
    gpu: Annotated[str | None, options.CEILING] = None,
    beside: Annotated[str | None, options.BESIDE] = None,
    graph: Annotated[bool, options.GRAPH] = True,
) -> Outcome:
    """Time tiers on batches, each only after it was right there; on a GPU beside its measured ceilings.

    Exit code 0: all timed; 1: a tier is wrong and was not timed; 2: a tier refused, or bad usage.
    """
    from mla.commands.bench import bench as body

    found = lambda s: {name: tier_of(parse_tier(name), s) for name in tiers or ["paged"]}
    record, blocks = body(run, found, batches or ["4q1s4k"], repeats, level, gpu, beside, graph)
    return Outcome(record, blocks, EXIT[record["status"]])


@command(
    app,
    ("model", "heads", "dtype", "max_workspace_tokens", "tune_file", "threads"),
    model="deepseek-v2-lite",
    threads=None,
)
def tune(
    run: Run,
    file: Annotated[str | None, options.FILE] = None,
    query_lens: Annotated[str, options.LENS] = "1,4,16,64,128,256,512",
    contexts: Annotated[str, options.CONTEXTS] = "1,64,256,512,1024,4096,8192",
    repeats: Annotated[int, options.REPEATS] = 3,
    verify: Annotated[bool, options.VERIFY] = False,
) -> Outcome:
    """Measure on this machine which form of the paged tier is faster where, and keep the table.

    A table serves one model size and dtype; those of other sizes in the file stay.
    """
    from mla.commands.environment import environment
    from mla.commands.figures import tune_blocks
    from mla.commands.output import progress
    from mla.commands.records import tune_record
    from mla.commands.resolve import case_of, counts_of, model_of, tables_of
    from mla.tune import FormCosts, measure, regret

    s, path = run.settings, file or str(run.settings.tune_file or "mla-tune.json")
    kept, case = tables_of(path), case_of(s, model_of(s), "1q1")
    mha, mqa = (
        tier_of(f"paged:{form}", s.model_copy(update={"tune_file": None, "form": form})) for form in ("mha", "mqa")
    )
    grid = {"query_lens": counts_of("--query-lens", query_lens), "contexts": counts_of("--contexts", contexts)}
    where = environment(s.device)
    provenance = f"{where['cpu']}, {where['threads']} threads, torch {where['torch']}"
    with progress("tune", "pairs") as tick:
        table = measure(mha, mqa, case.dims, case.dtype, provenance, **grid, repeats=repeats, progress=tick)
    others = [t for t in kept if (t.size, t.dtype) != (table.size, table.dtype)]
    FormCosts((*others, table)).save(path)
    found = None
    if verify:
        auto = tier_of("paged", s.model_copy(update={"tune_file": path, "form": "auto"}))
        with progress("verify", "pairs") as tick:
            found = regret(auto, mha, mqa, case.dims, case.dtype, **grid, repeats=repeats, progress=tick)
    return Outcome(tune_record(s, path, table, found), tune_blocks)


@command(app, SETTINGS)
def info(run: Run) -> Outcome:
    """Report the environment, every setting with its source, and what the defaults come to."""
    from mla.commands.records import info_record
    from mla.commands.report import info_blocks
    from mla.commands.resolve import layout_of, model_of, requests_of

    config = model_of(run.settings)
    longest = max(r.input_length + r.output_length - 1 for r in requests_of(run.settings)[1])  # the last is not cached
    record = info_record(run.settings, config, layout_of(run.settings, config), longest)
    return Outcome(record, info_blocks)
