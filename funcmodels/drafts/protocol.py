"""Speculative decoding: a draft proposes a window of tokens a row, the model verifies it in one forward.

    proposal, dstate = draft.propose(params, dstate, carry)
    window = proposal.batch(state)
    out, pending = model.forward(params, state, window, keep_steps=True)
    verdict = verify(out, proposal, sampling)
    state = commit(pending, verdict.accepted)
    dstate, carry = draft.extend(params, dstate, out, window, verdict.tokens, carry)

The law of the tokens is that of plain sampling, whatever the draft. A draft that comes without the law it was drawn
from is compared with what the model's own sampler draws; one that brings its law is accepted by rejection sampling.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lowering import Rows
from lowering.ops.sampling import first_of
from params.tree import tree, tree_map

from ..output import Output
from ..sampling.draws import DraftNoise, adjusted, coins, finite, first_by, keys_of, law, sample
from ..sampling.penalties import TokenCounts
from ..sampling.settings import RowSampling, Sampling
from ..state.batch import Batch
from ..state.state import State


@tree
class Carry:
    """What a draft goes on from: each row's newest token, not yet run by the model, and a hidden state before it.

    That is a head's own; a block draft, which does not read it, keeps the model's there.
    """

    token: Int[Tensor, " rows"]
    hidden: Float[Tensor, "rows hidden"]

    def where(self, new: Tensor, old: Carry) -> Carry:
        """This carry in the rows where `new` is true, `old` elsewhere."""
        return tree_map(lambda x, y: torch.where(new.reshape(-1, *(1,) * (x.ndim - 1)), x, y), self, old)

    def select(self, rows: Int[Tensor, " rows"]) -> Carry:
        """The carry of `rows`."""
        return tree_map(lambda x: x[rows], self)


@tree
class Proposal:
    """A window a row: `root`, its newest token, and the drafts after it. `start` is the place that the root takes.

    The softmax of `logits` is the law that each draft was drawn from. Drafts that come with None, as argmax and coupled
    ones do, are compared with the model's own draw.
    """

    root: Int[Tensor, " rows"]
    tokens: Int[Tensor, "rows drafts"]
    start: Int[Tensor, " rows"]
    logits: Float[Tensor, "rows drafts vocab"] | None = None

    def batch(self, state: State) -> Batch:
        """The windows as the batch to verify. Raises as `Batch.from_tokens` does."""
        # An id that is no token is run as one that is, and never equals what is drawn.
        window = torch.cat((self.root[:, None], self.tokens.clamp(0, state.vocab - 1)), 1)
        return Batch.from_tokens(window.flatten(), [window.shape[1]] * window.shape[0], state)


@tree
class Verdict:
    """`accepted` tokens of each row's window count, the root among them; as many new `tokens` follow, then -1."""

    tokens: Int[Tensor, "rows window"]
    accepted: Int[Tensor, " rows"]


def verify(
    out: Output,
    proposal: Proposal,
    sampling: Sampling | RowSampling = Sampling(),
    requests: Int[Tensor, " rows"] | None = None,
    counts: TokenCounts | None = None,
    numbers: Float[Tensor, "rows window vocab"] | None = None,
    coins: Float[Tensor, "rows drafts"] | None = None,
) -> Verdict:
    """Say how many drafts of each window count, and draw the token after them.

    `out` is the forward of `proposal.batch(state)` with logits of all tokens. Each emitted token has the law p of
    `sample`, given the tokens before it: in a window too, penalties count the drafts before a place, on top of
    `counts`, which hold the root. Without `proposal.logits` a token is drawn after each of the window's, and drafts
    count while they equal it: a draft x is accepted with probability p(x). With them, a draft that was drawn from q is
    accepted with probability min(1, p(x) / q(x)), and a rejected one replaced by a draw from what p has more than q
    (Leviathan et al. 2023): sum(min(p, q)) in all. `requests` number the rows for the noise (0, 1, ... by default).
    Where there is no choice, as `sample` has it, a row's new tokens end, and `accepted` is 0 if there is none after the
    root: whether that is the root's doing, or a draft's whose values are no numbers, says a forward of the root alone.

    `numbers` are noise of your own, those of `sample` for the token after each of the window's. Where drafts come with
    their law, `coins` (uniform in [0, 1), one a draft) say in place of counted ones whether it is accepted.
    """
    rows, steps = proposal.tokens.shape
    width = steps + 1
    if out.logits.shape[0] != rows * width:
        raise ValueError(
            f"verify: {out.logits.shape[0]} rows of logits for {rows} windows of {width} tokens; run "
            "forward(params, state, proposal.batch(state), keep_steps=True) with logits of all tokens"
        )
    device = out.logits.device
    if requests is None:
        requests = torch.arange(rows, device=device)
    if isinstance(sampling, Sampling):
        sampling = RowSampling.of([sampling] * rows, device)
    if sampling.seed.shape[0] != rows or requests.shape[0] != rows:
        raise ValueError(
            f"verify: {rows} windows, settings of {sampling.seed.shape[0]} rows and {requests.shape[0]} requests; give "
            "one of each a window"
        )
    windows = out.logits.unflatten(0, (rows, width))
    _check_noise(numbers, coins, proposal, windows)
    windows, sampling = adjusted(windows, sampling, counts, proposal.tokens)
    if proposal.logits is None:
        return _compared(windows, proposal, sampling, requests, numbers)
    if proposal.logits.shape != (rows, steps, windows.shape[2]):
        raise ValueError(
            f"verify: logits of {list(proposal.logits.shape)} for drafts of [{rows}, {steps}] over "
            f"{windows.shape[2]} tokens; keep those that each draft was drawn from"
        )
    return _rejected(windows, proposal, proposal.logits, sampling, requests, numbers, coins)


