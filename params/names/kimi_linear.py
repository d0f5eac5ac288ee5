"""Kimi Linear: where each leaf stands in a Hugging Face checkpoint.

There are three spellings, and each leaf may have its own: that of the published checkpoints, which is written; that
of `save_pretrained` of transformers, which calls the first, dense layers `block_sparse_moe` too; and that of a model of
transformers in memory, which has one convolution in place of three, and the experts stacked. Rows are kept as they are:
`kv_b_proj` holds a head's key, then its value; an expert's `w1` is its gate, `w3` goes up, `w2` down.
"""

from __future__ import annotations

from dataclasses import dataclass

from params.names.rules import (
    AnyOf,
    Beside,
    Convolutions,
    ExpertsApart,
    Ignore,
    Layout,
    Merged,
    Names,
    Part,
    Plain,
    Rule,
    Squeeze,
    of_base_class,
)
from params.spec import TensorSpec


@dataclass(frozen=True)
class Broadcast:
    """A number a head, [1, 1, heads, 1] in the checkpoint, [heads] in the tree."""

    name: str

    def layouts(self, leaf: TensorSpec, layer: int | None) -> tuple[Layout, ...]:
        """One tensor, the whole leaf with the axes put back."""
        return ((Part(self.name.format(i=layer), (1, 1, leaf.shape[0], 1)),),)


_LAYER = "model.layers.{i}"
_ATTN, _FORGET = f"{_LAYER}.self_attn", f"{_LAYER}.self_attn.forget_gate"
_DENSE, _SPARSE = f"{_LAYER}.mlp", f"{_LAYER}.block_sparse_moe"


def _either(*rules: Rule) -> AnyOf:
    return AnyOf(rules)


def _in_proj(forget: str) -> Merged:
    names = (*(f"{_ATTN}.{part}_proj" for part in ("q", "k", "v", "b")), f"{forget}.f_a_proj", f"{_ATTN}.g_a_proj")
    return Merged(tuple(f"{name}.weight" for name in names))


def _latent(queries: str) -> Merged:
    return Merged((f"{_ATTN}.{queries}.weight", f"{_ATTN}.kv_a_proj_with_mqa.weight"))


def _gate_up(root: str) -> Merged:
    return Merged((f"{root}.gate_proj.weight", f"{root}.up_proj.weight"))


def _experts(root: str, stacked: str, *each: str) -> ExpertsApart:
    return ExpertsApart(f"{root}.experts.{stacked}_proj", tuple(f"{root}.experts.{{e}}.{name}.weight" for name in each))


NAMES = Names(
    family="kimi_linear",
    rules={
        "embed.weight": Plain("model.embed_tokens.weight"),
        "norm.weight": Plain("model.norm.weight"),
        "head.weight": Plain("lm_head.weight"),
        "layers.{i}.input_norm.weight": Plain(f"{_LAYER}.input_layernorm.weight"),
        "layers.{i}.post_norm.weight": Plain(f"{_LAYER}.post_attention_layernorm.weight"),
        "layers.{i}.attn.in_proj.weight": _either(_in_proj(_ATTN), _in_proj(_FORGET)),
        "layers.{i}.attn.conv": _either(
            Convolutions(tuple(f"{_ATTN}.{part}_conv1d.weight" for part in ("q", "k", "v"))),
            Squeeze(f"{_ATTN}.conv1d.weight"),
        ),
        "layers.{i}.attn.forget.weight": _either(*(Plain(f"{root}.f_b_proj.weight") for root in (_ATTN, _FORGET))),
        "layers.{i}.attn.a_log": _either(*(Broadcast(f"{root}.A_log") for root in (_ATTN, _FORGET))),
        "layers.{i}.attn.dt_bias": _either(*(Plain(f"{root}.dt_bias") for root in (_ATTN, _FORGET))),
        "layers.{i}.attn.gate.weight": Plain(f"{_ATTN}.g_b_proj.weight"),
        "layers.{i}.attn.norm.weight": Plain(f"{_ATTN}.o_norm.weight"),
        "layers.{i}.attn.down.weight": Beside("layers.{i}.attn.q_up.weight", _latent("q_a_proj"), _latent("q_proj")),
        "layers.{i}.attn.q_bias": Plain(f"{_ATTN}.q_a_proj.bias"),
        "layers.{i}.attn.kv_bias": Plain(f"{_ATTN}.kv_a_proj_with_mqa.bias"),
        "layers.{i}.attn.q_norm.weight": Plain(f"{_ATTN}.q_a_layernorm.weight"),
        "layers.{i}.attn.q_up.weight": Plain(f"{_ATTN}.q_b_proj.weight"),
        "layers.{i}.attn.latent_norm.weight": Plain(f"{_ATTN}.kv_a_layernorm.weight"),
        "layers.{i}.attn.up.weight": Plain(f"{_ATTN}.kv_b_proj.weight"),
        "layers.{i}.attn.out.weight": Plain(f"{_ATTN}.o_proj.weight"),
        "layers.{i}.attn.out.bias": Plain(f"{_ATTN}.o_proj.bias"),
        "layers.{i}.mlp.gate_up.weight": _either(*(_gate_up(root) for root in (_DENSE, _SPARSE))),
        "layers.{i}.mlp.down.weight": _either(*(Plain(f"{root}.down_proj.weight") for root in (_DENSE, _SPARSE))),
        "layers.{i}.mlp.router.weight": _either(*(Plain(f"{root}.gate.weight") for root in (_SPARSE, _DENSE))),
        "layers.{i}.mlp.router.bias": _either(
            *(Plain(f"{root}.gate.e_score_correction_bias") for root in (_SPARSE, _DENSE))
        ),
        "layers.{i}.mlp.experts.gate_up": _either(
            *(_experts(root, "gate_up", "w1", "w3") for root in (_SPARSE, _DENSE))
        ),
        "layers.{i}.mlp.experts.down": _either(*(_experts(root, "down", "w2") for root in (_SPARSE, _DENSE))),
        "layers.{i}.mlp.shared.gate_up.weight": _either(
            *(_gate_up(f"{root}.shared_experts") for root in (_SPARSE, _DENSE))
        ),
        "layers.{i}.mlp.shared.down.weight": _either(
            *(Plain(f"{root}.shared_experts.down_proj.weight") for root in (_SPARSE, _DENSE))
        ),
    },
    prefixes=of_base_class(),
    ignore=(Ignore("**.rotary_emb.inv_freq", "rotary frequencies, which nothing reads"),),
)
