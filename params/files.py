"""A checkpoint directory, before any weight is read: where it is, its config, its tensors' names, shapes and places.

Nothing here or elsewhere in `params` unpickles: weights are safetensors, everything else is JSON.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from params.errors import CheckpointError, ConfigError, cut
from params.guarded import NAME, lies_at, open_file, parsed, place, read_object

CONFIG_LIMIT = 16 * 2**20
"""Bytes a config.json may have; real ones have a few kilobytes."""
INDEX_LIMIT = 256 * 2**20
"""Bytes an index may have; a quarter of a million expert tensors take about 40 MB."""
HEADER_LIMIT, HEADER_VALUES = 100_000_000, 2**22
"""Bytes and values that the header of a safetensors file may have. The first is the format's own bound."""
AXES = 64
"""More than this PyTorch has no tensor of."""

FLOAT_STEM, QUANTIZED_STEM = "model", "quant_model_weights"
"""How files of weights are called, ModelSlim's and all others."""
SINGLE, INDEX = f"{FLOAT_STEM}.safetensors", f"{FLOAT_STEM}.safetensors.index.json"
NAMED = "transformers_weights"
"""The field of a config that names the file or the index of its weights."""

HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
"""What is fetched from the hub: configuration, weights, tokenizer. Never pickled weights, never code."""

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
"""The header's dtype words that PyTorch can hold."""


class StoredTensor(NamedTuple):
    """A tensor in a file: its shape and dtype, and its bytes as `nbytes` at `offset` of `file`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    offset: int
    nbytes: int


def resolve(path_or_hub_id: str | Path) -> Path:
    """The directory of a checkpoint: an existing one, or a hub repository (`owner/name`) fetched into the hub's cache.

    `CheckpointError` when it is neither, or when the hub cannot give it. `TypeError` for what is no path at all.
    """
    if not isinstance(path_or_hub_id, (str, os.PathLike)):
        raise TypeError(f"a checkpoint is a directory or a hub id (owner/name), found {path_or_hub_id!r:.100}")
    if not str(path_or_hub_id):
        raise CheckpointError("the name of a checkpoint is empty; give a directory or a hub id (owner/name)")
    directory = Path(os.path.expanduser(place("the name of a checkpoint", path_or_hub_id)))
    if os.path.isdir(directory):  # unlike a path's own test false for a name that no system has files of
        return directory
    if os.path.exists(directory):
        raise CheckpointError(f"{directory} is a file; give the directory that holds it and its config.json")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(path_or_hub_id)):
        raise CheckpointError(
            f"no directory {cut(str(directory))}, and {cut(repr(str(path_or_hub_id)))} is not a hub id (owner/name); "
            "check the path"
        )
    return _download(str(path_or_hub_id))


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    # a proxy's or a timeout's error is the client's own, which the hub's errors are built on
    network = tuple(base for base in HfHubHTTPError.__bases__ if issubclass(base, Exception))
    try:
        return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES, ignore_patterns=["*/*"]))
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise CheckpointError(
            f"no directory {hub_id!r} here, and the hub has no such repository, or not for this account: {error}"
        ) from error
    except (OSError, *network) as error:
        raise CheckpointError(
            f"no directory {hub_id!r} here, and the hub could not be reached for a repository of that name: {error}; "
            "give a directory, or try again with a connection"
        ) from error


def read_config(directory: str | Path) -> dict[str, Any]:
    """`config.json` of a checkpoint. `CheckpointError` when there is none, `ConfigError` when it is not an object."""
    path = place("the directory of a checkpoint", directory) / "config.json"
    if not lies_at(path):
        raise CheckpointError(
            f"{cut(str(directory))} has no config.json; a checkpoint is a directory with config and weights"
        )
    return read_object(path, CONFIG_LIMIT, ConfigError)


def tensor_names(directory: str | Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint under its own name, from the files' headers alone.

    The files that count are chosen as transformers does (`_get_resolved_checkpoint_files` in its modeling_utils.py):
    the file or index that `config.json` names as `transformers_weights`; `model.safetensors` alone, whatever index and
    shards lie beside it, unless its index names it too; a `*.safetensors.index.json`; all `*.safetensors` there are. An
    index assigns each tensor to one file, and copies of it in others are passed over.

    `CheckpointError` for a broken index or header, an index that leaves out a tensor of its files or has one that they
    lack, missing files, and without an index for names that stand in two files.
    """
    directory = place("the directory of a checkpoint", directory)
    if not os.path.isdir(directory):
        raise CheckpointError(f"{cut(str(directory))} is no directory; give one with config and weights")
    named = _named_weights(directory)
    index = _read_index(directory, named)
    if index is None:
        return _joined(directory, _loose_files(directory) if named is None else [named])
    missing = sorted(file for file in set(index.values()) if not lies_at(directory / file))
    if missing:
        raise CheckpointError(
            f"{directory}: the index names files that are not there: {listed(missing)}; finish the download"
        )
    headers = {file: read_header(directory / file) for file in sorted(set(index.values()))}
    _check_index(directory, index, headers)
    return {name: headers[file][name] for name, file in index.items()}


def _joined(directory: Path, files: Iterable[str]) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for file in files:
        header = read_header(directory / file)
        twice = [f"{name} (in {found[name].file.name} and {file})" for name in header if name in found]
        if twice:
            raise CheckpointError(f"{directory}: tensors that stand in two files: {listed(twice)}; remove one")
        found |= header
    return found


def _visible(directory: Path, pattern: str) -> list[str]:
    """Names at the top of the directory, without hidden ones (unfinished saves, file-manager leftovers)."""
    return sorted(path.name for path in directory.glob(pattern) if not path.name.startswith("."))


