"""accelerate: a drop-in `find_executable_batch_size` that bisects where accelerate's own shrinks by tenths.

Change the import, and the call stays as it is::

    from oomprobe.integrations.accelerate import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=128)
    def train(batch_size, model, optimizer):
        ...

    train(model, optimizer)      # probed, then trained once, at the largest size that fits
    train.result                 # the ProbeResult: the trials, the margin, what limited

A trial leaves the function once each of its optimizers has made a few steps; by then, training has reached its peak
memory. After the last trial the function is called once for good. What `Accelerator.prepare` returned is probed by the plain
`oomprobe.find_max_batch`, in `unchanged`, which restores the Accelerator's own counters.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from oomprobe import probe
from oomprobe.errors import Caller, InvalidArgumentError, NotRunError
from oomprobe.integrations.framework import count_calls
from oomprobe.options import Step, check_size
from oomprobe.verdicts import Verdict, classify_error

SHARED = ("PartialState", "AcceleratorState", "GradientState")  # of accelerate.state, each one for the whole process
PATIENCE = 8  # An optimizer that steps so many times more rarely than another is not waited for.


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int | None = 128,
    reduce_batch_size_fn: None = None,
    *,
    trial_steps: int = 2,
    **options: Any,
) -> Callable[..., Any]:
    """Call a training function with the largest batch size that truly fits, found by running it.

    **The function is called many times.** A trial leaves it after `trial_steps` steps of its optimizers; whatever it does
    until then (loading, logging, opening files) happens in each trial. What it does later (evaluation, checkpoints) happens
    only in the call for good. A function that never steps an optimizer of torch runs to its end in each trial.

    Models, optimizers, accelerate's own state and the random numbers of torch, numpy and Python come back bit for bit before
    the call for good. Not restored: generators and iterators of your own, and tensors in plain containers that the function
    changes in place (pass objects with ``state_dict`` in `preserve`).

    Args:
        function: Takes the batch size as its first argument, a method before ``self``; you call it without.
        starting_batch_size: Largest size to try, at least 1; None: until memory runs out.
        reduce_batch_size_fn: Only None: bisection needs no rule for shrinking.
        trial_steps: Steps that each optimizer makes in one call of a trial, at least 1.
        options: Those of `oomprobe.find_max_batch`, except max_batch and global_batch. `device` None is the current
            accelerator, or host memory where there is none.

    Returns:
        The decorated function. It probes anew at each call; its attribute ``result`` is the `ProbeResult` of the last.

    Raises:
        InvalidArgumentError: an argument is wrong.
        TypeError: called with arguments that the function does not take, such as the batch size.
        OomProbeError: when called, as `oomprobe.find_max_batch`.
    """
    if reduce_batch_size_fn is not None:
        raise InvalidArgumentError(
            "reduce_batch_size_fn says how to shrink after a failure, and this bisects: leave it out, and pass multiple_of "
            "or min_batch for the sizes that you want"
        )
    if "max_batch" in options:
        raise InvalidArgumentError("max_batch: pass starting_batch_size instead, the largest size that is tried")
    if "global_batch" in options:
        raise InvalidArgumentError(
            "global_batch: the function accumulates gradients itself; plan with result.plan(...)"
        )
    if starting_batch_size is not None:
        check_size("starting_batch_size", starting_batch_size)
    check_size("trial_steps", trial_steps)
    count_calls(options, trial_steps)
    options["max_batch"] = starting_batch_size
    if function is None:
        return functools.partial(_decorated, trial_steps=trial_steps, options=options)
    return _decorated(function, trial_steps, options)


def _decorated(function: Callable[..., Any], trial_steps: int, options: dict[str, Any]) -> Callable[..., Any]:
    name = str(getattr(function, "__name__", function))
    signature = inspect.signature(function)
    if next(iter(signature.parameters), None) in (None, "self", "cls") or inspect.iscoroutinefunction(function):
        raise InvalidArgumentError(
            f"{name}{signature} cannot be probed: as with accelerate, the batch size is passed before everything else. "
            f"Write def {name}(batch_size, ...), or def {name}(batch_size, self, ...), and call it without the batch size"
        )

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(1, *args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"{name}{signature} was called with arguments it does not take ({error}). The decorator passes the batch "
                f"size: call {name} without it"
            ) from None
        if _Trials.running:  # the steps of one would count as the other's
            raise NotRunError(f"{name} was called in a trial of another decorated function: decorate only one of them")
        trials = _Trials(function, name, args, kwargs, trial_steps)
        step = Step(
            run=trials,
            max_calls=1,  # a call without an optimizer step ran to the end: another would do the same
            caller=Caller(
                alone=f"call {name}.__wrapped__({{batch_size}}, ...), the function without the decorator",
                limit="starting_batch_size",
            ),
            has_made=trials.has_made,
        )
        result = probe.find_max_batch(torch.nn.Module(), step, **options)
        call.result = result = replace(result, notes=(*result.notes, trials.note()))  # type: ignore[attr-defined]
        del trials, step
        _collect()
        try:
            return function(result.batch_size, *args, **kwargs)
        except Exception as error:
            if classify_error(error) in (Verdict.OOM, Verdict.HOST_OOM):
                error.add_note(
                    f"oomprobe: batch {result.batch_size} ran in the probe and failed in the call for good, which met what "
                    "the first steps do not (a longer sample, evaluation, a checkpoint). Let the first batches be the "
                    "largest, or lower memory_fraction"
                )
            raise

    call.result = None  # type: ignore[attr-defined]
    return call


class _Left(BaseException):
    """Raised in the function to leave it; not an Exception, so that its own handlers do not take it for a failure."""


class _Trials:
    """The step that is probed: one call of the function, left when its optimizers have stepped."""

    running = False  # any

    def __init__(
        self, function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], trial_steps: int
    ) -> None:
        self._function, self._name, self._args, self._kwargs = function, name, args, kwargs
        self._trial_steps = trial_steps
        self._steps: MutableMapping[torch.optim.Optimizer, int] = {}  # of the current call, by optimizers still alive
        self._stepped = False  # in the current call
        self._stepped_at: set[int] = set()  # sizes at which an optimizer stepped
        self._ended_at: set[int] = set()  # sizes at which the function ran to its end
        self._calls = 0
        # Parameters by id, with the number of the call that made them.
        self._made: dict[int, tuple[int, weakref.ref[torch.Tensor]]] = {}
        _collect()
        objects = gc.get_objects()
        module = sys.modules.get("accelerate.accelerator")
        # All that exist: the function may reach its own through globals of functions that it calls.
        self._accelerators = [] if module is None else _of_type(objects, module.Accelerator)
        self._scalers = [one for one in _of_type(objects, torch.amp.GradScaler) if one.is_enabled()]
        # Tensors that existed before, by id. None: unknown, since the collector does not list frozen objects.
        self._existed = set(map(id, _of_type(objects, torch.Tensor))) if gc.get_freeze_count() == 0 else None

    def __call__(self, model: torch.nn.Module, batch_size: int) -> None:
        _collect()  # models and loaders are cycles, and two of them at once are no trial of one
        self._calls += 1
        self._steps, self._stepped = WeakIdKeyDictionary(), False
        handle = register_optimizer_step_post_hook(self._after_step)
        _Trials.running = True
        try:
            with unchanged(*self._accelerators):
                self._function(batch_size, *self._args, **self._kwargs)
            self._ended_at.add(batch_size)
        except _Left:
            pass
        finally:
            _Trials.running = False
            handle.remove()
            # A scaler left inside its step refuses the next; its only public way out, update(), changes the scale.
            for scaler in self._scalers:
                scaler._per_optimizer_states.clear()
        if self._stepped:
            self._stepped_at.add(batch_size)
        elif self._stepped_at:
            raise NotRunError(
                f"at batch {batch_size} {self._name} ended without an optimizer step, and at batch {max(self._stepped_at)} "
                "it made some. If it handles an out-of-memory error itself, have it raise that again; if the loader drops a "
                "last batch that is not full, pass the number of examples as starting_batch_size"
            )

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._stepped = True
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        counts = list(self._steps.values())
        if min(counts) >= self._trial_steps or max(counts) >= PATIENCE * self._trial_steps:
            raise _Left

    def has_made(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the current call made all that an optimizer trains, so that nothing of it needs restoring."""
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        if self._existed is None or any(id(one) in self._existed for one in parameters):
            return False
        for one in parameters:
            call, made = self._made.get(id(one), (self._calls, None))
            if call != self._calls and made is not None and made() is one:
                raise NotRunError(
                    f"{self._name} trains a model that an earlier call made and kept (in a global, in a cache): the trials "
                    "have trained it, and its initial weights are not known. Make it before the first call, or anew in each"
                )
            self._made[id(one)] = (self._calls, weakref.ref(one))
        return True

    def note(self) -> str:
        """What a call of a trial was."""
        how = f"a trial calls {self._name}, and leaves it when each optimizer has made {self._trial_steps} steps"
        if not self._ended_at:
            return how
        why = "" if self._stepped_at else " without a step of a torch optimizer"
        return f"{how}; at sizes from {min(self._ended_at)} to {max(self._ended_at)} it ran to its end{why}"


