"""Drafted generation gives what undrafted generation gives, whatever the draft, and says how the drafts fared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import funcmodels as fm
from params import tree
from tests import tiny
from tests.oracle import deepseek_v2, kimi_linear, qwen3_5
from tests.sampling.test_penalties import penalised

PROMPTS = [[5, 9, 200, 31, 7], [100], [17, 30, 44, 250, 81, 66, 3, 12, 90, 71, 33], [2, 2, 2], [301, 77], [8] * 20]
NEW = 22
SAMPLED = fm.Sampling(temperature=1.2, top_k=60, top_p=0.95, min_p=0.002, seed=9)
MIXED = [SAMPLED if index % 2 else fm.Sampling() for index in range(len(PROMPTS))]

Loaded = tuple[fm.Model, Any]
Plainly = Callable[..., list[fm.Result]]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """A random model with a random head, and a tokenizer's worth of vocabulary."""
    model = fm.build({"model_type": "qwen3_5_text", **tiny.SIZES, "mtp_num_hidden_layers": 1})
    generator = torch.Generator().manual_seed(0)
    params = model.init_params(seed=1)
    return model, fm.model.checkpoints.tree_map(lambda x: torch.randn(x.shape, generator=generator) / 6, params)


@dataclass(frozen=True)
class Scripted(fm.Draft):
    """A draft that knows the texts: right, but for the places where `wrong(place)` says otherwise.

    It goes by the newest token and its place alone, so it drafts garbage where two texts agree in those.
    """

    texts: dict[tuple[int, int], list[int]]
    wrong: Any

    def init_state(self, state: fm.State) -> fm.State:
        """The state carries nothing but the rows' lengths."""
        return fm.fork(state)

    def extend(
        self, params: Any, state: fm.State, out: Any, batch: fm.Batch, next_tokens: torch.Tensor, carry: Any = None
    ) -> tuple[fm.State, fm.Carry]:
        """Count the tokens and keep the newest."""
        kept, ends, next_tokens = [], batch.query_start.tolist(), next_tokens.flatten()
        newest = [0] * batch.rows if carry is None else carry.token.tolist()
        for row, (start, end) in enumerate(pairwise(ends)):
            known = [token for token in next_tokens[start:end].tolist() if token >= 0]
            newest[row] = known[-1] if known else newest[row]
            kept.append(len(known))
        lengths = state.lengths + torch.tensor(kept, dtype=torch.int32)
        grown = fm.State(**{**state.__dict__, "lengths": lengths})
        return grown, fm.Carry(torch.tensor(newest), torch.zeros(batch.rows, 1))

    def propose(
        self, params: Any, state: fm.State, carry: fm.Carry, steps: int = 3, noise: Any = None
    ) -> tuple[fm.Proposal, fm.State]:
        """The text's next tokens, or wrong ones."""
        drafts = []
        for root, place in zip(carry.token.tolist(), state.lengths.tolist(), strict=True):
            text = self.texts.get((place, root), [])
            right = [text[at] if at < len(text) else 0 for at in range(steps)]
            drafts.append([(x + self.wrong(place + at)) % tiny.VOCAB for at, x in enumerate(right)])
        return fm.Proposal(carry.token, torch.tensor(drafts), state.lengths), state


def scripted(prompts: list[list[int]], results: list[fm.Result], wrong: Any = lambda place: 0) -> Scripted:
    """The draft that knows these results."""
    texts = {}
    for prompt, result in zip(prompts, results, strict=True):
        whole = prompt + result.tokens
        texts |= {(at, whole[at]): whole[at + 1 :] for at in range(len(prompt), len(whole))}
    return Scripted(texts, wrong)


WRONG = {
    "right": lambda place: 0,
    "garbage": lambda place: 1 + place % 7,
    "every other": lambda place: place % 2,
    "every third": lambda place: place % 3 == 0,
}


def outcome(results: list[fm.Result]) -> list[tuple[Any, ...]]:
    return [(x.tokens, x.text, x.finish_reason, x.prompt_tokens) for x in results]


@pytest.fixture(scope="module")
def plainly(loaded: Loaded) -> Plainly:
    """`plainly(new, **given)`: what the prompts give without a draft, run once for all drafts that are held to it."""
    found: dict[str, list[fm.Result]] = {}

    def run(new: int, **given: Any) -> list[fm.Result]:
        key = repr((new, sorted(given.items())))
        if key not in found:
            found[key] = fm.generate(*loaded, PROMPTS, new, **given)
        return found[key]

    return run


