"""The table of answers for the values of an axis as data, with its JSON form, and what is said about it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from oomprobe.errors import InvalidArgumentError
from oomprobe.ground.units import format_seconds
from oomprobe.ground.words import clip, count
from oomprobe.records.axis import CARDS, text_of_value
from oomprobe.records.files import read_json
from oomprobe.records.kinds import Plain, Samples
from oomprobe.records.notes import Note, remark
from oomprobe.records.plain import from_plain, reading, require_at_most
from oomprobe.records.savings import Comparison
from oomprobe.records.trials import Trial
from oomprobe.results.base import Reported
from oomprobe.results.blocks import (
    NOTES,
    VERDICT_WIDTH,
    Block,
    Fact,
    Facts,
    Report,
)
from oomprobe.results.kinds import OfCards, OfValues, product
from oomprobe.results.result import (
    SCHEMA_VERSION,
    WARNING,
    ProbeResult,
    appendix,
    facts_of,
    not_covered_block,
    read_at,
    subject,
)
from oomprobe.results.savings import OfSavings, cheapest, trial_at

MOST_ROWS = 1000  # of a file
_SHARED = ("ranks", "holds for", "state")  # facts that are the same for all rows


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ProbeTable(Reported):
    """The largest batch size for each value of one axis, such as each length of a sequence; or on each of several simulated cards.

    Attributes:
        axis: Name of the step's argument; of cards, ``"device"``; of savings, ``"saving"``.
        rows: The result for each value, in the order of the search; None where even the smallest batch does not fit. Values
            that a time limit cut off are missing.
        unfit: Why there is no result, for each value that has none.
        required: Of cards: the batch size that must run.
        savings: Of savings: the size at which they are compared, and what each means.
        notes: What concerns the table rather than one row.
        elapsed_s: Wall time of all searches.
        schema_version: Version of the JSON form.

    Examples:
        >>> import oomprobe, tempfile, torch
        >>> def step(model, batch_size, length):
        ...     model(torch.randn(batch_size, length, 256)).sum().backward()
        >>> model, options = torch.nn.Linear(256, 256), {"multiple_of": 1024, "progress": "off"}
        >>> table = oomprobe.find_max_batches(model, step, {"length": [8, 16]}, device="sim:64MiB", **options)
        >>> table.batch_sizes(), table.best(), table.product(8)
        ({8: 2048, 16: 1024}, 8, 16384)
        >>> for length, result in table.fitting():
        ...     print(length, result.batch_size, result.limited_by)
        8 2048 memory
        16 1024 memory
        >>> ProbeTable.from_dict(json.loads(table.to_json())) == ProbeTable.from_dict(table.to_dict())
        True
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     table.to_html(f"{folder}/lengths.html")
        ...     figure = table.plot()
        >>> table.report().verdict
        '2 of 2 values of length fit in ...'
    """

    axis: str
    rows: Mapping[Any, ProbeResult | None]
    unfit: Mapping[Any, str] = field(default_factory=dict)
    required: Samples | None = None
    savings: Comparison | None = None
    notes: tuple[str, ...] = ()
    elapsed_s: float = 0.0
    schema_version: int = SCHEMA_VERSION

    def batch_sizes(self) -> dict[Any, int]:
        """Return the batch size for each value that fits: alone, unless the table was made with an epoch."""
        return {value: result.batch_size for value, result in self.fitting()}

    def fitting(self) -> Iterator[tuple[Any, ProbeResult]]:
        """Yield the values that fit, with their results."""
        for value, result in self.rows.items():
            if result is not None:
                yield value, result

    def product(self, value: object) -> float | None:
        """Return a value times its batch size, such as the tokens of a batch; None if it does not fit or is no number."""
        return product(value, self.rows[value])

    def best(self) -> Any:
        """Return the value with the largest product of value and batch size; None without any."""
        products = {}
        for value in self.rows:
            of_row = self.product(value)
            if of_row is not None:
                products[value] = of_row
        return max(products, key=products.__getitem__, default=None)

    def smallest(self) -> Any:
        """Return the card with the least memory on which the `required` batch size runs; None without any.

        Examples:
            >>> import oomprobe
            >>> cards, options = {"device": ["sim:1GiB", "sim:2GiB"]}, {"multiple_of": 256, "progress": "off"}
            >>> oomprobe.probe_target("oomprobe.demo:wide_mlp", over=cards, require=512, **options).smallest()
            'sim:1GiB'
        """
        return OfCards(self.rows, self.unfit, self.required).chosen

    def at(self, batch_size: int) -> dict[Any, tuple[int, int] | None]:
        """Return the peaks of each row at one size, allocated and reserved in bytes; None where it ran out of memory.

        Raises:
            InvalidArgumentError: a row has not run that size.

        Examples:
            >>> import oomprobe
            >>> table = oomprobe.probe_target("oomprobe.demo:small_gpt", savings="checkpoint", device="sim:2GiB", progress="off")
            >>> size = table.savings.batch_size
            >>> table.at(size)["checkpoint"] < table.at(size)["as is"]
            True
        """
        peaks: dict[Any, tuple[int, int] | None] = {}
        for value, result in self.rows.items():
            trial = trial_at(result, batch_size)
            if trial is None and result is not None:
                raise InvalidArgumentError(
                    f"batch {batch_size} was not run in row {text_of_value(value)}"
                )
            peaks[value] = None
            if trial is not None and trial.passed:
                peaks[value] = trial.peaks
        return peaks

    def cheapest(self, batch_size: int, *, same_numbers: bool = False) -> Any:
        """Return the first row that runs a size, or a larger one; of savings, that is the cheapest. None if there is none.

        `same_numbers`: only of savings that do not change what training computes.

        Examples:
            >>> import oomprobe
            >>> cards, options = {"device": ["sim:1GiB", "sim:2GiB"]}, {"multiple_of": 256, "progress": "off"}
            >>> table = oomprobe.probe_target("oomprobe.demo:wide_mlp", over=cards, **options)
            >>> table.cheapest(table.batch_sizes()["sim:2GiB"])
            'sim:2GiB'
        """
        return cheapest(self.rows, batch_size, same_numbers=same_numbers)

    def choice(self) -> tuple[int | None, Any]:
        """Return the batch size that must run, and the smallest card or cheapest saving that runs it.

        Either is None where none is required, or none runs it.

        Examples:
            >>> import oomprobe
            >>> options = {"require": 512, "multiple_of": 256, "progress": "off"}
            >>> cards = {"device": ["sim:1GiB", "sim:2GiB"]}
            >>> oomprobe.probe_target("oomprobe.demo:wide_mlp", over=cards, **options).choice()
            (512, 'sim:1GiB')
        """
        kind = self._kind()
        return kind.size, kind.chosen

    def _kind(self) -> OfValues:
        if self.savings is not None:
            return OfSavings(self.rows, self.savings)
        if self.axis == CARDS:
            return OfCards(self.rows, self.unfit, self.required)
        return OfValues(self.axis, self.rows, self.unfit)

    def to_dict(self) -> dict[str, Any]:
        """Return the table as JSON types; `from_dict` reads them back, except values other than numbers, texts and tuples."""
        rows, sizes = [], self.batch_sizes()
        for value, result in self.rows.items():
            rows.append(
                {
                    "value": json.loads(json.dumps(value, default=str)),
                    "batch_size": sizes.get(value),
                    "unfit": self.unfit.get(value),
                    "result": None if result is None else result.to_dict(),
                }
            )
        return {
            "schema_version": self.schema_version,
            "axis": self.axis,
            "required": self.required,
            "savings": None if self.savings is None else asdict(self.savings),
            "rows": rows,
            "notes": list(self.notes),
            "elapsed_s": self.elapsed_s,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ProbeTable:
        """Return the table that `to_dict` wrote.

        Raises:
            InvalidArgumentError: the data has another schema version, or is not a table.
        """
        with reading("table", data, SCHEMA_VERSION):
            saved = from_plain(_SavedTable, data)
            require_at_most(MOST_ROWS, saved.rows, "rows")
            rows: dict[Any, ProbeResult | None] = {}
            unfit = {}
            for at, row in enumerate(saved.rows):
                value = _value(row.value)
                rows[value] = None
                if row.result is not None:
                    rows[value] = result = read_at(row.result, f"rows[{at}].result")
                    if result.confirmation is None:
                        raise InvalidArgumentError(
                            f"rows[{at}].result.trials has none that ran batch {result.batch_size}"
                        )
                if row.unfit is not None:
                    unfit[value] = row.unfit
            read = {name: getattr(saved, name) for name in _SHARED_FIELDS}
            table = cls(rows=rows, unfit=unfit, **read)
            if table._kind().has_names:
                for at, value in enumerate(rows):
                    if not isinstance(value, str):
                        raise InvalidArgumentError(f"rows[{at}].value is no name")
            return table

    def _noted(self) -> list[Note]:
        """Return the notes of the table, and each of the rows' notes once, with the values of its rows unless it is all of them.

        Of cards and savings, only warnings are told with their rows: each has other figures.
        """
        rows_of: dict[Note, list[str]] = defaultdict(list)
        rows = list(self.fitting())
        for value, result in rows:
            for note in result._noted():
                rows_of[note].append(text_of_value(value))
        shared, of_some_rows = [], []
        for note, values in rows_of.items():
            if len(values) == len(rows):
                shared.append(note)
            elif note.warns or not self._kind().has_names:
                of_some_rows.append(
                    replace(note, text=f"{self.axis}={', '.join(values)}: {note.text}")
                )
        return [*map(remark, self.notes), *shared, *of_some_rows]

    def report(self, *, verbose: bool = False, all_trials: bool = False) -> Report:
        """Return the report; a verbose one, or one of all trials, contains that of each row."""
        has_rows = verbose or all_trials
        results, parts = [], {}
        for value, result in self.fitting():
            results.append(result)
            if has_rows:
                part = result.report(verbose=verbose, all_trials=all_trials)
                # The picture of all rows, and what to paste for them, say enough.
                parts[f"{self.axis}={text_of_value(value)}"] = replace(
                    part, pictures={}, to_paste=()
                )
        is_contaminated = any(result.contaminated for result in results)
        kind = self._kind()
        blocks = [
            *kind.blocks(),
            Block("", _facts(self)),
            Block(NOTES, [note.text for note in self._noted()]),
        ]
        about, last_lines = "", []
        if results:
            about, last_lines = subject(results[-1]), appendix(results[-1])
            if not has_rows:
                blocks.append(not_covered_block(results[-1]))
        return Report(
            subject=about,
            verdict=clip(kind.verdict(), VERDICT_WIDTH),
            warning=WARNING if is_contaminated else "",
            to_paste=kind.to_paste(),
            blocks=blocks,
            parts=parts,
            pictures={f"batch size for each {self.axis}": kind.draw},
            appendix=last_lines,
        )


# --- read from a file ---


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavedRow:
    """A row of a table in its file."""

    value: Plain
    unfit: str | None
    result: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _SavedTable:
    """A table in its file."""

    axis: str
    rows: tuple[_SavedRow, ...]
    required: Samples | None = None
    savings: Comparison | None = None
    notes: tuple[str, ...]
    elapsed_s: float


_SHARED_FIELDS = {each.name for each in fields(_SavedTable)} - {"rows"}  # with a `ProbeTable`


def _value(value: Any) -> Hashable:
    """Return a value of the axis as it was before JSON made a list of a tuple."""
    if isinstance(value, list):
        return tuple(map(_value, value))
    return value  # type: ignore[no-any-return]


def _facts(table: ProbeTable) -> Facts:
    """Return the facts that all rows share, and the time of all."""
    trials, facts = list[Trial](), dict[str, Sequence[Fact]]()
    for _, result in table.fitting():
        trials += result.trials
        facts = {**facts_of(result, verbose=False)}
    shared = {label: facts[label][:1] for label in _SHARED if label in facts}
    calls = count(sum(trial.steps for trial in trials), "call", "calls")
    took = f"the rows took {count(len(trials), 'trial', 'trials')} and {calls}"
    return {**shared, "time": [Fact(f"{format_seconds(table.elapsed_s)}; {took}")]}


def read_result(path: str | Path) -> ProbeResult | ProbeTable:
    """Return the result or the table that `to_json` wrote to a file.

    Raises:
        InvalidArgumentError: the file cannot be read, or holds neither.
    """
    data = read_json(path)
    kind: type[ProbeResult | ProbeTable] = ProbeResult
    if isinstance(data, dict) and "axis" in data:
        kind = ProbeTable
    try:
        return kind.from_dict(data)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{path}: {error}") from None
