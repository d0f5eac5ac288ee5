"""The table of ops. `find` looks one up, `table` prints every op with its kernels."""

from __future__ import annotations

import difflib
import itertools
from typing import TYPE_CHECKING

from .errors import LoweringError
from .target import TARGETS

if TYPE_CHECKING:
    from .op import Op

OPS: dict[str, Op] = {}

_changes = itertools.count(1)
version = 0
"""Another one after every change of ops and kernels: what was captured before may hold other choices."""


def add(op: Op, *, replace: bool = False) -> None:
    """Enter an op; a second one of the same name is an error, unless it is to `replace` the first."""
    if op.name in OPS and not replace:
        raise LoweringError(f"op {op.name!r} is registered twice; with replace=True this one takes its place")
    OPS[op.name] = op
    changed()


def changed() -> None:
    """Note that other kernels may be chosen from now on."""
    global version
    version = next(_changes)


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
        tried = ([kernel for kernel in op.serving(name) if not kernel.only_by_name] for name in names)
        cells = [", ".join(f"`{kernel.name}`" for kernel in kernels) for kernels in tried]
        lines.append(f"| `{op.name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)
