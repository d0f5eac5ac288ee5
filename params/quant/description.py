"""`quant_model_description.json`: what a ModelSlim checkpoint says of each of its tensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from params.errors import CheckpointError
from params.files import INDEX_LIMIT
from params.guarded import lies_at, read_object
from params.quant.values import MX_BLOCK, MXFP8Weight

FILE = "quant_model_description.json"
FLOAT = "FLOAT"
"""The one word for what is not quantised."""

SETTINGS = frozenset(
    ("model_quant_type", "version", "metadata", "group_size", "optional", "reduce_quant_type", "quant_method",
     "packed_modules_mapping", "ignore", "kv_cache_type", "kv_quant_type", "fa_quant_type")
)  # fmt: skip
"""Keys that name no tensor. What a weight is, the schemes of its tensors say."""

_CACHE_SETTINGS = ("kv_cache_type", "kv_quant_type", "fa_quant_type")
_CACHE_WORDS = ("C8", "FAQuant")


@dataclass(frozen=True)
class Description:
    """Tensor, as the names' rules spell it, to its scheme; and the sentences on what cannot be loaded at all.

    `group_size` are the inputs that share a scale where an output has several. 0 says nothing: what ModelSlim writes
    is the setting of the layer it came to last, and older exports have none.
    """

    words: Mapping[str, str] = field(repr=False)
    problems: tuple[tuple[str, str], ...]
    group_size: int = 0

    def matched(self, names: Collection[str]) -> Description:
        """The entries under these `names` of tensors, where they call a feed-forward block otherwise than the files."""
        words: dict[str, str] = {}
        problems = list(self.problems)
        for name, word in self.words.items():
            other = name if name in names else _other_block(name)
            here = other if other in names else name
            if here != name and here in self.words:
                problems.append((name, f"{name} and {here} mean the same tensor; keep one of the two entries"))
            words[here] = word
        return replace(self, words=words, problems=tuple(problems))


_BLOCKS = {"mlp": "block_sparse_moe", "block_sparse_moe": "mlp"}
"""Two words for a feed-forward block with experts: what writes a description may use the one, the files the other."""


def _other_block(name: str) -> str:
    return ".".join(_BLOCKS.get(word, word) for word in name.split("."))


def read_description(directory: Path, canonical: Callable[[str], str]) -> Description | None:
    """The description in a checkpoint's directory, `None` where there is none: then nothing is quantised.

    `CheckpointError` for a file that holds no object.
    """
    path = directory / FILE
    if not lies_at(path):
        return None
    entries = read_object(path, INDEX_LIMIT, CheckpointError)
    words: dict[str, str] = {}
    spelled: dict[str, str] = {}
    problems = _cache_settings(entries)
    for name, word in entries.items():
        if name in SETTINGS or not isinstance(word, str):
            continue
        plain = canonical(name)
        first = spelled.setdefault(plain, name)
        if first != name:
            problems.append((name, f"{name} and {first} mean the same tensor; keep one of the two entries"))
        if word in _CACHE_WORDS or plain.endswith(".quant_type"):
            problems.append((name, f"{name} is {word}: {_CACHE_REFUSAL}"))
        words[plain] = word
    size = entries.get("group_size", 0)
    if type(size) is not int or size < 0:
        problems.append(("group_size", f"group_size is {str(size)[:50]}, expected how many inputs share a scale, or 0"))
        size = 0
    return Description(words, tuple(problems), size)


_CACHE_REFUSAL = (
    "KV-cache int8 (C8) and quantised attention are not supported, and the model's numbers would differ without them; "
    "export the model without quantising the cache"
)


def written(words: Mapping[str, str], groups: Collection[int]) -> str:
    """The file for a checkpoint of these tensors, in which so many inputs share a scale of `groups`.

    Of several such numbers it can say none. Its other settings are those of an export without options.
    """
    kinds = sorted(set(words.values()) - {FLOAT})
    sizes = {*groups, *([MX_BLOCK] if MXFP8Weight.scheme in kinds else [])}
    settings = {
        "model_quant_type": next(iter(kinds), FLOAT),
        "version": "1.0.0",
        "metadata": {},
        "group_size": sizes.pop() if len(sizes) == 1 else 0,
        "optional": {},
    }
    return json.dumps(settings | dict(words), indent=2) + "\n"


def _cache_settings(entries: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = {name: entries.get(name) for name in _CACHE_SETTINGS}
    return [(name, f"{name} is {word}: {_CACHE_REFUSAL}") for name, word in found.items() if word]
