"""Decoding while tokens arrive: the decoders of the `tokenizers` library, as stages that say what can no longer change.

The library's decoders turn a whole list of tokens into another, and are not append-only: a run of byte tokens becomes
characters or one replacement mark a byte when it is over, an end of word is a space unless it is the last, a space is
taken from the first word. Each stage here knows which tokens its decoder looks at together, and leaves what they become
to the library's decoder itself. What no stage knows is held back to the end, which is always right.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import tokenizers

Decode = Callable[[list[str]], str]
"""A decoder of the library: the text of a whole list of tokens."""

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a decoder puts for bytes that are no character, or not yet one."""


@runtime_checkable
class Stage(Protocol):
    """A decoder between those before and after it. After one that fuses, a list holds parts of one token."""

    def push(self, tokens: list[str]) -> list[str]:
        """What can no longer change, once these tokens are in."""
        ...

    def rest(self, tokens: list[str]) -> list[str]:
        """What would follow if these tokens were the last. Nothing is kept of them."""
        ...


class Detokenizer:
    """Text of tokens as they arrive: what `push` gave and what `rest` gives are together the text of all of them.

    A token costs the same however many came before, but for `rest` where much is held back.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages

    def push(self, token: str) -> str:
        """The text that is certain once `token` is in."""
        tokens = [token]
        for stage in self._stages:
            tokens = stage.push(tokens)
        return "".join(tokens)

    def rest(self) -> str:
        """The text that would follow if no token came any more."""
        tokens: list[str] = []
        for stage in self._stages:
            tokens = stage.rest(tokens)
        return "".join(tokens)


def stages_of(decoder: Any) -> list[Callable[[], Stage]]:
    """What makes the stages of a decoder, given as in a tokenizer.json; None joins tokens with spaces."""
    if decoder is None:
        return [partial(_Placed, " ".join)]
    made: list[Callable[[], Stage]] = []
    chain, fused = flat(decoder), False
    for at, entry in enumerate(chain):
        kind = entry["type"]
        if kind == "Fuse":
            fused = True
            continue
        known = (_FUSED if fused else _SEPARATE).get(kind)
        if known is None:
            last = _library({"type": "Sequence", "decoders": chain[at:]})
            return [*made, partial(_Whole, last, fused)]
        made.append(known(entry))
        fused = fused or kind == "ByteLevel"
    return made


def flat(entry: Any) -> list[Any]:
    """The members of nested sequences of normalizers or decoders, in order; of none, nothing."""
    if entry is None:
        return []
    if entry["type"] != "Sequence":
        return [entry]
    members = entry["decoders" if "decoders" in entry else "normalizers"]
    return [one for member in members for one in flat(member)]


def with_part(name: str, entry: Any) -> tokenizers.Tokenizer:
    """A tokenizer of the library that has nothing but one part, which is given as in a tokenizer.json."""
    from tokenizers import Tokenizer

    model = {"type": "BPE", "vocab": {}, "merges": []}
    return Tokenizer.from_str(json.dumps({"version": "1.0", "model": model, name: entry}))


def _library(entry: Any) -> Decode:
    decoder = with_part("decoder", entry).decoder
    assert decoder is not None
    return decoder.decode


class _Alone:
    """Each token by itself."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode

    def push(self, tokens: list[str]) -> list[str]:
        return self.rest(tokens)

    def rest(self, tokens: list[str]) -> list[str]:
        return [self._decode([token]) for token in tokens]


class _Placed:
    """Each token by itself, but for the first of all: others are decoded behind an empty one, which gives nothing."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._lead: list[str] = []

    def push(self, tokens: list[str]) -> list[str]:
        found = self.rest(tokens)
        self._lead = [""] if tokens else self._lead
        return found

    def rest(self, tokens: list[str]) -> list[str]:
        leads = [self._lead, *[[""]] * len(tokens)]
        return [self._decode([*lead, token]) for lead, token in zip(leads, tokens, strict=False)]


class _Last:
    """Each token by itself, but for the last of all: others are decoded before an empty one, which gives nothing."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._held: list[str] = []

    def push(self, tokens: list[str]) -> list[str]:
        known = self._held + tokens
        self._held = known[-1:]
        return [self._decode([token, ""]) for token in known[:-1]]

    def rest(self, tokens: list[str]) -> list[str]:
        known = self._held + tokens
        return [self._decode([token, ""]) for token in known[:-1]] + [self._decode([token]) for token in known[-1:]]


