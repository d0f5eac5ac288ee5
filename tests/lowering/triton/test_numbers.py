"""Our Triton kernels in Triton's interpreter, against the bodies of their ops, on the cases of `lowering.cases`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lowering
from lowering.cases import CASES
from lowering.cases.case import Case
from lowering.op import find
from lowering.ops import DeltaStates, DeltaTrail
from lowering.ops.short_conv import WindowTrail
from lowering.ops.sparse import selected_slots
from lowering.rows import Rows
from lowering.target import TARGETS
from lowering.triton import delta, launch, short_conv
from tests.lowering.triton.interpreter import run, runner
from tests.tolerances import assert_close

SMALL = {
    "gated_delta_rule": 65536,
    "gated_rms_norm": 40960,
    "gated_rms_norm_fp32": 40960,
    "attention_residual": 2048,
    "hyper_mix": 8192,
    "rotary": 8192,
    "rotary_interleaved": 8192,
    "rotary_angles": 8192,
    "yarn_angles": 8192,
    "mrope_angles": 8192,
    **dict.fromkeys(("rms_norm", "gemma_rms_norm", "add_rms_norm", "add_gemma_rms_norm", "l2_norm"), 40960),
    **dict.fromkeys(("rms_norm_rstd", "gemma_rms_norm_rstd"), 40960),
    "grouped_gemma_rms_norm": 40960,
    "sparse_attention": 65536,
    "expand_blocks": 2048,
}
"""Bytes of a unified buffer, 512 for other ops: tiles are then smaller than tensors, and their last one is ragged."""
OPS = (
    "gated_delta_rule",
    "delta_gates",
    "channel_gates",
    "short_conv",
    "gated_rms_norm",
    "gated_rms_norm_fp32",
    "rms_norm",
    "gemma_rms_norm",
    "add_rms_norm",
    "add_gemma_rms_norm",
    "rms_norm_rstd",
    "gemma_rms_norm_rstd",
    "grouped_gemma_rms_norm",
    "l2_norm",
    "swiglu",
    "geglu",
    "rotary",
    "rotary_interleaved",
    "rotary_angles",
    "yarn_angles",
    "mrope_angles",
    "hyper_mix",
    "hyper_inject",
    "attention_residual",
    "sparse_attention",
    "expand_blocks",
)
BEFORE = {"gated_delta_rule": 5, "short_conv": 2}
"""Where the state stands among an op's arguments."""


def taken(case: Case) -> bool:
    """Whether the kernel takes the case: one that continues a state, by few tokens a row; wide ones by the fewest."""
    if case.op not in OPS or case.bench:
        return False
    args, _ = case.arguments()
    rows = next((arg for arg in args if isinstance(arg, Rows)), None)
    if not args[0].numel():
        return False
    if case.op == "expand_blocks":
        return True
    if case.op == "sparse_attention":
        return rows is not None and args[1].shape[-1] >= 16 and rows.max_query <= (12 if args[1].shape[-1] == 16 else 4)
    most = 4 if "128" in case.name else 300 if case.op == "short_conv" else 5
    return rows is None or (args[BEFORE[case.op]] is not None and (rows.max_query <= most or "ragged_10" in case.name))


def with_padding_of_nan(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What belongs to no row must not be read."""
    rows = next((arg for arg in args if isinstance(arg, Rows)), None)
    for x in args:
        if (
            rows is not None
            and isinstance(x, Tensor)
            and x.is_floating_point()
            and not rows.uniform
            and x.shape[0] == args[0].shape[0]
        ):
            x[int(rows.query_start[-1]) :] = float("nan")
    return args


def filled(case: Case, dtype: torch.dtype) -> tuple[Any, Any, Rows | None]:
    """What the kernel gives, what the op's body gives, and the rows."""
    args, kwargs = case.arguments(dtype)
    args = with_padding_of_nan(args)
    found = called(case, args, kwargs, SMALL.get(case.op, 512))
    return found, find(case.op).body(*args, **kwargs), next((arg for arg in args if isinstance(arg, Rows)), None)


def called(case: Case, args: Any, kwargs: Any, unified_buffer: int = 192 * 1024) -> Any:
    """What the registered kernel gives on a 910B with such a buffer, as the interpreter runs it."""
    target = replace(TARGETS["ascend910b"], unified_buffer=unified_buffer)
    asked: dict[str, Any] = {case.op: f"triton_{case.op}"}
    with lowering.use(target=target, **asked):
        return find(case.op)(*args, **kwargs)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "RUNNER", runner)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("case", [case for case in CASES if taken(case)], ids=str)
