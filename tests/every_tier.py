"""All tiers of this repository in all their forms, for tests that loop over them within one case."""

import torch

import tiers
from mla.tier import Tier


def every_tier(page_size: int, keys: int = 0) -> dict[str, Tier]:
    """Return the tiers by name; a tiny workspace holds about a seventh of `keys`, and at least one page."""
    tiny = page_size * max(1, keys // (7 * page_size))
    found = {n: tiers.get(n) for n in ("naive:mha", "naive:mqa", "template", "paged", "paged:mha", "paged:mqa")}
    for form in ("auto", "mha", "mqa"):
        found[f"paged:{form} in {tiny} rows"] = tiers.get("paged", form=form, max_workspace_tokens=tiny)
    found["decode=paged+prefill=naive"] = tiers.compose(tiers.get("paged"), tiers.get("naive"), decode_query_len=4)
    return found


def triton_tiers(page_size: int, keys: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tier]:
    """Return the forms of the Triton tier for a dtype, by name; it does not expand float16, so "mha" is left out there.

    For processes that can run it (`triton_here`). A tiny workspace holds what `every_tier` gives it.
    """
    found = {n: tiers.get(n) for n in ("triton", "triton:mqa")}
    if dtype != torch.float16:
        tiny = page_size * max(1, keys // (7 * page_size))
        found["triton:mha"] = tiers.get("triton:mha")
        found[f"triton:mha in {tiny} rows"] = tiers.get("triton:mha", max_workspace_tokens=tiny)
    return found
