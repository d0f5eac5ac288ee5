"""Qwen3.5 and Qwen3.6, dense and mixture of experts: three gated delta net layers, then one of gated attention.

Text models. Source: `Qwen3_5TextConfig`, `Qwen3_5MoeTextConfig` and their models in transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lowering import ops
from params.spec import TensorSpec
from params.tree import tree, unchecked

from .. import config as configs
from ..attention.gated_delta import DeltaNet, delta_net, delta_net_spec, delta_net_state
from ..attention.gqa import GatedAttention, gated_attention, gated_attention_spec, key_value_pages
from ..batch import Batch
from ..blocks.linear import Embedding, Linear, Norm, linear_spec, norm_spec
from ..blocks.mlp import Mlp, SharedExpertMoe, mlp, mlp_spec, moe, moe_spec
from ..output import LogitsOf, Output, Taps, head_logits
from ..state import Entry, State
from ..step import Step, begin, finish


@dataclass(frozen=True)
class Qwen35Config:
    """Fields of the checkpoint's config.json under their own names. `num_experts` 0 is the dense model."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    layer_types: tuple[str, ...]
    rope_theta: float
    partial_rotary_factor: float
    mrope_section: tuple[int, ...]
    full_attention_interval: int = 4
    linear_conv_kernel_dim: int = 4
    intermediate_size: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    mtp_num_hidden_layers: int = 0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = False

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that rotate."""
        return int(self.head_dim * self.partial_rotary_factor)


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


def read_config(given: Mapping[str, Any]) -> Qwen35Config:
    """The text model's config, from a text or a vision-language `config.json`. Raises `ConfigError`."""
    text = {**given, **configs.section(given, "text_config")}
    rope = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
    rope |= {name: text[name] for name in rope if text.get(name) is not None}
    rope |= configs.section(text, "rope_parameters") or configs.section(text, "rope_scaling")
    fields = {"layer_types": _layer_types(text), **{k: v for k, v in text.items() if v is not None}, **rope}
    sizes = _MOE_SIZES if "moe" in str(text.get("model_type")) else ("intermediate_size",)
    config = configs.read(Qwen35Config, fields, required=sizes)
    _check(config, fields, sizes)
    return config


def _layer_types(given: Mapping[str, Any]) -> list[str]:
    """Every n-th layer attends fully, by default every fourth. Wrong types are left to the config's own check."""
    layers, every = given.get("num_hidden_layers"), given.get("full_attention_interval") or 4
    if not isinstance(layers, int) or not isinstance(every, int):
        return []
    return ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]


def _check(config: Qwen35Config, given: Mapping[str, Any], sizes: Sequence[str]) -> None:
    found = {name: getattr(config, name) for name in (*_POSITIVE, *sizes)}
    configs.require(
        *((value > 0, f"{name} must be positive, found {value}") for name, value in found.items()),
        *_layer_rules(config),
        *_feed_forward_rules(config, given, sizes),
        *_rotary_rules(config, given),
        (
            given.get("hidden_act", "silu") == "silu",
            f"hidden_act {given.get('hidden_act')!r} is not supported; only silu is",
        ),
        (not given.get("attention_bias", False), "attention_bias true is not supported"),
        (given.get("attn_output_gate", True), "attn_output_gate false is not supported: Qwen3.5 gates its attention"),
    )


def _layer_rules(config: Qwen35Config) -> Iterator[tuple[bool, str]]:
    kinds, known = config.layer_types, ("full_attention", "linear_attention")
    layers, drafts = config.num_hidden_layers, config.mtp_num_hidden_layers
    yield drafts >= 0, f"mtp_num_hidden_layers must not be negative, found {drafts}"
    yield len(kinds) == layers, f"layer_types has {len(kinds)} entries, num_hidden_layers is {layers}"
    yield set(kinds) <= set(known), f"layer_types may hold {' and '.join(known)}, found {sorted(set(kinds))}"
    for more, fewer in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        whole = getattr(config, more) % max(getattr(config, fewer), 1) == 0
        yield whole, f"{more} must be a multiple of {fewer}, found {getattr(config, more)} and {getattr(config, fewer)}"


def _feed_forward_rules(
    config: Qwen35Config, given: Mapping[str, Any], sizes: Sequence[str]
) -> Iterator[tuple[bool, str]]:
    experts, chosen, kind = config.num_experts, config.num_experts_per_tok, given.get("model_type")
    yield (experts > 0) == (sizes is _MOE_SIZES), f"model_type {kind!r} and num_experts {experts} contradict each other"
    yield experts <= 0 or chosen <= experts, f"num_experts_per_tok {chosen} is more than num_experts {experts}"


