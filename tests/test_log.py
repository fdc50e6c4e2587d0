"""The logger ``oomprobe``: what a finished probe notes, once, and nothing that is printed by itself."""

import logging
import subprocess
import sys

import pytest
import torch
from helpers import a_result

import oomprobe
from oomprobe.results.log import logged
from oomprobe.results.result import WARNING
from oomprobe.results.table import ProbeTable

pytestmark = pytest.mark.usefixtures("warm_python")

QUIET = {"device": "sim:1GiB", "max_batch": 4, "progress": "off"}


def forward(model, batch_size, length=8):
    return model(torch.randn(batch_size, length, 8)).sum()


def levels(caplog):
    return [
        (record.levelno, record.getMessage())
        for record in caplog.records
        if record.name == "oomprobe"
    ]


@pytest.fixture(autouse=True)
def listens(caplog):
    caplog.set_level(logging.INFO, logger="oomprobe")


def test_each_note_of_a_result_is_logged_once_at_the_end(caplog):
    result = oomprobe.find_max_batch(torch.nn.Linear(8, 8), forward, **QUIET)
    weak = [note.startswith("weak: ") for note in result.notes]
    assert any(weak)
    assert not all(weak)
    assert levels(caplog) == [
        (logging.WARNING if one else logging.INFO, note)
        for one, note in zip(weak, result.notes, strict=True)
    ]
    caplog.clear()
    checked = oomprobe.check(torch.nn.Linear(8, 8), forward, 4, device="sim:1GiB", progress="off")
    assert [text for _, text in levels(caplog)] == [*checked.notes]


def test_a_table_logs_what_its_rows_share_once(caplog):
    table = oomprobe.find_max_batches(torch.nn.Linear(8, 8), forward, {"length": [8, 16]}, **QUIET)
    shared = [note for note in table.rows[8].notes if note in table.rows[16].notes]
    texts = [text for _, text in levels(caplog)]
    assert [texts.count(note) for note in shared] == [1] * len(shared)
    assert any(note.startswith("weak: ") for note in shared)


@pytest.mark.parametrize("contaminated", [True, False])
def test_a_contaminated_answer_is_a_warning(caplog, contaminated):
    for found in (
        result := a_result(contaminated=contaminated),
        ProbeTable(axis="n", rows={1: result}),
    ):
        caplog.clear()
        assert logged(found) is found
        assert ((logging.WARNING, WARNING) in levels(caplog)) == contaminated


def test_without_logging_configured_nothing_is_printed():
    imports = (
        "from oomprobe.records.notes import warning; from oomprobe.results.log import log_notes"
    )
    code = f"{imports}; log_notes([warning('no optimizer stepped')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
