"""What every family, draft, sampler and capture gives on fixed inputs, kept bit for bit: the net under a redesign.

    python -m tests.golden            # say what differs from tests/golden.json
    python -m tests.golden --write    # keep what is computed now

A change of numbers that is meant is kept with `--write`, in a commit that says why. Each value is kept as a digest of
its bits and a few of its numbers. Another processor may round otherwise: where the primitives that `machine` tries give
other bits than they gave when the file was written, the few numbers are compared, within rounding.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import funcmodels as fm
import lowering
import params
from lowering import npu_reference
from tests import checkpoints
from tests.checkpoints import written

FILE = Path(__file__).with_suffix(".json")
PARTS: dict[str, Callable[..., Iterator[tuple[str, Any]]]] = {}
"""What is computed, by name: each yields names and values (tensors, numbers, strings, lists of these)."""
CONFIGS = checkpoints.CONFIGS | {
    "flash_next": lambda: {**checkpoints.CONFIGS["flash_next"](), "mtp_num_hidden_layers": 1}
}
TARGETS = ("ascend910b", "ascend910_93", "ascend950")
HALF, EXACT = torch.bfloat16, torch.float32
SCHEDULE = [[5, 1, 0], [3, 0, 4], [1, 1, 1], [3, 3, 3], [0, 1, 9], [1, 1, 1]]
"""New tokens of each row a forward: prompts, chunks, a step, a window to verify, an idle row, a step."""
VERIFY, ACCEPTED = 3, [1, 3, 0]


def part(name: str, **fixed: Any) -> Any:
    """Enter a function as a part, with arguments."""

    def enter(function: Any) -> Any:
        PARTS[name] = partial(function, **fixed)
        return function

    return enter


@cache
def made(family: str, dtype: torch.dtype = EXACT) -> tuple[fm.Model, Any]:
    """A tiny model and parameters that are whole multiples of a power of two, so that any machine has the same."""
    model = fm.build(CONFIGS[family]())
    return model, typed(model, filled(model.init_params()), dtype)


def typed(model: fm.Model, tree: Any, dtype: torch.dtype) -> Any:
    """The parameters in `dtype`, but for those that the spec pins."""
    return params.tree_map(lambda spec, value: value.to(spec.dtype or dtype), model.param_spec(), tree)


def filled(tree: Any) -> Any:
    """The tree with other numbers: around 0, and around what a leaf was set to where that is one number."""
    for path, leaf in list(params.items(tree)):
        draw = torch.Generator().manual_seed(zlib.crc32(path.encode()))
        steps = torch.randint(-128, 129, leaf.shape, generator=draw).to(leaf.dtype)
        middle = leaf.flatten()[:1] if leaf.numel() and (leaf == leaf.flatten()[0]).all() else 0
        tree = params.put(tree, path, middle + steps * (leaf.shape[-1] ** -0.5 / 64).__float__())
    return tree


def ids_of(model: fm.Model, count: int, seed: int) -> Tensor:
    return torch.randint(model.config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


def remembered(name: str, state: fm.State) -> Iterator[tuple[str, Any]]:
    for row in range(state.rows):
        for entry, value in fm.logical(state, row).items():
            yield f"{name} row {row} {entry}", value


def run(model: fm.Model, tree: Any, forward: Any, commit: Any, page_size: int = 4, **kinds: Any) -> Any:
    """The schedule, by functions that may be captured: every output, then every entry of the state."""
    state = model.init_state(3, 32, page_size=page_size, **kinds)
    for at, counts in enumerate(SCHEDULE):
        batch = fm.Batch.from_tokens(ids_of(model, sum(counts), at), counts, state)
        logits = "last" if at == len(SCHEDULE) - 1 else "all"
        out, state = forward(tree, state, batch, logits=logits, keep_steps=at == VERIFY)
        state = commit(state, ACCEPTED) if at == VERIFY else state
        yield f"call {at} logits", out.logits
        yield f"call {at} hidden", out.hidden
    yield from remembered("state", state)


def _family(family: str, dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    model, tree = made(family, dtype)
    yield from run(model, tree, model.forward, fm.commit, dtype=dtype)
    batch = fm.Batch.from_tokens(ids_of(model, 9, 7), [4, 5])
    out, _ = model.forward(tree, None, batch, outputs=("layers.0",))
    yield "alone logits", out.logits
    yield from ((f"alone {name}", value) for name, value in out.extra.items())


def _moved(family: str) -> Iterator[tuple[str, Any]]:
    """Rows forked, selected, released, and decoded on."""
    model, tree = made(family)
    state = model.init_state(2, 24, page_size=4, pages=24)
    _, state = model.forward(tree, state, fm.Batch.from_tokens(ids_of(model, 11, 1), [6, 5], state))
    branch = fm.fork(state)
    for name, one in (("main", state), ("branch", branch)):
        out, after = model.forward(tree, one, fm.Batch.from_tokens(ids_of(model, 4, len(name)), [3, 1], one))
        yield f"{name} logits", out.logits
        yield from remembered(name, after)
        one = fm.select(after, [1, -1])
        yield from remembered(f"{name} selected", one)


def _captured(family: str) -> Iterator[tuple[str, Any]]:
    model, tree = made(family)
    forward = lowering.jit(model.forward, donate=("state",), buckets=(4, 12), backend="fx")
    commit = lowering.jit(fm.commit, donate=("state",), backend="fx")
    yield from run(model, tree, forward, commit)


def _quantised(family: str, scheme: Any) -> Iterator[tuple[str, Any]]:
    model, tree = made(family)
    yield from run(model, params.quantize(tree, scheme), model.forward, fm.commit)


def _gradients(family: str) -> Iterator[tuple[str, Any]]:
    model, tree = made(family)
    batch = fm.Batch.from_tokens(ids_of(model, 9, 3), [4, 5])
    found = torch.func.grad(lambda tree: model.forward(tree, None, batch)[0].logits.logsumexp(-1).sum())(tree)
    yield from params.items(found)


def _explained(family: str, target: str) -> Iterator[tuple[str, Any]]:
    """Each op's kernel on a target, and why others were refused."""
    model, _ = made(family)
    spec = model.param_spec(HALF)
    state = model.init_state(3, 512, HALF)
    for counts in ([40, 9, 0], [1, 1, 1], [4, 4, 4]):
        batch = fm.Batch.from_tokens(ids_of(model, sum(counts), 1), counts, state)
        report = lowering.explain(model.forward, spec, state, batch, target=target, keep_steps=counts == [4, 4, 4])
        for row in report.rows:
            yield f"{counts} {row.op} {row.kernel}", [row.count, *map(list, row.refused.items())]


