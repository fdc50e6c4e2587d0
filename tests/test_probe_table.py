"""Tables over an axis: arguments, records, text and command line; on simulated cards and host memory. tests/cuda has the answers."""

import json
import re
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest
import torch
from example_results import gpu
from helpers import page_of, same_as_golden
from helpers import text_of as report
from ledger import MIB, LedgerDevice
from zoo import training_step

import oomprobe
from oomprobe import InvalidArgumentError, ProbeTable, cli
from oomprobe.records.axis import Axis
from oomprobe.records.epoch import EpochRecord

QUIET = {"device": "sim:64MiB", "progress": "off"}

# --- targets ---


def linear():
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, training_step(optimizer, lambda n, length: torch.randn(n, length, 16))


def linear_of_8():
    model, step = linear()
    return model, lambda model, batch_size: step(model, batch_size, length=8)


def too_large():
    model, step = linear()
    return model, lambda model, batch_size, length: step(model, batch_size, length=length * 10**7)


def bug():
    model, step = linear()
    return model, lambda model, batch_size, length: step(model, batch_size, length={8: 8}[length])


def alternates():
    model, inner = linear()
    last = None

    def step(model, batch_size, length):
        nonlocal last
        if last not in (None, length):
            raise ValueError("another length")
        last = length
        inner(model, batch_size, length=length)

    return model, step


def trained(result, alone):
    """Return a result that four orders of an epoch have lowered from its answer alone."""
    record = EpochRecord(
        batch_size=result.batch_size, ends=(None,) * 4, deaths=0, longest_only_batch_size=alone
    )
    return replace(result, epoch=record)


def a_table(**changes):
    short = trained(gpu(), 104)
    other = replace(
        trained(gpu(), 40),
        batch_size=32,
        notes=("the answer ran for 25 calls; rarer events were not measured",),
    )
    given = {
        "axis": "length",
        "rows": {512: short, 1024: other, 8192: None, 16384: None},
        "unfit": {
            8192: "batch 1, the smallest allowed, does not fit",
            16384: "not tried, since length 8192 does not fit",
        },
        "notes": (
            "training that meets all values in one process runs out of memory with the batch sizes of the rows",
        ),
        "elapsed_s": 83.0,
    }
    return ProbeTable(**given | changes)


# --- the axis ---


@pytest.mark.parametrize(
    ("over", "said"),
    [
        (
            {},
            'over must map an argument of the step to its values, over={"length": [512, 1024, 2048]}, not {}',
        ),
        ({"length": [1], "width": [2]}, "over has 2 axes, length, width, and a table has one"),
        ({"batch_size": [1]}, "'batch_size' in over is not an extra argument of the step"),
        ({"a-b": [1]}, "'a-b' in over is not"),
        ({"length": "512"}, "the values of length must be a list, not '512'"),
        ({"length": []}, "length must have at least one value"),
        ({"length": [512, 512.0]}, "and each only once"),
        (
            {"size": [[640, 480]]},
            "a value of size cannot be a key of the table: write [640, 480] as a tuple",
        ),
        ({"size": [1]}, "Write it as def step_fn(model, batch_size, size): ..."),
    ],
)
def test_an_axis_that_makes_no_table_is_refused(over, said):
    with pytest.raises(InvalidArgumentError) as caught:
        oomprobe.find_max_batches(
            torch.nn.Linear(1, 1), lambda model, batch_size: None, over, **QUIET
        )
    assert said in str(caught.value)


def test_values_are_plain_numbers_and_name_their_row():
    assert [type(one) for one in Axis.of({"length": np.arange(2, 6, 2)}).values] == [int, int]
    rows = Axis.of({"size": [512, (640, 480), "short"]})
    assert [rows.label(row) for row in range(3)] == ["size=512", "size=640x480", "size='short'"]


def test_a_value_that_other_processes_cannot_get_is_refused():
    with pytest.raises(
        InvalidArgumentError,
        match="a value of length cannot be sent to the processes that run trials",
    ):
        oomprobe.probe_target(
            linear, over={"length": [lambda: 8]}, device="cpu:64MiB", progress="off"
        )


