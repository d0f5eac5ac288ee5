"""States and batches used wrongly: every misuse raises, and says what was given, what was expected, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch.utils.flop_counter import FlopCounterMode

import funcmodels as fm
import lowering
import params
from funcmodels.models import FAMILIES
from tests.oracle.qwen3_5 import Pair, pair, tokens
from tests.oracle.states import advance, assert_rows_close, per_row, refuses
from tests.sharding import kinds as families
from tests.tolerances import assert_close


@pytest.fixture
def one() -> Pair:
    return pair("dense", 0)


@pytest.fixture(params=[False, True], ids=["by default", "checked"])
def state(one: Pair, request: pytest.FixtureRequest) -> fm.State:
    return advance(one, one.model.init_state(2, 12, page_size=4, pages=9, checked=request.param), tokens(one, 6, 3))[1]


@pytest.fixture
def pending(one: Pair, state: fm.State) -> fm.State:
    return advance(one, state, [[1, 2, 3], [4]], keep_steps=True)[1]


# Batches


@pytest.mark.parametrize(
    ("lists", "error", "message"),
    [
        ([[1, 2], [3, -1]], ValueError, "row 1, token 1: id -1 is out of range; ids must be in 0..{last}"),
        ([[1], [10_000]], ValueError, "row 1, token 0: id 10000 is out of range; ids must be in 0..{last}"),
        ([[1]], fm.StateError, "the batch has 1 rows, the state has 2; give one list a row ([] idles)"),
        ([[1], [2], []], fm.StateError, "the batch has 3 rows, the state has 2"),
        ([[], [1] * 10], ValueError, "row 1: 10 new tokens do not fit: it holds 3, and max_len is 12"),
        ([[1] * 7, []], ValueError, "row 0: 7 new tokens do not fit: it holds 6, and max_len is 12"),
    ],
)
def test_batches_that_do_not_fit(one: Pair, state: fm.State, lists: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message.format(last=one.config.vocab_size - 1))):
        fm.Batch.from_lists(lists, state)


def test_batches_from_tensors(one: Pair, state: fm.State) -> None:
    with pytest.raises(ValueError, match=re.escape("counts [1, 1] add up to 2, there are 3 tokens")):
        fm.Batch.from_tokens(torch.tensor([1, 2, 3]), [1, 1])
    with pytest.raises(ValueError, match="counts"):
        fm.Batch.from_tokens(torch.tensor([1, 2, 3]), [4, -1])
    with pytest.raises(ValueError, match="a batch of 3 tokens does not fit in 2"):
        fm.Batch.from_tokens(torch.tensor([1, 2, 3]), [2, 1]).pad(2)
    made = fm.Batch.from_tokens(torch.tensor([1, 2, 3]), [2, 1], state)
    assert made == fm.Batch.from_lists([[1, 2], [3]], state)


def test_a_vocabulary_without_a_state() -> None:
    with pytest.raises(ValueError, match=re.escape("id 9 is out of range; ids must be in 0..8")):
        fm.Batch.from_lists([[9]], vocab=9)
    with pytest.raises(ValueError, match="id -1 is out of range"):
        fm.Batch.from_lists([[-1]])


def test_hints_of_a_batch() -> None:
    assert (fm.Batch.from_lists([[1, 2], [3, 4]]).uniform, fm.Batch.from_lists([[1, 2], [3]]).uniform) == (True, False)
    assert fm.Batch.from_lists([[1, 2], []]).max_query == 2
    padded = replace(fm.Batch.from_lists([[1], [2]]), positions=torch.zeros(3, 2, dtype=torch.int64)).pad(5)
    assert not padded.uniform and padded.rows == 2
    assert padded.positions is not None and padded.positions.shape == (3, 5)
    assert fm.Batch.from_lists([[1], [2]]).pad(2).uniform


def test_room_is_checked_again_by_forward(one: Pair, state: fm.State) -> None:
    batch = fm.Batch.from_lists([[1] * 6, []], state)
    _, after = one.model.forward(one.params, state, batch)
    with pytest.raises(ValueError, match="row 0: 6 new tokens do not fit: it holds 12"):
        one.model.forward(one.params, after, batch)
    other = one.model.init_state(3, 12)
    with pytest.raises(fm.StateError, match="the batch has 2 rows, the state has 3"):
        one.model.forward(one.params, other, batch)


# Making a state


@pytest.mark.parametrize("name", ["rows", "max_len", "page_size", "pages"])
@pytest.mark.parametrize("value", [0, -3])
def test_sizes_of_a_state(one: Pair, name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"init_state: {name} must be at least 1, found {value}"):
        one.model.init_state(**({"rows": 1, "max_len": 4} | {name: value}))


@pytest.mark.parametrize("name", ["dtype", "recurrent_dtype"])
def test_dtypes_of_a_state(one: Pair, name: str) -> None:
    with pytest.raises(ValueError, match=r"a state holds floating-point values, found dtype torch\.int32"):
        one.model.init_state(1, 4, **{name: torch.int32})
    made = fm.logical(one.model.init_state(1, 4, **{name: torch.bfloat16}), 0)
    for path, value in made.items():
        rounded = path.endswith("delta") == (name == "recurrent_dtype")
        assert value.dtype == (torch.bfloat16 if rounded else torch.float32), path


# Keeping and committing steps


def test_steps_are_kept_for_sixteen_tokens_at_most(one: Pair) -> None:
    state = one.model.init_state(1, 20)
    with pytest.raises(ValueError, match="keep_steps=True with 17 new tokens in a row; at most 16 can be kept"):
        advance(one, state, [[1] * 17], keep_steps=True)
    _, pending = advance(one, state, [[1] * 16], keep_steps=True)
    for accepted in range(17):
        fresh = one.model.init_state(1, 20)
        _, expected = advance(one, fresh, [[1] * accepted]) if accepted else (None, fresh)
        assert_rows_close(fm.commit(pending, [accepted]), expected)


def test_steps_are_not_kept_without_a_state(one: Pair) -> None:
    with pytest.raises(fm.StateError, match="keep_steps=True needs a state to commit"):
        one.model.forward(one.params, None, fm.Batch.from_lists([[1]]), keep_steps=True)


@pytest.mark.parametrize(
    ("accepted", "message"),
    [
        ([4, 1], "row 0 was offered 3 tokens, 4 were accepted; give 0..3"),
        ([1, 2], "row 1 was offered 1 tokens, 2 were accepted; give 0..1"),
        ([0, -1], "row 1 was offered 1 tokens, -1 were accepted; give 0..1"),
        ([1], "accepted has shape [1], expected one count a row, [2]"),
        ([1, 1, 1], "accepted has shape [3], expected one count a row, [2]"),
    ],
)
@pytest.mark.parametrize("make", [list, torch.tensor])
def test_counts_that_cannot_be_accepted(
    pending: fm.State, accepted: list[int], message: str, make: Callable[[list[int]], Any]
) -> None:
    with pytest.raises(ValueError, match=re.escape(f"commit: {message}")):
        fm.commit(pending, make(accepted))
    fm.commit(pending, [3, 1])


def test_a_single_number_is_not_one_count_a_row(pending: fm.State) -> None:
    with refuses(ValueError, "accepted has shape [], expected one count a row, [2]"):
        fm.commit(pending, torch.tensor(1))


def test_fractions_of_tokens_are_not_accepted(pending: fm.State) -> None:
    with refuses(TypeError, "commit: accepted must be integers, found torch.float32"):
        fm.commit(pending, torch.tensor([1.5, 0.0]))


def test_nothing_to_commit(state: fm.State, pending: fm.State) -> None:
    with pytest.raises(fm.StateError, match="commit: nothing is pending"):
        fm.commit(state, [0, 0])
    with pytest.raises(fm.StateError, match="commit: nothing is pending"):
        fm.commit(fm.commit(pending, [1, 1]), [1, 1])


def test_a_pending_state_can_only_be_committed(one: Pair, pending: fm.State) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: advance(one, pending, [[1], []]), lambda: fm.fork(pending), lambda: fm.select(pending, [0]),
        lambda: fm.release(pending), lambda: fm.logical(pending, 0),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(fm.StateError, match=r"pending after keep_steps=True; call commit\(state, accepted\) first"):
            call()


def test_a_pending_state_can_be_committed_in_several_ways(one: Pair, state: fm.State, pending: fm.State) -> None:
    fewer, more = fm.commit(pending, [1, 0]), fm.commit(pending, [3, 1])
    assert (fewer.lengths.tolist(), more.lengths.tolist()) == ([7, 3], [9, 4])
    assert_rows_close(fm.commit(pending, [0, 0]), state)
    out, _ = advance(one, more, [[5], [5]])
    plain, _ = one.model.forward(one.params, None, fm.Batch.from_lists([tokens(one, 6, 3)[0] + [1, 2, 3, 5]]))
    assert_close(out.logits[0], plain.logits[-1], looser=5, reason="one call against three")


# Stale states


def test_an_overwritten_tail_is_found(one: Pair, state: fm.State) -> None:
    _, first = advance(one, state, [[], [5, 6]])
    _, second = advance(one, state, [[], [7]])
    with pytest.raises(fm.StaleStateError, match=r"row 1 of this state is stale.*fork\(state\) before"):
        advance(one, first, [[1], []])
    with pytest.raises(fm.StaleStateError, match="row 1"):
        fm.logical(first, 1)
    for whole in (lambda: fm.logical(first, 0), lambda: fm.fork(first, [0]), lambda: fm.select(first, [0])):
        whole()
    advance(one, second, [[1], [1]])
    advance(one, state, [[1], [1]])


def test_a_pending_state_overwritten_before_its_commit_is_found(one: Pair, state: fm.State, pending: fm.State) -> None:
    advance(one, state, [[8, 9], []])
    for accepted in ([1, 1], [2, 0], [3, 1]):
        stale = fm.commit(pending, accepted)
        with pytest.raises(fm.StaleStateError, match="row 0"):
            advance(one, stale, [[1], []])
    advance(one, fm.commit(pending, [0, 1]), [[1], [2]])


def test_rejected_drafts_overwritten_by_what_follows(one: Pair, pending: fm.State) -> None:
    kept = fm.commit(pending, [1, 1])
    advance(one, kept, [[9], [9]])
    with pytest.raises(fm.StaleStateError, match="row 0"):
        advance(one, fm.commit(pending, [2, 1]), [[1], []])
    advance(one, fm.commit(pending, [1, 1]), [[9], [9]])


def test_the_same_tokens_at_other_rotary_positions_are_another_continuation(one: Pair, state: fm.State) -> None:
    batch = fm.Batch.from_lists([[5], []], state)
    placed = [replace(batch, positions=torch.full((3, 1), at)) for at in (6, 9)]
    _, first = one.model.forward(one.params, state, placed[0])
    one.model.forward(one.params, state, placed[1])
    with pytest.raises(fm.StaleStateError, match="row 0"):
        advance(one, first, [[1], []])


@pytest.mark.parametrize("take", [fm.fork, fm.select])
def test_rows_of_a_stale_state_cannot_be_taken(one: Pair, state: fm.State, take: Callable[..., fm.State]) -> None:
    _, first = advance(one, state, [[5], []])
    advance(one, state, [[6], []])
    with pytest.raises(fm.StaleStateError, match="row 0"):
        take(first, [1, 0])


def test_a_state_of_another_model(one: Pair) -> None:
    layers = one.config.num_hidden_layers
    kinds = list(one.config.layer_types)
    for others, message in (
        ([*kinds, "full_attention"], f"the state has entries for {layers + 1} layers, the parameters have {layers}"),
        (kinds[:-1], f"the state has entries for {layers - 1} layers, the parameters have {layers}"),
        (kinds[::-1], "the state's entry for layer 0 is"),
    ):
        other = fm.build({**one.model.config_json, "num_hidden_layers": len(others), "layer_types": others})
        with refuses(fm.StateError, message):
            advance(one, other.init_state(1, 8), [[1]])


def test_a_batch_made_by_hand_says_how_long_its_rows_are() -> None:
    tokens, ends = torch.arange(6), torch.tensor([0, 4, 6], dtype=torch.int32)
    with refuses(TypeError, "max_query"):
        fm.Batch(tokens, ends)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("starts", "hints", "message"),
    [
        ([0, 4, 6], {"max_query": 4, "uniform": True}, "the batch says uniform, 2 rows of 4 tokens, and holds 6"),
        ([0, 4, 6], {"max_query": 4, "counts": (4, 3)}, "counts [4, 3] do not fit its 6 tokens and max_query=4"),
        ([0, 4, 6], {"max_query": 3, "counts": (4, 2)}, "counts [4, 2] do not fit its 6 tokens and max_query=3"),
        ([0, 4, 6], {"max_query": 4, "counts": (4, -1)}, "counts [4, -1] do not fit its 6 tokens"),
        ([0, 4, 6], {"max_query": 4, "counts": (4,)}, "the batch has 2 rows and counts for 1"),
        ([0, 4, 6], {"max_query": 4, "counts": (2, 4)}, "[4, 2] tokens by query_start, and counts say [2, 4]"),
        ([0, 4, 6], {"max_query": 3}, "[4, 2] tokens by query_start, and at most max_query=3"),
        ([0, 4, 6], {"max_query": 3, "uniform": True}, "[4, 2] tokens by query_start, and exactly max_query=3"),
        ([2, 4, 6], {"max_query": 4}, "query_start [2, 4, 6] must begin at 0"),
        ([0, 4, 7], {"max_query": 4}, "query_start [0, 4, 7] must begin at 0, never fall, and end within its 6 tokens"),
        ([0, 4, 3], {"max_query": 4}, "query_start [0, 4, 3] must begin at 0, never fall"),
        ([0], {"max_query": 4}, "the batch has no rows"),
        ([[0, 4, 6]], {"max_query": 4}, "query_start must be integers [rows + 1] of 64 or 32 bits"),
        ([0, 4, 6], {"max_query": 4, "positions": torch.zeros(6, 1).long()}, "6 tokens, and positions [6, 1]"),
        ([0, 4, 6], {"max_query": 4, "positions": torch.zeros(1, 1).long()}, "6 tokens, and positions [1, 1]"),
        ([0, 4, 6], {"max_query": 4, "positions": torch.zeros(6).long()}, "positions must be integers [axes, 6]"),
        ([0, 4, 6], {"max_query": 4, "positions": torch.zeros(3, 6)}, "positions must be integers [axes, 6]"),
        ([0, 4, 6], {"max_query": 4, "tokens": torch.full((6,), 10**6)}, "token 0 of the batch: id 1000000 is out of"),
        ([0, 4, 6], {"max_query": 4, "tokens": torch.arange(6) - 1}, "token 0 of the batch: id -1 is out of range"),
        ([0, 4, 6], {"max_query": 4, "tokens": torch.zeros(6)}, "tokens must be integers [tokens] of 64 or 32 bits"),
        ([0, 4, 6], {"max_query": 4, "tokens": torch.zeros(6).byte()}, "of 64 or 32 bits, found torch.uint8 [6]"),
        ([0, 4, 6], {"max_query": 4, "positions": torch.zeros(2, 6).long()}, "positions have 2 axes; give one"),
        ([0, 0], {"max_query": 0}, "max_query must be an integer of at least 1, found 0"),
        ([0, 4, 6], {"max_query": 4.0}, "max_query must be an integer of at least 1, found 4.0"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.plain
def test_batches_that_contradict_themselves(
    one: Pair, starts: list[Any], hints: dict[str, Any], message: str, rows: int | None
) -> None:
    parts: dict[str, Any] = {"tokens": torch.arange(6), "query_start": torch.tensor(starts, dtype=torch.int32)}
    batch = fm.Batch(**parts | hints)
    state = None if rows is None else one.model.init_state(rows, 12)
    calls = [lambda: one.model.forward(one.params, state, batch)]
    # Only a state brings a vocabulary.
    calls += [lambda: fm.check(batch, state)] if state is not None or "of the batch: id" not in message else []
    for call in calls:
        with refuses(ValueError, message):
            call()


def test_rotary_positions_of_text_and_of_images(one: Pair) -> None:
    batch = fm.Batch.from_lists([[1, 2, 3], [4, 5]])
    place = torch.tensor([[3, 1, 4, 1, 5]])
    logits = [
        one.model.forward(one.params, None, replace(batch, positions=place.expand(axes, 5)))[0].logits
        for axes in (1, 3)
    ]
    assert_close(logits[0], logits[1], looser=1, reason="one table of angles against three")
    with refuses(ValueError, "positions have 2 axes; give one for text, three"):
        one.model.forward(one.params, None, replace(batch, positions=place.expand(2, 5)))


def test_a_wrong_output_name_takes_no_pages(one: Pair) -> None:
    state = one.model.init_state(1, 16, page_size=4, pages=4)
    for wrong, message in (["nope"], "no such value"), ("layers.0", "give a list of names"):
        with refuses(ValueError, message):
            advance(one, state, [[1, 2]], outputs=wrong)
    assert state.ledger.leases[0].pool.free == 4


def test_merged_rows_that_do_not_fit_the_heads(one: Pair) -> None:
    index = next(i for i, kind in enumerate(one.config.layer_types) if kind == "full_attention")
    path = f"layers.{index}.attn.qkv.weight"
    narrow = params.put(one.params, path, params.at(one.params, path)[1:])
    with refuses(ValueError, "qkv.weight has"):
        one.model.forward(narrow, None, fm.Batch.from_lists([[1, 2]]))


def test_the_same_tokens_written_again_are_another_continuation(one: Pair, state: fm.State) -> None:
    """Their values need not be the same: a row's rounding hangs on its company."""
    _, first = advance(one, state, [[5], [6]])
    _, second = advance(one, state, [[5], []])
    with pytest.raises(fm.StaleStateError, match="row 0"):
        advance(one, first, [[1], [1]])
    advance(one, second, [[1], [1]])


