"""Faster Torch kernels, where a reference is slow. Same file names as `ops/`."""
