"""Results, notes and errors made from trials written by hand."""

import dataclasses
import types
from functools import reduce

import pytest
from helpers import a_trial, same_as_golden

from oomprobe.ground import allocator_settings
from oomprobe.probing import neighbours, summary
from oomprobe.probing.session import Session
from oomprobe.records.notes import Note, NoteKind, Notes, remark
from oomprobe.records.options import Options
from oomprobe.records.patience import Patience
from oomprobe.records.trials import DeviceInfo, Outcome, Phase, RunnerInfo, Verdict
from oomprobe.results.progress import Reporter
from oomprobe.rules.diagnosis import Calls
from oomprobe.rules.search import Found

MIB = 2**20


def trial(batch_size, passed=True, **fields):
    verdict = Verdict.FITS if passed else Verdict.OOM
    return dataclasses.replace(a_trial(batch_size, verdict), **fields)


def bench(*trials, on_host=True, step_names=("step",), **options):
    device = DeviceInfo(on_host=on_host, name="a device", total_bytes=2**30, torch_device="cpu")
    facts = RunnerInfo(device=device, step_names=step_names, threads=1)
    runner = types.SimpleNamespace(facts=facts)
    clock = types.SimpleNamespace(elapsed_s=1.0, patience=Patience())
    session = Session(runner, Options(**options), Reporter(), clock, list(trials))
    session.budget.total_bytes, session.budget.available_bytes, session.state_verified = (
        90 * MIB,
        100 * MIB,
        True,
    )
    return session


def not_covered(*step_names):
    return summary.result_of(
        bench(trial(1), step_names=step_names), Found(batch_size=1)
    ).not_covered


@pytest.mark.parametrize(
    ("names", "covered"),
    [
        ("eval eval_step Val2 val-epoch validation my_test", True),
        ("interval retrieval latest contest valley", False),
    ],
)
def test_a_step_covers_evaluation_if_its_name_says_so(names, covered):
    for name in names.split():
        listed = [line.split()[0] for line in not_covered("train", name)]
        assert listed == ["evaluation"] * (not covered) + [
            "saving",
            "longest",
            "smaller",
            "other",
            "data",
            "state",
        ]


def test_what_comes_late_is_not_covered_unless_a_step_is_named_so():
    def told(*names):
        items = [item for item in not_covered(*names) if "come late" in item]
        return "".join(items).partition(", which")[0]

    assert told("") == "saving a checkpoint, the last evaluation, resuming from a checkpoint"
    assert told("train", "eval") == "saving a checkpoint, resuming from a checkpoint"
    assert told("train", "evaluate", "save_and_resume") == ""


# --- all that is said, in scenarios ---


def took(starting_s):
    return Calls(served_bytes=0, blocks=0, starting_s=starting_s, call_s=0.1)


def failed(verdict=Verdict.OOM, size=9, **fields):
    return trial(size, passed=False, verdict=verdict, **fields)


AT_NINE, UPPER = {"deciding": 9}, {"peak_reserved_bytes": 60 * MIB, "peak_upper_bytes": 95 * MIB}
SIMULATED, ON_CUDA, AS_COMMAND = (
    {"is_simulated": True},
    {"on_host": False, "torch_device": "cuda:0"},
    {"environment": {"command": "a"}},
)
COMPILED = Notes([remark("first"), Note(text="compiled", kind=NoteKind.COMPILES)])
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
UNPREDICTED = Outcome(trial=trial(8), unpredicted="it draws")


def took_mib(allocated, reserved):
    return {"peak_allocated_bytes": allocated * MIB, "peak_reserved_bytes": reserved * MIB}


def leaking(**fields):
    return trial(8, phase=Phase.CONFIRM, step_leaked_bytes=MIB, **fields)


