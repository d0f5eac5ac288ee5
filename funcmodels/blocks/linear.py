"""Parameter nodes of projections, tables and norms, and what applies them.

Nothing else reads their weights: a node of another kind, with a field more, is then applied as what it is or refused.
Ops that take a weight as it is are handed that of `exactly(node, kind)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lowering import ops
from lowering.weights import PreparedWeight
from params.quant.values import QuantizedWeight
from params.sharding import Outputs, Rule, Vocabulary
from params.spec import Init, leaf
from params.tree import exactly, put, tree

PrepareWeight = Callable[[str, Any], Any]
L = TypeVar("L", bound="Linear")
N = TypeVar("N", bound="Norm")


@tree
class Linear:
    """A projection without bias. Merged projections that read one input are one weight."""

    by_kind: ClassVar[bool] = True
    projections: ClassVar[tuple[str, ...]] = ("weight",)

    weight: Float[Tensor, "outputs inputs"] | QuantizedWeight | PreparedWeight

    @staticmethod
    def spec(inputs: int, *parts: int, shard: Rule | None = None) -> Linear:
        """Spec of a projection from `inputs` to the sum of `parts`, which ranks share as `shard` says."""
        return Linear(leaf((sum(parts), inputs), parts=parts if len(parts) > 1 else None, shard=shard))

    @staticmethod
    def head_spec(vocab: int, hidden: int) -> Linear:
        """Spec of an output projection of its own."""
        return Linear.spec(hidden, vocab, shard=Vocabulary())

    def lower_weights(self: L, prepare: PrepareWeight) -> L:
        """With the weight in the layout of the kernel that will read it."""
        return put(self, "weight", prepare("linear", self.weight))


@tree
class BiasedLinear(Linear):
    """A projection with a bias."""

    bias: Float[Tensor, " outputs"]

    @staticmethod
    def spec(inputs: int, *parts: int, shard: Rule | None = None) -> BiasedLinear:
        """Spec of a projection as `Linear.spec` gives it, and of its bias."""
        # What is added up of several ranks gets its bias once, after that.
        own = shard if isinstance(shard, Outputs) else None
        bias = leaf((sum(parts),), "zeros", parts=parts if len(parts) > 1 else None, shard=own)
        return BiasedLinear(Linear.spec(inputs, *parts, shard=shard).weight, bias)


@tree
class Embedding:
    """A token table. Tied models also read it as the head: `head` is that layout where it differs."""

    weight: Float[Tensor, "vocab hidden"]
    head: Any = None

    @staticmethod
    def spec(vocab: int, hidden: int) -> Embedding:
        """Spec of a token table."""
        return Embedding(leaf((vocab, hidden), shard=Vocabulary()))

    def lower_weights(self, prepare: PrepareWeight) -> Embedding:
        """With a copy of the weight in the layout that the head's projection wants."""
        prepared = prepare("linear", self.weight)
        return replace(self, head=None if prepared is self.weight else prepared)


@tree
class Norm:
    """The weight of a root-mean-square norm."""

    by_kind: ClassVar[bool] = True
    initial: ClassVar[Init] = "ones"

    weight: Float[Tensor, " dim"]

    @classmethod
    def spec(cls: type[N], dim: int, dtype: torch.dtype | None = None) -> N:
        """Spec of a norm that changes no direction at first; `dtype` where it is not the model's."""
        return cls(leaf((dim,), cls.initial, dtype))


@tree
class GemmaNorm(Norm):
    """The weight of a norm that multiplies by one plus it."""

    initial: ClassVar[Init] = "zeros"

    def lower_weights(self, prepare: PrepareWeight) -> GemmaNorm:
        """With the weight in the layout of the kernel that will read it."""
        return put(self, "weight", prepare("gemma_rms_norm", self.weight))


def project(params: Linear, x: Float[Tensor, "*lead inputs"]) -> Float[Tensor, "*lead outputs"]:
    """The projection of `x`, with its bias where it has one."""
    if type(params) is BiasedLinear:
        return ops.linear(x, params.weight) + params.bias
    return ops.linear(x, exactly(params, Linear).weight)


def normalised(params: Norm, x: Float[Tensor, "*lead dim"], *, eps: float) -> Float[Tensor, "*lead dim"]:
    """`x` with unit root mean square, times what the norm says: its weight, or one plus it."""
    if type(params) is GemmaNorm:
        return ops.gemma_rms_norm(x, params.weight, eps=eps)
    return ops.rms_norm(x, exactly(params, Norm).weight, eps=eps)


def add_normalised(
    params: Norm, x: Float[Tensor, "*lead dim"], residual: Float[Tensor, "*lead dim"], *, eps: float
) -> tuple[Float[Tensor, "*lead dim"], Float[Tensor, "*lead dim"]]:
    """`normalised` of the sum x + residual, and that sum."""
    if type(params) is GemmaNorm:
        return ops.add_gemma_rms_norm(x, residual, params.weight, eps=eps)
    return ops.add_rms_norm(x, residual, exactly(params, Norm).weight, eps=eps)


def look_up(params: Embedding, ids: Int[Tensor, "*lead"]) -> Float[Tensor, "*lead hidden"]:
    """The rows of the token table at `ids`."""
    return ops.embedding(ids, exactly(params, Embedding).weight)


def head_weight(embed: Embedding, head: Linear | None) -> Any:
    """The output projection's weight: its own, or the embedding's where the two are tied. It has no bias."""
    if head is not None:
        return exactly(head, Linear).weight
    table = exactly(embed, Embedding)
    return table.weight if table.head is None else table.head
