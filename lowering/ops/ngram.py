"""Embeddings of n-grams: the hash from a token and those before it to rows of a table, the rows, and their gate.

Hashes are 64-bit integers that wrap around. With t_s the token s places back and odd multipliers m_s,
    mix_n = t_0 m_0 ^ t_1 m_1 ^ ... ^ t_(n-1) m_(n-1),    n = 2 .. number of multipliers
and head h of order n reads row offset_h + (mix_n mod size_h). A token before the row's first, or on the other side of
an end-of-text token, counts as end-of-text. Source: `Qwen4ExpTextNGramEmbedding` in transformers 5.24.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from params import MappedRows
from params.tree import tree

from ..op import op
from ..rows import Rows
from .short_conv import window_after, with_scratch
from .widen import wide

LEAST_SCORE = 1e-6
"""Below this a gate's score has no root taken: its slope there would be without bound."""


@tree
class ContextTrail:
    """Enough to stand after any of the newest tokens: the tokens before them, then themselves, of each row."""

    tokens: Int[Tensor, "slots steps"]

    def at(self, accepted: Int[Tensor, " rows"], past: int) -> Int[Tensor, "slots past"]:
        """The context after the first `accepted` of each row's new tokens: one gather."""
        return window_after(self.tokens[..., None], accepted, past)[..., 0]


@op
def ngram_rows(
    tokens: Int[Tensor, " tokens"],
    context: Int[Tensor, "slots past"] | None,
    positions: Int[Tensor, " tokens"],
    rows: Rows,
    *,
    multipliers: tuple[int, ...],
    sizes: tuple[int, ...],
    offsets: tuple[int, ...],
    end: int,
    keep_steps: bool,
) -> tuple[Int[Tensor, "tokens ngrams"], Int[Tensor, "slots past"] | None, ContextTrail | None]:
    """Rows of the table that each token reads, one a head; orders one after the other, heads of an order together.

    `context` holds the tokens before each row's first, newest last, one fewer than there are multipliers; `positions`
    are places in the row, so that what it holds for places before 0 does not count. `end` is the end-of-text token.
    Returns also the context after each row's last token, or with `keep_steps` the old one and a trail. Padding gives
    the rows of some token.
    """
    past = len(multipliers) - 1
    new = rows.rectangle(tokens).long()
    before = new.new_zeros(new.shape[0], past) if context is None else context[: new.shape[0]]
    history = torch.cat((before, new), 1)
    mixes = _mixes(history, rows.rectangle(positions), multipliers, end)
    each = len(sizes) // past
    heads = [
        mixes[head // each].remainder(size) + at for head, (size, at) in enumerate(zip(sizes, offsets, strict=True))
    ]
    found = rows.flat(torch.stack(heads, -1), tokens.shape[0])
    if context is None:
        return found, None, None
    history = with_scratch(history)
    if keep_steps:
        return found, context, ContextTrail(history)
    return found, ContextTrail(history).at(rows.new, past), None


def _mixes(history: Tensor, places: Tensor, multipliers: tuple[int, ...], end: int) -> list[Tensor]:
    """Of each order from 2 the hash [rows max_query], from history [rows past+max_query]."""
    past, width = len(multipliers) - 1, places.shape[1]
    mix = history[:, past:] * multipliers[0]
    same_text = torch.ones_like(places, dtype=torch.bool)
    mixes = []
    for back in range(1, past + 1):
        token = history[:, past - back : past - back + width]
        same_text = same_text & (places >= back) & (token != end)
        mix = mix ^ (torch.where(same_text, token, end) * multipliers[back])
        mixes.append(mix)
    return mixes


@op
def table_rows(
    ids: Int[Tensor, "tokens ngrams"], table: Float[Tensor, "buckets dim"] | MappedRows
) -> Float[Tensor, "tokens embedded"]:
    """The rows of `table` at `ids`, those of a token laid end to end, on the device of the ids.

    The table may lie on another device than the ids, or in its files (`MappedRows`): ids and rows then travel, which
    waits for the device and cannot be captured in a graph of that device.
    """
    at = ids.to(table.device)
    found = table.rows(at) if isinstance(table, MappedRows) else F.embedding(at, table)
    return found.to(ids.device).flatten(1)


@op
def ngram_gate(
    key: Float[Tensor, "tokens streams hidden"],
    query: Float[Tensor, "tokens streams hidden"],
    value: Float[Tensor, "tokens hidden"],
) -> tuple[Float[Tensor, "tokens streams hidden"], Float[Tensor, "tokens streams"]]:
    """The value for each stream, times its gate: sigmoid of the signed root of key . query / sqrt(hidden); and gates.

    Scores and gates are float32 or wider. A score of 0 gives 0.5.
    """
    score = (wide(key) * wide(query)).sum(-1) / key.shape[-1] ** 0.5
    gate = (score.sign() * score.abs().clamp(min=LEAST_SCORE).sqrt()).sigmoid()
    return (gate[..., None] * wide(value)[:, None]).to(value.dtype), gate
