"""Block drafts against float64 loops over their formulas: context, blocks, and what a Markov head adds."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import funcmodels as fm
import lowering
import params
from funcmodels.drafts import block, markov
from tests.oracle import block_drafts, qwen3_5
from tests.oracle.block_drafts import VARIANTS, Drafter, Transcription, begun, flattened
from tests.oracle.qwen3_5 import tokens
from tests.oracle.states import ROUNDING, poison
from tests.tolerances import assert_close

variants = pytest.mark.parametrize(("variant", "seed"), [(name, 2 * i) for i, name in enumerate(VARIANTS)])


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


@functools.cache
def drafter(variant: str, seed: int) -> Drafter:
    """A random draft for a random model, the same for the same arguments."""
    return block_drafts.build(qwen3_5.pair("dense", seed % 3), variant, seed)


def formulas(one: Drafter, ids: list[int]) -> Transcription:
    """The transcription with `ids` as context, from the hidden states of transformers' own layers."""
    theirs = one.one.theirs
    formula = Transcription(one, theirs.model.embed_tokens.weight, theirs.lm_head.weight)
    layers = qwen3_5.run(one.one, ids).layers
    for at in range(len(ids)):
        formula.commit([layers[i][at].double().numpy() for i in flattened(one.fields)["target_layer_ids"]])
    return formula


def close(actual: Any, expected: Any) -> None:
    assert_close(actual, expected, dtype=torch.float32, looser=5, reason=ROUNDING)


@variants
def test_context_and_drafts_are_those_of_the_formulas(variant: str, seed: int) -> None:
    """Ragged prompts that begin, fill and cross pages; greedy drafts of a whole block and of its beginning."""
    one = drafter(variant, seed)
    ids = tokens(one.one, 5, 1, 8, seed=seed)
    _, dstate, carry, out = begun(one, ids)
    assert torch.equal(carry.token, torch.ones(3, dtype=torch.int64))
    close(carry.hidden, out.hidden[[4, 5, 13]])
    proposal, after = one.draft.propose(one.one.params, dstate, carry, one.draft.most_steps)
    shorter, _ = one.draft.propose(one.one.params, dstate, carry, 2)
    assert torch.equal(shorter.tokens, proposal.tokens[:, :2]) and proposal.logits is None
    for row, row_ids in enumerate(ids):
        formula = formulas(one, row_ids)
        close(fm.logical(dstate, row), formula.entries())
        assert params.equal(fm.logical(after, row), fm.logical(dstate, row))
        assert proposal.tokens[row].tolist() == formula.drafts(1)[0]


