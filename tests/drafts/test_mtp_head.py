"""The multi-token prediction head against float64 loops and transformers: values, entries, chains, gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import funcmodels as fm
import params
from tests.oracle import mtp
from tests.oracle.mtp import MtpPair, Transcription
from tests.oracle.qwen3_5 import KINDS, entries, tokens
from tests.oracle.states import ROUNDING, advance, per_row
from tests.tolerances import assert_close

HEADS = [(kind, seed, 1 + (seed in (1, 2))) for kind in KINDS for seed in range(4)]

kinds = pytest.mark.parametrize("kind", KINDS)
heads = pytest.mark.parametrize(("kind", "seed", "layers"), HEADS)


def close(actual: Any, expected: Any) -> None:
    assert_close(actual, expected, looser=5, dtype=torch.float32, reason=ROUNDING)


def given(one: MtpPair, *counts: int, seed: int = 0) -> tuple[list[list[int]], list[Tensor]]:
    """Next tokens and hidden states of rows, both random: the head must not care where they come from."""
    generator = torch.Generator().manual_seed(seed)
    hidden = [torch.randn(count, one.config.hidden_size, generator=generator) for count in counts]
    return tokens(one, *counts, seed=seed), hidden


@torch.no_grad()
def assembled(one: MtpPair, ids: list[int], hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """One row through the head of transformers, in two chunks: hidden, logits, and its cache as logical entries."""
    from transformers import DynamicCache

    cache = DynamicCache(config=one.head.config)
    embedded, cut = one.theirs.model.embed_tokens(torch.tensor(ids)), len(ids) // 3
    chunks = [chunk for chunk in (slice(0, cut), slice(cut, None)) if len(ids[chunk])]
    made = torch.cat([one.head(embedded[chunk], hidden[chunk], cache) for chunk in chunks])
    return made, one.theirs.lm_head(made), entries(cache, one.head.config.layer_types)


@heads
def test_a_batch_alone_is_the_formula_and_the_head_of_transformers(kind: str, seed: int, layers: int) -> None:
    one = mtp.pair(kind, seed, layers)
    ids, hidden = given(one, 1, 9, 2, 17, seed=seed)
    head = fm.draft(one.model, "mtp")
    batch = fm.Batch.from_lists(ids)
    out, none = head.forward(one.params, None, batch, torch.cat(hidden))
    assert none is None
    last, _ = head.forward(one.params, None, batch, torch.cat(hidden), logits="last")
    for row, (row_ids, h) in enumerate(zip(ids, hidden, strict=True)):
        formula = Transcription(one)
        right = torch.from_numpy(formula.run(row_ids, h))
        theirs, their_logits, _ = assembled(one, row_ids, h)
        for expected, logits in ((right, torch.from_numpy(formula.logits(right.numpy()))), (theirs, their_logits)):
            close(per_row(out.hidden, ids)[row], expected)
            close(per_row(out.logits, ids)[row], logits)
            close(last.logits[row], logits[-1])


@heads
def test_chunks_leave_the_keys_and_values_of_the_formula(kind: str, seed: int, layers: int) -> None:
    """`extend` in chunks that end within pages and at their ends, each chunk told the token that follows it."""
    one = mtp.pair(kind, seed, layers)
    counts = (6, 11, 1, 8)
    ids = tokens(one, *(count + 1 for count in counts), seed=seed)
    head = fm.draft(one.model, "mtp")
    state = one.model.init_state(4, 16, page_size=(1, 3, 4, 128)[seed], checked=True)
    dstate, carry = head.init_state(state), None
    hidden: list[list[Tensor]] = [[] for _ in ids]
    for lower, upper in ((0, 1), (1, 5), (5, 8), (8, 11)):
        fed = [row[lower : min(upper, len(row) - 1)] for row in ids]
        out, state = advance(one, state, fed)
        batch = fm.Batch.from_lists(fed)
        last = torch.tensor([row[min(upper, len(row) - 1)] for row in ids])
        dstate, carry = head.extend(one.params, dstate, out, batch, fm.next_tokens(batch, last), carry)
        for row, part in enumerate(per_row(out.hidden, fed)):
            hidden[row].append(part)
    assert carry is not None and carry.token.tolist() == [row[-1] for row in ids]
    assert dstate.ledger.lengths == counts and dstate.lengths.tolist() == list(counts)
    for row, row_ids in enumerate(ids):
        formula = Transcription(one)
        made = formula.run(row_ids[1:], torch.cat(hidden[row]))
        close(fm.logical(dstate, row), formula.entries())
        close(fm.logical(dstate, row), assembled(one, row_ids[1:], torch.cat(hidden[row]))[2])
        close(carry.hidden[row], torch.from_numpy(made[-1]))


@heads
def test_drafts_are_those_of_the_formula_chained(kind: str, seed: int, layers: int) -> None:
    """Each draft goes back in with the head's own hidden; a proposal leaves the state as it was."""
    one = mtp.pair(kind, seed, layers)
    ids = tokens(one, *(3 + row % 5 for row in range(12)), seed=seed)
    head = fm.draft(one.model, "mtp")
    state = one.model.init_state(12, 16, page_size=4, pages=40)
    out, after = advance(one, state, ids)
    batch = fm.Batch.from_lists(ids)
    last = out.logits[(batch.query_start[1:] - 1).long()].argmax(-1)
    dstate, carry = head.extend(one.params, head.init_state(state), out, batch, fm.next_tokens(batch, last))
    before = [fm.logical(dstate, row) for row in range(12)]
    proposal, again = head.propose(one.params, dstate, carry, 5)
    shorter, _ = head.propose(one.params, dstate, carry, 2)
    assert torch.equal(shorter.tokens, proposal.tokens[:, :2])
    assert torch.equal(proposal.root, last) and torch.equal(proposal.start, after.lengths)
    for held in (dstate, again):
        assert all(params.equal(fm.logical(held, row), before[row]) for row in range(12))
    unchained = 0
    for row, row_ids in enumerate(ids):
        formula = Transcription(one)
        made = formula.run([*row_ids[1:], int(last[row])], per_row(out.hidden, ids)[row])[-1]
        drafts = proposal.tokens[row].tolist()
        assert drafts == formula.chain(int(last[row]), made, 5)
        other = Transcription(one)
        other.run([*row_ids[1:], int(last[row])], per_row(out.hidden, ids)[row])
        unchained += (
            int(other.logits(other.step(drafts[0], per_row(out.hidden, ids)[row][-1].numpy())).argmax()) != drafts[1]
        )
    assert unchained > 3, "the hidden state that is handed on must matter to these drafts"


