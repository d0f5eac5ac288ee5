"""Faster Torch kernels, where a reference is slow. Same file names as `ops/`."""

from . import attention, delta, linear, moe, sampling, short_conv

__all__ = ["attention", "delta", "linear", "moe", "sampling", "short_conv"]
