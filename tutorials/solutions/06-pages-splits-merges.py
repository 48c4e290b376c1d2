"""Solutions of notebook 06: each section takes the place of the exercise cell of its name."""

import torch

from mla.state import merge


# %% ex1
def slots(table, start, stop, page_size):
    """Return a tensor (stop - start,) of slots; `table` is one row of the block table, an int32 tensor."""
    at = torch.arange(start, stop)
    return table[at // page_size].long() * page_size + at % page_size


# %% ex2
def visible(query_len, seq_len):
    """Return `query_len` counts, the keys that each new token sees."""
    return [seq_len - query_len + i + 1 for i in range(query_len)]


# %% ex3
def weigh(weights, rows, live):
    """Return (M, L) from weights (M, K), rows (K, L) and live (K,), True where a row may be read."""
    return weights @ torch.where(live[:, None], rows, 0.0)


# %% ex4
def merge_two(out_a, lse_a, out_b, lse_b):
    """Return out (T, N, V) and lse (T, N) over the union; lse natural, -inf where a part has no key."""
    top = torch.maximum(lse_a, lse_b)
    top = torch.where(top == float("-inf"), 0.0, top)  # -inf - -inf is NaN
    w_a, w_b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = w_a + w_b
    share = torch.where(total > 0, w_a / total, 0.0)[..., None]
    rest = torch.where(total > 0, w_b / total, 0.0)[..., None]
    return share * out_a + rest * out_b, top + torch.log(total)


# %% ex5
def in_chunks(attend, keys, row_kv_lens, cap):
    """Return the AttentionState over keys 0 .. keys - 1; row t sees the first row_kv_lens[t] of them."""
    state = None
    for start in range(0, keys, cap):
        stop = min(start + cap, keys)
        part = attend(start, stop, (row_kv_lens - start).clamp(0, stop - start))
        state = part if state is None else merge(state, part)
    return state
