import dataclasses
import functools
import inspect
import itertools
import math
import re
import types

import numpy as np
import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

import oomprobe
from oomprobe.errors import InvalidArgumentError, check_size
from oomprobe.ground.processes import MARK
from oomprobe.probing import opening, order
from oomprobe.records.options import Options, Step, check_model, check_seconds, named_steps
from oomprobe.records.sizes import Sizes
from oomprobe.runners.ranks_here import check_process_group

SIZES = ["min_batch", "multiple_of", "steps", "confirm_steps", "max_batch", "global_batch"]
TIMES = ["time_limit_s", "trial_time_limit_s"]
NOT_NUMBERS = [
    math.nan,
    -math.inf,
    math.inf,
    True,
    "0.9",
    [0.9],
    1j,
    np.float32(0.9),
    torch.tensor(0.9),
]
VALID = {"memory_fraction": 0.5, "resolution": 0.5, "breakdown": True, "host_memory": "64GiB"}
RANGES = {
    **dict.fromkeys(SIZES, "an integer of at least 1"),
    **dict.fromkeys(TIMES, "a positive number of seconds"),
    "memory_fraction": "above 0 and at most 1 (0.9 is 90 %)",
    "resolution": "at least 0 and under 1",
    "breakdown": "True or False",
    "host_memory": "a text such as '64GiB'",
}


def refused(call, *arguments):
    with pytest.raises(InvalidArgumentError) as caught:
        call(*arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("names", "values"),
    [
        (SIZES, [0, -1, True, False, 1.0, 8.0, 2.5, math.nan, math.inf, "8", [8], 1j]),
        (["min_batch", "multiple_of", "steps"], [None]),
        (TIMES, [0, -1, math.nan, math.inf, -math.inf, True, "60"]),
        (["memory_fraction"], [0, -0.0, -1, 1.0000001, 90, None, *NOT_NUMBERS]),
        (["resolution"], [-0.1, 1, 1.5, None, *NOT_NUMBERS]),
        (["breakdown"], [0, 1, None, "yes"]),
        (["host_memory"], [0, 8, 64.0, True, b"8GiB"]),
    ],
    ids=[
        "sizes",
        "sizes with a default",
        "times",
        "memory_fraction",
        "resolution",
        "breakdown",
        "host_memory",
    ],
)
def test_a_number_out_of_its_range_is_refused(names, values):
    for name, value in itertools.product(names, values):
        assert (
            refused(functools.partial(Options, **{name: value}))
            == f"{name} must be {RANGES[name]}, not {value!r}"
        )


@pytest.mark.parametrize(
    ("names", "values"),
    [
        (SIZES, [1, 10**9]),
        (TIMES, [1, 0.001, None]),
        (["memory_fraction"], [1e-9, 1, np.float64(0.9)]),
        (["resolution"], [0, 0.999]),
    ],
)
def test_a_number_in_its_range_is_accepted(names, values):
    for name, value in itertools.product(names, values):
        assert getattr(Options(**{name: value}), name) == value


def test_reading_data_may_take_no_time():
    assert check_seconds("scan_s", 0) is None
    assert (
        refused(check_seconds, "scan_s", -1)
        == "scan_s must be a number of seconds, at least 0, not -1"
    )


@pytest.mark.parametrize(
    ("value", "kind"), [(np.int64(8), "numpy.int64"), (torch.tensor(8), "torch.Tensor")]
)
def test_a_foreign_integer_is_refused_with_advice(value, kind):
    said = refused(check_size, "batch_size", value)
    assert re.match(
        rf"batch_size must be an integer of at least 1, not .* of type {kind}: pass int\(", said
    )


def test_options_are_stated_once():
    """Where a type checker or a reader needs them again, they are the same."""
    fields = {option.name: option for option in dataclasses.fields(Options)}
    riders = {"device", "preserve", "progress", "epoch"}
    searches = {*fields, *riders}
    checks = {name for name, option in fields.items() if option.metadata["in_checks"]} | riders
    signature = inspect.signature(oomprobe.find_max_batch).parameters
    assert set(signature) == {"model", "step_fn", "misspelt"} | searches
    assert {name: signature[name].default for name in fields} == {
        name: one.default for name, one in fields.items()
    }
    assert order.SearchOptions.__optional_keys__ == searches
    assert order.CheckOptions.__optional_keys__ == checks
    assert {name: order.SearchOptions.__annotations__[name].__forward_arg__ for name in fields} == {
        name: signature[name].annotation for name in fields
    }


