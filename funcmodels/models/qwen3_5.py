"""Qwen3.5 and Qwen3.6, dense and mixture of experts: three gated delta net layers, then one of gated attention.

Text models. Source: `Qwen3_5TextConfig`, `Qwen3_5MoeTextConfig` and their models in transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lowering import ops
from params.tree import tree, unchecked

from ..attention.gated_delta import DeltaNet, DeltaNetState, delta_net, delta_net_spec, delta_net_state
from ..attention.gqa import GatedAttention, KeyValuePages, gated_attention, gated_attention_spec, key_value_pages
from ..blocks.linear import (
    Embedding,
    Linear,
    Norm,
    add_normalised,
    embedding_spec,
    head_spec,
    head_weight,
    linear_spec,
    look_up,
    norm_spec,
    normalised,
)
from ..blocks.mlp import Mlp, SharedExpertMoe, mlp, mlp_spec, moe, moe_spec
from ..output import LogitsOf, Output, Taps, head_logits
from ..state.batch import Batch
from ..state.state import Entry, State
from ..state.step import Step, begin, finish
from .qwen3_5_config import Qwen35Config, read_config

__all__ = ["Qwen35Config", "Qwen35Params", "forward", "init_entries", "param_spec", "read_config"]


@tree
class Layer:
    """One decoder layer: a token mixer and a feed-forward block, each behind a norm."""

    input_norm: Norm
    attn: DeltaNet | GatedAttention
    post_norm: Norm
    mlp: Mlp | SharedExpertMoe


@tree
class Mtp:
    """Multi-token prediction head: embedding and hidden are normalised, joined (embedding first) and projected."""

    embed_norm: Norm
    hidden_norm: Norm
    fc: Linear
    layers: tuple[Layer, ...]
    norm: Norm


@tree
class Qwen35Params:
    """All parameters. `head` is None when the embedding is tied to it; `mtp` when the checkpoint has none."""

    embed: Embedding
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear | None
    mtp: Mtp | None


def param_spec(config: Qwen35Config) -> Qwen35Params:
    """The parameter tree with a `TensorSpec` at each leaf."""
    hidden = config.hidden_size
    tied = config.tie_word_embeddings
    mtp = None
    if config.mtp_num_hidden_layers:
        layers = tuple(_layer_spec(config, "full_attention") for _ in range(config.mtp_num_hidden_layers))
        norms = {name: norm_spec(hidden, "zeros") for name in ("embed_norm", "hidden_norm", "norm")}
        mtp = unchecked(Mtp, fc=linear_spec(2 * hidden, hidden), layers=layers, **norms)
    return unchecked(
        Qwen35Params,
        embed=embedding_spec(config.vocab_size, hidden),
        layers=tuple(_layer_spec(config, kind) for kind in config.layer_types),
        norm=norm_spec(hidden, "zeros"),
        head=None if tied else head_spec(config.vocab_size, hidden),
        mtp=mtp,
    )


def _layer_spec(config: Qwen35Config, kind: str) -> Layer:
    hidden = config.hidden_size
    if kind == "full_attention":
        attn = gated_attention_spec(hidden, config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    else:
        attn = delta_net_spec(hidden, **_delta_sizes(config))
    if config.num_experts:
        inner, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
        feed = moe_spec(hidden, config.num_experts, inner, shared)
    else:
        feed = mlp_spec(hidden, config.intermediate_size)
    norms = {name: norm_spec(hidden, "zeros") for name in ("input_norm", "post_norm")}
    return unchecked(Layer, attn=attn, mlp=feed, **norms)


def _delta_sizes(config: Qwen35Config) -> dict[str, int]:
    return {
        "k_heads": config.linear_num_key_heads, "v_heads": config.linear_num_value_heads,
        "k_dim": config.linear_key_head_dim, "v_dim": config.linear_value_head_dim,
        "width": config.linear_conv_kernel_dim,
    }  # fmt: skip


def init_entries(
    config: Qwen35Config, rows: int, pages: int, page_size: int,
    dtype: torch.dtype, recurrent_dtype: torch.dtype, device: torch.device,
) -> tuple[Entry, ...]:  # fmt: skip
    """One empty entry a layer."""
    kv = (pages, page_size, config.num_key_value_heads, config.head_dim, dtype, device)
    recurrent = {"dtype": dtype, "recurrent_dtype": recurrent_dtype, "device": device}
    return tuple(
        key_value_pages(*kv) if kind == "full_attention" else delta_net_state(rows, **_delta_sizes(config), **recurrent)
        for kind in config.layer_types
    )


def forward(
    config: Qwen35Config,
    params: Qwen35Params,
    state: State | None,
    batch: Batch,
    *,
    logits: LogitsOf = "all",
    outputs: Sequence[str] = (),
    keep_steps: bool = False,
) -> tuple[Output, State | None]:
    """Logits and final hidden of the batch's tokens, and the state that holds them too. See `Model.forward`."""
    taps = Taps(outputs, _tap_names(config))
    kinds = [KeyValuePages if kind == "full_attention" else DeltaNetState for kind in config.layer_types]
    step = begin(state, batch, keep_steps, axes=(1, 3), kinds=kinds)
    x = look_up(params.embed, batch.tokens)
    hidden, entries = decoder_layers(config, params.layers, params.norm, x, batch, step, taps)
    found = head_logits(hidden, head_weight(params.embed, params.head), step, logits)
    return Output(found, hidden, taps.taken()), finish(step, entries)