# --- on simulated cards and host memory ---


def test_rows_on_a_simulated_card_equal_probes_of_their_own():
    model, step = linear()
    table = oomprobe.find_max_batches(model, step, {"length": [1024, 4096]}, start_batch=2, **QUIET)
    assert [result.trials[0].batch_size for result in table.rows.values()] == [2, 1]
    alone = oomprobe.find_max_batch(model, lambda model, n: step(model, n, length=4096), **QUIET)
    assert table.rows[4096].batch_size == alone.batch_size
    assert any(trial.replayed for trial in table.rows[4096].trials)


def test_rows_on_host_memory():
    options = {"device": "cpu:512MiB", "progress": "off", "max_batch": 2}
    table = oomprobe.find_max_batches(*linear(), {"length": [8, 16]}, **options)
    assert table.batch_sizes() == {8: 2, 16: 2}


def test_each_row_is_compiled_as_if_training_had_started_with_it():
    model = torch.nn.Linear(16, 16)
    inputs = []

    def backend(graph, example_inputs):
        inputs.extend(example_inputs)
        return graph.forward

    forward = torch.compile(lambda model, x: model(x).square().mean(), backend=backend)

    def step(model, batch_size, length):
        forward(model, torch.randn(batch_size, length, 16)).backward()

    options = {"device": LedgerDevice(), "max_batch": 1, "progress": "off"}
    oomprobe.find_max_batches(model, step, {"length": [4, 8]}, **options)
    # A second length in the same process would be compiled for any length.
    assert inputs
    assert not [one for one in inputs if isinstance(one, torch.SymInt)]


# --- records ---


def test_a_table_comes_back_from_json():
    sizes = a_table(axis="size", rows={(640, 480): gpu()}, unfit={}, notes=())
    for table in (a_table(), sizes):
        assert ProbeTable.from_dict(json.loads(table.to_json())) == table
    for data in ({}, [], {"schema_version": 1}, {"schema_version": 9, "axis": "x"}):
        with pytest.raises(InvalidArgumentError):
            ProbeTable.from_dict(data)


def test_the_mapping_and_the_best_value():
    assert a_table().batch_sizes() == {512: 98, 1024: 32}
    assert a_table().best() == 512
    assert a_table(rows={"short": gpu()}, unfit={}).best() is None
    assert a_table(rows={(2, 3): gpu()}, unfit={}).product((2, 3)) == 6 * 98


def test_a_brief_report_is_the_verbose_one_without_those_of_the_rows():
    text = report(a_table(), verbose=True)
    same_as_golden(text, "report_table.txt")
    assert max(map(len, text.splitlines())) <= 100
    start, of_the_rows = text.split("\n--- length=512 ---\n")
    one, other = of_the_rows.split("\n--- length=1024 ---\n")
    assert report(a_table()) == start + other[other.index("\nnot covered by the trials:") :]
    assert [one, other] == [report(result, verbose=True) for _, result in a_table().fitting()]


def test_contamination_of_a_row_is_a_warning_of_the_table():
    table = a_table(rows={512: replace(gpu(), contaminated=True), 1024: gpu()})
    assert report(table).count("!! WARNING: ") == 1
    assert page_of(table).count(">WARNING: ") == 2  # also in the row's own report


def test_the_page_folds_the_report_of_each_row():
    page = page_of(a_table())
    assert page.count("<details>") == 2
    assert re.search(r'<tr class="answer"><td>\* 512</td><td>98</td>', page)
    assert '<tr class="failed"><td>8192</td><td>-</td>' in page
    assert "<b>verdict: 2 of 4 values of length fit" in a_table()._repr_html_()