@pytest.mark.parametrize("sampling", [fm.Sampling(), SAMPLED, MIXED], ids=["greedy", "sampled", "mixed"])
@pytest.mark.parametrize(("rows", "chunk", "steps"), [(6, 512, 3), (2, 4, 1), (1, 512, 7), (4, 3, 2)])
def test_the_head_changes_nothing_but_rounds(
    rows: int, chunk: int, steps: int, sampling: Any, loaded: Loaded, plainly: Plainly
) -> None:
    setup: dict[str, Any] = {"rows": rows, "chunk": chunk, "eos": (), "sampling": sampling, "page_size": 8}
    plain = plainly(NEW, **setup)
    drafted = fm.generate(*loaded, PROMPTS, NEW, draft="mtp", draft_steps=steps, **setup)
    assert outcome(drafted) == outcome(plain)
    assert all(len(result.accepted) == steps for result in drafted)
    assert all(result.accepted == () for result in plain)


@pytest.mark.parametrize("sampling", [fm.Sampling(), MIXED], ids=["greedy", "mixed"])
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(("rows", "chunk", "steps"), [(6, 512, 3), (2, 4, 1), (3, 5, 7)])
def test_no_draft_changes_the_tokens(
    rows: int, chunk: int, steps: int, wrong: str, sampling: Any, loaded: Loaded, plainly: Plainly
) -> None:
    setup: dict[str, Any] = {"rows": rows, "chunk": chunk, "eos": (), "sampling": sampling, "page_size": 8}
    plain = plainly(NEW, **setup)
    draft = scripted(PROMPTS, plain, WRONG[wrong])
    drafted = fm.generate(*loaded, PROMPTS, NEW, draft=draft, draft_steps=steps, **setup)
    assert outcome(drafted) == outcome(plain)
    for result in drafted:
        # Each round gives a token and the accepted drafts; the last may give more than is taken.
        given = result.rounds + sum(result.accepted)
        assert NEW - 1 <= given <= NEW - 1 + steps
        assert list(result.accepted) == sorted(result.accepted, reverse=True)
    if wrong == "right":
        least = -(-(NEW - 1) // (steps + 1))
        extra = sum(result.rounds - least for result in drafted)
        assert 0 <= extra <= 2, "only where two texts have the same token at the same place is a draft wrong"
    if wrong == "garbage":
        assert {result.accepted for result in drafted} == {(0,) * steps}


PENALISED = fm.Sampling(
    0.9, top_k=80, seed=3, repetition_penalty=1.3, presence_penalty=0.6, frequency_penalty=0.4,
    logit_bias=((7, 3.0), (200, -float("inf"))),
)  # fmt: skip
PENALTIES = [PENALISED, fm.Sampling(), replace(PENALISED, temperature=0.0), SAMPLED, PENALISED, PENALISED]


def one_at_a_time(loaded: Loaded, prompt: list[int], number: int, given: fm.Sampling) -> list[int]:
    """Tokens from forwards of the whole text so far, penalised by the formulas: for greedy rows, their argmax."""
    model, params = loaded
    text = list(prompt)
    for _ in range(NEW):
        out, _ = model.forward(params, None, fm.Batch.from_lists([text]))
        output = text[len(prompt) :]
        logits = torch.from_numpy(penalised(out.logits[-1].detach().numpy(), given, prompt, output)).float()
        free = replace(given, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, logit_bias=())
        text += fm.sample(logits[None], free, torch.tensor([number]), torch.tensor([len(text)])).tolist()
    return text[len(prompt) :]


@pytest.fixture(scope="module")
def alone(loaded: Loaded) -> list[list[int]]:
    """What each prompt gives by itself."""
    each = enumerate(zip(PROMPTS, PENALTIES, strict=True))
    return [one_at_a_time(loaded, prompt, number, given) for number, (prompt, given) in each]


@pytest.mark.parametrize("draft", [None, "mtp"])
@pytest.mark.parametrize(("rows", "chunk"), [(6, 512), (2, 4)])
def test_penalties_go_by_the_tokens_of_each_row(
    draft: str | None, rows: int, chunk: int, loaded: Loaded, plainly: Plainly, alone: list[list[int]]
) -> None:
    """Rows that ask for them and rows that do not, rows that are given to other prompts."""
    setup: dict[str, Any] = {"rows": rows, "chunk": chunk, "eos": (), "sampling": PENALTIES, "page_size": 8}
    found = fm.generate(*loaded, PROMPTS, NEW, draft=draft, **setup)
    for number, (given, result) in enumerate(zip(PENALTIES, found, strict=True)):
        assert result.tokens == alone[number], number
        assert given != PENALISED or 200 not in result.tokens
    setup["sampling"] = [replace(given, **OFF) for given in PENALTIES]
    free = plainly(NEW, **setup)
    assert [x.tokens == y.tokens for x, y in zip(found, free, strict=True)] == [False, True, False, True, False, False]


OFF: dict[str, Any] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@pytest.mark.parametrize("wrong", ["right", "every third"])
def test_drafts_of_penalised_rows_are_verified_with_what_the_window_has(
    wrong: str, loaded: Loaded, plainly: Plainly
) -> None:
    plain = plainly(NEW, sampling=PENALTIES, eos=())
    draft = scripted(PROMPTS, plain, WRONG[wrong])
    drafted = fm.generate(*loaded, PROMPTS, NEW, draft=draft, draft_steps=5, rows=4, sampling=PENALTIES, eos=())
    assert outcome(drafted) == outcome(plain)
    assert sum(sum(result.accepted) for result in drafted) > NEW


@pytest.mark.parametrize("wrong", ["right", "every other"])
@pytest.mark.parametrize("steps", [1, 3, 6])
def test_rows_end_inside_a_window(wrong: str, steps: int, loaded: Loaded, plainly: Plainly) -> None:
    """At every place of a window, by length and by an end token; the row then goes to another prompt."""
    whole = plainly(NEW, eos=())
    draft = scripted(PROMPTS, whole, WRONG[wrong])
    ends = tuple(result.tokens[4 + index] for index, result in enumerate(whole))
    for length in range(1, 11):
        setup: dict[str, Any] = {"eos": ends[: length // 2], "rows": 2, "page_size": 8}
        plain = plainly(length, **setup)
        assert outcome(fm.generate(*loaded, PROMPTS, length, draft=draft, draft_steps=steps, **setup)) == outcome(plain)
        reasons = {result.finish_reason for result in plain}
    assert reasons == {"eos", "length"}


def test_stop_strings_inside_a_window(loaded: Loaded, tmp_path: Any) -> None:
    tiny.write(tmp_path)
    model, params = fm.load(tmp_path, dtype=torch.float32)
    prompt = "def "
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(prompt)
    free = fm.generate(model, params, [prompt], 40, sampling=SAMPLED, eos=())[0]
    assert free.text is not None
    draft = scripted([ids], [free])
    for at in range(0, 20, 3):
        stop = free.text[at : at + 3]
        setup: dict[str, Any] = {"sampling": SAMPLED, "eos": (), "stop": stop}
        plain, pieces = fm.generate(model, params, [prompt], 40, **setup), []
        drafted = fm.generate(model, params, [prompt], 40, draft=draft, stream=pieces.append, **setup)
        assert outcome(drafted) == outcome(plain)
        assert "".join(event.text for event in pieces) == plain[0].text == free.text[: free.text.index(stop)]


def test_a_row_that_ends_in_prefill_has_taken_no_draft(loaded: Loaded) -> None:
    for result in fm.generate(*loaded, PROMPTS[:2], 1, draft="mtp", draft_steps=2):
        assert (result.rounds, result.accepted, result.acceptance) == (0, (0, 0), (0.0, 0.0))
        assert result.tokens_per_round == 0


class Outside(Scripted):
    """Drafts ids that are no tokens: those of the text, moved by `wrong`, a multiple of the vocabulary."""

    def propose(self, *args: Any, **kwargs: Any) -> tuple[fm.Proposal, fm.State]:
        """Not as a token."""
        proposal, state = super().propose(*args, **kwargs)
        return fm.Proposal(proposal.root, proposal.tokens + self.wrong(0), proposal.start), state


@pytest.mark.parametrize("away", [-tiny.VOCAB, tiny.VOCAB])
def test_drafts_that_are_no_tokens_are_never_taken(away: int, loaded: Loaded) -> None:
    plain = fm.generate(*loaded, PROMPTS, NEW, eos=())
    draft = Outside(scripted(PROMPTS, plain).texts, lambda place: away)
    assert outcome(fm.generate(*loaded, PROMPTS, NEW, eos=(), draft=draft)) == outcome(plain)


class Poisoned(Scripted):
    """Drafts token 1 somewhere in most windows, in none of some, and the text everywhere else."""

    def propose(self, *args: Any, **kwargs: Any) -> tuple[fm.Proposal, fm.State]:
        """At a place that goes by the row's length."""
        proposal, state = super().propose(*args, **kwargs)
        places = torch.arange(proposal.tokens.shape[1])
        here = places == (proposal.start % (len(places) + 1))[:, None]
        return replace(proposal, tokens=torch.where(here, 1, proposal.tokens)), state


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("sampling", [fm.Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "one",
    [lambda: qwen3_5.pair("dense"), lambda: deepseek_v2.pair("full"), lambda: kimi_linear.pair("published")],
    ids=["delta", "latent", "both"],
)
def test_drafts_that_are_no_numbers_change_nothing(one: Any, sampling: fm.Sampling, value: float) -> None:
    """What a rejected one leaves in its window reaches the tokens before it, and must not end their row."""
    one = one()
    weight = one.params.embed.weight.clone()
    weight[1] = value
    params, prompts = tree.put(one.params, "embed.weight", weight), [[5, 9, 20, 31, 7], [10], [17, 30, 44, 25, 2, 6, 3]]
    given: dict[str, Any] = {"eos": (), "sampling": sampling, "page_size": 8, "numbers": [0, 4, 5]}
    plain = fm.generate(one.model, params, prompts, 14, **given)
    assert {result.finish_reason for result in plain} == {"length"}
    draft = Poisoned(scripted(prompts, plain).texts, lambda place: 0)
    drafted = fm.generate(one.model, params, prompts, 14, draft=draft, **given)
    assert outcome(drafted) == outcome(plain)
    assert all(sum(result.accepted) > 0 for result in drafted), "other windows are taken as they were"


@pytest.mark.plain
@pytest.mark.parametrize("draft", [3, Scripted], ids=["number", "class"])
def test_what_is_no_draft_is_refused(draft: Any, loaded: Loaded) -> None:
    with pytest.raises(TypeError, match="draft must be 'mtp'"):
        fm.generate(*loaded, [[1]], draft=draft)


def half(draft: Scripted, *args: Any) -> Any:
    proposal, state = Scripted.propose(draft, *args)
    return replace(proposal, tokens=proposal.tokens[:, :1]), state


UNFIT = [
    ("init_state", lambda draft, state: {}, "init_state gave dict, expected a State of 1 rows"),
    ("init_state", lambda draft, state: fm.fork(state, [0, 0]), "init_state gave a state of 2 rows"),
    ("extend", lambda *args: args[2], r"extend gave State, expected \(State, Carry\)"),
    ("extend", lambda *args: (args[2], None), r"extend gave \(State, NoneType\), expected \(State, Carry\)"),
    ("propose", lambda *args: (torch.zeros(1, 3), args[2]), r"propose gave \(Tensor, State\), expected \(Proposal, St"),
    ("propose", half, r"propose gave root \[1\] and tokens \[1, 1\], expected \[1\] and \[1, 3\]"),
]  # fmt: skip


@pytest.mark.plain
@pytest.mark.parametrize(("name", "wrong", "message"), UNFIT)
def test_what_a_draft_gives_is_checked(name: str, wrong: Any, message: str, loaded: Loaded) -> None:
    draft = type("Unfit", (Scripted,), {name: wrong})({}, lambda place: 0)
    with pytest.raises((TypeError, ValueError), match=f"draft: Unfit.{message}"):
        fm.generate(*loaded, [[1, 2]], 8, eos=(), draft=draft)


REFUSED = [
    ({"draft": "dflash"}, "'dflash' is not a known draft"),
    ({"draft": "mtp", "draft_steps": 16}, "draft_steps must be at most 15, found 16"),
    ({"draft": "mtp", "draft_steps": 0}, "draft_steps must be at least 1, found 0"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_mistakes_are_found_before_any_work(given: dict[str, Any], message: str, loaded: Loaded) -> None:
    with pytest.raises(ValueError, match=message):
        fm.generate(loaded[0], None, [[1]], **given)
