"""Captures on a stand-in for NPU graphs: equal to plain calls in any order of moves, and what that proves can fail."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import funcmodels as fm
import lowering
from funcmodels.drafts.round import Round
from lowering import CaptureError, npu_reference
from lowering.jit.npu import NpuGraphs
from params.tree import tree_map
from tests.lowering.jit.npu_double import DEVICE, HANDLED, Double, HangError, NPUGraph
from tests.lowering.jit.npu_models import MAX_LEN, ROWS, NpuTwins, made, on
from tests.lowering.jit.test_round import same

pytestmark = pytest.mark.filterwarnings("ignore::lowering.RecaptureWarning")


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    npu_reference.load()
    found = Double()
    on(found, monkeypatch)
    return found


@pytest.mark.parametrize(
    ("kind", "seed", "pages"),
    [("dense", 1, None), ("moe", 2, 7), pytest.param("moe", 3, None, marks=pytest.mark.sweep)],
)
def test_replays_equal_plain_calls(kind: str, seed: int, pages: int | None, double: Double) -> None:
    twins = NpuTwins(kind, seed, pages=pages)
    draw = twins.draw
    moves = ["prefill", "decode", "verify", "fork", "select", "release", *["decode", "verify"] * 3, "prefill"]
    draw.shuffle(moves)
    twins.forward([4, 1, 3])
    for move in moves:
        if move == "prefill":
            twins.forward([draw.randint(0, 3) for _ in range(ROWS - 1)] + [2])
        elif move == "decode":
            twins.forward([1] * ROWS)
        elif move == "verify":
            twins.verify(4)
        elif move == "fork":
            twins.both(fm.fork, [draw.randrange(ROWS) for _ in range(ROWS)])
        elif move == "select":
            twins.both(fm.select, draw.sample(range(ROWS), ROWS))
        else:
            twins.both(fm.release, [draw.randrange(ROWS)])
    twins.check()
    if pages is not None:
        # Prompts, tokens and windows (of both kinds); moved rows need no captures of their own, only moved pools do.
        assert (twins.step.captures, twins.commit.captures) == (3, 1)
    assert {graph.pool for graph in double.graphs} == {1, 2}, "a pool for each jitted function"
    assert double.log.count("update ends") == len(twins.kept)


def test_lists_are_computed_anew_without_graphs_too() -> None:
    twins = NpuTwins("dense", 8, backend="fx")
    for counts in ([5, 2, 0], [1, 1, 1], [0, 3, 4], [1, 1, 1]):
        twins.forward(counts)
    twins.verify(4)
    twins.check()
    assert twins.step.captures == 3


def begun(kind: str, prompts: list[list[int]]) -> Any:
    """Both states and the carry of rows whose prompts are in; token 1 follows each."""
    one = made(kind)
    head = fm.draft(one.model, "mtp")
    state = one.state(len(prompts))
    drafted = head.init_state(state)
    batch = fm.Batch.from_lists(prompts, state)
    out, state = one.model.forward(one.params, state, batch)
    following = fm.next_tokens(batch, torch.ones(len(prompts), dtype=torch.int64))
    return state, *head.extend(one.params, drafted, out, batch, following)


@torch.no_grad()
@pytest.mark.parametrize(("kind", "temperature"), [("dense", 0.0), ("moe", 0.8)])
def test_a_captured_round_equals_a_plain_one(kind: str, temperature: float, double: Double) -> None:
    one = made(kind)
    plainly: Any = Round(one.model, fm.draft(one.model, "mtp")).run
    step = lowering.jit(plainly, ("state", "drafted"), backend="npu")
    sampling = fm.RowSampling.of([fm.Sampling(temperature, seed=row) for row in range(ROWS)])
    requests = torch.tensor([4, 7, 2])
    kept = []
    with lowering.use(target="ascend910b"):
        mine, right = (begun(kind, [[5, 6, 7], [8], [9, 4]]) for _ in range(2))
        for number in range(4):
            most = torch.tensor([number, 4, 4 * (number > 1)])
            found, *mine = step(one.params, *mine, sampling, requests, most, steps=3, drawn=temperature > 0)
            expected, *right = plainly(one.params, *right, sampling, requests, most, steps=3, drawn=temperature > 0)
            assert same(found, expected) and same(mine[2], right[2]), f"round {number}"
            kept.append((found, tree_map(torch.clone, found)))
            for actual, plain in zip(mine[:2], right[:2], strict=True):
                assert actual.ledger.lengths == plain.ledger.lengths == tuple(plain.lengths.tolist())
                for row in range(ROWS):
                    assert same(fm.logical(actual, row), fm.logical(plain, row)), f"round {number}, row {row}"
    assert all(same(*pair) for pair in kept)
    assert step.captures == 1
    # Two drafts, a layer that verifies, and one that extends.
    (graph,) = double.graphs
    assert len(graph.graph_dispatch_mode.graph_dispatch_records) == 4 and double.log.count("update ends") == 4


class Skipped(NpuGraphs):
    def update(self, graph: Any, lists: Any) -> None:
        return None


class Stale(NpuGraphs):
    """Updates each graph with the lists of its replay before."""

    def update(self, graph: Any, lists: Any) -> BaseException | None:
        before, vars(graph)["before"] = getattr(graph, "before", lists), lists
        return super().update(graph, before)


class Swapped(NpuGraphs):
    def update(self, graph: Any, lists: Any) -> BaseException | None:
        return super().update(graph, lists[::-1])


class Renamed(NpuGraphs):
    """Names the arguments as the operator's older version does, which the device does not notice."""

    def update(self, graph: Any, lists: Any) -> BaseException | None:
        return super().update(graph, [{"actual_seq_lengths_kv": x["actual_seq_kvlen"]} for x in lists])