def test_an_empty_state_continued_twice(one: Pair) -> None:
    empty = one.model.init_state(2, 12)
    _, first = advance(one, empty, [[5], [6]])
    _, second = advance(one, empty, [[7], []])
    with pytest.raises(fm.StaleStateError, match="row 0"):
        advance(one, first, [[1], [1]])
    advance(one, second, [[1], [1]])


def test_a_row_selected_before_the_original_went_on(one: Pair, state: fm.State) -> None:
    taken = fm.select(state, [1])
    _, original = advance(one, state, [[], [5]])
    _, newer = advance(one, taken, [[6]])
    with pytest.raises(fm.StaleStateError, match="row 1"):
        advance(one, original, [[], [1]])
    advance(one, newer, [[1]])


def test_operators_may_be_watched(one: Pair) -> None:
    """A mode that sees operators and runs them is no trace: pages are taken, and overwritten tokens noticed."""
    state = one.model.init_state(1, 12, page_size=4, pages=3)
    with FlopCounterMode(display=False):
        _, first = advance(one, state, [[5, 6, 7]])
        out, _ = advance(one, first, [[8, 9]])
        advance(one, state, [[1]])
        with pytest.raises(fm.StaleStateError, match="row 0"):
            advance(one, first, [[1]])
    plain, _ = one.model.forward(one.params, None, fm.Batch.from_lists([[5, 6, 7, 8, 9]]))
    assert_close(out.logits, plain.logits[-2:], looser=5, reason="one call against two")


