"""Why memory ran out: the record, and its report."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomprobe.allocator.segments import segment_size
from oomprobe.ground.units import format_bytes
from oomprobe.ground.words import clean, clip
from oomprobe.records.files import write_file
from oomprobe.records.kinds import Bytes
from oomprobe.records.timeline import Timeline
from oomprobe.results.blocks import Block, Fact, Report, Row, Table, as_text
from oomprobe.results.html import page
from oomprobe.results.plot import segments_figure, timeline_figure
from oomprobe.tape.orders import Reordered
from oomprobe.tape.stacks import UNKNOWN, Modules

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ROWS = 12
NAME_WIDTH = 70  # columns of a table
TITLES = {
    "live": "live tensors fill the memory",
    "fragmentation": "fragmentation: enough memory is free, but in pieces that are too small",
    "cap": "a cap: the device has memory, and this process may not use it",
    "others": "other processes hold the memory",
    "request": "one request is larger than the device, whatever else it holds",
    "host": "the host's memory ran out, not the device's",
    "pinned": "pinned memory of the host ran out, not the device's memory",
    "unknown": "it does not say what held the memory",
    None: "no request was refused",
}
BESIDE = "other allocations on the device, outside of torch's allocator"  # Metal's
BESIDE_TITLE = "allocations outside of torch's allocator hold the memory"
ENGINE_NAMES = {
    "jax": "JAX",
    "tensorflow": "TensorFlow",
    "llama.cpp": "llama.cpp",
    "vllm": "vLLM",
    "cupy": "CuPy",
}
OF_EQUAL_MODULES = (
    "a line of the model, how many calls from it hold memory at once, and how much each: what "
    "checkpointing computes again instead of keeping it"
)
OF_ANOTHER_ENGINE = "{name}, not torch, ran out of the device's memory"
CAUGHT = "The run went on after this error: it was caught, and is not how the run ended."


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why memory ran out, or what held it at its peak. Sizes are in bytes; None where a file does not say.

    Attributes:
        source: The file.
        cause: ``"live"``, ``"fragmentation"``, ``"cap"``, ``"others"``, ``"request"`` (it alone is
            larger than the device), ``"host"``, ``"pinned"`` (memory of the host that is pinned) or
            ``"unknown"``; None: nothing was refused.
        engine: Whose memory it is: ``"torch"``, ``"host"``, ``"jax"``, ``"tensorflow"``,
            ``"llama.cpp"``, ``"vllm"`` or ``"cupy"``.
        went_on: Whether the run went on after the error of a log; None: unknown.
        ended_with: The exception that ended the run then.
        ranks: Of a log: the cause of the last error of each rank or GPU, in the order of these.
        requested_bytes: The request that was refused, the last one if there were several.
        where: The line that asked for it, such as ``"model.py:7 in forward"``.
        live_bytes: Held by tensors then, or at the peak; each block counts as a multiple of 512 bytes, as torch rounds it.
        reserved_bytes: Held by torch's allocator then, or at most.
        free_bytes: Free on the device when the request was refused.
        available_bytes: What torch's allocator could have held then: what it had reserved, with what
            was free; under a cap, what that allowed at least.
        cap_bytes: The cap that the allocator was held to, where that is known: of a probe's trial.
        held: What was live, largest first: by line of code, or of a log by what it tells apart.
        kinds: The same bytes by kind: parameters and buffers, forward, backward, optimizer, ...
        modules: Calls of equal modules: the line, how many hold memory, and the bytes of all.
        least_bytes: Memory for torch in which the recording runs, with the refused requests, and with
            2 MiB less it does not. Where it is fragmented, still less can happen to run.
        least_bytes_expandable: The same with ``expandable_segments``.
        least_cap_bytes: The smallest cap on a larger device, as ``set_per_process_memory_fraction``
            sets one, in which the recording runs. With expandable segments it is not `least_bytes`:
            torch counts a whole request, also where some of its pages are mapped, and not what the
            last page has beyond the request.
        timeline: Of a snapshot with history: memory over time.
        reordered: After fragmentation, how many of 40 other orders of the recorded calls run in the
            memory that they had, and how many with ``expandable_segments``; None where a recording
            has no calls that could change places.
        advice: What to type.
        notes: How certain this is, and what the file does not say.

    Examples:
        >>> import oomprobe, tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".log") as log:
        ...     _ = log.write("CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 23.65 GiB total capacity; 12.10 GiB "
        ...         "already allocated; 1.04 GiB free; 22.31 GiB reserved in total by PyTorch)")
        ...     log.flush()
        ...     found = oomprobe.explain(log.name)
        >>> found.cause, found.requested_bytes, round(found.live_bytes / 2**30, 1)
        ('fragmentation', 2147483648, 12.1)
        >>> found.to_dict()["reserved_bytes"]
        23955180093
        >>> found.in_short().partition("; ")[2]
        'largest share: tensors of this process, 12.10 GiB (54 %)'
        >>> found.report().verdict
        'fragmentation: enough memory is free, but in pieces that are too small'
        >>> with tempfile.NamedTemporaryFile(suffix=".html") as file:
        ...     found.to_html(file.name)
    """

    source: str
    cause: str | None = None
    engine: str = "torch"
    went_on: bool | None = None
    ended_with: str = ""
    ranks: Mapping[str, str] = field(default_factory=dict)
    requested_bytes: Bytes | None = None
    where: str = ""
    live_bytes: Bytes | None = None
    reserved_bytes: Bytes | None = None
    free_bytes: Bytes | None = None
    available_bytes: Bytes | None = None
    cap_bytes: Bytes | None = None
    held: Mapping[str, Bytes] = field(default_factory=dict)
    kinds: Mapping[str, Bytes] = field(default_factory=dict)
    modules: tuple[Modules, ...] = ()
    least_bytes: Bytes | None = None
    least_bytes_expandable: int | None = None
    least_cap_bytes: Bytes | None = None
    timeline: Timeline | None = None
    reordered: Reordered | None = None
    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain data, as JSON has it."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    def to_html(self, path: str | Path) -> None:
        """Write the report as one self-contained HTML file, whole or not at all.

        Raises:
            InvalidArgumentError: a snapshot is shown, and matplotlib is not installed
                (``pip install 'oomprobe[plot]'``), or the file cannot be written.
        """
        write_file(path, page(self.report()).encode())

    def __str__(self) -> str:
        """Return the report, of at most 100 columns."""
        return as_text(self.report())

    def report(self) -> Report:
        """Return the report, of which text and page are made."""
        facts = {
            "asked for": _sizes(self.requested_bytes),
            "where": [Fact(self.where)] if self.where else [],
            "live": _sizes(self.live_bytes),
            "reserved": _sizes(self.reserved_bytes, " by torch's allocator"),
            "free": _sizes(self.free_bytes, " on the device"),
        }
        calls = [
            f"{calls.where}: {calls.count} x {format_bytes(calls.held_bytes / max(1, calls.count))}"
            for calls in self.modules
        ]
        ranks = [f"{rank}: {TITLES.get(cause, cause)}" for rank, cause in self.ranks.items()]
        if len(ranks) < 2:
            ranks = []
        orders = self.reordered.lines() if self.reordered else []
        blocks = (
            Block("memory", {label: about for label, about in facts.items() if about}),
            Block("ranks, in the order of their errors", ranks[:MOST_ROWS]),
            _shares("what was live", self.held),
            _shares("by kind", self.kinds),
            Block("calls of equal modules", calls[:MOST_ROWS], OF_EQUAL_MODULES),
            Block("the least memory for torch in which the same requests run", self._least()),
            Block("the same calls in other orders, in the memory that it had", orders),
            Block("what to type", self.advice),
            Block("notes:", self.notes),
        )
        warning = ""
        if self.went_on:
            warning = CAUGHT
            if self.ended_with:
                warning += f" It ended with {self.ended_with}"
        pictures: dict[str, Callable[[], Figure]] = {}
        if self.timeline is not None:
            pictures["memory over time, by what held it"] = partial(timeline_figure, self.timeline)
            if self.timeline.segments:
                draw = partial(segments_figure, self.timeline.segments)
                pictures["the largest segments at that moment, and their gaps"] = draw
        return Report(
            verdict=self._title(),
            warning=warning,
            to_paste=self.advice,
            blocks=blocks,
            pictures=pictures,
        )

    def in_short(self) -> str:
        """Return the cause, and what held the most."""
        if not self.held:
            return self._title()
        name, nbytes = max(self.held.items(), key=lambda item: item[1])
        share = 100 * nbytes / max(1, sum(self.held.values()))
        largest = f"{_end_of(name)}, {format_bytes(nbytes)} ({share:.0f} %)"
        return f"{self._title()}; largest share: {largest}"

    def _title(self) -> str:
        title = TITLES.get(self.cause, TITLES["unknown"])  # a file may have any text
        if self.cause == "others" and BESIDE in self.held:
            return BESIDE_TITLE
        if self.engine not in ENGINE_NAMES or self.cause == "host":
            return title
        of_engine = OF_ANOTHER_ENGINE.format(name=ENGINE_NAMES[self.engine])
        if self.cause == "unknown":
            return of_engine
        return f"{of_engine}: {title}"

    def _least(self) -> list[str]:
        if self.least_bytes is None or self.least_bytes_expandable is None:
            return []
        lines = []
        if self.available_bytes is not None:
            lines.append(f"it had: {format_bytes(self.available_bytes)}{self._cap()}")
        lines += [
            f"as recorded: {format_bytes(self.least_bytes)}; {_smallest_card(self.least_bytes)}"
        ]
        if self.least_cap_bytes not in (None, self.least_bytes):
            lines.append(f"as recorded, under a cap: {format_bytes(self.least_cap_bytes)}")
        if self.least_bytes_expandable != self.least_bytes:
            change = self.least_bytes_expandable / max(1, self.least_bytes) - 1
            lines.append(
                f"with expandable segments: {format_bytes(self.least_bytes_expandable)} ({change:+.1%})"
            )
        return lines

    def _cap(self) -> str:
        """Return what is known of the cap, if one held back what was free."""
        if self.cap_bytes is not None:
            return ", under the cap"
        reserved, free, requested, available = (
            nbytes or 0
            for nbytes in (
                *(self.reserved_bytes, self.free_bytes),
                *(self.requested_bytes, self.available_bytes),
            )
        )
        if available >= reserved + free:
            return ""
        too_much = format_bytes(reserved + segment_size(requested))
        return f" at least, under a cap of less than {too_much}"


