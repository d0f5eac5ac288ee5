"""Kimi Linear against transformers: outputs, every layer and state entry, gradients, checkpoints of every spelling."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given
from safetensors.torch import load_file, save_file
from torch import Tensor

import funcmodels as fm
import lowering
import params
from funcmodels.attention.gated_delta import DeltaNetState
from funcmodels.attention.mla import LatentPages
from funcmodels.blocks.mlp import Routing
from lowering import ops
from lowering.layouts import NdPages, NzPages
from tests.models.test_qwen3_5 import SPLITS
from tests.oracle.families import (
    assert_bitwise,
    check_drawn_drafts,
    check_nearness,
    check_saved,
    check_shared_prefix,
    check_unread_places,
    close,
    loss_of,
    schedules,
    their_gradients,
    total_loss,
)
from tests.oracle.kimi_linear import KINDS, build, pair, run, sizes
from tests.oracle.qwen3_5 import tokens
from tests.oracle.states import advance, assert_rows_close, per_row, poison, run_schedule
from tests.tolerances import assert_close

LAYERS = tuple(f"layers.{index}" for index in range(4))
REFERENCES: dict[str, Any] = dict.fromkeys(
    ("mla_prefix_attention", "attention", "gated_delta_rule", "experts"), "torch"
)  # fmt: skip

kinds = pytest.mark.parametrize("kind", KINDS)
layouts = pytest.mark.parametrize("layout", ["nd", "nz"])


# Against transformers


def test_the_random_models_are_of_every_kind() -> None:
    configs = [pair(kind, seed).config for kind in KINDS for seed in range(4)]
    assert {bool(config.q_lora_rank) for config in configs} == {False, True}
    assert {config.attention_bias for config in configs} == {False, True}
    assert {config.moe_renormalize for config in configs} == {False, True}
    assert len({config.layer_types for config in configs}) >= 4
    assert {("dense" in config.mlp_layer_types, "sparse" in config.mlp_layer_types) for config in configs} >= {
        (True, True), (True, False),
    }  # fmt: skip
    assert {config.num_expert_group > config.topk_group for config in configs} == {False, True}


@kinds
@pytest.mark.parametrize("seed", range(4))
def test_outputs_layers_and_entries_are_those_of_transformers(kind: str, seed: int) -> None:
    one = pair(kind, seed)
    ids = tokens(one, 1, 13, 2, 30, seed=seed)
    state = one.model.init_state(4, 40, page_size=(1, 3, 8, 128)[seed])
    wanted = [*LAYERS, *(["router"] if kind != "dense" else [])]
    out, after = advance(one, state, ids, outputs=wanted)
    plain, _ = one.model.forward(one.params, None, fm.Batch.from_lists(ids))
    for row, row_ids in enumerate(ids):
        theirs = run(one, row_ids)
        assert fm.logical(after, row).keys() == theirs.entries.keys()
        close(fm.logical(after, row), theirs.entries)
        close(per_row(out.logits, ids)[row], theirs.logits)
        close(per_row(plain.logits, ids)[row], theirs.logits)
        close(per_row(out.hidden, ids)[row], theirs.hidden)
        close([per_row(out.extra[layer], ids)[row] for layer in LAYERS], theirs.layers)
        if kind != "dense":
            chosen = torch.stack([per_row(layer, ids)[row] for layer in out.extra["router"].ids])
            assert torch.equal(chosen.sort(-1).values, torch.stack(theirs.chosen).sort(-1).values)


@kinds
@pytest.mark.parametrize("seed", range(2))
def test_a_conversation_of_several_calls_is_that_of_transformers(kind: str, seed: int) -> None:
    one = pair(kind, seed)
    state, cache = one.model.init_state(1, 96, page_size=4), None
    for part in tokens(one, 5, 1, 1, 2, 70, 1, 9, seed=seed):
        out, state = advance(one, state, [part])
        theirs = run(one, part, cache=cache)
        cache = theirs.cache
        close(out.logits, theirs.logits)
        close(fm.logical(state, 0), theirs.entries)


@pytest.mark.parametrize("kind", ["published", "grouped"])
@pytest.mark.parametrize("seed", range(2))
def test_bfloat16_is_as_near_the_truth_as_transformers(kind: str, seed: int) -> None:
    """Root mean square distance to float32 on the same rounded weights: at most twice transformers', plus 0.5%."""
    fields = sizes(kind, seed)
    # All experts: a choice among equals would turn on the last bit.
    fields |= {"num_experts_per_tok": fields["num_local_experts"], "topk_group": fields["n_group"]}
    low, high = build(fields, seed, torch.bfloat16), build(fields, seed, torch.bfloat16)
    high.theirs.float()
    check_nearness(low, high, run, seed)


