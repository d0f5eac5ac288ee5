"""The device check and `compare`: what they find wrong, and what they write."""

from __future__ import annotations

import json
import operator
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowering
from lowering import LoweringError, cases, ops
from lowering import __main__ as commands
from lowering.__main__ import main
from lowering.check import comparison, journal
from lowering.check import device as check
from lowering.target import TARGETS
from tests.cases import CASES, VERIFY, Case, Draw, delta

CPU = torch.device("cpu")
FEW = tuple(case for case in CASES if case.op in ("geglu", "route_softmax", "write_pages") and not case.bench)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases of three ops: floating point, integers beside it, and one that writes in place."""
    monkeypatch.setattr(cases, "CASES", FEW)


@pytest.fixture
def kernel() -> Iterator[Callable[..., None]]:
    """`kernel(op, run, **options)` registers a CPU kernel called mine for the length of a test."""
    added: list[lowering.Op] = []

    def add(op: lowering.Op, run: Callable[..., Any], **options: Any) -> None:
        op.kernel("mine", targets=("cpu",), **options)(run)
        added.append(op)

    yield add
    for op in added:
        del op.kernels["mine"]
        op._choices.clear()


def check_device(device: torch.device, target: lowering.Target, *only: str) -> check.Checked:
    """Every kernel of `target` on every case of the ops `only`, in this process."""
    trials = check.planned(device, target, only)
    found = tuple(trial.tried(device, target) for trial in trials)
    return check.Checked(check.environment(device, target), found, len(trials))


def outcomes(name: str) -> list[comparison.Outcome]:
    found = check_device(CPU, TARGETS["cpu"]).outcomes
    return [outcome for outcome in found if outcome.kernel == name]


def test_every_kernel_and_case_in_two_dtypes() -> None:
    found = check_device(CPU, TARGETS["cpu"])
    ran = {(outcome.op, outcome.kernel, outcome.case, outcome.dtype) for outcome in found.outcomes}
    assert ran == {
        (case.op, kernel.name, case.name, dtype)
        for case in FEW
        for kernel in lowering.OPS[case.op].serving("cpu")
        for dtype in ("float32", "bfloat16")
    }
    assert found.ok and all(x.error is not None and x.seconds for x in found.outcomes)


def test_a_wrong_kernel_is_found(kernel: Callable[..., None]) -> None:
    """By the size of its error: one thousandth is beyond float32 and within bfloat16."""
    kernel(ops.geglu, lambda gate_up: ops.geglu.body(gate_up.float()).to(gate_up.dtype) * 1.001)
    found = outcomes("mine")
    assert {(x.dtype, x.ok) for x in found} == {("float32", False), ("bfloat16", True)}
    errors = [x.error for x in found if x.dtype == "float32"]
    assert all(error is not None and 5e-4 < error < 1.1e-3 for error in errors)


def broken(gate_up: Tensor) -> Tensor:
    raise IndexError("no such place")


WRONG = [
    (ops.geglu, broken, "IndexError: no such place"),
    (ops.geglu, lambda gate_up: gate_up, r"ValueError: the kernel returns shape \[5, 512\], expected \[5, 256\]"),
    (ops.geglu, lambda gate_up: (ops.geglu.body(gate_up),), "ValueError: the kernel returns .*expected"),
    (ops.geglu, lambda gate_up: ops.geglu.body(gate_up) / 0, "values that are not finite"),
    (ops.route_softmax, lambda logits, *, top_k: (ops.route_softmax.body(logits, top_k=top_k)[0],
     ops.route_softmax.body(-logits, top_k=top_k)[1]), "integers differ"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "run", "message"), WRONG)
def test_a_broken_kernel_does_not_end_the_check(
    op: lowering.Op, run: Callable[..., Any], message: str, kernel: Callable[..., None]
) -> None:
    kernel(op, run)
    found = outcomes("mine")
    failed = [outcome.failed for outcome in found if outcome.failed]
    assert failed and not any(outcome.ok for outcome in found if outcome.failed)
    assert any(pytest.raises(ValueError, match=message).matches(ValueError(text)) for text in failed)
    assert len(found) == 2 * len([case for case in FEW if case.op == op.name])


def test_a_kernel_that_spoils_its_arguments_is_judged_by_its_first_run(kernel: Callable[..., None]) -> None:
    """Timing repeats a call; a kernel that writes in place must not be blamed for that."""

    def run(gate_up: Tensor) -> Tensor:
        y = ops.geglu.body(gate_up)
        gate_up.zero_()
        return y

    kernel(ops.geglu, run)
    assert all(outcome.ok for outcome in outcomes("mine"))


def two_axes(gate_up: Tensor) -> str | None:
    return f"takes 3 axes; found {gate_up.ndim}" if gate_up.ndim < 3 else None


def test_refusals_are_listed(kernel: Callable[..., None]) -> None:
    kernel(ops.geglu, broken, refuse=two_axes)
    found = {outcome.case: outcome for outcome in outcomes("mine")}
    assert found["mlp"].refused == "takes 3 axes; found 2" and found["mlp"].ok and found["mlp"].error is None
    assert found["lead"].failed and not found["lead"].ok
    sheet = check_device(CPU, TARGETS["cpu"]).sheet()
    pairs = zip(sheet.rows, sheet.reasons, strict=True)
    ((row, said),) = [(row, said) for row, said in pairs if row[:2] == ("geglu", "mine")]
    assert row[3:5] == ("0", "2") and "lead, float32: IndexError" in said and "found 2" in said


def test_trails_of_different_form_are_compared_by_what_they_mean() -> None:
    """The state half-way along: a kernel that records something else than the reference is not wrong for it."""
    args, kwargs = delta(VERIFY, 2, 4, 8, 12, state=True, keep_steps=True)(Draw(torch.float32))
    full = comparison.reference(ops.gated_delta_rule, args, kwargs)
    (q, k, v, decay, beta, state, _), half = args, VERIFY.counts[0] // 2
    picked = torch.cat([torch.arange(half) + row * VERIFY.counts[0] for row in range(3)])
    start = torch.arange(0, 4 * half, half, dtype=torch.int32)
    rows = lowering.Rows(start, max_query=half, uniform=True)
    first = (x[picked] for x in (q, k, v, decay, beta))
    _, after, _ = ops.gated_delta_rule.body(*first, state, rows, keep_steps=False)
    assert comparison.tensor_error(full[2], after[:-1]) < 1e-5


def test_a_bound_is_that_of_the_coarser_dtype_beyond_the_reference() -> None:
    """A bfloat16 state beside float32 values is held to what bfloat16 can, a float32 result to float32."""
    args, kwargs = delta(VERIFY, 2, 4, 8, 12, state=True, keep_steps=False, recurrent=torch.bfloat16)(
        Draw(torch.float32)
    )
    out, state, _ = comparison.reference(ops.gated_delta_rule, args, kwargs)
    expected = comparison.Expected.of(ops.gated_delta_rule, args, kwargs, 256)
    own = [comparison.tensor_error(x, y) for x, y in zip((out, state), expected.exact[:2], strict=True)]
    assert state.dtype == torch.bfloat16 and own[0] < 1e-6 < 1e-3 < own[1] < 1e-2
    assert expected.most == pytest.approx([2e-5 + own[0], 2e-2 + own[1]])
    error, most = expected.worst((out * 1.001, state, None))
    assert most == expected.most[0] < 5e-4 < error < 1.1e-3
    assert expected.worst((out, state * 1.1, None))[1] == expected.most[1]


def test_choices_are_those_of_the_arguments_dtype() -> None:
    """Two experts that only float64 tells apart: a kernel that takes the reference's is not wrong."""
    logits = torch.tensor([[0.0, 1e-9, -5.0]])
    ids = [ops.route_softmax.body(x, top_k=1)[1] for x in (logits, logits.double())]
    assert not torch.equal(*ids)
    assert torch.equal(comparison.Expected.of(ops.route_softmax, (logits,), {"top_k": 1}, 1).exact[1], ids[0])


