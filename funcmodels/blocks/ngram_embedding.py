"""Embeddings of n-grams that a layer adds to its residual streams: hashed rows of a large table, gated by the streams.

A token and those before it are hashed to rows of the table; their embedding gives each stream a key and all of them a
value; what passes the gate also goes through a dilated convolution over the last tokens. Source: `Qwen4ExpTextPLELayer`
in transformers 5.24.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lowering import ops
from lowering.ops import ContextTrail, WindowTrail
from params import MappedRows
from params.constants import Constant
from params.spec import leaf
from params.tree import exactly, static, tree

from ..state.space import Space
from ..state.state import Recurrent
from ..state.step import Step
from .linear import Linear, Norm, project


@tree
class NgramEmbedding:
    """The table, and what reads it. `key_value` rows: a key for each stream, then the value.

    The hash is part of the structure: odd `multipliers`, one a place; of each head the rows it can reach, `sizes` from
    `offsets` on; and the `end` token, at which texts end.
    """

    table: Float[Tensor, "buckets dim"] | MappedRows
    key_value: Linear
    key_norm: Norm
    query_norm: Norm
    conv_norm: Norm
    conv: Float[Tensor, "channels width"]
    multipliers: tuple[int, ...] = static()
    sizes: tuple[int, ...] = static()
    offsets: tuple[int, ...] = static()
    end: int = static()

    @staticmethod
    def spec(
        hidden: int, streams: int, *, dim: int, width: int, heads: int, order: int, index: int, base: int, divisor: int,
        shards: int, vocab: int, seed: int, end: int,
    ) -> NgramEmbedding:  # fmt: skip
        """Spec of the n-gram embedding that is number `index` of the model's, of n-grams up to `order` tokens.

        Each of `heads` hashes an order reads `dim` / (heads of all orders) channels. The table has as many rows as the
        hashes can reach, rounded up to a multiple of `divisor`, and stands in checkpoints as `shards` tensors.
        """
        joined, count = streams * hidden, heads * (order - 1)
        sizes = hash_sizes(base, count, index)
        buckets = -(-sum(sizes) // divisor) * divisor
        norm = Norm(leaf((joined,), "zeros"))
        return NgramEmbedding(
            table=leaf((buckets, dim // count), parts=shard_rows(buckets, shards), table=True),
            key_value=Linear.spec(dim, joined, hidden),
            key_norm=norm,
            query_norm=norm,
            conv_norm=norm,
            conv=leaf((joined, width), "conv"),
            multipliers=hash_multipliers(vocab, order, index, seed),
            sizes=sizes,
            offsets=(0, *itertools.accumulate(sizes[:-1])),
            end=end,
        )

    def constants(self) -> dict[str, Constant]:
        """The hash as checkpoints repeat it, and the scale of a table, which must be none."""
        return {
            "multipliers": Constant(self.multipliers),
            "sizes": Constant(self.sizes),
            "offsets": Constant(self.offsets),
            "table_scale": Constant((1.0,), saved=False),
        }


@tree
class NgramTrails:
    """The trails of window and context while pending."""

    window: WindowTrail
    context: ContextTrail


@tree
class NgramState(Recurrent):
    """The last inputs of the convolution (normalised, time-major), and the last tokens, newest last (0 for none)."""

    window: Float[Tensor, "slots past channels"]
    context: Int[Tensor, "slots before"]
    trail: NgramTrails | None = None

    def after(self, accepted: Int[Tensor, " rows"]) -> NgramState:
        """The state after the first `accepted` pending tokens of each row."""
        assert self.trail is not None
        window = self.trail.window.at(accepted, self.window.shape[1]).to(self.window.dtype)
        return NgramState(window, self.trail.context.at(accepted, self.context.shape[1]))


def shard_rows(rows: int, shards: int) -> tuple[int, ...]:
    """Rows of each shard of a table: equally many, the last perhaps fewer, and none without rows."""
    each = -(-rows // shards)
    return tuple(min(each, rows - start) for start in range(0, rows, each))


def ngram_state(space: Space, hidden: int, streams: int, *, width: int, order: int) -> NgramState:
    """Zeros for every row and the scratch slot. The convolution's taps lie `order` tokens apart."""
    slots, device = space.rows + 1, space.device
    window = torch.zeros(slots, (width - 1) * order, streams * hidden, dtype=space.dtype, device=device)
    return NgramState(window, torch.zeros(slots, order - 1, dtype=torch.int64, device=device))


def ngram_embedding(
    params: NgramEmbedding,
    x: Float[Tensor, "tokens streams hidden"],
    tokens: Int[Tensor, " tokens"],
    past: NgramState | None,
    step: Step,
    *,
    eps: float,
) -> tuple[Float[Tensor, "tokens streams hidden"], Float[Tensor, "tokens streams"], NgramState | None]:
    """The streams with their embeddings added, the gates, and the state after each row's last token."""
    streams, hidden = x.shape[1:]
    context, window = (None, None) if past is None else (past.context, past.window)
    ids, context, seen = ops.ngram_rows(
        tokens,
        context,
        step.positions,
        step.rows,
        multipliers=params.multipliers,
        sizes=params.sizes,
        offsets=params.offsets,
        end=params.end,
        keep_steps=step.keep_steps,
    )
    embedded = ops.table_rows(ids, params.table).to(x.dtype)
    key, value = project(params.key_value, embedded).split((streams * hidden, hidden), -1)
    norms = (params.key_norm, params.query_norm, params.conv_norm)
    key_norm, query_norm, conv_norm = (exactly(norm, Norm).weight for norm in norms)
    key = ops.grouped_gemma_rms_norm(key, key_norm, groups=streams, eps=eps)
    query = ops.grouped_gemma_rms_norm(x.flatten(1), query_norm, groups=streams, eps=eps)
    gated, gates = ops.ngram_gate(key.view_as(x), query.view_as(x), value)
    normed = ops.grouped_gemma_rms_norm(gated.flatten(1), conv_norm, groups=streams, eps=eps)
    reach = {"keep_steps": step.keep_steps, "dilation": len(params.multipliers)}
    y, window, taken = ops.short_conv(normed, params.conv, window, step.rows, **reach)
    x = x + (gated + y.view_as(x))
    if window is None or context is None:
        return x, gates, None
    return x, gates, NgramState(window, context, NgramTrails(taken, seen) if step.keep_steps else None)


@cache
def hash_multipliers(vocab: int, order: int, index: int, seed: int) -> tuple[int, ...]:
    """One odd multiplier for each of `order` places: 64-bit, and small enough that a product with a token fits."""
    half = max(1, _LARGEST // max(vocab, 1) // 2)
    first = seed + _APART * index
    return tuple(2 * (_mixed(first + _STEP * (place + 1)) % half) + 1 for place in range(order))


@cache
def hash_sizes(base: int, heads: int, index: int) -> tuple[int, ...]:
    """Of each head the number of rows it can reach: the primes from `base` on, `heads` of them for each `index`."""
    return tuple(itertools.islice(_primes(base), index * heads, (index + 1) * heads))


def _primes(start: int) -> Iterator[int]:
    for number in itertools.count(max(start, 2)):
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            yield number


_LARGEST, _WORD = 2**63 - 1, 2**64 - 1
_APART, _STEP = 10007, 0x9E3779B97F4A7C15


def _mixed(number: int) -> int:
    """SplitMix64 of a number (Steele, Lea and Flood 2014)."""
    word = (number + _STEP) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)
