"""`Model`: a family's pure functions together with one config."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

import params as checkpoints
from lowering import ops
from lowering.detect import device_named
from lowering.jit.tape import beforehand
from lowering.ops.delta import kept_in
from params.errors import ConfigError
from params.guarded import check_plain, place
from params.modes import lasting
from params.sharding import Ranks
from params.spec import widened

from .checkpoint.text import Tokenizer
from .config import section
from .family import Family
from .models import FAMILIES
from .output import LogitsOf, Output, check_logits, mark_lengths
from .state import state as states
from .state.batch import Batch, check_ids
from .state.pages import MOST_PAGES, PagePool
from .state.space import Space
from .state.state import Entry, State

S = TypeVar("S", State, None)
"""A forward of a state gives a state, a forward of none gives none."""


@dataclass(frozen=True)
class Model:
    """A family and a config. Holds no tensors: parameters and state are passed in.

    `tokenizer` is that of the checkpoint it was loaded from, if it was, and `unread` what of it no model here reads.
    `dtype` is that of the parameters; states are in float64 where these are. With `ranks` it is one rank's part of a
    model that several share: parameters and states are the rank's own, logits and hidden states the whole's.
    """

    family: Family
    config: Any
    config_json: Mapping[str, Any]
    tokenizer: Tokenizer | None = None
    unread: checkpoints.Unread | None = None
    ranks: Ranks | None = None
    dtype: torch.dtype | None = None

    def __repr__(self) -> str:
        return f"Model({self.config!r})"

    def param_spec(self, dtype: torch.dtype | None = None) -> Any:
        """The parameter tree with a `TensorSpec` (shape, dtype, initialiser) at each leaf.

        `dtype` is entered where a leaf pins none, which makes the tree stand for parameters of that dtype.
        """
        spec = self.whole_spec(dtype)
        if self.ranks is not None:
            spec, _ = checkpoints.sharded(spec, self.family.names, dict(checkpoints.items(spec)), self.ranks)
        if dtype is None:
            return spec
        return checkpoints.tree_map(lambda leaf: replace(leaf, dtype=leaf.dtype or dtype), spec)

    def whole_spec(self, dtype: torch.dtype | None = None) -> Any:
        """The parameter tree of all ranks together, with a `TensorSpec` at each leaf.

        What leaves pin is the least for parameters of `dtype`: they too are float64 where these are.
        """
        return widened(self.family.params.spec(self.config), dtype)

    @property
    def local(self) -> Any:
        """The config that this rank computes with: the model's, with its own share of the heads."""
        return self.config if self.ranks is None else self._shared

    @cached_property
    def _shared(self) -> Any:
        assert self.ranks is not None
        counts = {name: getattr(self.config, name) for name in self.family.heads}
        return replace(self.config, **{name: max(count // self.ranks.size, 1) for name, count in counts.items()})

    def sharded(self, ranks: Ranks) -> Model:
        """One rank's part of the model. `ConfigError` where its heads cannot be shared out among so many."""
        made = replace(self, ranks=ranks)
        made.param_spec()
        return made

    def agreed(self, x: Tensor) -> Tensor:
        """`x` as the first rank has it, on all of them: what is decided once must not hang on a rank's last bit."""
        return x if self.ranks is None else ops.from_first(x, group=self.ranks.group)

    def init_params(self, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Any:
        """Random parameters, the same for the same seed whatever else the tree holds, and for any number of ranks.

        `TypeError` for a seed that is no integer, `CheckpointError` for a dtype that parameters cannot have.
        """
        whole = self.whole_spec(dtype)
        made = checkpoints.init(whole, seed, dtype, device_named(device))
        return made if self.ranks is None else checkpoints.shard(made, whole, self.ranks)

    @lasting
    def init_state(
        self,
        rows: int,
        max_len: int,
        dtype: torch.dtype | None = None,
        recurrent_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        page_size: int = 128,
        pages: int | None = None,
        checked: bool = False,
        layout: str | None = None,
    ) -> State:
        """A state of `rows` empty rows, each of at most `max_len` tokens.

        `dtype` is that of pages and convolution windows (the default dtype if None), `recurrent_dtype` that of
        delta-rule matrices (if None float32, unless the target's fused delta rule takes bfloat16 alone); both are
        float64 by default where the model was loaded so. `pages` makes
        a shared pool of that many pages of `page_size` tokens; by default every row owns enough for `max_len`. A
        `checked` state also looks up that its pages hold its own tokens, at the price of a host read a forward.
        `layout` is that of pages of latents, "nd" for plain and "nz" for Ascend's tiled ones; by default it follows the
        target in force.
        """
        known = None if layout is None else self._known_layout(layout)

        def entries(space: Space) -> tuple[Entry, ...]:
            return self.family.init_entries(self.local, replace(space, layout=known))

        kinds = (dtype, recurrent_dtype)
        return self.empty_state(entries, rows, max_len, *kinds, device, page_size, pages, checked)

    def empty_state(
        self,
        entries: Callable[[Space], tuple[Entry, ...]],
        rows: int,
        max_len: int,
        dtype: torch.dtype | None = None,
        recurrent_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        page_size: int = 128,
        pages: int | None = None,
        checked: bool = False,
    ) -> State:
        """What `init_state` makes, of what `entries(space)` gives: a draft's own state."""
        for name, value in (("rows", rows), ("max_len", max_len), ("page_size", page_size), ("pages", pages)):
            if value is not None or name != "pages":
                at_least_one(f"init_state: {name}", value, MOST_PAGES if name == "pages" else 2**31 - 1)
        device = device_named(device)
        owned = pages is None
        if pages is None:
            pages = rows * -(-max_len // page_size)
            at_least_one(f"init_state: pages of {rows} rows of max_len={max_len} tokens", pages, MOST_PAGES)
        pool = PagePool(pages, owned)
        wide = torch.float64 if self.dtype == torch.float64 else None
        dtype = dtype or wide or torch.get_default_dtype()
        kinds = (dtype, recurrent_dtype or wide or self._recurrent_dtype(dtype, device))
        for kind in kinds:
            if not isinstance(kind, torch.dtype):
                raise TypeError(f"init_state: dtype and recurrent_dtype must be a torch.dtype, found {kind!r:.100}")
            if not kind.is_floating_point:
                raise ValueError(f"init_state: a state holds floating-point values, found dtype {kind}")
        layers = entries(Space(rows, pool.pages, page_size, *kinds, device))
        return states.empty(
            layers,
            rows=rows,
            max_len=max_len,
            page_size=page_size,
            pool=pool,
            vocab=self.config.vocab_size,
            device=device,
            checked=checked,
        )

    def _recurrent_dtype(self, dtype: torch.dtype, device: torch.device) -> torch.dtype:
        return kept_in(dtype, device, of_channels=self.family.decays_channels)

    def _known_layout(self, layout: str) -> str:
        if layout not in self.family.layouts:
            known = ", ".join(self.family.layouts) or "none, since this model keeps no latents"
            raise ValueError(f"init_state: layout={layout!r:.100}; layouts of this model's pages: {known}")
        return layout

    @lasting
    def forward(
        self,
        params: Any,
        state: S,
        batch: Batch,
        *,
        logits: LogitsOf = "all",
        outputs: Sequence[str] = (),
        keep_steps: bool = False,
    ) -> tuple[Output, S]:
        """Run the batch's new tokens of every row on top of what the state remembers; return output and new state.

        `logits` are given for all tokens [tokens vocab], for each row's last token [rows vocab] (zeros where a row
        is idle), or for none [0 vocab]. `outputs` names intermediate values to return in `extra`: `layers.3` is the
        residual stream after layer 3, `router` the experts chosen in every layer. With `keep_steps` (at most 16
        tokens a row) the new state is pending until `commit`. `state=None` computes the batch alone, for training.

        Raises `StateError` for a state that is pending, used up or of other rows, `ValueError` for a row without
        room, `OutOfPages`, and `LoweringError` when the policy leaves an op without a kernel.
        """
        self._check_params(params)
        if not isinstance(batch, Batch):
            raise TypeError(
                f"forward: expected a Batch, found a {type(batch).__name__}; make one with Batch.from_lists"
            )
        check_logits(logits)
        beforehand(check_ids, batch, self.config.vocab_size)
        out, state = self.family.forward(
            self.local, params, state, batch, logits=logits, outputs=outputs, keep_steps=keep_steps
        )
        mark_lengths(out, batch, logits)
        return out, state

    def _check_params(self, params: Any) -> None:
        """`TypeError` for parameters of another family, `ValueError` for those of another width or count of layers."""
        if not isinstance(params, self.family.params):
            raise TypeError(
                f"forward: params are {type(params).__name__}, and a model of type {self.config_json['model_type']!r} "
                f"takes {self.family.params.__name__}; give what came with the model from load or init_params"
            )
        embed, width = params.embed.weight, self.config.hidden_size
        if isinstance(embed, Tensor) and embed.shape[-1] != width:
            raise ValueError(
                f"forward: params embed tokens in {embed.shape[-1]} values, this model's hidden_size is {width}; give "
                "what came with the model from load or init_params"
            )
        layers, expected = len(params.layers), self.config.num_hidden_layers
        if not layers:
            raise ValueError(
                "forward: params have no layers, as those that load_draft gives; load the model for its own"
            )
        if layers != expected:
            raise ValueError(
                f"forward: params have {layers} layers, this model's config {expected}; a model of fewer is "
                f"fm.build({{**model.config_json, 'num_hidden_layers': {layers}, ...}}), with what the config lists "
                "layer by layer (layer_types) cut alike"
            )


def at_least_one(name: str, value: Any, most: int = 2**63 - 1) -> None:
    """`TypeError` for a `value` that is not an integer, `ValueError` for one below 1 or above `most`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, found {value!r:.100}") from None
    if number < 1:
        raise ValueError(f"{name} must be at least 1, found {value}")
    if number > most:
        raise ValueError(f"{name} must be at most {most}, found {number if number < 2**64 else 'far more'}")


def build(config: Mapping[str, Any] | str | Path) -> Model:
    """A model without weights, from a config dictionary, a `config.json`, or a directory that holds one."""
    if not isinstance(config, Mapping):
        if not isinstance(config, (str, os.PathLike)):
            raise TypeError(f"build: expected a config dictionary, or where one lies, found {config!r:.100}")
        path = place("the path of a config", config)
        config = checkpoints.read_config(path.parent if path.name == "config.json" else path)
    config = dict(config)
    check_plain(config, "config", ConfigError)
    section(config, "text_config")  # families without one too: what reads ids of special tokens looks into it
    family = _family_of(config)
    return Model(family, family.read_config(config), config)


def _family_of(config: Mapping[str, Any]) -> Family:
    for family in FAMILIES.values():
        if family.claims is not None and family.claims(config):
            return family
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ConfigError(f"model_type {kind!r} is not a known architecture; known: {', '.join(FAMILIES)}")
    return FAMILIES[kind]
