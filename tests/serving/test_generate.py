"""Generation against transformers, and what must not change a prompt's tokens; text streams; stop conditions."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import funcmodels as fm
import lowering
import params as trees
from funcmodels.checkpoint.text import TextStream
from funcmodels.serving.prefixes import Share
from funcmodels.serving.scheduler import Continuation, Offer
from tests import tiny

PROMPTS = [[5, 9, 200, 31, 7], [100], [17, 30, 44, 250, 81, 66, 3, 12, 90, 71, 33], [2, 2, 2], [301, 77], [8] * 20]


@pytest.fixture(scope="module")
def reference() -> Any:
    """The transformers model of the checkpoint."""
    return tiny.oracle()


@pytest.fixture(scope="module")
def directory(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("checkpoint"), reference)


@pytest.fixture(scope="module")
def loaded(directory: Path) -> tuple[fm.Model, Any]:
    return fm.load(directory, dtype=torch.float32)


@pytest.fixture(scope="module")
def expected(reference: Any) -> list[list[int]]:
    """Greedy continuations of `PROMPTS`, one at a time, by transformers."""

    def continued(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        whole = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
        return whole[0, len(prompt) :].tolist()

    return [continued(prompt) for prompt in PROMPTS]


def tokens(results: list[fm.Result]) -> list[list[int]]:
    return [result.tokens for result in results]


@pytest.mark.parametrize(
    ("rows", "chunk", "page_size"), [(None, 512, 128), (1, 512, 16), (2, 4, 8), (4, 3, 5), (9, 1, 64)]
)
def test_greedy_tokens_are_those_of_transformers(
    rows: int | None, chunk: int, page_size: int, loaded: tuple[fm.Model, Any], expected: list[list[int]]
) -> None:
    ours = fm.generate(*loaded, PROMPTS, 24, eos=(), rows=rows, chunk=chunk, page_size=page_size)
    assert tokens(ours) == expected
    assert len({tuple(found[-8:]) for found in expected}) > 3, "the prompts should not all end alike"
    for result, prompt in zip(ours, PROMPTS, strict=True):
        assert (result.finish_reason, result.rounds, result.prompt_tokens) == ("length", 23, len(prompt))


def test_prepared_parameters_give_the_same_tokens(loaded: tuple[fm.Model, Any], expected: list[list[int]]) -> None:
    model, params = loaded
    assert tokens(fm.generate(model, lowering.prepare(params), PROMPTS, 24, eos=(), rows=3)) == expected


def test_one_token_ends_in_prefill(loaded: tuple[fm.Model, Any], expected: list[list[int]]) -> None:
    results = fm.generate(*loaded, PROMPTS, 1, eos=(), rows=2)
    assert tokens(results) == [found[:1] for found in expected]
    assert {result.rounds for result in results} == {0}


SAMPLING = fm.Sampling(temperature=1.5, top_p=0.98, seed=4)


@pytest.mark.plain
@pytest.mark.parametrize("default", ["meta", torch.float64], ids=str)
def test_a_default_device_or_dtype_is_not_asked(default: str | torch.dtype, directory: Path) -> None:
    """Weights, states, batches and noise are where and what they are without it."""
    penalised = replace(SAMPLING, top_k=9, min_p=0.01, frequency_penalty=0.3, logit_bias=((5, 1.0),))

    def everything() -> tuple[list[list[int]], list[torch.Tensor]]:
        model, params = fm.load(directory, dtype=torch.float32)
        found = tokens(fm.generate(model, params, PROMPTS[:2], 4, sampling=[penalised, fm.Sampling()]))
        state = model.init_state(2, 16, dtype=torch.float32, page_size=4, pages=8)
        out, state = model.forward(params, state, fm.Batch.from_lists([[1, 2], [3]], state), keep_steps=True)
        state = fm.select(fm.fork(fm.commit(state, [1, 1])), [1, 0])
        return found, trees.leaves((out, state, model.init_params(), params))

    expected = everything()
    try:
        torch.set_default_dtype(default) if isinstance(default, torch.dtype) else torch.set_default_device(default)
        found = everything()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert found[0] == expected[0]
    for x, y in zip(found[1], expected[1], strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


def test_sampled_tokens_do_not_depend_on_rows_chunks_or_company(loaded: tuple[fm.Model, Any]) -> None:
    wanted = tokens(fm.generate(*loaded, PROMPTS, 16, sampling=SAMPLING, eos=(), rows=1))
    assert len({token for found in wanted for token in found}) > 30
    for rows, chunk in ((2, 512), (3, 2), (6, 5)):
        assert tokens(fm.generate(*loaded, PROMPTS, 16, sampling=SAMPLING, eos=(), rows=rows, chunk=chunk)) == wanted
    mixed = [SAMPLING if index % 2 else fm.Sampling() for index in range(len(PROMPTS))]
    found = tokens(fm.generate(*loaded, PROMPTS, 16, sampling=mixed, eos=(), rows=4))
    assert found[1::2] == wanted[1::2]
    assert found[::2] == tokens(fm.generate(*loaded, PROMPTS, 16, eos=()))[::2]


def test_equal_prompts_are_told_apart_by_number_and_seed(loaded: tuple[fm.Model, Any]) -> None:
    def sampled(seed: int, numbers: list[int] | None = None) -> list[list[int]]:
        given = fm.Sampling(1.5, seed=seed)
        return tokens(fm.generate(*loaded, [[5, 6]] * 3, 12, sampling=given, eos=(), numbers=numbers))

    first = sampled(1)
    assert len({tuple(found) for found in first}) == 3
    assert sampled(1) == first
    assert all(a != b for a, b in zip(sampled(2), first, strict=True))
    assert sampled(1, [2, -(2**63), 2]) == [first[2], sampled(1, [0, 0, -(2**63)])[2], first[2]]


def test_a_result_can_be_had_again_in_any_company(loaded: tuple[fm.Model, Any], expected: list[list[int]]) -> None:
    """By its number: alone, in another order, beside prompts that were not there, in fewer rows and smaller pieces."""
    draw = random.Random(3)
    each = [replace(SAMPLING, temperature=1.5 * (at % 3 > 0), min_p=0.001 * (at % 2)) for at in range(len(PROMPTS))]
    numbers = [draw.randrange(-(2**63), 2**63) for _ in PROMPTS]
    whole = fm.generate(*loaded, PROMPTS, 16, sampling=each, eos=(), numbers=numbers)
    assert [result.number for result in whole] == numbers
    assert tokens(whole)[::3] == [found[:16] for found in expected[::3]], "every third is greedy"
    for size in (1, 2, 5, 6):
        picked: list[int | None] = [*draw.sample(range(len(PROMPTS)), size)]
        requests = [fm.Request(tuple(PROMPTS[at]), 16, each[at], number=numbers[at]) for at in picked if at is not None]
        stranger = draw.randrange(size + 1)
        picked.insert(stranger, None)
        requests.insert(stranger, fm.Request((7, 8, 9), 5, fm.Sampling(2.0, top_k=3), number=numbers[0]))
        served = fm.serve(*loaded, requests, rows=draw.randint(1, 4), chunk=draw.choice([2, 512]))
        found = {event.request: event.result for event in served if event.result}
        for place, at in enumerate(picked):
            assert at is None or (found[place].tokens, found[place].number) == (whole[at].tokens, numbers[at])


@pytest.mark.parametrize("rows", [1, 2, 6])
def test_eos_ends_a_row_and_the_next_prompt_takes_it(
    rows: int, loaded: tuple[fm.Model, Any], expected: list[list[int]]
) -> None:
    ends = (expected[0][3], expected[2][7])
    results = fm.generate(*loaded, PROMPTS, 24, eos=ends, rows=rows)
    for result, whole in zip(results, expected, strict=True):
        at = min((whole.index(end) + 1 for end in ends if end in whole), default=24)
        assert result.tokens == whole[:at]
        assert result.finish_reason == ("eos" if set(ends) & set(whole) else "length")
        assert result.rounds == at - 1
    assert {"eos"} <= {result.finish_reason for result in results}
    assert len({len(result.tokens) for result in results}) > 1


@pytest.mark.parametrize("as_list", [False, True])
def test_eos_of_the_checkpoint_is_the_default(
    as_list: bool, reference: Any, expected: list[list[int]], tmp_path: Path
) -> None:
    end = expected[0][2]
    tiny.write(tmp_path, reference, [tiny.VOCAB - 1, end] if as_list else end)
    model, params = fm.load(tmp_path, dtype=torch.float32)
    result = fm.generate(model, params, PROMPTS[:1], 24)[0]
    assert (result.tokens, result.finish_reason) == (expected[0][: expected[0].index(end) + 1], "eos")
    assert fm.generate(model, params, PROMPTS[:1], 24, eos=())[0].finish_reason == "length"


def test_events_add_up_to_the_results(loaded: tuple[fm.Model, Any]) -> None:
    model, params = loaded
    events: list[fm.Event] = []
    results = fm.generate(model, params, PROMPTS, 20, sampling=SAMPLING, eos=(), stream=events.append, rows=2)
    for number, result in enumerate(results):
        mine = [event for event in events if event.request == number]
        assert [token for event in mine for token in event.tokens] == result.tokens
        assert "".join(event.text for event in mine) == result.text
        assert [event.result for event in mine] == [None] * (len(mine) - 1) + [result]
        assert model.tokenizer is not None
        assert result.text == model.tokenizer.decode(result.tokens)


def test_requests_may_differ_in_length_and_settings(loaded: tuple[fm.Model, Any], expected: list[list[int]]) -> None:
    lengths = [3, 20, 1, 7, 11, 2]
    requests = [fm.Request(tuple(prompt), length) for prompt, length in zip(PROMPTS, lengths, strict=True)]
    done = {event.request: event.result for event in fm.serve(*loaded, requests, rows=2, page_size=4) if event.result}
    assert {number: result.tokens for number, result in done.items()} == {
        number: expected[number][:length] for number, length in enumerate(lengths)
    }


def test_serve_leaves_the_grad_mode_of_its_caller_alone(loaded: tuple[fm.Model, Any]) -> None:
    modes = [torch.is_grad_enabled() for _ in fm.serve(*loaded, [fm.Request((1, 2), 3)])]
    assert modes == [True] * 3


def test_no_prompts_give_no_results(loaded: tuple[fm.Model, Any]) -> None:
    assert fm.generate(*loaded, []) == []


@pytest.mark.parametrize("which", range(4))
def test_stop_strings_cut_the_text_before_them(which: int, loaded: tuple[fm.Model, Any]) -> None:
    model, params = loaded
    free = fm.generate(model, params, ["def "], 40, sampling=SAMPLING, eos=())[0]
    assert free.text is not None and model.tokenizer is not None
    whole = [free.text[at : at + 2] for at in range(len(free.text) - 1)]
    stop = [pair for pair in whole if "\ufffd" not in pair][3 * which]
    pieces: list[str] = []

    def keep(event: fm.Event) -> None:
        pieces.append(event.text)

    found = fm.generate(model, params, ["def "], 40, sampling=SAMPLING, eos=(), stop=["☃☃", stop], stream=keep)[0]
    assert found.finish_reason == "stop"
    assert found.text == free.text[: free.text.index(stop)] == "".join(pieces)
    assert found.tokens == free.tokens[: len(found.tokens)]
    assert stop in model.tokenizer.decode(found.tokens)
    assert stop not in model.tokenizer.decode(found.tokens[:-1])


def test_a_stop_string_may_be_a_special_token(loaded: tuple[fm.Model, Any]) -> None:
    forced = fm.Sampling(logit_bias=((0, 1e4),))
    result = fm.generate(*loaded, ["def "], 5, sampling=forced, eos=(), stop=tiny.END)[0]
    assert (result.tokens, result.text, result.finish_reason) == ([0], "", "stop")


@pytest.mark.parametrize(
    ("eos", "stop", "text", "reason"),
    [
        ((), (f"b{tiny.END}",), "a", "stop"), ((0,), (f"b{tiny.END}",), "a", "stop"), ((0,), ("b!",), "ab", "eos"),
        ((), (f"b{tiny.END}!",), "ab", "length"), ((), ("b\ufffd",), "a", "stop"),
    ],
)  # fmt: skip
def test_a_stop_string_that_the_last_token_completes(
    eos: tuple[int, ...], stop: tuple[str, ...], text: str, reason: str, loaded: tuple[fm.Model, Any]
) -> None:
    tokenizer = loaded[0].tokenizer
    assert tokenizer is not None
    half = [tiny.byte_ids("語")[0]] if "\ufffd" in stop[0] else [0]
    ids = [*tiny.byte_ids("ab"), *half]
    request = fm.Request((1,), len(ids), eos=eos, stop=stop)
    row = Continuation(0, request, Share(None, 0, ()), TextStream(tokenizer, stop))
    result = row.take(Offer([*ids, 5])).result
    assert result is not None
    assert (result.tokens, result.text, result.finish_reason) == (ids, text, reason)


def test_string_prompts_are_tokenised(loaded: tuple[fm.Model, Any]) -> None:
    model, params = loaded
    assert model.tokenizer is not None
    ids = model.tokenizer.encode("def read(self)")
    assert tokens(fm.generate(model, params, ["def read(self)"], 8)) == tokens(fm.generate(model, params, [ids], 8))


def test_text_ends_before_the_end_of_text_token(loaded: tuple[fm.Model, Any], expected: list[list[int]]) -> None:
    model, params = loaded
    end = next(token for token in expected[0][4:] if token < 200 and token not in expected[0][:4])
    result = fm.generate(model, params, PROMPTS[:1], 24, eos=end)[0]
    assert model.tokenizer is not None
    assert result.tokens[-1] == end and model.tokenizer.decode([end])
    assert result.text == model.tokenizer.decode(result.tokens[:-1])


@pytest.mark.parametrize("nested", [False, True])
def test_an_empty_prompt_begins_with_the_bos_token(nested: bool, loaded: tuple[fm.Model, Any]) -> None:
    model, params = loaded
    config = {**model.config_json, "bos_token_id": 7}
    if nested:
        config = {"model_type": "qwen3_5", "text_config": config}
    begun = fm.build(config)
    assert tokens(fm.generate(begun, params, [[]], 5)) == tokens(fm.generate(begun, params, [[7]], 5))


REFUSED = [
    ({"prompts": [[1], []]}, "prompt 1 is empty.*bos_token_id"),
    ({"prompts": [[1], [2, 320]]}, r"prompt 1 has token ids outside the vocabulary \(0..319\): \[320\]"),
    ({"prompts": [[1] * 100], "max_new_tokens": 29}, "100 tokens and 29 new ones do not fit in the 128 positions"),
    ({"prompts": "text"}, "prompts is a list of prompts"),
    pytest.param({"prompts": [1, 2]}, "prompts is a list of prompts", marks=pytest.mark.plain),
    ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, found 0"),
    ({"draft": "mtp"}, "this model has no mtp head"),
    ({"sampling": [fm.Sampling()] * 3}, "2 prompts and 3 samplings"),
    ({"stop": ""}, "stop string is empty"),
    ({"rows": 0}, "rows must be at least 1, found 0"),
    ({"numbers": [3]}, "2 prompts and 1 numbers"),
    ({"numbers": [3, 2**63]}, "number must be an integer of 64 bits, found one of 64 bits"),
    ({"chunk": -1}, "chunk must be at least 1, found -1"),
    ({"page_size": 0}, "page_size must be at least 1, found 0"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_mistakes_are_found_before_any_work(given: dict[str, Any], message: str, loaded: tuple[fm.Model, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        fm.generate(loaded[0], None, **{"prompts": [[1], [2]], **given})


WRONG_TYPES = [
    ({"prompts": [[1], [1.7, 2.2]]}, r"prompt 1 must be a list of integer token ids, found \[1.7, 2.2\]"),
    ({"prompts": [[1], 2.5]}, "prompt 1 must be a list of integer token ids, found 2.5"),
    ({"max_new_tokens": 2.5}, "max_new_tokens must be an integer, found 2.5"),
    ({"max_new_tokens": None}, "max_new_tokens must be an integer, found None"),
    ({"rows": 1.0}, "rows must be an integer, found 1.0"),
    ({"page_size": "8"}, "page_size must be an integer, found '8'"),
    ({"stop": None}, "stop must be a string or a list of strings, found None"),
    ({"stop": ["x", 3]}, r"stop must be a string or a list of strings, found \['x', 3\]"),
    ({"eos": 2.0}, r"eos must be a list of integer token ids, found \[2.0\]"),
    ({"eos": "end"}, "eos must be a list of integer token ids, found 'end'"),
    ({"sampling": [0.8, 0.8]}, "sampling must be a Sampling, found 0.8"),
    ({"sampling": 0.8}, "sampling must be a list with one a prompt, found 0.8"),
    ({"prompts": 5}, "prompts must be a list with one a prompt, found 5"),
    ({"prompts": [[1], [True]]}, r"prompt 1 must be a list of integer token ids, found \[True\]"),
    ({"numbers": 5}, "numbers must be a list with one a prompt, found 5"),
    ({"max_new_tokens": True}, "max_new_tokens must be an integer, found True"),
    ({"rows": True}, "rows must be an integer, found True"),
    ({"stream": 5}, "stream must be a function that takes an Event, found 5"),
]


@pytest.mark.plain
@pytest.mark.parametrize("requests", [5, [5], [[1]], ["x"], [None]])
def test_what_are_no_requests(requests: Any, loaded: tuple[fm.Model, Any]) -> None:
    with pytest.raises(TypeError, match=r"serve: expected a list of fm\.Request, found"):
        fm.serve(loaded[0], None, requests)


@pytest.mark.plain
def test_prompts_may_come_from_an_iterator(loaded: tuple[fm.Model, Any]) -> None:
    given: Any = iter([[1], [2]])
    assert tokens(fm.generate(*loaded, given, 3)) == tokens(fm.generate(*loaded, [[1], [2]], 3))


@pytest.mark.plain
@pytest.mark.parametrize(("given", "message"), WRONG_TYPES)
def test_wrong_types_are_named(given: dict[str, Any], message: str, loaded: tuple[fm.Model, Any]) -> None:
    with pytest.raises(TypeError, match=message):
        fm.generate(loaded[0], None, **{"prompts": [[1], [2]], **given})


@pytest.mark.plain
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": "abc"}, "prompt must be a list of integer token ids, found 'abc'"),
        ({"prompt": (1.5,)}, "prompt must be a list of integer token ids"),
        ({"eos": 3}, "eos must be a list of integer token ids, found 3"),
        ({"stop": "end"}, "stop must be a tuple of strings, found 'end'"),
        ({"sampling": None}, "sampling must be a Sampling, found None"),
        ({"number": 1.0}, "number must be an integer, found 1.0"),
        ({"number": True}, "number must be an integer, found True"),
    ],
)
def test_requests_of_wrong_types(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        fm.Request(**{"prompt": (1,), "max_new_tokens": 2, **given})


@pytest.mark.plain
def test_ids_and_ends_of_other_integer_types(loaded: tuple[fm.Model, Any]) -> None:
    ids: Any = torch.tensor([5, 6])
    plain = fm.generate(*loaded, [[5, 6]], 3, eos=[])
    assert tokens(fm.generate(*loaded, [list(ids), list(ids.numpy())], 3, eos=[])) == tokens(plain) * 2
    assert fm.requests_of(loaded[0], [[5]], 3, eos=ids.numpy()[0])[0].eos == (5,)


def test_a_prompt_that_just_fits(loaded: tuple[fm.Model, Any]) -> None:
    assert len(fm.generate(*loaded, [[1] * 100], 28, eos=())[0].tokens) == 28


def test_a_model_without_tokenizer_takes_ids_only(loaded: tuple[fm.Model, Any], expected: list[list[int]]) -> None:
    model = fm.build(loaded[0].config_json)
    results = fm.generate(model, loaded[1], PROMPTS[:2], 5)
    assert tokens(results) == [found[:5] for found in expected[:2]]
    assert [result.text for result in results] == [None, None]
    with pytest.raises(ValueError, match="prompt 0 is a string"):
        fm.generate(model, loaded[1], ["text"])
    with pytest.raises(ValueError, match="need a tokenizer"):
        fm.generate(model, loaded[1], [[1]], stop="x")


def test_broken_parameters_leave_no_choice(loaded: tuple[fm.Model, Any]) -> None:
    model, params = loaded
    broken = trees.put(params, "norm.weight", torch.full_like(params.norm.weight, torch.nan))
    for result in fm.generate(model, broken, [[1, 2], [3], [4]], rows=2):
        assert (result.tokens, result.text, result.finish_reason, result.rounds) == ([], "", "no_choice", 0)


def streamed(stream: TextStream, ids: list[int]) -> list[str]:
    """The pieces of a stream, that of its end included; none after a stop."""
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return [*pieces, stream.finish()]


def test_streams_never_show_half_a_character(loaded: tuple[fm.Model, Any]) -> None:
    tokenizer = loaded[0].tokenizer
    assert tokenizer is not None
    text = "größe naïve 語☃🙂🙂 x\u0301 \N{ZERO WIDTH JOINER}👩‍👩‍👧 ok"
    ids = tiny.byte_ids(text)
    assert len(ids) == len(text.encode())
    pieces = streamed(TextStream(tokenizer), ids)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece and len(piece) <= 1 for piece in pieces)


STOPS = [
    ("abcabd--", ["abd"], "abc"), ("abcabd--", ["d", "abd"], "abc"), ("xab", ["abc"], "xab"), ("aaab", ["aab"], "a"),
    ("abc", ["b", "abc"], "a"), ("abc", ["bc", "abc"], ""), ("é語☃ok", ["語☃"], "é"), ("\n\n\nx", ["\n\nx"], "\n"),
    ("stop", ["stop"], ""), ("", ["x"], ""), ("é語☃", ["\ufffd"], "é語☃"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "stops", "shown"), STOPS)
@pytest.mark.parametrize("seed", range(4))
def test_stop_strings_do_not_depend_on_how_the_text_was_split(
    seed: int, text: str, stops: list[str], shown: str, loaded: tuple[fm.Model, Any]
) -> None:
    tokenizer = loaded[0].tokenizer
    assert tokenizer is not None
    # Alone, as the tokenizer merges them, and bytes in place of some merges.
    generator = random.Random(seed)
    words = [text] if seed == 0 else [text[:2], text[2:]] if seed == 1 else list(text)
    ids = [i for word in words for i in (tokenizer.encode(word) if generator.random() < 0.5 else tiny.byte_ids(word))]
    assert tokenizer.decode(ids) == text
    stream = TextStream(tokenizer, stops)
    assert "".join(streamed(stream, ids)) == shown
    assert stream.stopped == (shown != text)


def test_ids_without_a_token_give_no_text(loaded: tuple[fm.Model, Any]) -> None:
    tokenizer = loaded[0].tokenizer
    assert tokenizer is not None
    ids = [tiny.VOCAB - 1, *tiny.byte_ids("a"), 0, tiny.VOCAB - 2, *tiny.byte_ids("b")]
    assert "".join(streamed(TextStream(tokenizer), ids)) == "ab"
