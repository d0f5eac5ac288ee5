"""Kimi-K3: delta attention beside gated latent attention without rope, experts in a latent, and attention residuals.

Text model. In place of a residual stream each sublayer reads a mean of sums of the outputs before it; see
`funcmodels.blocks.attention_residual`. The state is Kimi Linear's. What is added in norms is as in the authors'
`modeling_kimi_linear.py` (moonshotai/Kimi-K3 at c5d1dd4c428b).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lowering import ops
from params.tree import exactly, tree, unchecked

from ..attention.gated_delta import DeltaNetState
from ..attention.kimi_delta import KimiDelta, kimi_delta, kimi_delta_spec
from ..attention.mla import LatentAttention, LatentPages, latent_attention, latent_attention_spec
from ..blocks.attention_residual import AttentionResidual, attention_residual, attention_residual_spec
from ..blocks.linear import (
    Embedding,
    Linear,
    Norm,
    embedding_spec,
    head_spec,
    head_weight,
    linear_spec,
    look_up,
    norm_spec,
    normalised,
    project,
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
from .kimi_k3_config import KimiK3Config, is_kimi_k3, read_config
from .kimi_linear import entry_kinds, init_entries, tap_names
from .kimi_linear_config import LATENT_EPS

__all__ = ["KimiK3Config", "KimiK3Params", "forward", "init_entries", "is_kimi_k3", "param_spec", "read_config"]


@tree
class LatentMoe:
    """Routed experts between two projections, which read a latent and whose sum has a norm; plus one on every token."""

    router: BiasedRouter
    down: Linear
    experts: Experts
    norm: Norm
    up: Linear
    shared: Mlp


@tree
class Layer:
    """One decoder layer: an attention and a feed-forward block, each behind a mean of sums and a norm."""

    attn_residual: AttentionResidual
    input_norm: Norm
    attn: KimiDelta | LatentAttention
    mlp_residual: AttentionResidual
    post_norm: Norm
    mlp: Mlp | LatentMoe


@tree
class KimiK3Params:
    """All parameters."""

    embed: Embedding
    layers: tuple[Layer, ...]
    output_residual: AttentionResidual
    norm: Norm
    head: Linear


def param_spec(config: KimiK3Config) -> KimiK3Params:
    """The parameter tree with a `TensorSpec` at each leaf."""
    hidden = config.hidden_size
    return unchecked(
        KimiK3Params,
        embed=embedding_spec(config.vocab_size, hidden),
        layers=tuple(_layer_spec(config, index) for index in range(config.num_hidden_layers)),
        output_residual=attention_residual_spec(hidden),
        norm=norm_spec(hidden, "ones"),
        head=head_spec(config.vocab_size, hidden),
    )


def _layer_spec(config: KimiK3Config, index: int) -> Layer:
    residuals = {name: attention_residual_spec(config.hidden_size) for name in ("attn_residual", "mlp_residual")}
    norms = {name: norm_spec(config.hidden_size, "ones") for name in ("input_norm", "post_norm")}
    attn, feed = _attention_spec(config, index), _feed_forward_spec(config, index)
    return unchecked(Layer, attn=attn, mlp=feed, **residuals, **norms)


def _attention_spec(config: KimiK3Config, index: int) -> KimiDelta | LatentAttention:
    if config.is_linear(index):
        return kimi_delta_spec(
            config.hidden_size, config.linear_num_heads, config.linear_head_dim, config.linear_conv_kernel_dim,
            full_rank_gate=True, dtype=torch.float32,
        )  # fmt: skip
    return latent_attention_spec(
        config.hidden_size, config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim,
        config.v_head_dim, config.q_lora_rank, config.kv_lora_rank, bias=False, gated=True,
    )  # fmt: skip


def _feed_forward_spec(config: KimiK3Config, index: int) -> Mlp | LatentMoe:
    hidden, latent, inner = config.hidden_size, config.routed_expert_hidden_size, config.moe_intermediate_size
    if not config.is_sparse(index):
        return mlp_spec(hidden, config.intermediate_size)
    return unchecked(
        LatentMoe,
        router=biased_router_spec(hidden, config.num_experts),
        down=linear_spec(hidden, latent),
        experts=experts_spec(latent, config.num_experts, inner),
        norm=norm_spec(latent, "ones"),
        up=linear_spec(latent, hidden),
        shared=mlp_spec(hidden, config.num_shared_experts * inner),
    )


def forward(
    config: KimiK3Config,
    params: KimiK3Params,
    state: State | None,
    batch: Batch,
    *,
    logits: LogitsOf = "all",
    outputs: Sequence[str] = (),
    keep_steps: bool = False,
) -> tuple[Output, State | None]:
    """Logits and final hidden of the batch's tokens, and the state that holds them too. See `Model.forward`.

    There is no stream after a layer: `layers.3` is what the layer behind it, or the head, reads of all sums.
    """
    taps = Taps(outputs, tap_names(config))
    step = begin(state, batch, keep_steps, kinds=entry_kinds(config))
    eps = config.rms_norm_eps
    entries: list[Entry | None] = []
    prefix = look_up(params.embed, batch.tokens)
    bank = prefix[:, None][:, :0]  # no snapshots yet; sliced and not made, so that it has the prefix's dtype and device
    x = attention_residual(params.layers[0].attn_residual, bank, prefix, eps=eps)
    readers = [layer.attn_residual for layer in params.layers[1:]] + [params.output_residual]
    for index, (layer, next_reader) in enumerate(zip(params.layers, readers, strict=True)):
        attended, entry = _attend(config, layer.attn, normalised(layer.input_norm, x, eps=eps), index, step)
        if index % config.attn_res_block_size == 0:
            # What has been summed, and read here as such, is a snapshot now; attention begins the next sum.
            bank, prefix = torch.cat((bank, prefix[:, None]), 1), attended
        else:
            prefix = prefix + attended
        x = attention_residual(layer.mlp_residual, bank, prefix, eps=eps)
        fed = _feed_forward(config, layer.mlp, normalised(layer.post_norm, x, eps=eps), index, taps)
        prefix = prefix + fed
        x = attention_residual(next_reader, bank, prefix, eps=eps)
        taps.offer(f"layers.{index}", x)
        entries.append(entry)
    normed = normalised(params.norm, x, eps=eps)
    found = head_logits(normed, head_weight(params.embed, params.head), step, logits)
    return Output(found, normed, taps.taken()), finish(step, entries)


def _attend(
    config: KimiK3Config, params: KimiDelta | LatentAttention, x: Float[Tensor, "tokens hidden"], index: int,
    step: Step,
) -> tuple[Float[Tensor, "tokens hidden"], Entry | None]:  # fmt: skip
    if isinstance(params, KimiDelta):
        past, bound = step.past(index, DeltaNetState), float(config.gate_lower_bound)
        return kimi_delta(params, x, past, step, eps=config.rms_norm_eps, lower_bound=bound)
    return latent_attention(
        params, x, step.past(index, LatentPages), step, None,
        heads=config.num_attention_heads, nope_dim=config.qk_nope_head_dim, rope_dim=config.qk_rope_head_dim,
        v_dim=config.v_head_dim, scale=config.softmax_scale, eps=LATENT_EPS, gated=True,
    )  # fmt: skip


def _feed_forward(
    config: KimiK3Config, params: Mlp | LatentMoe, x: Float[Tensor, "tokens hidden"], index: int, taps: Taps
) -> Float[Tensor, "tokens hidden"]:
    if isinstance(params, Mlp):
        return mlp(params, x, caps=config.caps)
    weights, ids = ops.route_sigmoid(
        router_logits(x, exactly(params.router, BiasedRouter).weight), params.router.bias,
        top_k=config.num_experts_per_token, groups=config.num_expert_group, kept_groups=config.topk_group,
        scale=config.routed_scaling_factor, renormalise=config.moe_renormalize,
    )  # fmt: skip
    taps.offer(f"layers.{index}.router", Routing(ids, weights))
    latent, each = project(params.down, x), params.experts
    latent = ops.experts(latent, weights.to(x.dtype), ids, each.gate_up, each.down, caps=config.caps)
    routed = project(params.up, normalised(params.norm, latent, eps=config.rms_norm_eps))
    return routed + mlp(params.shared, x, caps=config.caps)
