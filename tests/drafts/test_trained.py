"""A tiny model and its head, trained for seconds: right heads are accepted, and what they are fed decides it."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import funcmodels as fm
import params
from tests.drafts.rounds import Asked, Rows, agreement, undrafted
from tests.oracle import mtp
from tests.oracle.mtp import MtpPair
from tests.oracle.qwen3_5 import KINDS

VOCAB = 6
STARTS = [(a, b) for a in range(VOCAB) for b in range(VOCAB)]

kinds = pytest.mark.parametrize("kind", KINDS)


def sequence(start: tuple[int, int], count: int) -> list[int]:
    """Each token follows from the two before it, so that a token alone does not tell the next."""
    ids = list(start)
    while len(ids) < count:
        ids.append((3 * ids[-2] + 5 * ids[-1] + ids[-1] * ids[-2] + 1) % VOCAB)
    return ids


@functools.cache
def trained(kind: str) -> MtpPair:
    """Trunk and head together, the head also on its own hidden states, until both know the sequence."""
    fields = mtp.sizes(kind, 0) | {"vocab_size": VOCAB, "hidden_size": 24, "rms_norm_eps": 1e-6}
    one = mtp.build(kind, fields | {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}, 0, 1)
    tree = params.tree_map(lambda leaf: leaf.clone().requires_grad_(), one.params)
    optimizer = torch.optim.Adam(params.leaves(tree), lr=0.02)
    for _ in range(45):
        optimizer.zero_grad()
        loss(one, tree).backward()
        optimizer.step()
    return replace(one, params=params.tree_map(lambda leaf: leaf.detach(), tree))


def loss(one: MtpPair, tree: Any) -> Tensor:
    """Cross entropy of the next token, and of the two after it by the head and the head on its own hidden."""
    ids = torch.tensor([sequence(start, 13) for start in STARTS])
    first, second, third, fourth = (ids[:, at : at + 10].flatten() for at in range(4))
    batch = fm.Batch.from_tokens(first, [10] * len(STARTS))
    head = fm.draft(one.model, "mtp")
    out, _ = one.model.forward(tree, None, batch)
    draft, _ = head.forward(tree, None, replace(batch, tokens=second), out.hidden)
    later, _ = head.forward(tree, None, replace(batch, tokens=third), draft.hidden)
    logits = torch.cat((out.logits, draft.logits, later.logits))
    return torch.nn.functional.cross_entropy(logits, torch.cat((second, third, fourth)))


def accepted_a_round(rows: Rows, rounds: int) -> float:
    return sum(sum(rows.round(rows.propose())) for _ in range(rounds)) / rounds / len(rows.tokens)


@kinds
def test_a_right_head_is_accepted_and_changes_no_token(kind: str) -> None:
    one = trained(kind)
    asked = [Asked(sequence(start, 2 + 3 * (start[0] % 2))) for start in STARTS]
    truths = undrafted(one, asked, 26)
    rows = Rows(one, asked, max_len=64, page_size=5, checked=True)
    assert accepted_a_round(rows, 6) > 3.5
    compared, left_out = agreement(rows, truths)
    assert compared > 36 * 20 and left_out <= compared // 20
    rows.check()


@kinds
def test_a_head_fed_wrongly_is_accepted_less(kind: str) -> None:
    """Hidden states of another row, or the trunk's own at each step of a chain: the token alone does not tell."""
    one = trained(kind)
    asked = [Asked(sequence(start, 4)) for start in STARTS]
    rows = Rows(one, asked, max_len=64)
    assert rows.carry is not None
    rows.carry = fm.Carry(rows.carry.token, rows.carry.hidden.roll(1, 0))
    first = rows.round(rows.propose())
    assert sum(first) < 2.5 * len(asked)
    assert sum(rows.round(rows.propose())) > 3 * len(asked), "the next round starts from its own hidden states"


@kinds
def test_sampled_rows_accept_as_often_as_the_model_agrees(kind: str) -> None:
    """At a temperature that leaves the law flat few drafts are accepted; the tokens are those of the undrafted run."""
    one = trained(kind)
    hot = fm.Sampling(temperature=20.0, seed=3)
    asked = [Asked(sequence(start, 4), request, hot) for request, start in enumerate(STARTS)]
    truths = undrafted(one, asked, 20)
    rows = Rows(one, asked, max_len=64, checked=True)
    assert 1 < accepted_a_round(rows, 4) < 2.5
    compared, left_out = agreement(rows, truths)
    assert compared > 36 * 4 and left_out <= compared // 20
    rows.check()
