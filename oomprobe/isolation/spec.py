"""What a child has to know to build what is probed."""

from __future__ import annotations

import pickle
from dataclasses import asdict, dataclass
from typing import Any

import torch

from oomprobe.devices import Device
from oomprobe.errors import InvalidArgumentError
from oomprobe.options import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The question of a probe, as a message.

    Attributes:
        target: ``module:function`` or ``path/to/file.py:function``.
        device: A string for `choose_device`, or None.
        pickled_device: A `Device` of the caller's own, as hexadecimal digits of a pickle.
        options: Those of the probe.
    """

    target: str
    device: str | None
    pickled_device: str | None
    options: Options

    @classmethod
    def of(cls, target: str, device: Any, options: Options) -> Spec:
        """Make one.

        Raises:
            InvalidArgumentError: the device cannot be sent to another process.
        """
        if device is None or isinstance(device, str | torch.device):
            return cls(
                target=target, device=None if device is None else str(device), pickled_device=None, options=options
            )
        return cls(target=target, device=None, pickled_device=_pickled(device), options=options)

    def to_message(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Spec:
        """Read what `to_message` wrote."""
        return cls(**{**message, "options": Options(**message["options"])})

    def open_device(self) -> Any:
        """What the caller gave as `device`."""
        return self.device if self.pickled_device is None else pickle.loads(bytes.fromhex(self.pickled_device))


def _pickled(device: object) -> str:
    if not isinstance(device, Device):
        raise InvalidArgumentError(
            f"device must be None, a string, a torch.device or a Device, not {type(device).__name__}"
        )
    try:
        return pickle.dumps(device).hex()
    except Exception as error:
        raise InvalidArgumentError(
            f"the {type(device).__name__} given as device cannot be sent to the processes that run trials ({error}): "
            "name it by a string such as 'cuda:1', or pass isolate=False"
        ) from None
