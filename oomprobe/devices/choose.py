"""Resolve the `device` argument to a `Device`."""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import Any

import torch

from oomprobe.devices.accelerator import AcceleratorDevice
from oomprobe.devices.base import Device
from oomprobe.devices.host import HostDevice
from oomprobe.devices.mps import MpsDevice
from oomprobe.errors import InvalidArgumentError, NoDeviceError
from oomprobe.ground.units import format_bytes, parse_bytes
from oomprobe.records.options import names_simulated, refuse_lazy

DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # of NVIDIA, of AMD, and of both under WSL
ON_THE_CPU = (
    "the model is on the CPU, and this machine has a device of the kind {kind}: call model.to({kind!r}) before you make its optimizer; "
    "or pass device='cpu' to probe host memory, or device='sim:24GiB' to simulate a card"
)


def choose_device(device: object, model: torch.nn.Module) -> Device:
    """Return the `Device` for a string, a `torch.device`, a `Device`, or None (where the model's parameters are)."""
    if isinstance(device, Device):
        return device
    home = model_device(model)
    if device is None:
        accelerator = current_accelerator()
        if home is None:
            device = accelerator or torch.device("cpu")
        elif home.type == "cpu" and accelerator is not None:
            raise InvalidArgumentError(ON_THE_CPU.format(kind=accelerator.type))
        else:
            device = home
    chosen = _open(device)
    if chosen.is_simulated:
        return chosen  # it checks the model's device itself
    if home is not None and not _same_device(home, chosen.torch_device):
        raise InvalidArgumentError(
            f"device={str(device)!r}, but the model's parameters are on {home}: call "
            f"model.to({str(chosen.torch_device)!r}) first, or leave device out to probe where the model is"
        )
    return chosen


def opened_if_simulated(device: Any, world_size: int = 1) -> Any:
    """Return the simulated card that ``"sim:..."`` names; return any other device unchanged."""
    if not names_simulated(device):
        return device
    from oomprobe.devices.simulated import SimulatedDevice  # takes a second to import

    return SimulatedDevice(device.partition(":")[2], world_size=world_size)


def is_host(device: object) -> bool:
    """Return whether each trial runs in a forked process that RLIMIT_AS limits."""
    return isinstance(device, HostDevice)


def model_device(model: torch.nn.Module) -> torch.device | None:
    """Return the one device of all parameters and buffers, or None; refuse lazy, meta and divided models.

    Beside a card, a step may keep frozen parameters in host memory, and swap them in.
    """
    places: dict[torch.device, str] = {}
    frozen: dict[torch.device, str] = {}
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        refuse_lazy(name, tensor)
        is_parked = tensor.device.type == "cpu" and not tensor.requires_grad
        (frozen if is_parked else places).setdefault(tensor.device, name)
    if not places:
        places = frozen
    for place, name in places.items():
        if place.type == "meta":
            raise InvalidArgumentError(
                f"{name} is on the meta device and has no memory: materialise the model with "
                "model.to_empty(device=...) and initialise it, then probe"
            )
    if len(places) > 1:
        listed = ", ".join(f"{name} on {place}" for place, name in places.items())
        raise InvalidArgumentError(
            f"the model is on {len(places)} devices ({listed}): oomprobe measures one device's memory; "
            "move the model to one device with model.to(...)"
        )
    return next(iter(places), None)


def list_devices() -> list[Device]:
    """Return every device of this machine that can be probed."""
    devices: list[Device] = []
    current = current_accelerator()
    if current is not None:
        for index in range(torch.accelerator.device_count()):
            devices.append(_open_accelerator(torch.device(current.type, index)))
    with contextlib.suppress(NoDeviceError):
        devices.append(HostDevice())
    return devices


def _open(device: object) -> Device:
    device = opened_if_simulated(device)
    if isinstance(device, Device):
        return device
    stated_bytes, named = None, device
    if isinstance(device, str):
        kind, colon, rest = device.partition(":")
        if kind == "cpu":
            return HostDevice(parse_bytes(rest) if colon else None)
        named, stated_bytes = split_budget(device)
        try:
            named = torch.device(named)
        except RuntimeError:
            raise InvalidArgumentError(
                f"device={device!r} is not a device that torch knows: use 'cuda', 'cuda:1', 'cuda:1:8GiB', 'cpu:4GiB' or 'sim:24GiB'"
            ) from None
    if not isinstance(named, torch.device):
        raise InvalidArgumentError(
            f"device must be None, a string, a torch.device or a Device, not {type(device).__name__}"
        )
    if named.type == "cpu":
        return HostDevice()
    opened = _open_accelerator(named, stated_bytes)
    budget = _budget_to_state(opened)
    if budget is not None:
        raise InvalidArgumentError(
            f"{opened.name} shares the host's memory: without a budget no allocation fails and the whole machine swaps "
            f"or freezes (pytorch#174358). State one: device={budget!r}, or call set_per_process_memory_fraction(...) "
            "with less than 1 before you probe"
        )
    return opened


def _budget_to_state(device: Device) -> str | None:
    if isinstance(device, AcceleratorDevice):
        return device.budget_to_state()
    return None


def split_budget(text: str) -> tuple[str, int | None]:
    """Split a device string into the device and its budget; a number without a unit is an index.

    Examples:
        >>> split_budget("cuda:1:8GiB"), split_budget("xpu:2GiB"), split_budget("cuda:1")
        (('cuda:1', 8589934592), ('xpu', 2147483648), ('cuda:1', None))
    """
    device, colon, last = text.rpartition(":")
    is_number, has_unit = last[:1].isdecimal(), last.rstrip()[-1:].isalpha()
    if colon and is_number and has_unit:
        return device, parse_bytes(last)
    return text, None


def _open_accelerator(device: torch.device, stated_bytes: int | None = None) -> Device:
    current = current_accelerator()
    kind, count, present = None, 0, "no accelerator"
    if current is not None:
        kind, count = current.type, torch.accelerator.device_count()
        present = f"{count} of type {kind}"
    if kind != device.type or (device.index or 0) >= count:
        raise NoDeviceError(
            f"no device {str(device)!r} here: torch {torch.__version__} sees {present}. "
            "Type `oomprobe devices` to list what can be probed; 'sim:24GiB' simulates a GPU, and 'cpu:4GiB' probes host memory"
        )
    if device.type != "mps":
        return AcceleratorDevice(device, stated_bytes)
    if stated_bytes is not None:
        raise InvalidArgumentError("mps takes no budget: lower memory_fraction instead")
    return MpsDevice()


def may_have_gpu() -> bool:
    """Return whether some program of this machine can use a GPU, with whatever torch it has."""
    if any(map(os.path.exists, DRIVERS)):
        return True
    # To ask a torch for CUDA would use CUDA in this process.
    return torch.version.cuda is None and current_accelerator() is not None


def current_accelerator() -> torch.device | None:
    """Return the kind of accelerator that torch can use here."""
    if not torch.accelerator.is_available():
        return None
    return torch.accelerator.current_accelerator()


def _same_device(home: torch.device, chosen: torch.device) -> bool:
    if None in (home.index, chosen.index):  # whichever is current
        return home.type == chosen.type
    return home == chosen


def describe_device(device: Device) -> str:
    """Return the line for a device in the output of `oomprobe devices`."""
    line = f"{device.torch_device!s}  {device.name}  {format_bytes(device.total_bytes)}"
    budget = _budget_to_state(device)
    if budget is None:
        return line
    return f"{line}  shares the host's memory: state a budget, such as {budget!r}"
