"""Our own Triton kernels, one source for Ascend's Triton and upstream's, compiled and interpreted, run nowhere yet.

`sources/` holds the kernels, which import Triton alone and are imported by the first launch on a device; the files
beside it say, one op family each, with which arguments and tiles a kernel computes a call of an op. `kernels` registers
them with their ops. docs/npu-evidence.md tells what has been shown of them.
"""

from . import kernels

__all__ = ["kernels"]
