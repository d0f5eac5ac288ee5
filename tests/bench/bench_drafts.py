"""What a draft costs a round: the bundled model's MTP head against its DSpark, on the same rows, in one process.

    python -m tests.bench.bench_drafts [--dtype float32] [--tokens 256]

Prints, for 1 and 8 rows and for 3 and 7 drafts: milliseconds of `propose` and of `extend` after a window, of both
drafts, and DSpark's in MTP's; then those of the model's own forward over the window, which every round has too. A head
runs once for each token that it drafts, a block draft once in all.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

import funcmodels as fm
import lowering
from funcmodels.speculative import outputs_for
from tests import held_out
from tests.bench.timing import best

REPEATS = 15


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--tokens", type=int, default=256, help="tokens that each row holds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    model, params = fm.load("bundled", dtype=dtype)
    params = lowering.prepare(params)
    drafts = {"MTP": fm.draft(model, "mtp"), "DSpark": fm.draft(model, "dspark", dtype)}
    print(f"bundled model, {args.dtype}, {args.threads} threads, rows of {args.tokens} tokens; milliseconds")
    for rows in (1, 8):
        for steps in (3, 7):
            report(model, params, drafts, rows, steps, args.tokens)


@torch.no_grad()
def report(model: fm.Model, params: Any, drafts: dict[str, Any], rows: int, steps: int, tokens: int) -> None:
    """One line for `rows` rows and `steps` drafts."""
    calls: list[Callable[[], Any]] = []
    for draft in drafts.values():
        calls += parts(model, params, draft, rows, steps, tokens)
    seconds = best(REPEATS, *calls)
    mtp, dspark = seconds[:3], seconds[3:]
    shown = [
        f"{name} {1e3 * one:.2f} and {1e3 * two:.2f}, {two / one:.2f}"
        for name, one, two in zip(("propose", "extend"), mtp, dspark, strict=False)
    ]
    whole = sum(dspark[:2]) / sum(mtp[:2])
    print(
        f"{rows} rows, {steps} drafts: {'; '.join(shown)}; both {whole:.2f}; the model's window {1e3 * mtp[2]:.2f}",
        flush=True,
    )


def parts(
    model: fm.Model, params: Any, draft: Any, rows: int, steps: int, tokens: int
) -> tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]:
    """`propose`, `extend` and the model's forward of one round, to be run again and again on the same values."""
    assert model.tokenizer is not None
    prompts = held_out.prompts(model.tokenizer, rows, tokens, tokens, seed=rows)
    state = model.init_state(rows, tokens + 16, params.embed.weight.dtype)
    drafted, outputs = draft.init_state(state), outputs_for(draft)
    batch = fm.Batch.from_lists(prompts, state)
    out, state = model.forward(params, state, batch, outputs=outputs)
    last = out.logits[batch.query_start[1:].long() - 1].argmax(-1)
    drafted, carry = draft.extend(params, drafted, out, batch, fm.next_tokens(batch, last))
    proposal, drafted = draft.propose(params, drafted, carry, steps)
    window = proposal.batch(state)
    run, _ = model.forward(params, state, window, outputs=outputs, keep_steps=True)
    following = torch.cat((proposal.tokens, proposal.tokens[:, :1]), 1)
    return (
        lambda: draft.propose(params, drafted, carry, steps),
        lambda: draft.extend(params, drafted, run, window, following, carry),
        lambda: model.forward(params, state, window, outputs=outputs, keep_steps=True),
    )


if __name__ == "__main__":
    main()
