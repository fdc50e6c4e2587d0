import contextlib
import copy
import functools
import gc
import io
import os
import pickle
import re
import signal
import traceback

import numpy as np
import pytest
import torch
from ledger import Log
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import oomprobe
from oomprobe.errors import UnreliableError
from simulation.bench import Bench, bytes_of

MIB = 2**20


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def train(model, optimizer, batch_size, device=None):
    def step():
        x, y = (
            torch.randn(batch_size, 64, device=device),
            torch.randint(10, (batch_size,), device=device),
        )
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


# --- nothing real changes ---


@pytest.mark.parametrize("device", [None, "cuda"])
def test_a_step_changes_no_real_tensor(device):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch_size=64, device=device):
        optimizer.zero_grad()
        x, y = (
            torch.randn(batch_size, 3, 8, 8, device=device),
            torch.randint(10, (batch_size,), device=device),
        )
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def real():
        states = (t for state in optimizer.state.values() for t in state.values() if t.dim())
        return [*model.parameters(), *model.buffers(), *states]

    step(4, None)  # creates real optimizer state
    optimizer.zero_grad()
    before = [t.detach().clone() for t in real()]
    bench = Bench()
    bench.device.place(real())
    bench.run(step, times=3)
    assert all(map(torch.equal, before, real()))


def test_patches_are_removed_after_an_error():
    def patched():
        return (
            torch.cuda.is_available,
            torch.amp.autocast.__init__,
            nn.Module._apply,
            torch.Generator,
            torch.save,
        )

    before = patched()
    bench = Bench(net())
    with pytest.raises(KeyError, match="mine"):
        bench.run(lambda: {}["mine"])
    assert patched() == before
    x = torch.randn(4, 4, requires_grad=True)
    y = F.dropout(x, 0.5)
    assert "NativeDropout" not in type(y.grad_fn).__name__  # the CPU's own path again
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.stack([x.bfloat16(), x]).dtype is torch.float32  # by the CPU's list


# --- what is counted ---


def test_parameters_gradients_and_state_are_counted():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    bench = Bench(model)
    weights = bytes_of(*model.parameters())
    assert bench.allocated_bytes == weights
    bench.run(train(model, optimizer, 32, "cuda"), times=2)
    workspaces = 2 * 8_519_680  # of the main and the backward thread
    assert (
        bench.allocated_bytes == 4 * weights + workspaces
    )  # gradients and two moments; step counts stay on the host
    optimizer.zero_grad()
    assert bench.allocated_bytes == 3 * weights + workspaces


def activation():
    x = torch.zeros(MIB, device="cuda")
    y = x + 1
    del x
    return y * 2


def views():
    x = torch.zeros(MIB, device="cuda")
    return x, x[:10], x.view(2, -1), x.detach(), x.to("cuda")


def copied():
    x = torch.zeros(MIB, device="cuda")
    return x, x.to("cuda", copy=True)


@pytest.mark.parametrize(
    ("make", "left_mib", "peak_mib"),
    [
        (activation, 4, 8),
        (views, 4, 4),
        (copied, 8, 8),
        (
            lambda: torch.zeros(16, device="cuda").resize_(MIB),
            4,
            4 + 512 / MIB,
        ),  # the new block before the old one is freed
        (lambda: torch.zeros(MIB, device="cuda").to("cpu"), 0, 4),
        (lambda: torch.empty(MIB, pin_memory=True).pin_memory(), 0, 0),
    ],
)
def test_storages_count_while_alive(make, left_mib, peak_mib):
    def step():
        made = make()
        return torch.cuda.memory_allocated(), made

    bench = Bench()
    left, made = bench.run(step)
    assert (left, bench.peak_bytes) == (left_mib * MIB, peak_mib * MIB)
    del made
    assert bench.allocated_bytes == 0


DATA = torch.zeros(4096, 64)


def moved(model):
    x = torch.randn(MIB, 64)
    assert torch.cuda.memory_allocated() == bytes_of(*model.parameters())  # x is on the host
    return x.to("cuda")


def used(model):
    x = torch.randn(MIB, 64)
    model[0](x)
    assert x.is_cuda
    return x