class _Distinct:
    """Each token by itself, none where it repeats the one before it or gives nothing."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._before: list[str] = []

    def push(self, tokens: list[str]) -> list[str]:
        found = self.rest(tokens)
        self._before = (self._before + tokens)[-1:]
        return found

    def rest(self, tokens: list[str]) -> list[str]:
        known = self._before + tokens
        fresh = range(len(self._before), len(known))
        texts = [self._decode([known[at]]) for at in fresh if at == 0 or known[at] != known[at - 1]]
        return [text for text in texts if text]


class _Runs:
    """Runs of byte tokens (`<0xE2>`) together, other tokens as they are.

    A run that is UTF-8 is one token, another one a replacement mark a byte: a byte more can undo all of it.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._run = bytearray()

    def push(self, tokens: list[str]) -> list[str]:
        return self._take(self._run, tokens)

    def rest(self, tokens: list[str]) -> list[str]:
        run = self._run[:]
        return self._take(run, tokens) + self._ended(run)

    def _take(self, run: bytearray, tokens: list[str]) -> list[str]:
        found = []
        for token in tokens:
            if self._decode([token]) != token:
                run.append(int(token[3:5], 16))
                continue
            found += [*self._ended(run), token]
            run.clear()
        return found

    def _ended(self, run: bytearray) -> list[str]:
        try:
            return [run.decode()] if run else []
        except UnicodeDecodeError:
            return [UNFINISHED] * len(run)


class _Bytes:
    """Tokens in the alphabet of byte-level tokenizers, as bytes of UTF-8; what is none is replaced."""

    def __init__(self) -> None:
        self._pending = b""

    def push(self, tokens: list[str]) -> list[str]:
        data = self._pending + b"".join(map(_bytes, tokens))
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return [text]

    def rest(self, tokens: list[str]) -> list[str]:
        return [(self._pending + b"".join(map(_bytes, tokens))).decode("utf-8", "replace")]


class _Strip:
    """Parts of one token, without up to `start` of a character at its beginning, and up to `stop` at its end."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content, self._start, self._stop = content, start, stop
        self._held = ""

    def push(self, tokens: list[str]) -> list[str]:
        found, self._start, self._held = self._split(tokens)
        return found

    def rest(self, tokens: list[str]) -> list[str]:
        return self._split(tokens)[0]

    def _split(self, tokens: list[str]) -> tuple[list[str], int, str]:
        text = "".join(tokens)
        inner = text.lstrip(self._content)
        cut = min(self._start, len(text) - len(inner))
        start = self._start - cut if cut == len(text) else 0
        known = self._held + text[cut:]
        end = len(known) - min(self._stop, len(known) - len(known.rstrip(self._content)))
        return [known[:end]], start, known[end:]


class _Whole:
    """Everything at the end."""

    def __init__(self, decode: Decode, fused: bool) -> None:
        self._decode, self._fused = decode, fused
        self._tokens: list[str] = []

    def push(self, tokens: list[str]) -> list[str]:
        self._tokens += tokens
        return []

    def rest(self, tokens: list[str]) -> list[str]:
        known = self._tokens + tokens
        return [self._decode(["".join(known)] if self._fused else known)] if known else []


def _made(stage: Callable[[Decode], Stage]) -> Callable[[Any], Callable[[], Stage]]:
    return lambda entry: partial(stage, _library(entry))


_SEPARATE: dict[str, Callable[[Any], Callable[[], Stage]]] = {
    "Replace": _made(_Alone),
    "Strip": _made(_Alone),
    "Metaspace": _made(_Placed),
    "WordPiece": _made(_Placed),
    "BPEDecoder": _made(_Last),
    "CTC": _made(_Distinct),
    "ByteFallback": _made(_Runs),
    "ByteLevel": lambda entry: _Bytes,
}
_FUSED: dict[str, Callable[[Any], Callable[[], Stage]]] = {
    "Metaspace": _made(_Alone),  # each character by itself, all of them in the first token
    "Strip": lambda entry: partial(_Strip, entry["content"], entry["start"], entry["stop"]),
}


def _alphabet() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    code = {byte: byte for byte in plain} | {byte: 256 + at for at, byte in enumerate(others)}
    return [chr(code[byte]) for byte in range(256)]


BYTE_CHARS = _alphabet()
_BYTE_OF = {char: byte for byte, char in enumerate(BYTE_CHARS)}


def _bytes(token: str) -> bytes:
    """The bytes that a token spells in the alphabet; a token with any other character stands for itself."""
    codes = [_BYTE_OF.get(char, -1) for char in token]
    return bytes(codes) if -1 not in codes else token.encode()
