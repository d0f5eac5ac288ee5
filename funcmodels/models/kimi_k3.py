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
from lowering.layouts import LAYOUTS
from params.names.kimi_k3 import NAMES
from params.tree import tree

from ..attention.kimi_delta import KimiDelta
from ..attention.mla import LatentAttention
from ..blocks.attention_residual import AttentionResidual, attention_residual
from ..blocks.linear import (
    Embedding,
    Linear,
    Norm,
    head_weight,
    look_up,
    normalised,
    project,
)
from ..blocks.mlp import (
    BiasedRouter,
    Experts,
    Mlp,
    mlp,
)
from ..family import Family
from ..output import LogitsOf, Output, Taps, head_logits
from ..state.batch import Batch
from ..state.state import Entry, State
from ..state.step import begin, finish
from .kimi_k3_config import KimiK3Config, is_kimi_k3, read_config
from .kimi_linear import attend, choose_experts, entry_kinds, init_entries, tap_names


@tree
class LatentMoe:
    """Routed experts between two projections, which read a latent and whose sum has a norm; plus one on every token."""

    router: BiasedRouter
    down: Linear
    experts: Experts
    norm: Norm
    up: Linear
    shared: Mlp

    @staticmethod
    def spec(config: KimiK3Config) -> LatentMoe:
        """Spec of the parameters."""
        hidden, latent, inner = config.hidden_size, config.routed_expert_hidden_size, config.moe_intermediate_size
        return LatentMoe(
            router=BiasedRouter.spec(hidden, config.num_experts),
            down=Linear.spec(hidden, latent),
            experts=Experts.spec(latent, config.num_experts, inner),
            norm=Norm.spec(latent),
            up=Linear.spec(latent, hidden),
            shared=Mlp.spec(hidden, config.num_shared_experts * inner),
        )


@tree
class Layer:
    """One decoder layer: an attention and a feed-forward block, each behind a mean of sums and a norm."""

    attn_residual: AttentionResidual
    input_norm: Norm
    attn: KimiDelta | LatentAttention
    mlp_residual: AttentionResidual
    post_norm: Norm
    mlp: Mlp | LatentMoe

    @staticmethod
    def spec(config: KimiK3Config, index: int) -> Layer:
        """Spec of layer `index`."""
        hidden, sparse = config.hidden_size, config.is_sparse(index)
        norm, residual = Norm.spec(hidden), AttentionResidual.spec(hidden)
        feed = LatentMoe.spec(config) if sparse else Mlp.spec(hidden, config.intermediate_size)
        if config.is_linear(index):
            sizes = config.linear_num_heads, config.linear_head_dim, config.linear_conv_kernel_dim
            attn = KimiDelta.spec(hidden, *sizes, full_rank_gate=True, dtype=torch.float32)
        else:
            attn = LatentAttention.spec(hidden, *config.latent_sizes, bias=False, gated=True)
        return Layer(residual, norm, attn, residual, norm, feed)


@tree
class KimiK3Params:
    """All parameters."""

    embed: Embedding
    layers: tuple[Layer, ...]
    output_residual: AttentionResidual
    norm: Norm
    head: Linear

    @staticmethod
    def spec(config: KimiK3Config) -> KimiK3Params:
        """The parameter tree with a `TensorSpec` at each leaf."""
        vocab, hidden = config.vocab_size, config.hidden_size
        return KimiK3Params(
            embed=Embedding.spec(vocab, hidden),
            layers=tuple(Layer.spec(config, index) for index in range(config.num_hidden_layers)),
            output_residual=AttentionResidual.spec(hidden),
            norm=Norm.spec(hidden),
            head=Linear.head_spec(vocab, hidden),
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
    eps, kind = config.rms_norm_eps, {"lower_bound": float(config.gate_lower_bound), "gated": True}
    entries: list[Entry | None] = []
    prefix = look_up(params.embed, batch.tokens)
    bank = prefix[:, None][:, :0]  # no snapshots yet; sliced and not made, so that it has the prefix's dtype and device
    x = attention_residual(params.layers[0].attn_residual, bank, prefix, eps=eps)
    readers = [layer.attn_residual for layer in params.layers[1:]] + [params.output_residual]
    for index, (layer, next_reader) in enumerate(zip(params.layers, readers, strict=True)):
        normed = normalised(layer.input_norm, x, eps=eps)
        attended, entry = attend(config, step, index, layer.attn, normed, **kind)
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


def _feed_forward(
    config: KimiK3Config, params: Mlp | LatentMoe, x: Float[Tensor, "tokens hidden"], index: int, taps: Taps
) -> Float[Tensor, "tokens hidden"]:
    if isinstance(params, Mlp):
        return mlp(params, x, caps=config.caps)
    chosen, each = choose_experts(config, params.router, x), params.experts
    taps.offer(f"layers.{index}.router", chosen)
    latent, weights = project(params.down, x), chosen.weights.to(x.dtype)
    latent = ops.experts(latent, weights, chosen.ids, each.gate_up, each.down, caps=config.caps)
    routed = project(params.up, normalised(params.norm, latent, eps=config.rms_norm_eps))
    return routed + mlp(params.shared, x, caps=config.caps)


FAMILY = Family(
    model_types=("kimi_k3",),
    read_config=read_config,
    params=KimiK3Params,
    names=NAMES,
    init_entries=init_entries,
    forward=forward,
    layouts=tuple(LAYOUTS),
    heads=("num_attention_heads", "linear_num_heads"),
    decays_channels=True,
    claims=is_kimi_k3,
)
