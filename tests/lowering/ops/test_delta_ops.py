"""The gated delta rule, token by token in float64, against the reference and every kernel; trails; gates; gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lowering
from lowering import ops
from lowering.ops import DeltaStates, DeltaTrail, gated_delta_rule
from tests.cases import ROWS, VERIFY, Draw, RowCounts, delta
from tests.tolerances import assert_close


def recurrence(tokens: Sequence[Tensor], part: slice, state: Tensor) -> tuple[Tensor, Tensor]:
    """One row in float64: a part of q, k, v, decay and beta [tokens heads ...], from a state [v_heads v_dim k_dim]."""
    q, k, v, decay, beta = (x[part] for x in tokens)
    shared = v.shape[1] // k.shape[1]
    outputs: list[list[Tensor]] = []
    heads = list(state.double())
    for t in range(v.shape[0]):
        outputs.append([])
        for h in range(v.shape[1]):
            key, query = k[t, h // shared].double(), q[t, h // shared].double()
            s = heads[h] * decay[t, h].double().exp()
            u = beta[t, h].double() * (v[t, h].double() - s @ key)
            heads[h] = s + torch.outer(u, key)
            outputs[-1].append(heads[h] @ query)
    stacked = [torch.stack(row) for row in outputs]
    return torch.stack(stacked) if stacked else v.double(), torch.stack(heads)


def by_rows(rows: RowCounts, args: Any) -> tuple[Tensor, Tensor]:
    """The recurrence over every row: outputs (zeros for padding), and the state with its scratch slot untouched."""
    _, k, v, _, _, state, made = args
    start = made.query_start
    out, slots = torch.zeros(v.shape, dtype=torch.float64), []
    for row in range(len(rows.counts)):
        part = slice(int(start[row]), int(start[row + 1]))
        before = torch.zeros(v.shape[1], v.shape[2], k.shape[2]) if state is None else state[row]
        out[part], after = recurrence(args[:5], part, before)
        slots.append(after)
    return out, torch.stack(slots)


def kernels_for(args: Any, kwargs: Any) -> list[str]:
    """Names of the kernels that take this call, the reference among them."""
    return [
        kernel.name
        for kernel in gated_delta_rule.serving("cpu")
        if kernel.refuse is None or kernel.refuse(*args, **kwargs) is None
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("state", [False, True], ids=["fresh", "continued"])
@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: rows.name)
def test_every_kernel_is_the_recurrence(rows: RowCounts, state: bool, dtype: torch.dtype) -> None:
    """All sizes distinct, ragged rows, idle rows, padding, chunks with a tail; padding reads as zeros."""
    args, kwargs = delta(rows, 2, 6, 8, 12, state=state, keep_steps=False)(Draw(dtype, 1))
    expected, after = by_rows(rows, args)
    for name in kernels_for(args, kwargs):
        with lowering.use(gated_delta_rule=name):
            out, new, trail = gated_delta_rule(*args, **kwargs)
        assert trail is None and (new is None) == (not state)
        assert_close(out, expected, length=sum(rows.counts), dtype=dtype)
        if new is not None:
            assert_close(new[:-1], after, length=sum(rows.counts), dtype=dtype)


def test_wrong_heads_would_show() -> None:
    """Value head h uses key head h // shared, not h % k_heads."""
    args, kwargs = delta(ROWS[2], 2, 6, 8, 12, state=True, keep_steps=False)(Draw(torch.float32))
    q, k, v, *rest = args
    swapped, _, _ = gated_delta_rule(q.flip(1), k.flip(1), v, *rest, **kwargs)
    plain, _, _ = gated_delta_rule(q, k, v, *rest, **kwargs)
    assert (swapped - plain).abs().max() > 0.1


def gates(kind: str, tokens: int, heads: int) -> Tensor:
    """Log decays that a legal model can produce."""
    if kind == "zero":
        return torch.zeros(tokens, heads)
    if kind == "mixed":
        return torch.where(torch.arange(heads) % 2 == 0, 0.0, -5.0).expand(tokens, heads).clone()
    if kind == "strong_at_times":
        # What a weak gate says must not be lost in a sum with those of -1000.
        return torch.where(torch.rand(tokens, heads, generator=torch.Generator().manual_seed(0)) < 0.4, -1000.0, -0.07)
    return torch.full((tokens, heads), float(kind))