# Rows and pages


def test_rows_that_do_not_exist(state: fm.State) -> None:
    for call, least in ((fm.fork, 0), (fm.select, -1), (fm.release, 0)):
        for row in (2, least - 1):
            with pytest.raises(ValueError, match=rf"{call.__name__}: row {row} is not in {least}\.\.1"):
                call(state, [row])
        with pytest.raises(ValueError, match=f"{call.__name__}: no rows are given"):
            call(state, [])
    with pytest.raises(ValueError, match=r"logical: row 2 is not in 0\.\.1"):
        fm.logical(state, 2)


@pytest.mark.plain
@pytest.mark.parametrize(
    "rows", ["a", [1.0], [True, False], torch.tensor([True, True]), torch.tensor([1.0]), 1, [None]]
)
def test_rows_that_are_no_integers(rows: Any, state: fm.State) -> None:
    for call in fm.fork, fm.select, fm.release:
        with pytest.raises(TypeError, match=f"{call.__name__}: rows must be a list of integers"):
            call(state, rows)
    with pytest.raises(TypeError, match="fork_into: rows must be a list of integers"):
        fm.fork_into(state, rows, state, 0)


@pytest.mark.plain
def test_rows_as_a_tensor_are_the_same_rows(one: Pair) -> None:
    _, state = advance(one, one.model.init_state(2, 12, page_size=4, pages=12), [[1, 2], [3]])
    twice: Any = torch.tensor([1, 1])
    fork = fm.fork(state, twice)
    assert fork.lengths.tolist() == [1, 1]
    assert fm.release(fork, twice[:1]).ledger.lengths == (1, 0)
    with pytest.raises(ValueError, match="name a row twice"):
        fm.select(state, twice)


