"""Write the bundled model's directory from a training run: bfloat16 weights, config, tokenizer, and its card.

    python docs/bundled/export.py DATA RUN OUT

The held-out figure on the card is that of the exported weights, run in bfloat16 over every held-out token.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from string import Template
from typing import Any

import torch
import train

import funcmodels as fm
import params as checkpoints
from params import tree
from params.names.qwen3_5 import NAMES

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
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
    (args.out / "README.md").write_text(card(args.data, facts, bits, tree.num_bytes(params)))


def card(data: Path, facts: dict[str, Any], bits: float, size: int) -> str:
    """The model card, `card.md` with the run's figures in it."""
    corpus = json.loads((data / "corpus.json").read_text())
    tokens = facts["step"] * train.ROWS * train.LENGTH
    return Template((train.HERE / "card.md").read_text()).substitute(
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
        bits=f"{bits:.3f}",
        size=tree.size(size),
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder written by tokenizer.py")
    parser.add_argument("run", type=Path, help="folder written by train.py")
    parser.add_argument("out", type=Path, help="directory of the model")
    return parser.parse_args()


if __name__ == "__main__":
    main()
