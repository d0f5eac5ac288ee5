"""The one reader of a checkpoint's files: regular ones inside of their directory, of bounded size, and what JSON says.

A directory may come from anyone. A pipe would be waited for, a device never ends, a link may lead to a private file,
and a few megabytes of brackets take gigabytes once they are parsed: all of that is refused before it is read.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

from params.errors import CheckpointError, cut

VALUES, LEVELS, NAME, BITS = 2**20, 64, 512, 128
"""What JSON may have: values, levels of nesting, characters of a name, bits of an integer."""

_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
"""Opening a pipe must not wait for its writer. Systems without the flag have no pipes among their files."""


def place(what: str, given: Any) -> Path:
    """`given` as a path. `TypeError` for what is no path, `CheckpointError` for one that no system has files of."""
    try:
        name = os.fspath(given)
        if not isinstance(name, str):
            raise TypeError
    except TypeError:
        raise TypeError(f"{what} must be a path, found {given!r:.100}") from None
    if not name:
        raise CheckpointError(f"{what} is empty; give a path, '.' for the working directory")
    try:
        if b"\0" in os.fsencode(name):
            raise CheckpointError(f"{what} has a NUL character, which no file name may: {cut(repr(name))}")
    except UnicodeEncodeError:
        raise CheckpointError(f"{what} has characters that no file name may: {cut(repr(name))}") from None
    return Path(name)


def lies_at(path: Path) -> bool:
    """Whether something has this name, be it of a kind that `open_file` refuses, or a link to nothing."""
    return os.path.lexists(path)


def open_file(path: Path, kind: type[ValueError] = CheckpointError, *, buffering: int = -1) -> BinaryIO:
    """A file of a checkpoint, open for reading.

    Raises `kind` for anything but a regular file, and for one outside of its directory: a link may only lead inside,
    or to the hub's cache, where the files of `snapshots/<revision>` lie in `blobs`.
    """
    try:
        _check_regular(path, path.stat(), kind)  # some devices act on being opened
        stream = open(path, "rb", buffering, opener=_at_once)  # noqa: SIM115, the caller closes it
    except FileNotFoundError as error:
        raise kind(f"{path} is not a file, or a link to nothing; finish the download") from error
    except OSError as error:
        raise kind(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        _check_place(path, os.fstat(stream.fileno()), kind)
    except (kind, OSError):
        stream.close()
        raise
    return stream


def _at_once(name: str, flags: int) -> int:
    return os.open(name, flags | _NO_WAIT)


def _check_regular(path: Path, found: os.stat_result, kind: type[ValueError]) -> None:
    if not stat.S_ISREG(found.st_mode):
        what = next((word for word, test in _KINDS.items() if test(found.st_mode)), "something else")
        raise kind(f"{path} is {what}, expected a regular file; remove it, or download the checkpoint again")


_KINDS: dict[str, Callable[[int], bool]] = {
    "a directory": stat.S_ISDIR,
    "a pipe": stat.S_ISFIFO,
    "a socket": stat.S_ISSOCK,
    "a device": lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode),
}


def _check_place(path: Path, opened: os.stat_result, kind: type[ValueError]) -> None:
    """What was opened, and not what has the name by now, is looked at."""
    _check_regular(path, opened, kind)
    real, home = Path(os.path.realpath(path)), Path(os.path.realpath(path.parent))
    homes = [home, *([home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [])]
    try:
        same = os.path.samestat(opened, real.stat())
    except OSError:
        same = False
    if not same:
        raise kind(f"{path} changed while it was opened; load again")
    if not any(real.is_relative_to(place) for place in homes):
        raise kind(f"{path} is a link to {real}, outside of its directory; put the file itself there")


def read_bytes(path: Path, limit: int, kind: type[ValueError] = CheckpointError) -> bytes:
    """All of a file of at most `limit` bytes. Raises `kind` for a larger one, and as `open_file`."""
    try:
        with open_file(path, kind) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > limit:
                raise kind(
                    f"{path} has {size} bytes, more than the {limit} such a file may have; it is not what it is named"
                )
            content = stream.read(size + 1)
    except OSError as error:
        raise kind(f"{path} cannot be read: {error.strerror or error}") from error
    if len(content) != size:
        raise kind(f"{path} had {size} bytes and changed while it was read; load again")
    return content


def read_object(path: Path, limit: int, kind: type[ValueError]) -> dict[str, Any]:
    """A JSON file that must hold an object; anything else raises `kind` with the reason."""
    value = parsed(read_bytes(path, limit, kind), path, kind)
    if not isinstance(value, dict):
        raise kind(f"{path} holds a {type(value).__name__}, expected an object")
    check_plain(value, str(path), kind)
    return value


def parsed(content: bytes, where: Path, kind: type[ValueError], values: int = VALUES, **options: Any) -> Any:
    """The value of a JSON text. `kind` for what is none, and for one of more than so many values."""
    # commas in texts count too, which makes it a bound from above
    if sum(map(content.count, (b",", b"[", b"{"))) > values:
        raise kind(f"{where} has more than {values} values, more than such a file may have; it is not what it is named")
    try:
        return json.loads(content.decode(), **options)
    except RecursionError:
        raise kind(f"{where} is nested too deeply") from None
    except ValueError as error:
        raise kind(f"{where} is not JSON: {error}") from error


def check_plain(value: Any, where: str, kind: type[ValueError]) -> None:
    """Raise `kind` for what no honest JSON has: deep nesting, names like books, integers of hundreds of digits."""
    level: list[Any] = [value]
    for _ in range(LEVELS):
        inner = {id(item): item for node in level for item in _inside(node, where, kind)}
        level = [item for item in inner.values() if isinstance(item, (dict, list, tuple))]
        if not level:
            return
    raise kind(f"{where} is nested too deeply, more than {LEVELS} levels")


def _inside(node: Any, where: str, kind: type[ValueError]) -> Iterable[Any]:
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for name, item in items:
        if isinstance(name, str) and len(name) > NAME:
            raise kind(f"{where}: {name[:40]!r}... is a name of {len(name)} characters, more than {NAME}")
        if isinstance(item, int) and item.bit_length() > BITS:
            raise kind(f"{where}: {name} is an integer of {item.bit_length()} bits, more than {BITS}")
        yield item
