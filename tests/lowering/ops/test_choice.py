"""How a kernel is chosen, explained, cached, asked for by name and refused."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointError, checkpoint

import funcmodels as fm
import lowering
from lowering import OPS, TARGETS, LoweringError, Policy, ops
from lowering.detect import of_device
from lowering.kernel import REFERENCE, Choice
from lowering.op import Op
from lowering.policy import from_environment
from lowering.target import named
from lowering.weights import PreparedWeight, plain
from params import TensorSpec
from tests.cases import CASES, DECODE_1, Case, Draw, RowCounts, cases_of, delta
from tests.each import each, try_all
from tests.tiny import SIZES

SUPPORTED = [name for name, target in TARGETS.items() if target.refused is None]


@pytest.fixture
def doubled() -> Iterator[Op]:
    """An op of this test alone, with two kernels: one for small inputs, one for float64 on another target too."""

    def test_doubled(x: Tensor, *, times: int = 2) -> Tensor:
        return x * times

    made = Op(test_doubled)

    def refuse(x: Tensor, *, times: int = 2) -> str | None:
        return None if x.shape[0] <= 4 else f"takes at most 4 rows; this call has {x.shape[0]}"

    @made.kernel("small", targets=("cpu",), refuse=refuse)
    def _small(x: Tensor, *, times: int = 2) -> Tensor:
        return x + x

    @made.kernel("ascend", targets=("ascend950",))
    def _ascend(x: Tensor, *, times: int = 2) -> Tensor:
        return x * 2

    yield made
    del OPS["test_doubled"]


def test_the_first_kernel_that_takes_the_call_runs(doubled: Op) -> None:
    """Kernels are tried in the order registered, the reference last; explain gives each reason."""
    choice = doubled.explain(torch.zeros(3))
    assert choice.kernel.name == "small" and choice.refused == {} and choice.target is TARGETS["cpu"]
    choice = doubled.explain(torch.zeros(5))
    assert choice.kernel.name == REFERENCE
    assert choice.refused == {
        "small": "takes at most 4 rows; this call has 5",
        "ascend": "serves ascend950; target is cpu",
    }
    assert doubled.explain(torch.zeros(5), target="ascend950").kernel.name == "ascend"
    assert doubled.explain(torch.zeros(5), target="cuda").kernel.name == REFERENCE


def test_a_printed_report_leaves_out_kernels_of_other_targets_alone(doubled: Op) -> None:
    """By the targets of the kernel, not by how its reason begins; the rows keep every reason."""

    def refuse(x: Tensor, *, times: int = 2) -> str:
        return "serves nobody today"

    @doubled.kernel("picky", targets=("cpu",), refuse=refuse)
    def picky(x: Tensor, *, times: int = 2) -> Tensor:
        return x

    with lowering.record() as report:
        doubled(torch.zeros(5))
    (row,) = report.rows
    assert set(row.refused) == {"small", "ascend", "picky"}
    assert "picky: serves nobody today" in row.reasons() and "ascend" not in row.reasons()
    assert "serves nobody today" in str(report)


def test_counting_a_call_compares_nothing(doubled: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report makes the row of a choice once, whatever the number of calls: who records does not run slower."""
    made = []
    row_of = lowering.Report._row
    monkeypatch.setattr(lowering.Report, "_row", lambda self, *args: made.append(args) or row_of(self, *args))
    with lowering.record() as report:
        for rows in (2, 2, 3, 5, 2, 5):
            doubled(torch.zeros(rows))
    assert [(row.kernel, row.count) for row in report.rows] == [("small", 4), (REFERENCE, 2)]
    assert len(made) == 3, "one for each signature"
    assert pickle.loads(pickle.dumps(report)) == report


