"""Modes of Torch that values must not depend on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def _without_values() -> bool:
    """Whether fake tensors are traced, which outlive nothing: a dry run's mode is that of its program."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def lasting(function: F) -> F:
    """`function`, whose tensors are good everywhere: inside `torch.inference_mode()` it runs under `no_grad` instead.

    A tensor made in that mode can never be written to outside of it, nor take part in a derivative. States, captures
    and parameters outlive the block that they were made in.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        # Dynamo cannot ask for the mode; what it compiles is told apart by it.
        if torch.compiler.is_dynamo_compiling() or not torch.is_inference_mode_enabled() or _without_values():
            return function(*args, **kwargs)
        # Leaving the mode turns gradients on.
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return cast(F, run)
