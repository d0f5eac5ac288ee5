"""`table`: every op with its kernels, for the documentation."""

from __future__ import annotations

from ..op import OPS
from ..policy import Policy
from ..target import EVERY, TARGETS


def table() -> str:
    """Markdown: one row an op, one column a target, the kernels that serve it in the order they are tried."""
    lines = ["| op | " + " | ".join(EVERY) + " |", "|---" * (len(EVERY) + 1) + "|"]
    for op in sorted(OPS.values(), key=lambda op: op.name):
        tried = (op.candidates(Policy(), TARGETS[name]) for name in EVERY)
        cells = [", ".join(f"`{kernel.name}`" for kernel, refusal in kernels if not refusal) for kernels in tried]
        lines.append(f"| `{op.name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)
