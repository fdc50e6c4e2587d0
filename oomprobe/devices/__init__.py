"""The one door to memory: what a probe may ask of a device, and how a device is chosen."""

from oomprobe.devices.base import Device, Simulated, Usage, asked_bytes, raised_by
from oomprobe.devices.choose import choose_device, list_devices

__all__ = [
    "Device",
    "Simulated",
    "Usage",
    "asked_bytes",
    "choose_device",
    "list_devices",
    "raised_by",
]
