"""One rank: runs its part of every family beside the whole model, and writes how far they are apart as JSON.

python -m tests.sharding.worker OUT [KIND ...]      (RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set)
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import funcmodels as fm
import lowering
import params as trees
from funcmodels.drafts.named import NAMES, BlockParams
from lowering import ops
from lowering.explain.report import watch
from tests.oracle import block_drafts
from tests.oracle.qwen3_5 import Pair
from tests.sharding.kinds import EXPERTS, HEADS, whole

BLOCK_DRAFTED = "qwen_moe"
VARIANTS = ("dflash", "plain", "vanilla", "gated", "rnn", "narrow")
"""Block drafts whose greedy tokens are compared."""
CAPTURED = ("qwen_moe", "deepseek_v2")
LISTS = [[[3, 5, 7, 9, 11, 2, 6], [4, 8], []], [[1], [], [2, 3, 4]], [[5], [6], [7]]]
"""New tokens of three rows in three forwards: ragged, with idle rows, then one each."""
VERIFY, ACCEPTED = [[8, 9, 10], [11, 12, 13], [14, 15, 16]], [1, 3, 0]


def main(out: Path, kinds: list[str]) -> None:
    """Compare each kind, with slices of experts and with whole ones."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    found = {}
    for kind in kinds:
        for whole_experts in (False, True) if kind in EXPERTS else (False,):
            ranks = fm.ranks_of(mesh, whole_experts=whole_experts)
            found[f"{kind}{' whole experts' if whole_experts else ''}"] = compared(kind, *whole(kind), ranks)
    found["quantised"] = quantised(fm.ranks_of(mesh))
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@torch.no_grad()
def compared(kind: str, model: fm.Model, params: Any, ranks: trees.Ranks) -> dict[str, Any]:
    """Distances of logits and states, and the tokens that both generate."""
    own = model.sharded(ranks)
    held = trees.shard(params, model.whole_spec(), ranks)
    with lowering.record() as report:
        mine = list(run(own, held))
    theirs = list(run(model, params))
    return {
        "logits": max(distance(a[0], b[0]) for a, b in zip(mine, theirs, strict=True)),
        "hidden": max(distance(a[1], b[1]) for a, b in zip(mine, theirs, strict=True)),
        "states": states(mine[-1][2], theirs[-1][2], own, ranks),
        "tokens": [generated(kind, own, held), generated(kind, model, params)],
        "block tokens": block_drafted(model, params, own, held) if kind == BLOCK_DRAFTED else [[], []],
        "drafts": {} if ranks.whole_experts else dict(drafted(kind, model, params, own, held)),
        "captured": captured(own, held) if kind in CAPTURED else 0.0,
        "ops": sorted({row.op for row in report.rows} & {"all_reduce", "all_gather"}),
        "refused": refused(own, held, ranks) if kind == "gemma3" else [],
        "first logits": mine[0][0].flatten()[:50].tolist(),
    }


@torch.no_grad()
def quantised(ranks: trees.Ranks) -> list[float]:
    """How far int8 is from float32: the ranks', and the whole's. A rank scales its activations for itself."""
    model, params = whole("qwen_dense")
    small = trees.quantize(params, "W8A8_DYNAMIC")
    held = trees.shard(small, model.whole_spec(), ranks)
    expected = [logits for logits, *_ in run(model, params)]
    runs = [list(run(model.sharded(ranks), held)), list(run(model, small))]
    return [
        float(sum((a[0] - b).norm() for a, b in zip(one, expected, strict=True)) / sum(b.norm() for b in expected))
        for one in runs
    ]


def run(model: fm.Model, params: Any) -> Iterator[tuple[Tensor, Tensor, fm.State]]:
    """Logits, hidden states and the state after each forward, a verified window among them."""
    state = model.init_state(3, 32, page_size=4)
    for lists in LISTS:
        out, state = model.forward(params, state, fm.Batch.from_lists(lists, state))
        yield out.logits, out.hidden, state
    out, state = model.forward(params, state, fm.Batch.from_lists(VERIFY, state), keep_steps=True)
    state = fm.commit(state, ACCEPTED)
    yield out.logits, out.hidden, state
    out, state = model.forward(params, state, fm.Batch.from_lists(LISTS[1], state))
    yield out.logits, out.hidden, state


def distance(one: Tensor, two: Tensor) -> float:
    """Largest difference, in units of the largest value."""
    return float((one - two).abs().max() / two.abs().max().clamp(min=1e-9))


