"""DeepSeek-V2 and V2-Lite: where each leaf stands in a Hugging Face checkpoint.

Checkpoint rows are kept as they are: `q_proj` and `q_b_proj` hold a head's part without rope, then that with it, whose
channels are in pairs; `kv_a_proj_with_mqa` holds the latent, then the rope key, in pairs too; `kv_b_proj` holds a
head's key, then its value.
"""

from __future__ import annotations

from params.names.rules import Beside, ExpertStack, Ignore, Merged, Names, Plain, of_base_class

_LAYER = "model.layers.{i}"
_ATTN, _MLP = f"{_LAYER}.self_attn", f"{_LAYER}.mlp"
_SHARED, _EXPERT = f"{_MLP}.shared_experts", f"{_MLP}.experts.{{e}}"

NAMES = Names(
    family="deepseek_v2",
    rules={
        "embed.weight": Plain("model.embed_tokens.weight"),
        "norm.weight": Plain("model.norm.weight"),
        "head.weight": Plain("lm_head.weight"),
        "layers.{i}.input_norm.weight": Plain(f"{_LAYER}.input_layernorm.weight"),
        "layers.{i}.post_norm.weight": Plain(f"{_LAYER}.post_attention_layernorm.weight"),
        "layers.{i}.attn.down.weight": Beside(
            "layers.{i}.attn.q_up.weight",
            Merged((f"{_ATTN}.q_a_proj.weight", f"{_ATTN}.kv_a_proj_with_mqa.weight")),
            Merged((f"{_ATTN}.q_proj.weight", f"{_ATTN}.kv_a_proj_with_mqa.weight")),
        ),
        "layers.{i}.attn.q_bias": Plain(f"{_ATTN}.q_a_proj.bias"),
        "layers.{i}.attn.kv_bias": Plain(f"{_ATTN}.kv_a_proj_with_mqa.bias"),
        "layers.{i}.attn.q_norm.weight": Plain(f"{_ATTN}.q_a_layernorm.weight"),
        "layers.{i}.attn.q_up.weight": Plain(f"{_ATTN}.q_b_proj.weight"),
        "layers.{i}.attn.latent_norm.weight": Plain(f"{_ATTN}.kv_a_layernorm.weight"),
        "layers.{i}.attn.up.weight": Plain(f"{_ATTN}.kv_b_proj.weight"),
        "layers.{i}.attn.out.weight": Plain(f"{_ATTN}.o_proj.weight"),
        "layers.{i}.attn.out.bias": Plain(f"{_ATTN}.o_proj.bias"),
        "layers.{i}.mlp.gate_up.weight": Merged((f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight")),
        "layers.{i}.mlp.down.weight": Plain(f"{_MLP}.down_proj.weight"),
        "layers.{i}.mlp.router.weight": Plain(f"{_MLP}.gate.weight"),
        "layers.{i}.mlp.experts.gate_up": ExpertStack(
            f"{_MLP}.experts.gate_up_proj", (f"{_EXPERT}.gate_proj.weight", f"{_EXPERT}.up_proj.weight")
        ),
        "layers.{i}.mlp.experts.down": ExpertStack(f"{_MLP}.experts.down_proj", (f"{_EXPERT}.down_proj.weight",)),
        "layers.{i}.mlp.shared.gate_up.weight": Merged((f"{_SHARED}.gate_proj.weight", f"{_SHARED}.up_proj.weight")),
        "layers.{i}.mlp.shared.down.weight": Plain(f"{_SHARED}.down_proj.weight"),
    },
    prefixes=of_base_class(),
    ignore=(Ignore("**.rotary_emb.inv_freq", "rotary frequencies, computed from the config"),),
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)
