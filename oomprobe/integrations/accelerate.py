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
import inspect
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, replace
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from oomprobe import probe
from oomprobe.errors import Caller, InvalidArgumentError, NotRunError
from oomprobe.options import Options, Step, check_size
from oomprobe.result import ProbeResult
from oomprobe.verdicts import Verdict, classify_error

SHARED = ("PartialState", "AcceleratorState", "GradientState")  # of accelerate.state: each one for the whole process
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
    check_size("trial_steps", trial_steps)
    if starting_batch_size is not None:
        check_size("starting_batch_size", starting_batch_size)
    options = _checked({**options, "max_batch": starting_batch_size})
    for name in ("steps", "confirm_steps"):  # the contract counts optimizer steps, and a call makes several
        options[name] = math.ceil(options[name] / trial_steps)
    if function is None:
        return functools.partial(_decorated, trial_steps=trial_steps, options=options)
    return _decorated(function, trial_steps, options)


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """With the numbers of steps, as the probe would check them when the function is called, in the decorator's words."""
    try:
        bound = inspect.signature(probe.find_max_batch).bind(None, None, **options)
    except TypeError as error:
        raise TypeError(f"find_executable_batch_size() {error}") from None
    bound.apply_defaults()
    try:
        Options(**{one.name: bound.kwargs[one.name] for one in fields(Options)})
    except InvalidArgumentError as error:
        raise InvalidArgumentError(str(error).replace("max_batch", "starting_batch_size")) from None
    return {**options, **{name: bound.kwargs[name] for name in ("steps", "confirm_steps")}}