def states(mine: fm.State, theirs: fm.State, model: fm.Model, ranks: trees.Ranks) -> float:
    """How far the ranks' entries, put together, are from the whole's."""
    worst = 0.0
    for row in range(mine.rows):
        whole_entries = fm.logical(theirs, row)
        for name, value in fm.logical(mine, row).items():
            expected = whole_entries[name]
            if value.shape == expected.shape:
                worst = max(worst, distance(value, expected) if value.numel() else 0.0)
                continue
            axis = next(i for i, (a, b) in enumerate(zip(value.shape, expected.shape, strict=True)) if a != b)
            parts = ops.all_gather(value.movedim(axis, -1).contiguous(), group=ranks.group, ranks=ranks.size)
            joined = parts.movedim(-1, axis)
            if joined.shape == expected.shape and "window" not in name:
                worst = max(worst, distance(joined, expected) if joined.numel() else 0.0)
            else:
                worst = max(worst, unordered(joined, expected, axis))
    return worst


def unordered(joined: Tensor, expected: Tensor, axis: int) -> float:
    """How far the worst channel is from its likeliest twin: ranks hold blocks of channels, or one head twice."""
    if not joined.numel():
        return 0.0
    one, two = (x.movedim(axis, 0).flatten(1) for x in (joined, expected))
    apart = (one[:, None] - two[None]).abs().amax(-1)
    return float(torch.maximum(apart.amin(0).max(), apart.amin(1).max()) / expected.abs().max().clamp(min=1e-9))


def generated(kind: str, model: fm.Model, params: Any) -> list[list[int]]:
    """Greedy and sampled tokens, with the draft head where there is one; beside them a row without a choice."""
    prompts = [[3, 4, 5, 6], [7, 8], [9]]
    draft = "mtp" if kind in HEADS else "none"
    greedy = fm.generate(model, params, prompts, max_new_tokens=7, draft=draft)
    one = fm.Sampling(1.0, seed=5)
    none = fm.Sampling(1.0, logit_bias=tuple((token, -torch.inf) for token in range(model.config.vocab_size)))
    drawn = fm.generate(model, params, prompts, 7, draft=draft, sampling=[one, none, one], numbers=[3, 1, -8], rows=2)
    assert [result.finish_reason == "no_choice" for result in drawn] == [False, True, False]
    return [result.tokens for result in (*greedy, *drawn)]


def block_drafted(model: fm.Model, params: Any, own: fm.Model, held: Any) -> list[list[int]]:
    """Tokens of the ranks with a draft that each of them has whole, and of the whole model without one."""
    one = block_drafts.build(Pair(None, model, params), "vanilla", 1)
    with tempfile.TemporaryDirectory() as directory:
        plain = trees.put(one.draft.params, "context", None)
        trees.save(plain, directory, BlockParams.spec(one.draft.config), NAMES, one.fields)
        ranks = fm.generate(own, held, [[3, 4, 5]], 8, draft=directory)
    return [ranks[0].tokens, fm.generate(model, params, [[3, 4, 5]], 8)[0].tokens]