GAPS = {
    "trials": [trial(8, **took_mib(60, 70)), failed(**took_mib(62, 80))],
    "device": ON_CUDA,
    "found": AT_NINE,
}
SCENARIOS = {
    "nothing told": {},
    "a size limit": {"trials": [trial(8), failed(Verdict.SIZE_LIMIT)], "found": AT_NINE},
    "poisoned": {"trials": [trial(8), failed(Verdict.POISONED, limiting_rank=1)], "found": AT_NINE},
    "host memory": {"trials": [trial(8), failed(Verdict.HOST_OOM, step_name="eval")], "found": AT_NINE},
    "memory, after others": {"trials": [trial(9), failed(), trial(8, step_name="train")], "found": AT_NINE},
    "it splits": {"told": {"splits": True}},
    "no time to grow": {"told": {"has_time_to_grow": False}},
    "no time to grow, and no need": {"told": {"has_time_to_grow": False}, "max_batch": 8},
    "a larger limit": {"found": {"limit": 12, "first_failing": 13}},
    "a failure at the limit": {"trials": [trial(8), failed(size=12), failed(size=14)], "found": {"limit": 12, "first_failing": 12}},
    "failures below and above": {
        "trials": [failed(size=4), trial(8), failed(size=16, phase=Phase.BISECT), failed(size=32)], "found": {"limit": 8, "first_failing": 4},
    },
    "a failure that bisecting met": {"trials": [trial(8), failed(size=16, phase=Phase.BISECT)], "found": {"limit": 8, "first_failing": 4}},
    "a failure that did not last": {"trials": [trial(8), failed(size=32)], "found": {"limit": 8, "first_failing": 4, "transient": (32,)}},
    "confirmed": {"told": {"program.confirmed": 50}},
    "confirmed until settled": {"trials": [trial(8, settled_after=7)], "told": {"program.confirmed": 7}},
    "two steps": {"told": {"program.confirmed": 1}, "facts": {"step_names": ("train", "eval")}},
    "a command": {"told": {"program.confirmed": 5}, "facts": AS_COMMAND},
    "compiled": {"told": {"notes": COMPILED, "calls": {4: took(2.0), 8: took(3.4), 16: took(0.0)}}},
    "took long, not compiled": {"told": {"calls": {4: took(2.0)}}},
    "little data": {"facts": {"max_batch": 8}, "max_batch": 8},
    "more data": {"facts": {"max_batch": 9}, "max_batch": 8},
    "enough data": {"trials": [trial(8), failed()], "found": AT_NINE, "facts": {"max_batch": 8}, "max_batch": 8},
    "transient": {"found": {"transient": (4, 8)}},
    "unconfirmed": {"found": {"unconfirmed": (12, 9)}},
    "simulated": {"device": SIMULATED},
    "simulated, no range": {"trials": [trial(8, **UPPER | {"peak_upper_bytes": 60 * MIB})], "device": SIMULATED},
    "simulated, within the budget": {"trials": [trial(8, **UPPER | {"peak_upper_bytes": 89 * MIB})], "device": SIMULATED},
    "simulated, at the budget": {"trials": [trial(8, **UPPER | {"peak_upper_bytes": 90 * MIB})], "device": SIMULATED},
    "simulated, over the budget": {
        "trials": [trial(2), trial(4, peak_upper_bytes=89 * MIB), failed(size=6), trial(7, peak_upper_bytes=90 * MIB), trial(8, **UPPER)],
        "device": SIMULATED,
    },
    "unpredicted": {"device": SIMULATED, "told": {"outcome": UNPREDICTED, "in_steps_s": 12.0}},
    "left behind": {"trials": [trial(2, leaked_bytes=MIB), trial(4, leaked_bytes=3 * MIB), trial(8, leaked_bytes=2 * MIB)]},
    "kept by each step": {
        "trials": [trial(8, leaked_bytes=9 * MIB, step_leaked_bytes=MIB)], "told": {"held_by_step": ". The code held a list"},
    },
    "kept by gradients": {"trials": [trial(8, step_leaked_bytes=3 * MIB)], "told": {"gradients_hold_graphs": True}},
    "kept by each step, a larger size ran": {"trials": [leaking(peak_reserved_bytes=36 * MIB), trial(9)]},
    "kept by each step, a larger size failed": {"trials": [leaking(peak_reserved_bytes=36 * MIB), failed()]},
    "kept by each step, beside the plan's trial": {
        "trials": [leaking(peak_reserved_bytes=90 * MIB), trial(8, phase=Phase.CONFIRM, accumulation_steps=4)],
    },
    "kept by each step, reserved unknown": {"trials": [leaking(peak_allocated_bytes=36 * MIB)]},
    "pressed": {"trials": [trial(8, alloc_retries=3, steps=3)]},
    "pressed on half of its calls": {"trials": [trial(8, alloc_retries=3, steps=6)]},
    "pressed once": {"trials": [trial(8, alloc_retries=1, steps=1)]},
    "hardly pressed": {"trials": [trial(8, alloc_retries=2, steps=6)]},
    "pressed, set already": {"trials": [trial(8, alloc_retries=3, steps=3)], "settings": EXPANDABLE},
    "crowded": {"device": ON_CUDA, "told": {"neighbours.held_bytes": [3 * 2**30]}},
    "crowded, and shrank": {"device": ON_CUDA, "told": {"neighbours.held_bytes": [3 * 2**30, 2**30]}},
    "not crowded, and grew": {"device": ON_CUDA, "told": {"neighbours.held_bytes": [2 * 2**30, 0, 2 * 2**30 + MIB]}},
    "on the host": {"told": {"neighbours.held_bytes": [3 * 2**30]}},
    "contaminated": {"told": {"neighbours.notes": Notes([remark("others")]), "neighbours.contaminated": True}},
    "not exact": {"trials": [trial(8), failed(size=13)], "found": {"deciding": 13}, "multiple_of": 4},
    "exact": {"trials": [trial(8), failed(size=12)], "found": {"deciding": 12}, "multiple_of": 4},
    "gaps of the failure": GAPS | {"trials": [trial(8, **took_mib(66, 70)), failed(**took_mib(62, 80))]},
    "gaps of the answer": GAPS,
    "gaps, expandable": {**GAPS, "settings": EXPANDABLE},
    "gaps of another allocator": {**GAPS, "settings": {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}},
    "gaps, where memory does not limit": {"trials": [trial(8, **took_mib(60, 70))], "device": ON_CUDA},
    "small gaps": GAPS | {"trials": [trial(8, **took_mib(66, 70)), failed(**took_mib(75, 80))]},
    "gaps of a command": {
        "trials": [trial(8, peak_allocated_bytes=MIB, peak_reserved_bytes=2 * MIB), failed()],
        "device": ON_CUDA, "facts": AS_COMMAND, "found": AT_NINE,
    },
    "another torch": {"untested": "torch 9.9 is not tested"},
    "another torch, of a command": {"untested": "torch 9.9 is not tested", "facts": {"environment": {"torch": "9.9"}}},
    "as built": {"device": ON_CUDA, "told": {"as_built.needs_emptying": True}},
    "another device": {"facts": {"environment": {"device": "cuda:3"}}},
    "all is covered elsewhere": {"facts": {"not_covered": ("this", "that")}},
    "ranks in processes": {"facts": {"world_size": 2, "replaceable": True}},
    "one rank in a process": {"facts": {"replaceable": True}, "device": {"not_covered": ("kernels",)}},
    "the largest examples": {"told": {"notes": Notes([Note(text="largest", kind=NoteKind.LARGEST_EXAMPLES)])}},
    "a line": {
        "trials": [trial(n, peak_allocated_bytes=n * MIB) for n in (2, 4, 8)]
        + [trial(8, peak_allocated_bytes=MIB, accumulation_steps=2), failed(peak_allocated_bytes=MIB), trial(3), trial(8)],
    },
}  # fmt: skip


