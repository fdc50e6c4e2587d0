"""The benchmark beside the peers: what it takes down, how it judges, and that its limit is one."""

import json
import os
import random
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from peers import ballast, cards, child, limits, measuring, seen, state, table, tools, truth
from peers.workloads import HOST, MIB, Plain, Trained, adamw

SCRIPT = Path(__file__).parent.parent / "scripts" / "benchmark_peers.py"


@pytest.fixture
def unlogged(monkeypatch):
    """Models of the benchmark train in this process, and its hook for optimizers stays out of it."""
    monkeypatch.setattr(seen, "_hooked", True)
    monkeypatch.delenv(seen.LOG_VARIABLE, raising=False)


def benchmark(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False
    )


# --- what was run ---


def log(tmp_path, *lines):
    path = tmp_path / "log"
    path.write_text("".join(f"{line}\n" for line in lines))
    return seen.read(path)


def test_trials_are_runs_of_one_size(tmp_path):
    was = log(tmp_path, "forward 1 0.0", "forward 1 1.0", "forward 2 2.0", "forward 1 3.0")
    assert was.trials == 3


def test_time_in_steps_is_from_a_forward_to_the_last_that_is_known_of_its_step(tmp_path):
    finished = ("forward 4 10.0", "backward 4 11.0", "stepped 4 11.5")
    failed_in_forward = ("forward 8 20.0",)
    without_optimizer = ("forward 2 30.0", "backward 2 30.25")
    assert log(tmp_path, *finished, *failed_in_forward, *without_optimizer).in_steps_s == 1.75


def test_how_far_a_size_came(tmp_path):
    was = log(tmp_path, "forward 4 0.0", "backward 4 1.0", "stepped 4 2.0", "forward 8 3.0", "backward 8 4.0")
    assert [was.ran(4), was.ran(8), was.ran(2)] == ["stepped", "no", "no"]


def test_where_nothing_steps_a_backward_counts(tmp_path):
    was = log(tmp_path, "forward 4 0.0", "backward 4 1.0", "forward 8 2.0")
    assert [was.ran(4), was.ran(8)] == ["backward", "no"]


def test_a_backward_does_not_count_where_the_step_that_follows_it_fails(tmp_path):
    was = log(tmp_path, "forward 4 0.0", "backward 4 1.0", "stepping 4 1.5")
    assert was.ran(4) == "no"


