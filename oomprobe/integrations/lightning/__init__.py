"""`find_max_batch` for Lightning: a Trainer, a LightningModule, and its data, as they are before ``trainer.fit``.

Each trial is Lightning's own fit, of a Trainer made like the user's and heard of by nobody, for two optimizer steps.
"""

from __future__ import annotations

import inspect
import tempfile
from dataclasses import replace
from typing import Any

import torch

import oomprobe
from oomprobe.devices import Device, choose_device, replay_of
from oomprobe.errors import Caller, DeviceLostError, InvalidArgumentError
from oomprobe.integrations.framework import LOOP_STEPS, check_flag, framework, loops_of, refuse_several, untimed
from oomprobe.integrations.generators import generators_kept
from oomprobe.integrations.lightning.batch_size import BatchSize
from oomprobe.integrations.lightning.examples import Examples
from oomprobe.integrations.lightning.kept import on_host, quiet, undone
from oomprobe.integrations.lightning.loaders import EVAL, TRAIN, sources_of
from oomprobe.integrations.lightning.loop import MICRO_BATCHES, Callbacks, Loop, trial_arguments
from oomprobe.options import Options, Step, check_seconds
from oomprobe.result import ProbeResult

MINIMUM = "2.5"
LONGEST = "longest sequence"  # how the core says that it does not know which examples a step makes batches of


def find_max_batch(
    trainer: Any,
    module: Any,
    datamodule: Any = None,
    *,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    batch_size_name: str = "batch_size",
    write_back: bool = True,
    scan_s: float = 30.0,
    **options: Any,
) -> ProbeResult:
    """Find the largest batch size that this training fits with, by running it; called before ``trainer.fit``.

    Every trial is `Trainer.fit` of a Trainer with the same accelerator, precision plugin, gradient clipping and
    accumulation, on batches of the largest examples. Where the module validates, a second step trains once and validates
    beside the optimizer state which that leaves. ``prepare_data`` and ``setup`` run once, before the first trial, and
    ``teardown`` once after the last.

    In place of loggers the module finds Lightning's own `DummyLogger`, as with fast_dev_run, and in place of callbacks others
    of their classes, whose hooks are not called: nothing is logged and no checkpoint written, and what the module writes
    into ``log_dir`` goes when the probe ends. What it writes elsewhere is written in each trial. What you have put on the
    Trainer, or made in a subclass of it, is not on that of a trial.

    Afterwards the module, the data module and the random number generators, also those in attributes of the two, of data
    sets and of collate functions, are as before, so that training gives the same losses. Not given back: what the module
    keeps in plain dicts and objects and changes in place (an average of the weights; pass what has ``state_dict`` in
    `preserve`), and where a stream stood.

    Args:
        trainer: The ``Trainer`` that will train: on one device. It is asked for its settings and never run.
        module: A ``LightningModule``, maybe compiled.
        datamodule: A ``LightningDataModule``; None: the loaders are the module's own, or handed in. Train loaders are taken
            in its place, as by ``trainer.fit``.
        train_dataloaders: Data loaders instead, as for ``trainer.fit``. They are made again at each size, from their
            data set and collate function, and keep none of a batch sampler.
        val_dataloaders: The same for validation; they keep their batch size.
        batch_size_name: Attribute of the module, the data module or the hyperparameters of one, that
            ``train_dataloader()`` reads. Not used for loaders that are handed in.
        write_back: Set that attribute to the answer, everywhere where Lightning's own finder would.
        scan_s: Seconds to look for the largest examples of each data set; at least 0.
        options: Those of `oomprobe.find_max_batch`. `device` is by default where the Trainer trains, `max_batch` at most
            the number of examples.

    Returns:
        The answer; one step of its trials is two optimizer steps.

    Raises:
        FrameworkError: Lightning is not installed or too old.
        InvalidArgumentError: the Trainer, the loaders or an option cannot be probed; nothing was run.
        UnreliableError: the loaders did not give batches of the size asked for, or a fit did not train.
        OomProbeError: as for `oomprobe.find_max_batch`.

    Example::

        result = find_max_batch(trainer, module, datamodule, memory_fraction=0.9)
        trainer.fit(module, datamodule=datamodule)  # at result.batch_size
    """
    inspect.signature(oomprobe.find_max_batch).bind(None, None, **options)  # its own TypeError for what it lacks
    check_seconds("scan_s", scan_s)
    check_flag("write_back", write_back)
    pl = _package_of(trainer)
    own = getattr(module, "_orig_mod", module)  # where torch.compile keeps the module
    if not isinstance(own, pl.LightningModule):
        raise InvalidArgumentError(
            f"module must be a LightningModule of {pl.__name__}, as the Trainer is, not {type(own).__name__}"
        )
    _check_trainer(pl, trainer)
    datamodule, sources = sources_of(pl, trainer, own, datamodule, train_dataloaders, val_dataloaders)
    micro = MICRO_BATCHES if options.get("global_batch") is not None or trainer.accumulate_grad_batches > 1 else 1
    device = _device(trainer, options.pop("device", None))
    # A precision plugin may have a GradScaler, which trials share.
    others = [one for one in (datamodule, trainer.precision_plugin) if one is not None]
    with (
        quiet(),
        on_host(own),
        undone(own, others, options.get("preserve", ()), device.torch_device.type),
        tempfile.TemporaryDirectory(prefix="oomprobe-", ignore_cleanup_errors=True) as folder,
        generators_kept([*own.modules(), datamodule]) as generators,
    ):
        batch_size = BatchSize(batch_size_name, own, datamodule)  # where asking for hyperparameters leaves none
        if sources[TRAIN].holder is not None:
            batch_size.check()
        micro = micro if own.automatic_optimization else 1  # with manual optimization it is the module's own business
        loop = Loop(
            pl=pl,
            module=module,
            own=own,
            datamodule=datamodule,
            arguments=trial_arguments(pl, trainer, micro, folder),
            callbacks=Callbacks(pl, trainer, folder),
            micro=micro,
            batch_size=batch_size,
            sources=sources,
            generators=generators,
        )
        result = _probe(loop, device, options, scan_s)
    if write_back and sources[TRAIN].holder is not None:
        batch_size.write(result.batch_size)
    return _told(result, loop)


