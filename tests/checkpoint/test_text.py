"""Text streams against the `tokenizers` library for each of its decoders; stop strings; tokenizers of either file."""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Tokens

import funcmodels as fm
from funcmodels.checkpoint.detokenizer import BYTE_CHARS
from funcmodels.checkpoint.text import TextStream, Tokenizer
from funcmodels.checkpoint.vocabularies import KIMI_PATTERN

TEXT = "größe naïve 語中文☃🙂🙂 x\u0301 👩\u200d👩\u200d👧 it's n't . ok\n\n  two  spaces � e\u0301\u0327 ไทย नमस्ते"
SPECIAL = ["<s>", "<|im_end|>", "</s>"]
PLAIN = "<think 🙂>"
"""Added, and shown in texts."""
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def trained(model: Any, trainer: type, pre_tokenizer: Any, decoder: Any, extra: Any = (), **options: Any) -> Tokens:
    """A tokenizer trained on a few lines, with `extra` tokens in its vocabulary."""
    tokens = Tokens(model)
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizer, decoder
    tokens.train_from_iterator([TEXT] * 3, trainer(special_tokens=SPECIAL, show_progress=False, **options))
    tokens.add_tokens([AddedToken(text, normalized=False) for text in [*extra, PLAIN]])
    return tokens


def listed(decoder: Any, words: list[str]) -> Tokens:
    """A tokenizer of these words."""
    ids = {word: at for at, word in enumerate([*SPECIAL, PLAIN, *dict.fromkeys(words)])}
    tokens = Tokens(models.WordLevel(ids, unk_token=PLAIN))
    tokens.decoder = decoder
    tokens.add_special_tokens(SPECIAL)
    tokens.add_tokens([PLAIN])
    return tokens


def replaced() -> list[Any]:
    return [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


SPLIT = pre_tokenizers.Split("▁", "merged_with_next")
KINDS: dict[str, Callable[[], Tokens]] = {
    "byte_level": lambda: trained(
        models.BPE(), trainers.BpeTrainer, pre_tokenizers.ByteLevel(), decoders.ByteLevel(),
        vocab_size=300, initial_alphabet=ALPHABET,
    ),
    "gemma": lambda: trained(models.BPE(), trainers.BpeTrainer, SPLIT, decoders.Sequence(replaced()), BYTES),
    "llama": lambda: trained(
        models.BPE(), trainers.BpeTrainer, SPLIT, decoders.Sequence([*replaced(), decoders.Strip(" ", 1, 0)]),
        [*BYTES, "▁", "▁▁"],
    ),
    "metaspace": lambda: trained(
        models.Unigram(), trainers.UnigramTrainer, pre_tokenizers.Metaspace(), decoders.Metaspace(),
        vocab_size=90, unk_token=SPECIAL[0],
    ),
    "word_piece": lambda: trained(
        models.WordPiece({}, unk_token=SPECIAL[0]), trainers.WordPieceTrainer, pre_tokenizers.BertPreTokenizer(),
        decoders.WordPiece(), [" .", "##", "do not", "'s"],
    ),
    "end_of_word": lambda: trained(
        models.BPE(end_of_word_suffix="</w>"), trainers.BpeTrainer, pre_tokenizers.Whitespace(), decoders.BPEDecoder(),
        end_of_word_suffix="</w>",
    ),
    "ctc": lambda: listed(decoders.CTC(), ["<pad>", "|", *"abcdefgh'.,", " ", "中", "🙂"]),
    "joined_with_spaces": lambda: listed(None, ["a", "b", "", " ", "中"]),
    "strip_both": lambda: listed(
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 3), decoders.Metaspace()]),
        [*BYTES, " ", "  ", "   ", "a ", " b", "中", "▁c"],
    ),
    "unknown_to_the_stream": lambda: listed(
        decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("(?<=a)b+(?!a)"), "⟨b⟩")]), ["a", "b", "ab", "🙂"]
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokens, Tokenizer]:
    """The library's tokenizer and ours, of one file."""
    return both(KINDS[request.param](), tmp_path_factory.mktemp(request.param))


def both(tokens: Tokens, directory: Path) -> tuple[Tokens, Tokenizer]:
    tokens.save(str(directory / "tokenizer.json"))
    return Tokens.from_file(str(directory / "tokenizer.json")), Tokenizer.of(directory, {})


