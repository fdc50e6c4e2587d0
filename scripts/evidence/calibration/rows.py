"""Comparisons as data, and as lines of text."""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median

MIB, GB, GIB = 2**20, 10**9, 2**30
EVIDENCE = Path(__file__).resolve().parents[3] / "tests" / "evidence" / "published"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A published peak and a simulated one.

    Attributes:
        name: What was run.
        published_bytes: None if it did not fit, according to the publication.
        simulated_bytes: The same measurement in the simulation; None if it does not fit.
        interval_bytes: Bounds of the peak in the simulation.
        rounding_bytes: Half of the last published digit.
        explained_bytes: The simulated figure with the workspace of Winograd's algorithm.
        remark: Note for the reader.
        counted: Whether the summary counts it; other rows explain.
    """

    name: str
    published_bytes: float | None
    simulated_bytes: float | None
    interval_bytes: tuple[float, float] | None = None
    rounding_bytes: float = 0
    explained_bytes: float | None = None
    remark: str = ""
    counted: bool = True

    @property
    def error(self):
        """Relative error, negative if the simulation is too low, which is dangerous; None without both figures."""
        if self.published_bytes is None or self.simulated_bytes is None:
            return None
        return self.simulated_bytes / self.published_bytes - 1

    @property
    def inside(self):
        """Whether the published, rounded figure lies in the simulated interval."""
        if self.published_bytes is None or self.interval_bytes is None:
            return None
        low, upper = self.interval_bytes
        return low - self.rounding_bytes <= self.published_bytes <= upper + self.rounding_bytes

    @property
    def verdict(self):
        """ "inside" the interval, "high" if the simulation is above the published figure, "low" if below; else ""."""
        if self.inside is None:
            return ""
        return (
            "inside"
            if self.inside
            else "high"
            if self.simulated_bytes > self.published_bytes
            else "low"
        )

    @property
    def too_low(self):
        """Whether the simulation is too optimistic: a lower peak, or a fit although the real run did not fit."""
        if self.published_bytes is None or self.simulated_bytes is None:
            return self.simulated_bytes is not None
        return self.simulated_bytes < self.published_bytes - self.rounding_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """A batch size that ran and one that failed, with the simulation of both.

    Attributes:
        name: Model and image size.
        ran: Largest batch size that ran, as published.
        failed: Next larger batch size in the publication, which failed.
        ran_fits: Whether `ran` fits in the simulation.
        failed_fits: Whether `failed` fits in the simulation.
        ran_bytes: Bounds of peak reserved for `ran`; the upper one includes convolution workspaces.
        failed_bytes: The same for `failed`.
        retries: Times the allocator freed its cache for the larger size that fits; above 0 is marginal.
    """

    name: str
    ran: int
    failed: int
    ran_fits: bool
    failed_fits: bool
    ran_bytes: tuple[int, int]
    failed_bytes: tuple[int, int]
    retries: int
    card: str
    remark: str = ""

    @property
    def verdict(self):
        """HIT; OVER if `ran` does not fit (safe); UNDER if `failed` fits (dangerous)."""
        if not self.ran_fits:
            return "OVER"
        return "UNDER" if self.failed_fits else "HIT"


def shown_figures(rows, unit, unit_bytes, digits):
    """Yield the lines of a table of figures, in the unit of the publication."""

    def number(nbytes):
        return f"{nbytes / unit_bytes:,.{digits}f}"

    yield f"{'':32} {'published':>10} {'simulated':>10} {'error':>8}  interval, {unit}"
    for row in rows:
        published = "OOM" if row.published_bytes is None else number(row.published_bytes)
        simulated = "OOM" if row.simulated_bytes is None else number(row.simulated_bytes)
        error = "" if row.error is None else f"{100 * row.error:+.2f} %"
        between = (
            ""
            if row.interval_bytes is None
            else "[{}, {}]".format(*map(number, row.interval_bytes))
        )
        inside = {True: "has it", False: "misses it", None: ""}[row.inside]
        line = f"{row.name:32} {published:>10} {simulated:>10} {error:>8}  {between:20} {inside:9} {row.remark}"
        yield line.rstrip()
    rows = [row for row in rows if row.counted]
    compared = [row for row in rows if row.error is not None]
    if compared:
        worst = max(compared, key=lambda row: abs(row.error))
        middle = median(abs(row.error) for row in compared)
        yield f"relative error: median {100 * middle:.2f} %, worst {100 * worst.error:+.2f} % ({worst.name})"
    explained = [
        (row.explained_bytes / row.published_bytes - 1, row.name)
        for row in rows
        if row.explained_bytes
    ]
    if explained:
        middle, worst = (
            median(abs(error) for error, _ in explained),
            max(explained, key=lambda one: abs(one[0])),
        )
        yield f"with Winograd's workspace: median {100 * middle:.2f} %, worst {100 * worst[0]:+.2f} % ({worst[1]})"
    yield f"under-estimates: {_share(row.too_low for row in rows)}"
    known = [row.inside for row in rows if row.inside is not None]
    if known:
        yield f"published figure inside the interval: {_share(known)}"


def shown_brackets(rows):
    """Yield the lines of a table of brackets."""
    yield f"{'':36} {'ran':>4} {'failed':>6}  {'verdict':8} peak reserved, MiB: ran; failed"
    for row in rows:
        between = "; ".join(
            f"[{low / MIB:,.0f}, {up / MIB:,.0f}]" for low, up in (row.ran_bytes, row.failed_bytes)
        )
        marginal = f"  marginal: {row.retries} retries" if row.retries else ""
        yield f"{row.name:36} {row.ran:4} {row.failed:6}  {row.verdict:8} {between}{marginal}"
    verdicts = [row.verdict for row in rows]
    yield f"brackets hit: {_share(verdict == 'HIT' for verdict in verdicts)}"
    yield f"under-estimates (lets through what failed): {_share(verdict == 'UNDER' for verdict in verdicts)}"
    yield f"over-estimates (refuses what ran): {_share(verdict == 'OVER' for verdict in verdicts)}"


def write_figures(family, rows, answers=(), **about):
    """Write figures in bytes to tests/evidence/published/FAMILY.json, one row a line, with what they are `about`."""
    _write(family, about, [json.dumps(row) for row in [*map(as_dict, rows), *answers]])


def as_dict(row):
    """Return a figure as a row of the evidence."""
    upper = None if row.interval_bytes is None else row.interval_bytes[1]
    figures = {"published": row.published_bytes, "simulated": row.simulated_bytes, "upper": upper}
    rounded = {name: None if value is None else round(value) for name, value in figures.items()}
    more = {"rounding": row.rounding_bytes, "explained": row.explained_bytes}
    rounded |= {name: round(value) for name, value in more.items() if value}
    return {"name": row.name, **rounded, "verdict": row.verdict, "remark": row.remark}


def write_brackets(family, rows, **about):
    """Write brackets to the same folder: which of both sizes ran as published, and which fits in the simulation."""
    lines = []
    for row in rows:
        sizes = ((row.ran, row.ran_fits), (row.failed, row.failed_fits))
        said = ", ".join(f"{size} {'fits' if fits else 'refused'}" for size, fits in sizes)
        figures = {
            "name": row.name,
            "card": row.card,
            "published": f"{row.ran} ran, {row.failed} failed",
            "simulated": said,
        }
        lines.append(json.dumps({**figures, "verdict": row.verdict, "remark": row.remark}))
    _write(family, about, lines)


def _write(family, about, lines):
    import torch

    head = json.dumps(
        {"family": family, **about, "simulated with torch": torch.__version__}, indent=1
    )[:-2]
    EVIDENCE.mkdir(exist_ok=True)
    text = head + ',\n "rows": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"
    (EVIDENCE / f"{family}.json").write_text(text)


def _share(truths):
    truths = list(truths)
    return f"{sum(truths)} of {len(truths)} ({100 * sum(truths) / max(1, len(truths)):.0f} %)"
