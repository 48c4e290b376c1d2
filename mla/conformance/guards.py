"""Memory that a tier must leave alone: poisoned slots, guard rows, its inputs; and the form of what it returns.

Axes: T new tokens (packed over requests), N heads, V value.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mla.batch import AttentionBatch
from mla.cache import CacheSpec, PagedLatentCache, slots_of
from mla.conformance.cases import Case
from mla.conformance.inputs import Inputs, make_inputs, poison
from mla.need import Need, normal_device
from mla.state import AttentionState
from mla.tier import Plan, Prepared, Tier

GUARD_ROWS = 3
GUARD = float("nan")
LAYERS, SPARE_COLUMNS = 3, 64  # of the tensors that wrapped caches are cut from


class Wrong(Exception):
    """What is found beside the numbers: the status of a result, a sentence, and the kind of fault that it means.

    `kind` is one of the fault kinds "write", "memory" and "form".
    """

    def __init__(self, status: str, detail: str, kind: str = "form") -> None:
        """Hold all three for the result."""
        super().__init__(detail)
        self.status, self.detail, self.kind = status, detail, kind


def filled_cache(tier: Tier, case: Case, given: Inputs, device: str) -> PagedLatentCache:
    """Return the cache of a case, poisoned, written the tier's way and read back; raises Wrong."""
    cache = fill_cache(tier, case, given, device)
    check_cache(case, given, cache.data, memory_of(cache))
    return cache


def fill_cache(tier: Tier, case: Case, given: Inputs, device: str) -> PagedLatentCache:
    """Poison the case's cache, the tier's own or a wrapped one, and write old rows and then new ones the tier's way.

    Raises Wrong where the tier's own cache is not of the form that was asked for; what was written is not looked at.
    """
    page, layout = case.page_size, case.cache_layout
    if case.cache == "plain":
        cache = tier.new_cache(CacheSpec(given.num_pages, page, layout, device))
        expected = ((given.num_pages, page, layout.storage_width), layout.storage_dtype)
        if (tuple(cache.data.shape), cache.data.dtype) != expected or cache.layout != layout:
            found = f"{cache.layout} {tuple(cache.data.shape)} of {cache.data.dtype}"
            raise Wrong("wrong_shape", f"new_cache gave {found}, expected {layout} {expected[0]}", "form")
        poison(cache)
    else:
        cache = _poisoned(case, given.num_pages, device)
    for b, (old, (kv_c, k_pe)) in enumerate(zip(given.history, given.keys, strict=True)):
        slots = slots_of(given.batch.block_table[b], 0, kv_c.shape[0], page)[old]
        tier.write(cache, kv_c[old], k_pe[old], slots)
    tier.write(cache, given.new_kv_c, given.new_k_pe, given.batch.slot_mapping)
    return cache


