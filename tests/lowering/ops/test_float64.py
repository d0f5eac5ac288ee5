"""Float64 in is float64 inside: no op rounds to float32 on the way, in any kernel that takes the call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

import funcmodels as fm
import lowering
from lowering import OPS, LoweringError, Policy, ops
from lowering.kernel import REFERENCE, Kernel
from params import tree as trees
from params.tree import items, put
from tests.cases import CASES, DECODE_8, Case, Draw, delta, live
from tests.each import each
from tests.oracle import deepseek_v2, kimi_linear, qwen3_8_flash_next
from tests.oracle.qwen3_5 import KINDS, pair, tokens
from tests.tolerances import assert_close

STEP = 1e-6
"""Of the difference quotients. One rounding to float32 inside is 1e-7 of the value, so a tenth of the quotient."""

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
"""Torch's own forward-mode rules are scripted when the first of them is loaded."""

SKIPPED = (
    "write_pages", "embedding", "ngram_rows", "rotary_angles", "mrope_angles", "keep_top", "draw", "yarn_angles",
    "expand_blocks", "greedy_markov_token", "greedy_token", "index_keys", "index_scores_topk",
    # New latents are in pages and beside them, and kernels read either: test_mla_ops.py has these ops in float64.
    "mla_prefix_attention", "latent_norm_rope_write", "write_latents",
    # These exchange between ranks: tests/sharding runs them.
    "all_gather", "all_reduce", "from_first",
)  # fmt: skip
PAIRS = [
    (case, kernel)
    for case in CASES
    if not (case.bench or case.quantized or case.name == "empty" or case.op in SKIPPED or "two_chunks" in case.name)
    for kernel in OPS[case.op].serving("cpu")
]


def widened(case: Case) -> tuple[list[Any], dict[str, Any], list[int]]:
    """The arguments in float64, and which of them are floating-point tensors."""
    args, kwargs = case.arguments()
    floating = [at for at, x in enumerate(args) if isinstance(x, Tensor) and x.is_floating_point()]
    return [x.double() if at in floating else x for at, x in enumerate(args)], kwargs, floating


