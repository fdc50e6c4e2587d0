"""What each adapter promises, for all of them: the drivers are in `drivers.py`, what only one promises in its own file."""

import pickle
import random
import weakref
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from helpers import a_result, a_trial
from ledger import Log
from torch.utils.data import DataLoader

import oomprobe

from . import drivers
from .drivers import DRIVERS, OfAccelerate, OfLightning, OfTransformers, OfUltralytics, Watch

pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks' own, about torch and short runs
LOOPS = [OfTransformers, OfLightning]  # their probe runs the framework's own loop
WITH_DATA = [*LOOPS, OfUltralytics]
NAMES = {"ids": lambda value: getattr(value, "__name__", None)}


def made(driver, folder, watch=None, **settings):
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    return driver(folder, Watch() if watch is None else watch, **settings)


# --- the answer ---


@pytest.mark.parametrize("driver", DRIVERS, **NAMES)
def test_the_answer_is_the_largest_size_that_runs(driver, tmp_path):
    watch = Watch(room=5)
    settings = (
        {"gradient_accumulation_steps": 5} if driver is OfTransformers else {}
    )  # keeps the global batch of 20
    one = made(driver, tmp_path, watch, **settings)
    result = one.find(max_batch=8)
    assert (result.batch_size, result.limited_by, result.first_failing_batch_size) == (
        5,
        "memory",
        6,
    )
    assert {5, 6} <= set(watch.trained)
    if driver in LOOPS:  # where the framework reads it
        assert {trial.samples_per_s for trial in result.trials} == {
            None
        }  # a call takes more than one batch
        assert set(one.size) == {5}
        watch.trained.clear()
        one.train()
        assert watch.trained[0] == 5


@pytest.mark.parametrize("driver", WITH_DATA, **NAMES)
def test_no_batch_is_larger_than_the_data_set(driver, tmp_path):
    # Of three examples the last batch of two holds one, which counts as two.
    one = made(driver, tmp_path, examples=3)
    result = one.find(max_batch=None)
    assert (result.batch_size, result.limited_by) == (3, "max_batch")
    assert "the data set limits the batch size: it has 3 examples" in result.notes
    assert not any("last batch" in item for item in result.not_covered)
    one.watch.trained.clear()
    with pytest.raises(oomprobe.InvalidArgumentError, match="3 examples, too few for min_batch=5"):
        one.find(min_batch=5)
    assert one.watch.trained == []


class DropsLast(drivers.WatchedTrainer):
    def get_train_dataloader(self):
        made = super().get_train_dataloader()
        return DataLoader(
            made.dataset, self._train_batch_size, collate_fn=self.data_collator, drop_last=True
        )


