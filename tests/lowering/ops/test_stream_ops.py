"""Hyper-connections, n-gram hashes and dilated convolutions against their formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lowering
from lowering import ops
from lowering.portable import hyper_connection
from tests.cases import Draw, RowCounts
from tests.lowering.ops.largest import largest
from tests.tolerances import assert_close


def one_row(count: int) -> lowering.Rows:
    return RowCounts("one", (count,), (0,)).made()


def connection(streams: int, hidden: int, rank: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Streams of 5 tokens, and a norm, the projection down, the weights that write back, and the projection up."""
    draw = torch.Generator().manual_seed(seed)
    joined = streams * hidden
    shapes = ((5, streams, hidden), (joined,), (rank, joined), (streams, joined), (joined, rank))
    return tuple(torch.randn(shape, generator=draw, dtype=torch.float64) / shape[-1] ** 0.5 for shape in shapes)


def mixed_plainly(x: Tensor, norm: Tensor, down: Tensor, inject: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token and stream by stream."""
    read, back = [], []
    for token in x:
        n = torch.cat([stream * (stream.square().mean() + 1e-6).rsqrt() for stream in token]) * (1 + norm)
        low = down @ n / len(token)
        gates = torch.sigmoid(up @ (low * torch.sigmoid(low)))
        read.append(torch.stack((gates * n).chunk(len(token))).sum(0) / len(token))
        back.append(2 * torch.sigmoid(inject @ n / len(token)))
    return torch.stack(read), torch.stack(back)


@pytest.mark.parametrize(("streams", "hidden", "rank"), [(4, 8, 3), (2, 7, 5), (3, 1, 4)])
def test_a_connection_is_its_formula(streams: int, hidden: int, rank: int) -> None:
    x, norm, down, inject, up = connection(streams, hidden, rank)
    read, back = mixed_plainly(x, norm, down, inject, up)
    mixed, weights = ops.hyper_mix(x, norm, torch.cat((down, inject)), up, eps=1e-6)
    assert weights is not None
    assert_close((mixed, weights), (read, back))
    only_read, none = ops.hyper_mix(x, norm, down, up, eps=1e-6)
    assert none is None
    assert_close(only_read, read)
    y = torch.randn(5, hidden, dtype=torch.float64)
    written = ops.hyper_inject(x, y, weights)
    assert_close(written, torch.stack([x[:, s] + back[:, s, None] * y for s in range(streams)], 1))


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_connections_of_a_prompt_work_on_some_tokens_at_a_time(
    monkeypatch: Any, writes: bool, dtype: torch.dtype
) -> None:
    """The last piece is of fewer. No tensor but a result is of all tokens."""
    monkeypatch.setattr(hyper_connection, "BLOCK", 2 * 3 * 16 + 5)
    draw = Draw(dtype)
    x, y = draw.normal(41, 3, 16), draw.normal(41, 16)
    args = x, draw.normal(48), draw.normal(5 + 3 * writes, 48), draw.normal(48, 5)
    kernels = [ops.hyper_mix.explain(*args, eps=1e-6).kernel, ops.hyper_inject.kernels["torch_blocked"]]
    assert kernels[0].name == "torch_blocked"
    mixed, weights = kernels[0].run(*args, eps=1e-6)
    expected, others = ops.hyper_mix.body(*args, eps=1e-6)
    assert_close(mixed, expected, length=48)
    assert (weights is None) == (others is None) == (not writes)
    assert largest(lambda: kernels[0].run(*args, eps=1e-6)) <= 41 * 16
    if weights is not None and others is not None:
        assert_close(weights, others, length=48)
        assert torch.equal(kernels[1].run(x, y, weights), ops.hyper_inject.body(x, y, weights))


@pytest.mark.parametrize("open_stream", range(4))
def test_a_gate_at_one_and_the_others_at_zero_give_that_stream(open_stream: int) -> None:
    """Streams of constants 1 to 4; the mean over streams leaves a quarter of the normalised stream."""
    x = torch.arange(1.0, 5.0)[None, :, None].expand(2, 4, 6).contiguous()
    norm = torch.arange(4.0).repeat_interleave(6)
    down = torch.ones(1, 24)
    up = torch.full((4, 6), -1e4).index_fill(0, torch.tensor([open_stream]), 1e4).reshape(24, 1)
    mixed, _ = ops.hyper_mix(x, norm, down, up, eps=0.0)
    assert_close(mixed, torch.full((2, 6), (1.0 + open_stream) / 4))


def test_streams_that_change_places_with_their_parameters_change_nothing() -> None:
    x, norm, down, inject, up = connection(4, 8, 3)
    order = torch.tensor([2, 0, 3, 1])
    channels = (order[:, None] * 8 + torch.arange(8)).flatten()
    mixed, weights = ops.hyper_mix(x, norm, torch.cat((down, inject)), up, eps=1e-6)
    moved = torch.cat((down[:, channels], inject[order][:, channels]))
    again, others = ops.hyper_mix(x[:, order], norm[channels], moved, up[channels], eps=1e-6)
    assert weights is not None and others is not None
    assert_close((again, others), (mixed, weights[:, order]))


def test_bfloat16_streams_are_mixed_in_float32() -> None:
    """Weights to write back are float32, and what is read differs from the truth by roundings of projections alone."""
    x, norm, down, inject, up = (part.float().bfloat16() for part in connection(4, 64, 6))
    mixed, weights = ops.hyper_mix(x, norm, torch.cat((down, inject)), up, eps=1e-6)
    read, back = mixed_plainly(*(part.double() for part in (x, norm, down, inject, up)))
    assert weights is not None and weights.dtype == torch.float32 and mixed.dtype == torch.bfloat16
    assert_close(mixed, read, dtype=torch.bfloat16)
    assert_close(weights, back, dtype=torch.bfloat16)
    written = ops.hyper_inject(x, mixed, weights)
    exact = (x.double() + weights.double()[..., None] * mixed.double()[:, None]).bfloat16()
    assert (written != exact).float().mean() < 0.01


def rows_plainly(
    ids: list[int], multipliers: list[int], sizes: list[int], offsets: list[int], end: int
) -> list[list[int]]:
    """Of each token the rows its n-grams are hashed to, with numbers of any size wrapped to 64 bits at the end."""
    found = []
    each = len(sizes) // (len(multipliers) - 1)
    for at in range(len(ids)):
        seen = [ids[at]]
        while len(seen) < len(multipliers):
            before = at - len(seen)
            over = before < 0 or ids[before] == end or (len(seen) > 1 and seen[-1] == end)
            seen.append(end if over else ids[before])
        row = []
        for head, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
            mix = 0
            for token, multiplier in zip(seen[: 2 + head // each], multipliers, strict=False):
                mix ^= token * multiplier % 2**64
            row.append(offset + (mix - 2**64 if mix >= 2**63 else mix) % size)
        found.append(row)
    return found


@pytest.mark.parametrize("order", [2, 3, 4])
def test_hashes_are_those_of_whole_numbers(order: int) -> None:
    """Multipliers of all 64 bits, so that products wrap; ends in a row, at the edge of the n-gram, and first."""
    multipliers = [9223372036854775783, 6148914691236517205, 23703573157769, 3][:order]
    sizes = [101, 103, 107, 109, 113, 127][: 2 * (order - 1)]
    offsets = [sum(sizes[:head]) for head in range(len(sizes))]
    end = 2
    ids = [7, 2, 5, 6, 2, 2, 9, 4, 1, 8, 2, 3, 0, 0, 2, 248_319, 6]
    right = torch.tensor(rows_plainly(ids, multipliers, sizes, offsets, end))
    hashed = {"multipliers": tuple(multipliers), "sizes": tuple(sizes), "offsets": tuple(offsets), "end": end}
    places = torch.arange(len(ids))
    rows, none, _ = ops.ngram_rows(torch.tensor(ids), None, places, one_row(len(ids)), **hashed, keep_steps=False)
    assert none is None and torch.equal(rows, right)
    # What a context holds for places before the first token does not count.
    context, found = torch.full((2, order - 1), 5), []
    for at in range(len(ids)):
        row, context, _ = ops.ngram_rows(
            torch.tensor(ids[at : at + 1]), context, places[at : at + 1], one_row(1), **hashed, keep_steps=False
        )
        found.append(row)
    assert torch.equal(torch.cat(found), right)
    assert context is not None and context[0].tolist() == ids[-order + 1 :]


def test_a_gate_of_no_score_is_half_open_and_small_scores_have_a_slope() -> None:
    """The root of a score below 1e-6 is taken as that of 1e-6; the sign of 0 is 0."""
    key = torch.tensor([[[0.0]], [[4.0]], [[-4.0]], [[1e-9]]])
    value = torch.full((4, 1), 3.0)
    gated, gates = ops.ngram_gate(key, torch.ones(4, 1, 1), value)
    assert_close(gates, torch.tensor([[0.0], [2.0], [-2.0], [1e-3]]).sigmoid())
    assert_close(gated[:, 0], gates * 3)
    slope = torch.func.grad(lambda k: ops.ngram_gate(k, torch.ones(4, 1, 1), value)[0].sum())(key)
    assert slope.isfinite().all() and slope[0] == 0 and slope[1] > 0


@pytest.mark.parametrize(("width", "dilation"), [(4, 3), (2, 5), (3, 2), (4, 1)])
@pytest.mark.parametrize("kernel", ["torch", "torch_blocked"])
def test_a_dilated_convolution_is_torchs(width: int, dilation: int, kernel: str) -> None:
    """In one piece, and token by token with the window carried."""
    draw = torch.Generator().manual_seed(width)
    x, weight = torch.randn(23, 6, generator=draw), torch.randn(6, width, generator=draw)
    past = (width - 1) * dilation
    right = F.silu(F.conv1d(F.pad(x.T, (past, 0))[None], weight[:, None], groups=6, dilation=dilation)[0].T)
    with lowering.use(short_conv=kernel):
        y, _, _ = ops.short_conv(x, weight, None, one_row(23), dilation=dilation, keep_steps=False)
        assert_close(y, right, length=width)
        window, found = torch.zeros(2, past, 6), []
        for at in range(23):
            y, window, _ = ops.short_conv(
                x[at : at + 1], weight, window, one_row(1), dilation=dilation, keep_steps=False
            )
            found.append(y)
            assert window is not None
    assert_close(torch.cat(found), right, length=width)
    assert torch.equal(window[0], x[-past:]) and window.shape == (2, past, 6)