def test_a_kernel_gives_what_the_op_gives(case: Case, dtype: torch.dtype) -> None:
    found, expected, rows = filled(case, dtype)
    if not isinstance(found, tuple) or rows is None or found[2] is None:
        return assert_close(found, expected, length=case.length)
    assert_close(found[:2], expected[:2], length=case.length)
    for accepted in range(rows.max_query + 1):
        counts = torch.full((rows.count,), accepted, dtype=torch.int32)
        assert_close(*(_standing(trail, counts, case) for trail in (found[2], expected[2])), length=case.length)
    return None


def _standing(trail: Any, accepted: Tensor, case: Case) -> Tensor:
    if isinstance(trail, WindowTrail):
        return trail.at(accepted, trail.inputs.shape[1] - 4)
    assert isinstance(trail, (DeltaStates, DeltaTrail))
    return trail.at(accepted)


def cut(tokens: int, heads: int, dim: int, *, turned: bool = False) -> Tensor:
    """Heads cut out of rows that hold more, and NaN around them; or heads that do not lie behind each other."""
    if turned:
        return torch.randn(heads, tokens, dim).transpose(0, 1)
    rows = torch.full((tokens, 5 + heads * dim), torch.nan)
    rows[:, 2:-3] = torch.randn(tokens, heads * dim)
    return rows[:, 2:-3].unflatten(1, (heads, dim))