@pytest.mark.parametrize(
    ("driver", "settings", "sizes"),
    [
        (OfTransformers, {"max_steps": 30}, [7, 5, 7]),
        (
            OfTransformers,
            {"num_train_epochs": 2, "gradient_accumulation_steps": 3},
            [7, 7, 5, 7, 7],
        ),
        (OfTransformers, {"num_train_epochs": 2, "kind": DropsLast}, [7, 7, 7]),  # by itself
        (OfTransformers, {"num_train_epochs": 2, "dataloader_drop_last": True}, [7, 7]),
        (OfTransformers, {"max_steps": 2}, [7, 7]),
        (
            OfTransformers,
            {"max_steps": 30, "examples": 36},
            [7, 2, 7],
        ),  # batch norm cannot train on one example
        (OfLightning, {}, [7, 5, 7]),
        (OfLightning, {"accumulate_grad_batches": 4}, [7, 7, 7, 5, 7, 7]),
        (OfLightning, {"max_epochs": -1, "max_steps": 6}, [7, 5, 7]),
        (OfLightning, {"max_epochs": -1, "max_steps": 5}, [7, 7]),  # within the first epoch
        (OfLightning, {"limit_train_batches": 3}, [7, 7]),
        (OfLightning, {"drop_last": True}, [7, 7]),
        (OfLightning, {"limit_val_batches": 1.0}, [7, 5, 7, 7]),
        (OfUltralytics, {}, [7, 5]),
        (OfUltralytics, {"examples": 36}, [7, 2]),
    ],
    ids=str,
)
def test_a_smaller_last_batch_runs_if_an_epoch_follows(driver, settings, sizes, tmp_path):
    own = {
        OfTransformers: {"max_steps": -1},
        OfLightning: {"limit_val_batches": 0},
        OfUltralytics: {},
    }[driver]
    one = made(driver, tmp_path, **{"examples": 40, **own, **settings})
    result = one.find(min_batch=7, max_batch=7, write_back=False)
    assert one.watch.trained == sizes * (len(one.watch.trained) // len(sizes))
    assert not any("last batch" in item for item in result.not_covered)


# --- options ---


class Average:
    """Something with a state that is found only in `preserve`."""

    def __init__(self):
        self.value = torch.zeros(1)

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value.copy_(state["value"])


@pytest.mark.parametrize("driver", DRIVERS, **NAMES)
def test_options_are_passed_on(driver, tmp_path):
    average, updated = Average(), Log()
    one, found = made(driver, tmp_path), weakref.ref(average)
    one.watch.also = lambda: updated.append(found().value.add_(1).item())
    options = {
        "min_batch": 2,
        "multiple_of": 2,
        "memory_fraction": 0.5,
        "resolution": 0.3,
        "time_limit_s": 500.0,
    }
    steps = {"steps": 3, "confirm_steps": 5}
    result = one.find(max_batch=5, preserve=[average], write_back=False, **options, **steps)
    assert {name: result.options[name] for name in options} == options
    calls = {name: -(-steps[name] // driver.STEPS_PER_CALL) for name in steps}
    assert {name: result.options[name] for name in steps} == calls  # each call makes some steps
    assert (result.batch_size, len(updated) > 2) == (4, True)
    assert not any("the data set limits" in note for note in result.notes)  # max_batch does
    if driver is not OfAccelerate:  # which trains at the end
        assert average.value.item() == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps": 0}, "steps must be"),
        ({"preserve": 5}, "preserve"),
        ({"batchsize": 4}, "there is no option 'batchsize'"),
        ({"scan_s": -1}, "scan_s must be"),
    ],
    ids=str,
)
@pytest.mark.parametrize("driver", DRIVERS, **NAMES)
def test_wrong_options_are_refused_before_anything_trains(driver, options, said, tmp_path):
    if driver not in LOOPS and "scan_s" in options:
        said = "there is no option 'scan_s'"
    one = made(driver, tmp_path)
    before = one.state()
    with pytest.raises(oomprobe.OomProbeError, match=said) as caught:
        one.find(**options)
    assert isinstance(caught.value, ValueError | TypeError)
    assert (one.watch.trained, one.state()) == ([], before)


# --- training after a probe equals training without one ---


SET_UPS = {
    OfTransformers: {
        "plain": dict,
        "bf16": lambda: {
            "bf16": True, "gradient_accumulation_steps": 3, "gradient_checkpointing": True,
            "train_sampling_strategy": "group_by_length", "neftune_noise_alpha": 5.0,
        },
        "given an optimizer": drivers.given_an_optimizer,
        "given a tokenizer": drivers.given_a_tokenizer,
        "model_init": lambda: {"given": {"model_init": drivers.language_model}},
    },
    OfLightning: {
        "plain": dict,
        "bf16": lambda: {"precision": "bf16-mixed", "accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
        "given loaders": lambda: {"passes_loaders": True, "precision": "64-true"},
        "manual": lambda: {"manual": True},
    },
    OfUltralytics: {
        "plain": dict,
        "partly frozen": lambda: {"prepare": drivers.partly_frozen},
        "of a checkpoint": lambda: {"prepare": lambda model: model.requires_grad_(False).eval()},
    },
    OfAccelerate: {"plain": dict, "scaled": lambda: {"scale": 4.0}},
}  # fmt: skip
ENDINGS = {  # of batch 3, and what the probe raises
    "out of memory": None,
    "bug": Exception,
    "SIGINT": KeyboardInterrupt,
    "SIGTERM": SystemExit,
    "nothing fits": oomprobe.NothingFitsError,
}


def trained(driver, folder, set_up, *, ending=None, is_used=False, **options):
    """Return what training gives after a probe with that ending; without one if it is None."""
    one = made(driver, folder, **SET_UPS[driver][set_up]())
    if is_used:
        one.train()
        torch.manual_seed(7)  # a Trainer seeds only its first training
    error = driver.BUG if ending == "bug" else ENDINGS.get(ending)
    if ending is not None:
        one.watch.ending, one.watch.room = ending, 0 if ending == "nothing fits" else 2
        before = one.state()
        with pytest.raises(error) if error else nullcontext() as caught:
            result = one.find(**{"write_back": False, "max_batch": 4, **options})
        if error is None:
            assert (result.batch_size, result.state_verified) == (2, True)
            assert result.device.startswith("simulated" if "device" in options else "ledger")
        if ending == "bug":
            said = " ".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
            assert driver.NAMED in said
            assert f"comes without oomprobe, {driver.ALONE}" in said
        if driver is not OfAccelerate or error is not None:  # it has trained
            assert one.state() == before
        one.watch.room = 10**9
    if ending is None or error is not None:
        one.without_a_probe(2)
    return one.train(), torch.rand(1).item(), random.random(), np.random.rand()


CASES = [(driver, set_up, "out of memory", {}) for driver in DRIVERS for set_up in SET_UPS[driver]]
CASES += [
    (driver, "plain", ending, {})
    for driver in DRIVERS
    for ending, error in ENDINGS.items()
    if error
]
CASES += [
    (driver, "plain", "out of memory", {"is_used": True}) for driver in (*LOOPS, OfAccelerate)
]
CASES += [
    (driver, "plain", "out of memory", {"device": "sim:300MiB", "max_batch": 2}) for driver in LOOPS
]


@pytest.mark.parametrize(("driver", "set_up", "ending", "options"), CASES, **NAMES)
def test_training_after_a_probe_equals_training_without(driver, set_up, ending, options, tmp_path):
    is_used = {name: value for name, value in options.items() if name == "is_used"}
    assert trained(driver, tmp_path, set_up, ending=ending, **options) == trained(
        driver, tmp_path, set_up, **is_used
    )


# --- callbacks ---


def listening(driver):
    """Return a callback of the framework that records each hook that is called."""
    hooks = [name for name in dir(driver.kind) if name.startswith("on_")]
    heard = Log()
    told = {hook: lambda *_, hook=hook, **__: heard.append(hook) for hook in hooks}
    return heard, type("Listening", (driver.kind,), told)()


@pytest.mark.parametrize("driver", LOOPS, **NAMES)
def test_trials_call_no_callback_and_write_nothing(driver, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    saves = (
        {"save_strategy": "steps", "save_steps": 1, "disable_tqdm": False}
        if driver is OfTransformers
        else {}
    )
    one, (heard, callback) = made(driver, tmp_path, **saves), listening(driver)
    one.add(callback)
    one.add(driver.callback(PROBE))
    heard.clear()
    before = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    result = one.find(max_batch=1, write_back=False)
    assert (
        [item for item in result.not_covered if "callbacks" in item]
        == [
            "callbacks, which trials do not call: Listening"  # neither what only shows progress nor the monitor's
        ]
    )
    assert (heard, sorted(tmp_path.rglob("*")), capsys.readouterr()) == ([], before, ("", ""))
    one.train()
    assert len(heard) > 9


# --- the monitor of the real run ---


PROBE = a_result(trials=(a_trial(4, peak_allocated_bytes=100, peak_reserved_bytes=200),))


class Noted(oomprobe.PeakMonitor):
    """Notes what the callback tells it."""

    def __init__(self):
        super().__init__(PROBE)
        self.heard = Log()

    def seen(self, phase):
        self.heard.append(f"{self.steps}{phase[0]}")
        super().seen(phase)


EVALUATES = {
    "gradient_accumulation_steps": 2, "max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4,
    "save_strategy": "steps", "save_steps": 4, "given": {"eval_dataset": drivers.Sentences(8)},
}  # fmt: skip


@pytest.mark.parametrize(
    ("driver", "settings", "heard"),
    [
        (
            OfTransformers,
            EVALUATES,
            "1t 2t 2e 2e 2e 3t 4t 4e 4e 4e 4s",
        ),  # trains, evaluates, saves a checkpoint
        (
            OfLightning,
            {"manual": True, "max_steps": 4, "num_sanity_val_steps": 1},
            "0e 1t 2t 3t 4t 4e 4e 4e",
        ),
        (
            OfLightning,
            {"accumulate_grad_batches": 2, "max_steps": 2, "num_sanity_val_steps": 1},
            "0e 0t 1t 1t 2t 2e 2e 2e",
        ),
    ],
    ids=["Trainer", "manual", "automatic"],
)
def test_the_monitors_callback_tells_each_phase(driver, settings, heard, tmp_path):
    one, watch = made(driver, tmp_path, examples=16, **settings), driver.callback(PROBE)
    watch.monitor = Noted()
    one.add(watch)
    one.train()
    assert " ".join(watch.monitor.heard) == heard
    assert (watch.monitor.batch_size, watch.monitor.probed_bytes) == (4, 100)


@pytest.mark.parametrize(("asked", "expected"), [(None, 2), (4, 4)])
@pytest.mark.parametrize("driver", LOOPS, **NAMES)
def test_the_monitors_callback_compares_at_the_size_that_trains(driver, asked, expected, tmp_path):
    settings = {"per_device_train_batch_size": 2} if driver is OfTransformers else {}
    one, watch = (
        made(driver, tmp_path, max_steps=1, **settings),
        driver.callback(PROBE, batch_size=asked),
    )
    if driver is OfLightning:
        one.owners[1].batch_size = 2
    monitor = watch.monitor
    one.add(watch)
    one.train()
    assert watch.monitor is monitor
    assert (monitor.batch_size, monitor.steps) == (expected, 1)
    assert (monitor.probed_bytes is None) == (expected == 2)  # of the probe's one size


@pytest.mark.parametrize("driver", LOOPS, **NAMES)
def test_the_monitors_callback_is_the_frameworks_and_pickles(driver, tmp_path):
    path = tmp_path / "probe.json"
    PROBE.to_json(path)
    for watch in (
        driver.callback(path, 4, False),
        pickle.loads(pickle.dumps(driver.callback(path, 4, False))),
    ):
        assert isinstance(watch, driver.kind)
        assert isinstance(watch, driver.callback)
        assert (type(watch).__name__, watch.monitor.batch_size, watch.monitor.ok) == (
            "PeakMonitorCallback",
            4,
            True,
        )
