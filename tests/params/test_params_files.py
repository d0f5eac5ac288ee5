"""Directories, configs, indices and headers: broken ones are refused with a reason and nothing else."""

from __future__ import annotations

import json
import math
import pickle
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file

import params
from params import files
from params.names.rules import Merged, Names, Plain


def header(text: str | bytes, body: bytes = b"") -> bytes:
    """A safetensors file with this header."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw + body


def entry(dtype: str = "F32", shape: str = "[4]", offsets: str = "[0,16]") -> str:
    """A header's description of one tensor."""
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


BROKEN = {
    "empty": b"",
    "shorter than its length": b"\x01\0\0",
    "lying header length": struct.pack("<Q", 10**15) + b"{}",
    "header past the end": struct.pack("<Q", 100) + b"{}",
    "not JSON": header(b"\xff\xfe{]"),
    "a list": header("[1, 2]"),
    "deep": header("[" * 5000),
    "truncated": header(f'{{"a":{entry()}}}', bytes(8)),
    "bytes left over": header(f'{{"a":{entry()}}}', bytes(24)),
    "overlap": header(f'{{"a":{entry()},"b":{entry(offsets="[8,24]")}}}', bytes(24)),
    "hole": header(f'{{"a":{entry(offsets="[8,24]")}}}', bytes(24)),
    "backwards": header(f'{{"a":{entry(offsets="[16,0]")}}}', bytes(16)),
    "offsets past any file": header(f'{{"a":{entry(offsets="[0,18446744073709551615]")}}}', bytes(16)),
    "shape and bytes differ": header(f'{{"a":{entry(shape="[5]")}}}', bytes(16)),
    "shape overflows": header(f'{{"a":{entry(shape="[4294967296,4294967296,4]")}}}', bytes(16)),
    "negative size": header(f'{{"a":{entry(shape="[-4]")}}}', bytes(16)),
    "unknown dtype": header(f'{{"a":{entry(dtype="Q32")}}}', bytes(16)),
    "dtype without a PyTorch type": header(f'{{"a":{entry(dtype="F4", offsets="[0,2]")}}}', bytes(2)),
    "thousands of axes": header(f'{{"a":{entry(shape="[" + "1," * 5000 + "4]")}}}', bytes(16)),
    "endless strides": header(f'{{"a":{entry(shape=f"[{2**62},{2**62},0]", offsets="[0,0]")}}}'),
    "sizes that are no integers": header(f'{{"a":{entry(shape="[4.0]")}}}', bytes(16)),
    "true for a size": header(f'{{"a":{entry(shape="[true,4]")}}}', bytes(16)),
    "a name like a book": header(f'{{"{"a." * 5000}":{entry()}}}', bytes(16)),
    "half a character": header(f'{{"\\ud800":{entry()}}}', bytes(16)),
    "one name twice": header(f'{{"a":{entry()},"a":{entry()}}}', bytes(16)),
    "no shape": header('{"a":{"dtype":"F32","data_offsets":[0,16]}}', bytes(16)),
    "a pickle": pickle.dumps({"a": [1.0] * 64}),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_broken_weights(tmp_path: Path, content: bytes) -> None:
    """A file that is not exactly a safetensors file is named in a `CheckpointError`."""
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(params.CheckpointError, match=r"model\.safetensors"):
        params.tensor_names(tmp_path)


def test_headers_are_read_exactly(tmp_path: Path) -> None:
    """Names, shapes, dtypes and places, for every dtype there is, without reading values."""
    tensors = {word: torch.zeros(3, 2, dtype=dtype) for word, dtype in files.DTYPES.items()}
    tensors |= {"scalar": torch.tensor(1.0), "none": torch.zeros(0, 5)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = params.tensor_names(tmp_path)
    assert {name: (value.shape, value.dtype) for name, value in found.items()} == {
        name: (tuple(value.shape), value.dtype) for name, value in tensors.items()
    }
    stored = found["scalar"]
    assert (tmp_path / "model.safetensors").read_bytes()[stored.offset :][: stored.nbytes] == struct.pack("<f", 1.0)


SPEC = {"merged": params.TensorSpec((3, 2), parts=(1, 2)), "plain": params.TensorSpec((2,))}
NAMES = Names("fuzz", {"merged": Merged(("ab", "cd")), "plain": Plain("ef")})
GOOD = save({"ab": torch.ones(1, 2), "cd": torch.zeros(2, 2), "ef": torch.ones(2).bfloat16()})


def load_bytes(content: bytes) -> Any:
    """Load a checkpoint of one file with these bytes."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "model.safetensors").write_bytes(content)
        return params.load(directory, SPEC, NAMES)


def test_the_fuzzed_file_is_good() -> None:
    """Unchanged, the file of the next tests loads."""
    assert load_bytes(GOOD)["merged"].tolist() == [[1, 1], [0, 0], [0, 0]]


@settings(max_examples=150, deadline=None)
@given(flips=st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(1, 255)), min_size=1, max_size=6))
def test_flipped_bytes(flips: list[tuple[int, int]]) -> None:
    """Whatever bytes change, a file loads or raises `CheckpointError`."""
    content = bytearray(GOOD)
    for place, mask in flips:
        content[place] ^= mask
    try:
        tree = load_bytes(bytes(content))
    except params.CheckpointError:
        return
    assert tree["merged"].shape == (3, 2)


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, len(GOOD) - 1), more=st.binary(min_size=0, max_size=12))
def test_cut_files(cut: int, more: bytes) -> None:
    """A file of another length is refused, wherever it was cut and whatever follows."""
    content = GOOD[:cut] + more
    assume(len(content) != len(GOOD))
    with pytest.raises(params.CheckpointError):
        load_bytes(content)


WORDS = st.sampled_from(["F32", "F16", "I8", "BOOL", "F64", "F8_E4M3", "Q8", 3, None])
SIZES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 2**40, 2**63, -1, 2.0, True, "2", None]), max_size=4)
PLACES = st.one_of(st.tuples(st.integers(0, 40), st.integers(0, 40)), st.lists(st.integers(-4, 24), max_size=3))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_headers_that_the_library_takes(data: st.DataObject) -> None:
    """What a header may say is what safetensors itself reads, and no other."""
    tensors: dict[str, Any] = {}
    end = 0
    for name in data.draw(st.lists(st.sampled_from("abc"), unique=True)):
        word, place = data.draw(WORDS), data.draw(PLACES)
        shape: list[Any] = data.draw(SIZES)
        if data.draw(st.integers(0, 9)) and all(type(size) is int and 0 <= size < 9 for size in shape):
            itemsize = files.DTYPES[word].itemsize if word in files.DTYPES else 4
            place = [end, end := end + itemsize * math.prod(shape)]
        tensors[name] = {"dtype": word, "shape": shape, "data_offsets": place}
    content = header(json.dumps(tensors), bytes(data.draw(st.sampled_from([end, end, end, 16]))))
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "model.safetensors"
        file.write_bytes(content)
        try:
            with safe_open(file, framework="pt") as opened:
                theirs = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, OSError):
            theirs = None
        try:
            ours = {name: stored.shape for name, stored in files.read_header(file).items()}
        except params.CheckpointError:
            ours = None
    assert ours == theirs


def index(directory: Path, weight_map: Any, name: str = "model") -> None:
    """Write an index."""
    (directory / f"{name}.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def two_files(tmp_path: Path) -> Path:
    """A checkpoint of `a` and `b` in two files."""
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "two.safetensors")
    index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    return tmp_path


def test_index(two_files: Path) -> None:
    """Each tensor comes from the file the index names."""
    assert {name: stored.file.name for name, stored in params.tensor_names(two_files).items()} == {
        "a": "one.safetensors",
        "b": "two.safetensors",
    }


@pytest.mark.parametrize(
    "file",
    ["../one.safetensors", "/etc/one.safetensors", "sub/one.safetensors", "..\\one.safetensors", "c:one.safetensors",
     "one.bin", "..", "", ".safetensors/..", "a\0.safetensors", "\ud800.safetensors", "a" * 300 + ".safetensors",
     3, None, ["one.safetensors"]],
)  # fmt: skip
def test_an_index_names_files_beside_it_only(two_files: Path, file: Any) -> None:
    """No path, no other kind of file, no other type gets past the index."""
    index(two_files, {"a": "one.safetensors", "b": file})
    with pytest.raises(params.CheckpointError, match="may only name safetensors files beside it"):
        params.tensor_names(two_files)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "one.safetensors", "b": "gone.safetensors", "c": "lost.safetensors"}, "gone.safetensors, lost.safeten"),
        ({"a": "one.safetensors", "b": "one.safetensors"}, r"b \(not in one.safetensors\)"),
        ({"a": "two.safetensors", "b": "one.safetensors"}, "a .not in two.safetensors., b .not in one.safetensors."),
        (
            {"b": "two.safetensors", "c": "one.safetensors"},
            r"c .not in one.*, a .in one.safetensors, not in the index.",
        ),
        ({}, "no weight_map"),
        (["a"], "no weight_map"),
        (None, "no weight_map"),
    ],
)
def test_wrong_indices(two_files: Path, weight_map: Any, message: str) -> None:
    """Missing files are all listed; an index that disagrees with its files is refused."""
    index(two_files, weight_map)
    with pytest.raises(params.CheckpointError, match=message):
        params.tensor_names(two_files)


def test_an_index_must_name_every_tensor_of_its_files(tmp_path: Path) -> None:
    """An index cut short is not taken for the whole; a file that it does not name stays out."""
    save_file({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"d": torch.ones(2)}, tmp_path / "stray.safetensors")
    index(tmp_path, {"a": "one.safetensors"})
    with pytest.raises(
        params.CheckpointError, match=r"disagree: b \(in one.safetensors, not in the index\), c "
    ) as caught:
        params.tensor_names(tmp_path)
    assert "stray" not in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"7", b"\xff", b"[" * 100_000, b'{"weight_map": {'])
def test_malformed_index(two_files: Path, text: bytes) -> None:
    """An index that is not a JSON object is refused by name."""
    (two_files / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(params.CheckpointError, match=r"model.safetensors.index.json"):
        params.tensor_names(two_files)


def test_two_indices(two_files: Path) -> None:
    """Which index counts is not guessed."""
    index(two_files, {"a": "one.safetensors"}, "other")
    with pytest.raises(params.CheckpointError, match=r"2 indices: model.safetensors.index.json, other.safetensors"):
        params.tensor_names(two_files)


@pytest.mark.parametrize(("stale", "file"), [("b", "one"), ("a", "two")])
def test_a_tensor_in_two_files(two_files: Path, stale: str, file: str) -> None:
    """The index says which of two counts, the earlier or the later one; without an index there is no telling."""
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, two_files / f"{file}.safetensors")
    found = params.tensor_names(two_files)
    assert {name: home.file.name for name, home in found.items()} == {"a": "one.safetensors", "b": "two.safetensors"}
    (two_files / "model.safetensors.index.json").unlink()
    with pytest.raises(params.CheckpointError, match=rf"two files: {stale} \(in one.safetensors and two.safetensors\)"):
        params.tensor_names(two_files)


@pytest.mark.parametrize(
    "left", ["index and shards", "index", "broken index", "shards", "another index", "named by its index"]
)
def test_one_file_beside_an_older_index(two_files: Path, left: str) -> None:
    """`model.safetensors` counts alone, as in transformers, unless its own index names it beside others."""
    save_file({"a": torch.zeros(3)}, two_files / "model.safetensors")
    if left == "index":
        (two_files / "one.safetensors").unlink()
    if left == "broken index":
        (two_files / "model.safetensors.index.json").write_text("{")
    if left in ("shards", "another index"):
        (two_files / "model.safetensors.index.json").unlink()
    if left == "another index":
        index(two_files, {"a": "one.safetensors", "b": "two.safetensors"}, "consolidated")
    if left == "named by its index":
        index(two_files, {"a": "model.safetensors", "b": "two.safetensors"})
    found = params.tensor_names(two_files)
    assert found["a"].shape == (3,)
    assert ("b" in found) == (left == "named by its index")


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ("one.safetensors", {"a": "one.safetensors"}),
        ("other.safetensors.index.json", {"b": "two.safetensors"}),
        ("../one.safetensors", r"transformers_weights may only name safetensors files .*, not '../one.safetensors'"),
        (["one.safetensors"], "transformers_weights may only name"),
        ("gone.safetensors", "gone.safetensors is not a file"),
        ("gone.safetensors.index.json", "gone.safetensors.index.json is not a file, or a link to nothing"),
    ],
)
def test_a_config_that_names_its_weights(two_files: Path, named: Any, found: Any) -> None:
    """What it names comes before everything else, as in transformers."""
    save_file({"a": torch.zeros(3)}, two_files / "model.safetensors")
    index(two_files, {"b": "two.safetensors"}, "other")
    (two_files / "config.json").write_text(json.dumps({"transformers_weights": named}))
    if isinstance(found, dict):
        assert {name: stored.file.name for name, stored in params.tensor_names(two_files).items()} == found
    else:
        with pytest.raises((params.CheckpointError, params.ConfigError), match=found):
            params.tensor_names(two_files)


def test_float_weights_beside_quantised_ones(two_files: Path) -> None:
    """Which of the two a description is about is not guessed."""
    for name in ("model", "quant_model_weights"):
        save_file({"a": torch.zeros(3)}, two_files / f"{name}.safetensors")
    with pytest.raises(params.CheckpointError, match=r"twice: model.safetensors and, quantised, quant_model_weights.s"):
        params.tensor_names(two_files)


def test_a_link_to_nothing(two_files: Path) -> None:
    """A dangling link, as an interrupted download leaves it, is named with and without an index."""
    (two_files / "two.safetensors").unlink()
    (two_files / "two.safetensors").symlink_to(two_files / "blobs" / "123")
    with pytest.raises(params.CheckpointError, match=r"two.safetensors"):
        params.tensor_names(two_files)
    (two_files / "model.safetensors.index.json").unlink()
    with pytest.raises(params.CheckpointError, match=r"two.safetensors is not a file, or a link to nothing"):
        params.tensor_names(two_files)


def test_only_the_top_of_a_directory_counts(two_files: Path) -> None:
    """Weights in folders and hidden files are other things; links to files elsewhere are fine (the hub's cache)."""
    (two_files / "model.safetensors.index.json").unlink()
    (two_files / "optional").mkdir()
    (two_files / "optional" / "rotation.safetensors").write_bytes(b"")
    (two_files / ".two.safetensors.1.part.safetensors").write_bytes(b"")
    (two_files / "blobs").mkdir()
    (two_files / "two.safetensors").rename(two_files / "blobs" / "123")
    (two_files / "two.safetensors").symlink_to(Path("blobs") / "123")
    assert set(params.tensor_names(two_files)) == {"a", "b"}


def test_no_weights(tmp_path: Path) -> None:
    """Nothing there, and nothing there but a pickle, are told apart; a pickle is never opened."""
    with pytest.raises(params.CheckpointError, match=r"has no .*safetensors file"):
        params.tensor_names(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    with pytest.raises(
        params.CheckpointError, match=r"pickled weights only \(pytorch_model.bin\).*convert: .*save_pre"
    ):
        params.tensor_names(tmp_path)


def test_config(tmp_path: Path) -> None:
    """A config is a JSON object."""
    (tmp_path / "config.json").write_text('{"model_type": "é", "n": 1e-6}')
    assert params.read_config(tmp_path) == {"model_type": "é", "n": 1e-6}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff{}", "is not JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "is not JSON"),
        (b"[1]", "holds a list, expected an object"),
        (b"null", "holds a NoneType"),
        (b"[" * 100_000, "nested too deeply"),
        (b" " * (files.CONFIG_LIMIT + 1), "more than the 16777216"),
    ],
    ids=["empty", "cut", "bytes", "digits", "list", "null", "deep", "large"],
)
def test_bad_configs(tmp_path: Path, text: bytes, message: str) -> None:
    """Every way a config can be wrong has its reason."""
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(params.ConfigError, match=message):
        params.read_config(tmp_path)


def test_no_config(tmp_path: Path) -> None:
    """A directory without config is no checkpoint."""
    with pytest.raises(params.CheckpointError, match=r"has no config.json"):
        params.read_config(tmp_path)


def test_resolve_directory(tmp_path: Path) -> None:
    """A directory is itself, whatever type its name has."""
    assert params.resolve(tmp_path) == params.resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("path", ["nowhere", "./a/b", "/no/such/place", "../x", "a/b/c", "a b/c", "x/.x"])
def test_resolve_nothing(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be a hub id is not asked for there."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(params.CheckpointError, match="no directory"):
        params.resolve(path)


def test_resolve_file(tmp_path: Path) -> None:
    """A file is pointed back to its directory."""
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(params.CheckpointError, match="is a file; give the directory"):
        params.resolve(tmp_path / "model.safetensors")


def test_resolve_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id is fetched without code, pickles and folders."""
    from huggingface_hub.utils import filter_repo_objects

    offered = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "vocab.txt",
               "tokenizer.json", "tokenizer.model", "chat_template.jinja", "pytorch_model.bin", "modeling.py", "w.pt",
               "x.h5", "tokenizer_x.py", "onnx/config.json", "optional/rotation.safetensors"]  # fmt: skip
    wanted = {}

    def download(name: str, **patterns: Any) -> str:
        wanted[name] = set(filter_repo_objects(offered, **patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert params.resolve("owner/name") == tmp_path
    assert wanted == {"owner/name": set(offered[:7])}


@pytest.mark.parametrize("kind", ["unknown", "offline", "proxy", "invalid"])
def test_hub_errors(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No such repository and no connection are told apart."""
    from huggingface_hub import errors

    bare = next(base for base in errors.HfHubHTTPError.__bases__ if base is not OSError)
    unknown = errors.RepositoryNotFoundError.__new__(errors.RepositoryNotFoundError)
    raised = {
        "unknown": unknown,
        "offline": errors.LocalEntryNotFoundError("no cache"),
        "proxy": bare("proxy says no"),
        "invalid": errors.HFValidationError("bad name"),
    }[kind]

    def download(*_: Any, **__: Any) -> str:
        raise raised

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    message = "could not be reached" if kind in ("offline", "proxy") else "has no such repository"
    with pytest.raises(
        params.CheckpointError, match=f"no directory 'owner/name' here, and the hub.*{message}|{message}"
    ):
        params.resolve("owner/name")