def sliced(model):
    x = DATA[:128]
    model[0](x)
    model[0](x)  # moved only once
    return x


@pytest.mark.parametrize(
    ("batch", "nbytes"),
    [(moved, 256 * MIB), (used, 256 * MIB + 8_519_680), (sliced, 128 * 64 * 4 + 8_519_680)],
)
def test_a_host_batch_counts_once_used_with_the_card(batch, nbytes):
    model = net()
    bench = Bench(model)
    weights = bench.allocated_bytes

    def step():
        with torch.no_grad():
            x = batch(model)
        return x.shape[1], torch.cuda.memory_allocated()

    assert bench.run(step) == (64, weights + nbytes)


# --- what the step sees ---


def test_devices_as_the_step_sees_them():
    model = net()

    def step():
        assert model.cuda() is model is model.to("cuda")
        x = torch.randn(4, 64, device=next(model.parameters()).device)
        y = model(x)
        y.sum().backward()
        host = torch.zeros(3)
        return [
            next(model.parameters()).device, x.device, y.device, model[0].weight.grad.device,
            torch.zeros_like(x).device, x.new_zeros(3).device, torch.tensor([1.0, 2.0], device="cuda").device,
            torch.as_tensor(np.ones(3), device="cuda").device, host.cuda().device, host.to(0).device,
            host.to(x).device, torch.arange(4, device="cuda").device, x.to(torch.float16).device,
            x.half().device, x.type(torch.int32).device, torch.full((2,), 1.0, device=torch.device("cuda", 0)).device,
        ], [host.device, x.cpu().device, torch.tensor([1]).device, x.to("cpu").device], [
            (t.is_cuda, t.is_cpu, t.get_device()) for t in (model[0].weight, x, host)
        ]  # fmt: skip

    card, host, kinds = Bench(model).run(step)
    assert {str(device) for device in card} == {"cuda:0"}
    assert {str(device) for device in host} == {"cpu"}
    assert kinds == [(True, False, 0), (True, False, 0), (False, True, -1)]


def test_hooks_of_saved_tensors_see_the_card():
    """Operators call them, and backward passes."""
    model, seen = nn.Linear(64, 64), Log()

    def note(tensor):
        seen.extend((str(tensor.device), str(model.weight.device)))
        return tensor

    def step():
        x = torch.randn(4, 64, device="cuda", requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(note, note):
            loss = (model(x) * model.bias).sum()
        torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()

    Bench(model).run(step)
    assert len(seen) > 10
    assert {*seen} == {"cuda:0"}


def test_torch_cuda_answers_from_the_simulation():
    def step():
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        x = torch.zeros(MIB, device="cuda")
        end.record()
        torch.cuda.synchronize()
        del x
        with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0):
            torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
        cuda, accelerator = torch.cuda, torch.accelerator
        answers = [
            cuda.is_available(), cuda.device_count(), cuda.current_device(), accelerator.current_accelerator().type,
            cuda.is_bf16_supported(), cuda.get_device_name(), cuda.get_device_properties(0).total_memory,
            cuda.memory_allocated(), cuda.max_memory_allocated(), cuda.memory_reserved(), cuda.mem_get_info()[0],
            cuda.memory_stats()["allocated_bytes.all.peak"], "num_ooms" in cuda.memory_summary(),
            start.elapsed_time(end) > 0,
        ]  # fmt: skip
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return [*answers, torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated()]

    bench = Bench(card="H100-80GB")
    card = bench.device.card
    assert bench.run(step) == [
        True, 1, 0, "cuda", True, card.full_name, card.total_bytes, 0, 4 * MIB, 20 * MIB, card.available_bytes - 20 * MIB,
        4 * MIB, True, True, 0, 0,
    ]  # fmt: skip
    assert bench.peak_bytes == 4 * MIB  # the trial keeps its own peak


# --- values ---


def one_set():
    values = torch.zeros(5000)
    values[3] = 7
    return values


