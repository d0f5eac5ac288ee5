"""Reading a Hugging Face `config.json` into a frozen dataclass, field by field, with every complaint in one error."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from params.errors import ConfigError

C = TypeVar("C")

MOST_LAYERS = 10_000
"""More than any model has. Lists as long are made while a config is read, before all of it has been checked."""


def read(cls: type[C], given: Mapping[str, Any], required: Collection[str] = ()) -> C:
    """An instance of dataclass `cls` from the fields of the same names in `given`; others are ignored.

    Raises `ConfigError` that lists every field that is missing (no default, or `required`) or of the wrong type.
    """
    kinds = get_type_hints(cls)
    values: dict[str, Any] = {}
    complaints: list[str] = []
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in given and given[field.name] is not None:
            value = given[field.name]
            if not _fits(value, kinds[field.name]):
                complaints.append(f"{field.name} must be {_called(kinds[field.name])}, found {value!r}")
            values[field.name] = tuple(value) if isinstance(value, list) else value
        elif field.default is dataclasses.MISSING or field.name in required:
            complaints.append(f"{field.name} is missing")
    if complaints:
        raise ConfigError(f"config for {cls.__name__}: " + "; ".join(complaints))
    return cls(**values)


def section(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The section `name` of a config, empty when absent or null. Raises `ConfigError` for anything but a section."""
    found = given.get(name)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"{name} must be a section of fields, found {found!r}")
    return found


TIED = "tie_word_embeddings"


def text_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's fields: those of the section `text_config`, and where it is silent those beside it.

    Whether the embedding is tied is said by the wrapper, where it says so: it is what ties in transformers, whose
    text models inside of wrappers have no head. Raises `ConfigError` for anything but a section.
    """
    fields = {**given, **section(given, "text_config")}
    return fields if given.get(TIED) is None else {**fields, TIED: given[TIED]}


def layer_count(given: Mapping[str, Any]) -> int | None:
    """How many layers a config says there are; `None` for what is no integer, which `read` complains of.

    Raises `ConfigError` for more than `MOST_LAYERS`.
    """
    count = given.get("num_hidden_layers")
    if not isinstance(count, int):
        return None
    if count > MOST_LAYERS:
        raise ConfigError(f"num_hidden_layers must be at most {MOST_LAYERS}, found {count}; check the config")
    return count


def require(*conditions: tuple[bool, str]) -> None:
    """`ConfigError` listing the sentence of each condition that does not hold."""
    broken = [sentence for holds, sentence in conditions if not holds]
    if broken:
        raise ConfigError("; ".join(broken))


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is tuple:
        return isinstance(value, (list, tuple)) and all(_fits(item, get_args(kind)[0]) for item in value)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _called(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"a list of {get_args(kind)[0].__name__}"
    return {int: "an integer", float: "a finite number", bool: "true or false", str: "a string"}[kind]
