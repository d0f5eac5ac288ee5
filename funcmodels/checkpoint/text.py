"""Text in and out: the tokenizer of a checkpoint directory, and text while tokens arrive, up to a stop string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from params.errors import CheckpointError, ConfigError
from params.files import CONFIG_LIMIT
from params.guarded import lies_at, read_object

from ..config import section
from .detokenizer import UNFINISHED, Detokenizer
from .vocabularies import LibraryErrors, TiktokenModel, TokenizerJson, TokenVocabulary

FILES: dict[str, type[TokenizerJson] | type[TiktokenModel]] = {
    "tokenizer.json": TokenizerJson,
    "tiktoken.model": TiktokenModel,
}
"""What a tokenizer is read from: the first of these that is there."""


@dataclass(frozen=True)
class Tokenizer:
    """A checkpoint's tokenizer, opened when it is first needed, and the ids that begin and end its texts.

    It is the directory's `tokenizer.json`, or `tiktoken.model` as Kimi publishes it. A file that is broken, or made to
    crash, is a `CheckpointError` when it is opened or first used. It may still be slow: the regular expressions of a
    tokenizer.json run up to the library's own bound at each place of a text. Serve only from files that you trust.
    `generation` is what the directory's `generation_config.json` says.
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
        """Whether the directory has one of the files."""
        return any(lies_at(self.directory / name) for name in FILES)

    @cached_property
    def vocabulary(self) -> TokenVocabulary:
        """What the file holds."""
        found = next((name for name in FILES if lies_at(self.directory / name)), None)
        if found is None:
            raise CheckpointError(f"{self.directory} has no {' or '.join(FILES)}, so it takes and gives token ids only")
        return FILES[found](self.directory / found)

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
        return self.vocabulary.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens` without special ones. Ids that the tokenizer does not know give nothing."""
        return self.vocabulary.decode([token for token in tokens if 0 <= token < 2**32])


def special_ids(name: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    """`<name>_token_id` of a config or its text part, an integer or a list, as a tuple; empty when there is none."""
    key = f"{name}_token_id"
    found = config.get(key)
    if found is None:
        found = section(config, "text_config").get(key)
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ConfigError(f"{key} must be an integer or a list of integers, found {found!r:.200}")
    return tuple(ids)


class TextStream:
    """Text of tokens as they arrive: `push` gives what is certain by now, `finish` the rest; together all of it.

    What a later token may change is held back, and so is what may turn out to begin a stop string. The text ends before
    the first stop string to be complete, whatever tokens it came in. A stop string may hold special tokens, as they are
    written (`<|im_end|>`), though texts do not show them: for it they are looked at in their places.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._vocabulary = tokenizer.vocabulary
        self._text = Detokenizer([made() for made in self._vocabulary.stages])
        self._stop = tuple(stop)
        inside = {one: {mark for mark in self._vocabulary.special if mark and mark in one} for one in stop}
        self._marked = {one: marks for one, marks in inside.items() if marks}
        self._held = ""
        self._marks: list[tuple[int, str]] = []  # places in the text from the held part on, and special tokens there
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is certain after one more token; nothing after a stop string."""
        with LibraryErrors(f"token {token} cannot be decoded", "check the tokenizer's file"):
            spelled = self._vocabulary.token(token)
            self._held += "" if spelled is None else self._text.push(spelled)
        return self._look(token) if self._stop else self._shown(len(self._held))

    def leave_out(self, token: int) -> str:
        """As `push` of a token that ends the text and is no part of it. A stop string may hold it none the less."""
        return self._look(token) if self._stop else ""

    def _look(self, token: int) -> str:
        """Look for stop strings after `token`."""
        with LibraryErrors(f"token {token} cannot be decoded", "check the tokenizer's file"):
            # If this were the end, this would be the text: to stop here is then right. But for half a character.
            rest = self._text.rest()
        text, whole = self._held + rest.rstrip(UNFINISHED), self._held + rest
        self._marks = [(min(place, len(whole)), mark) for place, mark in self._marks]
        mark = self._vocabulary.mark(token)
        if mark is not None and any(mark in marks for marks in self._marked.values()):
            self._marks = [*self._marks, (len(whole), mark)][-max(map(len, self._stop)) :]
            if any(self._with_marks(whole, stop)[0].endswith(stop) for stop in self._marked):
                return self._ended(whole)  # nothing follows that could complete the character
        return self._shown(self._certain()) if self._cut(text) is None else self._ended(text)

    def finish(self) -> str:
        """What was held back."""
        with LibraryErrors("the text cannot be decoded", "check the tokenizer's file"):
            return self._ended(self._held + self._text.rest())

    def _ended(self, text: str) -> str:
        if self.stopped:
            return ""
        cut = self._cut(text)
        self.stopped, self._held = cut is not None, ""
        return text[:cut]

    def _shown(self, count: int) -> str:
        """Let go of the first characters of what is held."""
        piece, self._held = self._held[:count], self._held[count:]
        self._marks = [(place - count, mark) for place, mark in self._marks if place >= count]
        return piece

    def _cut(self, text: str) -> int | None:
        """Where the first stop string to be complete begins."""
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        for stop in self._marked:
            marked, places = self._with_marks(text, stop)
            found += [(places[at + len(stop)], places[at])] if (at := marked.find(stop)) >= 0 else []
        return min(found)[1] if found else None

    def _certain(self) -> int:
        """How much of what is held begins no stop string."""
        held = self._held
        ends = [len(held) - _overlap(held, stop) for stop in self._stop]
        for stop in self._marked:
            marked, places = self._with_marks(held, stop)
            ends.append(places[len(marked) - _overlap(marked, stop)])
        return min(ends)

    def _with_marks(self, text: str, stop: str) -> tuple[str, list[int]]:
        """A text with the special tokens that `stop` holds, and of each place in it the one in `text`."""
        parts, places, at = [], [], 0
        for place, mark in self._marks:
            if place <= len(text) and mark in self._marked[stop]:
                parts += [text[at:place], mark]
                places += [*range(at, place), *[place] * len(mark)]
                at = place
        return "".join([*parts, text[at:]]), [*places, *range(at, len(text) + 1)]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without completing it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
