"""Kimi Linear: delta attention with a decay a channel beside latent attention without rope, and mixtures of experts.

Text models. Source: `KimiLinearConfig` and `KimiLinearForCausalLM` of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lowering import ops
from params.tree import exactly, tree, unchecked

from ..attention.gated_delta import DeltaNetState, delta_net_state
from ..attention.kimi_delta import KimiDelta, kimi_delta, kimi_delta_spec
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
from ..blocks.mlp import (
    BiasedRouter,
    Experts,
    Mlp,
    Routing,
    biased_router_spec,
    experts_spec,
    mlp,
    mlp_spec,
    router_logits,
)
from ..output import LogitsOf, Output, Taps, head_logits
from ..state.batch import Batch
from ..state.state import Entry, State
from ..state.step import Step, begin, finish
from .kimi_linear_config import LATENT_EPS, KimiLinearConfig, read_config

__all__ = ["KimiLinearConfig", "KimiLinearParams", "forward", "init_entries", "param_spec", "read_config"]


@tree
class SigmoidMoe:
    """Routed experts, plus one for every token."""

    router: BiasedRouter
    experts: Experts
    shared: Mlp


@tree
class Layer:
    """One decoder layer: an attention and a feed-forward block, each behind a norm."""

    input_norm: Norm
    attn: KimiDelta | LatentAttention
    post_norm: Norm
    mlp: Mlp | SigmoidMoe


@tree
class KimiLinearParams:
    """All parameters."""

    embed: Embedding
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear


def param_spec(config: KimiLinearConfig) -> KimiLinearParams:
    """The parameter tree with a `TensorSpec` at each leaf."""
    hidden = config.hidden_size
    return unchecked(
        KimiLinearParams,
        embed=embedding_spec(config.vocab_size, hidden),
        layers=tuple(_layer_spec(config, index) for index in range(config.num_hidden_layers)),
        norm=norm_spec(hidden, "ones"),
        head=head_spec(config.vocab_size, hidden),
    )


def _layer_spec(config: KimiLinearConfig, index: int) -> Layer:
    attn, feed = _attention_spec(config, index), _feed_forward_spec(config, index)
    norms = {name: norm_spec(config.hidden_size, "ones") for name in ("input_norm", "post_norm")}
    return unchecked(Layer, attn=attn, mlp=feed, **norms)


def _attention_spec(config: KimiLinearConfig, index: int) -> KimiDelta | LatentAttention:
    if config.is_linear(index):
        width = config.linear_conv_kernel_dim
        return kimi_delta_spec(config.hidden_size, config.linear_num_heads, config.linear_head_dim, width)
    return latent_attention_spec(
        config.hidden_size, config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim,
        config.v_head_dim, config.q_lora_rank, config.kv_lora_rank, config.attention_bias,
    )  # fmt: skip


def _feed_forward_spec(config: KimiLinearConfig, index: int) -> Mlp | SigmoidMoe:
    hidden, inner, experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
    if not config.is_sparse(index):
        return mlp_spec(hidden, config.intermediate_size)
    return unchecked(
        SigmoidMoe, router=biased_router_spec(hidden, experts), experts=experts_spec(hidden, experts, inner),
        shared=mlp_spec(hidden, config.num_shared_experts * inner),
    )  # fmt: skip


def init_entries(
    config: KimiLinearConfig, rows: int, pages: int, page_size: int,
    dtype: torch.dtype, recurrent_dtype: torch.dtype, device: torch.device, layout: str | None = None,
) -> tuple[Entry, ...]:  # fmt: skip
    """One empty entry a layer."""
    heads, dim = config.linear_num_heads, config.linear_head_dim
    sizes = (heads, heads, dim, dim, config.linear_conv_kernel_dim)
    widths = config.kv_lora_rank, config.qk_rope_head_dim
    return tuple(
        delta_net_state(rows, *sizes, dtype, recurrent_dtype, device)
        if config.is_linear(index)
        else latent_pages(pages, page_size, *widths, dtype, device, layout)
        for index in range(config.num_hidden_layers)
    )


def forward(
    config: KimiLinearConfig,
    params: KimiLinearParams,
    state: State | None,
    batch: Batch,
    *,
    logits: LogitsOf = "all",
    outputs: Sequence[str] = (),
    keep_steps: bool = False,
) -> tuple[Output, State | None]:
    """Logits and final hidden of the batch's tokens, and the state that holds them too. See `Model.forward`."""
    taps = Taps(outputs, tap_names(config))
    step = begin(state, batch, keep_steps, kinds=entry_kinds(config))
    eps = config.rms_norm_eps
    entries: list[Entry | None] = []
    x = look_up(params.embed, batch.tokens)
    normed = normalised(params.layers[0].input_norm, x, eps=eps)
    next_norms = [layer.input_norm for layer in params.layers[1:]] + [params.norm]
    for index, (layer, next_norm) in enumerate(zip(params.layers, next_norms, strict=True)):
        mixed, entry = _attend(config, layer.attn, normed, index, step)
        normed, x = add_normalised(layer.post_norm, mixed, x, eps=eps)
        fed = _feed_forward(config, layer.mlp, normed, index, taps)
        normed, x = add_normalised(next_norm, fed, x, eps=eps)
        taps.offer(f"layers.{index}", x)
        entries.append(entry)
    found = head_logits(normed, head_weight(params.embed, params.head), step, logits)
    return Output(found, normed, taps.taken()), finish(step, entries)


def entry_kinds(config: KimiLinearConfig) -> list[type[Entry]]:
    """What `init_entries` makes for each layer."""
    return [DeltaNetState if config.is_linear(index) else LatentPages for index in range(config.num_hidden_layers)]


def tap_names(config: KimiLinearConfig) -> list[str]:
    """The values that `forward` can be asked for."""
    layers = range(config.num_hidden_layers)
    routed = [f"layers.{index}.router" for index in layers if config.is_sparse(index)]
    return [f"layers.{index}" for index in layers] + routed


def _attend(
    config: KimiLinearConfig, params: KimiDelta | LatentAttention, x: Float[Tensor, "tokens hidden"], index: int,
    step: Step,
) -> tuple[Float[Tensor, "tokens hidden"], Entry | None]:  # fmt: skip
    if isinstance(params, KimiDelta):
        return kimi_delta(params, x, step.past(index, DeltaNetState), step, eps=config.rms_norm_eps)
    return latent_attention(
        params, x, step.past(index, LatentPages), step, None,
        heads=config.num_attention_heads, nope_dim=config.qk_nope_head_dim, rope_dim=config.qk_rope_head_dim,
        v_dim=config.v_head_dim, scale=config.softmax_scale, eps=LATENT_EPS,
    )  # fmt: skip


def _feed_forward(
    config: KimiLinearConfig, params: Mlp | SigmoidMoe, x: Float[Tensor, "tokens hidden"], index: int, taps: Taps
) -> Float[Tensor, "tokens hidden"]:
    if isinstance(params, Mlp):
        return mlp(params, x)
    weights, ids = ops.route_sigmoid(
        router_logits(x, exactly(params.router, BiasedRouter).weight), params.router.bias,
        top_k=config.num_experts_per_token, groups=config.num_expert_group, kept_groups=config.topk_group,
        scale=config.routed_scaling_factor, renormalise=config.moe_renormalize,
    )  # fmt: skip
    taps.offer(f"layers.{index}.router", Routing(ids, weights))
    routed = ops.experts(x, weights.to(x.dtype), ids, params.experts.gate_up, params.experts.down)
    return routed + mlp(params.shared, x)
