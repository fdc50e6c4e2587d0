"""What a comparison is, as data, and as lines of text."""

from dataclasses import dataclass
from statistics import median

MIB, GB = 2**20, 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A published peak beside a simulated one.

    Attributes:
        name: What was run.
        published_bytes: None where the publication says that it did not fit.
        simulated_bytes: What the same measurement would read in the simulation; None where it does not fit.
        interval_bytes: What the simulation says the peak is between.
        rounding_bytes: Half of the last digit published.
        remark: What a reader has to know about this row.
        counted: Whether it is among the rows of the family, and not beside them for explanation.
    """

    name: str
    published_bytes: float | None
    simulated_bytes: float | None
    interval_bytes: tuple[float, float] | None = None
    rounding_bytes: float = 0
    remark: str = ""
    counted: bool = True

    @property
    def error(self):
        """Relative; negative where the simulation is too low, which is the dangerous side. None without two figures."""
        if self.published_bytes is None or self.simulated_bytes is None:
            return None
        return self.simulated_bytes / self.published_bytes - 1

    @property
    def inside(self):
        """Whether the published figure, which was rounded, lies in the simulated interval."""
        if self.published_bytes is None or self.interval_bytes is None:
            return None
        low, upper = self.interval_bytes
        return low - self.rounding_bytes <= self.published_bytes <= upper + self.rounding_bytes

    @property
    def too_low(self):
        """Whether the simulation promises what did not hold: a lower peak, or a fit where there was none."""
        if self.published_bytes is None:
            return self.simulated_bytes is not None
        return self.simulated_bytes is not None and self.simulated_bytes < self.published_bytes - self.rounding_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Bracket:
    """A batch size that ran and one that did not, beside what the simulation says of both.

    Attributes:
        name: Of the model.
        ran: Batch size published as the largest that ran.
        failed: Batch size published as failed: the next on the publication's ladder.
        ran_fits: Whether the first fits in the simulation.
        failed_fits: Whether the second does.
        ran_bytes: What the first reserves at its peak, without a limit; the upper end has room for convolutions.
        failed_bytes: The same for the second.
        retries: Times the allocator gave its cache back for the larger of those that fit: more than 0 is marginal.
    """

    name: str
    ran: int
    failed: int
    ran_fits: bool
    failed_fits: bool
    ran_bytes: tuple[int, int]
    failed_bytes: tuple[int, int]
    retries: int

    @property
    def verdict(self):
        """HIT; OVER where what ran is refused (safe); UNDER where what failed is let through (dangerous)."""
        if not self.ran_fits:
            return "OVER"
        return "UNDER" if self.failed_fits else "HIT"


def shown_figures(rows, unit, unit_bytes, digits):
    """Lines of a table of figures; the unit is one of the publication."""

    def number(nbytes):
        return f"{nbytes / unit_bytes:,.{digits}f}"

    yield f"{'':32} {'published':>10} {'simulated':>10} {'error':>8}  interval, {unit}"
    for row in rows:
        published = "OOM" if row.published_bytes is None else number(row.published_bytes)
        simulated = "OOM" if row.simulated_bytes is None else number(row.simulated_bytes)
        error = "" if row.error is None else f"{100 * row.error:+.2f} %"
        between = "" if row.interval_bytes is None else "[{}, {}]".format(*map(number, row.interval_bytes))
        inside = {True: "has it", False: "misses it", None: ""}[row.inside]
        line = f"{row.name:32} {published:>10} {simulated:>10} {error:>8}  {between:20} {inside:9} {row.remark}"
        yield line.rstrip()
    yield from summary_of_figures([row for row in rows if row.counted])


def summary_of_figures(rows):
    """Median, worst, and how often too low."""
    compared = [row for row in rows if row.error is not None]
    if compared:
        worst = max(compared, key=lambda row: abs(row.error))
        middle = median(abs(row.error) for row in compared)
        yield f"relative error: median {100 * middle:.2f} %, worst {100 * worst.error:+.2f} % ({worst.name})"
    yield f"under-estimates: {_share(row.too_low for row in rows)}"
    known = [row.inside for row in rows if row.inside is not None]
    if known:
        yield f"published figure inside the interval: {_share(known)}"


def shown_brackets(rows):
    """Lines of a table of brackets."""
    yield f"{'':36} {'ran':>4} {'failed':>6}  {'verdict':8} peak reserved without a limit, MiB: ran; failed"
    for row in rows:
        between = "; ".join(f"[{low / MIB:,.0f}, {up / MIB:,.0f}]" for low, up in (row.ran_bytes, row.failed_bytes))
        marginal = f"  marginal: {row.retries} retries" if row.retries else ""
        yield f"{row.name:36} {row.ran:4} {row.failed:6}  {row.verdict:8} {between}{marginal}"
    yield from summary_of_brackets(rows)


def summary_of_brackets(rows):
    """Shares of hits, and of each kind of miss."""
    verdicts = [row.verdict for row in rows]
    yield f"brackets hit: {_share(verdict == 'HIT' for verdict in verdicts)}"
    yield f"under-estimates (lets through what failed): {_share(verdict == 'UNDER' for verdict in verdicts)}"
    yield f"over-estimates (refuses what ran): {_share(verdict == 'OVER' for verdict in verdicts)}"


def _share(truths):
    truths = list(truths)
    return f"{sum(truths)} of {len(truths)} ({100 * sum(truths) / max(1, len(truths)):.0f} %)"
