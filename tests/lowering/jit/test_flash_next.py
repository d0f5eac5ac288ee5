"""Captures of Qwen3.8-Flash-Next: on the stand-in for NPU graphs, compiled, without reads of the device, refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import funcmodels as fm
import lowering
import params as checkpoints
from funcmodels.drafts.round import Round
from lowering import CaptureError, npu_reference
from params import tree
from tests.lowering.jit.npu_double import Double
from tests.lowering.jit.npu_models import PAGE, ROWS, NpuTwins, made, on
from tests.lowering.jit.test_inductor import Sides
from tests.lowering.jit.test_no_sync import NoSync, Run
from tests.lowering.jit.test_npu_graph import begun
from tests.lowering.jit.test_round import same
from tests.oracle import qwen3_8_flash_next_mtp as flash
from tests.oracle.states import assert_rows_close, poison
from tests.tolerances import assert_close

pytestmark = pytest.mark.filterwarnings("ignore::lowering.RecaptureWarning")

STEPS = 3
BUDGET = 64
INDEXER, ATTENTION = "npu_lightning_indexer", "npu_fused_infer_attention_score_v2"


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    npu_reference.load()
    found = Double()
    on(found, monkeypatch)
    return found


def recorded(double: Double) -> list[list[str]]:
    """Of each graph that attends, the operators of selection and attention in the order they run."""
    names = [[call.func.__name__.partition(".")[0] for call in graph.calls] for graph in double.graphs]
    found = [[name for name in some if name in (INDEXER, ATTENTION)] for some in names]
    return [some for some in found if some]


def filled(twins: NpuTwins, *lengths: int) -> None:
    """Prompts of these lengths on both sides, in one plain forward of each; NaN wherever nothing is written."""
    ids = [[twins.draw.randrange(50) for _ in range(length)] for length in lengths]
    params, model = twins.one.params, twins.one.model
    with torch.no_grad(), lowering.use(target="ascend910b"):
        for side in ("captured", "plain"):
            state = poison(getattr(twins, side))
            setattr(twins, side, model.forward(params, state, fm.Batch.from_lists(ids, state))[1])


def test_replays_equal_plain_calls(double: Double) -> None:
    """Tokens, chunks and windows, cut anywhere, while rows grow over ends of blocks, of pages and of the budget."""
    twins = NpuTwins("flash", 1)
    filled(twins, PAGE - 7, BUDGET - 5, 1)
    for move in ("decode", "verify", "chunk", "decode", "verify", "select", "decode", "verify", "verify", "decode"):
        if move == "decode":
            twins.forward([1] * ROWS)
        elif move == "verify":
            twins.verify(2 if twins.draw.random() < 0.2 else 4)
        elif move == "chunk":
            twins.forward([3, 0, 5])
        else:
            twins.both(fm.select, [2, 0, 1])
    twins.check()
    lengths = sorted(twins.captured.ledger.lengths)
    assert lengths[2] > PAGE and lengths[1] > BUDGET + 3 and lengths[0] > 4
    assert recorded(double) == [[INDEXER, ATTENTION]] * 3
    assert (twins.step.captures, twins.commit.captures) == (3, 1)


@torch.no_grad()
def test_short_rows_replay_what_dense_attention_gives(double: Double) -> None:
    """A program knows no lengths, so it always selects; a plain call is dense while every row is within the budget."""
    twins = NpuTwins("flash", 2)
    filled(twins, 9, 1, BUDGET - 8)
    params, model = twins.one.params, twins.one.model
    ids = torch.randint(50, (12, ROWS), generator=torch.Generator().manual_seed(4)).tolist()
    with lowering.use(target="ascend910b"):
        for tokens in ids:
            batch = fm.Batch.from_lists([[token] for token in tokens], twins.captured)
            out, twins.captured = twins.step(params, twins.captured, batch)
            with lowering.record() as report:
                right, twins.plain = model.forward(params, twins.plain, batch)
            longest = max(twins.plain.ledger.lengths)
            dense = "paged_attention" in {row.op for row in report.rows}
            assert dense == (longest <= BUDGET + 3)
            assert_close(out.logits, right.logits, looser=8, reason="bfloat16 layers, attention in another order")
    assert longest > BUDGET + 3 and twins.step.captures == 1


@torch.no_grad()
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.sweep), 0.8])
def test_a_captured_round_equals_a_plain_one(temperature: float, double: Double) -> None:
    """Drafts, a window, commit and draft-extend in one graph, with rows that accept nothing, over a page's end."""
    one = made("flash")
    plainly: Any = Round(one.model, fm.draft(one.model, "mtp")).run
    step = lowering.jit(plainly, ("state", "drafted"), backend="npu")
    sampling = fm.RowSampling.of([fm.Sampling(temperature, seed=row) for row in range(ROWS)])
    requests = torch.tensor([4, 7, 2])
    prompts = [[7 * at % 50 for at in range(PAGE - 4)], [8], [at % 50 for at in range(BUDGET)]]
    with lowering.use(target="ascend910b"):
        mine, right = (begun("flash", prompts) for _ in range(2))
        for number in range(5):
            most = torch.tensor([4, number, 4 * (number > 1)])
            rest = (sampling, requests, most)
            found, *mine = step(one.params, *mine, *rest, steps=STEPS, drawn=temperature > 0)
            expected, *right = plainly(one.params, *right, *rest, steps=STEPS, drawn=temperature > 0)
            assert same(found, expected) and same(mine[2], right[2]), f"round {number}"
            for actual, plain in zip(mine[:2], right[:2], strict=True):
                assert actual.ledger.lengths == plain.ledger.lengths == tuple(plain.lengths.tolist())
                for row in range(ROWS):
                    assert same(fm.logical(actual, row), fm.logical(plain, row)), f"round {number}, row {row}"
    assert step.captures == 1
    # Two drafts after the carry's own, a layer that verifies, and one that extends.
    assert recorded(double) == [[INDEXER, ATTENTION] * 4]


