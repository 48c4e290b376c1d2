class Care:
    """How a case's memory is handled: make the inputs, fill a tier's cache, copy what must stay as it is."""

    inputs: Callable[[Case, str], Inputs]
    fill: Callable[[Tier, Case, Inputs, str], PagedLatentCache]
    seen: Callable[[PagedLatentCache, Inputs], Tensor]


def large() -> list[Case]:
