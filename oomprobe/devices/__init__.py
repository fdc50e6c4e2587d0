"""Devices: the `Device` protocol, its implementations, and the choice of one."""

from oomprobe.devices.base import Device, DeviceInfo, Usage, describe, raised_by, replay_of
from oomprobe.devices.choose import choose_device, is_host, list_devices, simulated_or

__all__ = [
    "Device",
    "DeviceInfo",
    "Usage",
    "choose_device",
    "describe",
    "is_host",
    "list_devices",
    "raised_by",
    "replay_of",
    "simulated_or",
]
