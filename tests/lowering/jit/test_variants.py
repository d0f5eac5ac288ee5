"""Rounds of one size are two programs, greedy and drawing; so are blocks embedded inside of a program and outside.

MTP, DFlash and DSpark, on the stand-in for NPU graphs and operator by operator; all comparisons are to the last bit.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

import funcmodels as fm
import lowering
import params as trees
from funcmodels.drafts.named import BlockParams, DFlashDraft, DSparkDraft, read_config, with_context
from funcmodels.serving.prefixes import Share
from funcmodels.serving.programs import Keys
from funcmodels.serving.requests import Request
from funcmodels.serving.scheduler import Continuation
from lowering import npu_reference
from tests.lowering.jit.npu_double import Double
from tests.lowering.jit.npu_models import Made, made, on
from tests.lowering.jit.test_round import same

pytestmark = [pytest.mark.plain, pytest.mark.filterwarnings("ignore::lowering.RecaptureWarning")]

STEPS, VOCAB = 2, 50
GREEDY, WARM, HOT = fm.Sampling(), fm.Sampling(0.8, top_k=9), fm.Sampling(1.6, top_p=0.9)
EVERY = (GREEDY, WARM, HOT)
PROMPTS = [[5, 6, 7], [8], [9, 4]]
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "block_size": 5, "mask_token_id": 3, "target_layer_ids": [0, 1],
    "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9,
}  # fmt: skip
KINDS = {
    "dflash": {"architectures": ["DFlashDraftModel"]},
    "dspark": {"architectures": ["Qwen3DSparkModel"], "markov_rank": 16},
}
DRAFTS = ("mtp", *KINDS)


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> Any:
    npu_reference.load()
    found = Double()
    on(found, monkeypatch)
    with torch.no_grad():
        yield found


@functools.cache
def draft_of(kind: str) -> Any:
    """A random draft for the dense model, the same each time."""
    model = made("dense").model
    if kind == "mtp":
        return fm.draft(model, "mtp")
    config = read_config(CONFIG | KINDS[kind], 2)
    generator = torch.Generator().manual_seed(3)

    def leaf(spec: torch.Tensor) -> torch.Tensor:
        return (torch.randn(spec.shape, generator=generator) * spec.shape[-1] ** -0.5).bfloat16()

    own = with_context(trees.tree_map(leaf, trees.init(BlockParams.spec(config), 0)))
    return (DFlashDraft if kind == "dflash" else DSparkDraft)(model, config, own)


class Run:
    """Rounds of one set of rows: both states and the carry, after prompts that token 1 follows."""

    def __init__(self, kind: str, rows: int) -> None:
        self.one: Made = made("dense")
        self.draft = draft_of(kind)
        self.params = self.draft.joined(self.one.params)
        state = self.one.state(rows)
        drafted, batch = self.draft.init_state(state), fm.Batch.from_lists(PROMPTS[:rows], state)
        out, state = self.one.model.forward(self.one.params, state, batch, outputs=self.draft.outputs)
        following = fm.next_tokens(batch, torch.ones(rows, dtype=torch.int64))
        self.now: Any = (state, *self.draft.extend(self.one.params, drafted, out, batch, following))

    def round(self, step: Any, keys: Keys, most: list[int], **kwargs: Any) -> fm.Verdict:
        """Run a round and go on from it."""
        given = (keys.sampling, keys.numbers, torch.tensor(most))
        verdict, *self.now = step(self.params, *self.now, *given, steps=STEPS, **kwargs)
        return verdict

    def check(self, other: Run) -> None:
        """Both have come to the same."""
        assert same(self.now[2], other.now[2])
        for mine, right in zip(self.now[:2], other.now[:2], strict=True):
            assert mine.ledger.lengths == right.ledger.lengths == tuple(right.lengths.tolist())
            for row in range(mine.rows):
                assert same(fm.logical(mine, row), fm.logical(right, row)), f"row {row}"


def plainly(kind: str) -> Any:
    return fm.Round(made("dense").model, draft_of(kind)).run


def captured(kind: str, backend: str) -> Any:
    return lowering.jit(plainly(kind), ("state", "drafted"), backend=backend)


def keys_of(settings: list[fm.Sampling], draw: random.Random) -> Keys:
    """What the host makes of rows with these settings, each with a seed and a number of its own."""
    keyed = [(draw.randrange(99), replace(one, seed=draw.randrange(99))) for one in settings]
    rows = [Continuation(number, Request((1,), 9, one), Share(None, 0, ())) for number, one in keyed]
    every = EVERY if GREEDY in settings else EVERY[1:]  # as where no row of a call is greedy
    return Keys.of(rows, every, torch.device("cpu"))


def policy(backend: str) -> Any:
    """Under which plain calls choose the kernels of a captured one."""
    if backend == "npu":
        return lowering.use(target="ascend910b")
    return lowering.use(paged_attention="torch", block_attention="torch", gated_delta_rule="torch")


def batches(draw: random.Random, sizes: tuple[int, ...]) -> list[list[fm.Sampling]]:
    """Settings of rows, of each size: all greedy, all drawing, and mixed, in any order, greedy ones in between."""
    order = []
    for rows in sizes:
        drawing = [[HOT, WARM, WARM], [GREEDY, WARM, GREEDY], [WARM, GREEDY, HOT]]
        order += [kind[:rows] for kind in (*drawing, [GREEDY] * 3, [GREEDY] * 3)]
    draw.shuffle(order)
    return order


@pytest.mark.parametrize(
    ("kind", "backend", "drawn", "sizes"),
    [
        ("mtp", "npu", False, (3,)), ("dflash", "npu", False, (3,)), ("dspark", "npu", False, (3,)),
        ("dspark", "fx", True, (2, 3)),
        *(pytest.param(kind, "npu", True, (2, 3), marks=pytest.mark.sweep) for kind in DRAFTS),
        *(pytest.param(kind, "fx", False, (2, 3), marks=pytest.mark.sweep) for kind in DRAFTS),
    ],
)  # fmt: skip
def test_any_order_of_variants_equals_plain_rounds(
    kind: str, backend: str, drawn: bool, sizes: tuple[int, ...]
) -> None:
    """Over one state of each size. Two programs a size: greedy, and one for all other mixes of settings."""
    draw = random.Random(f"{kind} {backend} {drawn}")
    step, plain = captured(kind, backend), plainly(kind)
    with policy(backend):
        runs = {rows: (Run(kind, rows), Run(kind, rows)) for rows in sizes}
        for settings in batches(draw, sizes):
            mine, right = runs[len(settings)]
            keys, most = keys_of(settings, draw), [draw.randint(0, STEPS + 1) for _ in settings]
            alike = replace(keys, sampling=keys_of([GREEDY] * len(settings), draw).sampling)
            as_greedy = copy(right).round(plain, alike, most)
            found = mine.round(step, keys, most, drawn=drawn)
            assert same(found, right.round(plain, keys, most, drawn=drawn))
            for row, one in enumerate(settings):
                beside = f"greedy row {row} among {settings}"
                assert one is not GREEDY or torch.equal(found.tokens[row], as_greedy.tokens[row]), beside
            mine.check(right)
        # Seeds, temperatures and numbers are inputs: also rows that are greedy in the drawing program.
        keys = keys_of([GREEDY] * sizes[0], draw)
        warm = keys_of([WARM] * sizes[0], draw).sampling
        forced = replace(keys, sampling=replace(warm, temperature=torch.zeros(sizes[0])))
        mine, right = runs[sizes[0]]
        most = [STEPS + 1] * sizes[0]
        assert same(mine.round(step, forced, most, drawn=drawn), right.round(plain, keys, most))
        mine.check(right)
    assert step.captures == len(step._graphs) == 2 * len(sizes)
    check_programs([over_vocabulary(capture.program.graph) for capture in step._graphs.values()], drawn)


def check_programs(found: list[set[str]], drawn: bool) -> None:
    """Greedy programs have no noise, law, exponential or order over the vocabulary; the others have what they need."""
    drawing = {"_softmax", "exp", "log", "log1p", "neg", "sort", "topk", "exponentials", "cumsum", "stack"}
    greedy = [names for names in found if not names & drawing]
    assert len(greedy) == len(found) / 2 and all("argmax" in names for names in greedy)
    for names in found:
        if names not in greedy:
            assert names >= {"exponentials", "exp"} and ("_softmax" in names) == drawn


def over_vocabulary(graph: torch.fx.GraphModule) -> set[str]:
    """Names of the operators that read or make numbers of each token of the vocabulary."""
    names = set()
    for node in graph.graph.nodes:
        touched = [node, *node.all_input_nodes]
        shapes = [x.meta["val"].shape for x in touched if isinstance(x.meta.get("val"), torch.Tensor)]
        if node.op == "call_function" and any(VOCAB in shape[-1:] for shape in shapes):
            names.add(node.target.__name__.split(".")[0])
    return names


@pytest.mark.parametrize("backend", ["npu", pytest.param("fx", marks=pytest.mark.sweep)])
def test_a_block_embedded_outside_is_an_input(backend: str) -> None:
    """Both forms agree; another embedding is another result; each call takes the form that it asks for."""
    draft = draft_of("dspark")
    with policy(backend):
        run = Run("dspark", 3)
        _, drafted, carry = run.now
        noise = fm.DraftNoise(keys_of([WARM] * 3, random.Random(1)).sampling, torch.arange(3))
        propose = lowering.jit(draft.propose, backend=backend)
        own = draft.embed(run.params, carry.token)
        others = [own, own.flip(1), None, own * 2, own, None]
        laws = []
        for embedded in others:
            given = (run.params, drafted, carry, STEPS, noise)
            right, _ = draft.propose(*given, embedded=embedded)
            found, _ = propose(*given, embedded=embedded) if embedded is not None else propose(*given)
            assert same(found, right)
            laws.append(found.logits)
        assert propose.captures == 2
        assert all(torch.equal(laws[0], laws[at]) for at in (2, 4, 5))
        assert not torch.equal(laws[0], laws[1]) and not torch.equal(laws[0], laws[3])
        keys = keys_of([GREEDY, WARM, HOT], random.Random(2))
        inside, outside = deepcopy(run), deepcopy(run)
        found = outside.round(plainly("dspark"), keys, [3] * 3, embedded=own)
        assert same(found, inside.round(plainly("dspark"), keys, [3] * 3))
        outside.check(inside)
    with pytest.raises(
        ValueError, match=r"embedded is \[3, 4, 64\] of torch.bfloat16, this draft's blocks are \[3, 5, 64\]"
    ):
        draft.propose(run.params, drafted, carry, STEPS, embedded=own[:, 1:])


def test_a_lowered_draft_projects_and_turns_once() -> None:
    """A layer has one product for queries, keys and values; the context has one for all layers, and one turn."""
    draft, layers, found = draft_of("dspark"), CONFIG["num_hidden_layers"], []
    with policy("npu"):
        run = Run("dspark", 2)
        _, drafted, carry = run.now
        extend, propose = (lowering.jit(call, backend="npu") for call in (draft.extend, draft.propose))
        hidden = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        out = fm.Output(hidden[:0], hidden, dict.fromkeys(draft.outputs, hidden))
        extend(run.params, drafted, out, fm.Batch.from_lists([[1, 2], [3, 4]], drafted), torch.arange(4))
        propose(run.params, drafted, carry, STEPS)
        for call in (extend, propose):
            (capture,) = call._graphs.values()
            calls = [x for x in capture.program.graph.graph.nodes if x.op == "call_function"]
            found.append(Counter(x.target.__name__.split(".")[0] for x in calls))
            assert not found[-1].keys() & {"addmm", "bmm", "matmul", "linear", "npu_weight_quant_batchmatmul"}
    assert [each["mm"] for each in found] == [2, 4 * layers + 1 + STEPS]
    # The operator takes one tensor: in a layer it turns queries and keys, of the context all keys at once.
    assert [each["npu_rotary_mul"] for each in found] == [1, 2 * layers]
