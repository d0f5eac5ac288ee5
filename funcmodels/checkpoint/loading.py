"""`load`: a checkpoint directory, or one on the hub, as a model and its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

import params as checkpoints
from lowering.detect import device_named
from params.checkpoint import Tables
from params.errors import CheckpointError
from params.quant.schemes import is_quantized_checkpoint
from params.sharding import Ranks

from ..config import check_layers, section
from ..model import Model, build
from .parallel import ranks_of
from .text import Tokenizer

BUNDLED = Path(__file__).parent.parent / "bundled"
"""Directory of the small model that comes with the package."""


class Checkpoint(NamedTuple):
    """A checkpoint before any weight is read: where it is, what it holds, and the model that fits it."""

    directory: Path
    tensors: dict[str, checkpoints.StoredTensor]
    model: Model


def load(
    path_or_hub_id: str | Path,
    dtype: torch.dtype | None = torch.bfloat16,
    device: torch.device | str = "cpu",
    mesh: DeviceMesh | Ranks | None = None,
    tables: Tables = "device",
) -> tuple[Model, Any]:
    """The model and the parameters of a checkpoint: a directory, a hub id (`owner/name`), or `"bundled"`.

    With a `mesh` of one axis each of its ranks reads its own part of the parameters: heads, slices of feed-forward
    layers and of experts, rows of token tables. `ranks_of(mesh, whole_experts=True)` shares out experts whole instead.

    `dtype` is that of the parameters, except for those that a family wants in float32 at least; `None` keeps the stored
    ones. With float64 all is float64, states of the model too unless they are asked for otherwise. A draft head is
    loaded where the checkpoint has one. `tables` says where a large table that is read by rows goes: beside the other
    parameters, on the "host", or with "file" nowhere, so that rows are read from the checkpoint's files. Raises
    `CheckpointError` or `ConfigError`; nothing is loaded in part.
    """
    device = device_named(device)
    directory, tensors, model = open_checkpoint(path_or_hub_id)
    if mesh is not None:
        model = model.sharded(mesh if isinstance(mesh, Ranks) else ranks_of(mesh))
    spec, names = model.whole_spec(), model.family.names
    params = checkpoints.load(
        directory, spec, names, dtype=dtype, device=device, tensors=tensors, tables=tables, ranks=model.ranks
    )
    unread = checkpoints.Unread.of(directory, tensors, names, [path for path, _ in checkpoints.items(spec)])
    return replace(model, unread=unread, dtype=params.embed.weight.dtype), params


def without_weights(
    path_or_hub_id: str | Path, dtype: torch.dtype = torch.bfloat16, schemes: Mapping[str, str] | None = None
) -> tuple[Model, Any]:
    """The model of a directory and its parameters as meta tensors: what a program is lowered with.

    Of a quantised checkpoint they are the quantised ones, which takes the headers of its files; of any other the config
    is enough. `schemes` quantises these as `params.quantize` does, from pattern of leaf path to word.
    """
    directory = directory_of(path_or_hub_id)
    if is_quantized_checkpoint(directory):
        directory, tensors, model = open_checkpoint(path_or_hub_id)
        spec = checkpoints.quantized_spec(directory, model.whole_spec(dtype), model.family.names, tensors)
    else:
        model = build(directory)
        spec = model.whole_spec(dtype)
    params = checkpoints.init(spec, dtype=dtype, device="meta")
    if schemes:
        # Ranges are values, which nothing here has.
        ranges = {path: (-1.0, 1.0) for path, _ in checkpoints.items(params)}
        params = checkpoints.quantize(params, schemes, input_ranges=ranges)
    return model, params


def open_checkpoint(path_or_hub_id: str | Path) -> Checkpoint:
    """What `load` does before it reads weights: config, tokenizer, and the tensors' names and places."""
    directory = directory_of(path_or_hub_id)
    config = checkpoints.read_config(directory)
    model = build(config)  # says what is not known here before it says which files are missing
    tensors = checkpoints.tensor_names(directory)
    check_layers(model.config, len(tensors))
    model = with_head_of(model, tensors)
    return Checkpoint(directory, tensors, replace(model, tokenizer=Tokenizer.of(directory, config)))


def with_head_of(model: Model, tensors: Iterable[str]) -> Model:
    """The model with a draft head if and only if its checkpoint's tensors have one.

    The config's field is often wrong: repositories without a head keep it, and saving with transformers drops it.
    """
    layers = _mtp_layers(map(model.family.names.canonical, tensors))
    said = bool(getattr(model.config, "mtp_num_hidden_layers", 0))
    return model if bool(layers) == said else build(_with_mtp(model.config_json, layers))


def directory_of(path_or_hub_id: str | Path) -> Path:
    """The directory that a path, a hub id or `"bundled"` stands for."""
    if path_or_hub_id != "bundled":
        return checkpoints.resolve(path_or_hub_id)
    if not (BUNDLED / "config.json").is_file():
        raise CheckpointError("this installation has no bundled model; give a checkpoint directory or a hub id")
    return BUNDLED


def _mtp_layers(names: Iterable[str]) -> int:
    """How many draft-head layers a checkpoint's tensors make up."""
    words = (name.split(".") for name in names if name.startswith("mtp.layers."))
    return len({word[2] for word in words})


def _with_mtp(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    count = {"mtp_num_hidden_layers": layers}
    nested = section(config, "text_config")
    return {**config, **count} | ({"text_config": {**nested, **count}} if nested else {})
