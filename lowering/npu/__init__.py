"""Kernels of torch_npu's fused operators, for Ascend. Same file names as `ops/`; the only place that names torch_npu.

Kernels for quantised weights are in `quant_linear` and `quant_experts`. All are for inference: under
gradients and function transforms the Torch kernels run. Operators are called by name through the dispatcher, optional
arguments by keyword, so that nothing here needs torch_npu to be imported, and the same call meets the device, a fake
tensor's shape function or a CPU reference of the operator.
"""

from . import (
    attention,
    delta,
    hyper_connection,
    linear,
    mla,
    mlp,
    moe,
    norm,
    quant_experts,
    quant_linear,
    rotary,
    sampling,
    short_conv,
    sparse,
)
from .kernel import say_gaps
from .tables import evidence_table, kernel_table, op_table, target_table

say_gaps()

__all__ = [
    "attention", "delta", "evidence_table", "hyper_connection", "kernel_table", "linear", "mla", "mlp", "moe", "norm",
    "op_table", "quant_experts", "quant_linear", "rotary", "sampling", "short_conv", "sparse", "target_table",
]  # fmt: skip
