"""What is asked of a probe, and the types of the keyword arguments that ask for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from oomprobe.errors import InvalidArgumentError, UnknownOptionError
from oomprobe.ground.words import did_you_mean
from oomprobe.records.axis import NO_AXIS, Axis
from oomprobe.records.epoch import Epoch, token_options
from oomprobe.records.options import RESOLUTION, Options
from oomprobe.records.patience import PATIENCE, Patience
from oomprobe.results.progress import Progress


class CheckOptions(TypedDict, total=False):
    """The options of a check: those that `Options` marks so, and all that are no numbers; `find_max_batch` says what each means."""

    device: Any  # as `find_max_batch` takes it; of a table of cards, a list of names
    memory_fraction: float
    confirm_steps: int | None
    preserve: Iterable[Any]
    time_limit_s: float | None
    host_memory: str | None
    breakdown: bool
    progress: Progress
    epoch: Epoch | Mapping[str, Epoch] | None


class SearchOptions(CheckOptions, total=False):
    """The options of `find_max_batch`. A command refuses those that need its processes to be ours."""

    min_batch: int
    max_batch: int | None
    multiple_of: int
    start_batch: int | None
    steps: int
    global_batch: int | None
    resolution: float
    trial_time_limit_s: float | None


NO_EPOCH = "tables of cards and of savings take no epoch: probe the row that you choose with it"


def refuse_unknown(given: Iterable[str]) -> None:
    """Raise UnknownOptionError, with the likeliest option meant, for a name that no option has."""
    known = SearchOptions.__annotations__
    for name in given:
        if name not in known:
            raise UnknownOptionError(f"there is no option {name!r}{did_you_mean(name, known)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the caller asks of a probe, whatever runs its trials."""

    options: Options
    device: Any = None
    preserve: Iterable[Any] = ()
    progress: Progress = "auto"
    axis: Axis = NO_AXIS
    patience: Patience = PATIENCE  # for tests

    def refuse_epoch(self) -> None:
        """Raise InvalidArgumentError if there is an epoch, in tables whose rows are no values of the step."""
        if self.axis.epochs:
            raise InvalidArgumentError(NO_EPOCH)

    @classmethod
    def of(
        cls,
        given: Mapping[str, Any],
        *,
        batch_size: int | None = None,
        axis: Axis = NO_AXIS,
        resolution: float = RESOLUTION,
    ) -> Order:
        """Return the order for keyword arguments: a search, with `resolution` as default, or a check of one `batch_size`.

        Raises:
            InvalidArgumentError: a value is invalid, or a check is given an option of searches.
            UnknownOptionError: there is no such option.
        """
        rest = dict(given)
        patience = rest.pop("patience", PATIENCE)
        axis = axis.drawing(rest.pop("epoch", None))
        of_tokens = dict[str, int]()
        if axis.counts_tokens:
            of_tokens = token_options(axis.epochs[""], {"max_batch": batch_size, **rest})
        refuse_unknown(rest)
        riders = {
            name: rest.pop(name) for name in ("device", "preserve", "progress") if name in rest
        }
        if batch_size is None:
            options = Options(**{"resolution": resolution, **rest, **of_tokens})
        else:
            options = Options.to_check(batch_size, **rest)
        return cls(options=options, axis=axis, patience=patience, **riders)
