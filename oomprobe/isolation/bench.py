"""A workbench whose trials run in child processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oomprobe.clock import Clock
from oomprobe.here import opened, told_of_trials
from oomprobe.interrupts import Interrupts
from oomprobe.isolation.remote import RemoteRunner
from oomprobe.isolation.spec import Spec
from oomprobe.options import Options
from oomprobe.progress import Progress, reporter
from oomprobe.record import Record
from oomprobe.result import Trial
from oomprobe.scope import scope
from oomprobe.workbench import Workbench


@scope
def isolated_bench(
    target: str, device: Any, options: Options, progress: Progress, journal: str | Path | None
) -> Iterator[Workbench]:
    """Everything a probe of a target needs; on every way out no process of it is left."""
    spec = Spec.of(target, device, options)
    status = reporter(progress)
    recorded: list[Trial] = []
    with told_of_trials(recorded), Interrupts() as interrupts, opened(journal) as book:
        clock = Clock(options)
        runner = RemoteRunner(spec, interrupts, clock)
        try:
            question = runner.open()
            if book is not None:
                book.ask(question)
            bench = Workbench(runner, options, status, clock, recorded, Record(book, isolated=True))
            bench.state_verified = True  # nothing of the caller's was there to be changed
            yield bench
        finally:
            status.close()
            runner.close()
