"""Every op under vmap, grad, tracing and on tensors without values; and with arguments that are strided views."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import lowering
from lowering import OPS, Policy
from lowering.op import REFERENCE
from tests.cases import CASES, Case, cases_of, live
from tests.each import each
from tests.tolerances import assert_close

SKIPPED = ("two_chunks", "idle_first", "uniform", "8_2_256", "many_choices")
SMALL = [case for case in CASES if not case.bench and not any(name in case.name for name in SKIPPED)]
IN_PLACE = ("index_keys", "latent_norm_rope_write", "write_latents", "write_pages")
PAGED = ("block_attention", "paged_attention")
"""Ops whose cases hold NaN in every page that their page ids do not name."""
OUT_OF_PLACE = [case for case in SMALL if case.op not in IN_PLACE]


def op_of(case: Case) -> str:
    """What is one test: an op."""
    return case.op


def form(case: Case) -> list[str]:
    """What is checked once in a hooked run: a case whatever its sizes."""
    return [re.sub(r"[\d_]+", " ", str(case))]


def split(case: Case, chosen: Callable[[Tensor], bool], seed: int = 0) -> tuple[list[Tensor], Callable[..., Any]]:
    """The chosen tensors of a call, and the call as a function from them to its tensors."""
    args, kwargs = case.arguments(seed=seed)
    leaves, structure = pytree.tree_flatten(args)
    at = [index for index, x in enumerate(leaves) if isinstance(x, Tensor) and chosen(x)]

    def call(*given: Tensor) -> Any:
        full = list(leaves)
        for index, x in zip(at, given, strict=True):
            full[index] = x
        result = OPS[case.op](*pytree.tree_unflatten(full, structure), **kwargs)
        return [x for x in pytree.tree_leaves(live(case.op, result)) if x is not None]

    return [leaves[index] for index in at], call


def floating(x: Tensor) -> bool:
    """Whether a gradient can reach it."""
    return x.is_floating_point()


def tensors(value: Any) -> list[Tensor]:
    """Floating-point leaves of a result."""
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor) and x.is_floating_point()]


@each(OUT_OF_PLACE, by=op_of, hooked=form)
def test_vmap_maps_an_op(case: Case) -> None:
    """Two calls with other values, mapped: each equals its own call. No operator falls back to a loop and warns."""
    first, call = split(case, floating, seed=0)
    second, _ = split(case, floating, seed=1)
    if case.op in PAGED:
        second = [first[0] * 2, *first[1:]]  # The rows' page ids are not mapped, and differ by seed.
    if not first:
        return
    stacked = [torch.stack(pair) for pair in zip(first, second, strict=True)]
    mapped = torch.func.vmap(call)(*stacked)
    for index, given in enumerate((first, second)):
        one = pytree.tree_map(lambda x, index=index: x[index], mapped)
        assert_close(tensors(one), tensors(call(*given)), length=case.length)


DIFFERENTIABLE = [
    # A difference quotient and forward mode are compared in float32, which a bfloat16 state is not.
    case
    for case in OUT_OF_PLACE
    if case.op
    not in (
        "draw",
        "expand_blocks",
        "greedy_markov_token",
        "greedy_token",
        "index_scores_topk",
        "keep_top",
        "ngram_rows",
        "rotary_angles",
        "mrope_angles",
        "yarn_angles",
    )
    # New latents are in the pages and beside them, and kernels read either: test_mla_ops.py differentiates both.
    and case.op != "mla_prefix_attention"
    and case.name != "empty"
    and not case.quantized
    and "bf16" not in case.name
]


@each(DIFFERENTIABLE, by=op_of, hooked=form)
def test_grad_reaches_every_input(case: Case) -> None:
    """Through the kernel chosen by default, through the reference, by autograd; and along a difference quotient."""
    inputs, call = split(case, lambda x: x.is_floating_point() and not bool(x.isnan().any()))
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator) for x in tensors(call(*inputs))]
    directions = [torch.randn(x.shape, generator=generator) for x in inputs]

    def loss(*given: Tensor) -> Tensor:
        return torch.stack([(x * w).sum() for x, w in zip(tensors(call(*given)), weights, strict=True)]).sum()

    every = tuple(range(len(inputs)))
    found = torch.func.grad(loss, every)(*inputs)
    with lowering.use(Policy({case.op: REFERENCE})):
        expected = torch.func.grad(loss, every)(*inputs)
        ahead, behind = (
            loss(*(x + step * d for x, d in zip(inputs, directions, strict=True))) for step in (1e-2, -1e-2)
        )
    leaves = [x.clone().requires_grad_() for x in inputs]
    eager = torch.autograd.grad(loss(*leaves), leaves, allow_unused=True, materialize_grads=True)
    steepness = torch.stack([x.square().sum() for x in expected]).sum().sqrt()
    reason = "gradients sum over the whole output; those that vanish do so by cancelling"
    for other in (found, eager):
        assert_close(other, expected, length=case.length, scale=1e-2 * float(steepness), reason=reason)
    slope = torch.stack([(x * d).sum() for x, d in zip(expected, directions, strict=True)]).sum()
    reason = "a central difference in float32 with step 0.01"
    assert_close((ahead - behind) / 2e-2, slope, looser=500, scale=float(steepness), reason=reason)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@each(DIFFERENTIABLE, by=op_of, hooked=form)
def test_jvp_agrees_with_grad(case: Case) -> None:
    """Forward mode along a direction is reverse mode's inner product with it, through the kernels chosen by default."""
    inputs, call = split(case, lambda x: x.is_floating_point() and not bool(x.isnan().any()))
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator) for x in tensors(call(*inputs))]
    directions = tuple(torch.randn(x.shape, generator=generator) for x in inputs)

    def loss(*given: Tensor) -> Tensor:
        return torch.stack([(x * w).sum() for x, w in zip(tensors(call(*given)), weights, strict=True)]).sum()

    slope = torch.func.jvp(loss, tuple(inputs), directions)[1]
    gradients = torch.func.grad(loss, tuple(range(len(inputs))))(*inputs)
    expected = torch.stack([(x * d).sum() for x, d in zip(gradients, directions, strict=True)]).sum()
    steepness = float(torch.stack([x.square().sum() for x in gradients]).sum().sqrt())
    reason = "both sum over the whole output, which may cancel"
    assert_close(slope, expected, length=case.length, looser=20, scale=steepness, reason=reason)


