"""Faster Torch kernels, where a reference is slow. Same file names as `ops/`."""

from . import attention, delta, linear, mla, moe, sampling, short_conv, sparse

__all__ = ["attention", "delta", "linear", "mla", "moe", "sampling", "short_conv", "sparse"]
