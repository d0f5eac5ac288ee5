"""Train the bundled model with funcmodels' own forward through `torch.func`; stop and resume at any time.

    python docs/bundled/tokenizer.py DATA
    python docs/bundled/train.py DATA RUN --minutes 95 --decay-minutes 20

Every call goes on from RUN's newest checkpoint for `--minutes`, compiling included. The learning rate is flat until
`--decay-minutes` before the end, then falls to zero. RUN keeps the last checkpoint before the fall as
`stable.safetensors`; renamed to `newest.safetensors`, training goes on from there. The tokens of step n depend on n and
the seed alone, the length of the fall on the clock.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import muon
import numpy as np
import torch
import torch._inductor
import torch._inductor.config
import torch.nn.functional as F
import torch.utils._pytree as pytree
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import funcmodels as fm
from params import tree
from params.tree import tree_map

HERE = Path(__file__).parent
ROWS, LENGTH = 4, 512  # sequences a step, tokens a sequence
INTO_TRUNK = 0.1  # share of the draft head's gradient that trains the layers below it
RATE, WARMUP = 6e-3, 100
CLIP = 1.0
SEED = 0
LOG_EVERY, EVAL_EVERY, SAVE_SECONDS = 20, 200, 180.0
EVAL_LENGTH, EVAL_ROWS = 1024, 4


class Data:
    """The two token files, and how many bytes each token id stands for."""

    def __init__(self, folder: Path) -> None:
        self.train = np.load(folder / "train.npy").astype(np.int64)
        self.held_out = np.concatenate([[0], np.load(folder / "heldout.npy")]).astype(np.int64)
        vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        self.bytes = np.zeros(len(vocab), np.int64)
        for token, index in vocab.items():
            self.bytes[index] = len(token) if index else 0  # a byte-level token has one character a byte; id 0 has none

    def windows(self, step: int) -> list[list[int]]:
        """The `ROWS` windows of `LENGTH + 1` tokens of a step; an epoch shuffles all windows, at a random phase."""
        count = len(self.train) // LENGTH - 2
        rows = []
        for index in range(step * ROWS, (step + 1) * ROWS):
            epoch, place = divmod(index, count)
            draw = np.random.Generator(np.random.Philox(key=[SEED, epoch]))
            start = draw.integers(LENGTH) + draw.permutation(count)[place] * LENGTH
            rows.append(self.train[start : start + LENGTH + 1].tolist())
        return rows

    def held_out_windows(self, length: int) -> list[list[int]]:
        """The held-out stream cut into windows that share one token: every token is predicted once."""
        starts = range(0, len(self.held_out) - 1, length)
        return [self.held_out[start : start + length + 1].tolist() for start in starts]


def make_loss(model: Any, dtype: torch.dtype) -> Callable[..., tuple[Tensor, Tensor]]:
    """Loss of the model and its draft head together, and the model's alone, with float32 parameters run in `dtype`."""
    spec = model.param_spec()

    def loss(params: Any, batch: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        cast = in_dtype(spec, params, dtype)
        out, _ = model.forward(cast, None, batch)
        own = F.cross_entropy(out.logits.float(), targets)
        return own + draft_loss(model, cast, out, batch, targets), own.detach()

    return loss


def draft_loss(model: Any, params: Any, out: Any, batch: Any, targets: Tensor) -> Tensor:
    """Cross-entropy in nats of the draft head against what the model itself predicts one token later.

    The first pass sees the model's hidden states, the second its own from the place before at every other token, as
    when it drafts several tokens. `INTO_TRUNK` of its gradient reaches the model's layers, none embedding and head.
    """
    params = tree.put(params, "embed.weight", params.embed.weight.detach())
    forward = partial(fm.draft(model, "mtp").forward, params, None, replace(batch, tokens=targets))
    hidden = INTO_TRUNK * out.hidden + (1 - INTO_TRUNK) * out.hidden.detach()
    aim = by_row(out.logits.detach())[:, 1:].float().softmax(-1)
    first = forward(hidden)[0]
    odd = torch.arange(len(targets))[:, None] % 2 == 1
    second = forward(torch.where(odd, first.hidden.roll(1, 0), hidden))[0]
    each = [-(aim * by_row(x.logits)[:, :-1].float().log_softmax(-1)).sum(-1).mean() for x in (first, second)]
    return torch.stack(each).sum()


def by_row(values: Tensor) -> Tensor:
    """`[tokens ...]` of a training batch as `[rows length ...]`."""
    return values.unflatten(0, (-1, LENGTH))


def make_score(model: Any, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Mean cross-entropy in nats of `targets`, with parameters run in `dtype`."""
    spec = model.param_spec()

    def score(params: Any, batch: Any, targets: Tensor) -> Tensor:
        out, _ = model.forward(in_dtype(spec, params, dtype), None, batch)
        return F.cross_entropy(out.logits.float(), targets)

    return score


def in_dtype(spec: Any, params: Any, dtype: torch.dtype) -> Any:
    """Parameters in `dtype`, but for those that the spec pins to another."""
    return tree_map(lambda leaf, value: value.to(leaf.dtype or dtype), spec, params)


def inputs(windows: list[list[int]]) -> tuple[Any, Tensor]:
    """The batch of all but the last token of each window, and the tokens that follow."""
    batch = fm.Batch.from_lists([window[:-1] for window in windows])
    return batch, torch.tensor([token for window in windows for token in window[1:]])


@torch.no_grad()
def bits_per_byte(score: Callable[..., Tensor], params: Any, data: Data, every: int = 1) -> float:
    """Held-out bits per byte in windows of `EVAL_LENGTH` tokens; `every` = n uses one window in n."""
    windows = data.held_out_windows(EVAL_LENGTH)[::every]
    nats, size = 0.0, 0
    for at in range(0, len(windows), EVAL_ROWS):
        batch, targets = inputs(windows[at : at + EVAL_ROWS])
        nats += score(params, batch, targets).item() * len(targets)
        size += int(data.bytes[targets.numpy()].sum())
    return nats / math.log(2) / size


def save(path: Path, params: Any, moments: muon.Moments, facts: dict[str, Any]) -> None:
    """Write a checkpoint at once or not at all."""
    whole = {"params": params, "first": moments.first, "second": moments.second}
    tensors = {name: leaf.contiguous() for name, leaf in tree.items(whole)}
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={key: str(value) for key, value in facts.items()})
    os.replace(partial, path)


def restore(path: Path, params: Any) -> tuple[Any, muon.Moments, dict[str, Any]]:
    """Parameters, moments and facts of a checkpoint; `params` gives the structure."""
    with safe_open(path, "pt") as file:
        facts = {key: json.loads(value) for key, value in file.metadata().items()}
        whole = {"params": params, "first": params, "second": params}
        names = iter([name for name, _ in tree.items(whole)])
        found = tree_map(lambda _: file.get_tensor(next(names)), whole)
    return found["params"], muon.Moments(found["first"], found["second"]), facts


def one_core() -> None:
    """Run and compile on one core, and take denormal numbers as zero (they make a backward pass ten times as slow)."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch._inductor.config.cpp.threads = 1
    torch._inductor.config.compile_threads = 1


class Gradient:
    """Gradient of a step's mean loss, and the loss with and without the draft head's, compiled.

    The whole of `grad_and_value` is traced once into a graph of plain operators, and Inductor fuses them: minutes to
    begin with, then about twice the tokens a core second of deriving the gradient operator by operator.
    """

    def __init__(self, loss: Callable[..., tuple[Tensor, Tensor]], params: Any, data: Data) -> None:
        self.data = data
        leaves, self.taken = pytree.tree_flatten((params, *inputs(data.windows(0))))
        differentiate = torch.func.grad_and_value(loss, has_aux=True)

        def flat(*values: Tensor) -> list[Any]:
            return pytree.tree_leaves(differentiate(*pytree.tree_unflatten(values, self.taken)))

        graph = make_fx(flat, tracing_mode="fake")(*leaves)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        self.given = pytree.tree_structure((params, (0.0, 0.0)))
        self.run: Callable[..., Any] = torch._inductor.compile(graph, leaves)  # type: ignore[assignment]

    @torch.no_grad()
    def __call__(self, params: Any, step: int) -> tuple[Any, tuple[float, float]]:
        """The gradient; the model's own loss, and the mean of its draft head's two passes."""
        leaves, _ = pytree.tree_flatten((params, *inputs(self.data.windows(step))))
        grads, (both, own) = pytree.tree_unflatten(list(self.run(*leaves)), self.given)
        return grads, (own.item(), (both - own).item() / 2)


class Clock:
    """Wall time of this call: minutes left, and the learning rate's factor at the end."""

    def __init__(self, minutes: float, decay_minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes
        self.decay = 60 * decay_minutes

    def left(self) -> float:
        return self.end - time.monotonic()

    def factor(self, step: int) -> float:
        fall = min(1.0, max(0.0, self.left()) / self.decay) if self.decay else 1.0
        return fall * min(1.0, (step + 1) / WARMUP)


def main() -> None:
    args = parse()
    one_core()
    args.run.mkdir(parents=True, exist_ok=True)
    data = Data(args.data)
    model = fm.build(json.loads((HERE / "config.json").read_text()))
    params = model.init_params(seed=SEED, dtype=torch.float32)
    moments, facts = muon.init(params), {"step": 0, "seconds": 0.0}
    newest = args.run / "newest.safetensors"
    if newest.exists():
        params, moments, facts = restore(newest, params)
    with (args.run / "train.log").open("a") as file:
        train(args, model, data, params, moments, facts, lambda line: report(file, line))


def train(args: Any, model: Any, data: Data, params: Any, moments: Any, facts: Any, say: Callable[[str], None]) -> None:
    """Step until the clock runs out; checkpoints and the log go to the run's folder."""
    score = make_score(model, torch.bfloat16)
    clock = Clock(args.minutes, args.decay_minutes)
    gradient = Gradient(make_loss(model, torch.bfloat16), params, data)
    run = Run(args.run, facts, clock, say)
    say(f"from step {facts['step']}, {facts['seconds'] / 60:.1f} minutes trained before")
    for step in run.steps():
        grads, losses = gradient(params, step)
        grads, norm = muon.clip(grads, CLIP)
        rate = RATE * args.rate * clock.factor(step)
        params, moments = muon.update(model.param_spec(), params, moments, grads, step + 1, rate)
        run.after(step, losses, norm.item(), rate)
        if run.save_due():
            save(run.checkpoint(), params, moments, run.facts())
        if (step + 1) % EVAL_EVERY == 0:
            say(f"step {step + 1} held-out sample {bits_per_byte(score, params, data, every=12):.4f} bits per byte")
    save(args.run / "newest.safetensors", params, moments, run.facts())
    say(f"stop at step {run.step} after {run.facts()['seconds'] / 60:.1f} minutes of training")


class Run:
    """The host side of a training run: where it is, when it saves, what it says."""

    def __init__(self, folder: Path, facts: dict[str, Any], clock: Clock, say: Callable[[str], None]) -> None:
        self.folder, self.clock, self.say = folder, clock, say
        self.step, self.before = facts["step"], facts["seconds"]
        self.start = self.saved = self.logged = time.monotonic()
        self.losses: list[tuple[float, float]] = []

    def steps(self) -> Iterator[int]:
        while self.clock.left() > 0:
            yield self.step

    def after(self, step: int, losses: tuple[float, float], norm: float, rate: float) -> None:
        """Count a finished step; every `LOG_EVERY` say where training stands."""
        self.step = step + 1
        self.losses.append(losses)
        if self.step % LOG_EVERY == 0:
            now = time.monotonic()
            speed = len(self.losses) * ROWS * LENGTH / (now - self.logged)
            own, draft = (sum(values) / len(values) for values in zip(*self.losses, strict=True))
            at = f"norm {norm:.2f} rate {rate:.2e} {speed:.0f} tokens/s"
            self.say(f"step {self.step} loss {own:.4f} draft {draft:.4f} {at}")
            self.logged, self.losses = now, []

    def save_due(self) -> bool:
        due = time.monotonic() - self.saved > SAVE_SECONDS
        if due:
            self.saved = time.monotonic()
        return due

    def checkpoint(self) -> Path:
        """While the rate falls, the last checkpoint before the fall is kept beside the newest."""
        newest, stable = self.folder / "newest.safetensors", self.folder / "stable.safetensors"
        falling = self.clock.left() < self.clock.decay
        if falling and not stable.exists() and newest.exists():
            os.replace(newest, stable)
        return newest

    def facts(self) -> dict[str, Any]:
        return {"step": self.step, "seconds": round(self.before + time.monotonic() - self.start, 1)}


def report(file: Any, line: str) -> None:
    file.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    file.flush()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder written by tokenizer.py")
    parser.add_argument("run", type=Path, help="folder of checkpoints and train.log")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--decay-minutes", type=float, default=0.0)
    parser.add_argument("--rate", type=float, default=1.0, help="factor on the learning rate")
    return parser.parse_args()


if __name__ == "__main__":
    main()
