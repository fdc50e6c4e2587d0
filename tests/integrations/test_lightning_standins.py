"""Modules that use the loggers and callbacks of their Trainer are probed, and nothing of it is seen afterwards."""

import gc
import os
import tempfile
import weakref
from pathlib import Path

import pytest
import torch

import oomprobe
from integrations.lightning_models import FRAMEWORK_WARNINGS, MIB, Data, LedgerDevice, Module, OwnLoaders, pl
from oomprobe.integrations.lightning import find_max_batch

pytestmark = [pytest.mark.filterwarnings(line) for line in (*FRAMEWORK_WARNINGS, "ignore:.*`tensorboardX`")]
SEEN: list[object] = []  # no attribute, which a probe would put back


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """In an empty folder, beside an empty one for temporary files."""
    (tmp_path / "here").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    SEEN.clear()
    yield
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "here", tmp_path / "temporary"]


class Kept(pl.Callback):
    """A callback that a module looks for."""

    def __init__(self):
        self.scale, self.seen = 2.0, []

    def note(self, value):
        self.seen.append(value)
        self.last = value
        return value * self.scale

    def on_train_start(self, *_):
        raise AssertionError("a hook was called")

    on_train_batch_end = on_fit_start = setup = on_train_start


class ByRun(pl.loggers.Logger):
    """Starts a run when it is asked anything, as loggers of services do."""

    def _start(self):
        raise AssertionError("a run was started")

    name = version = experiment = save_dir = log_dir = property(_start)
    log_metrics = log_hyperparams = finalize = save = _start


def trainer_of(*, logger=True, callbacks=(), **settings):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=logger, callbacks=list(callbacks), **{**quiet, **settings}
    )


def probed(use, trainer=None, module=OwnLoaders):
    class Uses(module):
        def training_step(self, batch, batch_idx):
            use(self)
            return super().training_step(batch, batch_idx)

    device = LedgerDevice(9 * MIB)
    trainer = trainer or trainer_of()
    return find_max_batch(trainer, Uses(device, examples=64), device=device, progress="off")


def writes_beside_its_logs(module):
    for folder in (
        module.logger.log_dir,
        module.logger.save_dir,
        module.trainer.log_dir,
        module.trainer.default_root_dir,
    ):
        with open(os.path.join(folder, "image.png"), "a") as file:
            file.write("x")


def logs_with_all_there_is(module):
    module.logger.log_metrics({"a": 1}, step=module.global_step)
    module.logger.log_image(key="a", images=[torch.zeros(1)])
    module.logger.experiment.add_image("a", torch.zeros(1))
    module.logger.experiment.log({"a": 1})
    module.log("loss", 1.0, logger=True)


def checkpoints(module):
    found = module.trainer.checkpoint_callback
    assert isinstance(found, pl.callbacks.ModelCheckpoint)
    if module.global_step == 0:
        SEEN.append(found.best_model_path)
    Path(found.dirpath, "mine").write_text("x")
    found.best_model_path = "mine"
    module.trainer.save_checkpoint("now.ckpt")


@pytest.mark.parametrize("use", [writes_beside_its_logs, logs_with_all_there_is, checkpoints])
def test_what_a_module_does_with_loggers_and_checkpoints_is_without_effect(use):
    trainer = trainer_of(callbacks=[Kept()])
    before = [dict(vars(one)) for one in (*trainer.loggers, *trainer.callbacks)]
    assert probed(use, trainer).batch_size == 8
    assert [vars(one) for one in (*trainer.loggers, *trainer.callbacks)] == before
    assert set(SEEN) <= {""}  # each fit begins with the user's


def test_a_logger_of_the_users_is_asked_nothing():
    def looks(module):
        SEEN.append((isinstance(module.logger, ByRun), len(module.trainer.loggers)))
        logs_with_all_there_is(module)

    assert probed(looks, trainer_of(logger=[ByRun(), pl.loggers.CSVLogger(".")])).batch_size == 8
    assert set(SEEN) == {(False, 2)}


def test_without_a_logger_there_is_none():
    probed(lambda module: SEEN.append(module.logger), trainer_of(logger=False, enable_checkpointing=False))
    assert set(SEEN) == {None}


def test_a_callback_is_there_to_look_at_and_is_not_called():
    def finds(module):
        [found] = [one for one in module.trainer.callbacks if isinstance(one, Kept)]
        SEEN.append((id(found), found.note(3), len(found.seen)))

    trainer = trainer_of(callbacks=[Kept()])  # in no variable of this function that the step could be seen to reach
    result = probed(finds, trainer)
    own = trainer.callbacks[0]
    assert result.batch_size == 8
    assert (own.seen, hasattr(own, "last"), hasattr(own, "log")) == ([], False, False)
    assert {scaled for _, scaled, _ in SEEN} == {6.0}
    assert max(count for _, _, count in SEEN) <= 2  # each fit begins with the user's
    assert id(own) not in {one for one, _, _ in SEEN}
    assert any("Kept" in item for item in result.not_covered)


def test_what_a_module_leaves_in_a_callback_ends_with_the_fit():
    def leaves(module):
        [found] = [one for one in module.trainer.callbacks if isinstance(one, Kept)]
        if module.global_step == 0:
            assert all(one() in (None, found) for one in SEEN)
        SEEN.append(weakref.ref(found))

    gc.disable()
    try:
        probed(leaves, trainer_of(callbacks=[Kept()]))
    finally:
        gc.enable()


def test_callbacks_that_the_module_configures_are_there_too_and_do_not_end_a_trial():
    class Configures(OwnLoaders):
        def configure_callbacks(self):
            return [Kept(), pl.callbacks.LambdaCallback(on_train_start=Kept.on_train_start)]

    def finds(module):
        SEEN.extend(type(one).__name__ for one in module.trainer.callbacks)

    result = probed(finds, module=Configures)
    assert {"Kept", "LambdaCallback"} <= set(SEEN)
    assert any("Kept" in item for item in result.not_covered)


def test_training_is_not_resumed_from_a_checkpoint_of_its_last_exception(tmp_path):
    before = trainer_of(logger=False, enable_checkpointing=False, max_steps=3)
    before.fit(OwnLoaders(examples=64))
    on_exception = pl.callbacks.OnExceptionCheckpoint(tmp_path)
    before.save_checkpoint(on_exception.ckpt_path)
    found = probed(lambda module: SEEN.append(module.global_step), trainer_of(callbacks=[on_exception]))
    assert (found.batch_size, set(SEEN)) == (8, {0, 1})
    Path(on_exception.ckpt_path).unlink()


def test_a_bug_is_told_with_what_to_type_and_what_a_trial_lacks():
    with pytest.raises(oomprobe.StepFailedError) as caught:
        probed(lambda module: module.nothing, trainer_of(callbacks=[Kept()], enable_checkpointing=False))
    told = (
        "run trainer.fit with batch_size = 1. In trials callbacks (Kept) are not called, loggers are Lightning's Dummy"
    )
    assert told in str(caught.value)
    assert "step_fn" not in str(caught.value)


def test_setup_finds_them_too():
    class Sets(Data):
        def setup(self, stage):
            super().setup(stage)
            SEEN.append((self.trainer.logger.log_dir, self.trainer.checkpoint_callback.dirpath))

    device = LedgerDevice(9 * MIB)
    assert find_max_batch(trainer_of(), Module(device), Sets(), device=device, progress="off").batch_size == 8
    assert all(isinstance(path, str) for path in SEEN[0])