ON_CARD = {
    "item": (lambda loss: loss.item(), 1.0),
    "text": (lambda loss: f"{loss:.3f}", "1.000"),
    "array of a scalar": (lambda loss: float(loss.detach().cpu().numpy()), 1.0),
    "array": (lambda loss: np.isfinite(loss.expand(5).clone().cpu().numpy()).sum(), 5),
    "list": (lambda loss: loss.expand(5).tolist(), [1.0] * 5),
    "isfinite": (lambda loss: bool(torch.isfinite(loss)), True),
    "all": (lambda loss: bool(torch.isfinite(loss).all()), True),
    "isnan": (lambda loss: bool(torch.isnan(loss)), False),
    "not": (lambda loss: bool(~torch.isnan(loss)), True),
    "or": (lambda loss: bool(torch.isnan(loss) | torch.isinf(loss)), False),
    "larger": (lambda loss: bool(loss > 0), True),
    "smaller": (lambda loss: bool(loss < 0.5), False),
    "and": (lambda loss: bool((loss > 0) & (loss < 10)), True),
    "allclose": (lambda loss: torch.allclose(loss, loss), True),
    "torch.equal": (lambda loss: torch.equal(loss, loss), True),
}
ON_HOST = {
    "scalar": (lambda _: torch.tensor(3.5).item(), 3.5),
    "text at the host": (lambda _: str(torch.ones(3)), "tensor([1., 1., 1.])"),
    "set": (
        lambda _: (float(one_set()[3]), float(one_set().sum()), bool((one_set() > 5).any())),
        (7.0, 7.0, True),
    ),
    "permutation": (lambda _: len(set(torch.randperm(100_000).tolist())), 100_000),
    "4 TiB, without memory": (
        lambda _: torch.zeros(2**20, 2**20, device="cpu").numpy().shape,
        (2**20, 2**20),
    ),
}


@pytest.mark.parametrize(
    ("read", "value"), {**ON_CARD, **ON_HOST}.values(), ids=[*ON_CARD, *ON_HOST]
)
def test_a_loss_reads_as_one_and_host_tensors_keep_their_values(read, value):
    bench = Bench()
    assert bench.run(lambda: read(torch.randn((), device="cuda") + 3)) == value
    assert bench.notes == ""


def unknown(dtype):
    return torch.empty(4, dtype=dtype, device="cuda")[1]


def index():
    return torch.randn(5, device="cuda").argmax().item()


DECIDING = {
    "boolean": lambda: unknown(torch.bool).item(),
    "branch": lambda: index() > 3,
    "a list's choice": lambda: index() in [3, 4],
    "number of turns": lambda: [*range(unknown(torch.int64).item())],
    "size": lambda: torch.zeros(2 * (index() + 2)),
    "slice": lambda: torch.zeros(9)[: index()],
    "a list": lambda: unknown(torch.int64)[None].tolist(),
    "int": lambda: int(unknown(torch.int64)),
}
HARMLESS = {
    "counts": lambda: 5 + (torch.randn(8, device="cuda") > 0).sum().item(),
    "printed": lambda: f"{index()} {index() / 7:.2f}",
    "an index": lambda: [*range(5)][index()],
    "indices": lambda: torch.randn(4, 3, device="cuda").argmax(1).tolist(),
    "kept": lambda: copy.deepcopy(pickle.loads(pickle.dumps(index()))),
}


@pytest.mark.parametrize("name", DECIDING)
def test_unknown_values_are_noted_where_something_depends_on_them(name):
    bench = Bench()
    bench.run(DECIDING[name])
    assert re.search(r"test_card_mode\.py:\d+ reads an? (integer|boolean)", bench.notes)


@pytest.mark.parametrize("name", HARMLESS)
def test_unknown_values_are_not_noted_where_nothing_depends_on_them(name):
    bench = Bench()
    bench.run(HARMLESS[name])
    assert bench.notes == ""


