"""What is asked of a probe, the types of the keyword arguments that ask for it, and why some are refused.

Importing this module does not import torch: the command line refuses at once.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

from oomprobe.errors import InvalidArgumentError, UnknownOptionError, check_size
from oomprobe.ground.words import did_you_mean
from oomprobe.records.axis import CARDS, NO_AXIS, Axis
from oomprobe.records.epoch import Epoch, token_options
from oomprobe.records.options import Options, is_simulated, names_simulated
from oomprobe.records.patience import PATIENCE, Patience
from oomprobe.records.savings import check_settings, chosen
from oomprobe.results.progress import Progress


class CheckOptions(TypedDict, total=False):
    """The options of a check: those that `Options` marks so, and all that are no numbers; `find_max_batch` says what each means."""

    device: Any  # as `find_max_batch` takes it; of a table of cards, a list of names
    memory_fraction: float
    multiple_of: int
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
    start_batch: int | None
    steps: int
    global_batch: int | None
    resolution: float
    trial_time_limit_s: float | None


Subject = Literal["model", "target", "command"]  # what a probe is of
COMMAND_RESOLUTION = 1 / 64  # each trial is a whole run of the command
UNASKED = {"isolate": True, "breakdown": False, "keep_writes": False}  # the defaults of flags
TABLES = ("over", "savings", "require")
NEED_A_TARGET = ("breakdown", "epoch", "isolate", "nproc_per_node", "over", "preserve")
NOT_FOR_COMMANDS = (
    "{options} cannot be given for a command: it runs as it is, in processes of its own. For {options}, write a target: "
    "oomprobe run path/to/train.py:build"
)
ONE_CARD = (
    "a command is simulated on one card: name one as {}, such as 'sim:RTX-4090'. For a table of cards, write a target: "
    "oomprobe run path/to/train.py:build --device sim:all"
)
ITS_OWN_DEVICES = (
    "{} {device} cannot be given for a command: it runs on the devices that it chooses (CUDA_VISIBLE_DEVICES narrows them), or on a "
    "simulated card, such as 'sim:24GiB' or 'sim:RTX-4090'"
)
NO_DATA_TO_KEEP = (
    "{} would replace your files by files without data, since nothing on a simulated card has "
    "values: leave it out"
)
ONLY_FOR_COMMANDS = (
    "{options} can be given for a command alone: steps of a model or a target are counted, and "
    "what these write stays. Leave it out"
)
NO_SEARCH = (
    "a check of batch {size} makes no search and no table, so it would ignore {options}: leave "
    "that out"
)
NO_MULTIPLE = "batch {size} is not a multiple of {}={multiple_of}: change one of them"
TWO_TABLES = (
    "{options} make a table each: leave one out, and make a table for each value of the other"
)
SIZE_OR_TABLE = (
    "{}={size} asks about one size, and {} for the largest with each value: leave one out"
)
NO_ROWS = (
    "{}={size} is for a table of cards or of savings: to run one size, call check, check_target "
    "or check_command"
)
NO_EPOCH = "a table of cards or of savings takes no {}: probe the row that you choose with it"
OWN_PROCESSES = "ranks are processes of their own: leave out {}"
ITS_OWN_CARD = (
    "{} {device} cannot be given for several ranks, which have a card each: leave it out, or state a kind or a budget for each, "
    "such as 'cuda', 'cuda:8GiB' or 'sim:24GiB'. CUDA_VISIBLE_DEVICES chooses the cards"
)
OF_EACH_RANK = re.compile(r"(cuda|xpu)(:[\d.]+ ?[A-Za-z]+)?")
NO_LIVE_OBJECTS = (
    "{} takes live objects of this process, but isolated trials run in other processes: leave it "
    "out, or pass isolate=False"
)


def refuse(asked: Mapping[str, Any], of: Subject, batch_size: int | None) -> None:
    """Raise InvalidArgumentError for options that mean nothing for what is asked, or exclude each other.

    Args:
        asked: The options of all kinds, by name.
        of: What the probe is of.
        batch_size: The size of a check; None for a search, or a table of them.
    """
    given = {
        name
        for name, value in asked.items()
        if value is not None and value is not UNASKED.get(name)
    }
    over = asked.get("over")
    axes = {*over} if isinstance(over, Mapping) else set()
    if of == "command":
        _refuse_for_command(asked, given, axes)
    else:
        _refuse_any(ONLY_FOR_COMMANDS, ("passes_after_s", "keep_writes"), given)
    if of == "target" and CARDS not in axes and not is_simulated(asked.get("device")):
        _refuse_for_processes(asked, given)
    if batch_size is None:
        size = asked.get("require")
        _refuse_for_table(asked, given, axes)
    else:
        size = batch_size
        check_size("batch_size", size)
        only = [option.name for option in fields(Options) if not option.metadata["in_checks"]]
        _refuse_any(NO_SEARCH, (*only, *TABLES), given, size=size)
    if size is not None:
        multiple_of = asked.get("multiple_of", 1)
        check_size("multiple_of", multiple_of)
        if size % multiple_of:
            numbers = {"size": size, "multiple_of": multiple_of}
            raise InvalidArgumentError(NO_MULTIPLE, options=("multiple_of",), **numbers)


def _refuse_any(text: str, options: Iterable[str], given: Container[str], **values: object) -> None:
    """Raise InvalidArgumentError, with a text about those of the options that are given, if any are."""
    refused = [name for name in options if name in given]
    if refused:
        raise InvalidArgumentError(text, options=refused, **values)


def _refuse_for_command(asked: Mapping[str, Any], given: set[str], axes: set[str]) -> None:
    """Refuse what would need the command's processes to be ours."""
    device = asked.get("device")
    if CARDS in axes or isinstance(device, list | tuple) or device == "sim:all":
        raise InvalidArgumentError(ONE_CARD, options=(CARDS,))
    _refuse_any(NOT_FOR_COMMANDS, NEED_A_TARGET, given)
    if names_simulated(device):
        _refuse_any(NO_DATA_TO_KEEP, ["keep_writes"], given)
    else:
        _refuse_any(ITS_OWN_DEVICES, ["device"], given, device=repr(device))
    if "savings" in given:
        check_settings(asked["savings"])


