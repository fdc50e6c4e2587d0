"""From the `device` argument to a `Device`."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from oomprobe.devices import linux
from oomprobe.devices.accelerator import AcceleratorDevice
from oomprobe.devices.base import Device, replay_of
from oomprobe.devices.host import HostDevice
from oomprobe.devices.mps import MpsDevice
from oomprobe.devices.stated import split_budget, typed_size
from oomprobe.errors import InvalidArgumentError, NoDeviceError
from oomprobe.units import format_bytes, parse_bytes


def choose_device(device: object, model: torch.nn.Module) -> Device:
    """Resolve the `device` argument: None (where the model's parameters are), a string, a `torch.device` or a `Device`."""
    if isinstance(device, Device):
        return device
    home = model_device(model)
    chosen = _open(device if device is not None else home or _accelerator() or torch.device("cpu"))
    if replay_of(chosen) is not None:
        return chosen  # says itself what it can take
    if home is not None and not _same(home, chosen.torch_device):
        raise InvalidArgumentError(
            f"device={str(device)!r}, but the model's parameters are on {home}: call "
            f"model.to({str(chosen.torch_device)!r}) first, or leave device out to probe where the model is"
        )
    return chosen


def simulated_or(device: Any) -> Any:
    """The card that ``"sim:..."`` names; any other device as it is."""
    if not isinstance(device, str) or device.partition(":")[0] != "sim":
        return device
    from oomprobe.devices.simulated import SimulatedDevice  # costs a second that others need not spend

    return SimulatedDevice(device.partition(":")[2])


def is_host(device: Device) -> bool:
    """Whether each trial runs in a forked process, limited by RLIMIT_AS."""
    return isinstance(device, HostDevice)


def model_device(model: torch.nn.Module) -> torch.device | None:
    """Where all parameters and buffers of the model are; None for a model without any."""
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    places: dict[torch.device, str] = {}
    for name, tensor in tensors:
        if isinstance(tensor, UninitializedTensorMixin):
            raise InvalidArgumentError(
                f"{name} is a lazy parameter without a shape yet: run one forward pass, then probe"
            )
        places.setdefault(tensor.device, name)
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
    """Every device of this machine that can be probed."""
    found: list[Device] = []
    if here := _accelerator():
        found += [_open_accelerator(torch.device(here.type, i)) for i in range(torch.accelerator.device_count())]
    with contextlib.suppress(NoDeviceError):
        found.append(HostDevice())
    return found


def _open(device: object) -> Device:
    device = simulated_or(device)
    if isinstance(device, Device):
        return device
    if isinstance(device, str):
        kind, colon, rest = device.partition(":")
        if kind == "cpu":
            return HostDevice(parse_bytes(rest) if colon else None)
        plain, stated_bytes = split_budget(device)
        try:
            known = torch.device(plain)
        except RuntimeError:
            raise InvalidArgumentError(
                f"device={device!r} is not a device that torch knows: use 'cuda', 'cuda:1', 'cuda:1:8GiB' or 'cpu:4GiB'"
            ) from None
        return _budgeted(_open_accelerator(known, stated_bytes))
    if isinstance(device, torch.device):
        return HostDevice() if device.type == "cpu" else _budgeted(_open_accelerator(device))
    raise InvalidArgumentError(
        f"device must be None, a string, a torch.device or a Device, not {type(device).__name__}"
    )


def _budgeted(device: Device) -> Device:
    """The device itself, where probing it cannot take the whole machine down."""
    if isinstance(device, AcceleratorDevice) and device.lacks_budget():
        free_bytes = linux.free_bytes()
        found = "" if free_bytes is None else f" ({format_bytes(free_bytes)} are available now)"
        raise InvalidArgumentError(
            f"{device.name} shares the host's memory{found}: without a budget no allocation fails, the whole machine swaps or "
            f"freezes (pytorch#174358). State one: device='{_advised(device)}', or set "
            "set_per_process_memory_fraction(...) below 1 before you probe"
        )
    return device


def _advised(device: Device) -> str:
    """What to type for a device that shares the host's memory: of what is free now, and half where nothing says."""
    free_bytes = linux.free_bytes()
    largest = device.total_bytes // 2 if free_bytes is None else min(free_bytes, device.total_bytes)
    return f"{device.torch_device}:{typed_size(largest)}"


def _open_accelerator(device: torch.device, stated_bytes: int | None = None) -> Device:
    here = _accelerator()
    count = 0 if here is None else torch.accelerator.device_count()
    if here is None or here.type != device.type or (device.index or 0) >= count:
        there = "no accelerator" if here is None else f"{count} of type {here.type}"
        raise NoDeviceError(
            f"no device {str(device)!r} here: torch {torch.__version__} sees {there}. "
            "Type `oomprobe devices` to list what can be probed; 'cpu:4GiB' probes host memory"
        )
    if device.type == "mps":
        return MpsDevice(stated_bytes)
    return AcceleratorDevice(device, stated_bytes)


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator(check_available=True)


def _same(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (one.index is None or other.index is None or one.index == other.index)


def describe_device(device: Device) -> str:
    """One line for `oomprobe devices`."""
    line = f"{device.torch_device!s}  {device.name}  {format_bytes(device.total_bytes)}"
    if isinstance(device, AcceleratorDevice) and device.lacks_budget():
        return f"{line}  shares the host's memory: state a budget, such as '{_advised(device)}'"
    return line
