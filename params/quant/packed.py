"""`quantization_config` of compressed-tensors: MXFP4 weights, which a checkpoint's `config.json` describes as a whole.

A module is quantised where the files hold its `weight_packed`. The section says how; its lists of modules are for
readers that build them before they see the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from params.files import StoredTensor, listed, read_config
from params.quant.description import FLOAT, Description
from params.quant.values import MX_BLOCK, MXFP4Weight

CONFIG, SECTION, SUFFIX = "config.json", "quantization_config", "weight_packed"
_METHOD, _FORMAT = "compressed-tensors", "mxfp4-pack-quantized"
_WEIGHTS: dict[str, Any] = {"num_bits": 4, "type": "float", "group_size": MX_BLOCK}
_WEIGHTS_OR_ABSENT: dict[str, Any] = {
    "strategy": "group",
    "symmetric": True,
    "dynamic": False,
    "scale_dtype": "torch.uint8",
}


def read_packed(directory: Path, names: Iterable[str]) -> Description | None:
    """What is quantised among tensors of these names, as the rules spell them; `None` where nothing is packed.

    `ConfigError` or `CheckpointError` for a config that cannot be read.
    """
    names = set(names)
    modules = {name.rpartition(".")[0] for name in names if name.endswith(f".{SUFFIX}")}
    if not modules:
        return None
    words = {name: FLOAT for name in names if name.endswith(".weight")}
    words |= {f"{module}.weight": MXFP4Weight.scheme for module in modules}
    wrong = list(_wrong(section(read_config(directory)), sorted(modules)))
    return Description(words, tuple((SECTION, text) for text in wrong))


def section(config: Mapping[str, Any]) -> Any:
    """What a config says of its weights: in the part on the text model, else at the top; `None` where it is silent."""
    text = config.get("text_config")
    inner = text.get(SECTION) if isinstance(text, Mapping) else None
    return config.get(SECTION) if inner is None else inner


def is_packed(config: Mapping[str, Any]) -> bool:
    """Whether a config speaks of packed MXFP4 weights."""
    found = section(config)
    return isinstance(found, Mapping) and _FORMAT in _formats(found)


def written_section(tensors: Mapping[str, Tensor | StoredTensor]) -> dict[str, Any]:
    """The section for a checkpoint of these tensors: of its modules, those with a plain matrix are left out."""
    matrices = [name for name, tensor in tensors.items() if name.endswith(".weight") and len(tensor.shape) == 2]
    plain = sorted(name.removesuffix(".weight") for name in matrices)
    group = {
        "format": _FORMAT,
        "targets": ["Linear"],
        "weights": {**_WEIGHTS, **_WEIGHTS_OR_ABSENT},
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": _METHOD,
        "format": _FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": plain,
    }


def _formats(given: Mapping[str, Any]) -> list[Any]:
    """What a section and its groups say of their format, which can be anything that JSON has."""
    return [found for found in (part.get("format") for part in (given, *_groups(given))) if found]


def _groups(given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = given.get("config_groups")
    found = groups.values() if isinstance(groups, Mapping) else ()
    return [group for group in found if isinstance(group, Mapping)]


def _wrong(given: Any, modules: list[str]) -> Iterator[str]:
    """What of a section is missing or not supported."""
    if not isinstance(given, Mapping):
        found = f"no {SECTION}" if given is None else f"{SECTION} is {given!r}, which is no section of fields"
        yield f"{found}, and tensors are packed: {listed(modules, 3)}; expected {_FORMAT} of {_METHOD}"
        return
    yield from _unlike(given, {"quant_method": _METHOD}, SECTION)
    yield from _unlike(given, {"format": _FORMAT}, SECTION, absent=bool(_formats(given)))
    yield from _unlike(given, dict.fromkeys(("kv_cache_scheme", "sparsity_config")), SECTION, absent=True)
    if not _groups(given):
        yield f"{SECTION}.config_groups is {given.get('config_groups')!r}, expected a section for each group of weights"
    for group in _groups(given):
        where = f"{SECTION}.config_groups"
        yield from _unlike(group, {"format": _FORMAT}, where, absent=True)
        yield from _unlike(group, dict.fromkeys(("input_activations", "output_activations")), where, absent=True)
        weights = group.get("weights")
        if not isinstance(weights, Mapping):
            yield f"{where}: weights is {weights!r}, expected a section"
            continue
        yield from _unlike(weights, _WEIGHTS, f"{where}.weights")
        yield from _unlike(weights, _WEIGHTS_OR_ABSENT, f"{where}.weights", absent=True)


def _unlike(given: Mapping[str, Any], expected: Mapping[str, Any], where: str, absent: bool = False) -> Iterator[str]:
    """Fields with another value than expected; `absent` ones may be missing or empty."""
    for name, value in expected.items():
        found = given.get(name)
        if found != value and not (absent and found in (None, {}, [])):
            yield f"{where}.{name} is {found!r}, expected {value!r}"
