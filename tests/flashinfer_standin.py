"""FlashInfer's MLA interface in plain PyTorch: its names, signatures and conventions, for machines without a GPU.

Facts are those of flashinfer-python 0.6.18: LSE in base 2 unless asked otherwise, planning apart from running, pages by
indptr and indices, dtypes fixed at plan. What the library reads as raw memory (strides, alignment, int32, the batch
size of a captured graph, its launch grid, 16384 work items) is checked here, where the library would go wrong silently.
It takes heads of any width, so that toy sizes run; `docs/tools/flashinfer_standin.py` compares it with the library, but
for the entry point of Blackwell, which was never run: only its signature is compared, where the package is.

Axes: T new tokens (packed over requests), S cached tokens, B requests, N heads, L KV rank, R rope, D any width.
"""

import itertools
import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

TAKES_ANY_SIZE = True
HALVES = (torch.float16, torch.bfloat16)
TILE, MOST_WORK, PROCESSORS = 64, 16384, 132
CAPABILITY = (9, 0)  # of the device that is stood in for; the entry point for Blackwell asks
SEMAPHORES = 8 << 20  # bytes at the head of xqa's workspace
LOG2E = math.log2(math.e)
_tape: "Tape | None" = None


class Tape(TorchDispatchMode):
    """A CUDA graph for the CPU: records every operator within the `with` block, and `replay()` runs them again.

    Operators read and write the tensors that they had, Python runs no more, and a kernel's launch grid stays.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Any] = []

    def __enter__(self) -> "Tape":
        global _tape
        _tape = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        global _tape
        _tape = None
        super().__exit__(*error)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and asking for it would import the compiler, for seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        fresh = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        fresh = [x for x in fresh if x.untyped_storage().data_ptr() not in given]
        if fresh or func._schema.is_mutable:
            self.steps.append(lambda: self._again(func, args, kwargs, fresh))
        return result

    @staticmethod
    def _again(func: Any, args: Any, kwargs: Any, held: list[Tensor]) -> None:
        new = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
        for old, x in zip(held, new, strict=False):
            old.copy_(x)

    def replay(self) -> None:
        """Run what was recorded once more."""
        for step in self.steps:
            step()


def _launch(kernel: Any, grid: Any) -> None:
    """Run a kernel that reads the plan when it runs; in a tape it runs again, and the grid is that of the capture."""
    captured = grid()

    def again() -> None:
        if grid() != captured:
            raise RuntimeError(f"the plan needs grid {grid()}, the graph was captured with {captured}")
        kernel()

    with _disable_current_modes():
        kernel()
    if _tape is not None:
        _tape.steps.append(again)


def _vector(name: str, x: Tensor, device: torch.device | None = None) -> Tensor:
    if not isinstance(x, Tensor) or x.dim() != 1 or x.dtype != torch.int32 or not x.is_contiguous():
        raise ValueError(f"{name} must be a contiguous int32 vector, got {getattr(x, 'dtype', x)} {tuple(x.shape)}")
    if device is not None and x.device != device:
        raise ValueError(f"{name} must be on {device}, got {x.device}")
    return x


def _indptr(name: str, x: Tensor) -> list[int]:
    found = _vector(name, x).tolist()
    if not found or found[0] != 0 or any(b < a for a, b in itertools.pairwise(found)):
        raise ValueError(f"{name} must start with 0 and never fall, got {found}")
    return found


def _strides(name: str, x: Tensor) -> None:
    """Kernels load 16 bytes at once along the last axis and take its stride to be 1."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name} must be contiguous along its last axis, got strides {x.stride()}")
    if x.shape[-1] in (64, 512) and x.numel():
        far = [s for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1]
        if x.data_ptr() % 16 or any(s * x.element_size() % 16 for s in far):
            raise ValueError(f"{name} must be aligned to 16 bytes, got strides {x.stride()}")


def _workspace(x: Tensor) -> Tensor:
    if x.dim() != 1 or x.dtype not in (torch.int8, torch.uint8) or not x.is_contiguous():
        raise ValueError(f"the float workspace must be bytes, got {x.dtype} of shape {tuple(x.shape)}")
    return x


