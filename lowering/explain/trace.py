"""Running a program without values: each signature of an op once, with the operators it calls written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from params import tree
from params.tree import tree_map

from ..kernel import Choice, Kernel
from ..op import Op
from ..policy import MODE
from ..rows import Rows
from .costs import ATEN, Cost, Formulas, cost, has_flops

SHOWN = 4
"""Entries of a list that are shown before the rest is counted."""


@dataclass(frozen=True)
class Shape:
    """What is known of a tensor without values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, value: Any) -> Any:
        """What is known of a tensor; anything else as it is."""
        if not isinstance(value, Tensor):
            return value
        return cls(tuple(value.shape), tuple(value.stride()), value.dtype, value.device)

    def made(self, device: torch.device | str | None = None) -> Tensor:
        """Such a tensor, on `device` instead of its own where one is given."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device or self.device)


@dataclass(frozen=True)
class Operator:
    """One operator call. `problems` says which other versions of the operator's package would refuse it, and why."""

    name: str
    arguments: str
    result: str
    cost: Cost
    problems: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({self.arguments}) -> {self.result}"


@dataclass
class Call:
    """Calls of one op with one signature. `by_reference`: traced through the reference, not through the kernel."""

    op: str
    kernel: str
    arguments: str
    result: str
    operators: tuple[Operator, ...]
    by_reference: bool
    count: int = 0

    @property
    def cost(self) -> Cost:
        """The cost of all `count` calls."""
        return sum((operator.cost for operator in self.operators), Cost()).times(self.count)


Check = Callable[[str, Sequence[Any], dict[str, Any]], "tuple[tuple[str, str], ...]"]
"""From an operator's name and its arguments as they were given, to what other versions would refuse."""


class Recorder(TorchDispatchMode):
    """Writes the operators that are called into `sink`, unless it is None."""

    def __init__(self, formulas: Formulas = ATEN, check: Check | None = None) -> None:
        super().__init__()
        self.formulas = formulas
        self.check = check
        self.given: tuple[Sequence[Any], dict[str, Any]] | None = None
        self.sink: list[Operator] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Composite operators are taken apart, so that what is written down is what a device runs."""
        out = self._recorded(func, args, kwargs or {})
        if isinstance(out, FakeTensor):
            # One of a single element may keep its value, and a copy of it to the device would then be made for real.
            out.constant = None
        return out

    def _recorded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given, self.given = self.given, None
        if self.sink is None or func.namespace == "prim":
            return func(*args, **kwargs)
        if not has_flops(func, self.formulas):
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        if not func.is_view:
            self.sink.append(self._written(func, args, kwargs, out, given or (args, kwargs)))
        return out

    def _written(self, func: Any, args: Any, kwargs: Any, out: Any, given: Any) -> Operator:
        name = func._schema.name.replace("::", ".")
        problems = () if self.check is None else self.check(func._schema.name, *given)
        price = cost(func, args, kwargs, out, self.formulas)
        return Operator(name, shown_arguments(*given), shown(out), price, problems)


@dataclass
class DryRun:
    """Takes every op call of a run without values, and counts it.

    A result depends on the signature and on the row lengths alone, and a model's layers repeat a few of those, so a
    kernel runs once for each. `outside` are the operators that a program calls itself, between its ops. Ops that a
    kernel calls count with each of its calls; `inside` collects those of the call that is being run.
    """

    recorder: Recorder = field(default_factory=Recorder)
    calls: dict[Any, Call] = field(default_factory=dict)
    outside: list[Operator] = field(default_factory=list)
    inside: list[tuple[Choice, Any, Call, Any]] = field(default_factory=list)

    def program(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Run the whole program; what it calls between its ops is written into `outside`."""
        self.recorder.sink = self.outside
        try:
            function(*args, **kwargs)
        finally:
            self.recorder.sink = None

    def __call__(self, op: Op, choice: Choice, key: tuple[Any, ...], args: Any, kwargs: Any) -> Any:
        """The result of an op call: tensors without values."""
        sink, self.recorder.sink = self.recorder.sink, None
        outer, self.inside = self.inside, []
        try:
            key = (*key, *(x.host for x in (*args, *kwargs.values()) if isinstance(x, Rows)))
            known = op.dry_results.get(key)
            if known is not None:
                self._repeat(known[2])
            else:
                known = (*self._run(op, choice.kernel, args, kwargs), self.inside)
                op.remember_dry(key, known)
            call, result, inside = known
            self._count(choice, key, call)
            outer += [*inside, (choice, key, call, tree_map(Shape.like, (args, kwargs)))]
            return tree_map(lambda leaf: leaf.made() if isinstance(leaf, Shape) else leaf, result)
        finally:
            self.recorder.sink, self.inside = sink, outer

    def _count(self, choice: Choice, key: Any, call: Call) -> None:
        self.calls.setdefault((choice.op, key), Call(**vars(call))).count += 1

    def _repeat(self, inside: list[tuple[Choice, Any, Call, Any]]) -> None:
        """Count, and report, the calls that a kernel makes whose run is not repeated."""
        report = MODE.get().report
        for choice, key, call, (args, kwargs) in inside:
            self._count(choice, key, call)
            if report is not None:
                report.add(choice, args, kwargs)

    def _run(self, op: Op, kernel: Kernel, args: Any, kwargs: Any) -> tuple[Call, Any]:
        by_reference = kernel.host_reads or (kernel.loaded is not None and not kernel.loaded())
        operators: list[Operator] = []
        self.recorder.sink = operators
        result = (op.body if by_reference else kernel.run)(*args, **kwargs)
        self.recorder.sink = None
        given = shown_arguments(args, kwargs, list(op.signature.parameters))
        call = Call(op.name, kernel.name, given, shown(result), tuple(operators), by_reference)
        return call, tree_map(Shape.like, result)


def shown_arguments(args: Sequence[Any], kwargs: dict[str, Any], names: Sequence[str] = ()) -> str:
    """Arguments as text; positional ones get a name where there is one."""
    positional = [f"{names[at]}={shown(x)}" if at < len(names) else shown(x) for at, x in enumerate(args)]
    return ", ".join([*positional, *(f"{name}={shown(x)}" for name, x in kwargs.items())])


def _shown_rows(rows: Rows) -> str:
    tensors = ", ".join(f"{path}={tree.describe(x)}" for path, x in tree.items(rows))
    known = "" if rows.host is None else ", host lengths" if rows.host.exact else ", bounds of host lengths"
    return f"Rows({tensors}, max_query={rows.max_query}, uniform={rows.uniform}{known})"


def shown(value: Any) -> str:
    """Text for a value: shapes and dtypes for tensors, the first entries of long lists, class names for other trees."""
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        rest = f", ... {len(value)} entries" if len(value) > SHOWN else ""
        inner = ", ".join(shown(x) for x in value[:SHOWN]) + rest
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, Rows):
        return _shown_rows(value)
    if isinstance(value, Tensor) or value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return tree.describe(value).removeprefix("torch.")
    leaves = tree.leaves(value)
    if not leaves or leaves[0] is value:
        return str(value)
    return f"{type(value).__name__}{shown(tuple(leaves))}"
