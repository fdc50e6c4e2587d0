"""The output of a command, read for the exceptions in it; and the cause of a run's end, from these and the reports. Pure.

Only lines that name an exception are read, never the whole output: a log that mentions INT_MAX would decide otherwise.
"""

from __future__ import annotations

import builtins
import re
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from oomprobe.records.trials import Verdict
from oomprobe.runners.command.reports import RunReports
from oomprobe.verdicts import ErrorFacts, Evidence, Link, classify

MOST_EXCEPTIONS = 400  # exceptions from the beginning of the output, and as many from its end
CONTEXT_LINES = 25  # shown before an exception, or from the end of the output
LONGEST_LINE = 4000
SIGNALLED = 128  # a shell exits with this and the number of the signal that ended its program
# Launchers put the rank in front: torchrun "[rank1]: " and "[default0]:", srun -l "0: ".
_PREFIX = r"(?:\[\w+\]:\s{0,9}|\d+: )*"
_EXCEPTION = re.compile(
    rf"^{_PREFIX}(?P<name>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt|OutOfResources))(?::\s?(?P<text>.*))?$"
)
_CPP_EXCEPTION = re.compile(rf"^{_PREFIX}\s*what\(\):\s+(?P<text>.+)$")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TORCH_OOM = re.compile(r"(?:CUDA|HIP) out of memory\. Tried to allocate")
_ROOT_CAUSE = re.compile(
    r"Root Cause(?>.{0,1000}?rank\s{0,20}: (?P<rank>\d{1,9})).{0,1000}?exitcode\s{0,20}: "
    r"(?P<code>-?\d{1,9})",
    re.DOTALL,
)  # torchrun's
_GOES_ON = "DistBackendError"  # NCCL's error: its cause stands a few lines below
_NCCL_FAILURE = re.compile(r"(?:Cuda|HIP) failure.*")

# What launchers raise when a process that they started has failed.
_LAUNCHERS = re.compile(
    r"(?:ChildFailed|CalledProcess|RendezvousClosed|RendezvousConnection)Error|"
    r"(?:Signal|ProcessExited|ProcessRaised)Exception|SystemExit|KeyboardInterrupt"
)
# How a rank learns that another one has failed.
_PEERS = re.compile(
    r"Connection (?:closed|reset) by peer|Broken pipe|remote process exited|Socket closed|recv, got 0 bytes|"
    r"connection was likely closed|client socket has (?:timed out|failed)|Application timeout|Timed out after \d+ seconds waiting|"
    r"Watchdog caught collective|collective operation timeout|NCCL communicator was aborted|"
    r"Some NCCL operations have failed or timed out|wait timeout after|Timed out waiting|Wait timeout|heartbeat|"
    r"ncclRemoteError|ncclSystemError",
    re.IGNORECASE,
)
# Slurm's words when the system has ended a task to get memory: they are about the host.
_SLURM_OOM = re.compile(r"^(?:slurmstepd|srun): error: .*(?:oom[-_]kill|OOM Killed|Out Of Memory)")
_KILLED = re.compile(r"killed by signal|SIGKILL", re.IGNORECASE)  # a data loader's worker
PORT_IN_USE = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)

# What Python and argparse write about a command that they cannot begin with.
_REFUSAL = re.compile(
    r"\S*python\S*: can't open file |\S+\.py: error: (?:unrecognized |ambiguous |the following |argument )"
)
# What programs say that want somebody to answer: input(), getpass, stty, and those that look first.
_WANTS_TERMINAL = re.compile(
    r"EOF when reading a line|Inappropriate ioctl|not a (?:tty|terminal)|"
    r"(?:requires?|needs?) a (?:tty|terminal)|not running (?:in|on) a terminal|interactive terminal",
    re.IGNORECASE,
)
NO_TERMINAL = (
    "A command has no input and no terminal: give it what it asks for as an argument, a file or a "
    "variable"
)