def test_errors_are_relative_to_value_and_mean_square() -> None:
    x, y = torch.tensor([1.0, 2.0, -4.0]), torch.tensor([1.0, 2.5, -4.0])
    root = (sum(value**2 for value in (1.0, 2.5, 4.0)) / 3) ** 0.5
    assert comparison.errors((x, None, [y]), (y, None, [y])) == [pytest.approx(0.5 / (2.5 + root)), 0.0]
    assert comparison.errors([torch.tensor([1, 2]), torch.empty(0)], [torch.tensor([1, 2]), torch.empty(0)]) == [0, 0]


class Cells(HTMLParser):
    """The text of every table cell, by table, but for what opens on demand; and whatever a page would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: list[list[str]] = []
        self.loaded: list[str] = []
        self.open: list[str] = []
        self.classes: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag == "table":
            self.tables.append([])
        if tag in ("td", "th"):
            self.tables[-1].append("")
        self.classes += [str(value) for name, value in attrs if name == "class"]
        if tag not in ("meta", "input", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if next((tag for tag in reversed(self.open) if tag != "span"), "") in ("td", "th"):
            self.tables[-1][-1] += data


KERNEL = """
import os, torch
from lowering import ops

@ops.geglu.kernel("mine", targets=("cpu",))
def geglu(gate_up):
    if gate_up.ndim > 2 and gate_up.dtype == torch.bfloat16:
        os.kill(os.getpid(), 11)
    return gate_up.chunk(2, -1)[0] * float("<b>" < "c")
