"""Solutions of notebook 03: each section takes the place of the exercise cell of its name."""

import torch


# %% ex1
def rotate_neighbours(x, angles):
    a, b = x[0::2], x[1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten()


# %% ex2
def column_order(R):
    return [*range(0, R, 2), *range(1, R, 2)]


# %% ex3
def blend(plain, keep, factor):
    return plain * keep + plain / factor * (1 - keep)


# %% ex4
def softmax_scale(P, R, L, factor, mscale_all_dim):
    import math

    m = 1.0 if factor is None else 0.1 * mscale_all_dim * math.log(factor) + 1
    return (P + R) ** -0.5 * m**2
