"""The config of DeepSeek-V2 and V2-Lite: the fields that shape the model, read from `config.json` and checked.

Source: `DeepseekV2Config` of transformers 5.24 and the rotary fields that it reads; its defaults hold for what may be
left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .. import config as configs

LATENT_EPS = 1e-6
"""What is added in the norms of latents, whatever `rms_norm_eps` says."""


@dataclass(frozen=True)
class DeepseekV2Config:
    """Fields of the checkpoint's config.json under their own names; `norm_topk_prob` has none, as nothing reads it.

    `q_lora_rank` 0 stands for null: queries are made without a latent. From `first_k_dense_replace` on layers are
    mixtures of experts. The rotary fields are those of `rope_parameters` (`rope_scaling` in older configs); of them
    `factor` and those after it hold for rope_type yarn only; 0 stands for the length of the model, and for factors that
    are left out.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int = 11008
    q_lora_rank: int = 0
    first_k_dense_replace: int = 0
    n_routed_experts: int = 64
    n_shared_experts: int = 2
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 1407
    topk_method: str = "greedy"
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    rope_theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float = 0.0
    truncate: bool = True

    @property
    def groups(self) -> tuple[int, int]:
        """Into how many groups a router's experts fall, and how many of them a token can choose from."""
        return (self.n_group, self.topk_group) if self.topk_method == "group_limited_greedy" else (1, 1)

    @property
    def experts_in_layer(self) -> tuple[bool, ...]:
        """Whether each layer is a mixture of experts."""
        return tuple(layer >= self.first_k_dense_replace for layer in range(self.num_hidden_layers))

    @property
    def softmax_scale(self) -> float:
        """What scores are multiplied by: YaRN also sharpens it, by the square of its factor for all channels."""
        sharper = _mscale(self.factor, self.mscale_all_dim) ** 2 if self.rope_type == "yarn" else 1.0
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * sharper

    @property
    def angle_multiplier(self) -> float:
        """What YaRN multiplies cosines and sines by: 1 where `mscale` and `mscale_all_dim` are equal."""
        if self.attention_factor:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    @property
    def ramp(self) -> tuple[float, float]:
        """The pairs of channels between which YaRN goes over from kept frequencies to divided ones."""
        low, high = (self._pair_that_turns(times) for times in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0.0), min(high, self.qk_rope_head_dim - 1.0)
        return float(low), high + 0.001 if low == high else float(high)

    def _pair_that_turns(self, times: float) -> float:
        """The pair of channels that turns so often over the length that the model was first trained with."""
        length = self.original_max_position_embeddings or self.max_position_embeddings
        turns = length / (times * 2 * math.pi)
        return self.qk_rope_head_dim * math.log(turns) / (2 * math.log(self.rope_theta))


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def read_config(given: Mapping[str, Any]) -> DeepseekV2Config:
    """The config of a `config.json`. Raises `ConfigError` that names the fields."""
    sections = {name: configs.section(given, name) for name in ("rope_parameters", "rope_scaling")}
    rope = {"rope_theta": given.get("rope_theta"), **next(filter(None, sections.values()), {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    named = {name: value for name, value in given.items() if name not in _ROPE}
    # Only here null is not the same as nothing: it stands for queries without a latent.
    named["q_lora_rank"] = 0 if given.get("q_lora_rank", 1536) is None else given.get("q_lora_rank", 1536)
    named |= {name: rope.get(name) for name in _ROPE} | {"rope_type": kind}
    config = configs.read(DeepseekV2Config, named, _needed(given, kind))
    configs.require(
        *configs.sizes(config, _OTHER_RULES),
        *_shape_rules(config, given),
        *_expert_rules(config, given),
        *_rope_rules(config, sections),
    )
    return config


def _needed(given: Mapping[str, Any], rope_type: Any) -> list[str]:
    """Fields without which the layers that the config asks for cannot be made. Wrong types are for others to name."""
    layers, dense = configs.layer_count(given), given.get("first_k_dense_replace") or 0
    routed = layers is None or not isinstance(dense, int) or dense < layers
    groups = ["n_group", "topk_group"] if given.get("topk_method") == "group_limited_greedy" else []
    return [*(["num_experts_per_tok", *groups] if routed else []), *(["factor"] if rope_type == "yarn" else [])]


def _shape_rules(config: DeepseekV2Config, given: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    heads, kv_heads = config.num_attention_heads, given.get("num_key_value_heads")
    yield config.q_lora_rank >= 0, f"q_lora_rank must be positive or null, found {config.q_lora_rank}"
    yield (
        kv_heads in (None, heads),
        f"num_key_value_heads must be num_attention_heads {heads}: every head has its own keys; found {kv_heads}",
    )
    rope = config.qk_rope_head_dim
    yield rope % 2 == 0, f"qk_rope_head_dim must be even, found {rope}"
    yield (
        given.get("hidden_act", "silu") == "silu",
        f"hidden_act {given.get('hidden_act')!r} is not supported; only silu is",
    )
    biased = given.get("mlp_bias")
    yield not biased, f"mlp_bias {biased!r} is not supported: no feed-forward projection has a bias"


def _expert_rules(config: DeepseekV2Config, given: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    dense, experts, chosen = config.first_k_dense_replace, config.n_routed_experts, config.num_experts_per_tok
    groups, kept = config.n_group, config.topk_group
    yield dense >= 0, f"first_k_dense_replace must not be negative, found {dense}"
    if dense >= config.num_hidden_layers:
        return
    yield 0 < chosen <= experts, f"num_experts_per_tok must be in 1..n_routed_experts {experts}, found {chosen}"
    yield (
        config.topk_method in METHODS,
        f"topk_method {config.topk_method!r} is not supported; known: {', '.join(METHODS)}",
    )
    for name, only in (("scoring_func", "softmax"), ("moe_layer_freq", 1)):
        yield given.get(name, only) in (only, None), f"{name} {given.get(name)!r} is not supported; only {only!r} is"
    if config.topk_method == "group_limited_greedy":
        yield groups > 0 and experts % max(groups, 1) == 0, f"n_group {groups} must divide n_routed_experts {experts}"
        yield 0 < kept <= groups, f"topk_group must be in 1..n_group {groups}, found {kept}"


def _rope_rules(config: DeepseekV2Config, sections: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[bool, str]]:
    yield config.rope_type in ROPES, f"rope_type {config.rope_type!r} is not supported; known: {', '.join(ROPES)}"
    one, two = sections.values()
    yield not (one and two) or one == two, "rope_parameters and rope_scaling are both given and differ; remove one"
    partial = (one or two).get("partial_rotary_factor", 1.0)
    yield partial == 1.0, f"partial_rotary_factor {partial!r} is not supported: all of qk_rope_head_dim rotates"
    if config.rope_type == "yarn":
        yield config.factor >= 1, f"factor must be at least 1, found {config.factor}"
        length = config.original_max_position_embeddings
        yield length >= 0, f"original_max_position_embeddings must be positive, found {length}"
        fast, slow = config.beta_fast, config.beta_slow
        yield fast >= slow > 0, f"beta_fast must be at least beta_slow, and both positive; found {fast} and {slow}"
        yield config.rope_theta > 1, f"rope_theta must be above 1 for yarn, found {config.rope_theta}"


METHODS = ("greedy", "group_limited_greedy")
ROPES = ("default", "yarn")
_ROPE = (
    "rope_theta", "rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim", "attention_factor", "truncate",
)  # fmt: skip
_OTHER_RULES = ("n_group", "topk_group", "routed_scaling_factor", "factor", "beta_fast", "beta_slow")
"""Numbers with rules of their own."""