HUGE = [
    ({"max_len": 10**30}, "max_len must be at most 2147483647, found far more"),
    ({"max_len": 2**31 - 1, "page_size": 1}, "pages of 2 rows of max_len=2147483647 tokens must be at most 16777216"),
    ({"rows": 10**400}, "rows must be at most 2147483647, found far more"), ({"pages": 2**31}, "pages must be at most"),
    ({"device": "gpu"}, "device 'gpu' cannot be used here: Torch does not"), ({"device": "cuda:-1"}, "'cuda:-1'"),
]  # fmt: skip


@pytest.mark.plain
@pytest.mark.parametrize(("given", "message"), HUGE)
def test_states_that_fit_nowhere(given: dict[str, Any], message: str, one: Pair) -> None:
    with pytest.raises(ValueError, match=f"init_state: {message}|{message}"):
        one.model.init_state(**{"rows": 2, "max_len": 12} | given)


@pytest.mark.plain
@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (["abc"], "row 0, token 0: 'a' is no token id"),
        ([[1], [2.0]], "row 1, token 0: 2.0 is no token id"),
        ([[None]], "row 0, token 0: None is no token id"),
        ([5], "row 0: expected a list of token ids, found 5"),
        (5, "expected a list of token ids a row, found 5"),
        ([[1, True]], "row 0, token 1: True is no token id"),
    ],
)
def test_lists_of_what_are_no_tokens(lists: Any, message: str, state: fm.State) -> None:
    for given in (None, state):
        with pytest.raises(TypeError, match=message):
            fm.Batch.from_lists(lists, given)
    with pytest.raises(ValueError, match="out of range"):
        fm.Batch.from_lists([[2**63]])


