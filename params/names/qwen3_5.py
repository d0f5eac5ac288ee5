"""Qwen3.5 and Qwen3.5-MoE: where each leaf stands in a Hugging Face checkpoint.

Checkpoint rows are kept as they are: `q_proj` holds `[query | gate]` head by head, `in_proj_qkv` holds query, key and
value heads in this order.
"""

from __future__ import annotations

from params.names.rules import (
    INSIDE_A_WRAPPER,
    Beside,
    ExpertStack,
    Ignore,
    Merged,
    Names,
    Plain,
    Rule,
    Squeeze,
    of_base_class,
)


def _layer(tree: str, file: str) -> dict[str, Rule | Beside]:
    """The rules of one layer; `tree` and `file` are its roots on both sides."""
    soft, delta, mlp = f"{file}.self_attn", f"{file}.linear_attn", f"{file}.mlp"
    shared, expert = f"{mlp}.shared_expert", f"{mlp}.experts.{{e}}"
    return {
        f"{tree}.input_norm.weight": Plain(f"{file}.input_layernorm.weight"),
        f"{tree}.post_norm.weight": Plain(f"{file}.post_attention_layernorm.weight"),
        f"{tree}.attn.qkv.weight": Merged((f"{soft}.q_proj.weight", f"{soft}.k_proj.weight", f"{soft}.v_proj.weight")),
        f"{tree}.attn.q_norm.weight": Plain(f"{soft}.q_norm.weight"),
        f"{tree}.attn.k_norm.weight": Plain(f"{soft}.k_norm.weight"),
        f"{tree}.attn.in_proj.weight": Merged(
            tuple(f"{delta}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
        ),
        f"{tree}.attn.conv": Squeeze(f"{delta}.conv1d.weight"),
        f"{tree}.attn.a_log": Plain(f"{delta}.A_log"),
        f"{tree}.attn.dt_bias": Plain(f"{delta}.dt_bias"),
        f"{tree}.attn.norm.weight": Plain(f"{delta}.norm.weight"),
        f"{tree}.attn.out.weight": Beside(
            f"{tree}.attn.in_proj.weight", Plain(f"{delta}.out_proj.weight"), Plain(f"{soft}.o_proj.weight")
        ),
        f"{tree}.mlp.gate_up.weight": Merged((f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")),
        f"{tree}.mlp.down.weight": Plain(f"{mlp}.down_proj.weight"),
        f"{tree}.mlp.router.weight": Plain(f"{mlp}.gate.weight"),
        f"{tree}.mlp.experts.gate_up": ExpertStack(
            f"{mlp}.experts.gate_up_proj", (f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight")
        ),
        f"{tree}.mlp.experts.down": ExpertStack(f"{mlp}.experts.down_proj", (f"{expert}.down_proj.weight",)),
        f"{tree}.mlp.shared.gate_up.weight": Merged((f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight")),
        f"{tree}.mlp.shared.down.weight": Plain(f"{shared}.down_proj.weight"),
        f"{tree}.mlp.shared_gate.weight": Plain(f"{mlp}.shared_expert_gate.weight"),
    }


NAMES = Names(
    family="qwen3_5",
    rules={
        "embed.weight": Plain("model.embed_tokens.weight"),
        "norm.weight": Plain("model.norm.weight"),
        "head.weight": Plain("lm_head.weight"),
        **_layer("layers.{i}", "model.layers.{i}"),
        "mtp.fc.weight": Plain("mtp.fc.weight"),
        "mtp.embed_norm.weight": Plain("mtp.pre_fc_norm_embedding.weight"),
        "mtp.hidden_norm.weight": Plain("mtp.pre_fc_norm_hidden.weight"),
        "mtp.norm.weight": Plain("mtp.norm.weight"),
        **_layer("mtp.layers.{i}", "mtp.layers.{i}"),
    },
    prefixes=(*INSIDE_A_WRAPPER, *of_base_class()),
    ignore=(
        Ignore("model.visual.**", "vision tower, this model reads text"),
        Ignore("visual.**", "vision tower, this model reads text"),
        Ignore("mtp.**", "draft head, not asked for", unless="mtp"),
        Ignore("**.rotary_emb.inv_freq", "rotary frequencies, computed from the config"),
    ),
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    nested="model.language_model.",
)
