"""CPU implementations of torch_npu's operators that our kernels call, written from the operators' documentation.

They let a forward that is lowered for an Ascend target run on any machine: they compute in float32 with the documented
roundings, write what the device writes, raise where the documentation forbids a call, and put NaN where it leaves a
value undefined. They say nothing about speed. What they rest on is listed in `docs/npu-evidence.md`.

    from lowering import npu_reference

    npu_reference.load()
    with lowering.use(target="ascend910b"):
        model.forward(params, state, batch)
"""

from . import (
    attention,
    cache,
    delta,
    hyper_connection,
    matmul,
    mla,
    mlp,
    moe,
    norm,
    quant,
    quant_matmul,
    rotary,
    sampling,
    short_conv,
    sparse,
)
from .checks import OperatorError
from .registration import OPERATORS, OperatorReference, load

# The modules register their operators when they are imported.
__all__ = [
    "OPERATORS", "OperatorError", "OperatorReference", "attention", "cache", "delta", "hyper_connection", "load",
    "matmul", "mla", "mlp", "moe", "norm", "quant", "quant_matmul", "rotary", "sampling", "short_conv", "sparse",
]  # fmt: skip
