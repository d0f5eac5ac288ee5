"""What a draft costs a round: the bundled model's MTP head against its DSpark, on the same rows, in one process.

    python -m tests.bench.bench_drafts [--dtype float32] [--tokens 256]
    python -m tests.bench.bench_drafts --sampled [--tokens 256]

Prints, for 1 and 8 rows and for 3 and 7 drafts: milliseconds of `propose` and of `extend` after a window, of both
drafts, and DSpark's in MTP's; then those of the model's own forward over the window, which every round has too. A head
runs once for each token that it drafts, a block draft once in all.

With `--sampled`: how many tokens a round gives where rows draw, and its time, for three kinds of drafts: the likeliest
tokens, what the noise of the model's own draws picks (that is what rounds do), and what noise apart picks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import funcmodels as fm
import lowering
from tests import held_out
from tests.bench.timing import best

REPEATS = 15
ROWS = 16
SAMPLED = (fm.Sampling(0.7), fm.Sampling(1.0), fm.Sampling(1.0, top_k=40, top_p=0.95))
WAYS = {"likeliest": lambda *rows: None, "coupled": fm.CoupledNoise, "drawn apart": fm.DraftNoise}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--tokens", type=int, default=256, help="tokens that each row holds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--sampled", action="store_true", help="compare ways to draft for rows that draw")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    model, params = fm.load("bundled", dtype=dtype)
    params = lowering.prepare(params)
    drafts = {"MTP": fm.draft(model, "mtp"), "DSpark": fm.draft(model, "dspark", dtype)}
    if args.sampled:
        for name, steps in (("MTP", 3), ("MTP", 7), ("DSpark", 7)):
            for given in SAMPLED:
                settings = f"temperature {given.temperature}, top_k {given.top_k}, top_p {given.top_p}"
                found = ways(model, params, drafts[name], steps, given, args.tokens)
                print(f"{name}, {steps} drafts, {settings}: {found}", flush=True)
        return
    print(f"bundled model, {args.dtype}, {args.threads} threads, rows of {args.tokens} tokens; milliseconds")
    for rows in (1, 8):
        for steps in (3, 7):
            report(model, params, drafts, rows, steps, args.tokens)


@torch.no_grad()
def ways(model: fm.Model, params: Any, draft: Any, steps: int, given: fm.Sampling, tokens: int) -> str:
    """Tokens and milliseconds of a row's round, for each way to draft, over `tokens` tokens of each of some rows."""
    assert model.tokenizer is not None
    prompts = held_out.prompts(model.tokenizer, ROWS, 30, 60, seed=11)
    sampling = fm.RowSampling.of([replace(given, seed=row) for row in range(ROWS)])
    shown = []
    for name, noise in WAYS.items():
        state, drafted, out, batch = begun(model, params, draft, prompts, tokens + 80)
        first = fm.sample(out.logits[batch.query_start[1:].long() - 1], sampling, torch.arange(ROWS), state.lengths)
        drafted, carry = draft.extend(params, drafted, out, batch, fm.next_tokens(batch, first))
        taken, rounds, start = torch.zeros(ROWS), torch.zeros(ROWS), time.perf_counter()
        while int(taken.min()) < tokens:
            live = taken < tokens
            proposal, drafted = draft.propose(params, drafted, carry, steps, noise(sampling, torch.arange(ROWS)))
            window = proposal.batch(state)
            out, pending = model.forward(params, state, window, outputs=draft.outputs, keep_steps=True)
            verdict = fm.verify(out, proposal, sampling)
            accepted = torch.where(live, verdict.accepted, 0)
            following = torch.where(torch.arange(steps + 1) < accepted[:, None], verdict.tokens, -1)
            state = fm.commit(pending, accepted)
            drafted, carry = draft.extend(params, drafted, out, window, following, carry)
            taken, rounds = taken + accepted, rounds + live
        each = 1e3 * (time.perf_counter() - start) / float(rounds.max())
        shown.append(f"{name} {float(taken.sum() / rounds.sum()):.2f} ({each:.0f} ms)")
    return "; ".join(shown)


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
    state, drafted, out, batch = begun(model, params, draft, prompts, tokens + 16)
    outputs = draft.outputs
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


def begun(model: fm.Model, params: Any, draft: Any, prompts: list[list[int]], room: int) -> Any:
    """States of the model, whose rows hold the prompts, and of the draft, which are empty; output and batch."""
    state = model.init_state(len(prompts), room, params.embed.weight.dtype)
    drafted, batch = draft.init_state(state), fm.Batch.from_lists(prompts, state)
    out, state = model.forward(params, state, batch, outputs=draft.outputs)
    return state, drafted, out, batch


if __name__ == "__main__":
    main()