@pytest.mark.plain
def test_parameters_of_another_model(one: Pair) -> None:
    batch = fm.Batch.from_lists([[1, 2]])
    gemma = replace(one.model, family=FAMILIES["gemma3_text"])
    with pytest.raises(TypeError, match=r"params are Qwen35Params, and .* takes Gemma3Params"):
        gemma.forward(one.params, None, batch)
    for other in (None, {}, one.params.layers):
        with pytest.raises(TypeError, match=f"params are {type(other).__name__}, and a model of type 'qwen3_5"):
            one.model.forward(other, None, batch)
    narrow = params.put(one.params, "embed.weight", one.params.embed.weight[:, 1:])
    with pytest.raises(ValueError, match="this model's hidden_size is"):
        one.model.forward(narrow, None, batch)


def test_a_row_selected_twice_names_fork(state: fm.State) -> None:
    with pytest.raises(ValueError, match=r"rows \[0, 1, 0\] name a row twice.*fork\(state, rows\) copies"):
        fm.select(state, [0, 1, 0])
    fm.select(state, [-1, -1, 0])


@pytest.mark.parametrize("pages", [None, 20])
def test_forked_rows_repeat_and_part(one: Pair, pages: int | None) -> None:
    ids = tokens(one, 9, 4)
    _, state = advance(one, one.model.init_state(2, 16, page_size=4, pages=pages, checked=True), ids)
    copies = fm.fork(state, [1, 0, 0])
    assert copies.lengths.tolist() == [4, 9, 9]
    out, after = advance(one, copies, [[1], [2, 3], [4]])
    advance(one, state, [[5], [6]])
    for row, (source, new) in enumerate(((1, [1]), (0, [2, 3]), (0, [4]))):
        plain, whole = advance(one, one.model.init_state(1, 16), [ids[source] + new])
        assert_rows_close(after, whole, [(row, 0)])
        part = per_row(out.logits, [[1], [2, 3], [4]])[row]
        assert_close(part, plain.logits[-len(new) :], looser=5, reason="one call against two")
    fm.logical(after, 0)


