"""Host integers of arguments in captured calls: computed with anew in every replay, or an error, and never frozen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import lowering
from lowering import CaptureError
from lowering.jit import backends as graphs
from lowering.jit.cuda import CudaGraphs
from lowering.jit.npu import NpuGraphs
from lowering.jit.program import flattened
from lowering.protocols import HostValued
from params.tree import off_tree, tree, unchecked
from tests.lowering.jit.npu_double import Double
from tests.lowering.jit.npu_models import on


@tree
class Rows(HostValued):
    """A tensor, and what the host knows of its rows."""

    x: Tensor
    counts: tuple[Any, ...] = off_tree(default=())
    known: bool = off_tree(default=True)

    def host_ints(self) -> tuple[Any, ...]:
        return self.counts

    def with_host_ints(self, values: tuple[Any, ...]) -> Rows:
        return unchecked(Rows, x=self.x, counts=values, known=self.known)

    def host_facts(self) -> tuple[bool, ...]:
        return (self.known,)


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    """An operator that adds a list to a vector, and has a check that branches on the list."""
    library = torch.library.Library("graphs_test", "FRAGMENT")
    library.define("add_list(Tensor x, *, SymInt[] lengths) -> Tensor")
    library.impl("add_list", lambda x, *, lengths: x + torch.tensor(lengths, dtype=x.dtype), "CPU")

    def shape(x: Tensor, *, lengths: list[int]) -> Tensor:
        assert len(lengths) == x.shape[0] and min(lengths) >= 0
        return torch.empty_like(x)

    library.impl("add_list", shape, "Meta")
    yield
    library._destroy()


def add_list(x: Tensor, lengths: list[Any]) -> Tensor:
    return torch.ops.graphs_test.add_list(x, lengths=lengths)


def ends(rows: Rows) -> Tensor:
    """x plus the rows' ends, and a bounded length at last."""
    return add_list(rows.x, [*accumulate(rows.counts), torch.sym_min(sum(rows.counts), 6)])


CALLS = [(0, 1), (1, 1), (1, 0), (5, 2), (0, 0), (7, 9)]


def test_lists_follow_the_host() -> None:
    step = lowering.jit(ends, backend="fx")
    for counts in CALLS:
        found = step(Rows(torch.zeros(3), counts))
        assert found.tolist() == [counts[0], sum(counts), min(sum(counts), 6)], counts
    assert step.captures == 1


def test_programs_without_host_integers_do_not_take_any() -> None:
    step = lowering.jit(lambda rows: rows.x * 2, backend="fx")
    for counts in CALLS:
        assert step(Rows(torch.ones(3), counts)).tolist() == [2, 2, 2]
    (capture,) = step._graphs.values()
    assert capture.program.host == ()
    assert len([node for node in capture.program.graph.graph.nodes if node.op == "placeholder"]) == 1


def branch(rows: Rows) -> Tensor:
    return rows.x if rows.counts[0] > 2 else -rows.x


def smaller(rows: Rows) -> Tensor:
    return rows.x + min(rows.counts)


def looped(rows: Rows) -> Tensor:
    return torch.stack([rows.x for _ in range(rows.counts[1])]).sum(0)


def sized(rows: Rows) -> Tensor:
    return rows.x[: rows.counts[0]]


def equal(rows: Rows) -> Tensor:
    return rows.x if rows.counts[0] == rows.counts[1] else -rows.x


def as_tensor(rows: Rows) -> Tensor:
    return rows.x[:2] + torch.tensor(rows.counts)


def made(rows: Rows) -> Tensor:
    return torch.zeros(rows.counts[0]) + rows.x.sum()


@pytest.mark.parametrize("function", [branch, smaller, looped, sized, equal, as_tensor, made])
def test_a_branch_on_one_is_an_error_at_its_line(function: Any) -> None:
    line = re.escape(_only_line(function))
    for counts in ((1, 1), (3, 4)):
        with pytest.raises(CaptureError, match=rf"test_host_values.py:\d+ \({line}\) branches on a row length"):
            lowering.jit(function, backend="fx")(Rows(torch.ones(3), counts))


def _only_line(function: Any) -> str:
    from inspect import getsource

    return getsource(function).splitlines()[1].strip()


def test_what_is_equal_for_all_values_is_no_branch() -> None:
    def same(rows: Rows) -> Tensor:
        both = rows.counts[0] + 2 == 2 + rows.counts[0]
        return rows.x if both else -rows.x

    step = lowering.jit(same, backend="fx")
    assert step(Rows(torch.ones(2), (3,))).tolist() == step(Rows(torch.ones(2), (0,))).tolist() == [1, 1]


def test_a_host_integer_is_no_result() -> None:
    with pytest.raises(CaptureError, match="returns a row length of the host"):
        lowering.jit(lambda rows: (rows.x, rows.counts[0] + 1), backend="fx")(Rows(torch.ones(2), (3,)))


def test_what_the_host_knows_is_part_of_the_key_where_it_matters() -> None:
    step = lowering.jit(ends, backend="fx")
    step(Rows(torch.zeros(3), (1, 2)))
    with pytest.warns(lowering.RecaptureWarning, match="since the host knows row lengths and did not, or the reverse"):
        step(Rows(torch.zeros(3), (1, 2), known=False))
    assert step.captures == 2
    free = lowering.jit(lambda rows: rows.x * 2, backend="fx")
    free(Rows(torch.zeros(3), (1, 2)))
    assert free(Rows(torch.ones(3), (1, 2), known=False)).tolist() == [2, 2, 2]
    assert free.captures == 1


def test_graphs_that_would_keep_a_list_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    double = Double()
    on(double, monkeypatch)
    monkeypatch.setitem(graphs.BACKENDS, "cuda", lambda: CudaGraphs(double, "cpu"))
    for backend, known in (("npu", "npu_fused_infer_attention_score, .*_v2"), ("cuda", "none")):
        message = f"graphs_test.add_list.default takes row lengths from the host.* given new ones: {known}. Ask for"
        with pytest.raises(CaptureError, match=message):
            lowering.jit(ends, backend=backend)(Rows(torch.zeros(3), (1, 2)))
        scaled = lowering.jit(lambda rows: rows.x * rows.counts[0], backend=backend)
        with pytest.raises(CaptureError, match=r"aten.mul.Tensor takes row lengths from the host"):
            scaled(Rows(torch.zeros(3), (1, 2)))
    assert not double.graphs
    with pytest.raises(CaptureError, match="which compiled code would freeze; name backend="):
        lowering.jit(ends, backend="inductor")(Rows(torch.zeros(3), (1, 2)))


def test_the_backend_is_that_of_where_the_tensors_lie() -> None:
    step = lowering.jit(lambda x: x)
    for device, kind in (("cpu", graphs.Inductor), ("cuda", CudaGraphs), ("npu", NpuGraphs)):
        flat = flattened(torch.ones(1))
        where: Any = SimpleNamespace(device=SimpleNamespace(type=device))
        flat.tensors[:] = [where]
        assert type(step._backend({"x": flat})) is kind
