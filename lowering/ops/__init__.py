"""Every op: its signature and its reference body, one file a family."""

from .attention import attention, block_attention, paged_attention, write_pages
from .attention_residual import attention_residual
from .collective import all_gather, all_reduce, from_first
from .delta import DeltaStates, DeltaTrail, channel_gates, delta_gates, gated_delta_rule, l2_norm, replay_delta
from .greedy import greedy_markov_token, greedy_token
from .hyper_connection import hyper_inject, hyper_mix
from .linear import embedding, linear
from .mla import LatentPools, LatentQueries, Latents, latent_norm_rope_write, mla_prefix_attention, write_latents
from .mlp import geglu, swiglu
from .moe import experts, route_grouped, route_sigmoid, route_softmax
from .ngram import ContextTrail, ngram_gate, ngram_rows, table_rows
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
from .rotary import mrope_angles, rotary, rotary_angles, rotary_interleaved, yarn_angles
from .sampling import draw, keep_top
from .short_conv import WindowTrail, short_conv
from .sparse import expand_blocks, index_keys, index_scores_topk, pool_keys, sparse_attention

__all__ = [
    "ContextTrail", "DeltaStates", "DeltaTrail", "LatentPools", "LatentQueries", "Latents", "WindowTrail",
    "add_gemma_rms_norm", "add_rms_norm", "all_gather", "all_reduce", "attention", "attention_residual",
    "block_attention", "channel_gates", "delta_gates", "draw", "embedding", "expand_blocks", "experts", "from_first",
    "gated_delta_rule", "gated_rms_norm", "gated_rms_norm_fp32", "geglu", "gemma_rms_norm", "gemma_rms_norm_rstd",
    "greedy_markov_token", "greedy_token", "grouped_gemma_rms_norm", "hyper_inject", "hyper_mix", "index_keys",
    "index_scores_topk", "keep_top", "l2_norm", "latent_norm_rope_write", "linear", "mla_prefix_attention",
    "mrope_angles", "ngram_gate", "ngram_rows", "paged_attention", "pool_keys", "replay_delta", "rms_norm",
    "rms_norm_rstd", "rotary", "rotary_angles", "rotary_interleaved", "route_grouped", "route_sigmoid", "route_softmax",
    "short_conv", "sparse_attention", "swiglu", "table_rows", "write_latents", "write_pages", "yarn_angles",
]  # fmt: skip
