"""Compare the stand-in of the tests with the real FlashInfer: the same inputs to both, on a GPU, and a record of it.

    python docs/tools/flashinfer_standin.py docs/results/flashinfer-standin-h200.json --without "fa2 prefill"

Both start from the same 16-bit numbers and differ in the order of their sums and in what they round: the weights, the
partial outputs of a split, the output. Right means rms(difference) <= 4 u rms(out), u the unit roundoff, one u for each
of these on either side, and an LSE within 1e-5 + 8e-5 |lse|: the limit of raw kernels (`mla.accuracy.limits`), but for
its part of the magnitudes added.
What is only moved (the cache, rows without keys) must be the same bits.

The LSE of the library's fa2 is further off, in proportion to u. Seen on an H200: a row of one key has its score wrong
in the 16-bit places, as if scores were rounded between the two halves that compute them. There 2 u (1 + |lse|) more is
allowed, a score having no more than the size of its LSE where it counts.

Axes: T new tokens (packed over requests), S states to merge, B requests, N heads, L KV rank, R rope, V value.
"""

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from mla.commands.environment import environment  # noqa: E402

WORKSPACE = 128 << 20
SCALE = 192**-0.5 * 1.87  # as of a model with YaRN: not the default of any library
Found = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """Head sizes of a comparison: N by case, the others as the library takes them."""

    heads: tuple[int, ...] = (16, 128)
    L: int = 512
    R: int = 64
    qk: int = 192
    V: int = 128


