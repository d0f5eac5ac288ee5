"""Ops and kernels, and the one loop that chooses between them.

An op is a typed function whose body is its reference. Kernels are registered beside it and must have the same
signature. A call looks up the choice by its static signature (shapes, dtypes, device, static arguments, policy,
target); the first call of a signature runs the loop in `Op.choose`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar, overload

from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import get_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from params import tree
from params.weights import WeightValue

from . import detect
from . import target as targets
from .errors import LoweringError
from .kernel import FUSED, REFERENCE, Choice, Kernel, Refusal, with_weights
from .once import differentiated_once
from .policy import COMPILED, EVIDENCE, MODE, Mode, Policy
from .rows import Rows
from .signature import OpCall, key_of, records_gradients, surroundings, with_autograd, without_values
from .target import TARGETS, Target

F = TypeVar("F", bound=Callable[..., Any])
Order = Callable[..., "tuple[tuple[str, ...], str]"]
"""From a call's arguments, of which only shapes, dtypes and static ones may be read, to the names of kernels in the
order to try them, and one sentence that says why."""

MOST_CHOICES = 4096
"""Choices that an op remembers: calls of ever new shapes begin anew past it."""


class Op:
    """A dispatchable function. Call it; `explain` it; register kernels on it with `kernel`.

    `contains` names ops that are part of what it computes: a preference for one of them holds here too. What a default
    has decided about a call, `remark(target, *args, **kwargs)` may tell, for reports: a sentence or None.
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
        self.remark: Callable[..., str | None] = lambda *args, **kwargs: None
        self._removed: set[str] = set()
        self._in_graph, self._trees_in_graph = _opaque(self)
        if self.name in OPS and not replace:
            raise LoweringError(f"op {self.name!r} is registered twice; with replace=True this one takes its place")
        OPS[self.name] = self
        _changed()

    def __repr__(self) -> str:
        return f"<op {self.name}: kernels {', '.join(self.kernels)}>"

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """An op is pickled and copied by name: there is one of each."""
        return find, (self.name,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel chosen for this call."""
        if is_dynamo_compiling():
            assert COMPILED.key and _marked(self.name)  # read, and so guarded
            at, args = _apart(args)
            flat = all(isinstance(value, _FLAT) for value in args)
            return self._in_graph(at, *args, **kwargs) if flat else self._trees_in_graph(at, *args, **kwargs)
        mode, around = MODE.get(), ""
        # Asked here first, for it costs a call.
        if get_interpreter_stack() or forward_ad._current_level >= 0 or _len_torch_dispatch_stack():
            around = surroundings()
        key = key_of(mode.key, around, args, kwargs)
        try:  # as `_remembered`, which would cost a call
            choice = self._choices.get(key)
        except TypeError:
            choice = None
        choice = choice or self._first(key, mode, args, kwargs)
        kernel = choice.kernel
        differentiated = kernel.limited and records_gradients((*args, *kwargs.values()))
        if differentiated:
            around = with_autograd(around, (*args, *kwargs.values()))
            key = key_of(mode.key, around, args, kwargs)
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
        available: Callable[[Target, str], str | None] | None = None,
        evidence: Callable[[Target], str] | None = None,
        loaded: Callable[[], bool] | None = None,
        remark: Callable[[Target], str] | None = None,
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
            refused = with_weights(name, weights, refuse)
            added = Kernel(
                name, run, targets, refused, host_reads, batches, backward_once, differentiable, eager, prepare,
                operators, weights, only_by_name, available, evidence, loaded, remark,
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
        _changed()

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
            raise LoweringError(f"{self.name}: no kernel {name!r:.100}; there are: {', '.join(self.kernels)}")
        return self.kernels[name]

    def asked(self, policy: Policy) -> tuple[str, str] | None:
        """The op whose preference governs this one, and the kernel it names; None where nobody asked.

        Its own preference comes first, then that of an op it contains, if it has a kernel of the name.
        """
        if not policy.prefer:
            return None
        if self.name in policy.prefer:
            return self.name, policy.prefer[self.name]
        found = ((name, policy.prefer[name]) for name in self.contains if name in policy.prefer)
        return next(((name, kernel) for name, kernel in found if kernel in self.kernels), None)

    def explain(self, *args: Any, target: str | Target | None = None, **kwargs: Any) -> Choice:
        """The choice for this call, without running it."""
        mode, around = MODE.get(), surroundings()
        chosen = mode.target if target is None else targets.named(target)
        if records_gradients((*args, *kwargs.values())):
            around = with_autograd(around, (*args, *kwargs.values()))
        return self.choose(Mode(mode.policy, chosen, dry=mode.dry), around, args, kwargs)

    def candidates(
        self, policy: Policy, target: Target, call: OpCall | None = None
    ) -> Iterator[tuple[Kernel, str | None]]:
        """The kernels in the order to try them, each with what refuses it, or None: the first without is chosen.

        A kernel that the policy asks for stands alone; naming it is enough where CANN's statement is all that speaks
        for it. Where no call is known, nothing that depends on one refuses a
        kernel or moves it forward.
        """
        asked = self.asked(policy)
        if asked is not None:
            kernel = self.kernel_named(asked[1])
            yield kernel, kernel.refusal(target, call, EVIDENCE[-1])
            return
        known = list(self.kernels.values())
        for kernel in known if call is None or not self.orders else self._weighed(known, target, call):
            if kernel.name == REFERENCE and policy.strict:
                yield kernel, "strict=True leaves the Torch reference out"
            elif kernel.only_by_name:
                yield kernel, "runs only where it is asked for by name"
            else:
                yield kernel, kernel.refusal(target, call, policy.evidence)

    def _weighed(self, known: list[Kernel], target: Target, call: OpCall) -> list[Kernel]:
        first, _ = self._ordered(target, call)
        if not first:
            return known
        tried = [*first, *(kernel for kernel in known if kernel not in first)]
        # A rule weighs kernels of a kind; portable ones stand behind whatever is fused here.
        return sorted(tried, key=lambda kernel: kernel.portable or not kernel.serves(target))

    def _ordered(self, target: Target, call: OpCall) -> tuple[list[Kernel], str]:
        """The kernels that the target's rule of order names for a call, and the rule's sentence."""
        if target.name not in self.orders:
            return [], ""
        names, why = self.orders[target.name](*call.args, **call.kwargs)
        return [self.kernel_named(name) for name in names if name not in self._removed], why

    def choose(self, mode: Mode, around: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Choice:
        """The first kernel that nothing refuses; `LoweringError` when the policy leaves none."""
        call = OpCall(args, kwargs, "" if mode.dry is not None else around or without_values(args, kwargs))
        target = mode.target or detect.of_device(call.device)
        source, asked = self.asked(mode.policy) or (None, None)
        refused = {FUSED: self.lacking[target.name]} if target.name in self.lacking and asked is None else {}
        for kernel, reason in self.candidates(mode.policy, target, call):
            if reason is None:
                if kernel.weights and not kernel.portable:
                    refused.pop(FUSED, None)  # said of plain weights
                if self.orders and asked is None:
                    refused |= self._passed_over(kernel, target, call)
                return Choice(self.name, kernel, refused, target, source)
            refused[kernel.name] = reason
        if asked is not None and not self.kernels[asked].serves(target):
            raise LoweringError(self._elsewhere(self.kernels[asked], mode, target, call))
        raise LoweringError(_no_kernel(self, target, source, asked, refused, call))

    def _passed_over(self, kernel: Kernel, target: Target, call: OpCall) -> dict[str, str]:
        """The kernels of its kind that a rule of order puts behind the one that is chosen, each with the rule's why."""
        ordered, why = self._ordered(target, call)
        later = ordered[ordered.index(kernel) + 1 :] if kernel in ordered else []
        return {one.name: why for one in later if one.portable == kernel.portable and one.serves(target)}

    def _elsewhere(self, kernel: Kernel, mode: Mode, target: Target, call: OpCall) -> str:
        """What to say of a kernel asked for by name that was written for other targets."""
        governing = (self.name, *self.contains)
        prefer = {name: asked for name, asked in mode.policy.prefer.items() if name not in governing}
        free = Mode(replace(mode.policy, prefer=prefer), target, dry=mode.dry)
        *others, last = kernel.targets or ("a machine that it is on record for",)
        needed = f"{', '.join(others)} or {last}" if others else last
        return (
            f"{self.name}: kernel {kernel.name!r} needs {needed}, target is {target.name}; "
            f"use {self.choose(free, call.around, call.args, call.kwargs).kernel.name!r} or drop the preference"
        )


OPS: dict[str, Op] = {}
"""Every op by its name."""

_changes = itertools.count(1)
_version = 0


def version() -> int:
    """Another number after every change of ops and kernels: what was captured before may hold other choices."""
    return _version


def _changed() -> None:
    global _version
    _version = next(_changes)


def find(name: str) -> Op:
    """The op called `name`; `LoweringError` names the nearest one."""
    found = OPS.get(name)
    if found is None:
        near = difflib.get_close_matches(name, OPS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known ops: {', '.join(sorted(OPS))}"
        raise LoweringError(f"unknown op {name!r:.100}{hint}")
    return found


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

    def dispatched(at: int | None, *args: Any, **kwargs: Any) -> Any:
        return op(*_joined(at, args), **kwargs)

    def dispatched_trees(at: int | None, *args: Any, **kwargs: Any) -> Any:
        return op(*_joined(at, args), **kwargs)

    return dispatched, dispatched_trees


def _apart(args: tuple[Any, ...]) -> tuple[int | None, tuple[Any, ...]]:
    """The place of rows among the arguments, and these with the rows' parts there: Dynamo's sizes may be symbols.

    Rows of a state, of which the host knows more, stay as they are.
    """
    for at, value in enumerate(args):
        if isinstance(value, Rows) and value.host is None:
            parts = (value.query_start, value.lengths, value.page_table, value.max_query, value.uniform)
            return at, (*args[:at], *parts, *args[at + 1 :])
    return None, args


def _joined(at: int | None, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments that `_apart` took apart."""
    if at is None:
        return args
    *tensors, most, uniform = args[at : at + 5]
    return (*args[:at], Rows(*tensors, max_query=most, uniform=uniform), *args[at + 5 :])


def _marked(name: str) -> bool:
    """Tell Dynamo to take an op as one call. It runs this while it traces, so that nobody else has to import Dynamo."""
    from torch._dynamo import trace_rules

    found = find(name)
    for form in (found._in_graph, found._trees_in_graph):
        trace_rules._allowed_callable_ids.add(id(form))
    trace_rules._nonstrict_trace_callable_ids.add(id(found._trees_in_graph))
    return True


vars(_marked)["_dynamo_marked_constant"] = True


def _no_kernel(
    op: Op, target: Target, source: str | None, asked: str | None, refused: dict[str, str], call: OpCall
) -> str:
    names = list(op.signature.parameters)
    shown = [f"{name}={tree.describe(value)}" for name, value in zip(names, call.args, strict=False)]
    shown += [f"{name}={tree.describe(value)}" for name, value in call.kwargs.items()]
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
