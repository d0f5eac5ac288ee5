"""Gemma3: layers that attend to a window of their past, and every few of them one that attends to all of it.

Text models. A norm stands before and after each block, embeddings are scaled, and local and global layers turn queries
and keys by angles of their own. Source: `Gemma3TextConfig` and `Gemma3ForCausalLM` in transformers 5.24.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lowering import ops
from params.names.gemma3 import NAMES
from params.tree import tree

from ..attention.gqa import Attention, KeyValuePages, attention, key_value_layers
from ..blocks.linear import (
    Embedding,
    GemmaNorm,
    Linear,
    Norm,
    add_normalised,
    head_weight,
    look_up,
    normalised,
    project,
)
from ..blocks.mlp import Mlp
from ..family import Family
from ..output import LogitsOf, Output, Taps, head_logits
from ..state.batch import Batch
from ..state.space import Space
from ..state.state import Entry, State
from ..state.step import Step, begin, finish, text_positions
from .gemma3_config import GLOBAL, LOCAL, Gemma3Config, read_config


@tree
class Layer:
    """One decoder layer: attention and a feed-forward block, each between two norms."""

    input_norm: Norm
    attn: Attention
    post_attn_norm: Norm
    pre_mlp_norm: Norm
    mlp: Mlp
    post_mlp_norm: Norm

    @staticmethod
    def spec(config: Gemma3Config) -> Layer:
        """Spec of a layer of either kind."""
        hidden, norm = config.hidden_size, GemmaNorm.spec(config.hidden_size)
        heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        attn = Attention.spec(hidden, *heads, norm=GemmaNorm, bias=config.attention_bias)
        return Layer(norm, attn, norm, norm, Mlp.spec(hidden, config.intermediate_size), norm)


@tree
class Gemma3Params:
    """All parameters. `head` is None when the embedding is tied to it."""

    embed: Embedding
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear | None

    @staticmethod
    def spec(config: Gemma3Config) -> Gemma3Params:
        """The parameter tree with a `TensorSpec` at each leaf."""
        vocab, hidden = config.vocab_size, config.hidden_size
        layers = tuple(Layer.spec(config) for _ in config.layer_types)
        head = None if config.tie_word_embeddings else Linear.head_spec(vocab, hidden)
        return Gemma3Params(Embedding.spec(vocab, hidden), layers, GemmaNorm.spec(hidden), head)


def init_entries(config: Gemma3Config, space: Space) -> tuple[Entry, ...]:
    """One empty entry a layer. Local layers keep every key too: dropping tokens brings those before a window back."""
    return key_value_layers(space, config, config.num_hidden_layers)


def forward(
    config: Gemma3Config,
    params: Gemma3Params,
    state: State | None,
    batch: Batch,
    *,
    logits: LogitsOf = "all",
    outputs: Sequence[str] = (),
    keep_steps: bool = False,
) -> tuple[Output, State | None]:
    """Logits and final hidden of the batch's tokens, and the state that holds them too. See `Model.forward`."""
    taps = Taps(outputs, [f"layers.{index}" for index in range(config.num_hidden_layers)])
    step = begin(state, batch, keep_steps, axes=(1,), kinds=(KeyValuePages,) * config.num_hidden_layers)
    x = _embedded(config, params, batch)
    places = text_positions(batch, step)
    angles = {kind: _angles(config, kind, places) for kind in dict.fromkeys(config.layer_types)}
    hidden, entries = _layers(config, params, x, step, angles, taps)
    return Output(_logits(config, params, hidden, step, logits), hidden, taps.taken()), finish(step, entries)


def _embedded(config: Gemma3Config, params: Gemma3Params, batch: Batch) -> Float[Tensor, "tokens hidden"]:
    x = look_up(params.embed, batch.tokens)
    return x * rounded(math.sqrt(config.hidden_size), x.dtype)


def rounded(value: float, dtype: torch.dtype) -> float:
    """The nearest number to a positive `value` that `dtype` holds, as a Python number, so that nothing is traced."""
    step = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(value))
    return round(value / step) * step


def _layers(
    config: Gemma3Config,
    params: Gemma3Params,
    x: Float[Tensor, "tokens hidden"],
    step: Step,
    angles: dict[str, tuple[Tensor, Tensor]],
    taps: Taps,
) -> tuple[Float[Tensor, "tokens hidden"], list[Entry | None]]:
    """The residual stream `x` through all layers and the final norm, and the layers' new entries.

    `angles` are those of each kind of layer.
    """
    eps = config.rms_norm_eps
    entries: list[Entry | None] = []
    normed = normalised(params.layers[0].input_norm, x, eps=eps)
    next_norms = [layer.input_norm for layer in params.layers[1:]] + [params.norm]
    for index, (layer, next_norm) in enumerate(zip(params.layers, next_norms, strict=True)):
        mixed, entry = _mix(config, layer.attn, normed, index, step, angles[config.layer_types[index]])
        mixed = normalised(layer.post_attn_norm, mixed, eps=eps)
        normed, x = add_normalised(layer.pre_mlp_norm, mixed, x, eps=eps)
        fed = project(layer.mlp.down, ops.geglu(project(layer.mlp.gate_up, normed)))
        fed = normalised(layer.post_mlp_norm, fed, eps=eps)
        normed, x = add_normalised(next_norm, fed, x, eps=eps)
        taps.offer(f"layers.{index}", x)
        entries.append(entry)
    return normed, entries


def _angles(config: Gemma3Config, kind: str, positions: Int[Tensor, " tokens"]) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the tokens' places, [tokens head_dim/2] each, for one kind of layer."""
    theta, factor = {
        GLOBAL: (config.rope_theta, config.rope_factor),
        LOCAL: (config.rope_local_base_freq, config.rope_local_factor),
    }[kind]
    return ops.rotary_angles(positions, rotary_dim=config.head_dim, theta=theta, factor=factor)


def _mix(
    config: Gemma3Config,
    params: Attention,
    x: Float[Tensor, "tokens hidden"],
    index: int,
    step: Step,
    angles: tuple[Tensor, Tensor],
) -> tuple[Float[Tensor, "tokens hidden"], Entry | None]:
    sizes: dict[str, Any] = {"heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads}
    scale, window = config.query_pre_attn_scalar**-0.5, config.window(index)
    past = step.past(index, KeyValuePages)
    return attention(params, x, past, step, angles, **sizes, eps=config.rms_norm_eps, scale=scale, window=window)


def _logits(
    config: Gemma3Config, params: Gemma3Params, hidden: Float[Tensor, "tokens hidden"], step: Step, logits: LogitsOf
) -> Float[Tensor, "positions vocab"]:
    cap = config.final_logit_softcapping
    found = head_logits(hidden, head_weight(params.embed, params.head), step, logits)
    return torch.tanh(found / cap) * cap if cap else found


FAMILY = Family(
    model_types=("gemma3", "gemma3_text"),
    read_config=read_config,
    params=Gemma3Params,
    names=NAMES,
    init_entries=init_entries,
    forward=forward,
    scales_embeddings=True,
)
