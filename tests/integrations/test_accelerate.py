import contextlib
import functools
import gc
import inspect
import weakref

import accelerate
import pytest
import torch
from accelerate.utils import find_executable_batch_size as shrinking
from ledger import HERE, Log

import oomprobe
from oomprobe.integrations.accelerate import find_executable_batch_size, unchanged

from .drivers import OfAccelerate, Watch

pytestmark = pytest.mark.filterwarnings(
    # from the autocast that accelerate enters with bf16 on a CPU
    "ignore:.*torch.cpu.amp.autocast.*:FutureWarning"
)
HOST = {"device": HERE, "progress": "off"}


@pytest.fixture(autouse=True)
def unfrozen(monkeypatch):
    """conftest freezes only imports, so the decorator may rely on what gc lists."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)


def fail_above(fitting, batch_size):
    if batch_size > fitting:
        torch.empty(2**50)  # more than any machine has: the allocator's own error


def steps_of(batch_size, *, optimizer=torch.optim.SGD, number=50, model=None, calls=None):
    model = torch.nn.Linear(4, 1) if model is None else model
    made = optimizer(model.parameters(), lr=0.1)
    for _ in range(number):
        made.zero_grad()
        model(torch.randn(batch_size, 4)).square().mean().backward()
        made.step()
        if calls is not None:
            calls.append(batch_size)


# --- the call style ---


def test_signature_matches_accelerate():
    ours, theirs = (
        list(inspect.signature(one).parameters.values())
        for one in (find_executable_batch_size, shrinking)
    )
    assert [(p.name, p.default, p.kind) for p in ours[:3]] == [
        (p.name, p.default, p.kind) for p in theirs
    ]
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in ours[3:])


@pytest.mark.parametrize("has_parentheses", [False, True])
def test_with_and_without_parentheses(has_parentheses):
    def train(batch_size, factor, *, added=0):
        """Train."""
        torch.empty(2**50 if batch_size > 2 else 1)
        return batch_size * factor + added

    decorated = (
        find_executable_batch_size(**HOST)(train)
        if has_parentheses
        else find_executable_batch_size(train)
    )
    assert decorated.result is None
    assert decorated(10, added=1) == 21
    assert decorated.result.batch_size == 2
    assert (decorated.__name__, decorated.__doc__) == ("train", "Train.")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"reduce_batch_size_fn": lambda: 1}, "bisects: leave it out"),
        ({"global_batch": 64}, "accumulates gradients itself"),
        ({"max_batch": 64}, "called starting_batch_size"),
        ({"starting_batch_size": 0}, "starting_batch_size must be"),
        (
            {"function": lambda self, batch_size: None},
            r"cannot be probed.* Write def .*\(batch_size, self, \.\.\.\)",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments, said):
    with pytest.raises(oomprobe.InvalidArgumentError, match=said):
        find_executable_batch_size(**arguments)


def test_a_method_takes_the_batch_size_before_self():
    class Runner:
        @find_executable_batch_size(starting_batch_size=2, **HOST)
        def train(batch_size, self, factor):
            steps_of(batch_size, number=3)
            return batch_size * factor * self.scale

        scale = 10

    assert Runner().train(3) == 60


# --- trials ---


def test_it_bisects_to_the_size_that_fits_and_trains_once(monkeypatch):
    # A copy of what the call made would count against the budget on a host, and reduce the answer.
    monkeypatch.setattr(
        "oomprobe.state.Snapshot.add", lambda self, optimizer: pytest.fail("copied")
    )
    calls, finished = Log(), Log()

    @find_executable_batch_size(starting_batch_size=128, **HOST)
    def train(batch_size):
        fail_above(37, batch_size)
        steps_of(batch_size, calls=calls)
        finished.append(batch_size)  # code after the training runs once
        return f"trained at {batch_size}"

    assert train() == "trained at 37"
    assert finished == [37]
    assert calls[-50:] == [37] * 50
    assert train.result.limited_by == "host_memory"  # the error is about host memory
    trials = {t.batch_size for t in train.result.trials}
    assert len(trials) <= 15  # accelerate needs 13 runs and ends at 33, below the limit
    assert "first seen when it stepped" not in str(train.result)


@pytest.mark.parametrize(
    ("trial_steps", "first", "left_after"), [(3, 0, "cgcccgcccg"), (2, 2, "cccgcccg")]
)
def test_every_optimizer_makes_its_steps(trial_steps, first, left_after):
    made = Log()

    @find_executable_batch_size(starting_batch_size=1, trial_steps=trial_steps, **HOST)
    def train(batch_size):
        models = {name: torch.nn.Linear(4, 1) for name in "cg"}  # critic, generator
        optimizers = {name: torch.optim.Adam(one.parameters()) for name, one in models.items()}
        made.append("")
        for number in range(40):
            for name in "cg" if number % 3 == first else "c":
                made[-1] += name
                models[name](torch.randn(batch_size, 4)).sum().backward()
                optimizers[name].step()

    train()
    assert set(made[:-1]) == {left_after}


@pytest.mark.parametrize(("kept", "left_after"), [(True, 15), (False, 1)])
def test_trials_do_not_wait_for_an_optimizer_that_stepped_once(kept, left_after):
    longest = Log()

    @find_executable_batch_size(starting_batch_size=1, **HOST)
    def train(batch_size):
        longest.append([])
        head, model = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(head.parameters())
        optimizer.step()
        if not kept:
            del optimizer
        steps_of(batch_size, number=500, model=model, calls=longest[-1])

    train()
    assert {len(one) for one in longest[:-1]} == {left_after}


def test_objects_of_a_call_are_freed_before_the_next():
    models, alive = Log(), Log()

    @find_executable_batch_size(starting_batch_size=16, **HOST)
    def train(batch_size):
        alive.append(sum(one() is not None for one in models))
        model = torch.nn.Linear(4, 1)
        model.itself = [model]  # a cycle, as accelerate and schedulers make them
        models.append(weakref.ref(model))
        model(torch.randn(batch_size, 4)).mean().backward()
        fail_above(5, batch_size)
        steps_of(batch_size, model=model)

    gc.disable()
    try:
        train()
    finally:
        gc.enable()
    assert set(alive) == {0}
    assert len(alive) > 10


# --- functions that end ---


@pytest.mark.parametrize("steps", [0, 1])
def test_a_function_that_ends_before_its_steps_fits(steps):
    calls = Log()

    @find_executable_batch_size(starting_batch_size=4, **HOST)
    def train(batch_size):
        calls.append(batch_size)
        steps_of(batch_size, number=steps)
        return batch_size

    assert train() == 4
    assert calls.count(1) < 10  # it does not run 32 times in search of an optimizer
    assert any("no optimizer stepped" in note for note in train.result.notes) is (steps == 0)


def handles_out_of_memory_itself(batch_size):
    with contextlib.suppress(RuntimeError):
        fail_above(4, batch_size)
        steps_of(batch_size)


def test_a_size_without_a_step_is_reported():
    train = find_executable_batch_size(handles_out_of_memory_itself, starting_batch_size=8, **HOST)
    said = r"at batch 8 handles_out_of_memory_itself ended without an optimizer step.*at batch 4.* have it raise them again; .*last"
    with pytest.raises(oomprobe.UnreliableError, match=said):
        train()


# --- failures ---


def test_nothing_fits_is_a_runtime_error():
    @find_executable_batch_size(starting_batch_size=8, **HOST)
    def train(batch_size):
        raise RuntimeError("NPU out of memory.")

    with pytest.raises(RuntimeError, match="no executable batch size found: batch 1") as nothing:
        train()
    assert nothing.value.trials


def test_a_size_that_is_passed_is_refused():
    @find_executable_batch_size(starting_batch_size=8, **HOST)
    def train(batch_size, model):
        raise AssertionError

    with pytest.raises(
        TypeError, match=r"train\(batch_size, model\) cannot .*: too many .*: leave it out"
    ):
        train(8, None)


def test_running_out_of_memory_in_the_final_call():
    calls = Log()

    @find_executable_batch_size(starting_batch_size=2, **HOST)
    def train(batch_size):
        calls.append(batch_size)
        steps_of(batch_size, number=5)
        torch.empty(2**50)  # beyond the steps of a trial

    with pytest.raises(RuntimeError, match="can't allocate") as caught:
        train()
    assert "batch 2 ran in the probe" in caught.value.__notes__[0]
    assert train.result.batch_size == 2
    assert calls.count(2) < 14


# --- what is restored ---


def test_a_model_kept_from_call_to_call_is_refused():
    @functools.cache
    def model_of_all_calls():
        return torch.nn.Linear(4, 1)

    @find_executable_batch_size(starting_batch_size=4, **HOST)
    def train(batch_size):
        steps_of(batch_size, model=model_of_all_calls())

    with pytest.raises(
        oomprobe.UnreliableError, match=r"train trains a model that an earlier call made and kept"
    ):
        train()
    assert train() is None  # now it exists before the first call, and is restored


def test_the_loop_of_accelerates_documentation():
    """An Accelerator outside the function; everything else is made and prepared inside."""
    seen, accelerator = Log(), accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)

    @find_executable_batch_size(starting_batch_size=32, **HOST)
    def inner(batch_size):
        seen.append(
            (
                accelerator.step,
                len(accelerator._models),
                accelerator.gradient_state.active_dataloader,
            )
        )
        accelerator.free_memory()
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        data = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(torch.randn(256, 4)), batch_size
        )
        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        for (x,) in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                fail_above(9, batch_size)
                optimizer.step()
                optimizer.zero_grad()
        return batch_size

    assert inner() == 9
    assert set(seen) == {(0, 0, None)}
    assert len(accelerator._models) == 1  # of the final call


def test_an_accelerator_made_inside():
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)

    @find_executable_batch_size(starting_batch_size=2, **HOST)
    def train(batch_size):
        made_already = accelerate.state.is_initialized()
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        steps_of(batch_size, model=accelerator.prepare(torch.nn.Linear(4, 1)), number=9)
        return made_already

    try:
        assert train() is False
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_prepared_objects_train_on_bit_equal(tmp_path):
    def prepared():
        torch.manual_seed(3)
        one = OfAccelerate(tmp_path, Watch(room=20), mixed_precision="bf16")
        one.model, one.optimizer, one.scheduler = one.accelerator.prepare(
            one.model, one.optimizer, one.scheduler
        )
        return one

    one, plain = prepared(), prepared()
    torch.manual_seed(4)
    with unchanged(one.accelerator):
        result = oomprobe.find_max_batch(one.model, one.micro_batch, min_batch=2, **HOST)
    assert result.batch_size == 20
    # `unchanged` puts the Accelerator back only after the probe has compared.
    assert any("not restored" in note and "(an Accelerator)" in note for note in result.notes)
    assert result.trials[0].steps == 2 * (1 + 1)  # trials do not wait for the optimizer's wrapper
    trained = one.train()
    torch.manual_seed(4)
    assert trained == plain.train()