@pytest.mark.parametrize(
    ("options", "batch_size", "error", "said"),
    [
        ({"mutliple_of": 8}, None, TypeError, "there is no option 'mutliple_of'; did you mean multiple_of?"),
        ({"max_bach": 8}, 8, InvalidArgumentError, "there is no option 'max_bach'; did you mean max_batch?"),
        ({"qqq": 8}, None, InvalidArgumentError, "there is no option 'qqq'$"),
        ({}, 0, InvalidArgumentError, "batch_size must be an integer of at least 1"),
    ],
)  # fmt: skip
def test_options_that_a_function_does_not_take_are_named(options, batch_size, error, said):
    with pytest.raises(error, match=said.replace("?", "[?]")):
        order.Order.of(options, batch_size=batch_size)


@pytest.mark.parametrize(
    "name", ["mutliple_of", "patience"]
)  # the tests pass the second one to other functions
def test_the_main_function_refuses_what_is_no_option(name):
    with pytest.raises(TypeError, match=f"there is no option '{name}'"):
        oomprobe.find_max_batch(torch.nn.Linear(1, 1), print, **{name: 8})


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"min_batch": 9, "max_batch": 8}, "min_batch=9 is larger than max_batch=8: swap them"),
        ({"min_batch": 3, "start_batch": 2}, "start_batch=2 is not between min_batch=3 and max_batch=None"),
        ({"max_batch": 8, "start_batch": 9}, "start_batch=9 is not between min_batch=1 and max_batch=8"),
        (
            {"min_batch": 9, "max_batch": 15, "multiple_of": 8},
            "no multiple of 8 lies between min_batch=9 and max_batch=15: lower multiple_of or raise max_batch",
        ),
    ],
)  # fmt: skip
def test_limits_without_a_size_between_them(limits, said):
    assert refused(lambda: Options(**limits)) == said


@pytest.mark.parametrize(
    ("options", "examples", "expected"),
    [
        ({}, 5, 5),
        ({"max_batch": 8}, 5, 5),
        ({"max_batch": 8}, 9, 8),
        ({"min_batch": 5}, 5, 5),
        ({"min_batch": 4, "multiple_of": 3, "start_batch": 5}, 5, "min_batch=4, start_batch=5, multiple_of=3"),
    ],
)  # fmt: skip
def test_the_data_set_limits_the_sizes(options, examples, expected):
    options = Options(**options)
    if isinstance(expected, str):
        said = f"the data set has {examples} examples, too few for {expected}"
        assert refused(options.within, examples) == said
    else:
        assert options.within(examples) == dataclasses.replace(options, max_batch=expected)


def test_sizes_follow_the_options():
    assert Options(min_batch=5, max_batch=100, multiple_of=8).sizes == Sizes(
        first=8, last=96, step=8
    )
    assert Options().sizes == Sizes(first=1, last=None, step=1)
    assert Options(min_batch=8, max_batch=8, start_batch=8, multiple_of=8).start_batch == 8


class Trainer:
    def step(self, model, batch_size):
        return "ran"


def generator(model, batch_size):
    yield model()


async def coroutine(model, batch_size):
    model()


@pytest.mark.parametrize(
    "step",
    [
        Trainer().step,
        lambda model, batch_size, amp=False, *, clip=None: "ran",
        functools.partial(lambda amp, model, batch_size: "ran", True),
        lambda batch, x: "ran",
        lambda x, model: "ran",
        lambda *both: "ran",
        max,
    ],
    ids=["method", "defaults", "partial", "a batch", "a model", "any", "no signature"],
)
def test_anything_callable_with_a_model_and_a_size_is_a_step(step):
    assert named_steps(step) == {"step": Step(step)}
    assert named_steps({"train": step}) == {"train": Step(step)}


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda model: None, "step(model) cannot be called with (model, batch_size): too many"),
        (Trainer.step, "step(self, model, batch_size) cannot be called"),
        (lambda batch_size, model: None, "is called with (model, batch_size): swap its first two parameters"),
        (lambda n, net, length=8: None, "step(n, net, length=8) is called with"),
        (None, "step must be a function (model, batch_size) that runs one full optimisation step, not NoneType"),
        ({}, "step_fn is an empty mapping: give at least one step, {'train': step_fn}"),
        ({1: max}, "names of steps must be strings, not 1"),
        ({"train": generator}, "train is a generator or async, so calling it runs nothing"),
        ({"train": coroutine}, "train is a generator or async, so calling it runs nothing"),
        ({"train": functools.partial(generator, batch_size=2)}, "train is a generator or async"),
    ],
)  # fmt: skip
def test_what_is_no_step_is_refused_before_it_runs(step, said):
    assert said in refused(named_steps, step)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.nn.Linear, "model must be a torch.nn.Module, not the class Linear: make an instance"),
        (None, "model must be a torch.nn.Module, not NoneType"),
        (check_model, "the first argument is a function, and model must be a torch.nn.Module: swap the two"),
        (torch.nn.Sequential(torch.nn.LazyLinear(2)), "the parameter 0.weight of a lazy module"),
    ],
    ids=["a class", "none", "a function", "a lazy module"],
)  # fmt: skip
def test_anything_but_a_module_with_its_parameters_is_refused(value, said):
    assert refused(check_model, value).startswith(said)


