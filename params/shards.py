"""One rank's slice of a weight as a value: it remembers what must be exchanged to make the whole's result.

A slice whose results are the rank's own (some heads of a projection) is a plain weight and needs no such value.
"""

from __future__ import annotations

from typing import Any

import torch

from params.tree import static, tree
from params.weights import WeightValue


@tree
class AddendWeight(WeightValue):
    """Some inputs of a projection [outputs inputs]: the ranks' products add up to the whole's.

    Of routed experts both projections are such values: some of what lies between them, of every expert. `weight` is
    whatever a whole weight may be: a tensor, a quantised or a prepared weight.
    """

    scheme = "some inputs, of several ranks"

    weight: Any
    group: str = static()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the rank's own weight."""
        return tuple(self.weight.shape)

    def static_key(self) -> tuple[object, ...]:
        """What a choice of kernel may depend on."""
        return type(self), self.group, *_key(self.weight)


@tree
class VocabularyWeight(WeightValue):
    """Rows of a token table [vocab hidden], from the token `first` on; those past the vocabulary are zeros.

    Every rank has equally many, `ranks` have them all.
    """

    scheme = "some tokens, of several ranks"

    weight: Any
    first: int = static()
    vocab: int = static()
    ranks: int = static()
    group: str = static()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole table."""
        return self.vocab, self.weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Of its rows."""
        return self.weight.dtype

    @property
    def tokens(self) -> range:
        """The ids of its rows, without those past the vocabulary."""
        stop = min(self.first + self.weight.shape[0], self.vocab)
        return range(min(self.first, stop), stop)

    def static_key(self) -> tuple[object, ...]:
        """What a choice of kernel may depend on."""
        return type(self), self.first, self.vocab, self.ranks, self.group, *_key(self.weight)


@tree
class SomeExperts(WeightValue):
    """Whole experts' weights [experts outputs inputs], from the expert `first` on, of `experts` in all."""

    scheme = "some experts, of several ranks"

    weight: Any
    first: int = static()
    experts: int = static()
    group: str = static()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of all experts' weights."""
        return self.experts, *self.weight.shape[1:]

    def static_key(self) -> tuple[object, ...]:
        """What a choice of kernel may depend on."""
        return type(self), self.first, self.experts, self.group, *_key(self.weight)


def _key(weight: Any) -> tuple[object, ...]:
    return weight.static_key() if hasattr(weight, "static_key") else (weight.shape, weight.dtype)
