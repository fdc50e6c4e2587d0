"""What a log says about memory that ran out: its errors in order, and whether the run went on.

Everything is looked for by fixed words in the bytes, and only what stands around them is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from oomprobe.allocator.segments import LARGE_SEGMENT
from oomprobe.errors import InvalidArgumentError
from oomprobe.explaining.encodings import plain_lines, said_in
from oomprobe.explaining.messages import ENGINES, KINDS, MessageKind, tensor_bytes
from oomprobe.ground.units import parse_bytes
from oomprobe.records.trials import Verdict
from oomprobe.verdicts.texts import ERROR_TEXTS, OOM_WORDS, ErrorText

ALMOST_FULL = 0.98  # of the memory that there is: that so little is in pieces is no reason
MOST_JUDGED = 4000  # places, from the end: what was before does not matter
_BEFORE, _AFTER = 300, 2000  # bytes of a message around its word
_LONGEST_JSON = 100_000  # bytes of a line that is read as an object
_NEAR = 20_000  # bytes between two reports of one error
_SAMPLED = 2**16  # bytes after an error, and from the end, that tell whether the run went on
_CONTEXT_BYTES = (
    2**30
)  # at most, of a process outside of torch's allocator, with kernels and libraries
_ROUNDING_BYTES = 2**26  # of five figures in GiB with two decimals
_NAMED_SHARE = 0.05  # of a card: others that hold less are not why it is full
_PROCESS = re.compile(
    r"Process \d+ has ([0-9]{1,20}(?:\.[0-9]{1,9})? (?:[KMGT]iB|bytes)) memory in use"
)
_SIZED = re.compile(r"([0-9.]+) ?([kmgtp]?)", re.IGNORECASE)
_HOST_WORDS = ("bad_alloc", "memoryerror", "[errno 12]", "cannot allocate memory", "host_memory")
_HINTS = tuple(word.encode() for word in (*OOM_WORDS, *_HOST_WORDS))
_VENDORS = {
    "amd": re.compile(r"\bHIP\b|PYTORCH_HIP|hipError|HIP_ERROR|\bmiopen|\brocm", re.IGNORECASE),
    "intel": re.compile(r"\bXPU\b|UR_RESULT|ZE_RESULT"),
    "apple": re.compile(r"\bMPS\b|kIOGPU|\bMetal\b"),
    "huawei": re.compile(r"\bNPU\b"),
}
_OLD_FORM = re.compile(r"total capacity;.{0,200}B (cached|reserved)")
_SETTINGS = re.compile(r"PYTORCH_(?:\w{2,6}_)?ALLOC_CONF")
_RANK = re.compile(r"\b(?:rank|default)['\"]?[ =:_]{0,2}(\d{1,5})\b|^(\d{1,4}): ", re.IGNORECASE)
_CARD = re.compile(r"\bGPU (\d{1,4})[ ;]")
_ROOT_CAUSE = re.compile(rb"Root Cause[^\0]{0,400}?\n\s{0,20}rank\s{0,20}: (\d{1,5})")
_ANEW = re.compile(r"out of memory|^Traceback|During handling|: error: ")  # another message begins
# Lines that speak of such errors, and are none: advice, a program's text in a traceback.
_NO_ERROR = re.compile(
    r"\b(?:tips?|hints?)\s?:|\bif (?:you|it|your)\b|\bto (?:avoid|prevent)\b|\bin case of\b"
    r"|\b(?:can|could|may|might|would|will) (?:cause|lead|result|run|go|get)\b"
    r"|^\W{0,3}(?:except|if|elif|raise|assert|return|print|log(?:ger)?\.\w+|#)[ (]",
    re.IGNORECASE,
)
_CAUGHT = re.compile(
    r"\bskip(?:ped|ping|s)?\b|\bretry|\bretri|\bdecreas|(?<!try )\breduc(?:ing|ed)\b|\brecover"
    r"|\bcaught\b|\bhalv|\bfall(?:ing|s)? back\b|\btrying again\b",
    re.IGNORECASE,
)
_PROGRESS = re.compile(
    r"\b(?:epoch|step|iter(?:ation)?|batch|train\w{0,6}|eval\w{0,8}|val(?:idation)?)['\"\])]?"
    r"[\s:=#\[]{0,4}\d|\bloss['\"]?[\s:=]{1,4}-?\d|\d ?(?:it/s|s/it)\b"
    r"|\b(?:training|run|job|epoch|evaluation) (?:is )?(?:done|finished|completed?)\b"
    r"|\bsav(?:ed|ing) (?:the )?(?:model|checkpoint)",
    re.IGNORECASE,
)
_NO_PROGRESS = re.compile(
    r"wandb:|torch/distributed|elastic|^srun|^slurm|File \"|exitcode|Error\b|Traceback", re.I
)
# What launchers raise of processes that they started.
_NO_END = re.compile(r"OutOfMemory|ChildFailed|CalledProcess|ProcessExited|ProcessRaised")
_BAR = re.compile(r"\d%\|")
_PINNED = re.compile(rb"pin_memory|cudaHost(?:Alloc|Register)|HostAllocator|host alloc|\bpinned\b")
_RAISED = re.compile(r"^\W{0,3}(?P<name>(?:\w+\.)*\w+(?:Error|Exception|Interrupt))(?::|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class OomText:
    """An out-of-memory error in bytes; None where the text does not say.

    Attributes:
        line: The first line of the error.
        engine: Whose it is: "torch", "host", "jax", ...
        vendor: Of the device: "nvidia", "amd", "intel", "apple" or "huawei".
        settings: The variable of the allocator's settings that the text names.
        stated: The cause that the kind of message itself says.
        rank: The rank or the device, such as "rank 2" or "GPU 0"; empty if the text names none.
        place: Where in the log it begins.
        end: Where what is known to be its text ends.
        requested: Bytes that were asked for.
        total: The device's memory.
        free: What was free on the device.
        allowed: The cap that was set for this process.
        live: What tensors held.
        reserved: What torch's allocator held.
        own: What this process held, with what torch does not count.
        others: What other processes held; without `own`, all that torch's allocator did not.
        is_unseen: Whether the driver did not see this process, so that `others` may be its own.
        is_raised: Whether the line begins with the name of an exception.
        old_form: How a torch before 2.1 names what it holds: "cached" before 1.4, "reserved".
    """

    line: str
    engine: str = "torch"
    vendor: str = "nvidia"
    settings: str = ""
    stated: str | None = None
    rank: str = ""
    place: int = 0
    end: int = 0
    requested: int | None = None
    total: int | None = None
    free: int | None = None
    allowed: int | None = None
    live: int | None = None
    reserved: int | None = None
    own: int | None = None
    others: int | None = None
    is_unseen: bool = False
    is_raised: bool = False
    old_form: str = ""

    def cause(self) -> str:
        """Return the likely cause, as `Explanation.cause` names it."""
        if self.stated is not None:
            return self.stated
        if self.requested is None:
            return "unknown"
        device_bytes = self.total or self.allowed
        if device_bytes is not None and self.requested > device_bytes:
            return "request"
        if self.live is None or self.reserved is None or self.free is None:
            return "unknown"
        available, needed = self.reserved + self.free, self.live + self.requested
        allowed = self.allowed or available
        is_capped = allowed < available
        if is_capped:
            available = allowed
        elif self.has_room():
            return "unknown"
        if needed <= ALMOST_FULL * available:
            return "fragmentation"
        if is_capped:
            return "cap"
        return self._full(available, needed, device_bytes or 0)

    def has_room(self) -> bool:
        """Return whether the device had room, and no cap that torch knows of held it back."""
        if self.requested is None or self.free is None:
            return False
        return self.free >= self.requested + LARGE_SEGMENT

    def _full(self, available: int, needed: int, device_bytes: int) -> str:
        """Return who fills a device that has no room for what is needed."""
        others = self.others or 0
        if self.own is None:
            others -= _CONTEXT_BYTES
        is_much = others > max(_ROUNDING_BYTES, _NAMED_SHARE * device_bytes)
        if not is_much or needed > available + others:
            return "live"
        return "unknown" if self.is_unseen else "others"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStory:
    """The out-of-memory errors of a log.

    Attributes:
        error: The one that matters: the last, or of ranks that ran out together the first.
        count: How many errors there are.
        is_whole: Whether all of the log was searched; otherwise only its end.
        went_on: Whether the run went on after it; None if the log does not tell.
        ended_with: The exception that ended the run then, if it was another.
        ranks: The cause of each rank's or device's last error, in the order of these.
    """

    error: OomText
    count: int = 1
    is_whole: bool = True
    went_on: bool | None = None
    ended_with: str = ""
    ranks: Mapping[str, str] = field(default_factory=dict)


def read_log(data: bytes) -> LogStory:
    """Return what a log says about memory that ran out.

    Raises:
        InvalidArgumentError: it has no such error.
    """
    data = plain_lines(data)
    errors: list[OomText] = []
    end = 0
    places = _places(data.lower())
    for place, word in places:
        if place < end:
            continue
        error = _read_at(data, place, word, end)
        if error is None:  # nor is any other word of what was searched
            line_end = data.find(b"\n", place, place + _AFTER - _BEFORE)
            end = line_end if line_end > 0 else place + _AFTER - _BEFORE
            continue
        end = error.end
        if errors and (whole := _as_one(data, errors[-1], error)):
            errors[-1] = whole
        else:
            errors.append(error)
    if not errors:
        raise InvalidArgumentError("it holds no out-of-memory error of a device or of the host")
    together = _ranks_together(data, errors)
    error = _first_cause(data, together)
    went_on, ended_with = _after(data, error)
    return LogStory(
        error=error,
        count=len(errors),
        is_whole=len(places) < MOST_JUDGED,
        went_on=went_on,
        ended_with=ended_with,
        ranks={rank: error.cause() for rank, error in together.items() if rank},
    )


def _places(lowered: bytes) -> list[tuple[int, bytes]]:
    """Return where words of such errors stand, with the words, in order."""
    kept: dict[int, bytes] = {}
    strong = [*chain.from_iterable(kind.words for kind in KINDS)]
    for words in (strong, _HINTS):  # apart, as hints may stand in each line of a log
        places: dict[int, bytes] = {}
        for word in words:
            place = len(lowered)
            for _ in range(MOST_JUDGED):
                place = lowered.rfind(word, 0, place)
                if place < 0:
                    break
                places[place] = word
        kept = dict(sorted(places.items())[-MOST_JUDGED:]) | kept
    return sorted(kept.items())


def _read_at(data: bytes, place: int, word: bytes, after: int) -> OomText | None:
    """Return the error whose text has a word at a place; None if it is no error."""
    line, message, end = _message_at(data, place, word, after)
    if _NO_ERROR.search(line[: max(0, line.lower().find(word.decode()))]):
        return None
    start = data.rfind(b"\n", max(0, place - _LONGEST_JSON), place) + 1
    head = data[max(start, place - _LONGEST_JSON) : place][:60].decode(errors="replace")
    rank = ""
    if match := _RANK.search(head):
        rank = f"rank {match[1] or match[2]}"
    elif match := _CARD.search(message):
        rank = f"GPU {match[1]}"
    context = data[max(0, place - 3000) : end + _BEFORE]
    error = OomText(
        line=line,
        rank=rank,
        place=place,
        end=end,
        vendor=_first_found(_VENDORS, message, "nvidia"),
        is_raised=_RAISED.match(line) is not None,
    )
    for kind in KINDS:
        text = message if kind.engine == "torch" else line  # terminals wrap torch's long line
        if kind.pattern.search(text):
            return _with_figures(error, kind, message)
    row = _error_text_of(line)
    if row is None:
        return None
    if row.of_host:
        return replace(error, engine="host", stated="host")
    context = context[max(0, context.rfind(b"Traceback", 0, -_BEFORE)) :]
    stated = "pinned" if _PINNED.search(context) else None
    return replace(error, engine=_first_found(ENGINES, message, "torch"), stated=stated)


def _first_found(patterns: Mapping[str, re.Pattern[str]], message: str, default: str) -> str:
    """Return the first name whose pattern a message has."""
    return next((name for name, pattern in patterns.items() if pattern.search(message)), default)


def _message_at(data: bytes, place: int, word: bytes, after: int) -> tuple[str, str, int]:
    """Return the line with the word, the message from there on, and where the line ends."""
    json_start = data.rfind(b"\n", max(0, place - _LONGEST_JSON), place) + 1
    end = data.find(b"\n", place + len(word), place + _LONGEST_JSON)
    if end < 0:
        end = min(len(data), place + _AFTER)
    if data[json_start : json_start + 1] == b"{" and json_start >= after:
        start = json_start
    else:
        start = max(after, json_start, place - _BEFORE)
        end = min(end, place + _AFTER)
    texts = [said_in(data[start:end].decode(errors="replace"))]
    for line in data[end : place + _AFTER].decode(errors="replace").split("\n")[1:]:
        said = said_in(line)
        if not said or _ANEW.search(said) or ("Tried to" in said and "Tried to" in " ".join(texts)):
            break
        texts.append(said)
    whole = "\n".join(texts)
    offset = max(0, whole.lower().find(word.decode()))
    line_start = whole.rfind("\n", 0, offset) + 1
    line = whole[max(line_start, offset - _BEFORE) : offset + _AFTER].partition("\n")[0]
    message = " ".join(whole[max(0, offset - _BEFORE) : offset + _AFTER].split())
    return line.strip(), message, end


def _error_text_of(line: str) -> ErrorText | None:
    """Return the row of an error text without figures, if it is about memory."""
    lowered = line.lower()
    row = next((row for row in ERROR_TEXTS if row.pattern.search(lowered)), None)
    if row is None or row.verdict is not Verdict.OOM:
        return None
    if row.of_host and row.ambiguous:
        return None
    return row


def _with_figures(error: OomText, kind: MessageKind, message: str) -> OomText:
    """Return an error with what its message states."""
    sizes: dict[str, Any] = {}
    for name, pattern in kind.figures.items():
        if match := pattern.search(message):
            size = _bytes_of(next(filter(None, match.groups())), kind.unit, name)
            if size is not None:
                sizes[name] = size
    if kind.engine == "tensorflow" and (nbytes := tensor_bytes(message)):
        sizes.setdefault("requested", nbytes)
    error = replace(
        error,
        engine=kind.engine,
        stated=kind.cause,
        old_form=next(iter(_OLD_FORM.findall(message)), ""),
        settings=next(iter(_SETTINGS.findall(message)), ""),
        line=_quoted(error.line, message),
    )
    if kind.engine != "torch":
        return replace(error, **sizes)
    processes = [_bytes_of(size, "B", "process") or 0 for size in _PROCESS.findall(message)]
    return _balanced(error, sizes, sorted(processes))


def _quoted(line: str, message: str) -> str:
    """Return what to show of a message: old texts end with a bracket, and no full stop."""
    start = message.find("Tried to allocate")
    if start < 0:
        return line
    quoted, bracket, _ = message[start:].partition(")")
    if "total capacity;" in quoted:
        return quoted + bracket
    return message[start:]


def _balanced(error: OomText, sizes: dict[str, Any], processes: list[int]) -> OomText:
    """Return an error of torch with the sizes that follow from those that it states."""
    unused, beside = sizes.pop("unused", 0), sizes.pop("beside", None)
    if "live" in sizes:
        sizes.setdefault("reserved", sizes["live"] + unused)
    reserved = sizes.get("reserved", 0)
    if beside is not None and {"allowed", "live"} <= sizes.keys():  # Metal's
        free = max(0, sizes["allowed"] - sizes["live"] - beside)
        return replace(error, **(sizes | {"own": reserved, "others": beside, "free": free}))
    is_unseen = "own" in sizes and sizes["own"] + _ROUNDING_BYTES < reserved
    if is_unseen:
        del sizes["own"]
    if processes and "own" not in sizes:
        # In a container, torch does not know its own number: the first that is large enough.
        sizes["own"] = next((size for size in processes if size >= reserved), processes[-1])
        processes.remove(sizes["own"])
        is_unseen = False
    if {"total", "reserved", "free"} <= sizes.keys():
        beyond = sizes["total"] - sizes["free"] - sizes.get("own", reserved)
        sizes["others"] = beyond if beyond > _ROUNDING_BYTES else 0
    if processes:
        sizes["others"] = sum(processes)
    return replace(error, is_unseen=is_unseen, **sizes)


def _bytes_of(size: str, unit: str, name: str) -> int | None:
    """Return a stated size, in units of 1024 as these programs count; None: it is no limit."""
    match = _SIZED.match(size.replace(",", ""))
    assert match is not None
    number, letter = match.groups()
    if not re.search("[A-Za-z]", size):
        letter = unit.removesuffix("iB").removesuffix("B")
    if float(number) == 0:
        return 0
    try:
        return parse_bytes(f"{number} {letter}iB" if letter else number)
    except InvalidArgumentError:
        if name == "requested":
            raise
        return None


# --- several errors ---


def _as_one(data: bytes, first: OomText, second: OomText) -> OomText | None:
    """Return two reports of one error as one; None if they are two errors."""
    if second.place - first.end > _NEAR or (first.engine, first.rank) != (
        second.engine,
        second.rank or first.rank,
    ):
        return None
    between = data[first.end : second.place]
    if _progressed(between):
        return None
    figures = (second.requested, second.live, second.reserved, second.free)
    is_repeated = (first.requested, first.live, first.reserved, first.free) == figures
    has_no_figures = second.requested is None and b"Traceback" not in between
    if first.engine == "torch" and not is_repeated and not has_no_figures:
        return None
    known = first
    if first.requested is None and second.requested is not None:
        known = second
    return replace(known, end=second.end)


def _ranks_together(data: bytes, errors: Sequence[OomText]) -> dict[str, OomText]:
    """Return the last error of each rank, of those after which no rank went on, in their order."""
    start = len(errors) - 1
    while start > 0:
        between = data[errors[start - 1].end : errors[start].place]
        if len(between) > _NEAR or _progressed(between) or _is_caught(data, errors[start - 1]):
            break
        start -= 1
    last: dict[str, OomText] = {}
    for error in errors[start:]:
        last.pop(error.rank, None)
        last[error.rank] = error
    return last


def _first_cause(data: bytes, together: Mapping[str, OomText]) -> OomText:
    """Return the error that ended the run: the rank's that torchrun names, or the first."""
    *_, last = together.values()
    named = [error for rank, error in together.items() if rank]
    if len(named) < 2:
        return last
    root = _ROOT_CAUSE.search(data, last.end)
    if root is None:
        return named[0]
    return together.get(f"rank {int(root[1])}", named[0])


