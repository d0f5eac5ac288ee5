"""Ops and kernels, and the one loop that chooses between them.

An op is a typed function whose body is its reference. Kernels are registered beside it and must have the same
signature. A call looks up the choice by its static signature (shapes, dtypes, device, static arguments, policy,
target); the first call of a signature runs the loop in `Op.choose`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import TransformType, get_interpreter_stack, get_unwrapped, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import SUPPORTED_NODES

from params import tree
from params.weights import WeightValue

from . import registry
from . import target as targets
from .errors import LoweringError
from .once import differentiated_once
from .policy import COMPILED, MODE, Mode, Policy
from .target import TARGETS, Target
from .weights import PreparedWeight

F = TypeVar("F", bound=Callable[..., Any])
Refusal = Callable[..., "str | None"]
Order = Callable[..., "tuple[tuple[str, ...], str]"]
"""From a call's arguments, of which only shapes, dtypes and static ones may be read, to the names of kernels in the
order to try them, and one sentence that says why."""

REFERENCE = "torch"
MOST_CHOICES = 4096
"""Choices that an op remembers: calls of ever new shapes begin anew past it."""
FUSED = "fused"
"""Stands among the refused kernels for the operator that a target does not have."""

_PLAIN = frozenset({bool, int, float, str, type(None)})
"""Types of static arguments that stand for themselves in the key of a choice."""

SECOND = "a second derivative"
_DIFFERENTIATED = frozenset({"autograd", "grad", "jvp", SECOND})
"""Surroundings in which derivatives are taken. A tensor still has its values on the host there."""


@dataclass(frozen=True)
class Kernel:
    """One way to run an op.

    `refuse(*args, **kwargs)` reads shapes, dtypes and static arguments and returns `None`, or one sentence with the
    limit in it. `host_reads` marks a kernel that reads tensor values on the host: it is refused while a program is
    being traced or mapped. `batches=False` marks one whose operators have no batching rule: it is refused under vmap.
    `backward_once=True` marks one whose operators have a first derivative, in reverse mode, and no other: it is refused
    under jvp and where derivatives are nested; a second backward of autograd's, which cannot be foreseen, raises.
    `differentiable=False` marks one whose operators have no derivative at all: it is refused under every derivative.
    `eager=True` marks one that writes in place and loops to spare memory passes: it is refused where anything records
    or maps the operators (tracing, function transforms, gradients).
    `prepare(weight)` makes, once, the weight layout that the kernel wants, or returns None for a weight it leaves.
    `operators` are the operators outside Torch that it calls: it is refused where the target lacks one.
    `weights` are the kinds of weights that it reads, quantised ones and perhaps `Tensor`; without any it reads plain
    ones only. What `refuse` says includes what it does not read.
    `only_by_name=True` marks one that runs only where a policy names it.
    """

    name: str
    run: Callable[..., Any]
    targets: tuple[str, ...]
    refuse: Refusal | None = None
    host_reads: bool = False
    batches: bool = True
    backward_once: bool = False
    differentiable: bool = True
    eager: bool = False
    prepare: Callable[[Any], Any] | None = None
    operators: tuple[str, ...] = ()
    weights: tuple[type[WeightValue] | type[Tensor], ...] = ()
    only_by_name: bool = False

    @functools.cached_property
    def limited(self) -> bool:
        """Whether it is not for gradients, or not for all of them. Asked on every call."""
        return self.eager or not self.differentiable or self.backward_once

    def serves(self, target: Target) -> bool:
        """Whether the kernel was written for this target."""
        return target.name in self.targets

    def reads(self, weight: Any) -> bool:
        """Whether the kernel was written for weights of this kind, quantised or plain. The reference reads all."""
        return self.name == REFERENCE or isinstance(weight, self.weights or Tensor)


@dataclass(frozen=True)
class Choice:
    """The kernel that a call gets, and why not those tried before it, nor those that a rule of order puts later.

    `asked` is the op whose preference named the kernel: this one, or one that it contains; None without a preference.
    """

    op: str
    kernel: Kernel
    refused: dict[str, str]
    target: Target
    asked: str | None = None


class Op:
    """A dispatchable function. Call it; `explain` it; register kernels on it with `kernel`.

    `contains` names ops that are part of what it computes: a preference for one of them holds here too.
    """

    def __init__(self, body: Callable[..., Any], contains: tuple[str, ...] = (), *, replace: bool = False) -> None:
        functools.update_wrapper(self, body)
        self.contains = contains
        self.name = body.__name__
        self.body = body
        self.signature = inspect.signature(body)
        reference = Kernel(REFERENCE, body, tuple(TARGETS))
        self.kernels: dict[str, Kernel] = {REFERENCE: reference}
        self._choices: dict[Any, Choice] = {}
        self.dry_results: dict[Any, Any] = {}
        self.lacking: dict[str, str] = {}
        self.orders: dict[str, Order] = {}
        self._removed: set[str] = set()
        self._in_graph, self._trees_in_graph = _opaque(self)
        registry.add(self, replace=replace)

    def __repr__(self) -> str:
        return f"<op {self.name}: kernels {', '.join(self.kernels)}>"

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """An op is pickled and copied by name: there is one of each."""
        return registry.find, (self.name,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel chosen for this call."""
        if is_dynamo_compiling():
            assert COMPILED.key and _marked(self.name)  # read, and so guarded
            flat = all(isinstance(value, _FLAT) for value in args)
            return self._in_graph(*args, **kwargs) if flat else self._trees_in_graph(*args, **kwargs)
        mode, around = MODE.get(), ""
        # Asked here first, for it costs a call.
        if get_interpreter_stack() or forward_ad._current_level >= 0 or _len_torch_dispatch_stack():
            around = _surroundings()
        key = _key(mode.key, around, args, kwargs)
        try:  # as `_remembered`, which would cost a call
            choice = self._choices.get(key)
        except TypeError:
            choice = None
        choice = choice or self._first(key, mode, args, kwargs)
        kernel = choice.kernel
        differentiated = kernel.limited and _records_gradients(args)
        if differentiated:
            around = _with_autograd(around, args)
            key = _key(mode.key, around, args, kwargs)
            choice = self._remembered(key) or self._first(key, mode, args, kwargs)
            kernel = choice.kernel
        if mode.report is not None:
            mode.report.add(choice, args, kwargs)
        if mode.dry is not None:
            return mode.dry(self, choice, key, args, kwargs)
        if differentiated and kernel.backward_once and around in ("autograd", "grad"):
            return differentiated_once(self.name, kernel, around, args, kwargs)
        return kernel.run(*args, **kwargs)

    def _remembered(self, key: tuple[Any, ...]) -> Choice | None:
        try:
            return self._choices.get(key)
        except TypeError:  # a size is a symbol, which no later call can be told from
            return None

    def _first(self, key: tuple[Any, ...], mode: Mode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Choice:
        """The choice for a signature not seen before; `key[1]` are its surroundings."""
        choices = self._choices  # those of the kernels there are now: a thread may register another meanwhile
        choice = self.choose(mode, key[1], args, kwargs)
        if len(choices) >= MOST_CHOICES:
            choices = self._choices = {}
        with suppress(TypeError):  # of a key that holds symbols
            choices[key] = choice
        return choice

    def remember_dry(self, key: Any, result: Any) -> None:
        """Keep what a dry run found for a signature."""
        if len(self.dry_results) >= MOST_CHOICES:
            self.dry_results = {}
        self.dry_results[key] = result

    def kernel(
        self,
        name: str,
        *,
        targets: tuple[str, ...],
        refuse: Refusal | None = None,
        host_reads: bool = False,
        batches: bool = True,
        backward_once: bool = False,
        differentiable: bool = True,
        eager: bool = False,
        prepare: Callable[[Any], Any] | None = None,
        operators: tuple[str, ...] = (),
        weights: tuple[type[WeightValue] | type[Tensor], ...] = (),
        only_by_name: bool = False,
        replace: bool = False,
    ) -> Callable[[F], F]:
        """Register a kernel, for every call from now on; `remove` takes it away again.

        Kernels are tried in the order registered, the reference last; see `order_by`. With `only_by_name` it runs only
        where `lowering.use` names it. With `replace` it takes the place of the kernel of that name, if there is one, so
        that a notebook's cell can be run again.
        """

        def register(run: F) -> F:
            if name == REFERENCE or (name in self.kernels and not replace):
                fix = "it is the op's own body" if name == REFERENCE else "replace=True puts this one in its place"
                raise LoweringError(f"{self.name}: kernel {name!r} is registered twice; {fix}")
            if list(inspect.signature(run).parameters) != list(self.signature.parameters):
                raise LoweringError(
                    f"{self.name}: kernel {name!r} takes {inspect.signature(run)}, the op takes {self.signature}"
                )
            refused = _with_weights(name, weights, refuse)
            added = Kernel(
                name, run, targets, refused, host_reads, batches, backward_once, differentiable, eager, prepare,
                operators, weights, only_by_name,
            )  # fmt: skip
            # Threads that choose go on with the kernels there were.
            rest = {other: kernel for other, kernel in self.kernels.items() if other != REFERENCE}
            self.kernels = rest | {name: added, REFERENCE: self.kernels[REFERENCE]}
            self._removed.discard(name)
            self._forget_choices()
            return run

        return register

    def remove(self, name: str) -> None:
        """Take a kernel away: no call gets it any more, nor a captured program that was made with it."""
        if name == REFERENCE:
            raise LoweringError(f"{self.name}: {REFERENCE!r} is the op's own body, which cannot be removed")
        gone = self.kernel_named(name)
        self.kernels = {other: kernel for other, kernel in self.kernels.items() if kernel is not gone}
        self._removed.add(name)
        self._forget_choices()

    def _forget_choices(self) -> None:
        self._choices, self.dry_results = {}, {}
        registry.changed()

    def order_by(self, targets: tuple[str, ...], *, replace: bool = False) -> Callable[[Order], Order]:
        """Register the rule that orders the kernels on these targets by a call's shapes.

        The rule has the op's signature and returns names of kernels and one sentence that says why. Those that it does
        not name are tried after them, in the order registered; fused ones always come before portable ones. A kernel
        that a policy asks for is tried alone.
        """

        def register(rule: Order) -> Order:
            if list(inspect.signature(rule).parameters) != list(self.signature.parameters):
                raise LoweringError(
                    f"{self.name}: the rule of order takes {inspect.signature(rule)}, the op takes {self.signature}"
                )
            for target in targets:
                if target in self.orders and not replace:
                    raise LoweringError(f"{self.name}: a rule of order for {target} is given twice")
                self.orders[target] = rule
            self._forget_choices()
            return rule

        return register

    def without(self, targets: tuple[str, ...], reason: str) -> None:
        """Say why these targets have no operator of their own for this op; `explain` shows it as `fused`'s refusal."""
        for target in targets:
            if self.lacking.get(target, reason) != reason:
                raise LoweringError(f"{self.name}: a reason for {target} is given twice")
            self.lacking[target] = reason
        self._forget_choices()

    def serving(self, target: str | Target) -> list[Kernel]:
        """The kernels written for a target, in the order they are tried."""
        machine = targets.named(target)
        return [kernel for kernel in self.kernels.values() if kernel.serves(machine)]

    def kernel_named(self, name: str) -> Kernel:
        """The kernel called `name`, or `LoweringError` listing those there are."""
        if name not in self.kernels:
            raise LoweringError(f"{self.name}: no kernel {name!r}; there are: {', '.join(self.kernels)}")
        return self.kernels[name]

    def explain(self, *args: Any, target: str | Target | None = None, **kwargs: Any) -> Choice:
        """The choice for this call, without running it."""
        mode = MODE.get()
        chosen = mode.target if target is None else targets.named(target)
        surroundings = _surroundings()
        if _records_gradients(args):
            surroundings = _with_autograd(surroundings, args)
        return self.choose(Mode(mode.policy, chosen, dry=mode.dry), surroundings, args, kwargs)

    def choose(self, mode: Mode, surroundings: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Choice:
        """Try the kernels in order; `LoweringError` when the policy leaves none."""
        target = mode.target or targets.of_device(_device(args, kwargs))
        surroundings = "" if mode.dry is not None else surroundings or _without_values(args, kwargs)
        source, asked = mode.policy.asked(self) or (None, None)
        ordered, why = self._ordered(target, args, kwargs) if asked is None else ([self.kernel_named(asked)], "")
        rest = [] if asked else [kernel for kernel in self.kernels.values() if kernel not in ordered]
        refused = {FUSED: self.lacking[target.name]} if target.name in self.lacking and asked is None else {}
        tried = [*ordered, *rest]
        if ordered:
            # A rule weighs kernels of a kind; portable ones stand behind whatever is fused here.
            tried.sort(key=lambda kernel: _portable(kernel) or not kernel.serves(target))
        for kernel in tried:
            if kernel.name == REFERENCE and mode.policy.strict and asked is None:
                refused[kernel.name] = "strict=True leaves the Torch reference out"
                continue
            if kernel.only_by_name and asked is None:
                refused[kernel.name] = "runs only where it is asked for by name"
                continue
            reason = _refusal(kernel, target, surroundings, args, kwargs)
            if reason is None:
                if kernel.weights and not _portable(kernel):
                    refused.pop(FUSED, None)  # said of plain weights
                later = ordered[ordered.index(kernel) + 1 :] if kernel in ordered else []
                alike = [other for other in later if _portable(other) == _portable(kernel) and other.serves(target)]
                return Choice(self.name, kernel, refused | {other.name: why for other in alike}, target, source)
            refused[kernel.name] = reason
        if asked is not None and not self.kernels[asked].serves(target):
            raise LoweringError(self._elsewhere(self.kernels[asked], mode, surroundings, args, kwargs))
        raise LoweringError(_no_kernel(self, target, source, asked, refused, args, kwargs))

    def _ordered(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Kernel], str]:
        """The kernels that the target's rule of order names for this call, and the rule's sentence."""
        if target.name not in self.orders:
            return [], ""
        names, why = self.orders[target.name](*args, **kwargs)
        return [self.kernel_named(name) for name in names if name not in self._removed], why

    def _elsewhere(self, kernel: Kernel, mode: Mode, surroundings: str, args: Any, kwargs: Any) -> str:
        """What to say of a kernel asked for by name that was written for other targets."""
        governing = (self.name, *self.contains)
        prefer = {name: asked for name, asked in mode.policy.prefer.items() if name not in governing}
        target = mode.target or targets.of_device(_device(args, kwargs))
        free = Mode(Policy(prefer, mode.policy.strict), target, dry=mode.dry)
        *others, last = kernel.targets
        needed = f"{', '.join(others)} or {last}" if others else last
        return (
            f"{self.name}: kernel {kernel.name!r} needs {needed}, target is {target.name}; "
            f"use {self.choose(free, surroundings, args, kwargs).kernel.name!r} or drop the preference"
        )


@overload
def op(body: Callable[..., Any]) -> Op: ...
@overload
def op(*, contains: tuple[str, ...] = (), replace: bool = False) -> Callable[[Callable[..., Any]], Op]: ...
def op(
    body: Callable[..., Any] | None = None, *, contains: tuple[str, ...] = (), replace: bool = False
) -> Op | Callable[..., Op]:
    """Make a typed function an op: its body is the reference, its name the name users type.

    With `contains=("gemma_rms_norm",)` a preference for a kernel of that op holds for this one too, where it has a
    kernel of that name and nobody asked for one of its own. `replace` lets it take the place of an op of its name.
    """
    made = functools.partial(Op, contains=contains, replace=replace)
    return made if body is None else made(body)


_FLAT = (Tensor, int, float, str, type(None))
"""Types of arguments that any recorded call can hold."""


def _opaque(op: Op) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The op as Dynamo records it, one call whose kernel is chosen when the graph is lowered: of tensors, and of trees.

    Strict `torch.export` takes the first form alone.
    """

    def dispatched(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    def dispatched_trees(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    return dispatched, dispatched_trees


def _marked(name: str) -> bool:
    """Tell Dynamo to take an op as one call. It runs this while it traces, so that nobody else has to import Dynamo."""
    from torch._dynamo import trace_rules

    found = registry.find(name)
    for form in (found._in_graph, found._trees_in_graph):
        trace_rules._allowed_callable_ids.add(id(form))
    trace_rules._nonstrict_trace_callable_ids.add(id(found._trees_in_graph))
    return True


vars(_marked)["_dynamo_marked_constant"] = True


def _portable(kernel: Kernel) -> bool:
    return not kernel.operators


def _refusal(kernel: Kernel, target: Target, surroundings: str, args: Any, kwargs: Any) -> str | None:
    if not kernel.serves(target):
        return f"serves {', '.join(kernel.targets)}; target is {target.name}"
    if kernel.operators:
        from .npu.features import missing

        lacking = missing(kernel.operators, target)
        if lacking is not None:
            return lacking
    around = set(surroundings.split(" and ")) if surroundings else set()
    if kernel.host_reads and around - _DIFFERENTIATED:
        return f"reads lengths or ids on the host, which {surroundings} does not allow"
    if kernel.eager and surroundings:
        return f"writes in place, which {surroundings} does not allow"
    if not kernel.batches and "vmap" in around:
        return "has no batching rule, so it is left out under vmap"
    if not kernel.differentiable and around & _DIFFERENTIATED:
        return f"has no derivative, so it is left out under {surroundings}"
    if kernel.backward_once and "jvp" in around:
        return "has no forward derivative, so it is left out under jvp"
    if kernel.backward_once and SECOND in around:
        return f"has a first derivative alone, so it is left out under {SECOND}"
    return None if kernel.refuse is None else kernel.refuse(*args, **kwargs)


def _with_weights(name: str, kinds: tuple[type, ...], refuse: Refusal | None) -> Refusal:
    """A kernel's refusal, after that of weights in a form that it was not written for."""

    def refused(*args: Any, **kwargs: Any) -> str | None:
        return unread_weight(name, kinds, (*args, *kwargs.values())) or (refuse and refuse(*args, **kwargs))

    return refused


def unread_weight(name: str, kinds: tuple[type, ...], values: tuple[Any, ...]) -> str | None:
    """A sentence about a weight that the kernel of this name, which reads weights of these kinds, does not read."""
    owners = [value.kernels for value in values if isinstance(value, PreparedWeight)]
    if any(name not in names for names in owners):
        return f"takes no weight that was prepared for {', '.join(owners[0])}"
    special = [value for value in values if isinstance(value, WeightValue)]
    for value in special:
        if not isinstance(value, kinds):
            return f"takes no {type(value).__name__} ({value.scheme})"
    if kinds and Tensor not in kinds and not special and not owners:
        return f"takes {' and '.join(kind.__name__ for kind in kinds)}; the weight of this call is plain"
    return None


def _no_kernel(
    op: Op, target: Target, source: str | None, asked: str | None, refused: dict[str, str], args: Any, kwargs: Any
) -> str:
    names = list(op.signature.parameters)
    shown = [f"{name}={tree.describe(value)}" for name, value in zip(names, args, strict=False)]
    shown += [f"{name}={tree.describe(value)}" for name, value in kwargs.items()]
    head = f"kernel {asked!r} was asked for by name" if asked else "no kernel takes this call"
    if source is not None and source != op.name:
        head += f", for every op that contains {source},"
    fix = f'allow its reference with lowering.use({op.name}="{REFERENCE}"), or leave strict=True out'
    if asked:
        others = [name for name, kernel in op.kernels.items() if name != asked and kernel.serves(target)]
        fix = f"ask for another kernel: {', '.join(others) or 'none'}"
    reasons = "\n".join(f"  {name}: {reason}" for name, reason in refused.items())
    called = f"  called with {', '.join(shown)}"
    return f"{op.name}: {head} on target {target.name}\n{reasons}\n{called}\n  to fix: change the call, or {fix}"


def _key(mode: int, surroundings: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What the choice may depend on: never values.

    This runs on every op call, so it is flat. The tensors of a call lie on one device: the first speaks for all.
    """
    try:
        device = args[0].device
    except (IndexError, AttributeError):
        device = None
    key: list[Any] = [mode, surroundings, device, *kwargs]
    for value in args:
        if type(value) is Tensor:
            key.append(value.shape)
            key.append(value.dtype)
        else:
            key.append(_static(value))
    for value in kwargs.values():
        key.append(value if type(value) in _PLAIN else _static(value))
    return tuple(key)


def _static(value: Any) -> Any:
    if isinstance(value, Tensor):
        return type(value), value.shape, value.dtype, value.device
    return value.static_key() if hasattr(value, "static_key") else value


def _surroundings() -> str:
    """What records, maps or differentiates operators here, joined by " and "; an empty string where they just run."""
    stack, forward = get_interpreter_stack(), forward_ad._current_level >= 0
    if not (stack or forward):
        return "tracing" if _len_torch_dispatch_stack() else ""
    keys = [level.key() for level in stack or ()]
    # Of forward mode every level counts, and one that is not a transform's: `linearize` and `dual_level` make those.
    jvps, grads = max(keys.count(TransformType.Jvp), forward), keys.count(TransformType.Grad)
    found = {
        "tracing": _len_torch_dispatch_stack(),
        "vmap": TransformType.Vmap in keys,
        "jvp": jvps,
        "grad": grads,
        SECOND: jvps + grads > 1,
        "functionalize": TransformType.Functionalize in keys,
    }
    return " and ".join(name for name, here in found.items() if here)


def _with_autograd(around: str, args: tuple[Any, ...]) -> str:
    """`around` where `args` require gradients: those of a transform's own, or autograd's beneath it, which are more."""
    if not any(_innermost(x).requires_grad for x in _tensors(args)):
        return around
    word = SECOND if "grad" in around or "jvp" in around else "autograd"
    return f"{around} and {word}" if around else word


def _innermost(x: Tensor) -> Tensor:
    """The tensor beneath those that function transforms have wrapped around it."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def _records_gradients(args: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in _tensors(args))


def _without_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    tensors = _tensors((*args, *kwargs.values()))
    return "a tensor without values" if any(x.is_meta or isinstance(x, FakeTensor) for x in tensors) else ""


def _tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    """The tensors among `values`, and in those that are trees."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) in SUPPORTED_NODES:
            yield from (leaf for leaf in tree.leaves(value) if isinstance(leaf, Tensor))


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for value in (*args, *kwargs.values()):
        device = getattr(value, "device", None)
        if isinstance(device, torch.device):
            return device
    raise LoweringError("an op was called without any tensor, so its target cannot be known; name one with use()")