class Unfenced(NpuGraphs):
    def launched(self) -> None:
        self.fence = None


def drafts_agree() -> None:
    """Drafts and their laws, captured and called plainly, twice, from states that grow; `AssertionError` if not."""
    one = made("dense")
    noise = fm.DraftNoise(fm.RowSampling.of([fm.Sampling(0.9)] * ROWS), torch.arange(ROWS))
    plainly: Any = fm.draft(one.model, "mtp").propose
    propose = lowering.jit(plainly, ("state",), backend="npu")
    with lowering.use(target="ascend910b"):
        (mine, carry), (right, _) = (begun("dense", [[5, 6, 7], [8], [9, 4]])[1:] for _ in range(2))
        for _ in range(2):
            found, mine = propose(one.params, mine, carry, steps=3, noise=noise)
            expected, right = plainly(one.params, right, carry, steps=3, noise=noise)
            assert same(found, expected), "drafts differ"
            mine, right = grown(mine), grown(right)


def grown(drafted: fm.State) -> fm.State:
    """The draft's state with some more tokens in each row."""
    one = made("dense")
    batch = fm.Batch.from_lists([[3, 4, 5], [6, 7], [8]], drafted)
    hidden = torch.randn(6, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    return fm.draft(one.model, "mtp").forward(one.params, drafted, batch, hidden)[1]


@torch.no_grad()
def test_right_updates_pass() -> None:
    drafts_agree()


@torch.no_grad()
@pytest.mark.parametrize("wrong", [Skipped, Stale, Swapped, Renamed, Unfenced])
def test_a_wrong_update_is_noticed(wrong: type, double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above rest on: the double tells right updates from wrong ones."""
    on(double, monkeypatch, wrong)
    with pytest.raises((HangError, CaptureError, AssertionError)):
        drafts_agree()


def test_programs_that_wait_for_nothing_are_not_updated(double: Double) -> None:
    twins = NpuTwins("dense", 4)
    twins.verify(2)
    before = list(double.log)
    with lowering.use(target="ascend910b"), torch.no_grad():
        twins.forward([2] * ROWS, keep_steps=True)
        updates = double.log.count("update ends")
        twins.both(lambda state: state)
        twins.captured, twins.plain = twins.commit(twins.captured, [1, 0, 2]), fm.commit(twins.plain, [1, 0, 2])
        doubled = lowering.jit(lambda x: x * 2, backend="npu")
        assert torch.equal(doubled(torch.ones(3)), torch.full((3,), 2.0))
    twins.check()
    assert before and double.log.count("update ends") == updates
    assert double.log[-2:] == ["replay begins", "replay ends"]


def test_an_update_that_fails_reaches_the_caller_and_the_next_call_works(double: Double) -> None:
    twins = NpuTwins("dense", 6)
    twins.forward([3, 0, 2])
    twins.forward([1, 1, 1])
    runs = [placed.run for capture in twins.step._graphs.values() for placed in capture.runs]
    batch = fm.Batch.from_lists([[1], [2], [3]], twins.captured)

    def fails(graph: NPUGraph) -> None:
        raise OSError("the driver is gone")

    double.updating = fails
    replays = double.log.count("replay begins")
    with lowering.use(target="ascend910b"), torch.no_grad(), pytest.raises(CaptureError) as found:
        twins.step(twins.one.params, twins.captured, batch)
    assert "an update of its row lengths failed (the driver is gone); nothing was replayed" in str(found.value)
    assert isinstance(found.value.__cause__, OSError) and double.log.count("replay begins") == replays
    double.updating = lambda graph: None
    (broken,) = (run for run in runs if run.trouble is not None)
    with pytest.raises(CaptureError, match="this graph cannot be replayed: an update of its row lengths failed"):
        broken([], [])
    twins.forward([1, 1, 1])
    twins.forward([2, 4, 0])
    twins.check()
    assert twins.step.captures == 3  # the graph that failed was captured anew, the other one was kept


def test_a_replay_waits_for_its_update_and_an_update_for_the_replay_before(double: Double) -> None:
    twins = NpuTwins("dense", 7)
    double.updating = lambda graph: time.sleep(0.02)
    for counts in ([2, 1, 0], [1, 1, 1], [1, 1, 1], [0, 3, 3], [1, 1, 1]):
        twins.forward(counts)
    twins.check()
    once = ["update begins", "update ends", "replay begins", "replay ends", "fence"]
    assert double.log == [*once, *["fence passed", *once] * 4]


def test_one_thread_on_the_right_device_updates(double: Double) -> None:
    step = lowering.jit(made("dense").model.forward, ("state",), backend="npu")
    state = made("dense").state(1)
    with lowering.use(target="ascend910b"), torch.no_grad():
        for number in range(100):
            _, state = step(made("dense").params, state, fm.Batch.from_lists([[number % 50]], state), logits="last")
    assert len(double.threads) == 1 and double.threads[0] != threading.get_ident()
    assert [thread.ident for thread in updaters()] == double.threads
    del step
    gc.collect()
    assert not updaters()


def updaters() -> list[threading.Thread]:
    gc.collect()
    return [thread for thread in threading.enumerate() if thread.name.startswith("graph-update")]


def test_a_thread_that_cannot_choose_its_device_fails_the_call(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(double, "current_device", lambda: DEVICE - 1)
    twins = NpuTwins("dense", 10)
    with pytest.raises(CaptureError, match=f"update on device {DEVICE - 1}, the graph is of {DEVICE}"):
        twins.forward([1] * ROWS)


def test_records_that_are_not_as_traced_are_refused_at_capture(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    double.stripped = ("actual_seq_kvlen",)
    with pytest.raises(CaptureError, match=r"record 0 \(npu_fused_.*_v2\) was captured without actual_seq_kvlen"):
        NpuTwins("dense", 11).forward([1] * ROWS)
    monkeypatch.delitem(HANDLED, "npu_fused_infer_attention_score_v2.default")
    with pytest.raises(CaptureError, match=r"the program has 1 operators to update, .*, and the device recorded 0"):
        NpuTwins("dense", 11).forward([1] * ROWS)
    assert "replay begins" not in double.log


def test_a_capture_that_fails_half_way_leaves_the_state(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = NpuTwins("dense", 12)
    twins.forward([3, 1, 2])
    double.capturing = NPUGraph(double)  # somebody else's
    batch = fm.Batch.from_lists([[1], [2], [3]], twins.captured)
    with lowering.use(target="ascend910b"), torch.no_grad(), pytest.raises(RuntimeError, match="another capture is"):
        twins.step(twins.one.params, twins.captured, batch)
    double.capturing = None
    twins.forward([1, 1, 1])
    twins.check()


def test_captures_ahead_leave_the_state_and_go_down_in_size(double: Double) -> None:
    twins = NpuTwins("moe", 13, pages=7)
    twins.forward([2, 3, 1])
    batch = fm.Batch.from_lists([[1], [2], [3]], twins.captured)
    with lowering.use(target="ascend910b"), torch.no_grad():
        twins.step.warm([(ROWS, 1), (4 * ROWS, 4), 8], twins.one.params, twins.captured, batch)
    sizes = [sum(x.numel() for x in graph.memory) for graph in double.graphs[1:]]
    assert twins.step.captures == 3 and sizes == sorted(sizes, reverse=True)
    assert double.log.count("replay begins") == 1
    twins.check()
    twins.forward([1, 1, 1])
    twins.forward([4, 4, 4])
    twins.check()
    assert twins.step.captures == 3


def test_near_the_end_of_a_row_there_is_room_to_capture() -> None:
    twins = NpuTwins("dense", 14)
    twins.step = lowering.jit(twins.one.model.forward, ("state",), (8, 512), "npu")
    twins.forward([MAX_LEN - 1, 1, 0], bucket=512)
    twins.forward([1, 1, 1])
    twins.check()


@torch.no_grad()
def test_bounds_of_lengths_are_another_program(double: Double) -> None:
    """Operators that need lengths are not given bounds; what was captured with lengths waits for them to be known."""
    twins = NpuTwins("dense", 15)
    twins.forward([1, 1, 1])
    starts = torch.tensor([0, 2, 5, 6], dtype=torch.int32)
    unknown = fm.Batch(torch.tensor([3, 1, 4, 1, 5, 9, 0, 0]), starts, max_query=3)
    with lowering.use(target="ascend910b"):
        _, twins.plain = twins.one.model.forward(twins.one.params, twins.plain, unknown)
        _, twins.captured = twins.step(twins.one.params, twins.captured, unknown)
    assert not twins.captured.ledger.exact
    updates = double.log.count("update ends")
    twins.forward([1, 1, 1])
    assert double.log.count("update ends") == updates and twins.step.captures == 3
    twins.both(fm.read_lengths)
    assert twins.captured.ledger.lengths == (4, 5, 3)
    twins.forward([1, 1, 1])
    assert double.log.count("update ends") == updates + 1 and twins.step.captures == 3
    twins.check()


def test_parameters_that_moved_are_captured_over_once(double: Double) -> None:
    twins = NpuTwins("dense", 16)
    twins.forward([1, 1, 1])
    twins.one = type(twins.one)(twins.one.model, tree_map(torch.clone, twins.one.params))
    with pytest.warns(
        lowering.RecaptureWarning, match="captured again, since tensors that must stay in place were moved"
    ):
        twins.forward([1, 1, 1])
    twins.forward([1, 1, 1])
    twins.check()
    assert twins.step.captures == 2


def test_two_states_that_are_both_in_use_have_their_own_graphs() -> None:
    twins, others = NpuTwins("dense", 17), NpuTwins("dense", 18)
    others.step = twins.step
    for _ in range(3):
        twins.forward([1, 1, 1])
        others.forward([1, 1, 1])
    twins.check()
    others.check()
    assert twins.step.captures == 2


def test_an_input_that_is_not_fixed_may_come_from_anywhere(double: Double) -> None:
    def shifted(pair: dict[str, Tensor], params: Tensor) -> Tensor:
        return pair["x"] + pair["y"] * params

    step = lowering.jit(shifted, backend="npu")
    params = torch.tensor([2.0, 3.0])
    for number in range(3):
        pair = {"x": torch.full((2,), float(number)), "y": torch.ones(2)}
        assert step(pair=pair, params=params).tolist() == [number + 2.0, number + 3.0]
    assert step.captures == 1
