"""Wheels kept apart from the environment: fetched with pip into the cache directory, unpacked, never installed."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from .cache import cache_directory
from .errors import LoweringError


def python_tag() -> str:
    """What names of wheels call this Python: `cp311`."""
    return f"cp{sys.version_info.major}{sys.version_info.minor}"


def fetch_wheel(package: str, version: str, check: Callable[[Path], None]) -> Path:
    """Download a wheel with pip, have it checked, and unpack it into the cache; the directory. pip shows its progress.

    A directory of the same wheel is replaced. Raises `LoweringError` when pip finds no such wheel for this Python and
    platform, and whatever `check(wheel)` raises.
    """
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        wheel = _download(package, version, Path(scratch))
        check(wheel)
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
            _let_run(archive, unpacked)
        target = cache / wheel.stem
        if target.exists():
            shutil.rmtree(target)
        # Renaming last, so that an interrupted fetch leaves nothing that looks whole.
        unpacked.rename(target)
    return target


def _download(package: str, version: str, directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(directory)]
    if subprocess.run([*command, f"{package}=={version}"], check=False).returncode:
        raise LoweringError(
            f"pip could not download {package}=={version} for {python_tag()} on {sysconfig.get_platform()} (its own "
            "message is above); without pip here, run: python -m ensurepip"
        )
    (wheel,) = directory.glob("*.whl")
    return wheel


def _let_run(archive: zipfile.ZipFile, unpacked: Path) -> None:
    """Give programs the mode that they have in the archive, which `extractall` forgets."""
    for member in archive.infolist():
        mode = member.external_attr >> 16
        if mode & stat.S_IXUSR and not member.is_dir():
            (unpacked / member.filename).chmod(stat.S_IMODE(mode))
