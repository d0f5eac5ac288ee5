"""What a request asks of its sampler: settings of one row, checked, and of the rows of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from params.errors import ConfigError
from params.tree import static, to, tree, tree_map

from .penalties import Bias, Penalties

if TYPE_CHECKING:
    from ..model import Model


@dataclass(frozen=True)
class Sampling:
    """How to pick tokens. `temperature` 0 is greedy: the largest logit, the lowest id among equals.

    Filters work on the law after temperature, in this order, each on what the one before left, renormalised:
    `top_k` keeps a token if fewer than k are larger (0: off); `top_p` keeps it if the mass of larger ones is below
    top_p (1: off), so the largest always stays; `min_p` keeps it if its probability is at least min_p times the
    largest (0: off). Equal tokens stay or go together: ties at a threshold are all kept.

    Before temperature, and for greedy rows too, come `logit_bias`, pairs of token and what is added to its logit (-inf
    forbids it), and the penalties: `repetition_penalty` (1: off) divides positive and multiplies negative logits of
    tokens in prompt or output, `frequency_penalty` (0: off) is subtracted for each time a token is in the output,
    `presence_penalty` (0: off) once if it is there. With penalties, `sample` and `verify` need `counts`.

    Numbers may be of any real type and are used in float32. `ValueError` for one that is out of its range, or that
    float32 has as 0 or as infinite: 0 aside, sizes go from its smallest normal number, 1.18e-38, to 3.40e+38.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def penalised(self) -> bool:
        """Whether tokens that came before matter."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    def __post_init__(self) -> None:
        wrong = []
        for name, (wanted, read) in _RULES.items():
            given = getattr(self, name)
            found = read(given)
            if found is None:
                wrong.append(f"{name} must be {wanted}, found {_shown(given)}")
            object.__setattr__(self, name, found)
        if wrong:
            raise ValueError("Sampling: " + "; ".join(wrong))

    @staticmethod
    def of(model: Model) -> Sampling:
        """The settings that the checkpoint of `model` asks for in its `generation_config.json`.

        They are what that file says, as transformers reads it: greedy unless `do_sample` is true, then at temperature 1
        unless it names another. A filter that it does not name is off, as in vLLM (transformers sets `top_k` to 50).
        Without such a file, greedy. `ConfigError` for a value out of range, and for a setting that is not among ours.
        """
        given = {} if model.tokenizer is None else model.tokenizer.generation
        foreign = [
            f"{name}={given[name]!r:.100}"
            for name in sorted(given.keys() & _FOREIGN.keys())
            if given[name] not in (None, _FOREIGN[name])
        ]
        sampled = given.get("do_sample") or False
        if foreign or not isinstance(sampled, bool):
            reason = "Sampling has no " + ", ".join(foreign) if foreign else f"do_sample is {sampled!r:.100}"
            raise ConfigError(f"generation_config.json: {reason}; write the settings that you want yourself")
        named = {name: given[name] for name in _RULES.keys() - {"seed", "logit_bias"} if given.get(name) is not None}
        try:
            found = Sampling(**{"temperature": 1.0, **named})
        except ValueError as error:
            raise ConfigError(f"generation_config.json: {error}") from None
        # Of a greedy row filters mean nothing; penalties do.
        return found if sampled else replace(found, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)


_FOREIGN = {
    "num_beams": 1, "num_beam_groups": 1, "penalty_alpha": 0, "dola_layers": None, "guidance_scale": 1, "top_h": None,
    "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "encoder_repetition_penalty": 1, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "bad_words_ids": [], "suppress_tokens": [], "begin_suppress_tokens": [],
    "sequence_bias": {}, "forced_bos_token_id": None, "forced_eos_token_id": None, "min_length": 0, "min_new_tokens": 0,
    "exponential_decay_length_penalty": None, "constraints": [], "force_words_ids": [], "watermarking_config": None,
}  # fmt: skip
"""What transformers' generation config has beside ours that decides which tokens come; where it does nothing."""

LEAST, MOST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
"""The sizes of normal float32 numbers. Devices may take smaller ones for 0."""


def _number(given: Any) -> float | None:
    """A real number, None for what float32 does not have."""
    if not isinstance(given, Real) or isinstance(given, bool):
        return None
    try:
        number = float(given)
    except OverflowError:
        return None
    return number if given == 0 or LEAST <= abs(number) <= MOST else None


def _whole(given: Any, least: int, end: int) -> int | None:
    """An integer from `least` and below `end`, None for anything else."""
    if not isinstance(given, Integral) or isinstance(given, bool):
        return None
    number = int(given)
    return number if least <= number < end else None


def _within(fits: Callable[[float], bool]) -> Callable[[Any], float | None]:
    """Reads a number that `fits`."""

    def read(given: Any) -> float | None:
        number = _number(given)
        return number if number is not None and fits(number) else None

    return read


