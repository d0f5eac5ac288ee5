"""DeepSeek-V2 and V2-Lite: latent attention, the first layers dense, the others mixtures of experts in groups.

Text models. Source: `DeepseekV2Config` and `DeepseekV2ForCausalLM` of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from lowering import ops
from lowering.layouts import LAYOUTS
from params.names.deepseek_v2 import NAMES
from params.tree import tree

from ..attention.mla import LatentAttention, LatentPages, latent_attention, latent_pages
from ..blocks.decoder import decoder_layers
from ..blocks.linear import (
    Embedding,
    Linear,
    Norm,
    head_weight,
    look_up,
)
from ..blocks.mlp import GroupedMoe, Mlp, grouped_moe, mlp
from ..family import Family
from ..output import LogitsOf, Output, Taps, head_logits
from ..state.batch import Batch
from ..state.space import Space
from ..state.state import Entry, State
from ..state.step import begin, finish, text_positions
from .deepseek_v2_config import LATENT_EPS, DeepseekV2Config, read_config


@tree
class Layer:
    """One decoder layer: latent attention and a feed-forward block, each behind a norm."""

    input_norm: Norm
    attn: LatentAttention
    post_norm: Norm
    mlp: Mlp | GroupedMoe

    @staticmethod
    def spec(config: DeepseekV2Config, routed: bool) -> Layer:
        """Spec of a layer, with a mixture of experts where it is `routed`."""
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        attn = LatentAttention.spec(
            hidden,
            config.num_attention_heads,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
            config.q_lora_rank,
            config.kv_lora_rank,
            config.attention_bias,
        )
        feed = Mlp.spec(hidden, config.intermediate_size)
        if routed:
            feed = GroupedMoe.spec(hidden, config.n_routed_experts, inner, config.n_shared_experts * inner)
        return Layer(Norm.spec(hidden), attn, Norm.spec(hidden), feed)


@tree
class DeepseekV2Params:
    """All parameters. `head` is None when the embedding is tied to it."""

    embed: Embedding
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear | None

    @staticmethod
    def spec(config: DeepseekV2Config) -> DeepseekV2Params:
        """The parameter tree with a `TensorSpec` at each leaf."""
        vocab, hidden = config.vocab_size, config.hidden_size
        layers = tuple(Layer.spec(config, routed) for routed in config.experts_in_layer)
        head = None if config.tie_word_embeddings else Linear.head_spec(vocab, hidden)
        return DeepseekV2Params(Embedding.spec(vocab, hidden), layers, Norm.spec(hidden), head)


def init_entries(config: DeepseekV2Config, space: Space) -> tuple[Entry, ...]:
    """One empty entry a layer."""
    widths = config.kv_lora_rank, config.qk_rope_head_dim
    return tuple(latent_pages(space, *widths) for _ in range(config.num_hidden_layers))


def forward(
    config: DeepseekV2Config,
    params: DeepseekV2Params,
    state: State | None,
    batch: Batch,
    *,
    logits: LogitsOf = "all",
    outputs: Sequence[str] = (),
    keep_steps: bool = False,
) -> tuple[Output, State | None]:
    """Logits and final hidden of the batch's tokens, and the state that holds them too. See `Model.forward`."""
    taps = Taps(outputs, _tap_names(config))
    step = begin(state, batch, keep_steps, axes=(1,), kinds=(LatentPages,) * config.num_hidden_layers)
    rotary = _rotary(config, text_positions(batch, step))

    def mix(index: int, attn: LatentAttention, x: Tensor) -> tuple[Tensor, Entry | None]:
        return latent_attention(
            attn,
            x,
            step.past(index, LatentPages),
            step,
            rotary,
            heads=config.num_attention_heads,
            nope_dim=config.qk_nope_head_dim,
            rope_dim=config.qk_rope_head_dim,
            v_dim=config.v_head_dim,
            scale=config.softmax_scale,
            eps=LATENT_EPS,
        )

    feed = partial(_feed_forward, config, taps)
    x = look_up(params.embed, batch.tokens)
    hidden, entries = decoder_layers(params.layers, params.norm, x, mix, feed, taps, eps=config.rms_norm_eps)
    found = head_logits(hidden, head_weight(params.embed, params.head), step, logits)
    return Output(found, hidden, taps.taken()), finish(step, entries)


def _tap_names(config: DeepseekV2Config) -> list[str]:
    layers = [f"layers.{index}" for index in range(config.num_hidden_layers)]
    routed = zip(layers, config.experts_in_layer, strict=True)
    return layers + [f"{layer}.router" for layer, experts in routed if experts]


def _rotary(
    config: DeepseekV2Config, positions: Int[Tensor, " tokens"]
) -> tuple[Float[Tensor, "tokens half"], Float[Tensor, "tokens half"]]:
    sizes: dict[str, Any] = {"rotary_dim": config.qk_rope_head_dim, "theta": config.rope_theta}
    if config.rope_type == "default":
        return ops.rotary_angles(positions, **sizes)
    stretch = {"factor": config.factor, "ramp": config.ramp, "multiplier": config.angle_multiplier}
    return ops.yarn_angles(positions, **sizes, **stretch)


def _feed_forward(
    config: DeepseekV2Config, taps: Taps, index: int, params: Mlp | GroupedMoe, x: Float[Tensor, "tokens hidden"]
) -> Float[Tensor, "tokens hidden"]:
    if isinstance(params, Mlp):
        return mlp(params, x)
    groups, kept = config.groups
    y, routing = grouped_moe(
        params, x, top_k=config.num_experts_per_tok, groups=groups, kept_groups=kept, scale=config.routed_scaling_factor
    )
    taps.offer(f"layers.{index}.router", routing)
    return y


FAMILY = Family(
    model_types=("deepseek_v2",),
    read_config=read_config,
    params=DeepseekV2Params,
    names=NAMES,
    init_entries=init_entries,
    forward=forward,
    layouts=tuple(LAYOUTS),
    heads=("num_attention_heads",),
)
