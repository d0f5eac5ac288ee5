"""A program lowered to any target: traced here, or for Ascend in the process that has torch_npu."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from params import tree

from .. import detect
from .. import target as targets
from ..explain.report import abstract, dry
from ..explain.stages import Lowered, argument_bytes, lowered
from ..explain.trace import DryRun
from ..policy import MODE, Policy
from ..target import Target
from ..use import check_names


def traced(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: str | Target | None,
    policy: Policy | None,
    capture: Callable[[], Any],
) -> Lowered:
    """`function(*args, **kwargs)` lowered to `target`; `capture` compiles it where the arguments lie on that machine.

    Target and policy default to those in force, the target then to that of the tensors.
    """
    mode = MODE.get()
    policy = policy or mode.policy
    check_names(policy)
    here = _device_of((args, kwargs))
    chosen = mode.target or detect.of_device(here) if target is None else targets.named(target)
    found = _through(chosen)(function, args, kwargs, chosen, policy)
    return replace(found, capture=capture) if here.type.replace("meta", "cpu") == chosen.device else found


def _through(target: Target) -> Callable[..., Lowered]:
    if target.device != "npu":
        return _here
    from . import process  # which most programs never need

    return process.lower


def _here(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], target: Target, policy: Policy
) -> Lowered:
    run = DryRun()
    with dry(target, policy, run) as (fake, report), torch.no_grad():
        run.program(function, abstract(args, fake), abstract(kwargs, fake))
    return lowered(target, f"torch {torch.__version__}", run, report, argument_bytes(function, args, kwargs))


def _device_of(arguments: Any) -> torch.device:
    devices = [leaf.device for leaf in tree.leaves(arguments) if isinstance(leaf, Tensor)]
    return devices[0] if devices else torch.device("cpu")
