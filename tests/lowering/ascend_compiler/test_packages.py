"""The compiler's packages: what is fetched, and what is not taken for it."""

from __future__ import annotations

import hashlib
import os
import stat
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lowering import LoweringError, wheels
from lowering import cache as caching
from lowering.__main__ import main
from lowering.ascend_compiler import packages

HERE = (wheels.python_tag(), packages.platform.machine())
FILES = {"triton-ascend": packages.ADAPTER, "ascendnpu-ir": packages.BISHENG, "numpy": "numpy/__init__.py"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(caching.ENVIRONMENT, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What pip is asked for; it gets wheels of one file each, whose hashes are the expected ones."""
    found: list[str] = []
    for package, file in FILES.items():
        with zipfile.ZipFile(tmp_path / f"{package}.whl", "w") as archive:
            member = zipfile.ZipInfo(file)
            member.external_attr = (stat.S_IFREG | (0o644 if package == "numpy" else 0o755)) << 16
            archive.writestr(member, "content")
        text = (tmp_path / f"{package}.whl").read_bytes()
        monkeypatch.setitem(packages.HASHES, (package, HERE[0], HERE[1]), hashlib.sha256(text).hexdigest())

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        found.append(command[-1])
        package, *_, version = command[-1].partition("==")
        name = f"{package.replace('-', '_')}-{version}-{HERE[0]}-{HERE[0]}-any.whl"
        (Path(command[command.index("--dest") + 1]) / name).write_bytes((tmp_path / f"{package}.whl").read_bytes())
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(wheels.subprocess, "run", run)
    return found


def test_what_is_missing_says_what_to_run(cache: Path) -> None:
    with pytest.raises(LoweringError, match=r"run: python -m lowering fetch-ascend-compiler") as error:
        packages.fetched()
    assert str(cache) in str(error.value) and "triton-ascend 3.2.0, ascendnpu-ir 1.2.0, numpy" in str(error.value)


def test_fetching_gets_what_is_not_here(cache: Path, asked: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Of one version each, with programs that can be run."""
    assert main(["fetch-ascend-compiler"]) == 0
    assert asked == [f"{package}=={version}" for package, version in packages.VERSIONS.items()]
    found = packages.fetched()
    assert os.access(found.adapter, os.X_OK) and os.access(found.compiler(""), os.X_OK)
    assert not os.access(found.numpy / FILES["numpy"], os.X_OK) and str(found.bisheng) in capsys.readouterr().out
    assert packages.fetch() == found and len(asked) == len(packages.VERSIONS)


def test_another_wheel_of_that_name_is_not_unpacked(
    cache: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(packages.HASHES, ("ascendnpu-ir", HERE[0], HERE[1]), "0" * 64)
    with pytest.raises(LoweringError, match=r"ascendnpu_ir-1\.2\.0.* expected 0{64}: it is not the published wheel"):
        packages.fetch()
    assert [path.name.partition("-")[0] for path in cache.iterdir()] == ["triton_ascend"]


def test_a_python_without_such_wheels(cache: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "python_tag", lambda: "cp399")
    with pytest.raises(
        LoweringError, match=r"no triton-ascend 3\.2\.0 for cp399 on .*; it is made for cp310 on aarch64"
    ):
        packages.fetch()
    assert not asked
