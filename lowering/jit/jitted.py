"""`jit`: a function captured once for each shape of its arguments, and replayed from then on.

    step = lowering.jit(model.forward, donate=("state",))
    out, state = step(params, state, batch, logits="last")

The host's part of a function (checks, pages, lengths) is Python, and a replay runs none of it: it is noted on a tape
while the function is traced, and a call plays that, and the replay in place of the function.
"""

from __future__ import annotations

import inspect
import itertools
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._C._functorch import get_interpreter_stack
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef

from params.modes import lasting
from params.tree import items

from ..dryrun.traced import traced
from ..errors import CaptureError, RecaptureWarning
from ..explain.stages import Lowered
from ..host import tracing
from ..op import version
from ..policy import MODE
from ..protocols import Carried, HostValued, Ragged
from ..target import Target
from .backends import BACKENDS, DEFAULTS
from .buckets import Bucket, Buckets, NoBucketError, idle
from .capture import MOST_PLACES, TRACING, Backend, Capture, Placed, Rehearsal
from .program import Flat, flattened, trace
from .tape import HostCall

F = TypeVar("F", bound=Callable[..., Any])

DONATED = "donated to a captured call"
FAILED = "partly overwritten by a captured call that failed"
FACTS = "what the host knows"

MOST_CAPTURES = 256
"""Captures that a function keeps: past it the one goes that was used the longest ago."""
MOST_NUMBERS = 16 * MOST_CAPTURES
"""Structures of arguments that are known by a number before those go that no capture has."""
MOST_COMPARED = 64
"""Earlier calls that a new one is compared with, to say why it is captured again."""


def captured_with(prepare: Callable[..., dict[str, Any]]) -> Callable[[F], F]:
    """Say what a function is captured with in the place of some arguments: what `prepare(fit, *args, **kwargs)` gives.

    It is called with the function's arguments; `fit(batch)` pads a batch to its bucket, which is done anyway to those
    that it leaves. For arguments in forms that a graph does not take, or as long as a batch is.
    """

    def mark(function: F) -> F:
        vars(function)["captured_with"] = prepare
        return function

    return mark


def jit(
    function: Callable[..., Any],
    donate: Sequence[str] = (),
    buckets: Sequence[int] | None = None,
    backend: str | None = None,
    watch: Callable[[], AbstractContextManager[object]] | None = None,
    fixed: Sequence[str] = ("params",),
) -> Jitted:
    """`function` as captured programs: traced once for each key, compiled, and replayed.

    The key is the policy and target in force, the dtypes, shapes and static fields of all arguments, and whether row
    lengths are known on the host or only bounds of them. Batches are padded to one of `buckets` (token counts; powers
    of two by default) and results cut to what was asked for; a larger batch runs uncaptured, and a `RecaptureWarning`
    says so once. A change of anything but the batch's size captures again, and one says so once for each reason.

    Arguments named in `donate` (states) are updated in place: the result holds their buffers, and the old value raises
    when it is used again; so it does when a replay fails half-way, which leaves it partly overwritten. All other
    results are tensors of their own, which later replays leave alone.

    `backend` is "inductor" (compiled; the default on CPUs), "fx" (operator by operator, to the last bit what was
    traced), "cuda" (CUDA graphs; the default there) or "npu" (NPU graphs, whose attention operators are given the row
    lengths of each replay in an update before it; the default there). Graphs of a device read tensors where they lay at
    capture: pools of pages, what is written in place, and the arguments named in `fixed` (parameters) must stay there,
    or one is captured again and says so once; all others are copied into buffers of the capture.

    Kernels that read values on the host or write in place are not for tracing, so a captured call may choose others
    than a plain one. Lists that kernels compute from row lengths on the host are computed anew in every replay.
    `watch()` is entered around each capture, and no warnings are given then: who watches expects them. No gradients are
    recorded. Under function transforms and inside another trace the function itself runs. Raises `CaptureError` for a
    function that reads values from the device or branches on a row length, or that cannot be captured otherwise.

    Any number of threads may call: a capture is replayed by one at a time (on a device any capture is), and one at a
    time captures. A state belongs to one thread at a time. The last 256 captures that were used are kept.
    """
    return Jitted(function, donate, buckets, backend, watch, fixed)