def test_a_shared_pool_counts_its_pages(one: Pair) -> None:
    state = one.model.init_state(2, 16, page_size=4, pages=7)
    pool = state.ledger.leases[0].pool
    _, state = advance(one, state, tokens(one, 9, 4))
    assert pool.free == 7 - 3 - 1
    copies = fm.fork(state)
    assert pool.free == 2, "only the page of row 0 that is not full is copied"
    with pytest.raises(fm.OutOfPages, match="3 more pages are needed and 2 of 7 are free; release or drop states"):
        advance(one, copies, [[1] * 7, [1] * 8])
    assert pool.free == 2
    assert_rows_close(copies, state)
    del copies
    assert pool.free == 3
    state = fm.release(state, [0])
    assert pool.free == 6
    assert state.lengths.tolist() == [0, 4]
    _, state = advance(one, state, [[3], [4]])
    assert pool.free == 4
    fm.release(state)
    assert pool.free == 7


def test_out_of_pages_names_the_remedy_and_leaves_the_state(one: Pair) -> None:
    _, state = advance(one, one.model.init_state(2, 16, page_size=4, pages=2), [[1, 2, 3, 4], [5]])
    before = params.tree_map(torch.clone, state)
    for call in (lambda: advance(one, state, [[6], [7]]), lambda: fm.fork(state)):
        with pytest.raises(fm.OutOfPages, match=r"1 more pages are needed and 0 of 2.*init_state\(pages=\.\.\.\)"):
            call()
        assert state == before
    advance(one, state, [[], [7]])


