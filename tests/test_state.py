import collections
import copy
import gc
import io
import itertools
import random
import subprocess
import sys
import textwrap
import threading
import weakref

import numpy as np
import pytest
import torch
from test_watch import ComparedByValue
from torch import nn

import oomprobe
from oomprobe.errors import InvalidArgumentError, UnreliableError
from oomprobe.state import Keeper, keeper
from oomprobe.state.reach import reachable
from oomprobe.watch import OptimizerWatch


class Net(nn.Module):
    """Tied weights, a frozen BatchNorm in eval mode, a non-persistent buffer, a parameter without gradient."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.BatchNorm1d(8).eval()
        self.decode = nn.Linear(8, 4, bias=False)
        self.decode.weight = nn.Parameter(self.encode.weight.detach().T.clone())
        self.tied = nn.Linear(4, 8, bias=False)
        self.tied.weight = self.encode.weight
        self.fixed = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("count", torch.zeros(1), persistent=False)

    def forward(self, x):
        self.count += 1
        hidden = self.frozen(self.norm(self.encode(x) + self.tied(x)))
        return self.decode(torch.nn.functional.dropout(hidden))


def bits(value):
    """Everything in it as bytes, for an exact comparison (NaN payloads and signed zeros included)."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.shape), value.detach().cpu().contiguous().numpy().tobytes())
    if isinstance(value, dict):
        return {repr(k): bits(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [bits(v) for v in value]
    return repr(value)


def everything(model, *objects):
    """An independent picture of the state, made without the package."""
    return {
        "parameters": [(n, id(p), p.data_ptr(), p.requires_grad, bits(p)) for n, p in model.named_parameters()],
        "buffers": [(n, id(b), bits(b)) for n, b in model.named_buffers()],
        "modes": [(n, m.training) for n, m in model.named_modules()],
        "grads": [None if p.grad is None else bits(p.grad) for p in model.parameters()],
        "objects": [bits(o.state_dict()) for o in objects],
        "rng": [bits(torch.get_rng_state()), bits(list(np.random.get_state())), random.getstate()],
    }


class Training:
    def __init__(self, *, warm_steps=0):
        torch.manual_seed(3)
        self.model = Net()
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.ema = torch.optim.swa_utils.AveragedModel(self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(warm_steps):
            self.step(self.model, 4)

    def step(self, model, batch_size):
        self.optimizer.zero_grad()
        loss = model(torch.randn(batch_size, 4)).square().mean() + random.random() + np.random.rand()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.ema.update_parameters(model)

    @property
    def objects(self):
        return (self.optimizer, self.scheduler, self.ema, self.scaler)


class Stop(Exception):
    pass


def bug(model, batch_size):
    raise Stop("a bug")


def interrupted(model, batch_size):
    raise KeyboardInterrupt


def too_large(model, batch_size):
    torch.empty(2**50)


def slow(model, batch_size):
    import time

    time.sleep(5)


WAYS_OUT = {
    "answer": (lambda m, b: None, {"max_batch": 8}, None),
    "nothing fits": (too_large, {}, oomprobe.NothingFitsError),
    "bug in the step": (bug, {}, oomprobe.StepFailedError),
    "Ctrl-C": (interrupted, {}, KeyboardInterrupt),
    "time limit": (slow, {"time_limit_s": 2.0}, oomprobe.TimeLimitError),
}


@pytest.mark.parametrize("warm_steps", [0, 3], ids=["fresh", "mid-training"])
@pytest.mark.parametrize("way", WAYS_OUT)
def test_everything_comes_back_on_every_way_out(way, warm_steps):
    ending, options, error = WAYS_OUT[way]
    training = Training(warm_steps=warm_steps)
    calls = []

    def step(model, batch_size):
        training.step(model, max(2, batch_size))
        model.train()  # flips the frozen BatchNorm, as careless code does
        model.count = model.count * 2  # replaces a buffer
        calls.append(batch_size)
        if way == "nothing fits" or len(calls) > 3:
            ending(model, batch_size)

    before = everything(training.model, *training.objects)

    def probe():
        return oomprobe.find_max_batch(training.model, step, device="cpu:1GiB", progress="off", **options)

    if error is None:
        assert probe().state_verified
    else:
        with pytest.raises(error):
            probe()
    assert calls, "the step never ran"
    assert everything(training.model, *training.objects) == before


@pytest.mark.parametrize("skip", ["put_back", "surroundings"])
def test_a_restore_that_is_skipped_is_noticed(monkeypatch, skip):
    training = Training(warm_steps=1)
    if skip == "put_back":
        monkeypatch.setattr(keeper.Keeper, "put_back", lambda self, **_: None)
    else:
        monkeypatch.setattr(keeper.Surroundings, "put_back", lambda self, **_: None)
    with pytest.raises(UnreliableError, match="not everything came back"):
        oomprobe.find_max_batch(
            training.model, training.step, device="cpu:1GiB", min_batch=2, max_batch=4, progress="off"
        )


def test_training_goes_on_to_bit_equal_weights():
    probed, plain = Training(), Training()
    oomprobe.find_max_batch(probed.model, probed.step, device="cpu:1GiB", min_batch=2, max_batch=8, progress="off")
    for training in (probed, plain):
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        for _ in range(4):
            training.step(training.model, 4)
    assert bits(probed.model.state_dict()) == bits(plain.model.state_dict())
    assert bits(probed.optimizer.state_dict()) == bits(plain.optimizer.state_dict())


def test_tied_weights_stay_tied():
    training = Training()
    oomprobe.find_max_batch(training.model, training.step, device="cpu:1GiB", min_batch=2, max_batch=4, progress="off")
    assert training.model.tied.weight is training.model.encode.weight


def test_an_optimizer_made_inside_a_step_is_found_when_it_steps():
    model = nn.Linear(3, 3)
    hidden = {}

    def get():
        if "optimizer" not in hidden:
            hidden["optimizer"] = torch.optim.Adam(model.parameters(), lr=0.5)
        return hidden["optimizer"]

    def step(model, batch_size):
        optimizer = get()
        optimizer.zero_grad()
        model(torch.randn(batch_size, 3)).sum().backward()
        optimizer.step()

    before = bits(dict(model.named_parameters()))
    result = oomprobe.find_max_batch(model, step, device="cpu:1GiB", max_batch=2, progress="off")
    assert result.state_verified
    assert bits(dict(model.named_parameters())) == before
    assert not hidden["optimizer"].state, "the state it made while probing is gone"


def test_optimizer_given_through_preserve_and_none_gradients():
    model = nn.Linear(2, 2)
    model.weight.grad = torch.full((2, 2), 7.0)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]
    kept = Keeper(model, [], optimizers, "cpu")
    original = model.weight.grad
    model.weight.grad = None
    model.bias.grad = torch.ones(2)
    optimizers[0].step()
    kept.put_back()
    assert kept.differences() == []
    assert model.bias.grad is None
    assert torch.equal(model.weight.grad, torch.full((2, 2), 7.0))
    assert model.weight.grad is original
    assert optimizers[0].state == {}


def test_replaced_gradients_are_not_kept_alive_and_come_back_by_value():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    kept = Keeper(model, [], [], "cpu")
    died = weakref.ref(model.weight.grad)
    value = model.weight.grad.clone()
    model.zero_grad(set_to_none=True)
    gc.collect()
    assert died() is None
    kept.put_back()
    assert torch.equal(model.weight.grad, value)
    assert kept.differences() == []


def test_nan_bits_and_negative_zero_survive():
    model = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        model.weight.view(-1).view(torch.int32).copy_(torch.tensor([0x7FC00001, -(2**31)], dtype=torch.int32))
    before = bits(model.weight)
    kept = Keeper(model, [], [], "cpu")
    torch.nn.init.ones_(model.weight)
    kept.put_back()
    assert bits(model.weight) == before


def test_swapped_data_comes_back_to_its_own_memory():
    model = nn.Linear(2, 2)
    pointer = model.weight.data_ptr()
    kept = Keeper(model, [], [], "cpu")
    model.weight.data = torch.zeros(5, 5)
    kept.put_back()
    assert model.weight.data_ptr() == pointer
    assert model.weight.shape == (2, 2)
    assert kept.differences() == []


def test_expanded_and_shared_buffers():
    model = nn.Module()
    base = torch.arange(4.0)
    model.register_buffer("base", base)
    model.register_buffer("view", base[1:3])
    model.register_buffer("wide", base[:1].expand(3, 1))
    kept = Keeper(model, [], [], "cpu")
    base.zero_()
    assert kept.differences()
    kept.put_back()
    assert kept.differences() == []
    assert model.view.tolist() == [1.0, 2.0]
    assert model.view.untyped_storage().data_ptr() == model.base.untyped_storage().data_ptr()


def test_sparse_gradients():
    model = nn.Embedding(5, 2, sparse=True)
    model(torch.tensor([1])).sum().backward()
    value = model.weight.grad.to_dense().clone()
    kept = Keeper(model, [], [], "cpu")
    model.zero_grad()
    kept.put_back()
    assert torch.equal(model.weight.grad.to_dense(), value)
    assert kept.differences() == []


def test_parameters_added_or_removed_by_a_step():
    model = nn.Linear(2, 2)
    kept = Keeper(model, [], [], "cpu")
    names = [n for n, _ in model.named_parameters()]
    model.register_parameter("extra", nn.Parameter(torch.ones(1)))
    del model.bias
    assert kept.differences()
    kept.put_back()
    assert [n for n, _ in model.named_parameters()] == names


MATMUL = torch.backends.cuda.matmul
FLAGS = {
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "grad mode": lambda: torch.set_grad_enabled(False),
    "cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "mkldnn.enabled": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "autocast cpu": lambda: torch.set_autocast_enabled("cpu", True),
    "math attention": lambda: torch.backends.cuda.enable_math_sdp(False),
    "cudnn attention": lambda: torch.backends.cuda.enable_cudnn_sdp(False),
    "default device": lambda: torch.set_default_device("meta"),
    "fp16 reduced precision reduction": lambda: setattr(MATMUL, "allow_fp16_reduced_precision_reduction", False),
    "bf16 reduced precision reduction": lambda: setattr(MATMUL, "allow_bf16_reduced_precision_reduction", False),
    "fp16 accumulation": lambda: setattr(MATMUL, "allow_fp16_accumulation", True),
    "attention fast path": lambda: torch.backends.mha.set_fastpath_enabled(False),
    "autograd multithreading": lambda: torch.autograd.set_multithreading_enabled(False),
    "nnpack": lambda: torch.backends.nnpack.set_flags(False),
    "fill uninitialised memory": lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "warn always": lambda: torch.set_warn_always(True),
    "random": random.random,
    "numpy.random": np.random.rand,
    "torch (cpu)": lambda: torch.rand(1),
}


@pytest.mark.parametrize("name", FLAGS)
def test_global_flags_and_generators(name):
    kept = Keeper(nn.Linear(1, 1), [], [], "cpu")
    FLAGS[name]()
    assert kept.differences() == [name]
    kept.put_back()
    assert kept.differences() == []


class Counter:
    """State behind attributes that only its own state_dict knows."""

    class Inner:
        value = torch.zeros(1)

    def __init__(self):
        self.inner = Counter.Inner()
        self.inner.value = torch.zeros(1)

    def state_dict(self):
        return {"value": self.inner.value.clone()}

    def load_state_dict(self, state):
        self.inner.value = state["value"].clone()


def test_objects_known_only_through_their_state_dict():
    counter = Counter()
    kept = Keeper(nn.Linear(1, 1), [lambda m, b: counter], [], "cpu")
    counter.inner.value += 1
    assert kept.differences() == ["state of Counter"]
    kept.put_back()
    assert counter.inner.value.item() == 0
    assert kept.differences() == []


def test_preserve_refuses_what_has_no_state():
    with pytest.raises(InvalidArgumentError, match="preserve holds a list"):
        Keeper(nn.Linear(1, 1), [], [[1]], "cpu")


def test_a_snapshot_larger_than_host_memory_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setattr(keeper.linux, "free_bytes", lambda: 1000)
    with pytest.raises(UnreliableError, match=r"needs a copy of 78\.52 KiB .* and 1000 B is free: nothing was run"):
        Keeper(nn.Linear(200, 100), [], [], "cpu")


def test_host_copy_is_a_state_dict_of_before():
    training = Training(warm_steps=2)
    kept = Keeper(training.model, [training.step], [], "cpu")
    model_before = bits(training.model.state_dict())
    optimizer_before = bits(training.optimizer.state_dict()["state"])
    training.step(training.model, 4)
    copied = kept.host_copy()
    named = {name: copied["model"][name] for name in training.model.state_dict()}
    assert bits(named) == model_before
    assert bits(copied["optimizers"][0]["state"]) == optimizer_before
    fresh = torch.optim.AdamW([p for p in training.model.parameters() if p.requires_grad])
    fresh.load_state_dict(copy.deepcopy(copied["optimizers"][0]))


class Holder:
    def __init__(self, optimizer):
        self.parts = {"list": [optimizer]}

    def method(self, model, batch_size):
        pass

    def __call__(self, model, batch_size):
        pass


def test_what_a_step_can_reach():
    from functools import partial

    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1)

    def closes_over(model, batch_size):
        optimizer.step()

    def default(model, batch_size, optimizer=optimizer):
        pass

    def nested(model, batch_size):
        return (lambda: [closes_over for _ in range(1)])()

    holder = Holder(optimizer)
    for root in (closes_over, default, nested, holder, holder.method, partial(default, optimizer=optimizer)):
        assert optimizer in reachable([root]), root
    assert optimizer not in reachable([lambda m, b: None])


def test_a_step_of_a_script_names_its_optimizer(tmp_path):
    """Globals of the module that defines the step, which is how scripts are written."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
            import torch, oomprobe
            model = torch.nn.Linear(3, 3)
            optimizer = torch.optim.Adam(model.parameters())
            def loss_of(batch_size):
                return model(torch.randn(batch_size, 3)).sum()
            def step(model, batch_size):
                optimizer.zero_grad(); loss_of(batch_size).backward(); optimizer.step()
            before = model.weight.clone()
            result = oomprobe.find_max_batch(model, step, device="cpu:1GiB", max_batch=2, progress="off")
            assert torch.equal(before, model.weight) and not optimizer.state
            print(result.batch_size)
        """)
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.stdout == "2\n", done.stderr