def results(case: Case, args: list[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    leaves = pytree.tree_leaves(live(case.op, OPS[case.op](*args, **kwargs)))
    return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def refused(case: Case, kernel: Kernel) -> bool:
    args, kwargs, _ = widened(case)
    return kernel.refuse is not None and kernel.refuse(*args, **kwargs) is not None


@each(PAIRS, by=lambda case, kernel: case.op, hooked=lambda case, kernel: [case.op, (case.op, kernel.name)])
def test_difference_quotients_are_those_of_float64(case: Case, kernel: Kernel) -> None:
    """A central difference over a step of 1e-6 is the derivative, which it is not after a rounding to float32."""
    if refused(case, kernel):
        return
    args, kwargs, floating = widened(case)
    generator = torch.Generator().manual_seed(2)
    directions = {at: torch.randn(args[at].shape, generator=generator, dtype=torch.float64) for at in floating}

    def moved(by: float) -> list[Any]:
        return [x + by * directions[at] if at in floating else x for at, x in enumerate(args)]

    with lowering.use(Policy({case.op: kernel.name})):
        ahead, behind = (results(case, moved(step), kwargs) for step in (STEP, -STEP))
    assert all(x.dtype == torch.float64 for x in ahead)

    def along(*given: Tensor) -> list[Tensor]:
        full = dict(enumerate(args)) | dict(zip(floating, given, strict=True))
        return results(case, [full[at] for at in range(len(args))], kwargs)

    with lowering.use(Policy({case.op: REFERENCE})):
        inputs = tuple(args[at] for at in floating)
        slopes = torch.func.jvp(along, inputs, tuple(directions[at] for at in floating))[1]
    reason = "a central difference in float64 with step 1e-6"
    quotients = [(x - y) / (2 * STEP) for x, y in zip(ahead, behind, strict=True)]
    assert_close(quotients, list(slopes), dtype=torch.float32, length=case.length, looser=10, reason=reason)


@pytest.mark.parametrize("kernel", ["torch_step", REFERENCE])
@pytest.mark.parametrize("given", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("held", [torch.float64, torch.float32, torch.bfloat16])
def test_the_delta_state_may_have_a_dtype_of_its_own(kernel: str, given: torch.dtype, held: torch.dtype) -> None:
    """Wider than the inputs or narrower; the result is rounded once, to the dtypes given."""
    (*inputs, state, start), kwargs = delta(DECODE_8, 2, 4, 8, 12, state=True, keep_steps=False)(Draw(torch.float64))
    inputs = [x.to(given) for x in inputs]
    with lowering.use(gated_delta_rule=kernel):
        out, after, _ = ops.gated_delta_rule(*inputs, state.to(held), start, **kwargs)
    assert (out.dtype, after.dtype) == (given, held)
    wide = [x.double() for x in (*inputs, state.to(held))]
    expected = ops.gated_delta_rule.body(*wide, start, **kwargs)
    narrow = torch.float32 if torch.float64 not in (given, held) else torch.float64
    for found, right, dtype in ((out, expected[0], given), (after[:-1], expected[1][:-1], held)):
        kind = dtype if dtype != torch.float64 else narrow
        assert_close(found, right, dtype=kind, length=8)


def test_packed_weights_refuse_float64_in_a_sentence() -> None:
    """oneDNN has no float64."""
    x, weight = torch.randn(3, 1024, dtype=torch.float64), torch.randn(1024, 1024, dtype=torch.float64)
    assert ops.linear.kernels["onednn_packed"].prepare(weight) is None  # type: ignore[misc]
    assert "packs none of torch.float64" in ops.linear.explain(x, weight).refused["onednn_packed"]
    with lowering.use(linear="onednn_packed"), pytest.raises(LoweringError, match=r"packs none of torch\.float64"):
        ops.linear(x, weight)


def forward(model: Any, tree: Any, state: Any, ids: list[list[int]]) -> tuple[Tensor, Any]:
    out, state = model.forward(tree, state, fm.Batch.from_lists(ids, state, vocab=model.config.vocab_size))
    return out.logits, state


@pytest.mark.parametrize("recurrent", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_a_float64_model_prefills_and_decodes(kind: str, recurrent: torch.dtype) -> None:
    """As without a state: chunks, then steps, then one forward of all. A float32 state costs float32 rounding."""
    one = pair(kind, 0)
    tree = one.model.init_params(3, torch.float64)
    (ids,) = tokens(one, 40, seed=1)
    whole, _ = forward(one.model, tree, None, [ids])
    state, found = one.model.init_state(1, 64, dtype=torch.float64, recurrent_dtype=recurrent, page_size=8), []
    for piece in (ids[:33], ids[33:37], *([token] for token in ids[37:])):
        logits, state = forward(one.model, tree, state, [piece])
        found.append(logits)
    assert whole.dtype == found[0].dtype == torch.float64
    reason = "roundings of every layer add up, and norms of small values magnify them"
    assert_close(torch.cat(found), whole, dtype=recurrent, looser=20, reason=reason)


@pytest.mark.parametrize("family", [kimi_linear, deepseek_v2, qwen3_8_flash_next], ids=lambda family: family.__name__)
def test_one_argument_makes_all_float64(family: Any, tmp_path: Path) -> None:
    """Leaves that families want in float32, states, and what is read again as it is stored; bfloat16 leaves them so."""
    one, draw = family.pair(*getattr(family, "KINDS", ())[:1], 0), Draw(torch.float64)
    exact = trees.tree_map(lambda leaf: draw.normal(*leaf.shape), one.model.param_spec())
    fm.save(one.model, exact, tmp_path)
    for dtype in (torch.float64, None):
        model, found = fm.load(tmp_path, dtype=dtype)
        assert found == exact
        state = model.init_state(1, 16)
        _, after = forward(model, found, state, [[1, 2, 3]])
        kinds = {leaf.dtype for part in (found, state.layers, after.layers) for leaf in trees.leaves(part)}
        assert {kind for kind in kinds if kind.is_floating_point} == {torch.float64}
    model, found = fm.load(tmp_path, dtype=torch.bfloat16)
    pinned = {path for path, leaf in items(model.param_spec()) if leaf.dtype == torch.float32}
    assert pinned == {path for path, leaf in items(found) if leaf.dtype == torch.float32}
    state = model.init_state(1, 16)
    assert {leaf.dtype for leaf in trees.leaves(state.layers)} <= {torch.float32, torch.int64}


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_change_of_any_weight_reaches_float64_logits(kind: str) -> None:
    """By 1e-9 of it, in prefill and decoding; a float32 inside would round the change away."""
    one = pair(kind, 0)
    tree = one.model.init_params(3, torch.float64)
    (ids,) = tokens(one, 12, seed=1)

    def logits(given: Any) -> list[Tensor]:
        state = one.model.init_state(1, 64, dtype=torch.float64, recurrent_dtype=torch.float64)
        first, state = forward(one.model, given, state, [ids[:11]])
        return [first, forward(one.model, given, state, [ids[11:]])[0]]

    base = logits(tree)
    for path, leaf in items(tree):
        if leaf.dtype != torch.float64 or path.startswith("mtp."):
            continue
        step = 1e-9 * torch.randn(leaf.shape, dtype=leaf.dtype, generator=torch.Generator().manual_seed(1))
        for x, y, z in zip(
            logits(put(tree, path, leaf + step)), base, logits(put(tree, path, leaf - step)), strict=True
        ):
            change = (x - z).abs().max()
            assert 0 < change < 1e-4, path
            # Linear in so small a step: the two half changes are equal up to float64 rounding.
            assert ((x - y) - (y - z)).abs().max() <= 1e-3 * change + 1e-13 * y.abs().max(), path


def test_cases_of_float64_reach_every_kernel_that_takes_it() -> None:
    """So that no kernel is left out of the quotients unseen."""
    taken = {(case.op, kernel.name) for case, kernel in PAIRS if not refused(case, kernel)}
    every = {
        (name, kernel.name)
        for name, op in OPS.items()
        if name not in SKIPPED
        for kernel in op.serving("cpu")
        if not kernel.weights or Tensor in kernel.weights
    }
    assert every - taken <= {("linear", "onednn_packed")}