def _named_weights(directory: Path) -> str | None:
    """What `config.json`, if there is one, names as the file or the index of the weights."""
    config = read_config(directory) if lies_at(directory / "config.json") else {}
    named = config.get(NAMED)
    if named is not None and not _plain_file(str(named).removesuffix(".index.json")):
        raise ConfigError(
            f"{directory}: {NAMED} may only name safetensors files beside it or an index of such, not {named!r}"
        )
    return named


def _read_index(directory: Path, named: str | None) -> dict[str, str] | None:
    """From tensor to file; `None` where no index counts."""
    if named is not None:
        return _weight_map(directory / named) if named.endswith(".index.json") else None
    if lies_at(directory / SINGLE):
        try:
            found = _weight_map(directory / INDEX) if lies_at(directory / INDEX) else {}
        except CheckpointError:
            return None  # a leftover, which nothing else looks at either
        return found if SINGLE in found.values() else None
    indices = _visible(directory, "*.safetensors.index.json")
    if len(indices) > 1:
        raise CheckpointError(f"{directory} has {len(indices)} indices: {listed(indices)}; keep the one that counts")
    return _weight_map(directory / indices[0]) if indices else None


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = read_object(path, INDEX_LIMIT, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map from tensor to file")
    wrong = [repr(file) for file in weight_map.values() if not _plain_file(file)]
    if wrong:
        raise CheckpointError(f"{path}: a weight_map may only name safetensors files beside it, not {listed(wrong)}")
    return weight_map


def _plain_file(file: object) -> bool:
    """A name that can only mean a file of the same directory."""
    return isinstance(file, str) and re.fullmatch(r"[^/\\:\0\ud800-\udfff]{1,200}\.safetensors", file) is not None


def _loose_files(directory: Path) -> list[str]:
    if lies_at(directory / SINGLE):
        others = _visible(directory, f"{QUANTIZED_STEM}*.safetensors")
        if others:
            raise CheckpointError(
                f"{directory} has a model's weights twice: {SINGLE} and, quantised, {listed(others)}; keep those that "
                "count"
            )
        return [SINGLE]
    files = _visible(directory, "*.safetensors")
    if files:
        return files
    pickled = [name for pattern in ("*.bin", "*.pt", "*.pth") for name in _visible(directory, pattern)]
    if pickled:
        raise CheckpointError(
            f"{directory} has pickled weights only ({listed(pickled)}); they can run code and are not read. Where you "
            "trust them, convert: AutoModelForCausalLM.from_pretrained(directory).save_pretrained(new_directory)"
        )
    raise CheckpointError(f"{directory} has no *.safetensors file")


def _check_index(directory: Path, index: dict[str, str], headers: dict[str, dict[str, StoredTensor]]) -> None:
    wrong = [f"{name} (not in {file})" for name, file in index.items() if name not in headers[file]]
    wrong += [
        f"{name} (in {file}, not in the index)"
        for file, header in headers.items()
        for name in header
        if name not in index
    ]
    if wrong:
        raise CheckpointError(f"{directory}: the index and the files disagree: {listed(wrong)}; download them again")


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file. `CheckpointError` when the header does not describe the file exactly."""
    try:
        with open_file(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if length > min(size - 8, HEADER_LIMIT):
                raise _broken(file, f"its header would have {length} bytes, the file has {size}")
            content = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    header = parsed(content, file, CheckpointError, HEADER_VALUES, object_pairs_hook=_distinct)
    if not isinstance(header, dict):
        raise _broken(file, f"its header is a {type(header).__name__}, expected an object")
    header.pop("__metadata__", None)
    found = {name: _stored(name, entry, file, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for name, tensor in sorted(found.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end:
            raise _broken(file, f"{name} begins at byte {tensor.offset}, what is before it ends at {end}")
        end += tensor.nbytes
    if end != size:
        raise _broken(file, f"its tensors end at byte {end}, the file has {size}")
    return found


def _broken(file: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{file} is not a whole safetensors file: {why}; download or save it again")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys differ; of two tensors of one name only the last would be seen."""
    found = dict(pairs)
    if len(found) != len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"its header names {name[:NAME]!r} twice")
    return found


def _stored(name: str, entry: Any, file: Path, base: int) -> StoredTensor:
    """A tensor of a header, of which each part may be anything."""
    if len(name) > NAME or not name.isprintable():
        raise _broken(file, f"{name[:40]!r}... is a name of {len(name)} characters, expected at most {NAME} printable")
    if not isinstance(entry, Mapping) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _broken(file, f"{name} must have dtype, shape and data_offsets and nothing else")
    word, shape, place = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(word, str) or word not in DTYPES:
        raise CheckpointError(f"{file}: {name} has dtype {cut(repr(word))}, which PyTorch has no type for")
    if not (_are_sizes(shape) and len(shape) <= AXES and math.prod(size or 1 for size in shape) < 2**60):
        raise _broken(file, f"{name} has shape {cut(str(shape))}, expected at most {AXES} sizes")
    if not (_are_sizes(place) and len(place) == 2):
        raise _broken(file, f"{name} has data_offsets {cut(str(place))}, expected where its bytes begin and end")
    nbytes = math.prod(shape) * DTYPES[word].itemsize
    if place[1] - place[0] != nbytes:
        raise _broken(file, f"{name} {word}{shape} has {nbytes} bytes, data_offsets {place} are of others")
    return StoredTensor(tuple(shape), DTYPES[word], file, base + place[0], nbytes)


def _are_sizes(found: Any) -> bool:
    return isinstance(found, list) and all(type(item) is int and 0 <= item < 2**63 for item in found)


def listed(names: Iterable[str], most: int = 20) -> str:
    """Names for a message: all of them, or the first few and how many more."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
