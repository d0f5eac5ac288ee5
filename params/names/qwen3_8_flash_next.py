"""Qwen3.8-Flash-Next: where each leaf stands in a Hugging Face checkpoint.

Checkpoint rows are kept as they are: `q_proj` holds `[query | gate]` head by head, `in_proj_qkv` holds query, key and
value heads in this order, `index_qk_proj` the index query heads, then the index key. The n-gram table comes in shards.
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
    Shards,
    Squeeze,
    of_base_class,
)


def _connection(tree: str, file: str, inject: bool) -> dict[str, Rule | Beside]:
    """The rules of one hyper-connection; those around a sublayer also write back to the streams."""
    down = f"{file}.input_mix_weight_down.weight"
    return {
        f"{tree}.norm.weight": Plain(f"{file}.hc_norm.weight"),
        f"{tree}.down": Merged((down, f"{file}.block_inject_weight.weight")) if inject else Plain(down),
        f"{tree}.up": Plain(f"{file}.input_mix_weight_up.weight"),
    }


def _ngrams(tree: str, file: str) -> dict[str, Rule | Beside]:
    table = f"{file}.ple_embedding.ngram_embedding"
    return {
        f"{tree}.table": Shards(f"{table}.shard_{{s}}.weight", f"{table}.weight"),
        f"{tree}.key_value.weight": Merged((f"{file}.key_proj.weight", f"{file}.value_proj.weight")),
        f"{tree}.key_norm.weight": Plain(f"{file}.norm_key.weight"),
        f"{tree}.query_norm.weight": Plain(f"{file}.norm_query.weight"),
        f"{tree}.conv_norm.weight": Plain(f"{file}.norm_conv.weight"),
        f"{tree}.conv": Squeeze(f"{file}.conv1d.weight"),
    }


def _layer(tree: str, file: str) -> dict[str, Rule | Beside]:
    """The rules of one layer; `tree` and `file` are its roots on both sides."""
    soft, delta, mlp = f"{file}.self_attn", f"{file}.linear_attn", f"{file}.mlp"
    shared, expert = f"{mlp}.shared_expert", f"{mlp}.experts.{{e}}"
    read = (f"{soft}.q_proj", f"{soft}.k_proj", f"{soft}.v_proj", f"{soft}.indexer.index_qk_proj")
    return {
        **_connection(f"{tree}.attn_streams", f"{file}.attn_hyper_connection", inject=True),
        **_connection(f"{tree}.mlp_streams", f"{file}.mlp_hyper_connection", inject=True),
        **_ngrams(f"{tree}.ngrams", f"{file}.ple"),
        f"{tree}.attn.qkv.weight": Merged(tuple(f"{name}.weight" for name in read)),
        f"{tree}.attn.q_norm.weight": Plain(f"{soft}.q_norm.weight"),
        f"{tree}.attn.k_norm.weight": Plain(f"{soft}.k_norm.weight"),
        f"{tree}.attn.index_q_norm.weight": Plain(f"{soft}.indexer.q_layernorm.weight"),
        f"{tree}.attn.index_k_norm.weight": Plain(f"{soft}.indexer.k_layernorm.weight"),
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
        f"{tree}.mlp.router.weight": Plain(f"{mlp}.gate.weight"),
        f"{tree}.mlp.experts.gate_up": ExpertStack(
            f"{mlp}.experts.gate_up_proj", (f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight")
        ),
        f"{tree}.mlp.experts.down": ExpertStack(f"{mlp}.experts.down_proj", (f"{expert}.down_proj.weight",)),
        f"{tree}.mlp.shared.gate_up.weight": Merged((f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight")),
        f"{tree}.mlp.shared.down.weight": Plain(f"{shared}.down_proj.weight"),
        f"{tree}.mlp.shared_gate.weight": Plain(f"{mlp}.shared_expert_gate.weight"),
    }


_HASH = "model.layers.{i}.ple.ple_embedding"

NAMES = Names(
    family="qwen3_8_flash_next",
    rules={
        "embed.weight": Plain("model.embed_tokens.weight"),
        "head.weight": Plain("lm_head.weight"),
        **_layer("layers.{i}", "model.layers.{i}"),
        **_connection("mixer", "model.hyper_connection_mixer", inject=False),
        "mtp.embed_norm.weight": Plain("mtp.pre_fc_norm_embedding.weight"),
        "mtp.hidden_norm.weight": Plain("mtp.pre_fc_norm_hidden.weight"),
        "mtp.embed_proj.weight": Plain("mtp.fc_embedding.weight"),
        "mtp.hidden_proj.weight": Plain("mtp.fc_hidden.weight"),
        **_layer("mtp.layers.{i}", "mtp.layers.{i}"),
        **_connection("mtp.mixer", "mtp.hyper_connection_mixer", inject=False),
    },
    constants={
        "layers.{i}.ngrams.multipliers": f"{_HASH}.layer_multipliers",
        "layers.{i}.ngrams.sizes": f"{_HASH}.ngram_heads_vocab_sizes",
        "layers.{i}.ngrams.offsets": f"{_HASH}.ngram_heads_offsets",
        "layers.{i}.ngrams.table_scale": f"{_HASH}.ngram_embedding.weight_scale",
    },
    prefixes=(*INSIDE_A_WRAPPER, *of_base_class("hyper_connection_mixer")),
    ignore=(
        Ignore("model.visual.**", "vision tower, this model reads text"),
        Ignore("visual.**", "vision tower, this model reads text"),
        Ignore("mtp.**", "draft head, not asked for", unless="mtp"),
        Ignore("**.rotary_emb.inv_freq", "rotary frequencies, computed from the config"),
        Ignore("**.hashstats_*", "counts of hash collisions, which nothing reads"),
        Ignore("**.token_lookup*", "map of tokens, which nothing reads"),
    ),
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    nested="model.language_model.",
)