def _refuse_for_processes(asked: Mapping[str, Any], given: set[str]) -> None:
    """Refuse what cannot reach the processes in which a target's trials run."""
    if "nproc_per_node" in given:
        _refuse_any(OWN_PROCESSES, ["isolate"], given)
        device = asked.get("device")
        if not (isinstance(device, str) and OF_EACH_RANK.fullmatch(device)):
            _refuse_any(ITS_OWN_CARD, ["device"], given, device=repr(device))
    if "isolate" not in given and asked.get("preserve") not in (None, (), []):
        raise InvalidArgumentError(NO_LIVE_OBJECTS, options=("preserve",))


def _refuse_for_table(asked: Mapping[str, Any], given: set[str], axes: set[str]) -> None:
    """Refuse two tables in one, and what only another table takes."""
    asks = {"over": axes - {CARDS}, CARDS: CARDS in axes, "savings": "savings" in given}
    tables = [name for name in asks if asks[name]]
    if len(tables) > 1:
        raise InvalidArgumentError(TWO_TABLES, options=tables)
    size = asked.get("require")
    if "over" in tables:
        if size is not None:
            raise InvalidArgumentError(SIZE_OR_TABLE, options=("require", "over"), size=size)
        return
    if tables:
        _refuse_any(NO_EPOCH, ["epoch"], given)
    else:
        _refuse_any(NO_ROWS, ["require"], given, size=size)
    if size is not None:
        check_size("require", size)
    if "savings" in given:
        chosen(asked["savings"])  # raises


def refuse_unknown(given: Iterable[str]) -> None:
    """Raise UnknownOptionError, with the likeliest option meant, for a name that no option has."""
    known = SearchOptions.__annotations__
    for name in given:
        if name not in known:
            raise UnknownOptionError(f"there is no option {name!r}{did_you_mean(name, known)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the caller asks of a probe, whatever runs its trials.

    Attributes:
        axis: Of the table, if it is one over values of the step or over cards, and the epochs of the step.
        savings: Of a table of these, as the caller names them.
        required: The size about which a table of cards or of savings is asked.
    """

    options: Options
    device: Any = None
    preserve: Iterable[Any] = ()
    progress: Progress = "auto"
    axis: Axis = NO_AXIS
    savings: str | Sequence[str] | None = None
    required: int | None = None
    patience: Patience = PATIENCE  # for tests

    @classmethod
    def of(
        cls,
        given: Mapping[str, Any],
        *,
        of: Subject = "model",
        batch_size: int | None = None,
        **own: Any,
    ) -> Order:
        """Return the order for keyword arguments: a search, a table of searches, or a check of one `batch_size`.

        Args:
            given: The options that all functions take.
            of: What the probe is of.
            batch_size: The size of a check.
            **own: Further options, which only some functions take.

        Raises:
            InvalidArgumentError: a value is invalid, or an option means nothing for what is asked.
            UnknownOptionError: there is no such option.
        """
        rest = dict(given)
        patience = rest.pop("patience", PATIENCE)
        asked = {**rest, **own}
        refuse(asked, of, batch_size)
        refuse_unknown(rest)
        over = asked.get("over")
        axis = (NO_AXIS if over is None else Axis.of(over)).drawing(asked.get("epoch"))
        names = [option.name for option in fields(Options)]
        numbers = {name: asked[name] for name in names if name in asked}
        if batch_size is not None:
            numbers |= {"min_batch": batch_size, "max_batch": batch_size}
        elif of == "command":
            numbers.setdefault("resolution", COMMAND_RESOLUTION)
        if axis.counts_tokens:
            numbers |= token_options(axis.epochs[""], numbers)
        riders = {name: asked[name] for name in ("device", "preserve", "progress") if name in asked}
        return cls(
            options=Options(**numbers),
            axis=axis,
            savings=asked.get("savings"),
            required=asked.get("require"),
            patience=patience,
            **riders,
        )