def test_a_step_is_taken_down_before_and_after_it(tmp_path):
    log_path = tmp_path / "log"
    code = "import torch; from peers.workloads import Plain, adamw; m = Plain(); o = adamw(m); m(torch.randn(3, 64)).backward(); o.step()"
    path = os.pathsep.join([str(SCRIPT.parent), str(SCRIPT.parent.parent)])
    environment = {**os.environ, seen.LOG_VARIABLE: str(log_path), "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    events = [line.split()[:2] for line in log_path.read_text().splitlines()]
    assert events == [[event, "3"] for event in ("forward", "backward", "stepping", "stepped")]


def test_no_log_is_nothing_run(tmp_path):
    assert seen.read(tmp_path / "none") == seen.Seen(0, frozenset(), frozenset(), 0.0)


def test_a_model_takes_down_its_forwards_and_backwards(tmp_path, unlogged, monkeypatch):
    monkeypatch.setenv(seen.LOG_VARIABLE, str(tmp_path / "log"))
    Plain()(torch.randn(3, 64)).backward()
    events = [line.split()[:2] for line in (tmp_path / "log").read_text().splitlines()]
    assert events == [["forward", "3"], ["backward", "3"]]


def test_a_part_of_a_model_is_heard_in_a_copy_too(tmp_path, unlogged, monkeypatch):
    monkeypatch.setenv(seen.LOG_VARIABLE, str(tmp_path / "log"))
    part = torch.nn.Linear(4, 1)
    tools.heard(part)
    deepcopy(part)(torch.ones(5, 4, requires_grad=True)).sum().backward()
    with torch.no_grad():
        part(torch.ones(6, 4))
    assert (seen.read(tmp_path / "log").trials, seen.read(tmp_path / "log").backwards) == (2, {5})


# --- what a call leaves behind ---


def changes(do):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = adamw(model)
    before = state.taken_down(model, optimizer)
    do(model, optimizer)
    return state.changed(before, state.taken_down(model, optimizer))


class Elsewhere(torch.nn.Parameter):
    device = "cuda:0"


def give_gradients(model, _):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def take_one_step(model, optimizer):
    give_gradients(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("names", "do"),
    [
        ([], lambda model, optimizer: None),
        (["weights"], lambda model, optimizer: model[0].weight.data.add_(1)),
        (["buffers"], lambda model, optimizer: model[1].running_mean.add_(1)),
        (["gradients"], give_gradients),
        (["modes"], lambda model, optimizer: model[1].eval()),
        (["device"], lambda model, optimizer: setattr(model[0], "weight", Elsewhere(model[0].weight.data))),
        (["weights", "optimizer"], take_one_step),
        (["torch's generator"], lambda model, optimizer: torch.rand(1)),
        (["numpy's generator"], lambda model, optimizer: numpy.random.rand()),
        (["Python's generator"], lambda model, optimizer: random.random()),
    ],
    ids=lambda value: "+".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_each_kind_of_change_is_seen(names, do):
    assert changes(do) == names


# --- the limit on the host ---


def test_the_limit_makes_a_real_allocation_fail_and_is_lifted():
    with limits.held(64):
        torch.empty(32 * MIB, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(96 * MIB, dtype=torch.uint8)
    assert torch.empty(96 * MIB, dtype=torch.uint8).numel() == 96 * MIB


def test_the_limit_is_lifted_when_the_work_fails():
    with pytest.raises(ZeroDivisionError), limits.held(64):
        _ = 1 / 0
    assert torch.empty(96 * MIB, dtype=torch.uint8).numel() == 96 * MIB


def test_the_limit_holds_a_process_started_meanwhile():
    code = "import resource; print(resource.getrlimit(resource.RLIMIT_AS)[0])"
    with limits.held(4096):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 4096 * MIB < int(done.stdout) < 2**50


def test_what_is_in_use_is_known_to_the_byte():
    before = limits.malloced()["left_bytes"]
    kept = torch.empty(MIB, dtype=torch.uint8)
    assert 0 <= limits.malloced()["left_bytes"] - before - kept.numel() < 64 * 1024


# --- the limit on a card ---


class Card:
    """Made up: each piece costs the driver a little more than was asked for."""

    def __init__(self, free_bytes, overhead_bytes=0):
        self.free_bytes, self.overhead_bytes = free_bytes, overhead_bytes

    def free(self):
        return self.free_bytes

    def take(self, count):
        self.free_bytes -= count + self.overhead_bytes
        return count


def test_the_ballast_leaves_the_budget():
    card = Card(141 * 1024 * MIB)
    ballast.fill(8 * 1024 * MIB, card.free, card.take)
    assert card.free_bytes == 8 * 1024 * MIB


def test_the_ballast_allows_for_what_pieces_cost():
    card = Card(141 * 1024 * MIB, overhead_bytes=MIB // 2)
    ballast.fill(8 * 1024 * MIB, card.free, card.take)
    assert abs(card.free_bytes - 8 * 1024 * MIB) < ballast.PIECE_BYTES


def test_the_ballast_ends_where_taking_takes_nothing():
    assert len(ballast.fill(0, lambda: 1024 * MIB, lambda count: count)) == ballast.ROUNDS


def test_a_card_that_is_too_full_is_told():
    card = Card(1000 * MIB)
    with pytest.raises(MemoryError, match="1000 MiB are free, the budget is 2048 MiB"):
        ballast.fill(2048 * MIB, card.free, card.take)


STAND_IN = """#!/bin/sh
echo "$@" >> {folder}/asked
echo {says}
cat > /dev/null
echo let go >> {folder}/asked
"""


def stand_in(monkeypatch, tmp_path, says):
    """In place of Python: says what a ballast would, and waits as one does."""
    script = tmp_path / "python"
    script.write_text(STAND_IN.format(folder=tmp_path, says=says))
    script.chmod(0o755)
    monkeypatch.setattr(ballast.sys, "executable", str(script))
    return tmp_path / "asked"


def test_the_ballast_is_kept_until_the_work_has_ended(monkeypatch, tmp_path):
    asked = stand_in(monkeypatch, tmp_path, says=8 * 1024 * MIB)
    with ballast.beside(8 * 1024) as free_bytes:
        assert free_bytes == 8 * 1024 * MIB
        assert asked.read_text() == f"-m peers.ballast {8 * 1024 * MIB}\n"
    assert asked.read_text().endswith("let go\n")


def test_a_ballast_that_was_not_placed_ends_the_benchmark(monkeypatch, tmp_path):
    stand_in(monkeypatch, tmp_path, says="1000 MiB are free")
    with pytest.raises(SystemExit, match="no limit on the card: 1000 MiB are free"), ballast.beside(8 * 1024):
        pytest.fail("worked without a limit")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a card")
def test_the_ballast_says_that_there_is_no_card():
    with pytest.raises(SystemExit, match="no CUDA device here"), ballast.beside(8):
        pytest.fail("worked without a limit")


def test_what_is_in_use_on_a_card_is_nothing_before_it_is_touched():
    if not torch.cuda.is_initialized():
        assert limits.allocated() == {"left_bytes": 0, "left_reserved_bytes": 0}
        assert not torch.cuda.is_initialized()


# --- the truth ---


def test_a_scan_finds_each_size_that_fits():
    assert measuring.run_child("scan", HOST["bug"]) == {"fits": [[1, 24]]}


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 8, 9, 100])
@pytest.mark.parametrize("smallest", [1, 2])
def test_a_bisection_finds_the_last_that_fits(limit, smallest):
    found = truth.bisected(lambda size: None if size <= limit else "no memory", smallest)
    assert found["fits"] == ([[smallest, limit]] if limit >= smallest else [])
    assert {said for size, said in found["tried"].items() if int(size) > limit} == {"no memory"}
    assert all(str(size) in found["tried"] for size in range(max(smallest, limit - 2), limit + 4))


def test_no_size_of_a_bisection_is_run_twice():
    ran = []
    truth.bisected(lambda size: ran.append(size) or (None if size <= 41 else "no memory"), 1)
    assert len(ran) == len(set(ran))


def test_a_neighbour_that_fits_beyond_a_failure_is_seen():
    found = truth.bisected(lambda size: None if size <= 16 or size == 18 else "no memory", 1)
    assert found["fits"] == [[1, 16], [18, 18]]


def test_the_truth_on_a_card_is_asked_of_fresh_processes(monkeypatch):
    def run_child(kind, workload, size, steps):
        assert (kind, steps) == ("survive", workload.scan_steps)
        return {"step_s": 1.0} if size <= 5 else {"ended": "process ended with 1: out of memory"}

    monkeypatch.setattr(measuring, "run_child", run_child)
    found = measuring.true_sizes(cards.CUDA["resnet50"])
    assert found["fits"] == [[1, 5]]
    assert found["tried"]["6"] == "process ended with 1: out of memory"


# --- the work on a card, small and on the host ---


@pytest.mark.parametrize(("model", "parameters"), [(cards.ResNet50, 25_557_032), (cards.GPT2, 124_439_808)])
def test_the_models_are_the_ones_they_are_named_after(model, parameters):
    with torch.device("meta"):
        assert sum(p.numel() for p in model().parameters()) == parameters


SMALL = {
    "resnet50": replace(
        cards.CUDA["resnet50"], build=lambda: cards.ResNet50((1, 1), 8, 10), sample=(3, 32, 32), device="cpu"
    ),
    "gpt2-small": replace(
        cards.CUDA["gpt2-small"], build=lambda: cards.GPT2(2, 32, 2, 16, 1000), sample=(16,), device="cpu"
    ),
}


@pytest.mark.parametrize("mixed", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SMALL)
def test_the_models_train_in_mixed_precision(name, mixed, unlogged):
    workload = replace(SMALL[name], mixed=mixed)
    model = workload.placed()
    optimizer = workload.optimizer(model)
    before, step = state.taken_down(model, optimizer), workload.step(optimizer)
    for _ in range(workload.scan_steps):
        step(model, 2)
    assert {"weights", "gradients", "optimizer"} <= set(state.changed(before, state.taken_down(model, optimizer)))
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("mixed", "scaled"), [(torch.float16, True), (torch.bfloat16, False)])
def test_a_loss_is_scaled_in_float16_alone(mixed, scaled, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, enabled: asked.append((device, enabled)))
    replace(SMALL["gpt2-small"], mixed=mixed).step(None)
    assert asked == [("cpu", scaled)]


def test_attention_looks_back_alone(unlogged):
    model = cards.GPT2(2, 32, 2, 16, 1000)
    ids = torch.randint(1000, (1, 16))
    changed = ids.clone()
    changed[0, -1] += 1
    outputs = [model.blocks(model.tokens(x) + model.positions.weight) for x in (ids, changed)]
    assert torch.equal(outputs[0][:, :-1], outputs[1][:, :-1])
    assert not torch.equal(outputs[0][:, -1], outputs[1][:, -1])


def test_one_step_serves_all_steps_of_a_job(unlogged):
    """A scaler made anew for each would skip them all."""
    workload = SMALL["gpt2-small"]
    model = workload.placed()
    job = tools.Job(workload, model, workload.optimizer(model))
    assert job.step is job.step
    job.train(2)
    assert job.optimizer.state


def test_the_data_is_where_the_model_is():
    on_meta = replace(cards.CUDA["gpt2-small"], device="meta")
    assert on_meta.inputs(2).device.type == "meta"
    assert on_meta.inputs(2).shape == (2, 1024)
    assert replace(on_meta, build=Plain).placed().first.weight.device.type == "meta"


# --- who is asked ---


def test_steps_are_timed_and_peaks_told(unlogged, monkeypatch):
    limit = replace(limits.LIMITS["cuda"], peak=lambda: {"peak": 7})
    monkeypatch.setitem(limits.LIMITS, "cpu", limit)
    assert child.survive(replace(HOST["bug"], build=Plain), 2, 3) == {"step_s": pytest.approx(0.1, abs=1), "peak": 7}


@pytest.mark.parametrize(("name", "placed"), [("toma", True), ("oomprobe run", False), ("accelerate", False)])
def test_who_builds_the_model_finds_the_card_empty(name, placed, unlogged, monkeypatch):
    monkeypatch.setitem(limits.LIMITS, "meta", replace(limits.LIMITS["cuda"], in_use=lambda: {"left_bytes": 0}))
    monkeypatch.setitem(tools.TOOLS, name, lambda: lambda job: job.model and job.model.first.weight.device.type)
    monkeypatch.setattr(state, "taken_down", lambda model, optimizer: {})
    said = child.tool(replace(cards.CUDA["resnet50"], build=Plain, device="meta"), name)
    assert (said["answer"], said["own_model"]) == ("meta" if placed else None, not placed)


@pytest.mark.parametrize(("name", "left"), [("accelerate", 5), ("toma", 1)])
def test_what_is_left_counts_from_where_the_call_began(name, left, unlogged, monkeypatch):
    """A model of ours that went before the call is no memory that the call gave back."""
    told = iter((96, 101)) if name == "accelerate" else iter((100, 101))
    limit = replace(limits.LIMITS["cuda"], in_use=lambda: {"left_bytes": next(told)})
    monkeypatch.setitem(limits.LIMITS, "cpu", limit)
    monkeypatch.setitem(tools.TOOLS, name, lambda: lambda job: 3)
    assert child.tool(replace(HOST["bug"], build=Plain), name)["left_bytes"] == left


def test_who_is_not_installed_is_said_and_asked_again_once_it_is(monkeypatch, tmp_path):
    monkeypatch.setitem(tools.PACKAGES, "toma", "no-such-package")
    results = {"device": "host", "workloads": {"bug": {"tools": {}, "survived": {}, "truth": {"fits": [[1, 24]]}}}}
    measuring.measure(results, tmp_path / "kept.json", [HOST["bug"]], ["toma"])
    row = json.loads((tmp_path / "kept.json").read_text())["workloads"]["bug"]
    assert row["tools"] == {"toma": {"not_installed": "no-such-package"}}
    assert table.cell(HOST["bug"], row, row["tools"]["toma"]) == "not installed"

    monkeypatch.setitem(tools.PACKAGES, "toma", "torch")
    monkeypatch.setattr(measuring, "run_child", lambda *_, **__: {"answer": None, "error": "asked"})
    measuring.measure(results, tmp_path / "kept.json", [HOST["bug"]], ["toma"])
    assert row != results["workloads"]["bug"]
    assert results["workloads"]["bug"]["tools"]["toma"]["error"] == "asked"


def test_what_cannot_be_built_is_left_out(monkeypatch, tmp_path, capsys):
    workload = replace(HOST["yolo"], needs="no-such-package")
    results = {"workloads": {}}
    measuring.measure(results, tmp_path / "kept.json", [workload], ["oomprobe"])
    assert results == {"workloads": {}}
    assert capsys.readouterr().out == "yolo: left out, no-such-package is not installed\n"


def test_what_the_file_has_is_not_run_again(monkeypatch, tmp_path):
    monkeypatch.setattr(measuring, "run_child", lambda *arguments, **named: pytest.fail(f"ran {arguments}"))
    kept = {"truth": {"fits": []}, "tools": {"oomprobe": {"answer": 3}}, "survived": {"3": {"step_s": 1.0}}}
    measuring.measure({"workloads": {"bug": kept}}, tmp_path / "kept.json", [HOST["bug"]], ["oomprobe"])
    assert not (tmp_path / "kept.json").exists(), "nothing was measured, and versions were written anew"


def test_a_truth_that_was_not_found_in_time_is_looked_for_again(monkeypatch, tmp_path):
    monkeypatch.setattr(measuring, "run_child", lambda *arguments, **named: {"fits": [[1, 24]]})
    kept = {"truth": {"ended": "no answer within 300 s"}, "tools": {"oomprobe": {}}, "survived": {}}
    measuring.measure({"workloads": {"bug": kept}}, tmp_path / "kept.json", [HOST["bug"]], ["oomprobe"])
    assert kept["truth"] == {"fits": [[1, 24]]}


def test_an_interruption_while_the_file_is_written_leaves_it_whole(monkeypatch, tmp_path):
    path = tmp_path / "kept.json"
    measuring.keep({"first": 1}, path)

    def torn(self, text):
        with self.open("w") as file:
            file.write(text[:3])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", torn)
    with pytest.raises(KeyboardInterrupt):
        measuring.keep({"second": 2}, path)
    assert json.loads(path.read_text()) == {"first": 1}


def test_the_commit_is_that_of_the_code(monkeypatch):
    import benchmark_peers

    said = {"rev-parse": "abc1234", "status": ""}
    monkeypatch.setattr(benchmark_peers, "git", lambda verb, *_: said[verb])
    assert benchmark_peers.own_version() == "abc1234"
    said["status"] = " M scripts/peers/tools.py"
    assert benchmark_peers.own_version() == "abc1234+"


def test_the_limit_on_a_card_stands_while_it_is_worked_on(monkeypatch, tmp_path):
    events = []

    class Beside:
        def __init__(self, mib):
            self.mib = mib

        def __enter__(self):
            events.append(f"{self.mib} MiB left")
            return self.mib * MIB

        def __exit__(self, *_):
            events.append("let go")

    def run_child(kind, workload, *arguments, log=None):
        events.append((kind, *arguments))
        return {"answer": 4} if kind == "tool" else {"step_s": 1.0} if arguments[0] <= 4 else {"ended": "died"}

    monkeypatch.setitem(limits.LIMITS, "cuda", replace(limits.LIMITS["cuda"], beside=Beside))
    monkeypatch.setattr(measuring, "run_child", run_child)
    results = {"workloads": {}}
    measuring.measure(results, tmp_path / "kept.json", [cards.CUDA["resnet50"]], ["oomprobe"])
    assert events[0] == "8192 MiB left"
    assert events[-3:] == [("tool", "oomprobe"), ("survive", 4, 50), "let go"]
    assert results["workloads"]["resnet50"]["free_bytes"] == 8192 * MIB


def test_oomprobe_is_asked_in_a_process_of_its_own():
    said = measuring.ask(HOST["mlp"], "oomprobe")
    assert said["error"] is None
    assert said["ran"] == "stepped"
    assert said["changed"] == []
    assert 16 <= said["answer"] <= 64
    assert said["trials"] > 3
    assert 0 < said["in_steps_s"] < said["wall_s"]


def test_a_child_that_dies_says_how():
    ended = measuring.run_child("survive", HOST["bug"], 25, 1)["ended"]
    assert ended == "process ended with 1: ValueError: could not broadcast 24 labels to 25"


def test_a_child_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(measuring, "LONGEST_S", 0.1)
    assert measuring.run_child("survive", HOST["bug"], 1, 1) == {"ended": "no answer within 0.1 s"}


# --- tables, of made-up results ---

MADE_UP = {
    "truth": {"fits": [[1, 100]]},
    "survived": {
        "90": {"step_s": 0.5, "peak_reserved_bytes": 6144 * MIB},
        "130": {"step_s": 0.5},
        "120": {"ended": "process ended with 1: out of memory"},
    },
}


def told(answer=None, **more):
    usual = {"error": None, "wall_s": 12.0, "in_steps_s": 9.0, "changed": [], "left_bytes": 0, "trials": 9}
    return {"answer": answer, "ran": "stepped", **usual, **more}


@pytest.mark.parametrize(
    ("text", "workload", "answer"),
    [
        ("90%", "conv", told(90)),
        ("**120: dies**", "conv", told(120)),
        ("90%, computed", "conv", told(90, ran="no")),
        ("**90%, computed**", "leak", told(90, ran="no")),
        ("90%", "conv", told(90, ran="backward")),
        ("**90%**", "bug", told(90)),
        ("error", "conv", told(error="RuntimeError: no")),
        ("nothing", "conv", told(error=None)),
        ("nothing", "nothing-fits", told(error=None)),
        ("error ✓", "leak", told(error="RuntimeError: memory leak: 50 MiB more after 50 steps")),
        ("RuntimeError", "leak", told(error="RuntimeError: target_w_leak failed")),
        ("130: beyond the data", "100-examples", told(130, ran="no")),
        ("**90%**", "leak", told(90, notes=["batch 90 is slow"])),
        ("90%, told", "leak", told(90, notes=["slow", "leak: each step at batch 90 keeps 1.00 MiB"])),
        ("error ✓", "nothing-fits", told(error="NothingFitsError: batch 1 does not fit on host memory")),
        ("KeyError", "nothing-fits", told(error="KeyError: 'exp_avg'")),
        ("error ✓", "bug", told(error="StepFailedError: the step failed with ValueError: could not broadcast 24")),
        ("RuntimeError", "bug", told(error="RuntimeError: no")),
        ("nothing", "poisoned", told(error=None)),
        ("**hangs**", "conv", {"ended": "no answer within 300 s"}),
        ("**crashes**", "conv", {"ended": "process ended with -11: "}),
        ("-", "conv", {"not_for": "for YOLO models"}),
        ("not installed", "conv", {"not_installed": "toma"}),
    ],
)
def test_a_cell_for_each_outcome(text, workload, answer):
    assert table.cell(cards.ALL[workload], MADE_UP, answer) == text


def test_none_is_right_where_nothing_fits():
    assert table.cell(HOST["nothing-fits"], {**MADE_UP, "truth": {"fits": []}}, told(error=None)) == "nothing ✓"


def test_a_row_whose_truth_is_not_known_says_so():
    results = made_up("host", "conv")
    results["workloads"]["conv"]["truth"] = {"ended": "no answer within 300 s"}
    assert "| a convolutional net | ? | ? | not installed |" in table.compact(results)
    assert "sizes that fit not known, no answer within 300 s" in table.whole(results)


def test_versions_of_earlier_rows_are_told():
    now, before = {"python": "3", "torch": "2"}, {"python": "3", "torch": "1"}
    results = {"versions": before}
    results |= {"versions": now, "versions_before": measuring.measured_before(results, now)}
    assert table.versions(results) == "python 3, torch 2, some rows with torch 1"
    assert measuring.measured_before(results, now) == [before]
    assert measuring.measured_before(results, before) == [now]
    assert measuring.measured_before({}, now) == []


def test_a_cell_where_the_truth_is_not_known():
    assert table.cell(HOST["conv"], {**MADE_UP, "truth": {"ended": "no answer within 300 s"}}, told(90)) == "?"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("75%, 3.0 s", told(90)),
        ("dies, 3.0 s", told(120)),
        ("no answer, 3.0 s", told(error="RuntimeError: no")),
        ("not installed", {"not_installed": "toma"}),
    ],
)
def test_what_an_answer_uses_of_the_budget_and_the_time_beside_its_steps(text, answer):
    assert table.spent(cards.CUDA["resnet50"], MADE_UP, answer) == text


