import re
import sys

import pytest
import torch
from ledger import LedgerDevice
from torch import nn

import oomprobe
from oomprobe.devices import choose_device
from oomprobe.devices.host import HostDevice
from oomprobe.errors import InvalidArgumentError, NoDeviceError

GIB = 2**30
ON_CPU = nn.Linear(2, 2)
WITHOUT_PARAMETERS = nn.ReLU()
no_accelerator = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="there is an accelerator here"
)
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="host memory is probed on Linux")


def refused(error, text, device, model=ON_CPU):
    with pytest.raises(error, match=re.escape(text)):
        choose_device(device, model)


# --- the argument ---


@linux_only
@pytest.mark.parametrize(
    "device", [None, "cpu", torch.device("cpu", 0), "cpu:512MiB", "cpu:1.5 GB"]
)
def test_host_memory_or_part_of_it(device):
    chosen, size = (
        choose_device(device, ON_CPU),
        {"cpu:512MiB": GIB // 2, "cpu:1.5 GB": 15 * 10**8}.get(device),
    )
    assert isinstance(chosen, HostDevice)
    assert (chosen.name == "host memory") == (size is None)
    assert size in (None, chosen.available_bytes())


INVALID = {
    "'{size}' is not a size in memory: write it like '24GiB'": [
        *("cpu:", "cpu:0", "cpu:much", "cpu:-4GiB", "cpu:4GiB:1", "cuda:8GiBs", "cuda:0GiB"),
    ],
    "device='{device}' is not a device that torch knows: use 'cuda'": [
        *(
            "nonsense",
            "cuda:x",
            "cuda:-1",
            "",
            "GPU",
            "cuda:8GiB:1",
            "cuda:1:8",
            "cuda:GiB",
            ":8GiB",
        ),
    ],
    "device must be None, a string, a torch.device or a Device, not": [
        0,
        True,
        ["cuda"],
        HostDevice,
    ],
}


@pytest.mark.parametrize(
    ("text", "device"), [(text, device) for text, row in INVALID.items() for device in row]
)
def test_an_invalid_device_is_refused(text, device):
    refused(
        InvalidArgumentError, text.format(device=device, size=str(device).partition(":")[2]), device
    )


@pytest.mark.parametrize(
    ("text", "gib"), [("sim:24GiB", 24), ("sim:H100-80GB", 78), ("sim:rtx 4090", 23)]
)
def test_simulated_devices(text, gib):
    chosen = choose_device(text, ON_CPU)
    assert isinstance(chosen, oomprobe.SimulatedDevice)
    assert chosen.available_bytes() // GIB == gib
    refused(NoDeviceError, "similar cards: H100-80GB, P100-16GB, V100-16GB", "sim:H1000")


@no_accelerator
@pytest.mark.parametrize("device", ["cuda:99", "mps", "meta"])
def test_an_absent_device_is_refused(device):
    text = f"no device {str(device)!r} here: torch {torch.__version__} sees no accelerator. Type `oomprobe devices`"
    refused(NoDeviceError, text, device)


def test_a_device_object_is_returned_unchanged():
    device = LedgerDevice()
    assert choose_device(device, ON_CPU) is device
    assert choose_device(device, nn.LazyLinear(2)) is device


# --- where the model is ---


def test_a_model_without_parameters_runs_on_the_given_device(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    for device in (None, "cpu:4GiB"):
        assert choose_device(device, WITHOUT_PARAMETERS).torch_device == torch.device("cpu")


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_model_without_memory_is_refused():
    text = "1.weight is on the meta device and has no memory: materialise the model"
    refused(InvalidArgumentError, text, None, nn.Sequential(ON_CPU, nn.Linear(2, 2, device="meta")))
    text = "the parameter weight of a lazy module has no shape yet"
    refused(InvalidArgumentError, text, None, nn.LazyLinear(3))