"""


@pytest.mark.plain
def test_the_command_writes_a_page_and_json(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1 for a failure, which stands first on the page. A kernel that kills its process loses nothing."""
    (tmp_path / "their_kernels.py").write_text(KERNEL)
    monkeypatch.syspath_prepend(tmp_path)
    stem = tmp_path / "report.of.mine"
    flags = ["--only", "geglu", "--only", "expand_blocks", "--import", "their_kernels", "--output", str(stem)]
    assert main(["check", "--device", "cpu", *flags]) == 1
    out, err = capfd.readouterr()
    assert "geglu" in out and "over the bound" in out and f"{stem}.html" in err and "Segmentation fault" in err
    written = json.loads(Path(f"{stem}.json").read_text())
    assert written["environment"]["target"] == "cpu" and written["environment"]["torch"] == torch.__version__
    found = {(x["op"], x["kernel"], x["case"], x["dtype"]): x for x in written["outcomes"]}
    wanted = [(case, dtype) for case in CASES for dtype in ("float32", "bfloat16") if case.op in flags]
    assert set(found) == {
        (case.op, kernel, case.name, dtype)
        for case, dtype in wanted
        for kernel in [*(x.name for x in lowering.OPS[case.op].serving("cpu")), *["mine"] * (case.op == "geglu")]
    }
    assert len(found) == len(written["outcomes"]) == written["planned"]
    assert found["geglu", "mine", "lead", "bfloat16"]["failed"] == "its process ended with SIGSEGV"
    assert all(x["error"] == 0 for x in found.values() if x["op"] == "expand_blocks")
    page = Cells(Path(f"{stem}.html").read_text())
    assert not page.loaded and not page.open and len(page.tables) == 3
    assert page.tables[2][7:9] == ["geglu", "mine"] and torch.__version__ in page.tables[1]


WORKER = """
import json, os, sys, time
path, torn = sys.argv[1], '{"begun": {"kern'
lines = [json.loads(x) for x in open(path) if x.strip() and not x.startswith(torn)]
def add(**entry):
    with open(path, "a") as file:
        file.write("\\n" + json.dumps(entry) + "\\n")
if not lines:
    add(environment={"device": "cpu", "target": "cpu"}, planned=4)
done = sum("outcome" in x for x in lines)
for at in range(done, 4):
    item = {"op": "geglu", "kernel": str(at), "case": "c", "dtype": "float32"}
    add(begun=item)
    if at == 0:
        open(path, "a").write(torn)
        os._exit(0)
    if at == 1:
        time.sleep(60)
    add(outcome=item | {"failed": "device lost"} if at == 2 else item | {"error": 0.0, "bound": 1.0})
    if at == 2:
        sys.exit(3)
"""


