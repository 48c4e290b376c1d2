"""Readers of traces, each malformed line, the package's own trace, and the hidden-state source."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mla.serving import SMALL_TRACE, HiddenSource, Request, read_azure, read_mooncake, read_trace

TRACES = Path(__file__).parents[2] / "shared" / "traces"
GOOD = '{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}\n'
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = "2023-11-16 18:17:03.9799600,600,10\n"


def trace(name: str) -> Path:
    if not (TRACES / name).exists():
        pytest.skip(f"{name} is not beside the repository")
    return TRACES / name


def write(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode())
    return path


def test_mooncake_line_becomes_a_request(tmp_path: Path) -> None:
    path = write(tmp_path, "t.jsonl", GOOD + GOOD.replace("5", "7.5", 1).rstrip("\n"))
    assert read_mooncake(path) == [Request(0, 5, 600, 3, (0, 1), 512), Request(1, 7.5, 600, 3, (0, 1), 512)]
    assert read_mooncake(path, limit=1) == read_mooncake(path)[:1]


def test_mooncake_block_size_by_header_or_keyword(tmp_path: Path) -> None:
    line = '{"timestamp": 0, "input_length": 65, "output_length": 1, "hash_ids": [0, 1, 2]}\n'
    expected = [Request(0, 0, 65, 1, (0, 1, 2), 32)]
    assert read_mooncake(write(tmp_path, "a.jsonl", '{"block_size": 32}\n' + line)) == expected
    assert read_mooncake(write(tmp_path, "b.jsonl", line), block_size=32) == expected
    with pytest.raises(ValueError, match=r"block_size: expected 32, as .*line 1 says, got 16"):
        read_mooncake(tmp_path / "a.jsonl", block_size=16)


def test_azure_rows_become_requests_that_share_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, "t.csv", (HEADER + ROW + "2023-11-16 18:17:05.0000000,512,1").replace("\n", "\r\n"))
    first, second = read_azure(path)
    assert first == Request(0, 0.0, 600, 10, ((0, 0), (0, 1)), 512)
    assert second == Request(1, 1020.04, 512, 1, ((1, 0),), 512)


def test_azure_dates_with_a_zone(tmp_path: Path) -> None:
    rows = "2024-05-10 00:00:00.009930+00:00,1,1\n2024-05-10 02:00:00.010930+02:00,1,1\n"
    assert [r.arrival_ms for r in read_azure(write(tmp_path, "t.csv", HEADER + rows))] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda s: "not json\n", "expected one JSON object, got 'not json'"),
        (lambda s: "[1, 2]\n", "expected one JSON object"),
        (lambda s: "\n", "expected a request, got an empty line"),
        (lambda s: s.replace('"input_length"', '"input_len"'), r"missing \['input_length'\], surplus \['input_len'\]"),
        (lambda s: s.replace("}", ', "type": "text"}'), r"missing \[\], surplus \['type'\]"),
        (lambda s: s.replace("}", ', "timestamp": 9}'), "every key once"),
        (lambda s: s.replace("600", "-600"), "input_length: expected an int of at least 1, got -600"),
        (lambda s: s.replace("600", '"600"'), "input_length: expected an int of at least 1, got '600'"),
        (lambda s: s.replace("600", "600.0"), "input_length: expected an int of at least 1, got 600.0"),
        (lambda s: s.replace(": 3", ": 0"), "output_length: expected an int of at least 1, got 0"),
        (lambda s: s.replace(": 3", ": true"), "output_length: expected an int of at least 1, got True"),
        (lambda s: s.replace("[0, 1]", "[0]"), r"hash_ids\): expected ceil\(600 / 512\) = 2 ids, got 1"),
        (lambda s: s.replace("[0, 1]", "[0, 1, 2]"), "= 2 ids, got 3"),
        (lambda s: s.replace("[0, 1]", '[0, "1"]'), "hash_ids: expected a list of ints"),
        (lambda s: s.replace("[0, 1]", "7"), "hash_ids: expected a list of ints, got 7"),
        (lambda s: s.replace(": 5", ": 4"), "expected arrivals in order, got 4.* after 5"),
        (lambda s: s.replace(": 5", ": NaN"), "timestamp.*expected 0 or more, and finite, got nan"),
        (lambda s: s.replace(": 5", ": null"), "timestamp.*expected a number, got None"),
        (lambda s: '{"block_size": 32}\n', "missing .*surplus"),
    ],
)
def test_mooncake_malformed_line(tmp_path: Path, change: Callable[[str], str], complaint: str) -> None:
    path = write(tmp_path, "t.jsonl", GOOD + change(GOOD) + GOOD)
    with pytest.raises(ValueError, match=rf"t\.jsonl, line 2.*{complaint}.*Fix: "):
        read_mooncake(path)
    assert len(read_mooncake(path, limit=1)) == 1  # lines past the limit are not read


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("2023-11-16 18:17:04,600\n", "expected 3 cells, got 2"),
        ("2023-11-16 18:17:04,600,10,9\n", "expected 3 cells, got 4"),
        ("2023-11-16 25:17:04,600,10\n", "TIMESTAMP: expected a date"),
        ("16.11.2023,600,10\n", "TIMESTAMP: expected a date"),
        ("2023-11-16 18:17:04,six,10\n", "ContextTokens: expected an int of at least 1, got 'six'"),
        ("2023-11-16 18:17:04,-6,10\n", "ContextTokens: expected an int of at least 1, got '-6'"),
        ("2023-11-16 18:17:04,600,0\n", "GeneratedTokens: expected an int of at least 1, got '0'"),
        ("2023-11-16 18:17:04,600,\n", "GeneratedTokens: expected an int of at least 1, got ''"),
        ("2023-11-16 18:17:03.9,600,10\n", "expected arrivals in order"),
        ("\n", "got an empty line"),
    ],
)
def test_azure_malformed_line(tmp_path: Path, row: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=rf"t\.csv, line 3.*{complaint}.*Fix: "):
        read_azure(write(tmp_path, "t.csv", HEADER + ROW + row))


def test_azure_arrivals_backwards_after_the_first_row(tmp_path: Path) -> None:
    rows = ROW + "2023-11-16 18:17:09,6,1\n2023-11-16 18:17:08,6,1\n"
    with pytest.raises(ValueError, match=r"line 4: expected arrivals in order"):
        read_azure(write(tmp_path, "t.csv", HEADER + rows))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "line 1: expected a trace, got an empty file"),
        ("TIMESTAMP,ContextTokens\n", "line 1: expected the header"),
        (ROW, "line 1: expected the header"),
        (HEADER, "line 2: expected a request, got the end of the file"),
    ],
)
def test_azure_bad_header_or_empty_file(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read_azure(write(tmp_path, "t.csv", text))


def test_mooncake_empty_file_and_lonely_header(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 1: expected a trace, got an empty file"):
        read_mooncake(write(tmp_path, "a.jsonl", ""))
    with pytest.raises(ValueError, match="line 2: expected a request, got the end of the file"):
        read_mooncake(write(tmp_path, "b.jsonl", '{"block_size": 32}\n'))
    with pytest.raises(ValueError, match="line 1: block_size: expected an int of at least 1, got 0"):
        read_mooncake(write(tmp_path, "c.jsonl", '{"block_size": 0}\n' + GOOD))


def test_bad_encoding_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(GOOD.encode() + b"\xff\n")
    with pytest.raises(ValueError, match="line 2: expected UTF-8 text"):
        read_mooncake(path)


def test_read_trace_chooses_by_suffix_then_first_line(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", GOOD), ("b.csv", HEADER + ROW), ("c.txt", GOOD), ("d", HEADER + ROW)):
        assert [r.input_length for r in read_trace(write(tmp_path, name, text))] == [600]
    with pytest.raises(ValueError, match=r"e\.txt, line 1: expected a Mooncake trace .* got 'hello"):
        read_trace(write(tmp_path, "e.txt", "hello\n"))
    with pytest.raises(ValueError, match="the header"):
        read_trace(write(tmp_path, "f.csv", GOOD))


@pytest.mark.parametrize("limit", [0, -1, 2.0, True])
def test_limit_must_be_positive(tmp_path: Path, limit: int) -> None:
    with pytest.raises((ValueError, TypeError), match="limit: expected an int of at least 1"):
        read_mooncake(write(tmp_path, "t.jsonl", GOOD), limit=limit)


def test_request_checks_itself() -> None:
    with pytest.raises(ValueError, match=r"block_ids .*: expected ceil\(9 / 4\) = 3 ids, got 2"):
        Request(0, 0.0, 9, 1, (1, 2), 4)
    with pytest.raises(TypeError, match=r"block_ids .*: expected a tuple, got list"):
        Request(0, 0.0, 9, 1, [1, 2, 3], 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"ints, strings or tuples of these, got 1\.0"):
        Request(0, 0.0, 3, 1, (1.0,), 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="output_length"):
        Request(0, 0.0, 3, 1.5, (1,), 4)  # type: ignore[arg-type]


def test_small_trace_has_what_it_promises() -> None:
    requests = read_trace(SMALL_TRACE)
    assert len(requests) == 10
    assert all(40 <= r.input_length <= 700 and 4 <= r.output_length <= 24 for r in requests)
    assert sum(r.block_ids in [q.block_ids for q in requests[: r.id]] for r in requests) == 1  # one full-prompt hit
    twin = requests[2]
    assert (twin.block_ids, twin.input_length) == (requests[0].block_ids, requests[0].input_length)
    assert twin.input_length % 64  # a partial tail, so it is copied on write


@pytest.mark.parametrize("name", ["mooncake_conversation_200.jsonl", "mooncake_synthetic_100.jsonl"])
def test_public_mooncake_trace(name: str) -> None:
    rows = [json.loads(line) for line in trace(name).read_text().splitlines()]
    got = [(r.arrival_ms, r.input_length, r.output_length, list(r.block_ids)) for r in read_trace(trace(name))]
    assert got == [(r["timestamp"], r["input_length"], r["output_length"], r["hash_ids"]) for r in rows]


@pytest.mark.parametrize(("name", "count"), [("azure_conversation_400.csv", 400), ("azure_code_200.csv", 200)])
def test_public_azure_trace(name: str, count: int) -> None:
    requests = read_trace(trace(name))
    rows = [line.split(",") for line in trace(name).read_text().split()[1:] if "," in line]
    assert [[r.input_length, r.output_length] for r in requests] == [[int(p), int(g)] for _, p, g in rows]
    assert len(requests) == count
    assert len({id for r in requests for id in r.block_ids}) == sum(math.ceil(r.input_length / 512) for r in requests)


def test_azure_arrival_by_hand() -> None:
    requests = read_trace(trace("azure_conversation_400.csv"), limit=2)
    assert [r.arrival_ms for r in requests] == [0.0, 4314.579]  # 50.9951690 - 46.6805900 s


A = Request(0, 0.0, 10, 40, (7, 8, 9), 4)
B = Request(1, 0.0, 9, 40, (7, 8, 11), 4)


def test_hidden_states_are_equal_where_blocks_are_and_only_there() -> None:
    source = HiddenSource(5, seed=3)
    a, b = source.tokens(A, 0, 50), source.tokens(B, 0, 49)
    assert a.shape == (50, 5)
    assert a.dtype == torch.float32
    assert torch.equal(a[:8], b[:8])
    rows = torch.cat([a, b[8:]])
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)  # all others differ, the generated ones too


def test_hidden_states_do_not_depend_on_order_chunks_or_memory() -> None:
    whole = HiddenSource(5, seed=3).tokens(A, 0, 50)
    tiny = HiddenSource(5, seed=3, cache_bytes=1)  # remembers one block only
    for start, stop in ((49, 50), (9, 27), (0, 1), (3, 11), (0, 50), (10, 10)):
        assert torch.equal(tiny.tokens(A, start, stop), whole[start:stop])
    assert not torch.equal(HiddenSource(5, seed=4).tokens(A, 0, 50), whole)


def test_hidden_states_are_the_same_in_another_process() -> None:
    code = (
        "from mla.serving import HiddenSource, Request;"
        "print(HiddenSource(2, seed=1).tokens(Request(0, 0.0, 3, 1, (('a', 1),), 4), 0, 4).tolist())"
    )
    env = {**os.environ, "PYTHONHASHSEED": "12345"}
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout
    here = HiddenSource(2, seed=1).tokens(Request(0, 0.0, 3, 1, (("a", 1),), 4), 0, 4).tolist()
    assert there == f"{here}\n"


def test_hidden_states_are_standard_normal_and_rounded_last() -> None:
    request = Request(0, 0.0, 512, 1, (0,), 512)
    rows = HiddenSource(256).tokens(request, 0, 512)
    assert abs(rows.mean().item()) < 5 / rows.numel() ** 0.5  # 5 sigma of the mean of that many draws
    assert abs(rows.var().item() - 1) < 5 * (2 / rows.numel()) ** 0.5  # and of their variance
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(HiddenSource(256, dtype=dtype).tokens(request, 0, 512), rows.to(dtype))


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 51)])
def test_hidden_positions_outside_the_request(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="start, stop: expected 0 <= start <= stop <= 50"):
        HiddenSource(5).tokens(A, start, stop)


def test_hidden_source_arguments() -> None:
    with pytest.raises(ValueError, match="hidden_size: expected an int of at least 1, got 0"):
        HiddenSource(0)
    with pytest.raises(ValueError, match="dtype: expected a floating dtype"):
        HiddenSource(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("path", "kind", "text"),
    [
        ("absent.jsonl", ValueError, r"absent\.jsonl: expected a file with a trace, got no such file\. Fix: "),
        ("", ValueError, r": expected a file with a trace, got a folder\. Fix: "),
        (None, TypeError, r"^path: expected the path of a trace, got None\. Fix: "),
    ],
)
@pytest.mark.parametrize("read", [read_trace, read_mooncake, read_azure])
def test_what_is_no_file_is_named(tmp_path: Path, read: Callable, path: str | None, kind: type, text: str) -> None:
    with pytest.raises(kind, match=text):
        read(path if path is None else tmp_path / path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
def test_deeply_nested_json_names_file_and_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"deep\.jsonl, line 1: expected one JSON object, got .* Fix: "):
        read_mooncake(write(tmp_path, "deep.jsonl", text + "\n"))
