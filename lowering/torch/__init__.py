"""Faster Torch kernels, where a reference is slow. Same file names as `ops/`; `kda` is more of `delta`."""

from . import attention, delta, kda, linear, mla, moe, quant, sampling, sharded, short_conv, sparse

__all__ = ["attention", "delta", "kda", "linear", "mla", "moe", "quant", "sampling", "sharded", "short_conv", "sparse"]
