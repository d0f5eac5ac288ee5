"""Kimi Linear: delta attention with a decay a channel beside latent attention without rope, and mixtures of experts.

Text models. Source: `KimiLinearConfig` and `KimiLinearForCausalLM` of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from jaxtyping import Float
from torch import Tensor

from lowering import ops
from lowering.layouts import LAYOUTS
from params.names.kimi_linear import NAMES
from params.tree import exactly, tree

from ..attention.gated_delta import DeltaNetState, delta_net_state
from ..attention.kimi_delta import KimiDelta, kimi_delta
from ..attention.mla import LatentAttention, LatentPages, latent_attention, latent_pages
from ..blocks.decoder import decoder_layers
from ..blocks.linear import (
    Embedding,
    Linear,
    Norm,
    head_weight,
    look_up,
)
from ..blocks.mlp import (
    BiasedRouter,
    Experts,
    Mlp,
    Routing,
    mlp,
    router_logits,
)
from ..family import Family
from ..output import LogitsOf, Output, Taps, head_logits
from ..state.batch import Batch
from ..state.space import Space
from ..state.state import Entry, State
from ..state.step import Step, begin, finish
from .kimi_linear_config import LATENT_EPS, KimiLinearConfig, read_config


@tree
class SigmoidMoe:
    """Routed experts, plus one for every token."""

    router: BiasedRouter
    experts: Experts
    shared: Mlp

    @staticmethod
    def spec(config: KimiLinearConfig) -> SigmoidMoe:
        """Spec of the parameters."""
        hidden, inner, experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
        shared = Mlp.spec(hidden, config.num_shared_experts * inner)
        return SigmoidMoe(BiasedRouter.spec(hidden, experts), Experts.spec(hidden, experts, inner), shared)


@tree
class Layer:
    """One decoder layer: an attention and a feed-forward block, each behind a norm."""

    input_norm: Norm
    attn: KimiDelta | LatentAttention
    post_norm: Norm
    mlp: Mlp | SigmoidMoe

    @staticmethod
    def spec(config: KimiLinearConfig, index: int) -> Layer:
        """Spec of layer `index`."""
        hidden, norm = config.hidden_size, Norm.spec(config.hidden_size)
        sparse = config.is_sparse(index)
        feed = SigmoidMoe.spec(config) if sparse else Mlp.spec(hidden, config.intermediate_size)
        if config.is_linear(index):
            width = config.linear_conv_kernel_dim
            attn = KimiDelta.spec(hidden, config.linear_num_heads, config.linear_head_dim, width)
        else:
            attn = LatentAttention.spec(hidden, *config.latent_sizes, config.attention_bias)
        return Layer(norm, attn, norm, feed)


@tree
class KimiLinearParams:
    """All parameters."""

    embed: Embedding
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear

    @staticmethod
    def spec(config: KimiLinearConfig) -> KimiLinearParams:
        """The parameter tree with a `TensorSpec` at each leaf."""
        vocab, hidden = config.vocab_size, config.hidden_size
        layers = tuple(Layer.spec(config, index) for index in range(config.num_hidden_layers))
        return KimiLinearParams(
            Embedding.spec(vocab, hidden), layers, Norm.spec(hidden), Linear.head_spec(vocab, hidden)
        )


def init_entries(config: KimiLinearConfig, space: Space) -> tuple[Entry, ...]:
    """One empty entry a layer."""
    heads, dim = config.linear_num_heads, config.linear_head_dim
    sizes = (heads, heads, dim, dim, config.linear_conv_kernel_dim)
    widths = config.kv_lora_rank, config.qk_rope_head_dim
    return tuple(
        delta_net_state(space, *sizes) if config.is_linear(index) else latent_pages(space, *widths)
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
    mix, feed = partial(attend, config, step), partial(_feed_forward, config, taps)
    x = look_up(params.embed, batch.tokens)
    hidden, entries = decoder_layers(params.layers, params.norm, x, mix, feed, taps, eps=config.rms_norm_eps)
    found = head_logits(hidden, head_weight(params.embed, params.head), step, logits)
    return Output(found, hidden, taps.taken()), finish(step, entries)


def entry_kinds(config: KimiLinearConfig) -> list[type[Entry]]:
    """What `init_entries` makes for each layer."""
    return [DeltaNetState if config.is_linear(index) else LatentPages for index in range(config.num_hidden_layers)]


def tap_names(config: KimiLinearConfig) -> list[str]:
    """The values that `forward` can be asked for."""
    layers = range(config.num_hidden_layers)
    routed = [f"layers.{index}.router" for index in layers if config.is_sparse(index)]
    return [f"layers.{index}" for index in layers] + routed


def attend(
    config: KimiLinearConfig, step: Step, index: int, params: KimiDelta | LatentAttention,
    x: Float[Tensor, "tokens hidden"], *, lower_bound: float | None = None, gated: bool = False,
) -> tuple[Float[Tensor, "tokens hidden"], Entry | None]:  # fmt: skip
    """What attention of either kind gives. `lower_bound` is that of delta attention, `gated` of latent attention."""
    if isinstance(params, KimiDelta):
        past = step.past(index, DeltaNetState)
        return kimi_delta(params, x, past, step, eps=config.rms_norm_eps, lower_bound=lower_bound)
    return latent_attention(
        params, x, step.past(index, LatentPages), step, None,
        heads=config.num_attention_heads, nope_dim=config.qk_nope_head_dim, rope_dim=config.qk_rope_head_dim,
        v_dim=config.v_head_dim, scale=config.softmax_scale, eps=LATENT_EPS, gated=gated,
    )  # fmt: skip


def choose_experts(config: KimiLinearConfig, router: BiasedRouter, x: Float[Tensor, "tokens hidden"]) -> Routing:
    """The experts of each token, and their weights in the router's dtype."""
    weights, ids = ops.route_sigmoid(
        router_logits(x, exactly(router, BiasedRouter).weight), router.bias,
        top_k=config.num_experts_per_token, groups=config.num_expert_group, kept_groups=config.topk_group,
        scale=config.routed_scaling_factor, renormalise=config.moe_renormalize,
    )  # fmt: skip
    return Routing(ids, weights)


def _feed_forward(
    config: KimiLinearConfig, taps: Taps, index: int, params: Mlp | SigmoidMoe, x: Float[Tensor, "tokens hidden"]
) -> Float[Tensor, "tokens hidden"]:
    if isinstance(params, Mlp):
        return mlp(params, x)
    chosen, each = choose_experts(config, params.router, x), params.experts
    taps.offer(f"layers.{index}.router", chosen)
    routed = ops.experts(x, chosen.weights.to(x.dtype), chosen.ids, each.gate_up, each.down)
    return routed + mlp(params.shared, x)


FAMILY = Family(
    model_types=("kimi_linear",),
    read_config=read_config,
    params=KimiLinearParams,
    names=NAMES,
    init_entries=init_entries,
    forward=forward,
    layouts=tuple(LAYOUTS),
    heads=("num_attention_heads", "linear_num_heads"),
    decays_channels=True,
)
