"""Faster Torch kernels, where a reference is slow. Same file names as `ops/`; `kda` is more of `delta`."""

from . import (
    attention,
    attention_residual,
    delta,
    greedy,
    hyper_connection,
    kda,
    linear,
    mla,
    moe,
    quant,
    sampling,
    sharded,
    short_conv,
    sparse,
)

__all__ = [
    "attention", "attention_residual", "delta", "greedy", "hyper_connection", "kda", "linear", "mla", "moe", "quant",
    "sampling", "sharded", "short_conv", "sparse",
]  # fmt: skip
