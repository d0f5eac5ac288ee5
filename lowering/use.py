"""`use` and `in_force`: the policy and target of a block of code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace

from . import target as targets
from .op import find
from .policy import MODE, Mode, Policy, enter, leave
from .target import Target


def check_names(policy: Policy) -> None:
    """`LoweringError` for an op or kernel that does not exist."""
    for op, kernel in policy.prefer.items():
        find(op).kernel_named(kernel)


@contextmanager
def use(
    policy: Policy | None = None,
    *,
    target: str | Target | None = None,
    strict: bool | None = None,
    evidence: str | None = None,
    **prefer: str,
) -> Iterator[Policy]:
    """Ask for kernels inside a `with` block: `use(rms_norm="torch")` runs that kernel or raises `LoweringError`.

    `policy` replaces the one in force; keyword pairs are added to it. `target` lowers for that machine instead of
    the tensors' own. `strict=True` makes every op without a chosen kernel an error instead of running its reference.
    `evidence` is the least that must speak for a kernel's operators (see `Policy`).

    The block is that of a thread (of a context, `contextvars`): threads that it starts choose as if there were none. So
    does what `torch.utils.checkpoint` recomputes in a backward outside of it, or on a device, where a thread of Torch's
    own runs that; a `CheckpointError` may be all that says so. `in_force` takes the block there.
    """
    mode = MODE.get()
    base = mode.policy if policy is None else policy
    merged = Policy(
        {**base.prefer, **prefer},
        base.strict if strict is None else strict,
        base.evidence if evidence is None else evidence,
    )
    check_names(merged)
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
