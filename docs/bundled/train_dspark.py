"""Train the block draft of the bundled model, a DSpark, to say what the model itself would say.

    python docs/bundled/train_dspark.py DATA OUT --minutes 6

DATA is the folder written by tokenizer.py. For a part of the minutes the model reads training text, and its residual
streams are kept. The rest goes to the draft: behind random places of a text, a block has to give the law that the model
has of each token that follows, from the streams before the block. The clock counts processor time, and the learning
rate falls to zero with it. Prints what the draft then does on held-out text.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import export
import muon
import numpy as np
import torch
import torch.nn.functional as F
import train
from torch import Tensor

import funcmodels as fm
import params as checkpoints
from funcmodels.drafts.block import angles_at, block_hidden, context_entries
from funcmodels.drafts.markov import corrected
from funcmodels.drafts.named import NAMES, BlockParams, read_config
from params import tree

LENGTH = 256  # tokens of a text
READING = 0.15  # share of the minutes
ROWS, ANCHORS = 8, 24  # texts a step, and blocks in each
FIRST = 8  # the first token that a block may begin with
RATE, WARMUP, CLIP = 6e-3, 20, 1.0
LATER = 0.85  # weight of each place of a block relative to the one before: it counts only if that one was right
SEED = 0
CONFIG = {
    "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "hidden_size": 128, "intermediate_size": 192,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "vocab_size": 4096,
    "num_target_layers": 16, "layer_types": ["full_attention"] * 2,
    "dspark_config": {
        "block_size": 7, "mask_token_id": 0, "target_layer_ids": [3, 9, 15], "sample_from_anchor": True,
        "markov_rank": 16, "markov_head_type": "vanilla",
    },
}  # fmt: skip


class Clock:
    """Processor time of this process since it was made, as a share of what is given."""

    def __init__(self, minutes: float) -> None:
        self.start, self.given = time.process_time(), 60 * minutes

    def share(self) -> float:
        """How much of it is spent, 1 at the end."""
        return (time.process_time() - self.start) / self.given


@dataclass(frozen=True)
class Texts:
    """Texts [texts tokens], the residual streams that the draft reads, and what the output projection reads."""

    tokens: Tensor
    features: Tensor
    hidden: Tensor


@torch.no_grad()
def read(model: fm.Model, params: Any, data: train.Data, names: tuple[str, ...], clock: Clock) -> Texts:
    """Texts and what the model makes of them, until the part of the time for it is spent."""
    draw, found = np.random.Generator(np.random.Philox(SEED)), []
    while clock.share() < READING:
        starts = draw.integers(len(data.train) - LENGTH, size=ROWS)
        rows = [data.train[start : start + LENGTH].tolist() for start in starts]
        out, _ = model.forward(params, None, fm.Batch.from_lists(rows), logits=None, outputs=names)
        streams = torch.cat([out.extra[name] for name in names], -1)
        found.append((torch.tensor(rows), *(x.unflatten(0, (ROWS, -1)).bfloat16() for x in (streams, out.hidden))))
    return Texts(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def make_loss(config: Any, target: Any) -> Callable[..., Tensor]:
    """Weighted cross-entropy of blocks: parameters, some texts, and the places in them [texts blocks]."""
    size = config.block_size
    inside = torch.arange(size)
    weights = LATER ** inside.float()

    def loss(own: Any, tokens: Tensor, features: Tensor, final: Tensor, places: Tensor) -> Tensor:
        texts, length = tokens.shape
        at = places[..., None] + inside  # [texts blocks size]
        every = torch.arange(length).expand(texts, -1)
        k, v = context_entries(config, own, features.flatten(0, 1), angles_at(config, every.flatten()))
        attend = partial(attended, config, every, at, k.unflatten(0, (texts, -1)), v.unflatten(0, (texts, -1)))
        known = tokens.gather(1, at.flatten(1)).view_as(at)
        masked = torch.where(inside > 0, config.mask_token_id, known)
        x = F.embedding(masked.flatten(), target.embed.weight)
        hidden = block_hidden(config, own, x, angles_at(config, at.flatten()), attend)
        base = hidden @ target.embed.weight.T
        logits, _ = corrected(own.markov, base, hidden, known.flatten(), None)
        aims = final.gather(1, at.flatten(1)[..., None].expand(-1, -1, final.shape[2])).flatten(0, 1)
        law = (aims @ target.embed.weight.T).softmax(-1)
        each = -(law * logits.log_softmax(-1)).sum(-1).unflatten(0, (-1, size))
        return (each.mean(0) * weights).sum() / weights.sum()

    return loss


def attended(
    config: Any,
    every: Tensor,
    at: Tensor,
    context_k: Tensor,
    context_v: Tensor,
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """Attention of all blocks of each text over the context before their places and over themselves."""
    texts, blocks, size = at.shape
    q, k, v = (x.unflatten(0, (texts, -1)).transpose(1, 2) for x in (q, k, v))
    keys, values = (
        torch.cat((context[:, :, layer].transpose(1, 2), own), 2) for context, own in ((context_k, k), (context_v, v))
    )
    before = (every[:, None, None] < at[:, :, :1, None]).expand(-1, -1, size, -1).flatten(1, 2)
    block = torch.arange(blocks).repeat_interleave(size)
    own = (block[:, None] == block).expand(texts, -1, -1)
    seen = torch.cat((before, own), -1)[:, None]
    y = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)
    return y.transpose(1, 2).flatten(0, 1)


def begun(own: Any, target: Any) -> Any:
    """Random parameters with the model's final norm, whose output projection they use, and no correction yet."""
    own = tree.put(own, "norm.weight", 1 + target.norm.weight)
    return tree.put(own, "markov.w2.weight", torch.zeros_like(own.markov.w2.weight))


