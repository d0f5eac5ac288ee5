"""Random changes to a checkpoint's directory: to what its JSON says, to headers of weights, to the files themselves."""

from __future__ import annotations

import json
import math
import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.checkpoints import CONFIGS

NESTED: Any = 1
for _ in range(70):
    NESTED = [NESTED]
VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 7, 64, 1000, 2**31, 2**40, 2**63, -(2**63), 10**30, 10**400, 0.0, -0.0, 0.5, 1.5,
    1e-30, 1e-320, 1e30, 1e38, 1e308, -1e308, math.nan, math.inf, -math.inf, "", "x", "1", "é\u202e\n", "\ud800",
    "default", "yarn", "linear", "full_attention", "linear_attention", "W8A8", "W8A8_DYNAMIC", "FLOAT", "float8_e4m3fn",
    "a" * 400_000, [], {}, [1], ["x"], [None], {"a": 1}, {"rope_type": "yarn"}, NESTED, list(range(5000)), ["y"] * 3000,
]  # fmt: skip


def _fields(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        yield name, value
        if isinstance(value, dict):
            yield from _fields(value)


FIELDS = sorted((field for make in CONFIGS.values() for field in _fields(make())), key=repr)
"""Names and values that some family's config has."""


def mutate(directory: Path, draw: random.Random) -> str:
    """Change one thing in a directory whose files are shared with others, and say what."""
    names = sorted(path.name for path in directory.iterdir())
    file = directory / draw.choice([*names, *["config.json"] * max(1, len(names))])
    if draw.random() < 0.12:
        how = draw.choice(FILES)
    elif not _ordinary(file):
        return "nothing"
    elif draw.random() < 0.1:
        how = draw.choice(CONTENTS)
    else:
        how = _json if file.suffix == ".json" else _header
    return f"{file.name}: {how.__name__.strip('_')} {how(file, draw) or ''}"


def _ordinary(file: Path) -> bool:
    return file.is_file() and not file.is_symlink() and file.stat().st_size < 10**7


def _write(file: Path, content: bytes) -> None:
    file.unlink(missing_ok=True)
    file.write_bytes(content)


# What the files say


def _json(file: Path, draw: random.Random) -> str:
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return "nothing"
    changed, what = changed_json(value, draw)
    _write(file, json.dumps(changed).encode())
    return what


def changed_json(value: Any, draw: random.Random) -> tuple[Any, str]:
    """The value with one thing changed somewhere inside, and what."""
    inside = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    if not inside or draw.random() < 0.02:
        new = _other(value, draw)
        return new, f"= {new!r:.60}"
    key, item = draw.choice(inside)
    if isinstance(item, (dict, list)) and item and draw.random() < 0.8:
        new, what = changed_json(item, draw)
        return _with(value, key, new), f".{key!s:.40}{what}"
    if isinstance(value, dict) and draw.random() < 0.4:
        return _renamed(value, key, draw)
    new = _other(item, draw)
    return _with(value, key, new), f".{key!s:.40} = {new!r:.60}"


def _with(value: Any, key: Any, new: Any) -> Any:
    return {**value, key: new} if isinstance(value, dict) else [*value[:key], new, *value[key + 1 :]]


def _renamed(value: dict[str, Any], key: str, draw: random.Random) -> tuple[Any, str]:
    left = {name: item for name, item in value.items() if name != key}
    how = draw.choice(("left out", "renamed", "added", "swapped", "long"))
    other, given = draw.choice(FIELDS)
    if how == "left out":
        return left, f" without {key:.40}"
    if how == "renamed":
        return left | {
            key + draw.choice(("x", ".", " ", "\u0000", ".weight", "_scale")): value[key]
        }, f" {key:.40} renamed"
    if how == "added":
        return value | {other: given}, f" with {other} = {given!r:.60}"
    if how == "swapped":
        name = draw.choice(list(value))
        return value | {key: value[name], name: value[key]}, f" {key:.40} and {name:.40} swapped"
    return value | {draw.choice(("n" * 600, ".".join("a" * 5000), "b" * 200)): value[key]}, " with a long name"


def _other(value: Any, draw: random.Random) -> Any:
    """Another value, often one that is near."""
    near: list[Any] = [[value], {"a": value}, str(value)[:1000]]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        near += [value + 1, value - 1, value * 2, -value, float(min(value, 2**60)), value // 2, value * 10**6]
    if isinstance(value, list):
        near += [value + value, value[:-1], value[::-1], value * 50]
    return draw.choice(near if draw.random() < 0.4 else VALUES)


def _header(file: Path, draw: random.Random) -> str:
    """A change to the header of a safetensors file, whose bytes stay."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8 : 8 + length])
    except (ValueError, RecursionError):
        return "nothing"
    changed, what = changed_json(header, draw)
    raw = json.dumps(changed).encode()
    _write(file, struct.pack("<Q", len(raw)) + raw + content[8 + length :])
    return what


# What the files hold


def _cut(file: Path, draw: random.Random) -> None:
    content = file.read_bytes()
    _write(file, content[: draw.randrange(len(content) + 1)])


def _flipped(file: Path, draw: random.Random) -> None:
    """In the header, of which most of the first kilobytes are."""
    content = bytearray(file.read_bytes())
    for _ in range(draw.randint(1, 4)):
        if content:
            content[draw.randrange(min(len(content), 4000))] ^= 1 << draw.randrange(8)
    if file.suffix == ".safetensors":
        length = int.from_bytes(content[:8], "little")
        content[8 + length :] = file.read_bytes()[8 + length :]  # values may be anything, and finite they should be
    _write(file, bytes(content))


def _longer(file: Path, draw: random.Random) -> None:
    _write(file, file.read_bytes() + draw.randbytes(draw.randint(1, 40)))


def _brackets(file: Path, draw: random.Random) -> None:
    _write(file, draw.choice((b"[" * 100_000, b'{"a":' * 20_000, b"[" + b"[]," * 2**20, b"\xff\xfe{}", b"", b"{}")))


CONTENTS: list[Callable[[Path, random.Random], Any]] = [_cut, _flipped, _longer, _brackets]

# The files themselves


def _gone(file: Path, draw: random.Random) -> None:
    _remove(file)


def _pipe(file: Path, draw: random.Random) -> None:
    _remove(file)
    os.mkfifo(file)


def _link(file: Path, draw: random.Random) -> str:
    places = ("/dev/zero", "/proc/self/environ", "/etc/hostname", "gone", file.name, "config.json", "..")
    _remove(file)
    file.symlink_to(place := draw.choice(places))
    return f"to {place}"


def _folder(file: Path, draw: random.Random) -> None:
    _remove(file)
    file.mkdir()


def _again(file: Path, draw: random.Random) -> str:
    """A copy under another name, or a file that directories may have too."""
    names = (
        "quant_model_description.json", "generation_config.json", "model.safetensors.index.json",
        "other.safetensors.index.json", "model.safetensors", "stray.safetensors", "tokenizer.json", "x.bin",
    )  # fmt: skip
    name = draw.choice(names)
    if _ordinary(file) and not os.path.lexists(file.parent / name):
        content = file.read_bytes() if draw.random() < 0.5 else b'{"eos_token_id": 3, "model.norm.weight": "FLOAT"}'
        _write(file.parent / name, content)
    return f"as {name}"


def _sparse(file: Path, draw: random.Random) -> None:
    _remove(file)
    file.touch()
    os.truncate(file, 2**36)


def _remove(file: Path) -> None:
    """Gone, whatever it was; a change before this one may have taken it already."""
    if file.is_dir() and not file.is_symlink():
        file.rmdir()
    else:
        file.unlink(missing_ok=True)


FILES: list[Callable[[Path, random.Random], Any]] = [_gone, _pipe, _link, _folder, _again, _again, _sparse]