def drawn(tokens: Tokens, draw: random.Random) -> list[int]:
    """Random ids: of text, of characters and half characters in byte tokens, special ones, and none at all."""
    ids: list[int] = []
    names = tokens.get_vocab()
    while len(ids) < 30:
        at, char = draw.randrange(len(TEXT)), draw.choice(TEXT + "🌍👋é\xa0")
        pieces = [f"<0x{byte:02X}>" for byte in char.encode()[: draw.choice([4, 4, 4, 2])]]
        ids += draw.choice([
            [names[piece] for piece in pieces if piece in names],
            [names[piece] for piece in pieces if piece in names],
            draw.choices([*names.values(), len(names) + 7], k=draw.randint(1, 4)),
            [names[draw.choice([*SPECIAL, PLAIN])]],
            tokens.encode(TEXT[at : at + draw.randint(1, 6)]).ids,
        ])  # fmt: skip
    return ids


def streamed(stream: TextStream, ids: list[int]) -> list[str]:
    """The pieces of a stream, that of its end included; none after a stop."""
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    return [*pieces, stream.finish()]


@pytest.mark.parametrize("seed", range(3))
def test_the_pieces_of_a_stream_are_the_text_of_all_tokens(kind: tuple[Tokens, Tokenizer], seed: int) -> None:
    tokens, tokenizer = kind
    draw = random.Random(seed)
    for _ in range(40):
        ids = drawn(tokens, draw)[: draw.randint(8, 40)]
        pieces = streamed(TextStream(tokenizer), ids)
        assert "".join(pieces) == tokens.decode(ids) == tokenizer.decode(ids), ids


