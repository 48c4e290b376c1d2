"""The body of `mla check`: cases on tiers, in processes of their own where the tiers are foreign, and what came out."""

import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

from mla import conformance
from mla.commands.check_record import check_record, compare_records, read_record, write_junit
from mla.commands.check_report import check_blocks, fault_blocks
from mla.commands.environment import environment
from mla.commands.flags import Outcome, Run, take_threads
from mla.commands.options import LEVELS, Asked
from mla.commands.output import Tick, check_target, progress, show
from mla.commands.resolve import device_of
from mla.conformance import Case, Result
from mla.conformance.isolate import Child, check_isolated, command_of, serve, tried
from mla.conformance.latent import run_latent_case
from mla.conformance.pins import parse_pins, pinned
from mla.conformance.runner import inputs_of
from mla.conformance.spread import Results, Spread
from mla.conformance.trial import Trial
from mla.errors import bad
from mla.settings import RunSettings, TierPair, load_settings, parse_tier
from mla.tier import Tier

EXIT = {"ok": 0, "failed": 1, "incomplete": 2, "refused": 2}
SHOWN, DIAGNOSED = 10, 40  # failures; a diagnosis takes a part of a second
GROUP = "mla.tiers"  # entry points of other packages' tiers
TOLD = ("form", "max_workspace_tokens", "tune_file")
POLL = 0.3

TierOf = Callable[[str | TierPair, RunSettings], Tier]
Notes = Callable[[Case], list[str]]


def run_check(run: Run, asked: Asked, tier_of: TierOf) -> Outcome:
    """Do what `mla check` was asked for; `tier_of` looks a tier up. Raises ValueError for what makes no sense."""
    asked.check()
    asked = replace(asked, tiers=asked.tiers or ("paged",))
    alone = [spec for spec in asked.tiers if asked.jobs > 1 and isolated(spec, asked)]
    if alone:
        got, fix = f"{asked.jobs}, and {alone[0]} in a process of its own", "add --no-isolate, or drop --jobs"
        raise bad("--jobs", expected="1 beside --isolate", got=got, fix=fix)
    if asked.faults:
        return run_faults(run, asked)
    if asked.watch:
        watch(run, asked, tier_of)
    check_target(asked.junit, "--junit")
    earlier = None if asked.baseline is None else read_record(asked.baseline)
    record = checked(run, asked, tier_of)
    code = EXIT[record["verdict"]]
    if earlier is not None:
        record["baseline"] = compare_records(str(asked.baseline), earlier, record)
        code = 1 if record["baseline"]["new_failures"] else 2 if record["baseline"]["lost"] else 0
    if asked.junit is not None:
        write_junit(record, asked.junit)
    return Outcome(record, partial(check_blocks, shown=None if asked.every else SHOWN), code)


def checked(run: Run, asked: Asked, tier_of: TierOf) -> dict[str, Any]:
    """Run every case on every tier and return the record: a summary for each tier, a record for each case."""
    device, title = device_of(run.settings), f"check {', '.join(asked.tiers)}"
    by_tier: dict[str, tuple[str, list[Result], list[str]]] = {}
    with progress(title, "cases") as tick:
        for spec in asked.tiers:
            with ExitStack() as open_children:
                name, has_kernel, results, notes = subject(spec, asked, run.settings, device, tier_of, open_children)
                if not name.isprintable():
                    raise bad("tier.name", expected="one line of printable text", got=repr(name), fix="rename the tier")
                if name in by_tier:
                    got, fix = f"{by_tier[name][0]} and {spec}, both named {name}", "drop one, or rename it"
                    raise bad("tier", expected="tiers of different names", got=got, fix=fix)
                done = run_jobs(jobs_of(asked, has_kernel), results, asked.stop, name, tick)
                ran = next((r.case for r in done if r.status not in ("refused", "not_run")), None)
                by_tier[name] = spec, done, [] if ran is None else notes(ran)
    again = partial(command_again, run, asked)
    return check_record(asked, by_tier, environment(device), again)


