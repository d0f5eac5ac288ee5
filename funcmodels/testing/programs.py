"""A small model of every family, in every phase, for the device check: `python -m lowering check --import` this module.

Widths are those that fused operators take (heads of 128, latents of 512 with 64 rope channels), parameters random and
the same each time. Every expert is chosen, with its own weight, so that no near tie sends a token elsewhere. A phase
begins with a prefill; logits of the phase are what is compared.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import torch
from torch import Tensor

import lowering
import params as trees
from lowering.check.programs import PROGRAMS, ModelPhase

from ..model import build
from ..state.batch import Batch
from ..state.state import commit

ROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.25,
    "mrope_section": [6, 5, 5],
}
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_hidden_layers": 4,
    "rope_parameters": ROPE,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "topk_group": 1,
}
KIMI: dict[str, Any] = LATENT | {
    "model_type": "kimi_linear",
    "num_hidden_layers": 4,
    "num_experts": 4,
    "num_experts_per_token": 4,
    "num_shared_experts": 1,
    "num_expert_group": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 1.5,
    "mla_use_nope": True,
    "linear_attn_config": {
        "head_dim": 128,
        "num_heads": 2,
        "short_conv_kernel_size": 4,
        "full_attn_layers": [4],
        "kda_layers": [1, 2, 3],
    },
}
K3: dict[str, Any] = {
    "q_lora_rank": 128,
    "mla_use_output_gate": True,
    "routed_expert_hidden_size": 128,
    "latent_moe_use_norm": True,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 2,
    "linear_attn_config": KIMI["linear_attn_config"] | {"use_full_rank_gate": True, "gate_lower_bound": -5.0},
}
FLASH: dict[str, Any] = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "output_gate_type": "sigmoid",
    "hc_count": 4,
    "hc_lowrank": 32,
    "ple_layer_ids": [2],
    "ple_embed_dim": 96,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 1000,
    "seed": 1234,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 1,
    "eos_token_id": 0,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 128,
    "indexer_compress_ratio": 4,
    "rope_parameters": ROPE | {"mrope_interleaved": True},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": SIZES | {"model_type": "qwen3"},
    "qwen3_5": SIZES | DELTA | {"model_type": "qwen3_5_text"},
    "qwen3_5_moe": SIZES | DELTA | EXPERTS | {"model_type": "qwen3_5_moe_text"},
    "qwen3_8_flash_next": SIZES | DELTA | EXPERTS | FLASH | {"model_type": "qwen4_exp_text"},
    "gemma3": SIZES | {"model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 32},
    "deepseek_v2": SIZES
    | LATENT
    | {
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "topk_method": "greedy",
        "n_group": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
    },
    "kimi_linear": SIZES | KIMI | {"q_lora_rank": None},
    "kimi_k3": SIZES | KIMI | K3,
}
"""By family, or by kind of one."""
PHASES: dict[str, tuple[list[int], ...]] = {
    "prefill": (),
    "chunk": ([20, 0, 9],),
    "decode": ([1, 1, 1], [1, 1, 1]),
    "verify": ([4, 4, 4], [1, 1, 1]),
    "captured": ([1, 1, 1], [1, 1, 1]),
}
"""New tokens of each row in the forwards behind the prompts'. A window's tokens are accepted in part."""
PROMPTS, ACCEPTED = [40, 17, 1], [4, 0, 2]
MAX_LEN = 256


@functools.cache
def _made(name: str) -> tuple[Any, Any]:
    """A model, and float32 parameters on the CPU."""
    model = build(CONFIGS[name])
    return model, model.init_params(seed=3)


def run(name: str, phase: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The logits [tokens vocab] of a phase's forwards, one behind the other; of the prompts' where it has no other."""
    model, whole = _made(name)
    held = trees.tree_map(lambda spec, value: value.to(device, spec.dtype or dtype), model.param_spec(), whole)
    # On a CPU operator by operator: references read lengths on the host, which compiled code would freeze.
    backend = "fx" if device.type == "cpu" else None
    captured = lowering.jit(model.forward, donate=("state",), backend=backend)
    forward = captured if phase == "captured" else model.forward
    state, found = model.init_state(3, MAX_LEN, dtype, dtype, device), []
    draw = torch.Generator().manual_seed(5)
    for at, counts in enumerate((PROMPTS, *PHASES[phase])):
        ids = torch.randint(SIZES["vocab_size"], (sum(counts),), generator=draw, device="cpu")
        window = phase == "verify" and at == 1
        batch = Batch.from_tokens(ids.to(device), counts, state)
        out, state = forward(held, state, batch, keep_steps=window)
        state = commit(state, ACCEPTED) if window else state
        found.append(out.logits.float().cpu())
    return torch.cat(found[1:] or found)


def _program(name: str, phase: str) -> ModelPhase:
    plain = "decode" if phase == "captured" else phase
    return ModelPhase(name, phase, partial(run, name, phase), partial(run, name, plain))


PROGRAMS.extend(_program(name, phase) for name in CONFIGS for phase in PHASES)
