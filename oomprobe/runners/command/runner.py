"""The runner whose trials are runs of the user's command."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import tenacity

from oomprobe.devices.choose import opened_if_simulated
from oomprobe.errors import InvalidArgumentError, SimulationError, StepFailedError, UnreliableError
from oomprobe.ground.units import format_seconds
from oomprobe.ground.waiting import Held, until
from oomprobe.ground.words import count
from oomprobe.records.notes import Note, NoteKind, remark, warning
from oomprobe.records.options import Options
from oomprobe.records.patience import PATIENCE, Patience
from oomprobe.records.trials import (
    SIMULATED,
    UNSIMULATED,
    CallRecord,
    DeviceInfo,
    Measured,
    Outcome,
    Request,
    RunnerInfo,
    Trial,
    Verdict,
)
from oomprobe.runners.command.files import TrialFiles
from oomprobe.runners.command.output import OUT_OF_MEMORY, PORT_IN_USE, Ending, cause_of
from oomprobe.runners.command.reports import (
    RunReports,
    are_the_same,
    fraction_of,
    limiting_rank,
)
from oomprobe.runners.command.run import BATCH, BATCH_VARIABLE, Run
from oomprobe.runners.signals import Interrupts
from oomprobe.tape.record import NotRecorded, TapedTrial
from oomprobe.verdicts import Evidence

if TYPE_CHECKING:
    from oomprobe.devices.simulated import SimulatedDevice
    from oomprobe.tape.calls import RecordedCall

MORE = 1.25  # times what it takes to start the command and to make the steps of a trial: trials go on for so long
TICK_S = 0.1  # between readings of the reports
ATTEMPTS = 4
# Where both are set, torch ignores the second.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
LARGEST_READ_BYTES = 2**20  # of a file among the arguments
NOT_COVERED = (
    "what comes after the steps of a trial: evaluation, checkpoints, longer samples, the last batch of an epoch",
    "data loader workers and their host memory",
)
ALONE = "Run the command with {batch_size} in place of {{batch}} to see it"
NO_VALUES = (
    "Tensors of a simulated card have no values, and {line} was the last to read one, so this may "
    "be no error of yours: the program may have gone by a value that was made up. Leave that out "
    "while you probe, or probe on a real card"
)
UNUSED = (
    f"the command does not use the batch size: put {BATCH} where its number stands (--batch-size {BATCH}), or let the program "
    f"read the environment variable {BATCH_VARIABLE}. If a file that the command does not name reads the variable, begin "
    f"with: env {BATCH_VARIABLE}={BATCH} ..."
)
IGNORES = (
    "batch {size} asked torch for exactly as many bytes in each step as batch {smaller}, so the command does not use the "
    "batch size: a configuration file that overrides it, a data set that has fewer samples, a program that chooses the size "
    "itself, or a first stage that trains something else. See that {batch} reaches the data loader of {program}"
)
LEFT_RUNNING = (
    "the command ended at batch {size} while programs that it had started still ran, and none has reported anything: a trial "
    "follows the command, not what it leaves in the background (nohup ... &). Name the training program itself"
)
TOO_FEW = (
    "the command ended without an error at batch {size} after {steps}, and a trial needs {wanted}: its data set may have too few samples "
    "for larger batches (drop_last leaves out the last one), or it was told to stop. Let it run longer, pass --max-batch, or "
    "lower --steps"
)
NO_MARGIN = (
    "memory_fraction={fraction} cannot be promised: at batch {size}, {why}. Mend that, or pass --memory-fraction 1.0 to search "
    "without a margin"
)
MISSING = (
    "at batch {size}, {seen} of {all} ranks reported their steps; {missing} did not within {waited}. Ranks on other machines "
    "report to a folder that all machines see: set TMPDIR to one, such as TMPDIR=$HOME"
)
REFUSED = "the command cannot be simulated as it is. At batch {size}: {why}"
NOT_SIMULATED = (
    "at batch {size}, no process of the command used the simulated card. It may train on the CPU (--device cuda? "
    "an emptied CUDA_VISIBLE_DEVICES?), run Python with -I, -E or -S, "
    "or with an emptied environment (sudo, env -i, a container)"
)
WEAK_EXIT = (
    "weak: no process reported an optimizer step, so a trial passed when the command exited with "
    "0. A program that does not train runs its whole course in each trial: let it end after a few "
    "batches, or probe a target (docs/inference.md)"
)
WEAK_SECONDS = (
    "weak: no process reported an optimizer step, so a trial passed when the command had run for {seconds}, whatever it "
    "had done by then"
)
SHORT = (
    "weak: the command ended by itself after {steps}, and a confirmation makes at least {wanted}: memory may grow or fragment later. "
    "Let it run longer (without --max-steps); oomprobe ends it"
)
HANDLED = (
    "batch {size} passed although its allocator ran out of memory {times}: torch tries other plans of a convolution where one "
    "does not fit, which are slower"
)


def checked(command: Sequence[str]) -> list[str]:
    """Return the words of a command; raise InvalidArgumentError unless it can be started and uses the batch size."""
    are_words = not isinstance(command, str) and all(isinstance(word, str) for word in command)
    if not command or not are_words:
        raise InvalidArgumentError(
            f"the command must be a list of strings, such as ['python', 'train.py', '--batch-size', '{BATCH}'], not {command!r}"
        )
    if shutil.which(command[0]) is None:
        raise InvalidArgumentError(
            f"{command[0]} is not a program that can be run: {_why_no_program(command[0])}"
        )
    for word in command:
        if BATCH in word or BATCH_VARIABLE in word + _text_of(word):
            return list(command)
    raise InvalidArgumentError(UNUSED)


def _why_no_program(word: str) -> str:
    if word.startswith("-"):
        return "options of oomprobe stand before the two dashes"
    if " " in word:
        return "it has spaces; leave out the quotes around the whole command"
    if word.endswith(".py"):
        return f"begin with python, as in python {word}"
    if "=" in word:
        return "set variables before oomprobe, or begin with env"
    return "check its name, its path and its mode"


def _text_of(word: str) -> str:
    with suppress(OSError, ValueError):
        path = Path(word)
        if path.is_file() and path.stat().st_size <= LARGEST_READ_BYTES:
            return path.read_text(errors="ignore")
    return ""


class CommandRunner:
    """Runs a command for each trial; see `oomprobe.records.trials.Runner`."""

    def __init__(
        self, command: list[str], options: Options, interrupts: Interrupts, passes_after_s: float | None,
        patience: Patience = PATIENCE, card: str | None = None, keep_writes: bool = False,
    ) -> None:  # fmt: skip
        self._command, self._options, self._interrupts = command, options, interrupts
        self._passes_after_s, self._patience = passes_after_s, patience
        self._files = TrialFiles(command, on_card=card is not None, keeps_writes=keep_writes)
        # The card that each process of the command is to be on; None: real devices.
        self._card = card
        # The same card, on which sizes are replayed that follow from others.
        self.simulated: SimulatedDevice | None = opened_if_simulated(card)
        # Fraction of the memory, by UUID of the device; by the first run that passed.
        self._available: dict[str, float] = {}
        self._measured = Measured(available_bytes=0, outside_bytes=None)  # by that run
        self._device = DeviceInfo(
            name="the command's device", torch_device="cuda:0", total_bytes=0, on_host=False
        )
        self._environment: dict[str, Any] = {
            "command": shlex.join(command),
            "torch": None,
            "cuda": None,
        }
        self._took_s: list[float] = []  # by each run
        self._last_passed = 0, RunReports()  # batch size and reports
        self._world_size = 1
        self._left_out: dict[str, None] = {}  # by a simulated card, of what the command does
        self._torch_version: tuple[int, ...] = ()  # the oldest that a process reported

    # --- the Runner protocol ---

    @property
    def facts(self) -> RunnerInfo:
        """What is known so far; the device only once a run has reported it."""
        return RunnerInfo(
            device=self._device,
            step_names=("command",),
            threads=1,
            starts_anew=True,
            replaceable=True,
            world_size=self._world_size,
            grows_capped=True,
            confirmations=2,
            runs_plans=False,
            records=self._card is None,
            alone=ALONE,
            not_covered=NOT_COVERED
            if self._card is None
            else (*NOT_COVERED, *UNSIMULATED, *self._left_out),
            environment=self._environment,
        )

    def measure(self) -> Measured:
        """Return what the first run that passed has shown; zero bytes are available until then."""
        return self._measured

    def run(self, request: Request) -> Outcome:
        """Run the command; run again if a port was in use or memory not yet free."""
        outcome, ending = until(
            lambda result: not _is_not_its_fault(*result),
            lambda: self._run(request),
            wait=tenacity.wait_exponential(max=8),
            stop=tenacity.stop_after_attempt(ATTEMPTS),
        )
        if ending.verdict is Verdict.BUG:
            message = _failed(request, ending, self._files)
            raise StepFailedError(message, batch_size=request.batch_size)
        return outcome

    def _run(self, request: Request) -> tuple[Outcome, Ending]:
        fractions = self._fractions()
        variables, taped, unrecorded = self._variables(fractions), tuple[TapedTrial, ...](), ""
        if request.records:
            variables["OOMPROBE_RECORDS"] = str(len(request.calls))
        with (
            Run(self._command, request.batch_size, variables, self._files) as run,
            self._interrupts.delivered_until(None),
        ):
            began_s = time.time()
            seen, ending = self._watch(run, request)
            self._files.look(run.folder, began_s, run.output)
            if ending.verdict in (Verdict.BUG, Verdict.CRASHED):
                words = "\n".join([ending.error, *run.output.tail()])
                self._files.check(request.batch_size, run.folder, words)
            self._took_s.append(run.elapsed_s)
            self._record(run, seen)
            if request.records:
                try:
                    taped = run.tapes(seen)
                except NotRecorded as error:
                    unrecorded = str(error)
        measured = None
        if ending.verdict is Verdict.FITS:
            self._check_pass(request, seen, fractions)
            measured = self._measure(seen)
        self._describe(seen)
        outcome = self._outcome(request, seen, ending, fractions, measured)
        return replace(outcome, taped=taped, unrecorded=unrecorded), ending

    def _record(self, run: Run, seen: RunReports) -> None:
        """Keep what the only process on the card asked of it."""
        if self.simulated is None:
            return
        from oomprobe.tape.calls import read_calls  # takes a second to import

        recorded = run.recorded()
        calls: list[RecordedCall] = []
        workspace_bytes = 0
        if len(seen.training) <= len(recorded) == 1:
            calls = read_calls(recorded[0])
            workspace_bytes = seen.fullest_card.workspaces_bytes
        self.simulated.begin_with(calls, workspace_bytes)

    def cap_bytes(self, request: Request) -> int:
        """Return the cap of a run on its card."""
        return int(min(self._fractions().values()) * self._device.total_bytes)

    def _fractions(self) -> dict[str, float]:
        """Return the caps as fractions of each device's memory; "" stands for devices that no run has reported yet."""
        share = self._options.memory_fraction
        if share >= 1 and self._card is None:
            return {}
        known = {uuid: share * available for uuid, available in self._available.items()}
        return {"": min(known.values(), default=share), **known}

    def _variables(self, fractions: Mapping[str, float]) -> dict[str, str]:
        """Return the environment variables that hold the command to the caps.

        Torch's own are for processes that ignore PYTHONPATH. Versions before 2.10 refuse to start with them.
        """
        if not fractions:
            return {}
        variables = {"OOMPROBE_FRACTIONS": json.dumps(fractions)}
        if self._card is not None:
            return {**variables, "OOMPROBE_SIMULATE": self._card}
        if self._torch_version >= (2, 10):
            users = os.environ.get(ALLOCATOR_VARIABLES[0]) or os.environ.get(ALLOCATOR_VARIABLES[1])
            settings = f"per_process_memory_fraction:{min(fractions.values()):.9f}"
            if users:
                settings = f"{users},{settings}"
            variables |= dict.fromkeys(ALLOCATOR_VARIABLES, settings)
        return variables

    # --- one run ---

    def _watch(self, run: Run, request: Request) -> tuple[RunReports, Ending]:
        """Follow a run until it passes, fails or ends; return its reports and its ending."""
        wanted, patience = len(request.calls), self._patience
        troubled, incomplete = Held(), Held()
        while not run.has_ended(TICK_S):
            seen = run.reports()
            _check_refusal(request, seen)
            if self._has_done_enough(run, request, seen):
                return seen, _swallowed(run, request, seen) or FITS
            most_s = patience.handling_s if seen.may_recover else patience.failed_s
            if seen.goes_on or troubled.for_s(seen.is_in_trouble) > most_s:
                return seen, _failure_of(run, request, seen)
            if (
                incomplete.for_s(seen.steps >= wanted and seen.missing_ranks > 0)
                > patience.missing_s
            ):
                ranks, missing = seen.world_size, seen.missing_ranks
                waited = format_seconds(patience.missing_s)
                raise UnreliableError(
                    MISSING.format(
                        size=request.batch_size,
                        seen=ranks - missing,
                        all=ranks,
                        missing=missing,
                        waited=waited,
                    )
                )
            if request.deadline_s is not None and time.monotonic() > request.deadline_s:
                return seen, _timed_out(run, seen)
        return (seen := run.reports()), self._ended(run, request, seen)

    def _has_done_enough(self, run: Run, request: Request, seen: RunReports) -> bool:
        """Return whether a running command can be judged."""
        if not seen.reports:
            return self._passes_after_s is not None and run.elapsed_s > self._passes_after_s
        steps = seen.steps_of_all
        if steps < len(request.calls):
            return False
        # More steps see more, and cost little beside starting the command; those of an answer may cost another run.
        run.start_up_s = run.start_up_s or run.elapsed_s
        least_s = MORE * run.start_up_s
        if request.confirms and self._took_s:
            least_s = max(least_s, fmean(self._took_s))
        return steps >= self._patience.look_calls or run.elapsed_s > least_s

    def _ended(self, run: Run, request: Request, seen: RunReports) -> Ending:
        """Return how a command ended that ended by itself."""
        size, steps, wanted = request.batch_size, seen.steps, 1 + self._options.steps
        _check_refusal(request, seen)
        if swallowed := _swallowed(run, request, seen):
            return swallowed
        if run.status == 0 and not seen.is_in_trouble:
            if not seen.reports and run.left_running:
                raise UnreliableError(LEFT_RUNNING.format(size=size))
            reports_steps = steps or self._last_passed[1].training
            if steps < wanted and reports_steps:
                made = count(steps, "optimizer step", "optimizer steps")
                raise UnreliableError(TOO_FEW.format(size=size, steps=made, wanted=wanted))
            return FITS
        failure = _failure_of(run, request, seen)
        misses_cuda = "CUDA" in failure.error or "NVIDIA" in failure.error
        if self._card is not None and misses_cuda and not seen.reports:
            raise SimulationError(NOT_SIMULATED.format(size=size))
        # What fails after the steps of a trial, such as an evaluation without its data, would not have been seen.
        if steps >= len(request.calls) and failure.verdict in (Verdict.BUG, Verdict.CRASHED):
            return FITS
        return failure

    # --- what a run has shown ---

    def _check_pass(
        self, request: Request, seen: RunReports, fractions: Mapping[str, float]
    ) -> None:
        """Raise UnreliableError if a pass proves nothing: the size was not used, or the margin was not held."""
        size, (last_size, last) = request.batch_size, self._last_passed
        if self._card is not None and not seen.cards:
            raise SimulationError(NOT_SIMULATED.format(size=size))
        if fractions and (why := seen.uncapped(fractions)):
            fraction = self._options.memory_fraction
            raise UnreliableError(NO_MARGIN.format(fraction=fraction, size=size, why=why))
        smaller, larger = sorted((size, last_size))
        # Sizes that are closer may come to the same: scripts divide by the number of ranks, or round.
        if larger >= 2 * smaller and are_the_same(seen.requested, last.requested):
            program = seen.training[0].program
            raise UnreliableError(
                IGNORES.format(size=larger, smaller=smaller, batch=BATCH, program=program)
            )
        self._last_passed = size, seen

    def _measure(self, seen: RunReports) -> Measured | None:
        """Learn how much memory is available from the first pass, when NCCL and the kernels are there; None from others."""
        cards = seen.cards
        if self._available or not cards:
            return None
        self._available = {
            card.memory.uuid: card.available_bytes / card.memory.total_bytes for card in cards
        }
        available_bytes = min(card.available_bytes for card in cards)
        self._measured = Measured(available_bytes=available_bytes, outside_bytes=seen.outside_bytes)
        return self._measured

    def _describe(self, seen: RunReports) -> None:
        """Note the devices and versions that the answer holds for."""
        cards = seen.cards
        if not cards:
            return
        memory, last = cards[0].memory, seen.reports[-1]
        for report in seen.training:
            self._left_out |= dict.fromkeys(report.not_covered)
        name = memory.name
        if self._card is not None:
            name = f"simulated {name}"
            self._environment["device"] = SIMULATED
        if len(cards) > 1:
            name = f"{len(cards)} x {name}"
        self._device = DeviceInfo(
            name=name,
            torch_device=f"cuda:{memory.index}",
            total_bytes=memory.total_bytes,
            on_host=False,
        )
        self._torch_version = min(
            tuple(map(int, report.torch.split(".")[:2])) for report in seen.reports
        )
        programs = dict.fromkeys(report.program for report in seen.training)
        if programs:
            self._environment["program"] = ", ".join(programs)
        self._environment |= {"torch": last.torch, "cuda": last.cuda}
        self._world_size = seen.world_size

    def _outcome(
        self,
        request: Request,
        seen: RunReports,
        ending: Ending,
        fractions: Mapping[str, float],
        measured: Measured | None,
    ) -> Outcome:
        steps, step_s = seen.steps, seen.step_s
        cap_bytes = request.cap_bytes
        if fractions and not cap_bytes:
            caps = [
                int(fraction_of(card.memory, fractions) * card.memory.total_bytes)
                for card in seen.cards
            ]
            cap_bytes = min(caps, default=None)
        fullest = seen.fullest_card
        memories = [memory for _, memory in fullest.users]
        served_bytes, allocations = max(map(max, seen.requested.values()), default=(0, 0))
        ranks = seen.ranks(passed=ending.verdict is Verdict.FITS)
        peak_bytes, upper_bytes = fullest.peak_reserved_bytes, None
        if self._card is not None:
            step_s = None  # the simulation's time says nothing
            # If convolutions take the workspaces that they may want.
            wanted_bytes = peak_bytes + fullest.workspaces_bytes
            upper_bytes = max(peak_bytes, min(wanted_bytes, cap_bytes or 0))
        trial = Trial.of(
            request,
            ending.verdict,
            steps=steps,
            cap_bytes=cap_bytes,
            peak_allocated_bytes=sum(memory.peak_allocated_bytes for memory in memories) or None,
            peak_reserved_bytes=peak_bytes or None,
            peak_upper_bytes=upper_bytes,
            pinned_bytes=seen.pinned_bytes,
            host_bytes=seen.host_bytes,
            step_s=step_s,
            samples_per_s=None if step_s is None else request.batch_size / step_s,
            alloc_retries=max((memory.retries for memory in memories), default=0),
            error=ending.error or None,
            where=ending.where,
            ranks=ranks,
            limiting_rank=limiting_rank(ranks),
        )
        # What a step asks for is that of the largest; further steps were a bonus.
        record = CallRecord(
            step=request.calls[0].step, served_bytes=served_bytes, blocks=allocations, stepped=1
        )
        return Outcome(
            trial=trial,
            records=(record,) * min(steps, len(request.calls)),
            measured=measured,
            outside_after_bytes=seen.outside_bytes,
            in_steps_s=(seen.step_s or 0.0) * steps,
            notes=tuple(self._notes(request, trial, seen)),
        )

    def _notes(self, request: Request, trial: Trial, seen: RunReports) -> Iterator[Note]:
        yield from self._files.notes()
        for report in seen.training:
            yield from map(remark, report.notes)
            if report.not_compared:
                yield Note(text=report.not_compared, kind=NoteKind.NOT_COMPARED)
        if trial.verdict is not Verdict.FITS:
            return
        if request.confirms and 0 < trial.steps < len(request.calls):
            yield warning(
                SHORT.format(steps=count(trial.steps, "step", "steps"), wanted=len(request.calls))
            )
        if not trial.steps:
            if seen.reports or self._passes_after_s is None:
                yield warning(WEAK_EXIT)
            else:
                yield warning(WEAK_SECONDS.format(seconds=format_seconds(self._passes_after_s)))
        if ooms := sum(report.ooms for report in seen.reports):
            yield remark(
                HANDLED.format(size=trial.batch_size, times=count(ooms, "time", "times")),
                trial.batch_size,
            )


