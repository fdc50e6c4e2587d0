"""The JSON Schemas in docs/schema: made from the records, and true of what is written and read."""

import json
import random

import pytest
import schemas
from hypothesis import given, settings
from jsonschema import Draft202012Validator
from processes import REPOSITORY
from strategies import BY_TYPE, results
from test_broken_files import WRONG, broken, faults
from test_broken_files import results as full_results

from oomprobe.errors import InvalidArgumentError
from oomprobe.results.result import ProbeResult
from oomprobe.results.table import ProbeTable

FOLDER = REPOSITORY / "docs" / "schema"
SCHEMAS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.iterdir()}
VALIDATORS = {name: Draft202012Validator(schema) for name, schema in SCHEMAS.items()}
VERSION_1 = REPOSITORY / "tests" / "data" / "result_version_1.json"
EVIDENCE = sorted(REPOSITORY.glob("tests/evidence/*.json"))
FULL = dict(full_results())


def schema_of(data):
    return "table" if "axis" in data else "result"


def test_the_files_are_those_that_the_records_make():
    written = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
    assert written == schemas.texts(), "run scripts/schemas.py"
    for schema in SCHEMAS.values():
        Draft202012Validator.check_schema(schema)


def test_each_field_of_the_answers_is_described():
    for schema in SCHEMAS.values():
        undescribed = {
            name for name, kind in schema["properties"].items() if "description" not in kind
        }
        assert undescribed == set()


def saved():
    """Yield all results and tables that are kept as files, and some with every kind of field."""
    yield pytest.param(json.loads(VERSION_1.read_text()), id="version 1")
    for path in EVIDENCE:
        for part in json.loads(path.read_text()).get("parts", []):
            if "result" in part:
                yield pytest.param(part["result"], id=f"{path.stem} {part['model']}")
    yield from (pytest.param(data, id=kind) for kind, data in FULL.items())


@pytest.mark.parametrize("data", [*saved()])
def test_each_file_that_is_kept_is_as_its_schema_says(data):
    VALIDATORS[schema_of(data)].validate(data)


@settings(max_examples=25)
@given(results, BY_TYPE["Explanation"])
def test_whatever_a_record_holds_is_as_its_schema_says(result, explanation):
    written = json.loads(result.to_json())
    VALIDATORS["result"].validate(written)
    VALIDATORS["table"].validate(ProbeTable(axis="n", rows={1: result, 2: None}).to_dict())
    VALIDATORS["explanation"].validate(explanation.to_dict())
    if result.epoch is not None:
        VALIDATORS["epoch"].validate(written["epoch"])


# At these places the reader leaves a value out, or compares it with others.
OTHERWISE = ("value", "batch_size", "hardest", "schema_version")
# A schema leaves free what an environment and options hold, where the reader wants numbers that can be shown.
UNSHOWN = [
    number
    for number, value in enumerate(WRONG)
    if type(value) in (int, float) and not abs(value) <= 1e30
]


def is_read(data):
    try:
        (ProbeTable if "axis" in data else ProbeResult).from_dict(data)
    except InvalidArgumentError:
        return False
    return True


def test_a_schema_refuses_the_wrong_values_that_the_reader_refuses():
    wrong = [
        fault
        for fault in faults()
        if fault[0] != "snapshot" and fault[2][-1] not in OTHERWISE and fault[3] not in UNSHOWN
    ]
    decided = {True: 0, False: 0}
    for name, _, data in (broken(*fault) for fault in random.Random(3).sample(wrong, 150)):
        valid = VALIDATORS[schema_of(FULL[name.split()[0]])].is_valid(data)
        decided[valid] += 1
        assert valid == is_read(data), name
    assert min(decided.values()) > 20


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("result", {"schema_version": 2}),
        ("result", {"batch_size": 0}),
        ("result", {"limited_by": None}),
        ("result", {"trials": [{"batch_size": 1}]}),
        ("savings", {"savings": {"batch_size": 1, "failed": {"as is": "no verdict"}}}),
        ("table", {"rows": [{"value": 1, "unfit": None}]}),
    ],
)
def test_a_schema_refuses(name, changes):
    data = {**FULL[name], **changes}
    assert not VALIDATORS[schema_of(data)].is_valid(data)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("result", "schema_version"),
        ("result", "trials"),
        ("table", "schema_version"),
        ("table", "rows"),
    ],
)
def test_a_schema_refuses_what_lacks_a_field(kind, name):
    data = {key: value for key, value in FULL[kind].items() if key != name}
    assert not VALIDATORS[kind].is_valid(data)
