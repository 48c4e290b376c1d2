"""All tiers of this repository in all their forms, for tests that loop over them within one case."""

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
