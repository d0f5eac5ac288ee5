"""The gated delta rule with a decay a channel: a float64 recurrence at any gate, and its gradients; trails; gates."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lowering
from lowering import ops
from lowering.ops import DeltaTrail, gated_delta_rule
from lowering.target import named
from tests.cases import PROMPT, ROWS, VERIFY, Draw, RowCounts, delta
from tests.lowering.ops.test_delta_ops import gradients, kernels_for
from tests.tolerances import assert_close

CHUNKED, STEP = "torch_chunked_channels", "torch_step"


def recurrence(tokens: Sequence[Tensor], state: Tensor, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """Part of a row's q, k, v, decay and beta, token by token in float64, from a state [heads v_dim k_dim]."""
    q, k, v, decay, beta = (x[part].double() for x in tokens)
    s = state.double()
    outputs = [v.new_zeros(0, *v.shape[1:])]
    for t in range(v.shape[0]):
        s = s * decay[t].exp()[:, None, :]
        read = (s * k[t][:, None, :]).sum(-1)
        s = s + (beta[t][:, None] * (v[t] - read))[:, :, None] * k[t][:, None, :]
        outputs.append((s * q[t][:, None, :]).sum(-1)[None])
    return torch.cat(outputs), s


def by_rows(rows: RowCounts, args: Any) -> tuple[Tensor, Tensor]:
    """The recurrence over every row: outputs (zeros for padding), and the state of each."""
    *tokens, state, made = args
    start = made.query_start
    _, k, v, _, _ = tokens
    out, after = torch.zeros(v.shape, dtype=torch.float64), []
    for row in range(len(rows.counts)):
        part = slice(int(start[row]), int(start[row + 1]))
        before = v.new_zeros(v.shape[1], v.shape[2], k.shape[2]) if state is None else state[row]
        out[part], last = recurrence(tokens, before, part)
        after.append(last)
    return out, torch.stack(after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("state", [False, True], ids=["fresh", "continued"])
@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: rows.name)
def test_every_kernel_is_the_recurrence(rows: RowCounts, state: bool, dtype: torch.dtype) -> None:
    """All sizes distinct, ragged rows, idle rows, padding, chunks with a tail; padding reads as zeros."""
    args, kwargs = delta(rows, 3, 3, 8, 12, state=state, keep_steps=False, channels=True)(Draw(dtype, 1))
    expected, after = by_rows(rows, args)
    names = kernels_for(args, kwargs)
    assert (CHUNKED in names) == (max(rows.counts) >= 2) and "torch_chunked" not in names
    for name in names:
        with lowering.use(gated_delta_rule=name):
            out, new, trail = gated_delta_rule(*args, **kwargs)
        assert trail is None and (new is None) == (not state)
        assert_close(out, expected, length=sum(rows.counts), dtype=dtype)
        if new is not None:
            assert_close(new[:-1], after, length=sum(rows.counts), dtype=dtype)


def test_key_heads_may_be_shared_and_one_decay_a_head_is_that_of_its_channels() -> None:
    args, kwargs = delta(ROWS[-1], 2, 6, 8, 12, state=True, keep_steps=False)(Draw(torch.float32, 3))
    q, k, v, decay, *rest = args
    for name in ("torch", CHUNKED):
        with lowering.use(gated_delta_rule=name):
            out, after, _ = gated_delta_rule(q, k, v, decay[..., None].expand(-1, -1, 8), *rest, **kwargs)
        right, expected, _ = gated_delta_rule.body(*args, **kwargs)
        assert_close((out, after), (right, expected), length=130)


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "-5": lambda noise: torch.full_like(noise, -5.0),
    "-2.5": lambda noise: torch.full_like(noise, -2.5),
    "-3": lambda noise: torch.full_like(noise, -3.0),
    "0": torch.zeros_like,
    "-1e-3": lambda noise: torch.full_like(noise, -1e-3),
    "half_and_half": lambda noise: torch.where(torch.arange(noise.shape[-1]) % 2 == 0, 0.0, -5.0).expand_as(noise),
    "anywhere": lambda noise: -5 * noise.sigmoid(),
    "one_step_of_-80": lambda noise: torch.where(torch.arange(len(noise)) % 40 == 3, -80.0, -0.01)[:, None, None]
    .expand_as(noise),
    "-1000": lambda noise: torch.full_like(noise, -1000.0),
}  # fmt: skip
"""Log decays of the lower-bounded gate, whose bound is -5, and of the plain one, which has none."""