def decoder_layers(
    config: Qwen35Config, layers: Sequence[Layer], norm: Norm, x: Float[Tensor, "tokens hidden"],
    batch: Batch, step: Step, taps: Taps,
) -> tuple[Float[Tensor, "tokens hidden"], list[Entry | None]]:  # fmt: skip
    """The residual stream `x` through decoder layers and the final `norm`, and the layers' new entries."""
    rotary = _rotary(config, batch, step)
    eps = config.rms_norm_eps
    entries: list[Entry | None] = []
    normed = normalised(layers[0].input_norm, x, eps=eps)
    next_norms = [layer.input_norm for layer in layers[1:]] + [norm]
    for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
        mixed, entry = _mix(config, layer.attn, normed, index, step, rotary)
        normed, x = add_normalised(layer.post_norm, mixed, x, eps=eps)
        fed = _feed_forward(config, layer.mlp, normed, index, taps)
        normed, x = add_normalised(next_norm, fed, x, eps=eps)
        taps.offer(f"layers.{index}", x)
        entries.append(entry)
    return normed, entries


def _tap_names(config: Qwen35Config) -> list[str]:
    layers = [f"layers.{index}" for index in range(config.num_hidden_layers)]
    return layers + [f"{layer}.router" for layer in layers if config.num_experts]


def _rotary(
    config: Qwen35Config, batch: Batch, step: Step
) -> tuple[Float[Tensor, "tokens half"], Float[Tensor, "tokens half"]]:
    sizes: dict[str, Any] = {"rotary_dim": config.rotary_dim, "theta": config.rope_theta}
    if batch.positions is None:
        return ops.rotary_angles(step.positions, **sizes)
    if batch.positions.shape[0] == 1:  # of text: all three axes are this one
        return ops.rotary_angles(batch.positions[0], **sizes)
    return ops.mrope_angles(batch.positions, sections=config.mrope_section, **sizes)


def _mix(
    config: Qwen35Config, params: DeltaNet | GatedAttention, x: Float[Tensor, "tokens hidden"], index: int, step: Step,
    rotary: tuple[Tensor, Tensor],
) -> tuple[Float[Tensor, "tokens hidden"], Entry | None]:  # fmt: skip
    eps = config.rms_norm_eps
    if isinstance(params, GatedAttention):
        heads = {"heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads}
        return gated_attention(params, x, step.past(index, KeyValuePages), step, rotary, **heads, eps=eps)
    k_heads, k_dim = config.linear_num_key_heads, config.linear_key_head_dim
    return delta_net(params, x, step.past(index, DeltaNetState), step, k_heads=k_heads, k_dim=k_dim, eps=eps)


def _feed_forward(
    config: Qwen35Config, params: Mlp | SharedExpertMoe, x: Float[Tensor, "tokens hidden"], index: int, taps: Taps
) -> Float[Tensor, "tokens hidden"]:
    if isinstance(params, Mlp):
        return mlp(params, x)
    y, routing = moe(params, x, top_k=config.num_experts_per_tok)
    taps.offer(f"layers.{index}.router", routing)
    return y