def test_a_kernel_asked_for_by_name_runs_or_raises(doubled: Op) -> None:
    """Never another in its place; the error gives the reason, the call and what else there is."""
    with lowering.use(test_doubled="small"), lowering.record() as report:
        doubled(torch.zeros(2))
        with pytest.raises(
            LoweringError, match=r"(?s)'small' was asked for.*at most 4 rows; this call has 5.*x=f32\[5\].*torch"
        ):
            doubled(torch.zeros(5))
    elsewhere = r"^test_doubled: kernel 'ascend' needs ascend950, target is cpu; use 'small' or drop the preference$"
    with lowering.use(test_doubled="ascend"), pytest.raises(LoweringError, match=elsewhere):
        doubled(torch.zeros(2))
    with lowering.use(test_doubled=REFERENCE), lowering.record() as other:
        doubled(torch.zeros(2))
    assert [row.kernel for row in report.rows + other.rows] == ["small", REFERENCE]


def test_strict_leaves_the_reference_out(doubled: Op) -> None:
    """Unless it is asked for by name."""
    with lowering.use(strict=True):
        doubled(torch.zeros(2))
        reason = r"(?s)at most 4 rows.*strict=True leaves the Torch reference out"
        advice = r'use\(test_doubled="torch"\), or leave strict=True out$'
        with pytest.raises(LoweringError, match=f"{reason}.*to fix: change the call, or allow its reference.*{advice}"):
            doubled(torch.zeros(5))
        with lowering.use(test_doubled=REFERENCE):
            doubled(torch.zeros(5))


def test_policies_nest_and_end(doubled: Op) -> None:
    """An inner policy adds to the outer one; a given policy replaces it; afterwards nothing is left."""
    with lowering.use(test_doubled=REFERENCE):
        with lowering.use(rms_norm="torch") as inner:
            assert dict(inner.prefer) == {"test_doubled": REFERENCE, "rms_norm": "torch"}
            assert doubled.explain(torch.zeros(2)).kernel.name == REFERENCE
        with lowering.use(Policy()):
            assert doubled.explain(torch.zeros(2)).kernel.name == "small"
    assert doubled.explain(torch.zeros(2)).kernel.name == "small"
    with pytest.raises(ZeroDivisionError), lowering.use(test_doubled=REFERENCE):
        raise ZeroDivisionError
    assert doubled.explain(torch.zeros(2)).kernel.name == "small"


def test_unknown_names_give_the_nearest(doubled: Op) -> None:
    """Ops, kernels and targets."""
    with (
        pytest.raises(LoweringError, match="unknown op 'rms_nrom'; did you mean 'rms_norm'"),
        lowering.use(rms_nrom="torch"),
    ):
        pass
    with (
        pytest.raises(LoweringError, match="no kernel 'smal'; there are: small, ascend, torch"),
        lowering.use(test_doubled="smal"),
    ):
        pass
    with (
        pytest.raises(LoweringError, match="unknown target 'ascend95'; did you mean 'ascend950'"),
        lowering.use(target="ascend95"),
    ):
        pass
    for said, meant in (("ascend910c", "ascend910_93"), ("A2", "ascend910b"), ("Atlas A5", "ascend950")):
        with pytest.raises(LoweringError, match=f"did you mean '{meant}'"):
            named(said)
    with pytest.raises(LoweringError, match=r"known ops: .*rms_norm"):
        lowering.find("?")


def test_ascend310p_is_refused_with_the_reason() -> None:
    """By name and as a value."""
    for given in ("ascend310p", TARGETS["ascend310p"]):
        with pytest.raises(LoweringError, match="'ascend310p' is refused: no operator has been checked"):
            named(given)
    with pytest.raises(LoweringError, match="refused"):
        lowering.explain(ops.swiglu, torch.zeros(2, 4), target="ascend310p")


