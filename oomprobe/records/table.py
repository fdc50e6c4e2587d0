"""The table of answers for the values of an axis: plain data, with its JSON and CSV forms."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oomprobe.records.axis import magnitude, text_of_value
from oomprobe.records.plain import reading, written
from oomprobe.records.result import SCHEMA_VERSION, Flat, ProbeResult
from oomprobe.records.trials import last_of

# As for results, the methods that render import `report` when they are called.
if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeTable:
    """The largest batch size for each value of one axis, such as each length of a sequence; or on each of several simulated cards.

    Attributes:
        axis: Name of the step's argument; of cards, ``"device"``.
        rows: The result for each value, in the order of the search; None where even the smallest batch does not fit. Values
            that a time limit cut off are missing.
        mixed: The batch size for each value with which steps of all values took turns in one process, in random order, as in
            training with a bucket for each value; empty if that was not tried or did not run.
        mixed_failed: Whether steps of all values were to run in turn, and no sizes were found with which they do.
        unfit: Why there is no result, for each value that has none.
        required: Of cards: the batch size that must run.
        notes: What concerns the table rather than one row.
        elapsed_s: Wall time of all searches.
        schema_version: Version of the JSON form.

    Examples:
        >>> import oomprobe, tempfile, torch
        >>> def step(model, batch_size, length):
        ...     model(torch.randn(batch_size, length, 256)).sum().backward()
        >>> model, options = torch.nn.Linear(256, 256), {"multiple_of": 1024, "mixed": False, "progress": "off"}
        >>> table = oomprobe.find_max_batches(model, step, {"length": [8, 16]}, device="sim:64MiB", **options)
        >>> table.batch_sizes(), table.best(), table.product(8)
        ({8: 2048, 16: 1024}, 8, 16384)
        >>> for length, result in table.fitting():
        ...     print(length, result.batch_size, result.limited_by)
        8 2048 memory
        16 1024 memory
        >>> table.to_csv().splitlines()[1]
        '8,2048,,16384,...'
        >>> ProbeTable.from_dict(json.loads(table.to_json())) == ProbeTable.from_dict(table.to_dict())
        True
        >>> table.summary()["length=8/batch_size"]
        2048
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     table.to_html(f"{folder}/lengths.html")
        ...     figure = table.plot()
    """

    axis: str
    rows: Mapping[Any, ProbeResult | None]
    mixed: Mapping[Any, int] = field(default_factory=dict)
    mixed_failed: bool = False
    unfit: Mapping[Any, str] = field(default_factory=dict)
    required: int | None = None
    notes: tuple[str, ...] = ()
    elapsed_s: float = 0.0
    schema_version: int = SCHEMA_VERSION

    def batch_sizes(self) -> dict[Any, int]:
        """Return the batch size for each value that fits, alone; training that meets all of them needs `mixed`."""
        return {value: result.batch_size for value, result in self.fitting()}

    def fitting(self) -> Iterator[tuple[Any, ProbeResult]]:
        """Yield the values that fit, with their results."""
        yield from ((value, result) for value, result in self.rows.items() if result is not None)

    def product(self, value: object) -> float | None:
        """Return a value times its batch size, such as the tokens of a batch; None if it does not fit or is no number."""
        result, size = self.rows[value], magnitude(value)
        return None if result is None or size is None else size * result.batch_size

    def best(self) -> Any:
        """Return the value with the largest product of value and batch size; None without any."""
        products = {value: product for value in self.rows if (product := self.product(value)) is not None}
        return max(products, key=lambda value: products[value], default=None)

    def smallest(self) -> Any:
        """Return the card with the least memory on which the `required` batch size runs; None without any.

        Examples:
            >>> import oomprobe
            >>> cards, options = {"device": ["sim:1GiB", "sim:2GiB"]}, {"multiple_of": 256, "progress": "off"}
            >>> oomprobe.probe_target("oomprobe.demo:wide_mlp", over=cards, require=512, **options).smallest()
            'sim:1GiB'
        """
        able = {
            name: one.available_bytes for name, one in self.fitting() if one.batch_size >= (self.required or math.inf)
        }
        return min(able, key=lambda name: able[name], default=None)

    def summary(self) -> Flat:
        """Return the batch sizes as one flat mapping for a tracker of experiments, such as ``"length=512/batch_size"``."""
        told: Flat = {"notes": "\n".join(self.notes), "elapsed_s": self.elapsed_s}
        for value, result in self.rows.items():
            name = f"{self.axis}={text_of_value(value)}"
            told[f"{name}/batch_size"] = None if result is None else result.batch_size
            told[f"{name}/mixed_batch_size"] = self.mixed.get(value)
        return told

    def to_dict(self) -> dict[str, Any]:
        """Return the table as JSON types; `from_dict` reads them back, except values other than numbers, texts and tuples."""
        rows = [
            {
                "value": json.loads(json.dumps(value, default=str)),
                "batch_size": None if result is None else result.batch_size,
                "mixed_batch_size": self.mixed.get(value),
                "unfit": self.unfit.get(value),
                "result": None if result is None else result.to_dict(),
            }
            for value, result in self.rows.items()
        ]
        about = {"mixed_failed": self.mixed_failed, "notes": list(self.notes), "elapsed_s": self.elapsed_s}
        head = {"schema_version": self.schema_version, "axis": self.axis, "required": self.required}
        return {**head, "rows": rows, **about}

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the table as JSON text, and write it to `path` if given."""
        return written(json.dumps(self.to_dict(), indent=2) + "\n", path)

    def to_csv(self, path: str | Path | None = None) -> str:
        """Return one line for each value as CSV text, with a head, and write it to `path` if given."""
        stream = io.StringIO()
        lines = csv.writer(stream, lineterminator="\n")
        measured = ("peak_allocated_bytes", "peak_reserved_bytes", "budget_bytes", "samples_per_s")
        sizes = ("batch_size", "mixed_batch_size", f"batch_size_x_{self.axis}")
        lines.writerow([self.axis, *sizes, *measured, "limited_by"])
        for value, result in self.rows.items():
            cells: list[object] = [text_of_value(value)]
            if result is not None:
                cells += [result.batch_size, self.mixed.get(value), self.product(value)]
                told = {**asdict(last_of(result.trials, result.batch_size)), "budget_bytes": result.budget_bytes}
                cells += [*(told[name] for name in measured), result.limited_by]
            lines.writerow(cells)
        return written(stream.getvalue(), path)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ProbeTable:
        """Return the table that `to_dict` wrote.

        Raises:
            InvalidArgumentError: the data has another schema version, or is not a table.
        """
        with reading("table", data, SCHEMA_VERSION):
            rows = {_value(row["value"]): row for row in data["rows"]}
            results = {value: row["result"] for value, row in rows.items()}
            return cls(
                axis=data["axis"],
                rows={value: None if one is None else ProbeResult.from_dict(one) for value, one in results.items()},
                mixed={value: row["mixed_batch_size"] for value, row in rows.items() if row["mixed_batch_size"]},
                mixed_failed=data.get("mixed_failed", False),
                unfit={value: row["unfit"] for value, row in rows.items() if row["unfit"] is not None},
                required=data.get("required"),
                notes=tuple(data["notes"]),
                elapsed_s=data["elapsed_s"],
            )

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the batch size, and its product with the value, for each value; see `ProbeResult.plot`."""
        from oomprobe.report.plot import saved, table_figure

        return saved(table_figure(self), path)

    def to_html(self, path: str | Path) -> None:
        """Write the table, with the report of each row, as one self-contained HTML file; see `ProbeResult.to_html`."""
        from oomprobe.report.html import page

        written(page(self), path)

    def _repr_html_(self) -> str:
        from oomprobe.report.html import notebook

        return notebook(self)

    def __repr__(self) -> str:
        from oomprobe.report.table import in_one_line

        return in_one_line(self)

    def __str__(self) -> str:
        from oomprobe.report.table import text

        return text(self)


def _value(value: Any) -> Hashable:
    return tuple(map(_value, value)) if isinstance(value, list) else value
