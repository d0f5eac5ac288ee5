"""Ops with a reference body, kernels for targets, and the choice between them, explained.

`lowering` knows no model. `ops/` holds one file an op family; `portable/` faster Torch kernels for the same ops, `npu/`
those of torch_npu's fused operators.
"""

from . import beside  # noqa: F401

# isort: split

# Kernels are tried in the order registered: a fused operator, then a kernel of ours, then what is made of Torch's own.
from . import npu as npu_kernels

# isort: split
from . import ops
from . import triton as triton_kernels

# isort: split
from . import portable as torch_kernels
from .ascend_compiler.audit import Finding, audit
from .ascend_compiler.compile import TritonSource, compile_for
from .ascend_compiler.emulator import Emulation, EmulationError, emulate
from .ascend_compiler.outcome import Compiled, Overflow, Refused
from .check.comparison import Comparison, compare
from .errors import CaptureError, CollectiveError, LoweringError, RecaptureWarning
from .explain.html import page
from .explain.report import Report, Row, explain, record, watch
from .explain.sheet import Sheet
from .explain.stages import Lowered, compared
from .explain.table import table
from .jit.jitted import Jitted, captured_with, jit
from .kernel import Choice, Kernel
from .lower import lower
from .op import OPS, Op, find, op
from .policy import MODE, Policy
from .prepare import prepare
from .rows import Rows
from .target import TARGETS, Target
from .use import check_names, in_force, use

check_names(MODE.get().policy)  # A mistake in the environment variable is an error at import.

__all__ = [
    "OPS", "TARGETS", "CaptureError", "Choice", "CollectiveError", "Comparison", "Compiled", "Emulation",
    "EmulationError", "Finding", "Jitted", "Kernel", "Lowered", "LoweringError", "Op", "Overflow", "Policy",
    "RecaptureWarning", "Refused", "Report", "Row", "Rows", "Sheet", "Target", "TritonSource", "audit",
    "captured_with", "compare", "compared", "compile_for", "emulate", "explain", "find", "in_force", "jit", "lower",
    "npu_kernels", "op", "ops", "page", "prepare", "record", "table", "torch_kernels", "triton_kernels", "use",
    "watch",
]  # fmt: skip