@torch.library.custom_op("oomprobe_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("message", "act"),
    [
        (
            "aten::repeat_interleave at LINE depends on the values .* real device",
            lambda x: torch.ones_like(x).repeat_interleave(x.long()),
        ),
        ("LINE asks for the address", lambda x: x.data_ptr()),
        (
            "LINE asks for the address",
            lambda x: x.untyped_storage().data_ptr(),
        ),  # not dispatched by torch
        ("sparse_coo tensor .* at LINE", lambda x: x.to_sparse()),
        (
            "oomprobe_tests.twice.* at LINE cannot run without data .*register_fake",
            lambda x: twice(x),
        ),
    ],
)
def test_refusals_name_the_line(message, act):
    line = act.__code__.co_firstlineno
    with pytest.raises(
        UnreliableError, match=message.replace("LINE", rf"test_card_mode\.py:{line}\b")
    ):
        Bench().run(lambda: act(torch.randn(5, device="cuda")))


COPIES = {
    "state of a model": lambda model, optimizer: copy.deepcopy(model.state_dict()),
    "optimizer": lambda model, optimizer: copy.deepcopy(optimizer),
    "activations": lambda model, optimizer: copy.deepcopy(
        model[0](torch.ones(4, 64, device="cuda")).detach()
    ),
}


@pytest.mark.parametrize("name", COPIES)
def test_what_early_stopping_keeps_is_copied(name):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    bench, kept = Bench(model), []
    bench.run(train(model, optimizer, 4, "cuda"))

    def keep():
        before = torch.cuda.memory_allocated()
        kept.append(COPIES[name](model, optimizer))
        return torch.cuda.memory_allocated() - before

    def tensors(value):
        if isinstance(value, torch.optim.Optimizer):
            value = [value.param_groups, [*value.state.values()]]
        return [one for one in tree_leaves(value) if isinstance(one, torch.Tensor) and one.is_cuda]

    taken = bench.run(keep)
    copied = bench.run(
        lambda: {
            one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors(kept[0])
        }
    )
    assert taken == sum(-(-nbytes // 512) * 512 for nbytes in copied.values()) > 0


def test_copies_share_memory_as_the_tensors_did():
    bench = Bench(net())

    def copied():
        whole = torch.ones(8, 8, device="cuda")
        first, part = copy.deepcopy((whole, whole[2:, 1:]))
        return (
            first.untyped_storage()._cdata == part.untyped_storage()._cdata,
            part.stride(),
            part.storage_offset(),
        )

    assert bench.run(copied) == (True, (8, 1), 17)


def test_a_copy_of_what_has_a_graph_fails_as_in_torch():
    model = net()
    with pytest.raises(RuntimeError, match="only leaf tensors can be copied"):
        Bench(model).run(lambda: copy.deepcopy(model(torch.ones(4, 64, device="cuda"))))


def test_a_state_is_saved_to_a_buffer_and_loaded_again():
    model = net()
    optimizer, buffer = torch.optim.AdamW(model.parameters()), io.BytesIO()
    bench = Bench(model)
    bench.run(train(model, optimizer, 4, "cuda"))
    bench.run(lambda: torch.save((model.state_dict(), optimizer.state_dict()), buffer))
    assert buffer.tell() > 3 * sum(one.nbytes for one in model.parameters())

    def load():
        buffer.seek(0)
        weights, state = torch.load(buffer)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)

    bench.run(load)


@pytest.mark.parametrize("opened", [False, True], ids=["path", "file"])
def test_a_file_is_never_replaced_by_a_checkpoint_without_values(opened, tmp_path):
    path = tmp_path / "best.pt"
    path.write_bytes(b"good weights")
    model, bench = net(), Bench(net())
    with path.open("r+b") as file:
        bench.run(lambda: torch.save(model.state_dict(), file if opened else path))
    assert path.read_bytes() == b"good weights"
    assert "test_card_mode.py" in bench.notes
    assert "nothing was written" in bench.notes


# --- out of memory ---


def test_out_of_memory_is_torchs_own_and_leaks_nothing():
    model = net()
    bench = Bench(model, card="64MiB")
    weights = bench.allocated_bytes
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate"):
        bench.run(train(model, optimizer, 2**20, "cuda"))
    for parameter in model.parameters():
        parameter.grad = None
    assert bench.allocated_bytes - weights in (0, 8_519_680, 2 * 8_519_680)


def test_out_of_memory_in_backward_can_be_caught_by_the_step():
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))

    def step():
        try:
            model(torch.randn(4096, 1024, device="cuda")).sum().backward()
        except torch.OutOfMemoryError as error:
            return "backward" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]

    assert Bench(model, card="130MiB").run(step)


