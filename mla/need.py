"""What a layer asks of a tier, fixed for its life: everything that a refusal may depend on.

Axes: N heads, L KV rank, P nope, R rope, V value.
"""

import math
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from mla.batch import MASKS, AttentionBatch
from mla.cache import FLOAT_DTYPES, CacheLayout
from mla.checks import check_int
from mla.errors import bad


@dataclass(frozen=True)
class Capacity:
    """Upper bounds that a layer promises to every step; `plan` checks them, and buffers are sized from them."""

    max_requests: int
    max_tokens: int
    max_query_len: int
    max_seq_len: int
    max_splits: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_int(f"capacity.{name}", value, 1, "promise at least one")

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
                expected = f"at most {getattr(self, name)}"
                raise bad(f"batch exceeds capacity.{name}", expected=expected, got=str(value), fix="raise it in Need")


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
            check_int(name, getattr(self, name), low, "take it from MLAConfig")
        _check_scale("softmax_scale", self.softmax_scale, "use MLAConfig.softmax_scale")
        if self.mask not in MASKS:
            raise bad("mask", expected=f"one of {MASKS}", got=repr(self.mask), fix="'causal' for a decoder")
        if (getattr(self.layout, "L", None), getattr(self.layout, "R", None)) != (self.L, self.R):
            fix = "build the layout from the same config"
            raise bad("layout", expected=f"a layout of L={self.L}, R={self.R}", got=repr(self.layout), fix=fix)
        for name in ("dtype", "out_dtype"):
            value = getattr(self, name)
            if value not in FLOAT_DTYPES and not (name == "out_dtype" and value is None):
                expected, fix = f"one of {FLOAT_DTYPES}", "torch.bfloat16, for one"
                raise bad(name, expected=expected, got=repr(value), fix=fix, kind=TypeError)
        self._check_features()
        object.__setattr__(self, "device", normal_device(self.device))
        object.__setattr__(self, "arch", self.arch or arch_of(self.device))
        object.__setattr__(self, "out_dtype", self.out_dtype or self.dtype)

    def _check_features(self) -> None:
        flags = ("lse", "uniform_queries", "graph_capture", "batch_invariant", "sinks", "alibi", "kv_sharing")
        for name in flags:
            if not isinstance(getattr(self, name), bool):
                raise bad(name, expected="True or False", got=repr(getattr(self, name)), fix="a bool", kind=TypeError)
        if self.window is not None:
            check_int("window", self.window, 1, "None for no window")
        if self.softcap is not None:
            _check_scale("softcap", self.softcap, "None for no cap")
        if self.output_quantisation is not None and not isinstance(self.output_quantisation, str):
            got = repr(self.output_quantisation)
            raise bad("output_quantisation", expected="a name or None", got=got, fix="None for none", kind=TypeError)
        if self.capacity is not None and not isinstance(self.capacity, Capacity):
            raise bad("capacity", expected="a Capacity or None", got=repr(self.capacity), fix="None", kind=TypeError)

    @property
    def compute_dtype(self) -> torch.dtype:
        """promote(query dtype, float32): the dtype of scores, softmax and LSE."""
        return torch.promote_types(self.dtype, torch.float32)

    def features(self) -> dict[str, object]:
        """Return the features beyond plain MLA that are asked for, by field name."""
        names = ("window", "sinks", "softcap", "alibi", "kv_sharing", "output_quantisation")
        return {n: getattr(self, n) for n in names if getattr(self, n) not in (None, False)}


def normal_device(device: torch.device | str) -> str:
    """Return the device with its index, such as 'cuda:0'; 'cpu' has none. Raises ValueError for no device of torch."""
    try:
        d = torch.device(device)
    except RuntimeError as error:
        raise bad("device", expected="a torch device", got=repr(device), fix="'cpu' or 'cuda:0', for two") from error
    return "cpu" if d.type == "cpu" else f"{d.type}:{d.index or 0}"


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
        f"{name} = {value!r} is not computed by {tier}, which takes {name} unset only; unset it or choose another tier."
        for name, value in need.features().items()
        if name not in supported
    ]


def refuse_package(tier: str, distribution: str, minimum: str, extra: str) -> list[str]:
    """Return a sentence where `distribution` is missing or older than `minimum`, else []; nothing is imported.

    Releases compare by their numbers: 0.6.18.post1 is 0.6.18.
    """
    fix = f'run pip install "mla-tiers[{extra}]" or choose another tier.'
    try:
        found = version(distribution)
    except PackageNotFoundError:
        return [f"{distribution} is not installed; {tier} needs {distribution} >= {minimum}; {fix}"]
    if _release(found) < _release(minimum):
        return [f"{distribution} {found} is too old; {tier} needs {distribution} >= {minimum}; {fix}"]
    return []


def _release(text: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(n) for n in re.sub(r"(\.0+)+$", "", found[0]).split(".")) if found else ()


def _check_scale(name: str, value: object, fix: str) -> None:
    if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
        kind = ValueError if isinstance(value, float) else TypeError
        raise bad(name, expected="a positive Python float", got=repr(value), fix=fix, kind=kind)
