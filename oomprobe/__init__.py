"""Find the largest batch size that truly fits, by running it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from oomprobe.ground.version import __version__ as __version__

# The module of each public name. They load on first use: importing oomprobe is nearly free, and its pure modules work
# without torch.
_NAMES = {
    "devices": ("Device",),
    "devices.simulated": ("SimulatedDevice",),
    "errors": (
        *(
            "OomProbeError",
            "InvalidArgumentError",
            "NoDeviceError",
            "NothingFitsError",
            "StepFailedError",
        ),
        *("DeviceLostError", "TimeLimitError", "UnreliableError"),
    ),
    "explaining": ("PeakMonitor", "explain"),
    "probe": (
        *("check", "check_command", "check_target"),
        *("find_max_batch", "find_max_batches", "find_max_tokens", "find_savings"),
        *("probe_command", "probe_target"),
    ),
    "records.epoch": ("Epoch", "EpochRecord"),
    "records.fit": ("LinearFit",),
    "records.options": ("Step",),
    "records.plan": ("PlanEntry",),
    "records.trials": ("Phase", "Trial", "Verdict"),
    "results.result": ("ProbeResult",),
    "results.table": ("ProbeTable",),
    "results.why": ("Explanation",),
    "verdicts": ("Evidence", "classify_error"),
    "worst_case": ("WorstCaseBatches", "worst_case_batches"),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

if TYPE_CHECKING:
    from oomprobe.devices import Device as Device
    from oomprobe.devices.simulated import SimulatedDevice as SimulatedDevice
    from oomprobe.errors import DeviceLostError as DeviceLostError
    from oomprobe.errors import InvalidArgumentError as InvalidArgumentError
    from oomprobe.errors import NoDeviceError as NoDeviceError
    from oomprobe.errors import NothingFitsError as NothingFitsError
    from oomprobe.errors import OomProbeError as OomProbeError
    from oomprobe.errors import StepFailedError as StepFailedError
    from oomprobe.errors import TimeLimitError as TimeLimitError
    from oomprobe.errors import UnreliableError as UnreliableError
    from oomprobe.explaining import PeakMonitor as PeakMonitor
    from oomprobe.explaining import explain as explain
    from oomprobe.probe import check as check
    from oomprobe.probe import check_command as check_command
    from oomprobe.probe import check_target as check_target
    from oomprobe.probe import find_max_batch as find_max_batch
    from oomprobe.probe import find_max_batches as find_max_batches
    from oomprobe.probe import find_max_tokens as find_max_tokens
    from oomprobe.probe import find_savings as find_savings
    from oomprobe.probe import probe_command as probe_command
    from oomprobe.probe import probe_target as probe_target
    from oomprobe.records.epoch import Epoch as Epoch
    from oomprobe.records.epoch import EpochRecord as EpochRecord
    from oomprobe.records.fit import LinearFit as LinearFit
    from oomprobe.records.options import Step as Step
    from oomprobe.records.plan import PlanEntry as PlanEntry
    from oomprobe.records.trials import Phase as Phase
    from oomprobe.records.trials import Trial as Trial
    from oomprobe.records.trials import Verdict as Verdict
    from oomprobe.results.result import ProbeResult as ProbeResult
    from oomprobe.results.table import ProbeTable as ProbeTable
    from oomprobe.results.why import Explanation as Explanation
    from oomprobe.verdicts import Evidence as Evidence
    from oomprobe.verdicts import classify_error as classify_error
    from oomprobe.worst_case import WorstCaseBatches as WorstCaseBatches
    from oomprobe.worst_case import worst_case_batches as worst_case_batches


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'oomprobe' has no attribute {name!r}")
    return getattr(import_module(f"oomprobe.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