def _rotary_rules(config: Qwen35Config, given: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    dim, kind, sections = config.rotary_dim, given.get("rope_type", given.get("type", "default")), config.mrope_section
    yield (
        0 < dim <= config.head_dim and dim % 2 == 0,
        f"partial_rotary_factor {config.partial_rotary_factor} gives {dim} rotary channels of {config.head_dim}; "
        "an even number in 2..head_dim is needed",
    )
    yield len(sections) == 3, f"mrope_section must have three parts, found {list(sections)}"
    yield kind == "default", f"rope_type {kind!r} is not supported; only default is"


_MOE_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
_POSITIVE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim", "max_position_embeddings", "full_attention_interval", "rope_theta", "rms_norm_eps",
)  # fmt: skip


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
        embed=unchecked(Embedding, weight=TensorSpec((config.vocab_size, hidden)), head=None),
        layers=tuple(_layer_spec(config, kind) for kind in config.layer_types),
        norm=norm_spec(hidden, "zeros"),
        head=None if tied else linear_spec(hidden, config.vocab_size),
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

    def entry(kind: str) -> Entry:
        if kind == "full_attention":
            return key_value_pages(pages, page_size, config.num_key_value_heads, config.head_dim, dtype, device)
        return delta_net_state(
            rows, **_delta_sizes(config), dtype=dtype, recurrent_dtype=recurrent_dtype, device=device
        )

    return tuple(entry(kind) for kind in config.layer_types)


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
    step = begin(state, batch, keep_steps)
    taps = Taps(outputs)
    rotary = _rotary(config, batch, step)
    eps = config.rms_norm_eps
    entries: list[Entry | None] = []

    x = ops.embedding(batch.tokens, params.embed.weight)
    normed = ops.gemma_rms_norm(x, params.layers[0].input_norm.weight, eps=eps)
    next_norms = [layer.input_norm for layer in params.layers[1:]] + [params.norm]
    for index, (layer, next_norm) in enumerate(zip(params.layers, next_norms, strict=True)):
        past = None if step.past is None else step.past[index]
        mixed, entry = _mix(config, layer.attn, normed, past, step, rotary)
        normed, x = ops.add_gemma_rms_norm(mixed, x, layer.post_norm.weight, eps=eps)
        fed = _feed_forward(config, layer.mlp, normed, index, taps)
        normed, x = ops.add_gemma_rms_norm(fed, x, next_norm.weight, eps=eps)
        taps.offer(f"layers.{index}", x)
        entries.append(entry)
    head = params.embed.head if params.head is None else params.head.weight
    head = params.embed.weight if head is None else head
    return Output(head_logits(normed, head, step, logits), normed, taps.taken()), finish(step, entries)


def _rotary(
    config: Qwen35Config, batch: Batch, step: Step
) -> tuple[Float[Tensor, "tokens half"], Float[Tensor, "tokens half"]]:
    sizes: dict[str, Any] = {"rotary_dim": config.rotary_dim, "theta": config.rope_theta}
    if batch.positions is None:
        return ops.rotary_angles(step.positions, **sizes)
    return ops.mrope_angles(batch.positions, sections=config.mrope_section, **sizes)


def _mix(
    config: Qwen35Config, params: DeltaNet | GatedAttention, x: Float[Tensor, "tokens hidden"], past: Any, step: Step,
    rotary: tuple[Tensor, Tensor],
) -> tuple[Float[Tensor, "tokens hidden"], Entry | None]:  # fmt: skip
    if isinstance(params, GatedAttention):
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        return gated_attention(params, x, past, step, rotary, heads=heads, kv_heads=kv_heads, eps=config.rms_norm_eps)
    k_heads, k_dim = config.linear_num_key_heads, config.linear_key_head_dim
    return delta_net(params, x, past, step, k_heads=k_heads, k_dim=k_dim, eps=config.rms_norm_eps)


def _feed_forward(
    config: Qwen35Config, params: Mlp | SharedExpertMoe, x: Float[Tensor, "tokens hidden"], index: int, taps: Taps
) -> Float[Tensor, "tokens hidden"]:
    if isinstance(params, Mlp):
        return mlp(params, x)
    y, routing = moe(params, x, top_k=config.num_experts_per_tok)
    taps.offer(f"layers.{index}.router", routing)
    return y
