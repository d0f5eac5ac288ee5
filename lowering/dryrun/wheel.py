"""The torch_npu wheel, in a cache directory of its own: fetched with pip, unpacked, never installed.

Installed without CANN it would break `import torch`, so it stays outside the environment and only the dry run's own
process imports it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

import torch

from ..cache import ENVIRONMENT, cache_directory
from ..errors import LoweringError


def series() -> str:
    """The torch_npu series that the installed torch can load, `2.13`: its binaries fit one minor version of torch."""
    return ".".join(torch.__version__.split(".")[:2])


def fetched() -> Path:
    """The directory of the unpacked wheel for this torch and Python; `LoweringError` says how to fetch one."""
    found = list(cache_directory().glob(f"torch_npu-{series()}.*-{_python_tag()}-*"))
    if not found:
        raise LoweringError(
            f"a dry run needs the torch_npu {series()} wheel for {_python_tag()}, and {cache_directory()} has none; "
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
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        wheel = _download(wanted, Path(scratch))
        _check(wheel)
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        target = cache / wheel.stem
        if target.exists():
            shutil.rmtree(target)
        # Renaming last, so that an interrupted fetch leaves nothing that looks whole.
        unpacked.rename(target)
    return target


def _download(version: str, directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(directory)]
    if subprocess.run([*command, f"torch-npu=={version}"], check=False).returncode:
        raise LoweringError(
            f"pip could not download torch-npu=={version} for {_python_tag()} on {sysconfig.get_platform()} (its own "
            "message is above); without pip here, run: python -m ensurepip"
        )
    (wheel,) = directory.glob("*.whl")
    return wheel


def _check(wheel: Path) -> None:
    """`LoweringError` unless the file is a torch_npu wheel for this Python."""
    words = wheel.stem.split("-")
    if words[0] != "torch_npu" or _python_tag() not in words:
        raise LoweringError(f"{wheel.name} was downloaded; expected a torch_npu wheel for {_python_tag()}")
    with zipfile.ZipFile(wheel) as archive:
        missing = {"torch_npu/__init__.py", f"{words[0]}-{words[1]}.dist-info/METADATA"} - set(archive.namelist())
    if missing:
        raise LoweringError(f"{wheel.name} does not hold {', '.join(sorted(missing))}, so it is not torch_npu's wheel")


def _python_tag() -> str:
    return f"cp{sys.version_info.major}{sys.version_info.minor}"