class Attributes:
    """Something with state whose restoration is its own matter."""

    def __init__(self, **values):
        self.__dict__.update(values)

    def state_dict(self):
        return dict(self.__dict__)

    def load_state_dict(self, state):
        self.__dict__.update(state)


class Plain:
    """No comparison of its own."""

    def __init__(self, value=0):
        self.value = value


class Raises(Attributes):
    def load_state_dict(self, state):
        raise ValueError("another version")


def test_what_cannot_be_restored_does_not_keep_the_rest_from_it():
    model, stuck, other = nn.Linear(2, 2), Raises(inner=Plain()), Attributes(n=0)
    kept = Keeper(model, [], [stuck, other], "cpu")
    before, generator = bits(model.weight), torch.get_rng_state()
    stuck.inner.value, other.n = 1, 1
    nn.init.zeros_(model.weight)
    torch.rand(1)
    with pytest.raises(UnreliableError, match=r"state of Raises \(ValueError: another version\)\. Do not train"):
        kept.put_back()
    assert other.n == 0
    assert bits(model.weight) == before
    assert torch.equal(torch.get_rng_state(), generator)


def test_a_read_only_array_that_did_not_change_is_not_written():
    data = np.zeros(3)
    data.flags.writeable = False
    holder = Attributes(data=data, n=0)
    kept = Keeper(nn.Linear(1, 1), [], [holder], "cpu")
    holder.n = 1
    kept.put_back()
    assert holder.n == 0
    assert kept.differences() == []


