import builtins
import contextlib
import dataclasses
import sys
import time
import traceback

import pytest
import torch
from test_result import a_trial

from oomprobe import errors
from oomprobe.devices.host import HostDevice
from oomprobe.errors import OomProbeError, StepFailedError, step_failed
from oomprobe.interrupts import Interrupts

TREE = {
    errors.InvalidArgumentError: ValueError,
    errors.NoDeviceError: RuntimeError,
    errors.NothingFitsError: MemoryError,
    errors.StepFailedError: RuntimeError,
    errors.DeviceLostError: RuntimeError,
    errors.TimeLimitError: RuntimeError,
    errors.UnreliableError: RuntimeError,
}


# --- the tree ---


@pytest.mark.parametrize("kind", TREE)
def test_each_error_is_the_builtin_its_caller_expects_and_carries_trials(kind):
    trials = (a_trial(), a_trial())
    error = kind("what happened", trials=trials)
    assert isinstance(error, OomProbeError)
    assert isinstance(error, TREE[kind])
    assert error.trials is trials
    assert error.args == ("what happened",)
    assert kind("what happened").trials == ()


def test_the_tree_in_the_docstring_is_the_tree():
    drawn = [line.split("(") for line in errors.__doc__.splitlines() if line.strip().startswith("+--")]
    pairs = {name.strip(" +-"): rest.split(")")[0] for name, rest in drawn}
    assert pairs == {kind.__name__: base.__name__ for kind, base in TREE.items()}
    assert set(pairs) == {kind.__name__ for kind in OomProbeError.__subclasses__()}


def test_only_the_message_of_a_step_failure_is_made_elsewhere():
    assert {str(kind("said")) for kind in TREE if kind is not StepFailedError} == {"said"}


def test_a_lost_device_carries_the_snapshot():
    snapshot = object()
    assert errors.DeviceLostError("lost", snapshot=snapshot).snapshot is snapshot
    assert errors.DeviceLostError("lost").snapshot is None


# --- a failed step is an instance of the user's class too ---


class NeedsArguments(Exception):
    def __init__(self, code, *, hint):
        super().__init__(f"code {code}")
        self.code, self.hint = code, hint


class MadeInNew(Exception):
    def __new__(cls, code, *, hint):
        made = super().__new__(cls, code)
        made.hint = hint
        return made

    def __init__(self, code, *, hint):
        super().__init__(code)


class Slotted(Exception):
    __slots__ = ("code", "never_set")

    def __init__(self, code):
        super().__init__(code)
        self.code = code


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class HasMessage(Exception):
    def __init__(self, message):
        super().__init__()
        self.message = message


class Shouts(KeyError):
    def __str__(self):
        return "SHOUTED"


class Meta(type):
    pass


class OfMeta(Exception, metaclass=Meta):
    pass


def raised_by(call):
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