def made_up(device, workload, **more):
    rows = {
        "oomprobe": told(90, left_reserved_bytes=3 * MIB) if device == "cuda" else told(90),
        "toma": {"not_installed": "toma"},
    }
    versions = {"python": "0.0", "torch": "0.0"}
    return {"device": device, "versions": versions, "workloads": {workload: {**MADE_UP, "tools": rows}}, **more}


CARD = made_up("cuda", "resnet50", card={"card": "Made Up 1", "driver": "0.0", "torch": "0.0"})


def test_a_row_has_a_column_for_each_heading():
    for results in (made_up("host", "conv"), CARD):
        [(name, row)] = results["workloads"].items()
        lines = table.detailed(name, row).splitlines()
        details = [line for line in lines if line.startswith(("| oomprobe", "| toma"))]
        assert [line.count("|") for line in details] == [len(table.HEAD) + 1] * 2
    assert "| 75% |" in details[0]
    assert "| 25%, 3.0 s | nothing | 0 MiB, 3 MiB reserved |" in details[0]


def test_totals_by_tool():
    rows = (
        made_up("host", "conv")["workloads"]
        | made_up("host", "leak")["workloads"]
        | made_up("host", "gpt")["workloads"]
    )
    rows["gpt"] = {**MADE_UP, "tools": {"oomprobe": told(120, ran="no", changed=["weights"], left_bytes=5 * MIB)}}
    lines = table.totals({"workloads": rows}).splitlines()
    assert lines[2:] == ["| oomprobe | 2 of 3 | 0 | 2 of 3 | 90% | 9 | 24 | 1 of 3 | 5 MiB |"]


