"""Our own Triton kernels, one source for Ascend's Triton and upstream's, compiled and interpreted, run nowhere yet.

`sources/` holds the kernels, which import Triton alone and are never imported here; the files beside it say, one op
family each, with which arguments and tiles a kernel computes a call of an op. No kernel of this folder is registered
with an op: there is no launcher, and none is chosen. docs/npu-evidence.md tells what has been shown of them.
"""
