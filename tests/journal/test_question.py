import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from oomprobe.journal.differences import differences
from oomprobe.journal.fingerprint import described, digest
from oomprobe.journal.question import question_of
from oomprobe.options import Options

ROOT = Path(__file__).parents[1]


def question(step=print, model=None, device="cpu", **options):
    steps = step if isinstance(step, dict) else {"step": step}
    return question_of(nn.Linear(2, 2) if model is None else model, steps, device, Options(**options))


def compiled(source, name="step", filename="train.py", **there):
    namespace = {"__name__": "train", **there}
    exec(compile(source, filename, "exec"), namespace)
    return namespace[name]


def same(one, other):
    return digest(one) == digest(other)


STEP = """
LENGTH = 512
def helper(x):
    return [y for y in range(x) if y in {"a", "b", "c", "d"}]
def step(model, batch_size, *, scale=2.0):
    try:
        inner = lambda: (batch_size, scale, {"e", "f", "g"} == 1, LENGTH)
        return helper(inner())
    except KeyError:
        return None
"""


# --- the question ---


def test_it_is_json_and_asking_twice_is_the_same():
    asked = question(compiled(STEP), max_batch=8)
    assert json.loads(json.dumps(asked)) == asked == question(compiled(STEP), max_batch=8)
    assert asked["oomprobe"].count(".") == 1
    assert asked["torch"] == torch.__version__
    assert asked["model"]["class"] == "Linear"
    assert asked["model"]["parameters"] == 6
    assert (asked["steps"]["step"]["module"], asked["steps"]["step"]["name"]) == ("train", "step")


def test_another_process_with_another_hash_seed_asks_the_same():
    code = "import json, journal.test_question as t; print(json.dumps(t.question(t.compiled(t.STEP))))"
    answers = set()
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        answers.add(done.stdout.strip())
    assert answers == {json.dumps(question(compiled(STEP)))}


class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(2, 2)

    def forward(self, x):
        return self.one(x)


class Deeper(Mine):
    def forward(self, x):
        return self.one(self.one(x))


Deeper.__qualname__ = "Mine"


def frozen(model):
    return model.requires_grad_(False)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (nn.Linear(2, 2), nn.Linear(2, 3)),
        (nn.Linear(2, 6, bias=False), nn.Linear(3, 4, bias=False)),  # as many parameters
        (nn.Linear(2, 2), nn.Linear(2, 2).half()),
        (nn.Linear(2, 2), nn.Linear(2, 2).eval()),
        (nn.Linear(2, 2), frozen(nn.Linear(2, 2))),
        (nn.Sequential(nn.ReLU()), nn.Sequential(nn.GELU())),
        (nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False)),
        (Mine(), Deeper()),
    ],
)
def test_what_changes_the_memory_of_a_model_changes_the_question(one, other):
    assert question(model=one)["model"] != question(model=other)["model"]
    assert question(model=one) == question(model=one)


def test_values_of_parameters_do_not():
    assert question(model=nn.Linear(2, 2)) == question(model=nn.Linear(2, 2))


def test_a_lazy_module_has_a_question():
    assert question(model=nn.LazyLinear(4))["model"]["parameters"] == 0


def test_the_device_and_the_options_belong_to_it():
    assert question(device="cpu") != question(device="sim:1GiB")
    assert differences(question(steps=2), question(steps=3)) == ["options.steps: 2 in the journal, 3 now"]


def test_time_does_not():
    assert question(time_limit_s=1) == question(trial_time_limit_s=2.5) == question()


# --- code ---


def test_a_file_may_move_and_lines_may_shift():
    assert same(compiled(STEP), compiled("\n\n" + STEP, filename="/elsewhere/train.py"))


def test_running_it_does_not_change_it():
    """Python rewrites the code of a function that is called often."""
    step = compiled("def step(m, n):\n    t = 0\n    for i in range(n):\n        t += i\n    return t")
    before = digest(step)
    for _ in range(100):
        step(None, 100)
    assert digest(step) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LENGTH = 512", "LENGTH = 1024"),  # a setting that the code names
        ("range(x)", "list(x)"),  # in a helper
        ("scale=2.0", "scale=3.0"),
        ('"e", "f"', '"e", "h"'),  # in a set, in a function inside it
        ("== 1", "== 2"),
        ("KeyError", "ValueError"),
        ("return None", "return 1"),
    ],
)
def test_what_the_code_does_changes_it(old, new):
    assert old in STEP
    assert not same(compiled(STEP), compiled(STEP.replace(old, new)))


def test_what_is_caught_changes_it():
    """The code is the same; a table beside it says where exceptions go."""
    within = "def step(m, n):\n    try:\n        a(n)\n        b(n)\n    except KeyError:\n        pass"
    beside = "def step(m, n):\n    try:\n        a(n)\n    except KeyError:\n        pass\n    else:\n        b(n)"
    assert compiled(within).__code__.co_code == compiled(beside).__code__.co_code
    assert not same(compiled(within), compiled(beside))


def test_defaults_change_it():
    assert not same(compiled("def step(m, n, k=1): ..."), compiled("def step(m, n, k=2): ..."))


