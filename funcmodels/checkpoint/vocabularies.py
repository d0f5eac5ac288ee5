"""The two files that a tokenizer may be published as: `tokenizer.json`, and Kimi's `tiktoken.model`.

Both are data, never code. The libraries that read them bound little of what a file from anyone may ask for: what they
fail at is a `CheckpointError` here, and what would grow without bounds is refused before they are asked.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from params.errors import CheckpointError
from params.files import CONFIG_LIMIT
from params.guarded import lies_at, read_bytes, read_object

from ..config import section
from .detokenizer import BYTE_CHARS, Stage, flat, stages_of, with_part

TOKENIZER_LIMIT = 2**28
"""Bytes a tokenizer's file may have; that of Gemma 3, among the largest, has 33 million."""
TEXT_LIMIT, TEXT_GROWTH = 2**20, 64
"""Characters that a text may have once it is normalized, or how many times as many as before, whichever is more."""
DECODED_GROWTH = 2**12
"""How many times as long a decoder may make a token."""


@runtime_checkable
class TokenVocabulary(Protocol):
    """Text to ids and back. `stages` make a `Detokenizer`, which takes what `token` gives."""

    stages: list[Callable[[], Stage]]
    special: frozenset[str]
    """Contents of the tokens that texts do not show."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, those of special tokens that it spells included."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ids, without special and unknown ones."""
        ...

    def token(self, token: int) -> str | None:
        """An id as its decoder takes it; None for what texts do not show, special and unknown ones."""
        ...

    def mark(self, token: int) -> str | None:
        """The content of a special token that texts do not show; None for any other."""
        ...


class LibraryErrors(AbstractContextManager[None]):
    """What a library raises inside as a `CheckpointError`, panics too, which are no `Exception`."""

    def __init__(self, what: str, advice: str = "download it again") -> None:
        self._what, self._advice = what, advice

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        # A TypeError is about what a caller gave.
        if _panic(error) or (isinstance(error, Exception) and not isinstance(error, (CheckpointError, TypeError))):
            raise CheckpointError(f"{self._what}: {str(error)[:500]}; {self._advice}") from error


def _panic(error: BaseException | None) -> bool:
    """Whether a library written in Rust gave up. Each has a class of its own for that, which no module names."""
    return type(error).__name__ == "PanicException"


class TokenizerJson:
    """A `tokenizer.json`, read and run by the `tokenizers` library."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer, models

        self.path = path
        content = read_bytes(path, TOKENIZER_LIMIT)
        with LibraryErrors(f"{path} cannot be read"):
            self._tokens = Tokenizer.from_buffer(content)
            # Training setups leave these in the file; a prompt is to be taken whole and as it is.
            self._tokens.no_truncation()
            self._tokens.no_padding()
            parts = Tokenizer(models.BPE())
            parts.normalizer, parts.decoder = self._tokens.normalizer, self._tokens.decoder
            found = json.loads(parts.to_str())
            self.stages = stages_of(found["decoder"])
            self._normalizers = [(entry, _normalizer(entry)) for entry in flat(found["normalizer"])]
            added = self._tokens.get_added_tokens_decoder().values()
        self.special = frozenset(token.content for token in added if token.special)
        most = math.prod(map(growth, flat(found["decoder"])))
        if most > DECODED_GROWTH:
            raise CheckpointError(
                f"{path}: its decoder may make a token more than {DECODED_GROWTH} times as long; it is broken, or made "
                "to exhaust memory"
            )

    def encode(self, text: str) -> list[int]:
        """The ids of a text. `CheckpointError` where the library fails, or the file would have it grow too much."""
        with LibraryErrors(f"{self.path} fails on a text of {len(text)} characters"):
            self._check_growth(text)
            return self._tokens.encode(text).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ids."""
        with LibraryErrors(f"{self.path} cannot decode {len(tokens)} tokens"):
            return self._tokens.decode(list(tokens), skip_special_tokens=True)

    def token(self, token: int) -> str | None:
        """The token of an id that texts show."""
        found = self._tokens.id_to_token(token)
        return None if found in self.special else found

    def mark(self, token: int) -> str | None:
        """The content of a special token."""
        found = self._tokens.id_to_token(token)
        return found if found in self.special else None

    def _check_growth(self, text: str) -> None:
        """Refuse a text that normalizers would multiply: the library would try, and abort the process."""
        given, most = len(text), max(TEXT_LIMIT, TEXT_GROWTH * len(text))
        if given * math.prod(growth(entry) for entry, _ in self._normalizers) <= most:
            return
        for entry, normalize in self._normalizers:
            if _normalized(text, entry) > most:
                raise CheckpointError(
                    f"{self.path}: normalizing makes more than {most} characters of {given}; it is broken, or made to "
                    "exhaust memory"
                )
            text = normalize(text)


def _normalizer(entry: Any) -> Callable[[str], str]:
    normalizer = with_part("normalizer", entry).normalizer
    assert normalizer is not None
    return normalizer.normalize_str


def _normalized(text: str, entry: Any) -> int:
    """How many characters a normalizer may make of a text: exactly so where it replaces one text by another."""
    pattern = entry["pattern"].get("String") if entry["type"] == "Replace" else None
    if pattern:
        return len(text) + text.count(pattern) * (len(entry["content"]) - len(pattern))
    return len(text) * growth(entry)


