"""accelerate: a drop-in `find_executable_batch_size` that bisects, while accelerate's own shrinks by tenths.

Only the import changes::

    from oomprobe.integrations.accelerate import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=128)
    def train(batch_size, model, optimizer):
        ...

    train(model, optimizer)      # probed, then trained once, at the largest size that fits
    train.result                 # the ProbeResult: the trials, the margin, what limited

A trial interrupts the function once each of its optimizers has made a few steps; by then, training has reached its peak
memory. After the last trial the function is called once more and runs to its end. To probe what `Accelerator.prepare`
returned, call `oomprobe.find_max_batch` within `unchanged`, which restores the Accelerator's counters.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Unpack
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from oomprobe import probe
from oomprobe.errors import (
    Caller,
    InvalidArgumentError,
    NothingFitsError,
    NotRunError,
    StepFailedError,
    check_size,
)
from oomprobe.integrations import framework
from oomprobe.probing.order import SearchOptions
from oomprobe.records.options import Step
from oomprobe.records.trials import Verdict
from oomprobe.runners.hooks import wraps_another
from oomprobe.state.tracker import parameters_of
from oomprobe.verdicts import classify_error

SHARED_STATES = (
    "PartialState",
    "AcceleratorState",
    "GradientState",
)  # process-wide, in accelerate.state
NOT_TAKEN = {
    "global_batch": "has no use here: the function accumulates gradients itself; plan with result.plan(...)",
    "max_batch": "is called starting_batch_size here",
}
MAX_STEP_RATIO = (
    8  # a trial does not wait for an optimizer that steps less often than another by this factor
)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int | None = 128,
    reduce_batch_size_fn: None = None,
    *,
    trial_steps: int = 2,
    **options: Unpack[SearchOptions],
) -> Callable[..., Any]:
    """Call a training function with the largest batch size that fits, found by running it.

    **The function is called many times.** A trial interrupts it after `trial_steps` steps of its optimizers; whatever it
    does until then (loading, logging, opening files) happens in each trial. What it does later (evaluation, checkpoints)
    happens only in the final call. A function that never steps an optimizer of torch runs to its end in each trial.

    Models, optimizers, accelerate's own state and the random numbers of torch, numpy and Python are restored bit for bit
    before the final call. Not restored: generators and iterators of your own, and tensors in plain containers that the
    function changes in place (pass objects with ``state_dict`` in `preserve`).

    Args:
        function: Takes the batch size as its first argument (a method: before ``self``); you call it without.
        starting_batch_size: Largest size to try, at least 1; None: until memory runs out.
        reduce_batch_size_fn: Must be None: bisection needs no rule for shrinking.
        trial_steps: Steps that each optimizer makes in one call of a trial, at least 1.
        options: Those of `oomprobe.find_max_batch`, except global_batch, and max_batch, which is starting_batch_size.
            `device` None is the current accelerator, or host memory without one.

    Returns:
        The decorated function. Each call probes again; its attribute ``result`` is the last `ProbeResult`.

    Raises:
        InvalidArgumentError: an argument is wrong.
        NoExecutableBatchSizeError: when called: nothing fits. As with accelerate, it is a RuntimeError.
        Exception: when called: whatever the function itself raises, as it is.
        OomProbeError: when called: all others, as `oomprobe.find_max_batch`.

    Examples:
        >>> @find_executable_batch_size(starting_batch_size=8, device="sim:1GiB", progress="off")
        ... def train(batch_size, epochs):
        ...     model = torch.nn.Linear(8, 8)
        ...     optimizer = torch.optim.SGD(model.parameters())
        ...     for _ in range(epochs):
        ...         model(torch.randn(batch_size, 8)).sum().backward()
        ...         optimizer.step()
        ...     return epochs
        >>> train(10), train.result.batch_size
        (10, 8)
    """
    if reduce_batch_size_fn is not None:
        raise InvalidArgumentError(
            "reduce_batch_size_fn says how to shrink after a failure, but oomprobe bisects: leave it out, and pass multiple_of "
            "or min_batch to choose sizes"
        )
    for name in NOT_TAKEN.keys() & options:
        raise InvalidArgumentError(f"{name} {NOT_TAKEN[name]}")
    if starting_batch_size is not None:
        check_size("starting_batch_size", starting_batch_size)
    check_size("trial_steps", trial_steps)
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            trial_steps=trial_steps,
            **options,
        )
    options["max_batch"] = starting_batch_size
    framework.steps_to_calls(options, trial_steps)
    name = str(getattr(function, "__name__", function))
    signature = inspect.signature(function)
    if next(iter(signature.parameters), None) in (None, "self", "cls"):
        raise InvalidArgumentError(
            f"{name}{signature} cannot be probed: as with accelerate, the batch size is the first argument. "
            f"Write def {name}(batch_size, ...), or def {name}(batch_size, self, ...), and call it without the batch size"
        )

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(1, *args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"{name}{signature} cannot be called like this: {error}. The decorator passes the batch size: leave it out of "
                "the call"
            ) from None
        trials = _Trials(
            name, lambda batch_size: function(batch_size, *args, **kwargs), trial_steps
        )
        step = Step(
            trials,
            is_loop=False,
            starts_anew=True,
            max_calls=1,  # a call without an optimizer step ran to its end, and another would too
            caller=Caller(
                alone=f"call {name}.__wrapped__({{batch_size}}, ...), the function without the decorator",
                limit="starting_batch_size",
            ),
            has_made=trials.has_made,
        )
        own: BaseException | None = None
        try:
            result = probe.find_max_batch(torch.nn.Module(), step, **options)
        except StepFailedError as error:
            own = error.__cause__
            if own is None:
                raise
            own.add_note(f"oomprobe: {error}")
        except NothingFitsError as error:
            nothing = NoExecutableBatchSizeError(f"no executable batch size found: {error}")
            nothing.trials = error.trials
            raise nothing from None
        if own is not None:
            raise own  # only here, so that it keeps its own cause
        call.result = result  # type: ignore[attr-defined]
        del trials, step
        _collect()
        try:
            return function(result.batch_size, *args, **kwargs)
        except Exception as error:
            if classify_error(error) in (Verdict.OOM, Verdict.HOST_OOM):
                error.add_note(
                    f"oomprobe: batch {result.batch_size} ran in the probe and failed in the final call, which did what the "
                    "first steps do not (a longer sample, evaluation, a checkpoint). Put the largest batches first, or "
                    "lower memory_fraction"
                )
            raise

    call.result = None  # type: ignore[attr-defined]
    return call


class NoExecutableBatchSizeError(NothingFitsError, RuntimeError):
    """Nothing fits: a RuntimeError too, as accelerate raises."""


class _TrialDone(BaseException):
    """Interrupts the function at the end of a trial; not an Exception, so that the function's own handlers ignore it."""