@pytest.mark.parametrize("kind", ["-2.5", "-3", "-5", "-20", "-68", "-80", "-1000", "zero", "mixed", "strong_at_times"])
@pytest.mark.parametrize("keys", ["random", "nearly_equal"])
def test_extreme_gates_stay_finite_forward_and_backward(kind: str, keys: str) -> None:
    """Chunk sums of log decays reach -320 and far beyond; exp of the positive difference would overflow."""
    rows = RowCounts("long", (150,), (0,))
    (q, k, v, decay, beta, state, start), kwargs = delta(rows, 1, 2, 8, 6, state=True, keep_steps=False)(
        Draw(torch.float32, 2)
    )
    decay = gates(kind, *decay.shape)
    if keys == "nearly_equal":
        k, beta = F.normalize(k[:1] + 1e-3 * k, dim=-1), torch.full_like(beta, 0.999)
    wanted = by_rows(rows, (q, k, v, decay, beta, state, start))
    wanted_grads = gradients(by_rows_differentiably, (q, k, v, decay, beta, state))
    for name in kernels_for((q, k, v, decay, beta, state, start), kwargs):
        with lowering.use(gated_delta_rule=name):
            out, after, _ = gated_delta_rule(q, k, v, decay, beta, state, start, **kwargs)
            grads = gradients(lambda *xs: gated_delta_rule(*xs, start, **kwargs)[:2], (q, k, v, decay, beta, state))
        hint = "100 nearly equal keys with strength near 1 make each chunk's triangular system ill-conditioned"
        loose = {"looser": 10.0, "reason": hint} if keys == "nearly_equal" else {}
        assert_close((out, after[:-1]), wanted, length=150, dtype=torch.float32, **loose)
        for grad, expected in zip(grads, wanted_grads, strict=True):
            assert_close(
                grad, expected, length=150, dtype=torch.float32, looser=10.0, scale=1e-3,
                reason="sums over tokens, channels and states; a strong decay's gradient is a difference of such sums",
            )  # fmt: skip