def test_a_device_without_target_says_what_to_name() -> None:
    """Also a call without any tensor."""
    assert of_device(torch.device("cuda", 1)) is TARGETS["cuda"] and of_device(torch.device("meta")) is TARGETS["cpu"]
    with pytest.raises(LoweringError, match="no target is known for device type 'xla'; name one"):
        of_device(torch.device("xla"))
    with pytest.raises(LoweringError, match="without any tensor"):
        ops.swiglu(3)


def test_registration_mistakes_raise_at_once(doubled: Op) -> None:
    """Another signature, the same name twice, an op twice."""
    with pytest.raises(LoweringError, match=r"kernel 'bad' takes \(x, \*, scale.*the op takes"):
        doubled.kernel("bad", targets=("cpu",))(lambda x, *, scale=1: x)
    with pytest.raises(LoweringError, match=r"kernel 'small' is registered twice"):
        doubled.kernel("small", targets=("cpu",))(lambda x, *, times=2: x)
    with pytest.raises(LoweringError, match="op 'swiglu' is registered twice"):
        Op(ops.swiglu.body)
    assert list(doubled.kernels) == ["small", "ascend", REFERENCE]


def test_an_op_is_chosen_once_a_signature(doubled: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes, dtypes and static arguments make a signature; values and strides do not."""
    seen = counted(monkeypatch)
    for _ in range(3):
        doubled(torch.randn(4, 3))
        doubled(torch.randn(3, 4).T)
    assert len(seen) == 1
    doubled(torch.randn(5, 3))
    doubled(torch.randn(4, 3, dtype=torch.float64))
    doubled(torch.randn(4, 3), times=2)
    doubled(x=torch.randn(4, 3))
    doubled(x=torch.randn(4, 3))
    assert len(seen) == 5


def test_the_cache_is_per_policy_and_target(doubled: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal policies share their choices, however often they are set."""
    x = torch.zeros(2)
    seen = counted(monkeypatch)
    for _ in range(3):
        doubled(x)
        for kernel in ("small", REFERENCE):
            with lowering.use(test_doubled=kernel):
                doubled(x)
        with lowering.use(target="ascend950"):
            doubled(x)
    assert [choice.kernel.name for choice in seen] == ["small", "small", REFERENCE, "ascend"]


def test_a_later_kernel_clears_the_cache(doubled: Op) -> None:
    """What was chosen before it is chosen again."""
    doubled(torch.zeros(9))
    doubled.kernel("any", targets=("cpu",))(lambda x, *, times=2: x * 3)
    assert doubled(torch.ones(9)).tolist() == [3.0] * 9


def by(factor: int) -> Any:
    """A kernel that multiplies by `factor`, whatever it is asked for."""

    def run(x: Tensor, *, times: int = 2) -> Tensor:
        return x * factor

    return run


def test_a_kernel_only_by_name_runs_where_it_is_named(doubled: Op) -> None:
    x = torch.ones(9)
    doubled(x)
    doubled.kernel("mine", targets=("cpu",), only_by_name=True)(by(5))
    assert doubled(x).tolist() == [2.0] * 9
    assert doubled.explain(x).refused["mine"] == "runs only where it is asked for by name"
    with lowering.use(test_doubled="mine"):
        assert doubled(x).tolist() == [5.0] * 9
    with lowering.use(strict=True), pytest.raises(LoweringError, match="mine: runs only where it is asked for by name"):
        doubled(x)
    assert "`mine`" not in lowering.table()


def test_a_cell_can_be_run_again(doubled: Op) -> None:
    """With `replace` an op, a kernel and a rule take the place of those before; the reference stays what it is."""
    x = torch.ones(9)
    for factor in (3, 4):
        doubled.kernel("mine", targets=("cpu",), replace=True)(by(factor))
        doubled.order_by(("cpu",), replace=True)(lambda x, *, times=2: (("mine",), "always"))
        doubled.without(("ascend950",), "nothing there")
        assert doubled(x).tolist() == [float(factor)] * 9
    with pytest.raises(LoweringError, match="kernel 'torch' is registered twice; it is the op's own body"):
        doubled.kernel(REFERENCE, targets=("cpu",), replace=True)(by(3))
    again = lowering.op(replace=True)(doubled.body)
    assert OPS["test_doubled"] is again and list(again.kernels) == [REFERENCE]


@pytest.mark.plain
@pytest.mark.parametrize("captured", [False, True])
def test_a_removed_kernel_runs_nowhere(doubled: Op, captured: bool, recwarn: pytest.WarningsRecorder) -> None:
    """Not by a choice that was made before, nor in a captured program, nor by a rule that names it."""
    x, run = torch.ones(9), lowering.jit(lambda x: doubled(x), backend="fx") if captured else doubled
    doubled.order_by(("cpu",))(lambda x, *, times=2: (("mine",), "always"))
    doubled.kernel("mine", targets=("cpu",))(by(3))
    assert run(x).tolist() == [3.0] * 9
    doubled.remove("mine")
    assert run(x).tolist() == [2.0] * 9
    with pytest.raises(LoweringError, match="no kernel 'mine'"):
        doubled.remove("mine")
    with pytest.raises(LoweringError, match="which cannot be removed"):
        doubled.remove(REFERENCE)
    doubled.kernel("mine", targets=("cpu",))(by(7))
    assert run(x).tolist() == [7.0] * 9
    said = [str(warning.message) for warning in recwarn]
    assert len(said) == captured and all("since kernels were registered or removed" in words for words in said)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Choice]:
    """Every choice made from here on."""
    seen: list[Choice] = []
    choose = Op.choose

    def counting(self: Op, *args: Any) -> Choice:
        seen.append(choose(self, *args))
        return seen[-1]

    monkeypatch.setattr(Op, "choose", counting)
    return seen


