"""Qwen3: where each leaf stands in a Hugging Face checkpoint."""

from __future__ import annotations

from params.names.rules import Ignore, Merged, Names, Plain, of_base_class

_LAYER, _ATTN, _MLP = "model.layers.{i}", "model.layers.{i}.self_attn", "model.layers.{i}.mlp"

NAMES = Names(
    family="qwen3",
    rules={
        "embed.weight": Plain("model.embed_tokens.weight"),
        "layers.{i}.input_norm.weight": Plain(f"{_LAYER}.input_layernorm.weight"),
        "layers.{i}.attn.qkv.weight": Merged(tuple(f"{_ATTN}.{part}_proj.weight" for part in "qkv")),
        "layers.{i}.attn.qkv.bias": Merged(tuple(f"{_ATTN}.{part}_proj.bias" for part in "qkv")),
        "layers.{i}.attn.out.weight": Plain(f"{_ATTN}.o_proj.weight"),
        "layers.{i}.attn.out.bias": Plain(f"{_ATTN}.o_proj.bias"),
        "layers.{i}.attn.q_norm.weight": Plain(f"{_ATTN}.q_norm.weight"),
        "layers.{i}.attn.k_norm.weight": Plain(f"{_ATTN}.k_norm.weight"),
        "layers.{i}.post_norm.weight": Plain(f"{_LAYER}.post_attention_layernorm.weight"),
        "layers.{i}.mlp.gate_up.weight": Merged((f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight")),
        "layers.{i}.mlp.down.weight": Plain(f"{_MLP}.down_proj.weight"),
        "norm.weight": Plain("model.norm.weight"),
        "head.weight": Plain("lm_head.weight"),
    },
    prefixes=of_base_class(),
    ignore=(Ignore("**.rotary_emb.inv_freq", "rotary frequencies, computed from the config"),),
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)
