"""The one door to memory: what a probe may ask of a device, and how a device is chosen."""

from oomprobe.devices.base import (
    Device,
    DeviceInfo,
    History,
    Usage,
    describe,
    history_of,
    notes_of,
    raised_by,
    replay_of,
    served_bytes,
)
from oomprobe.devices.choose import choose_device, is_host, list_devices

__all__ = [
    "Device",
    "DeviceInfo",
    "History",
    "Usage",
    "choose_device",
    "describe",
    "history_of",
    "is_host",
    "list_devices",
    "notes_of",
    "raised_by",
    "replay_of",
    "served_bytes",
]
