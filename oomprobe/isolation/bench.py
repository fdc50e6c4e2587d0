"""A workbench whose trials run in child processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from oomprobe.clock import Clock
from oomprobe.here import told_of_trials
from oomprobe.interrupts import Interrupts
from oomprobe.isolation.remote import RemoteRunner
from oomprobe.isolation.spec import Spec
from oomprobe.options import Options
from oomprobe.progress import Progress, reporter
from oomprobe.result import Trial
from oomprobe.scope import scope
from oomprobe.workbench import Workbench


@scope
def isolated_bench(target: str, device: Any, options: Options, progress: Progress) -> Iterator[Workbench]:
    """Everything a probe of a target needs; on every way out no process of it is left."""
    spec = Spec.of(target, device, options)
    status = reporter(progress)
    recorded: list[Trial] = []
    with told_of_trials(recorded), Interrupts() as interrupts:
        clock = Clock(options)
        runner = RemoteRunner(spec, interrupts, clock)
        try:
            runner.open()
            bench = Workbench(runner, options, status, clock, recorded)
            bench.state_verified = True  # nothing of the caller's was there to be changed
            yield bench
        finally:
            status.close()
            runner.close()