class Answers:
    """Its state is made anew on every call, as most are."""

    def __init__(self, make):
        self.make = make

    def state_dict(self):
        return {"made": self.make()}

    def load_state_dict(self, state):
        pass


def some_file(content=b"a"):
    return io.BytesIO(content)


UNCOMPARABLE = {
    "object": lambda: Plain(3),
    "object in an object": lambda: Plain(Plain(np.float32("nan"))),
    "deque of tensors": lambda: collections.deque([torch.zeros(2)] * 2, maxlen=2),
    "set of objects": lambda: {"a", 2},
    "nan": lambda: np.float32("nan"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "file": some_file,
    "numpy generator": lambda: np.random.default_rng(0),
    "torch generator": lambda: torch.Generator().manual_seed(1),
    "lock": threading.Lock,
    "array of objects": lambda: np.array([Plain()], dtype=object),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    "ordered": lambda: collections.OrderedDict(a=torch.ones(1)),
    "key without comparison": lambda: {Plain(): 1},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", UNCOMPARABLE)
def test_equal_state_is_not_called_different(name):
    answers = Answers(UNCOMPARABLE[name])
    kept = Keeper(nn.Linear(1, 1), [], [answers], "cpu")
    kept.put_back()
    assert kept.differences() == []


CHANGED = {
    "object": lambda: Plain(4),
    "deque of tensors": lambda: collections.deque([torch.ones(2)] * 2, maxlen=2),
    "set of objects": lambda: {"a", 3},
    "sparse": lambda: (2 * torch.eye(3)).to_sparse(),
    "file": lambda: some_file(b"b"),
    "numpy generator": lambda: np.random.default_rng(1),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(4), 0.2, 0, torch.qint8),
    "array of objects": lambda: np.array([Plain(1)], dtype=object),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHANGED)
def test_changed_state_is_called_different(name):
    answers = Answers(UNCOMPARABLE[name])
    kept = Keeper(nn.Linear(1, 1), [], [answers], "cpu")
    kept._objects[0]._value.make = CHANGED[name]
    assert kept.differences() == ["state of Answers"]


def run_script(text):
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)