@each(
    [case for case in CASES if not case.bench],
    by=lambda case: case.op,
    hooked=lambda case: [re.sub(r"[\d_]+", " ", str(case))],
)
def test_values_do_not_choose(case: Case) -> None:
    """Other values of the same shapes get the same kernel, and a second call chooses nothing."""
    op = OPS[case.op]
    kernels = []
    for seed in (0, 1):
        args, kwargs = case.arguments(seed=seed)
        with lowering.record() as report:
            op(*args, **kwargs)
        kernels.append([(row.kernel, row.refused) for row in report.rows])
    assert kernels[0] == kernels[1]


@each([case for case in CASES if not case.bench])
def test_explain_works_for_every_target(case: Case) -> None:
    """Without running on it, every op of every case has a kernel, or an error that says why not."""
    args, kwargs = case.arguments()
    for target in SUPPORTED:
        choice = OPS[case.op].explain(*args, target=target, **kwargs)
        assert choice.target is TARGETS[target] and choice.kernel.serves(choice.target)
        assert all(reason for reason in choice.refused.values())


def layer(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Two ops, one called twice."""
    return ops.rms_norm(ops.linear(ops.linear(x, weight), weight), scale, eps=1e-6)


def test_explain_reports_what_a_run_records() -> None:
    """Same ops, same kernels, same counts; explain computes nothing and leaves its arguments alone."""
    args = (torch.randn(3, 8), torch.randn(8, 8), torch.ones(8))
    with lowering.record() as ran:
        layer(*args)
    explained = lowering.explain(layer, *args, target="cpu")
    assert explained.rows == ran.rows
    assert [(row.op, row.count) for row in ran.rows] == [("linear", 2), ("rms_norm", 1)]
    assert "onednn_packed" in str(explained) and "rms_norm" in repr(explained)


@pytest.mark.plain
@pytest.mark.parametrize("name", sorted({case.op for case in CASES}))
def test_explain_agrees_with_the_run(name: str) -> None:
    """For every op and choice, host-reading kernels included, whose bodies a dry run replaces by the reference."""
    chosen: dict[str, Case] = {}
    for case in cases_of(name):
        if not case.bench:
            args, kwargs = case.arguments()
            choice = OPS[name].explain(*args, **kwargs)
            chosen.setdefault(f"{choice.kernel.name} {choice.refused}", case)
    try_all([(case,) for case in chosen.values()], check_explained)


def check_explained(case: Case) -> None:
    args, kwargs = case.arguments()
    with lowering.record() as ran:
        OPS[case.op](*args, **kwargs)
    before = [x.clone() if isinstance(x, Tensor) else x for x in args]
    assert lowering.explain(OPS[case.op], *args, **kwargs).rows == ran.rows
    for x, y in zip(args, before, strict=True):
        assert not isinstance(x, Tensor) or torch.equal(x.nan_to_num(), y.nan_to_num())


def test_explain_takes_specs_and_fake_tensors() -> None:
    """A model without weights, and tensors without storage."""
    specs = (TensorSpec((3, 8)), TensorSpec((8, 8)), TensorSpec((8,), dtype=torch.float32))
    report = lowering.explain(layer, *specs, target="ascend950")
    assert {row.target.name for row in report.rows} == {"ascend950"}
    with FakeTensorMode() as mode:
        fakes = [torch.empty(3, 8), torch.empty(8, 8), torch.empty(8)]
    with mode:
        assert lowering.explain(layer, *fakes, target="ascend950").rows == report.rows


def test_explain_checks_its_policy() -> None:
    """As `use` does: an op or kernel that does not exist is an error, not ignored."""
    args = (torch.randn(3, 8), torch.randn(8, 8))
    for prefer, message in (
        ({"lineer": "torch"}, "did you mean 'linear'"),
        ({"linear": "tourch"}, "no kernel 'tourch'"),
    ):
        with pytest.raises(LoweringError, match=message):
            lowering.explain(ops.linear, *args, policy=Policy(prefer))


def test_explain_says_which_kernels_were_asked_for_by_name() -> None:
    """And of which torch_npu and CANN the operators are taken to be."""
    args = (torch.empty(3, 8, device="meta"), TensorSpec((8, 8)), TensorSpec((8,)))
    machine = lowering.target.named("ascend950", torch_npu="2.10.0")
    report = lowering.explain(layer, *args, target=machine, policy=Policy({"rms_norm": "torch"}))
    assert {row.op: row.reasons() == "asked for by name" for row in report.rows} == {"linear": False, "rms_norm": True}
    assert "lowered to ascend950 (torch_npu 2.10.0, CANN 9.1.0)" in str(report)


def test_explain_takes_meta_tensors_beside_specs() -> None:
    """Neither has a device of its own, so they meet on one."""
    args = (torch.empty(3, 8, device="meta"), TensorSpec((8, 8)), TensorSpec((8,)))
    report = lowering.explain(layer, *args, target="ascend950")
    assert [(row.op, row.count) for row in report.rows] == [("linear", 2), ("rms_norm", 1)]
    mixed = (torch.empty(3, 8, device="meta"), torch.randn(8, 8), TensorSpec((8,)))
    assert lowering.explain(layer, *mixed, target="ascend950").rows == report.rows


@pytest.mark.parametrize("experts", [0, 64])
def test_explain_takes_a_state_on_meta(experts: int) -> None:
    """A model without weights and a state without memory, on every target."""
    sizes: dict[str, Any] = {**SIZES, "model_type": "qwen3_5_text"}
    if experts:
        sizes |= {
            "model_type": "qwen3_5_moe_text", "num_experts": experts, "num_experts_per_tok": 2,
            "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16,
        }  # fmt: skip
    model = fm.build(sizes)
    state = model.init_state(2, 32, dtype=torch.bfloat16, device="meta")
    for target in SUPPORTED:
        report = lowering.explain(
            model.forward, model.param_spec(), state, fm.Batch.from_lists([[1, 2], [3]]), target=target
        )
        assert {row.target.name for row in report.rows} == {target}
        assert {"gated_delta_rule", "paged_attention"} <= {row.op for row in report.rows}


def test_a_dry_run_goes_once_a_signature(doubled: Op) -> None:
    """Later calls get tensors like the first one's; other shapes, and real calls, run."""
    ran: list[tuple[int, ...]] = []

    def body(x: Tensor, *, times: int = 2) -> Tensor:
        ran.append(tuple(x.shape))
        return x.new_empty(*x.shape, 3, dtype=torch.bfloat16)

    doubled.kernel("counted", targets=("cuda",))(body)

    def calls(x: Tensor) -> Tensor:
        for _ in range(3):
            y = doubled(x)
            assert (y.shape, y.dtype, y.device) == ((*x.shape, 3), torch.bfloat16, x.device)
        return doubled(x[:2])

    report = lowering.explain(calls, torch.zeros(9), target="cuda")
    assert ran == [(9,), (2,)] and [row.count for row in report.rows] == [4]
    lowering.explain(calls, torch.zeros(9), target="cuda")
    assert len(ran) == 2
    with lowering.use(target="cuda"):
        calls(torch.zeros(9))
    assert len(ran) == 6


def test_explain_gives_the_cost_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value read during explain is an error of the fake tensors, so none is read."""
    rows = RowCounts("long", (2000,), (0,))
    args, kwargs = delta(rows, 2, 4, 8, 8, state=True, keep_steps=False)(Draw(torch.float32))
    report = lowering.explain(ops.gated_delta_rule, *args, **kwargs)
    assert [row.kernel for row in report.rows] == ["torch_chunked"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [("attention=torch", {"attention": "torch"}), (" a = b , linear=torch,", {"a": "b", "linear": "torch"}), ("", {})],
)
def test_the_environment_sets_the_policy(given: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of op and kernel; anything else names the part that is not one."""
    monkeypatch.setenv("FUNCMODELS_LOWERING", given)
    assert dict(from_environment().prefer) == expected
    monkeypatch.setenv("FUNCMODELS_LOWERING", "attention=torch,linear")
    with pytest.raises(LoweringError, match="'linear' is not of the form op=kernel"):
        from_environment()


@pytest.mark.parametrize(
    ("given", "shown"),
    [("attention=torch", "torch"), ("atention=torch", "unknown op 'atention'; did you mean 'attention'")],
)
def test_a_process_takes_its_policy_from_the_environment(given: str, shown: str) -> None:
    """A mistake in it is an error at import, not a silent default."""
    code = "import torch; from lowering import Rows, ops; x = torch.ones(1, 1, 1)\n"
    code += "rows = Rows(torch.tensor([0, 1]), max_query=1, uniform=True)\n"
    code += "print(ops.attention.explain(x, x, x, rows, scale=1.0).kernel.name)"
    environment = {**os.environ, "FUNCMODELS_LOWERING": given, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == shown or (done.returncode != 0 and shown in done.stderr), done.stderr


def test_prepared_weights_choose_their_kernel() -> None:
    """A packed weight goes to the kernel that packed it; that kernel refuses a plain one and says how to make one."""
    args, kwargs = cases_of("linear")[0].arguments()
    packed = ops.linear.kernels["onednn_packed"].prepare(args[1])  # type: ignore[misc]
    assert ops.linear.explain(args[0], packed).kernel.name == "onednn_packed"
    choice = ops.linear.explain(*args, **kwargs)
    assert choice.kernel.name == REFERENCE
    assert choice.refused["onednn_packed"].endswith(
        "lowering.prepare(params) packs those of 524288 torch.float32 elements or more"
    )
    with (
        pytest.raises(LoweringError, match=r"x is torch.float64 and the weight was packed as torch.float32"),
        lowering.use(linear="onednn_packed"),
    ):
        ops.linear(args[0].double(), packed)


class Early(PreparedWeight):
    """A weight in the layout of one kernel."""

    kernels: ClassVar[tuple[str, ...]] = ("early",)

    def __init__(self, weight: Tensor) -> None:
        self.values = weight

    def plain(self) -> Tensor:
        """The weight as it was."""
        return self.values

    def static_key(self) -> object:
        """Enough for this test."""
        return type(self)


class Late(Early):
    """A weight in the layout of another."""

    kernels = ("late",)


class Owner:
    """A node with a weight of the op of this test."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight

    def lower_weights(self, prepare: Any) -> Owner:
        """With the weight that the op's kernel wants."""
        return Owner(prepare("test_scaled", self.weight))


def test_a_weight_is_prepared_for_the_kernel_that_is_chosen() -> None:
    """By the policy in force too; not at all where a rule may choose another kernel at each call."""
    x, owner = torch.ones(3), Owner(torch.full((3,), 2.0))

    def test_scaled(x: Tensor, weight: Any) -> Tensor:
        return x * plain(weight)

    op = Op(test_scaled)
    for kind in (Early, Late):
        op.kernel(*kind.kernels, targets=("cpu",), prepare=kind)(test_scaled)

    def met(kernel: str, layout: type) -> None:
        weight = lowering.prepare(owner).weight
        assert type(weight) is layout and op.explain(x, weight).kernel.name == kernel

    try:
        met("early", Early)
        with lowering.use(test_scaled="late"):
            met("late", Late)
        with lowering.use(test_scaled=REFERENCE):
            met(REFERENCE, Tensor)
        op.order_by(("cpu",))(lambda x, weight: (("late",) if len(x) < 9 else (), "late is for few"))
        met("late", Tensor)
        with lowering.use(test_scaled="early"):
            met("early", Early)
    finally:
        del OPS["test_scaled"]


def test_one_decode_step_chooses_the_step_kernel() -> None:
    """The delta rule's shape buckets: one token in every row, one in some, several."""
    chosen = {}
    for name, rows in {
        "one": DECODE_1,
        "some": RowCounts("some", (1, 0), (1, 1)),
        "few": RowCounts("few", (2, 2), (1, 1)),
    }.items():
        args, kwargs = delta(rows, 2, 4, 8, 8, state=True, keep_steps=False)(Draw(torch.float32))
        chosen[name] = ops.gated_delta_rule.explain(*args, **kwargs).kernel.name
    assert chosen == {"one": "torch_step", "some": REFERENCE, "few": "torch_chunked"}


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_policy_is_carried_to_threads_and_recomputations(repeats: int) -> None:
    """The kernels of the two choices save other tensors for the backward, so a recomputation by others fails."""
    q, k, v = (torch.randn(6, 2, 8, requires_grad=True) for _ in range(3))
    rows, run = RowCounts("two", (3, 3), (0, 0)).made(), list[str]()

    def attended() -> Tensor:
        run.append(ops.attention.explain(q, k, v, rows, scale=0.4).kernel.name)
        return ops.attention(q, k, v, rows, scale=0.4).sum()

    with lowering.use(attention="torch"):
        expected, here = attended(), lowering.in_force()
        lost = checkpoint(attended, use_reentrant=False)
        found = checkpoint(attended, use_reentrant=False, context_fn=lambda: (nullcontext(), lowering.in_force()))
    expected.backward()
    right, q.grad = q.grad, None
    with pytest.raises(CheckpointError):
        lost.backward()
    run.clear()
    for _ in range(repeats):
        found.backward(retain_graph=True)
    assert right is not None and q.grad is not None and torch.equal(q.grad, right * repeats)
    with here, here, ThreadPoolExecutor(1) as threads:
        threads.submit(attended).result()
        threads.submit(lambda: here.__enter__() or attended()).result()
    attended()
    assert run == ["torch"] * repeats + ["torch_sdpa", "torch", "torch_sdpa"]