def subject(
    spec: str, asked: Asked, settings: RunSettings, device: str, tier_of: TierOf, open_children: ExitStack
) -> tuple[str, bool, Results, Notes]:
    """Return a tier's name, whether it has an inner kernel, and how it is run and asked: here, or in a child."""
    most = float("inf") if asked.every else DIAGNOSED
    if isolated(spec, asked):
        told = {name: getattr(settings, name) for name in TOLD}
        told["tune_file"] = None if settings.tune_file is None else str(settings.tune_file)
        hello = {"tier": spec, "threads": settings.threads, "settings": told}
        child = open_children.enter_context(Child(command_of("child"), hello, asked.timeout))
        loaded = child.load()
        if loaded.status != "ran":
            raise _cannot_load(spec, loaded)

        def ask(case: Case) -> list[str]:
            return _notes(child.ask("notes", case, inputs_of(case, device), device))

        run = lambda level, cases: check_isolated(child, cases, level=level, device=device, most_diagnosed=most)
        return child.tier, loaded.kind == "latent", run, ask
    tier = tier_of(parse_tier(spec), settings)
    notes = lambda case: _notes(tried(tier, "notes", case, inputs_of(case, device), device))
    run = partial(run_here, tier, device, most)
    if asked.jobs > 1:
        make = partial(runner, spec, settings, device, most / asked.jobs, tier_of)
        run = open_children.enter_context(Spread(asked.jobs, make)).results
    return tier.name, getattr(tier, "latent", None) is not None, run, notes


def runner(spec: str, settings: RunSettings, device: str, most: float, tier_of: TierOf) -> Results:
    """Return `run_here` of a tier, in a process that runs a part of the cases."""
    take_threads(settings.threads)
    return partial(run_here, tier_of(parse_tier(spec), settings), device, most)


def run_here(tier: Tier, device: str, most: float, level: str, cases: Iterable[Case]) -> Iterator[Result]:
    """Yield the results of a tier, or of its inner kernel, in this process."""
    if level == "attend":
        yield from conformance.check(tier, cases, device=device, most_diagnosed=most)
        return
    kernel = getattr(tier, "latent", None)
    for case in cases:
        if kernel is None:
            yield Result(case, tier.name, "refused", detail=f"{tier.name} has no inner kernel.", level="latent")
        else:
            yield run_latent_case(kernel, case, device=device, name=tier.name, why_not=tier.why_not)


def serve_child(folder: str, descriptor: int, tier_of: TierOf) -> None:
    """Be the child of a run: load the tier with the options that its parent was given, and answer."""

    def load_tier(hello: Mapping[str, Any]) -> Tier:
        take_threads(hello["threads"])
        return tier_of(parse_tier(hello["tier"]), load_settings()[0].model_copy(update=hello["settings"]))

    serve(folder, descriptor, load_tier)


def jobs_of(asked: Asked, has_kernel: bool) -> list[tuple[str, list[Case]]]:
    """Return which cases to run at which level: those named with --case, else the suite's."""
    change = lambda case: replace(case, seed=case.seed + asked.seed, lse=case.lse and asked.lse)
    level = asked.level or ("both" if has_kernel and not asked.cases else "attend")
    levels = ("attend", "latent") if level == "both" else (level,)
    if not asked.cases:
        cases = pinned(map(change, conformance.suite(asked.suite)), parse_pins(asked.pins))
        return [(level, cases) for level in levels]
    jobs = []
    for name in asked.cases:
        id, _, own = name.partition("@")
        if own not in ("", *LEVELS[:2]):
            raise bad("--case", expected="ID, ID@attend or ID@latent", got=repr(name), fix="copy one from a report")
        cases = pinned([change(conformance.find(id))], parse_pins(asked.pins))
        jobs += [(each, cases) for each in ((own,) if own else levels)]
    return jobs


