"""Settings of a run. A flag wins over `MLA_*` in the environment, that over a TOML file, that over the default."""

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from mla.errors import bad

Source = str
"""Where a setting came from: `flag`, `environment MLA_X`, `file PATH` or `default`."""

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class TierPair:
    """Two tiers over one cache: `decode` takes the decode and verify rows, `prefill` the others."""

    decode: str
    prefill: str

    def __str__(self) -> str:
        return f"decode={self.decode}+prefill={self.prefill}"


def _between(least: int, most: int) -> Callable[[Any], int]:
    # Not pydantic's own int: it reads True as 1 and 64.0 as 64.
    def check(value: Any) -> int:
        number = int(value) if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,99}", value.strip()) else value
        if type(number) is not int or not least <= number <= most:
            raise ValueError(f"a whole number of at least {least}, at most {most}")
        return number

    return check


def _device(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[a-z]+(:[0-9]+)?", value):
        raise ValueError("a torch device such as 'cpu', 'cuda' or 'cuda:0'")
    return value


def _path(value: Any) -> Path:
    if not isinstance(value, str | Path):
        raise ValueError("the path of a file")
    return Path(value)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _split(pair: str) -> list[tuple[str, str]]:
    parts = [part.partition("=") for part in pair.split("+")]
    return [(key.strip(), name.strip()) for key, _, name in parts]


def _tier(value: Any) -> str | TierPair:
    if isinstance(value, TierPair):
        return value
    if isinstance(value, Mapping) or (isinstance(value, str) and "=" in value):
        halves = sorted(value.items() if isinstance(value, Mapping) else _split(value))
        if [key for key, _ in halves] == ["decode", "prefill"] and all(_is_name(name) for _, name in halves):
            return TierPair(**dict(halves))
    elif _is_name(value):
        return value.strip()
    raise ValueError(
        "a tier name such as 'paged', or a pair, in TOML {decode = 'paged', prefill = 'naive:mha'},"
        " elsewhere decode=paged+prefill=naive:mha"
    )


def parse_tier(text: str) -> str | TierPair:
    """Read a tier as the command line names it, or a pair, decode=paged+prefill=naive:mha; raises ValueError."""
    try:
        return _tier(text)
    except ValueError as error:
        raise bad("tier", expected=str(error), got=repr(text), fix="see `mla tiers`") from None


def _tiers(value: Any) -> tuple[str | TierPair, ...]:
    if isinstance(value, str):
        value = value.split(",")
    tiers = tuple(_tier(item) for item in (value if isinstance(value, list | tuple) else [value]))
    if not tiers or len(set(tiers)) != len(tiers):
        raise ValueError("at least one tier, each named once")
    return tiers


Count = Annotated[int, BeforeValidator(_between(1, 2**31 - 1))]
Heads = Annotated[int, BeforeValidator(_between(1, 65536))]
Threads = Annotated[int, BeforeValidator(_between(1, 4096))]
Seed = Annotated[int, BeforeValidator(_between(0, 2**63 - 1))]


class RunSettings(BaseSettings):
    """One run of `mla compare` or one of its friends; `load_settings` makes it. Frozen."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix="MLA_", enable_decoding=False, env_parse_none_str="none"
    )

    model: str = Field("toy", description="Name of a preset, or path of a Hugging Face config.json.")
    heads: Heads | None = Field(None, description="Query heads in place of the model's own; none: the model's.")
    trace: Annotated[Path, BeforeValidator(_path)] | None = Field(
        None, description="Request trace, Mooncake JSONL or Azure CSV; none: the packaged one."
    )
    requests: Count | None = Field(None, description="Replay only the first so many requests; none: all.")
    tiers: Annotated[tuple[str | TierPair, ...], BeforeValidator(_tiers)] = Field(
        ("naive:mha", "naive:mqa", "paged", TierPair("paged", "naive:mha"), "template"),
        description="Tiers to run: names, paths of tier files, or decode/prefill pairs. Comma separated outside TOML.",
    )
    dtype: Dtype = Field("float32", description="Type of weights, queries and outputs.")
    cache_dtype: Dtype | None = Field(None, description="Type of the cached latent rows; none: dtype.")
    page_size: Count = Field(64, description="Tokens in a page of the cache.")
    num_pages: Count | None = Field(None, description="Pages in the pool; none: as many as the trace needs.")
    token_budget: Count = Field(2048, description="New tokens in one step, at most.")
    max_running: Count = Field(32, description="Requests that run at once, at most.")
    max_workspace_tokens: Count | None = Field(
        None, description="Cached rows that a tier gathers or expands at once, at least a page; none: by the formula."
    )
    form: Literal["auto", "mha", "mqa"] = Field(
        "auto", description="Form of paged and triton: expanded (mha), absorbed (mqa), or chosen per request (auto)."
    )
    tune_file: Annotated[Path, BeforeValidator(_path)] | None = Field(
        None, description="Times of both forms that `mla tune` wrote, for form = auto; none: by counted work."
    )
    max_model_len: Count | None = Field(
        None, description="Longest request, prompt and output together; none: the longest of the trace."
    )
    seed: Seed = Field(0, description="Seed of weights and hidden states.")
    device: Annotated[str, BeforeValidator(_device)] = Field("cpu", description="Torch device: cpu, cuda, cuda:0, ...")
    threads: Threads | None = Field(
        1,
        description="CPU threads; none: torch's choice. More than 1 slows small models, above all on shared cores.",
    )

    @model_validator(mode="after")
    def _workspace_holds_a_page(self) -> "RunSettings":
        rows = self.max_workspace_tokens
        if rows is not None and rows < self.page_size:
            raise bad(
                "max_workspace_tokens",
                expected=f"at least one page of {self.page_size} tokens",
                got=str(rows),
                fix=f"raise it to {self.page_size}, or make page_size smaller",
            )
        return self


def load_settings(
    config: Path | None = None, overrides: Mapping[str, Any] | None = None
) -> tuple[RunSettings, dict[str, Source]]:
    """Return the settings of a run and, for every field, where its value came from.

    `config` is a TOML file whose top-level keys are the fields of `RunSettings`; `overrides` are the flags, in which
    None means "not given" and "none" no value. Raises ValueError, a sentence for each fault: an unknown name in the
    file, in the environment (`MLA_*`) or among the flags, with the nearest known name; a value that does not fit; a
    file that cannot be read.
    """
    file = {} if config is None else _read_toml(config)
    environment = EnvSettingsSource(RunSettings)()
    flags = {key: _none(key, value) for key, value in (overrides or {}).items() if value is not None}
    variables = [key for key in os.environ if key.upper().startswith("MLA_")]
    _raise_all(
        [*_unknown(file, f"file {config}"), *_unknown(variables, "environment", "MLA_"), *_unknown(flags, "flag")]
    )

    given: dict[str, tuple[Any, Source]] = {key: (value, f"file {config}") for key, value in file.items()}
    given |= {key: (value, f"environment MLA_{key.upper()}") for key, value in environment.items()}
    given |= {key: (value, "flag") for key, value in flags.items()}
    _raise_all([_wrong(key, "a value", value, source) for key, (value, source) in given.items() if value == ""])
    try:
        settings = RunSettings(**{key: value for key, (value, _) in given.items()})
    except ValidationError as error:
        _raise_all([_sentence(detail, given) for detail in error.errors()])
        raise
    return settings, {key: given[key][1] if key in given else "default" for key in RunSettings.model_fields}


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        fix = "name a file that exists" if isinstance(error, OSError) else "mend it at that place"
        raise bad(str(path), expected="a readable TOML file", got=str(error), fix=fix) from None


def _none(key: str, value: Any) -> Any:
    # As in the environment: the only way to say on the command line that a value of the file shall not hold.
    field = RunSettings.model_fields.get(key)
    return None if value == "none" and field is not None and type(None) in get_args(field.annotation) else value


def _unknown(keys: Iterable[str], source: Source, prefix: str = "") -> list[Exception]:
    known = {(prefix + name).upper() if prefix else name: name for name in RunSettings.model_fields}
    faults = []
    for key in keys:
        if (key.upper() if prefix else key) not in known:
            near = difflib.get_close_matches(key[len(prefix) :].lower(), known.values(), n=1)
            names = [shown for shown, name in known.items() if not near or name == near[0]]
            fix = f"write {names[0]}" if near else f"use one of {', '.join(names)}"
            faults.append(bad(key, expected="the name of a setting", got=f"an unknown name ({source})", fix=fix))
    return faults


def _wrong(key: str, expected: str, value: Any, source: Source) -> Exception:
    default = RunSettings.model_fields[key].default
    default = "none" if default is None else repr(default)
    fix = f"give such a value, or leave {key} out for its default, {default}"
    return bad(key, expected=expected, got=f"{value!r} ({source})", fix=fix)


def _sentence(detail: Any, given: Mapping[str, tuple[Any, Source]]) -> Exception:
    own = detail.get("ctx", {}).get("error")
    if not detail["loc"]:
        return own
    key = str(detail["loc"][0])
    expected = str(own) if own else detail["msg"].removeprefix("Input should be ")
    return _wrong(key, expected, *given[key])


def _raise_all(faults: list[Exception]) -> None:
    if len(faults) == 1:
        raise faults[0] from None
    if faults:
        raise ValueError("\n".join(map(str, faults))) from None
