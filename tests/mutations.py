"""Faults put into the packages, one at a time: the tests named for each must fail.

`python -m tests.mutations [--only WORD]` applies each to a copy of the tree, runs its tests there up to the first that
fails, and prints which faults are caught; it ends with 1 if one is not, or stands no longer. `--check` looks only
whether each still finds its text, exactly once. Faults of kernels, conventions flipped at the operators that they call,
are tests of the suite: `pytest -m mutation` runs `tests/lowering/npu/test_kernels_mutations.py`.

To add one, choose a short text that says what it is about and will not be reworded soon, and a test as narrow as it is
quick. One that survives is a test to write, not an entry to delete.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOST = "its text no longer stands there once; choose another"
COPIED = ("funcmodels", "lowering", "params", "tests", "pyproject.toml")


@dataclass(frozen=True)
class Mutation:
    """A text, what stands in its place, and pytest's arguments for the tests that must fail then.

    `place` is the file, or a folder with one file that has the text.
    """

    place: str
    text: str
    instead: str
    tests: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text!r} -> {self.instead!r}"

    def file(self, root: Path = ROOT) -> Path | None:
        """The file in which the text occurs; None unless it does so once and nowhere else."""
        place = root / self.place
        counts = {file: file.read_text().count(self.text) for file in (place, *place.glob("*.py")) if file.is_file()}
        return max(counts, key=lambda file: counts[file]) if sum(counts.values()) == 1 else None


CONTRACT = "tests/models/test_contract.py"


def beside(family: str, test: str = "outputs_layers") -> str:
    """The contract's test of outputs, layers and entries, or another one, for a family."""
    return f"{CONTRACT} -k '{test} and {family}'"


MODELS = (
    # Attention: gates, scales, norms of heads, windows, rotation.
    Mutation("funcmodels/attention/gqa.py", "y * torch.sigmoid(gate)", "y * torch.tanh(gate)", beside("qwen3_5")),
    Mutation("funcmodels/attention/gqa.py", "q.shape[2] ** -0.5", "1.0", beside("qwen3_5")),
    Mutation("funcmodels/attention/gqa.py", "normalised(params.k_norm, k,", "normalised(params.q_norm, k,",
             beside("gemma3")),
    Mutation("funcmodels/models/gemma3.py", "config.query_pre_attn_scalar**-0.5", "config.head_dim**-0.5",
             beside("gemma3")),
    Mutation("funcmodels/models/gemma3_config.py", "return self.sliding_window if", "return self.sliding_window + 1 if",
             beside("gemma3")),
    Mutation("funcmodels/models/gemma3.py", "(config.rope_local_base_freq, config.rope_local_factor)",
             "(config.rope_theta, config.rope_factor)", beside("gemma3")),
    Mutation("lowering/ops/rotary.py", "(low * cos - high * sin,", "(low * cos + high * sin,", beside("gemma3")),
    Mutation("lowering/ops/rotary.py", "(even * cos - odd * sin, odd * cos + even * sin)",
             "(odd * cos + even * sin, even * cos - odd * sin)", beside("deepseek_v2")),
    Mutation("funcmodels/attention/mla.py", "y * gate.sigmoid() if gate.shape[1] else y", "y", beside("kimi_k3")),
    Mutation("funcmodels/attention/qsa.py", "(y * gate).flatten(1)", "y.flatten(1)", beside("flash_next")),
    # Norms and residual sums.
    Mutation("lowering/ops/norm.py", "return (normalise(x, eps)[0] * (1 + wide(plain(weight)))).to(x.dtype)",
             "return (normalise(x, eps)[0] * wide(plain(weight))).to(x.dtype)", beside("gemma3")),
    Mutation("funcmodels/models/gemma3.py", "normalised(layer.post_mlp_norm,", "normalised(layer.pre_mlp_norm,",
             beside("gemma3")),
    Mutation("funcmodels/models/gemma3.py", "x * rounded(math.sqrt(config.hidden_size), x.dtype)", "x",
             beside("gemma3")),
    Mutation("funcmodels/models/kimi_k3.py", "prefix = prefix + fed", "prefix = fed", beside("kimi_k3")),
    Mutation("funcmodels/blocks/ngram_embedding.py", "x = x + (gated + y.view_as(x))", "x = x + y.view_as(x)",
             beside("flash_next")),
    # Delta rules and experts.
    Mutation("funcmodels/attention/gated_delta.py", "scale=k_dim**-0.5", "scale=1.0", beside("qwen3_5")),
    Mutation("funcmodels/attention/gated_delta.py", "qkv, z, b, a = project", "qkv, z, a, b = project",
             beside("qwen3_5")),
    Mutation("funcmodels/attention/kimi_delta.py", 'activation="sigmoid"', 'activation="silu"', beside("kimi_linear")),
    Mutation("funcmodels/blocks/mlp.py", "torch.sigmoid(project(params.shared_gate, x)) * ", "", beside("moe")),
    Mutation("funcmodels/models/deepseek_v2.py", "scale=config.routed_scaling_factor", "scale=1.0",
             beside("deepseek_v2")),
    Mutation("funcmodels/models/kimi_linear.py", "renormalise=config.moe_renormalize", "renormalise=True",
             beside("kimi_linear")),
)  # fmt: skip
MISUSE, MACHINE = "tests/state/test_misuse.py", "tests/property/test_state_machine.py"
ROOM = "funcmodels/state"
STATE = (
    # Pages: who holds which.
    Mutation(ROOM, "if self._references[page] == 0:", "if self._references[page] <= 1:",
             f"{MISUSE} -k a_shared_pool_counts"),
    Mutation(ROOM, "self._references[page] += 1", "self._references[page] += 0",
             f"{MISUSE} -k a_shared_pool_counts"),
    Mutation(ROOM, "if count > len(self._free):", "if count > len(self._free) + 1:",
             f"{MISUSE} -k out_of_pages"),
    Mutation(ROOM, "need = [-(-", "need = [(",
             beside("qwen3_5", "a_prefix_is_shared")),
    Mutation(ROOM, "lease.pool.references(page) > 1", "lease.pool.references(page) > 2",
             "tests/state/test_rows.py -k an_ancestor"),
    # Where tokens go.
    Mutation(ROOM, "live = row < state.rows", "live = row <= state.rows",
             beside("qwen3_5", "padding_and_unread")),
    Mutation(ROOM, "positions = first[row] + ", "positions = ", beside("gemma3", "conversation")),
    Mutation(ROOM, "map(torch.clone, pages)", "pages", beside("gemma3", "inside_a_gradient")),
    # Lengths, pending tokens, commit.
    Mutation(ROOM, "pending + accepted", "pending",
             beside("gemma3", "any_number_of_drawn")),
    Mutation(ROOM, "entry.after(accepted) if isinstance(entry, Recurrent) else entry", "entry",
             beside("qwen3_5", "any_number_of_drawn")),
    Mutation(ROOM, "if not 0 <= count <= offered:", "if not 0 <= count <= offered + 1:",
             f"{MISUSE} -k counts_that_cannot"),
    Mutation(ROOM, "batch.max_query > MAX_KEPT_STEPS", "batch.max_query > MAX_KEPT_STEPS + 1",
             f"{MISUSE} -k steps_are_kept"),
    Mutation(ROOM, "    if state.pending is not None:\n        raise",
             "    if False:\n        raise", f"{MISUSE} -k a_pending_state_can_only"),
    Mutation("lowering/ops/short_conv.py", "index = accepted[:, None] + torch", "index = accepted[:, None] * 0 + torch",
             "tests/lowering/ops/test_conv_ops.py"),
    Mutation("lowering/ops/delta.py", "replay_delta(self.before, self.keys, self.updates, self.decay, accepted)",
             "replay_delta(self.before, self.keys, self.updates, self.decay, accepted + 1)",
             "tests/lowering/ops/test_delta_ops.py"),
    # Fork, select, release.
    Mutation(ROOM, "length % page_size > 0 and ", "False and ", f"{MISUSE} -k forked_rows_repeat"),
    Mutation(ROOM, "target[new] = source[old]", "target[old] = source[old]", f"{MISUSE} -k forked_rows_repeat"),
    Mutation(ROOM, "if len(set(live)) < len(live):", "if False:", f"{MISUSE} -k selected_twice"),
    Mutation(ROOM, "torch.where(live.reshape(-1, *(1,) * (x.ndim - 1)), x[index], 0)", "x[index]",
             beside("qwen3_5", "move_and_start_anew")),
    Mutation(ROOM, "torch.where(live[:-1], x[index[:-1]], 0)", "x[index[:-1]]",
             beside("gemma3", "move_and_start_anew")),
    # Staleness.
    Mutation(ROOM, "or first.least >= length", "or True", f"{MISUSE} -k overwritten_tail"),
    Mutation(ROOM, "over.epoch > epoch or", "False or", "tests/property/test_stale_rows.py"),
    Mutation(ROOM, "first.extent() is extent or", "False or",
             "tests/property/test_stale_rows.py"),
    Mutation(ROOM, "base[row] + total[1:]", "base[row] + total[:-1]", MACHINE),
)  # fmt: skip
GROUPS = {"models": MODELS, "state": STATE}