def _decorated(function: Callable[..., Any], trial_steps: int, options: dict[str, Any]) -> Callable[..., Any]:
    signature, name = _signature_of(function), _name_of(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(1, *args, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"{name}{signature} was called with arguments it does not take ({error}). The batch size is passed by the "
                f"decorator: call {name} without it"
            ) from None
        if (outer := _IN_TRIAL.get()) is not None:
            raise NotRunError(
                f"{outer} calls {name} in its trials, and both are decorated with find_executable_batch_size: the steps and "
                f"the memory of one's trials would be taken for the other's. Decorate {name} alone, or {outer} alone and let "
                "it pass a batch size on"
            )
        trials = _Trials(function, args, kwargs, trial_steps)
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
        call.result = replace(result, notes=(*result.notes, *trials.notes))  # type: ignore[attr-defined]
        del trials, step
        _collect()
        return _for_good(function, call.result, args, kwargs)  # type: ignore[attr-defined]

    call.result = None  # type: ignore[attr-defined]
    call.oomprobe_decorated = True  # type: ignore[attr-defined]
    return call


def _signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Of what can be trained by a call with the batch size first; anything else is refused."""
    name = _name_of(function)
    if not callable(function) or inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise InvalidArgumentError(
            f"{function!r} cannot be probed: it must be a function that trains when it is called with the batch size first"
        )
    if hasattr(function, "oomprobe_decorated"):
        raise InvalidArgumentError(f"{name} is decorated with find_executable_batch_size already: once is enough")
    signature = inspect.signature(function)
    first = next(iter(signature.parameters), None)
    if first in ("self", "cls"):
        raise InvalidArgumentError(
            f"{name}{signature} is a method, and the batch size is passed before everything else, as with accelerate, so "
            f"that {first} would be a number. Write def {name}(batch_size, {first}, ...) and call it as before, without the "
            "batch size, or decorate a function inside the method"
        )
    try:
        signature.bind_partial(1)
    except TypeError:
        raise InvalidArgumentError(
            f"{name}{signature} takes no batch size, which is passed first: write def {name}(batch_size, ...)"
        ) from None
    return signature


def _name_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", function))


def _for_good(function: Callable[..., Any], result: ProbeResult, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return function(result.batch_size, *args, **kwargs)
    except Exception as error:
        if classify_error(error) in (Verdict.OOM, Verdict.HOST_OOM):
            error.add_note(
                f"oomprobe: batch {result.batch_size} ran in the probe, and failed in the call for good: it met what the "
                "trials' first steps had not (a longer sample, evaluation, a checkpoint). Nothing was tried again. Let the "
                "first batches be the largest, or lower memory_fraction",
            )
        raise


class _Left(BaseException):
    """Raised in the function to leave it. Not an Exception, so that no handler of its own takes it for a failure."""


class _Trials:
    """The step that is probed: one call of the function, left when its optimizers have stepped."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], trial_steps: int
    ) -> None:
        self._function, self._args, self._kwargs, self._trial_steps = function, args, kwargs, trial_steps
        self._name = _name_of(function)
        self._stepped_at: set[int] = set()  # sizes at which an optimizer stepped
        self._ended_at: set[int] = set()  # sizes at which it ran to its end
        self._calls = 0
        self._made: dict[int, tuple[int, weakref.ref[torch.Tensor]]] = {}  # parameters by id, in which call
        _collect()
        objects = gc.get_objects()
        module = sys.modules.get("accelerate.accelerator")
        # All there are: the function may reach its own by globals of functions that it calls.
        self._accelerators = [] if module is None else _of_type(objects, module.Accelerator)
        self._scalers = _of_type(objects, torch.amp.GradScaler)
        # Tensors that were there before, by id; None: not known, for what is frozen is not among the objects.
        self._there = set(map(id, _of_type(objects, torch.Tensor))) if gc.get_freeze_count() == 0 else None

    def __call__(self, model: torch.nn.Module, batch_size: int) -> None:
        _collect()  # models and loaders are cycles, and two of them at once are no trial of one
        self._calls += 1
        leave = _Leave(self._trial_steps)
        before = _IN_TRIAL.set(self._name)
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
        if leave.stepped:
            self._stepped_at.add(batch_size)
        elif self._stepped_at:
            raise NotRunError(
                f"at batch {batch_size} {self._name} ended without an optimizer step, and at batch "
                f"{max(self._stepped_at)} it made some, so that size was not really run. Where it handles an "
                "out-of-memory error itself, have it raise that again. Otherwise the data set is often smaller than a batch and "
                "the loader drops the last: pass its length as starting_batch_size"
            )

    def has_made(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the function made all that an optimizer trains in its call, so that nothing of it is to be restored."""
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        if self._there is None or any(id(one) in self._there for one in parameters):
            return False
        for one in parameters:
            call, made = self._made.get(id(one), (self._calls, None))
            if call != self._calls and made is not None and made() is one:
                raise NotRunError(
                    f"{self._name} trains what an earlier call of it has made and kept (in a global, in a cache): the trials "
                    "have trained it, and how it was before is not known. Make it before the first call, or anew in each"
                )
            self._made[id(one)] = (self._calls, weakref.ref(one))
        return True

    @property
    def notes(self) -> tuple[str, ...]:
        """What a call of a trial was."""
        how = f"a trial calls {self._name}, and leaves it when each optimizer has made {self._trial_steps} steps"
        if not self._ended_at:
            return (how,)
        why = "all the same" if self._stepped_at else "without a step of an optimizer of torch"
        sizes = f"{min(self._ended_at)} to {max(self._ended_at)}"
        return (f"{how}; at sizes of {sizes} it ran to its end {why}, with whatever it does there",)


_IN_TRIAL: ContextVar[str | None] = ContextVar("_IN_TRIAL", default=None)  # the name of the function


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


def _of_type(objects: list[Any], kind: type) -> list[Any]:
    """Without asking them: lazy modules import what they stand for when they are."""
    return [one for one in objects if issubclass(type(one), kind)]


# --- what accelerate keeps for itself ---


@contextmanager
def unchanged(*accelerators: Any) -> Iterator[None]:
    """Give Accelerators, and what all of a process share, back as they were.

    An Accelerator counts micro-batches and lists what it prepared, outside any ``state_dict``. A probe that is left in the
    midst of an accumulation would leave training to step at other micro-batches than without it.

    Args:
        accelerators: Of `accelerate.Accelerator`.

    Example:
        >>> class Accelerator:
        ...     step = 0
        >>> accelerator = Accelerator()
        >>> with unchanged(accelerator):
        ...     accelerator.step = 3
        >>> accelerator.step
        0
    """
    own = [(vars(one), _copy(vars(one))) for one in accelerators]
    shared = {name: _copy(state) for name, state in _shared_states().items()}
    try:
        yield
    finally:
        for attributes, before in own:
            _put_back(attributes, before)
        for name, state in _shared_states().items():  # it may have been imported meanwhile
            _put_back(state, shared.get(name, {}))


def _copy(attributes: dict[str, Any]) -> dict[str, tuple[Any, list[Any]]]:
    """Each value, and what is in it if it is a list: those are filled in place."""
    return {name: (value, list(value) if isinstance(value, list) else []) for name, value in attributes.items()}


def _put_back(attributes: dict[str, Any], before: dict[str, tuple[Any, list[Any]]]) -> None:
    attributes.clear()
    for name, (value, items) in before.items():
        if isinstance(value, list):
            value[:] = items
        attributes[name] = value


def _shared_states() -> dict[str, dict[str, Any]]:
    """By class. Private: accelerate has no other way to them that would not make them."""
    module = sys.modules.get("accelerate.state")
    return {} if module is None else {name: getattr(module, name)._shared_state for name in SHARED}
