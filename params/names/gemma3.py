"""Gemma3: where each leaf stands in a Hugging Face checkpoint, of the text model or of the one that sees images too."""

from __future__ import annotations

from params.names.rules import INSIDE_A_WRAPPER, Ignore, Merged, Names, Plain, Rule, of_base_class


def _layer(tree: str, file: str) -> dict[str, Rule]:
    """The rules of one layer; `tree` and `file` are its roots on both sides."""
    attn, mlp = f"{file}.self_attn", f"{file}.mlp"
    merged = {kind: tuple(f"{attn}.{part}_proj.{kind}" for part in "qkv") for kind in ("weight", "bias")}
    return {
        f"{tree}.input_norm.weight": Plain(f"{file}.input_layernorm.weight"),
        f"{tree}.post_attn_norm.weight": Plain(f"{file}.post_attention_layernorm.weight"),
        f"{tree}.pre_mlp_norm.weight": Plain(f"{file}.pre_feedforward_layernorm.weight"),
        f"{tree}.post_mlp_norm.weight": Plain(f"{file}.post_feedforward_layernorm.weight"),
        f"{tree}.attn.qkv.weight": Merged(merged["weight"]),
        f"{tree}.attn.qkv.bias": Merged(merged["bias"]),
        f"{tree}.attn.out.weight": Plain(f"{attn}.o_proj.weight"),
        f"{tree}.attn.out.bias": Plain(f"{attn}.o_proj.bias"),
        f"{tree}.attn.q_norm.weight": Plain(f"{attn}.q_norm.weight"),
        f"{tree}.attn.k_norm.weight": Plain(f"{attn}.k_norm.weight"),
        f"{tree}.mlp.gate_up.weight": Merged((f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")),
        f"{tree}.mlp.down.weight": Plain(f"{mlp}.down_proj.weight"),
    }


NAMES = Names(
    family="gemma3",
    rules={
        "embed.weight": Plain("model.embed_tokens.weight"),
        "norm.weight": Plain("model.norm.weight"),
        "head.weight": Plain("lm_head.weight"),
        **_layer("layers.{i}", "model.layers.{i}"),
    },
    prefixes=(*INSIDE_A_WRAPPER, *of_base_class()),
    ignore=(
        Ignore("model.vision_tower.**", "vision tower, this model reads text"),
        Ignore("vision_tower.**", "vision tower, this model reads text"),
        Ignore("model.multi_modal_projector.**", "vision tower, this model reads text"),
        Ignore("multi_modal_projector.**", "vision tower, this model reads text"),
        Ignore("**.rotary_emb.inv_freq", "rotary frequencies, computed from the config"),
    ),
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    nested="model.language_model.",
)
