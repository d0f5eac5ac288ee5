"""DeepSeek-V2 and V2-Lite: latent attention, the first layers dense, the others mixtures of experts in groups.

Text models. Source: `DeepseekV2Config` and `DeepseekV2ForCausalLM` of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lowering import ops
from params.tree import tree, unchecked

from ..attention.mla import LatentAttention, LatentPages, latent_attention, latent_attention_spec, latent_pages
from ..blocks.linear import (
    Embedding,
    Linear,
    Norm,
    add_normalised,
    embedding_spec,
    head_spec,
    head_weight,
    look_up,
    norm_spec,
    normalised,
)
from ..blocks.mlp import GroupedMoe, Mlp, grouped_moe, grouped_moe_spec, mlp, mlp_spec
from ..output import LogitsOf, Output, Taps, head_logits
from ..state.batch import Batch
from ..state.state import Entry, State
from ..state.step import begin, finish, text_positions
from .deepseek_v2_config import LATENT_EPS, DeepseekV2Config, read_config

__all__ = ["DeepseekV2Config", "DeepseekV2Params", "forward", "init_entries", "param_spec", "read_config"]


@tree
class Layer:
    """One decoder layer: latent attention and a feed-forward block, each behind a norm."""

    input_norm: Norm
    attn: LatentAttention
    post_norm: Norm
    mlp: Mlp | GroupedMoe


@tree
class DeepseekV2Params:
    """All parameters. `head` is None when the embedding is tied to it."""

    embed: Embedding
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear | None


def param_spec(config: DeepseekV2Config) -> DeepseekV2Params:
    """The parameter tree with a `TensorSpec` at each leaf."""
    hidden = config.hidden_size
    return unchecked(
        DeepseekV2Params,
        embed=embedding_spec(config.vocab_size, hidden),
        layers=tuple(_layer_spec(config, routed) for routed in config.experts_in_layer),
        norm=norm_spec(hidden, "ones"),
        head=None if config.tie_word_embeddings else head_spec(config.vocab_size, hidden),
    )


def _layer_spec(config: DeepseekV2Config, routed: bool) -> Layer:
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    attn = latent_attention_spec(
        hidden, config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim,
        config.q_lora_rank, config.kv_lora_rank, config.attention_bias,
    )  # fmt: skip
    if routed:
        feed = grouped_moe_spec(hidden, config.n_routed_experts, inner, config.n_shared_experts * inner)
    else:
        feed = mlp_spec(hidden, config.intermediate_size)
    norms = {name: norm_spec(hidden, "ones") for name in ("input_norm", "post_norm")}
    return unchecked(Layer, attn=attn, mlp=feed, **norms)


def init_entries(
    config: DeepseekV2Config, rows: int, pages: int, page_size: int,
    dtype: torch.dtype, recurrent_dtype: torch.dtype, device: torch.device, layout: str | None = None,
) -> tuple[Entry, ...]:  # fmt: skip
    """One empty entry a layer."""
    widths = config.kv_lora_rank, config.qk_rope_head_dim
    return tuple(
        latent_pages(pages, page_size, *widths, dtype, device, layout) for _ in range(config.num_hidden_layers)
    )


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
    eps = config.rms_norm_eps
    entries: list[Entry | None] = []
    x = look_up(params.embed, batch.tokens)
    normed = normalised(params.layers[0].input_norm, x, eps=eps)
    next_norms = [layer.input_norm for layer in params.layers[1:]] + [params.norm]
    for index, (layer, next_norm) in enumerate(zip(params.layers, next_norms, strict=True)):
        mixed, entry = latent_attention(
            layer.attn, normed, step.past(index, LatentPages), step, rotary,
            heads=config.num_attention_heads, nope_dim=config.qk_nope_head_dim, rope_dim=config.qk_rope_head_dim,
            v_dim=config.v_head_dim, scale=config.softmax_scale, eps=LATENT_EPS,
        )  # fmt: skip
        normed, x = add_normalised(layer.post_norm, mixed, x, eps=eps)
        fed = _feed_forward(config, layer.mlp, normed, index, taps)
        normed, x = add_normalised(next_norm, fed, x, eps=eps)
        taps.offer(f"layers.{index}", x)
        entries.append(entry)
    found = head_logits(normed, head_weight(params.embed, params.head), step, logits)
    return Output(found, normed, taps.taken()), finish(step, entries)


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
    config: DeepseekV2Config, params: Mlp | GroupedMoe, x: Float[Tensor, "tokens hidden"], index: int, taps: Taps
) -> Float[Tensor, "tokens hidden"]:
    if isinstance(params, Mlp):
        return mlp(params, x)
    groups, kept = config.groups
    y, routing = grouped_moe(
        params, x, top_k=config.num_experts_per_tok, groups=groups, kept_groups=kept, scale=config.routed_scaling_factor
    )
    taps.offer(f"layers.{index}.router", routing)
    return y
