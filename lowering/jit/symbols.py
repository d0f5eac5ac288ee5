"""Host integers while a program is traced: symbols that lists can be computed from, and that nothing may branch on.

A row's length changes between replays. While tracing it is a `torch.SymInt`, so that what is computed from it becomes
part of the graph. A branch on one would be decided once, for all replays: it is an error at its line.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jaxtyping
import torch
import torch.utils._pytree as pytree
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from ..errors import CaptureError

NOT_OURS = (str(Path(torch.__file__).parent), str(Path(jaxtyping.__file__).parent), "<", __file__)
"""How names of files begin that no error points to: Torch's, those of shape checks, generated code and this one."""
TORCHS_OWN = ("aten", "prim", "prims")


class HostSymbols(ShapeEnv):
    """Makes the symbols of one trace."""

    def __init__(self) -> None:
        # A length is never taken for a constant because it is 0 or 1, nor for another that is equal by chance.
        super().__init__(
            allow_scalar_outputs=False,
            allow_dynamic_output_shape_ops=False,
            specialize_zero_one=False,
            duck_shape=False,
        )

    def symbol(self, name: str, value: int) -> torch.SymInt:
        """A symbol that shape functions outside Torch see as `value`."""
        source = ConstantSource(name)
        symbol = self.create_symbol(
            value, source, dynamic_dim=DimDynamic.DYNAMIC, positive=None, do_not_specialize_zero_one=True
        )
        found = self.create_symintnode(symbol, hint=value, source=source)
        assert isinstance(found, torch.SymInt)
        return found

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        """What ShapeEnv finds, unless it holds for some values of the symbols alone: then `CaptureError`."""
        before = len(self.guards)
        found = super().evaluate_expr(*args, **kwargs)
        if len(self.guards) > before:
            raise CaptureError(
                f"capture: {place(traceback.extract_stack())} branches on a row length, or reads it as a number, and "
                "it changes between replays; use torch.sym_min, torch.sym_max or tensors"
            )
        return found


class Tracing(FakeTensorMode):
    """Fake tensors of static shapes. Operators outside Torch see numbers for symbols: their checks branch on them."""

    def __init__(self, symbols: HostSymbols) -> None:
        super().__init__(allow_non_fake_inputs=True, shape_env=symbols)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As of FakeTensorMode."""
        if func.namespace not in TORCHS_OWN:
            args, kwargs = pytree.tree_map_only(torch.SymInt, lambda x: x.node.hint, (args, kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def place(frames: Iterable[traceback.FrameSummary]) -> str:
    """The innermost line that somebody wrote for what is being traced."""
    ours = [x for x in frames if not x.filename.startswith(NOT_OURS)]
    return f"{ours[-1].filename}:{ours[-1].lineno} ({ours[-1].line})" if ours else "the function"