GROWTH = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "BertNormalizer": 12, "ByteLevel": 4}
"""How many characters Unicode's rules, spaces around Han, or the bytes of a character make of one."""


def growth(entry: Any) -> int:
    """How many times as long a normalizer or decoder may make a text."""
    kind = entry["type"]
    if kind == "Replace":
        size, pattern = len(entry["content"]), entry["pattern"].get("String")
        # A regular expression may match between any two characters.
        return max(1, -(-size // len(pattern))) if pattern else 1 + size
    if kind == "Prepend":
        return 1 + len(entry["prepend"])
    if kind == "Precompiled":
        packed = base64.b64decode(entry["precompiled_charsmap"])
        texts = packed[4 + int.from_bytes(packed[:4], "little") :]
        return max(1, *map(len, texts.split(b"\0")))
    if kind in ("BPEDecoder", "CTC"):  # an empty mark is between any two characters
        return 2 if "" in (entry.get("suffix"), entry.get("word_delimiter_token")) else 1
    return GROWTH.get(kind, 1)


# From tokenization_kimi.py of moonshotai/Kimi-Linear-48B-A3B-Instruct (919416f), the same in Kimi-K3: Han by itself,
# then the words, numbers and signs of `o200k_base`.
KIMI_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
KIMI_RESERVED = 256
"""Ids after those of the file, of special tokens: named in tokenizer_config.json, or reserved."""
KIMI_TEXT, KIMI_RUN = 400_000, 25_000
"""Characters of a text, and of a run of spaces or of others, after which Kimi's tokenizer begins anew."""


class TiktokenModel:
    """Kimi's `tiktoken.model`: bytes and their ranks, run by `tiktoken` as the authors' `tokenization_kimi.py` does.

    Special tokens are those of `tokenizer_config.json`, `added_tokens_decoder`.
    """

    def __init__(self, path: Path) -> None:
        import tiktoken

        self.path = path
        content = read_bytes(path, TOKENIZER_LIMIT)
        with LibraryErrors(f"{path} cannot be read"):
            # The library's own reader keeps a copy by path, and gives that one after the file has changed.
            lines = (line.split() for line in content.splitlines() if line)
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
            self._shown = {rank: token for token, rank in ranks.items()}
            single = {bytes([byte]) for byte in range(256)}
            if self._shown.keys() != set(range(len(ranks))) or not single <= ranks.keys():
                raise ValueError(f"the ranks of its {len(ranks)} tokens must be 0, 1, ..., all single bytes among them")
            added = _added(path.parent / "tokenizer_config.json", len(ranks))
            self._codes = tiktoken.Encoding(
                path.name,
                pat_str=KIMI_PATTERN,
                mergeable_ranks=ranks,
                special_tokens={name: token for token, (name, _) in added.items()},
            )
        self._hidden = {token: name for token, (name, hidden) in added.items() if hidden}
        self._shown |= {token: name.encode() for token, (name, hidden) in added.items() if not hidden}
        self.special = frozenset(self._hidden.values())
        self.stages = stages_of({"type": "ByteLevel"})

    def encode(self, text: str) -> list[int]:
        """The ids of a text, cut where the authors' code cuts it."""
        with LibraryErrors(f"{self.path} fails on a text of {len(text)} characters"):
            parts = (text[at : at + KIMI_TEXT] for at in range(0, len(text), KIMI_TEXT))
            pieces = (piece for part in parts for piece in _pieces(part))
            return [token for piece in pieces for token in self._codes.encode(piece, allowed_special="all")]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ids."""
        return b"".join(self._shown.get(token, b"") for token in tokens).decode("utf-8", "replace")

    def token(self, token: int) -> str | None:
        """The token of an id that texts show, in the alphabet of byte-level tokenizers."""
        return "".join(BYTE_CHARS[byte] for byte in self._shown.get(token, b"")) or None

    def mark(self, token: int) -> str | None:
        """The content of a special token."""
        return self._hidden.get(token)


def _added(path: Path, first: int) -> dict[int, tuple[str, bool]]:
    """Names of the ids from `first` on, and whether texts leave them out: as the config has it, else reserved ones."""
    config = read_object(path, CONFIG_LIMIT, CheckpointError) if lies_at(path) else {}
    names = {token: (f"<|reserved_token_{token}|>", False) for token in range(first, first + KIMI_RESERVED)}
    for key, entry in section(config, "added_tokens_decoder").items():
        if not (key.isdecimal() and isinstance(entry, Mapping) and isinstance(entry.get("content"), str)):
            raise CheckpointError(f"{path}: added_tokens_decoder must give each id a content; download it again")
        if int(key) in names:
            names[int(key)] = entry["content"], entry.get("special") is True
    contents = {name for name, _ in names.values()}
    if len(contents) != len(names) or "" in contents:
        raise CheckpointError(f"{path}: added_tokens_decoder has a content twice, or an empty one; download it again")
    return names


def _pieces(text: str) -> Iterator[str]:
    """A text, cut within long runs of spaces or of other characters."""
    runs = re.finditer(r"\s+|\S+", text)
    cuts = [at for run in runs for at in range(run.start() + KIMI_RUN, run.end(), KIMI_RUN)]
    return (text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)]))
