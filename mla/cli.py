"""The commands: `mla` and `python -m mla`. The only module here that looks up tiers, and only inside functions.

Imports are inside functions, so that `mla --help` does not wait for torch.
"""

from typing import Annotated, Any

import typer

from mla.errors import bad
from mla.flags import Outcome, Run, command
from mla.settings import RunSettings, TierPair

app = typer.Typer(
    name="mla", no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)

EXIT = {"ok": 0, "mismatch": 1, "raised": 1, "refused": 2}
SETTINGS = tuple(RunSettings.model_fields)
SIZES = ("model", "heads", "dtype", "cache_dtype")
LIMITS = ("page_size", "token_budget", "max_running", "max_workspace_tokens", "max_model_len")


def _version(wanted: bool) -> None:
    if wanted:
        from mla.environment import own_version

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
    if spec.partition(":")[0] == "paged":
        options = {"form": settings.form, "max_workspace_tokens": settings.max_workspace_tokens}
        if settings.tune_file is not None:
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
    return {spec if "+" in spec else name: tier for name, (spec, tier) in named.items()}


@command(app, SETTINGS)
def compare(run: Run) -> Outcome:
    """Replay a request trace through the tiers and hold every step against the float64 oracle.

    Exit code 0: all right; 1: a tier is wrong; 2: a tier refused, or bad usage.
    """
    from mla.records import model_record, replay_record
    from mla.report import compare_blocks
    from mla.resolve import model_of, replay_spec_of, requests_of
    from mla.serving.replay import replay
    from mla.output import progress

    spec = replay_spec_of(run.settings, model_of(run.settings))
    (name, requests), found = requests_of(run.settings), tiers_of(run.settings)
    with progress("replay", "tokens") as tick:
        report = replay(spec, requests, list(found.values()), tick)
    record = replay_record(name, requests, model_record(run.settings, spec.config, spec.layout), report, list(found))
    return Outcome(record, compare_blocks, EXIT[record["status"]])


ASK = typer.Option(metavar="NAME=VALUE", help="Ask for more: a field of Need, such as window=4096. May be repeated.")


@command(app, (*SIZES, *LIMITS, "tiers", "device"))
def tiers(run: Run, ask: Annotated[list[str] | None, ASK] = None) -> Outcome:
    """Say which tiers can run here for a model, and every reason of those that cannot."""
    import tiers as registry
    from mla.records import model_record
    from mla.report import tiers_blocks
    from mla.resolve import asked_of, model_of, need_of

    s, config, asked = run.settings, model_of(run.settings), asked_of(ask or [])
    need = need_of(s, config, asked)
    given = () if run.sources["tiers"] == "default" else s.tiers
    reasons = {str(spec): _reasons(spec, s, need) for spec in [*registry.names(), *given]}
    try:
        auto = registry.select(need)[1]
    except ValueError as error:
        auto = str(error)
    record = {
        "model": model_record(s, config, need.layout), "device": f"{need.device} ({need.arch})", "asked": asked, "auto": auto,
        "tiers": [{"name": name, "status": "no" if why else "yes", "reasons": why} for name, why in reasons.items()],
    }  # fmt: skip
    return Outcome(record, tiers_blocks)


def _reasons(spec: str | TierPair, settings: RunSettings, need: Any) -> list[str]:
    try:
        return tier_of(spec, settings).why_not(need)
    except Exception as error:  # a tier of another distribution may fail in any way, and the list goes on
        return [f"cannot be loaded: {type(error).__name__}: {error}"]


BATCH = typer.Option(metavar="SPEC", help="Requests as COUNTqNEWsKEYS, parts joined by _: 16q1s4k, 2q2k_32q1s1k.")
GPU = typer.Option(metavar="GPU", help="A known GPU, or NAME:TFLOPS:GBPS for ceilings of your own. May be repeated.")


@command(app, SIZES, model="deepseek-v3", dtype="bfloat16")
def cost(run: Run, batch: Annotated[str, BATCH] = "16q1s4k", gpu: Annotated[list[str] | None, GPU] = None) -> Outcome:
    """Count the bytes and FLOPs of attention before anything runs: which form wins, and from where on."""
    from mla.records import cost_record, model_record
    from mla.report import cost_blocks
    from mla.resolve import dtype_of, gpu_of, layout_of, model_of

    config = model_of(run.settings)
    layout, itemsize = layout_of(run.settings, config), dtype_of(run.settings).itemsize
    gpus = [gpu_of(text, itemsize) for text in gpu or ["h200"]]
    record = cost_record(model_record(run.settings, config, layout), config, batch, gpus, itemsize)
    return Outcome(record, cost_blocks)


@command(app, SETTINGS)
def info(run: Run) -> Outcome:
    """Report the environment, every setting with its source, and what the defaults come to."""
    from mla.records import info_record
    from mla.report import info_blocks
    from mla.resolve import layout_of, model_of, requests_of

    config = model_of(run.settings)
    longest = max(r.input_length + r.output_length - 1 for r in requests_of(run.settings)[1])  # the last is not cached
    record = info_record(run.settings, config, layout_of(run.settings, config), longest)
    return Outcome(record, info_blocks)
