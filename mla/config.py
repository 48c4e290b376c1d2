"""What a model's attention looks like: frozen settings under their Hugging Face names, and the softmax scale.

Axes: T new tokens (packed over requests), S cached tokens, B requests, N heads, H hidden, Lq query rank, L KV rank,
P nope, R rope, V value.
"""

import dataclasses
import math
import sys
from dataclasses import dataclass
from os import PathLike
from typing import Any, Self

from mla.errors import bad

ROPE_TYPES = ("default", "yarn", "deepseek_yarn", "none", "longrope")
YARN_TYPES = ("yarn", "deepseek_yarn")


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's magnitude `m(f, a) = 0.1 a ln f + 1` for f > 1, and 1 otherwise.

    `factor` is the context extension f and `mscale` the coefficient a, both unitless; so is the result.
    Source: YaRN (arXiv 2309.00071) section 3.4, with the coefficient DeepSeek-V2 added.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _positive(field: str, value: Any, kind: type = float) -> None:
    wanted = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, wanted) or not 0 < value <= sys.float_info.max:
        what = "a positive int" if kind is int else "a positive finite number"
        raise bad(field, expected=what, got=repr(value), fix=f"set {field} to {what}")


def _boolean(field: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise bad(field, expected="True or False", got=repr(value), fix=f"set {field} to a bool", kind=TypeError)


@dataclass(frozen=True)
class RopeConfig:
    """How the R position dimensions are rotated; names as in a model's `rope_parameters`.

    `type` "default" is plain RoPE; "yarn" the generic YaRN; "deepseek_yarn" DeepSeek's, which differs only in the
    amplitude of cos and sin; "none" leaves R > 0 dimensions unrotated; "longrope" can be stored but not computed.
    `interleaved` rotates adjacent pairs (2i, 2i+1), otherwise (i, i + R/2). `theta` is the base, `factor` the context
    extension, `original_max_position_embeddings` the trained length in tokens, from which YaRN takes its ramp
    whatever the sequence length; `llama_4_scaling_beta` None switches the query scaling off. Raises ValueError
    naming the field. Sources: RoFormer (arXiv 2104.09864) section 3.2.2, YaRN (arXiv 2309.00071) section 3.
    """

    type: str = "default"
    theta: float = 10000.0
    interleaved: bool = True
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    llama_4_scaling_beta: float | None = None

    def __post_init__(self) -> None:
        if self.type not in ROPE_TYPES:
            raise bad(
                "rope.type", expected=f"one of {', '.join(ROPE_TYPES)}", got=repr(self.type), fix="use one of these"
            )
        _positive("rope.theta", self.theta)
        if self.theta <= 1.0:
            raise bad("rope.theta", expected="a base above 1", got=repr(self.theta), fix="use the model's rope_theta")
        for field in ("interleaved", "truncate"):
            _boolean(f"rope.{field}", getattr(self, field))
        for field in ("mscale", "mscale_all_dim", "llama_4_scaling_beta"):
            value = getattr(self, field)
            if value is not None and value != 0:
                _positive(f"rope.{field}", value)
        for field in ("beta_fast", "beta_slow", "factor", "original_max_position_embeddings", "attention_factor"):
            value = getattr(self, field)
            if value is not None:
                _positive(f"rope.{field}", value, kind=int if field == "original_max_position_embeddings" else float)
        if self.type in YARN_TYPES:
            self._check_yarn()
        elif self.type == "default" and self.factor not in (None, 1.0):
            raise bad(
                "rope.factor", expected="no factor with type 'default'", got=repr(self.factor), fix="use type 'yarn'"
            )
        if self.llama_4_scaling_beta is not None and self.original_max_position_embeddings is None:
            raise bad(
                "rope.original_max_position_embeddings",
                expected="a length in tokens, because llama_4_scaling_beta is set",
                got="None",
                fix="add original_max_position_embeddings or remove llama_4_scaling_beta",
            )

    def _check_yarn(self) -> None:
        for field in ("factor", "original_max_position_embeddings"):
            if getattr(self, field) is None:
                raise bad(
                    f"rope.{field}", expected=f"a value, because type is {self.type!r}", got="None", fix=f"add {field}"
                )
        if self.factor is not None and self.factor < 1:
            raise bad(
                "rope.factor", expected="at least 1 with YaRN", got=repr(self.factor), fix="use the model's factor"
            )
        if self.beta_fast < self.beta_slow:
            raise bad(
                "rope.beta_fast", expected=f">= beta_slow ({self.beta_slow})", got=repr(self.beta_fast), fix="swap them"
            )
        if self.type == "deepseek_yarn" and self.attention_factor is not None:
            raise bad(
                "rope.attention_factor",
                expected="None with type 'deepseek_yarn', whose amplitude comes from mscale and mscale_all_dim",
                got=repr(self.attention_factor),
                fix="use type 'yarn' or remove attention_factor",
            )


@dataclass(frozen=True)
class MLAConfig:
    """One model's MLA under its Hugging Face field names, with the axis letters as properties.

    `q_lora_rank` None means a direct `q_proj`; `q_lora_multiplier` and `kv_lora_multiplier` scale the query and KV
    latents after their norms; `unsupported` holds one sentence per Hugging Face field this package cannot compute
    (see `require_supported`). `max_position_embeddings` is the usable length in tokens, never times `factor`.
    `num_key_value_heads` has no place here: every head has its own key and value. Raises ValueError naming the field.
    Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1 and appendix C.
    """

    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: RopeConfig = RopeConfig()
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    max_position_embeddings: int = 4096
    num_hidden_layers: int = 1
    q_lora_multiplier: float = 1.0
    kv_lora_multiplier: float = 1.0
    name: str = "custom"
    unsupported: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        dims = ("hidden_size", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
        for field in (*dims, "max_position_embeddings", "num_hidden_layers"):
            _positive(field, getattr(self, field), kind=int)
        if self.q_lora_rank is not None:
            _positive("q_lora_rank", self.q_lora_rank, kind=int)
        R = self.qk_rope_head_dim
        if not isinstance(R, int) or isinstance(R, bool) or R < 0 or R % 2:
            raise bad(
                "qk_rope_head_dim",
                expected="an even int >= 0",
                got=repr(R),
                fix="rotation works on pairs; 0 means none",
            )
        for field in ("rms_norm_eps", "q_lora_multiplier", "kv_lora_multiplier"):
            _positive(field, getattr(self, field))
        _boolean("attention_bias", self.attention_bias)
        if not isinstance(self.rope, RopeConfig):
            raise bad("rope", expected="a RopeConfig", got=repr(self.rope), fix="see MLAConfig.from_hf", kind=TypeError)
        if self.q_lora_rank is None and self.q_lora_multiplier != 1.0:
            raise bad(
                "q_lora_multiplier",
                expected="1.0 without q_lora_rank",
                got=repr(self.q_lora_multiplier),
                fix="remove it",
            )

    @property
    def H(self) -> int:
        """Hidden size."""
        return self.hidden_size

    @property
    def N(self) -> int:
        """Number of heads."""
        return self.num_attention_heads

    @property
    def Lq(self) -> int | None:
        """Query rank, or None for a direct query projection."""
        return self.q_lora_rank

    @property
    def L(self) -> int:
        """KV rank: the width of the cached latent."""
        return self.kv_lora_rank

    @property
    def P(self) -> int:
        """Width of the position-free part of one head's query and key."""
        return self.qk_nope_head_dim

    @property
    def R(self) -> int:
        """Width of the rotated part, shared by all heads on the key side."""
        return self.qk_rope_head_dim

    @property
    def V(self) -> int:
        """Width of one head's value."""
        return self.v_head_dim

    @property
    def softmax_scale(self) -> float:
        """The factor on every score, `(P + R)^-0.5 * m(factor, mscale_all_dim)^2`, unitless.

        m is `yarn_mscale`, and 1 without YaRN or without mscale_all_dim. The only place this is computed: the width
        of an absorbed query (L + R) never enters. Source: DeepSeek-V2 (arXiv 2405.04434) eq. 17 and section 3.1.4.
        """
        scale = (self.P + self.R) ** -0.5
        rope = self.rope
        if rope.type in YARN_TYPES and rope.factor is not None and rope.mscale_all_dim:
            scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
        return scale

    @classmethod
    def from_hf(cls, source: "dict[str, Any] | str | PathLike[str]") -> Self:
        """Read a Hugging Face `config.json` given as a dict, the file's path or its folder.

        See `mla.hf_config.read`, which does the work and lists what raises.
        """
        from mla.hf_config import read

        return cls(**read(source))

    def replace(self, **changes: Any) -> Self:
        """Return a copy with `changes` applied and checked again; an unknown field raises ValueError."""
        known = [field.name for field in dataclasses.fields(self)]
        for field in changes:
            if field not in known:
                raise bad("field", expected=f"one of {', '.join(known)}", got=repr(field), fix="check the spelling")
        return dataclasses.replace(self, **changes)

    def require_supported(self) -> None:
        """Raise ValueError naming every Hugging Face field of this model that cannot be computed here."""
        if self.unsupported:
            raise bad(
                f"config {self.name!r}",
                expected="only features this package computes",
                got="; ".join(self.unsupported),
                fix="use another preset, or clear `unsupported` with config.replace to accept plain MLA instead",
            )
