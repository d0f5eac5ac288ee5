"""`Family`: what a model file provides, in one value at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .output import Output
from .state.state import Entry


@dataclass(frozen=True)
class MtpHead:
    """What a model file provides for its multi-token prediction head.

    `read` takes config, parameters and the head's hidden, and gives what the output projection reads, and its weight.
    """

    init_entries: Callable[..., tuple[Entry, ...]]
    forward: Callable[..., tuple[Output, Any]]
    read: Callable[[Any, Any, Any], tuple[Tensor, Any]]


@dataclass(frozen=True)
class Family:
    """What a model file provides for the configs of its `model_types`.

    `params` is the class of its parameters, whose `spec(config)` is their tree of specs, and `names` the table of their
    names in checkpoints (`params.names`). `mtp` is None where the architecture has no multi-token prediction head.
    `layouts` are those of pages that `init_entries` can be asked for. `heads` are the config's fields that count what
    ranks share: each computes with its own part of them. `claims` tells a config of the family that calls itself by
    another family's type. With `scales_embeddings` the model multiplies what it looks up, so that what a draft would
    read of the table is not known. With `decays_channels` the delta rule has a decay a channel, not one a head.
    """

    model_types: tuple[str, ...]
    read_config: Callable[[Mapping[str, Any]], Any]
    params: type[Any]
    names: Any
    init_entries: Callable[..., tuple[Entry, ...]]
    forward: Callable[..., tuple[Output, Any]]
    mtp: MtpHead | None = None
    layouts: tuple[str, ...] = ()
    heads: tuple[str, ...] = ("num_attention_heads", "num_key_value_heads")
    claims: Callable[[Mapping[str, Any]], bool] | None = None
    scales_embeddings: bool = False
    decays_channels: bool = False


def by_model_type(families: Iterable[Family]) -> dict[str, Family]:
    """Families by the `model_type` of a config. `ValueError` for two of one type."""
    found: dict[str, Family] = {}
    for family in families:
        for kind in family.model_types:
            if kind in found:
                names = f"{found[kind].params.__name__} and {family.params.__name__}"
                raise ValueError(f"model_type {kind!r} is that of {names}; leave it to one of the families")
            found[kind] = family
    return found
