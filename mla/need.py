"""What a layer asks of a tier, fixed for its life: everything that a refusal may depend on.

Axes: N heads, L KV rank, P nope, R rope, V value.
"""

import math
from dataclasses import dataclass

import torch

from mla.batch import MASKS, AttentionBatch
from mla.cache import CacheLayout
from mla.errors import bad


@dataclass(frozen=True)
class Capacity:
    """Upper bounds that a layer promises to every step; `plan` checks them, and buffers are sized from them."""

    max_requests: int
    max_tokens: int
    max_query_len: int
    max_seq_len: int
    max_splits: int = 1

    def check(self, batch: AttentionBatch) -> None:
        """Raise ValueError that names the first promise which `batch` breaks."""
        found = {
            "max_requests": batch.num_requests,
            "max_tokens": batch.num_tokens,
            "max_query_len": batch.max_query_len,
            "max_seq_len": batch.max_seq_len,
        }
        for name, value in found.items():
            if value > getattr(self, name):
                limit = getattr(self, name)
                raise bad(f"batch exceeds capacity.{name}", expected=f"at most {limit}", got=str(value), fix="raise the capacity in Need")


@dataclass(frozen=True, kw_only=True)
class Need:
    """All that a refusal may depend on, fixed for the life of a layer; frozen and hashable.

    `softmax_scale` comes from `MLAConfig.softmax_scale` and nowhere else. `lse`: False gives state.lse None. `mask`:
    "causal" (bottom-right), "full" or "rows" (explicit bounds). The fields from `window` on are features that no tier
    may drop in silence: each is computed right or refused with a sentence. `capacity` None sizes scratch per batch.
    """

    N: int
    L: int
    P: int
    R: int
    V: int
    softmax_scale: float
    layout: CacheLayout
    page_size: int
    dtype: torch.dtype
    device: str = "cpu"
    arch: str = ""
    out_dtype: torch.dtype | None = None
    lse: bool = False
    mask: str = "causal"
    uniform_queries: bool = False
    graph_capture: bool = False
    batch_invariant: bool = False
    capacity: Capacity | None = None
    window: int | None = None
    sinks: bool = False
    softcap: float | None = None
    alibi: bool = False
    kv_sharing: bool = False
    output_quantisation: str | None = None

    def __post_init__(self) -> None:
        for name, low in (("N", 1), ("L", 1), ("P", 1), ("R", 0), ("V", 1), ("page_size", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise bad(name, expected=f"an int >= {low}", got=repr(value), fix="take it from MLAConfig")
        scale = self.softmax_scale
        if not isinstance(scale, float) or not math.isfinite(scale) or scale <= 0:
            expected, fix = "a positive Python float", "use MLAConfig.softmax_scale"
            raise bad("softmax_scale", expected=expected, got=repr(scale), fix=fix, kind=TypeError if not isinstance(scale, float) else ValueError)
        if self.mask not in MASKS:
            raise bad("mask", expected=f"one of {MASKS}", got=repr(self.mask), fix="'causal' for a decoder")
        if (self.layout.L, self.layout.R) != (self.L, self.R):
            got = f"L={self.layout.L}, R={self.layout.R}"
            raise bad("layout", expected=f"L={self.L}, R={self.R}", got=got, fix="build the layout from the same config")
        for name in ("dtype", "out_dtype"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, torch.dtype) or not value.is_floating_point):
                raise bad(name, expected="a float torch.dtype", got=repr(value), fix="torch.bfloat16, for one", kind=TypeError)
        set_field = lambda name, value: object.__setattr__(self, name, value)
        set_field("device", normal_device(self.device))
        set_field("arch", self.arch or arch_of(self.device))
        set_field("out_dtype", self.out_dtype or self.dtype)

    @property
    def compute_dtype(self) -> torch.dtype:
        """promote(query dtype, float32): the dtype of scores, softmax and LSE."""
        return torch.promote_types(self.dtype, torch.float32)

    def features(self) -> dict[str, object]:
        """Return the features beyond plain MLA that are asked for, by field name."""
        names = ("window", "sinks", "softcap", "alibi", "kv_sharing", "output_quantisation")
        return {n: getattr(self, n) for n in names if getattr(self, n) not in (None, False)}


def normal_device(device: torch.device | str) -> str:
    """Return the device with its index, such as 'cuda:0'; 'cpu' has none."""
    d = torch.device(device)
    return str(d) if d.type == "cpu" or d.index is not None else f"{d.type}:0"


def arch_of(device: torch.device | str) -> str:
    """Return 'cpu', 'sm_90', 'gfx942' and so on for a device; the device type where the machine lacks the device."""
    d = torch.device(device)
    if d.type != "cuda" or not torch.cuda.is_available():
        return d.type
    properties = torch.cuda.get_device_properties(d)
    amd = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    return amd.split(":")[0] or f"sm_{properties.major}{properties.minor}"


def refuse_features(tier: str, need: Need, supported: tuple[str, ...] = ()) -> list[str]:
    """Return one sentence for each feature that `need` asks for and `tier` does not compute."""
    return [
        f"{name} = {value!r} is not computed by {tier}, which takes {name} unset only; unset it or choose a tier that has it."
        for name, value in need.features().items()
        if name not in supported
    ]