def _check_noise(numbers: Tensor | None, coins: Tensor | None, proposal: Proposal, windows: Tensor) -> None:
    """`ValueError` for noise of another shape than what is drawn, and for coins that no draft is accepted by."""
    drafts = proposal.tokens.shape
    for name, given, wanted in (("numbers", numbers, windows.shape), ("coins", coins, drafts)):
        if given is not None and given.shape != wanted:
            raise ValueError(f"verify: {name} of {list(given.shape)}, expected {list(wanted)}")
    if coins is not None and proposal.logits is None:
        raise ValueError("verify: coins are given, and drafts without proposal.logits are compared; leave coins out")


def _compared(
    windows: Float[Tensor, "rows window vocab"],
    proposal: Proposal,
    sampling: RowSampling,
    requests: Tensor,
    numbers: Tensor | None,
) -> Verdict:
    """The verdict on drafts that were not drawn: the draw after an accepted one is independent of the comparison."""
    rows, width, _ = windows.shape
    places = torch.arange(width, device=windows.device)
    positions = (proposal.start[:, None] + 1 + places).flatten()
    each = sampling.repeated(width)
    numbers = None if numbers is None else numbers.flatten(0, 1)
    drawn = sample(windows.flatten(0, 1), each, requests.repeat_interleave(width), positions, numbers=numbers)
    drawn = drawn.view(rows, width)
    equal = F.pad(drawn[:, :-1] == proposal.tokens, (1, 0), value=True)
    # After a place without a choice nothing counts, nor does its own token.
    accepted = (equal & (drawn >= 0)).to(torch.int32).cumprod(1).sum(1)
    return Verdict(torch.where(places < accepted[:, None], drawn, -1), accepted)


def _rejected(
    windows: Float[Tensor, "rows window vocab"],
    proposal: Proposal,
    draft_logits: Float[Tensor, "rows drafts vocab"],
    sampling: RowSampling,
    requests: Tensor,
    numbers: Tensor | None,
    coin: Tensor | None,
) -> Verdict:
    """The verdict on drafts drawn from a law of their own: by a coin each, with noise apart from the draft's."""
    rows, width, vocab = windows.shape
    p = law(windows.flatten(0, 1), sampling.repeated(width)).view(rows, width, vocab)
    q = draft_logits.float().softmax(-1)
    sane = finite(windows.flatten(0, 1)).view(rows, width)
    places = torch.arange(width, device=windows.device)
    drafts = proposal.tokens.long()
    wanted, given = (x.gather(2, drafts[..., None])[..., 0] for x in (p[:, :-1], q))
    if coin is None:
        coin = coins(sampling.seed, requests, proposal.start[:, None] + 1 + places[:-1])
    # A draft that q cannot give was not drawn from it, and no number in p or q accepts nothing.
    fits = (given > 0) & (coin * given < wanted) & sane[:, :-1]
    accepted = 1 + fits.to(torch.int32).cumprod(1).sum(1)
    last = accepted[:, None] - 1
    # After the last draft nothing was rejected: there the law is held against zeros.
    at = last[..., None].expand(-1, 1, vocab)
    more, less = (x.gather(1, at)[:, 0] for x in (p, F.pad(q, (0, 0, 0, 1))))
    own = None if numbers is None else numbers.gather(1, at)[:, 0]
    drawn = _from_the_rest(more, less, keys_of(sampling.seed, requests, proposal.start + accepted), own)
    tokens = torch.where(places < last, F.pad(drafts, (0, 1)), drawn[:, None])
    accepted = accepted - (~sane.gather(1, last)[:, 0]).to(accepted)
    return Verdict(torch.where(places < accepted[:, None], tokens, -1), accepted)