def _package_of(trainer: object) -> Any:
    """One of two packages, with the same classes under different names."""
    roots = {kind.__module__.partition(".")[0] for kind in type(trainer).__mro__}
    name = "pytorch_lightning" if "pytorch_lightning" in roots else "lightning.pytorch"
    pl = framework(name, minimum=MINIMUM, extra="lightning")
    if not isinstance(trainer, pl.Trainer):
        raise InvalidArgumentError(f"trainer must be a {name}.Trainer, not {type(trainer).__name__}")
    return pl


def _check_trainer(pl: Any, trainer: Any) -> None:
    """Refuse what trains on several ranks, or not at all."""
    strategy = type(trainer.strategy).__name__
    refuse_several(f"Trainer(strategy={strategy})", trainer.world_size)
    if not isinstance(trainer.strategy, pl.strategies.SingleDeviceStrategy):
        raise InvalidArgumentError(
            f"Trainer(strategy={strategy}) adds buffers of its own even on one rank, which would not be part of the "
            "trials. Probe with a Trainer(devices=1, strategy='auto'), and keep room for what the strategy adds (DDP: "
            "buckets as large as the gradients), by a smaller memory_fraction"
        )
    if trainer.fast_dev_run:
        raise InvalidArgumentError(
            "Trainer(fast_dev_run=...) runs a batch or so to look for bugs, and has no batch size to find: remove it"
        )
    if trainer.limit_train_batches == 0:
        raise InvalidArgumentError("Trainer(limit_train_batches=0) does not train: there is nothing to probe")


def _probe(loop: Loop, device: Device, options: dict[str, Any], scan_s: float) -> ProbeResult:
    limits = {name: options[name] for name in ("min_batch", "multiple_of", "max_batch") if name in options}
    first = Options(**limits).sizes.first
    for name, contracted in (("steps", 2), ("confirm_steps", 5)):
        options[name] = loops_of(name, options.get(name, contracted))
    examples = Examples(loop, first, scan_s)

    def train(model: object, batch_size: int) -> None:
        loop.train(batch_size)

    def evaluate(model: object, batch_size: int) -> None:
        loop.evaluate(batch_size)

    functions = {"train": train} | ({"eval": evaluate} if EVAL in loop.sources else {})
    steps = {name: Step(run=function, caller=_caller(loop)) for name, function in functions.items()}
    try:
        result = oomprobe.find_max_batch(loop.module, steps, device=device, **examples.limited(options))
    except DeviceLostError:
        raise
    except Exception:
        loop.end(first)  # what setup() opened is closed, unless the probe was interrupted
        raise
    loop.end(first)
    covered = examples.covered(result.batch_size)
    not_covered = [item for item in result.not_covered if not (covered and item.startswith(LONGEST))]
    return replace(result, notes=(*result.notes, *examples.notes(result)), not_covered=tuple(not_covered))


def _caller(loop: Loop) -> Caller:
    held = loop.sources[TRAIN].holder is None
    how = "loaders of batch_size={batch_size}" if held else f"{loop.batch_size.name} = {{batch_size}}"
    missed = sorted(kind.__name__ for kind in loop.callbacks.kinds)
    more = f"callbacks ({', '.join(missed)}) are not called, " if missed else ""
    return Caller(
        alone=f"run trainer.fit with {how}",
        more=f"In trials {more}loggers are Lightning's DummyLogger, as with fast_dev_run, and the Trainer is a plain one.",
    )


def _device(trainer: Any, device: object) -> Device:
    """Not where the parameters are: Lightning brings them to its device with each fit, and takes them back after it."""
    root = trainer.strategy.root_device
    chosen = choose_device(str(root) if device is None else device, torch.nn.Module())
    there = chosen.torch_device
    if replay_of(chosen) is None and (there.type, there.index or 0) != (root.type, root.index or 0):
        raise InvalidArgumentError(
            f"device={device!r}, but the Trainer trains on {root}: leave device out, or give the Trainer "
            f"accelerator={there.type!r}"
        )
    return chosen


def _told(result: ProbeResult, loop: Loop) -> ProbeResult:
    notes = [
        f"one step of a trial is Trainer.fit for {LOOP_STEPS} optimizer steps"
        + (f" of {loop.micro} accumulated batches each" if loop.micro > 1 else "")
    ]
    if loop.sources[TRAIN].holder is None:
        notes.append(f"nothing was set: make your DataLoader with batch_size={result.batch_size}")
    for name, what in ((EVAL, "validation"), (TRAIN, "training")):
        for own_size in sorted(loop.own_sizes.get(name, ())):
            notes.append(f"a {what} loader keeps its own batch size of {own_size}")
    known = ("ProgressBar", "ModelSummary", "Checkpoint", "LearningRateMonitor", "DeviceStatsMonitor")
    kinds = tuple(getattr(loop.pl.callbacks, name) for name in known)  # which only show or save
    missed = sorted(kind.__name__ for kind in loop.callbacks.kinds if not issubclass(kind, kinds))
    told = f"callbacks, which trials do not call: {', '.join(missed)} (one that averages weights holds a copy of them)"
    return replace(
        untimed(result),
        notes=(*result.notes, *notes),
        not_covered=(*result.not_covered, *([told] if missed else [])),
    )
