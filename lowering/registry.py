"""The table of ops. `find` looks one up, `table` prints every op with its kernels."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from .errors import LoweringError
from .target import TARGETS

if TYPE_CHECKING:
    from .op import Op

OPS: dict[str, Op] = {}


def add(op: Op) -> None:
    """Enter an op; a second one of the same name is an error."""
    if op.name in OPS:
        raise LoweringError(f"op {op.name!r} is registered twice")
    OPS[op.name] = op


def find(name: str) -> Op:
    """The op called `name`; `LoweringError` names the nearest one."""
    op = OPS.get(name)
    if op is None:
        near = difflib.get_close_matches(name, OPS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known ops: {', '.join(sorted(OPS))}"
        raise LoweringError(f"unknown op {name!r}{hint}")
    return op


def table() -> str:
    """Markdown: one row an op, one column a target, the kernels that serve it in the order they are tried."""
    names = [name for name, target in TARGETS.items() if target.refused is None]
    lines = ["| op | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for op in sorted(OPS.values(), key=lambda op: op.name):
        cells = [", ".join(f"`{kernel.name}`" for kernel in op.serving(name)) for name in names]
        lines.append(f"| `{op.name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)
