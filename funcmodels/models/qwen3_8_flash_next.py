"""Qwen3.8-Flash-Next: delta nets and sparse attention between hyper-connections, n-gram embeddings, experts everywhere.

Text model. Several residual streams take the place of a residual and its norms: nothing else normalises what a layer
reads, and the mean of the streams that the last connection reads goes to the head as it is. Source:
`Qwen4ExpTextConfig` and `Qwen4ExpForCausalLM` in transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lowering import ops
from params.tree import tree, unchecked

from ..attention.gated_delta import DeltaNet, DeltaNetState, delta_net, delta_net_spec, delta_net_state
from ..attention.qsa import (
    IndexedAttention,
    IndexedPages,
    IndexSizes,
    indexed_attention,
    indexed_attention_spec,
    indexed_pages,
)
from ..blocks.hyper_connection import HyperConnection, hyper_connection_spec, read_streams
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
)
from ..blocks.mlp import SharedExpertMoe, moe, moe_spec
from ..blocks.ngram_embedding import NgramEmbedding, NgramState, ngram_embedding, ngram_embedding_spec, ngram_state
from ..output import LogitsOf, Output, Taps, head_logits
from ..state.batch import Batch
from ..state.state import Entry, Recurrent, State
from ..state.step import Step, begin, finish
from .qwen3_8_flash_next_config import INDEXED, LINEAR, FlashNextConfig, indexed_by, read_config

if TYPE_CHECKING:
    from ..model import Model

__all__ = ["FlashNextConfig", "FlashNextParams", "forward", "init_entries", "param_spec", "read_config", "with_index"]


@tree
class Layer:
    """One decoder layer: n-gram embeddings (or None), then a token mixer and experts, each between connections."""

    ngrams: NgramEmbedding | None
    attn_streams: HyperConnection
    attn: DeltaNet | IndexedAttention
    mlp_streams: HyperConnection
    mlp: SharedExpertMoe


@tree
class Mtp:
    """Multi-token prediction head: the token's embedding is added to each of the streams, then one more layer."""

    embed_norm: Norm
    hidden_norm: Norm
    embed_proj: Linear
    hidden_proj: Linear
    layers: tuple[Layer, ...]
    mixer: HyperConnection


@tree
class FlashNextParams:
    """All parameters. `head` is None when the embedding is tied to it; `mtp` when the checkpoint has none."""

    embed: Embedding
    layers: tuple[Layer, ...]
    mixer: HyperConnection
    head: Linear | None
    mtp: Mtp | None


@tree
class NgramLayerState(Recurrent):
    """The state of a layer with n-gram embeddings: that of its delta net, and that of the embeddings."""

    attn: DeltaNetState
    ngrams: NgramState

    def after(self, accepted: Int[Tensor, " rows"]) -> NgramLayerState:
        """The state after the first `accepted` pending tokens of each row."""
        return NgramLayerState(self.attn.after(accepted), self.ngrams.after(accepted))


def param_spec(config: FlashNextConfig) -> FlashNextParams:
    """The parameter tree with a `TensorSpec` at each leaf."""
    hidden, streams = config.hidden_size, config.hc_count
    mixer = hyper_connection_spec(hidden, streams, config.hc_lowrank, writes=False)
    mtp = None
    if config.mtp_num_hidden_layers:
        layers = tuple(_layer_spec(config, INDEXED, None) for _ in range(config.mtp_num_hidden_layers))
        mtp = unchecked(
            Mtp, embed_norm=norm_spec(hidden, "zeros"), hidden_norm=norm_spec(streams * hidden, "zeros"),
            embed_proj=linear_spec(hidden, hidden), hidden_proj=linear_spec(hidden, hidden), layers=layers, mixer=mixer,
        )  # fmt: skip
    return unchecked(
        FlashNextParams,
        embed=embedding_spec(config.vocab_size, hidden),
        layers=tuple(_layer_spec(config, kind, config.ple_index(at)) for at, kind in enumerate(config.layer_types)),
        mixer=mixer,
        head=None if config.tie_word_embeddings else head_spec(config.vocab_size, hidden),
        mtp=mtp,
    )