def session_of(*, facts=None, device=None, told=None, trials=(), **options):
    session = bench(*trials, **options)
    info = dataclasses.replace(session.runner.facts.device, **(device or {}))
    session.runner.facts = dataclasses.replace(session.runner.facts, device=info, **(facts or {}))
    for path, value in (told or {}).items():
        *owners, name = path.split(".")
        setattr(reduce(getattr, owners, session), name, value)
    return session


def said(*, found=None, trials=(), **rest):
    """Yield all that a result says of a session, in lines; the golden file has those that are not usual."""
    told = summary.result_of(
        session_of(trials=trials or [trial(8)], **rest), Found(**{"batch_size": 8, **(found or {})})
    )
    limit = (
        told.limit_batch_size,
        told.first_failing_batch_size,
        told.limited_by,
        told.limiting_step,
        told.limiting_rank,
    )
    yield f"  limit {limit}; predicted {told.fit and told.fit.predicted_max_batch}, {[*told.estimates.values()]}"
    yield f"  on {told.environment['device']}, after {told.environment.get('after')}"
    yield from (f"  {told.note_kinds.get(note, 'note')}: {note}" for note in told.notes)
    yield f"  sizes noted: {told.noted_sizes}"
    yield f"  not covered: {[item.partition(' ')[0] for item in told.not_covered]}"


UNFIT = {
    "the smallest": {"trials": [failed(size=1, step_name="eval", where="forward")]},
    "one size of several steps": {"trials": [failed(size=2), failed(Verdict.HOST_OOM, size=2, error="text")], "min_batch": 2, "max_batch": 2},
    "under the budget": {"trials": [failed(size=4, cap_bytes=90 * MIB), trial(2)], "min_batch": 4},
    "over the budget": {"trials": [failed(size=1, cap_bytes=90 * MIB + 1)]},
    "over the budget, of a command": {
        "trials": [failed(size=1, cap_bytes=91 * MIB)], "facts": {"grows_capped": True, "runs_plans": False},
    },
    "without a margin": {"trials": [failed(size=1, cap_bytes=90 * MIB)], "memory_fraction": 1.0},
    "beside others": {"trials": [failed(size=1)], "device": ON_CUDA},
}  # fmt: skip


def test_what_is_said_equals_its_golden_file(monkeypatch):
    monkeypatch.setattr(neighbours, "processes_on", lambda device: f"pid 7 on {device}")
    lines, usual = [], []
    for name, scenario in SCENARIOS.items():
        told = {"settings": {}, "untested": None, **scenario}
        settings, untested = told.pop("settings"), told.pop("untested")
        for variable in allocator_settings.VARIABLES:
            monkeypatch.delenv(variable, raising=False)
        for variable, value in settings.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setattr(summary, "untested_note", lambda untested=untested: untested)
        lines += [f"{name}:", *(line for line in said(**told) if line not in usual)]
        usual = usual or [*said(**told)]
    for name, scenario in UNFIT.items():
        lines += [
            f"nothing fits, {name}:",
            *f"{summary.nothing_fits(session_of(**scenario))}".split("\n"),
        ]
    same_as_golden("\n".join(lines) + "\n", "summaries.txt")
