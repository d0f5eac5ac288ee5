"""Shape checks in place: right calls pass unchanged, a wrong one fails at its function and says what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import funcmodels as fm
import lowering
import params
from funcmodels.attention import gqa
from funcmodels.blocks.linear import Linear
from funcmodels.state.step import begin
from funcmodels.testing.shape_checks import disable_shape_checks, enable_shape_checks, shape_checked
from lowering import OPS, Rows, ops
from lowering.kernel import Kernel
from tests.tiny import SIZES

pytestmark = pytest.mark.plain


@pytest.fixture
def checks() -> Iterator[None]:
    enable_shape_checks()
    yield
    disable_shape_checks()


def tokens(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


ROWS = Rows(torch.tensor([0, 3, 5]), max_query=3)

WRONG: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "width": (
        lambda: ops.rms_norm(tokens(5, 48), tokens(32), eps=1e-6),
        [
            "lowering.ops.norm.rms_norm: weight: axis 'dim' is 32, expected 48 as in x",
            "x: f32[5,48] for Float[Tensor, '*lead dim']",
        ],
    ),
    "lead": (
        lambda: ops.add_rms_norm(tokens(2, 5, 48), tokens(3, 5, 48), tokens(48), eps=1e-6),
        ["lowering.ops.norm.add_rms_norm: residual: axis '*lead' is [3, 5], expected [2, 5] as in x"],
    ),
    "token count": (
        lambda: ops.attention(tokens(5, 4, 8), tokens(5, 2, 8), tokens(4, 2, 8), ROWS, scale=1.0),
        ["lowering.ops.attention.attention: v: axis 'tokens' is 4, expected 5 as in q"],
    ),
    "rank": (
        lambda: ops.attention(tokens(5, 32), tokens(5, 2, 8), tokens(5, 2, 8), ROWS, scale=1.0),
        ["lowering.ops.attention.attention: q: shape is [5, 32], expected 3 axes: tokens heads head_dim"],
    ),
    "lead rank": (lambda: ops.rms_norm(tokens(), tokens(4), eps=1e-6), ["x: shape is [], expected 1 axes or more"]),
    "dtype": (
        lambda: ops.embedding(tokens(5), tokens(32, 4)),
        ["lowering.ops.linear.embedding: ids: dtype is torch.float32, expected Int"],
    ),
    "no tensor": (
        lambda: ops.embedding([1, 2], tokens(32, 4)),
        ["embedding: ids: expected a tensor, Int[Tensor, '*lead'], found list"],
    ),
    "named by keyword": (
        lambda: ops.rms_norm(weight=tokens(32), x=tokens(5, 48), eps=1e-6),
        ["weight: axis 'dim' is 32, expected 48 as in x"],
    ),
    "part of a tuple": (
        lambda: attention(rotary=(tokens(5, 2), tokens(5, 1))),
        ["funcmodels.attention.gqa.attention: rotary[1]: axis 'half' is 1, expected 2 as in rotary[0]"],
    ),
    "not a tuple": (
        lambda: attention(rotary=tokens(5, 2)),
        ["attention: rotary: f32[5,2] is not tuple[Float[Tensor, 'tokens half'], Float[Tensor, 'tokens half']]"],
    ),
    "of two shapes the one with as many axes": (
        lambda: delta_rule(decay=tokens(5, 2, 3)),
        ["gated_delta_rule: decay: axis 'k_dim' is 3, expected 4 as in q"],
    ),
    "beside another of two shapes": (
        lambda: delta_rule(decay=tokens(5, 2, 4), beta=tokens(5, 3)),
        [
            "beta: axis 'v_heads' is 3, expected 2 as in v",
            "decay: f32[5,2,4] for Float[Tensor, 'tokens v_heads k_dim']",
        ],
    ),
    "width of a layer": (
        lambda: attention(x=tokens(5, 40)),
        ["lowering.ops.linear.linear: weight: axis 'inputs' is 32, expected 40 as in x"],
    ),
    "batch axis too many": (
        lambda: attention(x=tokens(1, 5, 32)),
        ["attention: x: shape is [1, 5, 32], expected 2 axes: tokens hidden"],
    ),
}


def delta_rule(**changes: Any) -> Any:
    """The gated delta rule of two rows, 3 and 2 tokens, with some arguments replaced."""
    given = {"q": tokens(5, 2, 4), "k": tokens(5, 2, 4), "v": tokens(5, 2, 6), "decay": -tokens(5, 2).abs()}
    given |= {"beta": tokens(5, 2), "state": None, "rows": ROWS}
    return ops.gated_delta_rule(*(given | changes).values(), keep_steps=False)


def attention(**changes: Any) -> Tensor:
    """Gated attention of two rows, 3 and 2 tokens, with some arguments replaced."""
    weights = params.init(gqa.GatedAttention.spec(32, heads=4, kv_heads=2, head_dim=8))
    step = begin(None, fm.Batch.from_lists([[1, 2, 3], [4, 5]]))
    rotary = ops.rotary_angles(step.positions, rotary_dim=4, theta=1e4)
    given = {"x": tokens(5, 32), "rotary": rotary, "heads": 4, "kv_heads": 2} | changes
    return gqa.attention(weights, past=None, step=step, eps=1e-6, **given)[0]


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.usefixtures("checks")
def test_a_wrong_call_names_function_argument_axis_and_sizes(name: str) -> None:
    call, expected = WRONG[name]
    with pytest.raises(TypeCheckError) as caught:
        call()
    for sentence in expected:
        assert sentence in str(caught.value)


@pytest.mark.usefixtures("checks")
def test_a_tree_takes_a_spec_where_it_takes_a_tensor_and_nowhere_else() -> None:
    spec = Linear.spec(3, 2)
    assert isinstance(spec.weight, params.TensorSpec) and spec.weight.shape == (2, 3)
    wrong: list[Any] = [tokens(3), 3, spec]
    for weight in wrong:
        with pytest.raises(TypeCheckError, match=r"Linear.__init__: weight: (shape is|expected)"):
            Linear(weight)


def run(model: fm.Model, weights: Any) -> list[Any]:
    """A prompt, a kept window, its commit, and one more token."""
    state: Any = model.init_state(2, 16, page_size=4)
    prompt = fm.Batch.from_lists([[1, 2, 3, 4, 5], [6, 7]], state)
    first, state = model.forward(weights, state, prompt)
    kept, state = model.forward(weights, state, fm.Batch.from_lists([[8, 9, 1], [2]], state), keep_steps=True)
    state = fm.commit(state, [1, 1])
    last, state = model.forward(weights, state, fm.Batch.from_lists([[3], []], state), logits="last")
    return [first.logits, kept.logits, last.logits, *fm.logical(state, 0).values()]


@pytest.mark.parametrize("moe", [False, True])
def test_right_calls_give_the_same_bits(moe: bool) -> None:
    more = {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 20,
    }
    kind = {"model_type": "qwen3_5_moe_text", **more} if moe else {"model_type": "qwen3_5_text"}
    model = fm.build({**SIZES, **kind})
    weights = model.init_params()
    plain = run(model, weights)
    enable_shape_checks()
    checked = run(model, weights)
    disable_shape_checks()
    for a, b in zip(plain, checked, strict=True):
        assert torch.equal(a, b)


def test_enabling_twice_is_enabling_once_and_disabling_puts_everything_back() -> None:
    def look() -> list[Any]:
        return [
            gqa.attention,
            vars(fm.Batch)["from_tokens"],
            fm.commit,
            ops.linear.body,
            type(ops.linear).__call__,
        ]

    plain = look()
    enable_shape_checks()
    once = look()
    enable_shape_checks()
    assert [a is b for a, b in zip(once, look(), strict=True)] == [True] * 5
    assert not any(a is b for a, b in zip(plain, once, strict=True))
    disable_shape_checks()
    after = look()
    assert after[0] is plain[0] and after[2:] == plain[2:] and after[1].__func__ is plain[1].__func__
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        attention(x=tokens(5, 40))


def test_names_imported_elsewhere_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    other = types.ModuleType("other")
    vars(other)["attention"] = gqa.attention
    monkeypatch.setitem(sys.modules, "other", other)
    enable_shape_checks()
    assert vars(other)["attention"] is gqa.attention
    disable_shape_checks()
    assert vars(other)["attention"] is gqa.attention


@pytest.mark.parametrize("value", ["1", "0", ""])
def test_the_environment_switch_works_before_import(value: str) -> None:
    program = (
        "import torch, funcmodels; from lowering import ops; ops.rms_norm(torch.ones(5, 4), torch.ones(1), eps=1e-6)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "FUNCMODELS_SHAPE_CHECKS": value},
    )
    assert ("rms_norm: weight: axis 'dim' is 1, expected 4 as in x" in done.stderr) == (value == "1")
    assert (done.returncode == 0) == (value != "1")


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_every_op_promises_its_tensors(op: lowering.Op, checks: None) -> None:
    """An op whose body was not wrapped has no annotated tensor: it would be checked nowhere."""
    assert op.body.__shape_checked__ and op.body.__wrapped__.__name__ == op.name


@pytest.mark.usefixtures("checks")
def test_a_kernel_answers_for_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Kernel("bad", lambda x, weight, *, eps: x[..., 1:], ("cpu",))
    monkeypatch.setitem(ops.rms_norm.kernels, "bad", bad)
    with (
        lowering.use(rms_norm="bad"),
        pytest.raises(TypeCheckError, match="the result: axis 'dim' is 7, expected 8 as in x"),
    ):
        ops.rms_norm(tokens(5, 8), tokens(8), eps=1e-6)


@pytest.mark.usefixtures("checks")
def test_a_call_python_itself_refuses_keeps_its_own_error() -> None:
    with pytest.raises(TypeError, match="missing 3 required positional arguments"):
        ops.attention(tokens(5, 4, 8))
    with pytest.raises(TypeError, match=r"attention\(\) missing"):
        gqa.attention()  # type: ignore[call-arg]


# Functions of the reader's own.


def cell(text: str) -> dict[str, Any]:
    """What a notebook cell leaves behind: it has no source file."""
    names: dict[str, Any] = {"Float": Float, "Tensor": Tensor, "shape_checked": shape_checked, "torch": torch}
    exec(text, names)
    return names


OUTER = """
@shape_checked
def outer(x: Float[Tensor, "rows dim"], y: Float[Tensor, " rows"]) -> Float[Tensor, "dim rows"]:
    return x.T * y
