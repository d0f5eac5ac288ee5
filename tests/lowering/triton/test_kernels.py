"""Our Triton kernels in the registry: where they are offered, what they refuse, how reports and captures see them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import funcmodels as fm
import lowering
from lowering import Compiled, LoweringError, Rows, ops
from lowering.cases import CASES
from lowering.op import OPS, find
from lowering.target import ASCEND, TARGETS
from lowering.triton import catalogue, kernels, launch
from lowering.triton.emulated import emulated
from tests.lowering.triton.interpreter import runner
from tests.lowering.triton.test_numbers import OPS as TAKEN_UP
from tests.oracle.states import ROUNDING
from tests.tolerances import assert_close

OURS = {op.name: kernel for op in OPS.values() for kernel in op.kernels.values() if kernel.name.startswith("triton_")}


def step(**changed: Any) -> dict[str, Any]:
    """Arguments of a decoding step of two rows, four heads on two of keys, dims of 8."""
    given = {"q": torch.randn(2, 2, 8), "v": torch.randn(2, 4, 8), "decay": -torch.rand(2, 4), "beta": torch.rand(2, 4)}
    rows = Rows(torch.tensor([0, 1, 2], dtype=torch.int32), max_query=1, uniform=True)
    return {**given, "k": given["q"], "state": torch.randn(3, 4, 8, 8), "rows": rows, "keep_steps": False, **changed}


def refusal(op: str, target: str = "ascend910b", **given: Any) -> str:
    """What the kernel of ours says of a call, with nothing else to choose before it."""
    asked: dict[str, Any] = {op: f"triton_{op}"}
    with lowering.use(target=target, **asked), pytest.raises(LoweringError) as raised:
        find(op)(**given)
    return str(raised.value)


def test_each_is_offered_where_the_compiler_took_it() -> None:
    """After fused operators and before portable kernels, on every Ascend target, and nowhere else."""
    assert {*OURS} == {*TAKEN_UP}
    for name, kernel in OURS.items():
        assert kernel.targets == ASCEND and not kernel.differentiable and not kernel.batches
        tried = list(find(name).kernels.values())
        at = tried.index(kernel)
        assert all(other.operators for other in tried[:at]) and all(other.portable for other in tried[at + 1 :])


@pytest.mark.parametrize("target", ASCEND)
def test_the_record_is_what_the_compiler_says_today(target: str) -> None:
    """One kernel of each op, and every name of the catalogue; `compile-kernels --record` writes it anew."""
    machine = TARGETS[target]
    made = catalogue.launches(machine)
    assert kernels.record()[target].keys() == made.keys()
    for name in [next(name for name in made if name.partition(",")[0] == op) for op in OURS]:
        shown = catalogue.show(machine, name, made[name])
        assert isinstance(shown.outcome, Compiled)
        row = {"chip": shown.outcome.chip, "tile": shown.launch.constants["TILE"]}
        row |= {"used": round(shown.outcome.used, 4), "emulated": emulated(name.partition(",")[0], shown.target)}
        assert shown.good and kernels.record()[target][name] == row


def test_reports_say_what_speaks_for_them() -> None:
    """And who asks for what documentation names gets plain Torch, with the reason."""
    call = step()
    args = [call[name] for name in ("q", "k", "v", "decay", "beta", "state", "rows")]
    with lowering.use(target="ascend950"):
        report = lowering.explain(ops.gated_delta_rule, *args, keep_steps=False, target="ascend950")
    assert report.rows[0].kernel == "triton_gated_delta_rule" and report.rows[0].evidence == "emulated"
    assert report.rows[0].remark == "compiled for Ascend950PR_9589, UB at most 78%"
    with lowering.use(target="ascend950", evidence="documented"):
        choice = ops.gated_delta_rule.explain(*args, keep_steps=False)
    assert choice.kernel.portable and not choice.kernel.name.startswith("triton")
    assert "asks for what documentation names" in choice.refused["triton_gated_delta_rule"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"state": None}, "continues a state; this call has none"),
        ({"v": torch.randn(2, 3, 8)}, "v_heads in multiples of k_heads; this call has 3 and 2"),
        ({"state": torch.randn(3, 4, 8, 8, dtype=torch.float64)}, "one of this call's is float64"),
        ({"q": torch.randn(2, 2, 6), "k": torch.randn(2, 2, 6)}, "takes powers of two; k_dim is 6"),
        (
            {"rows": Rows(torch.tensor([0, 17, 17], dtype=torch.int32), max_query=17, uniform=False)},
            "at most 16 tokens",
        ),
        ({"q": torch.randn(0, 2, 8)}, "takes no empty tensor"),
    ],
)
def test_refusals_of_the_delta_rule(changed: dict[str, Any], message: str) -> None:
    assert message in refusal("gated_delta_rule", **step(**changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": (2, 4, 24), "k_pages": (3, 8, 2, 24)}, "takes powers of two; head_dim is 24"),
        ({"v_pages": (3, 8, 2, 8)}, "takes dims from 16 on; v_dim is 8"),
        ({"q": (2, 3, 16)}, "takes heads in multiples of kv_heads; this call has 3 and 2"),
        ({"k_pages": (3, 6, 2, 16), "v_pages": (3, 6, 2, 16)}, "takes powers of two; page_size is 6"),
        ({"selected": (2, 0)}, "takes no empty tensor"),
        ({"page_table": (2, 4097)}, "at most 4096 pages a row; this call has 4097"),
        (
            {"k_pages": (3, 8, 2, 512), "q": (2, 34, 512)},
            "takes up to 16 heads a key/value head at this dim; this call has 17",
        ),
    ],
)
def test_refusals_of_sparse_attention(changed: dict[str, tuple[int, ...]], message: str) -> None:
    shapes = {"q": (2, 4, 16), "k_pages": (3, 8, 2, 16), "v_pages": (3, 8, 2, 16)}
    shapes |= {"selected": (2, 5), "page_table": (2, 4)} | changed
    given: dict[str, Any] = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    selected, table = given.pop("selected").int(), given.pop("page_table").int()
    rows = Rows(torch.tensor([0, 1, 2], dtype=torch.int32), torch.ones(2, dtype=torch.int32), table, max_query=1)
    assert message in refusal("sparse_attention", **given, selected=selected, rows=rows, scale=0.25)


def test_blocks_of_three_tokens_are_refused() -> None:
    rows = Rows(torch.tensor([0, 1], dtype=torch.int32), torch.ones(1).int(), torch.zeros(1, 4).int(), max_query=1)
    blocks = torch.zeros(1, 2, dtype=torch.int32)
    assert "takes powers of two; ratio is 3" in refusal("expand_blocks", blocks=blocks, rows=rows, ratio=3)


def test_other_refusals() -> None:
    """A tile that no unified buffer holds, a window that is not there, gradients, symbols, other machines."""
    wide = torch.empty(2, 2**17, device="meta")
    norm = {"x": wide, "gate": wide, "weight": wide[0], "eps": 1e-6, "activation": "silu"}
    assert "a row of 131072 cells does not fit the 196608 bytes of ascend910b" in refusal("gated_rms_norm", **norm)
    rows = Rows(torch.tensor([0, 2], dtype=torch.int32), max_query=2, uniform=True)
    conv = {"x": torch.randn(2, 8), "weight": torch.randn(8, 4), "window": None, "rows": rows, "keep_steps": False}
    assert "continues a window; this call has none" in refusal("short_conv", **conv)
    assert "has no derivative" in refusal(
        "delta_gates",
        a=torch.randn(2, 4, requires_grad=True),
        b=torch.randn(2, 4),
        a_log=torch.randn(4),
        dt_bias=torch.randn(4),
    )
    assert "needs ascend910b, ascend910_93 or ascend950" in refusal(
        "delta_gates", "cpu", a=torch.randn(2, 4), b=torch.randn(2, 4), a_log=torch.randn(4), dt_bias=torch.randn(4)
    )


HEADS = torch.ones(2, 1, 8)


@pytest.mark.parametrize(
    ("op", "given", "message"),
    [
        ("swiglu", {"gate_up": torch.randn(2, 7)}, "halves the last axis; gate_up has 7"),
        ("geglu", {"gate_up": torch.randn(2, 7)}, "halves the last axis; gate_up has 7"),
        ("rms_norm", {"x": torch.randn(2, 8), "weight": torch.randn(1), "eps": 1e-6}, "8 channels and 1 weights"),
        (
            "add_gemma_rms_norm",
            {"x": torch.randn(2, 8), "residual": torch.randn(2, 8), "weight": torch.randn(6), "eps": 1e-6},
            "8 channels and 6 weights",
        ),
        (
            "grouped_gemma_rms_norm",
            {"x": torch.randn(2, 8), "weight": torch.randn(8), "groups": 3, "eps": 1e-6},
            "groups of one size; this call has 8 channels in 3 groups",
        ),
        (
            "rotary",
            {"q": HEADS, "k": HEADS.half(), "cos": HEADS[:, 0, :4], "sin": HEADS[:, 0, 4:]},
            "takes one dtype; found q float32, k float16",
        ),
    ],
)
@pytest.mark.plain  # the hook's checks of shapes would come first
def test_refusals_of_what_would_be_read_wrongly(op: str, given: dict[str, Any], message: str) -> None:
    """Sizes and dtypes that the op's body has its own say about, and a kernel would go past."""
    assert message in refusal(op, **given)


