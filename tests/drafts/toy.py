"""A toy model and a toy draft, tables of logits after each token, decoded in rounds of drawn drafts by many rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

import funcmodels as fm
from tests.sampling.test_penalties import penalised
from tests.sampling.test_sampling import expected_law

VOCAB, ROWS, ROOT, START, STEPS = 7, 20_000, 2, 9, 2


def table(seed: int, spread: float = 1.5) -> Tensor:
    """Random logits of the next token after each token."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


@dataclass(frozen=True)
class Toy:
    """The model's table and the draft's, the settings, and the prompt before the root."""

    model: Tensor
    draft: Tensor
    given: fm.Sampling
    prompt: tuple[int, ...] = ()

    def law(self, output: Sequence[int] = ()) -> np.ndarray:
        """The law of the token after the root and `output`, by the formulas."""
        came = [ROOT, *output]
        return expected_law(penalised(self.model[came[-1]].numpy(), self.given, self.prompt, came), self.given)

    def draft_law(self, token: int = ROOT) -> np.ndarray:
        """The law of a draft after `token`, which knows no penalties."""
        free = replace(self.given, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
        return expected_law(penalised(self.draft[token].numpy(), free, (), ()), self.given)

    def chain(self, count: int) -> Tensor:
        """The law of the first `count` tokens after the root, all sequences in order."""
        found, outputs = np.ones(1), [()]
        for _ in range(count):
            found = np.concatenate([mass * self.law(output) for mass, output in zip(found, outputs, strict=True)])
            outputs = [(*output, token) for output in outputs for token in range(VOCAB)]
        return torch.from_numpy(found)


Propose = Callable[[Toy, fm.RowSampling, Tensor, Tensor, Tensor], fm.Proposal]
"""Toy, settings, requests, roots and their places, to a window of drafts a row."""


def drawn(toy: Toy, rows: fm.RowSampling, requests: Tensor, root: Tensor, start: Tensor) -> fm.Proposal:
    """Drafts drawn as a draft of the package draws them."""
    noise, tokens, laws = fm.DraftNoise(rows, requests), [root], []
    for step in range(STEPS):
        token, law = noise.draw(toy.draft[tokens[-1]], start + 1 + step)
        tokens.append(token)
        laws.append(law)
    return fm.Proposal(root, torch.stack(tokens[1:], 1), start, torch.stack(laws, 1))


def likeliest(toy: Toy, rows: fm.RowSampling, requests: Tensor, root: Tensor, start: Tensor) -> fm.Proposal:
    """The draft's argmax tokens, which bring no law."""
    tokens = [root]
    for _ in range(STEPS):
        tokens.append(toy.draft[tokens[-1]].argmax(-1))
    return fm.Proposal(root, torch.stack(tokens[1:], 1), start)


def first_round(toy: Toy, propose: Propose = drawn, rows: int = ROWS) -> tuple[fm.Proposal, fm.Verdict]:
    """One round in every row."""
    given, requests = fm.RowSampling.of([toy.given] * rows), torch.arange(rows)
    proposal = propose(toy, given, requests, torch.full((rows,), ROOT), torch.full((rows,), START))
    return proposal, verdict_on(toy, proposal, given, requests, counts_of(toy, rows))


def counts_of(toy: Toy, rows: int) -> fm.TokenCounts:
    """What each row has seen with its root."""
    return fm.TokenCounts.of([toy.prompt] * rows, VOCAB).add(torch.full((rows, 1), ROOT))


def verdict_on(
    toy: Toy, proposal: fm.Proposal, given: fm.RowSampling, requests: Tensor, counts: fm.TokenCounts
) -> fm.Verdict:
    """`verify`, after the toy model's forward."""
    window = torch.cat((proposal.root[:, None], proposal.tokens), 1)
    out = fm.Output(toy.model[window].flatten(0, 1), torch.zeros(window.numel(), 1), {})
    return fm.verify(out, proposal, given, requests, counts)


def stream(toy: Toy, propose: Propose = drawn, count: int = 3, rows: int = ROWS, relaxed: bool = False) -> Tensor:
    """The first `count` tokens after the root of each row, in rounds: [rows count]. `relaxed` forgets what came."""
    given, requests, counts = fm.RowSampling.of([toy.given] * rows), torch.arange(rows), counts_of(toy, rows)
    found = torch.full((rows, count + STEPS + 1), -1)
    held, root = torch.zeros(rows, dtype=torch.int64), torch.full((rows,), ROOT)
    while int(held.min()) < count:
        verdict = verdict_on(toy, propose(toy, given, requests, root, START + held), given, requests, counts)
        counts = counts if relaxed else counts.add(verdict.tokens)
        places = torch.arange(STEPS + 1)
        live = (places < verdict.accepted[:, None]) & (held < count)[:, None]
        # What does not count goes to a place past the end.
        found = found.scatter(1, torch.where(live, held[:, None] + places, count + STEPS), verdict.tokens)
        newest = verdict.tokens.gather(1, verdict.accepted[:, None] - 1)[:, 0]
        root, held = torch.where(held < count, newest, root), held + live.sum(1)
    return found[:, :count]