def gradients(function: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Gradients of a fixed random combination of outputs and final state."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out, after = function(*leaves)
    draw = Draw(torch.float32, 9)
    after = after[:1]
    loss = (out * draw.normal(*out.shape)).sum() + (after * draw.normal(*after.shape)).sum()
    return torch.autograd.grad(loss, leaves)


def by_rows_differentiably(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One row in float64."""
    out, after = recurrence((q, k, v, decay, beta), slice(None), state[0])
    return out, after[None]


@pytest.mark.parametrize("past", [0, 1])
def test_gradients_of_every_kernel(past: int) -> None:
    """Ragged rows and padding: equal to the float64 recurrence, zero for padding."""
    rows = RowCounts("ragged", (11, 0, 3), (past,) * 3, padding=2)
    args, kwargs = delta(rows, 2, 4, 5, 3, state=True, keep_steps=False)(Draw(torch.float32))
    *inputs, start = args

    def reference(*xs: Tensor) -> tuple[Tensor, Tensor]:
        parts = [recurrence(xs[:5], slice(0, 11), xs[5][0]), recurrence(xs[:5], slice(11, 14), xs[5][2])]
        return torch.cat([*(out for out, _ in parts), xs[2][14:].double() * 0]), parts[0][1][None]

    wanted = gradients(reference, tuple(inputs))
    for name in kernels_for(args, kwargs):
        with lowering.use(gated_delta_rule=name):
            found = gradients(lambda *xs: gated_delta_rule(*xs, start, **kwargs)[:2], tuple(inputs))
        assert all(not x[14:].any() for x in found[:5])
        assert_close(found, tuple(x.float() for x in wanted), length=130)


@pytest.mark.parametrize("accepted", [(0, 0, 0), (4, 4, 4), (1, 3, 2), (2, 0, 4)])
@pytest.mark.parametrize("recurrent", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_a_trail_stands_after_any_token(accepted: tuple[int, ...], recurrent: torch.dtype) -> None:
    """The replayed state is that of a run over the accepted tokens alone; the old state is returned untouched."""
    args, kwargs = delta(VERIFY, 2, 6, 8, 12, state=True, keep_steps=True)(Draw(torch.float32, 4))
    args = (*args[:5], args[5].to(recurrent), args[6])
    before = args[5].clone()
    expected = by_rows(VERIFY, args)[0]
    for name in kernels_for(args, kwargs):
        with lowering.use(gated_delta_rule=name):
            out, kept, trail = gated_delta_rule(*args, **kwargs)
        assert torch.equal(kept, before) and isinstance(trail, DeltaTrail)
        assert_close(out, expected, length=130, dtype=torch.float32)
        found = trail.at(torch.tensor(accepted, dtype=torch.int32))
        assert found.dtype == recurrent and torch.equal(found[-1], before[-1])
        for row, count in enumerate(accepted):
            part = slice(4 * row, 4 * row + count)
            _, after = recurrence(args[:5], part, before[row])
            assert_close(found[row], after, length=130, dtype=recurrent)


def test_a_trail_of_ragged_rows() -> None:
    """Rows shorter than the longest, an idle row: each stands after its own tokens."""
    rows = RowCounts("ragged", (3, 0, 1), (2, 4, 6), padding=2)
    args, kwargs = delta(rows, 2, 6, 8, 12, state=True, keep_steps=True)(Draw(torch.float32, 5))
    for name in kernels_for(args, kwargs):
        with lowering.use(gated_delta_rule=name):
            _, _, trail = gated_delta_rule(*args, **kwargs)
        found = trail.at(torch.tensor([2, 0, 1], dtype=torch.int32))
        for row, part in enumerate((slice(0, 2), slice(3, 3), slice(3, 4))):
            assert_close(found[row], recurrence(args[:5], part, args[5][row])[1], dtype=torch.float32, length=130)


@pytest.mark.parametrize("channels", [False, True])
def test_a_row_that_accepts_nothing_may_hold_nan(channels: bool) -> None:
    """As one does whose request has ended without a choice: the row stays what it was."""
    args, kwargs = delta(VERIFY, 6, 6, 8, 12, state=True, keep_steps=True, channels=channels)(Draw(torch.float32, 4))
    dirty, before = [x.clone() for x in args[:5]], args[5].clone()
    for x in dirty:
        x[4:8] = torch.nan
    trails = [gated_delta_rule(*dirty, *args[5:], **kwargs)[2]]
    if not channels:
        after = [torch.full_like(before[:3], torch.nan) if step == 2 else before[:3] + step for step in range(4)]
        trails.append(DeltaStates(args[5], torch.stack(after, 1)))
    for trail in trails:
        found = trail.at(torch.tensor([2, 0, 4], dtype=torch.int32))
        assert torch.equal(found[1], before[1]) and found.isfinite().all()
        assert not torch.equal(found[0], before[0])


def test_nothing_reads_padding() -> None:
    """NaN in padding tokens and in the scratch slot reaches no live output or state."""
    rows = RowCounts("padded", (9, 0, 2), (1, 1, 1), padding=4)
    args, kwargs = delta(rows, 2, 6, 8, 12, state=True, keep_steps=False)(Draw(torch.float32, 6))
    dirty = [x.clone() for x in args[:6]]
    for x in dirty[:5]:
        x[11:] = torch.nan
    dirty[5][-1] = torch.nan
    for name in kernels_for(args, kwargs):
        with lowering.use(gated_delta_rule=name):
            out, after, _ = gated_delta_rule(*args, **kwargs)
            out2, after2, _ = gated_delta_rule(*dirty, args[6], **kwargs)
        assert torch.equal(out[:11], out2[:11]) and torch.equal(after[:-1], after2[:-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_gates(dtype: torch.dtype) -> None:
    """Float32 whatever comes in, and right where softplus saturates either way."""
    a = torch.tensor([[-90.0, -3, 0, 0.5, 19, 60]]).to(dtype)
    b = torch.tensor([[-30.0, -1, 0, 1, 5, 30]]).to(dtype)
    a_log, dt_bias = torch.tensor([2.77, 0, -1, 1, 2, 0.5]), torch.tensor([-4.0, 1, 0, 2, -1, 0])
    decay, beta = ops.delta_gates(a, b, a_log, dt_bias)
    wanted = -a_log.double().exp() * torch.logaddexp(torch.zeros(6).double(), a.double() + dt_bias)
    assert decay.dtype == beta.dtype == torch.float32 and (decay <= 0).all()
    assert_close(decay, wanted, dtype=torch.float32)
    assert_close(beta, (1 / (1 + (-b.double()).exp())), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_l2_norm(dtype: torch.dtype) -> None:
    """Eps is added to the sum of squares; zeros stay zeros."""
    x = Draw(dtype).normal(3, 2, 20)
    x[0, 0] = 0
    wide = x.double()
    wanted = 0.25 * wide / (wide.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert_close(ops.l2_norm(x, scale=0.25), wanted.to(dtype))
    tiny = torch.full((1, 4), 1e-4)
    assert_close(ops.l2_norm(tiny), tiny.double() / (4e-8 + 1e-6) ** 0.5, dtype=torch.float32)


def test_a_decayed_state_keeps_no_denormal_numbers() -> None:
    """Without writes it fades to exact zeros; rounding to nearest would hold the smallest denormals for good."""
    rows = RowCounts("decode", (1, 1), (3, 3))
    (q, k, v, decay, beta, state, start), kwargs = delta(rows, 2, 4, 8, 6, state=True, keep_steps=False)(
        Draw(torch.float32)
    )
    stuck = state.clone()
    for _ in range(400):
        with lowering.use(gated_delta_rule="torch_step"):
            _, state, _ = gated_delta_rule(q, k, v, decay * 0 - 0.4, beta * 0, state, start, **kwargs)
        stuck = stuck * torch.tensor(-0.4).exp()
        assert not denormals(state[:-1])
    assert not state[:-1].any() and denormals(stuck)
    (q, k, v, decay, beta, state, start), kwargs = delta(ROWS[-1], 2, 4, 8, 6, state=True, keep_steps=False)(
        Draw(torch.float32)
    )
    for total in (-80, -90, -100, -300):
        with lowering.use(gated_delta_rule="torch_chunked"):
            _, after, _ = gated_delta_rule(q, k, v, decay * 0 + total / 130, beta * 0, state, start, **kwargs)
        assert not denormals(after[:-1])


def denormals(x: Tensor) -> int:
    """How many values are below the smallest normal number and not zero."""
    return int(((x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)).sum())