class Seen(TorchDispatchMode):
    """The operators that Torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_planning_leaves_no_trace() -> None:
    """What a plan asks Torch for, as frequencies, belongs to no program that is being traced."""
    places, found = torch.arange(4), Seen()
    with lowering.use(target="ascend910b"), found:
        choice = ops.rotary_angles.explain(places, rotary_dim=8, theta=1e4)
    assert choice.kernel.name == "triton_rotary_angles" and not found.names


def test_on_the_cpu_the_body_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the references of Ascend's operators are loaded; else an error says what to do."""
    args, kwargs = next(case for case in CASES if case.op == "delta_gates").arguments()
    monkeypatch.setattr(kernels, "loaded", lambda operators: False)
    with lowering.use(target="ascend910b"), pytest.raises(LoweringError, match="these tensors are on the CPU"):
        ops.delta_gates(*args, **kwargs)
    monkeypatch.setattr(kernels, "loaded", lambda operators: True)
    with lowering.use(target="ascend910b"):
        found = ops.delta_gates(*args, **kwargs)
    assert all(map(torch.equal, found, ops.delta_gates.body(*args, **kwargs)))


def test_a_launch_without_triton_says_what_is_missing() -> None:
    with pytest.raises(LoweringError, match=r"needs Triton, and there is none here .*; install triton-ascend"):
        launch._kernel("norm", "gated_rms_norm")


