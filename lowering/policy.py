"""Policies: which kernels a caller asks for, and the calling mode that every op reads.

A policy is a value. It is set for a block of code with `use`, or for a process with the environment variable
`FUNCMODELS_LOWERING="linear=torch,attention=torch_sdpa"`. A kernel asked for by name runs or raises; it never falls
back. What is asked of an op also holds for the ops that contain it: `gemma_rms_norm="torch"` turns the native norm on
wherever it occurs, in `add_gemma_rms_norm` too.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from . import target as targets
from .errors import LoweringError
from .target import Target

if TYPE_CHECKING:
    from .explain.report import Report
    from .explain.trace import DryRun
    from .op import Op

ENVIRONMENT = "FUNCMODELS_LOWERING"


@dataclass(frozen=True)
class Policy:
    """Kernels asked for by name, op by op; `strict` leaves the Torch reference out unless it is asked for."""

    prefer: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False

    def __hash__(self) -> int:
        return hash((tuple(sorted(self.prefer.items())), self.strict))

    def asked(self, op: Op) -> tuple[str, str] | None:
        """The op whose preference governs `op`, and the kernel it names; None where nobody asked.

        Its own preference comes first, then that of an op it contains, if `op` has a kernel of the name.
        """
        if op.name in self.prefer:
            return op.name, self.prefer[op.name]
        found = ((name, self.prefer[name]) for name in op.contains if name in self.prefer)
        return next(((name, kernel) for name, kernel in found if kernel in op.kernels), None)


_MODE_KEYS: dict[tuple[Policy, Target | None, bool], int] = {}
_COUNTER = itertools.count()


@dataclass(frozen=True)
class Mode:
    """What an op call reads from its surroundings. With `dry`, kernels are chosen as in a real run; none computes."""

    policy: Policy
    target: Target | None = None
    report: Report | None = None
    dry: DryRun | None = None
    key: int = field(init=False)

    def __post_init__(self) -> None:
        # A small number stands for (policy, target, dry) in the key of a choice, since it is hashed on every op call.
        key = _MODE_KEYS.setdefault((self.policy, self.target, self.dry is not None), next(_COUNTER))
        object.__setattr__(self, "key", key)


def from_environment() -> Policy:
    """The policy that the environment variable asks for. Names are checked once the ops are registered."""
    text = os.environ.get(ENVIRONMENT, "")
    prefer: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        op, equals, kernel = item.partition("=")
        if not (op and equals and kernel):
            raise LoweringError(f"{ENVIRONMENT}={text!r}: {item!r} is not of the form op=kernel")
        prefer[op.strip()] = kernel.strip()
    return Policy(prefer)


MODE: ContextVar[Mode] = ContextVar("lowering_mode", default=Mode(from_environment()))


class _Compiled(threading.local):
    """What code under `torch.compile` reads in place of `MODE`, so that it is compiled again for another policy."""

    def __init__(self) -> None:  # of every thread; Dynamo guards no attribute of the class
        self.key = str(MODE.get().key)


COMPILED = _Compiled()


def enter(mode: Mode) -> Token[Mode]:
    """Put a mode in force in this thread, until `leave` of what this returns."""
    token = MODE.set(mode)
    COMPILED.key = str(mode.key)
    return token


def leave(token: Token[Mode]) -> None:
    """End what `enter` began."""
    MODE.reset(token)
    COMPILED.key = str(MODE.get().key)


def check(policy: Policy) -> None:
    """`LoweringError` for an op or kernel that does not exist."""
    from . import registry

    for op, kernel in policy.prefer.items():
        registry.find(op).kernel_named(kernel)


@contextmanager
def use(
    policy: Policy | None = None, *, target: str | Target | None = None, strict: bool | None = None, **prefer: str
) -> Iterator[Policy]:
    """Ask for kernels inside a `with` block: `use(rms_norm="torch")` runs that kernel or raises `LoweringError`.

    `policy` replaces the one in force; keyword pairs are added to it. `target` lowers for that machine instead of
    the tensors' own. `strict=True` makes every op without a chosen kernel an error instead of running its reference.

    The block is that of a thread (of a context, `contextvars`): threads that it starts choose as if there were none. So
    does what `torch.utils.checkpoint` recomputes in a backward outside of it, or on a device, where a thread of Torch's
    own runs that; a `CheckpointError` may be all that says so. `in_force` takes the block there.
    """
    mode = MODE.get()
    base = mode.policy if policy is None else policy
    merged = Policy({**base.prefer, **prefer}, base.strict if strict is None else strict)
    check(merged)
    chosen = mode.target if target is None else targets.named(target)
    token = enter(replace(mode, policy=merged, target=chosen))
    try:
        yield merged
    finally:
        leave(token)


_LEFT: ContextVar[tuple[Token[Mode], ...]] = ContextVar("lowering_left", default=())
"""What those `InForce` blocks put back that are open here."""


@dataclass(frozen=True)
class InForce:
    """The policy and target of a place. Good for any number of `with` blocks, in any thread."""

    policy: Policy
    target: Target | None

    def __enter__(self) -> None:
        token = enter(replace(MODE.get(), policy=self.policy, target=self.target))
        _LEFT.set((*_LEFT.get(), token))

    def __exit__(self, *error: object) -> None:
        *outer, token = _LEFT.get()
        _LEFT.set(tuple(outer))
        leave(token)


def in_force() -> InForce:
    """What `use` has asked for here, as a context manager for elsewhere: another thread, or a recomputation.

    `checkpoint(f, x, use_reentrant=False, context_fn=lambda: (nullcontext(), lowering.in_force()))` recomputes `f` with
    the kernels of its forward, wherever its backward runs.
    """
    mode = MODE.get()
    return InForce(mode.policy, mode.target)
