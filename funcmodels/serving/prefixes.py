"""Which prompts begin alike, so that what they share is run once: a plan made from the prompts before any of them runs.

A prompt is compared with those next to it. One that begins as the next ones do stops where they part, and a copy of its
row is what they begin from. Prompts that share more among themselves than with the rest do so at several lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Prompt = Sequence[int]
Beginning = tuple[int | None, int]
"""The number of a prompt, and how many of its first tokens."""


@dataclass(frozen=True)
class Share:
    """Of one prompt: its first `start` tokens come from prompt `source`, if any; where `holds` says, others begin."""

    source: int | None
    start: int
    holds: tuple[int, ...]

    @property
    def beginning(self) -> Beginning:
        """What the prompt begins from."""
        return self.source, self.start


def plan(prompts: Sequence[Prompt], least: int) -> list[Share]:
    """A `Share` for each prompt. Where one begins lie at least `least` tokens that need not be run again.

    The last common token is run by every prompt: it leaves each of them one of its own to run, and a draft's entry of a
    place goes by the token after it.
    """
    common = [_common(one, other) - 1 for one, other in pairwise(prompts)]
    stack: list[tuple[int, int]] = []  # lengths in rising order, and who stops there
    shares = []
    for number, ahead in enumerate(_lengths_ahead(common)):
        while number and stack and stack[-1][0] > common[number - 1]:
            stack.pop()
        start, source = stack[-1] if stack else (0, None)
        holds = []
        for length in ahead:
            if length >= (stack[-1][0] if stack else 0) + least:
                holds.append(length)
                stack.append((length, number))
        shares.append(Share(source, start, tuple(holds)))
    return shares


def _common(one: Prompt, other: Prompt) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(one), len(other)))


def _lengths_ahead(common: Sequence[int]) -> list[tuple[int, ...]]:
    """For each prompt, in rising order, what it shares with the next ones: the least of `common` up to each of them."""
    found: list[tuple[int, ...]] = [()]
    for length in reversed(common):
        found.append((*(x for x in found[-1] if x < length), length))
    return found[::-1]


def pages_held(shares: Sequence[Share], page_size: int) -> int:
    """The most pages that copies for prompts still to come can hold at a time, the one about to be made included."""
    most, stack = 0, list[int]()
    for share in shares:
        while stack and stack[-1] > share.start:
            stack.pop()
        stack += share.holds
        if stack:
            most = max(most, stack[-1] // page_size + len(stack))
    return most
