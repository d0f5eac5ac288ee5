"""Policies: which kernels a caller asks for, and the calling mode that every op reads.

A policy is a value. It is set for a block of code with `lowering.use`, or for a process with the environment variable
`FUNCMODELS_LOWERING="linear=torch,attention=torch_sdpa,evidence=stated"`. A kernel asked for by name runs or raises; it
never falls back. What is asked of an op also holds for the ops that contain it: `gemma_rms_norm="torch"` turns the
native norm on wherever it occurs, in `add_gemma_rms_norm` too.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from .errors import LoweringError
from .kernel import Choice
from .target import Target

ENVIRONMENT = "FUNCMODELS_LOWERING"


EVIDENCE = ("documented", "in use", "stated")
"""What may speak for an operator on a target, the strongest first. See `Policy.evidence`."""


@dataclass(frozen=True)
class Policy:
    """Kernels asked for by name, op by op; `strict` leaves the Torch reference out unless it is asked for.

    `evidence` is the least that must speak for the operators of a kernel on its target: "documented" (torch_npu's
    documentation lists the machine), "in use" (that, or an engine calls the operator there; the default), "stated"
    (that, or CANN's product tables list the machine). What this machine's probe has seen to work counts always, and a
    kernel that is asked for by name needs no more than CANN's statement.
    `LoweringError` for another word.
    """

    prefer: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False
    evidence: str = "in use"

    def __post_init__(self) -> None:
        if self.evidence not in EVIDENCE:
            known = ", ".join(map(repr, EVIDENCE))
            raise LoweringError(f"evidence must be one of {known}, found {self.evidence!r:.100}")

    def __hash__(self) -> int:
        return hash((tuple(sorted(self.prefer.items())), self.strict, self.evidence))


@runtime_checkable
class Listener(Protocol):
    """What is told of every op call: a report."""

    def add(self, choice: Choice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """One call, before it runs."""


@runtime_checkable
class Stead(Protocol):
    """What takes every op call in the place of its kernel: a dry run."""

    def __call__(self, op: Any, choice: Choice, key: tuple[Any, ...], args: Any, kwargs: Any) -> Any:
        """The result of a call of the `Op`, whose signature is `key`."""


_MODE_KEYS: dict[tuple[Policy, Target | None, bool], int] = {}
_COUNTER = itertools.count()


@dataclass(frozen=True)
class Mode:
    """What an op call reads from its surroundings. With `dry`, kernels are chosen as in a real run; none computes."""

    policy: Policy
    target: Target | None = None
    report: Listener | None = None
    dry: Stead | None = None
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
            raise LoweringError(f"{ENVIRONMENT}={text!r:.100}: {item!r:.100} is not of the form op=kernel")
        prefer[op.strip()] = kernel.strip()
    evidence = prefer.pop("evidence", Policy.evidence)
    return Policy(prefer, evidence=evidence)


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
