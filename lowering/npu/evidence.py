"""What speaks for each operator on each Ascend machine: torch_npu's documentation, engines that call it, CANN's tables.

Three statements by three parties, kept apart. None of them is a run: `python -m lowering check` on a device is. A wheel
of torch_npu and the CANN beneath it have versions of their own: the wheel's schemas are in `schemas.json`, what its
documentation says stands here, and `stated` says from which CANN on the operator is built for a machine, without which
no other statement helps.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..policy import EVIDENCE
from ..target import ASCEND, Target

SEEN = "seen here"
"""What speaks for an operator that this machine's own probe has run."""


@dataclass(frozen=True)
class Evidence:
    """The statements about one operator, each naming Ascend targets.

    `stated` gives, for a target that CANN's product tables or operator definitions mark, the first version that does;
    `master` is its development branch. `engines` says where calls were read.
    """

    documented: tuple[str, ...]
    in_use: tuple[str, ...]
    stated: dict[str, str]
    engines: str = ""

    def of(self, target: Target) -> str | None:
        """The strongest statement that names the target, as `Policy.evidence` spells it; None for none."""
        named = (self.documented, self.in_use, self.stated)
        return next((kind for kind, targets in zip(EVIDENCE, named, strict=True) if target.name in targets), None)

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets that any statement names."""
        return tuple(name for name in ASCEND if name in {*self.documented, *self.in_use, *self.stated})


SOURCES = {
    "documented": "operator pages of op-plugin 517f2e7d (2026-08-21); of the torch_npu 2.13 wheel where it has none",
    "in use": "vllm-ascend 182b75ea (2026-08-22), sglang and sgl-kernel-npu f425bdf1 (2026-08-21)",
    "stated": "product tables and operator definitions of ops-transformer 3a280bcc (2026-07-21) and ops-nn e5c3fa93 "
    "(2026-08-22) with their tags; 8.5.0 is the oldest that was read, and stands where a table names none for 910",
}
"""Where the statements were read."""

_NAMES = dict(zip("235", ASCEND, strict=True))


def _row(documented: str, in_use: str, stated: str, engines: str = "") -> Evidence:
    """A row by Atlas generations: 2 is 910B, 3 is 910_93, 5 is 950; `stated` holds their first CANN versions, or -."""
    first = dict(zip(ASCEND, stated.split(), strict=True))
    return Evidence(
        tuple(_NAMES[digit] for digit in documented),
        tuple(_NAMES[digit] for digit in in_use),
        {target: version for target, version in first.items() if version != "-"},
        engines,
    )


OPERATORS: dict[str, Evidence] = {
    # Norms, activations
    "npu_rms_norm": _row("23", "235", "8.5.0 8.5.0 8.5.0", "vllm-ascend ops (norms)"),
    "npu_add_rms_norm": _row("235", "235", "8.5.0 8.5.0 8.5.0", "vllm-ascend ops (norms)"),
    "npu_gemma_rms_norm": _row("23", "", "8.5.0 8.5.0 9.2.0-beta.1"),
    "npu_swiglu": _row("2", "235", "8.5.0 8.5.0 8.5.0", "vllm-ascend ops/activation.py, device/device_op.py"),
    "npu_geglu": _row("2", "", "8.5.0 8.5.0 8.5.0"),
    # Rotary embeddings, cache writes
    "npu_rotary_mul": _row("23", "235", "8.5.0 8.5.0 8.5.0", "vllm-ascend ops/rotary_embedding.py, ops/rope_dsv4.py"),
    "npu_interleave_rope": _row("23", "23", "8.5.0 8.5.0 -", "vllm-ascend attention/mla_v1.py, attention/sfa_v1.py"),
    "npu_apply_rotary_pos_emb": _row("235", "", "8.5.0 8.5.0 8.5.0"),
    "npu_kv_rmsnorm_rope_cache_v2": _row("23", "235", "8.5.0 8.5.0 8.5.0", "vllm-ascend attention/mla_v1.py (v1)"),
    "npu_scatter_pa_kv_cache": _row("23", "235", "8.5.0 8.5.0 9.0.0", "vllm-ascend device/device_op.py"),
    # Attention
    "npu_fused_infer_attention_score_v2": _row(
        "23", "235", "8.5.0 8.5.0 9.0.0", "vllm-ascend attention/attention_v1.py, attention/mla_v1.py"
    ),
    "npu_attention_update": _row("235", "23", "8.5.0 8.5.0 9.0.0", "vllm-ascend attention/mla_v1.py"),
    "atb.npu_ring_mla": _row("23", "23", "8.5.0 8.5.0 -", "sglang attention/ascend_backend.py"),
    "npu_lightning_indexer": _row("235", "235", "8.5.0 8.5.0 9.1.0.pre", "vllm-ascend device/device_op.py"),
    # Recurrences, hyper-connections
    "npu_recurrent_gated_delta_rule_functional": _row("23", "", "8.5.0 8.5.0 9.1.0.pre"),
    "npu_chunk_gated_delta_rule": _row("235", "23", "8.5.0 8.5.0 master", "vllm-ascend ops/gdn.py, behind a probe"),
    "npu_fused_causal_conv1d": _row("5", "", "- - 9.1.0-beta.1"),
    "npu_mhc_post": _row("5", "", "9.1.0.pre 9.1.0.pre 9.1.0.pre"),
    # Quantisation, products
    "npu_quantize": _row("23", "23", "8.5.0 8.5.0 8.5.0", "vllm-ascend ops/register_custom_ops.py"),
    "npu_dynamic_quant": _row("23", "235", "8.5.0 8.5.0 8.5.0", "vllm-ascend quantization/methods"),
    "npu_dynamic_mx_quant": _row("5", "5", "- - 8.5.0", "vllm-ascend quantization/methods/w8a8_mxfp8.py"),
    "npu_dequant_swiglu_quant": _row("23", "", "8.5.0 9.0.0 8.5.0"),
    "npu_quant_matmul": _row("23", "235", "8.5.0 8.5.0 8.5.0", "vllm-ascend quantization/methods/w8a8_mxfp8.py"),
    "npu_transpose_batchmatmul": _row(
        "23", "23", "8.5.0 8.5.0 8.5.0", "vllm-ascend attention/mla_v1.py, attention/sfa_v1.py"
    ),
    "npu_convert_weight_to_int4pack": _row("23", "235", "8.5.0 8.5.0 8.5.0", "vllm-ascend quantization/methods"),
    "npu_format_cast": _row("235", "235", "- - -", "vllm-ascend quantization/methods"),
    # Sampling
    "npu_top_k_top_p": _row("235", "23", "8.5.0 8.5.0 9.0.0", "vllm-ascend sample/sampler.py"),
    # Experts
    "npu_grouped_matmul": _row("23", "235", "8.5.0 8.5.0 8.5.0", "vllm-ascend device/device_op.py"),
    "npu_grouped_matmul_swiglu_quant_v2": _row("235", "235", "8.5.0 8.5.0 8.5.0", "vllm-ascend device/device_op.py"),
    "npu_moe_init_routing_v2": _row("23", "235", "8.5.0 8.5.0 8.5.0", "vllm-ascend device/device_op.py"),
    "npu_moe_gating_top_k": _row("23", "235", "8.5.0 8.5.0 8.5.0", "vllm-ascend device/device_op.py, sglang moe/topk"),
    "npu_moe_gating_top_k_softmax_v2": _row("23", "", "8.5.0 8.5.0 8.5.0"),
    "npu_moe_token_unpermute": _row("235", "235", "8.5.0 8.5.0 8.5.0", "vllm-ascend ops/fused_moe/token_dispatcher.py"),
}
"""Every operator that our kernels call."""


def serves(operator: str) -> tuple[str, ...]:
    """Names of the targets that any statement names for an operator."""
    return OPERATORS[operator].targets


def speaks_for(operators: tuple[str, ...], target: Target) -> str:
    """What speaks for a kernel of these operators on the target: for its weakest one, the strongest statement."""
    found = [SEEN if name in target.seen else OPERATORS[name].of(target) or "nothing" for name in operators]
    return max(found, key=(SEEN, *EVIDENCE, "nothing").index)


def doubt(operators: tuple[str, ...], target: Target, wanted: str) -> str | None:
    """One sentence about the first operator that too little speaks for on the target; None when there is none."""
    for name in operators:
        if name in target.seen:
            continue
        if name in dict(target.failed):
            return f"{name} failed in this machine's probe: {dict(target.failed)[name]}"
        found, first = OPERATORS[name].of(target), OPERATORS[name].stated.get(target.name)
        if first is not None and not target.has_cann(first):
            return f"{name} is built for {target.name} from CANN {first} on; the target has {target.cann}"
        if found is None:
            return f"{name} is neither documented for {target.name} nor in use on it, nor does CANN state it"
        if EVIDENCE.index(found) > EVIDENCE.index(wanted):
            return f"{name} is {_STATEMENTS[found]} for {target.name}, no more; evidence={found!r} takes it"
    return None


_STATEMENTS = {"in use": "called by an engine, not documented", "stated": "stated by CANN, not documented or in use"}
