"""Make a command of a function: every setting a flag, `--config` and `--json`, and wrong input a sentence."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from mla.commands.environment import environment, invocation
from mla.commands.output import Block, check_target, sentences, show, write
from mla.settings import RunSettings, Source, load_settings


@dataclass(frozen=True)
class Run:
    """The settings of a run and where each came from, and where its record goes (`--json`)."""

    settings: RunSettings
    sources: Mapping[str, Source]
    json: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What a command found: its record, how the completed record reads to a person, and the exit code."""

    record: Mapping[str, Any]
    blocks: Callable[[Mapping[str, Any]], Sequence[Block]]
    exit: int = 0


Function = Callable[..., Outcome]


def command(app: typer.Typer, names: Sequence[str], **defaults: Any) -> Callable[[Function], Function]:
    """Register a function (run, ...) -> Outcome as a command that takes the settings `names` as flags.

    The first parameter is the Run, the others are arguments and options of its own. `defaults` replace the default of
    a setting in this command. The record is completed with the environment and every setting with its source.
    """

    def decorate(function: Function) -> Function:
        title = function.__name__

        def run(config: Path | None, json: str | None, **given: Any) -> None:
            with sentences():
                check_target(json)
                ready = _load(config, {name: given.pop(name) for name in names}, title, defaults, json)
                take_threads(ready.settings.threads)
                outcome = function(ready, **given)
                head: dict[str, Any] = {"command": title, "invocation": invocation(), "exit": outcome.exit}
                head["environment"] = environment(ready.settings.device)
                record = {**head, "settings": _settings_record(ready), **outcome.record}
                write(record, json)
                show(outcome.blocks(record), stderr=json == "-")
            raise typer.Exit(outcome.exit)

        own = list(inspect.signature(function).parameters.values())[1:]
        parameters = [*own, *(_flag(name, defaults) for name in names), CONFIG, JSON]
        run.__doc__ = function.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(title)(run)
        return function

    return decorate


def _keyword(name: str, kind: Any, *words: str, metavar: str, help: str) -> inspect.Parameter:
    option = typer.Option(*words, metavar=metavar, help=help, show_default=False)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


CONFIG = _keyword("config", Path | None, "--config", metavar="FILE", help="TOML file of settings.")
JSON = _keyword("json", str | None, "--json", metavar="FILE", help="Write the record as JSON; - for standard output.")


def _flag(name: str, defaults: Mapping[str, Any]) -> inspect.Parameter:
    """A setting as an option that hands its text on: `load_settings` reads it, and says what is wrong with it."""
    field = RunSettings.model_fields[name]
    default = defaults.get(name, field.default)
    shown = ", ".join(map(str, default)) if isinstance(default, tuple) else "none" if default is None else default
    help = f"{field.description} [{shown}]"
    if name == "tiers":
        return _keyword(name, list[str] | None, "--tier", metavar="TIER", help=f"{help} May be repeated.")
    kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if get_origin(kind) is Literal]
    metavar = "|".join(get_args(kinds[0])) if kinds else "VALUE"
    return _keyword(name, str | None, f"--{name.replace('_', '-')}", metavar=metavar, help=help)


def _load(config: Path | None, flags: dict[str, Any], title: str, defaults: Mapping[str, Any], json: str | None) -> Run:
    if flags.get("tiers") is not None:
        flags["tiers"] = ",".join(flags["tiers"]) or None  # one list, whether --tier is repeated or holds commas
    settings, sources = load_settings(config, flags)
    changed = {name: value for name, value in defaults.items() if sources[name] == "default"}
    sources |= dict.fromkeys(changed, f"default of mla {title}")
    return Run(settings.model_copy(update=changed), sources, json)


def take_threads(threads: int | None) -> None:
    """Set the number of CPU threads; None leaves torch's choice."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)


def _settings_record(run: Run) -> dict[str, Any]:
    return {name: {"value": getattr(run.settings, name), "source": source} for name, source in run.sources.items()}