class _Trials:
    """The probed step: one call of the function, interrupted when its optimizers have stepped."""

    def __init__(self, name: str, train: Callable[[int], object], trial_steps: int) -> None:
        self._name, self._train, self._trial_steps = name, train, trial_steps
        self._calls = 0
        self._largest_stepped = 0  # largest size at which an optimizer stepped
        self._made_in: Any = (
            WeakTensorKeyDictionary()
        )  # by parameter: the number of the call that made it
        _collect()
        objects = gc.get_objects()
        module = sys.modules.get("accelerate.accelerator")
        # All Accelerators and scalers: the function may use some through globals of the functions that it calls.
        self._accelerators = [] if module is None else _of_type(objects, module.Accelerator)
        self._scalers = [
            scaler for scaler in _of_type(objects, torch.amp.GradScaler) if scaler.is_enabled()
        ]
        # Ids of the tensors that exist already. None: unknown, because gc does not list frozen objects.
        self._existed: set[int] | None = None
        if gc.get_freeze_count() == 0:
            self._existed = set(map(id, _of_type(objects, torch.Tensor)))

    def __call__(self, model: torch.nn.Module, batch_size: int) -> None:
        _collect()  # models and loaders are cycles: those of the last call must not share memory with the next
        self._calls += 1
        steps: WeakKeyDictionary[torch.optim.Optimizer, int] = (
            WeakKeyDictionary()
        )  # of optimizers still alive
        has_stepped = False

        def after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
            nonlocal has_stepped
            if not has_stepped:
                # Others may step later. A probe freezes older objects, so gc lists only those of this call.
                for made in _of_type(gc.get_objects(), torch.optim.Optimizer):
                    if not wraps_another(made):
                        steps[made] = 0
            has_stepped = True
            steps[optimizer] = steps.get(optimizer, 0) + 1
            least = min(steps.values())
            if (
                least >= self._trial_steps
                or max(steps.values()) >= MAX_STEP_RATIO * self._trial_steps
            ):
                raise _TrialDone

        handle = register_optimizer_step_post_hook(after_step)
        try:
            with unchanged(*self._accelerators):
                self._train(batch_size)
        except _TrialDone:
            pass
        finally:
            handle.remove()
            # A scaler interrupted within step() refuses the next one; its only public reset, update(), changes the scale.
            for scaler in self._scalers:
                scaler._per_optimizer_states.clear()
        if has_stepped:
            self._largest_stepped = max(self._largest_stepped, batch_size)
        elif self._largest_stepped:
            raise NotRunError(
                f"at batch {batch_size} {self._name} ended without an optimizer step, but at batch {self._largest_stepped} "
                "it made some. If it handles out-of-memory errors itself, have it raise them again; if the loader drops an "
                "incomplete last batch, pass the number of examples as starting_batch_size"
            )

    def has_made(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the current call made all parameters of the optimizer, so that none of them needs restoring."""
        parameters = parameters_of(optimizer)
        if self._existed is None or not self._existed.isdisjoint(map(id, parameters)):
            return False
        made_in = {self._made_in.setdefault(parameter, self._calls) for parameter in parameters}
        if made_in - {self._calls}:
            raise NotRunError(
                f"{self._name} trains a model that an earlier call made and kept (in a global, in a cache): the trials "
                "have trained it, and its initial weights are lost. Make it before the first call, or again in each"
            )
        return True


def _collect() -> None:
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _of_type(objects: list[Any], kind: type) -> list[Any]:
    return [
        one for one in objects if issubclass(type(one), kind)
    ]  # isinstance would import lazy modules


@contextmanager
def unchanged(*accelerators: Any) -> Iterator[None]:
    """Restore Accelerators, and the state that they share, on exit.

    An Accelerator counts micro-batches and lists what it prepared, in no ``state_dict``: after a probe that ended in the
    middle of an accumulation, training would step at other micro-batches.

    Args:
        accelerators: Instances of `accelerate.Accelerator`.

    Examples:
        >>> def probe_prepared(accelerator, model, step):
        ...     with unchanged(accelerator):
        ...         return probe.find_max_batch(model, step)
    """
    states: list[dict[str, Any]] = [accelerator.__dict__ for accelerator in accelerators]
    if module := sys.modules.get("accelerate.state"):
        # The public constructors would create the state.
        states += [getattr(module, name)._shared_state for name in SHARED_STATES]
    before = [(state, dict(state)) for state in states]
    lists: list[tuple[list[Any], list[Any]]] = []
    for state in states:
        for value in state.values():
            if isinstance(value, list):
                lists.append((value, list(value)))
    try:
        yield
    finally:
        for state, values in before:
            state.clear()
            state.update(values)
        for filled, items in lists:  # accelerate changes them in place
            filled[:] = items
