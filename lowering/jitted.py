"""`jit`: a function captured once for each shape of its arguments, and replayed from then on.

    step = lowering.jit(model.forward, donate=("state",))
    out, state = step(params, state, batch, logits="last")

The host's part of a function (checks, pages, lengths) is Python, and a replay runs none of it. A function that has such
a part says so with `host_side`, and a call then runs that, and the replay in place of the function.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch._C._functorch import get_interpreter_stack

from .buckets import Bucket, Buckets, NoBucketError, idle
from .errors import CaptureError, RecaptureWarning
from .graphs import BACKENDS, Capture, Flat, flattened, trace
from .host import tracing
from .policy import MODE
from .stages import Lowered, lower
from .target import Target

F = TypeVar("F", bound=Callable[..., Any])

DONATED = "donated to a captured call"


@dataclass(frozen=True)
class HostSide:
    """What the host has done before a replay, and has left to do after it.

    `arguments` replace those of the call, `after` completes the result.
    """

    arguments: dict[str, Any]
    after: Callable[[Any], Any]


def host_side(side: Callable[..., HostSide]) -> Callable[[F], F]:
    """Say what the host's part of a function is: `side(fit, *args, **kwargs)`, called with the function's arguments.

    `fit(batch)` pads a batch to its bucket. What the part raises reaches the caller before anything has run.
    """

    def mark(function: F) -> F:
        vars(function)["host_side"] = side
        return function

    return mark


def jit(
    function: Callable[..., Any],
    donate: Sequence[str] = (),
    buckets: Sequence[int] | None = None,
    backend: str | None = None,
) -> Jitted:
    """`function` as captured programs: traced once for each key, compiled, and replayed.

    The key is the policy and target in force, and the dtypes, shapes and static fields of all arguments. Batches are
    padded to one of `buckets` (token counts; powers of two by default) and results cut to what was asked for; a larger
    batch runs uncaptured, and a `RecaptureWarning` says so once. A change of anything but the batch's size captures
    again, and one says so once for each reason.

    Arguments named in `donate` (states) are updated in place: the result holds their buffers, and the old value raises
    when it is used again. All other results are tensors of their own, which later replays leave alone. `backend` is
    "inductor" (the default: compiled) or "fx" (operator by operator, to the last bit what was traced).

    Kernels that read values on the host or write in place are not for tracing, so a captured call may choose others
    than a plain one. No gradients are recorded. Under function transforms and inside another trace the function itself
    runs. Raises `CaptureError` for a function that reads values from the device, or that cannot be captured otherwise.
    """
    return Jitted(function, donate, buckets, backend)


class Jitted:
    """A function with its captures. Call it as the function. `captures` counts them."""

    def __init__(
        self, function: Callable[..., Any], donate: Sequence[str], buckets: Sequence[int] | None, backend: str | None
    ) -> None:
        self.function = function
        self.name = getattr(inspect.unwrap(_innermost(function)), "__name__", type(function).__name__)
        self.signature = inspect.signature(function)
        self.donate = (donate,) if isinstance(donate, str) else tuple(donate)
        self.buckets = Buckets.of(buckets)
        self.backend = next(iter(BACKENDS)) if backend is None else backend
        self.captures = 0
        self._side = _host_side(function)
        self._graphs: dict[tuple[Any, ...], Capture] = {}
        self._seen: list[dict[str, Any]] = []
        self._numbers: dict[Any, int] = {}
        # A model has hundreds of leaves: taking its parameters apart anew would cost more than a replay of a small one.
        self._known: dict[str, tuple[weakref.ref[Any], Flat, int]] = {}
        self._said: set[str] = set()
        if self.backend not in BACKENDS:
            raise ValueError(f"jit: backend={backend!r} is not known; there are: {', '.join(BACKENDS)}")
        for name in self.donate:
            if name not in self.signature.parameters:
                raise ValueError(
                    f"jit: donate names {name!r}, and {self.name} takes {', '.join(self.signature.parameters)}"
                )

    def __repr__(self) -> str:
        return f"jit({self.name}, donate={self.donate!r}, backend={self.backend!r}, {self.captures} captures)"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result, by replaying its capture for arguments like these; captured now if there is none."""
        if tracing() or get_interpreter_stack():
            return self.function(*args, **kwargs)
        given = self._bound(args, kwargs)
        try:
            side = self._host_side(self.buckets.fit, given, args, kwargs)
        except NoBucketError as reason:
            self._say("bucket", f"{reason}; it runs uncaptured", above=1)
            result = self.function(*args, **kwargs)
            self._mark_donated(given)
            return result
        flats, capture = self._captured(given | side.arguments)
        result = capture.replay([x for flat in flats.values() for x in flat.tensors])
        # Only now: whatever failed before has left the donated values as they were.
        self._mark_donated(given)
        return side.after(result)

    def warm(self, buckets: Iterable[Bucket], *args: Any, **kwargs: Any) -> None:
        """Capture for `buckets` now, with a progress bar on a terminal; nothing is computed.

        The arguments are those of a call, and the batch among them says how many rows there are. A bucket is a number
        of tokens, or a pair of it and the most tokens of one row: `(rows, 1)` decodes, `(rows * 4, 4)` verifies.
        """
        given = self._bound(args, kwargs)
        batches = [name for name, value in given.items() if _is_batch(value)]
        if len(batches) != 1:
            raise ValueError(f"warm: {self.name} was given {len(batches)} batches; buckets are sizes of one")
        sizes = list(buckets)
        console = Console(stderr=True)
        shown = track(sizes, "capturing", console=console, transient=True) if console.is_terminal else sizes
        for bucket in shown:
            self._captured(given | {batches[0]: idle(given[batches[0]], bucket)})

    def ahead(self, *args: Any, **kwargs: Any) -> Jitted:
        """Capture for arguments like these now, computing nothing; this function itself."""
        self._captured(self._prepared(args, kwargs))
        return self

    def lower(self, *args: Any, target: str | Target | None = None, **kwargs: Any) -> Lowered:
        """The function lowered for arguments like these, batches padded to their bucket; `.compile()` captures it."""
        given = self._prepared(args, kwargs)
        bound = inspect.BoundArguments(self.signature, given)
        found = lower(self.function, *bound.args, target=target, **bound.kwargs)
        return replace(found, capture=partial(self.ahead, *args, **kwargs)) if found.capture else found

    def _prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments as a call would hand them to a replay."""
        given = self._bound(args, kwargs)
        return given | self._host_side(self.buckets.fit, given, args, kwargs).arguments

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def _host_side(self, fit: Callable[[Any], Any], given: Mapping[str, Any], args: Any, kwargs: Any) -> HostSide:
        if self._side is not None:
            return self._side(fit, *args, **kwargs)
        for name, value in given.items():
            if hasattr(value, "mark_used"):
                raise CaptureError(
                    f"jit: {name!r} is a {type(value).__name__}, whose lengths and pages are counted on the host, and "
                    f"{self.name} does not say how (lowering.host_side); jit the functions that it calls instead"
                )
        return HostSide({}, lambda result: result)

    def _donated(self, given: Mapping[str, Any]) -> list[str]:
        return [name for name in self.donate if given[name] is not None]

    def _mark_donated(self, given: Mapping[str, Any]) -> None:
        for name in self._donated(given):
            given[name].mark_used(DONATED)

    def _flat(self, name: str, value: Any) -> tuple[Flat, int]:
        """An argument taken apart, and a number for its part of the key. The last one of each name is remembered."""
        known = self._known.get(name)
        if known is not None and known[0]() is value:
            return known[1:]
        flat = flattened(value)
        try:
            number = self._numbers.setdefault((flat.structure, flat.dtypes, flat.shapes), len(self._numbers))
        except TypeError:
            raise CaptureError(
                f"jit: {name!r} holds a value that is no tensor and cannot be told from others: {value!r:.100}; give "
                "tensors, numbers, strings or other hashable values"
            ) from None
        if hasattr(value, "__weakref__"):
            self._known[name] = (weakref.ref(value, partial(self._forget, name)), flat, number)
        return flat, number

    def _forget(self, name: str, reference: weakref.ref[Any]) -> None:
        """Keep no tensors of an argument that nobody holds any more."""
        if name in self._known and self._known[name][0] is reference:
            del self._known[name]

    def _captured(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Flat], Capture]:
        """The arguments taken apart, and the capture for them."""
        found = {name: self._flat(name, value) for name, value in arguments.items()}
        flats = {name: flat for name, (flat, _) in found.items()}
        key = (MODE.get().key, *((name, number) for name, (_, number) in found.items()))
        capture = self._graphs.get(key)
        if torch.is_grad_enabled():
            _check_gradients(flats)
        if capture is None:
            _check_devices(flats)
            capture = self._graphs[key] = self._capture(arguments, flats)
            self.captures += 1
            self._tell_changes({name: flat for name, flat in flats.items() if not _is_batch(arguments[name])})
        pools = tuple(x.data_ptr() for value in arguments.values() if hasattr(value, "pools") for x in value.pools())
        if pools not in capture.pools:
            if capture.pools:
                self._say("pool", "captured again, over another pool of pages; the compiled code is kept", above=2)
                self.captures += 1
            capture.pools.add(pools)
        return flats, capture

    def _capture(self, arguments: Mapping[str, Any], flats: dict[str, Flat]) -> Capture:
        for name in self._donated(arguments):
            if not hasattr(arguments[name], "mark_used"):
                raise CaptureError(f"jit: {name!r} is a {type(arguments[name]).__name__}; only states can be donated")
        staged = [name for name, value in arguments.items() if isinstance(value, Tensor) or _is_batch(value)]

        def call(arguments: dict[str, Any]) -> Any:
            bound = inspect.BoundArguments(self.signature, arguments)
            return self.function(*bound.args, **bound.kwargs)

        program = trace(call, flats, self._donated(arguments), staged)
        inputs = [x for flat in flats.values() for x in flat.tensors]
        ends = {name: len(flat.tensors) for name, flat in flats.items()}
        with torch.no_grad():
            run = BACKENDS[self.backend](program.graph, inputs)
        places, at = [], 0
        for name, count in ends.items():
            places += range(at, at + count) if name in staged else ()
            at += count
        return Capture(program, run, Capture.buffers_for(inputs, places))

    def _tell_changes(self, flats: Mapping[str, Flat]) -> None:
        """Say why a call like an earlier one is captured again. The batch is left out: another size is no reason."""
        now: dict[str, Any] = {"": MODE.get().key}
        now |= {name: (flat.structure, flat.dtypes, flat.shapes) for name, flat in flats.items()}
        nearest = min(self._seen, key=lambda then: sum(then[name] != now[name] for name in now), default=now)
        self._seen.append(now)
        for name in now:
            if now[name] != nearest[name]:
                self._say(*_change(name, nearest[name], now[name]), above=3)

    def _say(self, reason: str, what: str, above: int) -> None:
        """Warn once for each reason, at the line of the caller, `above` functions of ours away."""
        if reason not in self._said:
            self._said.add(reason)
            warnings.warn(f"jit({self.name}): {what}", RecaptureWarning, stacklevel=above + 2)


def _check_devices(flats: Mapping[str, Flat]) -> None:
    for name, flat in flats.items():
        elsewhere = {x.device.type for x in flat.tensors} - {"cpu"}
        if elsewhere:
            raise CaptureError(f"jit: {name!r} lies on {', '.join(elsewhere)}; captures run on the CPU only so far")


def _check_gradients(flats: Mapping[str, Flat]) -> None:
    for name, flat in flats.items():
        if flat.requires_grad:
            raise CaptureError(
                f"jit: {name!r} requires gradients, and captured code records none; call it under torch.no_grad(), or "
                "differentiate the plain function"
            )


def _change(name: str, then: Any, now: Any) -> tuple[str, str]:
    """A word for what makes a call differ from an earlier one, and a sentence."""
    again = "both captures are kept"
    if not name:
        return "policy", f"captured again, under another policy or target; {again}"
    kinds = ("structure", "dtypes", "shapes")
    kind = next(kind for kind, one, other in zip(kinds, then, now, strict=True) if one != other)
    statics = [structure[2] for structure, dtypes, _ in (then, now) if not dtypes]
    if len(statics) == 2:
        return (
            name,
            f"captured again, since {name!r} changed from {_shown(statics[0])} to {_shown(statics[1])}; {again}",
        )
    kind = "structure or a static field" if kind == "structure" else kind
    return f"{kind} of {name}", f"captured again, since the {kind} of {name!r} changed; {again}"


def _shown(statics: tuple[Any, ...]) -> str:
    return repr(statics[0] if len(statics) == 1 else statics)


def _is_batch(value: Any) -> bool:
    return hasattr(value, "pad") and hasattr(value, "idle")


def _innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    return _innermost(function.func) if isinstance(function, partial) else function


def _host_side(function: Callable[..., Any]) -> Callable[..., HostSide] | None:
    """The host's part of a function: of a method with its object, of a partial with its arguments."""
    if isinstance(function, partial):
        side = _host_side(function.func)
        if side is None:
            return None
        return lambda fit, *args, **kwargs: side(fit, *function.args, *args, **(function.keywords | kwargs))
    side = getattr(function, "host_side", None)
    owner = getattr(function, "__self__", None)
    if side is None or owner is None:
        return side
    return lambda fit, *args, **kwargs: side(fit, owner, *args, **kwargs)