def test_a_buffer_over_a_read_only_file_is_not_written(tmp_path):
    run_script(f"""
        import numpy as np, torch, warnings
        from oomprobe.state import Keeper
        warnings.simplefilter("ignore")
        np.save({str(tmp_path / "a.npy")!r}, np.ones((4, 4), "f4"))
        model = torch.nn.Linear(2, 2)
        model.register_buffer("table", torch.from_numpy(np.load({str(tmp_path / "a.npy")!r}, mmap_mode="r")))
        kept = Keeper(model, [], [], "cpu")
        kept.put_back()
        assert kept.differences() == []
        """)


def test_quantised_buffers_come_back():
    run_script("""
        import torch, warnings
        from oomprobe.state import Keeper
        warnings.simplefilter("ignore")
        model = torch.nn.Linear(2, 2)
        one, other = (torch.quantize_per_tensor(torch.full((4,), v), .1, 0, torch.qint8) for v in (1., 2.))
        model.register_buffer("q", one)
        kept = Keeper(model, [], [], "cpu")
        kept.put_back()
        assert kept.differences() == []
        model.q = other
        assert kept.differences()
        kept.put_back()
        assert kept.differences() == []
        assert model.q is one
        """)


def test_optimizers_that_a_step_builds_anew_are_not_kept_alive():
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    before = bits(dict(model.named_parameters()))
    kept = Keeper(model, [], [], "cpu")
    other_before = bits(dict(other.named_parameters()))
    died = []
    for _ in range(50):
        optimizer = torch.optim.Adam([*model.parameters(), *other.parameters()], lr=0.5)
        (model(torch.ones(1, 3)).sum() + other(torch.ones(1, 3)).sum()).backward()
        kept.add(optimizer)
        optimizer.step()
        died += [weakref.ref(optimizer), weakref.ref(optimizer.state[model.weight]["exp_avg"])]
        assert kept.optimizers == [optimizer]
    del optimizer
    gc.collect()
    assert not [ref for ref in died if ref() is not None]
    assert kept.optimizers == []
    kept.put_back()
    assert kept.differences() == []
    assert bits(dict(model.named_parameters())) == before
    assert bits(dict(other.named_parameters())) == other_before