@pytest.mark.parametrize("gate", [gate for gate in GATES if gate != "-1e-3"])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 63, 64, 65, 1000])
def test_any_gate_at_any_length_forward_and_backward(tokens: int, gate: str) -> None:
    """Sums of log decays go far beyond what float32 has an exponential for; nothing overflows, nothing cancels."""
    rows = RowCounts("long", (tokens,), (0,))
    args, kwargs = delta(rows, 2, 2, 8, 6, state=True, keep_steps=False, channels=True)(Draw(torch.float32, 2))
    q, k, v, decay, beta, state, start = args
    inputs = (q, k, v, GATES[gate](torch.logit(decay.clamp(-1.99, -0.01) / -2)), beta, state)
    out, after = recurrence(inputs[:5], state[0])
    wanted = gradients(lambda *xs: _with_scratch(recurrence(xs[:5], xs[5][0])), inputs)
    # Short calls are the reference's, long ones the chunks'; those of one token the step's as well.
    names = [name for name in kernels_for((*inputs, start), kwargs) if name != "torch" or tokens < 100]
    assert names and (tokens == 1 or CHUNKED in names) and (tokens > 1 or STEP in names)
    for name in names:
        with lowering.use(gated_delta_rule=name):
            found = gated_delta_rule(*inputs, start, **kwargs)[:2]
            # The step writes in place; under autograd others take its place.
            grads = (
                gradients(lambda *xs: gated_delta_rule(*xs, start, **kwargs)[:2], inputs) if name != STEP else wanted
            )
        assert_close((found[0], found[1][0]), (out, after), length=tokens, dtype=torch.float32)
        assert (found[0] - out).norm() < 1e-4 * out.norm()
        for grad, expected in zip(grads, wanted, strict=True):
            assert_close(
                grad, expected, length=tokens, dtype=torch.float32, looser=10.0, scale=1e-3,
                reason="sums over tokens, channels and states; a strong decay's gradient is a difference of such sums",
            )  # fmt: skip


