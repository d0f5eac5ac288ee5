"""Parameters, states and decoder layers of Qwen3.8-Flash-Next, of which its draft head has some too."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from lowering import ops
from params.tree import tree

from ..attention.gated_delta import DeltaNet, DeltaNetState, delta_net
from ..attention.qsa import IndexedAttention, IndexedPages, IndexSizes, indexed_attention, indexed_pages
from ..blocks.hyper_connection import HyperConnection, read_streams
from ..blocks.linear import Embedding, GemmaNorm, Linear, Norm
from ..blocks.mlp import SharedExpertMoe, moe
from ..blocks.ngram_embedding import NgramEmbedding, NgramState, ngram_embedding
from ..output import Taps
from ..state.batch import Batch
from ..state.space import Space
from ..state.state import Entry, Recurrent
from ..state.step import Step
from .qwen3_8_flash_next_config import INDEXED, LINEAR, FlashNextConfig


@tree
class Layer:
    """One decoder layer: n-gram embeddings (or None), then a token mixer and experts, each between connections."""

    ngrams: NgramEmbedding | None
    attn_streams: HyperConnection
    attn: DeltaNet | IndexedAttention
    mlp_streams: HyperConnection
    mlp: SharedExpertMoe

    @staticmethod
    def spec(config: FlashNextConfig, kind: str, ngrams: int | None) -> Layer:
        """Spec of a layer of this kind of token mixer, with n-gram embeddings where they have an index."""
        hidden, streams = config.hidden_size, config.hc_count
        if kind == LINEAR:
            attn = DeltaNet.spec(hidden, **config.delta_sizes)
        else:
            heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
            attn = IndexedAttention.spec(hidden, *heads, _index_sizes(config))
        connection = HyperConnection.spec(hidden, streams, config.hc_lowrank)
        inner, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
        feed = SharedExpertMoe.spec(hidden, config.num_experts, inner, shared)
        table = None if ngrams is None else NgramEmbedding.spec(hidden, streams, index=ngrams, **config.ngram_sizes)
        return Layer(table, connection, attn, connection, feed)


@tree
class Mtp:
    """Multi-token prediction head: the token's embedding is added to each of the streams, then one more layer."""

    embed_norm: Norm
    hidden_norm: Norm
    embed_proj: Linear
    hidden_proj: Linear
    layers: tuple[Layer, ...]
    mixer: HyperConnection

    @staticmethod
    def spec(config: FlashNextConfig) -> Mtp | None:
        """Spec of the head, None where a config has none."""
        hidden, streams, count = config.hidden_size, config.hc_count, config.mtp_num_hidden_layers
        return (
            None
            if not count
            else Mtp(
                embed_norm=GemmaNorm.spec(hidden),
                hidden_norm=GemmaNorm.spec(streams * hidden),
                embed_proj=Linear.spec(hidden, hidden),
                hidden_proj=Linear.spec(hidden, hidden),
                layers=tuple(Layer.spec(config, INDEXED, None) for _ in range(count)),
                mixer=HyperConnection.spec(hidden, streams, config.hc_lowrank, writes=False),
            )
        )


@tree
class FlashNextParams:
    """All parameters. `head` is None when the embedding is tied to it; `mtp` when the checkpoint has none."""

    embed: Embedding
    layers: tuple[Layer, ...]
    mixer: HyperConnection
    head: Linear | None
    mtp: Mtp | None

    @staticmethod
    def spec(config: FlashNextConfig) -> FlashNextParams:
        """The parameter tree with a `TensorSpec` at each leaf."""
        vocab, hidden = config.vocab_size, config.hidden_size
        return FlashNextParams(
            embed=Embedding.spec(vocab, hidden),
            layers=tuple(Layer.spec(config, kind, config.ple_index(at)) for at, kind in enumerate(config.layer_types)),
            mixer=HyperConnection.spec(hidden, config.hc_count, config.hc_lowrank, writes=False),
            head=None if config.tie_word_embeddings else Linear.head_spec(vocab, hidden),
            mtp=Mtp.spec(config),
        )


@tree
class NgramLayerState(Recurrent):
    """The state of a layer with n-gram embeddings: that of its delta net, and that of the embeddings."""

    attn: DeltaNetState
    ngrams: NgramState

    def after(self, accepted: Int[Tensor, " rows"]) -> NgramLayerState:
        """The state after the first `accepted` pending tokens of each row."""
        return NgramLayerState(self.attn.after(accepted), self.ngrams.after(accepted))


def _index_sizes(config: FlashNextConfig) -> IndexSizes:
    return IndexSizes(
        config.indexer_n_heads, config.indexer_head_dim, config.indexer_budget, config.indexer_compress_ratio
    )


def index_entry(config: FlashNextConfig, space: Space) -> IndexedPages:
    """The empty entry of a layer of attention."""
    return indexed_pages(space, config.num_key_value_heads, config.head_dim, _index_sizes(config))


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
