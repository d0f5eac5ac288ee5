"""Ascend's own compiler for Triton kernels, run on any machine: what it makes of a kernel, and what that would do."""