@each(SMALL, by=op_of, hooked=form)
def test_fake_tensors_pass_without_a_host_read(case: Case) -> None:
    """`make_fx` captures the op; replayed on other values, the graph gives what the op gives on those."""
    first, call = split(case, lambda x: True)
    second, _ = split(case, floating, seed=1)
    graph = make_fx(call, tracing_mode="fake")(*first)
    values = iter(second)
    others = [next(values) if x.is_floating_point() else x for x in first]
    if case.op in PAGED:
        others = first
    expected = call(*(x.clone() for x in others))
    assert_close(tensors(graph(*(x.clone() for x in others))), tensors(expected), length=case.length)


@each(SMALL, by=op_of, hooked=form)
def test_meta_tensors_give_shapes(case: Case) -> None:
    """Same shapes and dtypes as a run, and nothing computed."""
    inputs, call = split(case, lambda x: True)
    found, expected = pytree.tree_leaves(call(*(x.to("meta") for x in inputs))), pytree.tree_leaves(call(*inputs))
    for x, y in zip(found, expected, strict=True):
        assert (x.shape, x.dtype, x.device.type) == (y.shape, y.dtype, "meta")


def strided(x: Tensor) -> Tensor:
    """The same values as a view with gaps in its last and first axes."""
    holes = x.new_zeros([2 * size for size in x.shape])
    view = holes[tuple(slice(1, None, 2) for _ in x.shape)]
    view.copy_(x)
    return view


@pytest.mark.plain
@each(SMALL, by=op_of)
def test_strided_arguments(case: Case) -> None:
    """Each tensor argument in turn as a non-contiguous view, through every kernel that takes the call."""
    args, kwargs = case.arguments()
    for kernel in OPS[case.op].serving("cpu"):
        if kernel.refuse is not None and kernel.refuse(*args, **kwargs) is not None:
            continue
        for index, x in enumerate(args):
            if not isinstance(x, Tensor):
                continue
            if case.op in ("index_keys", "write_pages") and index < 2:
                continue
            given = [y.clone() if isinstance(y, Tensor) else y for y in args]
            given[index] = strided(x)
            with lowering.use(Policy({case.op: kernel.name})):
                found = OPS[case.op](*given, **kwargs)
                expected = OPS[case.op](*(y.clone() if isinstance(y, Tensor) else y for y in args), **kwargs)
            assert_close(tensors(live(case.op, found)), tensors(live(case.op, expected)), length=case.length)


