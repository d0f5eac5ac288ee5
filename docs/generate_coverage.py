"""Write into docs/ascend.md how much of each family's work is fused, in how many calls, and why the rest is not.

    python -m docs.generate_coverage [NAME ...]      # families, those whose names hold NAME; all by default

It takes the torch_npu wheel (`python -m lowering fetch-torch-npu`) and some minutes, so it is run by hand when kernels
have changed. It stands between `<!-- coverage -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import funcmodels as fm
import lowering
from lowering.explain.costs import Cost
from lowering.explain.stages import Costs, parts, percent, why_loose
from lowering.target import ASCEND, DEFAULT_CANN
from params import quantize
from params.tree import tree_map
from tests.lowering.npu.published import FAMILIES, FLASH_NEXT, GEMMA3, KIMI_K3, KIMI_LINEAR, LITE

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "ascend.md"
WHOLE: dict[str, dict[str, Any]] = {
    "Qwen3-8B": FAMILIES["Qwen3-8B"] | {"num_hidden_layers": 36},
    "Qwen3.5-35B-A3B": FAMILIES["Qwen3.5-35B-A3B"] | {"num_hidden_layers": 40},
    "Qwen3.8-Flash-Next": FLASH_NEXT["text_config"],
    "DeepSeek-V2-Lite": LITE,
    "Kimi-Linear-48B-A3B": KIMI_LINEAR,
    "Kimi-K3": KIMI_K3,
    "Gemma3-4B": GEMMA3["4b"] | {"model_type": "gemma3_text"},
    "Gemma3-27B": GEMMA3["27b"] | {"model_type": "gemma3_text"},
}
"""Configs with all their layers."""
MIXED = {"**.experts.*": "W4A8_DYNAMIC", "**": "W8A8_DYNAMIC"}
QUANTISED: dict[str, tuple[str, Any, tuple[str, ...]]] = {
    "Qwen3.5-35B-A3B W8A8": ("Qwen3.5-35B-A3B", "W8A8_DYNAMIC", ("ascend910b", "ascend910_93")),
    "Qwen3.5-35B-A3B W4A8 experts": ("Qwen3.5-35B-A3B", MIXED, ("ascend910_93",)),
    "Qwen3.5-35B-A3B MXFP8": ("Qwen3.5-35B-A3B", "W8A8_MXFP8", ("ascend950",)),
    "DeepSeek-V2-Lite W8A8": ("DeepSeek-V2-Lite", "W8A8_DYNAMIC", ("ascend910b", "ascend910_93")),
    "Kimi-Linear-48B-A3B W8A8": ("Kimi-Linear-48B-A3B", "W8A8_DYNAMIC", ("ascend910b", "ascend910_93")),
    "Kimi-Linear-48B-A3B MXFP8": ("Kimi-Linear-48B-A3B", "W8A8_MXFP8", ("ascend950",)),
}
"""Families by words of `params.quantize`, and the machines that have operators for these."""
PHASES = {"decode": (8, 1, 4095), "verify": (8, 4, 4092), "prefill": (1, 2048, 0)}
"""Rows, new tokens of each, and tokens that each holds before."""
BEFORE = Path(__file__).with_name("fused_before.json")
"""The same figures of commit 268c38e, before kernels were held to CANN's host code: calls a layer, shares of bytes."""
NAMED = 0.01
"""Share of bytes or FLOPs from which on what is left is named."""
BF16 = torch.bfloat16


def lowered(model: fm.Model, phase: str, target: str, params: Any) -> lowering.Lowered:
    """One forward, with a state as `init_state` makes it on the target."""
    rows, tokens, held = PHASES[phase]
    with lowering.use(target=target):
        state = model.init_state(rows, 4096, BF16, device="meta")
        state = replace(state, ledger=state.ledger.at([held] * rows))
        batch = fm.Batch.from_lists([[0] * tokens] * rows, state)
        keep_steps = phase == "verify"
        return lowering.lower(model.forward, params, state, batch, keep_steps=keep_steps)


Left = dict[str, dict[str, list[str]]]
"""What is left, by reason, and by phase and share: the targets."""


def calls_a_layer(program: lowering.Lowered, layers: int) -> str:
    """Calls of operators that cost anything, the program's own between its ops among them."""
    costing = [call.count * sum(one.cost != Cost() for one in call.operators) for call in program.calls]
    return f"{(sum(costing) + sum(one.cost != Cost() for one in program.between)) / layers:.0f}"


