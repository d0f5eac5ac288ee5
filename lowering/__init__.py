"""Ops with a reference body, kernels for targets, and the choice between them, explained.

`lowering` knows no model. `ops/` holds one file an op family; `portable/` faster Torch kernels for the same ops, `npu/`
those of torch_npu's fused operators.
"""

from . import beside  # noqa: F401

# isort: split

# Kernels are tried in the order registered: a fused operator before anything made of Torch's own.
from . import npu as npu_kernels
from . import ops, policy
from . import portable as torch_kernels
from .check.comparison import Comparison, compare
from .errors import CaptureError, CollectiveError, LoweringError, RecaptureWarning
from .explain.html import page
from .explain.report import Report, Row, explain, record, watch
from .explain.sheet import Sheet
from .explain.stages import Lowered, compared, lower
from .jit.jitted import HostSide, Jitted, host_side, jit
from .op import Choice, Kernel, Op, op
from .policy import MODE, Policy, in_force, use
from .registry import OPS, find, table
from .target import TARGETS, Target
from .weights import prepare

policy.check(MODE.get().policy)  # A mistake in the environment variable is an error at import.

__all__ = [
    "OPS", "TARGETS", "CaptureError", "Choice", "CollectiveError", "Comparison", "HostSide", "Jitted", "Kernel",
    "Lowered", "LoweringError", "Op", "Policy", "RecaptureWarning", "Report", "Row", "Sheet", "Target", "compare",
    "compared", "explain", "find", "host_side", "in_force", "jit", "lower", "npu_kernels", "op", "ops", "page",
    "prepare", "record", "table", "torch_kernels", "use", "watch",
]  # fmt: skip
