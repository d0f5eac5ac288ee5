"""Under jaxtyping's import hook with beartype: right calls pass, wrong shapes fail naming the argument.

The hook must be installed before the first import, so these tests run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.plain  # a hook of its own, so that a hooked run would be the same again

ROOT = Path(__file__).parents[3]
HOOKED = """
from jaxtyping import install_import_hook
install_import_hook(["funcmodels", "lowering", "params"], "beartype.beartype")
import copy
import torch
import lowering
from jaxtyping import TypeCheckError
from lowering import OPS, Policy, ops
from tests.cases import CASES, cases_of
from tests.typechecker import check_kernels
check_kernels()
"""


def run(code: str) -> str:
    """What `code` prints after the hook is installed; its failure is the test's."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", HOOKED + code], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_case_passes_the_checks() -> None:
    """Through every kernel that takes it, in both dtypes, under vmap and grad too."""
    run("""
for case in CASES:
    if case.bench:
        continue
    for dtype in (torch.float32, torch.bfloat16):
        drawn = case.arguments(dtype)
        for kernel in OPS[case.op].serving("cpu"):
            args, kwargs = copy.deepcopy(drawn)
            if kernel.refuse is None or kernel.refuse(*args, **kwargs) is None:
                with lowering.use(Policy({case.op: kernel.name})):
                    OPS[case.op](*args, **kwargs)
x, w = torch.randn(2, 3, 8), torch.randn(2, 8)
torch.func.vmap(lambda x, w: ops.rms_norm(x, w, eps=1e-6))(x, w)
torch.func.grad(lambda w: ops.rms_norm(x, w, eps=1e-6).sum())(w[0])
""")


WRONG = """
rms_norm weight x[:-1]
linear weight x[:, :-1]
attention k x[..., :-1]
attention v x[:-1]
paged_attention v_pages x[1:]
gated_delta_rule beta x[:, :-1]
gated_delta_rule state x.mT
short_conv window x.flatten(1)
experts ids x[:-1]
rotary sin x[:, :-1]
"""


def test_a_wrong_shape_names_the_argument() -> None:
    """Whichever kernel would run: kernels stand under their op's own annotations."""
    shown = run(f"""
for line in {WRONG!r}.strip().splitlines():
    name, argument, change = line.split(maxsplit=2)
    op = OPS[name]
    case = [case for case in cases_of(name) if not case.bench and "keep" not in case.name][0]
    if name in ("gated_delta_rule", "short_conv"):
        case = [case for case in cases_of(name) if "decode" in case.name and "window" in case.name][0]
    args, kwargs = case.arguments()
    at = list(op.signature.parameters).index(argument)
    args = (*args[:at], eval(change, {{"x": args[at]}}), *args[at + 1 :])
    for kernel in op.serving("cpu"):
        if kernel.refuse is not None and kernel.refuse(*args, **kwargs) is not None:
            continue
        try:
            with lowering.use(**{{name: kernel.name}}):
                op(*args, **kwargs)
        except TypeCheckError as error:
            assert f"parameters of lowering.ops." in str(error) and f".{{name}}." in str(error), error
            assert f"parameter '{{argument}}'" in str(error), error
            print(name, argument, kernel.name)
        else:
            raise SystemExit(f"{{line}}: {{kernel.name}} took it")
""")
    for line in WRONG.strip().splitlines():
        assert " ".join(line.split()[:2]) in shown
    assert "torch_step" in shown and "torch_sdpa" in shown
