"""Nodes of a kind that a place was not made for: applied as what they are, or refused. No field is passed over."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

import funcmodels as fm
import params
from funcmodels.attention.mla import UpProjection
from funcmodels.blocks.linear import BiasedLinear, Embedding, GemmaNorm, Linear, Norm
from funcmodels.blocks.mlp import BiasedRouter, Mlp
from lowering import ops
from params.tree import tree, unchecked
from tests import tiny
from tests.models import test_qwen3
from tests.oracle import block_drafts, deepseek_v2, gemma3, kimi_k3, kimi_linear, qwen3_5, qwen3_8_flash_next
from tests.tolerances import assert_close

MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20}
CONFIGS: dict[str, Callable[[], dict[str, Any]]] = {
    "qwen3_5": lambda: {"model_type": "qwen3_5_text", **tiny.SIZES, "mtp_num_hidden_layers": 1},
    "qwen3_5_moe": lambda: {"model_type": "qwen3_5_moe_text", **tiny.SIZES, **MOE},
    "gemma3": lambda: {"model_type": "gemma3_text", **gemma3.sizes(1)},
    "qwen3": lambda: test_qwen3.sizes(0),
    "deepseek_v2": lambda: {"model_type": "deepseek_v2", **deepseek_v2.sizes("full", 0)},
    "kimi_linear": lambda: {"model_type": "kimi_linear", **kimi_linear.sizes("published", 0)},
    "kimi_k3": lambda: kimi_k3.sizes(0),
    "flash_next": lambda: {
        "model_type": "qwen4_exp_text", **qwen3_8_flash_next.sizes(0), "mtp_num_hidden_layers": 1,
    },
}  # fmt: skip
WEIGHT_ALONE = re.compile(
    r"(^|\.)(head|embed)$"  # greedy choices read these as they are
    r"|\.attn\.up$"  # attention over latents reads it as it is
    r"|\.mlp\.router$"  # those of float32, and those with a bias that is no logit's
)
"""Places whose weights ops read alone, so that another kind of node is refused there."""

families = pytest.mark.parametrize("family", CONFIGS)


@functools.cache
def made(family: str) -> tuple[fm.Model, Any]:
    """A tiny model and its parameters, none of them trivial."""
    model = fm.build(CONFIGS[family]())
    generator = torch.Generator().manual_seed(0)
    tree = model.init_params(0, torch.float32)
    return model, params.tree_map(lambda x: x + torch.randn(x.shape, generator=generator, dtype=x.dtype) / 9, tree)


def run(model: fm.Model, tree: Any) -> list[Tensor]:
    """Logits of a model: of a batch alone, of prompts and a step after; and those of its draft head."""
    batch = fm.Batch.from_lists([[3, 1, 4], [1, 5]])
    out, _ = model.forward(tree, None, batch)
    found, state = [out.logits], model.init_state(2, 16, page_size=8)
    for ids in ([[3, 1, 4], [1, 5]], [[9], [2]]):
        step, state = model.forward(tree, state, fm.Batch.from_lists(ids, state))
        found.append(step.logits)
    if getattr(tree, "mtp", None) is not None:
        found.append(fm.draft(model, "mtp").forward(tree, None, batch, out.hidden)[0].logits)
    return found


def places(tree: Any, *kinds: type) -> Iterator[tuple[str, Any]]:
    """Paths and nodes of these kinds, of one layer of each structure."""
    seen = set()
    for path, node in params.items(tree, is_leaf=lambda node: isinstance(node, kinds)):
        if isinstance(node, kinds):
            layer = re.match(r"(mtp\.)?layers\.\d+", path)
            kind = (path[layer.end() :], repr(pytree.tree_structure(params.at(tree, layer[0])))) if layer else path
            if kind not in seen:
                seen.add(kind)
                yield path, node


def unless_refused(kind: type, call: Callable[..., Any], *args: Any) -> Any:
    """What a call gives; None where it says that it does not read such a node."""
    try:
        return call(*args)
    except TypeError as error:
        if f"a {kind.__name__} (weight" not in str(error):
            raise
        return None


@pytest.mark.plain
@families
def test_a_bias_is_added_or_refused_wherever_there_is_a_projection(family: str, monkeypatch: Any) -> None:
    """As if every product with that weight had the bias added to it."""
    model, tree = made(family)
    linear, plain, refused = ops.linear, run(model, tree), []
    for path, node in places(tree, Linear, UpProjection, BiasedRouter, Embedding):
        bias = torch.randn(node.weight.shape[0], generator=torch.Generator().manual_seed(1), dtype=node.weight.dtype)
        found = unless_refused(BiasedLinear, run, model, params.put(tree, path, BiasedLinear(node.weight, bias)))
        if found is None:
            refused.append(path)
            continue

        def biased(x: Tensor, weight: Any, read: Any = node.weight, bias: Tensor = bias) -> Tensor:
            return linear(x, weight) + bias if weight is read else linear(x, weight)

        more = params.put(tree, path, Linear(node.weight)) if type(node) is BiasedLinear else tree
        with monkeypatch.context() as patch:
            patch.setattr(ops, "linear", biased)
            assert_close(found, run(model, more), looser=5, reason="sums in another order")
        assert any(not torch.equal(a, b) for a, b in zip(found, plain, strict=True)), path
    of_scores = ("mlp.router",) if family in ("deepseek_v2", "kimi_linear", "kimi_k3") else ()
    assert all(WEIGHT_ALONE.search(path) and (of_scores or "router" not in path) for path in refused), refused
    assert {"embed"} <= set(refused) and (tree.head is None or "head" in refused)


@pytest.mark.plain
@families
def test_a_norm_is_what_its_node_says(family: str) -> None:
    """A weight in a node that adds one to it, and one less in a node that does: the same logits, or refused."""
    model, tree = made(family)
    plain, applied = run(model, tree), []
    for path, node in places(tree, Norm):
        other = Norm(node.weight + 1) if type(node) is GemmaNorm else GemmaNorm(node.weight - 1)
        found = unless_refused(type(other), run, model, params.put(tree, path, other))
        if found is not None:
            applied.append(path)
            assert_close(found, plain, looser=20, reason="1 + (w - 1) is not w")
    assert family == "flash_next" or {"norm", "layers.0.input_norm"} <= set(applied)


@pytest.mark.parametrize("variant", ["dflash", "gated"])
def test_a_block_draft_refuses_what_it_does_not_read(variant: str) -> None:
    """Where it reads a bias the tokens' law changes."""

    def law(own: Any) -> Any:
        draft = type(one.draft)(one.one.model, one.draft.config, own)
        changed = block_drafts.Drafter(one.one, draft, one.fields, one.tensors)
        noise = fm.DraftNoise(fm.RowSampling.of([fm.Sampling(1.0)]), torch.arange(1))
        _, state, carry, _ = block_drafts.begun(changed, [[5, 3, 2, 4]])
        return draft.propose(one.one.params, state, carry, 2, noise)[0].logits

    one = block_drafts.build(qwen3_5.pair("dense", 0), variant, 0)
    own = one.draft.params
    plain, refused = law(own), set()
    for path, node in places(own, Linear):
        bias = torch.randn(node.weight.shape[0], generator=torch.Generator().manual_seed(1))
        found = unless_refused(BiasedLinear, law, params.put(own, path, BiasedLinear(node.weight, bias)))
        if found is None:
            refused.add(path)
        else:
            assert not torch.equal(found, plain), path
    expected = {"context", "layers.0.attn.qkv"} | ({"markov.w2"} if variant == "gated" else set())
    assert refused == expected


def test_a_node_is_extended_only_where_its_readers_ask_which_it_is() -> None:
    """Of a kind that they do not know they say so."""
    with pytest.raises(TypeError, match=r"Scaled: what reads a Mlp would not read scale; make it a tree of its own"):

        @tree
        class Scaled(Mlp):
            scale: Tensor

    @tree
    class Odd(BiasedLinear):
        scale: Tensor

    model, ours = made("gemma3")
    node = ours.layers[0].mlp.down
    odd = unchecked(Odd, weight=node.weight, bias=torch.zeros(node.weight.shape[0]), scale=torch.ones(1))
    with pytest.raises(TypeError, match=r"a Odd \(weight, bias, scale\) stands where a Linear \(weight\) is read"):
        run(model, params.put(ours, "layers.0.mlp.down", odd))
