"""Which Ascend this machine has. Called with a device of type npu only, so torch_npu is loaded by then."""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import replace
from typing import Any

import torch

from ..errors import LoweringError
from ..target import TARGETS, Target, named


@functools.cache
def detected(device: torch.device) -> Target:
    """The target of an npu device, with the versions of torch_npu and CANN that are loaded.

    Raises `LoweringError` when the driver does not answer (no device, or stand-ins for CANN), for a SoC that no target
    covers and for one that is refused.
    """
    module: Any = sys.modules.get("torch_npu")
    if module is None:
        raise LoweringError(f"tensors are on {device} and torch_npu is not loaded; import it, or name a target")
    try:
        soc = module.npu.get_device_name(device)
    except (RuntimeError, AssertionError) as error:
        raise LoweringError(
            f"tensors are on {device}, and its driver does not say what it is ({error}); name the target with "
            "lowering.use(target=...)"
        ) from error
    target = named(of_soc(soc), torch_npu=module.__version__)
    return replace(target, cann=module.npu.utils.get_cann_version() or None)


def of_soc(soc: str) -> Target:
    """The target of a SoC name such as "Ascend910B3"; `LoweringError` where there is none."""
    for target in TARGETS.values():
        if target.soc is not None and re.match(target.soc, soc):
            return target
    known = ", ".join(f"{target.name} ({target.soc})" for target in TARGETS.values() if target.soc)
    raise LoweringError(f"no target covers the SoC {soc!r}; known are {known}; name one with lowering.use(target=...)")
