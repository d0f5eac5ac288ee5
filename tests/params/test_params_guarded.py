"""Every file of a checkpoint is a regular one inside of its directory and of bounded size, or refused at once."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import funcmodels as fm
import params
from funcmodels.checkpoint.loading import BUNDLED
from params.guarded import NAME, check_plain, parsed, read_bytes
from params.names.rules import Names, Plain

READ = [
    "config.json", "generation_config.json", "model.safetensors.index.json", "one.safetensors",
    "quant_model_description.json", "tokenizer.json",
]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one file of each kind that is read, but for a description."""
    directory = shutil.copytree(BUNDLED, tmp_path_factory.mktemp("checkpoint") / "bundled")
    (directory / "model.safetensors").rename(directory / "one.safetensors")
    index = {"weight_map": dict.fromkeys(params.tensor_names(directory), "one.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def _socket(path: Path, elsewhere: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


def _outside(path: Path, elsewhere: Path) -> None:
    elsewhere.write_text("{}")
    path.symlink_to(elsewhere)


HOSTILE: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "pipe": (lambda path, _: os.mkfifo(path), "is a pipe, expected a regular file"),
    "endless": (lambda path, _: path.symlink_to("/dev/zero"), "is a device, expected"),
    "linked pipe": (lambda path, elsewhere: (os.mkfifo(elsewhere), path.symlink_to(elsewhere))[0], "is a pipe"),
    "socket": (_socket, "is a socket, expected"),
    "directory": (lambda path, _: path.mkdir(), "is a directory, expected"),
    "link outside": (_outside, "outside of its directory; put the file itself there"),
    "process": (lambda path, _: path.symlink_to("/proc/self/environ"), "outside of its directory"),
    "loop": (lambda path, _: path.symlink_to(path), "cannot be read: Too many levels of symbolic links"),
    "link to nothing": (lambda path, _: path.symlink_to("gone"), "is not a file, or a link to nothing"),
    "huge": (lambda path, _: (path.touch(), os.truncate(path, 2**40))[0], "more than the|is not JSON"),
}


def _read_all(directory: Path) -> None:
    model, _ = fm.load(directory)
    assert model.tokenizer is not None
    model.tokenizer.encode("text")


@pytest.mark.plain
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", READ)
def test_what_is_no_file_of_the_directory(name: str, kind: str, checkpoint: Path, tmp_path: Path) -> None:
    """Neither waited for nor read, whichever file of a checkpoint it stands for."""
    make, message = HOSTILE[kind]
    directory = shutil.copytree(checkpoint, tmp_path / "copy", copy_function=os.link)
    (directory / name).unlink(missing_ok=True)
    make(directory / name, tmp_path / "elsewhere")
    with pytest.raises((fm.CheckpointError, fm.ConfigError), match=message) as caught:
        _read_all(directory)
    assert name in str(caught.value)


def test_links_as_the_hubs_cache_has_them(checkpoint: Path, tmp_path: Path) -> None:
    """`snapshots/<revision>/name` leads to `blobs/<hash>`, beside `snapshots` and nowhere else."""
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(file for file in checkpoint.iterdir() if file.is_file()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / str(number))
    assert params.equal(fm.load(snapshot)[1], fm.load(checkpoint)[1])
    (tmp_path / "elsewhere").symlink_to(snapshot)
    fm.load(tmp_path / "elsewhere")
    snapshot.parent.rename(tmp_path / "others")
    with pytest.raises(params.ConfigError, match="outside of its directory"):
        fm.load(tmp_path / "others" / "abc")


def test_values_are_read_from_files_that_are_still_there(tmp_path: Path) -> None:
    """What takes the place of a file after its header was read is not waited for either."""
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    names = params.tensor_names(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(params.CheckpointError, match="is a pipe"):
        params.load(tmp_path, {"w": params.TensorSpec((2,))}, Names("x", {"w": Plain("w")}), tensors=names)


def test_a_file_has_a_bound(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(11))
    assert read_bytes(tmp_path / "a", 11) == bytes(11)
    with pytest.raises(params.CheckpointError, match="11 bytes, more than the 10"):
        read_bytes(tmp_path / "a", 10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 500 + "]" * 500, "nested too deeply, more than 64 levels"),
        ('{"a":' * 200 + "1" + "}" * 200, "nested too deeply"),
        (f'{{"a": {2**129}}}', "a is an integer of 130 bits, more than 128"),
        (f'{{"{"n" * (NAME + 1)}": 1}}', "is a name of 513 characters, more than 512"),
        ("[" + "[]," * 2**20 + "1]", "more than 1048576 values"),
    ],
    ids=["lists", "sections", "integer", "name", "values"],
)
def test_json_that_would_cost_more_than_it_says(text: str, message: str) -> None:
    with pytest.raises(params.ConfigError, match=message):
        check_plain(parsed(text.encode(), Path("c.json"), params.ConfigError), "c.json", params.ConfigError)


def test_lists_that_hold_each_other() -> None:
    """A config in memory may be a circle; looking at it ends."""
    one: dict[str, object] = {}
    one |= {"a": one, "b": one, "c": [one, one]}
    with pytest.raises(params.ConfigError, match="nested too deeply"):
        check_plain(one, "config", params.ConfigError)
