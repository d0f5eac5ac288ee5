"""Faster Torch kernels, where a reference is slow. Same file names as `ops/`."""

from . import attention, delta, linear, moe, short_conv

__all__ = ["attention", "delta", "linear", "moe", "short_conv"]