@kinds
def test_the_head_takes_the_hidden_after_the_final_norm(kind: str) -> None:
    """What transformers calls the last hidden state, which is what its output projection reads."""
    one = mtp.pair(kind, 2)
    (ids,) = tokens(one, 9)
    head = fm.draft(one.model, "mtp")
    state = one.model.init_state(1, 16)
    batch = fm.Batch.from_lists([ids])
    out, _ = one.model.forward(one.params, state, batch)
    with torch.no_grad():
        hidden = one.theirs.model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    dstate, carry = head.extend(
        one.params, head.init_state(state), out, batch, fm.next_tokens(batch, torch.tensor([7]))
    )
    formula = Transcription(one)
    made = formula.run([*ids[1:], 7], hidden)
    close(fm.logical(dstate, 0), formula.entries())
    close(carry.hidden[0], torch.from_numpy(made[-1]))


def test_bfloat16_heads_follow_the_states_dtype() -> None:
    one = mtp.small("dense")
    low = replace(one, params=params.to(one.params, dtype=torch.bfloat16))
    ids = tokens(one, 5, 8)
    head = fm.draft(one.model, "mtp")
    state = one.model.init_state(2, 16, dtype=torch.bfloat16)
    out, _ = advance(low, state, ids)
    batch = fm.Batch.from_lists(ids)
    dstate, carry = head.extend(
        low.params, head.init_state(state), out, batch, fm.next_tokens(batch, torch.tensor([1, 2]))
    )
    assert {leaf.dtype for leaf in fm.logical(dstate, 0).values()} == {torch.bfloat16}
    wide = head.forward(
        one.params, None, replace(batch, tokens=fm.next_tokens(batch, torch.tensor([1, 2]))), out.hidden.float()
    )
    assert_close(carry.hidden, wide[0].hidden[[4, 12]], dtype=torch.bfloat16, looser=4, reason="every layer rounds")


# Gradients


@pytest.mark.parametrize(("kind", "seed", "layers"), [("dense", 0, 1), ("dense", 1, 2), ("moe", 0, 2), ("moe", 1, 1)])
def test_gradients_are_those_of_transformers(kind: str, seed: int, layers: int) -> None:
    """Of every parameter of the head, the shared embedding and output projection, and the hidden states given."""
    one = mtp.pair(kind, seed, layers)
    ids, hidden = given(one, 7, 12, seed=seed)
    targets = torch.tensor(tokens(one, 19, seed=9)[0])
    head, batch = fm.draft(one.model, "mtp"), fm.Batch.from_lists(ids)

    def loss(tree: Any, given_hidden: Tensor) -> Tensor:
        out, _ = head.forward(tree, None, batch, given_hidden)
        return torch.nn.functional.cross_entropy(out.logits, targets, reduction="sum")

    (grads, into_hidden), value = torch.func.grad_and_value(loss, (0, 1))(one.params, torch.cat(hidden))
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in one.tensors.items()}
    theirs = loss_of_transformers(one, leaves, ids, wanted := [h.clone().requires_grad_() for h in hidden], targets)
    close(value, theirs.detach())
    theirs.backward()
    named = params.to_checkpoint(grads, one.model.param_spec(), one.model.family.names)
    reason = "a backward sums over tokens, layers and both rows"
    assert_close(into_hidden, torch.cat([h.grad for h in wanted if h.grad is not None]), looser=20, reason=reason)
    for name, leaf in named.items():
        if name.startswith("mtp.") or name in ("model.embed_tokens.weight", "lm_head.weight"):
            right = leaves[name].grad
            assert right is not None and right.abs().max() > 0, name
            assert_close(leaf, right, looser=20, reason=reason)
        else:
            assert not leaf.any(), f"{name} is no part of the head"


def loss_of_transformers(
    one: MtpPair, leaves: dict[str, Tensor], ids: list[list[int]], hidden: list[Tensor], targets: Tensor
) -> Tensor:
    """The head of transformers run on `leaves`; a tied output projection is the embedding's leaf."""
    own = {name.removeprefix("mtp."): leaf for name, leaf in leaves.items() if name.startswith("mtp.")}
    embedding = leaves["model.embed_tokens.weight"]
    projection = embedding if one.config.tie_word_embeddings else leaves["lm_head.weight"]
    made = [
        torch.func.functional_call(one.head, own, (embedding[torch.tensor(row)], h))
        for row, h in zip(ids, hidden, strict=True)
    ]
    return torch.nn.functional.cross_entropy(torch.cat(made) @ projection.T, targets, reduction="sum")