def readme(tmp_path, *results):
    path = tmp_path / "README.md"
    path.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    table.into_readme(path, *results)
    return path.read_text()


def test_without_a_card_the_host_stands_alone_and_says_so(tmp_path):
    text = readme(tmp_path, made_up("host", "conv"))
    assert text.startswith(f"before\n{table.BEGIN}\n| workload |")
    assert text.endswith(f"{table.NO_CARD}\n{table.END}\nafter\n")
    assert "| a convolutional net | 100 | 90% | not installed |" in text
    assert "old" not in text


def test_with_a_card_its_tables_follow(tmp_path):
    text = readme(tmp_path, made_up("host", "conv"), CARD)
    assert table.NO_CARD not in text
    assert "On CUDA: Made Up 1, driver 0.0, torch 0.0." in text
    assert "| ResNet-50 at 224 pixels, AMP | 100 | 90% | not installed |" in text
    assert "| ResNet-50 at 224 pixels, AMP | 100 | 75%, 3.0 s | not installed |" in text


def test_a_readme_without_a_place_is_told(tmp_path):
    (tmp_path / "README.md").write_text("nothing here")
    with pytest.raises(SystemExit, match="no place for the tables"):
        table.into_readme(tmp_path / "README.md", made_up("host", "conv"))


# --- the command ---


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a card")
def test_without_a_card_it_ends_with_4(tmp_path):
    done = benchmark("--device", "cuda", "--out", tmp_path / "none.json")
    assert done.returncode == 4
    assert "benchmark_peers: no CUDA device here" in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "none.json").exists()


def test_a_workload_of_the_other_device_is_refused():
    done = benchmark("--device", "cuda", "--workloads", "conv")
    assert done.returncode == 2
    assert "no workload conv on cuda; there are resnet50, gpt2-small, yolo-640" in done.stderr


def test_kept_results_are_shown(tmp_path):
    (tmp_path / "made_up.json").write_text(json.dumps(CARD))
    done = benchmark("--show", tmp_path / "made_up.json")
    assert done.returncode == 0, done.stderr
    assert "### ResNet-50 at 224 pixels, AMP (`resnet50`): sizes that fit 1 to 100" in done.stdout


def test_names_of_workloads_are_of_one_device_each():
    assert len(cards.ALL) == sum(map(len, cards.BY_DEVICE.values()))
    assert {workload.device for workload in cards.CUDA.values()} == {"cuda"}
    assert all(issubclass(workload.build, Trained) for workload in cards.CUDA.values())