def _biases(given: Any) -> tuple[tuple[int | None, float | None], ...] | None:
    """Pairs of a token and what its logit can have added."""
    if not isinstance(given, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in given):
        return None
    forbidden = -math.inf
    pairs = tuple(
        (_whole(token, 0, 2**31), forbidden if isinstance(x, Real) and x == forbidden else _number(x))
        for token, x in given
    )
    fits = not any(None in pair for pair in pairs) and len({token for token, _ in pairs}) == len(pairs)
    return pairs if fits else None


def _shown(given: Any) -> str:
    try:
        return f"{given!r:.100}"
    except ValueError:  # Python prints no integers of thousands of digits
        return "a number of too many digits to print"


_RANGE = f"of at least {LEAST:.3g} and at most {MOST:.3g} in size, as float32 has them"
_RULES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "temperature": (f"0 (greedy) or a positive number {_RANGE}", _within(lambda x: x >= 0)),
    "top_k": ("0 (off) or a positive integer below 2**31", lambda x: _whole(x, 0, 2**31)),
    "top_p": (f"above 0 and at most 1 (off), a number {_RANGE}", _within(lambda x: 0 < x <= 1)),
    "min_p": (f"in 0 (off)..1, 0 or a number {_RANGE}", _within(lambda x: 0 <= x <= 1)),
    "seed": ("an integer of 64 bits", lambda x: _whole(x, -(2**63), 2**63)),
    "repetition_penalty": (f"a positive number {_RANGE} (1: off)", _within(lambda x: x > 0)),
    "presence_penalty": (f"a number {_RANGE}, or 0 (off)", _number),
    "frequency_penalty": (f"a number {_RANGE}, or 0 (off)", _number),
    "logit_bias": (
        f"a tuple of pairs (token, number below inf), each token once and each number -inf, 0 or {_RANGE}",
        _biases,
    ),
}
"""What each setting has to be, in words; and what reads it, None for what does not fit."""


@tree
class RowSampling:
    """Settings of each row of a batch. `largest_k` and the flags are what the host knows of all rows together.

    `of` is given settings that were checked. Nobody looks into tensors that are put together by hand: out of range,
    they may leave their row no choice, and change no other.
    """

    temperature: Float[Tensor, " rows"]
    top_k: Int[Tensor, " rows"]
    top_p: Float[Tensor, " rows"]
    min_p: Float[Tensor, " rows"]
    seed: Int[Tensor, " rows"]
    bias: Bias | None
    penalties: Penalties | None
    greedy: bool = static()
    mixed: bool = static()
    largest_k: int = static()
    top_p_on: bool = static()
    top_p_alone: bool = static()
    min_p_on: bool = static()

    @staticmethod
    def of(rows: Sequence[Sampling], device: torch.device | str = "cpu") -> RowSampling:
        """One `Sampling` a row."""
        fields = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        numbers = [_column([getattr(row, name) for row in rows], torch.float32, device) for name in fields]
        whole = [_column([getattr(row, name) for row in rows], torch.int64, device) for name in ("top_k", "seed")]
        drawn = [row for row in rows if row.temperature > 0]
        nucleus = [row for row in drawn if row.top_p < 1]
        bias = Bias.of([row.logit_bias for row in rows])
        return RowSampling(
            temperature=numbers[0],
            top_k=whole[0],
            top_p=numbers[1],
            min_p=numbers[2],
            seed=whole[1],
            bias=bias if bias is None else to(bias, device),
            penalties=Penalties(*numbers[3:]) if any(row.penalised for row in rows) else None,
            greedy=not drawn,
            mixed=0 < len(drawn) < len(rows),
            largest_k=max((row.top_k for row in drawn), default=0),
            top_p_on=bool(nucleus),
            top_p_alone=any(row.top_k == 0 for row in nucleus),
            min_p_on=any(row.min_p > 0 for row in drawn),
        )

    def filters(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, dict[str, Any]]:
        """Temperature, top-k, top-p and min-p, those None that no row asks for, and hints: what the ops take.

        Greedy rows take part with a temperature of 1.
        """
        return (
            # One below 0, or NaN, leaves the row no token.
            torch.where(self.temperature == 0, 1, self.temperature.clamp(min=0)),
            self.top_k if self.largest_k else None,
            self.top_p if self.top_p_on else None,
            self.min_p if self.min_p_on else None,
            {"largest_k": self.largest_k, "p_alone": self.top_p_alone},
        )

    def repeated(self, times: int) -> RowSampling:
        """Each row's settings `times` in a row."""
        return tree_map(lambda x: x.repeat_interleave(times, 0), self)


def _column(values: Sequence[float], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A setting of each row. What all rows share is filled in: a copy to the device would wait for it."""
    if values and all(value == values[0] for value in values):
        return torch.full((len(values),), values[0], dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, device="cpu").to(device)
