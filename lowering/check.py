"""The device check: every kernel against its op's reference, on the device that is here.

Errors are distances from the reference body's values in float64, relative to the value plus its tensor's root mean
square. A kernel may be as far from them as the reference itself is in the same dtype, and the bound of `tolerances`
further: what it may be away from the reference.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from params import tree
from params.quant.values import QuantizedWeight, SplitWeight

from . import registry
from . import target as targets
from .npu.features import missing
from .op import Kernel, Op
from .policy import MODE, use
from .sheet import Sheet
from .target import Target
from .tolerances import VANISHED, bound
from .weights import PreparedWeight, plain

if TYPE_CHECKING:
    from .cases import Case

BROKEN = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""What a kernel may raise on a device; the check goes on to the next."""
ROUNDS = 3
"""Timed runs, of which the fastest counts."""


@dataclass(frozen=True)
class Outcome:
    """One kernel on one case: its largest relative error and the bound, or why it was refused, or how it failed."""

    op: str
    kernel: str
    case: str
    dtype: str
    error: float | None = None
    bound: float | None = None
    seconds: float | None = None
    refused: str | None = None
    failed: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it ran and kept its bound, or was refused."""
        return self.failed is None and (self.error is None or self.bound is None or self.error <= self.bound)


@dataclass(frozen=True)
class Checked:
    """All outcomes, and the machine they were found on."""

    environment: dict[str, str]
    outcomes: tuple[Outcome, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed and every bound was kept."""
        return all(outcome.ok for outcome in self.outcomes)

    def sheet(self) -> Sheet:
        """One row a kernel."""
        groups: dict[tuple[str, str], list[Outcome]] = {}
        for outcome in self.outcomes:
            groups.setdefault((outcome.op, outcome.kernel), []).append(outcome)
        rows = [_summary(op, kernel, found) for (op, kernel), found in groups.items()]
        marked = [index for index, found in enumerate(groups.values()) if not all(outcome.ok for outcome in found)]
        device, target = self.environment["device"], targets.named(self.environment["target"])
        through = "" if device.startswith(target.device) else ", through CPU references of its operators"
        title = f"kernels of {target} on {device}{through}"
        broken = sum(not outcome.ok for outcome in self.outcomes)
        notes = [f"{broken} of {len(self.outcomes)} cases failed" if broken else f"all {len(self.outcomes)} cases hold"]
        columns = ("op", "kernel", "ran", "refused", "largest error", "bound there", "fastest", "slowest", "remarks")
        return Sheet(title, columns, rows, numbers=columns[2:-1], marked=marked, notes=notes)

    def details(self) -> Sheet:
        """One row a case, those that failed first."""
        ordered = sorted(self.outcomes, key=lambda outcome: outcome.ok)
        rows = [
            (x.op, x.kernel, x.case, x.dtype, _number(x.error), _number(x.bound), _duration(x.seconds),
             x.failed or x.refused or "")
            for x in ordered
        ]  # fmt: skip
        marked = [index for index, outcome in enumerate(ordered) if not outcome.ok]
        columns = ("op", "kernel", "case", "dtype", "largest error", "bound", "time", "remarks")
        return Sheet("every case", columns, rows, numbers=columns[4:7], marked=marked)

    def environment_sheet(self) -> Sheet:
        """What it ran on."""
        return Sheet("environment", ("what", "value"), list(self.environment.items()))

    def json(self) -> str:
        """Everything, for programs."""
        return json.dumps({"environment": self.environment, "outcomes": [asdict(x) for x in self.outcomes]}, indent=1)

    def __repr__(self) -> str:
        return self.sheet().drawn()


def check_device(
    device: torch.device, target: Target, progress: Callable[[Sequence[Case]], Iterable[Case]] = iter
) -> Checked:
    """Run every kernel of `target` on every case, on `device`. `progress` may show the cases as they go by.

    An Ascend target on a CPU needs the CPU references of its operators loaded (`lowering.npu_reference.load`).
    """
    dtypes = (torch.float32, torch.bfloat16) + (() if device.type == "cpu" else (torch.float16,))
    from .cases import CASES

    found: list[Outcome] = []
    with use(target=target), torch.no_grad():
        for case in progress(CASES):
            for dtype in dtypes:
                found += _case_outcomes(case, dtype, device, target)
    return Checked(_environment(device, target), tuple(found))