def test_a_process_that_ends_or_hangs_is_followed_by_another(tmp_path: Path) -> None:
    book, seen = journal.Journal(tmp_path / "x.jsonl"), []
    book.path.touch()
    command = [sys.executable, "-S", "-c", WORKER, str(book.path)]
    assert journal.supervise(command, book, 2.0, seen.append) == 0
    found, begun = book.read()
    assert begun is None and found is not None and len(found.outcomes) == found.planned == 4
    assert [x.failed for x in found.outcomes] == [
        "its process ended with exit code 0", "no result after 2 seconds; its process was ended", "device lost", None,
    ]  # fmt: skip
    assert seen and not found.ok
    # What cannot be run at all is not tried for ever: as often as it may be in vain, and each is a line.
    book.path.write_text("")
    dying = (
        WORKER.replace("if at == 0:", "if True:").replace("planned=4", "planned=99").replace("range(done, 4)", "[done]")
    )
    assert journal.supervise([*command[:3], dying, command[-1]], book, 20.0, seen.append) == 0
    found, _ = book.read()
    assert found is not None and len(found.outcomes) == journal.PATIENCE and not found.ok
    assert "NOT FINISHED: 89 of 99 were not run" in found.sheet().text()
    # One that fails before it knows the machine has said why.
    book.path.write_text("")
    assert journal.supervise([sys.executable, "-S", "-c", "raise SystemExit(2)"], book, 20.0, seen.append) == 2


def test_ctrl_c_leaves_a_report_and_resume_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stem, target = tmp_path / "x", TARGETS["cpu"]

    def interrupted(_: object, book: journal.Journal, *rest: object) -> int:
        assert journal.work(book, CPU, target, check.planned(CPU, target, ["geglu"])) == 0
        kept = book.path.read_text().splitlines()[:8]
        book.path.write_text("\n".join(kept))
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "supervise", interrupted)
    assert main(["check", "--output", str(stem), "--only", "geglu"]) == 130
    written = json.loads(Path(f"{stem}.json").read_text())
    count = len(written["outcomes"])
    assert 0 < count < written["planned"] and "NOT FINISHED" in Path(f"{stem}.html").read_text()
    assert "--resume goes on" in capsys.readouterr().err

    def resumed(_: object, book: journal.Journal, *rest: object) -> int:
        return journal.work(book, CPU, target, check.planned(CPU, target, ["geglu"]))

    monkeypatch.setattr(commands, "supervise", resumed)
    assert main(["check", "--output", str(stem), "--only", "geglu", "--resume"]) == 0
    again = json.loads(Path(f"{stem}.json").read_text())
    assert again["outcomes"][:count] == written["outcomes"] and len(again["outcomes"]) == again["planned"]
    with pytest.raises(LoweringError, match="leave out --resume"):
        journal.work(journal.Journal(Path(f"{stem}.jsonl")), CPU, target, check.planned(CPU, target, ["write_pages"]))