# --- how the run went on ---


def _after(data: bytes, error: OomText) -> tuple[bool | None, str]:
    """Return whether the run went on after an error, and the exception that ended it then."""
    rest = data[error.end :]
    tail = rest[-_SAMPLED:]
    sample = rest
    if len(rest) > 2 * _SAMPLED:
        sample = rest[:_SAMPLED] + b"\n" + tail
    ended_with = ""
    for line in tail.decode(errors="replace").split("\n"):
        said = said_in(line)
        if (raised := _RAISED.match(said)) and not _NO_END.search(raised["name"]):
            ended_with = said
        elif _PROGRESS.search(said) and not _NO_PROGRESS.search(said):
            ended_with = ""  # that one was caught as well
    least = 5 if error.rank.startswith("rank") else 1  # other ranks may go on for a moment
    if _progressed(sample, least) or (_is_caught(data, error) and rest.strip()):
        return True, ended_with
    before = data[max(0, error.place - 3000) : error.place]
    if error.is_raised or b"Traceback" in before:
        return False, ""
    return None, ""


def _is_caught(data: bytes, error: OomText) -> bool:
    """Return whether the line of an error, or one of the next two, says that it was caught."""
    start = data.rfind(b"\n", max(0, error.place - _BEFORE), error.place) + 1
    own_line = data[max(start, error.place - _BEFORE) : error.end]
    following = data[error.end : error.end + 1000].split(b"\n")[:3]
    lines = (line.decode(errors="replace") for line in (own_line, *following))
    return any(map(_CAUGHT.search, lines))


def _progressed(data: bytes, least: int = 1) -> bool:
    """Return whether a run goes on: lines with steps or losses, more than one progress bar."""
    lines = bars = 0
    for line in data.decode(errors="replace").split("\n"):
        said = said_in(line[:_AFTER])
        if _NO_PROGRESS.search(said):
            continue
        if _BAR.search(said):
            bars += 1
        elif _PROGRESS.search(said):
            lines += 1
    return lines >= least or bars > least
