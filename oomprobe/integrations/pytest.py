"""A pytest fixture that guards the memory of a training step, on a simulated card without a GPU.

    def test_memory(max_batch):
        checked = max_batch.check(model, step, 8, device="sim:24GiB")
        checked.assert_peak_below("6.2GiB")
        checked.assert_no_growth("2%")  # against the baseline, which pytest --oomprobe-update writes

Baselines are results as `oomprobe show` and `oomprobe compare` read them: ``test_x.oomprobe/test_memory.json`` beside test_x.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from oomprobe.ground.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from torch import nn

    from oomprobe.records.options import Steps
    from oomprobe.results.result import ProbeResult

NO_BASELINE = (
    "there is no baseline {path}: run pytest --oomprobe-update, look at the file, and commit it"
)
ANOTHER_TORCH = (
    "the baseline {path} is of torch {before}, and this is {after}, whose memory may differ: give a tolerance, "
    'assert_no_growth("2%"), or write it anew with pytest --oomprobe-update'
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--oomprobe-update``."""
    parser.getgroup("oomprobe").addoption(
        "--oomprobe-update",
        action="store_true",
        help="write the baselines of max_batch.check(...).assert_no_growth()",
    )


@pytest.fixture
def max_batch(request: pytest.FixtureRequest) -> MaxBatch:
    """Check sizes of a step; see `oomprobe.integrations.pytest`."""
    name = re.sub(r"[^\w.-]+", "-", request.node.name)
    folder = request.path.with_suffix(".oomprobe")
    paths = (
        folder / (f"{name}.json" if number == 1 else f"{name}-{number}.json") for number in count(1)
    )
    return MaxBatch(paths, updates=request.config.getoption("--oomprobe-update"))


class MaxBatch:
    """Checks sizes of a step in a test; the n-th check has the n-th of the `paths` for its baseline."""

    def __init__(self, paths: Iterator[Path], *, updates: bool) -> None:
        self._paths, self._updates = paths, updates

    def check(self, model: nn.Module, step_fn: Steps, batch_size: int, **options: Any) -> Checked:
        """Run one size as `oomprobe.check` does, and record where the memory went."""
        from oomprobe.probe import check

        given: dict[str, Any] = {"breakdown": True, "progress": "off", **options}
        result = check(model, step_fn, batch_size, **given)
        return Checked(result, next(self._paths), updates=self._updates)


class Checked:
    """A size that ran, and its `result`."""

    def __init__(self, result: ProbeResult, path: Path, *, updates: bool) -> None:
        self.result, self._path, self._updates = result, path, updates

    def assert_peak_below(self, memory: str | int) -> None:
        """Fail if the step allocates this much or more: a number of bytes, or a text such as ``"6.2GiB"``."""
        __tracebackhide__ = True
        limit_bytes = parse_bytes(memory) if isinstance(memory, str) else memory
        peak_bytes, _ = self.result.trials[-1].peaks
        if peak_bytes >= limit_bytes:
            size, peak, limit = (
                self.result.batch_size,
                format_bytes(peak_bytes),
                format_bytes(limit_bytes),
            )
            pytest.fail(
                f"batch {size} allocates {peak}, not less than {limit}\n{self.result}",
                pytrace=False,
            )

    def assert_no_growth(self, tolerance: str | float | None = None) -> None:
        """Fail if the step allocates more than in the baseline, by more than a share such as ``"2%"``; None: at all."""
        __tracebackhide__ = True
        from oomprobe.records.files import read_json
        from oomprobe.results.compare import grown, stated_tolerance
        from oomprobe.results.result import ProbeResult

        if self._updates:
            self._path.parent.mkdir(exist_ok=True)
            self.result.to_json(self._path)
            return
        if not self._path.exists():
            pytest.fail(NO_BASELINE.format(path=self._path), pytrace=False)
        before = ProbeResult.from_dict(read_json(self._path))
        versions = [result.environment.get("torch") for result in (before, self.result)]
        if tolerance is None and versions[0] != versions[1]:
            pytest.fail(
                ANOTHER_TORCH.format(path=self._path, before=versions[0], after=versions[1]),
                pytrace=False,
            )
        if said := grown(before, self.result, stated_tolerance(str(tolerance or 0))):
            pytest.fail("\n".join(said), pytrace=False)
