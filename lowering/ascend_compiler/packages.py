"""The compiler's packages, in the cache of wheels: triton-ascend (front end), ascendnpu-ir (BiSheng) and a numpy.

triton-ascend is a module `triton` of its own, and its interpreter needs numpy below 2.4, so none of them is ever on the
path of this process.
"""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..cache import ENVIRONMENT, cache_directory
from ..errors import LoweringError
from ..wheels import fetch_wheel, python_tag

VERSIONS = {"triton-ascend": "3.2.0", "ascendnpu-ir": "1.2.0", "numpy": "2.2.6"}
"""The one version of each that is used: another one makes other programs."""

HASHES = {
    ("triton-ascend", "cp310", "x86_64"): "35e0ef063e4ec917028adc7f21274fd8cd5fd948c2cd9922c526d6a0dabe31f9",
    ("triton-ascend", "cp310", "aarch64"): "430d4d30265fc8baa8ab75d09a6282002ce2ec2a7a82eb427cbf8521a7975795",
    ("triton-ascend", "cp311", "x86_64"): "17c8d7161eed1e96a286281963fe04d3113ee85affaa5d82c7dd0c35803962f0",
    ("triton-ascend", "cp311", "aarch64"): "69a9aecd6fa8b0beb798d16989bb24bc8a1ad61ded71526d6099d4179c428043",
    ("ascendnpu-ir", "cp310", "x86_64"): "2de850a55d4029d30d3d09c7f1f6bbc36e5c8730c09126370eb01ae0cdd4e9f0",
    ("ascendnpu-ir", "cp310", "aarch64"): "4676f8102b5ff9068fb744145d3ad3eec6ed6b0f01e890074ba2cd14c8a8fdb2",
    ("ascendnpu-ir", "cp311", "x86_64"): "d4e5bfab877ee4ba7b312885f4f5bf646072fd47c88d5aa96f6a11f67d3e8522",
    ("ascendnpu-ir", "cp311", "aarch64"): "76aaaedd3c4a08148a690f1bdddf2e2668f484989ab261fdb7e19cdba5d0f957",
    ("numpy", "cp310", "x86_64"): "fc7b73d02efb0e18c000e9ad8b83480dfcd5dfd11065997ed4c6747470ae8915",
    ("numpy", "cp310", "aarch64"): "efd28d4e9cd7d7a8d39074a4d44c63eda73401580c5c76acda2ce969e0a38e83",
    ("numpy", "cp311", "x86_64"): "ba10f8411898fc418a521833e014a77d3ca01c15b0c6cdcce6a0d2897e6dbbdf",
    ("numpy", "cp311", "aarch64"): "b64d8d4d17135e00c8e346e0a738deb17e754230d7e0810ac5012750bbd85a5a",
}
"""sha256 of the wheel for each Python and machine (Linux) that has them all."""

ADAPTER = "triton/backends/ascend/triton-adapter-opt"
BISHENG = "ascendnpuir/bin/bishengir-compile"


@dataclass(frozen=True)
class Toolchain:
    """The directories of the three unpacked wheels."""

    triton: Path
    bisheng: Path
    numpy: Path

    @property
    def adapter(self) -> Path:
        """The program from Triton's IR to linalg."""
        return self.triton / ADAPTER

    def compiler(self, suffix: str) -> Path:
        """The program from linalg on; `suffix` tells one machine's from another's."""
        return self.bisheng / f"{BISHENG}{suffix}"


def fetched() -> Toolchain:
    """What `fetch` has unpacked for this Python; `LoweringError` says how to fetch it."""
    found = {package: _unpacked(package) for package in VERSIONS}
    missing = [f"{package} {VERSIONS[package]}" for package, path in found.items() if path is None]
    if missing:
        raise LoweringError(
            f"Ascend's compiler needs {', '.join(missing)} for {python_tag()}, and {cache_directory()} has none; run: "
            f"python -m lowering fetch-ascend-compiler ({ENVIRONMENT} names another cache directory)"
        )
    return Toolchain(*(path for path in (found[p] for p in ("triton-ascend", "ascendnpu-ir", "numpy")) if path))


def offered() -> bool:
    """Whether the compiler is made for this Python and machine."""
    return all((package, python_tag(), platform.machine()) in HASHES for package in VERSIONS)


def fetch() -> Toolchain:
    """Download the wheels that are not here yet, check their hashes, and unpack them into the cache.

    Raises `LoweringError` for a Python or a machine without such wheels, and for a wheel of another hash.
    """
    if not offered():
        known = sorted({f"{tag} on {machine}" for _, tag, machine in HASHES})
        raise LoweringError(
            f"there is no triton-ascend {VERSIONS['triton-ascend']} for {python_tag()} on {platform.machine()}; "
            f"it is made for {', '.join(known)} (Linux)"
        )
    for package in VERSIONS:
        if _unpacked(package) is None:
            fetch_wheel(package, VERSIONS[package], partial(_check, package))
    return fetched()


def _unpacked(package: str) -> Path | None:
    name = f"{package.replace('-', '_')}-{VERSIONS[package]}-{python_tag()}-*"
    return next(iter(cache_directory().glob(name)), None)


def _check(package: str, wheel: Path) -> None:
    expected = HASHES[package, python_tag(), platform.machine()]
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != expected:
        raise LoweringError(f"{wheel.name} has sha256 {found}; expected {expected}: it is not the published wheel")