@torch.no_grad()
@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_compiled_decoding_equals_plain_decoding() -> None:
    """From the first token on, past the budget and over ends of blocks and pages."""
    one = flash.small(4)
    sides = Sides(one, 0)
    for _ in range(one.config.indexer_budget + 2 * one.config.indexer_compress_ratio + 1):
        sides.forward([1, 1])
    assert_rows_close(sides.captured, sides.plain)
    assert sides.step.captures == 1


def on_meta(one: flash.MtpPair) -> Run:
    """A model, its head and empty states, without values."""
    head = fm.draft(one.model, "mtp")
    state = one.model.init_state(ROWS, 60, page_size=4, device="meta")
    return Run(one.model, head, tree.to(one.params, device="meta"), state, head.init_state(state))


@torch.no_grad()
@pytest.mark.parametrize("target", [None, "cuda"])
def test_a_round_waits_for_nothing(target: str | None) -> None:
    """Neither do the hash, the choice of blocks and attention to them; whole, and by its parts."""
    with lowering.use(target=target):
        run = on_meta(flash.small(4))
        _, carry = run.begun()
        now: Any = (run.state, run.drafted, carry)
        sampling = fm.RowSampling.of([fm.Sampling(0.8, seed=row) for row in range(ROWS)], "meta")
        rest = (sampling, torch.arange(ROWS, device="meta"), torch.full((ROWS,), 2, device="meta"))
        plainly: Any = Round(run.model, run.head).run
        for _ in range(3):
            with NoSync():
                _, *now = plainly(run.params, *now, *rest, drawn=True)
    assert now[0].ledger.lengths == now[1].ledger.lengths == (17, 13, 15)


@pytest.mark.parametrize("tables", ["host", "file"])
def test_a_table_left_behind_cannot_be_captured_on_a_device(tables: Any, tmp_path: Path) -> None:
    """Its rows come from the host: the error says which leaf, and how to load it. A captured call on a CPU reads it."""
    one = flash.small(4)
    names = one.model.family.names
    checkpoints.save(one.params, tmp_path, one.model.param_spec(), names, dict(one.model.config_json))
    model, apart = fm.load(tmp_path, dtype=None, tables=tables)
    table = "layers.0.ngrams.table"
    batch = fm.Batch.from_lists([[1, 2, 3]])
    found, _ = lowering.jit(model.forward, backend="fx")(apart, None, batch)
    assert torch.equal(found.logits, model.forward(apart, None, batch)[0].logits)
    device = tree.put(tree.to(apart, device="meta"), table, tree.at(apart, table))
    state = model.init_state(1, 8, page_size=4, device="meta")
    step = lowering.jit(model.forward, ("state",))
    with pytest.raises(CaptureError) as error:
        step(device, state, replace(batch, tokens=batch.tokens.to("meta"), query_start=batch.query_start.to("meta")))
    leaf = f"{table}.shards.0" if tables == "file" else table
    assert str(error.value).startswith(f"jit: {leaf} of 'params' lies on cpu, the rest on meta, and a captured program")
    assert "load with tables='device'" in str(error.value)
