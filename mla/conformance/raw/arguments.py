"""What a raw kernel may ask for by parameter name, and how a step is laid out for it.

Axes: T new tokens (packed over requests), B requests, s new tokens of each of them, N heads, L KV rank, R rope.
"""

import difflib
import inspect
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mla.errors import bad

STYLES = ("dense", "ragged")
NAMES: dict[str, tuple[str, ...]] = {
    "query": ("q", "query"),
    "q_latent": ("q_nope", "q_latent", "q_absorbed", "q_nope_absorbed", "ql_nope"),
    "q_pe": ("q_pe", "q_rope"),
    "rows": ("kv_cache", "cache", "kv", "k_cache", "k_buffer", "kv_buffer", "blocked_k", "latent_cache"),
    "kv_c": ("ckv", "ckv_cache", "kv_c", "kv_c_cache", "v_cache", "v_buffer"),
    "k_pe": ("kpe", "kpe_cache", "k_pe", "k_pe_cache"),
    "block_table": ("block_table", "block_tables", "page_table", "page_tables", "block_offsets"),
    "seq_lens": (
        *("seq_lens", "cache_seqlens", "cache_seq_lens", "context_lens", "kv_lens", "kv_len", "kv_len_arr"),
        *("kv_seqlens", "seqlens_k", "seq_lens_kv", "b_seq_len"),
    ),
    "q_indptr": ("qo_indptr", "q_indptr", "cu_seqlens_q", "cum_seq_lens_q", "query_start_loc"),
    "kv_indptr": ("kv_indptr", "kv_page_indptr"),
    "kv_indices": ("kv_indices", "kv_page_indices"),
    "kv_last_page_len": ("kv_last_page_len", "kv_last_page_lens"),
    "softmax_scale": ("softmax_scale", "sm_scale", "scale", "scaling", "attn_scale", "bmm1_scale"),
    "causal": ("causal", "is_causal"),
    "return_lse": ("return_lse", "return_softmax_lse"),
    "L": ("head_dim_v", "dv", "kv_lora_rank", "head_dim_ckv"),
    "R": ("qk_rope_head_dim", "head_dim_kpe"),
    "num_heads": ("num_heads", "num_qo_heads", "num_q_heads", "h_q"),
    "page_size": ("page_size", "block_size"),
    "max_seq_len": ("max_seq_len", "max_kv_len", "max_context_len", "max_seqlen_k"),
    "max_query_len": ("max_query_len", "max_q_len", "max_seqlen_q", "s_q"),
    "out": ("out", "o", "output"),
    "lse": ("lse",),
}
ROLES = {name: role for role, names in NAMES.items() for name in names}
ONLY_IF_REQUIRED = ("out", "lse")
CACHE_AXES = ("page slot row", "page slot head row", "page head slot row")


def match(kernel: Callable, style: str) -> dict[str, str]:
    """Return which parameter of a kernel gets what, {parameter: role}, by the names in `NAMES`.

    A parameter with a default gets what it is named after too, but an output buffer only where it is required, and
    qo_indptr of a dense kernel likewise. What `functools.partial` has bound stays as it is. Raises TypeError for a
    required parameter whose name is not known, listing what can be given, and where there are no names to go by.
    """
    bound = _bound(kernel)
    try:
        parameters = [*inspect.signature(kernel).parameters.values()]
    except (TypeError, ValueError):  # some built-in functions have no signature
        parameters = []
    roles, unknown = {}, []
    for p in parameters:
        if p.name in bound or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        required, role = p.default is p.empty, ROLES.get(p.name)
        if role is None:
            unknown += [p.name] if required else []
        elif required or not (role in ONLY_IF_REQUIRED or (style == "dense" and role == "q_indptr")):
            roles[p.name] = role
    if unknown:
        near = [f"{name} may be {n[0]}" for name in unknown if (n := difflib.get_close_matches(name, ROLES, 1))]
        hint = f" ({', '.join(near)})" if near else ""
        fix = f"bind {', '.join(unknown)} with functools.partial, or wrap the kernel in a function of these names{hint}"
        raise bad("kernel", expected=_known(), got=f"required {', '.join(unknown)}", fix=fix, kind=TypeError)
    if not {"query", "q_latent"} & {*roles.values()} or not {"rows", "kv_c"} & {*roles.values()}:
        fix = "wrap it: def kernel(q, kv_cache, block_table, seq_lens, softmax_scale): return yours(...)"
        got = f"{kernel!r} with ({', '.join(roles)})"
        raise bad("kernel", expected="a function that names a query and a cache", got=got, fix=fix, kind=TypeError)
    return roles


