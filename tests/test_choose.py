import re
import sys

import pytest
import torch
from fake_accelerator import FakeAccelerator, FakeModule
from torch import nn

import oomprobe
from oomprobe.devices import choose_device, list_devices
from oomprobe.devices.choose import describe_device, model_device
from oomprobe.devices.host import HostDevice
from oomprobe.errors import InvalidArgumentError, NoDeviceError

GIB = 2**30
ON_CPU = nn.Linear(2, 2)
WITHOUT_PARAMETERS = nn.ReLU()
no_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="host memory is probed on Linux")


def refused(error, text, device, model=ON_CPU):
    with pytest.raises(error, match=re.escape(text)):
        choose_device(device, model)


class Elsewhere(nn.Module):
    """A model with one tensor on each of the given devices, which this machine may lack."""

    def __init__(self, *places):
        super().__init__()
        for number, place in enumerate(places):
            tensor = torch.Tensor._make_wrapper_subclass(WithoutData, (1,), device=torch.device(place))
            self.register_buffer(f"part_{number}", tensor)


class WithoutData(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} was run on a tensor without data")


# --- the argument ---


@linux_only
@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu", 0), "cpu:512MiB", "cpu:1.5 GB"])
def test_host_memory_or_part_of_it(device):
    chosen, size = choose_device(device, ON_CPU), {"cpu:512MiB": GIB // 2, "cpu:1.5 GB": 15 * 10**8}.get(device)
    assert isinstance(chosen, HostDevice)
    assert (chosen.name == "host memory") == (size is None)
    assert size in (None, chosen.available_bytes())


INVALID = {
    "'{size}' is not a size in memory: write it like '24GiB'": ["cpu:", "cpu:0", "cpu:much", "cpu:-4GiB", "cpu:4GiB:1"],
    "device='{device}' is not a device that torch knows: use 'cuda'": ["nonsense", "cuda:x", "cuda:-1", "", "GPU"],
    "device must be None, a string, a torch.device or a Device, not": [0, True, ["cuda"], HostDevice],
}


@pytest.mark.parametrize(("text", "device"), [(text, device) for text, row in INVALID.items() for device in row])
def test_an_invalid_device_is_refused(text, device):
    refused(InvalidArgumentError, text.format(device=device, size=str(device).partition(":")[2]), device)


@pytest.mark.parametrize(("text", "gib"), [("sim:24GiB", 24), ("sim:H100-80GB", 78), ("sim:rtx 4090", 23)])
def test_simulated_devices(text, gib):
    chosen = choose_device(text, ON_CPU)
    assert isinstance(chosen, oomprobe.SimulatedDevice)
    assert chosen.available_bytes() // GIB == gib
    refused(NoDeviceError, "similar cards: P100-16GB, V100-16GB", "sim:H1000")


@pytest.mark.parametrize(("device", "said"), [("sim:24", "did you mean 'sim:24GiB'?"), ("sim:card", "the catalogue\n")])
def test_a_card_that_is_not_listed_is_answered_in_two_lines(device, said):
    with pytest.raises(NoDeviceError, match=re.escape(said)) as refusal:
        choose_device(device, ON_CPU)
    assert len(str(refusal.value).splitlines()) == 2


@no_accelerator
@pytest.mark.parametrize("device", ["cuda:99", "mps", "meta"])
def test_an_absent_device_is_refused(device):
    text = f"no device {str(device)!r} here: torch {torch.__version__} sees no accelerator. Type `oomprobe devices`"
    refused(NoDeviceError, text, device)


@pytest.mark.parametrize("device", ["xpu", torch.device("cuda", 2)])
def test_an_absent_card_is_refused(cards, device):
    refused(NoDeviceError, f"no device {str(device)!r} here: torch {torch.__version__} sees 2 of type cuda", device)


def test_a_device_object_is_returned_unchanged():
    device = FakeAccelerator(FakeModule())
    assert choose_device(device, ON_CPU) is device
    assert choose_device(device, nn.LazyLinear(2)) is device


# --- where the model is ---


def test_a_model_without_parameters_runs_on_the_given_device(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    for device in (None, "cpu:4GiB"):
        assert choose_device(device, WITHOUT_PARAMETERS).torch_device == torch.device("cpu")


def test_a_model_without_parameters_uses_the_accelerator(cards):
    assert choose_device(None, WITHOUT_PARAMETERS).torch_device == torch.device("cuda", 0)
    assert model_device(WITHOUT_PARAMETERS) is None


def test_the_models_device_is_found_and_may_be_stated(cards):
    for device in (None, "cuda", torch.device("cuda", 0)):
        assert choose_device(device, Elsewhere("cuda:0")).torch_device == torch.device("cuda", 0)
    assert choose_device("cpu", ON_CPU).torch_device == torch.device("cpu")


def test_a_model_left_on_the_cpu_beside_an_accelerator_is_refused(cards):
    text = "the model is on the CPU, and this machine has a device of the kind cuda: call model.to('cuda') before you make its"
    refused(InvalidArgumentError, text, None, ON_CPU)


def test_a_model_on_another_device_is_refused(cards):
    text = "device='cuda:1', but the model's parameters are on cuda:0: call model.to('cuda:1') first, or leave device"
    refused(InvalidArgumentError, text, "cuda:1", Elsewhere("cuda:0"))
    text = "device='cuda', but the model's parameters are on cpu: call model.to('cuda:0') first"
    refused(InvalidArgumentError, text, "cuda", ON_CPU)


META = nn.Linear(2, 2, device="meta")


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: nn.Sequential(ON_CPU, META),
            "1.weight is on the meta device and has no memory: materialise the model",
        ),
        (lambda: Elsewhere("cpu", "cuda:0"), "the model is on 2 devices (part_0 on cpu, part_1 on cuda:0): oomprobe"),
        (lambda: nn.LazyLinear(3), "is a lazy parameter without a shape yet: run one forward pass, then probe"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_model_that_is_not_on_one_device_is_refused(build, text):
    refused(InvalidArgumentError, text, None, build())


# --- the devices of this machine ---


@linux_only
def test_all_devices_are_listed(cards):
    assert [str(device.torch_device) for device in list_devices()] == ["cuda:0", "cuda:1", "cpu"]
    assert describe_device(list_devices()[1]) == "cuda:1  Fake Card  1.00 GiB"