KINDS = {
    "KeyError": (lambda: KeyError("labels"), {}),
    "plain": (lambda: Exception("x"), {}),
    "ValueError": (lambda: ValueError("x"), {}),
    "RuntimeError": (lambda: RuntimeError("x"), {}),
    "no arguments": (AssertionError, {}),
    "MemoryError": (lambda: MemoryError("x"), {}),
    "StopIteration": (lambda: StopIteration(7), {"value": 7}),
    "OSError": (lambda: OSError(28, "No space left", "/data"), {"errno": 28, "strerror": "No space left"}),
    "missing file": (lambda: raised_by(lambda: open("/nowhere/x").close()), {"errno": 2, "filename": "/nowhere/x"}),
    "OSError of one argument": (lambda: OSError("x"), {"errno": None}),
    "unicode": (lambda: raised_by(b"a\xff".decode), {"object": b"a\xff", "start": 1, "reason": "invalid start byte"}),
    "import": (lambda: raised_by(lambda: __import__("no_such_module")), {"name": "no_such_module"}),
    "attribute": (lambda: raised_by(lambda: (1).nope), {"name": "nope", "obj": 1}),
    "syntax": (lambda: raised_by(lambda: compile("1 +", "f.py", "exec")), {"filename": "f.py", "lineno": 1}),
    "group": (lambda: ExceptionGroup("m", [ValueError(1)]), {"message": "m"}),
    "torch": (lambda: raised_by(lambda: torch.ones(2) @ torch.ones(3)), {}),
    "torch's own class": (lambda: torch.OutOfMemoryError("x"), {}),
    "required arguments": (lambda: NeedsArguments(3, hint="h"), {"code": 3, "hint": "h"}),
    "required by __new__": (lambda: MadeInNew(3, hint="h"), {"hint": "h"}),
    "slots": (lambda: Slotted(3), {"code": 3}),
    "frozen": (lambda: Frozen(3), {"code": 3}),
    "message": (lambda: HasMessage("the user's"), {"message": "the user's"}),
    "own text": (lambda: Shouts("x"), {}),
    "metaclass": (lambda: OfMeta("x"), {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_except_clause_for_the_users_class_goes_on_working(kind):
    make, attributes = KINDS[kind]
    own, trials = make(), (a_trial(),)
    failed = step_failed(own, batch_size=16, trials=trials)
    assert isinstance(failed, type(own))
    assert isinstance(failed, StepFailedError)
    assert (failed.batch_size, failed.trials) == (16, trials)
    assert failed.args == own.args
    assert {name: getattr(failed, name) for name in attributes} == attributes
    assert str(failed) == (
        f"the step failed at batch size 16 with {type(own).__name__}: {own}\n"
        "This is not about memory, so no batch size would answer it: the same error comes without oomprobe. "
        "Run step_fn(model, 16) once by itself to see it."
    )
    with pytest.raises(type(own)) as caught:
        raise failed from own
    assert caught.value.__cause__ is own


def test_attributes_given_after_the_exception_was_made_are_copied():
    own = KeyError("labels")
    own.path = "train.csv"
    assert step_failed(own, batch_size=1, trials=()).path == "train.csv"


def test_slots_that_were_never_set_stay_unset():
    with pytest.raises(AttributeError):
        _ = step_failed(Slotted(3), batch_size=1, trials=()).never_set


class Forbids(Exception):
    def __init_subclass__(cls):
        raise TypeError("no subclasses")


class Speechless(Exception):
    def __str__(self):
        raise ValueError("no text either")


class OtherStepFailed(StepFailedError):
    pass


@pytest.mark.parametrize("own", [Forbids("closed"), OtherStepFailed("nested"), StepFailedError("nested")])
def test_a_class_that_cannot_be_joined_gives_a_plain_step_failure(own):
    own.code = 3
    failed = step_failed(own, batch_size=4, trials=())
    assert type(failed) is StepFailedError
    assert (failed.batch_size, failed.code) == (4, 3)
    assert str(failed).startswith("the step failed at batch size 4 with ")


def test_a_failure_inside_a_probe_inside_a_step_is_told_by_the_outer_one():
    inner = step_failed(KeyError("labels"), batch_size=4, trials=(a_trial(),))
    outer = step_failed(inner, batch_size=8, trials=())
    assert isinstance(outer, StepFailedError)
    assert (outer.batch_size, outer.trials, inner.batch_size) == (8, (), 4)


@pytest.mark.parametrize("kind", TREE)
def test_an_error_of_ours_from_a_probe_inside_a_step_is_not_caught_as_ours(kind):
    failed = step_failed(kind("of the inner probe"), batch_size=8, trials=())
    assert [k for k in TREE if isinstance(failed, k)] == [StepFailedError]
    assert f"with {kind.__name__}: {kind('of the inner probe')}" in str(failed)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_an_exception_without_text_is_still_told(batch_size):
    failed = step_failed(Speechless("x"), batch_size=batch_size, trials=())
    assert isinstance(failed, Speechless)
    assert str(failed).startswith(f"the step failed at batch size {batch_size} with Speechless: (no text)\n")


class OwnTrials(Exception):
    @property
    def trials(self):
        return 1


class OwnBatchSize(Exception):
    def __init__(self, text):
        super().__init__(text)

    @property
    def batch_size(self):
        return 1


class Discards(Exception):
    @property
    def trials(self):
        return 1

    @trials.setter
    def trials(self, value):
        pass


class Immutable(Exception):
    def __setattr__(self, name, value):
        raise RuntimeError("immutable")


@dataclasses.dataclass(frozen=True)
class FrozenTrials(Exception):
    trials: int


@pytest.mark.parametrize("own", [OwnTrials("x"), Discards("x"), Immutable("x"), FrozenTrials(3)])
def test_a_class_that_lets_our_attributes_not_be_set_gives_a_plain_step_failure(own):
    trials = (a_trial(),)
    failed = step_failed(own, batch_size=4, trials=trials)
    assert type(failed) is StepFailedError
    assert (failed.batch_size, failed.trials) == (4, trials)
    failed.trials = ()
    assert str(failed).startswith(f"the step failed at batch size 4 with {type(own).__name__}: ")


def test_our_batch_size_comes_before_a_property_of_that_name():
    failed = step_failed(OwnBatchSize("x"), batch_size=4, trials=())
    assert (failed.batch_size, isinstance(failed, OwnBatchSize)) == (4, True)


# --- where a smaller size ran ---


def test_a_step_that_ran_at_a_smaller_size_is_told_where_to_stop():
    text = str(step_failed(ValueError("sample larger than population"), batch_size=1024, trials=(), largest_passed=512))
    assert "batch 512 ran: pass max_batch=512 if sizes above it are not meant to work (a data set that ends?)" in text
    assert "no batch size would answer it" not in text
    assert text.endswith("Run step_fn(model, 1024) once by itself to see it.")


@pytest.mark.parametrize("largest_passed", [None, 8, 16])
def test_a_step_that_ran_at_no_smaller_size_is_told_that_none_will_do(largest_passed):
    text = str(step_failed(ValueError("x"), batch_size=8, trials=(), largest_passed=largest_passed))
    assert "so no batch size would answer it: the same error comes without oomprobe" in text
    assert "max_batch" not in text


def test_a_user_of_an_adapter_is_told_what_he_can_type():
    caller = errors.Caller(alone="run train({batch_size})", limit="starting_batch_size", more="It has no logger.")
    text = str(step_failed(ValueError("x"), batch_size=8, trials=(), caller=caller))
    assert text.endswith(
        "This is not about memory, so no batch size would answer it. To see whether it comes without oomprobe, run "
        "train(8). It has no logger."
    )
    text = str(step_failed(ValueError("x"), batch_size=8, trials=(), largest_passed=4, caller=caller))
    assert "batch 4 ran: pass starting_batch_size=4 if" in text
    assert "step_fn" not in text


def test_a_target_that_failed_is_a_step_failure_with_its_own_text():
    failed = errors.target_failed(KeyError("config"), "train.py:build")
    assert str(failed).startswith("the target train.py:build failed with KeyError while it was imported and built: ")
    assert (failed.trials, failed.batch_size) == ((), 0)
    assert str(errors.target_failed(Speechless("x"), "t:b")).count("(no text)") == 1


# --- the user's exception on its way ---


@pytest.mark.parametrize("own", [Frozen(3), Immutable("x"), StopIteration(3)])
def test_exceptions_that_refuse_attributes_pass_unchanged_while_signals_are_allowed(own):
    for deadline_s in (None, time.monotonic() + 60):
        with pytest.raises(type(own)) as caught, Interrupts() as interrupts, interrupts.allowed(deadline_s):
            raise own
        assert caught.value is own
        assert own.__context__ is None


@pytest.mark.skipif(sys.platform != "linux", reason="host memory is probed on Linux only")
@pytest.mark.parametrize("way", ["warm", "prime"])
def test_an_error_of_our_kind_that_a_step_raises_outside_a_trial_is_left_to_its_trial(way):
    device = HostDevice(2**24)

    def step(kind):
        raise kind("the step's own")

    for kind in TREE:
        getattr(device, way)(lambda kind=kind: step(kind))


def test_notes_are_shown_once():
    own = KeyError("labels")
    own.add_note("sample 7")
    failed = step_failed(own, batch_size=4, trials=())
    failed.__cause__ = own
    assert "".join(traceback.format_exception(failed)).count("sample 7") == 1
    assert own.__notes__ == ["sample 7"]


def test_the_traceback_names_the_class_and_shows_the_users_line():
    def step():
        raise KeyError("labels")  # the user's line

    try:
        step()
    except KeyError as own:
        failed = step_failed(own, batch_size=4, trials=())
        failed.__cause__ = own
    text = "".join(traceback.format_exception(failed))
    assert "# the user's line" in text
    assert "StepFailedError[KeyError]: the step failed at batch size 4 with KeyError: 'labels'" in text


def test_the_users_exception_is_not_changed():
    own = OSError(28, "No space left", "/data")
    own.extra = 1
    before = (own.args, dict(vars(own)), str(own))
    step_failed(own, batch_size=4, trials=())
    assert (own.args, dict(vars(own)), str(own)) == before


def test_stop_iteration_comes_through_a_context_manager():
    @contextlib.contextmanager
    def around():
        yield

    with pytest.raises(StopIteration) as caught, around():
        raise step_failed(StopIteration(), batch_size=4, trials=())
    assert isinstance(caught.value, StepFailedError)


def test_every_builtin_exception_that_needs_no_arguments():
    kinds = [
        kind
        for kind in vars(builtins).values()
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, ExceptionGroup | Warning)
    ]
    assert len(kinds) > 40
    for kind in kinds:
        own = kind.__new__(kind)
        assert isinstance(step_failed(own, batch_size=1, trials=()), kind), kind


def test_what_may_come_of_the_probe_itself_is_not_blamed_on_the_step():
    cause = RuntimeError("_apply(): Couldn't swap Linear.weight.grad")
    text = str(step_failed(cause, batch_size=1, trials=()))
    assert "the same error comes without oomprobe" not in text
    assert "without oomprobe it may not come; set .grad to None first" in text
    assert "the same error comes without oomprobe" in str(step_failed(RuntimeError("x"), batch_size=1, trials=()))
