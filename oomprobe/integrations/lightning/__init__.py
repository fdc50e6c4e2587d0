"""`find_max_batch` for Lightning: a Trainer, a LightningModule, and its data, as they are before ``trainer.fit``.

Each trial is Lightning's own fit, of a Trainer made like the user's and heard of by nobody, for two optimizer steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

import oomprobe
from oomprobe.devices import Device, Simulated, choose_device
from oomprobe.errors import Caller, InvalidArgumentError, StepFailedError
from oomprobe.integrations.framework import LOOP_STEPS, check_flag, loops_of, untimed
from oomprobe.integrations.generators import generators_kept
from oomprobe.integrations.lightning import settings
from oomprobe.integrations.lightning.batch_size import BatchSize
from oomprobe.integrations.lightning.examples import Examples
from oomprobe.integrations.lightning.loop import Loop
from oomprobe.integrations.lightning.quiet import quiet
from oomprobe.integrations.lightning.sources import EVAL, TRAIN, data_of, sources_of
from oomprobe.integrations.lightning.standins import stand_ins
from oomprobe.integrations.lightning.undone import on_host, undone
from oomprobe.options import Options, check_seconds
from oomprobe.result import ProbeResult
from oomprobe.scope import scope

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

    In place of the loggers and callbacks the module finds others of their classes, to look at and without effect: nothing
    is logged and no checkpoint written, hooks of callbacks are not called, and what the module writes into ``log_dir``
    goes when the probe ends. What it writes elsewhere is written in each trial.

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
    pl = settings.lightning_of(trainer)
    own = getattr(module, "_orig_mod", module)  # where torch.compile keeps the module
    if not isinstance(own, pl.LightningModule):
        raise InvalidArgumentError(
            f"module must be a LightningModule of {pl.__name__}, as the Trainer is, not {type(own).__name__}"
        )
    settings.check_trainer(pl, trainer)
    datamodule, handed_in = data_of(pl, datamodule, train_dataloaders, val_dataloaders)
    device = _device(trainer, options.pop("device", None))
    preserve = options.get("preserve", ())
    with (
        quiet(),
        on_host(own),
        undone(own, _others(trainer, datamodule), preserve, _kind(device)),
        stand_ins(pl, trainer) as others,
        generators_kept([*own.modules(), datamodule]) as generators,
    ):
        batch_size = BatchSize(batch_size_name, own, datamodule)
        sources = sources_of(pl, trainer, own, datamodule, handed_in)
        if sources[TRAIN].holder is not None:
            batch_size.check()
        micro = settings.micro_batches(trainer, own, planned=options.get("global_batch") is not None)
        loop = Loop(
            pl=pl,
            module=module,
            own=own,
            datamodule=datamodule,
            arguments=settings.trial_arguments(pl, trainer, micro, others.loggers),
            stand_ins=others,
            micro=micro,
            batch_size=batch_size,
            sources=sources,
            generators=generators,
        )
        result = _probe(loop, device, options, scan_s)
    missed = settings.unheard(pl, others.kinds)
    if write_back and sources[TRAIN].holder is not None:
        batch_size.write(result.batch_size)
    return _told(result, loop, missed)


def _probe(loop: Loop, device: Device, options: dict[str, Any], scan_s: float) -> ProbeResult:
    first = _first(options)
    for name, contracted in (("steps", 2), ("confirm_steps", 5)):
        options[name] = loops_of(name, options.get(name, contracted))
    examples = Examples(loop, first, scan_s)
    with _as_ended(loop, first):
        options = examples.limited(options)
        try:
            result = oomprobe.find_max_batch(loop.module, _steps(loop), device=device, **options)
        except StepFailedError as failed:
            cause = failed.__cause__
            if isinstance(cause, InvalidArgumentError):  # ours: the step has no bug
                raise type(cause)(str(cause), trials=failed.trials) from None
            raise
    covered = examples.largest_ran and examples.all_led(result.batch_size)
    not_covered = [item for item in result.not_covered if not (covered and item.startswith(LONGEST))]
    return replace(result, notes=(*result.notes, *examples.notes(result)), not_covered=tuple(not_covered))


@scope
def _as_ended(loop: Loop, size: int) -> Iterator[None]:
    """What ``setup()`` opened is closed, where the probe came to an end of its own."""
    try:
        yield
    except oomprobe.DeviceLostError:
        raise
    except Exception:
        loop.end(size)
        raise
    loop.end(size)


def _steps(loop: Loop) -> dict[str, Any]:
    def train(model: object, batch_size: int) -> None:
        loop.train(batch_size)

    def evaluate(model: object, batch_size: int) -> None:
        loop.evaluate(batch_size)

    steps = {"train": train, "eval": evaluate} if EVAL in loop.sources else {"train": train}
    for step in steps.values():
        step.oomprobe_caller = _caller(loop)  # type: ignore[attr-defined]
    return steps


def _caller(loop: Loop) -> Caller:
    held = loop.sources[TRAIN].holder is None
    how = "loaders of batch_size={batch_size}" if held else f"{loop.batch_size.name} = {{batch_size}}"
    missed = sorted(kind.__name__ for kind in loop.stand_ins.kinds)
    more = f"In trials callbacks ({', '.join(missed)}) are not called, and loggers log nothing." if missed else ""
    return Caller(alone=f"run trainer.fit with {how}", more=more)


def _device(trainer: Any, device: object) -> Device:
    """Not where the parameters are: Lightning brings them to its device with each fit, and takes them back after it."""
    root = trainer.strategy.root_device
    chosen = choose_device(str(root) if device is None else device, torch.nn.Module())
    there = chosen.torch_device
    if not isinstance(chosen, Simulated) and (there.type, there.index or 0) != (root.type, root.index or 0):
        raise InvalidArgumentError(
            f"device={device!r}, but the Trainer trains on {root}: leave device out, or give the Trainer "
            f"accelerator={there.type!r}"
        )
    return chosen


def _kind(device: Device) -> str:
    return device.torch_device.type


def _others(trainer: Any, datamodule: Any) -> list[Any]:
    """A precision plugin may have a GradScaler, which trials share."""
    return [one for one in (datamodule, trainer.precision_plugin) if one is not None]


def _first(options: dict[str, Any]) -> int:
    smallest, multiple_of = options.get("min_batch", 1), options.get("multiple_of", 1)
    return Options(min_batch=smallest, multiple_of=multiple_of, max_batch=options.get("max_batch")).sizes.first


def _told(result: ProbeResult, loop: Loop, missed: list[str]) -> ProbeResult:
    notes = [
        f"one step of a trial is Trainer.fit for {LOOP_STEPS} optimizer steps"
        + (f" of {loop.micro} accumulated batches each" if loop.micro > 1 else "")
    ]
    if loop.sources[TRAIN].holder is None:
        notes.append(f"nothing was set: make your DataLoader with batch_size={result.batch_size}")
    for own_size in sorted(loop.own_sizes.get(EVAL, ())):
        notes.append(f"a validation loader keeps its own batch size of {own_size}")
    for own_size in sorted(loop.own_sizes.get(TRAIN, ())):
        notes.append(f"a training loader keeps its own batch size of {own_size}")
    not_covered = list(result.not_covered)
    if missed:
        not_covered.append(
            f"callbacks, which trials do not call: {', '.join(missed)} (one that averages weights holds a copy of them)"
        )
    return replace(untimed(result), notes=(*result.notes, *notes), not_covered=tuple(not_covered))
