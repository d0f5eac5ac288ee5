"""What every kind of weight must satisfy: quantised ones as values, and prepared ones as what they were made of."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import lowering
import params
from lowering import LoweringError, npu_reference
from lowering.cases.weights import QUANTIZED
from lowering.kernel import Kernel
from lowering.op import OPS, Op
from lowering.weights import PreparedWeight
from params import tree
from params.quant.values import MXWeight, QuantizedWeight, SplitWeight
from tests.cases import Draw

kinds = pytest.mark.parametrize("kind", QUANTIZED)
OF_EXPERTS = ("w8a8_dynamic", "w8a8_dynamic_groups", "w4a8_dynamic", "w8a8_mxfp8", "w4a16_mxfp4")


def made(kind: str, outputs: int = 64, inputs: int = 128, *experts: int) -> QuantizedWeight:
    return QUANTIZED[kind](Draw(torch.float32).normal(*experts, outputs, inputs))


def below(kind: type) -> Iterator[type]:
    """All kinds of a kind that ship with the packages."""
    for one in kind.__subclasses__():
        yield from below(one)
        if one.__module__.startswith(("params", "lowering")):
            yield one


def test_every_kind_is_held_to_this() -> None:
    assert {type(made(kind)) for kind in QUANTIZED} == {*below(QuantizedWeight)} - {MXWeight}
    assert {type(ready) for one in LAYING for _, ready in prepared(*one)} == {*below(PreparedWeight)}


@kinds
def test_a_weight_says_its_shape_and_rounds_its_values_once(kind: str) -> None:
    weight = made(kind)
    exact = weight.dequantized()
    assert weight.shape == exact.shape == (64, 128) and exact.dtype == torch.float32
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        found = weight.dequantized(dtype)
        assert torch.equal(found, exact.to(dtype)), dtype


@kinds
@pytest.mark.parametrize("copied", [copy.deepcopy, partial(params.tree_map, torch.clone)], ids=["deepcopy", "clone"])
def test_a_weight_is_a_tree_and_copies_of_it_are_equal(kind: str, copied: Any) -> None:
    """Through its leaves and by the library: same values, dtypes and key, and no memory in common."""
    weight = made(kind)
    other = copied(weight)
    assert type(other) is type(weight) and params.equal(other, weight)
    assert other.static_key() == weight.static_key() and hash(other.static_key()) == hash(weight.static_key())
    places = {leaf.data_ptr() for leaf in tree.leaves(weight)}
    assert places.isdisjoint(leaf.data_ptr() for leaf in tree.leaves(other))
    assert params.to(weight, device="meta").device.type == "meta"


@kinds
def test_keys_tell_weights_apart(kind: str) -> None:
    """By shape, and from a tensor of the same shape: a kernel that was chosen for one is never run for another."""
    keys = [made(kind).static_key(), made(kind, 32).static_key(), made(kind, 64, 256).static_key()]
    assert len({*keys, *(made(other).static_key() for other in QUANTIZED)}) == 2 + len(QUANTIZED)


@kinds
def test_casts_leave_what_a_checkpoint_stored(kind: str) -> None:
    weight = made(kind)
    cast = params.to(weight, dtype=torch.bfloat16)
    if weight.exact:
        assert params.equal(cast, weight)
        return
    assert isinstance(cast, SplitWeight) and isinstance(weight, SplitWeight)
    assert params.equal(cast.parts[0], weight.parts[0]) and cast.parts[1].dtype == torch.bfloat16


# Prepared

LAYING = [(op, kernel) for op in OPS.values() for kernel in op.kernels.values() if kernel.prepare is not None]
SHAPES = {"experts": (4, 64, 128), "linear": (1024, 1024), "mla_prefix_attention": (64, 128)}
OF = {"experts": OF_EXPERTS, "linear": tuple(QUANTIZED)}


def prepared(op: Op, kernel: Kernel, times: int = 1) -> Iterator[tuple[Any, PreparedWeight]]:
    """Weights that a kernel has a layout of its own for, of `times` as many inputs, and what it makes of each."""
    assert kernel.prepare is not None
    npu_reference.load()  # layouts of Ascend are casts by its operators
    *lead, inputs = SHAPES.get(op.name, (128,))
    shape = (*lead, times * inputs)
    quantized = (made(kind, *shape[-2:], *shape[:-2]) for kind in OF.get(op.name, ()))
    for weight in (Draw(torch.bfloat16).normal(*shape), *quantized):
        if kernel.reads(weight):
            with lowering.use(target=kernel.targets[0]):
                ready = kernel.prepare(weight)
            if isinstance(ready, PreparedWeight):
                yield weight, ready


@pytest.mark.parametrize(("op", "kernel"), [pytest.param(*one, id=f"{one[0].name} {one[1].name}") for one in LAYING])
def test_a_prepared_weight_is_what_it_was_made_of(op: Op, kernel: Kernel) -> None:
    """Its shape and place, kernels that exist, a key of its own and its size; its plain values, or words."""
    for (weight, ready), (_, longer) in zip(prepared(op, kernel), prepared(op, kernel, 2), strict=True):
        assert type(longer) is type(ready) and longer.static_key() != ready.static_key()
        assert kernel.name in ready.kernels
        assert set(ready.kernels) <= {name for other in OPS.values() for name in other.kernels}
        assert tuple(ready.shape) == tuple(weight.shape) and ready.device == weight.device
        plain_key = weight.static_key() if isinstance(weight, QuantizedWeight) else (weight.shape, weight.dtype)
        assert isinstance(hash(ready.static_key()), int) and ready.static_key() != plain_key
        if type(ready).plain is PreparedWeight.plain:
            with pytest.raises(LoweringError, match=f"{kernel.name}.*use the plain parameters"):
                ready.plain()
        else:
            assert tuple(ready.plain().shape) == tuple(weight.shape)