@kinds
@pytest.mark.parametrize("seed", range(2))
def test_gradients_are_those_of_transformers(kind: str, seed: int) -> None:
    """Compared leaf by leaf; nothing but its choice depends on a router's bias."""
    one = pair(kind, seed)
    ids = tokens(one, 40, 5)
    loss, theirs = their_gradients(one, ids)
    for name, grad in theirs.items():
        assert grad is not None and grad.abs().max() > 0, f"{name} has no gradient to compare"
    theirs |= {name: torch.zeros_like(buffer) for name, buffer in one.theirs.named_buffers() if "bias" in name}
    expected = params.from_checkpoint(theirs, one.model.param_spec(), one.model.family.names)
    found, value = torch.func.grad_and_value(lambda tree: loss_of(one, tree, ids))(one.params)
    close(value, loss)
    for (path, grad), (_, right) in zip(params.items(found), params.items(expected), strict=True):
        assert grad.shape == right.shape, path
        assert_close(grad, right, looser=20, reason="a backward sums over tokens, layers and both rows")


@kinds
def test_gradients_through_a_state_are_those_without_one(kind: str) -> None:
    """Autograd writes nothing in place, and every part of a prompt gets its share."""
    one = pair(kind, 1)
    (ids,) = tokens(one, 30)
    tree = params.tree_map(lambda leaf: leaf.clone().requires_grad_(), one.params)
    empty = state = one.model.init_state(1, 32, page_size=4)
    logits = []
    for part in (ids[:19], ids[19:20], ids[20:]):
        out, state = one.model.forward(tree, state, fm.Batch.from_lists([part], state))
        logits.append(out.logits)
    total_loss([torch.cat(logits)], [ids]).backward()
    assert not any(leaf.requires_grad for leaf in params.leaves(empty))
    found = params.tree_map(lambda leaf: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, tree)
    expected = torch.func.grad(lambda weights: loss_of(one, weights, [ids]))(one.params)
    assert_close(found, expected, looser=20, reason="a backward sums over tokens and layers")


def test_gradients_example_by_example() -> None:
    one = pair("published", 2)
    examples, start = torch.tensor(tokens(one, 11, 11, 11)), torch.tensor([0, 11], dtype=torch.int32)

    def loss(tree: Any, example: Tensor) -> Tensor:
        out, _ = one.model.forward(tree, None, fm.Batch(example, start, max_query=11, uniform=True, counts=(11,)))
        return torch.nn.functional.cross_entropy(out.logits[:-1], example[1:])

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(one.params, examples)
    alone = [torch.func.grad(loss)(one.params, example) for example in examples]
    expected = params.tree_map(lambda *leaves: torch.stack(leaves), *alone)
    assert_close(each, expected, looser=20, reason="a backward in another order")