def _case_outcomes(case: Case, dtype: torch.dtype, device: torch.device, target: Target) -> Iterator[Outcome]:
    op = registry.find(case.op)
    expected = Expected.of(op, *case.arguments(dtype), case.length)
    for kernel in op.serving(target):
        blank = Outcome(op.name, kernel.name, case.name, str(dtype).removeprefix("torch."))
        args, kwargs = tree.map(lambda x: x.to(device) if isinstance(x, Tensor) else x, case.arguments(dtype))
        args = prepared(op, kernel, args)
        yield _outcome(kernel, target, args, kwargs, expected, blank)


def prepared(op: Op, kernel: Kernel, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with weights in the kernel's own layout, where it makes one."""

    def laid_out(name: str, weight: Any) -> Any:
        if not (isinstance(weight, QuantizedWeight) or name == "weight") or not kernel.reads(weight):
            return weight
        made = None if kernel.prepare is None else kernel.prepare(weight)
        return weight if made is None else made

    return tuple(laid_out(name, x) for name, x in zip(op.signature.parameters, args, strict=False))


def _outcome(kernel: Kernel, target: Target, args: Any, kwargs: Any, expected: Expected, blank: Outcome) -> Outcome:
    """`blank`, filled in."""
    reason = refusal(kernel, target, args, kwargs)
    if reason is not None:
        return replace(blank, refused=reason)
    try:
        seconds, result = timed(kernel, args, kwargs)
        found = settled(registry.find(blank.op), args, kwargs, result)
        error, most = expected.worst(found)
        return replace(blank, error=error, bound=most, seconds=seconds)
    except BROKEN as error:
        return replace(blank, failed=f"{type(error).__name__}: {error}")


def refusal(kernel: Kernel, target: Target, args: Any, kwargs: Any) -> str | None:
    """Why a kernel that serves the target does not take these arguments; None when it does."""
    lacking = missing(kernel.operators, target) if kernel.operators else None
    return lacking or (kernel.refuse(*args, **kwargs) if kernel.refuse else None)


def timed(kernel: Kernel, args: Any, kwargs: Any) -> tuple[float, Any]:
    """Seconds of the fastest of a few runs, and the result of the first: a kernel may write into its arguments."""
    seconds, results = [], []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        results.append(kernel.run(*args, **kwargs))
        if any(x.device.type != "cpu" for x in tree.leaves(args) if isinstance(x, Tensor)):
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds), results[0]


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
        exact = tree.map(lambda x, y: x if isinstance(x, Tensor) and x.is_floating_point() else y, wide, own)
        floats = [x for x in (*tree.leaves((args, kwargs)), *tree.leaves(own)) if isinstance(x, Tensor)]
        given = next(x.dtype for x in floats if x.is_floating_point())
        bounds = [max(bound(given, length), bound(kind, length)) for kind in _float_dtypes(own, given)]
        return cls(exact, tuple(most + error for most, error in zip(bounds, errors(own, exact), strict=True)))

    def worst(self, actual: Any) -> tuple[float, float]:
        """Error and bound of the tensor that comes nearest to its bound, or goes furthest beyond it; see `errors`."""
        return max(zip(errors(actual, self.exact), self.most, strict=True), key=lambda pair: pair[0] / pair[1])


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
    args, kwargs = tree.map(moved, (args, kwargs), is_leaf=quantized)
    with use(target="cpu"):
        return settled(op, args, kwargs, op.body(*args, **kwargs))


def _float_dtypes(result: Any, otherwise: torch.dtype) -> list[torch.dtype]:
    tensors = [x for x in tree.leaves(result) if isinstance(x, Tensor)]
    return [x.dtype if x.is_floating_point() else otherwise for x in tensors]


