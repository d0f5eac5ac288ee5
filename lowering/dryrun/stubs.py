"""Empty stand-ins for the CANN libraries that torch_npu is linked to, so that it loads on a machine without CANN.

What to stand in for is read from the wheel's own ELF files: the libraries they need and nobody here has, and the
symbols they use and nobody here defines. Each symbol becomes a C function that returns 0; none is ever called while
shapes are traced.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from ..errors import LoweringError

_PYTHON = re.compile("_?Py")
"""Symbols of the interpreter itself."""
_EMPTY = "long {}(void) {{ return 0; }}"
_DEFINED = {"aclrtGetDeviceCount": "int aclrtGetDeviceCount(unsigned *count) { *count = 1; return 0; }"}
"""The one that is called: slicing a tensor makes its device current, which ends the process where there is none."""


def stubs(wheel: Path) -> Path:
    """The directory of stand-ins for an unpacked wheel, built on first use. `LoweringError` without gcc."""
    directory = wheel / f"stubs-torch-{torch.__version__}"
    if not directory.exists():
        with tempfile.TemporaryDirectory(dir=wheel) as scratch:
            _put(directory, wheel, Path(scratch) / "stubs")
    return directory


def _put(directory: Path, wheel: Path, built: Path) -> None:
    built.mkdir()
    _build(built, *wanting(wheel))
    try:
        built.rename(directory)
    except OSError:
        # Another process was first; what it built is the same.
        if not directory.exists():
            raise


def wanting(wheel: Path) -> tuple[list[str], list[str]]:
    """Names of the libraries to stand in for, and the symbols that they must define."""
    shipped = sorted(wheel.glob("torch_npu*/**/*.so*"))
    needed = {name for path in shipped for name in _needed(path)} - {path.name for path in shipped}
    torch_files = [Path(torch._C.__file__), *sorted((Path(torch.__file__).parent / "lib").glob("*.so*"))]
    needed -= {path.name for path in torch_files}
    system = {name: _system_library(name) for name in sorted(needed)}
    present = [*shipped, *torch_files, *filter(None, system.values())]
    undefined = _symbols(shipped, "--undefined-only") - _symbols(present, "--defined-only")
    absent = [name for name, path in system.items() if path is None and not name.startswith("libpython")]
    return absent, sorted(name for name in undefined if not _PYTHON.match(name))


def _needed(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.+)\]", _tool("readelf", "-d", str(library)))


def _symbols(libraries: Iterable[Path], which: str) -> set[str]:
    """Names in the dynamic symbol tables, without their versions. A weak undefined symbol may stay undefined."""
    listed = _tool("nm", "-D", "--format=posix", which, *map(str, libraries))
    words = (line.split() for line in listed.splitlines())
    return {word[0].split("@")[0] for word in words if len(word) > 1 and not (which[2] == "u" and word[1] in "wv")}


def _system_library(name: str) -> Path | None:
    """Where the compiler finds the library, which it answers with a bare name when it does not."""
    found = Path(_tool("gcc", f"-print-file-name={name}").strip())
    return found if found.is_absolute() else None


def _build(directory: Path, libraries: Sequence[str], symbols: Sequence[str]) -> None:
    source = directory / "symbols.c"
    source.write_text("".join(f"{_DEFINED.get(name, _EMPTY.format(name))}\n" for name in symbols))
    for index, name in enumerate(libraries):
        # All symbols are in the first: the loader asks every library for every symbol.
        code = [str(source)] if index == 0 else ["-xc", "/dev/null"]
        _tool(
            "gcc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{name}", "-o", str(directory / name), *code
        )


def _tool(name: str, *arguments: str) -> str:
    if shutil.which(name) is None:
        raise LoweringError(
            f"a dry run builds stand-ins for the CANN libraries and needs {name!r}, which is not on PATH; install gcc "
            "with binutils (Debian, Ubuntu: apt-get install gcc), then try again"
        )
    done = subprocess.run(
        [name, *arguments], capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"}
    )
    if done.returncode:
        raise LoweringError(f"{name} {' '.join(arguments[:3])} ... failed:\n{done.stderr.strip()}")
    return done.stdout