def trained(config: Any, target: Any, texts: Texts, clock: Clock) -> Any:
    """Parameters of the draft, trained until the clock has run out."""
    spec = BlockParams.spec(config)
    own = begun(checkpoints.init(spec, SEED), target)
    moments, gradient = muon.init(own), torch.func.grad_and_value(make_loss(config, target))
    draw = np.random.Generator(np.random.Philox(SEED + 1))
    step, losses, first = 0, [], clock.share()
    while clock.share() < 1:
        rows = torch.from_numpy(draw.integers(len(texts.tokens), size=ROWS))
        places = draw.integers(FIRST, LENGTH - config.block_size, size=(ROWS, ANCHORS))
        given = (texts.tokens[rows], texts.features[rows].float(), texts.hidden[rows].float())
        grads, value = gradient(own, *given, torch.from_numpy(places))
        grads, _ = muon.clip(grads, CLIP)
        rate = RATE * min(1.0, (step + 1) / WARMUP) * max(0.0, 1 - clock.share()) / (1 - first)
        own, moments = muon.update(spec, own, moments, grads, step + 1, rate)
        step += 1
        losses.append(value.item())
        if step % 50 == 0:
            print(f"step {step} loss {np.mean(losses[-50:]):.3f} rate {rate:.1e}", flush=True)
    return own


def main() -> None:
    args = parse()
    train.one_core()
    clock = Clock(args.minutes)
    data = train.Data(args.data)
    model, params = fm.load("bundled", dtype=torch.float32)
    config = read_config(CONFIG, model.config.num_hidden_layers)
    texts = read(model, params, data, tuple(f"layers.{layer}" for layer in config.target_layer_ids), clock)
    print(f"{texts.tokens.numel():,} tokens read", flush=True)
    own = trained(config, params, texts, clock)
    checkpoints.save(tree.to(own, dtype=torch.bfloat16), args.out, BlockParams.spec(config), NAMES, CONFIG)
    print(tree.summary(own))
    report(args.out, data)


def report(directory: Path, data: train.Data) -> None:
    """Tokens a round of greedy text on held-out prompts, beside those of the model's own head."""
    model, params = fm.load("bundled", dtype=torch.bfloat16)
    for draft, steps in ((directory, 7), ("mtp", 7), (directory, 3), ("mtp", 3)):
        found = export.acceptance(model, params, data, draft, steps)
        shares = ", ".join(f"{share:.0%}" for share in found["shares"])
        print(f"{draft}, {steps} drafts: {found['tokens_a_round']:.2f} tokens a round; accepted by position {shares}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder written by tokenizer.py")
    parser.add_argument("out", type=Path, help="directory of the draft")
    parser.add_argument("--minutes", type=float, default=6.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