def test_a_captured_step_starts_the_same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the whole bundled model: eager and captured steps agree to the last bit, and with the references."""
    called: list[str] = []
    monkeypatch.setattr(launch, "RUNNER", lambda file, name, *rest: (called.append(name), runner(file, name, *rest)))
    model, params = fm.load("bundled", dtype=torch.float32)
    names = ("gated_delta_rule", "delta_gates", "short_conv")
    asked = {name: f"triton_{name}" for name in names}
    state = model.init_state(rows=2, max_len=16, dtype=torch.float32, recurrent_dtype=torch.float32)
    _, state = model.forward(params, state, fm.Batch.from_lists([[5, 6, 7], [8]], state))
    batch = fm.Batch.from_lists([[9], [10]], state)
    expected, _ = model.forward(params, state, batch)
    step = lowering.jit(lambda p, s, b: _on_ascend(asked, model.forward, p, s, b), backend="fx")
    found, _ = _on_ascend(asked, model.forward, params, state, batch)
    assert {"recurrent", "delta_gates", "short_conv"} <= {*called}
    assert_close(found.logits, expected.logits, looser=5, reason=ROUNDING)
    seen = len(called)
    captured, _ = step(params, state, batch)
    again, _ = step(params, state, batch)
    assert torch.equal(captured.logits, found.logits) and torch.equal(again.logits, found.logits)
    assert len(called) > seen and step.captures == 1


def _on_ascend(asked: dict[str, Any], function: Any, *args: Any) -> Any:
    """A call whose delta nets are those of Ascend, and whose other ops are the machine's own."""
    others = (name for name, op in OPS.items() if name not in asked and len(op.serving("ascend910b")) > 1)
    rest: dict[str, Any] = dict.fromkeys(others, "torch")
    with lowering.use(target="ascend910b", **rest, **asked):
        return function(*args)


def test_the_record_is_text_that_a_person_reads() -> None:
    rows = json.loads(kernels.RECORD.read_text(encoding="utf-8"))
    assert {*rows} == {*ASCEND} and all(0 < row["used"] <= 1 for named in rows.values() for row in named.values())
