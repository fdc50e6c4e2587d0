"""Devices: the `Device` protocol, its implementations, and the choice of one."""

from oomprobe.devices.base import Device, Usage, describe, device_error, extras_of, replays
from oomprobe.devices.choose import (
    choose_device,
    current_accelerator,
    is_host,
    list_devices,
    names_simulated,
    opened_if_simulated,
)

__all__ = [
    "Device",
    "Usage",
    "choose_device",
    "current_accelerator",
    "describe",
    "device_error",
    "extras_of",
    "is_host",
    "list_devices",
    "names_simulated",
    "opened_if_simulated",
    "replays",
]