def _from_the_rest(
    p: Float[Tensor, "rows vocab"],
    q: Float[Tensor, "rows vocab"],
    keys: Int[Tensor, " rows"],
    numbers: Float[Tensor, "rows vocab"] | None = None,
) -> Int[Tensor, " rows"]:
    """A draw from what p has more than q; from p where that is nothing, as when p is q up to rounding."""
    rest = torch.where(p > q, p - q, 0)
    some = rest.sum(-1, keepdim=True) > 0
    weights = torch.where(some, rest, p)
    weights = weights / weights.amax(-1, keepdim=True)  # what is left may be as little as float32 has
    return first_of(weights.log(), weights > 0, keys) if numbers is None else first_by(weights.log(), numbers)


def kept_tokens(batch: Batch, next_tokens: Int[Tensor, "*lead"]) -> tuple[Int[Tensor, " tokens"], Int[Tensor, " rows"]]:
    """The token after each place of `batch`, on its device (0 for -1); and how many count a row, where they were given.

    `ValueError` unless there is one a token of the batch, `TypeError` unless they are integers.
    """
    if next_tokens.is_floating_point() or next_tokens.dtype == torch.bool:
        raise TypeError(f"extend: next tokens must be integers, found {next_tokens.dtype}")
    following = next_tokens.reshape(-1)
    tokens = batch.tokens
    if following.shape != tokens.shape:
        raise ValueError(f"extend: {following.shape[0]} next tokens for {tokens.shape[0]} tokens; give one for each")
    starts = _starts(batch, following.device)
    given = Rows(starts, max_query=batch.max_query, uniform=batch.uniform).rectangle((following >= 0).int())
    # The first -1 of a row ends it; cells past its end hold 0 and end it too.
    kept = given.cumprod(1).sum(1, dtype=torch.int32)
    return following.clamp(min=0).to(tokens), kept


def _starts(batch: Batch, device: torch.device) -> Int[Tensor, " ends"]:
    """`query_start` on `device`; on the host from what is known there, without reading the other."""
    if batch.query_start.device == device or not (batch.uniform or batch.counts):
        return batch.query_start.to(device).long()
    counts = batch.counts or (batch.max_query,) * batch.rows
    return torch.tensor([0, *counts], device=device).cumsum(0)


def next_tokens(batch: Batch, last: Int[Tensor, " rows"]) -> Int[Tensor, " tokens"]:
    """The token after each place of a batch of prompts: the next one of the batch, and `last[r]` at row r's end.

    `ValueError` unless `last` has an integer for each row.
    """
    if last.shape != (batch.rows,) or last.is_floating_point() or last.dtype == torch.bool:
        raise ValueError(
            f"next_tokens: last is {last.dtype} {list(last.shape)}, the batch has {batch.rows} rows; give the token "
            "after each row's end, an integer"
        )
    following = torch.cat((batch.tokens[1:], batch.tokens[:1]))
    ends = batch.query_start[1:].long() - 1
    live = batch.query_start.diff() > 0
    # Idle rows write to a place past the tokens.
    at = torch.where(live, ends, following.shape[0])
    return torch.cat((following, following[:1])).index_copy(0, at, last.to(following))[:-1]


@tree
class DraftedParams:
    """Parameters of a model, and of a draft that has its own: what captured functions are given as `params`."""

    model: Any
    draft: Any


