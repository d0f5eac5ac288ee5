"""Kernels against their op's reference: how far each is from the exact values, and how long it takes.

Errors are distances from the reference body's values in float64, relative to the value plus its tensor's root mean
square. A kernel may be as far from them as the reference itself is in the same dtype, and the bound of `tolerances`
further: what it may be away from the reference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from params import tree
from params.quant.values import QuantizedWeight, SplitWeight
from params.tree import tree_map

from .. import detect
from ..explain.sheet import Sheet
from ..kernel import Kernel
from ..op import Op, find
from ..policy import MODE, Policy
from ..signature import OpCall
from ..target import Target
from ..use import use
from ..weights import PreparedWeight, plain
from .tolerances import BASE, VANISHED, bound

QUOTED = 600
"""Characters of an error that are kept."""
ROUNDS = 3
"""Runs, of which the fastest counts."""


@dataclass(frozen=True)
class Outcome:
    """One kernel on one case: its largest relative error and the bound, or why it was refused, or how it failed.

    `evidence` is what speaks for the kernel's operators on the machine; `operators` those that a probe saw return.
    """

    op: str
    kernel: str
    case: str
    dtype: str
    evidence: str = ""
    error: float | None = None
    bound: float | None = None
    seconds: float | None = None
    refused: str | None = None
    failed: str | None = None
    operators: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether it ran and kept its bound, or was refused."""
        return self.failed is None and (self.error is None or self.bound is None or self.error <= self.bound)


class Fault(AbstractContextManager["Fault"]):
    """Takes whatever is raised inside, and has it in words: a kernel may be anybody's. Ctrl-C and exits pass."""

    words: str | None = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if kind is None or not isinstance(error, Exception):
            return False
        said = f"{kind.__name__}: {error}"
        self.words = said if len(said) <= QUOTED else f"{said[:QUOTED]} ..."
        return True