OUT_OF_MEMORY = (Verdict.OOM, Verdict.HOST_OOM)
QUOTED = "its output quotes an out-of-memory error, and not all of its processes report what they raise: {line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedError:
    """An exception that a process reported, or found in its output."""

    facts: ErrorFacts
    text: str  # "KeyError: 'input_ids'"
    who: str = ""  # the process, if known
    where: str | None = None  # the user's line, if known
    context: tuple[str, ...] = ()  # the lines of the output up to it

    @property
    def is_launchers(self) -> bool:
        """Whether a launcher raised it, because something that it started has failed."""
        return _LAUNCHERS.fullmatch(self.facts[0].classes[0].rpartition(".")[2]) is not None

    @property
    def is_peers(self) -> bool:
        """Whether it tells only that another process has failed."""
        text = "\n".join(link.text for link in self.facts)
        return _PEERS.search(text) is not None and not PORT_IN_USE.search(text)


@dataclass(slots=True)
class Output:
    """What a command has written so far."""

    first: list[ReportedError] = field(default_factory=list)
    last: deque[ReportedError] = field(default_factory=lambda: deque(maxlen=MOST_EXCEPTIONS))
    oom_line: str = ""  # the first that quotes torch's out-of-memory error
    denied_line: str = ""  # the first that quotes EACCES
    mentions_host_oom: bool = False  # whether Slurm says that a task was ended to get host memory
    _tail: deque[str] = field(default_factory=lambda: deque(maxlen=400))
    _part: str = ""  # of a line
    _waits_for: str = ""  # the class of an exception that goes on below

    def feed(self, text: str) -> None:
        """Read more of the output."""
        *lines, self._part = re.split(r"[\r\n]", self._part + text)
        self._part = self._part[-LONGEST_LINE:]
        for line in lines:
            self._read(_ESCAPES.sub("", line)[:LONGEST_LINE].rstrip())

    def close(self) -> None:
        """Read the last line, which may not have ended."""
        self.feed("\n")

    def _read(self, line: str) -> None:
        if not line:
            return
        self._tail.append(line)
        if not self.oom_line and _TORCH_OOM.search(line):
            self.oom_line = line
        if not self.denied_line and "Permission denied" in line:
            self.denied_line = line.strip()
        if _SLURM_OOM.search(line):
            self.mentions_host_oom = True
        if (raised := _EXCEPTION.match(line)) and not raised["name"].startswith("nccl"):
            self._waits_for = raised["name"] if raised["name"].endswith(_GOES_ON) else ""
            self._add(raised["name"], raised["text"] or "")
        elif cpp := _CPP_EXCEPTION.match(line):
            self._add("RuntimeError", cpp["text"])
        elif _REFUSAL.match(line):
            self._add("UsageError", line)
        elif self._waits_for and (failure := _NCCL_FAILURE.search(line)):
            self._add(self._waits_for, failure[0])

    def _add(self, name: str, text: str) -> None:
        if hasattr(builtins, name):
            classes: tuple[str, ...] = (f"builtins.{name}",)
        elif name.endswith("MemoryError"):  # numpy's
            classes = name, "builtins.MemoryError"
        else:
            classes = name, "builtins.RuntimeError"
        whole, context = f"{name}: {text}".removesuffix(": "), tuple(self.tail())
        kept = self.first if len(self.first) < MOST_EXCEPTIONS else self.last
        kept.append(
            ReportedError(facts=(Link(classes=classes, text=text),), text=whole, context=context)
        )

    def exceptions(self) -> list[ReportedError]:
        """Return the exceptions in the order of the output."""
        return [*self.first, *self.last]

    def tail(self) -> list[str]:
        """Return the last lines."""
        return list(self._tail)[-CONTEXT_LINES:]

    def root_cause(self) -> tuple[int, int] | None:
        """Return the rank that failed first and its exit status, as torchrun reports them; None if it does not."""
        cause = _ROOT_CAUSE.search("\n".join(self._tail))
        return None if cause is None else (int(cause["rank"]), int(cause["code"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why a run failed."""

    verdict: Verdict
    error: str
    where: str | None = None
    context: Sequence[str] = ()  # lines of the output that show it
    read_at: str = ""  # the line that read, on a simulated card, what has no value


def cause_of(
    seen: RunReports, output: Output, status: int, evidence: Evidence, *, oom_kills: int
) -> Ending:
    """Return why a run failed: what its processes reported, then what its output says, then how it exited.

    `status` is the exit status of the command, negative for a signal; `oom_kills` counts what the system's OOM killer ended.
    """
    ran_out = seen.out_of_memory
    # Where all report, an out-of-memory error of torch that none has raised is only text, such as a tip.
    all_told = seen.all_report and ran_out is None
    errors = [error for error in _errors(seen, output, all_told) if not error.is_launchers]
    verdict, cause = _judge(errors, evidence)
    if ran_out is not None and verdict not in OUT_OF_MEMORY:
        error = _named_in(
            "its allocator ran out of memory, and the program caught that", ran_out.name
        )
        return Ending(verdict=Verdict.OOM, error=error, where=ran_out.where)
    # A killed process leaves no error, or one of whoever waited for it; any other error says more than the system's count.
    if cause is None or _KILLED.search(cause.text):
        host_ran_out = oom_kills or output.mentions_host_oom
        if host_ran_out and verdict not in OUT_OF_MEMORY:
            error = f"the system's OOM killer ended a process; {_exit(output, status)}"
            return Ending(verdict=Verdict.HOST_OOM, error=error)
    if cause is not None:
        return Ending(
            verdict=verdict,
            error=with_hint(_named_in(cause.text, cause.who)),
            where=cause.where,
            context=cause.context,
            read_at=seen.read_at,
        )
    if output.oom_line and not all_told:
        return Ending(verdict=Verdict.OOM, error=QUOTED.format(line=output.oom_line))
    return Ending(verdict=Verdict.CRASHED, error=_crash(errors, output, status))


def _crash(errors: Sequence[ReportedError], output: Output, status: int) -> str:
    """Say how a run ended of which only peers have said anything, or none."""
    crash, tail = _exit(output, status), output.tail()
    if errors and output.root_cause() is None:
        crash += f" ({errors[0].text})"
    if tail:
        crash = "\n".join([crash, "the end of its output:", *tail])
    return with_hint(crash)


def _judge(
    errors: Sequence[ReportedError], evidence: Evidence
) -> tuple[Verdict, ReportedError | None]:
    """Return the first out-of-memory error, otherwise the first error that may be a cause, with its verdict."""
    verdict, cause = Verdict.BUG, None
    for error in errors:
        if error.is_peers:
            continue
        errors_verdict = classify(error.facts, evidence)
        if errors_verdict in OUT_OF_MEMORY:
            return errors_verdict, error
        if cause is None:
            verdict, cause = errors_verdict, error
    return verdict, cause


def _errors(seen: RunReports, output: Output, all_told: bool) -> Iterator[ReportedError]:
    """Yield the exceptions that processes reported, then those in the output."""
    printed = output.exceptions()
    if all_told:
        printed = [error for error in printed if not _TORCH_OOM.search(error.text)]
    for report in seen.reports:
        if report.errors:
            name, text = (
                report.errors[0].classes[0].removeprefix("builtins."),
                report.errors[0].text,
            )
            context = _context(text, printed)
            yield ReportedError(
                facts=report.errors,
                text=f"{name}: {text}",
                who=report.name,
                where=report.where,
                context=context,
            )
    yield from printed


def _context(text: str, printed: Sequence[ReportedError]) -> tuple[str, ...]:
    """Return the lines of the output above a reported error; none if it was not printed."""
    for error in printed:
        if text and error.facts[0].text == text.partition("\n")[0]:
            return error.context
    return ()


def with_hint(error: str) -> str:
    """Add what to do about an error that a command's lack of a terminal explains."""
    return f"{error}\n{NO_TERMINAL}" if _WANTS_TERMINAL.search(error) else error


def _named_in(error: str, who: str) -> str:
    return f"{who}: {error}" if who.startswith("rank") else error


def _exit(output: Output, status: int) -> str:
    who, code = "the command", status
    if cause := output.root_cause():
        who, code = f"rank {cause[0]}", cause[1]
    if code > SIGNALLED:  # by a shell in between
        code = SIGNALLED - code
    if -code in set(signal.Signals):
        return f"{who} was killed by {signal.Signals(-code).name}"
    return f"{who} exited with {code}"
