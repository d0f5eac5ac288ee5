"""Captured generation gives what plain generation gives, compiles each program once, and fails without doing harm."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import funcmodels as fm
import lowering
from funcmodels.serving import progress
from funcmodels.serving.prefixes import Share
from funcmodels.serving.programs import Keys, Programs
from funcmodels.serving.runner import settled
from funcmodels.serving.scheduler import NOBODY, Continuation
from params import tree
from params.tree import tree_map
from tests import tiny
from tests.serving.test_generate_drafted import PENALTIES, PROMPTS, SAMPLED, outcome, scripted

Loaded = tuple[fm.Model, Any]
Engines = Callable[..., fm.Engine]
PAGE = 16
ROOM = 48
"""Tokens that the longest request of every test fills: states of one shape, programs for one."""
SIZES: dict[str, Any] = {"rows": 3, "page_size": PAGE, "chunk": 16}
KEPT: dict[str, Any] = {"eos": (), **SIZES}


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """A random model with a random head."""
    return fresh()


@pytest.fixture(scope="module")
def engines(loaded: Loaded) -> Engines:
    """`engines(**options)`: the one of the model with these options; what it captures serves all tests here."""
    made: dict[str, fm.Engine] = {}

    def engine(**options: Any) -> fm.Engine:
        return made.setdefault(repr(sorted(options.items())), fm.Engine(*loaded, **{**SIZES, **options}))

    return engine


def fresh() -> Loaded:
    layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    model = fm.build({"model_type": "qwen3_5_text", **tiny.SIZES, **layers, "mtp_num_hidden_layers": 1})
    generator = torch.Generator().manual_seed(0)
    return model, tree_map(lambda x: torch.randn(x.shape, generator=generator) / 6, model.init_params(seed=1))


@contextmanager
def captures() -> Iterator[Counter[str]]:
    """Counts what is captured."""
    found: Counter[str] = Counter()

    def watch(what: str) -> Any:
        found[what] += 1
        return nullcontext()

    token = progress.WATCH.set(watch)
    try:
        yield found
    finally:
        progress.WATCH.reset(token)


def requests_of(draw: random.Random, sampling: list[fm.Sampling], count: int, engine: fm.Engine) -> list[fm.Request]:
    """Prompts of many lengths, some of which meet an end; one fills the room that all tests have."""
    lengths = [draw.choice([1, 2, 5, 9, 16, 17, 25]) for _ in range(count)]
    lengths.insert(draw.randrange(count), 28)
    requests = [
        fm.Request(
            tuple(draw.randrange(tiny.VOCAB) for _ in range(length)),
            draw.randint(3, 14) if length < 28 else ROOM - 28 - 3,
            sampling[at % len(sampling)],
            number=draw.randrange(-(2**63), 2**63),
        )
        for at, length in enumerate(lengths)
    ]
    ends = tuple(draw.choice(result.tokens[1:]) for result in draw.sample(served(engine, requests), 2))
    return [replace(request, eos=ends) for request in requests]


def served(engine: fm.Engine, requests: list[fm.Request]) -> list[fm.Result]:
    """Results in the order of the requests."""
    found = {event.request: event.result for event in engine.serve(requests) if event.result}
    return [found[number] for number in range(len(requests))]


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(2, 6))])
@pytest.mark.parametrize("kind", ["greedy", pytest.param("sampled", marks=pytest.mark.sweep), "mixed"])
def test_captured_tokens_are_the_plain_ones(seed: int, kind: str, engines: Engines) -> None:
    """Prompts that come and go at random, with and without a draft; each program is captured once for all of them."""
    draw = random.Random(f"{seed} {kind}")
    settings = {"greedy": [fm.Sampling()], "sampled": [SAMPLED], "mixed": [SAMPLED, fm.Sampling()]}[kind]
    requests = requests_of(draw, settings, draw.randint(5, 9), engines())
    right = served(engines(rows=len(requests), page_size=128, chunk=512), requests)
    assert {result.finish_reason for result in right} == {"length", "eos"}
    assert outcome(served(engines(rows=2), requests)) == outcome(right)
    with captures() as first:
        plain = served(engines(backend="fx"), requests)
        drafted = served(engines(backend="fx", draft="mtp"), requests)
    assert outcome(plain) == outcome(drafted) == outcome(right)
    assert [x.rounds for x in plain] == [x.rounds for x in right]
    assert first["a round"] <= 1 + (kind == "mixed")
    with captures() as second:
        order = list(range(len(requests)))[::-1]
        again = served(engines(backend="fx", draft="mtp"), [requests[at] for at in order])
    assert outcome(again) == [outcome(right)[at] for at in order]
    assert not second["a round"] or kind == "mixed"
    assert second["a step"] <= 1, "another order of prompts may meet another bucket, and nothing else"


def test_few_sizes_of_states_and_settings_are_captured() -> None:
    """Calls of other lengths, settings and numbers of prompts replay what there is."""
    draw, loaded = random.Random(3), fresh()
    engine = fm.Engine(*loaded, "mtp", "fx", **SIZES)
    with captures() as found:
        for count, new, top_k in ((7, 34, 40), (6, 38, 61), (3, 36, 33)):
            prompts = [[draw.randrange(tiny.VOCAB) for _ in range(draw.randint(2, 5))] for _ in range(count)]
            kinds = [fm.Sampling(0.7, top_k), fm.Sampling(0.9, top_p=0.9), fm.Sampling(1.2, top_k - 9, min_p=0.01)]
            each = [replace(kinds[at % 3], seed=at) for at in range(count)]
            captured = engine.generate(prompts, new, each, ())
            assert outcome(captured) == outcome(fm.generate(*loaded, prompts, new, "mtp", sampling=each, **KEPT))
    assert found == {"a step": 1, "a prefill of the draft": 1, "a round": 1}


@pytest.mark.parametrize("draft", [None, "mtp"])
def test_penalties_in_captured_rounds(draft: str | None, engines: Engines) -> None:
    right = engines().generate(PROMPTS, 14, PENALTIES, ())
    found = engines(backend="fx", **{"draft": draft} if draft else {}).generate(PROMPTS, 14, PENALTIES, ())
    assert outcome(found) == outcome(right)


def test_stop_strings_and_ends_in_captured_rounds(tmp_path: Any) -> None:
    layers = ["linear_attention", "full_attention"]
    tiny.write(tmp_path, tiny.oracle(num_hidden_layers=2, layer_types=layers))
    model, params = fm.load(tmp_path, dtype=torch.float32)
    given: dict[str, Any] = {"sampling": SAMPLED, "rows": 2, "page_size": PAGE}
    free = fm.generate(model, params, ["def ", "x"], 20, eos=(), **given)
    assert free[0].text is not None
    end = next(token for token in free[1].tokens[3:] if token not in free[0].tokens)
    given |= {"stop": free[0].text[4:6], "eos": end}
    pieces: list[fm.Event] = []
    found = fm.generate(model, params, ["def ", "x", "q"], 20, backend="fx", stream=pieces.append, **given)
    assert outcome(found) == outcome(fm.generate(model, params, ["def ", "x", "q"], 20, **given))
    assert [result.finish_reason for result in found][:2] == ["stop", "eos"]
    whole = free[0].text[: free[0].text.index(given["stop"])]
    assert "".join(event.text for event in pieces if event.request == 0) == whole


@torch.no_grad()
@pytest.mark.parametrize("captured", [False, True])
def test_a_step_leaves_the_length_of_nobodys_rows_alone(captured: bool, loaded: Loaded) -> None:
    model, params = loaded
    alone = Share(None, 0, ())
    rows = [
        Continuation(3, fm.Request((5, 6), 4), alone), NOBODY, Continuation(8, fm.Request((7,), 4, SAMPLED), alone)
    ]  # fmt: skip
    state = model.init_state(3, 3 * PAGE, page_size=PAGE)
    _, state = model.forward(params, state, fm.Batch.from_lists([[5, 6], [], [7]], state))
    keys = Keys.of(rows, [SAMPLED, fm.Sampling()], torch.device("cpu"))
    step = Programs.of(model, backend="fx" if captured else None).step
    drawn, _, new = step(params, state, fm.Batch.from_lists([[1], [0], [2]], state), keys)
    assert new.lengths.tolist() == [3, 0, 2]
    state = settled(new, [3, 0, 2])
    assert state.ledger.lengths == state.ledger.least == (3, 0, 2)
    for row, text, request, sampling in ((0, [5, 6, 1], 3, fm.Sampling()), (2, [7, 2], 8, SAMPLED)):
        out, _ = model.forward(params, None, fm.Batch.from_lists([text]))
        given = torch.tensor([request]), torch.tensor([len(text)])
        assert drawn[row] == fm.sample(out.logits[-1:], sampling, *given)[0]


def test_two_runs_at_a_time_share_programs(engines: Engines) -> None:
    """What is captured keeps nothing of a run: another may go on between any two of its rounds."""
    both = [[fm.Request(tuple(prompt), 14, one) for prompt in PROMPTS] for one in (fm.Sampling(), SAMPLED)]
    right = [served(engines(draft="mtp"), requests) for requests in both]
    runs = [engines(backend="fx", draft="mtp").serve(requests) for requests in both]
    found: list[dict[int, fm.Result]] = [{}, {}]
    for pair in itertools.zip_longest(*runs):
        for results, event in zip(found, pair, strict=True):
            if event is not None and event.result is not None:
                results[event.request] = event.result
    assert [[results[at] for at in range(len(PROMPTS))] for results in found] == right


@pytest.mark.parametrize("backend", [None, "fx"])
@pytest.mark.parametrize("draft", [None, "mtp"])
def test_a_row_without_a_choice_ends_alone(draft: str | None, backend: str | None, loaded: Loaded) -> None:
    """By broken parameters, after some tokens, or by its settings, at once; the rest goes on, in its row too."""
    model, params = loaded
    prompts = [*PROMPTS, *PROMPTS[::2]]
    settings = [fm.Sampling(), fm.Sampling(3.0, seed=2), fm.Sampling(0.9)] * 3
    right = fm.generate(*loaded, prompts, 14, sampling=settings, **KEPT)
    others = [at for at in range(len(prompts)) if at not in (1, 2, 3)]
    seen = {token for at in others for token in (*prompts[at], *right[at].tokens)} | {*prompts[1], *prompts[2]}
    broken = next(at for at, token in enumerate(right[1].tokens) if token not in seen)
    embed = params.embed.weight.clone()
    embed[right[1].tokens[broken]] = torch.nan
    settings[2] = replace(settings[2], logit_bias=tuple((token, -torch.inf) for token in range(tiny.VOCAB)))
    settings[3] = replace(settings[3], presence_penalty=-3e38, frequency_penalty=-3e38)
    given: dict[str, Any] = {"sampling": settings, "backend": backend, "draft": draft, **KEPT}
    found = fm.generate(model, tree.put(params, "embed.weight", embed), prompts, 14, **given)
    assert [found[at].tokens for at in others] == [right[at].tokens for at in others]
    assert {found[at].finish_reason for at in others} == {"length"}
    assert {found[at].finish_reason for at in (1, 2, 3)} == {"no_choice"}
    assert found[1].tokens == right[1].tokens[: broken + 1] and found[2].tokens == []
    assert found[3].tokens == right[3].tokens[:1], "what comes once is raised past float32 when it has come"


@pytest.mark.parametrize("backend", [None, "fx"])
def test_too_few_pages_are_an_error_and_the_next_call_works(
    backend: str | None, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[*range(30, 55), at] for at in range(5)]
    init = fm.Model.init_state

    def fewer(self: fm.Model, *args: Any, pages: int | None = None, **kwargs: Any) -> fm.State:
        assert pages is not None, "these prompts share a beginning"
        return init(self, *args, pages=6, **kwargs)

    right = outcome(fm.generate(*loaded, prompts, 20, **KEPT))
    given: dict[str, Any] = {**KEPT, "backend": backend}
    with monkeypatch.context() as patched:
        patched.setattr(fm.Model, "init_state", fewer)
        with pytest.raises(fm.OutOfPages, match=r"more pages are needed and \d of 6 are free"):
            fm.generate(*loaded, prompts, 20, **given)
    assert outcome(fm.generate(*loaded, prompts, 20, **given)) == right


def test_mistakes_with_backends(loaded: Loaded) -> None:
    with pytest.raises(ValueError, match="backend='graph' is not known"):
        fm.generate(loaded[0], None, [[1]], backend="graph")
    draft = scripted(PROMPTS, fm.generate(*loaded, PROMPTS, 3, eos=()))
    with pytest.raises(lowering.CaptureError, match="reads a value or a size that is only known on the device"):
        fm.generate(*loaded, PROMPTS, 3, draft=draft, backend="fx", **KEPT)


def test_what_is_captured_goes_with_its_engine() -> None:
    """Nothing is left in the model, which stays a record, or in the draft."""
    model, params = fresh()
    draft = fm.draft(model, "mtp")
    with captures() as found:
        engines = [fm.Engine(model, params, draft, "fx") for _ in range(2)]
        results = [engine.generate([[1, 2]], 2, eos=()) for engine in (*engines, engines[0])]
    assert results[0] == results[1] == results[2]
    assert found["a step"] == found["a round"] == 2, "once for each"
    for record in (model, draft):
        assert set(vars(record)) == {field.name for field in fields(record)}
    assert (copy.deepcopy(model), pickle.loads(pickle.dumps(model))) == (model, model)
    gone = [weakref.ref(x) for x in (*engines, params, params.embed.weight, model)]
    engines.clear()
    del params
    gc.collect()
    assert [x() is None for x in gone] == [True] * 4 + [False]
    del model, draft, record
    gc.collect()
    assert gone[-1]() is None


@pytest.mark.compile
# As Inductor is loaded.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("draft", [None, pytest.param("mtp", marks=pytest.mark.sweep)])
def test_compiled_rounds_give_the_plain_tokens(draft: str | None, loaded: Loaded) -> None:
    prompts = [prompt[:7] for prompt in PROMPTS]
    given: dict[str, Any] = {"rows": 2, "page_size": 8, "chunk": 4}
    right = outcome(fm.generate(*loaded, prompts, 9, eos=(), **given))
    engine = fm.Engine(*loaded, draft, "inductor", **given)
    with captures() as found:
        for order in (slice(None), slice(None, None, -1)):
            assert outcome(engine.generate(prompts[order], 9, eos=())) == right[order]
    assert found == ({"a step": 1, "a prefill of the draft": 1, "a round": 1} if draft else {"a step": 2})