FITS = Ending(verdict=Verdict.FITS, error="")


def _check_refusal(request: Request, seen: RunReports) -> None:
    """Raise SimulationError if a simulated card refused anything to the command."""
    if seen.refusal:
        raise SimulationError(REFUSED.format(size=request.batch_size, why=seen.refusal))


def _swallowed(run: Run, request: Request, seen: RunReports) -> Ending | None:
    """Return the out-of-memory error that a program caught and went on from, so that its steps prove nothing."""
    is_quoted = run.output.oom_line and not seen.all_report
    if seen.caught_oom or is_quoted:
        failure = _failure_of(run, request, seen)
        if failure.verdict in OUT_OF_MEMORY:
            return failure
    return None


def _failure_of(run: Run, request: Request, seen: RunReports) -> Ending:
    evidence = Evidence(smaller_size_passed=request.smaller_passed, memory_pressure=seen.is_pressed)
    return cause_of(seen, run.output, run.status or 0, evidence, oom_kills=int(run.oom_kills))


def _is_not_its_fault(outcome: Outcome, ending: Ending) -> bool:
    """Return whether a run failed before its size mattered: no port, or no memory for as much as a CUDA context."""
    if PORT_IN_USE.search(ending.error):
        return True
    if ending.verdict is not Verdict.OOM or ending.where is None:
        return False  # without a line, no process has reported its failure, and how far it had come
    has_begun = outcome.trial.peak_reserved_bytes or outcome.outside_after_bytes
    return not has_begun