def _collect() -> None:
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _of_type(objects: list[Any], kind: type) -> list[Any]:
    return [one for one in objects if issubclass(type(one), kind)]  # isinstance would make lazy modules import


@contextmanager
def unchanged(*accelerators: Any) -> Iterator[None]:
    """Restore Accelerators, and the state that all of a process share, on the way out.

    An Accelerator counts micro-batches and lists what it prepared, outside any ``state_dict``: after a probe that ended in
    the middle of an accumulation, training would step at other micro-batches.

    Args:
        accelerators: Of `accelerate.Accelerator`.
    """
    states: list[dict[str, Any]] = [one.__dict__ for one in accelerators] + _shared_states()
    before = [(state, dict(state)) for state in states]
    lists = [(value, list(value)) for state in states for value in state.values() if isinstance(value, list)]
    try:
        yield
    finally:
        known = {id(state) for state in states}
        before += [(state, {}) for state in _shared_states() if id(state) not in known]  # accelerate imported meanwhile
        for state, values in before:
            state.clear()
            state.update(values)
        for filled, items in lists:  # accelerate fills them in place
            filled[:] = items


def _shared_states() -> list[dict[str, Any]]:
    """Of each class in `SHARED`; private, because the public constructors would create the state."""
    module = sys.modules.get("accelerate.state")
    return [] if module is None else [getattr(module, name)._shared_state for name in SHARED]
