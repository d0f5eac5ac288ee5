"""Every family under `torch.func`, beside difference quotients; exported; and compiled by `torch.compile`."""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.autograd import forward_ad
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import funcmodels as fm
import lowering
import params as trees
from tests.sharding.kinds import KINDS, whole

pytestmark = [
    pytest.mark.plain,
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
    # Of `linearize` itself, and of the one fused kernel's backward, mapped by `jacrev`.
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]

STEP = 1e-6
Scalar = Callable[[Tensor], Tensor]


def forward_mode(f: Scalar, at: Tensor, along: Tensor) -> Tensor:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(at, along))).tangent
    assert tangent is not None
    return tangent


def beneath(f: Scalar, at: Tensor, along: Tensor) -> Tensor:
    """The gradient of a transform's gradient, by autograd."""
    at = at.clone().requires_grad_()
    return torch.autograd.grad(grad(f)(at) @ along, at)[0]


FIRST: dict[str, Callable[[Scalar, Tensor, Tensor], Tensor]] = {
    "grad": lambda f, x, d: grad(f)(x) @ d,
    "vjp": lambda f, x, d: vjp(f, x)[1](x.new_ones(()))[0] @ d,
    "jvp": lambda f, x, d: jvp(f, (x,), (d,))[1],
    "jacrev": lambda f, x, d: jacrev(f)(x) @ d,
    "jacfwd": lambda f, x, d: jacfwd(f)(x) @ d,
    "dual level": forward_mode,
    "functionalize(grad)": lambda f, x, d: functionalize(grad(f))(x) @ d,
    "grad(vmap)": lambda f, x, d: grad(lambda x: vmap(f)(torch.stack((x, x))).sum())(x) @ d / 2,
    "vmap(grad)": lambda f, x, d: vmap(grad(f))(torch.stack((x, 0 * x, x)))[2] @ d,
    "linearize(vmap)": lambda f, x, d: linearize(vmap(f), torch.stack((x, 0 * x)))[1](torch.stack((d, d)))[0],
}
SECOND: dict[str, Callable[[Scalar, Tensor, Tensor], Tensor]] = {
    "hessian": lambda f, x, d: hessian(f)(x) @ d,
    "grad(grad)": lambda f, x, d: grad(lambda x: grad(f)(x) @ d)(x),
    "jacrev(jacrev)": lambda f, x, d: jacrev(jacrev(f))(x) @ d,
    "jacfwd(jacfwd)": lambda f, x, d: jacfwd(jacfwd(f))(x) @ d,
    "grad(jvp)": lambda f, x, d: grad(lambda x: jvp(f, (x,), (d,))[1])(x),
    "jvp(grad)": lambda f, x, d: jvp(grad(f), (x,), (d,))[1],
    "vjp(grad)": lambda f, x, d: vjp(grad(f), x)[1](d)[0],
    "vmap(hessian)": lambda f, x, d: vmap(hessian(f))(torch.stack((0 * x, x)))[1] @ d,
    "autograd over grad": beneath,
}


OF_ALL = ("vmap(grad)", "grad(grad)", "jvp(grad)")
"""Those that every family goes through; one family goes through the others too."""


LONG = ("kimi_linear", "kimi_k3", "flash_next")
"""Families whose second derivatives take seconds."""


def made(kind: str) -> tuple[fm.Model, Any]:
    """The model of a kind and random parameters; where layers are listed, of the first two."""
    fields = KINDS[kind]
    if "layer_types" not in fields:
        return whole(kind)
    model = fm.build(fields | {"num_hidden_layers": 2, "layer_types": fields["layer_types"][:2]})
    draw = torch.Generator().manual_seed(7)
    return model, trees.tree_map(
        lambda leaf: torch.randn(leaf.shape, generator=draw) * max(leaf.shape[-1], 4) ** -0.5, model.init_params()
    )


def loss_of(kind: str) -> Scalar:
    """A scalar of two numbers that move the first norm of a model along drawn directions, in float64."""
    model, params = made(kind)
    params = trees.to(params, dtype=torch.float64)
    leaf = next(path for path, _ in trees.items(params) if path.startswith("layers.0") and path.endswith("norm.weight"))
    start = trees.at(params, leaf)
    draw = torch.Generator().manual_seed(2)
    ways = torch.randn(2, *start.shape, generator=draw, dtype=torch.float64) / 8
    weights = torch.randn(4, model.config.vocab_size, generator=draw, dtype=torch.float64)
    batch = fm.Batch.from_lists([[1, 2, 3], [7]])

    def loss(numbers: Tensor) -> Tensor:
        moved = trees.put(params, leaf, start + numbers @ ways)
        return (model.forward(moved, None, batch)[0].logits * weights).tanh().sum()

    return loss


