"""Text in and out: the tokenizer of a checkpoint directory, and decoding while tokens arrive.

Only `tokenizer.json` is read, by the `tokenizers` library: data, never code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from params.errors import CheckpointError, ConfigError
from params.files import CONFIG_LIMIT
from params.guarded import lies_at, read_bytes, read_object

from .config import section

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_LIMIT = 256 * 2**20
"""Bytes a tokenizer.json may have; the largest published ones have 40 MB."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a decoder puts for bytes that are no character, or not yet one."""


@dataclass(frozen=True)
class Tokenizer:
    """A checkpoint's `tokenizer.json`, opened when it is first needed, and the ids that begin and end its texts.

    `generation` is what its `generation_config.json` says.
    """

    directory: Path
    bos: int | None
    eos: tuple[int, ...]
    generation: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of(directory: Path, config: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer of a checkpoint directory. `generation_config.json` has the say on ids, then `config`."""
        path = directory / "generation_config.json"
        given = read_object(path, CONFIG_LIMIT, ConfigError) if lies_at(path) else {}
        bos, eos = (special_ids(name, given) or special_ids(name, config) for name in ("bos", "eos"))
        return Tokenizer(directory, bos[0] if bos else None, eos, given)

    @property
    def available(self) -> bool:
        """Whether the directory has a `tokenizer.json`."""
        return lies_at(self.directory / "tokenizer.json")

    @cached_property
    def _tokens(self) -> tokenizers.Tokenizer:
        from tokenizers import Tokenizer as Tokens

        path = self.directory / "tokenizer.json"
        if not self.available:
            raise CheckpointError(f"{self.directory} has no tokenizer.json, so it takes and gives token ids only")
        content = read_bytes(path, TOKENIZER_LIMIT)
        try:
            tokens = Tokens.from_buffer(content)
        except ValueError as error:
            raise CheckpointError(f"{path} cannot be read: {error}; download it again") from error
        # Training setups leave these in the file; a prompt is to be taken whole and as it is.
        tokens.no_truncation()
        tokens.no_padding()
        return tokens

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, with the special tokens that the checkpoint puts around it, if any.

        `ValueError` for half of a surrogate pair, which is what Python makes of bytes that are not UTF-8.
        """
        broken = next((at for at, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
        if broken is not None:
            raise ValueError(
                f"the text is not Unicode: character {broken} is {text[broken]!r}, as from bytes that are not UTF-8; "
                "give text in UTF-8"
            )
        return self._tokens.encode(text).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens` without special ones. Ids that the tokenizer does not know give nothing."""
        return self._tokens.decode(list(tokens), skip_special_tokens=True)


def special_ids(name: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    """`<name>_token_id` of a config or its text part, an integer or a list, as a tuple; empty when there is none."""
    key = f"{name}_token_id"
    found = config.get(key)
    if found is None:
        found = section(config, "text_config").get(key)
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ConfigError(f"{key} must be an integer or a list of integers, found {found!r}")
    return tuple(ids)


class TextStream:
    """Text of tokens as they arrive: `push` gives what is certain by now, `finish` the rest; together all of it.

    Half a character is held back until it is whole, and so is what may turn out to begin a stop string. Of the stop
    strings the first to be complete counts: the text ends before it, whatever tokens it came in.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._context: list[int] = []
        self._fresh: list[int] = []
        self._shown = 0
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is certain after one more token; nothing after a stop string."""
        self._fresh.append(token)
        text = self._window()
        certain = text.rstrip(UNFINISHED)
        # A character has at most four bytes, so at most three of these can still become one.
        certain += UNFINISHED * max(0, len(text) - len(certain) - 3)
        piece, self._shown = certain[self._shown :], max(self._shown, len(certain))
        if piece and certain == text:
            # Decoders look at neighbours, so the last whole piece stays in view of the next.
            self._context, self._fresh = self._fresh, []
            self._shown = len(self._window())
        return self._cut(piece)

    def finish(self) -> str:
        """What was held back."""
        piece = self._cut(self._window()[self._shown :])
        rest, self._held = self._held, ""
        return piece + rest

    def _window(self) -> str:
        return self._tokenizer.decode(self._context + self._fresh)

    def _cut(self, piece: str) -> str:
        text = self._held + piece
        if self.stopped:
            return ""
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
