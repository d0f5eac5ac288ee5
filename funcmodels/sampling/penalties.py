"""What changes logits before temperature and filters: a bias of chosen tokens, penalties on tokens that came before.

    counts = TokenCounts.of([[1, 2, 3], [4]], vocab=100)
    token = sample(logits, sampling, requests, positions, counts)
    counts = counts.add(token[:, None])

How often each token came is a value that the caller holds. It is needed only where a row asks for penalties.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from params.tree import tree


@tree
class TokenCounts:
    """What each row has seen of each token: whether its prompt has it, and how often it came after the prompt."""

    prompt: Bool[Tensor, "rows vocab"]
    output: Int[Tensor, "rows vocab"]

    @staticmethod
    def of(prompts: Sequence[Sequence[int]], vocab: int, device: torch.device | str = "cpu") -> TokenCounts:
        """The counts of rows with these prompts and nothing after them. `IndexError` for a token outside `vocab`."""
        prompt = torch.zeros(len(prompts), vocab, dtype=torch.bool, device="cpu")
        for row, tokens in enumerate(prompts):
            outside = [token for token in tokens if not 0 <= token < vocab]
            if outside:
                raise IndexError(f"row {row}: token {outside[0]!r:.100} is outside of the vocabulary (0..{vocab - 1})")
            prompt[row, torch.tensor(tokens, dtype=torch.int64, device="cpu")] = True
        prompt = prompt.to(device)
        return TokenCounts(prompt, torch.zeros_like(prompt, dtype=torch.int32))

    def add(self, tokens: Int[Tensor, "rows steps"]) -> TokenCounts:
        """The counts when these tokens came too; -1 counts for nothing, as in a verdict's `tokens`.

        `ValueError` for tokens of other rows.
        """
        if tokens.ndim != 2 or tokens.shape[0] != self.output.shape[0]:
            raise ValueError(
                f"counts are of {self.output.shape[0]} rows, tokens {list(tokens.shape)}; give [rows, steps], "
                "tokens[:, None] of one step"
            )
        came = (tokens >= 0).to(self.output.dtype)
        return TokenCounts(self.prompt, self.output.scatter_add(1, tokens.clamp(min=0).long(), came))


@tree
class Bias:
    """What is added to the logits of chosen tokens. Rows with fewer of them are filled up with adding 0 to token 0."""

    tokens: Int[Tensor, "rows biases"]
    values: Float[Tensor, "rows biases"]

    @staticmethod
    def of(rows: Sequence[Sequence[tuple[int, float]]]) -> Bias | None:
        """Pairs of token and value for each row; None if there are none at all."""
        most = max(map(len, rows), default=0)
        if not most:
            return None
        full = [[*row, *[(0, 0.0)] * (most - len(row))] for row in rows]
        return Bias(
            torch.tensor([[token for token, _ in row] for row in full], device="cpu"),
            torch.tensor([[value for _, value in row] for row in full], dtype=torch.float32, device="cpu"),
        )

    def added(self, logits: Float[Tensor, "rows window vocab"]) -> Float[Tensor, "rows window vocab"]:
        """The logits with the bias, each place of a row alike."""
        tokens, values = (x[:, None].expand(-1, logits.shape[1], -1) for x in (self.tokens, self.values))
        return logits.scatter_add(2, tokens, values.to(logits.dtype))


@tree
class Penalties:
    """A row's penalties, as vLLM and the OpenAI API define them.

    `repetition` divides positive logits of tokens that the prompt or the output has, and multiplies negative ones (the
    penalised sampling of CTRL, Keskar et al. 2019, in the form that transformers gave it). `frequency` is subtracted
    for each time a token came in the output, `presence` once if it came at all.
    """

    repetition: Float[Tensor, " rows"]
    presence: Float[Tensor, " rows"]
    frequency: Float[Tensor, " rows"]

    def applied(
        self,
        logits: Float[Tensor, "rows window vocab"],
        counts: TokenCounts,
        drafts: Int[Tensor, "rows drafts"],
    ) -> Float[Tensor, "rows window vocab"]:
        """The logits after each place of a window, each given that the `drafts` before it came.

        Place i follows the first i drafts. Only tokens that were drafted differ from place to place, so they are done
        again with their own counts: nothing as large as [rows window vocab] is counted.
        """
        whole = self._at(logits, counts.prompt[:, None], counts.output[:, None])
        drafts = drafts.long()
        earlier = torch.ones(logits.shape[1], drafts.shape[1], dtype=torch.bool, device=drafts.device).tril(-1)
        same = drafts[:, :, None] == drafts[:, None]
        came = (same[:, None] & earlier[:, None]).sum(-1, dtype=counts.output.dtype)
        places = drafts[:, None].expand(-1, logits.shape[1], -1)
        prompt, output = (x.gather(1, drafts)[:, None] for x in (counts.prompt, counts.output))
        return whole.scatter(2, places, self._at(logits.gather(2, places), prompt, output + came))

    def _at(self, logits: Tensor, prompt: Tensor, output: Tensor) -> Tensor:
        """Penalised logits [rows window tokens] of tokens with these counts, which broadcast."""
        repetition, presence, frequency = (x[:, None, None] for x in (self.repetition, self.presence, self.frequency))
        came = output > 0
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(prompt | came, repeated, logits)
        return logits - frequency * output - presence * came
