"""Devices: the `Device` protocol, its implementations, and the choice of one."""

from oomprobe.devices.base import Counters, Device, Usage, describe, device_error
from oomprobe.devices.choose import (
    choose_device,
    current_accelerator,
    is_host,
    list_devices,
    may_have_gpu,
    opened_if_simulated,
)

__all__ = [
    "Counters",
    "Device",
    "Usage",
    "choose_device",
    "current_accelerator",
    "describe",
    "device_error",
    "is_host",
    "list_devices",
    "may_have_gpu",
    "opened_if_simulated",
]