"""


def test_a_function_of_a_cell_is_checked_and_may_be_redefined() -> None:
    names = cell(OUTER)
    assert names["outer"](tokens(3, 2), tokens(3)).shape == (2, 3)
    with pytest.raises(TypeCheckError, match="outer: y: axis 'rows' is 2, expected 3 as in x"):
        names["outer"](tokens(3, 2), tokens(2))
    exec(OUTER.replace('"dim rows"', '"rows dim"'), names)
    with pytest.raises(TypeCheckError, match="outer: the result: axis 'rows' is 2, expected 3 as in x"):
        names["outer"](tokens(3, 2), tokens(3))


def test_a_function_without_shapes_is_refused() -> None:
    with pytest.raises(TypeError, match="nothing to check"):
        shape_checked(len)
    with pytest.raises(TypeError, match="nothing to check"):
        shape_checked(lambda x: x)


@shape_checked
def shrink(x: Float[Tensor, " size"], depth: int) -> Float[Tensor, " size"]:
    """Calls itself on ever shorter tensors, and fails on an empty one."""
    if depth:
        shrink(x[1:], depth - 1)
    elif not len(x):
        raise ZeroDivisionError
    return x * 2


def test_axis_sizes_belong_to_one_call() -> None:
    assert [shrink(tokens(size), 3).shape[0] for size in (4, 6)] == [4, 6]
    with pytest.raises(ZeroDivisionError):
        shrink(tokens(3), 3)
    assert shrink(tokens(5), 2).shape == (5,)


def test_threads_do_not_share_sizes() -> None:
    barrier = threading.Barrier(2)

    @shape_checked
    def meet(x: Float[Tensor, " size"]) -> Float[Tensor, " size"]:
        barrier.wait(10)
        return x + 1

    def repeat(size: int) -> list[int]:
        return [meet(tokens(size)).shape[0] for _ in range(50)]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(repeat, (3, 4))) == [[3] * 50, [4] * 50]


# Placeholders and transforms.


@pytest.mark.usefixtures("checks")
def test_checks_hold_for_fake_and_meta_tensors() -> None:
    with FakeTensorMode(), pytest.raises(TypeCheckError, match="weight: axis 'dim' is 3, expected 4"):
        ops.rms_norm(torch.empty(2, 4), torch.empty(3), eps=1e-6)
    with pytest.raises(TypeCheckError, match="weight: axis 'dim' is 3, expected 4"):
        ops.rms_norm(torch.empty(2, 4, device="meta"), torch.empty(3, device="meta"), eps=1e-6)


@pytest.mark.usefixtures("checks")
def test_transforms_pass_and_fail_as_plain_calls_do() -> None:
    x, weights = tokens(5, 8), tokens(3, 8)
    found = torch.func.vmap(lambda weight: ops.rms_norm(x, weight, eps=1e-6))(weights)
    assert found.shape == (3, 5, 8)
    with pytest.raises(TypeCheckError, match="weight: axis 'dim' is 3, expected 8"):
        torch.func.vmap(lambda weight: ops.rms_norm(x, weight, eps=1e-6))(weights.T)
    model = fm.build({**SIZES, "model_type": "qwen3_5_text"})
    batch = fm.Batch.from_lists([[1, 2, 3], [4, 5]])
    gradient = torch.func.grad(lambda p: model.forward(p, None, batch)[0].hidden.square().mean())(model.init_params())
    assert all(leaf.isfinite().all() for leaf in params.leaves(gradient))


@pytest.mark.compile
def test_checked_functions_compile_without_their_checks() -> None:
    """No graph break, and as many graphs as for the plain function."""
    from torch._dynamo.testing import CompileCounter

    counts = []
    for function in (shrink.__wrapped__, shrink):
        counter = CompileCounter()
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=False)
        for size in (2, 3, 4, 4, 3):
            x = tokens(size)
            assert torch.equal(compiled(x, 0), x * 2)
        counts.append(counter.frame_count)
    assert counts == [3, 3]
