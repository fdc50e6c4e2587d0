"""The peak of a real training run, beside the peak that a probe measured."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from oomprobe.devices import current_accelerator
from oomprobe.devices.statistics import Statistics
from oomprobe.errors import InvalidArgumentError, check_size
from oomprobe.ground.allocator_settings import allocator_settings, to_expand
from oomprobe.ground.units import format_bytes
from oomprobe.ground.words import clean
from oomprobe.records.trials import Trial
from oomprobe.results.progress import notice
from oomprobe.results.result import ProbeResult
from oomprobe.results.table import read_result

EVALUATION, TRAINING = "evaluation", "training"  # phases
FIRST_LINE = 50  # steps: by then the optimizers have stepped, and a real loop has logged
MOST_PERCENT = 1.0  # that the peak may be above the probe's
MOST_MISSED = 3  # items of what the probe did not cover, in a line
NO_PEAKS = "nothing was seen: torch counts no peaks on {kind}"
UNUSED = "nothing was seen: this process has not used its accelerator"
FAILED = "the last look failed: {error}"
NO_RESULT = "PeakMonitor compares with the result of one probe, or the path of its JSON, not with a {kind}: of a table pass table.rows[value]"
UNKNOWN = "the probe has no peak at batch {size}; it has those of batch {sizes}"
BETWEEN = "batch {size} was not run: its probed peaks lie on the line between those of batch {smaller} and {larger}"
EARLIER = "the allocator's peak is from before the run, which took at most that: call torch.cuda.reset_peak_memory_stats() before you make the monitor"
RESET = "resets of the allocator's peaks that were noticed: {resets}; a peak between the last look and a reset was not seen"
BEYOND = "a batch with {name} {number} came, and the epoch that was probed has at most {most}"
OTHER_DEVICE = "the probe was of {probed}, and this run is on {here}"
OTHER_TORCH = "the probe ran with torch {probed}, and this run has {here}"
ABOVE_CAP = (
    "the margin above it is in use, and fragmentation may end the run: {setting}train with a "
    "smaller batch"
)
REPEAT = {  # by phase
    TRAINING: "oomprobe.check(model, step_fn, {size}), on the largest batches of your data (oomprobe.worst_case_batches)",
    EVALUATION: "oomprobe.check(model, {{'train': step_fn, 'eval': eval_fn}}, {size})",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """The peaks of a probe at a batch size; None where they are not known."""

    sizes: Sequence[int]  # all that have peaks
    # The sizes that ran, from below and from above: equal if it ran itself.
    nearest: tuple[int, int] | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None

    @classmethod
    def of(cls, trials: Sequence[Trial], batch_size: int) -> Probed:
        """Return those of the last trial of a size, or on the line between the nearest sizes that ran.

        Examples:
            >>> from oomprobe.records.trials import Phase, Verdict
            >>> ran = {"verdict": Verdict.FITS, "phase": Phase.GROW}
            >>> trials = [Trial(batch_size=size, peak_allocated_bytes=100 + 10 * size, **ran) for size in (8, 16)]
            >>> Probed.of(trials, 16).allocated_bytes, Probed.of(trials, 10).allocated_bytes, Probed.of(trials, 17).allocated_bytes
            (260, 200, None)
        """
        ran = {t.batch_size: t for t in trials if t.passed and t.peak_allocated_bytes is not None}
        sizes = sorted(ran)
        if not sizes or not sizes[0] <= batch_size <= sizes[-1]:
            return cls(sizes=sizes)
        smaller = sizes[bisect_right(sizes, batch_size) - 1]
        larger = sizes[bisect_left(sizes, batch_size)]
        low, high = ran[smaller], ran[larger]
        share = (batch_size - smaller) / max(1, larger - smaller)
        return cls(
            sizes=sizes,
            nearest=(smaller, larger),
            allocated_bytes=_on_the_line(
                low.peak_allocated_bytes, high.peak_allocated_bytes, share
            ),
            reserved_bytes=_on_the_line(low.peak_reserved_bytes, high.peak_reserved_bytes, share),
        )

    @property
    def was_run(self) -> bool:
        """Whether a trial of this very size ran."""
        return self.nearest is not None and self.nearest[0] == self.nearest[1]

    def __str__(self) -> str:
        about = "" if self.was_run else "~"
        return f"{about}{format_bytes(self.allocated_bytes or 0)}"


def _on_the_line(low: int | None, high: int | None, share: float) -> int | None:
    if low is None or high is None:
        return None
    return round(low + share * (high - low))


class _UnseenError(Exception):
    """There is no peak to look at; the text says why."""


def _current_device() -> tuple[str, Statistics]:
    """Return the name of the accelerator that is current, and its statistics, without starting it."""
    kind = current_accelerator()
    module: Any = None if kind is None else torch.get_device_module(kind)
    if not hasattr(module, "memory_stats_as_nested_dict"):
        raise _UnseenError(NO_PEAKS.format(kind=kind or "the host"))
    if not module.is_initialized():
        raise _UnseenError(UNUSED)
    index = module.current_device()
    return str(module.get_device_properties(index).name), Statistics(module, index)


class PeakMonitor:
    """Compares the peak memory of a training run with what the probe measured at its batch size.

    It reads the counters of torch's allocator on the device that is current at the first step, and resets none. After 50 steps it
    writes a line to standard error, and another once the peak exceeds the probe's by more than 1 %. With several ranks, rank 0
    writes the first line, and each rank whose peak exceeds the probe's a line of its own.

    Args:
        result_or_path: A `ProbeResult`, or the path of its JSON. A simulated card's does too.
        batch_size: The size that trains, per rank as in the probe; None: the answer.
        warn: Write the two lines; False: write nothing.

    Raises:
        InvalidArgumentError: the file cannot be read, or holds no result, or one that is not of one probe.

    Attributes:
        batch_size: The size that is compared.
        steps: Calls of `step`.

    Examples:
        >>> import oomprobe
        >>> result = oomprobe.check_target("oomprobe.demo:wide_mlp", 64, device="sim:1GiB", progress="off")
        >>> monitor = oomprobe.PeakMonitor(result)
        >>> for batch in range(3):
        ...     monitor.step()  # after optimizer.step()
        >>> monitor.seen("evaluation")  # after an evaluation
        >>> monitor.probed_bytes == result.confirmation.peak_allocated_bytes, monitor.ok, monitor.to_dict()["steps"]
        (True, True, 3)
        >>> monitor.peak_bytes  # None, as there is no GPU here
        >>> monitor.compare_at(16)
        >>> monitor.to_dict()["notes"][0]
        'the probe has no peak at batch 16; it has those of batch 32, 64'
    """

    def __init__(
        self,
        result_or_path: ProbeResult | str | Path,
        batch_size: int | None = None,
        warn: bool = True,
    ) -> None:
        self._result, self._warn = _result_of(result_or_path), warn
        self.steps = 0
        self._longest: dict[str, float] = {}  # of each number of the shapes that came
        self._peak_bytes = self._peak_reserved_bytes = 0
        self._statistics: Statistics | None = None  # None before the first look that saw something
        self._device: str | None = None
        self._unseen = ""  # why the last look saw nothing
        self._resets = 0
        self._above_step: int | None = None  # the first at which the peak exceeded the probe's
        self._above_phase = ""
        self._is_first_line_due = True
        self.compare_at(self._result.batch_size if batch_size is None else batch_size)
        self._last_bytes = self._earlier_bytes = (
            0  # the allocator's peak: at the last look, and before the run
        )
        with suppress(Exception):  # the first step meets it again
            _, statistics = _current_device()
            self._last_bytes = self._earlier_bytes = statistics.peaks()[0]

    def compare_at(self, batch_size: int) -> None:
        """Compare with the probe's peak at another batch size from now on."""
        check_size("batch_size", batch_size)
        self.batch_size = batch_size
        self._probed = Probed.of(self._result.trials, batch_size)
        epoch = self._result.epoch
        if epoch is not None and epoch.batch_size == batch_size and epoch.peak_allocated_bytes:
            self._probed = replace(  # of all its orders, not only of the calls that ran
                self._probed,
                allocated_bytes=epoch.peak_allocated_bytes,
                reserved_bytes=epoch.peak_reserved_bytes,
            )

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes that the run has allocated so far; None before anything was seen."""
        return self._peak_bytes or None

    @property
    def probed_bytes(self) -> int | None:
        """The peak that the probe's last trial of this size allocated; None if that is not known.

        If the size was not run, it lies on the line between the nearest sizes that ran, and `to_dict` says so.
        """
        return self._probed.allocated_bytes

    @property
    def ok(self) -> bool:
        """Whether the peak has never exceeded the probe's by more than 1 %; also True as long as one of them is not known."""
        return self._above_step is None

    def step(self, phase: str = "", **shapes: float) -> None:
        """Look at the peak; call this after each optimizer step. It never raises, and does not wait for the device.

        Args:
            phase: What has run since the last look, if that is known, such as ``"training"``: named if the peak exceeds the probe's.
            **shapes: What the batch had of an epoch's numbers, such as ``length=411``: `to_dict` says where one lies beyond them.
        """
        self.steps += 1
        with suppress(TypeError):  # no number: it never raises
            for name, number in shapes.items():
                self._longest[name] = max(number, self._longest.get(name, 0))
        self.seen(phase)

    def seen(self, phase: str) -> None:
        """Look at the peak after something that is no optimizer step, such as ``"evaluation"``. It never raises."""
        try:
            self._look()
            self._tell(phase)
        except _UnseenError as error:
            self._unseen = str(error)
        except Exception as error:  # whatever is broken, the training goes on
            self._unseen = FAILED.format(error=repr(error))

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON types: the body of an issue with the form "Numbers from a GPU"."""
        probe = self._result.to_dict()
        named = ("batch_size", "device", "world_size", "not_covered", "environment")
        return {
            "batch_size": self.batch_size,
            "steps": self.steps,
            "peak_allocated_bytes": self.peak_bytes,
            "peak_reserved_bytes": self._peak_reserved_bytes or None,
            "probed_allocated_bytes": self._probed.allocated_bytes,
            "probed_reserved_bytes": self._probed.reserved_bytes,
            "difference_percent": self._difference_percent,
            "ok": self.ok,
            "first_step_above": self._above_step,
            "phase_above": self._above_phase,
            "cap_bytes": self._result.budget_bytes,
            "resets": self._resets,
            "rank": rank_here(),
            "device": self._device,
            "torch": str(torch.__version__),
            "notes": [*self._notes()],
            "probe": {name: probe[name] for name in named},
        }

    # --- what it sees ---

    def _look(self) -> None:
        """Read the peaks; keep the highest, whoever resets them."""
        if self._statistics is None:
            self._device, self._statistics = _current_device()
            self._unseen = ""
        allocated_bytes, reserved_bytes = self._statistics.peaks()
        if allocated_bytes < self._last_bytes:
            if self._is_of_the_run:
                self._resets += 1
            else:  # what ran before is no longer counted
                self._peak_bytes = self._peak_reserved_bytes = 0
            self._earlier_bytes = 0
        self._last_bytes = allocated_bytes
        self._peak_bytes = max(allocated_bytes, self._peak_bytes)
        self._peak_reserved_bytes = max(reserved_bytes, self._peak_reserved_bytes)

    @property
    def _is_of_the_run(self) -> bool:
        """Whether the peak is higher than before the run."""
        return self._peak_bytes > self._earlier_bytes

    @property
    def _difference_percent(self) -> float | None:
        if not self._peak_bytes or not self.probed_bytes:
            return None
        return 100 * (self._peak_bytes / self.probed_bytes - 1)

    # --- what it says ---

    def _tell(self, phase: str) -> None:
        """Write the lines that are due."""
        difference = self._difference_percent
        exceeds = difference is not None and difference > MOST_PERCENT
        if exceeds and self.ok and self._is_of_the_run:
            self._above_step, self._above_phase = self.steps, phase
            self._write(self._line_above(phase))
        if self.steps == FIRST_LINE and self._is_first_line_due:
            self._is_first_line_due = False
            if not rank_here():  # None: there are no ranks
                self._write(self._first_line())

    def _write(self, line: str) -> None:
        if not self._warn:
            return
        rank = rank_here()
        who = "oomprobe: " if rank is None else f"oomprobe: rank {rank}: "
        notice(who + line)

    def _first_line(self) -> str:
        at_most = "" if self._is_of_the_run else "at most "
        line = f"peak {at_most}{format_bytes(self._peak_bytes)}"
        if self._difference_percent is None:
            return f"{line}; {self._unknown()}"
        left_bytes = self._result.budget_bytes - self._peak_reserved_bytes
        side = "above" if left_bytes < 0 else "below"
        left = ": ".join(
            [f"reserved {format_bytes(abs(left_bytes))} {side} the cap", *self._advice()]
        )
        return f"{line}, probed {self._probed} ({self._difference_percent:+.1f} %), {left}"

    def _advice(self) -> Iterator[str]:
        """Yield what to do where reserved memory is above the cap."""
        if not 0 < self._result.budget_bytes < self._peak_reserved_bytes:
            return
        setting = to_expand(allocator_settings(), torch.__version__)
        if setting:
            setting = f"set {setting} before training, or "
        yield ABOVE_CAP.format(setting=setting)

    def _line_above(self, phase: str) -> str:
        where = f"step {self.steps}"
        if phase:
            where += f", in {phase}"
        peak, size = format_bytes(self._peak_bytes), self.batch_size
        line = f"peak {peak} at {where}: {self._difference_percent:.1f} % above the {self._probed} probed at batch {size}"
        missed = []  # without the advice that follows each
        for item in self._result.not_covered[:MOST_MISSED]:
            missed.append(clean(item.partition(" (")[0].partition(":")[0]))
        if missed:
            line += f"; not covered by the probe: {'; '.join(missed)}"
        return (
            f"{line}. To probe with it: {REPEAT.get(phase, REPEAT[EVALUATION]).format(size=size)}"
        )

    def _unknown(self) -> str:
        return UNKNOWN.format(
            size=self.batch_size, sizes=", ".join(map(str, self._probed.sizes)) or "none"
        )

    def _notes(self) -> Iterator[str]:
        """Yield what a reader of the numbers should know."""
        nearest, probed_torch = self._probed.nearest, self._result.environment.get("torch")
        if nearest is None:
            yield self._unknown()
        elif not self._probed.was_run:
            yield BETWEEN.format(size=self.batch_size, smaller=nearest[0], larger=nearest[1])
        if self._peak_bytes and not self._is_of_the_run:
            yield EARLIER
        longest = {} if self._result.epoch is None else self._result.epoch.longest
        for name, number in self._longest.items():
            if number > longest.get(name, number):
                yield BEYOND.format(name=name, number=number, most=longest[name])
        yield from self._advice()
        if self._resets:
            yield RESET.format(resets=self._resets)
        if self._device is not None and not self._result.device.endswith(self._device):
            yield OTHER_DEVICE.format(probed=self._result.device, here=self._device)
        if str(torch.__version__) != probed_torch:
            yield OTHER_TORCH.format(probed=probed_torch, here=torch.__version__)
        if self._unseen:
            yield self._unseen


def rank_here() -> int | None:
    """Return the rank of this process; None if it is none of several."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else None


def _result_of(result_or_path: object) -> ProbeResult:
    probed = result_or_path
    if isinstance(probed, str | Path):
        probed = read_result(probed)
    if not isinstance(probed, ProbeResult):
        raise InvalidArgumentError(NO_RESULT.format(kind=type(probed).__name__))
    return probed