@pytest.mark.parametrize(
    ("made", "wanted", "said"),
    [
        (1, 1, None),
        (2, 1, "torch.distributed has 2 ranks: one that runs out of memory .* --nproc-per-node 2;"),
        (2, 2, None),
        (2, 4, "the process group of rank 0 has 2 ranks, but the probe has 4"),
    ],
)
def test_the_process_group_has_as_many_ranks_as_the_probe(made, wanted, said):
    check_process_group()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=made)
    try:
        if said is None:
            check_process_group(wanted)
        else:
            assert re.search(said, refused(check_process_group, wanted))
    finally:
        torch.distributed.destroy_process_group()


def test_a_group_may_be_made_by_the_step():
    check_process_group(2, has_stepped=False)
    assert "nor the step initialised a process group on rank 0" in refused(check_process_group, 2)


@pytest.mark.parametrize(
    ("options", "around", "said"),
    [
        ({"nproc_per_node": "gpu", "device": "sim:1GiB"}, {}, "nproc_per_node must be an integer of at least 1, not 'gpu'"),
        ({}, {"platform": "darwin"}, "trials can be isolated on Linux only, and this is darwin"),
        ({}, {"mark": MARK}, "calls probe_target while it is imported"),
    ],
)  # fmt: skip
def test_what_no_process_can_run_is_refused_before_one_starts(options, around, said, monkeypatch):
    monkeypatch.setattr(
        opening, "sys", types.SimpleNamespace(platform=around.get("platform", "linux"))
    )
    if "mark" in around:
        monkeypatch.setenv(MARK, "1")
    assert said in refused(
        functools.partial(oomprobe.check_target, "oomprobe.demo:wide_mlp", 8, **options)
    )


def test_a_command_is_refused_where_it_cannot_be_ended(monkeypatch):
    monkeypatch.setattr(opening, "sys", types.SimpleNamespace(platform="win32"))
    with pytest.raises(
        InvalidArgumentError, match=r"Linux only, and this is win32: let a function"
    ):
        oomprobe.check_command(["python", "train.py", "{batch}"], 1)


# --- options that mean nothing for what is asked, or exclude each other ---

