"""`table`: every op with its kernels, for the documentation."""

from __future__ import annotations

from ..op import OPS
from ..target import EVERY


def table() -> str:
    """Markdown: one row an op, one column a target, the kernels that serve it in the order they are tried."""
    lines = ["| op | " + " | ".join(EVERY) + " |", "|---" * (len(EVERY) + 1) + "|"]
    for op in sorted(OPS.values(), key=lambda op: op.name):
        cells = [
            ", ".join(f"`{kernel.name}`" for kernel in op.serving(name) if not kernel.only_by_name) for name in EVERY
        ]
        lines.append(f"| `{op.name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)