def _lowered(family: str, target: str) -> Iterator[tuple[str, Any]]:
    """The schedule through the operators' CPU references."""
    npu_reference.load()
    model, tree = made(family, HALF)
    with lowering.use(target=target):
        yield from run(model, tree, model.forward, fm.commit, page_size=128, dtype=HALF, recurrent_dtype=HALF)


SETTINGS = [
    fm.Sampling(), fm.Sampling(0.8, seed=3), fm.Sampling(1.1, top_k=9, seed=4), fm.Sampling(0.9, top_p=0.8, seed=5),
    fm.Sampling(1.0, min_p=0.05, seed=6),
    fm.Sampling(0.7, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2, seed=7),
]  # fmt: skip


@part("sampling")
def _sampling() -> Iterator[tuple[str, Any]]:
    logits = torch.randint(-40, 41, (6, 97), generator=torch.Generator().manual_seed(1)) / 8
    requests, positions = torch.arange(6), torch.arange(6) * 3 + 2
    for index, one in enumerate(SETTINGS[:-1]):
        yield f"setting {index}", fm.sample(logits, fm.RowSampling.of([one] * 6), requests, positions)
    yield "mixed", fm.sample(logits, fm.RowSampling.of([*SETTINGS[:-1], SETTINGS[1]]), requests, positions)