@pytest.mark.plain
@pytest.mark.parametrize("op", sorted({case.op for case in CASES}))
def test_every_case_has_values_to_compare_with(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each passes through all but the kernels, and those of real widths through all but the reference."""
    for case in [case for case in CASES if case.op == op]:
        if case.bench:
            monkeypatch.setattr(comparison, "reference", lambda *_: None)
        args, kwargs = case.arguments(torch.bfloat16)
        expected = comparison.Expected.of(lowering.OPS[op], args, kwargs, case.length)
        assert expected.worst(expected.exact)[0] == 0
        monkeypatch.undo()


PLACES, NAN, INF = torch.tensor([[1, 2], [3, 4]]), torch.tensor([torch.nan, 1.0]), torch.tensor([torch.inf])
RESULTS = [
    (None, 1, "expected None"), (3, 4, "returns 4, expected 3"), ("a", None, "returns None"), (0.5, 0.75, None),
    ((PLACES, None), (PLACES, PLACES), "expected None"), (PLACES, PLACES + 1, "4 of 4"), (NAN, NAN.nan_to_num(), "NaN"),
    (torch.empty(0), torch.empty(1), "shape"), ([], [PLACES], "returns"), (True, False, "returns False"),
    (INF, -INF, "infinities"), ({"a": PLACES}, {"b": PLACES}, "returns"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "wrong", "message"), RESULTS)
def test_results_of_any_kind(value: Any, wrong: Any, message: str | None) -> None:
    """Of an op without floating-point arguments too; a wrong one is told in words or by its error."""
    made = lowering.Op.__new__(lowering.Op)  # not entered among the others
    made.name, made.body = "made", lambda x: value
    expected = comparison.Expected.of(made, (PLACES,), {}, 1)
    assert expected.worst(value)[0] == 0
    if message is None:
        assert operator.gt(*expected.worst(wrong))
    else:
        with pytest.raises(ValueError, match=message):
            expected.worst(wrong)


class Odd(Exception):  # noqa: N818
    """That nobody has heard of."""


def odd(*_: Any, **__: Any) -> Any:
    raise Odd("x" * 10_000)


@pytest.mark.parametrize("options", [{}, {"refuse": odd}, {"prepare": odd, "weights": (Tensor,)}])
def test_whatever_a_kernel_raises_is_a_short_line(
    options: dict[str, Any], kernel: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "CASES", tuple(case for case in CASES if case.op == "linear" and not case.bench)[:2])
    kernel(ops.linear, lambda x, weight: odd(), **options)
    found = [x for x in check_device(CPU, TARGETS["cpu"], "linear").outcomes if x.kernel == "mine"]
    assert found and all((x.failed or x.refused or "").startswith("Odd: xxx") for x in found)
    assert all(len(x.failed or "") < 700 for x in found)


def test_a_case_that_cannot_be_made_fails_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "CASES", (Case("geglu", "odd", odd), *FEW))
    found = check_device(CPU, TARGETS["cpu"])
    assert [x.case for x in found.outcomes if not x.ok] == ["odd"] * 2 * len(ops.geglu.serving("cpu"))
    assert "the case or the reference: Odd" in (found.outcomes[0].failed or "")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "cuda:77"], "device 'cuda:77' cannot be used here"),
        (["--device", "cpu", "--target", "ascend95"], "did you mean 'ascend950'"),
        (["--device", "meta", "--target", "ascend950"], "--target ascend950 is for --device cpu; on meta"),
    ],
)
def test_mistakes_are_one_message(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the process that does the work, which the command only repeats."""
    assert main(["check", "--worker", "--output", str(tmp_path / "x"), *flags]) == 2
    said = capsys.readouterr().err
    assert message in said and said.startswith("python -m lowering check: ")


def test_compare_measures_each_kernel(kernel: Callable[..., None]) -> None:
    """Against the reference in float64, in units of the dtype's rounding too; arguments stay as they are."""

    def run(gate_up: Tensor) -> Tensor:
        y = ops.geglu.body(gate_up) * 1.01
        gate_up.zero_()
        return y

    kernel(ops.geglu, run)
    x = torch.randn(7, 64)
    before = x.clone()
    found = {outcome.kernel: outcome for outcome in lowering.compare("geglu", None, x).outcomes}
    assert torch.equal(x, before) and set(found) == {"mine", "torch"} and found["torch"].error is not None
    exact = ops.geglu.body(x.double())
    expected = (exact.abs() * 0.01 / (exact.abs() + exact.square().mean().sqrt())).max().item()
    assert found["mine"].error == pytest.approx(expected, rel=1e-3) and found["torch"].error < 1e-6
    shown = lowering.compare(ops.geglu, ["mine", "npu_geglu"], x)
    assert "mine" in repr(shown) and "target is cpu" in repr(shown) and f"{expected / 2**-23:.2f}"[:3] in repr(shown)
    with pytest.raises(LoweringError, match="no kernel 'other'"):
        lowering.compare("geglu", ["other"], x)


def test_cases_come_from_their_seed() -> None:
    """A device's report can be made again anywhere."""
    case: Case = FEW[0]
    assert all(torch.equal(x, y) for x, y in zip(case.arguments()[0], case.arguments()[0], strict=True))