# --- scalers, cycles, models ---


@pytest.mark.parametrize("enabled", [True, False])
def test_cycles_are_freed_at_the_end_of_their_call(enabled):
    def step():
        cycle = [torch.zeros(MIB, device="cuda")]
        cycle.append(cycle)
        return gc.isenabled()

    bench = Bench()
    (gc.enable if enabled else gc.disable)()
    try:
        assert (bench.run(step), bench.allocated_bytes, gc.isenabled()) == (False, 0, enabled)
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantised_tensors_are_refused():
    weight = torch.quantize_per_tensor(torch.zeros(4, 4), 1.0, 0, torch.qint8)
    with pytest.raises(UnreliableError, match="quantised"):
        Bench().device.place([weight])


MODELS = {
    "recurrent": (
        lambda: nn.GRU(64, 32, 2, batch_first=True, dropout=0.1, bidirectional=True),
        lambda m, x: m(x)[0],
    ),
    "compiled": (
        lambda: torch.compile(nn.Linear(64, 64), fullgraph=True),
        lambda m, x: m(x),
    ),  # runs eagerly
    # Checkpointing asks for the device of real parameters inside the dispatch mode.
    "checkpointed norm": (
        lambda: nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.Dropout(0.1)),
        lambda m, x: checkpoint(m, x.requires_grad_(), use_reentrant=False),
    ),
}


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:torch.compile with fullgraph"
)  # by torch.compile
@pytest.mark.parametrize("name", MODELS)
def test_models_that_run(name):
    make, forward = MODELS[name]
    model = make()
    Bench(model).run(
        lambda: forward(model, torch.zeros(4, 10, 64, device="cuda")).sum().backward(), times=2
    )
    assert all(p.grad is not None for p in model.parameters())


# --- easily missed memory ---


def test_recurrent_networks_keep_their_gates():
    """Each time step saves four gates, the cell and the output: at least 6 * batch * length * width * 4 bytes."""
    bench = Bench(nn.LSTM(32, 64, batch_first=True))
    bench.run(lambda: bench.model(torch.zeros(256, 20, 32, device="cuda"))[0].sum().backward())
    assert bench.peak_bytes > 6 * 256 * 20 * 64 * 4
    assert "recurrent" in bench.notes


def test_replaced_parameter_data_counts_once():
    model = nn.Linear(1024, 1024, bias=False)

    def step():
        model(torch.zeros(8, 1024, device="cuda")).sum().backward()
        for p in model.parameters():
            p.data = p.data - 0.1 * p.grad
            p.grad = None

    bench = Bench(model)
    kept = model.weight.data  # as a snapshot does
    bench.run(step, times=3)
    assert bench.allocated_bytes == 4 * MIB + 2 * 8_519_680
    model.weight.data = kept


# --- CUDA only ---


@torch.library.custom_op("oomprobe_tests::thrice", mutates_args=())
def thrice(x: torch.Tensor) -> torch.Tensor:
    return x * 3


thrice.register_fake(torch.empty_like)


def test_calls_that_only_cuda_supports():
    def step():
        x, fresh = torch.zeros(8, device="cuda"), nn.Linear(8, 8).to("cuda")
        x.record_stream(torch.cuda.current_stream())
        generator = torch.Generator("cuda").manual_seed(0)
        torch.cuda.nvtx.range_push("step")
        torch.cuda.nvtx.range_pop()
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            (x.requires_grad_() * x).sum().backward()
        counts = torch.histc(
            torch.zeros(5, dtype=torch.int32, device="cuda"), bins=8
        )  # not implemented on the CPU
        drawn = torch.randn(4, device="cuda", generator=generator)
        made = [drawn, fresh.weight, nn.Linear(8, 8, device="cuda")(fresh(x)), thrice(x)]
        return (
            {one.device.type for one in made},
            isinstance(generator, torch.Generator),
            counts.shape,
            counts.dtype,
        )

    assert Bench().run(step) == ({"cuda"}, True, (8,), torch.int32)


