"""What is asked of a probe, and the types of the keyword arguments that ask for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import torch

from oomprobe.devices import Device
from oomprobe.records.axis import NO_AXIS, Axis
from oomprobe.records.options import Options
from oomprobe.records.patience import PATIENCE, Patience
from oomprobe.report.progress import Progress


class CommandCheckOptions(TypedDict, total=False):
    """The options of `oomprobe.check_command`; `oomprobe.find_max_batch` says what each means, here and below."""

    memory_fraction: float
    confirm_steps: int
    time_limit_s: float | None
    progress: Progress


class CommandOptions(CommandCheckOptions, total=False):
    """The options of `oomprobe.probe_command`."""

    min_batch: int
    max_batch: int | None
    multiple_of: int
    start_batch: int | None
    steps: int
    global_batch: int | None
    resolution: float
    trial_time_limit_s: float | None


OneDevice = str | torch.device | Device | None


class _ModelOptions(TypedDict, total=False):
    preserve: Iterable[Any]
    breakdown: bool


class CheckOptions(CommandCheckOptions, _ModelOptions, total=False):
    """The options of `oomprobe.check`."""

    device: OneDevice


class SearchOptions(CommandOptions, _ModelOptions, total=False):
    """The options of `oomprobe.find_max_batch`."""

    device: OneDevice


class TableOptions(CommandOptions, _ModelOptions, total=False):
    """The options of `oomprobe.find_max_batches`."""

    device: OneDevice | Sequence[str]


class TargetOptions(SearchOptions, total=False):
    """The options of `oomprobe.probe_target`."""

    isolate: bool
    nproc_per_node: int | Literal["gpu"] | None


class TargetTableOptions(TargetOptions, total=False):
    """The options of `oomprobe.probe_target` with `over`."""

    try_larger: bool
    mixed: bool
    require: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the caller asks of a probe, whatever runs its trials."""

    options: Options
    device: Any = None
    preserve: Iterable[Any] = ()
    progress: Progress = "auto"
    axis: Axis = NO_AXIS
    patience: Patience = PATIENCE  # for tests

    @classmethod
    def of(
        cls, given: Mapping[str, Any], *, batch_size: int | None = None, axis: Axis = NO_AXIS, resolution: float = 0.0
    ) -> Order:
        """Return the order for keyword arguments: a search, with `resolution` as default, or a check of one `batch_size`.

        Raises:
            InvalidArgumentError: a value is invalid, or a check is given an option of searches.
            TypeError: there is no such option.
        """
        rest = dict(given)
        riders = {name: rest.pop(name) for name in ("device", "preserve", "progress", "patience") if name in rest}
        if batch_size is None:
            options = Options(**{"resolution": resolution, **rest})
        else:
            options = Options.to_check(batch_size, **rest)
        return cls(options=options, axis=axis, **riders)