def outcome(mutation: Mutation, copy: Path) -> str:
    """Runs the tests of a mutation in the copy, and undoes it: "caught" and by what, "survives", or what is wrong."""
    file = mutation.file(copy)
    if file is None:
        return LOST
    whole = file.read_text()
    file.write_text(whole.replace(mutation.text, mutation.instead))
    command = f"{sys.executable} -m pytest -q -x -n 0 -p no:cacheprovider {mutation.tests}"
    try:
        done = subprocess.run(command, shell=True, cwd=copy, env=_environment(copy), capture_output=True, text=True)
    finally:
        file.write_text(whole)
    if done.returncode == 1:
        return f"caught by {next(line for line in done.stdout.splitlines() if line.startswith(('FAILED', 'ERROR')))}"
    return "survives" if done.returncode == 0 else f"ran no test: {done.stdout[-300:]}{done.stderr[-300:]}"


def _environment(copy: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}


def copied(into: Path) -> Path:
    """A copy of what the tests need of the tree."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, into / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, into / name)
    return into


def main(argv: Sequence[str] | None = None) -> int:
    """Try the mutations whose group or description has the word, and say what became of each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="a word of the group, the place, or the texts")
    parser.add_argument("--check", action="store_true", help="only look whether every text still stands")
    given = parser.parse_args(argv)
    chosen = [one for group, some in GROUPS.items() for one in some if given.only in f"{group} {one}"]
    if given.check:
        lost = [one for one in chosen if one.file() is None]
        print(*(f"{LOST}: {one}" for one in lost), f"{len(chosen) - len(lost)} of {len(chosen)} stand", sep="\n")
        return min(len(lost), 1)
    with tempfile.TemporaryDirectory() as directory:
        copy, missed = copied(Path(directory)), 0
        for one in chosen:
            began = time.monotonic()
            found = outcome(one, copy)
            missed += not found.startswith("caught")
            print(f"{one}\n  {found} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