def _drafted(family: str, kind: str, sampled: bool, drawn: bool = False, captured: bool = False) -> Any:
    """Rounds of a draft: what each emitted, the carry after, and what both states remember."""
    model, tree = made(family)
    draft = fm.draft(model, kind if kind == "mtp" else written(kind), dtype=EXACT)
    state = model.init_state(3, 64, page_size=8)
    drafted = draft.init_state(state)
    batch = fm.Batch.from_tokens(ids_of(model, 12, 5), [5, 4, 3], state)
    out, state = model.forward(tree, state, batch, outputs=draft.outputs)
    first = out.logits[batch.query_start[1:].long() - 1].argmax(-1)
    drafted, carry = draft.extend(tree, drafted, out, batch, fm.next_tokens(batch, first))
    sampling = fm.RowSampling.of(SETTINGS[:3] if sampled else [fm.Sampling()] * 3)
    step = fm.Round(model, draft).run
    step = lowering.jit(step, donate=("state", "drafted"), backend="fx") if captured else step
    most = torch.tensor([3, 3, 0])
    for at in range(4):
        verdict, state, drafted, carry = step(
            tree, state, drafted, carry, sampling, torch.arange(3), most, steps=2, drawn=drawn
        )
        yield f"round {at} tokens", verdict.tokens
        yield f"round {at} accepted", verdict.accepted
        yield f"round {at} carry", carry.hidden
    yield from remembered("state", state)
    yield from remembered("draft", drafted)


