"""Record the schemas of the `npu` operators that our kernels call, from a dump of everything the wheels define.

    python docs/record_npu_schemas.py DUMP.json

The dump holds `{"torch_npu": {version: {operator: schema}}}`, and under `"atb"` the same for the ATB library, whose
operators are named with `atb.` before them here; `lowering/npu/schemas.json` keeps the operators named in
`lowering/npu/features.py`, oldest version first. Every schema kept is parsed, so a damaged dump fails.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from lowering.npu.features import ARGUMENTS, RECORDED


def kept(dump: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Version to operator to schema for the operators we call; `ValueError` for one that no version has."""
    versions = sorted(dump, key=lambda version: [int(part) for part in version.split(".")[:3]])
    found = {v: {name: dump[v][name] for name in ARGUMENTS if name in dump[v]} for v in versions}
    absent = [name for name in ARGUMENTS if not any(name in schemas for schemas in found.values())]
    if absent:
        raise ValueError(f"no version in the dump has {', '.join(absent)}")
    for schemas in found.values():
        for schema in schemas.values():
            torch._C.parse_schema(schema)
    return found


def main(path: str) -> None:
    """Write the file anew."""
    dump = json.loads(Path(path).read_text(encoding="utf-8"))
    both = {
        version: schemas | {f"atb.{name}": schema for name, schema in dump["atb"].get(version, {}).items()}
        for version, schemas in dump["torch_npu"].items()
    }
    RECORDED.write_text(json.dumps(kept(both), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
