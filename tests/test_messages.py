"""What a caller gives wrongly is named in an error, not repeated: a value may be as long as a book."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import funcmodels as fm
import lowering
import params
from tests.checkpoints import CONFIGS, written

pytestmark = pytest.mark.plain

BOOKS: dict[str, Any] = {"text": "x" * 100_000, "list": ["x" * 100_000], "numbers": list(range(50_000))}
SMALL = fm.build(CONFIGS["qwen3_5"]())
TREE = SMALL.init_params()
BATCH = fm.Batch.from_lists([[1]])


def state() -> fm.State:
    return SMALL.init_state(2, 8)


def pending() -> fm.State:
    empty = state()
    return SMALL.forward(TREE, empty, fm.Batch.from_lists([[1, 2], [3]], empty), keep_steps=True)[1]


def generate(name: str) -> Callable[[Any], Any]:
    return lambda value: fm.generate(SMALL, TREE, **{"prompts": [[1]], "max_new_tokens": 1, name: value})


CALLS: dict[str, Callable[[Any], Any]] = {
    **{f"Sampling {name}": lambda value, name=name: fm.Sampling(**{name: value})
       for name in ("temperature", "top_k", "seed", "logit_bias")},
    **{f"Request {name}": lambda value, name=name: fm.Request(**{"prompt": (1,), "max_new_tokens": 1, name: value})
       for name in ("max_new_tokens", "sampling", "number")},
    **{f"generate {name}": generate(name)
       for name in ("draft", "draft_steps", "sampling", "rows", "backend", "recurrent_dtype", "stream")},
    **{f"init_state {name}": lambda value, name=name: SMALL.init_state(**{"rows": 1, "max_len": 4, name: value})
       for name in ("rows", "pages", "dtype", "device", "layout")},
    "init_params seed": lambda value: SMALL.init_params(value),
    "init_params device": lambda value: SMALL.init_params(device=value),
    **{f"load {name}": lambda value, name=name: fm.load(**{"path_or_hub_id": written("qwen3_5"), name: value})
       for name in ("path_or_hub_id", "dtype", "device", "mesh", "tables")},
    "build": fm.build, "draft": lambda value: fm.draft(SMALL, value), "save": lambda value: fm.save(SMALL, TREE, value),
    "outputs": lambda value: SMALL.forward(TREE, None, BATCH, outputs=value),
    "logits": lambda value: SMALL.forward(TREE, None, BATCH, logits=value),
    "max_query": lambda value: SMALL.forward(
        TREE, None, params.unchecked(fm.Batch, **vars(BATCH) | {"max_query": value})
    ),
    "counts of a batch": lambda value: fm.Batch.from_tokens(torch.tensor([1]), [2] * 50_000),
    "rows": lambda value: fm.select(state(), [0] * 50_000), "fork": lambda value: fm.fork(state(), value),
    "accepted": lambda value: fm.commit(pending(), value),
    "path": lambda value: params.at(TREE, str(value)), "scheme": lambda value: params.quantize(TREE, str(value)),
    "kernel": lambda value: lowering.use(rms_norm=str(value)).__enter__(),
    "op": lambda value: lowering.use(lowering.Policy({str(value): "torch"})).__enter__(),
    "target": lambda value: lowering.use(target=str(value)).__enter__(),
    "jit backend": lambda value: lowering.jit(SMALL.forward, backend=str(value)),
    "jit donate": lambda value: lowering.jit(SMALL.forward, donate=(str(value),)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_no_message_repeats_a_book(name: str) -> None:
    for value in BOOKS.values():
        with pytest.raises((TypeError, ValueError, KeyError, lowering.LoweringError)) as caught:
            CALLS[name](value)
        assert 10 < len(str(caught.value)) < 2500
