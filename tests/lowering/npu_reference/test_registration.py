"""How the namespace is defined: from recorded schemas, once, for one version, and never beside torch_npu."""

from __future__ import annotations

import inspect
import subprocess
import sys
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lowering import LoweringError, npu_reference
from lowering.npu.features import recorded

VERSIONS = tuple(recorded())
EVERY = [(version, name) for version, schemas in recorded().items() for name in schemas]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_operator_that_kernels_call_has_a_reference(version: str) -> None:
    assert set(recorded()[version]) <= set(npu_reference.OPERATORS)


@pytest.mark.parametrize(("version", "name"), EVERY)
def test_references_take_the_arguments_of_every_version(version: str, name: str) -> None:
    names = [argument.name for argument in torch._C.parse_schema(recorded()[version][name]).arguments]
    for part in (npu_reference.OPERATORS[name].shapes, npu_reference.OPERATORS[name].run):
        inspect.signature(part).bind(**dict.fromkeys(names))


def test_loading_again_does_nothing() -> None:
    npu_reference.load("2.13.0")
    npu_reference.load("2.13.1")


def test_another_version_needs_another_process() -> None:
    with pytest.raises(LoweringError, match=r"2\.13\.0 are loaded.* 2\.8\.0\.post5 need a process of their own"):
        npu_reference.load("2.8.0")
    with pytest.raises(LoweringError, match=r"'9\.9'.* 2\.14\.0"):
        npu_reference.load("9.9")


def test_torch_npu_excludes_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    with pytest.raises(LoweringError, match="torch_npu is loaded"):
        npu_reference.load()


def test_an_older_version_has_its_own_defaults() -> None:
    """In 2.8 the layout of rotary is BSH unless named, and the chunked delta rule does not exist."""
    program = """
import torch
from lowering import npu_reference
npu_reference.load("2.8")
q, cos = torch.randn(5, 2, 64), torch.ones(5, 1, 64)
torch.ops.npu.npu_apply_rotary_pos_emb(q, q.clone(), cos, cos, layout="TND")
assert not hasattr(torch.ops.npu, "npu_chunk_gated_delta_rule")
try:
    torch.ops.npu.npu_apply_rotary_pos_emb(q, q.clone(), cos, cos)
except npu_reference.OperatorError as error:
    assert "layout is 'BSH'" in str(error)
else:
    raise AssertionError("the default layout was taken")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_programs_are_recorded_as_calls_of_the_operators() -> None:
    def program(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        return torch.ops.npu.npu_swiglu(torch.ops.npu.npu_rms_norm(x, gamma, epsilon=1e-3)[0])

    graph = make_fx(program, tracing_mode="fake")(torch.randn(3, 16), torch.ones(16))
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert [name for name in called if name.startswith("npu.")] == [
        "npu.npu_rms_norm.default",
        "npu.npu_swiglu.default",
    ]


def test_limits_hold_without_values() -> None:
    with FakeTensorMode(), pytest.raises(npu_reference.OperatorError, match="npu_swiglu: axis -1"):
        torch.ops.npu.npu_swiglu(torch.empty(3, 7))
