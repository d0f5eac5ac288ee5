"""The cache of torch_npu wheels, and the stand-ins for libraries that are not here."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowering import LoweringError, wheels
from lowering import cache as caching
from lowering.__main__ import main
from lowering.dryrun import stubs, wheel

TAG = f"cp{sys.version_info.major}{sys.version_info.minor}"
SERIES = ".".join(torch.__version__.split(".")[:2])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(caching.ENVIRONMENT, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """`pip(name, *files)` stands in for a download of a wheel with these files; the commands that were run."""

    def install(name: str, *files: str, code: int = 0) -> list[list[str]]:
        commands: list[list[str]] = []

        def run(command: list[str], **_: Any) -> SimpleNamespace:
            commands.append(command)
            if code == 0:
                with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / name, "w") as archive:
                    for file in files:
                        archive.writestr(file, "content")
            return SimpleNamespace(returncode=code)

        monkeypatch.setattr(wheels.subprocess, "run", run)
        return commands

    return install


def test_the_cache_is_where_the_platform_keeps_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(caching.ENVIRONMENT, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.setattr(sys, "platform", "linux")
    assert caching.cache_directory() == Path("/somewhere/funcmodels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert caching.cache_directory() == Path.home() / ".cache" / "funcmodels"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert caching.cache_directory() == Path.home() / "Library" / "Caches" / "funcmodels"
    monkeypatch.setenv(caching.ENVIRONMENT, "/mine")
    assert caching.cache_directory() == Path("/mine")


def test_a_missing_wheel_says_what_to_run(cache: Path) -> None:
    with pytest.raises(LoweringError, match=r"run: python -m lowering fetch-torch-npu") as error:
        wheel.fetched()
    assert str(cache) in str(error.value) and TAG in str(error.value)


def test_the_newest_of_several_is_taken(cache: Path) -> None:
    """By number, and only of this torch's series and this Python."""
    for version, tag in (("0.9", TAG), ("0.10.post2", TAG), ("0.10", TAG), ("0.11", "cp27")):
        (cache / f"torch_npu-{SERIES}.{version}-{tag}-{tag}-any").mkdir(parents=True)
    (cache / f"torch_npu-9{SERIES}.0-{TAG}-{TAG}-any").mkdir()
    assert wheel.fetched().name.split("-")[1] == f"{SERIES}.0.10.post2"


def test_fetching_unpacks_what_pip_downloads(cache: Path, pip: Callable[..., list[list[str]]]) -> None:
    """Into the cache alone, the newest of torch's series by default; a second fetch replaces the first."""
    name = f"torch_npu-{SERIES}.0-{TAG}-{TAG}-manylinux_2_28_x86_64"
    files = ("torch_npu/__init__.py", f"torch_npu-{SERIES}.0.dist-info/METADATA")
    command = pip(f"{name}.whl", *files, "torch_npu/old.py")
    assert wheel.fetch() == cache / name == wheel.fetched()
    assert command[0][:4] == [sys.executable, "-m", "pip", "download"] and command[0][-1] == f"torch-npu=={SERIES}.*"
    assert "--no-deps" in command[0] and (cache / name / "torch_npu" / "old.py").read_text() == "content"
    command = pip(f"{name}.whl", *files)
    assert wheel.fetch(f"{SERIES}.0") == cache / name
    assert command[0][-1] == f"torch-npu=={SERIES}.0"
    assert not (cache / name / "torch_npu" / "old.py").exists() and [path.name for path in cache.iterdir()] == [name]


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        (
            f"torch_npu-{SERIES}.0-cp27-cp27-any.whl",
            ("torch_npu/__init__.py",),
            f"expected a torch_npu wheel for {TAG}",
        ),
        (f"torch-{SERIES}.0-{TAG}-{TAG}-any.whl", ("torch/__init__.py",), f"expected a torch_npu wheel for {TAG}"),
        (f"torch_npu-{SERIES}.0-{TAG}-{TAG}-any.whl", ("other/__init__.py",), "does not hold torch_npu-"),
    ],
)
def test_something_else_is_not_unpacked(
    name: str, files: tuple[str, ...], message: str, cache: Path, pip: Callable[..., list[list[str]]]
) -> None:
    pip(name, *files)
    with pytest.raises(LoweringError, match=message):
        wheel.fetch()
    assert list(cache.iterdir()) == []


