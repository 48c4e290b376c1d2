"""Solutions of notebook 07: each section takes the place of the exercise cell of its name."""


# %% ex1
def roof(flops, bytes, peak, bandwidth):
    """Return the roofline time in seconds, and "memory" or "compute": which of the two sets it."""
    by_flops, by_bytes = flops / peak, bytes / bandwidth
    return max(by_flops, by_bytes), "compute" if by_flops > by_bytes else "memory"


# %% ex2
def intensity(q, N, L, R, row_bytes):
    """Return FLOP per byte of absorbed attention over a long context; all q tokens of a request use the same rows."""
    return q * N * 2 * (L + R + L) / row_bytes


# %% ex3
def per_rank(N, L, R, tp, context):
    """Return FLOPs and cache bytes of one rank."""
    return 2 * (N // tp) * context * (L + R + L), context * (L + R) * 2


# %% ex4
def free_tokens(N, L, R, ridge):
    """Return the largest q with intensity at or below the ridge, a whole number."""
    return int(ridge // (N * (2 * L + R) / (L + R)))