@pytest.mark.parametrize("turned", [False, True])
def test_heads_are_read_where_they_lie(turned: bool) -> None:
    """A norm or a rotation of the parts of a projection copies them for no kernel that can go from row to row."""
    x, gate, weight = cut(7, 3, 8, turned=turned), cut(7, 3, 8), torch.randn(8)
    q, angles = cut(7, 3, 10), torch.randn(7, 4)
    rows = Rows(torch.tensor([0, 3, 7], dtype=torch.int32), max_query=4, uniform=False)
    conv = (cut(7, 1, 12)[:, 0], torch.randn(12, 4), torch.randn(3, 3, 12), rows)
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("rms_norm", (x, weight), {"eps": 1e-6}),
        ("gemma_rms_norm", (x, weight), {"eps": 1e-6}),
        ("gated_rms_norm", (x, gate, weight), {"eps": 1e-6, "activation": "silu"}),
        ("l2_norm", (x,), {}),
        ("rotary", (q, cut(7, 2, 10, turned=turned), angles, angles), {}),
        ("short_conv", conv, {"keep_steps": False}),
    ]
    for op, args, kwargs in calls:
        asked: dict[str, Any] = {op: f"triton_{op}"}
        with lowering.use(target="ascend910b", **asked):
            found = find(op)(*args, **kwargs)
        assert_close(found, find(op).body(*args, **kwargs), length=12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_what_is_not_selected_may_hold_anything(dtype: torch.dtype) -> None:
    """NaN in every slot that no token names, the first of a row among them; the last tile is ragged."""
    case = next(case for case in CASES if str(case) == "sparse_attention[long_decode_6_2_16_of_150]")
    (q, k, v, selected, rows), kwargs = case.arguments(dtype)
    selected = selected.masked_fill(selected == 0, -1).sort(descending=True).values
    valid, slots = selected_slots(selected, rows.page_table, k.shape[1])
    for pages in (k, v):
        named = pages.flatten(0, 1)[slots[valid]]
        pages.fill_(float("nan")).flatten(0, 1)[slots[valid]] = named
    expected = find("sparse_attention").body(q, k, v, selected, rows, **kwargs)
    assert expected.isfinite().all()
    assert_close(called(case, (q, k, v, selected, rows), kwargs), expected, length=case.length)


ACCEPTED = torch.tensor([0, 4, 2], dtype=torch.int32)
TINY = replace(TARGETS["ascend910b"], unified_buffer=64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_committed_states_and_windows(dtype: torch.dtype) -> None:
    """Rows that accept nothing, all and some of four tokens; tiles do not divide what they go over."""
    states = DeltaStates(torch.randn(4, 2, 5, 3).to(dtype), torch.randn(3, 4, 2, 5, 3).to(dtype))
    started, found = delta.commit(states, ACCEPTED, target=TINY)
    run(started)
    assert started.jobs > 3 and torch.equal(found, states.at(ACCEPTED))
    trail = WindowTrail(torch.randn(4, 3 + 4, 7).to(dtype))
    trail.inputs[3] = 0
    started, found = short_conv.commit(trail, ACCEPTED, 3, target=TINY)
    run(started)
    assert started.jobs > 3 and torch.equal(found, trail.at(ACCEPTED, 3))


@pytest.mark.parametrize("programs", [1, 5])
def test_scattered_states(programs: int) -> None:
    """A slot that nothing names stays as it is; -1 names none."""
    source, out, slots = torch.randn(3, 2, 5), torch.randn(6, 2, 5), torch.tensor([4, -1, 0], dtype=torch.int32)
    expected = out.clone()
    expected[[4, 0]] = source[[0, 2]]
    run(delta.scatter(source, slots, out, target=TINY), programs)
    assert torch.equal(out, expected)


PLAIN = [op for op in OPS if not {"rows", "bank"} & find(op).signature.parameters.keys()]


@pytest.mark.parametrize("op", PLAIN)
def test_strided_tensors_in_16_bits(op: str) -> None:
    """Every tensor but one of a single axis lies among others that are no numbers."""
    case = next(case for case in CASES if case.op == op and taken(case))
    args, kwargs = case.arguments(torch.float16)
    expected = find(op).body(*args, **kwargs)
    spaced = [_spaced(x) if isinstance(x, Tensor) and x.ndim > 1 else x for x in args]
    assert_close(called(case, spaced, kwargs, SMALL.get(op, 512)), expected, length=case.length)


def _spaced(x: Tensor) -> Tensor:
    other = torch.full_like(x, float("nan")) if x.is_floating_point() else torch.full_like(x, -(2**20))
    return torch.stack((x, other), -1)[..., 0]


READ = ("decay", "taps", "residual", "sin", "rates")
"""Tensors that a wrong run changes; they are the caller's, and copied first."""


def test_the_interpreter_notices_a_wrong_convention(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decay that is not applied, a tap that is left out, a gate that is not rounded: as large as they should be."""
    cases = {str(case): case for case in CASES}
    for name, changed in {
        "gated_delta_rule[verify_2_6_8_12_window]": lambda arguments, constants: arguments["decay"].zero_(),
        "short_conv[ragged_10x4_window]": lambda arguments, constants: arguments["taps"][0].zero_(),
        "gated_rms_norm[heads_silu]": lambda arguments, constants: constants.update(SILU=False),
        "rms_norm[heads]": lambda arguments, constants: constants.update(GEMMA=True),
        "gemma_rms_norm[heads]": lambda arguments, constants: constants.update(GEMMA=False),
        "rms_norm_rstd[heads]": lambda arguments, constants: arguments.update(eps=1e-2),
        "gemma_rms_norm_rstd[heads]": lambda arguments, constants: constants.update(KEPT=False),
        "add_rms_norm[heads]": lambda arguments, constants: arguments["residual"].zero_(),
        "add_gemma_rms_norm[heads]": lambda arguments, constants: constants.update(GEMMA=False),
        "grouped_gemma_rms_norm[streams]": lambda arguments, constants: constants.update(GEMMA=False),
        "l2_norm[awkward]": lambda arguments, constants: arguments.update(scale=1.01),
        "swiglu[mlp]": lambda arguments, constants: constants.update(GELU=True),
        "swiglu[caps]": lambda arguments, constants: arguments.update(up_cap=24.0),
        "swiglu[gate_cap]": lambda arguments, constants: constants.update(UP_CAPPED=True),
        "geglu[mlp]": lambda arguments, constants: constants.update(GELU=False),
        "rotary[partial]": lambda arguments, constants: arguments["sin"].neg_(),
        "rotary_interleaved[partial]": lambda arguments, constants: arguments["sin"].neg_(),
        "rotary_angles[text]": lambda arguments, constants: arguments["rates"].copy_(arguments["rates"].flip(1)),
        "yarn_angles[lite]": lambda arguments, constants: arguments.update(multiplier=1.0),
        "mrope_angles[image]": lambda arguments, constants: arguments["rates"].copy_(arguments["rates"].roll(1, 0)),
    }.items():
        args, kwargs = cases[name].arguments()
        expected = find(cases[name].op).body(*args, **kwargs)

        def wrongly(file: str, kernel: str, jobs: int, arguments: Any, constants: Any, changed: Any = changed) -> None:
            arguments = {key: x.clone() if key in READ else x for key, x in arguments.items()}
            constants = dict(constants)
            changed(arguments, constants)
            runner(file, kernel, jobs, arguments, constants)

        monkeypatch.setattr(launch, "RUNNER", wrongly)
        with pytest.raises(AssertionError):
            assert_close(called(cases[name], args, kwargs), expected, length=cases[name].length)