def test_a_failed_download(
    cache: Path, pip: Callable[..., list[list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    """One message and exit code 2."""
    pip("", code=1)
    assert main(["fetch-torch-npu"]) == 2
    said = capsys.readouterr().err
    assert f"pip could not download torch-npu=={SERIES}.* for {TAG}" in said and said.count("\n") == 1
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("version", ["2.8.0.post5", "1.11", f"{SERIES}0.1"])
def test_another_series_does_not_load(version: str, cache: Path) -> None:
    with pytest.raises(LoweringError, match=rf"torch_npu {version} does not load beside torch"):
        wheel.fetch(version)


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """An unpacked wheel whose one library needs a library that is gone, beside libm."""
    gone, folder = tmp_path / "gone.c", tmp_path / "torch_npu"
    folder.mkdir()
    gone.write_text("int far_away(void) { return 7; }\nint _ZN3far4awayEv(void) { return 8; }\n")
    user = tmp_path / "user.c"
    user.write_text(
        "#include <math.h>\n#include <stdio.h>\nint far_away(void); int _ZN3far4awayEv(void);\n"
        "extern int optional(void) __attribute__((weak)); int own(void) { return 1; }\n"
        'double used(double x) { printf(""); if (optional) x += 1; return cos(x) + far_away() + _ZN3far4awayEv(); }\n'
    )
    library = tmp_path / "libfar.so.3"
    subprocess.run(["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", library, gone], check=True)
    now = ["gcc", "-shared", "-fPIC", "-Wl,-z,now", "-o", folder / "libuser.so", user, library, "-lm"]
    subprocess.run(now, check=True)
    library.unlink()
    return tmp_path


def loads(library: Path, search: Path | None) -> subprocess.CompletedProcess[str]:
    code = "import ctypes, sys; f = ctypes.CDLL(sys.argv[1]).used; f.restype = ctypes.c_double; "
    code += "f.argtypes = [ctypes.c_double]; print(f(0.0))"
    environment = {} if search is None else {"LD_LIBRARY_PATH": str(search)}
    command = [sys.executable, "-c", code, str(library)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_stand_ins_are_what_is_missing_and_no_more(linked: Path) -> None:
    """A library that needs an absent one loads beside them, and its other libraries stay the real ones."""
    library = linked / "torch_npu" / "libuser.so"
    assert "libfar.so.3" in loads(library, None).stderr
    assert stubs.wanting(linked) == (["libfar.so.3"], ["_ZN3far4awayEv", "far_away"])
    built = stubs.stubs(linked)
    assert loads(library, built).stdout == "1.0\n"
    before = (built / "libfar.so.3").stat().st_mtime_ns
    assert stubs.stubs(linked) == built and (built / "libfar.so.3").stat().st_mtime_ns == before


def test_stand_ins_for_the_wheel_shadow_nothing() -> None:
    """None of their symbols is Torch's, Python's or the C library's."""
    directory = stubs.stubs(wheel.fetched())
    libraries = sorted(directory.glob("*.so*"))
    assert {"libascendcl.so", "libhccl.so"} <= {path.name for path in libraries}
    folder = Path(torch.__file__).parent / "lib"
    here = [ctypes.CDLL(None), *(ctypes.CDLL(str(folder / name)) for name in ("libtorch_cpu.so", "libc10.so"))]
    _, symbols = stubs.wanting(wheel.fetched())
    assert "aclrtGetDeviceCount" in symbols
    assert not [name for name in symbols for library in here if hasattr(library, name)]


def test_without_gcc_the_error_says_what_to_install(linked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(linked))
    with pytest.raises(LoweringError, match=r"needs 'readelf', which is not on PATH; install gcc with binutils"):
        stubs.stubs(linked)


def test_a_failing_tool_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "broken.so").write_bytes(b"not a library")
    with pytest.raises(LoweringError, match=r"readelf -d \S+ \.\.\. failed:\n.*"):
        stubs.stubs(tmp_path)
