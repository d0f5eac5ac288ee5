"""Qwen3, dense: attention whose queries and keys have norms, and SwiGLU; some layers may attend to a window alone.

Source: `Qwen3Config` and `Qwen3ForCausalLM` of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lowering import ops
from params.names.qwen3 import NAMES
from params.tree import tree

from ..attention.gqa import Attention, KeyValuePages, attention, key_value_layers
from ..blocks.decoder import decoder_layers
from ..blocks.linear import Embedding, Linear, Norm, head_weight, look_up
from ..blocks.mlp import Mlp, mlp
from ..family import Family
from ..output import LogitsOf, Output, Taps, head_logits
from ..state.batch import Batch
from ..state.space import Space
from ..state.state import Entry, State
from ..state.step import begin, finish, text_positions
from .qwen3_config import Qwen3Config, read_config


@tree
class Layer:
    """One decoder layer: attention and a feed-forward block, each behind a norm."""

    input_norm: Norm
    attn: Attention
    post_norm: Norm
    mlp: Mlp

    @staticmethod
    def spec(config: Qwen3Config) -> Layer:
        """Spec of a layer of either kind."""
        hidden, norm = config.hidden_size, Norm.spec(config.hidden_size)
        heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        attn = Attention.spec(hidden, *heads, bias=config.attention_bias)
        return Layer(norm, attn, norm, Mlp.spec(hidden, config.intermediate_size))


@tree
class Qwen3Params:
    """All parameters. `head` is None when the embedding is tied to it."""

    embed: Embedding
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear | None

    @staticmethod
    def spec(config: Qwen3Config) -> Qwen3Params:
        """The parameter tree with a `TensorSpec` at each leaf."""
        vocab, hidden = config.vocab_size, config.hidden_size
        layers = tuple(Layer.spec(config) for _ in config.layer_types)
        head = None if config.tie_word_embeddings else Linear.head_spec(vocab, hidden)
        return Qwen3Params(Embedding.spec(vocab, hidden), layers, Norm.spec(hidden), head)


def init_entries(config: Qwen3Config, space: Space) -> tuple[Entry, ...]:
    """One empty entry a layer."""
    return key_value_layers(space, config, config.num_hidden_layers)


def forward(
    config: Qwen3Config,
    params: Qwen3Params,
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
    rotary = ops.rotary_angles(text_positions(batch, step), rotary_dim=config.head_dim, theta=config.rope_theta)
    heads, kv_heads, eps = config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps

    def mix(index: int, attn: Attention, x: Tensor) -> tuple[Tensor, Entry | None]:
        past, window = step.past(index, KeyValuePages), config.window(index)
        return attention(attn, x, past, step, rotary, heads=heads, kv_heads=kv_heads, eps=eps, window=window)

    x = look_up(params.embed, batch.tokens)
    hidden, entries = decoder_layers(params.layers, params.norm, x, mix, lambda _, m, x: mlp(m, x), taps, eps=eps)
    found = head_logits(hidden, head_weight(params.embed, params.head), step, logits)
    return Output(found, hidden, taps.taken()), finish(step, entries)


FAMILY = Family(
    model_types=("qwen3",),
    read_config=read_config,
    params=Qwen3Params,
    names=NAMES,
    init_entries=init_entries,
    forward=forward,
)
