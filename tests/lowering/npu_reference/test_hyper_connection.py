"""The reference of the hyper-connection operator against a loop in float64, and each documented limit, broken once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import lowering
from tests.cases import Draw
from tests.lowering.npu_reference.calls import assert_like, assert_rounded_once, call, refused

POST = "npu_mhc_post"
Arguments = dict[str, Any]


@pytest.fixture(autouse=True)
def on_950() -> Iterator[None]:
    with lowering.use(target="ascend950"):
        yield


def valid(dtype: torch.dtype = torch.bfloat16, *lead: int, streams: int = 4) -> Arguments:
    """A call that the documentation allows, of tokens in one or two axes."""
    draw, lead = Draw(dtype, seed=streams), lead or (5,)
    return {
        "x": draw.normal(*lead, streams, 10), "h_res": torch.eye(streams).repeat(*lead, 1, 1),
        "h_out": draw.normal(*lead, 10), "h_post": draw.uniform(-1.0, 2.0, *lead, streams),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("lead", "streams"), [((5,), 4), ((2, 3), 6), ((1,), 8)])
def test_outputs_are_added_by_their_weights(dtype: torch.dtype, lead: tuple[int, ...], streams: int) -> None:
    given = valid(dtype, *lead, streams=streams)
    y = call(POST, given)
    flat = [given[name].double().flatten(0, len(lead) - 1) for name in ("x", "h_out", "h_post")]
    right = torch.stack(
        [torch.stack([x[i] + h[i] * out for i in range(streams)]) for x, out, h in zip(*flat, strict=True)]
    )
    assert y.dtype == dtype
    assert_rounded_once(y, right.view(y.shape))
    assert_like(POST, given)


def test_views_are_taken() -> None:
    given = valid()
    one = given["x"][:, :1].expand(-1, 4, -1)
    assert torch.equal(call(POST, given | {"x": one}), call(POST, given | {"x": one.contiguous()}))


LIMITS: dict[str, tuple[Callable[[Arguments], Arguments], str]] = {
    "float32": (lambda a: a | {"x": a["x"].float()}, "x is torch.float32"),
    "another dtype of outputs": (lambda a: a | {"h_out": a["h_out"].half()}, "dtypes differ"),
    "weights in half precision": (lambda a: a | {"h_post": a["h_post"].bfloat16()}, "h_post is torch.bfloat16"),
    "three streams": (
        lambda a: a | {"x": a["x"][:, :3], "h_post": a["h_post"][:, :3], "h_res": a["h_res"][:, :3, :3]},
        "of 3 streams; expected one of",
    ),
    "no axis of tokens": (lambda a: a | {"x": a["x"][0]}, "2-dimensional"),
    "other tokens": (lambda a: a | {"h_out": a["h_out"][:4]}, r"h_out is \[4, 10\]; expected \[5, 10\]"),
    "other weights": (lambda a: a | {"h_post": a["h_post"][:, :3]}, r"h_post is \[5, 3\]; expected \[5, 4\]"),
    "no tokens": (lambda a: {k: v[:0] for k, v in a.items()}, "without elements"),
    "another matrix": (lambda a: a | {"h_res": torch.zeros(5, 4, 4)}, "not the identity"),
    "no matrix": (lambda a: a | {"h_res": None}, "takes h_res"),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_is_kept(limit: str) -> None:
    change, words = LIMITS[limit]
    refused(POST, change(valid()), words)


@pytest.mark.parametrize("target", ["ascend910b", "ascend910_93"])
def test_older_machines_take_four_streams_in_blocks(target: str) -> None:
    with lowering.use(target=target):
        refused(POST, valid(), "multiples of 128")
        refused(POST, valid(torch.bfloat16, 5, streams=6), "of 6 streams; expected one of")