# --- the report ---


def _sizes(nbytes: int | None, more: str = "") -> list[Fact]:
    if nbytes is None:
        return []
    return [Fact(f"{format_bytes(nbytes)}{more}")]


def _shares(title: str, sizes: Mapping[str, int]) -> Block:
    """Return a table of bytes and shares by name, with the small ones together."""
    total = sum(sizes.values())
    shown = list(sizes.items())[:MOST_ROWS]
    rest = total - sum(nbytes for _, nbytes in shown)
    if rest:
        shown.append((f"{len(sizes) - MOST_ROWS} more", rest))
    if {*sizes} <= {UNKNOWN}:
        return Block(title, "")
    rows = []
    for name, nbytes in shown:
        share = f"{nbytes / max(1, total):.1%}"
        rows.append(Row(cells=(_end_of(name), format_bytes(nbytes), share)))
    return Block(title, Table(heads=("", "bytes", "share"), rows=rows, texts=frozenset({0})))


def _end_of(name: str) -> str:
    """Return what a table has room for: the end of a path says more."""
    return clip(clean(name)[::-1], NAME_WIDTH)[::-1]


def _smallest_card(nbytes: int) -> str:
    from oomprobe.simulation.catalogue import CATALOGUE  # imports torch

    cards = [card for card in CATALOGUE if card.available_bytes >= nbytes]
    if not cards:
        return "more than any card of the catalogue leaves to torch"
    card = min(cards, key=lambda card: card.available_bytes)
    return f"the smallest card that leaves it to torch is {card.name}, with {format_bytes(card.available_bytes)}"
