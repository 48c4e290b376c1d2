"""Solutions of notebook 01: each section takes the place of the exercise cell of its name."""


# %% ex1
def kept_keys_and_values(c, kv_heads, itemsize):
    return c.num_hidden_layers * kv_heads * (c.P + c.R + c.V) * itemsize


# %% ex2
def kept_rows(c, itemsize):
    return c.num_hidden_layers * (c.L + c.R) * itemsize


# %% ex3
def tokens_that_fit(c, free, tp, itemsize, kv_heads=None):
    if kv_heads is None:
        numbers = c.L + c.R
    else:
        numbers = max(kv_heads // tp, 1) * (c.P + c.R + c.V)
    return free // (c.num_hidden_layers * numbers * itemsize)


# %% ex4
def packed_row_bytes(L, R, block=128):
    return L + 4 * (L // block) + 2 * R