@pytest.mark.parametrize(("variant", "norm"), [("plain", Qwen3RMSNorm), ("gemma", Gemma3RMSNorm)])
def test_keys_of_the_context_are_rounded_as_keys_of_a_block(variant: str, norm: Any) -> None:
    """In bfloat16, to the bit: by transformers' own norm of each head, whatever the tokens around it are."""
    one, generator = drafter(variant, 2).draft, torch.Generator().manual_seed(3)
    own, config = params.to(one.params, dtype=torch.bfloat16), one.config
    features = torch.randn(40, own.fc.weight.shape[1], generator=generator).bfloat16()
    cos, sin = torch.ones(40, config.head_dim // 2), torch.zeros(40, config.head_dim // 2)
    k, v = block.context_entries(config, own, features, (cos, sin))
    unit = norm(config.hidden_size, eps=config.rms_norm_eps).bfloat16()
    heads = norm(config.head_dim, eps=config.rms_norm_eps).bfloat16()
    unit.weight.copy_(own.hidden_norm.weight)
    context, kv_rows = unit(features @ own.fc.weight.T), config.num_key_value_heads * config.head_dim
    for layer, node in enumerate(own.layers):
        heads.weight.copy_(node.attn.k_norm.weight)
        theirs_k, theirs_v = (
            (context @ node.attn.qkv.weight[-2 * kv_rows :].T).unflatten(1, (2, -1, config.head_dim)).unbind(1)
        )
        assert torch.equal(k[:, layer], heads(theirs_k)) and torch.equal(v[:, layer], theirs_v)


def test_a_block_has_hidden_states_of_its_own() -> None:
    """From hidden values alone the context is made; a block's states, through the head, are what is proposed of it."""
    one = drafter("dflash", 0)
    ids, model = tokens(one.one, 5, 3, seed=1), one.one.params
    _, dstate, carry, out = begun(one, ids)
    batch = fm.Batch.from_lists(ids)
    following = fm.next_tokens(batch, carry.token)
    again, _ = one.draft.extend(
        model,
        one.draft.init_state(one.one.model.init_state(2, 40)),
        fm.Output.of(out.hidden, out.extra),
        batch,
        following,
    )
    assert all(params.equal(fm.logical(again, row), fm.logical(dstate, row)) for row in range(2))
    hidden, _ = one.draft.hidden(model, dstate, carry)
    assert hidden.shape == (2, one.draft.config.block, one.draft.config.hidden_size)
    proposal, _ = one.draft.propose(model, dstate, carry, one.draft.most_steps)
    logits = hidden[:, 1:] @ (model.embed.weight if model.head is None else model.head.weight).T
    assert torch.equal(proposal.tokens, logits.argmax(-1))


@variants
def test_laws_are_those_of_the_formulas(variant: str, seed: int) -> None:
    """Each drawn draft brings the softmax of its place's logits over temperature, given the tokens drawn before."""
    one = drafter(variant, seed + 1)
    ids = tokens(one.one, 3, 6, seed=seed)
    _, dstate, carry, _ = begun(one, ids)
    heat = 1.7
    noise = fm.DraftNoise(fm.RowSampling.of([fm.Sampling(heat, seed=row) for row in range(2)]), torch.arange(2))
    proposal, _ = one.draft.propose(one.one.params, dstate, carry, one.draft.most_steps, noise)
    assert proposal.logits is not None
    for row, row_ids in enumerate(ids):
        logits = formulas(one, row_ids).drafts(1, proposal.tokens[row].tolist())[1]
        weights = np.exp((np.stack(logits) - np.max(logits, axis=1, keepdims=True)) / heat)
        right = torch.from_numpy(weights / weights.sum(1, keepdims=True))
        torch.testing.assert_close(proposal.logits[row].softmax(-1).double(), right, atol=2e-5, rtol=1e-3)
        assert (right.gather(1, proposal.tokens[row][:, None]) > 0).all()


@pytest.mark.parametrize("seed", range(4))
def test_any_chunking_gives_the_same_context(seed: int) -> None:
    """Prompts in random pieces, rows idle now and then, are those in one piece; the tail of a piece is not the last."""
    one = drafter("vanilla", seed)
    ids = tokens(one.one, 7, 3, 11, seed=seed)
    draw = random.Random(seed)
    _, whole, _, _ = begun(one, ids)
    state = one.one.model.init_state(3, 60, page_size=3, pages=30)
    dstate, carry, fed = one.draft.init_state(state), None, [0, 0, 0]
    while fed != [7, 3, 11]:
        more = [min(draw.choice([0, 1, 2, 5]), len(row) - at) for row, at in zip(ids, fed, strict=True)]
        if not any(more):
            continue
        new = [row[at : at + count] for row, at, count in zip(ids, fed, more, strict=True)]
        fed = [at + count for at, count in zip(fed, more, strict=True)]
        batch = fm.Batch.from_lists(new, state)
        out, state = one.one.model.forward(one.one.params, state, batch, outputs=one.draft.outputs)
        last = torch.tensor([row[at] if at < len(row) else 1 for row, at in zip(ids, fed, strict=True)])
        following = fm.next_tokens(batch, last)
        dstate, carry = one.draft.extend(one.one.params, dstate, out, batch, following, carry)
    assert carry is not None and carry.token.tolist() == [1, 1, 1]
    assert dstate.ledger.lengths == (7, 3, 11)
    for row in range(3):
        close(fm.logical(dstate, row), fm.logical(whole, row))


@variants
def test_what_blocks_leave_behind_is_never_read(variant: str, seed: int) -> None:
    """NaN wherever no context lies: before a proposal, after it, and once a window of which few tokens count is in."""
    one = drafter(variant, seed)
    ids = tokens(one.one, 4, 9, seed=seed)
    state, dstate, carry, _ = begun(one, ids)
    steps = min(one.draft.most_steps, 5)
    proposal, after = one.draft.propose(one.one.params, dstate, carry, steps)
    dirty, _ = one.draft.propose(one.one.params, poison(after), carry, steps)
    assert torch.equal(dirty.tokens, proposal.tokens)
    window = proposal.batch(state)
    out, _ = one.one.model.forward(one.one.params, state, window, outputs=one.draft.outputs, keep_steps=True)
    following = torch.cat((proposal.tokens, proposal.tokens[:, :1]), 1)
    kept = torch.tensor([[1], [2]])
    following = torch.where(torch.arange(steps + 1) < kept, following, -1)
    dstate, carry = one.draft.extend(one.one.params, poison(after), out, window, following, carry)
    assert dstate.lengths.tolist() == [5, 11]
    again, _ = one.draft.propose(one.one.params, poison(dstate), carry, steps)
    for row, row_ids in enumerate(ids):
        held = [*row_ids, 1, *proposal.tokens[row].tolist()][: 5 + 6 * row]
        formula = formulas(one, held)
        close(fm.logical(dstate, row), formula.entries())
        assert again.tokens[row].tolist() == formula.drafts(int(carry.token[row]))[0][:steps]


def test_a_block_at_the_end_of_a_full_row_has_room() -> None:
    """A proposal of one token runs a whole block, where the model's own state has no place left for it."""
    one = drafter("vanilla", 0)
    (ids,) = tokens(one.one, 11)
    model = one.one.model
    for pages in (None, 3):
        state = model.init_state(1, 12, page_size=4, pages=pages)
        dstate, batch = one.draft.init_state(state), fm.Batch.from_lists([ids], state)
        out, _ = model.forward(one.one.params, state, batch, outputs=one.draft.outputs)
        following = fm.next_tokens(batch, torch.tensor([1]))
        dstate, carry = one.draft.extend(one.one.params, dstate, out, batch, following)
        proposal, _ = one.draft.propose(one.one.params, dstate, carry, 1)
        assert proposal.tokens[0].tolist() == formulas(one, ids).drafts(1)[0][:1]


def test_projections_are_made_once() -> None:
    """Context: two products for all layers. A block: four a layer, one for all logits, and the head's one a place."""
    one = next(found for seed in range(9) if len((found := drafter("vanilla", seed)).draft.params.layers) > 1)
    layers, steps = len(one.draft.params.layers), one.draft.most_steps
    state, dstate, carry, out = begun(one, tokens(one.one, 5, 1))
    batch = fm.Batch.from_lists(tokens(one.one, 5, 1))
    with lowering.record() as extended:
        one.draft.extend(
            one.one.params, one.draft.init_state(one.one.model.init_state(2, 60)), out, batch, batch.tokens
        )
    with lowering.record() as proposed:
        one.draft.propose(one.one.params, dstate, carry, steps)
    assert count(extended, "linear") == 2 and count(extended, "rotary") == 1
    assert count(proposed, "linear") == 4 * layers + 1 + steps and count(proposed, "rotary") == layers
    assert count(proposed, "embedding") == 1 + steps
    assert state.lengths.tolist() == [5, 1]


def count(report: lowering.Report, op: str) -> int:
    return sum(row.count for row in report.rows if row.op == op)


# The Markov head


def head(rank: int, vocab: int, dtype: torch.dtype, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    w1, w2 = (torch.randn(vocab, rank, generator=generator).to(dtype) for _ in range(2))
    return markov.Markov(w1, block.Linear(w2))


def test_sums_are_rounded_once_before_the_choice() -> None:
    """In bfloat16 both summands are rounded, then their float32 sum; the lowest id wins the ties that this makes."""
    rows, vocab = 400, 500
    params_, before = head(8, vocab, torch.bfloat16), torch.arange(rows)
    base = (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 4).bfloat16()
    found, _ = markov.corrected(params_, base, torch.zeros(rows, 3), before, None)
    bias = (params_.w1[:rows].double() @ params_.w2.weight.double().T).bfloat16()
    right = (base.double() + bias.double()).bfloat16()
    assert found.dtype == torch.bfloat16
    near_ties = (found != right).float().mean()
    assert near_ties < 0.01, "a product may round to its other neighbour where it lies half-way"
    ties = [(row == row.max()).sum() for row in found]
    assert sum(int(tie) > 1 for tie in ties) > 3, "rounding must make ties here"
    for row, best in zip(found.float().numpy(), found.argmax(-1).tolist(), strict=True):
        assert best == int(np.flatnonzero(row == row.max())[0])


def test_a_nan_wins_and_padding_never_does() -> None:
    """The head may know more tokens than the model: those are padding, whatever it says of them."""
    params_ = head(4, 12, torch.float32)
    params_.w2.weight[9:] = torch.inf
    base = torch.zeros(3, 9)
    base[1, 5], base[1, 7] = torch.nan, torch.nan
    base[2] = -torch.inf
    found, _ = markov.corrected(params_, base, torch.zeros(3, 2), torch.tensor([0, 1, 2]), None)
    assert found.shape == (3, 9)
    right = params_.w1[0] @ params_.w2.weight[:9].T
    assert found.argmax(-1).tolist() == [int(right.argmax()), 5, 0]


def test_fewer_tokens_than_the_model_has() -> None:
    """The head's sum is over the draft's own tokens, its table over the model's; what is proposed are the model's."""
    one = block_drafts.build(qwen3_5.pair("dense", 0), "narrow", 4)
    own = one.draft.params
    assert own.ids is not None
    listed = {int(i) + at for at, i in enumerate(own.ids)}
    _, dstate, carry, _ = begun(one, tokens(one.one, 6, 4, 2))
    noise = fm.DraftNoise(fm.RowSampling.of([fm.Sampling(50.0, seed=row) for row in range(3)]), torch.arange(3))
    drawn, _ = one.draft.propose(one.one.params, dstate, carry, one.draft.most_steps, noise)
    assert drawn.logits is not None and drawn.logits.shape[2] == one.one.config.vocab_size
    for law in drawn.logits.flatten(0, 1):
        assert {int(at) for at in (law > -torch.inf).nonzero()} == listed
    assert set(drawn.tokens.flatten().tolist()) <= listed


# What a draft needs


def test_features_are_what_leaves_the_layers() -> None:
    """The last id is the stream before the final norm, and a draft that read another layer would differ."""
    one = drafter("vanilla", 0)
    model, ids = one.one.model, tokens(one.one, 6)
    last = model.config.num_hidden_layers - 1
    out, _ = model.forward(one.one.params, None, fm.Batch.from_lists(ids), outputs=("layers.0", f"layers.{last}"))
    right = qwen3_5.run(one.one, ids[0])
    close(out.extra["layers.0"], right.layers[0])
    close(out.extra[f"layers.{last}"], right.layers[last])
    assert (out.extra[f"layers.{last}"] - right.hidden).abs().max() > 0.1


def test_the_dtype_of_a_draft_is_its_own() -> None:
    """Beside a float32 model one of bfloat16 drafts with values rounded at both borders."""
    one = drafter("vanilla", 2)
    low = type(one.draft)(one.one.model, one.draft.config, params.to(one.draft.params, dtype=torch.bfloat16))
    _, dstate, carry, _ = begun(Drafter(one.one, low, one.fields, one.tensors), tokens(one.one, 6, 4))
    _, right, _, _ = begun(one, tokens(one.one, 6, 4))
    proposal, _ = low.propose(one.one.params, dstate, carry, 3)
    assert proposal.tokens.shape == (2, 3)
    reason = "every product and the state round"
    assert_close(fm.logical(dstate, 0), fm.logical(right, 0), dtype=torch.bfloat16, looser=8, reason=reason)


def test_misuses_are_refused() -> None:
    one = drafter("vanilla", 0)
    state, dstate, carry, out = begun(one, tokens(one.one, 5, 3))
    batch = fm.Batch.from_lists(tokens(one.one, 5, 3))
    given = (one.one.params, dstate)
    most = one.draft.most_steps
    with pytest.raises(ValueError, match=f"{most + 1} steps, and a block of this draft has {most}"):
        one.draft.propose(*given, carry, most + 1)
    with pytest.raises(ValueError, match="propose: steps must be at least 1"):
        one.draft.propose(*given, carry, 0)
    with pytest.raises(fm.StateError, match="carry has 1 rows, the state has 2"):
        one.draft.propose(*given, carry.select(torch.tensor([0])), 2)
    with pytest.raises(ValueError, match=r"the output has no layers\.\d.*outputs=draft.outputs"):
        one.draft.extend(*given, fm.Output(out.logits, out.hidden, {}), batch, batch.tokens)
    wide = {name: torch.cat((x, x), 1) for name, x in out.extra.items()}
    with pytest.raises(ValueError, match="one residual stream of"):
        one.draft.extend(*given, fm.Output(out.logits, out.hidden, wide), batch, batch.tokens)
    with pytest.raises(ValueError, match="the output is of 8 tokens, the batch has 2"):
        one.draft.extend(*given, out, fm.Batch.from_lists([[1], [2]]), torch.tensor([1, 2]))
    with pytest.raises(fm.StateError, match="already holds tokens"):
        one.draft.init_state(state)


# Gradients


def test_gradients_reach_every_parameter() -> None:
    """Without `context` in the tree the projections' rows are read where they stand, and so are their gradients."""
    one = drafter("gated", 0)
    config = one.draft.config
    own = params.put(params.to(one.draft.params, dtype=torch.float64), "context", None)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(5, own.fc.weight.shape[1], generator=generator, dtype=torch.float64)
    x = torch.randn(3, config.hidden_size, generator=generator, dtype=torch.float64)

    def loss(tree: Any) -> Tensor:
        k, v = block.context_entries(config, tree, features, block.angles_at(config, torch.arange(5)))

        def attend(layer: int, q: Tensor, new_k: Tensor, new_v: Tensor) -> Tensor:
            keys, values = (torch.cat((a[:, layer], b)).mean(1) for a, b in ((k, new_k), (v, new_v)))
            return (torch.einsum("qhd,kd->qhk", q, keys)).softmax(-1) @ values

        hidden = block.block_hidden(config, tree, x, block.angles_at(config, torch.arange(5, 8)), attend)
        logits, _ = markov.corrected(tree.markov, hidden @ hidden.T, hidden, torch.tensor([1, 2, 3]), None)
        return logits.log_softmax(-1)[:, 1].sum()

    with torch.enable_grad():
        grads = torch.func.grad(loss)(own)
    assert all(leaf.abs().max() > 0 for leaf in params.leaves(grads))
    aim = params.tree_map(lambda leaf: torch.randn(leaf.shape, generator=generator, dtype=torch.float64), own)
    ahead, behind = (loss(params.tree_map(lambda a, d, s=s: a + s * d, own, aim)) for s in (1e-6, -1e-6))
    slope = sum((a * d).sum() for a, d in zip(params.leaves(grads), params.leaves(aim), strict=True))
    assert_close((ahead - behind) / 2e-6, slope, dtype=torch.float32, looser=10, reason="a difference over 1e-6")