def before(name: str, target: str, phase: str) -> str:
    """Calls a layer and share of bytes as they were, for the same phase."""
    found = json.loads(BEFORE.read_text(encoding="utf-8")).get(name, {}).get(target, {}).get(phase)
    return f"{found['calls']:.0f} ({percent(found['bytes'])}) -> " if found else ""


def coverage(name: str) -> tuple[list[str], list[str], Left]:
    """Cells of a family in both tables, and what is left."""
    model = fm.build(WHOLE[name])
    cells: list[str] = []
    calls: list[str] = []
    left: Left = {}
    for target in ASCEND:
        for phase in PHASES:
            program = lowered(model, phase, target, model.param_spec(BF16))
            costs = program.cost_analysis()
            cells.append(fused(costs))
            now = calls_a_layer(program, model.config.num_hidden_layers)
            calls.append(before(name, target, phase) + now)
            for row, share in costs.left():
                if share >= NAMED:
                    places = left.setdefault(why_loose(program, row), {})
                    places.setdefault(f"{phase} {percent(share)}", []).append(short(target))
        print(f"{name} on {target}: {', '.join(cells[-len(PHASES) :])}", file=sys.stderr, flush=True)
    return cells, calls, left


def fused(costs: Costs) -> str:
    """The share of FLOPs and of bytes that is not Torch's."""
    return " / ".join(percent(1 - part) for part in parts(costs.loose, costs.total))


def quantised(name: str) -> list[str]:
    """Cells of a quantised family, and of machines that have no operators for it a dash."""
    family, words, targets = QUANTISED[name]
    model = fm.build(WHOLE[family])
    empty = tree_map(
        lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype or BF16, device="meta"), model.param_spec(BF16)
    )
    params = quantize(empty, words)
    cells = []
    for target in ASCEND:
        there = target in targets
        cells += [fused(lowered(model, phase, target, params).cost_analysis()) if there else "-" for phase in PHASES]
    print(f"{name}: {', '.join(cells)}", file=sys.stderr, flush=True)
    return cells


def short(target: str) -> str:
    """As a column is headed."""
    return target.removeprefix("ascend")


def written(names: list[str]) -> Iterator[str]:
    """The lines of the table, and below it what is left."""
    yield f"Of FLOPs / of bytes, in bfloat16, with CANN {DEFAULT_CANN} and evidence in use, the published layers."
    yield ""
    heads = [f"{short(target)} {phase}" for target in ASCEND for phase in PHASES]
    yield f"| family | {' | '.join(heads)} |"
    yield "|---" * (len(heads) + 1) + "|"
    found = {name: coverage(name) for name in names}
    for name, (cells, _, _) in found.items():
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""
    yield "Calls of operators a layer: before (commit 268c38e, with the share of bytes that was fused then) -> now."
    yield ""
    yield f"| family | {' | '.join(heads)} |"
    yield "|---" * (len(heads) + 1) + "|"
    for name, (_, calls, _) in found.items():
        yield f"| {name} | {' | '.join(calls)} |"
    yield ""
    if names == list(WHOLE):
        yield "Quantised and not prepared, so that int4 is laid out anew in every call: FLOPs / bytes as above,"
        yield "where the machine has operators for the format."
        yield ""
        yield f"| family and format | {' | '.join(heads)} |"
        yield "|---" * (len(heads) + 1) + "|"
        for name in QUANTISED:
            yield f"| {name} | {' | '.join(quantised(name))} |"
        yield ""
    for name, (_, _, left) in found.items():
        yield f"- {name}{':' if left else ': nothing to name.'}"
        for why, places in left.items():
            where = ", ".join(f"{place} on {' and '.join(targets)}" for place, targets in places.items())
            yield f"  - {why} ({where})"


def main() -> None:
    """Rewrite the table in place, or print that of some families."""
    names = [name for name in WHOLE if not sys.argv[1:] or any(part in name for part in sys.argv[1:])]
    text = "\n".join(written(names))
    if len(names) < len(WHOLE):
        print(text)
        return
    document = DOCUMENT.read_text(encoding="utf-8")
    body = re.compile(r"(<!-- coverage -->\n).*?(?=<!-- end -->)", re.DOTALL)
    DOCUMENT.write_text(body.sub(lambda found: f"{found[1]}{text}\n", document), encoding="utf-8")


if __name__ == "__main__":
    main()