def test_released_states(one: Pair, state: fm.State) -> None:
    _, later = advance(one, state, [[1], []])
    part = fm.release(later, [0])
    for gone in (state, later):
        with pytest.raises(fm.StateError, match="row 0 of this state was released; use the state that replaced it"):
            advance(one, gone, [[1], []])
        with pytest.raises(fm.StateError, match="released"):
            fm.logical(gone, 1)
    _, part = advance(one, part, [[2], [3]])
    fm.release(part)
    for call in (lambda: advance(one, part, [[1], []]), lambda: fm.fork(part), lambda: fm.release(part)):
        with pytest.raises(fm.StateError, match="this state was released and cannot be used again"):
            call()


def test_an_owned_row_keeps_its_pages_when_released(one: Pair) -> None:
    state = one.model.init_state(2, 8, page_size=4)
    for _ in range(3):
        _, state = advance(one, state, [[1] * 8, [2] * 8])
        state = fm.release(state, [0, 1])
        assert state.ledger.leases[0].pool.free == 0
        assert all(value.numel() == 0 or not value.any() for value in fm.logical(state, 0).values())


def test_a_donated_state(one: Pair, state: fm.State) -> None:
    state.ledger.buffers.used = "donated to a captured call"
    for call in (lambda: advance(one, state, [[1], []]), lambda: fm.select(state, [0]), lambda: fm.logical(state, 0)):
        with pytest.raises(fm.StateError, match="this state was donated to a captured call and cannot be used again"):
            call()


@pytest.mark.plain
def test_a_refused_call_has_overwritten_nothing(one: Pair, state: fm.State) -> None:
    """What another continuation holds stays good when a call is refused: nothing was written, and nothing noted."""
    _, held = advance(one, state, [[5], [6]])
    batch = fm.Batch.from_lists([[7], [8]], state)
    wrong: list[dict[str, Any]] = [{"logits": "some"}, {"outputs": ("none",)}]
    for forward in (one.model.forward, lowering.jit(one.model.forward, backend="fx")):
        for options in wrong:
            with pytest.raises(ValueError, match=r"logits='some'|no such value"):
                forward(one.params, state, batch, **options)
        with pytest.raises(ValueError, match="positions have 2 axes"):
            forward(one.params, state, replace(batch, positions=torch.zeros(2, 2).long()))
    advance(one, held, [[1], [1]])


