"""What this machine is: the target behind a device, and devices by name."""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import replace
from typing import Any

import torch

from .cache import probed
from .errors import LoweringError
from .target import TARGETS, Target, named


def of_device(device: torch.device) -> Target:
    """The target behind a device of this machine."""
    if device.type in ("cpu", "meta"):
        return TARGETS["cpu"]
    if device.type == "cuda":
        return TARGETS["cuda"]
    if device.type == "npu":
        return ascend(device)
    raise LoweringError(
        f"tensors are on {device}, and no target is known for device type {device.type!r}; "
        f"name one with lowering.use(target=...): {', '.join(TARGETS)}"
    )


@functools.cache
def ascend(device: torch.device) -> Target:
    """The target of an npu device: with the versions of torch_npu and CANN that are loaded, and what a probe has seen.

    Raises `LoweringError` when the driver does not answer (no device, or stand-ins for CANN), for a SoC that no target
    covers and for one that is refused.
    """
    soc = soc_of(device)
    module: Any = sys.modules["torch_npu"]
    cann = module.npu.utils.get_cann_version() or None
    found = probed(soc, module.__version__, cann or "unknown")
    target = named(of_soc(soc), torch_npu=module.__version__)
    return replace(target, cann=cann, seen=found.seen, failed=found.failed)


def soc_of(device: torch.device) -> str:
    """What the driver calls an npu device; `LoweringError` when it does not answer."""
    module: Any = sys.modules.get("torch_npu")
    if module is None:
        raise LoweringError(f"tensors are on {device} and torch_npu is not loaded; import it, or name a target")
    try:
        return module.npu.get_device_name(device)
    except (RuntimeError, AssertionError) as error:
        raise LoweringError(
            f"tensors are on {device}, and its driver does not say what it is ({error}); name the target with "
            "lowering.use(target=...)"
        ) from error


def of_soc(soc: str) -> Target:
    """The target of a SoC name such as "Ascend910B3"; `LoweringError` where there is none."""
    for target in TARGETS.values():
        if target.soc is not None and re.match(target.soc, soc):
            return target
    known = ", ".join(f"{target.name} ({target.soc})" for target in TARGETS.values() if target.soc)
    raise LoweringError(f"no target covers the SoC {soc!r}; known are {known}; name one with lowering.use(target=...)")


def device_named(device: torch.device | str | None) -> torch.device:
    """The device, the CPU for None. `ValueError` for one that is not known or not there, `TypeError` for no name."""
    try:
        found = torch.device("cpu" if device is None else device)
    except TypeError:
        shown = f"found {device!r:.100}"
        raise TypeError(f"device must be a name as 'cpu' or 'cuda:1', or a torch.device, {shown}") from None
    except RuntimeError:
        npu = 'an Ascend NPU needs CANN and pip install "funcmodels[npu]"'
        fix = npu if str(device).startswith("npu") else "give 'cpu', 'cuda', 'cuda:1' or 'npu'"
        raise ValueError(f"device {device!r:.100} cannot be used here: Torch does not know it; {fix}") from None
    try:
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, ImportError) as error:
        # Of a device without kernels Torch goes on to list all that have some.
        why = str(error).splitlines()[0].split(". ")[0]
        raise ValueError(f"device {device!r:.100} cannot be used here: {why}") from error
    return found