def _failed(request: Request, ending: Ending, files: TrialFiles) -> str:
    """Return the message for a command that failed with a bug."""
    size, ran = request.batch_size, request.largest_passed
    help_ = (
        "so a smaller batch size would not help; if the script divides it, pass --min-batch N "
        "--multiple-of N"
    )
    if ran is not None and ran < size:
        help_ = (
            f"and batch {ran} ran: pass --max-batch {ran} if larger ones are not meant to work (a data set that ends?), or "
            "--multiple-of if only some sizes are"
        )
    where = f" ({ending.where})" if ending.where else ""
    lines = [f"the command failed at batch size {size}{where}: {ending.error}"]
    if ending.read_at:
        lines.append(NO_VALUES.format(line=ending.read_at))
    else:
        lines.append(f"This is not about memory, {help_}. {ALONE.format(batch_size=size)}")
    lines += files.hint(ending.error)
    if ending.context:
        lines += ["The end of its output:", *ending.context]
    return "\n".join(lines)


def _timed_out(run: Run, seen: RunReports) -> Ending:
    steps = [
        f"{user.name} had made {count(user.steps, 'step', 'steps')}"
        for user in seen.reports
        if user.devices
    ]
    error = f"the command was ended after {format_seconds(run.elapsed_s)}"
    if shown := "; ".join(steps) or "".join(run.output.tail()[-1:]):
        error = f"{error}: {shown}"
    return Ending(verdict=Verdict.TIMED_OUT, error=error)