def test_a_late_optimizer_in_the_middle_of_training_comes_back():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)

    def step():
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    step()
    kept = Keeper(model, [], [], "cpu")
    before = bits(optimizer.state_dict())
    averages = optimizer.state[model.weight]["exp_avg"]
    kept.add(optimizer)
    step()
    optimizer.param_groups[0]["lr"] = 7.0
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert kept.differences()
    kept.put_back()
    assert kept.differences() == []
    assert bits(optimizer.state_dict()) == before
    assert optimizer.state[model.weight]["exp_avg"] is averages


def test_late_optimizers_that_are_equal_and_have_no_hash_both_come_back():
    model = nn.Linear(3, 3)
    both = [ComparedByValue(model.parameters(), lr=0.5) for _ in range(2)]
    kept = Keeper(model, [], [], "cpu")
    for one in both:
        kept.add(one)
        one.param_groups[0]["lr"] = 7.0
    kept.put_back()
    assert [one.param_groups[0]["lr"] for one in both] == [0.5, 0.5]


class Wrapper(torch.optim.Optimizer):
    """The shape of accelerate's: everything belongs to another optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)


def test_host_copy_is_of_before_and_never_raises():
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.eye(3).to_sparse())
    model.register_buffer("empty", None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    kept = Keeper(model, [], [Wrapper(optimizer)], "cpu")
    before = bits(model.weight)
    model.weight = nn.Parameter(torch.zeros(5, 5))
    model.empty = torch.ones(1)
    optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    copied = kept.host_copy()
    assert sorted(copied["model"]) == ["bias", "table", "weight"]
    assert bits(copied["model"]["weight"]) == before
    assert [len(state["param_groups"]) for state in copied["optimizers"]] == [1]


def test_a_plain_attribute_does_not_hide_a_restored_parameter():
    model = nn.Linear(2, 2)
    weight = model.weight
    kept = Keeper(model, [], [], "cpu")
    del model.weight
    model.weight = torch.zeros(2, 2)
    model.register_forward_pre_hook(lambda module, inputs: None)
    model.register_forward_hook(lambda module, inputs, output: output * 0, with_kwargs=False)
    assert {"parameters of Linear", "hooks of Linear"} < set(kept.differences())
    kept.put_back()
    assert model.weight is weight
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    model.__dict__["bias"] = torch.zeros(2)
    assert kept.differences() == ["bias of Linear, hidden by an attribute"]


def test_sparse_parameter_comes_back_in_place():
    model = nn.Module()
    model.weight = nn.Parameter(torch.eye(3).to_sparse())
    weight = model.weight
    kept = Keeper(model, [], [], "cpu")
    weight.data = (2 * torch.eye(3)).to_sparse()
    assert kept.differences()
    kept.put_back()
    assert model.weight is weight
    assert torch.equal(weight.to_dense(), torch.eye(3))
    assert kept.differences() == []


def test_state_that_is_kept_already_is_not_copied_again(monkeypatch):
    copied = []
    original = keeper.copy_storages
    monkeypatch.setattr(keeper, "copy_storages", lambda new, to: (copied.append(len(new)), original(new, to)))
    average = Attributes(shadow={"a": torch.ones(3)})
    kept = Keeper(nn.Module(), [], [average], "cpu")
    assert copied == [1]
    average.shadow["a"].zero_()
    assert kept.differences() == ["state of Attributes"]
    kept.put_back()
    assert average.shadow["a"].tolist() == [1, 1, 1]


def test_state_counts_in_the_size_check(monkeypatch):
    monkeypatch.setattr(keeper.linux, "free_bytes", lambda: 1000)
    with pytest.raises(UnreliableError, match="nothing was run"):
        Keeper(nn.Module(), [], [Answers(lambda: torch.ones(1000))], "cpu")


def test_deep_and_long_lists():
    deep = []
    node = deep
    for _ in range(3000):
        node.append([])
        node = node[0]
    samples = [{"text": "x", "label": i} for i in range(2000)]
    holder = Answers(lambda: 0)
    holder.deep, holder.samples = deep, samples
    kept = Keeper(nn.Linear(1, 1), [], [holder], "cpu")
    first = samples[0]
    samples[0] = None
    kept.put_back()
    assert samples[0] is first


def test_a_storage_is_compared_and_written_once(monkeypatch):
    flat = torch.ones(100)
    model = nn.Module()
    for i in range(100):
        model.register_parameter(f"p{i}", nn.Parameter(flat[i : i + 1]))
    kept = Keeper(model, [], [], "cpu")
    flat.zero_()
    calls = []
    original = torch.equal
    monkeypatch.setattr(torch, "equal", lambda a, b: calls.append(1) or original(a, b))
    kept.put_back()
    from_tensors = len(calls)
    assert kept.differences() == []
    assert flat.sum() == 100
    assert from_tensors < 20


def test_gradients_that_a_late_optimizer_had_before_are_said_to_be_unknown():
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    for network in (model, other):
        network(torch.ones(1, 1)).sum().backward()
    kept = Keeper(model, [], [], "cpu")
    kept.add(torch.optim.SGD(model.parameters()))
    assert kept.notes == []
    kept.add(torch.optim.SGD(other.parameters()))
    assert len(kept.notes) == 1
    assert kept.notes[0].startswith("SGD was first seen when it stepped, so what the gradients of 2 of its parameters")


def test_what_is_unknown_stands_in_the_notes_of_the_result():
    def made():
        network = nn.Linear(3, 1)
        network(torch.ones(1, 3)).sum().backward()
        return network, torch.optim.SGD(network.parameters())

    hidden = itertools.repeat(made())  # an iterator is not looked into

    def step(model, batch_size):
        network, optimizer = next(hidden)
        network(model(torch.ones(batch_size, 3))).sum().backward()
        optimizer.step()

    result = oomprobe.find_max_batch(nn.Linear(3, 3), step, device="cpu:1GiB", max_batch=1, progress="off")
    assert "SGD was first seen when it stepped" in " ".join(result.notes)


def test_a_default_device_that_was_set_comes_back():
    torch.set_default_device("meta")
    try:
        kept = Keeper(nn.Linear(1, 1, device="cpu"), [], [], "cpu")
        torch.set_default_device(None)
        assert kept.differences() == ["default device"]
        kept.put_back()
        assert torch.empty(1).device.type == "meta"
        kept.put_back()
        assert kept.differences() == []
    finally:
        torch.set_default_device(None)
    assert torch.empty(1).device.type == "cpu"


@pytest.fixture
def swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def converts(model, batch_size):
    model.double()
    torch.optim.SGD(model.parameters()).step()
    model(torch.ones(batch_size, 3).double()).sum().backward()
    model.zero_grad()


@pytest.mark.usefixtures("swapping")
def test_tensors_that_are_kept_can_be_swapped():
    model = nn.Linear(3, 3)
    parameters = list(model.parameters())
    before = [(bits(p), p.data_ptr()) for p in parameters]
    result = oomprobe.find_max_batch(model, converts, device="cpu:1GiB", max_batch=2, progress="off")
    assert result.state_verified
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
    assert [(bits(p), p.data_ptr()) for p in parameters] == before


# --- models and optimizers that a step makes anew on each call ---


def stepped(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def test_what_a_call_made_and_dropped_is_not_kept():
    keeper, made = Keeper(nn.Module(), [], [], "cpu"), []
    with OptimizerWatch(keeper.add):
        for _ in range(3):
            model = nn.Linear(4, 4)
            made.append(weakref.ref(model.weight))
            stepped(model)
            del model
            keeper.release_dead()
            assert made[-1]() is None
    assert keeper.notes == []  # what its gradients were before the probe is no question
    keeper.put_back()
    assert keeper.differences() == []


def test_what_others_still_have_is_kept_when_its_optimizer_has_died():
    keeper, model = Keeper(nn.Module(), [], [], "cpu"), nn.Linear(4, 4)
    before = [p.detach().clone() for p in model.parameters()]
    with OptimizerWatch(keeper.add):
        for _ in range(3):
            stepped(model)
            keeper.release_dead()
    assert not torch.equal(model.weight, before[0])
    keeper.put_back()
    assert [torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True)] == [True, True]
    assert [p.grad for p in model.parameters()] == [None, None]
    assert "gradients of 2 of its parameters" in keeper.notes[0]
    assert keeper.differences() == []
