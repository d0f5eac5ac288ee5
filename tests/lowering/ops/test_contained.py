"""A preference for an op holds for the ops that contain it: everywhere the norm occurs, and nowhere else."""

from __future__ import annotations

import pytest
import torch

import lowering
from lowering import OPS, LoweringError, Policy, ops
from lowering.cases import CASES
from lowering.policy import ENVIRONMENT, from_environment

X, WEIGHT = torch.ones(3, 8), torch.ones(8)
CALLS = {
    "gemma_rms_norm": lambda: ops.gemma_rms_norm.explain(X, WEIGHT, eps=1e-6),
    "gemma_rms_norm_rstd": lambda: ops.gemma_rms_norm_rstd.explain(X, WEIGHT, eps=1e-6),
    "add_gemma_rms_norm": lambda: ops.add_gemma_rms_norm.explain(X, X, WEIGHT, eps=1e-6),
    "grouped_gemma_rms_norm": lambda: ops.grouped_gemma_rms_norm.explain(X, WEIGHT, groups=2, eps=1e-6),
    "rms_norm": lambda: ops.rms_norm.explain(X, WEIGHT, eps=1e-6),
    "rms_norm_rstd": lambda: ops.rms_norm_rstd.explain(X, WEIGHT, eps=1e-6),
    "add_rms_norm": lambda: ops.add_rms_norm.explain(X, X, WEIGHT, eps=1e-6),
}
GEMMA = [name for name in CALLS if "gemma" in name]


def kernels(target: str = "ascend910b", **prefer: str) -> dict[str, str]:
    with lowering.use(Policy(prefer), target=target):
        return {name: call().kernel.name for name, call in CALLS.items()}


def test_every_op_that_computes_a_norm_names_it() -> None:
    assert {name for name in OPS if "gemma_rms_norm" in (name, *OPS[name].contains)} == set(GEMMA)
    for op in OPS.values():
        assert op.name not in op.contains and set(op.contains) <= OPS.keys()


@pytest.mark.parametrize("target", ["cpu", "ascend910b", "ascend950"])
def test_the_reference_is_asked_for_wherever_the_norm_occurs(target: str) -> None:
    plain, asked = kernels(target), kernels(target, gemma_rms_norm="torch")
    assert {asked[name] for name in GEMMA} == {"torch"}
    assert {name: asked[name] for name in CALLS if name not in GEMMA} == {
        name: plain[name] for name in CALLS if name not in GEMMA
    }


def test_a_kernel_that_an_op_has_not_leaves_it_to_its_own_choice() -> None:
    """npu_gemma_rms_norm is a kernel of the plain and the rstd form; the sum has one of another name."""
    asked = kernels(gemma_rms_norm="npu_rms_norm_1p")
    assert asked["gemma_rms_norm"] == asked["gemma_rms_norm_rstd"] == "npu_rms_norm_1p"
    assert asked["add_gemma_rms_norm"] == "npu_add_gemma_rms_norm"


def test_what_is_asked_of_the_op_itself_comes_first() -> None:
    asked = kernels(gemma_rms_norm="torch", add_gemma_rms_norm="npu_add_rms_norm_1p")
    assert asked["add_gemma_rms_norm"] == "npu_add_rms_norm_1p" and asked["gemma_rms_norm"] == "torch"
    assert kernels(add_gemma_rms_norm="torch")["gemma_rms_norm"] == "npu_gemma_rms_norm"


def test_explain_names_the_op_that_was_asked() -> None:
    def both() -> None:
        y, total = ops.add_gemma_rms_norm(X, X, WEIGHT, eps=1e-6)
        ops.gemma_rms_norm(y, WEIGHT, eps=1e-6)
        ops.rms_norm(total, WEIGHT, eps=1e-6)

    report = lowering.explain(both, target="ascend910b", policy=Policy({"gemma_rms_norm": "torch"}))
    assert {row.op: row.reasons() for row in report.rows} == {
        "add_gemma_rms_norm": "asked for by name, of gemma_rms_norm", "gemma_rms_norm": "asked for by name",
        "rms_norm": "",
    }  # fmt: skip
    assert "asked for by name, of gemma_rms_norm" in str(report)


def test_it_counts_as_asked_for_where_references_are_left_out() -> None:
    with lowering.use(target="ascend910b", strict=True, gemma_rms_norm="torch"):
        assert ops.grouped_gemma_rms_norm.explain(X, WEIGHT, groups=2, eps=1e-6).kernel.name == "torch"
    with lowering.use(target="ascend910b", strict=True), pytest.raises(LoweringError, match="strict=True"):
        ops.grouped_gemma_rms_norm.explain(X.double(), WEIGHT.double(), groups=2, eps=1e-6)


def test_a_kernel_that_cannot_run_raises_and_says_of_which_op_it_was_asked() -> None:
    empty = torch.ones(0, 8)
    with lowering.use(gemma_rms_norm="npu_gemma_rms_norm", target="ascend910b"):
        with pytest.raises(LoweringError) as error:
            ops.gemma_rms_norm_rstd.explain(empty, WEIGHT, eps=1e-6)
        assert "asked for by name, for every op that contains gemma_rms_norm, on target ascend910b" in str(error.value)
    with lowering.use(gemma_rms_norm="npu_gemma_rms_norm"), pytest.raises(LoweringError) as error:
        ops.gemma_rms_norm_rstd.explain(X, WEIGHT, eps=1e-6)
    assert "use 'torch' or drop the preference" in str(error.value)


def test_the_environment_reaches_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "gemma_rms_norm=torch")
    policy = from_environment()
    assert ops.add_gemma_rms_norm.asked(policy) == ("gemma_rms_norm", "torch")
    assert ops.add_rms_norm.asked(policy) is None


def test_weights_prepared_for_the_operator_are_read_by_the_reference() -> None:
    prepare = ops.gemma_rms_norm.kernel_named("npu_rms_norm_1p").prepare
    assert prepare is not None
    prepared = prepare(WEIGHT / 7)
    assert type(prepared).__name__ == "OnePlusWeight"
    with lowering.use(gemma_rms_norm="torch", target="ascend950"):
        found = ops.add_gemma_rms_norm(X, 2 * X, prepared, eps=1e-6)
    expected = ops.add_gemma_rms_norm.body(X, 2 * X, WEIGHT / 7, eps=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_latents_are_normed_turned_and_written_as_their_ops_are_asked_to_be() -> None:
    """The fused write has three ops in it."""
    case = next(case for case in CASES if (case.op, case.name) == ("latent_norm_rope_write", "large_eps"))
    args, kwargs = case.arguments(torch.bfloat16)

    def chosen(**prefer: str) -> str:
        with lowering.use(Policy(prefer), target="ascend910b"):
            return ops.latent_norm_rope_write.explain(*args, **kwargs).kernel.name

    assert chosen() != "torch"
    for name in ("rms_norm", "rotary_interleaved", "write_latents", "latent_norm_rope_write"):
        assert chosen(**{name: "torch"}) == "torch"