class Jitted:
    """A function with its captures. Call it as the function. `captures` counts them."""

    def __init__(
        self,
        function: Callable[..., Any],
        donate: Sequence[str],
        buckets: Sequence[int] | None,
        backend: str | None,
        watch: Callable[[], AbstractContextManager[object]] | None = None,
        fixed: Sequence[str] = ("params",),
    ) -> None:
        self.function = function
        self.name = getattr(inspect.unwrap(_innermost(function)), "__name__", type(function).__name__)
        self.signature = inspect.signature(function)
        self.donate = (donate,) if isinstance(donate, str) else tuple(donate)
        self.buckets = Buckets.of(buckets)
        self.backend = backend
        self.fixed = frozenset(fixed)
        self.captures = 0
        self._watch = watch
        self._prepare = _prepare_of(function)
        self._graphs: dict[tuple[Any, ...], Capture] = {}
        self._backends: dict[str, Backend] = {}
        self._seen: deque[dict[str, Any]] = deque(maxlen=MOST_COMPARED)
        # Found without a lock by those who replay, so that a number must never stand for two structures.
        self._numbers: dict[Any, int] = {}
        self._counter = itertools.count()
        self._lock = threading.RLock()
        # A model has hundreds of leaves: taking its parameters apart anew would cost more than a replay of a small one.
        self._known: dict[str, tuple[weakref.ref[Any], Flat, int]] = {}
        self._said: dict[str, object] = {}
        if backend is not None and backend not in BACKENDS:
            raise ValueError(f"jit: backend={backend!r:.100} is not known; there are: {', '.join(BACKENDS)}")
        named = [("donate", name) for name in self.donate]
        named += [("fixed", name) for name in self.fixed - {"params"}]
        for option, name in named:
            if name not in self.signature.parameters:
                takes = ", ".join(self.signature.parameters)
                raise ValueError(f"jit: {option} names {name!r:.100}, and {self.name} takes {takes}")

    def __repr__(self) -> str:
        backend = self.backend or " or ".join(DEFAULTS.values())
        return f"jit({self.name}, donate={self.donate!r}, backend={backend}, {self.captures} captures)"

    @lasting
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result, by replaying its capture for arguments like these; captured now if there is none."""
        if tracing() or get_interpreter_stack() or forward_ad._current_level >= 0:
            return self.function(*args, **kwargs)
        given = self._bound(args, kwargs)
        try:
            arguments = self._prepared(given, args, kwargs)
        except NoBucketError as reason:
            self._say("bucket", f"{reason}; it runs uncaptured", above=1)
            result = self.function(*args, **kwargs)
            self._mark_donated(given)
            return result
        capture, flats = self._captured(arguments)
        program = capture.program
        call = HostCall(program.tape, _unpadded(arguments, given), program.known(_tensors(flats)))
        ready = {name: value for name, value in call.arguments.items() if isinstance(value, Carried)}
        if any(value is not arguments[name] for name, value in ready.items()):
            arguments |= ready
            capture, flats = self._captured(arguments)
            program = capture.program
        ints = _joined(_host_ints(arguments)) if program.host else ()
        with capture.lock:
            placed, inputs = self._placed(capture, arguments, flats)
            how: tuple[str, ...] | None = (FAILED, "go on from a fork of it, or fill a new state")
            try:
                call.claim()
                own, outputs = capture.replay(placed, inputs, ints)
                how = ()
            except CaptureError:  # nothing has run
                how = None
                raise
            finally:
                # Only now: whatever failed before has left the donated values as they were.
                if how is not None:
                    self._mark_donated(given, *how)
        ledgers = call.ledgers(program.known(own, outputs))
        return program.results(own, outputs, ledgers, _tokens(given))

    @lasting
    def warm(self, buckets: Iterable[Bucket], *args: Any, **kwargs: Any) -> None:
        """Capture for `buckets` now, the largest first, with a progress bar on a terminal; the state stays as it is.

        The arguments are those of a call, and the batch among them says how many rows there are. A bucket is a number
        of tokens, or a pair of it and the most tokens of one row: `(rows, 1)` decodes, `(rows * 4, 4)` verifies.
        """
        given = self._bound(args, kwargs)
        batches = [name for name, value in given.items() if isinstance(value, Ragged)]
        if len(batches) != 1:
            raise ValueError(f"warm: {self.name} was given {len(batches)} batches; buckets are sizes of one")
        # The smaller ones find room in the memory of the largest.
        sizes = sorted(buckets, key=lambda bucket: bucket if isinstance(bucket, int) else bucket[0], reverse=True)
        from rich.console import Console
        from rich.progress import track

        console = Console(stderr=True)
        shown = track(sizes, "capturing", console=console, transient=True) if console.is_terminal else sizes
        for bucket in shown:
            arguments = given | {batches[0]: idle(given[batches[0]], bucket)}
            capture, flats = self._captured(arguments)
            with capture.lock:
                self._placed(capture, arguments, flats)

    @lasting
    def ahead(self, *args: Any, **kwargs: Any) -> Jitted:
        """Capture for arguments like these now, computing nothing; this function itself."""
        arguments = self._prepared(self._bound(args, kwargs), args, kwargs)
        capture, flats = self._captured(arguments)
        with capture.lock:
            self._placed(capture, arguments, flats)
        return self

    @lasting
    def lower(self, *args: Any, target: str | Target | None = None, **kwargs: Any) -> Lowered:
        """The function lowered for arguments like these, batches padded to their bucket; `.compile()` captures it."""
        given = self._prepared(self._bound(args, kwargs), args, kwargs)
        bound = inspect.BoundArguments(self.signature, given)
        capture = partial(self.ahead, *args, **kwargs)
        return traced(self.function, bound.args, bound.kwargs, target, None, capture)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    def _prepared(self, given: dict[str, Any], args: Any, kwargs: Any) -> dict[str, Any]:
        """The arguments as a program takes them, each with a ledger or rows checked."""
        hosted = {name: value for name, value in given.items() if isinstance(value, (Carried, Ragged))}
        for value in hosted.values():
            value.check()
        found = {} if self._prepare is None else self._prepare(self.buckets.fit, *args, **kwargs)
        padded = {name: value for name, value in hosted.items() if isinstance(value, Ragged) and name not in found}
        return given | found | {name: self.buckets.fit(value) for name, value in padded.items()}

    def _donated(self, given: Mapping[str, Any]) -> list[str]:
        return [name for name in self.donate if given[name] is not None]

    def _mark_donated(self, given: Mapping[str, Any], *how: str) -> None:
        for name in self._donated(given):
            given[name].mark_used(*(how or (DONATED,)))

    def _flat(self, name: str, value: Any) -> tuple[Flat, int]:
        """An argument taken apart, and a number for its part of the key. The last one of each name is remembered."""
        known = self._known.get(name)
        if known is not None and known[0]() is value:
            return known[1:]
        flat = flattened(value)
        try:
            number = self._numbers.setdefault((flat.structure, flat.dtypes, flat.shapes), next(self._counter))
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
        known = self._known.get(name)
        if known is not None and known[0] is reference:
            self._known.pop(name, None)

    def _captured(self, arguments: Mapping[str, Any]) -> tuple[Capture, dict[str, Flat]]:
        """The capture for these arguments, and what they were taken apart into."""
        found = {name: self._flat(name, value) for name, value in arguments.items()}
        flats = {name: flat for name, (flat, _) in found.items()}
        key = (_choices(), *((name, number) for name, (_, number) in found.items()))
        facts = _host_facts(arguments)
        if torch.is_grad_enabled():
            _check_gradients(flats)
        capture = self._known_capture(key, facts)
        if capture is None:
            with self._lock:  # Replays of other captures go on.
                capture = self._known_capture(key, facts) or self._made((*key, facts), arguments, flats)
        capture.used = next(self._counter)
        return capture, flats

    def _known_capture(self, key: tuple[Any, ...], facts: tuple[bool, ...]) -> Capture | None:
        """The capture for a key; one made where more was known, if nothing that the host knows is computed with."""
        exact = self._graphs.get((*key, facts))
        if exact is not None or all(facts):
            return exact
        other = self._graphs.get((*key, (True,) * len(facts)))
        return None if other is None or other.program.host else other

    def _made(self, key: tuple[Any, ...], arguments: Mapping[str, Any], flats: dict[str, Flat]) -> Capture:
        """A capture for arguments like none before."""
        if len(self._numbers) > MOST_NUMBERS:
            self._drop_numbers()
        with TRACING:  # Watched is what follows, so that a capture is told of once.
            capture = self._traced(arguments, flats)
        self._keep(key, capture)
        return capture

    def _keep(self, key: tuple[Any, ...], capture: Capture) -> None:
        """Enter a capture; with one too many, that goes which was used the longest ago."""
        capture.used = next(self._counter)
        self._graphs[key] = capture
        if len(self._graphs) > MOST_CAPTURES:
            del self._graphs[min(self._graphs, key=lambda key: self._graphs[key].used)]

    def _drop_numbers(self) -> None:
        """Forget the numbers that no capture is found by any more, or that none was made for."""
        kept = {number for key in self._graphs for _, number in key[1:-1]}
        kept |= {known[2] for known in list(self._known.values())}
        self._numbers = {parts: number for parts, number in list(self._numbers.items()) if number in kept}

    def _placed(
        self, capture: Capture, arguments: Mapping[str, Any], flats: dict[str, Flat]
    ) -> tuple[Placed, list[Tensor]]:
        """The run of a capture for where these arguments lie, and their tensors. Its lock is held."""
        if not capture.backend.fixed:
            self._note_pools(capture, arguments)
        inputs = _tensors(flats)
        placed = capture.placed(inputs)
        if placed is None:
            with self._watched(), TRACING:
                first = not capture.runs
                placed = capture.place(inputs, _rehearsal(arguments, flats))
            self.captures += 1
            if first:
                self._tell_changes(arguments, flats)
            else:
                self._say("places", "captured again, since tensors that must stay in place were moved", above=2)
        return placed, inputs

    def _watched(self) -> AbstractContextManager[object]:
        return nullcontext() if self._watch is None else self._watch()

    def _note_pools(self, capture: Capture, arguments: Mapping[str, Any]) -> None:
        """Count a capture over another pool as a graph of a device would have to be made anew for it."""
        held = [x.untyped_storage() for x in _pools(arguments)]
        pools = tuple(storage._cdata for storage in held)
        known = [tuple(one.cdata for one in kept) for kept in capture.pools]
        fresh, first = pools not in known, not known
        if fresh:
            # A weak reference keeps the number, not the memory: no later pool can have that of a former one.
            capture.pools = (tuple(map(StorageWeakRef, held)), *capture.pools)[:MOST_PLACES]
            self.captures += not first
        if fresh and not first:
            self._say("pool", "captured again, over another pool of pages; the compiled code is kept", above=3)

    def _traced(self, arguments: Mapping[str, Any], flats: dict[str, Flat]) -> Capture:
        backend = self._backend(flats)
        for name in self._donated(arguments):
            if not isinstance(arguments[name], Carried):
                raise CaptureError(f"jit: {name!r} is a {type(arguments[name]).__name__}; only states can be donated")
        staged = [name for name, value in arguments.items() if isinstance(value, (Tensor, Ragged))]

        def call(arguments: dict[str, Any]) -> Any:
            bound = inspect.BoundArguments(self.signature, arguments)
            return self.function(*bound.args, **bound.kwargs)

        program = trace(call, flats, self._donated(arguments), staged, _examples(arguments))
        if not backend.fixed:
            return Capture(program, backend, _places(flats, lambda name, x: name in staged))
        pools = set(map(id, _pools(arguments)))
        moving = _places(flats, lambda name, x: name not in self.fixed and id(x) not in pools)
        return Capture(program, backend, [place for place in moving if place not in program.written])

    def _backend(self, flats: Mapping[str, Flat]) -> Backend:
        """The backend for where the tensors lie; one for all captures there."""
        where = [(name, x.device.type) for name, flat in flats.items() for x in flat.tensors] or [("", "cpu")]
        first, device = where[0]
        _check_together(flats, device)
        name = self.backend or DEFAULTS.get(device)
        if name is None:
            raise CaptureError(f"jit: {first!r} lies on {device}; what is captured lies on {', '.join(DEFAULTS)}")
        if name not in self._backends:
            backend = BACKENDS[name]()
            backend.check(device)
            weakref.finalize(self, backend.close)
            self._backends[name] = backend
        return self._backends[name]

    def _tell_changes(self, arguments: Mapping[str, Any], flats: Mapping[str, Flat]) -> None:
        """Say why a call like an earlier one is captured again. The batch is left out: another size is no reason."""
        now: dict[str, Any] = {"": _choices(), FACTS: _host_facts(arguments)}
        told = {name: flat for name, flat in flats.items() if not isinstance(arguments[name], Ragged)}
        now |= {name: (flat.structure, flat.dtypes, flat.shapes) for name, flat in told.items()}
        nearest = min(self._seen, key=lambda then: sum(then[name] != now[name] for name in now), default=now)
        self._seen.append(now)
        for name in now:
            if now[name] != nearest[name]:
                self._say(*_change(name, nearest[name], now[name]), above=3)

    def _say(self, reason: str, what: str, above: int) -> None:
        """Warn once for each reason, at the line of the caller, `above` functions of ours away."""
        if self._watch is None and self._said.setdefault(reason, now := object()) is now:
            # Two more stand between: this function, and what `lasting` put around the outermost.
            warnings.warn(f"jit({self.name}): {what}", RecaptureWarning, stacklevel=above + 3)


def _choices() -> tuple[int, int]:
    """What the choice of kernels depends on beside the arguments."""
    return MODE.get().key, version()


def _joined(parts: Iterable[Iterable[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(parts))


def _tensors(flats: Mapping[str, Flat]) -> list[Tensor]:
    return _joined(flat.tensors for flat in flats.values())


def _pools(arguments: Mapping[str, Any]) -> list[Tensor]:
    return _joined(value.pools() for value in arguments.values() if isinstance(value, Carried))


def _host_ints(arguments: Mapping[str, Any]) -> list[Sequence[int]]:
    return [value.host_ints() for value in arguments.values() if isinstance(value, HostValued)]


def _host_facts(arguments: Mapping[str, Any]) -> tuple[bool, ...]:
    return tuple(_joined(value.host_facts() for value in arguments.values() if isinstance(value, HostValued)))


def _tokens(given: Mapping[str, Any]) -> dict[str, int]:
    """How many tokens each ragged argument has."""
    return {name: value.tokens.shape[0] for name, value in given.items() if isinstance(value, Ragged)}


def _unpadded(arguments: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with ragged ones as they were given: what a program takes of them is padded."""
    return {name: given[name] if isinstance(value, Ragged) else value for name, value in arguments.items()}


