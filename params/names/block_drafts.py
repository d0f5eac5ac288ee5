"""Block drafts, DFlash and DSpark: where each leaf stands in a checkpoint of its own.

Embedding and output projection are the model's that it drafts for. Some checkpoints call the input projection and its
norm those of an encoder.
"""

from __future__ import annotations

from params.names.rules import Ignore, Merged, Names, Plain, Rule


def _layer(tree: str, file: str) -> dict[str, Rule]:
    """The rules of one layer, that of Qwen3; `tree` and `file` are its roots on both sides."""
    attn, mlp = f"{file}.self_attn", f"{file}.mlp"
    return {
        f"{tree}.input_norm.weight": Plain(f"{file}.input_layernorm.weight"),
        f"{tree}.post_norm.weight": Plain(f"{file}.post_attention_layernorm.weight"),
        f"{tree}.attn.qkv.weight": Merged((f"{attn}.q_proj.weight", f"{attn}.k_proj.weight", f"{attn}.v_proj.weight")),
        f"{tree}.attn.out.weight": Plain(f"{attn}.o_proj.weight"),
        f"{tree}.attn.q_norm.weight": Plain(f"{attn}.q_norm.weight"),
        f"{tree}.attn.k_norm.weight": Plain(f"{attn}.k_norm.weight"),
        f"{tree}.mlp.gate_up.weight": Merged((f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")),
        f"{tree}.mlp.down.weight": Plain(f"{mlp}.down_proj.weight"),
    }


NAMES = Names(
    family="block_drafts",
    rules={
        "fc.weight": Plain("fc.weight"),
        "hidden_norm.weight": Plain("hidden_norm.weight"),
        "norm.weight": Plain("norm.weight"),
        **_layer("layers.{i}", "layers.{i}"),
        "markov.w1": Plain("markov_head.markov_w1.weight"),
        "markov.w2.weight": Plain("markov_head.markov_w2.weight"),
        "markov.gate.weight": Plain("markov_head.gate_proj.weight"),
        "markov.gate.bias": Plain("markov_head.gate_proj.bias"),
        "markov.joint.weight": Plain("markov_head.joint_proj.weight"),
        "markov.joint.bias": Plain("markov_head.joint_proj.bias"),
        "ids": Plain("d2t"),
    },
    prefixes=(
        ("model.encoder.fc.", "fc."),
        ("model.encoder.output_norm_enc.", "hidden_norm."),
        ("encoder.fc.", "fc."),
        ("encoder.output_norm_enc.", "hidden_norm."),
        ("model.", ""),
    ),
    ignore=(
        Ignore("embed_tokens.**", "embedding, which is the model's"),
        Ignore("lm_head.**", "output projection, which is the model's"),
        Ignore("confidence_head.**", "confidence head, for windows of several widths; here all rows have one"),
        Ignore("t2d", "which of the model's tokens the draft has, which `d2t` says too"),
        Ignore("**.rotary_emb.inv_freq", "rotary frequencies, computed from the config"),
    ),
)
