"""A Qwen3.5 spec tree of our own making, and transformers models to compare with.

The tree here is written from the checkpoint's side and knows nothing of `funcmodels`: an independent check of the
name table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from params import TensorSpec
from params.spec import Init
from params.tree import tree, unchecked


@tree
class Weight:
    """The weight of a norm, or a table."""

    weight: Any


@tree
class Linear:
    """A projection."""

    projections: ClassVar[tuple[str, ...]] = ("weight",)

    weight: Any


@tree
class Experts:
    """Stacked experts."""

    projections: ClassVar[tuple[str, ...]] = ("gate_up", "down")

    gate_up: Any
    down: Any


@tree
class Node:
    """Any node: its leaves are its fields, `None` where a kind of layer has none."""

    qkv: Any = None
    q_norm: Any = None
    k_norm: Any = None
    in_proj: Any = None
    conv: Any = None
    a_log: Any = None
    dt_bias: Any = None
    norm: Any = None
    out: Any = None
    gate_up: Any = None
    down: Any = None
    router: Any = None
    experts: Any = None
    shared: Any = None
    shared_gate: Any = None


@tree
class Layer:
    """A decoder layer."""

    input_norm: Any
    attn: Any
    post_norm: Any
    mlp: Any


@tree
class Mtp:
    """A draft head."""

    fc: Any
    embed_norm: Any
    hidden_norm: Any
    layers: Any
    norm: Any


@tree
class Params:
    """A whole model."""

    embed: Any
    layers: Any
    norm: Any
    head: Any
    mtp: Any


def linear(*shape: int, parts: tuple[int, ...] | None = None) -> Linear:
    """A projection's spec."""
    return unchecked(Linear, weight=TensorSpec(shape, parts=parts))


def weight(*shape: int, init: Init = "normal") -> Weight:
    """The spec of a norm or a table."""
    return unchecked(Weight, weight=TensorSpec(shape, init=init))


def soft_attention(config: Any) -> Node:
    """Gated full attention."""
    wide, narrow = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    parts = (2 * wide, narrow, narrow)
    return Node(
        qkv=linear(sum(parts), config.hidden_size, parts=parts),
        q_norm=weight(config.head_dim, init="zeros"),
        k_norm=weight(config.head_dim, init="zeros"),
        out=linear(config.hidden_size, wide),
    )


def delta_net(config: Any) -> Node:
    """Gated delta net."""
    heads = config.linear_num_value_heads
    values = heads * config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * config.linear_key_head_dim + values
    parts = (channels, values, heads, heads)
    return Node(
        in_proj=linear(sum(parts), config.hidden_size, parts=parts),
        conv=TensorSpec((channels, config.linear_conv_kernel_dim), init="conv"),
        a_log=TensorSpec((heads,), init="log_uniform", dtype=torch.float32),
        dt_bias=TensorSpec((heads,), init="inverse_softplus", dtype=torch.float32),
        norm=weight(config.linear_value_head_dim, init="ones"),
        out=linear(config.hidden_size, values),
    )


def dense(hidden: int, inner: int) -> Node:
    """SwiGLU."""
    return Node(gate_up=linear(2 * inner, hidden, parts=(inner, inner)), down=linear(hidden, inner))


def mixture(config: Any) -> Node:
    """Routed experts and a shared one."""
    experts, inner, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
    return Node(
        router=linear(experts, hidden),
        experts=unchecked(
            Experts,
            gate_up=TensorSpec((experts, 2 * inner, hidden)),
            down=TensorSpec((experts, hidden, inner)),
        ),
        shared=dense(hidden, config.shared_expert_intermediate_size),
        shared_gate=linear(1, hidden),
    )


def layer(config: Any, attn: Node) -> Layer:
    """One decoder layer around `attn`."""
    sparse = hasattr(config, "num_experts")
    mlp = mixture(config) if sparse else dense(config.hidden_size, config.intermediate_size)
    norm = weight(config.hidden_size, init="zeros")
    return unchecked(Layer, input_norm=norm, attn=attn, post_norm=norm, mlp=mlp)


def draft_head(config: Any) -> Mtp:
    """One full-attention layer over embedding and hidden state."""
    hidden = config.hidden_size
    norm = weight(hidden, init="zeros")
    return unchecked(
        Mtp,
        fc=linear(hidden, 2 * hidden),
        embed_norm=norm,
        hidden_norm=norm,
        layers=(layer(config, soft_attention(config)),),
        norm=norm,
    )


def build_spec(config: Any, mtp: bool = False) -> Params:
    """The spec tree of a transformers text config."""
    kinds = {"full_attention": soft_attention, "linear_attention": delta_net}
    return unchecked(
        Params,
        embed=weight(config.vocab_size, config.hidden_size),
        layers=tuple(layer(config, kinds[kind](config)) for kind in config.layer_types),
        norm=weight(config.hidden_size, init="zeros"),
        head=None if config.tie_word_embeddings else linear(config.vocab_size, config.hidden_size),
        mtp=draft_head(config) if mtp else None,
    )


SIZES = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip
ROPE = {
    "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}  # fmt: skip
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}


def build_oracle(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A transformers model, `dense` or `moe`, with every parameter random (its own start leaves norms at zero)."""
    import transformers

    name = {"dense": "Qwen3_5", "moe": "Qwen3_5Moe"}[kind]
    inner = {"intermediate_size": 40} if kind == "dense" else MOE
    config = getattr(transformers, f"{name}TextConfig")(**{**SIZES, "rope_parameters": dict(ROPE), **inner, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = (torch.randn(parameter.shape, generator=generator) / 8).to(dtype)
    return model


@pytest.fixture(scope="session")
def spec_of() -> Any:
    """`spec_of(config, mtp=False)`: the spec tree of a text config."""
    return build_spec


@pytest.fixture(scope="session")
def oracle() -> Any:
    """`oracle("dense" | "moe", seed, dtype, **config changes)`: a random transformers model."""
    return build_oracle


def build_wrapper_config(tied: bool) -> Any:
    """The config of a multimodal Qwen3.5 with a small vision tower."""
    from transformers import Qwen3_5Config

    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
        "patch_size": 4, "num_position_embeddings": 16,
    }  # fmt: skip
    text = {**SIZES, "rope_parameters": dict(ROPE), "intermediate_size": 40, "tie_word_embeddings": tied}
    return Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=tied)


@pytest.fixture(scope="session")
def wrapper() -> Any:
    """`wrapper(tied)`: a multimodal config."""
    return build_wrapper_config


@pytest.fixture(params=["dense", "moe"])
def model(request: pytest.FixtureRequest) -> Any:
    """A random transformers model of either kind."""
    return build_oracle(request.param)


@pytest.fixture
def saved(model: Any, tmp_path: Path) -> Path:
    """The directory of `model`, written by transformers."""
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"