# --- interrupts ---


def test_a_signal_in_a_library_waits_for_the_next_operator():
    """It must neither leave the library half-done nor wait until the call ends."""
    model, passed = nn.Linear(4, 4), Log()

    def step(model, batch_size):
        out = model(torch.randn(batch_size, 4))
        torch.utils._pytree.tree_map(functools.partial(os.kill, os.getpid()), [signal.SIGINT])
        passed.append("library")
        out.sum()
        passed.append("operator")

    with pytest.raises(KeyboardInterrupt):
        oomprobe.find_max_batch(model, step, device="sim:1GiB", progress="off")
    assert passed == ["library"]


@pytest.mark.parametrize("outside", [False, True])
def test_inference_mode_allocates_as_without_gradients(outside):
    """Also in operators such as einsum, which copies one of its arguments here."""

    def step():
        weights = torch.zeros(2, 4, 8, 8, device="cuda")
        values = torch.zeros(2, 8, 4, 64, device="cuda").transpose(1, 2)
        return torch.einsum("bhqk,bhkd->bhqd", weights, values)

    def allocated(mode):
        bench = Bench(None, "1GiB")
        with torch.inference_mode(outside):
            bench.run(mode()(step))
            assert torch.is_inference_mode_enabled() is outside
        return bench.device.counters().blocks, bench.peak_bytes

    found = allocated(torch.inference_mode)
    assert found == allocated(torch.no_grad)
    assert found[0] == 5  # the arguments, a copy of the values, cuBLAS's workspace, and the result


def test_autocast_that_building_enters_for_good_holds_for_the_steps():
    entered = contextlib.ExitStack()
    device = oomprobe.SimulatedDevice("1GiB")
    with device.building():
        model = nn.Linear(8, 8).cuda()
        entered.enter_context(torch.autocast("cuda", torch.bfloat16))
    device.start_trial()
    with entered:
        for _ in range(2):
            with device.session():
                assert model(torch.zeros(4, 8, device="cuda")).dtype is torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.tensor(2.0, device="cuda") + on_card(gradient)


def on_card(tensor):
    """Check that a tensor is on the card, and return some that are made there in three ways."""
    assert tensor.is_cuda
    assert tensor.device == torch.device("cuda:0")
    return torch.zeros(1).cuda() + torch.zeros(1).to("cuda") + torch.tensor([0.0], device="cuda")


BACKWARDS = {
    "a method": lambda loss, weights: loss.backward(),
    "torch.autograd.backward": lambda loss, weights: torch.autograd.backward(loss),
    "torch.autograd.grad": lambda loss, weights: torch.autograd.grad(loss, weights),
    "a graph of gradients": lambda loss, weights: loss.backward(create_graph=True),
}


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("way", BACKWARDS)
def test_code_inside_backward_is_on_the_card(way, reentrant):
    """In functions of the user's, hooks of tensors and of accumulated gradients, and what is recomputed."""
    if reentrant and way == "torch.autograd.grad":
        pytest.skip("torch refuses it")
    model = net()
    weights, calls = [*model.parameters()], Log()

    def accumulated(weight):
        calls.append("accumulated")
        weight.grad.add_(on_card(weight.grad))

    def head(x):
        calls.append("head")
        return model[2](x) + on_card(x)

    weights[0].register_hook(lambda gradient: gradient + on_card(gradient))
    weights[0].register_post_accumulate_grad_hook(accumulated)

    def step():
        hidden = Doubled.apply(model[0](torch.randn(8, 64, device="cuda")))
        out = head(hidden)
        if reentrant is not None:
            out = checkpoint(head, hidden, use_reentrant=reentrant)
        BACKWARDS[way](out.square().mean(), weights)

    Bench(model).run(step)
    assert calls.count("head") == (1 if reentrant is None else 3)
    assert ("accumulated" in calls) is (way != "torch.autograd.grad")
