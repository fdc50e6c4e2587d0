"""accelerate: the decorator `find_executable_batch_size`, that bisects where accelerate's own shrinks by tenths.

Change the import, and the call stays as it is::

    from oomprobe.integrations.accelerate import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=128)
    def train(batch_size, model, optimizer):
        ...

    train(model, optimizer)      # probed, then trained once, at the largest size that fits
    train.result                 # the ProbeResult: the trials, the margin, what limited

A function that trains to its end answers only by ending, so bisecting over whole runs would train for days, or stop at the
first small size that ends. So a trial calls it, and leaves it once each of its optimizers has made a few steps, which is
where the memory of training is known; then it is called once for good.

To keep accelerate's own decorator, probe first and start it at the answer: it runs at its first try::

    result = oomprobe.find_max_batch(model, step_fn)

    @accelerate.utils.find_executable_batch_size(starting_batch_size=result.batch_size)
    def train(batch_size): ...

What `Accelerator.prepare` returned is probed as it is; around that probe, `unchanged` keeps the Accelerator's own counters::

    with unchanged(accelerator):
        result = oomprobe.find_max_batch(model, step_fn)
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from oomprobe import probe
from oomprobe.errors import Caller, InvalidArgumentError, NotRunError, add_note
from oomprobe.integrations.accelerators import accelerators_of, of_type
from oomprobe.integrations.accelerators import unchanged as unchanged
from oomprobe.integrations.decorating import check_call, check_function, checked, name_of
from oomprobe.result import ProbeResult
from oomprobe.verdict import Verdict, classify_error

PATIENCE = 8  # times the steps asked for, that others make while one optimizer is waited for: it may have been for once


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int | None = 128,
    reduce_batch_size_fn: None = None,
    *,
    trial_steps: int = 2,
    **options: Any,
) -> Callable[..., Any]:
    """Call a training function with the largest batch size that truly fits, found by running it.

    **The function is called many times**: in trials it is left after `trial_steps` steps of its optimizers, and whatever it
    does until then (loading, downloading, logging, files it opens) happens in each trial, its ``finally`` blocks too. What
    it does afterwards (evaluation, checkpoints) happens only in the one call for good. A function that ends earlier, or
    never steps an optimizer of torch, runs to its end in each trial; `result.notes` says so.

    What it reaches (models, optimizers, torch's, numpy's and Python's random numbers) comes back between the trials' end and
    the call for good, bit for bit, and accelerate's own state before each call: it trains as if it had been called with that
    size at once. Not given back: generators of its own, iterators that it draws from, and tensors in plain containers that it
    changes in place (pass what has ``state_dict`` in `preserve`).

    Args:
        function: Takes the batch size as its first argument; it is called without it. A method takes it before ``self``.
            None: used with parentheses.
        starting_batch_size: No larger size is tried, as with accelerate; None: until the memory ends.
        reduce_batch_size_fn: Of accelerate's signature; there is nothing to reduce here, so only None.
        trial_steps: Steps that each optimizer makes in one call of a trial, at least 1. More of them where one that steps
            rarely comes late.
        options: Those of `oomprobe.find_max_batch`, but for max_batch and global_batch (the function accumulates).
            `device` None is the current accelerator, or host memory where there is none.

    Returns:
        The decorated function: it returns what the function returned, and probes anew at each call. Its attribute
        ``result`` is the `ProbeResult` of the last probe.

    Raises:
        InvalidArgumentError: an argument is wrong.
        TypeError: an unknown option; or, when it is called, arguments that the function does not take, such as the batch
            size.
        UnreliableError: when it is called: its trials call another decorated function.
        OomProbeError: when it is called, as `oomprobe.find_max_batch`: `NothingFitsError` where accelerate raises
            ``RuntimeError("No executable batch size found, reached zero.")``.

    Example:
        >>> @find_executable_batch_size(starting_batch_size=32, device="cpu:1GiB", progress="off")
        ... def train(batch_size, model):
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     for _ in range(100):
        ...         optimizer.zero_grad()
        ...         model(torch.randn(batch_size, 8)).square().mean().backward()
        ...         optimizer.step()
        ...     return batch_size
        >>> train(torch.nn.Linear(8, 1)), train.result.limited_by
        (32, 'max_batch')
    """
    if reduce_batch_size_fn is not None:
        raise InvalidArgumentError(
            "reduce_batch_size_fn says how to shrink after a failure, and this bisects: leave it out, and pass multiple_of "
            "or min_batch for the sizes that you want"
        )
    if "global_batch" in options:
        raise InvalidArgumentError(
            "global_batch: the function accumulates gradients itself; plan with result.plan(...)"
        )
    if "max_batch" in options:
        raise InvalidArgumentError(
            f"max_batch={options['max_batch']!r}: here the largest size that is tried is starting_batch_size, as with "
            f"accelerate. Pass starting_batch_size={options['max_batch']!r} instead"
        )
    options = checked(options, starting_batch_size, trial_steps)
    if function is None:
        return functools.partial(_decorated, trial_steps=trial_steps, options=options)
    return _decorated(function, trial_steps, options)


def _decorated(function: Callable[..., Any], trial_steps: int, options: dict[str, Any]) -> Callable[..., Any]:
    check_function(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        check_call(function, args, kwargs)
        if (outer := _IN_TRIAL.get()) is not None:
            outer.refuse_inner(function)
        trials = _Trials(function, args, kwargs, trial_steps)
        result = probe.find_max_batch(torch.nn.Module(), trials, **options)
        call.result = replace(result, notes=(*result.notes, *trials.notes))  # type: ignore[attr-defined]
        del trials
        _collect()
        return _for_good(function, call.result, args, kwargs)  # type: ignore[attr-defined]

    call.result = None  # type: ignore[attr-defined]
    call.oomprobe_decorated = True  # type: ignore[attr-defined]
    return call


def _for_good(function: Callable[..., Any], result: ProbeResult, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return function(result.batch_size, *args, **kwargs)
    except Exception as error:
        if classify_error(error) in (Verdict.OOM, Verdict.HOST_OOM):
            add_note(
                error,
                f"oomprobe: batch {result.batch_size} ran in the probe, and failed in the call for good: it met what the "
                "trials' first steps had not (a longer sample, evaluation, a checkpoint). Nothing was tried again. Let the "
                "first batches be the largest, or lower memory_fraction",
            )
        raise


class _Left(BaseException):
    """Raised in the function to leave it. Not an Exception, so that no handler of its own takes it for a failure."""


class _Trials:
    """The step that is probed: one call of the function, left when its optimizers have stepped."""

    oomprobe_max_calls = 1  # a call without an optimizer step ran to the end: another would do the same

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], trial_steps: int
    ) -> None:
        self._function, self._args, self._kwargs, self._trial_steps = function, args, kwargs, trial_steps
        self.oomprobe_caller = Caller(
            alone=f"call {self._name}.__wrapped__({{batch_size}}, ...), the function without the decorator",
            limit="starting_batch_size",
        )
        self._stepped_at: set[int] = set()  # sizes at which an optimizer stepped
        self._ended_at: set[int] = set()  # sizes at which it ran to its end
        self._calls, self._inner = 0, ""
        self._made: dict[int, tuple[int, weakref.ref[torch.Tensor]]] = {}  # parameters by id, in which call
        _collect()
        objects = gc.get_objects()
        self._accelerators, self._scalers = accelerators_of(objects), of_type(objects, torch.amp.GradScaler)
        # Tensors that were there before, by id; None: not known, for what is frozen is not among the objects.
        self._there = set(map(id, of_type(objects, torch.Tensor))) if gc.get_freeze_count() == 0 else None

    def __call__(self, model: torch.nn.Module, batch_size: int) -> None:
        _collect()  # models and loaders are cycles, and two of them at once are no trial of one
        self._calls += 1
        leave = _Leave(self._trial_steps)
        before = _IN_TRIAL.set(self)
        with unchanged(*self._accelerators), leave:
            try:
                self._function(batch_size, *self._args, **self._kwargs)
                self._ended_at.add(batch_size)
            except _Left:
                pass
            finally:
                _IN_TRIAL.reset(before)
                # One that was left in the midst of a step refuses the next; its only public way out, update(), scales.
                for scaler in self._scalers:
                    scaler._per_optimizer_states.clear()
        if self._inner:
            raise NotRunError(
                f"{self._name} calls {self._inner} in its trials, and both are decorated with find_executable_batch_size: the "
                f"steps and the memory of one's trials would be taken for the other's. Decorate {self._inner} alone, or "
                f"{self._name} alone and let it pass a batch size on"
            )
        if leave.stepped:
            self._stepped_at.add(batch_size)
        elif self._stepped_at:
            raise NotRunError(
                f"at batch {batch_size} {self._name} ended without an optimizer step, and at batch "
                f"{max(self._stepped_at)} it made some, so that size was not really run. Where it handles an "
                "out-of-memory error itself, have it raise that again. Otherwise the data set is often smaller than a batch and "
                "the loader drops the last: pass its length as starting_batch_size"
            )

    def refuse_inner(self, function: Callable[..., Any]) -> None:
        """Leave a trial in which another decorated function would be probed; no handler of the user's takes it up."""
        self._inner = name_of(function)
        raise _Left

    def oomprobe_made(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the function made all that an optimizer trains in its call, so that nothing of it is to be restored."""
        if self._there is None:
            return False
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        if any(id(one) in self._there for one in parameters):
            return False
        for one in parameters:
            self._refuse_kept(one)
            self._made[id(one)] = (self._calls, weakref.ref(one))
        return True

    def _refuse_kept(self, parameter: torch.Tensor) -> None:
        call, made = self._made.get(id(parameter), (self._calls, None))
        if call != self._calls and made is not None and made() is parameter:
            raise NotRunError(
                f"{self._name} trains what an earlier call of it has made and kept (in a global, in a cache): the trials have "
                "trained it, and how it was before is not known. Make it before the first call, or anew in each"
            )

    @property
    def _name(self) -> str:
        return name_of(self._function)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a call of a trial was."""
        how = f"a trial calls {self._name}, and leaves it when each optimizer has made {self._trial_steps} steps"
        if not self._ended_at:
            return (how,)
        why = "all the same" if self._stepped_at else "without a step of an optimizer of torch"
        sizes = f"{min(self._ended_at)} to {max(self._ended_at)}"
        return (f"{how}; at sizes of {sizes} it ran to its end {why}, with whatever it does there",)


_IN_TRIAL: ContextVar[_Trials | None] = ContextVar("_IN_TRIAL", default=None)


class _Leave:
    """Counts the steps of optimizers in this thread, and leaves the function with the last that is wanted."""

    def __init__(self, trial_steps: int) -> None:
        self._wanted, self._thread = trial_steps, threading.get_ident()
        # One that has died is not waited for.
        self._counts: MutableMapping[torch.optim.Optimizer, int] = WeakIdKeyDictionary()
        self.stepped = False

    def __enter__(self) -> None:
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if threading.get_ident() != self._thread:  # the hook is of the whole process
            return
        self.stepped = True
        self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        counts = list(self._counts.values())
        if min(counts) >= self._wanted or max(counts) >= PATIENCE * self._wanted:
            raise _Left


def _collect() -> None:
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
