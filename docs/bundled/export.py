"""Write the bundled model's directory from a training run: bfloat16 weights, config, tokenizer, and its card.

    python docs/bundled/export.py DATA RUN OUT

The held-out loss on the card is that of the exported weights, run in bfloat16 over every held-out token; the draft
head's figures are those of greedy text after `DRAFT_PROMPTS` pieces of held-out text.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import torch
import train

import funcmodels as fm
import params as checkpoints
from params import tree
from params.names.qwen3_5 import NAMES

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
DRAFT_PROMPTS, DRAFT_PROMPT, DRAFT_NEW = 200, 64, 128  # prompts, their tokens, and the tokens after each
GENERATION = {"bos_token_id": None, "do_sample": False, "eos_token_id": 0, "pad_token_id": 0}


def main() -> None:
    args = parse()
    train.one_core()
    config = json.loads((train.HERE / "config.json").read_text())
    model = fm.build(config)
    params, _, facts = train.restore(args.run / "newest.safetensors", model.init_params())
    params = train.in_dtype(model.param_spec(), params, torch.bfloat16)
    checkpoints.save(params, args.out, model.param_spec(), NAMES, config)
    for name in TOKENIZER_FILES:
        shutil.copyfile(args.data / name, args.out / name)
    (args.out / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n")
    data = train.Data(args.data)
    bits = train.bits_per_byte(train.make_score(model, torch.bfloat16), params, data)
    figures = facts | {"bits": bits, "size": tree.num_bytes(params)} | acceptance(model, params, data)
    (args.out / "README.md").write_text(card(args.data, figures))


def acceptance(
    model: fm.Model, params: Any, data: train.Data, draft: Any = "mtp", steps: int | None = None
) -> dict[str, Any]:
    """Tokens a round of greedy speculation on held-out text, and the share of rounds that took each draft."""
    starts = np.random.Generator(np.random.Philox(0)).integers(len(data.held_out) - DRAFT_PROMPT, size=DRAFT_PROMPTS)
    prompts = [data.held_out[start : start + DRAFT_PROMPT].tolist() for start in starts]
    results = fm.generate(model, params, prompts, DRAFT_NEW, draft=draft, draft_steps=steps)
    rounds = sum(result.rounds for result in results)
    places = zip(*(result.accepted for result in results if result.accepted), strict=True)
    shares = [sum(place) / rounds for place in places]
    return {"tokens_a_round": 1 + sum(shares), "shares": shares}


def card(data: Path, facts: dict[str, Any]) -> str:
    """The model card, `card.txt` with the run's figures in it."""
    corpus = json.loads((data / "corpus.json").read_text())
    tokens = facts["step"] * train.ROWS * train.LENGTH
    return Template((train.HERE / "card.txt").read_text()).substitute(
        python=corpus["python"],
        sha256=corpus["sha256"],
        documents=corpus["train"]["documents"],
        megabytes=f"{corpus['train']['bytes'] / 1e6:.1f}",
        held_documents=corpus["held_out"]["documents"],
        held_kilobytes=f"{corpus['held_out']['bytes'] / 1e3:.0f}",
        bytes_per_token=f"{corpus['held_out']['bytes_per_token']:.2f}",
        steps=f"{facts['step']:,}",
        tokens=f"{tokens / 1e6:.1f}",
        epochs=f"{tokens / corpus['train']['tokens']:.1f}",
        minutes=f"{facts['seconds'] / 60:.0f}",
        window=train.EVAL_LENGTH,
        bits=f"{facts['bits']:.3f}",
        size=tree.size(facts["size"]),
        tokens_a_round=f"{facts['tokens_a_round']:.2f}",
        shares=", ".join(f"{share:.0%}" for share in facts["shares"]),
        draft_prompts=DRAFT_PROMPTS,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder written by tokenizer.py")
    parser.add_argument("run", type=Path, help="folder written by train.py")
    parser.add_argument("out", type=Path, help="directory of the model")
    return parser.parse_args()


if __name__ == "__main__":
    main()