def _layer_spec(config: FlashNextConfig, kind: str, ngrams: int | None) -> Layer:
    hidden, streams = config.hidden_size, config.hc_count
    if kind == LINEAR:
        attn = delta_net_spec(hidden, **config.delta_sizes)
    else:
        heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        attn = indexed_attention_spec(hidden, *heads, _index_sizes(config))
    connection = hyper_connection_spec(hidden, streams, config.hc_lowrank)
    inner, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
    table = None if ngrams is None else ngram_embedding_spec(hidden, streams, index=ngrams, **config.ngram_sizes)
    return unchecked(
        Layer, ngrams=table, attn_streams=connection, attn=attn, mlp_streams=connection,
        mlp=moe_spec(hidden, config.num_experts, inner, shared),
    )  # fmt: skip


def _index_sizes(config: FlashNextConfig) -> IndexSizes:
    return IndexSizes(
        config.indexer_n_heads, config.indexer_head_dim, config.indexer_budget, config.indexer_compress_ratio
    )


def init_entries(
    config: FlashNextConfig, rows: int, pages: int, page_size: int,
    dtype: torch.dtype, recurrent_dtype: torch.dtype, device: torch.device,
) -> tuple[Entry, ...]:  # fmt: skip
    """One empty entry a layer."""
    recurrent = {"dtype": dtype, "recurrent_dtype": recurrent_dtype, "device": device}
    sizes = {"width": config.ple_conv_kernel_size, "order": config.ngram_size, "dtype": dtype, "device": device}

    def entry(layer: int, kind: str) -> Entry:
        if kind == INDEXED:
            return index_entry(config, pages, page_size, dtype, device)
        delta = delta_net_state(rows, **config.delta_sizes, **recurrent)
        if config.ple_index(layer) is None:
            return delta
        return NgramLayerState(delta, ngram_state(rows, config.hidden_size, config.hc_count, **sizes))

    return tuple(entry(layer, kind) for layer, kind in enumerate(config.layer_types))