def test_rows_with_the_largest_product_are_starred_alike():
    table = a_table(
        rows={
            512: replace(gpu(), batch_size=64),
            1024: replace(gpu(), batch_size=32),
            8: gpu(),
            9: None,
        }
    )
    assert re.findall(r"^\* +(\d+) ", report(table), re.MULTILINE) == ["512", "1024"]
    assert re.findall(r"<td>\* (\d+)</td>", page_of(table)) == ["512", "1024"]
    assert "* largest batch x length: 32768" in page_of(table)
    for without in (
        replace(table, rows={"a": gpu()}, unfit={}),
        replace(table, rows={9: None}),
    ):
        assert "*" not in report(without)


def test_a_table_is_one_line():
    assert (
        repr(a_table())
        == "<ProbeTable: 2 of 4 values of length fit in 21.60 GiB (90 % of 24.00 GiB on NVIDIA GeForce RTX 4090)>"
    )


# --- the command line ---


def run(target, *arguments):
    return cli.main(
        ["run", f"{__file__}:{target}", *arguments, "--device", "sim:64MiB", "--progress", "off"]
    )


@pytest.mark.parametrize("more", [["--over", "length=8,16"], ["--require", "2"], []])
def test_what_is_printed_and_saved(capsys, tmp_path, more):
    """A table has a line for each value, and each result its date and its target."""
    saved, is_table = tmp_path / "saved.json", "--over" in more
    name = "linear" if is_table else "linear_of_8"
    options = [] if "--require" in more else ["--max-batch", "2"]
    assert run(name, *more, *options, "--quiet", "--json", str(saved)) == 0
    assert capsys.readouterr().out == ("8 2\n16 2\n" if is_table else "2\n")
    data = json.loads(saved.read_text())
    environment = (data["rows"][0]["result"] if is_table else data)["environment"]
    assert environment["target"] == f"{__file__}:{name}"
    age = datetime.now(UTC) - datetime.fromisoformat(environment["date"])
    assert 0 <= age.total_seconds() < 100
    assert cli.main(["show", str(saved)]) == 0
    assert capsys.readouterr().out.startswith(
        f"verdict: {'2 of 2 values of length fit' if is_table else 'batch 2 '}"
    )
    assert cli.main(["compare", str(saved), str(saved)]) == (2 if is_table else 0)


def test_each_row_has_the_plan_of_a_global_batch_that_ranks_share(capsys):
    ranks = ["--global-batch", "8", "--world-size", "2", "--max-batch", "4"]
    assert run("linear", "--over", "length=8,16", *ranks, "--verbose") == 0
    assert capsys.readouterr().out.count("8 = 4 x 1 x 2, exact; micro-batch 4: ran") == 2


def test_where_nothing_fits_the_exit_status_is_1(capsys):
    assert run("too_large", "--over", "length=1,2") == 1
    out = capsys.readouterr().out
    assert "verdict: 0 of 2 values of length fit" in out
    assert "not tried, since length 1 does not fit" in out


def test_a_bug_in_a_later_row_keeps_the_finished_ones(tmp_path, capsys):
    saved = tmp_path / "table.json"
    assert run("bug", "--over", "length=8,16", "--max-batch", "2", "--json", str(saved)) == 3
    assert ProbeTable.from_dict(json.loads(saved.read_text())).batch_sizes() == {8: 2}
    assert "length=16: the step failed at batch size" in capsys.readouterr().err


def test_a_row_begins_with_a_stride_as_long_as_the_last_was_off():
    """The limit falls with the square of the value, and the first guess is twice as high."""
    device = LedgerDevice(1000 * MIB)

    def step(model, batch_size, value):
        device.take(batch_size * value**2 * MIB // 16)

    options = {"device": device, "progress": "off", "memory_fraction": 1.0}
    table = oomprobe.find_max_batches(torch.nn.Linear(1, 1), step, {"value": [2, 4, 8]}, **options)
    second, third = table.rows[4], table.rows[8]
    assert [trial.batch_size for trial in second.trials[:2]] == [2000, 2000 - 2000 // 64]
    begins = second.batch_size // 2
    assert [trial.batch_size for trial in third.trials[:2]] == [begins, begins - begins // 4]
    assert (second.batch_size, third.batch_size) == (pytest.approx(1000, rel=1 / 128), 250)
