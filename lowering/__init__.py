"""Ops with a reference body, kernels for targets, and the choice between them, explained.

`lowering` knows no model. `ops/` holds one file an op family; `torch/` faster Torch kernels for the same ops.
"""

from . import ops
from . import torch as torch_kernels
from .errors import LoweringError
from .op import Choice, Kernel, Op, op
from .policy import MODE, Policy, check, use
from .registry import OPS, find, table
from .report import Report, Row, explain, record
from .target import TARGETS, Target
from .weights import prepare

check(MODE.get().policy)  # A mistake in the environment variable is an error at import.

__all__ = [
    "OPS", "TARGETS", "Choice", "Kernel", "LoweringError", "Op", "Policy", "Report", "Row", "Target", "explain",
    "find", "op", "ops", "prepare", "record", "table", "torch_kernels", "use",
]  # fmt: skip
