"""The config of Kimi Linear: the fields that shape the model, read from `config.json` and checked.

Source: `KimiLinearConfig` of transformers 5.24, whose defaults hold for what may be left out, but for the kinds of
layers: the published ones differ from its default. Published checkpoints keep those of the delta attention in a section
`linear_attn_config`, which counts layers from 1.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from .. import config as configs
from .kimi_linear_spelling import DENSE, FULL, LINEAR, SPARSE, layer_kinds, one_spelling

LATENT_EPS = 1e-6
"""What is added in the norms of latents, whatever `rms_norm_eps` says: they are made with their default.

So does transformers make Kimi Linear's, and so do Kimi-K3's authors: `KimiMLAAttention` of `modeling_kimi_linear.py` in
moonshotai/Kimi-K3 at c5d1dd4c428b, whose other norms get the config's. Serving engines give all of them the config's.
"""


@dataclass(frozen=True)
class KimiLinearConfig:
    """Fields of the checkpoint's config.json under their own names, sections apart: see `read_config`.

    `layer_types` and `mlp_layer_types` name each layer's kinds. `q_lora_rank` 0 stands for null: queries are made
    without a latent. `qk_rope_head_dim` is the width of the key that heads share; nothing rotates it.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    linear_num_heads: int
    linear_head_dim: int
    linear_conv_kernel_dim: int = 4
    q_lora_rank: int = 0
    num_experts: int = 256
    num_shared_experts: int = 1
    num_experts_per_token: int = 8
    moe_intermediate_size: int = 1024
    num_expert_group: int = 1
    topk_group: int = 1
    moe_renormalize: bool = True
    routed_scaling_factor: float = 2.446
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 1048576
    attention_bias: bool = False

    def is_linear(self, index: int) -> bool:
        """Whether the layer is delta attention, else it is latent attention."""
        return self.layer_types[index] == LINEAR

    def is_sparse(self, index: int) -> bool:
        """Whether the layer is a mixture of experts."""
        return self.mlp_layer_types[index] == SPARSE

    @property
    def latent_sizes(self) -> tuple[int, int, int, int, int, int]:
        """Heads, widths and ranks of latent attention, as `LatentAttention.spec` takes them."""
        widths = (self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim)
        return (self.num_attention_heads, *widths, self.q_lora_rank, self.kv_lora_rank)

    @property
    def softmax_scale(self) -> float:
        """What scores are multiplied by."""
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5


C = TypeVar("C", bound=KimiLinearConfig)


def read_config(given: Mapping[str, Any]) -> KimiLinearConfig:
    """The config of a `config.json`. Raises `ConfigError` that names the fields."""
    return read_fields(KimiLinearConfig, given, (), _own_rules)


def read_fields(
    kind: type[C],
    given: Mapping[str, Any],
    needed: Collection[str],
    own_rules: Callable[[C, Mapping[str, Any]], Iterator[tuple[bool, str]]],
) -> C:
    """The config of one of the Kimi models, each of which has rules of its own and `needed` fields beside the common.

    Rules are given the fields under one spelling.
    """
    named, broken = one_spelling(given)
    kinds, wrong = layer_kinds(named, configs.section(given, "linear_attn_config"), configs.layer_count(given))
    named, broken = named | kinds, broken + wrong
    configs.require(*((False, sentence) for sentence in broken))
    config = configs.read(kind, named, (*_needed(named), *needed))
    configs.require(
        *configs.sizes(config, _OTHER_RULES),
        *_layer_rules(config),
        *_expert_rules(config, given),
        *_attention_rules(config, given),
        *_other_model_rules(given),
        *own_rules(config, named),
    )
    return config


def _needed(named: Mapping[str, Any]) -> list[str]:
    """Fields without which the layers that the config asks for cannot be made."""
    kinds = named.get("mlp_layer_types")
    routed = isinstance(kinds, (list, tuple)) and SPARSE in kinds
    return ["num_experts", "num_experts_per_token"] if routed else []


def _layer_rules(config: KimiLinearConfig) -> Iterator[tuple[bool, str]]:
    for name, known in (("layer_types", (LINEAR, FULL)), ("mlp_layer_types", (DENSE, SPARSE))):
        kinds = getattr(config, name)
        yield (
            len(kinds) == config.num_hidden_layers,
            f"{name} names {len(kinds)} layers, num_hidden_layers is {config.num_hidden_layers}",
        )
        strange = sorted(set(kinds) - set(known))
        yield not strange, f"{name} {', '.join(strange)} is not supported; known: {', '.join(known)}"


def _attention_rules(config: KimiLinearConfig, given: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    heads, kv_heads = config.num_attention_heads, given.get("num_key_value_heads")
    yield config.q_lora_rank >= 0, f"q_lora_rank must be positive or null, found {config.q_lora_rank}"
    yield (
        kv_heads in (None, heads),
        f"num_key_value_heads must be num_attention_heads {heads}: every head has its own keys; found {kv_heads}",
    )
    yield (
        config.linear_conv_kernel_dim > 1,
        (f"linear_conv_kernel_dim must be above 1, found {config.linear_conv_kernel_dim}"),
    )


def _expert_rules(config: KimiLinearConfig, given: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    experts, chosen, groups = config.num_experts, config.num_experts_per_token, config.num_expert_group
    if SPARSE not in config.mlp_layer_types:
        return
    yield groups > 0 and experts % max(groups, 1) == 0, f"num_expert_group {groups} must divide num_experts {experts}"
    kept, each = config.topk_group, experts // max(groups, 1)
    yield 0 < kept <= groups, f"topk_group must be in 1..num_expert_group {groups}, found {kept}"
    yield each >= 2, f"groups must have 2 experts or more, as many as their score adds up; they have {each}"
    yield (
        0 < chosen <= kept * each,
        f"num_experts_per_token must be in 1..{kept * each}, the experts of {kept} groups of {each}; found {chosen}",
    )
    for name, only in (("moe_router_activation_func", "sigmoid"), ("moe_layer_freq", 1)):
        yield given.get(name, only) in (only, None), f"{name} {given.get(name)!r} is not supported; only {only!r} is"


def _other_model_rules(given: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """What would be another model."""
    tied = given.get(configs.TIED)
    yield tied in (None, False), f"{configs.TIED} {tied!r} is not supported: the head has a weight of its own"
    rotated = given.get("mla_use_nope")
    sentence = f"mla_use_nope {rotated!r} is not supported: latent attention has no rotation here"
    yield rotated in (None, True), sentence


def _own_rules(config: KimiLinearConfig, given: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    act = given.get("hidden_act")
    yield act in (None, "silu"), f"hidden_act {act!r} is not supported; only silu is"
    for name in _KIMI_K3:
        yield not given.get(name), f"{name} {given.get(name)!r} is not supported: a model with it is Kimi-K3"


_KIMI_K3 = (
    "gate_lower_bound",
    "use_full_rank_gate",
    "mla_use_output_gate",
    "attn_res_block_size",
    "routed_expert_hidden_size",
    "latent_moe_use_norm",
)
_OTHER_RULES = ("num_experts_per_token", "num_expert_group", "topk_group", "routed_scaling_factor", "gate_lower_bound")
"""Numbers with rules of their own, Kimi-K3's bound, which is negative, among them."""