def _softmax(scores: Tensor, values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scores (..., S) in base 2, -inf where masked, and values (..., S, D): out (..., D), base-2 LSE (...).

    Weights are rounded to `dtype` before the product as tensor cores take them, their sum is not; an empty row is
    (0, -inf).
    """
    top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:-1], 1), -math.inf)
    weights = torch.exp2(scores - torch.where(top == -math.inf, 0, top))
    total = weights.sum(-1, keepdim=True)
    out = torch.where(total > 0, weights.to(dtype).float() @ values / total, 0)
    return out, (torch.where(top == -math.inf, 0, top) + total.log2())[..., 0]


def _mask(rows: int, keys: int, causal: bool) -> Tensor:
    """(rows, keys) of bool: True where a row does not see a key; bottom-right."""
    if not causal:
        return torch.zeros(rows, keys, dtype=torch.bool)
    return torch.arange(keys) > keys - rows + torch.arange(rows)[:, None]


class BatchMLAPagedAttentionWrapper:
    """Absorbed attention over pages; see the library's documentation of the same name."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        if backend not in ("auto", "fa2", "fa3"):
            raise ValueError(f"backend must be auto, fa2 or fa3 here, got {backend!r}")
        self.device = _workspace(float_workspace_buffer).device
        self._graph = use_cuda_graph
        self._buffers = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        if use_cuda_graph:
            for name, x in zip(("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"), self._buffers, strict=True):
                _vector(name, x, self.device)
        self._planned = False

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        if kv_data_type not in HALVES or q_data_type not in HALVES:
            raise ValueError(f"dtypes must be float16 or bfloat16, got {q_data_type} and {kv_data_type}")
        q, pages, lens = (
            _indptr("qo_indptr", qo_indptr),
            _indptr("kv_indptr", kv_indptr),
            _vector("kv_len_arr", kv_len_arr),
        )
        B, kv = len(q) - 1, lens.tolist()
        if B < 1:
            raise ZeroDivisionError("an empty batch divides by zero in the library's scheduler and ends the process")
        if len(pages) != B + 1 or len(kv) != B:
            raise ValueError(f"{B} requests need kv_indptr ({B + 1},) and kv_len_arr ({B},)")
        if _vector("kv_indices", kv_indices, self.device).shape[0] < pages[-1]:
            raise ValueError(f"kv_indices has {kv_indices.shape[0]} pages, kv_indptr asks for {pages[-1]}")
        tiles = 0
        for b in range(B):
            own, new = pages[b + 1] - pages[b], q[b + 1] - q[b]
            if not 0 <= kv[b] <= own * page_size:
                raise ValueError(f"kv_len_arr[{b}] = {kv[b]} does not lie in its {own} pages of {page_size}")
            if causal and 0 < kv[b] < new:
                raise ValueError(f"request {b}: causal rows without a key, {new} new tokens over {kv[b]} keys")
            tiles += -(-new * num_heads // TILE)
        if tiles > MOST_WORK - PROCESSORS:
            raise ValueError(f"{tiles} tiles overrun the library's list of {MOST_WORK} work items")
        if self._graph:
            for name, held, new in zip(
                ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"),
                self._buffers,
                (qo_indptr, kv_indptr, kv_indices, kv_len_arr),
                strict=True,
            ):
                if name == "kv_indices" and len(new) <= len(held):
                    held[: len(new)].copy_(new)
                elif len(new) == len(held):
                    held.copy_(new)
                else:
                    raise ValueError(f"{name} has {len(new)} entries, its buffer {len(held)}, fixed for the graph")
            self._kv_indices_buf = self._buffers[2]
        else:
            self._kv_indices_buf = kv_indices
        self._lists = q, pages, kv
        self._sizes = num_heads, head_dim_ckv, head_dim_kpe
        self._page_size, self._causal, self._sm_scale = page_size, causal, sm_scale
        self._q_data_type, self._kv_data_type = q_data_type, kv_data_type
        self._grid = 2 if q[-1] * num_heads // B > TILE else 1
        self._planned = True

    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        ckv_scale_arr: Tensor | None = None,
        kpe_scale: float | None = None,
    ) -> Any:
        if any(x is not None for x in (o_scale, ckv_scale, ckv_scale_arr, kpe_scale)):
            raise ValueError("scales are for fp8 rows, which were not planned")
        N, L, R = self._sizes
        T = q_nope.shape[0]
        for name, x, shape in (
            ("q_nope", q_nope, (T, N, L)),
            ("q_pe", q_pe, (T, N, R)),
            ("ckv_cache", ckv_cache, (*ckv_cache.shape[:1], self._page_size, L)),
            ("kpe_cache", kpe_cache, (*ckv_cache.shape[:1], self._page_size, R)),
        ):
            planned = self._q_data_type if name.startswith("q_") else self._kv_data_type
            if x.dtype != planned:
                raise ValueError(f"{name}.dtype={x.dtype} does not match the planned {planned}")
            if tuple(x.shape) != shape:
                raise ValueError(f"{name} must be {shape}, got {tuple(x.shape)}")
            _strides(name, x)
        if self._lists[0][-1] > T:
            raise ValueError(f"the plan has {self._lists[0][-1]} rows, q_nope {T}")
        out = torch.empty_like(q_nope) if out is None else out
        if return_lse and lse is None:
            lse = torch.empty(T, N, dtype=torch.float32, device=self.device)
        for name, y, shape, dtype in (("out", out, q_nope.shape, q_nope.dtype), ("lse", lse, (T, N), torch.float32)):
            if y is not None and (y.shape != shape or y.dtype != dtype):
                raise ValueError(f"{name} must be {tuple(shape)} of {dtype}, got {tuple(y.shape)} of {y.dtype}")
        if lse is not None and not lse.is_contiguous():
            raise ValueError("lse must be contiguous: the kernel writes it without strides")
        _strides("out", out)
        given = (q_nope, q_pe, ckv_cache, kpe_cache, out, lse, return_lse_base_on_e)
        _launch(lambda: self._kernel(*given), lambda: self._grid)
        return (out, lse) if return_lse else out

    def _kernel(self, q_nope, q_pe, ckv, kpe, out, lse, natural) -> None:
        q, pages, kv = self._lists
        for b, keys in enumerate(kv):
            rows = slice(q[b], q[b + 1])
            at = torch.arange(keys)
            page = self._kv_indices_buf[pages[b] : pages[b + 1]].long()[at // self._page_size]
            c, r = (x[page, at % self._page_size].float() for x in (ckv, kpe))  # (S, L), (S, R)
            query = torch.cat([q_nope[rows], q_pe[rows]], -1).float().transpose(0, 1)  # (N, t, L + R)
            scores = query @ torch.cat([c, r], -1).T * (self._sm_scale * LOG2E)
            hidden = _mask(q[b + 1] - q[b], keys, self._causal and keys > 0)
            found, base2 = _softmax(scores.masked_fill(hidden, -math.inf), c, self._kv_data_type)
            out[rows] = found.transpose(0, 1).to(out.dtype)
            if lse is not None:
                lse[rows] = base2.T * (math.log(2) if natural else 1)


class BatchPrefillWithRaggedKVCacheWrapper:
    """Varlen attention with keys and values of every head; see the library's documentation of the same name."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        kv_indptr_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list | None = None,
        jit_kwargs: dict | None = None,
    ) -> None:
        if kv_layout != "NHD" or backend not in ("auto", "fa2", "fa3") or use_cuda_graph or jit_args is not None:
            raise ValueError("the stand-in has NHD, fa2 and fa3, without graphs")
        self.device = _workspace(float_workspace_buffer).device

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Tensor | None = None,
        o_indptr: Tensor | None = None,
    ) -> None:
        named = lambda x: getattr(torch, x) if isinstance(x, str) else x
        self._lists = _indptr("qo_indptr", qo_indptr), _indptr("kv_indptr", kv_indptr)
        if len(self._lists[0]) != len(self._lists[1]) or len(self._lists[0]) < 2:
            raise ValueError("qo_indptr and kv_indptr must have one length, of one sequence or more")
        if num_qo_heads % num_kv_heads or custom_mask is not None or window_left != -1 or logits_soft_cap:
            raise ValueError("the stand-in has plain attention")
        self._sizes = num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo or head_dim_qk
        self._q_data_type = named(q_data_type)
        self._kv_data_type = named(kv_data_type) or self._q_data_type
        self._causal, self._sm_scale = causal, sm_scale or head_dim_qk**-0.5

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        N, kv_heads, qk, vo = self._sizes
        starts, key_starts = self._lists
        for name, x, shape, dtype in (
            ("q", q, (starts[-1], N, qk), self._q_data_type),
            ("k", k, (key_starts[-1], kv_heads, qk), self._kv_data_type),
            ("v", v, (key_starts[-1], kv_heads, vo), self._kv_data_type),
        ):
            if tuple(x.shape) != shape or x.dtype != dtype:
                raise ValueError(f"{name} must be {shape} of {dtype}, got {tuple(x.shape)} of {x.dtype}")
            _strides(name, x)
        out = q.new_empty(q.shape[0], N, vo) if out is None else out
        lse = q.new_empty(q.shape[0], N, dtype=torch.float32) if lse is None else lse
        _launch(lambda: self._kernel(q, k, v, out, lse), lambda: None)
        return (out, lse) if return_lse else out

    def _kernel(self, q, k, v, out, lse) -> None:
        starts, key_starts = self._lists
        groups = q.shape[1] // k.shape[1]
        keys, values = (x.float().repeat_interleave(groups, 1).transpose(0, 1) for x in (k, v))
        for i in range(len(starts) - 1):
            rows, own = slice(starts[i], starts[i + 1]), slice(key_starts[i], key_starts[i + 1])
            scores = q[rows].float().transpose(0, 1) @ keys[:, own].transpose(1, 2) * (self._sm_scale * LOG2E)
            hidden = _mask(rows.stop - rows.start, own.stop - own.start, self._causal)
            found, base2 = _softmax(scores.masked_fill(hidden, -math.inf), values[:, own], self._kv_data_type)
            out[rows], lse[rows] = found.transpose(0, 1).to(out.dtype), base2.T


def append_paged_mla_kv_cache(
    append_ckv: Tensor,
    append_kpe: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    ckv_cache: Tensor | None,
    kpe_cache: Tensor | None,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
) -> None:
    """Write rows (n, L) and (n, R) at `positions` of the requests `batch_indices`; the library has L = 512, R = 64."""
    assert ckv_cache is not None
    assert kpe_cache is not None
    for name, x in (("batch_indices", batch_indices), ("positions", positions), ("kv_indices", kv_indices)):
        _vector(name, x, append_ckv.device)
    pages, last = _indptr("kv_indptr", kv_indptr), _vector("kv_last_page_len", kv_last_page_len)
    if len(last) != len(pages) - 1 or not len(append_ckv) == len(append_kpe) == len(positions) == len(batch_indices):
        raise ValueError("one batch index and one position a row, one last page a request")
    if len(append_ckv) == 0:
        raise RuntimeError("invalid configuration argument: a launch of no blocks")
    page = ckv_cache.shape[1]
    for name, x, cache in (("ckv", append_ckv, ckv_cache), ("kpe", append_kpe, kpe_cache)):
        if x.dtype != cache.dtype:
            raise ValueError(f"append_{name} is {x.dtype}, the cache {cache.dtype}: the kernel would reinterpret it")
        _strides(f"append_{name}", x)
        _strides(f"{name}_cache", cache)
    at = torch.tensor(pages)[batch_indices.long()] * page + positions
    if bool((positions < 0).any()) or bool((at >= torch.tensor(pages)[batch_indices.long() + 1] * page).any()):
        raise ValueError("a position outside its request's pages")
    where = kv_indices.long()[at // page], at % page
    ckv_cache[where], kpe_cache[where] = append_ckv, append_kpe


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two states, v (T, N, D) of 16 bits and s (T, N) in base 2; two empty ones give NaN, as in the library."""
    for name, x in (("v_a", v_a), ("s_a", s_a), ("v_b", v_b), ("s_b", s_b)):
        if not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    if v_a.dtype not in HALVES or v_a.dtype != v_b.dtype or v_a.shape != v_b.shape or s_a.shape != s_b.shape:
        raise ValueError(f"two states of one shape, float16 or bfloat16, got {v_a.dtype} and {v_b.dtype}")
    if v_a.shape[1] * -(-v_a.shape[2] // max(8, v_a.shape[2] // 32)) > 1024:
        raise RuntimeError("too many threads for one block: heads times vectors of a head is over 1024")
    top = torch.maximum(s_a, s_b).float()
    w_a, w_b = torch.exp2(s_a.float() - top), torch.exp2(s_b.float() - top)
    share = (w_a / (w_a + w_b))[..., None], (w_b / (w_a + w_b))[..., None]
    return (share[0] * v_a.float() + share[1] * v_b.float()).to(v_a.dtype), (w_a + w_b).log2() + top


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor, mask: Tensor | None = None) -> None:
    """Merge another state into (v, s), for the rows (T,) where mask is True."""
    new = merge_state(v, s, v_other, s_other)
    keep = torch.ones(v.shape[0], dtype=torch.bool) if mask is None else mask.bool()
    v[keep], s[keep] = new[0][keep], new[1][keep]


def merge_states(v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Merge v (T, S, N, D) of 16 bits and s (T, S, N) over their second axis."""
    if v.dtype not in HALVES or not v.is_contiguous() or not s.is_contiguous():
        raise ValueError("contiguous states of 16 bits")
    top = s.amax(1, keepdim=True)
    weights = torch.exp2(s - top)
    total = weights.sum(1)
    out = (weights[..., None] * v.float()).sum(1) / total[..., None]
    return out.to(v.dtype), total.log2() + top[:, 0]


def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: Tensor | None = None,
    bmm1_scale: float | Tensor = 1.0,
    bmm2_scale: float | Tensor = 1.0,
    sinks: list[Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: Tensor | None = None,
    sparse_mla_top_k_lens: Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Tensor | None = None,
    use_fp16_softmax: bool | None = None,
) -> Any:
    """Absorbed decode of q new tokens a request: query (B, q, N, L + R), kv_cache (pages, page, L + R), dense only.

    Causal, bottom-right, LSE in base 2 from trtllm-gen and none from xqa. Empty requests and page ids outside the cache
    are refused, since what the kernels do with them is not known; the library itself checks neither.
    """
    plain = not sparse_mla_top_k and uses_shared_paged_kv_idx and not enable_dcp and not use_fp16_softmax
    others = (sinks, skip_softmax_threshold_scale_factor, cum_seq_lens_q, max_q_len, multi_ctas_kv_counter_buffer)
    rest = (sparse_mla_top_k_lens, causal_seqlens_kv_global)
    if backend not in ("trtllm-gen", "xqa") or not plain or any(x is not None for x in (*others, *rest)):
        raise ValueError(f"the stand-in has the dense kernels trtllm-gen and xqa, got backend {backend!r}")
    if (CAPABILITY[0] != 12) if backend == "xqa" else (CAPABILITY not in ((10, 0), (10, 3))):
        raise ValueError(f"{backend} has no kernel for a device of capability {CAPABILITY}")
    if query.dtype != torch.bfloat16 or kv_cache.dtype != torch.bfloat16:
        raise ValueError(f"bfloat16 queries and rows, got {query.dtype} and {kv_cache.dtype}")
    B, q, N, width = query.shape
    if qk_rope_head_dim < 1 or not width == kv_cache.shape[-1] == kv_lora_rank + qk_rope_head_dim:
        raise ValueError(f"rows of L + R, R > 0, got {width} and {kv_cache.shape[-1]}")
    given = (query, kv_cache, block_tables, seq_lens, max_seq_len, out, lse)
    (_check_xqa if backend == "xqa" else _check_trtllm)(*given, kv_lora_rank, return_lse, workspace_buffer)
    if not isinstance(bmm1_scale, float) or not isinstance(bmm2_scale, float):
        raise ValueError(f"16-bit rows take scales that are floats, got {bmm1_scale!r} and {bmm2_scale!r}")
    _check_lists(q, kv_cache, block_tables, seq_lens, max_seq_len, B)
    out = query.new_empty(B, q, N, kv_lora_rank) if out is None else out
    lse = query.new_empty(B * q, N, dtype=torch.float32) if return_lse and lse is None else lse
    scales = bmm1_scale, bmm2_scale
    _launch(lambda: _decode(query, kv_cache, block_tables, seq_lens, out, lse, kv_lora_rank, *scales), lambda: None)
    return (out, lse) if return_lse else out


def _check_trtllm(query, cache, table, lens, longest, out, lse, L, return_lse, workspace) -> None:
    B, q, N, _ = query.shape
    if 64 < N < 128:
        raise ValueError(f"trtllm-gen has no kernel for 64 < N < 128, got {N}")
    if cache.shape[-2] not in (32, 64):
        raise ValueError(f"trtllm-gen takes pages of 32 or 64 rows, got {cache.shape[-2]}")
    query.view(B * q, N, -1)  # the kernel reads two strides
    if out is not None and (out.shape != (B, q, N, L) or out.dtype != torch.bfloat16 or not out.is_contiguous()):
        raise ValueError(f"out must be {(B, q, N, L)} of bfloat16, got {tuple(out.shape)} of {out.dtype}")
    if return_lse and lse is not None:
        if lse.dtype != torch.float32 or tuple(lse.shape) not in ((B * q, N), (B, q, N)) or not lse.is_contiguous():
            raise ValueError(f"lse must be {(B * q, N)} of float32, got {tuple(lse.shape)} of {lse.dtype}")
    rows = (8 * N * B * -(-q // 256) * 256 + (1 << 20)) if return_lse else 0
    if rows > _workspace(workspace).numel():
        raise RuntimeError(f"the workspace holds {workspace.numel()} bytes, LSEs alone take {rows}")


def _check_xqa(query, cache, table, lens, longest, out, lse, L, return_lse, workspace) -> None:
    B, q, N, _ = query.shape
    if return_lse or lse is not None:
        raise NotImplementedError("xqa returns no LSE")
    if q != 1 or N != 128:
        raise ValueError(f"xqa takes one new token of 128 heads, got {q} of {N}")
    page = cache.shape[-2]
    if page not in (16, 32, 64, 128) or table.shape[-1] % (128 / page):
        raise ValueError(f"xqa takes pages of 16 to 128 rows, in tables of 128 rows, got {page} and {table.shape[-1]}")
    if out is not None and (out.shape != (B, N, L) or out.dtype != torch.bfloat16):
        raise ValueError(f"out must be {(B, N, L)} of bfloat16, got {tuple(out.shape)} of {out.dtype}")
    if not query.is_contiguous() or (out is not None and not out.is_contiguous()):
        raise ValueError("xqa reads the query and writes the output without strides")
    if cache.stride(-2) != cache.shape[-1]:
        raise ValueError(f"xqa reads the rows of a page side by side, got strides {cache.stride()}")
    if _workspace(workspace).numel() <= SEMAPHORES or bool(workspace[:SEMAPHORES].view(torch.int64).any()):
        raise ValueError("the first bytes of the workspace are semaphores, zero at first and after every call")


def _check_lists(q, cache, table, lens, longest, B) -> None:
    """What kernels read as raw int32 memory."""
    if cache.dim() != 3 or cache.stride(-1) != 1 or any(s >= 1 << 31 for s in cache.stride()):
        raise ValueError(f"kv_cache must be (pages, page, L + R) with strides of 31 bits, got {cache.stride()}")
    if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != B or not table.is_contiguous():
        raise ValueError(f"block_tables must be contiguous int32 ({B}, pages), got {table.dtype} {tuple(table.shape)}")
    kv = _vector("seq_lens", lens, cache.device).tolist()
    if len(kv) != B or any(not q <= n <= min(longest, table.shape[1] * cache.shape[1]) for n in kv):
        raise ValueError(f"{B} lengths from {q} to {longest} that their pages hold, got {kv}")
    if bool((table < 0).any()) or bool((table >= cache.shape[0]).any()):
        raise ValueError(f"page ids must be those of {cache.shape[0]} pages, got {table.tolist()}")


def _decode(query, cache, table, lens, out, lse, L, scale, out_scale) -> None:
    B, q, N, _ = query.shape
    out, page = out.view(B, q, N, L), cache.shape[1]
    for b, keys in enumerate(lens.tolist()):
        at = torch.arange(keys)
        rows = cache[table[b].long()[at // page], at % page].float()
        scores = query[b].float().transpose(0, 1) @ rows.T * (scale * LOG2E)
        found, base2 = _softmax(scores.masked_fill(_mask(q, keys, True), -math.inf), rows[:, :L], cache.dtype)
        out[b] = (found * out_scale).transpose(0, 1).to(out.dtype)
        if lse is not None:
            lse.view(B, q, N)[b] = base2.T


mla = SimpleNamespace(
    BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper,
    trtllm_batch_decode_with_kv_cache_mla=trtllm_batch_decode_with_kv_cache_mla,
)
page = SimpleNamespace(append_paged_mla_kv_cache=append_paged_mla_kv_cache)
