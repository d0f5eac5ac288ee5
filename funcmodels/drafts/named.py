"""`draft`: what drafts for a model, by name: its own head, or a block draft in a directory of its own."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, overload

import torch

import params as checkpoints
from lowering.detect import device_named
from params.errors import ConfigError, cut
from params.guarded import place
from params.modes import lasting
from params.names.block_drafts import NAMES
from params.names.rules import Ignore

from ..checkpoint.loading import BUNDLED, directory_of, with_head_of
from ..config import check_layers
from ..model import Model, build
from .block import BlockDraft, BlockParams, with_context
from .block_config import DFLASH, BlockConfig, read_config
from .dflash import DFlashDraft
from .dspark import DSparkDraft
from .mtp import MtpDraft


@overload
def draft(model: Model, kind: Literal["mtp"]) -> MtpDraft: ...
@overload
def draft(
    model: Model, kind: str | Path, dtype: torch.dtype | None = torch.bfloat16, device: torch.device | str = "cpu"
) -> MtpDraft | BlockDraft: ...
@lasting
def draft(
    model: Model,
    kind: str | Path,
    dtype: torch.dtype | None = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> MtpDraft | BlockDraft:
    """What drafts for `model`: its own head, or a block draft (DFlash, DSpark) in a directory of its own or on the hub.

    `"mtp"` is the multi-token prediction head that came with the model's checkpoint, `"dspark"` the block draft that
    comes with the bundled model. `dtype` and `device` are those of a block draft's parameters, as for `load`. Raises
    `ValueError` for a model without such a head, `ConfigError` for a draft of another kind or model, `CheckpointError`.
    """
    if kind == "mtp":
        if model.family.mtp is None:
            raise ValueError(
                f"draft: models of type {model.config_json['model_type']!r} have no mtp head; give the directory of a "
                "block draft, or 'none'"
            )
        if default_draft(model) == "none":
            raise ValueError(
                "draft: this model has no mtp head (its checkpoint holds no mtp tensors); load one that has, or give "
                "'none'"
            )
        return MtpDraft(model)
    directory = directory_of_draft(kind)
    config = read_config(checkpoints.read_config(directory), _layers(model))
    _check_fit(model, config)
    tensors, place = checkpoints.tensor_names(directory), device_named(device)
    check_layers(config, len(tensors))
    own = checkpoints.load(directory, BlockParams.spec(config), NAMES, dtype=dtype, device=place, tensors=tensors)
    return (DFlashDraft if config.architecture in DFLASH else DSparkDraft)(model, config, with_context(own))


@overload
def load_draft(
    path_or_hub_id: str | Path,
    kind: Literal["mtp"] = "mtp",
    dtype: torch.dtype | None = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> tuple[MtpDraft, Any]: ...
@overload
def load_draft(
    path_or_hub_id: str | Path,
    kind: str | Path,
    dtype: torch.dtype | None = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> tuple[MtpDraft | BlockDraft, Any]: ...
@lasting
def load_draft(
    path_or_hub_id: str | Path,
    kind: str | Path = "mtp",
    dtype: torch.dtype | None = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> tuple[MtpDraft | BlockDraft, Any]:
    """A draft and the parameters that it takes, without its model: to run, study or train the draft alone.

    `path_or_hub_id` is the model's checkpoint, as for `load`. Read of it are config, token table and output projection,
    and for `kind` `"mtp"` the head; the parameters have no layers, and `Model.forward` refuses them. What it would
    have made goes in as `Output.of(hidden, extra)`, and `own_state` gives the draft's state. `kind` is that of `draft`,
    `dtype` and `device` are those of `load`. Raises as the two do.
    """
    directory = directory_of(path_or_hub_id)
    stored, config = checkpoints.tensor_names(directory), checkpoints.read_config(directory)
    model = with_head_of(build(config), stored)
    made = draft(model, kind) if kind == "mtp" else draft(model, kind, dtype, device)
    spec = model.whole_spec(dtype)
    apart = {name: getattr(spec, name) if name in _BORROWED else _nothing(getattr(spec, name)) for name in vars(spec)}
    spec = checkpoints.unchecked(type(spec), **apart | ({} if kind == "mtp" else {"mtp": None}))
    names = replace(model.family.names, ignore=(*model.family.names.ignore, *_NOT_THE_DRAFTS))
    params = checkpoints.load(directory, spec, names, dtype=dtype, device=device_named(device), tensors=stored)
    return replace(made, model=replace(model, dtype=params.embed.weight.dtype)), params


_BORROWED = ("embed", "head", "mtp")
"""What drafts read of a model's parameters, in each family."""
_NOT_THE_DRAFTS = (Ignore("model.**", "layers of the model, which no draft reads"),)


def _nothing(part: Any) -> Any:
    return () if isinstance(part, tuple) else None


def directory_of_draft(kind: str | Path) -> Path:
    """The directory of a block draft. `ValueError` for a word that is no draft's name, directory or hub id."""
    if kind == "dspark":
        return BUNDLED / "dspark"
    if not os.path.isdir(place("the name of a checkpoint", kind)) and "/" not in str(kind):
        shown = cut(repr(str(kind)))
        raise ValueError(f"draft: {shown} is not a known draft; give 'mtp', 'dspark' or the directory of one")
    return checkpoints.resolve(kind)


def _layers(model: Model) -> int:
    if model.family.scales_embeddings:
        raise ConfigError(
            f"draft: models of type {model.config_json['model_type']!r} scale their embeddings, and what a block draft "
            "would read of them is not known; give 'none'"
        )
    return model.config.num_hidden_layers


def _check_fit(model: Model, config: BlockConfig) -> None:
    """`ConfigError` for a draft whose tokens or channels are not those of the model, which it borrows tables from."""
    hidden, vocab = model.config.hidden_size, model.config.vocab_size
    if config.hidden_size != hidden:
        raise ConfigError(
            f"draft: it has {config.hidden_size} channels, the model {hidden}; give the draft of this model"
        )
    if config.vocab_size < vocab:
        raise ConfigError(
            f"draft: it knows {config.vocab_size} tokens, the model {vocab}; give the draft of this model"
        )
    if config.mask_token_id >= vocab:
        raise ConfigError(f"draft: mask_token_id {config.mask_token_id} is not in the model's 0..{vocab - 1}")


def default_draft(model: Model) -> str:
    """What drafts for `model` if nobody says: `"mtp"` where it has such a head, else `"none"`."""
    return "mtp" if model.family.mtp is not None and model.config.mtp_num_hidden_layers else "none"
