"""Checks of notebook 01, the cache is the bill. Axes: N heads, H hidden, L KV rank, P nope, R rope, V value."""

import random
from collections.abc import Callable
from typing import Any

from check.verdict import checker, judge
from mla.config import MLAConfig

Answer = Callable[..., Any]


def _config() -> MLAConfig:
    """A config with no two sizes alike, V3's own among them now and then."""
    widths = random.choice([(512, 128, 64, 120), (384, 112, 48, 80), (256, 96, 32, 72)])
    heads = random.choice([16, 32, 64])
    return MLAConfig(
        hidden_size=heads * 60,
        num_attention_heads=heads,
        q_lora_rank=None,
        kv_lora_rank=widths[0],
        qk_nope_head_dim=widths[1],
        qk_rope_head_dim=widths[2],
        v_head_dim=widths[3],
        num_hidden_layers=random.randint(20, 61),
    )


@checker
def kept_keys_and_values(answer: Answer) -> tuple[bool, str]:
    """Judge `kept_keys_and_values(c, kv_heads, itemsize)`."""
    c, heads, size = _config(), random.choice([1, 4, 8]), random.choice([1, 2, 4])
    layers = c.num_hidden_layers
    each = lambda width: layers * heads * width * size
    wrong = {
        "that is the published formula: no head is hidden / heads wide": each(2 * (c.H // c.N)),
        "the layers are missing": heads * (c.P + c.R + c.V) * size,
        "the size of a number in bytes is missing": layers * heads * (c.P + c.R + c.V),
        "keys have P + R numbers: the rope part is missing": each(c.P + c.V),
        "2 x (P + R): a value is V wide, not as wide as a key": each(2 * (c.P + c.R)),
        "2 x V: a key is P + R wide": each(2 * c.V),
        "N heads: grouped attention keeps kv_heads of them": layers * c.N * (c.P + c.R + c.V) * size,
        "the heads are missing": layers * (c.P + c.R + c.V) * size,
        "doubled: P + R is the key and V is the value, both are in": each(2 * (c.P + c.R + c.V)),
    }
    return judge(_whole(answer(c, heads, size)), each(c.P + c.R + c.V), wrong, "a key is P + R wide, a value V")


@checker
def kept_rows(answer: Answer) -> tuple[bool, str]:
    """Judge `kept_rows(c, itemsize)`."""
    c, size = _config(), random.choice([1, 2, 4])
    each = lambda width: c.num_hidden_layers * width * size
    wrong = {
        "that is the published formula; both faults are still in": each(2 * c.L),
        "the 2 is gone and the position key is still missing": each(c.L),
        "the position key is in and the 2 still there: keys and values share one latent": each(2 * (c.L + c.R)),
        "the 2 is left on the latent: keys and values share it": each(2 * c.L + c.R),
        "every head has its own row here; the row is shared by all": c.N * each(c.L + c.R),
        "the layers are missing": (c.L + c.R) * size,
        "the size of a number in bytes is missing": c.num_hidden_layers * (c.L + c.R),
        "that is a cache of expanded keys and values": c.N * each(c.P + c.R + c.V),
    }
    return judge(_whole(answer(c, size)), each(c.L + c.R), wrong, "one latent and one position key, for all heads")


@checker
def tokens_that_fit(answer: Answer) -> tuple[bool, str]:
    """Judge `tokens_that_fit(c, free, tp, itemsize, kv_heads=None)`."""
    c, size = _config(), 2
    free = random.randint(20, 60) * 10**9 + 17
    row = c.num_hidden_layers * (c.L + c.R) * size
    for tp in (4, 1, 8):
        wrong = {
            "tp times too many: each GPU keeps the whole row of every token": tp * free // row,
            "tp times too many: GPUs do not hold other tokens, each keeps the whole row of all": free // row * tp,
            "tp times too few: free is what each GPU has": free // (row * tp),
            "the layers are missing": free // ((c.L + c.R) * size),
            "one too many: a token that does not fit whole does not fit": -(-free // row),
        }
        if tp == 1:
            wrong = {why: value for why, value in wrong.items() if value != free // row}
        ok, why = judge(_whole(answer(c, free, tp, size)), free // row, wrong)
        if not ok:
            return ok, f"MLA on {tp} GPUs: {why}"
    kv = c.num_hidden_layers * (c.P + c.R + c.V) * size
    for tp, heads, share in ((4, 8, 2), (8, 4, 1), (1, 4, 4)):
        wrong = {
            "every GPU keeps kv_heads / tp heads only": free // (heads * kv),
            "a GPU cannot keep less than one head": free * tp // (heads * kv),
            "that is MLA's answer: here kv_heads are given": free // row,
        }
        wrong = {name: value for name, value in wrong.items() if value != free // (share * kv)}
        ok, why = judge(_whole(answer(c, free, tp, size, heads)), free // (share * kv), wrong)
        if not ok:
            return ok, f"{heads} KV heads on {tp} GPUs: {why}"
    return True, "MLA's answer does not depend on tp"


@checker
def packed_row_bytes(answer: Answer) -> tuple[bool, str]:
    """Judge `packed_row_bytes(L, R, block=128)`."""
    for L, R, block in ((512, 64, 128), (256, 32, 64), (384, 128, 128)):
        scales = L // block
        wrong = {
            "everything in one byte, no scales": L + R,
            "the scales are missing": L + 2 * R,
            "the position key is in bf16, 2 bytes each": L + 4 * scales + R,
            "the position key is missing": L + 4 * scales,
            "a scale has 4 bytes": L + scales + 2 * R,
            "one scale for the whole latent: there is one per block": L + 4 + 2 * R,
            "the position key gets no scales": L + 4 * -(-(L + R) // block) + 2 * R,
        }
        ok, why = judge(_whole(answer(L, R, block)), L + 4 * scales + 2 * R, wrong)
        if not ok:
            return ok, f"L={L}, R={R}, blocks of {block}: {why}"
    return True, "656 bytes for V3's widths instead of 1,152"


def _whole(value: Any) -> Any:
    """An answer such as 1152.0 counts as whole."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