def closing_over(value, other=None):
    def step(model, batch_size):
        return value, other, batch_size

    return step


@pytest.mark.parametrize(
    "value", [1, 1.5, "a", b"a", True, None, (1, ("a", 2.0)), 10**5000, float("nan"), 2j], ids=type
)
def test_simple_closure_values_count(value):
    assert same(closing_over(value), closing_over(value))
    assert not same(closing_over(value), closing_over(3))
    assert not same(closing_over((value, 1)), closing_over((value, 2)))


def test_one_is_not_true():
    assert not same(closing_over(1), closing_over(True))


def test_objects_in_a_closure_do_not_count():
    assert same(closing_over(object()), closing_over(object()))
    assert same(closing_over(nn.Linear(2, 2)), closing_over(torch.zeros(2)))


def test_which_cell_holds_a_value_counts():
    assert not same(closing_over(1, None), closing_over(None, 1))


def test_what_the_step_counts_is_no_setting():
    source = "calls = {}\ndef step(model, batch_size):\n    global calls\n    calls += 1"
    assert same(compiled(source.format(0)), compiled(source.format(7)))


class Trainer:
    def __init__(self, length, calls=0):
        self.length, self.calls, self.unnamed = length, calls, object()

    def step(self, model, batch_size):
        self.calls += 1
        return self.length

    def __call__(self, model, batch_size):
        return self.length * 2


def plain(model, batch_size, length=0):
    return length


def other(model, batch_size, length=0):
    return length + 1


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda length: Trainer(length).step, "Trainer.step"),
        (Trainer, "Trainer"),
        (lambda length: functools.partial(plain, length=length), "plain"),
        (lambda length: functools.partial(functools.partial(plain), length=length), "plain"),
        (lambda length: functools.partial(Trainer(length).step), "Trainer.step"),
    ],
)
def test_partials_methods_and_objects_are_looked_into(make, name):
    assert question(make(1)) == question(make(1))
    assert differences(question(make(1)), question(make(2))) != []
    assert question(make(1))["steps"]["step"]["name"] == name


def test_the_inner_function_and_counts_of_methods():
    assert not same(functools.partial(plain), functools.partial(other))
    assert not same(Trainer(1).step, Trainer(1))
    assert same(Trainer(1, calls=1).step, Trainer(1, calls=5).step)


def test_a_decorated_step_is_looked_into():
    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args):
            return function(*args)

        return wrapper

    assert same(decorate(plain), decorate(plain))
    assert not same(decorate(plain), decorate(other))
    for wrap in (torch.no_grad(), functools.lru_cache):
        assert same(wrap(plain), wrap(plain))
        assert not same(wrap(plain), wrap(other))


def test_functions_that_name_each_other_end():
    source = "def step(m, n):\n    return b(m, n)\ndef b(m, n):\n    return step(m, n) + {}"
    assert same(compiled(source.format(1)), compiled(source.format(1)))
    assert not same(compiled(source.format(1)), compiled(source.format(2)))


def test_functions_of_other_packages_are_not_looked_into():
    def using(text, package):
        helper = compiled(f"def helper(x): return {text}", name="helper", __name__=package)
        return compiled("def step(m, n): return helper(n)", helper=helper)

    assert same(using(1, "library.inner"), using(2, "library.inner"))
    assert not same(using(1, "train.inner"), using(2, "train.inner"))


# --- total ---


class Hostile:
    def __getattr__(self, name):
        raise RuntimeError(name)

    def __call__(self, model, batch_size):
        return None


class Stranger(Hostile):
    __call__ = print


class Slotted:
    __slots__ = ("length",)

    def __call__(self, model, batch_size):
        return self.length


def unfilled():
    def step(model, batch_size):
        return later

    kept = step
    if kept is None:
        later = 1
    return kept


def test_the_code_counts_where_a_variable_is_not_there_yet():
    def longer():
        def step(model, batch_size):
            return later + 1

        kept = step
        if kept is None:
            later = 1
        return kept

    assert not same(unfilled(), longer())


@pytest.mark.parametrize(
    "step",
    [
        *(print, len, torch.add, torch.relu_, str.upper, "".join, dict, Hostile(), Stranger(), Slotted(), unfilled()),
        *(nn.Linear(1, 1), object(), None, functools.partial(print, Hostile()), functools.lru_cache(plain)),
    ],
    ids=lambda step: type(step).__name__,
)
def test_odd_callables_have_a_question(step):
    assert json.loads(json.dumps(question(step))) == question(step)
    assert "0x" not in json.dumps(question(step)["steps"])


def test_no_address_is_in_a_description():
    assert hex(id(plain)) not in json.dumps(described(closing_over(object(), plain)))
    assert "test_question.py" not in json.dumps(described(plain))


def test_what_holds_the_process_to_less_belongs_to_it():
    def held(**memory):
        return question_of(nn.Linear(2, 2), {"step": print}, "cpu", Options(), memory=memory)

    assert held(total=8, RLIMIT_AS=4) != held(total=8)
    assert held(total=8) != held(total=7)
