"""The pages of commands and settings, from the parser and from mla/settings.py."""

from typing import Any, Literal, get_args, get_origin

import typer
from pieces import table

from mla.cli import EXIT, app
from mla.settings import RunSettings


def default_of(field: Any) -> str:
    """Return a setting's default as a person would write it."""
    value = field.default
    if value is None:
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def kind_of(annotation: Any) -> str:
    """Return what values a setting takes, in words."""
    options = [a for a in get_args(annotation) if a is not type(None)] or [annotation]
    words = []
    for option in options:
        if get_origin(option) is Literal:
            words += [f"`{value}`" for value in get_args(option)]
        elif get_origin(annotation) is Literal:
            words.append(f"`{option}`")
    return ", ".join(dict.fromkeys(words))


def settings_page() -> str:
    """Return reference/settings.md."""
    rows = []
    for name, field in RunSettings.model_fields.items():
        flag = "--tier" if name == "tiers" else f"--{name.replace('_', '-')}"
        kinds = kind_of(field.annotation)
        about = (field.description or "") + (f" One of {kinds}." if kinds else "")
        rows.append((f"`{name}`", f"`{flag}`", f"`MLA_{name.upper()}`", f"`{default_of(field)}`", about))
    text = """---
hide: [toc]
---

# Settings

A run takes its settings in this order, the first that names one wins: a flag, an `MLA_*` variable of the environment,
the TOML file given with `--config`, the default. `mla info` prints each setting with where it came from. In the
environment and on the command line `none` stands for no value. A name that is no setting is refused, with the nearest
one that is.

"""
    example = """
## In a file

```toml
model = "deepseek-v2-lite"
heads = 2
requests = 2
tiers = ["naive:mqa", "paged", { decode = "paged", prefill = "naive:mha" }]
```

A pair is two tiers over one cache: `decode` takes the short queries, `prefill` the others. In the environment lists
are comma separated and a pair is written with a plus sign:

```sh
MLA_TIERS=naive:mqa,decode=paged+prefill=naive:mha mla compare --requests 1
```
"""
    head = ("setting", "flag", "environment", "default", "what it is")
    return text + table(head, rows) + example


def metavar(parameter: Any, context: Any) -> str:
    """Return how a parameter is written on the command line."""
    if parameter.param_type_name == "argument":
        return parameter.metavar or parameter.name.upper()
    names = ", ".join(f"`{n}`" for n in (*parameter.opts, *parameter.secondary_opts))
    return names if parameter.is_flag else f"{names} `{parameter.metavar or parameter.type.name.upper()}`"


def command_section(name: str, command: Any) -> str:
    """Return the section of one command: what it does, usage, arguments and options of its own, settings."""
    context = command.make_context(f"mla {name}", [], resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context))
    parts = [f"## `mla {name}`\n", f"{command.help}\n", f"```text\nmla {name} {usage}\n```\n"]
    own: list[tuple[str, str]] = []
    settings: list[tuple[str, str]] = []
    for parameter in command.get_params(context):
        if parameter.param_type_name == "argument":
            own.append((f"`{metavar(parameter, context)}`", getattr(parameter, "help", "") or ""))
        else:
            text = parameter.help or ""
            shown = parameter.default
            is_setting = parameter.name in RunSettings.model_fields
            if not is_setting and parameter.show_default and shown not in (None, (), []) and not parameter.is_flag:
                text += f" [{shown}]"
            (settings if is_setting else own).append((metavar(parameter, context), text))
    parts.append(table(("option", "what it does"), own))
    if settings:
        parts.append('??? note "Settings that it takes"\n')
        body = table(("flag", "what it is [default]"), settings)
        parts.append("\n".join(f"    {line}".rstrip() for line in body.splitlines()) + "\n")
    return "\n".join(parts)


def commands_page() -> str:
    """Return reference/commands.md."""
    group: Any = typer.main.get_command(app)
    shown = {name: c for name, c in group.commands.items() if not c.hidden}
    overview = table(
        ("command", "what it does"),
        [(f"[`mla {n}`](#mla-{n})", (c.help or "").split("\n\n")[0]) for n, c in shown.items()],
    )
    ends = {code: [w for w, c in EXIT.items() if c == code] for code in sorted(set(EXIT.values()))}
    exits = table(("exit code", "when"), [(code, ", ".join(words)) for code, words in ends.items()])
    text = """
# Commands

`mla` and `python -m mla` are the same. Every command takes `--config FILE` for [settings](settings.md), and `--json
FILE` to write its record, environment and settings included; `-` is standard output. Wrong input is one sentence on
standard error and exit code 2.

"""
    sections = "\n".join(command_section(name, command) for name, command in shown.items())
    return text + overview + "\n" + exits + "\n" + sections


def pages() -> dict[str, str]:
    """Return both pages."""
    return {"reference/commands.md": commands_page(), "reference/settings.md": settings_page()}