def name_of(kernel: Callable) -> str:
    """Return a kernel's own name, for reports."""
    while isinstance(kernel, partial):
        kernel = kernel.func
    return str(getattr(kernel, "__name__", "")).strip("<>") or "kernel"


def _bound(kernel: Callable) -> set[str]:
    return _bound(kernel.func) | set(kernel.keywords) if isinstance(kernel, partial) else set()


def _known() -> str:
    return "parameters out of " + "; ".join(" / ".join(names) for names in NAMES.values())


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a raw kernel: requests of `query_lens` new tokens over `seq_lens` keys each (host lists).

    q_latent (T, N, L), q_pe (T, N, R), rows (pages, page_size, L+R), table (B, max_pages) int32. `causal`: token i of a
    request of q tokens and s keys sees s - q + i + 1 of them, else all s.
    """

    q_latent: Tensor
    q_pe: Tensor
    rows: Tensor
    table: Tensor
    query_lens: list[int]
    seq_lens: list[int]
    softmax_scale: float
    lse: bool = True
    causal: bool = True
    style: str = "dense"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return B, s (that of the first request) and N."""
        return len(self.query_lens), self.query_lens[0], self.q_latent.shape[1]

    def flat(self) -> "Call":
        """Return the same call over pages of one row: rows (slots, 1, L+R), table (B, max_keys) of slots, no copy.

        Raises ValueError where the pages do not lie a whole number of rows apart.
        """
        pages, page, width = self.rows.shape
        between, row = self.rows.stride()[:2]
        if between % row:
            fix = "do not declare flat=True for such a cache"
            raise bad("cache.data", expected="pages a whole number of rows apart", got=f"{between} / {row}", fix=fix)
        step = between // row
        data = self.rows.as_strided((max(0, (pages - 1) * step + page), 1, width), (row, row, 1))
        table = torch.full((len(self.seq_lens), max(self.seq_lens, default=0)), -1, dtype=torch.int32)
        for b, (own, keys) in enumerate(zip(self.table.tolist(), self.seq_lens, strict=True)):
            table[b, :keys] = torch.tensor([own[j // page] * step + j % page for j in range(keys)], dtype=torch.int32)
        return replace(self, rows=data, table=table.to(self.rows.device))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that out may have, (B, s, N, L) or (T, N, L), by their axes."""
        T, N, L = self.q_latent.shape
        shapes: dict[str, tuple[int, ...]] = {"T N L": (T, N, L)}
        return shapes if self.style == "ragged" else {"B s N L": (*self.sizes, L), **shapes}

    def lse_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes that an LSE may have, such as (T, N), by their axes."""
        T, N = self.q_latent.shape[:2]
        packed: dict[str, tuple[int, ...]] = {"T N": (T, N), "N T": (N, T)}
        if self.style == "ragged":
            return packed
        B, s, N = self.sizes
        return {"B N s": (B, N, s), "B s N": (B, s, N), **packed}

    def value(self, role: str, axes: str) -> Any:
        """Return what a role stands for: a tensor such as rows (pages, page_size, L+R), or a number."""
        L, device = self.q_latent.shape[-1], self.rows.device
        N, R = self.q_latent.shape[1], self.q_pe.shape[-1]
        ints = lambda values: torch.tensor(values, dtype=torch.int32, device=device)
        shaped = lambda x: x.view(*self.sizes, x.shape[-1]) if self.style == "dense" else x
        pages = lambda x: {
            "page slot row": x,
            "page slot head row": x.unsqueeze(2),
            "page head slot row": x.unsqueeze(1),
        }[axes]
        page = self.rows.shape[1]
        counts = [-(-n // page) for n in self.seq_lens]
        made: dict[str, Callable[[], Any]] = {
            "query": lambda: shaped(torch.cat([self.q_latent, self.q_pe], -1)),
            "q_latent": lambda: shaped(self.q_latent),
            "q_pe": lambda: shaped(self.q_pe),
            "rows": lambda: pages(self.rows),
            "kv_c": lambda: pages(self.rows[..., :L]),
            "k_pe": lambda: pages(self.rows[..., L:]),
            "block_table": lambda: self.table,
            "seq_lens": lambda: ints(self.seq_lens),
            "q_indptr": lambda: ints([0, *accumulate(self.query_lens)]),
            "kv_indptr": lambda: ints([0, *accumulate(counts)]),
            "kv_indices": lambda: torch.cat([own[:n] for own, n in zip(self.table, counts, strict=True)]),
            "kv_last_page_len": lambda: ints(
                [n - (c - 1) * page if n else 0 for n, c in zip(self.seq_lens, counts, strict=True)]
            ),
            "softmax_scale": lambda: self.softmax_scale,
            "causal": lambda: self.causal,
            "return_lse": lambda: self.lse,
            "L": lambda: L,
            "R": lambda: R,
            "num_heads": lambda: N,
            "page_size": lambda: page,
            "max_seq_len": lambda: max(self.seq_lens),
            "max_query_len": lambda: max(self.query_lens),
            "out": lambda: shaped(self.q_latent.new_full(self.q_latent.shape, float("nan"))),
            "lse": lambda: self.q_latent.new_full((len(self.q_latent), N), float("nan"), dtype=torch.float32),
        }
        return made[role]()


def run(kernel: Callable, roles: dict[str, str], call: Call, axes: str) -> tuple[Tensor, Tensor | None]:
    """Call a kernel and return out (T, N, L) and the LSE in the kernel's own shape, (B, N, s), (T, N), ..., or None.

    Raises ValueError or TypeError where what comes back is no such pair; whatever the kernel raises goes on.
    """
    values = {name: call.value(role, axes) for name, role in roles.items()}
    bound = inspect.BoundArguments(inspect.signature(kernel), OrderedDict(values))
    result = kernel(*bound.args, **bound.kwargs)
    buffers = {role: values[name] for name, role in roles.items() if role in ONLY_IF_REQUIRED}
    parts = list(result) if isinstance(result, tuple | list) else [result]
    out = _plain("out", parts[0] if parts[0] is not None else buffers.get("out"))
    lse = parts[1] if len(parts) > 1 else buffers.get("lse")
    lse = None if lse is None else _plain("lse", lse)
    if tuple(out.shape) not in call.shapes().values():
        expected = " or ".join(f"({axes}) = {shape}" for axes, shape in call.shapes().items())
        raise bad("kernel's out.shape", expected=expected, got=str(tuple(out.shape)), fix="return the latent output")
    return out.reshape(call.q_latent.shape), lse


def _plain(name: str, x: Any) -> Tensor:
    if type(x) is not Tensor:
        got, fix = f"a {type(x).__name__}", "return out, lse"
        raise bad(f"kernel's {name}", expected="a tensor", got=got, fix=fix, kind=TypeError)
    return x


def packed_lse(lse: Tensor, call: Call, axes: str) -> Tensor:
    """Return an LSE in the axes "B N s", "B s N", "T N" or "N T" as (T, N); raises ValueError for another shape."""
    shape = call.lse_shapes()[axes]
    if tuple(lse.shape) != shape:
        fix = "return one layout for every number of tokens"
        raise bad("kernel's lse.shape", expected=f"({axes}) = {shape}", got=str(tuple(lse.shape)), fix=fix)
    if axes == "B N s":
        lse = lse.transpose(1, 2)
    return (lse.T if axes == "N T" else lse).reshape(call.q_latent.shape[:2])
