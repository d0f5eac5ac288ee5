"""Small models of every family whose heads can be shared among up to four ranks, with random parameters."""

from __future__ import annotations

from typing import Any

import torch

import funcmodels as fm
import params as trees

_QWEN: dict[str, Any] = {
    "vocab_size": 83, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 8, "linear_key_head_dim": 6,
    "linear_value_head_dim": 5, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mtp_num_hidden_layers": 1, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
    },
}  # fmt: skip
_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20}

KINDS: dict[str, dict[str, Any]] = {
    "qwen_dense": _QWEN | {"model_type": "qwen3_5_text", "intermediate_size": 36, "tie_word_embeddings": True},
    "qwen_moe": _QWEN | _MOE | {"model_type": "qwen3_5_moe_text"},
    "gemma3": {
        "model_type": "gemma3_text", "vocab_size": 70, "hidden_size": 24, "intermediate_size": 28,
        "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 10,
        "query_pre_attn_scalar": 14, "sliding_window": 6, "layer_types": [
            "sliding_attention", "full_attention", "sliding_attention",
        ], "attention_bias": True,
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2", "vocab_size": 90, "hidden_size": 24, "intermediate_size": 44,
        "num_hidden_layers": 3, "num_attention_heads": 4, "kv_lora_rank": 14, "q_lora_rank": None,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_shared_experts": 2, "moe_intermediate_size": 12, "first_k_dense_replace": 1, "attention_bias": True,
        "topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
    },
    "kimi_linear": {
        "model_type": "kimi_linear", "vocab_size": 77, "hidden_size": 24, "intermediate_size": 28,
        "num_hidden_layers": 3, "num_attention_heads": 4, "kv_lora_rank": 14, "q_lora_rank": None,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "num_local_experts": 8, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "moe_intermediate_size": 12, "first_k_dense_replace": 1, "linear_attn_config": {
            "kda_layers": [1, 3], "full_attn_layers": [2], "num_heads": 4, "head_dim": 6, "short_conv_kernel_size": 3,
        },
    },
    "kimi_k3": {
        "model_type": "kimi_k3", "text_config": {
            "model_type": "kimi_linear", "vocab_size": 77, "hidden_size": 24, "intermediate_size": 28,
            "num_hidden_layers": 4, "num_attention_heads": 4, "q_lora_rank": 10, "kv_lora_rank": 14,
            "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "num_experts": 8, "num_experts_per_token": 3,
            "num_shared_experts": 2, "moe_intermediate_size": 12, "routed_expert_hidden_size": 18,
            "attn_res_block_size": 2, "hidden_act": "situ", "activation_situ_beta": 1.5,
            "activation_situ_linear_beta": 2.0, "linear_attn_config": {
                "kda_layers": [1, 3, 4], "full_attn_layers": [2], "num_heads": 4, "head_dim": 6,
                "short_conv_kernel_size": 4, "use_full_rank_gate": True, "gate_lower_bound": -5.0,
            },
        },
    },
    "flash_next": _QWEN | _MOE | {
        "model_type": "qwen4_exp_text", "hc_count": 4, "hc_lowrank": 8, "ple_layer_ids": [1], "ple_embed_dim": 16,
        "ngram_vocab_size_base": 100, "heads_per_ngram": 2, "ngram_size": 3, "split_ngram_parts": 3, "eos_token_id": 5,
        "output_gate_type": "sigmoid", "indexer_n_heads": 2, "indexer_head_dim": 16, "indexer_compress_ratio": 4,
        "indexer_budget": 8,
    },
}  # fmt: skip
HEADS = {"qwen_dense", "qwen_moe", "flash_next"}
"""Those with a draft head."""
EXPERTS = {"qwen_moe", "deepseek_v2", "kimi_linear", "kimi_k3", "flash_next"}
"""Those with routed experts."""


def whole(kind: str) -> tuple[fm.Model, Any]:
    """The model of a kind and all its parameters, every one random."""
    model = fm.build(KINDS[kind])
    draw = torch.Generator().manual_seed(7)

    def random(leaf: torch.Tensor) -> torch.Tensor:
        return torch.randn(leaf.shape, generator=draw) * max(leaf.shape[-1], 4) ** -0.5

    return model, trees.tree_map(random, model.init_params())