def run_jobs(
    jobs: Sequence[tuple[str, list[Case]]], results: Results, stop: bool, tier: str, tick: Tick
) -> list[Result]:
    """Run all jobs in order, with a progress bar; after a failure with `stop`, the cases left are not run."""
    done: list[Result] = []
    total, stopped = sum(len(cases) for _, cases in jobs), False
    tick(0, total)
    begun = [results(level, cases) for level, cases in jobs]  # with several processes all of them start now
    for (level, cases), running in zip(jobs, begun, strict=True):
        for case in cases:
            if stopped:
                done.append(Result(case, tier, "not_run", detail="stopped at the first failure", level=level))
                continue
            done.append(next(running))
            stopped = stop and done[-1].failed
            tick(len(done), total)
    return done


def isolated(spec: str, asked: Asked) -> bool:
    """Whether a tier runs in a process of its own: as asked, else if it is a stranger's, from a file or a package."""
    if asked.isolate is not None:
        return asked.isolate
    pair = parse_tier(spec)
    names = [pair.decode, pair.prefill] if isinstance(pair, TierPair) else [pair]
    foreign = {entry.name for entry in entry_points(group=GROUP)}
    return any(name.endswith(".py") or name.partition(":")[0] in foreign for name in names)


def command_again(run: Run, asked: Asked, spec: str, name: str) -> str:
    """Return the command that runs one case of one tier again."""
    flags = [word for n, source in run.sources.items() if source == "flag" for word in _flag(run.settings, n)]
    words = ["mla", "check", spec, "--case", name, *flags]
    words += [] if asked.isolate is None else ["--isolate" if asked.isolate else "--no-isolate"]
    return shlex.join(words)


def watch(run: Run, asked: Asked, tier_of: TierOf) -> NoReturn:
    """Run and print again whenever a file of the tiers changes; only Ctrl-C ends it."""
    if run.json is not None:
        raise bad("--json", expected="none beside --watch", got=run.json, fix="drop one of them")
    while True:
        stamp = _stamps(asked.tiers)
        if sys.stdout.isatty():
            print("\x1b[2J\x1b[H", end="")
        try:
            show(check_blocks(checked(run, asked, tier_of), shown=SHOWN))
        except (ValueError, TypeError, ImportError) as error:  # a file that is being edited
            print(f"error: {error}")
        print(f"\nWaiting for {', '.join(asked.tiers)} to change; Ctrl-C ends.", flush=True)
        while _stamps(asked.tiers) == stamp:
            time.sleep(POLL)


def run_faults(run: Run, asked: Asked) -> Outcome:
    """Score the suite on the planted faults: exit code 1 where one is missed."""
    from mla.conformance.zoo import FAULTS
    from mla.conformance.zoo.score import score, summary_of

    levels = {"both": ("attend", "latent"), None: ("attend",)}.get(asked.level, (str(asked.level),))
    suites = ("smoke", "full") if asked.suite != "large" else ("smoke", "full", "large")
    found, faults = [], list(FAULTS.values())
    with progress("check --faults", "faults") as tick:
        for level in levels:
            for caught in score(faults, suites=suites, level=level, device=device_of(run.settings), diagnosed=True):
                found.append(caught)
                tick(len(found), len(faults) * len(levels))
    total = summary_of(found)
    record = {"suites": suites, **total, "results": [caught.record() for caught in found]}
    return Outcome(record, fault_blocks, 1 if total["missed"] else 0)


def _cannot_load(spec: str, loaded: Trial) -> Exception:
    if "Fix:" in loaded.detail:  # the registry's own sentence
        return ValueError(loaded.detail)
    where = f" ({loaded.at})" if loaded.at else ""
    return bad("tier", expected="one that can be loaded", got=f"{spec}: {loaded.detail}{where}", fix="mend the file")


def _notes(answer: Trial) -> list[str]:
    if answer.status == "ran":
        return answer.detail.splitlines()
    return [f"The tier's notes are missing: {answer.status}, {answer.detail}."]


def _flag(settings: RunSettings, name: str) -> Iterable[str]:
    value = getattr(settings, name)
    return f"--{name.replace('_', '-')}", "none" if value is None else str(value)


def _stamps(specs: Sequence[str]) -> Mapping[str, int]:
    return {spec: Path(spec).stat().st_mtime_ns if Path(spec).exists() else 0 for spec in specs}
