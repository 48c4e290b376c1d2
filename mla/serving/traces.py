"""Request traces: what arrives when, how long it is, and which prefixes are shared.

Two public formats are read: Mooncake JSONL (FAST'25) and Azure LLM inference CSV (2023 and 2024). A line that is not
exactly right raises with file and line number; nothing is skipped.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from mla.errors import bad

T = TypeVar("T")
BlockId = int | str | tuple[int | str, ...]

MOONCAKE_BLOCK = 512
SMALL_TRACE = Path(__file__).with_name("data") / "small_trace.jsonl"

_MOONCAKE_KEYS = {"timestamp", "input_length", "output_length", "hash_ids"}
_AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
_AZURE_DATE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(\.\d{1,9})?([+-]\d\d:\d\d)?", re.ASCII)
_AZURE_COUNT = re.compile(r"[1-9]\d{0,17}", re.ASCII)


@dataclass(frozen=True)
class Request:
    """One request: `input_length` prompt tokens arrive at `arrival_ms`, `output_length` tokens are generated.

    The prompt is cut in blocks of `block_size` tokens, the last one perhaps partial; two prompts whose first k
    `block_ids` are equal have the same tokens there. Ids are ints, strings or tuples of these. Raises TypeError for a
    wrong type; ValueError for a length below 1, a time that is negative or not finite, or a number of ids other than
    ceil(input_length / block_size).
    """

    id: int
    arrival_ms: float
    input_length: int
    output_length: int
    block_ids: tuple[BlockId, ...]
    block_size: int = MOONCAKE_BLOCK

    def __post_init__(self) -> None:
        for name in ("input_length", "output_length", "block_size"):
            _count(name, getattr(self, name))
        name, time = "arrival_ms (timestamp)", self.arrival_ms
        if type(time) not in (int, float):
            raise bad(name, expected="a number", got=repr(time), fix="pass milliseconds", kind=TypeError)
        if not 0 <= time < math.inf:
            raise bad(name, expected="0 or more, and finite", got=repr(time), fix="count from the start of the trace")
        name, ids = "block_ids (hash_ids)", self.block_ids
        if type(ids) is not tuple:
            raise bad(name, expected="a tuple", got=type(ids).__name__, fix="pass tuple(ids)", kind=TypeError)
        for id in ids:
            if any(type(part) not in (int, str) for part in (id if type(id) is tuple else (id,))):
                raise bad(
                    name, expected="ints, strings or tuples of these", got=repr(id), fix="int(id)", kind=TypeError
                )
        if len(ids) != (blocks := math.ceil(self.input_length / self.block_size)):
            raise bad(
                name,
                expected=f"ceil({self.input_length} / {self.block_size}) = {blocks} ids",
                got=str(len(ids)),
                fix="correct the length, the ids or the block size",
            )


def read_trace(path: str | Path, limit: int | None = None) -> list[Request]:
    """Read at most `limit` requests of a trace whose format follows from the suffix, or else from the first line.

    `.jsonl` is Mooncake, `.csv` is Azure; any other file is Mooncake when it starts with `{` and Azure when it starts
    with `TIMESTAMP`. Raises ValueError for anything else and for a path that is no file, TypeError for what is no path,
    and what `read_mooncake` and `read_azure` raise.
    """
    path = _file(path)
    suffix = path.suffix.lower()
    with path.open("rb") as file:
        start = file.readline(64)
    if suffix == ".jsonl" or (suffix != ".csv" and start.startswith(b"{")):
        return read_mooncake(path, limit)
    if suffix == ".csv" or start.startswith(b"TIMESTAMP"):
        return read_azure(path, limit)
    raise bad(
        f"{path}, line 1",
        expected="a Mooncake trace (.jsonl, lines of JSON objects) or an Azure trace (.csv, header TIMESTAMP,...)",
        got=repr(start.decode("utf-8", "replace")),
        fix="give the file its suffix, or call read_mooncake or read_azure",
    )


def read_mooncake(path: str | Path, limit: int | None = None, block_size: int | None = None) -> list[Request]:
    """Read at most `limit` requests of a Mooncake trace; equal hash ids are equal blocks of `block_size` tokens.

    Each line is an object with exactly the keys timestamp (ms), input_length, output_length, hash_ids. The block size
    is 512 tokens unless the keyword or a first line such as `{"block_size": 32}` says otherwise. Raises ValueError
    naming file, line and fault. Source: Mooncake (arXiv 2407.00079) and its released traces.
    """
    if block_size is not None:
        _count("block_size", block_size)
    lines = _lines(path)
    where, text = next(lines)
    header = _json_object(where, text) if '"block_size"' in text else {}
    if set(header) == {"block_size"}:
        stated = _located(where, lambda: _count("block_size", header["block_size"]))
        if block_size not in (None, stated):
            raise bad("block_size", expected=f"{stated}, as {where} says", got=repr(block_size), fix="leave it out")
        block_size = stated
    else:
        lines = _lines(path)
    size = block_size or MOONCAKE_BLOCK

    def parse(id: int, where: str, text: str) -> Request:
        row = _json_object(where, text)
        if set(row) != _MOONCAKE_KEYS:
            raise bad(
                where,
                expected=f"the keys {sorted(_MOONCAKE_KEYS)}",
                got=f"missing {sorted(_MOONCAKE_KEYS - set(row))}, surplus {sorted(set(row) - _MOONCAKE_KEYS)}",
                fix="correct or delete the line",
            )
        ids = row["hash_ids"]
        if type(ids) is not list or any(type(x) is not int for x in ids):
            raise bad(f"{where}: hash_ids", expected="a list of ints", got=repr(ids)[:80], fix="correct the line")
        return Request(id, row["timestamp"], row["input_length"], row["output_length"], tuple(ids), size)

    return _requests(path, lines, limit, parse)


def read_azure(path: str | Path, limit: int | None = None) -> list[Request]:
    """Read at most `limit` requests of an Azure LLM inference trace (TIMESTAMP, ContextTokens, GeneratedTokens).

    Arrival counts from the first row. The format says nothing of prefixes, so every request gets block ids of its own
    and nothing is shared. Raises ValueError naming file, line and fault. Source: AzurePublicDataset, LLM inference.
    """
    lines = _lines(path)
    where, text = next(lines)
    if text != _AZURE_HEADER:
        raise bad(where, expected=f"the header {_AZURE_HEADER}", got=repr(text[:80]), fix="restore the header")
    first: datetime | None = None

    def parse(id: int, where: str, text: str) -> Request:
        nonlocal first
        cells = text.split(",")
        if len(cells) != 3:
            raise bad(where, expected="3 cells", got=f"{len(cells)} in {text[:80]!r}", fix="correct or delete the line")
        date = _date(f"{where}: TIMESTAMP", cells[0])
        first = first or date
        for name, cell in zip(_AZURE_HEADER.split(",")[1:], cells[1:], strict=True):
            if not _AZURE_COUNT.fullmatch(cell):
                raise bad(f"{where}: {name}", expected="an int of at least 1", got=repr(cell), fix="correct the line")
        prompt, output = int(cells[1]), int(cells[2])
        blocks = tuple((id, k) for k in range(math.ceil(prompt / MOONCAKE_BLOCK)))
        arrival = (date - first) / timedelta(milliseconds=1)
        if arrival < 0:
            raise _backwards(where, cells[0])
        return Request(id, arrival, prompt, output, blocks)

    return _requests(path, lines, limit, parse)


def _requests(
    path: str | Path, lines: Iterator[tuple[str, str]], limit: int | None, parse: Callable[[int, str, str], Request]
) -> list[Request]:
    if limit is not None:
        _count("limit", limit)
    requests: list[Request] = []
    for where, text in islice(lines, limit):
        request = _located(where, lambda: parse(len(requests), where, text))  # noqa: B023
        if requests and request.arrival_ms < requests[-1].arrival_ms:
            raise _backwards(where, f"{request.arrival_ms} ms after {requests[-1].arrival_ms} ms")
        requests.append(request)
    if not requests:
        raise bad(f"{path}, line 2", expected="a request", got="the end of the file", fix="add requests")
    return requests


def _file(path: str | Path) -> Path:
    if not isinstance(path, str | Path):
        raise bad("path", expected="the path of a trace", got=repr(path), fix="pass a str or a Path", kind=TypeError)
    path = Path(path)
    if not path.is_file():
        got = "a folder" if path.is_dir() else "no such file"
        raise bad(str(path), expected="a file with a trace", got=got, fix="check the path")
    return path


def _lines(path: str | Path) -> Iterator[tuple[str, str]]:
    """Yield ("file, line n", text without its line end); raise on an empty file, an empty line or a bad encoding."""
    number = 0
    with _file(path).open("rb") as file:
        for number, raw in enumerate(file, 1):
            where = f"{path}, line {number}"
            try:
                text = raw.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise bad(where, expected="UTF-8 text", got=str(error), fix="save the file as UTF-8") from None
            if not text.strip():
                raise bad(where, expected="a request", got="an empty line", fix="delete the line")
            yield where, text
    if number == 0:
        raise bad(f"{path}, line 1", expected="a trace", got="an empty file", fix="pass another file")


def _located(where: str, make: Callable[[], T]) -> T:
    """Whatever is wrong with a value of a file is a ValueError that starts with file and line."""
    try:
        return make()
    except (TypeError, ValueError) as error:
        raise error if where in str(error) else ValueError(f"{where}: {error}") from None


def _json_object(where: str, text: str) -> dict[str, Any]:
    try:
        pairs = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError) as error:
        raise bad(where, expected="one JSON object", got=f"{text[:80]!r} ({error})", fix="correct the line") from None
    if not text.lstrip().startswith("{"):
        raise bad(where, expected="one JSON object", got=repr(text[:80]), fix="correct or delete the line")
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        raise bad(where, expected="every key once", got=f"the keys {names}", fix="delete the repeated key")
    return dict(pairs)


def _count(name: str, value: object) -> int:
    if type(value) is not int:
        raise bad(name, expected="an int of at least 1", got=repr(value), fix=f"pass {name}=1 or more", kind=TypeError)
    if value < 1:
        raise bad(name, expected="an int of at least 1", got=repr(value), fix=f"pass {name}=1 or more")
    return value


def _date(name: str, text: str) -> datetime:
    match = _AZURE_DATE.fullmatch(text)
    try:
        date = datetime.fromisoformat(match[1] + (match[2] or "")[:7] + (match[3] or "")) if match else None
    except ValueError:
        date = None
    if date is None:
        raise bad(name, expected="a date such as 2023-11-16 18:17:03.9799600", got=repr(text), fix="correct the line")
    return date if date.tzinfo else date.replace(tzinfo=UTC)


def _backwards(where: str, got: str) -> Exception:
    return bad(where, expected="arrivals in order", got=got, fix="sort the file by time")
