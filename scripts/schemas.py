"""Write docs/schema: a JSON Schema for each kind of JSON that oomprobe writes.

    .venv/bin/python scripts/schemas.py

They follow the annotations of the records' fields, by which `oomprobe.records.plain` reads files, and their docstrings.
"""

import inspect
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Union, get_args, get_origin, get_type_hints

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from oomprobe.ground.units import LARGEST_BYTES  # noqa: E402
from oomprobe.records.epoch import EpochRecord  # noqa: E402
from oomprobe.records.kinds import Bytes, Samples  # noqa: E402
from oomprobe.records.plain import LARGEST  # noqa: E402
from oomprobe.results.result import (  # noqa: E402
    SCHEMA_VERSION,
    ProbeResult,
    _ReadEnvironment,
    _ReadOptions,
)
from oomprobe.results.table import ProbeTable, _SavedRow, _SavedTable  # noqa: E402
from oomprobe.results.why import Explanation  # noqa: E402

FOLDER = ROOT / "docs" / "schema"
WRITTEN = {
    "result.json": ProbeResult,
    "table.json": _SavedTable,
    "epoch.json": EpochRecord,
    "explanation.json": Explanation,
}
VERSIONED = (ProbeResult, _SavedTable)
VALUES = {
    bool: {"type": "boolean"},
    str: {"type": "string"},
    int: {"type": "integer", "minimum": -LARGEST, "maximum": LARGEST},
    float: {"type": "number", "minimum": -LARGEST, "maximum": LARGEST},
    Bytes: {"type": "integer", "minimum": 0, "maximum": LARGEST_BYTES},
    Samples: {"type": "integer", "minimum": 1, "maximum": LARGEST_BYTES},
}
NAMES = {
    _SavedTable: "ProbeTable",
    _SavedRow: "Row",
    _ReadOptions: "Options",
    _ReadEnvironment: "Environment",
}
DOCUMENTED = {_SavedTable: ProbeTable}
# What the annotations leave to those who read a file.
MORE = {
    _SavedRow: {"batch_size": Samples | None, "result": ProbeResult | None},
    ProbeResult: {"options": _ReadOptions, "environment": _ReadEnvironment},
}


def main():
    FOLDER.mkdir(exist_ok=True)
    for name, text in texts().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def texts():
    """Return the text of each file by its name."""
    return {
        name: json.dumps(schema_of(record), indent=1) + "\n" for name, record in WRITTEN.items()
    }


def schema_of(record):
    """Return the schema of what a record is written as, complete in itself."""
    parts = {}
    whole = describe_record(record, parts)
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {
        "$schema": dialect,
        "title": NAMES.get(record, record.__name__),
        **whole,
        "$defs": parts,
    }


def describe_record(record, parts):
    """Return the schema of an object with a record's fields; `parts` gets those of the records in it."""
    about, said = documented(DOCUMENTED.get(record, record))
    kinds = get_type_hints(record, include_extras=True) | MORE.get(record, {})
    properties = {}
    for name, kind in kinds.items():
        properties[name] = {**describe(kind, parts)}
        if name in said:
            properties[name]["description"] = said[name]
    required = [
        each.name
        for each in fields(record)
        if each.default is MISSING and each.default_factory is MISSING
    ]
    if record in VERSIONED:
        properties["schema_version"] = {
            "const": SCHEMA_VERSION,
            "description": said["schema_version"],
        }
        required.append("schema_version")
    return {"description": about, "type": "object", "properties": properties, "required": required}


def describe(kind, parts):
    """Return the schema of a value that is annotated so."""
    if kind in VALUES:
        return VALUES[kind]
    outer, inner = get_origin(kind), get_args(kind)
    if outer in (Union, UnionType):
        return {"anyOf": [describe(inner[0], parts), {"type": "null"}]}
    if outer in (tuple, Sequence):
        schema = {"type": "array", "items": describe(inner[0], parts)}
        if outer is tuple and inner[-1] is not ...:
            schema |= {"minItems": len(inner), "maxItems": len(inner)}
        return schema
    if outer is Mapping:
        return {"type": "object", "additionalProperties": describe(inner[1], parts)}
    if not inspect.isclass(kind):
        return {}  # what JSON has
    name = NAMES.get(kind, kind.__name__)
    if name not in parts:
        parts[name] = {}  # it may hold one of its kind
        if is_dataclass(kind):
            parts[name] = describe_record(kind, parts)
        else:
            parts[name] = {"description": documented(kind)[0], "enum": [*kind]}
    return {"$ref": f"#/$defs/{name}"}


def documented(record):
    """Return the first line of a docstring, and what it says of each attribute."""
    first, _, rest = inspect.getdoc(record).partition("\n")
    _, _, attributes = rest.partition("\nAttributes:\n")
    attributes = attributes.partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE)
    return first, {name: as_json_has_it(text) for name, text in entries}


def as_json_has_it(text):
    return re.sub(r"\bNone\b", "null", re.sub(r"\s+", " ", text)).replace("``", "`")


if __name__ == "__main__":
    main()
