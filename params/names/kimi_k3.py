"""Kimi-K3: where each leaf stands in the published checkpoint.

Rows are kept as they are: `kv_b_proj` holds a head's key, then its value; an expert's `w1` is its gate, `w3` goes up,
`w2` down. Mixtures of experts are `block_sparse_moe` there; files that call them `mlp`, as engines do, are read too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from params.names.rules import (
    INSIDE_A_WRAPPER,
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
    of_base_class,
)
from params.spec import TensorSpec


@dataclass(frozen=True)
class Query:
    """A projection to one number, [1, inputs] in the checkpoint, [inputs] in the tree."""

    name: str

    def layouts(self, leaf: TensorSpec, layer: int | None) -> tuple[Layout, ...]:
        """One tensor, the whole leaf with the axis put back."""
        return ((Part(self.name.format(i=layer), (1, *leaf.shape)),),)


@dataclass(frozen=True)
class OfHeads:
    """A number a head; the checkpoint has more, which belong to no head. Kimi Linear's axes are read too."""

    name: str

    def layouts(self, leaf: TensorSpec, layer: int | None) -> tuple[Layout, ...]:
        """One tensor, of which the leaf is the beginning."""
        return ((Part(self.name.format(i=layer), leaf.shape, padded=True),),)


_LAYER = "model.layers.{i}"
_ATTN, _DENSE, _SPARSE = f"{_LAYER}.self_attn", f"{_LAYER}.mlp", f"{_LAYER}.block_sparse_moe"


def _projections(root: str, *names: str) -> Merged:
    return Merged(tuple(f"{root}.{name}.weight" for name in names))


def _either(rule: Callable[[str], Rule]) -> AnyOf:
    return AnyOf((rule(_SPARSE), rule(_DENSE)))


def _sparse(name: str) -> AnyOf:
    return _either(lambda root: Plain(f"{root}.{name}"))


def _experts(stacked: str, *each: str) -> AnyOf:
    def rule(root: str) -> ExpertsApart:
        names = tuple(f"{root}.experts.{{e}}.{name}.weight" for name in each)
        return ExpertsApart(f"{root}.experts.{stacked}_proj", names)

    return _either(rule)


def _residual(leaf: str, name: str) -> dict[str, Rule]:
    return {f"{leaf}.norm": Plain(f"{name}_norm.weight"), f"{leaf}.proj": Query(f"{name}_proj.weight")}


NAMES = Names(
    family="kimi_k3",
    rules={
        "embed.weight": Plain("model.embed_tokens.weight"),
        "norm.weight": Plain("model.norm.weight"),
        "head.weight": Plain("lm_head.weight"),
        **_residual("output_residual", "model.output_attn_res"),
        **_residual("layers.{i}.attn_residual", f"{_LAYER}.self_attention_res"),
        **_residual("layers.{i}.mlp_residual", f"{_LAYER}.mlp_res"),
        "layers.{i}.input_norm.weight": Plain(f"{_LAYER}.input_layernorm.weight"),
        "layers.{i}.post_norm.weight": Plain(f"{_LAYER}.post_attention_layernorm.weight"),
        "layers.{i}.attn.in_proj.weight": _projections(
            _ATTN, "q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_proj"
        ),
        "layers.{i}.attn.conv": Convolutions(tuple(f"{_ATTN}.{part}_conv1d.weight" for part in ("q", "k", "v"))),
        "layers.{i}.attn.forget.weight": Plain(f"{_ATTN}.f_b_proj.weight"),
        "layers.{i}.attn.a_log": OfHeads(f"{_ATTN}.A_log"),
        "layers.{i}.attn.dt_bias": Plain(f"{_ATTN}.dt_bias"),
        "layers.{i}.attn.norm.weight": Plain(f"{_ATTN}.o_norm.weight"),
        "layers.{i}.attn.down.weight": _projections(_ATTN, "q_a_proj", "kv_a_proj_with_mqa", "g_proj"),
        "layers.{i}.attn.q_norm.weight": Plain(f"{_ATTN}.q_a_layernorm.weight"),
        "layers.{i}.attn.q_up.weight": Plain(f"{_ATTN}.q_b_proj.weight"),
        "layers.{i}.attn.latent_norm.weight": Plain(f"{_ATTN}.kv_a_layernorm.weight"),
        "layers.{i}.attn.up.weight": Plain(f"{_ATTN}.kv_b_proj.weight"),
        "layers.{i}.attn.out.weight": Plain(f"{_ATTN}.o_proj.weight"),
        "layers.{i}.mlp.gate_up.weight": _projections(_DENSE, "gate_proj", "up_proj"),
        "layers.{i}.mlp.router.weight": _sparse("gate.weight"),
        "layers.{i}.mlp.router.bias": _sparse("gate.e_score_correction_bias"),
        "layers.{i}.mlp.down.weight": Beside(
            "layers.{i}.mlp.up.weight",
            _sparse("routed_expert_down_proj.weight"),
            Plain(f"{_DENSE}.down_proj.weight"),
        ),
        "layers.{i}.mlp.experts.gate_up": _experts("gate_up", "w1", "w3"),
        "layers.{i}.mlp.experts.down": _experts("down", "w2"),
        "layers.{i}.mlp.norm.weight": _sparse("routed_expert_norm.weight"),
        "layers.{i}.mlp.up.weight": _sparse("routed_expert_up_proj.weight"),
        "layers.{i}.mlp.shared.gate_up.weight": _either(
            lambda root: _projections(f"{root}.shared_experts", "gate_proj", "up_proj")
        ),
        "layers.{i}.mlp.shared.down.weight": _sparse("shared_experts.down_proj.weight"),
    },
    prefixes=(*INSIDE_A_WRAPPER, *of_base_class("output_attn_res_norm", "output_attn_res_proj")),
    ignore=(
        *(
            Ignore(f"{part}.**", "vision tower and its projector, this model reads text")
            for part in ("vision_tower", "mm_projector", "multi_modal_projector")
        ),
        Ignore("**.rotary_emb.inv_freq", "rotary frequencies, which nothing reads"),
    ),
    nested="language_model.model.",
    nested_head="language_model.lm_head.",
)