class Draft(abc.ABC):
    """What proposes tokens: derive a draft of your own from it. `MtpDraft` says what each function does.

    A model in parts on several ranks verifies what each rank proposes, and the ranks must propose the same: `propose`
    passes every choice through `model.agreed` before it goes on from it.
    """

    @property
    def outputs(self) -> tuple[str, ...]:
        """The values of the model's forward that `extend` needs: give them as its `outputs`."""
        return ()

    @property
    def most_steps(self) -> int | None:
        """The most tokens that it proposes, None for any number."""
        return None

    def joined(self, params: Any) -> Any:
        """What functions of the draft are captured with as `params`: all tensors that they read.

        That is `DraftedParams` of a draft that has parameters of its own.
        """
        return params

    @abc.abstractmethod
    def init_state(self, state: State) -> State:
        """An empty state of the draft for the rows of `state`."""

    @abc.abstractmethod
    def extend(
        self, params: Any, state: State, out: Output, batch: Batch, next_tokens: Tensor, carry: Carry | None = None
    ) -> tuple[State, Carry]:
        """Take in what the model has just run, and the token after each place."""

    @abc.abstractmethod
    def propose(
        self, params: Any, state: State, carry: Carry, steps: int = 3, noise: DraftNoise | None = None
    ) -> tuple[Proposal, State]:
        """`steps` tokens after each row's newest: the likeliest, or what `noise.draw` gives for their logits.

        The proposal has the laws that it gives too, or none where it gives None.
        """


def extend_inputs(
    fit: Callable[[Batch], Batch],
    draft: Draft,
    params: Any,
    state: State,
    out: Output,
    batch: Batch,
    next_tokens: Tensor,
    *rest: Any,
    **named: Any,
) -> dict[str, Any]:
    """What `extend` is captured with: all that has an entry a token is padded as the batch is."""
    fitted = fit(batch)
    extra = fitted.tokens.shape[0] - batch.tokens.shape[0]
    hidden = _padded(out.hidden, extra)
    # No draft reads logits: without them, outputs with many and with few replay one capture.
    taps = {name: _padded(out.extra[name], extra) for name in draft.outputs if name in out.extra}
    return {
        "params": draft.joined(params),
        "out": Output(hidden[:0], hidden, taps),
        "batch": fitted,
        "next_tokens": _padded(next_tokens.reshape(-1), extra, -1),
    }


def propose_inputs(fit: Any, draft: Draft, params: Any, *rest: Any, **named: Any) -> dict[str, Any]:
    """What `propose` is captured with."""
    return {"params": draft.joined(params)}


def _padded(x: Tensor, extra: int, value: float = 0) -> Tensor:
    """`x` [n ...] with `extra` more rows of `value`."""
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, extra), value=value) if extra else x


def checked(draft: Draft, call: str, found: Any, first: type, second: type) -> Any:
    """`found`, which a function of a draft gave. `TypeError` where it is not the pair that `Draft` asks for."""
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], first) and isinstance(found[1], second):
        return found
    given = f"({', '.join(type(x).__name__ for x in found)})" if isinstance(found, tuple) else type(found).__name__
    wanted = f"({first.__name__}, {second.__name__})"
    raise TypeError(f"draft: {type(draft).__name__}.{call} gave {given}, expected {wanted}; fm.Draft says of what")


def begun(draft: Draft, state: State) -> State:
    """What `draft.init_state` gives. `TypeError` for what is no state of as many rows."""
    found = draft.init_state(state)
    if not isinstance(found, State) or found.rows != state.rows:
        given = f"a state of {found.rows} rows" if isinstance(found, State) else type(found).__name__
        name = type(draft).__name__
        raise TypeError(f"draft: {name}.init_state gave {given}, expected a State of {state.rows} rows")
    return found


def proposed(draft: Draft, params: Any, state: State, carry: Carry, steps: int, **options: Any) -> Any:
    """What `draft.propose` gives. `TypeError` or `ValueError` for what is no proposal of `steps` tokens in each row."""
    found = checked(draft, "propose", draft.propose(params, state, carry, steps, **options), Proposal, State)
    root, tokens = found[0].root.shape, found[0].tokens.shape
    if tokens != (state.rows, steps) or root != (state.rows,):
        raise ValueError(
            f"draft: {type(draft).__name__}.propose gave root {list(root)} and tokens {list(tokens)}, expected "
            f"[{state.rows}] and [{state.rows}, {steps}]: {steps} tokens in each of {state.rows} rows"
        )
    return found


def model_params(params: Any) -> Any:
    """The model's part of what `Draft.joined` gives."""
    return params.model if isinstance(params, DraftedParams) else params