def _with_scratch(result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return result[0], result[1][None]


@pytest.mark.parametrize("gate", ["0", "-1e-3", "-5", "half_and_half"])
@pytest.mark.parametrize("tokens", [64, 200])
def test_nearly_equal_keys_written_at_full_strength(tokens: int, gate: str) -> None:
    """The worst triangular systems, in one chunk and in several: bounded, and as near as their condition allows."""
    rows = RowCounts("long", (tokens,), (0,))
    args, kwargs = delta(rows, 2, 2, 8, 6, state=True, keep_steps=False, channels=True)(Draw(torch.float32, 4))
    q, k, v, decay, beta, state, start = args
    k, beta, decay = F.normalize(k[:1] + 1e-3 * k, dim=-1), torch.full_like(beta, 0.999), GATES[gate](decay)
    inputs = (q, k, v, decay, beta, state)
    expected = recurrence(inputs[:5], state[0])
    wanted = gradients(lambda *xs: _with_scratch(recurrence(xs[:5], xs[5][0])), inputs)
    with lowering.use(gated_delta_rule=CHUNKED):
        out, after, _ = gated_delta_rule(*inputs, start, **kwargs)
        grads = gradients(lambda *xs: gated_delta_rule(*xs, start, **kwargs)[:2], inputs)
    reason = "nearly equal keys with strength near 1 make each chunk's triangular system ill-conditioned"
    assert_close((out, after[0]), expected, dtype=torch.float32, length=tokens, looser=10, reason=reason)
    assert (out - expected[0]).norm() < 1e-4 * expected[0].norm()
    for grad, right in zip(grads, wanted, strict=True):
        assert_close(grad, right, dtype=torch.float32, length=tokens, looser=20, scale=1e-3, reason=reason)


def test_gradients_of_ragged_rows() -> None:
    """Equal to the float64 recurrence, zero for padding."""
    rows = RowCounts("ragged", (11, 0, 3), (1,) * 3, padding=2)
    args, kwargs = delta(rows, 2, 2, 5, 3, state=True, keep_steps=False, channels=True)(Draw(torch.float32))
    *inputs, start = args

    def reference(*xs: Tensor) -> tuple[Tensor, Tensor]:
        parts = [recurrence(xs[:5], xs[5][row], part) for row, part in ((0, slice(0, 11)), (2, slice(11, 14)))]
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
    args, kwargs = delta(VERIFY, 3, 3, 8, 12, state=True, keep_steps=True, channels=True)(Draw(torch.float32, 4))
    args = (*args[:5], args[5].to(recurrent), args[6])
    before = args[5].clone()
    out, kept, trail = gated_delta_rule(*args, **kwargs)
    assert torch.equal(kept, before) and isinstance(trail, DeltaTrail)
    assert_close(out, by_rows(VERIFY, args)[0], length=130, dtype=torch.float32)
    found = trail.at(torch.tensor(accepted, dtype=torch.int32))
    assert found.dtype == recurrent and torch.equal(found[-1], before[-1])
    for row, count in enumerate(accepted):
        part = slice(4 * row, 4 * row + count)
        _, after = recurrence(args[:5], before[row], part)
        assert_close(found[row], after, length=130, dtype=recurrent)


def test_a_trail_of_ragged_rows_at_strong_gates() -> None:
    """Rows shorter than the longest, an idle row; a step that forgets all before it."""
    rows = RowCounts("ragged", (3, 0, 1), (2, 4, 6), padding=2)
    args, kwargs = delta(rows, 3, 3, 8, 12, state=True, keep_steps=True, channels=True)(Draw(torch.float32, 5))
    args[3][1] = -300.0
    _, _, trail = gated_delta_rule(*args, **kwargs)
    for counts, parts in (((2, 0, 1), (slice(0, 2), slice(3, 3), slice(3, 4))), ((3, 0, 0), (slice(0, 3),))):
        found = trail.at(torch.tensor(counts, dtype=torch.int32))
        for row, part in enumerate(parts):
            expected = recurrence(args[:5], args[5][row], part)[1]
            assert_close(found[row], expected, dtype=torch.float32, length=130)


def test_nothing_reads_padding() -> None:
    """NaN in padding tokens and in the scratch slot reaches no live output or state."""
    rows = RowCounts("padded", (9, 0, 2), (1, 1, 1), padding=4)
    args, kwargs = delta(rows, 3, 3, 8, 12, state=True, keep_steps=False, channels=True)(Draw(torch.float32, 6))
    dirty = [x.clone() for x in args[:6]]
    for x in dirty[:5]:
        x[11:] = torch.nan
    dirty[5][-1] = torch.nan
    for name in kernels_for(args, kwargs):
        with lowering.use(gated_delta_rule=name):
            out, after, _ = gated_delta_rule(*args, **kwargs)
            out2, after2, _ = gated_delta_rule(*dirty, args[6], **kwargs)
        assert torch.equal(out[:11], out2[:11]) and torch.equal(after[:-1], after2[:-1])


@pytest.mark.parametrize("name", [STEP, CHUNKED])
def test_a_decayed_state_keeps_no_denormal_numbers(name: str) -> None:
    """Channels that fade become exact zeros; those that do not stay."""
    rows = RowCounts("decode", (1, 1), (3, 3)) if name == STEP else RowCounts("prompt", (50, 50), (3, 3))
    args, kwargs = delta(rows, 2, 2, 8, 6, state=True, keep_steps=False, channels=True)(Draw(torch.float32))
    q, k, v, decay, beta, state, start = args
    first, fading = state.clone(), torch.arange(8) % 2 == 0
    decay = torch.where(fading, -0.4, 0.0).expand_as(decay)
    with lowering.use(gated_delta_rule=name):
        for _ in range(400 // max(rows.counts)):
            _, state, _ = gated_delta_rule(q, k, v, decay, beta * 0, state, start, **kwargs)
            assert not ((state[:-1] != 0) & (state[:-1].abs() < torch.finfo(torch.float32).tiny)).any()
    assert not state[:-1, ..., fading].any()
    assert torch.equal(state[:-1, ..., ~fading], first[:-1, ..., ~fading])


BOUNDS = (None, -5.0, -2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("bound", BOUNDS, ids=str)
def test_gates(bound: float | None, dtype: torch.dtype) -> None:
    """Float32 whatever comes in, right where softplus and sigmoid saturate, and never beyond the bound."""
    f = torch.tensor([-90.0, -3, 0, 0.5, 19, 60]).repeat(2, 3).view(2, 3, 6).to(dtype)
    b = torch.tensor([[-30.0, 0, 1], [5, 30, -1]]).to(dtype)
    a_log, dt_bias = torch.tensor([2.77, 0, -1]), torch.tensor([-4.0, 1, 0, 2, -1, 0]).repeat(3, 1)
    decay, beta = ops.channel_gates(f, b, a_log, dt_bias, lower_bound=bound)
    rate, x = a_log.double().exp()[:, None], f.double() + dt_bias
    if bound is None:
        wanted = -rate * torch.logaddexp(torch.zeros_like(x), x)
    else:
        # The bias is inside the product; the bound multiplies a sigmoid, and clamps nothing.
        wanted = bound / (1 + (-rate * x).exp())
        assert (decay >= bound).all()
    assert decay.dtype == beta.dtype == torch.float32 and (decay <= 0).all()
    assert_close(decay, wanted, dtype=torch.float32)
    assert_close(beta, 1 / (1 + (-b.double()).exp()), dtype=torch.float32)


def test_gates_are_those_of_transformers() -> None:
    from transformers import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForgetGate

    theirs = KimiLinearForgetGate(KimiLinearConfig(hidden_size=12, linear_num_heads=3, linear_head_dim=5))
    theirs.requires_grad_(False)
    draw = Draw(torch.float32, 3)
    for parameter in theirs.parameters():
        parameter.copy_(draw.normal(*parameter.shape))
    x = draw.normal(1, 7, 12) * 9
    f = theirs.f_b_proj(theirs.f_a_proj(x))[0].unflatten(-1, (3, 5))
    a_log, dt_bias = theirs.A_log.flatten(), theirs.dt_bias.unflatten(0, (3, 5))
    decay, _ = ops.channel_gates(f, torch.zeros(7, 3), a_log, dt_bias)
    assert_close(decay, theirs(x)[0], looser=10, reason="log(1 + exp(x)) loses what softplus keeps")


@pytest.mark.parametrize("target", ["ascend910b", "ascend910_93"])
def test_fused_rules_take_a_decay_a_channel_for_few_tokens(target: str) -> None:
    """From CANN 9.0.0 on; before, and for prompts, they refuse it in words, and ours or composed kernels take over."""
    before = named(target, cann="8.5.0")
    for rows, machine in ((VERIFY, named(target)), (VERIFY, before), (PROMPT, named(target))):
        args, kwargs = delta(
            rows, 3, 3, 128, 128, state=True, keep_steps=False, recurrent=torch.bfloat16, channels=True
        )(Draw(torch.bfloat16))
        choice = gated_delta_rule.explain(*args, target=machine, **kwargs)
        if rows is VERIFY and machine is not before:
            assert choice.kernel.name == "npu_recurrent_gated_delta_rule"
            continue
        assert choice.kernel.name == (CHUNKED if rows is PROMPT else "triton_gated_delta_rule")
        why = "at most 16 tokens a row" if rows is PROMPT else "a decay a channel, as this call has, from CANN"
        assert re.search(why, choice.refused["npu_recurrent_gated_delta_rule"])
        assert choice.refused["npu_chunk_gated_delta_rule"] == "takes one decay a head; this call has one a channel"
    gates = ops.channel_gates.explain(*_gates(), target=target)
    assert gates.refused["fused"] == "no fused operator makes the gates of the delta rule"


def _gates() -> tuple[Tensor, ...]:
    draw = Draw(torch.bfloat16)
    return draw.normal(5, 6, 8), draw.normal(5, 6), draw.uniform(-1.0, 3.0, 6), draw.uniform(-5.0, 1.0, 6, 8)