def load_standin() -> Any:
    """The module `tests/flashinfer_standin.py`, whatever else has that name."""
    spec = importlib.util.spec_from_file_location("standin", ROOT / "tests" / "flashinfer_standin.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_library() -> Any:
    """The installed FlashInfer."""
    for name in ("mla", "page"):
        importlib.import_module(f"flashinfer.{name}")
    return importlib.import_module("flashinfer")


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sums(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@dataclass(frozen=True)
class Paged:
    """A call of the absorbed kernel."""

    backend: str
    dtype: torch.dtype
    N: int
    L: int
    R: int
    page: int
    causal: bool
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    natural: bool = True
    apart: bool = False

    def tensors(self, device: str, seed: int = 0) -> dict[str, Any]:
        """Queries (T, N, L) and (T, N, R), one cache of rows (pages, page, L + R), page ids in no order."""
        T, pages = sum(self.query_lens), [-(-k // self.page) for k in self.kv_lens]
        q, rows = draw(seed, T, self.N, self.L + self.R), draw(seed + 1, sum(pages) + 2, self.page, self.L + self.R)
        q[..., : self.L] *= 0.3  # logits of some units
        ids = torch.randperm(sum(pages) + 2, generator=torch.Generator().manual_seed(seed))[: sum(pages)].int()
        cache = rows.to(device, self.dtype)
        if self.apart:  # one layer of an engine's cache
            whole = torch.zeros(len(rows), 3, *rows.shape[1:], dtype=self.dtype, device=device)
            whole[:, 1] = cache
            cache = whole[:, 1]
        q = q.to(device, self.dtype)
        return {
            "q_nope": q[..., : self.L].contiguous(),
            "q_pe": q[..., self.L :],
            "ckv_cache": cache[..., : self.L],
            "kpe_cache": cache[..., self.L :],
            "plan": {
                "qo_indptr": sums(self.query_lens),
                "kv_indptr": sums(pages),
                "kv_indices": ids.to(device),
                "kv_len_arr": torch.tensor(self.kv_lens, dtype=torch.int32),
                "num_heads": self.N,
                "head_dim_ckv": self.L,
                "head_dim_kpe": self.R,
                "page_size": self.page,
                "causal": self.causal,
                "sm_scale": SCALE,
                "q_data_type": self.dtype,
                "kv_data_type": self.dtype,
            },
        }


def paged(call: Paged, library: Any, device: str) -> Found:
    """Run a call: out (T, N, L), lse (T, N)."""
    given = call.tensors(device)
    wrapper = library.mla.BatchMLAPagedAttentionWrapper(
        torch.empty(WORKSPACE, dtype=torch.int8, device=device), backend=call.backend
    )
    wrapper.plan(**given.pop("plan"))
    out, lse = wrapper.run(**given, return_lse=True, return_lse_base_on_e=call.natural)
    return {"out": out, "lse": lse}


def replayed(first: Paged, then: Paged, library: Any, device: str, tape: Any) -> Found:
    """Capture `first`, plan `then` into the same buffers, replay: out (T, N, L), lse (T, N) of `then`."""
    given, other = first.tensors(device), then.tensors(device, seed=5)
    B, most = len(first.query_lens), max(len(x["plan"]["kv_indices"]) for x in (given, other))
    ints = lambda n: torch.zeros(n, dtype=torch.int32, device=device)
    wrapper = library.mla.BatchMLAPagedAttentionWrapper(
        torch.empty(WORKSPACE, dtype=torch.int8, device=device), use_cuda_graph=True, qo_indptr=ints(B + 1),
        kv_indptr=ints(B + 1), kv_indices=ints(most), kv_len_arr=ints(B), backend=first.backend,
    )  # fmt: skip
    pages = max(len(x["ckv_cache"]) for x in (given, other))
    held = {k: x.clone() for k, x in given.items() if k.startswith("q_")}
    cache = torch.zeros(pages, first.page, first.L + first.R, dtype=first.dtype, device=device)
    held |= {"ckv_cache": cache[..., : first.L], "kpe_cache": cache[..., first.L :]}
    held["out"], held["lse"] = torch.zeros_like(held["q_nope"]), torch.zeros(held["q_nope"].shape[:2], device=device)
    run = lambda: wrapper.run(**held, return_lse=True, return_lse_base_on_e=True)
    wrapper.plan(**given.pop("plan"))
    graph: Any = tape() if device == "cpu" else torch.cuda.CUDAGraph()
    if device != "cpu":
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
    with graph if device == "cpu" else torch.cuda.graph(graph):
        run()
    wrapper.plan(**other.pop("plan"))
    for name, x in other.items():
        held[name][: len(x)].copy_(x)
    graph.replay()
    return {"out": held["out"], "lse": held["lse"]}


def prefill(
    backend: str, dtype: torch.dtype, N: int, sizes: Sizes, causal: bool, lengths: Sequence[Sequence[int]],
    library: Any, device: str,
) -> Found:  # fmt: skip
    """Run the varlen kernel over heads of keys: out (T, N, V), lse (T, N)."""
    queries, keys = lengths
    q, k, v = (
        draw(i, sum(n), N, width).to(device, dtype)
        for i, (n, width) in enumerate(((queries, sizes.qk), (keys, sizes.qk), (keys, sizes.V)))
    )
    wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(
        torch.empty(WORKSPACE, dtype=torch.int8, device=device), "NHD", backend=backend
    )
    wrapper.plan(
        qo_indptr=sums(queries), kv_indptr=sums(keys), num_qo_heads=N, num_kv_heads=N, head_dim_qk=sizes.qk,
        head_dim_vo=sizes.V, causal=causal, sm_scale=SCALE / 2, q_data_type=dtype, kv_data_type=dtype,
    )  # fmt: skip
    out, lse = wrapper.run(q, k, v, return_lse=True)
    return {"out": out, "lse": lse}


def append(dtype: torch.dtype, sizes: Sizes, library: Any, device: str) -> Found:
    """Append rows of two requests to a cache: all of it (pages, page, L + R)."""
    cache = draw(0, 6, 4, sizes.L + sizes.R).to(device, dtype)
    rows = draw(1, 5, sizes.L + sizes.R).to(device, dtype)
    ints = lambda *values: torch.tensor(values, dtype=torch.int32, device=device)
    library.page.append_paged_mla_kv_cache(
        rows[:, : sizes.L], rows[:, sizes.L :], ints(0, 0, 1, 1, 1), ints(3, 4, 0, 1, 9), cache[..., : sizes.L],
        cache[..., sizes.L :], ints(5, 0, 2, 3, 1), ints(0, 2, 5), ints(1, 2),
    )  # fmt: skip
    return {"moved": cache}


def merged(how: str, dtype: torch.dtype, N: int, sizes: Sizes, library: Any, device: str) -> Found:
    """Merge states of three parts or two, v (T, S, N, V) and s (T, S, N), with LSEs far apart and empty ones."""
    v, s = draw(0, 9, 3, N, sizes.V).to(device, dtype), (6 * draw(1, 9, 3, N)).to(device)
    s[4, 1] = float("-inf")
    a, b = ((v[:, i].contiguous(), s[:, i].contiguous()) for i in (0, 1))
    if how == "merge_state":
        out, lse = library.merge_state(*a, *b)
    elif how == "merge_states":
        out, lse = library.merge_states(v, s)
    else:
        keep = (torch.arange(9, device=device) % 3 > 0) if how.endswith("mask") else None
        library.merge_state_in_place(*a, *b, mask=keep)
        out, lse = a
    return {"out": out, "lse": lse}


def calls(sizes: Sizes) -> Iterator[tuple[str, Callable[[Any, str], Found]]]:
    """Yield a name and a function of (library, device) for every comparison."""
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    few, L, R = sizes.heads[0], sizes.L, sizes.R
    decode, lens = (1,) * 7, (1, 63, 0, 64, 300, 2049, 1000)
    ragged, bounds = (1, 4, 2, 70, 3, 0, 1), (33, 4, 0, 300, 130, 12, 65)
    for backend, (short, dtype) in product(("fa2", "fa3"), halves.items()):
        make = partial(Paged, backend, dtype)
        for N, page in product(sizes.heads, (1, 16, 64)):
            call = make(N, L, R, page, True, decode, lens)
            yield f"{backend} decode {short} N{N} page {page}", partial(paged, call)
        for name, call in (
            ("verify of 4", make(few, L, R, 64, True, (4,) * 7, tuple(max(4, n) for n in lens))),
            ("ragged queries", make(few, L, R, 16, True, ragged, bounds)),
            ("ragged queries of many heads", make(sizes.heads[-1], L, R, 64, True, ragged, bounds)),
            ("without a mask", make(few, L, R, 16, False, ragged, bounds)),
            ("base 2", make(few, L, R, 16, True, decode, lens, natural=False)),
            ("one layer of an engine's cache", make(few, L, R, 16, True, decode, lens, apart=True)),
            ("one long request", make(few, L, R, 64, True, (1,), (20000,))),
        ):
            yield f"{backend} {name} {short}", partial(paged, call)
        graph = (
            make(few, L, R, 16, True, (1,) * 5, (90, 1, 300, 64, 65)),
            make(few, L, R, 16, True, (2, 1, 0, 1, 1), (17, 0, 0, 700, 5)),
        )
        yield f"{backend} graph planned again {short}", partial(_graph, graph)
    for backend in ("fa2", "fa3"):
        call = Paged(backend, torch.bfloat16, few, L, 0, 16, True, ragged, bounds)
        yield f"{backend} no rope bf16", partial(paged, call)
        for N, (name, causal, lengths) in product(
            sizes.heads,
            (
                ("causal", True, ((5, 128, 300, 1), (5, 500, 300, 77))),
                ("without a mask", False, ((64, 7, 129), (256, 33, 1))),
            ),
        ):
            run = partial(prefill, backend, torch.bfloat16, N, sizes, causal, lengths)
            yield f"{backend} prefill {name} bf16 N{N}", run
    for short, dtype in halves.items():
        yield f"append {short}", partial(append, dtype, sizes)
        for how in ("merge_state", "merge_state_in_place", "merge_state_in_place with a mask", "merge_states"):
            yield f"{how} {short}", partial(merged, how, dtype, min(few, 64), sizes)


def _graph(two: tuple[Paged, Paged], library: Any, device: str) -> Found:
    return replayed(*two, library, device, getattr(library, "Tape", None))


def difference(found: Found, expected: Found, short_scores: bool = False) -> dict[str, Any]:
    """How far two results are apart, as shares of what is allowed; `ok` where all is within it.

    `short_scores` allows for scores rounded to 16 bits.
    """
    row: dict[str, Any] = {"ok": True}
    for name, want in expected.items():
        got, want = (x.detach().cpu() for x in (found[name], want))
        if name == "moved":
            row["ok"] &= torch.equal(got, want)
            continue
        empty = expected["lse"].cpu() == float("-inf")
        row["ok"] &= bool(torch.equal(got[empty], want[empty]))
        got, want = (x[~empty].double() for x in (got, want))
        if name == "out":
            allowed = 4 * torch.finfo(found["out"].dtype).eps / 2 * want.square().mean().sqrt()
            row["out"] = float((got - want).square().mean().sqrt() / allowed)
        else:
            u = torch.finfo(expected["out"].dtype).eps / 2 if short_scores else 0.0
            limit = 1e-5 + 8e-5 * want.abs() + 2 * u * (1 + want.abs())
            row["lse"] = float(((got - want).abs() / limit).max())
        row["ok"] &= row[name] <= 1  # NaN is not
    return row


def compare(library: Any, device: str, sizes: Sizes, without: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Run every call through `library` on `device` and the stand-in on the CPU."""
    standin, rows = load_standin(), []
    for name, call in calls(sizes):
        if any(w in name for w in without):
            continue
        try:
            short_scores = name.startswith("fa2") and "prefill" not in name
            row = difference(call(library, device), call(standin, "cpu"), short_scores)
        except Exception as error:  # the next one may be right
            row = {"ok": False, "error": f"{type(error).__name__}: {str(error)[:300]}"}
        rows.append({"name": name, **row})
        print(f"{'ok   ' if row['ok'] else 'WRONG'} {name}: {row}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="where the record goes")
    parser.add_argument("--without", action="append", default=[], help="leave out calls whose name has this text")
    asked = parser.parse_args()
    from trials import save

    library = load_library()
    rows = compare(library, "cuda", Sizes(), asked.without)
    record = {
        "status": "ok" if all(row["ok"] for row in rows) else "mismatch",
        "library": {"name": "flashinfer-python", "version": library.__version__},
        "without": asked.without,
        "environment": environment("cuda"),
        "rows": rows,
    }
    save(asked.file, record)
    print(f"{sum(row['ok'] for row in rows)} of {len(rows)} agree; {asked.file}")
    return 0 if record["status"] == "ok" else 1


if __name__ == "__main__":
    sys.exit(main())