def index_entry(
    config: FlashNextConfig, pages: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> IndexedPages:
    """The empty entry of a layer of attention."""
    kv = (config.num_key_value_heads, config.head_dim)
    return indexed_pages(pages, page_size, *kv, _index_sizes(config), dtype, device)


def forward(
    config: FlashNextConfig,
    params: FlashNextParams,
    state: State | None,
    batch: Batch,
    *,
    logits: LogitsOf = "all",
    outputs: Sequence[str] = (),
    keep_steps: bool = False,
) -> tuple[Output, State | None]:
    """Logits of the batch's tokens, and the state that holds them too. See `Model.forward`.

    `Output.hidden` are the streams that the last connection reads, laid end to end: what the draft head takes.
    `outputs` offers `layers.3` (the streams after a layer) and, of each layer that has them, `layers.3.router`,
    `.blocks` (those selected, -1 for none), `.output_gate` (of attention), `.ngram_gate`, `.attn_inject` and
    `.mlp_inject` (the weights of the streams); and `mixed`, what goes to the head.
    """
    taps = Taps(outputs, _tap_names(config))
    step = begin(state, batch, keep_steps, kinds=_entry_kinds(config))
    rotary = place_angles(config, step)
    embedded = look_up(params.embed, batch.tokens)
    x = embedded[:, None].expand(-1, config.hc_count, -1)
    entries: list[Entry | None] = []
    for index, layer in enumerate(params.layers):
        x, entry = decoder_layer(config, layer, x, batch, index, step, rotary, taps)
        entries.append(entry)
    mixed, _ = read_streams(params.mixer, x, eps=config.rms_norm_eps)
    taps.offer("mixed", mixed)
    found = head_logits(mixed, head_weight(params.embed, params.head), step, logits)
    return Output(found, x.flatten(1), taps.taken()), finish(step, entries)


def _entry_kinds(config: FlashNextConfig) -> list[type[Entry]]:
    def kind(layer: int, name: str) -> type[Entry]:
        if name == INDEXED:
            return IndexedPages
        return DeltaNetState if config.ple_index(layer) is None else NgramLayerState

    return [kind(layer, name) for layer, name in enumerate(config.layer_types)]


def _tap_names(config: FlashNextConfig) -> list[str]:
    names = ["mixed"]
    for index, kind in enumerate(config.layer_types):
        kinds = ["router", "attn_inject", "mlp_inject"]
        kinds += ["blocks", "output_gate"] if kind == INDEXED else []
        kinds += ["ngram_gate"] if config.ple_index(index) is not None else []
        names += [f"layers.{index}", *(f"layers.{index}.{name}" for name in kinds)]
    return names


def place_angles(
    config: FlashNextConfig, step: Step
) -> tuple[Float[Tensor, "tokens half"], Float[Tensor, "tokens half"]]:
    """Cosines and sines of the tokens' places. Positions are refused: index blocks turn by their place in the row."""
    return ops.rotary_angles(step.positions, rotary_dim=config.rotary_dim, theta=config.rope_theta)


def decoder_layer(
    config: FlashNextConfig, layer: Layer, x: Float[Tensor, "tokens streams hidden"], batch: Batch, index: int,
    step: Step, rotary: tuple[Tensor, Tensor], taps: Taps,
) -> tuple[Float[Tensor, "tokens streams hidden"], Entry | None]:  # fmt: skip
    """The streams after layer `index`, and its new entry."""
    if layer.ngrams is None:
        kind = DeltaNetState if isinstance(layer.attn, DeltaNet) else IndexedPages
        return _blocks(config, layer, x, step.past(index, kind), index, step, rotary, taps)
    past = step.past(index, NgramLayerState)
    before, ngrams_before = (None, None) if past is None else (past.attn, past.ngrams)
    eps = config.rms_norm_eps
    x, gates, ngrams = ngram_embedding(layer.ngrams, x, batch.tokens, ngrams_before, step, eps=eps)
    taps.offer(f"layers.{index}.ngram_gate", gates)
    x, attn = _blocks(config, layer, x, before, index, step, rotary, taps)
    return x, NgramLayerState(attn, ngrams) if isinstance(attn, DeltaNetState) and ngrams is not None else None


def _blocks(
    config: FlashNextConfig, layer: Layer, x: Float[Tensor, "tokens streams hidden"],
    past: DeltaNetState | IndexedPages | None, index: int, step: Step, rotary: tuple[Tensor, Tensor], taps: Taps,
) -> tuple[Float[Tensor, "tokens streams hidden"], DeltaNetState | IndexedPages | None]:  # fmt: skip
    """The streams after token mixer and experts, each of which reads and writes them through its connection."""
    name, eps = f"layers.{index}", config.rms_norm_eps
    mixed, weights = read_streams(layer.attn_streams, x, eps=eps)
    taps.offer(f"{name}.attn_inject", weights)
    y, past = _mix(config, layer.attn, mixed, past, name, step, rotary, taps)
    x = ops.hyper_inject(x, y, weights)
    mixed, weights = read_streams(layer.mlp_streams, x, eps=eps)
    taps.offer(f"{name}.mlp_inject", weights)
    y, routing = moe(layer.mlp, mixed, top_k=config.num_experts_per_tok)
    taps.offer(f"{name}.router", routing)
    x = ops.hyper_inject(x, y, weights)
    taps.offer(name, x)
    return x, past


def _mix(
    config: FlashNextConfig, params: DeltaNet | IndexedAttention, x: Float[Tensor, "tokens hidden"], past: Any,
    name: str, step: Step, rotary: tuple[Tensor, Tensor], taps: Taps,
) -> tuple[Float[Tensor, "tokens hidden"], DeltaNetState | IndexedPages | None]:  # fmt: skip
    eps = config.rms_norm_eps
    if isinstance(params, DeltaNet):
        heads = {"k_heads": config.linear_num_key_heads, "k_dim": config.linear_key_head_dim}
        return delta_net(params, x, past, step, **heads, eps=eps, gate=config.gate)
    y, past, chosen = indexed_attention(
        params, x, past, step, rotary, heads=config.num_attention_heads, kv_heads=config.num_key_value_heads,
        index=_index_sizes(config), theta=config.rope_theta, eps=eps, show_blocks=taps.asks(f"{name}.blocks"),
    )  # fmt: skip
    taps.offer(f"{name}.blocks", chosen.blocks)
    taps.offer(f"{name}.output_gate", chosen.gate)
    return y, past


def with_index(model: Model, *, budget: int | None = None, ratio: int | None = None) -> Model:
    """The model with another index: `budget` tokens of selected blocks a query, `ratio` tokens a block.

    Weights stay as they are, and a budget is free to choose; of another ratio than theirs they have seen no block keys,
    which is warned about. States have a block key every `ratio` tokens: another ratio needs another state. Raises
    `ConfigError` for a budget that is not a multiple of the ratio.
    """
    return replace(model, config=indexed_by(model.config, read_config(model.config_json), budget=budget, ratio=ratio))