@part("generate/none", draft=None)
@part("generate/mtp", draft="mtp")
@part("generate/dspark", draft="dspark")
@part("generate/captured", draft="mtp", backend="fx")
def _generated(**kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Texts of the bundled model under every setting, with prompts that begin alike."""
    model, tree = fm.load("bundled", dtype=EXACT)
    start = "def read_lines(path, encoding=None):\n    with open(path"
    texts = [start + end for end in (", 'rb') as", ") as file", ", mode")] + ["class", "import os\n", "x"]
    results = fm.generate(
        model, tree, texts, 14, sampling=SETTINGS, stop="\n\n\n", rows=4, page_size=8, chunk=16, **kwargs
    )
    for index, one in enumerate(results):
        yield f"prompt {index}", [one.tokens, one.text, one.finish_reason, one.shared_tokens]


for _name in CONFIGS:
    part(f"family/{_name}", family=_name, dtype=EXACT)(_family)
    part(f"family/{_name}/half", family=_name, dtype=HALF)(_family)
    part(f"moved/{_name}", family=_name)(_moved)
    part(f"captured/{_name}", family=_name)(_captured)
    part(f"gradients/{_name}", family=_name)(_gradients)
    for _target in TARGETS:
        part(f"explained/{_name}/{_target}", family=_name, target=_target)(_explained)
        part(f"lowered/{_name}/{_target}", family=_name, target=_target)(_lowered)
for _family_name, _scheme in (
    ("qwen3_5", "W8A8_DYNAMIC"), ("qwen3_5_moe", "W8A8_DYNAMIC"), ("qwen3_5", "W8A8_MXFP8"),
    ("deepseek_v2", "W8A8_DYNAMIC"), ("kimi_k3", {"**.experts.*": "W4A16_MXFP4"}),
):  # fmt: skip
    _word = _scheme if isinstance(_scheme, str) else "experts"
    part(f"quantised/{_family_name}/{_word}", family=_family_name, scheme=_scheme)(_quantised)
for _family_name, _kind in (("qwen3_5", "mtp"), ("flash_next", "mtp"), ("qwen3_5", "dflash"), ("qwen3_5", "gated")):
    for _way in ({}, {"sampled": True}, {"sampled": True, "drawn": True}, {"sampled": True, "captured": True}):
        part(
            "/".join(["rounds", _family_name, _kind, *_way]),
            family=_family_name,
            kind=_kind,
            **{"sampled": False} | _way,
        )(_drafted)


# What is kept


def kept(value: Any) -> Any:
    """A tensor as its type, shape, digest and a few of its numbers; anything else as JSON has it."""
    if not isinstance(value, Tensor):
        return json.loads(json.dumps(value))
    value = value.detach().contiguous()
    digest = hashlib.sha256(value.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    flat = value.flatten().double()
    few = flat[:: max(flat.numel() // 4, 1)][:4].tolist()
    return [str(value.dtype), list(value.shape), digest, [float(f"{x:.6g}") for x in few]]


@torch.no_grad()
def computed(name: str) -> dict[str, Any]:
    """A part as it is kept."""
    return {key: kept(value) for key, value in PARTS[name]()}


@cache
def machine() -> str:
    """A digest of what Torch's primitives give here: the same where the same code runs on a like processor."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for rows, inner, columns in ((1, 32, 64), (3, 40, 17), (12, 192, 96), (64, 64, 64), (1, 192, 160)):
        for dtype in (EXACT, HALF):
            x, y = (torch.randint(-99, 100, shape, generator=draw) / 64 for shape in ((rows, inner), (inner, columns)))
            z = x.to(dtype) @ y.to(dtype)
            batched = torch.bmm(x.to(dtype).expand(3, -1, -1), y.to(dtype).expand(3, -1, -1))
            found += [z, batched, z.float().softmax(-1), z.exp(), z.sigmoid(), z.tanh(), z.abs().rsqrt(), z.cos()]
            found += [z.sum(-1), z.square().mean(-1), z.float().cumsum(-1), z.abs().log1p(), z.float().erf()]
    # A product in which processors were seen to differ that agree in all others: of 9 tokens of 18 values by 97.
    for _ in range(64):
        x, y = (torch.randint(-99, 100, shape, generator=draw).to(HALF) / 64 for shape in ((9, 18), (97, 18)))
        found.append(torch.nn.functional.linear(x, y))
    lower = torch.eye(16) + torch.randint(-9, 10, (16, 16), generator=draw).tril(-1) / 64
    found.append(torch.linalg.solve_triangular(lower, lower.T.contiguous(), upper=False))
    return hashlib.sha256("".join(kept(value)[2] for value in found).encode()).hexdigest()[:16]


def differences(name: str, before: dict[str, Any], exact: bool) -> list[str]:
    """Sentences on what a part gives otherwise than it did."""
    now = computed(name)
    found = [f"{name}: {key!r} is {'new' if key in now else 'gone'}" for key in before.keys() ^ now.keys()]
    for key in before.keys() & now.keys():
        if before[key] != now[key] and (exact or not _near(before[key], now[key])):
            found.append(f"{name}: {key!r} was {before[key]}, is {now[key]}")
    return sorted(found)


def _near(before: Any, now: Any) -> bool:
    """Whether two kept tensors are within rounding of each other, by the few numbers kept; tokens may be any then."""
    if not str(before[0]).startswith("torch.") or before[:2] != now[:2]:
        return False
    bound = {"torch.float32": 1e-3, "torch.bfloat16": 0.1}.get(before[0], float("inf"))
    return all(abs(x - y) <= bound * (1 + abs(x)) for x, y in zip(before[3], now[3], strict=True))


def main() -> None:
    """Compare, or write."""
    parser = argparse.ArgumentParser(description="Compare what is computed with what is kept.")
    parser.add_argument("--write", action="store_true", help="keep what is computed now")
    parser.add_argument("--only", default="", help="parts whose names begin so")
    options = parser.parse_args()
    names = [name for name in PARTS if name.startswith(options.only)]
    stored = json.loads(FILE.read_text())
    if options.write:
        kept = stored["parts"] | {name: computed(name) for name in names}
        parts = [f"{json.dumps(name)}: {json.dumps(kept[name])}" for name in PARTS]
        FILE.write_text(f'{{"machine": "{machine()}", "parts": {{\n' + ",\n".join(parts) + "\n}}\n")
        return
    found = [line for name in names for line in differences(name, stored["parts"][name], True)]
    print(*found, f"{len(names)} parts, {len(found)} differences", sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