def drafted(kind: str, model: fm.Model, params: Any, own: fm.Model, held: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each draft that a kind has: what ranks and the whole model propose, and what ranks exchange to choose it."""
    if kind in HEADS:
        yield "mtp", proposals(fm.draft(model, "mtp"), params, fm.draft(own, "mtp"), held)
    for variant in VARIANTS if kind == BLOCK_DRAFTED else ():
        one = block_drafts.build(Pair(None, model, params), variant, 1).draft
        mine = type(one)(own, one.config, one.params)
        yield variant, proposals(one, params, mine, held, captured=variant == "vanilla")


def proposals(one: Any, params: Any, mine: Any, held: Any, captured: bool = False) -> dict[str, Any]:
    """Greedy tokens, captured too where asked for; drawn ones, by a seed of the rank's own, and their last law."""
    assert mine.model.ranks is not None
    (state, carry), noise = begun(mine, held), own_noise(mine.model.ranks.rank)
    greedy, counts = exchanged(lambda: mine.propose(held, state, carry, 2)[0])
    drawn, sampled = exchanged(lambda: mine.propose(held, state, carry, 2, noise)[0])
    tokens = [one.propose(params, *begun(one, params), 2)[0].tokens, greedy.tokens]
    if captured:
        tokens.append(lowering.jit(mine.propose, backend="fx")(mine.joined(held), state, carry, 2)[0].tokens)
    return {
        "tokens": [found.tolist() for found in tokens], "greedy": counts, "sampled": sampled,
        "drawn": [drawn.tokens.tolist(), drawn.logits[:, -1].softmax(-1).tolist()],
    }  # fmt: skip


def begun(draft: Any, params: Any) -> tuple[fm.State, fm.Carry]:
    """A draft's state and carry after two prompts."""
    model = draft.model
    state = model.init_state(2, 32, page_size=4)
    batch, drafted = fm.Batch.from_lists([[3, 5, 7, 9, 11], [4, 8]], state), draft.init_state(state)
    out, _ = model.forward(params, state, batch, outputs=draft.outputs)
    return draft.extend(params, drafted, out, batch, fm.next_tokens(batch, torch.tensor([6, 2])))


def own_noise(seed: int) -> fm.DraftNoise:
    return fm.DraftNoise(fm.RowSampling.of([fm.Sampling(1.0, seed=seed)] * 2), torch.arange(2))


def exchanged(run: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """What a call gives, how often it hears the first rank's tokens, and the widest value that it gathers from each."""
    seen: list[tuple[str, int]] = []
    with watch(lambda op, args: seen.append((op, args[0].shape[-1])) if op in ("all_gather", "from_first") else None):
        found = run()
    widths = [width for op, width in seen if op == "all_gather"]
    return found, {"agreed": sum(op == "from_first" for op, _ in seen), "widest": max(widths, default=0)}


def refused(model: fm.Model, params: Any, ranks: trees.Ranks) -> list[str]:
    """What is said of calls that are not the first rank's, and of one that the second rank refuses; then one runs."""
    mine, last = ranks.rank, ranks.rank == ranks.size - 1
    calls: list[dict[str, Any]] = [
        {"prompts": [[3, 4 + mine]]}, {"prompts": [[3, 4]] * (1 + last)}, {"sampling": fm.Sampling(1.0, seed=mine)},
        {"max_new_tokens": 3 + mine}, {"page_size": 4 + last}, {"eos": (mine,)}, {"rows": 2 - last},
        {"prompts": [[3, 10**6]] if last else [[3]]}, {"stop": 5 if last else ()}, {},
    ]  # fmt: skip
    said = []
    for call in calls:
        try:
            found = fm.generate(model, params, **{"prompts": [[3, 4]], "max_new_tokens": 2} | call)
            said.append(str(found[0].tokens))
        except (ValueError, TypeError) as error:
            theirs = f"rank {ranks.size - 1} of {ranks.size} has refused" in str(error)
            said.append(
                "one refused"
                if theirs or "outside the vocabulary" in str(error) or "stop" in str(error)
                else str(error)
            )
    return said


def captured(model: fm.Model, params: Any) -> float:
    """How far a captured decoding step, collectives and all, is from a plain one."""
    step = lowering.jit(model.forward, donate=("state",), backend="fx")
    plain, replayed = (model.init_state(2, 16, page_size=4) for _ in range(2))
    worst = 0.0
    for token in (3, 4, 5):
        lists = [[token], [token + 1]]
        expected, plain = model.forward(params, plain, fm.Batch.from_lists(lists, plain))
        found, replayed = step(params, replayed, fm.Batch.from_lists(lists, replayed))
        worst = max(worst, distance(found.logits, expected.logits))
    return worst


@torch.no_grad()
def bereft(dies: int) -> None:
    """Steps of a model whose rank number `dies` ends after the first: captured, which says so, and plain."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    ranks = fm.ranks_of(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)))
    model, params = whole("gemma3")
    own, held = model.sharded(ranks), trees.shard(params, model.whole_spec(), ranks)
    step = lowering.jit(own.forward, donate=("state",), backend="fx")
    _, state = step(held, own.init_state(1, 8), fm.Batch.from_lists([[3]]))
    if ranks.rank == dies:
        os._exit(3)
    try:
        step(held, state, fm.Batch.from_lists([[4]]))
    except lowering.CollectiveError as error:
        print(error, "|", repr(state))
    own.forward(held, None, fm.Batch.from_lists([[5]]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "DIES" in os.environ:
        bereft(int(os.environ["DIES"]))
    else:
        main(Path(sys.argv[1]), sys.argv[2:])