AT, ALONG = torch.tensor([0.2, -0.3]).double(), torch.tensor([0.7, 0.4]).double()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.sweep) if kind in LONG else kind for kind in KINDS]
)
def test_derivatives_are_those_of_difference_quotients(kind: str) -> None:
    """Whatever is nested, no kernel is chosen that lacks the derivative, and nobody has to ask for another."""
    f = loss_of(kind)
    slope = (f(AT + STEP * ALONG) - f(AT - STEP * ALONG)) / (2 * STEP)
    bend = (grad(f)(AT + STEP * ALONG) - grad(f)(AT - STEP * ALONG)) / (2 * STEP)
    for expected, transforms in ((slope, FIRST), (bend, SECOND)):
        for name in transforms if kind == "gemma3" else transforms.keys() & set(OF_ALL):
            found = transforms[name](f, AT, ALONG)
            assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6 * float(bend.abs().max())), name


def create_graph(f: Scalar) -> Any:
    at = AT.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(f(at), at, create_graph=True)
    return torch.autograd.grad(gradient @ ALONG, at)[0]


@pytest.mark.parametrize("later", [create_graph, lambda f: jacfwd(vjp(f, AT)[1])(AT.new_ones(()))[0]])
def test_a_derivative_that_is_asked_for_too_late_names_the_way_round(later: Callable[[Scalar], Tensor]) -> None:
    """When the kernel was chosen nobody could know."""
    f = loss_of("gemma3")
    with pytest.raises(lowering.LoweringError, match=r'torch_sdpa.*lowering.use\(attention="torch"\)'):
        later(f)
    with lowering.use(attention="torch"):
        found = later(f)
    expected = hessian(f)(AT) @ ALONG if later is create_graph else grad(f)(AT)
    torch.testing.assert_close(found, expected)


# Programs


def logits(model: fm.Model) -> torch.nn.Module:
    """A forward without a state as what `torch.export` takes."""

    class Logits(torch.nn.Module):
        def forward(self, params: Any, batch: fm.Batch) -> Tensor:
            return model.forward(params, None, batch)[0].logits

    return Logits()


EXPORTED = [("qwen_dense", False), ("qwen_dense", True), ("kimi_k3", False), ("flash_next", False)]
"""Families between which all kernels stand that go over tokens, and whether the export is strict."""


@pytest.mark.compile
@pytest.mark.parametrize(
    ("kind", "strict"),
    [*EXPORTED, *(pytest.param(kind, strict, marks=pytest.mark.sweep)
                  for kind in KINDS for strict in (False, True) if (kind, strict) not in EXPORTED)],
)  # fmt: skip
def test_an_exported_forward_takes_other_batches(kind: str, strict: bool) -> None:
    """Any number of tokens within the bound that the batch's `max_query` is; and the same again from its file."""
    model, params = made(kind)

    def batch(count: int) -> fm.Batch:
        return fm.Batch.from_lists([list(range(1, count + 1)), [4, 5]]).pad(count + 2, max_query=20)

    example = batch(5)
    sizes: Any = torch.export.ShapesCollection()
    sizes[example.tokens] = {0: torch.export.Dim("tokens", min=3, max=40)}
    exported = torch.export.export(logits(model), (params, example), dynamic_shapes=sizes, strict=strict)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    for program in (exported, torch.export.load(file)):
        for given in map(batch, (1, 5, 20)):
            expected = model.forward(params, None, given)[0].logits
            torch.testing.assert_close(program.module()(params, given), expected, rtol=1e-4, atol=1e-5)


FRAMES = {"kimi_linear": 5, "kimi_k3": 5, "flash_next": 4}
"""Most compilations over all lengths, of families with kernels that work in blocks: one more a range of lengths."""


@pytest.mark.compile
@pytest.mark.parametrize(
    "kind",
    [kind if kind in ("gemma3", "flash_next") else pytest.param(kind, marks=pytest.mark.sweep) for kind in KINDS],
)
def test_a_compiled_forward_is_compiled_once_for_all_lengths(kind: str) -> None:
    """Once for the first one, and once for any; and again under another policy of this thread."""
    model, params = made(kind)
    torch._dynamo.reset()  # what other families compiled counts towards the most of one function
    counter = CompileCounter()
    compiled = torch.compile(model.forward, fullgraph=True, backend=counter)
    for count in (5, 9, 20, 8, 31, *range(10, 25)):
        batch = fm.Batch.from_lists([[token % 60 for token in range(count)], [4, 5]])
        found, expected = (run(params, None, batch)[0].logits for run in (compiled, model.forward))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert 2 <= counter.frame_count <= FRAMES.get(kind, 2)
    if kind != "gemma3":
        return
    other = lowering.use(attention="torch")
    with ThreadPoolExecutor(1) as thread:
        thread.submit(other.__enter__).result()
        compiled(params, None, fm.Batch.from_lists([[1, 2, 3, 4, 5], [4, 5]]))
        thread.submit(other.__exit__, None, None, None).result()
    assert counter.frame_count == 2
    with lowering.use(attention="torch"), lowering.record() as report:
        compiled(params, None, fm.Batch.from_lists([[1, 2, 3, 4, 5], [4, 5]]))
    assert counter.frame_count == 3
    assert {row.kernel for row in report.rows if row.op == "attention"} == {"torch"}