def _examples(arguments: Mapping[str, Any]) -> dict[str, Sequence[int]]:
    """Host integers to capture with: of a state those of empty rows, which have room for any batch."""
    return {
        name: [0] * len(value.host_ints()) if isinstance(value, Carried) else value.host_ints()
        for name, value in arguments.items()
        if isinstance(value, HostValued)
    }


def _rehearsal(arguments: Mapping[str, Any], flats: Mapping[str, Flat]) -> Rehearsal:
    """Inputs to run with before a capture: states with their own pools, of which only scratch pages are written."""

    def inputs() -> list[Tensor]:
        return _joined(_emptied(arguments[name], flat) for name, flat in flats.items())

    return Rehearsal(inputs, _joined(_examples(arguments).values()))


def _emptied(value: Any, flat: Flat) -> list[Tensor]:
    """The tensors of an argument, or of what takes its place in a rehearsal."""
    if not isinstance(value, Carried):
        return flat.tensors
    leaves = dict(zip(flat.places, pytree.tree_leaves(value.emptied()), strict=True))
    return [leaves[at] for at in range(len(flat.tensors))]


def _places(flats: Mapping[str, Flat], wanted: Callable[[str, Tensor], bool]) -> list[int]:
    """Where the tensors that are wanted, by argument, stand among all."""
    named = [(name, x) for name, flat in flats.items() for x in flat.tensors]
    return [place for place, (name, x) in enumerate(named) if wanted(name, x)]