def laid_out(op: Op, kernel: Kernel, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with weights in the kernel's own layout, where it makes one."""

    def in_layout(name: str, weight: Any) -> Any:
        if not (isinstance(weight, QuantizedWeight) or name == "weight") or not kernel.reads(weight):
            return weight
        made = None if kernel.prepare is None else kernel.prepare(weight)
        return weight if made is None else made

    return tuple(in_layout(name, x) for name, x in zip(op.signature.parameters, args, strict=False))


def outcome_of(kernel: Kernel, target: Target, args: Any, kwargs: Any, expected: Expected, blank: Outcome) -> Outcome:
    """`blank`, filled in with what becomes of a kernel that is asked for by name."""
    op = find(blank.op)
    with Fault() as fault:
        ((_, reason),) = op.candidates(Policy({op.name: kernel.name}), target, OpCall(args, kwargs))
        if reason is not None:
            return replace(blank, refused=reason)
        device = next((x.device for x in tree.leaves((args, kwargs)) if isinstance(x, Tensor)), torch.device("cpu"))
        first, result = timed(device, kernel.run, *args, **kwargs)
        # Before it is run again: it may write into its arguments, and its result lie there.
        error, most = expected.worst(comparable(op, args, kwargs, result))
        seconds = min(first, *(timed(device, kernel.run, *args, **kwargs)[0] for _ in range(ROUNDS - 1)))
        return replace(blank, error=error, bound=most, seconds=seconds)
    return replace(blank, failed=fault.words)


def timed(device: torch.device, run: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[float, Any]:
    """Seconds of one run on a device, and its result."""
    start = time.perf_counter()
    result = run(*args, **kwargs)
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start, result


@dataclass(frozen=True)
class Expected:
    """The values of an op's reference in float64, and how far each of its tensors may be from them."""

    exact: Any
    most: tuple[float, ...]

    @classmethod
    def of(cls, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], length: int) -> Expected:
        """From the reference in float64 and in the arguments' own dtypes, both on the CPU.

        A tensor's bound is that of its dtype or of the arguments', the coarser, for sums of `length` terms. Integers
        and booleans are those of the arguments' own dtypes: a rounding may move a value past a threshold.
        """
        wide, own = (reference(op, args, kwargs, dtype) for dtype in (torch.float64, None))
        exact = tree_map(lambda x, y: x if isinstance(x, Tensor) and x.is_floating_point() else y, wide, own)
        floats = [x for x in (*tree.leaves((args, kwargs)), *tree.leaves(own)) if isinstance(x, Tensor)]
        given = next((x.dtype for x in floats if x.dtype in BASE), torch.float32)
        bounds = [max(bound(given, length), bound(kind, length)) for kind in _float_dtypes(own, given)]
        return cls(exact, tuple(most + error for most, error in zip(bounds, errors(own, exact), strict=True)))

    def worst(self, actual: Any) -> tuple[float, float]:
        """Error and bound of the tensor that comes nearest to its bound, or goes furthest beyond it; see `errors`."""
        pairs = zip(errors(actual, self.exact), self.most, strict=True)
        return max(pairs, key=lambda pair: pair[0] / pair[1], default=(0.0, 0.0))


def reference(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None = None) -> Any:
    """The result of the op's body on the CPU, with floating-point arguments in `dtype` or as they are.

    Quantised weights stay as they are.
    """

    def quantized(x: Any) -> bool:
        return isinstance(x, QuantizedWeight) and not isinstance(x, SplitWeight)

    def moved(x: Any) -> Any:
        if quantized(x):
            return tree.to(x, "cpu")
        return x.detach().to("cpu", dtype if x.is_floating_point() else None, copy=True) if isinstance(x, Tensor) else x

    args = tuple(plain(x) if isinstance(x, PreparedWeight) else x for x in args)
    args, kwargs = tree_map(moved, (args, kwargs), is_leaf=quantized)
    with use(target="cpu"):
        return comparable(op, args, kwargs, op.body(*args, **kwargs))


def _float_dtypes(result: Any, otherwise: torch.dtype) -> list[torch.dtype]:
    return [x.dtype if x.dtype in BASE else otherwise for x in _leaves(result)[0] if isinstance(x, Tensor)]


def _leaves(result: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of a result, its floats as tensors, and its structure."""
    found, structure = pytree.tree_flatten(result)
    return [torch.tensor(x, dtype=torch.float64, device="cpu") if isinstance(x, float) else x for x in found], structure


def comparable(op: Op, args: Any, kwargs: Any, result: Any) -> Any:
    """A result without its scratch slot, and with the state half-way along a delta rule's trail in place of the trail.

    Kernels choose the trail's form.
    """
    if op.name == "gated_delta_rule" and result[-1] is not None:
        rows = op.signature.bind(*args, **kwargs).arguments["rows"]
        half = torch.full((rows.count,), rows.max_query // 2, dtype=torch.int32, device=rows.query_start.device)
        result = (*result[:-1], result[-1].at(half)[:-1])
    return live(op.name, result)


def errors(actual: Any, exact: Any) -> list[float]:
    """The largest error of each tensor, relative to the exact value plus its tensor's root mean square.

    Raises `ValueError` for another structure or shape, a value that is not finite where the exact one is, and other
    integers. What is no tensor and no float has to be equal.
    """
    one, structure = _leaves(actual)
    two, other = _leaves(exact)
    if structure != other:
        raise ValueError(f"the kernel returns {structure}, expected {other}")
    for x, y in zip(one, two, strict=True):
        if isinstance(x, Tensor) != isinstance(y, Tensor) or not (isinstance(y, Tensor) or x == y):
            raise ValueError(f"the kernel returns {x!r:.100}, expected {y!r:.100}")
    return [tensor_error(x.detach().cpu(), y) for x, y in zip(one, two, strict=True) if isinstance(x, Tensor)]


def tensor_error(x: Tensor, y: Tensor) -> float:
    """The largest relative error of a tensor; see `errors`."""
    if x.shape != y.shape:
        raise ValueError(f"the kernel returns shape {list(x.shape)}, expected {list(y.shape)}")
    if x.numel() == 0:
        return 0.0
    if not x.is_floating_point():
        wrong = int((x != y).sum())
        if wrong:
            raise ValueError(f"{wrong} of {x.numel()} integers differ")
        return 0.0
    x, y = x.double(), y.double()
    finite = torch.isfinite(y)
    if not torch.isfinite(x[finite]).all():
        raise ValueError("the kernel returns values that are not finite")
    if not torch.allclose(x[~finite], y[~finite], equal_nan=True):
        raise ValueError("the kernel returns other values where infinities or NaN are expected")
    x, y = x[finite], y[finite]
    if x.numel() == 0:
        return 0.0
    error = ((x - y).abs() - VANISHED).clamp(min=0) / (y.abs() + y.square().mean().sqrt() + VANISHED)
    return error.max().item()


@dataclass(frozen=True)
class Comparison:
    """Kernels of one op on the same arguments. `rounding` is the spacing of numbers near 1 in the arguments' dtype."""

    outcomes: tuple[Outcome, ...]
    rounding: float

    def sheet(self) -> Sheet:
        """One row a kernel."""
        rows = [
            (
                x.kernel,
                number(x.error),
                "" if x.error is None else f"{x.error / self.rounding:.2f}",
                duration(x.seconds),
                x.failed or x.refused or "",
            )
            for x in self.outcomes
        ]
        columns = ("kernel", "largest error", "in roundings", "time", "remarks")
        first = self.outcomes[0]
        title = f"{first.op}: kernels in {first.dtype} against the reference in float64"
        return Sheet(title, columns, rows, numbers=columns[1:4])

    def __repr__(self) -> str:
        return self.sheet().drawn()


def compare(op: str | Op, kernels: Sequence[str] | None, *args: Any, **kwargs: Any) -> Comparison:
    """Run kernels of an op on the same arguments, each against the reference in float64.

    `kernels` are names; None stands for all that serve the target (that of `lowering.use(target=...)`, or of the
    arguments' device). Errors are relative to the expected value plus the root mean square. A kernel that does not take
    the arguments is listed with its reason; `LoweringError` for a name that does not exist.
    """
    found = op if isinstance(op, Op) else find(op)
    tensors = [x for x in tree.leaves((args, kwargs)) if isinstance(x, Tensor)]
    target = MODE.get().target or detect.of_device(tensors[0].device if tensors else torch.device("cpu"))
    chosen = found.serving(target) if kernels is None else [found.kernel_named(name) for name in kernels]
    dtype = next((x.dtype for x in tensors if x.is_floating_point()), torch.float32)
    expected = Expected.of(found, args, kwargs, 1)
    outcomes = []
    for kernel in chosen:
        blank = Outcome(found.name, kernel.name, "given", str(dtype).removeprefix("torch."))
        # A kernel may write into its arguments, which stay the caller's.
        own = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (args, kwargs))
        with use(target=target), torch.no_grad():
            outcomes.append(outcome_of(kernel, target, *own, expected, blank))
    return Comparison(tuple(outcomes), torch.finfo(dtype).eps)


def live(op: str, result: Any) -> Any:
    """The result of an op without the scratch slot or page of its states, and without an order that is left open."""
    if op in ("short_conv", "gated_delta_rule"):
        out, state, trail = result
        return out, state if state is None else state[:-1], trail
    if op == "index_keys":
        return tuple(pages[1:] for pages in result)
    if op == "index_scores_topk":
        return result.sort(-1).values
    return result[:-1] if op == "replay_delta" else result


def number(value: float | None) -> str:
    """For a cell of a report."""
    return "" if value is None else f"{value:.2g}"


def duration(seconds: float | None) -> str:
    """For a cell of a report."""
    if seconds is None:
        return ""
    return f"{1e6 * seconds:.0f} us" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"
