"""The backend of CUDA graphs over a stand-in for `torch.cuda`'s: no machine of the tests has a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import funcmodels as fm
import lowering
from lowering.jit import backends as graphs
from lowering.jit.cuda import CudaGraphs
from tests.bench import bench_cuda
from tests.lowering.jit.npu_double import Double
from tests.oracle.mtp import small


class CudaDouble(Double):
    """`torch.cuda` for graphs, without what only NPU graphs have."""

    def CUDAGraph(self) -> Any:  # noqa: N802
        return self.NPUGraph()

    def graph(self, cuda_graph: Any, pool: Any = None, stream: Any = None) -> Any:
        return super().graph(cuda_graph, pool)


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> CudaDouble:
    found = CudaDouble()
    monkeypatch.setitem(graphs.BACKENDS, "cuda", lambda: CudaGraphs(found, "cpu"))
    return found


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::lowering.RecaptureWarning")
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_graphs_equal_operators(kind: str, double: CudaDouble) -> None:
    """Prompts, tokens, windows and rows that join and leave: as with the operators of the same programs, to the bit."""
    one = small(kind)
    sides = []
    for backend in ("cuda", "fx"):
        step = lowering.jit(one.model.forward, ("state",), (8,), backend)
        commit = lowering.jit(fm.commit, ("state",), backend=backend)
        sides.append([step, commit, one.model.init_state(3, 40, page_size=4, pages=30)])
    kept = []

    def forward(ids: list[list[int]], **kwargs: Any) -> None:
        found = []
        for side in sides:
            out, side[2] = side[0](one.params, side[2], fm.Batch.from_lists(ids, side[2]), **kwargs)
            found.append(out.logits)
        assert torch.equal(*found)
        kept.append((found[0], found[0].clone()))

    def both(move: Any, *args: Any) -> None:
        for side in sides:
            side[2] = move(side[2], *args)

    forward([[1, 2, 3], [4], [5, 6]])
    for number in range(2):
        forward([[number], [2], [3]])
        forward([[6, 5], [5, 8], [9, 7]], keep_steps=True)
        accepted = torch.tensor([number % 3, 2, 1])
        for side in sides:
            side[2] = side[1](side[2], accepted)
        both(fm.select, [2, 0, 1])
        both(fm.release, [1])
        forward([[1], [7, 8, number], []])
    for row in range(3):
        mine, right = (fm.logical(side[2], row) for side in sides)
        assert all(torch.equal(mine[name], right[name]) for name in right)
    assert all(torch.equal(now, then) for now, then in kept)
    assert (sides[0][0].captures, sides[0][1].captures) == (3, 1)
    assert {graph.pool for graph in double.graphs} == {1, 2} and "update begins" not in double.log


def test_a_function_without_a_state(double: CudaDouble) -> None:
    step = lowering.jit(lambda x, y: (x + y, x), backend="cuda")
    for number in range(3):
        x = torch.full((4,), float(number))
        total, same = step(x, y=torch.ones(4))
        assert total.tolist() == [number + 1.0] * 4 and same.tolist() == [number] * 4
        x += 5
        assert same.tolist() == [number] * 4
    assert step.captures == 1 and len(double.graphs) == 1


def test_the_benchmark_says_that_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["bench_cuda"])
    with pytest.raises(SystemExit, match="Torch sees no CUDA GPU here, so nothing was captured"):
        bench_cuda.main()
