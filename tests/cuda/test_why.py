"""`result.why()` on torch's own allocator: the figures of a snapshot that is made by hand of the same failure."""

import contextlib
import os
import re
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from bed import forked
from zoo import MODELS, target

import oomprobe

from .ranks import forking

MEMORY = "1GiB"
SAME = (
    "requested_bytes", "live_bytes", "reserved_bytes", "free_bytes", "least_bytes", "least_bytes_expandable",
    "least_cap_bytes",
)  # fmt: skip


def probed(name, **options):
    model, step = MODELS[name]()
    options = {"progress": "off", "resolution": 0.05, **options}
    result = oomprobe.find_max_batch(model, step, **options)
    is_recording = torch._C._cuda_isHistoryEnabled()
    return result, is_recording


def by_hand(name, size, cap_bytes, path):
    """Train at a size under a cap until memory runs out, and record that as the documentation says."""
    model, step = MODELS[name]()
    torch.cuda.set_per_process_memory_fraction(
        cap_bytes / torch.cuda.get_device_properties(0).total_memory
    )
    torch.cuda.memory._record_memory_history(stacks="python")
    with contextlib.suppress(torch.OutOfMemoryError):
        while True:
            step(model, size)
    torch.cuda.memory._dump_snapshot(path)


@pytest.mark.parametrize(
    ("name", "expandable"), [("gpt", False), ("gpt", True), ("conv", False), ("big state", True)]
)
def test_the_figures_are_those_of_a_snapshot_made_by_hand(name, expandable, tmp_path):
    variables = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if expandable else {}
    result, is_recording = forked(probed, name, memory=MEMORY, limit_s=120, **variables)
    why, path = result.why(), str(tmp_path / "snapshot.pickle")
    failed = min(
        t.batch_size for t in result.trials if t.batch_size > result.batch_size and not t.passed
    )
    assert why.source == f"batch {failed}"
    assert not is_recording
    forked(partial(by_hand, name, failed, result.budget_bytes, path), memory=MEMORY, **variables)
    found = oomprobe.explain(path)
    assert {key: getattr(why, key) for key in SAME} == {key: getattr(found, key) for key in SAME}
    assert sum(why.held.values()) == sum(found.held.values())
    # The probe's cap is no cause: it counts as the memory that there is.
    assert why.cause == {"cap": "live"}.get(found.cause, found.cause)
    assert why.available_bytes == why.cap_bytes == result.budget_bytes
    replayed, same = re.match(r"Replayed ([\d,]+) requests: after ([\d,]+) ", why.notes[0]).groups()
    assert replayed == same


@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_the_size_that_failed_next_has_run_once(name, tmp_path):
    def searched():
        (model, step), made = MODELS[name](), os.open(tmp_path / "made", os.O_CREAT | os.O_WRONLY)

        def counted(model, batch_size):
            os.write(made, f"{batch_size}\n".encode())  # which no trial takes back
            step(model, batch_size)

        return oomprobe.find_max_batch(model, counted, progress="off", resolution=0.05)

    result = forked(searched, memory=MEMORY, limit_s=120)
    made = (tmp_path / "made").read_text().split()
    [failed] = {size for size in map(int, made) if size > result.batch_size}
    assert made.count(str(failed)) == 1
    assert result.why().source == f"batch {failed}"


def test_what_backward_holds_has_no_stack_of_python():
    def with_its_model():
        why = probed("gpt")[0].why()  # with no other model beside it
        return why, sum(parameter.nbytes for parameter in MODELS["gpt"]()[0].parameters())

    why, model_bytes = forked(with_its_model, memory=MEMORY, limit_s=120)
    assert why.where == "backward"
    assert {"backward", "forward", "optimizer"} <= {*why.kinds}
    assert why.kinds["there before the step"] == pytest.approx(model_bytes, rel=0.01)
    assert re.fullmatch(r".*zoo\.py:\d+ in \w+", max(why.held, key=why.held.get))


def isolated(path):
    return oomprobe.probe_target(path, isolate=True, progress="off", resolution=0.05)


def test_a_worker_sends_the_explanation(tmp_path):
    """It is what this process would have said, but for the lines, whose paths are shown from another folder."""
    here = forked(probed, "mlp", memory=MEMORY, limit_s=120)[0]
    result = forked(forking, lambda: isolated(target(tmp_path)), memory=MEMORY, limit_s=120)
    assert result.batch_size == here.batch_size
    lines = {"where": "", "held": {}, "modules": (), "timeline": None}
    assert replace(result.why(), **lines) == replace(here.why(), **lines)
    assert result.to_dict()["explanation"]["kinds"] == asdict(here.why())["kinds"]


def while_recording():
    torch.cuda.memory._record_memory_history(max_entries=1000)
    return probed("mlp")


def test_a_recording_of_the_users_is_left_alone():
    result, is_recording = forked(while_recording, memory=MEMORY, limit_s=120)
    assert result.limited_by == "memory"
    assert result.why() is None
    assert is_recording


def test_a_table_explains_each_row():
    def searched():
        model = torch.nn.Linear(256, 256).cuda()

        def step(model, batch_size, width):
            model(torch.randn(batch_size * width, 256, device="cuda")).sum().backward()

        return oomprobe.find_max_batches(
            model, step, over={"width": [256, 1024]}, progress="off", resolution=0.1
        )

    table = forked(searched, memory=MEMORY, limit_s=120)
    for result in table.rows.values():
        assert result.why().cause == "live"
        assert result.why().source != f"batch {result.batch_size}"
