"""Drafting for Qwen3.8-Flash-Next: its head against float64 loops, and drafted decoding that changes no token."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import funcmodels as fm
from params import tree
from tests.oracle.qwen3_8_flash_next import SEEDS, tokens
from tests.oracle.qwen3_8_flash_next_mtp import MtpPair, Transcription, pair, small
from tests.oracle.states import ROUNDING, advance, assert_rows_close, per_row
from tests.tolerances import assert_close

seeds = pytest.mark.parametrize("seed", SEEDS)
ROWS, STEPS = 3, 3


def close(actual: Any, expected: Any) -> None:
    assert_close(actual, expected, looser=5, dtype=torch.float32, reason=ROUNDING)


def page(one: MtpPair) -> int:
    return 2 * one.config.indexer_compress_ratio


def streams(one: MtpPair, *counts: int, seed: int = 0) -> list[Tensor]:
    """Random streams, laid end to end: the head must not care where they come from."""
    generator = torch.Generator().manual_seed(seed)
    width = one.config.hc_count * one.config.hidden_size
    return [torch.randn(count, width, generator=generator) for count in counts]


@seeds
def test_a_batch_alone_is_the_formula(seed: int) -> None:
    one = pair(seed)
    ids, hidden = tokens(one, 1, 9, 2, 25, seed=seed), streams(one, 1, 9, 2, 25)
    head, batch = fm.draft(one.model, "mtp"), fm.Batch.from_lists(ids)
    out, none = head.forward(one.params, None, batch, torch.cat(hidden))
    assert none is None
    last, _ = head.forward(one.params, None, batch, torch.cat(hidden), logits="last")
    left_out = 0
    for row, (row_ids, h) in enumerate(zip(ids, hidden, strict=True)):
        formula = Transcription(one)
        right = formula.run(row_ids, h)
        close(per_row(out.hidden, ids)[row], torch.from_numpy(right))
        close(per_row(out.logits, ids)[row], torch.from_numpy(formula.logits(right)))
        close(last.logits[row], torch.from_numpy(formula.logits(right[-1])))
        left_out += formula.left_out
    assert left_out, "the longest row must be longer than the budget"


@seeds
def test_chunks_leave_the_pages_of_the_formula_and_chains_its_drafts(seed: int) -> None:
    """`extend` over the model's own streams in chunks, each told the token that follows it; then three drafts."""
    one = pair(seed)
    counts = (6, 21, 1, 8)
    ids = tokens(one, *(count + 1 for count in counts), seed=seed)
    head = fm.draft(one.model, "mtp")
    state = one.model.init_state(4, 32, page_size=page(one), checked=True)
    dstate, carry = head.init_state(state), None
    hidden: list[list[Tensor]] = [[] for _ in ids]
    for lower, upper in ((0, 1), (1, 5), (5, 8), (8, 21)):
        fed = [row[lower : min(upper, len(row) - 1)] for row in ids]
        out, state = advance(one, state, fed)
        batch = fm.Batch.from_lists(fed)
        last = torch.tensor([row[min(upper, len(row) - 1)] for row in ids])
        dstate, carry = head.extend(one.params, dstate, out, batch, fm.next_tokens(batch, last), carry)
        for row, part in enumerate(per_row(out.hidden, fed)):
            hidden[row].append(part)
    assert carry is not None and carry.token.tolist() == [row[-1] for row in ids]
    assert carry.hidden.shape[1] == one.config.hc_count * one.config.hidden_size
    proposal, after = head.propose(one.params, dstate, carry, STEPS)
    for row, row_ids in enumerate(ids):
        formula = Transcription(one)
        made = formula.run(row_ids[1:], torch.cat(hidden[row]))
        close(fm.logical(dstate, row), formula.entries())
        close(carry.hidden[row], torch.from_numpy(made[-1]))
        assert proposal.tokens[row].tolist() == formula.chain(made[-1], STEPS)
    assert_rows_close(after, dstate)


@pytest.mark.parametrize("seed", [1, 2, 5])
def test_drafts_that_fail_in_any_phase_leave_no_trace(seed: int) -> None:
    """Drafted places of blocks, raw keys among them, are written again by what was accepted."""
    one = small(seed)
    head, draw = fm.draft(one.model, "mtp"), random.Random(seed)
    texts = tokens(one, 41, 41, 41, seed=seed)
    begun = one.model.init_state(3, 48, page_size=page(one))
    state, dstate = begun, head.init_state(begun)
    at, carry = [5, 6, 7], None
    out, state = advance(one, state, [text[:count] for text, count in zip(texts, at, strict=True)])
    batch = fm.Batch.from_lists([text[:count] for text, count in zip(texts, at, strict=True)])
    following = torch.tensor([text[count] for text, count in zip(texts, at, strict=True)])
    dstate, carry = head.extend(one.params, dstate, out, batch, fm.next_tokens(batch, following), carry)
    for _ in range(8):
        proposal, dstate = head.propose(one.params, dstate, carry, STEPS)
        kept = [draw.randint(0, STEPS + 1) for _ in texts]
        # What counts of each window is the text; the rest are other tokens.
        windows = torch.tensor(tokens(one, *[STEPS + 1] * 3, seed=draw.randint(0, 9**9)))
        for row, text in enumerate(texts):
            right = text[at[row] : at[row] + kept[row]]
            windows[row, : len(right)] = torch.tensor(right)
        window = replace(proposal, root=windows[:, 0], tokens=windows[:, 1:]).batch(state)
        out, pending = one.model.forward(one.params, state, window, keep_steps=True)
        state = fm.commit(pending, kept)
        emitted = [text[place + 1 : place + 1 + count] for text, place, count in zip(texts, at, kept, strict=True)]
        told = torch.tensor([row + [-1] * (STEPS + 1 - len(row)) for row in emitted])
        dstate, carry = head.extend(one.params, dstate, out, window, told, carry)
        at = [place + count for place, count in zip(at, kept, strict=True)]
    for row, text in enumerate(texts):
        plainly, whole = advance(one, one.model.init_state(1, 48, page_size=page(one)), [text[: at[row]]])
        assert_rows_close(state, whole, [(row, 0)])
        formula = Transcription(one)
        formula.run(text[1 : at[row] + 1], plainly.hidden)
        close(fm.logical(dstate, row), formula.entries())


def test_without_a_head() -> None:
    one = small(0)
    with pytest.raises(ValueError, match="these parameters have no mtp head"):
        fm.draft(one.model, "mtp").forward(
            tree.put(one.params, "mtp", None), None, fm.Batch.from_lists([[1]]), streams(one, 1)[0]
        )
