"""The bundled model's corpus: Python standard library sources (PSF licence), split by file into train and held-out.

    python docs/bundled/corpus.py OUT      # writes OUT/corpus.json and prints counts

`documents()` is what the other scripts call. One interpreter version gives one corpus; `corpus.json` records the
version and the hash, so that a number measured on another version is not taken for the same number.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

SKIPPED_FOLDERS = {"site-packages", "encodings", "ensurepip", "__pycache__"}  # bundles and generated tables
SKIPPED_PREFIXES = ("config-", "_sysconfigdata", "lib2to3/tests/data")  # build facts of one machine, syntax fixtures
MIN_BYTES, MAX_BYTES = 200, 800_000
MAX_DIGITS = 0.10  # share of digits above which a file is a table of numbers, not code
HELD_OUT_PERCENT = 4  # of the files
NEAR_DUPLICATE = 0.3  # share of a file's distinct long lines that one other file may hold
LONG_LINE = 24  # characters; shorter lines (`return self`, `import os`) are everybody's


@dataclass(frozen=True)
class Document:
    """One source file: path relative to the library, its text, and whether training never sees it."""

    path: str
    text: str
    held_out: bool


def documents(root: Path | None = None) -> list[Document]:
    """All documents sorted by path; a held-out file has no near-duplicate among the training files."""
    texts = _texts(root or Path(sysconfig.get_paths()["stdlib"]))
    held_out = {path for path in texts if _bucket(path) < HELD_OUT_PERCENT}
    held_out -= _near_duplicates(texts, held_out)
    return [Document(path, text, path in held_out) for path, text in texts.items()]


def describe(docs: list[Document]) -> dict[str, object]:
    """Interpreter, corpus hash, and the documents and UTF-8 bytes of each split."""
    digest = hashlib.sha256()
    for doc in docs:
        digest.update(f"{doc.path}\0{doc.held_out}\0{doc.text}\0".encode())
    facts: dict[str, object] = {"python": platform.python_version(), "sha256": digest.hexdigest()}
    for name, flag in (("train", False), ("held_out", True)):
        sizes = [len(doc.text.encode()) for doc in docs if doc.held_out is flag]
        facts[name] = {"documents": len(sizes), "bytes": sum(sizes)}
    return facts


def _texts(root: Path) -> dict[str, str]:
    seen: set[str] = set()
    texts: dict[str, str] = {}
    for file in sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix()):
        path = file.relative_to(root).as_posix()
        text = _read(file) if _wanted(path) else None
        if not text or not _is_prose_or_code(text):
            continue
        key = hashlib.sha256(text.encode()).hexdigest()
        if key not in seen:
            seen.add(key)
            texts[path] = text
    return texts


def _wanted(path: str) -> bool:
    return not path.startswith(SKIPPED_PREFIXES) and SKIPPED_FOLDERS.isdisjoint(path.split("/"))


def _read(file: Path) -> str | None:
    """The text with Unix line ends, or None where the file declares another encoding or is not text."""
    try:
        return file.read_text(encoding="utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None


def _is_prose_or_code(text: str) -> bool:
    digits = sum(char.isdigit() for char in text) / len(text)
    return MIN_BYTES <= len(text) <= MAX_BYTES and digits <= MAX_DIGITS and "\0" not in text


def _bucket(path: str) -> int:
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") % 100


def _near_duplicates(texts: dict[str, str], held_out: set[str]) -> set[str]:
    """Held-out paths of which one training file holds more than `NEAR_DUPLICATE` of the long lines."""
    holders: dict[str, list[str]] = {}
    for path in texts.keys() - held_out:
        for line in _long_lines(texts[path]):
            holders.setdefault(line, []).append(path)
    close = set()
    for path in held_out:
        lines = _long_lines(texts[path])
        shared = Counter(holder for line in lines for holder in holders.get(line, ()))
        if shared and shared.most_common(1)[0][1] > NEAR_DUPLICATE * len(lines):
            close.add(path)
    return close


def _long_lines(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines() if len(line.strip()) >= LONG_LINE}


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    docs = documents()
    facts = describe(docs) | {"held_out_paths": [doc.path for doc in docs if doc.held_out]}
    (out / "corpus.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