STAGES: list[Callable[[], Any]] = [
    decoders.ByteFallback, decoders.Fuse, decoders.ByteLevel, decoders.WordPiece, decoders.BPEDecoder, decoders.CTC,
    decoders.Metaspace, lambda: decoders.Replace("▁", " "), lambda: decoders.Replace(Regex("a|^"), "bb"),
    lambda: decoders.Replace("b", ""), lambda: decoders.Strip(" ", 2, 0), lambda: decoders.Strip("b", 1, 0),
]  # fmt: skip
WORDS = [
    "", "a", "b", " ", "▁a", "##a", "a</w>", "</w>", "|", "<pad>", "Ġ", "Ċb", "ð", "Ł", "ĳ", "中", "\u0301", "� .",
    "<0x+F>", "<0xG1>", *(f"<0x{byte:02X}>" for byte in "👋中a".encode() + b"\xff\xc0"),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_decoders_in_any_order(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    for _ in range(40):
        chain = decoders.Sequence([draw.choice(STAGES)() for _ in range(draw.randint(1, 4))])
        tokens, tokenizer = both(listed(chain, WORDS), tmp_path)
        for _ in range(8):
            ids = draw.choices(range(tokens.get_vocab_size()), k=draw.randint(0, 20))
            ids = [token for token in ids for _ in range(draw.choice([1, 1, 2]))]
            pieces = streamed(TextStream(tokenizer), ids)
            assert "".join(pieces) == tokens.decode(ids), (chain, [tokens.id_to_token(token) for token in ids])


def test_what_is_certain_is_shown(kind: tuple[Tokens, Tokenizer], request: pytest.FixtureRequest) -> None:
    """Of tokens of whole characters at most the newest is held back, and a run of byte tokens until it is over."""
    tokens, tokenizer = kind
    if "unknown_to_the_stream" in request.node.name:
        assert "".join(streamed(TextStream(tokenizer), [5, 6] * 10)[:-1]) == ""
        return
    names = tokens.get_vocab()
    whole = [names[name] for name in names if name.isascii() and name not in [*SPECIAL, *BYTES] and name.strip()]
    ids = random.Random(1).choices(whole, k=50)
    if "gemma" in request.node.name:
        ids[20:20] = [names[f"<0x{byte:02X}>"] for byte in "👋🌍".encode()]
    stream, shown = TextStream(tokenizer), ""
    for at, token in enumerate(ids):
        shown += stream.push(token)
        if at and tokens.id_to_token(token) not in BYTES:
            assert len(shown) >= len(tokens.decode(ids[:at]).rstrip()), ids[: at + 1]


STOPPING = ["byte_level", "gemma"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", STOPPING)
def test_a_text_ends_before_the_first_stop_string(name: str, seed: int, tmp_path: Path) -> None:
    """Stop strings are cut out of texts with special tokens, begin and end anywhere; the first to be whole counts."""
    tokens, tokenizer = both(KINDS[name](), tmp_path)
    draw, ends = random.Random(seed), 0
    for _ in range(60):
        ids = [token for token in drawn(tokens, draw) if "\ufffd" not in tokens.decode([token])]
        plain, marked = tokens.decode(ids), tokens.decode(ids, skip_special_tokens=False)
        stops = [text[at : at + draw.randint(1, 14)] for text in (plain, marked) for at in [draw.randrange(len(text))]]
        expected, count = cut(tokens, ids, stops)
        stream = TextStream(tokenizer, stops)
        pieces = streamed(stream, ids)
        assert ("".join(pieces), len(pieces) - 1) == (expected, count), (ids, stops)
        assert stream.stopped == (count < len(ids) or expected != plain)
        ends += stream.stopped
    assert ends > 20


@pytest.mark.parametrize("name", STOPPING)
@pytest.mark.parametrize(
    ("stop", "ends", "after"),
    [
        ("p<|im_end|>", None, "c"), ("<|im_end|>", "ap{}", ""), ("<|im_end|>c", "ap{}", "c"),
        ("\ufffd<|im_end|>c", "ap{}", "c"), ("p<|im_end|>", None, ""), ("pc<|im_end|>", None, "c"),
    ],
)  # fmt: skip
def test_half_a_character_stands_before_a_special_token(
    name: str, stop: str, ends: str | None, after: str, tmp_path: Path
) -> None:
    """It parts what is before it from the token, whatever becomes of it; the token is no end of it for other texts."""
    tokens, tokenizer = both(KINDS[name](), tmp_path)
    names = tokens.get_vocab()
    half = [names[BYTE_CHARS[byte] if name == "byte_level" else f"<0x{byte:02X}>"] for byte in "🌍".encode()[:2]]
    ids = [*map(names.__getitem__, "ap"), *half, names["<|im_end|>"], *map(names.__getitem__, after)]
    stream = TextStream(tokenizer, [stop])
    text, shown = "".join(streamed(stream, ids)), tokens.decode([*ids[:2], *half])[2:]
    assert stream.stopped == (ends is not None)
    expected = tokens.decode(ids) if ends is None else ends.format(shown)
    assert text == expected.removesuffix("\ufffd" if stop.startswith("\ufffd") else "")


def cut(tokens: Tokens, ids: list[int], stops: list[str]) -> tuple[str, int]:
    """The text before the first stop string, and how many tokens it took: each beginning decoded anew."""
    for count in range(1, len(ids) + 1):
        plain, marked = (tokens.decode(ids[:count], skip_special_tokens=skip) for skip in (True, False))
        found = []
        for stop in stops:
            if (at := plain.rstrip("\ufffd").find(stop)) >= 0:
                found.append((at + len(stop), at))
            inside = {mark: mark in stop for mark in SPECIAL}
            parts = [part for part in re.split("(<s>|<.im_end.>|</s>)", marked) if inside.get(part, True)]
            if any(inside.values()) and (at := "".join(parts).find(stop)) >= 0:
                found.append((shown(parts, at + len(stop)), shown(parts, at)))
        if found:
            return plain[: min(found)[1]], count
    return tokens.decode(ids), len(ids)


def shown(parts: list[str], end: int) -> int:
    """How many of the first `end` characters are no part of a special token."""
    kept = [char for part in parts for char in (part if part not in SPECIAL else [""] * len(part))]
    return len("".join(kept[:end]))


KIMI = {"[BOS]": True, "[EOS]": True, "<|im_end|>": True, "<|tool call|>": False}
"""Special tokens as Kimi's tokenizer_config.json has them, and whether texts leave them out."""


def kimi(directory: Path, extra: tuple[bytes, ...] = ()) -> dict[bytes, int]:
    """A directory as Kimi publishes it, and the ranks of its tokens."""
    order = {char: byte for byte, char in enumerate(BYTE_CHARS)}
    ids = KINDS["byte_level"]().get_vocab()
    names = sorted(ids.keys() - {*SPECIAL, PLAIN}, key=ids.__getitem__)
    ranks = {bytes(order[char] for char in name): rank for rank, name in enumerate(names)}
    ranks |= {token: len(ranks) + at for at, token in enumerate(extra)}
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    (directory / "tiktoken.model").write_bytes(b"".join(lines))
    added = {len(ranks) + at: {"content": name, "special": hidden} for at, (name, hidden) in enumerate(KIMI.items())}
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    return ranks


@pytest.mark.parametrize("seed", range(2))
def test_a_tiktoken_model_is_read_as_transformers_converts_it(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    first = len(kimi(tmp_path))
    reserved = [f"<|reserved_token_{first + at}|>" for at in range(len(KIMI), 256)]
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    theirs = TikTokenConverter(
        str(tmp_path / "tiktoken.model"), pattern=KIMI_PATTERN, extra_special_tokens=[*KIMI, *reserved]
    ).converted()
    tokenizer, draw = Tokenizer.of(tmp_path, {}), random.Random(seed)
    assert tokenizer.available
    for _ in range(50):
        parts = draw.choices([*TEXT, *KIMI, reserved[7], "中文abc", "I'll  DON'T", "12345", " ?!\r\n"], k=30)
        ids = tokenizer.encode("".join(parts))
        assert ids == theirs.encode("".join(parts)).ids
        ids = [token for token in ids if draw.random() < 0.8]
        text = tokenizer.decode(ids)
        left_out = {first + at for at, hidden in enumerate(KIMI.values()) if hidden}
        assert text == theirs.decode([token for token in ids if token not in left_out], skip_special_tokens=False)
        assert "".join(streamed(TextStream(tokenizer), [*ids, 10**6])) == text


def test_kimi_splits_texts_as_its_authors_do(tmp_path: Path) -> None:
    """Han apart from other letters, numbers in threes, long runs anew; tokens across such a split are never used."""
    ranks = kimi(tmp_path, ("a漢".encode(), "漢a".encode(), b"1234", b"12", b"123", b"aa", b"  "))
    tokenizer = Tokenizer.of(tmp_path, {})
    single = [ranks[bytes([byte])] for byte in "漢".encode()]
    assert tokenizer.encode("a漢a") == [ranks[b"a"], *single, ranks[b"a"]]
    assert tokenizer.encode("12341") == [ranks[b"123"], ranks[b"4"], ranks[b"1"]]
    for text in ("\t" + " " * 25_001, "b" + "a" * 25_001 + "!"):
        parted = [tokenizer.encode(text[:at]) + tokenizer.encode(text[at:]) for at in (24_999, 25_000, 25_001)]
        assert [tokenizer.encode(text) == ids for ids in parted] == [False, True, False]


def test_a_stop_string_holds_a_special_token_of_kimi(tmp_path: Path) -> None:
    kimi(tmp_path)
    tokenizer = Tokenizer.of(tmp_path, {})
    stream = TextStream(tokenizer, ["t<|im_end|>"])
    assert "".join(streamed(stream, tokenizer.encode("ab[BOS]t[BOS]t<|im_end|>c"))) == "abt" and stream.stopped


BROKEN_TIKTOKEN = [b"", b"YQ== 0", b"not base64 0\n", b"YQ== x\n", b"YQ==\n", b"\xff\xfe 1\n", b"YQ== 99999999999999\n"]


@pytest.mark.parametrize("content", BROKEN_TIKTOKEN)
def test_a_broken_tiktoken_model_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_bytes(content)
    with pytest.raises(fm.CheckpointError, match=r"tiktoken\.model cannot be read"):
        Tokenizer.of(tmp_path, {}).encode("a")


@pytest.mark.parametrize(
    "added", [[], {"x": {}}, {"300": 3}, {"300": {"content": 5}}, {"300": {"content": ""}}, {"10000": 1},
              {"300": {"content": "a"}, "301": {"content": "a"}}],
)  # fmt: skip
def test_broken_special_tokens_of_kimi_are_named(added: Any, tmp_path: Path) -> None:
    kimi(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    with pytest.raises(fm.CheckpointError, match="added_tokens_decoder"):
        Tokenizer.of(tmp_path, {}).encode("a")


def wordlevel(**parts: Any) -> str:
    """A small tokenizer.json with some of its parts given."""
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"}
    return json.dumps({"version": "1.0", "model": model, **parts})


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def chain(kind: str, parts: list[Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: parts}


def charsmap() -> str:
    """A precompiled map whose longest text has a million characters."""
    trie = (0).to_bytes(4, "little")
    return base64.b64encode(len(trie).to_bytes(4, "little") + trie + b"a" * 10**6 + b"\0").decode()


EIGHTFOLD = [replace("a", "a" * 8)] * 9
FAILS: dict[str, str] = {
    "regex bomb": wordlevel(pre_tokenizer={
        "type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False
    }),
    "no unknown token": wordlevel(model={"type": "WordLevel", "vocab": {"b": 0}, "unk_token": "none"}),
    "no unknown piece": wordlevel(model={"type": "Unigram", "vocab": [["b", 0.0]], "unk_id": None}),
    "template": wordlevel(post_processor={
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}], "pair": [],
        "special_tokens": {},
    }),
    "multiplied": wordlevel(normalizer=chain("normalizers", EIGHTFOLD)),
    "nested": wordlevel(normalizer=chain("normalizers", [chain("normalizers", EIGHTFOLD[:5])] * 2)),
    "by patterns": wordlevel(normalizer=chain("normalizers", [replace("a", "a" * 8, "Regex")] * 9)),
    "prepended": wordlevel(normalizer=chain("normalizers", [{"type": "Prepend", "prepend": "a" * 999}, *EIGHTFOLD])),
    "bytes of bytes": wordlevel(normalizer=chain("normalizers", [replace("a", "é"), *[{"type": "ByteLevel"}] * 30])),
    "compatibility": wordlevel(
        normalizer=chain("normalizers", [replace("a", "\ufdfa"), {"type": "NFKD"}, replace("ل", "a")] * 9)
    ),
    "mapped": wordlevel(normalizer={"type": "Precompiled", "precompiled_charsmap": charsmap()}),
    "decoder": wordlevel(decoder=chain("decoders", EIGHTFOLD)),
    "decoder without a suffix": wordlevel(decoder=chain("decoders", [{"type": "BPEDecoder", "suffix": ""}] * 40)),
    "deep": "[" * 100_000,
}  # fmt: skip


@pytest.mark.plain
@pytest.mark.parametrize("name", FAILS)
def test_a_file_made_to_crash_is_an_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(FAILS[name])
    with pytest.raises(fm.CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.of(tmp_path, {}).encode("a" * 40 + "!")


@pytest.mark.plain
def test_normalizers_that_only_might_multiply_run(tmp_path: Path) -> None:
    """Twenty replacements of which none meets what another wrote, and a long text."""
    parts = [replace(chr(0x4E00 + at), "..." * 3) for at in range(20)]
    (tmp_path / "tokenizer.json").write_text(wordlevel(normalizer=chain("normalizers", parts)))
    assert Tokenizer.of(tmp_path, {}).encode("a") == [0]
    assert Tokenizer.of(tmp_path, {}).encode("\u4e00" * 20_000) == [2]


@pytest.mark.plain
def test_a_decoder_that_fails_is_an_error(tmp_path: Path) -> None:
    """Of no characters the library would strip the last one."""
    model = {"type": "WordLevel", "vocab": {"a": 0, "": 1, "[UNK]": 2}, "unk_token": "[UNK]"}
    strip = {"type": "Strip", "content": "a", "start": 0, "stop": 2}
    (tmp_path / "tokenizer.json").write_text(wordlevel(model=model, decoder=strip))
    tokenizer = Tokenizer.of(tmp_path, {})
    for run in (tokenizer.decode, lambda ids: streamed(TextStream(tokenizer), ids)):
        with pytest.raises(fm.CheckpointError, match="cannot"):
            run([1, 0])
    assert tokenizer.decode([-1, 2, 2**70]) == "[UNK]"


@pytest.mark.plain
@pytest.mark.parametrize("text_config", [[1], "x", 3])
@pytest.mark.parametrize("part", ["generation_config", "config"])
def test_a_text_config_that_is_none(part: str, text_config: Any, tmp_path: Path) -> None:
    given = {"text_config": text_config}
    (tmp_path / "generation_config.json").write_text(json.dumps(given if part == "generation_config" else {}))
    with pytest.raises(fm.ConfigError, match="text_config must be a section"):
        Tokenizer.of(tmp_path, given)