@pytest.mark.plain
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kind", families.KINDS)
def test_positions_that_a_model_does_not_read(kind: str, captured: bool) -> None:
    """Are refused before anything is noted, as are parameters of other layers; read ones move what is attended to."""
    model, weights = families.whole(kind)
    forward = lowering.jit(model.forward, backend="fx") if captured else model.forward
    _, state = model.forward(weights, model.init_state(1, 24, page_size=4, pages=8), fm.Batch.from_lists([[3] * 5]))
    batch = fm.Batch.from_lists([[4, 5, 6]], state)
    out, held = model.forward(weights, state, batch)
    free = state.ledger.leases[0].pool.free
    read = {"qwen_dense": (1, 3), "qwen_moe": (1, 3), "gemma3": (1,), "deepseek_v2": (1,)}.get(kind, ())
    for axes in {1, 3} - {*read}:
        with pytest.raises(ValueError, match=f"positions have {axes} axes, and this model (reads none|takes those of)"):
            forward(weights, state, replace(batch, positions=torch.tensor([[9, 7, 11]]).expand(axes, -1)))
    with pytest.raises(ValueError, match=r"params have \d+ layers, this model's config \d+; .*fm\.build"):
        forward(replace(weights, layers=weights.layers[:-1]), state, batch)
    assert state.ledger.leases[0].pool.free == free
    model.forward(weights, held, batch)
    for axes in read:
        placed = replace(batch, positions=torch.tensor([[9, 7, 11]]).expand(axes, -1))
        assert (model.forward(weights, held, placed)[0].logits - out.logits).abs().max() > 1e-3


@pytest.mark.plain
@pytest.mark.parametrize("changes", [{"layers": 1}, {"layers": -1}, {"head_dim": 2}, {"last": 1}])
def test_a_model_that_refuses_the_state_of_another(one: Pair, state: fm.State, changes: dict[str, int]) -> None:
    """Has overwritten nothing of it."""
    _, held = advance(one, state, [[5], [6]])
    kinds, config = list(one.config.layer_types), one.model.config_json
    kinds = {1: [*kinds, "full_attention"], -1: kinds[:-1]}.get(changes.get("layers", 0), kinds)
    if "last" in changes:
        kinds[-1] = next(kind for kind in kinds if kind != kinds[-1])
    size = one.config.head_dim * changes.get("head_dim", 1)
    other = fm.build({**config, "num_hidden_layers": len(kinds), "layer_types": kinds, "head_dim": size})
    with pytest.raises(fm.StateError, match="make the state with the init_state of a model whose config is that"):
        other.forward(other.init_params(), state, fm.Batch.from_lists([[1], [2]], state))
    advance(one, held, [[1], [1]])


@pytest.mark.compile
@pytest.mark.parametrize("whole", [True, False])
def test_a_state_is_not_for_torch_compile(one: Pair, whole: bool) -> None:
    """It would leave out what is done on the host: pages that are taken, and branches that are told apart."""
    state = one.model.init_state(1, 12, page_size=4, pages=3)
    batch = fm.Batch.from_lists([[5, 6, 7]], state)
    compiled = torch.compile(one.model.forward, backend="eager", fullgraph=whole)
    with torch.no_grad(), pytest.raises((fm.StateError, Unsupported), match=r"StateError|lowering\.jit"):
        compiled(one.params, state, batch)
    advance(one, state, [[5, 6, 7]])


@pytest.mark.plain
def test_a_state_is_not_for_torch_export(one: Pair) -> None:
    class Logits(torch.nn.Module):
        def forward(self, held: fm.State, batch: fm.Batch) -> torch.Tensor:
            return one.model.forward(one.params, held, batch)[0].logits

    state = one.model.init_state(1, 12)
    with pytest.raises(fm.StateError, match=r"torch\.export cannot follow a state.*pass state=None"):
        torch.export.export(Logits(), (state, fm.Batch.from_lists([[5, 6]], state)), strict=False)


@pytest.mark.plain
def test_what_is_no_state_and_no_batch(one: Pair, state: fm.State) -> None:
    calls: list[Callable[[Any], Any]] = [
        fm.fork, fm.release, fm.read_lengths, lambda what: fm.commit(what, [0]), lambda what: fm.select(what, [0]),
        lambda what: fm.check(fm.Batch.from_lists([[1]]), what),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(TypeError, match=r"expected a State, found a str; make one with model\.init_state"):
            call("a")
    with pytest.raises(TypeError, match=r"expected a Batch, found a list; make one with Batch\.from_lists"):
        one.model.forward(one.params, state, [[1], [2]])
    nothing: Any = 5
    with pytest.raises(TypeError, match=r"check: expected a Batch, found a int; make one with Batch\.from_lists"):
        fm.check(nothing)
    with pytest.raises(ValueError, match=r"device 'cuda:99' cannot be used here: "):
        one.model.init_state(1, 4, device="cuda:99")