VALUES, CARDS = {"length": [8, 16]}, ["sim:1GiB", "sim:2GiB"]
AN_EPOCH = oomprobe.Epoch({"length": [1, 2, 3]})
OF_A_COMMAND = "cannot be given for a command: it runs as it is"
ON_ONE_CARD = "a command is simulated on one card: name one as device, such as"
ALONE = "can be given for a command alone: steps of a model or a target are counted"
NO_ROWS = "require=8 is for a table of cards or of savings: to run one size, call check"
LIVE = "preserve takes live objects of this process"
REFUSED = {
    "find_max_batches": [
        ({"over": VALUES, "device": CARDS}, "over, device make a table each: leave one out"),
        ({"over": VALUES, "savings": "all"}, "over, savings make a table each"),
        ({"over": VALUES, "require": 8}, "require=8 asks about one size, and over for the largest"),
        ({"over": VALUES, "keep_writes": True}, f"keep_writes {ALONE}"),
        ({"device": CARDS, "require": 0}, "require must be an integer of at least 1, not 0"),
        ({"device": CARDS, "require": 20, "multiple_of": 8}, "batch 20 is not a multiple of multiple_of=8: change one"),
        ({"device": CARDS, "epoch": AN_EPOCH}, "a table of cards or of savings takes no epoch"),
    ],
    "find_savings": [
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, not 0"),
        ({"batch_size": 20, "multiple_of": 8}, "batch 20 is not a multiple of multiple_of=8"),
        ({"epoch": AN_EPOCH}, "a table of cards or of savings takes no epoch"),
        ({"over": VALUES}, "over, savings make a table each"),
    ],
    "find_max_tokens": [({"over": VALUES}, "there is no option 'over'")],
    "check": [
        ({"batch_size": 8, "preserve": [], "savings": "all"}, "would ignore savings: leave that out"),
        ({"batch_size": 20, "multiple_of": 8}, "batch 20 is not a multiple of multiple_of=8"),
        ({"batch_size": 8, "multiple_of": 0}, "multiple_of must be an integer of at least 1, not 0"),
    ],
    "probe_target": [
        ({"over": {"device": CARDS}, "savings": "all"}, "device, savings make a table each"),
        ({"require": 8}, NO_ROWS),
        ({"passes_after_s": 3, "keep_writes": True}, f"passes_after_s, keep_writes {ALONE}"),
        ({"nproc_per_node": 2, "isolate": False}, "ranks are processes of their own: leave out isolate"),
        ({"nproc_per_node": 2, "device": "cpu"}, "device 'cpu' cannot be given for several ranks"),
        ({"nproc_per_node": 2, "device": torch.device("cuda", 0)}, "cannot be given for several ranks"),
        ({"nproc_per_node": 2, "device": "cuda:8GiB", "preserve": [1]}, LIVE),
        ({"preserve": [1]}, LIVE),
    ],
    "check_target": [
        ({"batch_size": 8, "max_batch": 8, "over": VALUES}, "a check of batch 8 makes no search and no table, so it would ignore max_batch, over"),
        ({"batch_size": 8, "preserve": [1]}, LIVE),
    ],
    "probe_command": [
        ({"require": 8}, NO_ROWS),
        ({"breakdown": True, "nproc_per_node": 2}, f"breakdown, nproc_per_node {OF_A_COMMAND}"),
        ({"epoch": AN_EPOCH}, f"epoch {OF_A_COMMAND}"),
        ({"over": VALUES}, f"over {OF_A_COMMAND}"),
        ({"preserve": [1], "isolate": False}, f"isolate, preserve {OF_A_COMMAND}"),
        ({"device": CARDS}, ON_ONE_CARD),
        ({"device": "sim:all"}, ON_ONE_CARD),
        ({"over": {"device": CARDS}}, ON_ONE_CARD),
        ({"device": "cuda"}, "device 'cuda' cannot be given for a command: it runs on the devices that it chooses"),
        ({"device": "sim:1GiB", "keep_writes": True}, "keep_writes would replace your files by files without data"),
        ({"savings": "all"}, "a command can be given expandable_segments alone"),
        ({"savings": "expandable_segments,checkpoint"}, "a command can be given expandable_segments alone"),
    ],
    "check_command": [({"batch_size": 8, "steps": 3}, "so it would ignore steps: leave that out")],
}  # fmt: skip
OF = {"target": ["no_such_file.py:build"], "command": [["no-such-program", "{batch}"]]}


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [(name, *refusal) for name, refusals in REFUSED.items() for refusal in refusals],
)
def test_options_are_refused_before_anything_is_opened(function, options, said):
    """A target that is not there would be looked for, and a model that is none be noticed."""
    given = {"lengths": [1]} if function == "find_max_tokens" else {}
    subject = OF.get(function.partition("_")[2], [None, print])
    assert said in refused(
        functools.partial(getattr(oomprobe, function), *subject, **given, **options)
    )


@pytest.mark.parametrize("option", dataclasses.fields(Options), ids=lambda option: option.name)
def test_a_check_refuses_each_option_of_searches(option):
    check = functools.partial(
        oomprobe.check_target, *OF["target"], 8, **{option.name: VALID.get(option.name, 4)}
    )
    is_ignored = "so it would ignore" in refused(check)
    assert is_ignored is not option.metadata["in_checks"]


@pytest.mark.parametrize(
    ("of", "options"),
    [
        ("target", {"isolate": True, "nproc_per_node": 2, "device": "sim:1GiB"}),
        ("target", {"isolate": False, "preserve": [1]}),
        ("target", {"isolate": False, "nproc_per_node": 2, "device": "sim:1GiB", "preserve": [1]}),
        ("target", {"device": oomprobe.SimulatedDevice("1GiB"), "preserve": [1]}),
        ("target", {"over": {"device": CARDS}, "require": 8, "multiple_of": 8, "preserve": [1]}),
        ("target", {"savings": "all", "require": 8, "preserve": ()}),
        ("command", {"breakdown": False, "keep_writes": True, "epoch": None}),
        ("command", {"device": "sim:1GiB", "savings": "expandable_segments", "require": 8}),
    ],
)
def test_options_that_go_together_are_accepted(of, options):
    """The next thing to go wrong is that there is no such target, and no such program."""
    probe = functools.partial(getattr(oomprobe, f"probe_{of}"), *OF[of], **options)
    assert "no_such_file.py'" in refused(probe) or "no-such-program" in refused(probe)