def check_cache(case: Case, given: Inputs, data: Tensor, around: Tensor) -> None:
    """Raise Wrong unless a written cache, data (pages, page_size, storage_width), holds what it should and no more.

    Owned slots must hold what the plain layout gives back, every other slot the poison it held; `around`, bytes (n,)
    of `memory_of` the same cache, is compared too where the cache is cut out of a larger tensor.
    """
    page, layout, owned = case.page_size, case.cache_layout, given.owned_slots()
    at = (owned // page, owned % page)
    packed = [torch.cat(parts) for parts in zip(*given.keys, strict=True)]
    right = layout.round_trip(*packed or (given.new_kv_c[:0], given.new_k_pe[:0]))
    for name, stored, expected in zip(("kv_c", "k_pe"), layout.read(data[at]), right, strict=True):
        wrong = (stored != expected).any(-1) if expected.shape[-1] else torch.zeros_like(owned, dtype=torch.bool)
        if bool(wrong.any()):
            slot = int(owned[wrong][0])
            found = f"{name} read back from slot {slot} (page {slot // page}, row {slot % page})"
            raise Wrong("mismatch", f"{found} is not what was written", "write")
    untouched = _poisoned(case, given.num_pages, data.device).data
    untouched[at] = data[at]
    changed = (_bytes(data) != _bytes(untouched)).any(-1).flatten()
    if bool(changed.any()):
        raise Wrong("mismatch", f"write changed slot {int(changed.nonzero()[0])}, which no request owns", "write")
    if case.cache != "plain" and not torch.equal(around, _storage(untouched)):
        raise Wrong("mismatch", "write changed memory between the rows of a wrapped cache", "write")


def memory_of(cache: PagedLatentCache) -> Tensor:
    """Return a copy of a cache's memory as bytes (n,), including what lies between pages or rows that are apart."""
    return _bytes(cache.data).flatten() if cache.data.is_contiguous() else _storage(cache.data).clone()


def _poisoned(case: Case, pages: int, device: torch.device | str) -> PagedLatentCache:
    """A new cache that lies in memory as the case wants it, full of poison."""
    page, layout, width = case.page_size, case.cache_layout, case.cache_layout.storage_width
    shape = {"layers": (pages, LAYERS, page, width), "strided": (pages, page, width + SPARE_COLUMNS)}
    whole = torch.empty(shape.get(case.cache, (pages, page, width)), dtype=layout.storage_dtype, device=device)
    _storage(whole).fill_(255)  # NaN in every float format
    cache = PagedLatentCache.wrap(whole[:, 1] if case.cache == "layers" else whole[..., :width], layout)
    poison(cache)
    return cache


def _storage(x: Tensor) -> Tensor:
    """All bytes (n,) of the memory that a tensor of any shape is a view of."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def planned(tier: Tier, case: Case, need: Need, prepared: Prepared, batch: AttentionBatch) -> Plan:
    """Return the plan of a case: a fresh one, or one that an earlier batch has used and that is refilled for this one.

    The earlier batch has inputs and a cache of its own, so that whatever stays in the plan's memory is wrong here.
    Raises Wrong where the refilled plan is not the one that was given.
    """
    if case.earlier is None:
        return tier.plan(need, batch)
    given = make_inputs(case.earlier, need.device)
    plan = tier.plan(need, given.batch)
    tier.attend(given.q, fill_cache(tier, case.earlier, given, need.device), prepared, plan)
    if tier.plan(need, batch, plan) is not plan:
        raise Wrong("mismatch", "plan(into=...) did not return the plan that it was given", "form")
    return plan


def run_repeats(
    case: Case, kept: AttentionState, again: Callable[[], AttentionState]
) -> tuple[int, AttentionState] | None:
    """Attend `case.repeats` times more and return the first state that is not `kept` in bits, with its number.

    out (T, N, V) and lse (T, N); None where all are equal.
    """
    for k in range(1, case.repeats + 1):
        state = again()
        if not all(
            a is b or (a is not None and b is not None and _same(a, b)) for a, b in zip(state, kept, strict=True)
        ):
            return k, state
    return None


def check_repeats(differs: tuple[int, AttentionState] | None) -> None:
    """Raise Wrong where `run_repeats` found a state, out (T, N, V), that differs."""
    if differs is not None:
        detail = f"attend number {differs[0]} of the same inputs differs in bits from the first"
        raise Wrong("mismatch", detail, "memory")


def check_form(state: AttentionState, need: Need, T: int) -> None:
    """Raise Wrong unless the state is two plain tensors, out (T, N, V) and lse (T, N) or None, as the Need promises."""
    if (state.lse is not None) != need.lse:
        raise Wrong(
            "wrong_shape", f"lse is {'None' if state.lse is None else 'a tensor'}, but Need.lse is {need.lse}", "form"
        )
    expected = {"out": ((T, need.N, need.V), need.out_dtype), "lse": ((T, need.N), need.compute_dtype)}
    for name, (shape, dtype) in expected.items():
        x = getattr(state, name)
        if x is None:
            continue
        if type(x) is not Tensor or tuple(x.shape) != shape:
            found = f"{name} is a {type(x).__name__} {tuple(x.shape)}"
            raise Wrong("wrong_shape", f"{found}, expected a Tensor {shape}", "form")
        if x.dtype != dtype or normal_device(x.device) != need.device:
            raise Wrong("wrong_dtype", f"{name} is {x.dtype} on {x.device}, expected {dtype} on {need.device}", "form")


def guarded_buffers(need: Need, T: int) -> tuple[AttentionState, list[Tensor]]:
    """Return out buffers, (T, N, V) and (T, N), that lie between guard rows, all of it NaN, and the guards."""
    shapes = [((need.N, need.V), need.out_dtype)] + ([((need.N,), need.compute_dtype)] if need.lse else [])
    wholes = [torch.full((T + 2 * GUARD_ROWS, *s), GUARD, dtype=d, device=need.device) for s, d in shapes]
    inner = [x[GUARD_ROWS : GUARD_ROWS + T] for x in wholes]
    guards = [g for x in wholes for g in (x[:GUARD_ROWS], x[GUARD_ROWS + T :])]
    return AttentionState(inner[0], inner[1] if need.lse else None), guards


def check_guards(guards: list[Tensor]) -> None:
    """Raise Wrong where a guard, (GUARD_ROWS, N, V) or (GUARD_ROWS, N), is not what `guarded_buffers` made it."""
    for guard in guards:
        if not _same(guard, torch.full_like(guard, GUARD)):
            raise Wrong("mismatch", "rows before or after the caller's out buffers were written", "memory")


def check_same(name: str, now: Tensor | None, was: Tensor | None) -> None:
    """Raise Wrong where a tensor of any shape is not what it was, bit for bit, NaN included."""
    if now is None or was is None:
        return
    if not _same(now, was):
        raise Wrong("mismatch", f"{name} was changed", "memory")


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))


def _bytes(x: Tensor) -> Tensor:
    # a copy: an axis of length 1 counts as contiguous with any stride, but cannot be viewed as bytes
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)


@contextmanager
def uninitialised_memory_is_nan(device: str) -> Iterator[None]:
    """Make torch.empty give NaN on the CPU, so that memory which a tier forgets to write shows."""
    if device != "cpu":
        yield
        return
    was = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        torch.set_deterministic_debug_mode(was)
