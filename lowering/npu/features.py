"""Which `npu` operators a target has, and with which arguments. Those of the ATB library are called `atb.NAME`.

Where torch_npu is loaded its dispatcher answers. A target that is only named is looked up in the schemas recorded from
the wheels (`schemas.json`; docs/record_npu_schemas.py writes it), so that a laptop gets the answer of any of them.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch

from ..errors import LoweringError
from ..target import Target

RECORDED = Path(__file__).with_name("schemas.json")

ARGUMENTS: dict[str, tuple[str, ...]] = {
    "atb.npu_ring_mla": (
        "q_nope", "q_rope", "k_nope", "k_rope", "value", "mask", "seqlen", "head_num", "kv_head_num", "pre_out",
        "prev_lse", "qk_scale", "kernel_type", "mask_type", "input_layout", "calc_type",
    ),
    "npu_add_rms_norm": ("x1", "x2", "gamma", "epsilon"),
    "npu_apply_rotary_pos_emb": ("query", "key", "cos", "sin", "layout", "rotary_mode"),
    "npu_attention_update": ("lse", "local_out", "update_type"),
    "npu_chunk_gated_delta_rule": (
        "query", "key", "value", "beta", "initial_state", "actual_seq_lengths", "scale", "g",
    ),
    "npu_convert_weight_to_int4pack": ("weight",),
    "npu_dequant_swiglu_quant": ("x", "activate_left", "quant_mode"),
    "npu_dynamic_mx_quant": ("input", "axis", "round_mode", "dst_type", "block_size", "scale_alg"),
    "npu_dynamic_quant": ("input", "dst_type"),
    "npu_format_cast": ("input", "acl_format", "customize_dtype"),
    "npu_fused_causal_conv1d": (
        "x", "weight", "conv_states", "query_start_loc", "cache_indices", "max_query_len",
    ),
    "npu_fused_infer_attention_score_v2": (
        "query", "key", "value", "query_rope", "key_rope", "atten_mask", "actual_seq_qlen", "actual_seq_kvlen",
        "block_table", "num_query_heads", "num_key_value_heads", "softmax_scale", "pre_tokens", "next_tokens",
        "input_layout", "sparse_mode", "block_size", "return_softmax_lse",
    ),
    "npu_geglu": ("input", "dim", "approximate", "activate_left"),
    "npu_gemma_rms_norm": ("input", "gamma", "epsilon"),
    "npu_grouped_matmul": (
        "x", "weight", "bias", "scale", "antiquant_scale", "per_token_scale", "group_list", "split_item",
        "group_type", "group_list_type",
        "output_dtype", "scale_dtype", "per_token_scale_dtype",
    ),
    "npu_grouped_matmul_swiglu_quant_v2": (
        "x", "weight", "weight_scale", "x_scale", "group_list", "dequant_mode", "dequant_dtype", "quant_mode",
        "quant_dtype", "group_list_type", "weight_scale_dtype", "x_scale_dtype",
    ),
    "npu_interleave_rope": ("x", "cos", "sin"),
    "npu_kv_rmsnorm_rope_cache_v2": (
        "kv", "gamma", "cos", "sin", "index", "k_cache", "ckv_cache", "epsilon", "cache_mode", "is_output_kv",
    ),
    "npu_lightning_indexer": (
        "query", "key", "weights", "actual_seq_lengths_key", "block_table", "layout_query", "layout_key",
        "sparse_count", "sparse_mode",
    ),
    "npu_mhc_post": ("x", "h_res", "h_out", "h_post"),
    "npu_moe_gating_top_k": (
        "x", "k", "bias", "k_group", "group_count", "group_select_mode", "renorm", "norm_type",
        "routed_scaling_factor",
    ),
    "npu_moe_gating_top_k_softmax_v2": ("x", "k", "renorm", "output_softmax"),
    "npu_moe_init_routing_v2": (
        "x", "expert_idx", "active_num", "expert_num", "drop_pad_mode", "expert_tokens_num_type",
        "expert_tokens_num_flag", "quant_mode", "active_expert_range", "row_idx_type",
    ),
    "npu_moe_token_unpermute": ("permuted_tokens", "sorted_indices", "probs"),
    "npu_quant_matmul": (
        "x1", "x2", "scale", "pertoken_scale", "bias", "output_dtype", "pertoken_scale_dtype", "scale_dtype",
        "group_sizes",
    ),
    "npu_quantize": ("input", "scales", "zero_points", "dtype", "axis", "div_mode"),
    "npu_recurrent_gated_delta_rule_functional": (
        "query", "key", "value", "state", "beta", "scale", "actual_seq_lengths", "ssm_state_indices", "g", "gk",
    ),
    "npu_rms_norm": ("input", "gamma", "epsilon"),
    "npu_rotary_mul": ("input", "r1", "r2", "rotary_mode"),
    "npu_scatter_pa_kv_cache": ("key", "value", "key_cache", "value_cache", "slot_mapping", "cache_mode"),
    "npu_swiglu": ("input", "dim"),
    "npu_top_k_top_p": ("logits", "p", "k"),
    "npu_transpose_batchmatmul": ("input", "weight", "perm_x1", "perm_x2", "perm_y"),
}  # fmt: skip
"""Every operator that our kernels call, and the arguments they pass: what must be there for a kernel to be chosen."""


def missing(operators: tuple[str, ...], target: Target) -> str | None:
    """One sentence about the first operator, or argument of one, that the target lacks; None when all are there."""
    for operator in operators:
        if _is_loaded(target):
            found, where = _registered(operator), "the torch_npu that is loaded"
        else:
            version = recorded_version(target)
            if not any(operator in known for known in recorded().values()):
                return f"operator {operator} is in none of the recorded schemas; docs/record_npu_schemas.py adds it"
            found, where = recorded()[version].get(operator), f"torch_npu {version}"
        what = lacking(operator, found)
        if what is not None:
            first = next((v for v, known in recorded().items() if not lacking(operator, known.get(operator))), None)
            since = f"the first version that has it is {first}" if first else "no recorded version has it"
            return f"{what} is not in {where}; {since}"
    return None


def _is_loaded(target: Target) -> bool:
    """Whether the loaded torch_npu is of the target's series: a dry run loads one and may ask about another."""
    loaded = getattr(sys.modules.get("torch_npu"), "__version__", "")
    return bool(loaded) and loaded.split(".")[:2] == (target.torch_npu or "").split(".")[:2]


