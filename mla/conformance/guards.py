"""Memory that a tier must leave alone: poisoned slots, guard rows, its inputs; and the form of what it returns.

Axes: T new tokens (packed over requests), N heads, V value.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mla.cache import CacheSpec, PagedLatentCache, slots_of
from mla.conformance.cases import Case
from mla.conformance.inputs import Inputs, poison
from mla.need import Need, normal_device
from mla.state import AttentionState
from mla.tier import Tier

GUARD_ROWS = 3
GUARD = float("nan")


class Wrong(Exception):
    """What is found beside the numbers: the status of a result and a sentence."""

    def __init__(self, status: str, detail: str) -> None:
        """Hold both for the result."""
        super().__init__(detail)
        self.status, self.detail = status, detail


def filled_cache(tier: Tier, case: Case, given: Inputs, device: str) -> PagedLatentCache:
    """Poison the tier's own cache, write old rows and then new ones the tier's way, and read all of it back.

    Owned slots must hold what the plain layout gives back, every other slot the poison it held.
    """
    page, layout = case.page_size, case.cache_layout
    cache = tier.new_cache(CacheSpec(given.num_pages, page, layout, device))
    expected = (given.num_pages, page, layout.storage_width)
    if tuple(cache.data.shape) != expected or cache.layout != layout:
        raise Wrong(
            "wrong_shape", f"new_cache gave {cache.layout} {tuple(cache.data.shape)}, expected {layout} {expected}"
        )
    poison(cache)
    before = cache.data.clone()
    for b, (old, (kv_c, k_pe)) in enumerate(zip(given.history, given.keys, strict=True)):
        slots = slots_of(given.batch.block_table[b], 0, kv_c.shape[0], page)[old]
        tier.write(cache, kv_c[old], k_pe[old], slots)
    tier.write(cache, given.new_kv_c, given.new_k_pe, given.batch.slot_mapping)
    owned = given.owned_slots()
    got = layout.read(cache.data[owned // page, owned % page])
    packed = [torch.cat(parts) for parts in zip(*given.keys, strict=True)] or [
        x[:0] for x in (given.new_kv_c, given.new_k_pe)
    ]
    for name, stored, right in zip(("kv_c", "k_pe"), got, layout.round_trip(*packed), strict=True):
        wrong = (stored != right).any(-1) if right.shape[-1] else torch.zeros_like(owned, dtype=torch.bool)
        if bool(wrong.any()):
            slot = int(owned[wrong][0])
            raise Wrong(
                "mismatch",
                f"{name} read back from slot {slot} (page {slot // page}, row {slot % page}) is not what was written",
            )
    spared = torch.ones(given.num_pages * page, dtype=torch.bool, device=device)
    spared[owned] = False
    changed = (_bytes(cache.data) != _bytes(before)).any(-1).flatten() & spared
    if bool(changed.any()):
        raise Wrong("mismatch", f"write changed slot {int(changed.nonzero()[0])}, which no request owns")
    return cache


def check_form(state: AttentionState, need: Need, T: int) -> None:
    """Raise Wrong unless the state is two plain tensors, out (T, N, V) and lse (T, N) or None, as the Need promises."""
    if (state.lse is not None) != need.lse:
        raise Wrong("wrong_shape", f"lse is {'None' if state.lse is None else 'a tensor'}, but Need.lse is {need.lse}")
    expected = {"out": ((T, need.N, need.V), need.out_dtype), "lse": ((T, need.N), need.compute_dtype)}
    for name, (shape, dtype) in expected.items():
        x = getattr(state, name)
        if x is None:
            continue
        if type(x) is not Tensor or tuple(x.shape) != shape:
            raise Wrong("wrong_shape", f"{name} is a {type(x).__name__} {tuple(x.shape)}, expected a Tensor {shape}")
        if x.dtype != dtype or normal_device(x.device) != need.device:
            raise Wrong("wrong_dtype", f"{name} is {x.dtype} on {x.device}, expected {dtype} on {need.device}")


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
        if not bool((_bytes(guard) == _bytes(torch.full_like(guard, GUARD))).all()):
            raise Wrong("mismatch", "rows before or after the caller's out buffers were written")


def check_same(name: str, now: Tensor | None, was: Tensor | None) -> None:
    """Raise Wrong where a tensor of any shape is not what it was, bit for bit, NaN included."""
    if now is None or was is None:
        return
    if now.shape != was.shape or now.dtype != was.dtype or not bool((_bytes(now) == _bytes(was)).all()):
        raise Wrong("mismatch", f"{name} was changed")


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