def test_projections_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """One projection a layer; the convolution, both gates' latents and the write strength are views of it."""
    one = build(sizes("published", 0), 0, torch.bfloat16)
    seen: dict[str, list[Tensor]] = {}

    def watch(name: str, *arguments: int) -> None:
        real = getattr(ops, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            seen.setdefault(name, []).extend([*(args[at] for at in arguments), result])
            return result

        monkeypatch.setattr(ops, name, watched)

    watch("linear", 0)
    watch("short_conv", 0)
    watch("channel_gates", 1)
    one.model.forward(one.params, None, fm.Batch.from_lists(tokens(one, 9, 2)))
    made = {x.untyped_storage().data_ptr(): x for x in seen["linear"][1::2] if isinstance(x, Tensor)}
    read = [x for x in (*seen["short_conv"], *seen["channel_gates"], *seen["linear"][0::2]) if isinstance(x, Tensor)]
    strided = [x for x in read if not x.is_contiguous()]
    deltas = one.config.layer_types.count("linear_attention")
    assert len(strided) == 4 * deltas and all(x.untyped_storage().data_ptr() in made for x in strided)
    assert len({x.untyped_storage().data_ptr() for x in strided}) <= deltas
    assert {x.dtype for x in strided} == {torch.bfloat16}
    decay, beta = seen["channel_gates"][1]
    assert decay.dtype == beta.dtype == torch.float32


# Any split, any rollback gives the same


@kinds
@pytest.mark.parametrize("references", [False, True], ids=["kernels", "references"])
def test_chunks_of_one_row(kind: str, references: bool) -> None:
    one = pair(kind, 1)
    ids = tokens(one, 11)
    with lowering.use(**(REFERENCES if references else {})):
        whole, expected = advance(one, one.model.init_state(1, 11, page_size=3), ids)
        for split in SPLITS:
            logits, state = run_schedule(one, one.model.init_state(1, 11, page_size=3), ids, [[n] for n in split])
            close(logits[0], whole.logits)
            assert_rows_close(state, expected)


@pytest.mark.parametrize("split", [[64, 6], [6, 64], [33, 37], [31, 1, 38], [1, 69], [35, 35], [3, 63, 4]], ids=str)
def test_chunks_around_the_chunk_of_the_delta_rule(split: list[int]) -> None:
    one = pair("grouped", 1)
    ids = tokens(one, 70)
    whole, expected = advance(one, one.model.init_state(1, 72, page_size=8), ids)
    logits, state = run_schedule(one, one.model.init_state(1, 72, page_size=8), ids, [[n] for n in split])
    close(logits[0], whole.logits)
    assert_rows_close(state, expected)


@pytest.mark.parametrize("kind", ["published", "grouped"])
@given(case=schedules(), page_size=st.sampled_from((1, 3, 8, 128)), seed=st.integers(0, 3))
@example(case=([11, 3, 7], [[5, 0, 2], [0, 3, 1], [1, 0, 1], [2, 0, 3], [3, 0, 0]]), page_size=4, seed=0)
def test_mixed_and_interleaved_rows(
    kind: str, case: tuple[list[int], list[list[int]]], page_size: int, seed: int
) -> None:
    lengths, schedule = case
    one = pair(kind, seed)
    ids = tokens(one, *lengths, seed=seed)
    state = one.model.init_state(len(ids), 16, page_size=page_size, pages=64)
    logits, state = run_schedule(one, state, ids, schedule)
    for row, row_ids in enumerate(ids):
        whole, expected = advance(one, one.model.init_state(1, 16, page_size=16), [row_ids])
        close(logits[row], whole.logits)
        assert_rows_close(state, expected, [(row, 0)])


@kinds
@layouts
def test_any_number_of_drawn_drafts_can_be_kept(kind: str, layout: str) -> None:
    """A draft of random tokens behind the root: after 0..n of them count, the state is that of a plain run."""
    one = pair(kind, 0, tiled=True)
    prompts = tokens(one, 7, 4, 9)
    drafts = tokens(one, 4, 4, 4, seed=5)
    _, state = advance(one, one.model.init_state(3, 24, page_size=4, layout=layout), prompts)
    before = [fm.logical(state, row) for row in range(3)]
    for accepted in itertools.product(range(5), (0, 3), (4, 1)):
        out, pending = advance(one, state, drafts, keep_steps=True)
        kept = fm.commit(pending, list(accepted))
        _, expected = advance(one, one.model.init_state(3, 24, page_size=4, layout=layout), prompts)
        taken = [row[:count] for row, count in zip(drafts, accepted, strict=True)]
        plain, expected = advance(one, expected, taken)
        assert_rows_close(kept, expected)
        for row, right in enumerate(per_row(plain.logits, taken)):
            close(per_row(out.logits, drafts)[row][: accepted[row]], right)
    assert_bitwise([fm.logical(state, row) for row in range(3)], before)


@pytest.mark.parametrize("seed", range(3))
def test_speculation_with_a_sampled_draft_continues_as_a_plain_run(seed: int) -> None:
    check_drawn_drafts(pair("published", seed), seed)


# Layouts and prefixes


@pytest.mark.parametrize("page_size", [1, 3, 16, 128])
def test_layouts_are_bitwise_equal(page_size: int) -> None:
    """Prompts, prefixes, windows and single tokens; logits and every entry."""
    one = pair("grouped", 1, tiled=True)
    schedule = [[9, 0, 4], [1, 1, 1], [0, 20, 0], [4, 4, 4], [1, 0, 130]]
    ids = tokens(one, *(sum(counts) for counts in zip(*schedule, strict=True)))
    found = {}
    for layout, kind in (("nd", NdPages), ("nz", NzPages)):
        state = one.model.init_state(3, 160, page_size=page_size, layout=layout)
        latents = [entry for entry in state.layers if isinstance(entry, LatentPages)]
        assert latents and all(type(entry.latent) is type(entry.rope) is kind for entry in latents)
        assert all(isinstance(entry, (LatentPages, DeltaNetState)) for entry in state.layers)
        logits, state = run_schedule(one, state, ids, schedule)
        found[layout] = [*logits, *(fm.logical(state, row) for row in range(3))]
    assert_bitwise(found["nz"], found["nd"])


@layouts
def test_a_prefix_is_shared(layout: str) -> None:
    check_shared_prefix(pair("published", 0, tiled=True), run, layout)


# Padding and what nobody may read


@layouts
@pytest.mark.parametrize("references", [False, True], ids=["kernels", "references"])
@pytest.mark.parametrize("counts", [(3, 0, 1, 8), (1, 1, 1, 1), (0, 0, 9, 0)], ids=str)
def test_padding_and_unread_places_may_hold_nan(layout: str, references: bool, counts: tuple[int, ...]) -> None:
    one = pair("grouped", 0, tiled=True)
    check_unread_places(
        one, one.model.init_state(4, 32, page_size=8, layout=layout), counts, **(REFERENCES if references else {})
    )


def test_padding_leaves_kept_steps_alone() -> None:
    one = pair("published", 0)
    _, state = advance(one, one.model.init_state(3, 24, page_size=4), tokens(one, 6, 4, 5))
    batch = fm.Batch.from_lists([[1, 2, 3], [], [4]], state)
    _, pending = one.model.forward(one.params, poison(fm.fork(state)), batch.pad(9), keep_steps=True)
    _, expected = advance(one, state, [[1, 2], [], [4]])
    assert_rows_close(fm.commit(pending, [2, 0, 1]), expected)


# What a forward returns


def test_taps_of_every_kind() -> None:
    one = pair("published", 2)
    out, _ = one.model.forward(
        one.params, None, fm.Batch.from_lists(tokens(one, 3, 4)), outputs=("router", "layers.2.router", "layers.2")
    )
    routing = out.extra["router"]
    assert isinstance(routing, Routing)
    assert routing.ids.shape == routing.weights.shape == (3, 7, one.config.num_experts_per_token)
    assert torch.equal(out.extra["layers.2.router"].ids, routing.ids[1])
    close(routing.weights.sum(-1), torch.full((3, 7), one.config.routed_scaling_factor))
    with pytest.raises(ValueError, match=r"outputs='layers\.0\.router'.*offers no such value"):
        one.model.forward(one.params, None, fm.Batch.from_lists([[1]]), outputs=("layers.0.router",))


# Generation, checkpoints, programs


@kinds
def test_greedy_tokens_are_those_of_transformers(kind: str) -> None:
    one = pair(kind, 1)
    prompts = tokens(one, 3, 9, 1)
    found = [result.tokens for result in fm.generate(one.model, one.params, prompts, 15, eos=())]
    for prompt, generated in zip(prompts, found, strict=True):
        theirs = one.theirs.generate(torch.tensor([prompt]), max_new_tokens=15, do_sample=False, pad_token_id=0)
        assert generated == theirs[0, len(prompt) :].tolist()


@kinds
@pytest.mark.parametrize("seed", range(2))
def test_checkpoints_load_and_save(kind: str, seed: int, tmp_path: Path) -> None:
    check_saved(pair(kind, seed), tmp_path)
    _, half = fm.load(tmp_path / "theirs", dtype=torch.bfloat16)
    kept = {path.rpartition(".")[2] for path, leaf in params.items(half) if leaf.dtype == torch.float32}
    routed = any("router" in path for path, _ in params.items(half))
    assert kept == {"a_log", "dt_bias", *(["weight", "bias"] if routed else [])}
    assert not routed or half.layers[-1].mlp.router.bias.dtype == torch.float32


def test_every_spelling_is_read_and_the_published_one_is_written(tmp_path: Path) -> None:
    """The first, dense layer as `mlp` or as transformers saves it; convolutions apart or as one; experts likewise."""
    one = pair("published", 0)
    spec, names = one.model.param_spec(), one.model.family.names
    written = params.to_checkpoint(one.params, spec, names)
    one.theirs.save_pretrained(tmp_path)
    theirs = load_file(tmp_path / "model.safetensors")
    renamed = {name for name in theirs if name not in written}
    assert renamed == {f"model.layers.0.block_sparse_moe.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert {name.replace("block_sparse_moe", "mlp") for name in renamed} == set(written) - set(theirs)
    loaded = one.theirs.state_dict()
    delta = one.config.layer_types.index("linear_attention")
    assert f"model.layers.{delta}.self_attn.conv1d.weight" in loaded
    assert written[f"model.layers.{delta}.self_attn.A_log"].shape == (1, 1, one.config.linear_num_heads, 1)
    for spelling in (written, theirs, loaded):
        assert_bitwise(params.from_checkpoint(spelling, spec, names), one.params)


def test_a_missing_convolution_is_named(tmp_path: Path) -> None:
    one = pair("published", 0)
    one.theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    delta = one.config.layer_types.index("linear_attention")
    lost = f"model.layers.{delta}.self_attn.k_conv1d.weight"
    save_file({name: x for name, x in tensors.items() if name != lost}, tmp_path / "model.safetensors")
    with pytest.raises(fm.CheckpointError, match=rf"missing \(1\):\n  {lost}, for layers\.{delta}\.attn\.conv"):
        fm.load(tmp_path)


@pytest.mark.parametrize(("layout", "counts"), [("nd", (1, 1, 1)), ("nz", (4, 4, 4)), ("nz", (9, 0, 1))], ids=str)
def test_captured_steps_are_the_eager_ones(layout: str, counts: tuple[int, ...]) -> None:
    one = pair("grouped", 1, tiled=True)
    _, state = advance(one, one.model.init_state(3, 48, page_size=8, layout=layout), tokens(one, 5, 2, 11))
    other = copy.deepcopy(state)
    step = lowering.jit(one.model.forward, donate=("state",), backend="fx")
    for seed in (3, 4):
        new = tokens(one, *counts, seed=seed)
        out, other = step(one.params, other, fm.Batch.from_lists(new, other))
        with lowering.use(mla_prefix_attention="torch_absorbed"):
            expected, state = advance(one, state, new)
        close(out.logits, expected.logits)
    assert_rows_close(other, state)


def test_a_traced_verification_reads_nothing_and_replays() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    one = pair("grouped", 1)
    _, state = advance(one, one.model.init_state(2, 32, page_size=4), tokens(one, 5, 3))
    batch = fm.Batch.from_lists([[1, 2, 3], [4]], state).pad(6)

    def step(tree: Any, state: fm.State, new: Tensor) -> tuple[Tensor, list[Tensor]]:
        out, after = one.model.forward(tree, state, replace(batch, tokens=new), keep_steps=True)
        return out.logits, params.leaves(fm.commit(after, torch.ones(2, dtype=torch.int32)))

    spare = params.tree_map(torch.clone, state)
    graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(one.params, spare, batch.tokens)
    assert spare == state, "tracing wrote the example state"
    other = (batch.tokens + 11) % one.config.vocab_size
    logits, _ = graph(one.params, spare, other)
    close(logits[:4], step(one.params, state, other)[0][:4])


@kinds
def test_a_forward_on_the_meta_device(kind: str) -> None:
    one = pair(kind, 0)
    tree = params.to(one.params, device="meta")
    state = one.model.init_state(2, 32, page_size=4, device="meta")
    for new, keep_steps in (([[1] * 9, []], False), ([[4], [5]], False), ([[6], [7, 8]], True)):
        batch = fm.Batch.from_lists(new, state)
        out, state = one.model.forward(tree, state, batch, logits="last", keep_steps=keep_steps)
        assert out.logits.shape == (2, one.config.vocab_size) and out.logits.device.type == "meta"
    assert fm.commit(state, [1, 2]).ledger.lengths == (11, 3)