def _check_together(flats: Mapping[str, Flat], device: str) -> None:
    """`CaptureError` for an argument that does not lie on `device`, or that holds a tensor which lies elsewhere."""
    for name, flat in flats.items():
        found = {x.device.type for x in flat.tensors}
        if len(found) == 1 and found != {device}:
            raise CaptureError(f"jit: {name!r} lies on {found.pop()}, other arguments on {device}; move it there")
        if len(found) > 1:
            apart = ((path, x) for path, x in items(flat.rebuilt(flat.tensors)) if isinstance(x, Tensor))
            path, other = next((path, x.device.type) for path, x in apart if x.device.type != device)
            raise CaptureError(
                f"jit: {path} of {name!r} lies on {other}, the rest on {device}, and a captured program reads nothing "
                f"that lies elsewhere; move it to {device} (a table of embeddings: load with tables='device'), or call "
                "the function without jit"
            )


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
        if then[0] == now[0]:
            return "kernels", "captured again, since kernels were registered or removed"
        return "policy", f"captured again, under another policy or target; {again}"
    if name == FACTS:
        return (
            name,
            f"captured again, since the host knows row lengths and did not, or the reverse; {again}",
        )
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


def _innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    return _innermost(function.func) if isinstance(function, partial) else function


def _prepare_of(function: Callable[..., Any]) -> Callable[..., dict[str, Any]] | None:
    """What a function is captured with: of a method with its object, of a partial with its arguments."""
    if isinstance(function, partial):
        inner = _prepare_of(function.func)
        if inner is None:
            return None
        return lambda fit, *args, **kwargs: inner(fit, *function.args, *args, **(function.keywords | kwargs))
    prepare = getattr(function, "captured_with", None)
    owner = getattr(function, "__self__", None)
    if prepare is None or owner is None:
        return prepare
    return lambda fit, *args, **kwargs: prepare(fit, owner, *args, **kwargs)
