import re
import sys

import pytest
import torch
from fake_accelerator import FakeModule, LedgerDevice
from test_linux import run_python
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
    """A model with one tensor for each device named."""

    def __init__(self, *places):
        super().__init__()
        for number, place in enumerate(places):
            tensor = FakeTensorOn(place) if place == "cuda:0" else torch.ones(1, device=place)
            self.register_buffer(f"part_{number}", tensor)


class FakeTensorOn(torch.Tensor):
    """A tensor that says it is on a device that is not here."""

    @staticmethod
    def __new__(cls, place):
        return torch.Tensor._make_wrapper_subclass(cls, (1,), device=torch.device(place))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} was run on a tensor that is not there")


# --- strings and other things ---


@linux_only
@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu", 0), "cpu:512MiB", "cpu:1.5 GB"])
def test_the_host_or_a_part_of_it(device):
    chosen, size = choose_device(device, ON_CPU), {"cpu:512MiB": GIB // 2, "cpu:1.5 GB": 15 * 10**8}.get(device)
    assert isinstance(chosen, HostDevice)
    assert (chosen.name == "host memory") == (size is None)
    assert size in (None, chosen.available_bytes())


@pytest.mark.parametrize("text", ["cpu:", "cpu:0", "cpu:much", "cpu:-4GiB", "cpu:4GiB:1"])
def test_a_part_that_is_no_size(text):
    size = text.partition(":")[2]
    refused(InvalidArgumentError, f"{size!r} is not a size in memory: write it like '24GiB'", text)


@pytest.mark.parametrize("text", ["nonsense", "cuda:x", "cuda:-1", "", "GPU"])
def test_a_device_that_torch_does_not_know(text):
    refused(InvalidArgumentError, f"device={text!r} is not a device that torch knows: use 'cuda'", text)


@pytest.mark.parametrize(("text", "gib"), [("sim:24GiB", 24), ("sim:H100-80GB", 78), ("sim:rtx 4090", 23)])
def test_simulated_devices(text, gib):
    chosen = choose_device(text, ON_CPU)
    assert isinstance(chosen, oomprobe.SimulatedDevice)
    assert chosen.available_bytes() // GIB == gib


def test_a_card_nobody_makes():
    refused(NoDeviceError, "near it: P100-16GB, V100-16GB", "sim:H1000")
    refused(NoDeviceError, "it has P100-16GB, V100-16GB", "sim")


@pytest.mark.parametrize("device", [0, True, ["cuda"], HostDevice])
def test_what_is_no_device_at_all(device):
    refused(InvalidArgumentError, "device must be None, a string, a torch.device or a Device, not", device)


@no_accelerator
@pytest.mark.parametrize("device", ["cuda", "cuda:99", "xpu", "mps", "meta", torch.device("cuda", 1)])
def test_a_device_that_is_not_here(device):
    text = f"no device {str(device)!r} here: torch {torch.__version__} sees no accelerator. Type `oomprobe devices`"
    refused(NoDeviceError, text, device)


@pytest.mark.parametrize("device", ["cuda:2", "cuda:99", "xpu", torch.device("cuda", 2)])
def test_a_card_that_is_not_among_those_here(cards, device):
    refused(NoDeviceError, f"no device {str(device)!r} here: torch {torch.__version__} sees 2 of type cuda", device)


def test_a_device_object_is_taken_as_it_is():
    device = LedgerDevice(FakeModule())
    assert choose_device(device, ON_CPU) is device
    assert choose_device(device, nn.LazyLinear(2)) is device


# --- where the model is ---


@pytest.mark.parametrize("device", [None, "cpu", "cpu:4GiB"])
def test_a_model_without_parameters_runs_where_it_is_told(monkeypatch, device):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert choose_device(device, WITHOUT_PARAMETERS).torch_device == torch.device("cpu")


def test_a_model_without_parameters_uses_the_accelerator(cards):
    assert choose_device(None, WITHOUT_PARAMETERS).torch_device == torch.device("cuda", 0)
    assert model_device(WITHOUT_PARAMETERS) is None


@pytest.mark.parametrize("device", [None, "cuda", "cuda:0", torch.device("cuda")])
def test_the_device_of_the_model_is_found_and_may_be_said(cards, device):
    assert choose_device(device, Elsewhere("cuda:0")).torch_device == torch.device("cuda", 0)
    assert choose_device(None, ON_CPU).torch_device == torch.device("cpu")


def test_a_model_elsewhere_than_the_device(cards):
    text = "device='cuda:1', but the model's parameters are on cuda:0: call model.to('cuda:1') first, or leave device"
    refused(InvalidArgumentError, text, "cuda:1", Elsewhere("cuda:0"))
    text = "device='cuda', but the model's parameters are on cpu: call model.to('cuda:0') first"
    refused(InvalidArgumentError, text, "cuda", ON_CPU)


@linux_only
def test_meta_parameters_have_no_memory():
    model = nn.Linear(2, 2, device="meta")
    refused(InvalidArgumentError, "weight is on the meta device and has no memory: materialise the model", None, model)
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    refused(InvalidArgumentError, "1.weight is on the meta device", "cpu", mixed)


def test_a_model_on_two_devices():
    model = Elsewhere("cpu", "cuda:0")
    text = "the model is on 2 devices (part_0 on cpu, part_1 on cuda:0): oomprobe measures one device's memory"
    refused(InvalidArgumentError, text, None, model)


@pytest.mark.parametrize("lazy", [nn.LazyLinear(3), nn.LazyBatchNorm1d()])
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_modules_have_no_shape(lazy):
    text = "is a lazy parameter without a shape yet: run one forward pass, then probe"
    refused(InvalidArgumentError, text, None, lazy)


# --- what is here ---


@linux_only
def test_the_devices_here(cards):
    assert [str(device.torch_device) for device in list_devices()] == ["cuda:0", "cuda:1", "cpu"]
    assert describe_device(list_devices()[1]) == "cuda:1  Fake Card  1.00 GiB"


@linux_only
def test_choosing_the_host_does_not_wake_a_card():
    run_python(
        """
        import torch
        import oomprobe.devices
        oomprobe.devices.choose_device("cpu", torch.nn.Linear(2, 2))
        assert not torch.cuda.is_initialized()
        """
    )