def lacking(operator: str, schema: str | None) -> str | None:
    """What of an operator a schema lacks, in words; None when nothing."""
    if schema is None:
        return f"operator {operator}"
    types = {argument.name: argument.type for argument in torch._C.parse_schema(schema).arguments}
    absent = [name for name in ARGUMENTS.get(operator, ()) if name not in types]
    return f"argument {absent[0]} of operator {operator}" if absent else None


def home(operator: str) -> tuple[str, str]:
    """The dispatcher's namespace of an operator, and its name there."""
    library, _, name = operator.rpartition(".")
    return library or "npu", name


def registered(operator: str) -> Any:
    """The operator as the dispatcher has it; None where it has none."""
    library, name = home(operator)
    return getattr(getattr(torch.ops, library), name, None)


def loaded(operators: tuple[str, ...]) -> bool:
    """Whether all of them can be called in this process: on the device, by shape alone or through CPU references."""
    return all(registered(operator) for operator in operators)


def _registered(operator: str) -> str | None:
    packet = registered(operator)
    return None if packet is None else str(packet.default._schema).partition("::")[2]


@functools.cache
def recorded() -> dict[str, dict[str, str]]:
    """Version of torch_npu to operator to schema, oldest version first."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def recorded_version(target: Target) -> str:
    """The recorded version that stands for the target's torch_npu: the one of the same major and minor number."""
    wanted = target.torch_npu or ""
    for version in recorded():
        if version == wanted or version.split(".")[:2] == wanted.split(".")[:2]:
            return version
    raise LoweringError(
        f"no schemas are recorded for torch_npu {wanted!r}; recorded are {', '.join(recorded())}: name one of these, "
        "or run where that torch_npu is loaded"
    )


class _Operators:
    """The operators of one namespace, with an error in words for one that is not there."""

    def __init__(self, library: str) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        found = registered(f"{self._library}.{name}")
        if found is None:
            raise LoweringError(
                f"operator {self._library}::{name} is not loaded, so this kernel cannot run here; to see what would "
                "run, use lowering.explain or lowering.lower; to run the CPU references of the operators, call "
                "lowering.npu_reference.load()"
            )
        return found


npu = _Operators("npu")
"""The operators, looked up at each call: the references may be loaded at any time."""
atb = _Operators("atb")
"""The operators of the ATB library."""
