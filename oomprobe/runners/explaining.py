"""Record a trial that shall say why it runs out of memory: a runner around that of this process."""

from __future__ import annotations

from dataclasses import replace

from oomprobe.devices import Device
from oomprobe.explaining.explanation import of_snapshot
from oomprobe.records.trials import Measured, Outcome, Request, Runner, RunnerInfo, Verdict

BEFORE = "there before the step"  # the model, and what the process had kept with it


class Explaining:
    """Runs trials on a device that can be `recorded`; see `oomprobe.records.trials.Runner`."""

    def __init__(self, device: Device, runner: Runner) -> None:
        self._device, self._runner = device, runner

    @property
    def facts(self) -> RunnerInfo:
        """What the runner knows."""
        return replace(self._runner.facts, explains=True)

    def measure(self) -> Measured:
        """Sample the memory."""
        return self._runner.measure()

    def run(self, request: Request) -> Outcome:
        """Run a trial. If the request `explains`, record it, and say why it ran out of memory."""
        if not request.explains:
            return self._runner.run(request)
        with self._device.recorded() as snapshots:
            outcome = self._runner.run(request)
        if outcome.trial.verdict is not Verdict.OOM or not snapshots:
            return outcome
        explanation = of_snapshot(
            snapshots[0],
            source=f"batch {request.batch_size}",
            cap_bytes=request.cap_bytes,
            before=BEFORE,
        )
        return replace(outcome, why=explanation.to_dict())
