"""Random parameters: reproducible leaf by leaf, and distributed as stated."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy
import optree
import pytest
import torch

import params
from params import TensorSpec


def test_a_leaf_depends_on_its_path_alone(oracle: Any, spec_of: Any) -> None:
    """Another leaf, another layer count or a draft head changes no leaf that was there before."""
    config = oracle("dense").config
    first, second = params.init(spec_of(config), seed=3), params.init(spec_of(config, mtp=True), seed=3)
    assert dict(params.items(first)).keys() < dict(params.items(second)).keys()
    for path, leaf in params.items(first):
        assert torch.equal(leaf, params.at(second, path)), path
    assert second == params.init(spec_of(config, mtp=True), seed=3)


def test_seeds_and_paths_differ() -> None:
    """No two random leaves share values; neither do two seeds."""
    spec: Any = {name: TensorSpec((64,)) for name in ("a", "b")}
    trees = [params.init(spec, seed=seed) for seed in (0, 1, -1, 2**70)]
    values = [tree[name] for tree in trees for name in spec]
    assert all(not torch.equal(values[i], values[j]) for i in range(len(values)) for j in range(i))


def test_the_global_generator_is_left_alone() -> None:
    """`init` neither reads nor moves PyTorch's own seed."""
    spec: Any = {"a": TensorSpec((8,))}
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = params.init(spec)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(params.init(spec)["a"], first["a"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    """Leaves follow the model unless pinned; another dtype is the same draw, rounded."""
    spec: Any = {
        "free": TensorSpec((5, 3)),
        "pinned": TensorSpec((5,), "log_uniform", dtype=torch.float32),
        "none": None,
    }
    tree, wide = params.init(spec, dtype=dtype), params.init(spec, dtype=torch.float32)
    assert tree["free"].dtype == dtype and tree["pinned"].dtype == torch.float32 and tree["none"] is None
    assert torch.equal(tree["free"], wide["free"].to(dtype)) and torch.equal(tree["pinned"], wide["pinned"])


def test_meta() -> None:
    """On `meta` there are shapes and dtypes only."""
    spec: Any = {"a": TensorSpec((2**20, 2**20))}
    tree = params.init(spec, dtype=torch.bfloat16, device="meta")
    assert tree["a"].is_meta and tree["a"].shape == (2**20, 2**20) and tree["a"].dtype == torch.bfloat16


def draw(kind: Any, *shape: int) -> torch.Tensor:
    """A leaf with this initialiser, in float64."""
    spec: Any = {"x": TensorSpec(shape, kind)}
    return params.init(spec, seed=11)["x"].double()


def uniform(values: torch.Tensor, low: float, high: float) -> None:
    """Values are within the range, reach both ends, and have a uniform's mean and deviation (within 5 sigma)."""
    width, count = high - low, values.numel()
    assert values.min() >= low - 1e-6 * width and values.max() <= high + 1e-6 * width
    assert values.min() < low + 0.01 * width and values.max() > high - 0.01 * width
    assert abs(values.mean() - (low + high) / 2) < 5 * width / math.sqrt(12 * count)
    assert abs(values.var() / (width**2 / 12) - 1) < 5 * math.sqrt(0.8 / count)


def test_distributions() -> None:
    """Each initialiser draws what its name says, checked on the scale where it is simple."""
    count = 20_000
    assert (draw("zeros", 7) == 0).all() and (draw("ones", 7) == 1).all()
    normal = draw("normal", count)
    assert abs(normal.mean()) < 5 * 0.02 / math.sqrt(count)
    assert abs(normal.var() / 0.02**2 - 1) < 5 * math.sqrt(2 / count)
    uniform(draw("log_uniform", count).exp(), 0.01, 16)
    uniform(torch.log10(torch.nn.functional.softplus(draw("inverse_softplus", count))), -3, -1)
    uniform(draw("conv", count // 4, 4), -0.5, 0.5)


def test_unknown_initialiser() -> None:
    """A misspelt initialiser is named."""
    wrong: Any = params.unchecked(TensorSpec, shape=(1,), init="gauss", dtype=None, parts=None)
    with pytest.raises(ValueError, match="unknown initialiser 'gauss'"):
        params.init({"x": wrong})


@pytest.mark.plain
@pytest.mark.parametrize("seed", ["a", 1.0, None, True, float("nan"), [1], torch.tensor(1.0)])
def test_seeds_that_are_no_integers(seed: Any) -> None:
    with pytest.raises(TypeError, match="seed must be an integer, found"):
        params.init({"x": TensorSpec((2,), "normal")}, seed)


@pytest.mark.plain
def test_a_seed_is_its_number() -> None:
    """Of whichever type and size."""
    kinds: Any = (torch.tensor(3), numpy.int8(3), 3)
    spec: Any = TensorSpec((2,), "normal")
    drawn = [params.init(spec, seed) for seed in (*kinds, -1, 2**70)]
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])
    assert not any(torch.equal(drawn[0], other) for other in drawn[3:])


def test_trees_pass_through_pickle_without_trust_and_through_optree(oracle: Any, spec_of: Any) -> None:
    """`torch.load` refuses what is no plain data; optree, which optimisers of functions use, finds every leaf."""
    made = params.init(spec_of(oracle("dense").config), seed=2)
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    assert torch.load(file) == made
    leaves, structure = optree.tree_flatten(made)
    assert len(leaves) == len(params.leaves(made)) > 1
    assert optree.tree_unflatten(structure, leaves) == made
