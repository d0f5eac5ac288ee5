"""Reading a Hugging Face `config.json` into a frozen dataclass, field by field, with every complaint in one error."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from params.errors import ConfigError, cut

C = TypeVar("C")

MOST = {
    "num_hidden_layers": 1000,
    "mtp_num_hidden_layers": 100,
    "num_experts": 2**14,
    "n_routed_experts": 2**14,
    "ngram_vocab_size_base": 2**30,
    "ngram_size": 64,
    "heads_per_ngram": 512,
    "split_ngram_parts": 2**14,
    "block_size": 1024,
}
"""The most that a config may ask for of what lists or blocks are as long as: far more than any published model has."""
MOST_OTHERS, LARGEST, SMALLEST = 2**40, 2.0**127, 2.0**-126
"""The most of any other size, and between which magnitudes numbers lie that float32 can compute with."""


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
            wrong = _misfit(value, kinds[field.name], MOST.get(field.name, MOST_OTHERS))
            if wrong:
                complaints.append(cut(f"{field.name} must be {wrong}, found {value!r}"))
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
        raise ConfigError(cut(f"{name} must be a section of fields, found {found!r}"))
    return found


TIED = "tie_word_embeddings"


def text_fields(given: Mapping[str, Any], tied: bool | None = None) -> dict[str, Any]:
    """The text model's fields: those of the section `text_config`, and where it is silent those beside it.

    Whether the embedding is tied is said by the wrapper: it is what ties in transformers, whose text models inside of
    wrappers have no head. Where it is silent, `tied` says it, its class's default; without one, its classes differ
    there and the section is heard. Raises `ConfigError` for anything but a section.
    """
    inner = section(given, "text_config")
    said = given.get(TIED) if given.get(TIED) is not None or not inner else tied
    return {**given, **inner} | ({} if said is None else {TIED: said})


def rope_sections(given: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The sections that hold rotary fields, by name, without empty ones: the present spelling and the older one."""
    found = {name: section(given, name) for name in ("rope_parameters", "rope_scaling")}
    return {name: fields for name, fields in found.items() if fields}


def rope_section_rules(found: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[bool, str]]:
    """What the sections must not say: other kinds of rotary embedding, and two things at once."""
    for name, fields in found.items():
        kinds = [fields[key] for key in ("rope_type", "type") if key in fields]
        other = next((kind for kind in kinds if kind != "default"), "default")
        yield other == "default", f"{name}: rope_type {other!r} is not supported; only default is"
        interleaved = fields.get("mrope_interleaved")
        yield interleaved in (None, True), f"{name}: mrope_interleaved {interleaved!r} is not supported; only true is"
    # transformers lets rope_scaling replace rope_parameters; which of two the model was trained with is not guessed
    yield (
        len(found) < 2 or found["rope_parameters"] == found["rope_scaling"],
        "rope_parameters and rope_scaling are both given and differ; remove the one that does not hold: "
        + " and ".join(f"{name}={dict(fields)}" for name, fields in found.items()),
    )


def layer_count(given: Mapping[str, Any]) -> int | None:
    """How many layers a config says there are; `None` for what is no integer, which `read` complains of.

    Raises `ConfigError` for more than are allowed: lists as long are made before the rest of a config is checked.
    """
    count = given.get("num_hidden_layers")
    if not isinstance(count, int):
        return None
    wrong = _misfit(count, int, MOST["num_hidden_layers"])
    require((not wrong, f"num_hidden_layers must be {wrong}, found {count!r}"))
    return count


def check_layers(config: Any, tensors: int) -> None:
    """`ConfigError` for a config of more layers than its files have tensors: a spec of them all would take long."""
    layers = config.num_hidden_layers
    require((layers <= tensors, f"num_hidden_layers is {layers}, and the files have {tensors} tensors in all"))


def require(*conditions: tuple[bool, str]) -> None:
    """`ConfigError` listing the sentence of each condition that does not hold."""
    broken = [cut(sentence) for holds, sentence in conditions if not holds]
    if broken:
        raise ConfigError("; ".join(broken))


def sizes(config: Any, but: Collection[str] = ()) -> Iterator[tuple[bool, str]]:
    """Rules for `require`: each number is above zero, but those named, and those that a default says may be nothing."""
    kinds = get_type_hints(type(config))
    fields = [field for field in dataclasses.fields(config) if kinds[field.name] in (int, float)]
    nothing = [field.name for field in fields if field.default is not dataclasses.MISSING and field.default <= 0]
    yield from positive(config, [field.name for field in fields if field.name not in (*but, *nothing)])


def positive(config: Any, names: Collection[str]) -> Iterator[tuple[bool, str]]:
    """Rules for `require`: each of these fields is above zero."""
    for name in names:
        yield getattr(config, name) > 0, f"{name} must be positive, found {getattr(config, name)}"


def multiple(config: Any, more: str, fewer: str) -> tuple[bool, str]:
    """A rule for `require`: of one field there are whole multiples of the other."""
    many, few = getattr(config, more), getattr(config, fewer)
    return many % max(few, 1) == 0, f"{more} must be a multiple of {fewer}, found {many} and {few}"


def layer_types(config: Any, known: Collection[str]) -> Iterator[tuple[bool, str]]:
    """Rules for `require`: `layer_types` has one of the `known` kinds for each layer."""
    kinds, layers = config.layer_types, config.num_hidden_layers
    yield len(kinds) == layers, f"layer_types has {len(kinds)} entries, num_hidden_layers is {layers}"
    yield set(kinds) <= set(known), f"layer_types may hold {' and '.join(known)}, found {sorted(set(kinds))}"


def is_count(value: Any) -> bool:
    """Whether a value is an integer from 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _misfit(value: Any, kind: Any, most: int) -> str | None:
    """What a value should be and is not; null, which leaves a field to its default, never gets here."""
    if isinstance(kind, UnionType):
        (kind,) = [one for one in get_args(kind) if one is not NoneType]
    if get_origin(kind) is tuple:
        (inner, *_) = get_args(kind)
        whole = isinstance(value, (list, tuple)) and not any(_misfit(item, inner, most) for item in value)
        return None if whole else f"a list of {inner.__name__}"
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is float:
        return None if number and (value == 0 or SMALLEST <= abs(value) <= LARGEST) else "a finite number"
    if kind is int:
        whole = number and isinstance(value, int)
        return None if whole and abs(value) <= most else f"at most {most}" if whole else "an integer"
    return None if isinstance(value, kind) else {bool: "true or false", str: "a string"}[kind]
