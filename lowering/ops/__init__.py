"""Every op: its signature and its reference body, one file a family."""

from .attention import attention, paged_attention, write_pages
from .delta import DeltaInputs, DeltaTrail, delta_gates, gated_delta_rule, l2_norm, replay_delta
from .linear import embedding, linear
from .mlp import swiglu
from .moe import experts, route_softmax
from .norm import (
    add_gemma_rms_norm,
    add_rms_norm,
    gated_rms_norm,
    gated_rms_norm_fp32,
    gemma_rms_norm,
    gemma_rms_norm_rstd,
    grouped_gemma_rms_norm,
    rms_norm,
    rms_norm_rstd,
)
from .rotary import mrope_angles, rotary, rotary_angles, rotary_interleaved
from .sampling import draw, keep_top
from .short_conv import WindowTrail, short_conv

__all__ = [
    "DeltaInputs", "DeltaTrail", "WindowTrail", "add_gemma_rms_norm", "add_rms_norm", "attention", "delta_gates",
    "draw", "embedding", "experts", "gated_delta_rule", "gated_rms_norm", "gated_rms_norm_fp32", "gemma_rms_norm",
    "gemma_rms_norm_rstd", "grouped_gemma_rms_norm", "keep_top", "l2_norm", "linear", "mrope_angles", "paged_attention",
    "replay_delta", "rms_norm", "rms_norm_rstd", "rotary", "rotary_angles", "rotary_interleaved", "route_softmax",
    "short_conv", "swiglu", "write_pages",
]  # fmt: skip
