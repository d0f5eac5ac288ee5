"""Parameters and decoder layers of Qwen3.5, of which its draft head has some too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor

from lowering import ops
from params.tree import tree

from ..attention.gated_delta import DeltaNet, DeltaNetState, delta_net
from ..attention.gqa import GatedAttention, KeyValuePages, attention
from ..blocks import decoder
from ..blocks.linear import Embedding, GemmaNorm, Linear, Norm
from ..blocks.mlp import Mlp, SharedExpertMoe, mlp, moe
from ..output import Taps
from ..state.batch import Batch
from ..state.state import Entry
from ..state.step import Step
from .qwen3_5_config import Qwen35Config


@tree
class Layer:
    """One decoder layer: a token mixer and a feed-forward block, each behind a norm."""

    input_norm: Norm
    attn: DeltaNet | GatedAttention
    post_norm: Norm
    mlp: Mlp | SharedExpertMoe

    @staticmethod
    def spec(config: Qwen35Config, kind: str) -> Layer:
        """Spec of a layer of this kind of token mixer."""
        hidden, norm = config.hidden_size, GemmaNorm.spec(config.hidden_size)
        if kind == "full_attention":
            heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
            attn = GatedAttention.spec(hidden, *heads, norm=GemmaNorm)
        else:
            attn = DeltaNet.spec(hidden, **config.delta_sizes)
        inner, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
        feed = Mlp.spec(hidden, config.intermediate_size)
        if config.num_experts:
            feed = SharedExpertMoe.spec(hidden, config.num_experts, inner, shared)
        return Layer(norm, attn, norm, feed)


@tree
class Mtp:
    """Multi-token prediction head: embedding and hidden are normalised, joined (embedding first) and projected."""

    embed_norm: Norm
    hidden_norm: Norm
    fc: Linear
    layers: tuple[Layer, ...]
    norm: Norm

    @staticmethod
    def spec(config: Qwen35Config) -> Mtp | None:
        """Spec of the head, None where a config has none."""
        hidden, norm = config.hidden_size, GemmaNorm.spec(config.hidden_size)
        layers = tuple(Layer.spec(config, "full_attention") for _ in range(config.mtp_num_hidden_layers))
        return Mtp(norm, norm, Linear.spec(2 * hidden, hidden), layers, norm) if layers else None


@tree
class Qwen35Params:
    """All parameters. `head` is None when the embedding is tied to it; `mtp` when the checkpoint has none."""

    embed: Embedding
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear | None
    mtp: Mtp | None

    @staticmethod
    def spec(config: Qwen35Config) -> Qwen35Params:
        """The parameter tree with a `TensorSpec` at each leaf."""
        vocab, hidden = config.vocab_size, config.hidden_size
        return Qwen35Params(
            embed=Embedding.spec(vocab, hidden),
            layers=tuple(Layer.spec(config, kind) for kind in config.layer_types),
            norm=GemmaNorm.spec(hidden),
            head=None if config.tie_word_embeddings else Linear.head_spec(vocab, hidden),
            mtp=Mtp.spec(config),
        )


def decoder_layers(
    config: Qwen35Config,
    layers: Sequence[Layer],
    norm: Norm,
    x: Float[Tensor, "tokens hidden"],
    batch: Batch,
    step: Step,
    taps: Taps,
) -> tuple[Float[Tensor, "tokens hidden"], list[Entry | None]]:
    """The residual stream `x` through decoder layers and the final `norm`, and the layers' new entries."""
    mix, feed = partial(_mix, config, step, _rotary(config, batch, step)), partial(_feed_forward, config, taps)
    return decoder.decoder_layers(layers, norm, x, mix, feed, taps, eps=config.rms_norm_eps)


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
    config: Qwen35Config,
    step: Step,
    rotary: tuple[Tensor, Tensor],
    index: int,
    params: DeltaNet | GatedAttention,
    x: Float[Tensor, "tokens hidden"],
) -> tuple[Float[Tensor, "tokens hidden"], Entry | None]:
    eps = config.rms_norm_eps
    if isinstance(params, GatedAttention):
        heads = {"heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads}
        return attention(params, x, step.past(index, KeyValuePages), step, rotary, **heads, eps=eps)
    k_heads, k_dim = config.linear_num_key_heads, config.linear_key_head_dim
    return delta_net(params, x, step.past(index, DeltaNetState), step, k_heads=k_heads, k_dim=k_dim, eps=eps)


def _feed_forward(
    config: Qwen35Config, taps: Taps, index: int, params: Mlp | SharedExpertMoe, x: Float[Tensor, "tokens hidden"]
) -> Float[Tensor, "tokens hidden"]:
    if isinstance(params, Mlp):
        return mlp(params, x)
    y, routing = moe(params, x, top_k=config.num_experts_per_tok)
    taps.offer(f"layers.{index}.router", routing)
    return y