def test_kernels_without_batching_rules_are_left_out_under_vmap() -> None:
    """Without a warning; asking for one by name is an error there."""
    inputs, call = split(cases_of("attention")[0], floating)
    stacked = [torch.stack((x, x)) for x in inputs]
    with lowering.record() as report:
        torch.func.vmap(call)(*stacked)
        call(*inputs)
    assert [row.kernel for row in report.rows] == [REFERENCE, "torch_sdpa"]
    assert "vmap" in report.rows[0].refused["torch_sdpa"]
    with lowering.use(attention="torch_sdpa"), pytest.raises(lowering.LoweringError, match="no batching rule"):
        torch.func.vmap(call)(*stacked)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_kernels_without_forward_derivatives_are_left_out_under_jvp() -> None:
    """Also where jvp and vmap meet; reverse mode and plain calls keep them."""
    inputs, call = split(cases_of("attention")[0], floating)

    def first(*given: Tensor) -> Tensor:
        return call(*given)[0]

    def summed(*given: Tensor) -> Tensor:
        return first(*given).sum()

    with lowering.record() as report:
        torch.func.jvp(call, tuple(inputs), tuple(inputs))
        torch.func.jacfwd(first)(*inputs)
        torch.func.grad(summed)(*inputs)
    assert [row.kernel for row in report.rows] == [REFERENCE, REFERENCE, "torch_sdpa"]
    assert "no forward derivative, so it is left out under jvp" in report.rows[0].refused["torch_sdpa"]
    with lowering.use(attention="torch_sdpa"), pytest.raises(lowering.LoweringError, match="no forward derivative"):
        torch.func.jvp(call, tuple(inputs), tuple(inputs))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
def test_kernels_with_one_derivative_are_left_out_where_another_is_taken() -> None:
    """In forward mode without a transform's level, as `linearize` traces it, and where gradients are nested."""
    inputs, call = split(cases_of("attention")[0], floating)

    def summed(q: Tensor) -> Tensor:
        return call(q, *inputs[1:])[0].sum()

    def within(transform: Callable[[], Any]) -> set[str]:
        with lowering.record() as report:
            transform()
        return {row.kernel for row in report.rows}

    q = inputs[0]
    assert within(lambda: torch.func.grad(lambda x: torch.func.grad(summed)(x).sum())(q)) == {REFERENCE}
    assert within(lambda: torch.func.grad(summed)(q.clone().requires_grad_())) == {REFERENCE}
    # The value is that of a plain call.
    assert within(lambda: torch.func.linearize(summed, q)) == {REFERENCE, "torch_sdpa"}
    with forward_ad.dual_level():
        assert within(lambda: summed(forward_ad.make_dual(q, q))) == {REFERENCE}


def test_packed_weights_are_refused_under_every_gradient() -> None:
    """oneDNN's product has no derivative, and autograd would leave x without one."""
    x, weight = torch.randn(3, 1024), torch.randn(1024, 1024)
    packed = OPS["linear"].kernels["onednn_packed"].prepare(weight)  # type: ignore[misc]

    def product(x: Tensor) -> Tensor:
        return OPS["linear"](x, packed).sum()

    message = "PackedWeight, which only the kernel it was prepared for can read"
    for run in (
        lambda: product(x.clone().requires_grad_()),
        lambda: torch.func.grad(product)(x),
        lambda: torch.func.vmap(product)(x),
        lambda: torch.func.jvp(product, (x,), (x,)),
    ):
        with pytest.raises(lowering.LoweringError, match=message):
            run()
    with lowering.record() as report, torch.no_grad():
        product(x.clone().requires_grad_())
        product(x)
    assert [(row.kernel, row.count) for row in report.rows] == [("onednn_packed", 2)]


def test_kernels_that_read_the_host_are_left_out_while_tracing() -> None:
    """The graph holds no constants of this batch's lengths."""
    case = next(case for case in cases_of("paged_attention") if "ragged" in case.name)
    inputs, call = split(case, lambda x: True)
    with lowering.record() as report:
        make_fx(call, tracing_mode="fake")(*inputs)
        call(*(x.to("meta") for x in inputs))
        call(*inputs)
    assert [row.kernel for row in report.rows] == [REFERENCE, REFERENCE, "torch_rows"]
    assert "tracing" in report.rows[0].refused["torch_rows"]
    assert "without values" in report.rows[1].refused["torch_rows"]


def test_a_strided_pool_is_an_error_not_a_lost_write() -> None:
    """The pool is written in place; a reshaped copy of it would take the write and be dropped."""
    args, _ = cases_of("write_pages")[0].arguments()
    with pytest.raises(RuntimeError, match="view"):
        OPS["write_pages"](strided(args[0]), *args[1:])
