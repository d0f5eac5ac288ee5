"""The torch_npu wheel, in the cache of wheels (`lowering.wheels`).

Installed without CANN it would break `import torch`, so it stays outside the environment and only the dry run's own
process imports it.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import torch

from ..cache import ENVIRONMENT, cache_directory
from ..errors import LoweringError
from ..wheels import fetch_wheel, python_tag


def series() -> str:
    """The torch_npu series that the installed torch can load, `2.13`: its binaries fit one minor version of torch."""
    return ".".join(torch.__version__.split(".")[:2])


def fetched() -> Path:
    """The directory of the unpacked wheel for this torch and Python; `LoweringError` says how to fetch one."""
    found = list(cache_directory().glob(f"torch_npu-{series()}.*-{python_tag()}-*"))
    if not found:
        raise LoweringError(
            f"a dry run needs the torch_npu {series()} wheel for {python_tag()}, and {cache_directory()} has none; "
            f"run: python -m lowering fetch-torch-npu ({ENVIRONMENT} names another cache directory); "
            "lowering.explain tells the kernels without it"
        )
    return max(found, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name.split("-")[1])])


def fetch(version: str | None = None) -> Path:
    """Download the wheel with pip, check it, and unpack it into the cache; the directory. pip shows its progress.

    `version` defaults to the newest of the installed torch's series. Raises `LoweringError` when pip finds no such
    wheel for this Python and platform, or gets something else.
    """
    wanted = f"{series()}.*" if version is None else version
    if not f"{wanted}.".startswith(f"{series()}."):
        raise LoweringError(
            f"torch_npu {wanted} does not load beside torch {torch.__version__}: its binaries need torch of the same "
            f"series; fetch {series()}.*, other versions are checked by their recorded schemas"
        )
    return fetch_wheel("torch-npu", wanted, _check)


def _check(wheel: Path) -> None:
    """`LoweringError` unless the file is a torch_npu wheel for this Python."""
    words = wheel.stem.split("-")
    if words[0] != "torch_npu" or python_tag() not in words:
        raise LoweringError(f"{wheel.name} was downloaded; expected a torch_npu wheel for {python_tag()}")
    with zipfile.ZipFile(wheel) as archive:
        missing = {"torch_npu/__init__.py", f"{words[0]}-{words[1]}.dist-info/METADATA"} - set(archive.namelist())
    if missing:
        raise LoweringError(f"{wheel.name} does not hold {', '.join(sorted(missing))}, so it is not torch_npu's wheel")