def settled(op: Op, args: Any, kwargs: Any, result: Any) -> Any:
    """A result without its scratch slot, and with the state half-way along a delta rule's trail in place of the trail.

    Kernels choose the trail's form.
    """
    if op.name == "gated_delta_rule" and result[-1] is not None:
        given = op.signature.bind(*args, **kwargs).arguments
        starts = given["query_start"]
        half = torch.full((len(starts) - 1,), given["max_query"] // 2, dtype=torch.int32, device=starts.device)
        result = (*result[:-1], result[-1].at(half)[:-1])
    from .cases import live

    return live(op.name, result)


def errors(actual: Any, exact: Any) -> list[float]:
    """The largest error of each tensor, relative to the exact value plus its tensor's root mean square.

    Raises `ValueError` for another structure or shape, a value that is not finite where the exact one is, and other
    integers.
    """
    one, structure = pytree.tree_flatten(actual)
    two, other = pytree.tree_flatten(exact)
    if structure != other:
        raise ValueError(f"the kernel returns {structure}, expected {other}")
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
    if not torch.isfinite(x[torch.isfinite(y)]).all():
        raise ValueError("the kernel returns values that are not finite")
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
            (x.kernel, _number(x.error), "" if x.error is None else f"{x.error / self.rounding:.2f}",
             _duration(x.seconds), x.failed or x.refused or "")
            for x in self.outcomes
        ]  # fmt: skip
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
    found = op if isinstance(op, Op) else registry.find(op)
    tensors = [x for x in tree.leaves((args, kwargs)) if isinstance(x, Tensor)]
    target = MODE.get().target or targets.of_device(tensors[0].device)
    chosen = found.serving(target) if kernels is None else [found.kernel_named(name) for name in kernels]
    dtype = next(x.dtype for x in tensors if x.is_floating_point())
    expected = Expected.of(found, args, kwargs, 1)
    outcomes = []
    for kernel in chosen:
        blank = Outcome(found.name, kernel.name, "given", str(dtype).removeprefix("torch."))
        if not kernel.serves(target):
            reason = f"serves {', '.join(kernel.targets)}; target is {target.name}"
            outcomes.append(replace(blank, refused=reason))
            continue
        # A kernel may write into its arguments, which stay the caller's.
        own = tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, (args, kwargs))
        with use(target=target), torch.no_grad():
            outcomes.append(_outcome(kernel, target, *own, expected, blank))
    return Comparison(tuple(outcomes), torch.finfo(dtype).eps)


def _summary(op: str, kernel: str, found: Sequence[Outcome]) -> tuple[str, ...]:
    ran = [x for x in found if x.error is not None]
    refused = [x.refused for x in found if x.refused]
    nearest = max(ran, key=lambda x: (x.error or 0) / (x.bound or 1), default=None)
    times = [x.seconds for x in ran if x.seconds is not None]
    remarks = [f"{x.case}, {x.dtype}: {x.failed}" for x in found if x.failed]
    remarks += [f"{x.case}, {x.dtype}: over the bound" for x in ran if not x.ok]
    # A sentence says which sizes a kernel was refused for, so that of one case stands for the others.
    remarks += [f"refused, for one: {refused[0]}"] if refused else []
    error, most = (None, None) if nearest is None else (nearest.error, nearest.bound)
    spans = (_duration(min(times, default=None)), _duration(max(times, default=None)))
    return op, kernel, str(len(ran)), str(len(refused)), _number(error), _number(most), *spans, "\n".join(remarks)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{1e6 * seconds:.0f} us" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"


def _environment(device: torch.device, target: Target) -> dict[str, str]:
    found = {
        "device": str(device), "target": target.name, "machine": target.title, "torch_npu": target.torch_npu,
        "CANN": target.cann, "torch": torch.__version__, "python": platform.python_version(),
        "platform": platform.platform(), "processor": platform.processor(), "threads": str(torch.get_num_threads()),
        "time": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }  # fmt: skip
    return {name: value for name, value in found.items() if value}
