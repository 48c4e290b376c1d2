"""Questions to a raw kernel whose right answers are known: with q = 0 every score is 0, whatever the keys are.

The output of a row is then the plain mean of the values it sees, and its LSE is ln n of the n keys that it sees, log2 n
in base 2, 0 where a maximum comes back in its place, n where a sum does.
Axes: T new tokens (packed over requests), B requests, s new tokens of each of them, N heads, L KV rank, R rope.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla.conformance.raw.arguments import Call, packed_lse
from mla.errors import bad
from mla.need import Need

Ask = Callable[[Call, str], tuple[Tensor, Tensor | None]]
CLOSE = (
    0.03  # of a size; what separates two answers is more: ln n from log2 n 0.31, a mean from that of a key less 0.06
)
BASES: dict[str, Callable[[Tensor], Tensor]] = {
    "e": torch.log, "2": torch.log2, "maximum": torch.zeros_like, "sum": torch.clone,
}  # fmt: skip
ALIGNMENTS: dict[str, Callable[[int, int], list[int]]] = {
    "bottom-right": lambda s, n: [n - s + i + 1 for i in range(s)],
    "none": lambda s, n: [n] * s,
    "top-left": lambda s, n: [i + 1 for i in range(s)],
}


@dataclass(frozen=True)
class Convention:
    """What a kernel does where kernels differ, as found out by asking it.

    lse_base is "e" or "2", "maximum" or "sum" where that comes in place of an LSE, "unknown", or "none" for no LSE;
    lse_axes names its axes, such as "B N s"; `scale` is the factor on its scores and scale_name "as given", "none",
    "(L+R)^-0.5", "(P+R)^-0.5" or "unknown"; empty_lse and empty_out are what a row without keys gets, "-inf", "0",
    "nan" or a number, "" where nobody asked, and empty_out the error where one is raised; `tokens` is the causal
    alignment of several new tokens, "bottom-right", "top-left", "none", "unknown", "not asked", or the error that they
    raise; `cache` the axes of its pages. `seen` holds the LSE that it gave for so many keys.
    """

    cache: str
    lse_base: str
    lse_axes: str
    seen: tuple[tuple[int, float], ...]
    tokens: str
    scale: float
    scale_name: str
    empty_lse: str
    empty_out: str

    def sentences(self) -> list[str]:
        """Return the findings as sentences for a report."""
        given = " and ".join(f"{lse:.4g} for {n} keys of score 0" for n, lse in self.seen)
        lse = {
            "e": "natural",
            "2": "base 2, converted to natural",
            "none": "not returned",
            "unknown": "of no known base, left as it is",
        }.get(self.lse_base, f"no LSE but a {self.lse_base}")
        axes = f", axes ({self.lse_axes})" if self.lse_axes else ""
        scale = {"as given": "as given", "unknown": f"about {self.scale:.4g}, of no known name"}.get(self.scale_name)
        empty = f"output {self.empty_out}, LSE {self.empty_lse or None}"
        if self.empty_out.startswith("raises") or not self.empty_out:
            empty = self.empty_out or "not asked"
        return [
            f"LSE: {lse}{axes}" + (f" ({given})." if given else "."),
            f"Softmax scale: {scale or f'{self.scale:.6g} ({self.scale_name}), not the given'}.",
            f"Row without keys: {empty}.",
            f"Several new tokens of a request: causal mask {self.tokens}."
            if self.tokens in (*ALIGNMENTS, "unknown")
            else f"Several new tokens of a request: {self.tokens}.",
            f"Cache: axes ({self.cache}).",
        ]


def find(
    ask: Ask,
    need: Need,
    style: str,
    cache_axes: Sequence[str],
    max_query_len: int | None = None,
    empty_rows: bool = True,
) -> Convention:
    """Ask a kernel, ask(call, cache_axes) -> out (T, N, L) and its own LSE or None, and return what it does.

    Its sizes, dtype, page size and device are those of `need`; no call has more new tokens than max_query_len, nor
    requests without keys unless empty_rows. Raises RuntimeError with every error where the kernel answers for none of
    `cache_axes`.
    """
    first = need.page_size * -(-4 // need.page_size)
    keys = [first, first + need.page_size]
    s, B = _counts(need.N)
    lens = [keys[b % 2] for b in range(B)]
    single = _scene(need, style, [1] * B, lens)
    cache, lse = _first_answer(ask, single, cache_axes)
    base, axes, seen = _base(single, lse, lens)
    tokens, more_axes = ("not asked", "")
    if max_query_len is None or max_query_len >= s:
        tokens, more_axes = _tokens(ask, _scene(need, style, [s] * B, lens), cache)
    scale, scale_name = _scale(ask, need, style, keys[1], cache)
    empty_out, empty_lse = ("", "")
    if empty_rows:
        empty_out, empty_lse = _empty(ask, _scene(need, style, [1] * B, [*lens[:-1], 0]), cache, axes)
    return Convention(cache, base, more_axes or axes, seen, tokens, scale, scale_name, empty_lse, empty_out)


def _counts(N: int) -> tuple[int, int]:
    """New tokens s and requests B, such that (B, N, s), (B, s, N), (T, N) and (N, T) are four shapes."""
    s = 2 if N != 2 else 3
    return s, next(B for B in range(2, 6) if B not in (N, s) and B * s != N)


def _scene(need: Need, style: str, query_lens: list[int], seq_lens: list[int]) -> Call:
    """A zero query over rows of noise, page after page; rows that no request owns are 0."""
    page, T = need.page_size, sum(query_lens)
    most = -(-max(seq_lens) // page)
    random = torch.Generator().manual_seed(0)
    noise = torch.randn(len(seq_lens) * most * page, need.L + need.R, generator=random, dtype=torch.float64)
    rows = noise.view(len(seq_lens), most * page, -1)
    for b, n in enumerate(seq_lens):
        rows[b, n:] = 0
    zeros = lambda width: torch.zeros(T, need.N, width, dtype=need.dtype, device=need.device)
    table = torch.arange(len(seq_lens) * most, dtype=torch.int32).view(len(seq_lens), most)
    pages = rows.view(-1, page, need.L + need.R).to(need.device, need.dtype)
    scale = need.softmax_scale
    return Call(zeros(need.L), zeros(need.R), pages, table.to(need.device), query_lens, seq_lens, scale, style=style)


def _means(call: Call, alignment: str) -> Tensor:
    """The right output (T, L) of a zero query: the mean of the first keys, as many as the alignment shows to a row."""
    values = call.rows.double()[..., : call.q_latent.shape[-1]].reshape(len(call.seq_lens), -1, call.q_latent.shape[-1])
    counts = [(b, n) for b, (q, S) in _requests(call) for n in ALIGNMENTS[alignment](q, S)]
    return torch.stack([values[b, :n].mean(0) for b, n in counts])


def _requests(call: Call) -> list[tuple[int, tuple[int, int]]]:
    return list(enumerate(zip(call.query_lens, call.seq_lens, strict=True)))


def _is(got: Tensor, expected: Tensor) -> bool:
    """Whether two tensors of any shape are the same up to the rounding of 16 bits; NaN is not."""
    return bool((got.double() - expected).norm() <= CLOSE * expected.norm().clamp(min=1e-6))


def _first_answer(ask: Ask, call: Call, cache_axes: Sequence[str]) -> tuple[str, Tensor | None]:
    """The first axes for which the kernel returns the means, else the first for which it returns at all; its LSE."""
    right, answers, errors = _means(call, "none")[:, None], [], []
    for axes in cache_axes:
        try:
            out, lse = ask(call, axes)
        except Exception as error:  # the kernel of a stranger may raise anything at all
            errors.append(f"{type(error).__name__}: {error}")
            continue
        answers.append((axes, lse))
        if _is(out, right.expand_as(out)):
            return answers[-1]
    if not answers:
        tried = ", ".join(f"({axes})" for axes in cache_axes)
        raise RuntimeError(f"no answer to a zero query, cache of axes {tried}: " + "; ".join(dict.fromkeys(errors)))
    return answers[0]


def _base(call: Call, lse: Tensor | None, lens: list[int]) -> tuple[str, str, tuple[tuple[int, float], ...]]:
    """The base of an LSE, its axes, and what it is for the first two numbers of keys."""
    if lse is None:
        return "none", "", ()
    axes = next((axes for axes, shape in call.lse_shapes().items() if tuple(lse.shape) == shape), None)
    if axes is None:
        expected = " or ".join(f"({axes}) = {shape}" for axes, shape in call.lse_shapes().items())
        raise bad("kernel's lse.shape", expected=expected, got=str(tuple(lse.shape)), fix="return an LSE per row")
    values = packed_lse(lse, call, axes).double().cpu()
    n = torch.tensor(lens, dtype=torch.float64)[:, None].expand_as(values)
    seen = tuple((lens[b], float(values[b, 0])) for b in (0, 1))
    return next((name for name, f in BASES.items() if _is(values, f(n))), "unknown"), axes, seen


def _tokens(ask: Ask, call: Call, cache: str) -> tuple[str, str]:
    """The causal alignment of several new tokens, and the axes of their LSE."""
    try:
        out, lse = ask(call, cache)
    except Exception as error:  # one new token is all that many kernels take
        return f"raises {type(error).__name__}: {error}", ""
    rights = {name: _means(call, name)[:, None].expand_as(out) for name in ALIGNMENTS}
    found = next((name for name, right in rights.items() if _is(out, right)), "unknown")
    shapes = call.lse_shapes().items()
    return found, next((axes for axes, shape in shapes if lse is not None and tuple(lse.shape) == shape), "")


def _scale(ask: Ask, need: Need, style: str, keys: int, cache: str) -> tuple[float, str]:
    """The factor on the scores and its name: one key u that the query points at, the others 0.

    Its weight w = e^x / (e^x + n - 1) gives x = ln(w (n-1) / (1-w)) = factor * q . u; the query grows or shrinks until
    w can be read well.
    """
    call = _scene(need, style, [1], [keys])
    call.rows.zero_()
    u = torch.randn(need.L + need.R, generator=torch.Generator().manual_seed(1), dtype=torch.float64).sign()
    call.rows[0, 0] = u.to(call.rows)
    toward, target = u / (len(u) * need.softmax_scale), math.log(keys - 1)
    for _ in range(4):
        q = (toward * target).to(need.device, need.dtype)
        call.q_latent[:], call.q_pe[:] = q[: need.L], q[need.L :]
        try:
            out, _ = ask(call, cache)
        except Exception:  # an answer was had before; the suite will show what this one was
            return math.nan, "unknown"
        w = float((out[0, 0].double().cpu() * u[: need.L]).mean())
        if 0.05 < w < 0.95:
            break
        target *= 0.3 if w >= 0.95 else 3.0
    else:
        return math.nan, "unknown"
    found = math.log(w * (keys - 1) / (1 - w)) / float(q.double().cpu() @ u)
    known = {"as given": need.softmax_scale, "none": 1.0}
    known |= {"(L+R)^-0.5": (need.L + need.R) ** -0.5, "(P+R)^-0.5": (need.P + need.R) ** -0.5}
    name = min(known, key=lambda name: abs(math.log(found / known[name])) if found > 0 else 0.0)
    return (known[name], name) if abs(found / known[name] - 1) < CLOSE else (found, "unknown")


def _empty(ask: Ask, call: Call, cache: str, axes: str) -> tuple[str, str]:
    """What the last request of a call, which has no keys, gets: output and LSE as words."""
    try:
        out, lse = ask(call, cache)
        packed = None if lse is None or not axes else packed_lse(lse, call, axes)
    except Exception as error:  # rows without keys are more than many kernels take
        return f"raises {type(error).__name__}: {error}", ""
    return _word(out[-1]), "" if packed is None else _word(packed[-1])


def _word(values: Tensor) -> str:
    """One value in words; "several values" where a tensor of any shape holds more than one."""
    values = values.double()
    if bool(values.isnan().all()):
        return "nan"
    if bool((values != values.flatten()[0]).any()):
        return "several values"
    value = float(values.flatten()[0])
    return {math.inf: "+inf", -math.inf: "-inf", 0.0: "0"}.get(value, f"{value:.9g}")
