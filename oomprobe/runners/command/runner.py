"""The runner whose trials are runs of the user's command."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import tenacity

from oomprobe.errors import InvalidArgumentError, StepFailedError, UnreliableError
from oomprobe.ground.units import format_seconds
from oomprobe.ground.waiting import Held, until
from oomprobe.ground.words import count
from oomprobe.records.options import Options
from oomprobe.records.patience import PATIENCE, Patience
from oomprobe.records.trials import (
    Calls,
    DeviceInfo,
    Measured,
    Outcome,
    Request,
    RunnerInfo,
    Trial,
    Verdict,
)
from oomprobe.runners.command import reports
from oomprobe.runners.command.output import PORT_IN_USE, Ending, cause_of
from oomprobe.runners.command.reports import Asked, Report
from oomprobe.runners.command.run import BATCH, BATCH_VARIABLE, Run
from oomprobe.runners.signals import Interrupts
from oomprobe.verdicts import Evidence

MORE = 1.25  # times what it takes to start the command and to make the steps of a trial: trials go on for so long
TICK_S = 0.1  # between readings of the reports
ATTEMPTS = 4
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # where both are set, torch ignores the second
LARGEST_READ_BYTES = 2**20  # of a file among the arguments
NOT_COVERED = (
    "what comes after the steps of a trial: evaluation, checkpoints, longer samples, the last batch of an epoch",
    "data loader workers and their host memory",
)
ALONE = "Run the command with {batch_size} in place of {{batch}} to see it"
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
WEAK_EXIT = "weak: no process reported an optimizer step, so a trial passed when the command exited with 0"
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
    if isinstance(command, str) or not command or not all(isinstance(word, str) for word in command):
        raise InvalidArgumentError(
            f"the command must be a list of strings, such as ['python', 'train.py', '--batch-size', '{BATCH}'], not {command!r}"
        )
    if shutil.which(command[0]) is None:
        raise InvalidArgumentError(f"{command[0]} is not a program that can be run: {_why_no_program(command[0])}")
    texts = [*command, *map(_text_of, command)]
    if not any(BATCH in word for word in command) and not any(BATCH_VARIABLE in text for text in texts):
        raise InvalidArgumentError(UNUSED)
    return list(command)


def _why_no_program(word: str) -> str:
    if word.startswith("-"):
        return "options of oomprobe stand before the two dashes"
    if " " in word:
        return "it has spaces; leave out the quotes around the whole command"
    return (
        "set variables before oomprobe, or begin with env" if "=" in word else "check its name, its path and its mode"
    )


def _text_of(word: str) -> str:
    try:
        path = Path(word)
        return path.read_text(errors="ignore") if path.is_file() and path.stat().st_size <= LARGEST_READ_BYTES else ""
    except (OSError, ValueError):
        return ""


class CommandRunner:
    """Runs a command for each trial; see `oomprobe.records.trials.Runner`."""

    def __init__(
        self,
        command: list[str],
        options: Options,
        interrupts: Interrupts,
        passes_after_s: float | None,
        patience: Patience = PATIENCE,
    ) -> None:
        self._command, self._options, self._interrupts = command, options, interrupts
        self._passes_after_s, self._patience = passes_after_s, patience
        self._available: dict[str, tuple[int, int]] = {}  # bytes available and in all, by UUID of the device
        self._measured = Measured(available_bytes=0, outside_bytes=None)  # by the first run that passed
        self._device = DeviceInfo(name="the command's device", torch_device="cuda:0", total_bytes=0, on_host=False)
        self._environment: dict[str, Any] = {"command": shlex.join(command), "torch": None, "cuda": None}
        self._took_s: list[float] = []  # by each run
        self._last_passed: tuple[int, Asked] = (0, {})  # batch size, and what each step asked for
        self._has_stepped = False
        self._world_size = 1
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
            alone=ALONE,
            not_covered=NOT_COVERED,
            environment=self._environment,
        )

    def measure(self) -> Measured:
        """Return what the first run that passed has shown; zero bytes are available until then."""
        return self._measured

    def run(self, request: Request) -> Outcome:
        """Run the command once; again if a port was in use, or if memory of an earlier run was not free yet."""
        outcome, ending = until(
            lambda result: not _is_not_its_fault(*result),
            lambda: self._run(request),
            wait=tenacity.wait_exponential(max=8),
            stop=tenacity.stop_after_attempt(ATTEMPTS),
        )
        if ending.verdict is Verdict.BUG:
            raise StepFailedError(_failed(request, ending), batch_size=request.batch_size)
        return outcome

    def _run(self, request: Request) -> tuple[Outcome, Ending]:
        fractions = self._fractions()
        with (
            Run(self._command, request.batch_size, self._variables(fractions)) as run,
            self._interrupts.delivered_until(None),
        ):
            seen, ending = self._watch(run, request)
            self._took_s.append(run.elapsed_s)
        if ending.verdict is Verdict.FITS:
            self._check_pass(request, seen, fractions)
        return self._outcome(request, seen, ending, fractions), ending

    def _fractions(self) -> dict[str, float]:
        """Return the caps as fractions of each device's memory; "" stands for devices that no run has reported yet."""
        if self._options.memory_fraction == 1:
            return {}
        share = self._options.memory_fraction
        known = {uuid: share * available / total for uuid, (available, total) in self._available.items()}
        return {"": min(known.values(), default=share), **known}

    def _variables(self, fractions: Mapping[str, float]) -> dict[str, str]:
        """Return the environment variables that hold the command to the caps.

        Torch's own are for processes that ignore PYTHONPATH. Versions before 2.10 refuse to start with them.
        """
        if not fractions:
            return {}
        variables = {"OOMPROBE_FRACTIONS": json.dumps(fractions)}
        if self._torch_version >= (2, 10):
            users = os.environ.get(ALLOCATOR_VARIABLES[0]) or os.environ.get(ALLOCATOR_VARIABLES[1])
            cap = f"per_process_memory_fraction:{min(fractions.values()):.9f}"
            variables |= dict.fromkeys(ALLOCATOR_VARIABLES, ",".join(filter(None, [users, cap])))
        return variables

    # --- one run ---

    def _watch(self, run: Run, request: Request) -> tuple[list[Report], Ending]:
        """Follow a run until it passes, fails or ends; return its reports and its ending."""
        wanted, patience = request.wanted_calls, self._patience
        troubled, incomplete = Held(), Held()
        while not run.has_ended(TICK_S):
            seen = run.reports()
            if self._has_done_enough(run, request, seen, wanted):
                return seen, self._swallowed(run, request, seen) or FITS
            may_recover = not any(report.raised_ooms or report.errors for report in seen)
            goes_on = any(report.raised_ooms and report.why == "step" for report in seen)
            recovering_s = patience.handling_s if may_recover else patience.failed_s
            if goes_on or troubled.for_s(_is_troubled(seen)) > recovering_s:
                return seen, self._failure(run, request, seen)
            if incomplete.for_s(_lacks_ranks(seen, wanted)) > patience.missing_s:
                raise UnreliableError(_missing(request, seen, patience.missing_s))
            if request.deadline_s is not None and time.monotonic() > request.deadline_s:
                return seen, _timed_out(run, seen)
        return (seen := run.reports()), self._ended(run, request, seen)

    def _has_done_enough(self, run: Run, request: Request, seen: Sequence[Report], wanted: int) -> bool:
        """Return whether a running command can be judged."""
        if not seen:
            return self._passes_after_s is not None and run.elapsed_s > self._passes_after_s
        steps = reports.least_steps(seen)
        if steps < wanted:
            return False
        # More steps see more, and cost little beside starting the command; those of an answer may cost another run.
        run.start_up_s = run.start_up_s or run.elapsed_s
        least_s = max(MORE * run.start_up_s, fmean(self._took_s or [0.0]) if request.confirms else 0.0)
        return steps >= self._patience.look_calls or run.elapsed_s > least_s

    def _ended(self, run: Run, request: Request, seen: Sequence[Report]) -> Ending:
        """Return how a command ended that ended by itself."""
        steps = min((report.steps for report in reports.training(seen)), default=0)
        enough = steps >= 1 + self._options.steps
        if swallowed := self._swallowed(run, request, seen):
            return swallowed
        if run.status == 0 and not seen and run.left_running:
            raise UnreliableError(LEFT_RUNNING.format(size=request.batch_size))
        if run.status == 0 and not enough and (steps or self._has_stepped):
            steps_text = count(steps, "optimizer step", "optimizer steps")
            wanted = 1 + self._options.steps
            raise UnreliableError(TOO_FEW.format(size=request.batch_size, steps=steps_text, wanted=wanted))
        failure = self._failure(run, request, seen)
        # What fails after the steps of a trial, such as an evaluation without its data, would not have been seen.
        if run.status == 0 or (enough and failure.verdict in (Verdict.BUG, Verdict.CRASHED)):
            return FITS
        return failure

    def _swallowed(self, run: Run, request: Request, seen: Sequence[Report]) -> Ending | None:
        """Return the out-of-memory error that a program caught and went on from, so that its steps prove nothing."""
        is_quoted = run.output.oom_line and not reports.all_report(seen)
        if not is_quoted and not any(report.raised_ooms for report in seen):
            return None
        failure = self._failure(run, request, seen)
        return failure if failure.verdict in (Verdict.OOM, Verdict.HOST_OOM) else None

    def _failure(self, run: Run, request: Request, seen: Sequence[Report]) -> Ending:
        pressed = any(report.ooms or memory.retries for report in seen for memory in report.devices)
        evidence = Evidence(smaller_size_passed=request.smaller_passed, memory_pressure=pressed)
        return cause_of(seen, run.output, run.status or 0, evidence, oom_kills=int(run.oom_kills))

    # --- what a run has shown ---

    def _check_pass(self, request: Request, seen: Sequence[Report], fractions: Mapping[str, float]) -> None:
        """Raise UnreliableError if a pass proves nothing: the size was not used, or the margin was not held."""
        size = request.batch_size
        if fractions and (why := reports.uncapped(seen, fractions)):
            fraction = self._options.memory_fraction
            raise UnreliableError(NO_MARGIN.format(fraction=fraction, size=size, why=why))
        (smaller, larger), asked = sorted((size, self._last_passed[0])), reports.asked_by_step(seen)
        # Sizes that are closer may come to the same: scripts divide by the number of ranks, or round.
        if larger >= 2 * smaller and reports.are_the_same(asked, self._last_passed[1]):
            program = next(report.program for report in reports.training(seen))
            raise UnreliableError(IGNORES.format(size=larger, smaller=smaller, batch=BATCH, program=program))
        self._last_passed = size, asked
        self._has_stepped |= bool(reports.training(seen))

    def _learn(self, seen: Sequence[Report]) -> None:
        """Learn from a pass, when NCCL and the kernels are there, how much memory is available."""
        found = reports.cards(seen)
        for card in found:
            memory = card[0][1]
            self._available[memory.uuid] = reports.available_bytes(card), memory.total_bytes
        least_bytes = min(map(reports.available_bytes, found))
        self._measured = Measured(available_bytes=least_bytes, outside_bytes=reports.most_outside_bytes(found))

    def _describe(self, seen: Sequence[Report]) -> None:
        """Note the devices and versions that the answer holds for."""
        found = reports.cards(seen)
        if not found:
            return
        number, memory = len(found), found[0][0][1]
        self._device = DeviceInfo(
            name=memory.name if number == 1 else f"{number} x {memory.name}",
            torch_device=f"cuda:{memory.index}",
            total_bytes=memory.total_bytes,
            on_host=False,
        )
        self._torch_version = min([tuple(map(int, report.torch.split(".")[:2])) for report in seen])
        programs = dict.fromkeys(report.program for report in reports.training(seen))
        self._environment |= {"program": ", ".join(programs)} if programs else {}
        self._environment |= {"torch": seen[-1].torch, "cuda": seen[-1].cuda}
        self._world_size = reports.world_size(seen)

    def _outcome(
        self, request: Request, seen: Sequence[Report], ending: Ending, fractions: Mapping[str, float]
    ) -> Outcome:
        found, ranks = reports.cards(seen), reports.training(seen)
        passed, measured = ending.verdict is Verdict.FITS, None
        self._describe(seen)
        if passed and found and not self._available:
            self._learn(seen)
            measured = self._measured
        steps = min((report.steps for report in ranks), default=0)
        times_s = [(report.step_s[-1] - report.step_s[0]) / (report.steps - 1) for report in ranks if report.steps > 1]
        step_s = max(times_s, default=None) or None
        fullest = max(found, key=lambda card: _peak_bytes(card) / max(1, reports.available_bytes(card)), default=())
        served_bytes, allocations = max((max(steps) for steps in reports.asked_by_step(seen).values()), default=(0, 0))
        caps = [
            fractions.get(one.uuid, fractions[""]) * one.total_bytes for card in found for _, one in card if fractions
        ]
        trial = Trial.of(
            request,
            ending.verdict,
            steps=steps,
            cap_bytes=request.cap_bytes or (int(min(caps)) if caps else None),
            peak_allocated_bytes=sum(memory.peak_allocated_bytes for _, memory in fullest) or None,
            peak_reserved_bytes=_peak_bytes(fullest) or None,
            step_s=step_s,
            samples_per_s=None if step_s is None else request.batch_size / step_s,
            alloc_retries=max((memory.retries for _, memory in fullest), default=0),
            error=ending.error or None,
            where=ending.where,
            ranks=(of_ranks := reports.of_ranks(found, passed=passed)),
            limiting_rank=reports.limiting_rank(of_ranks),
        )
        return Outcome(
            trial=trial,
            calls=Calls(
                made=min(steps, request.wanted_calls),  # those beyond were a bonus
                first=min(1, steps),
                served_bytes=served_bytes,
                allocations=allocations,
            ),
            measured=measured,
            outside_after_bytes=reports.most_outside_bytes(found),
            in_steps_s=(step_s or 0.0) * steps,
            notes=tuple(self._notes(request, trial, seen)) if passed else (),
        )

    def _notes(self, request: Request, trial: Trial, seen: Sequence[Report]) -> Iterator[str]:
        if request.confirms and 0 < trial.steps < request.wanted_calls:
            yield SHORT.format(steps=count(trial.steps, "step", "steps"), wanted=request.wanted_calls)
        if not trial.steps and self._passes_after_s is not None and not seen:
            yield WEAK_SECONDS.format(seconds=format_seconds(self._passes_after_s))
        elif not trial.steps:
            yield WEAK_EXIT
        if ooms := sum(report.ooms for report in seen):
            yield HANDLED.format(size=trial.batch_size, times=count(ooms, "time", "times"))


FITS = Ending(verdict=Verdict.FITS, error="")


def _is_troubled(seen: Sequence[Report]) -> bool:
    """Return whether a process with memory on a GPU has failed, or has run out of memory and not stepped since."""
    return any(report.devices and (report.errors or report.raised_ooms or report.why == "oom") for report in seen)


def _is_not_its_fault(outcome: Outcome, ending: Ending) -> bool:
    """Return whether a run failed before its size mattered: no port, or no memory for as much as a CUDA context."""
    is_known = ending.where is not None  # otherwise no process reported its failure, and how far it had come
    has_begun = outcome.trial.peak_reserved_bytes or outcome.outside_after_bytes
    return bool(PORT_IN_USE.search(ending.error)) or (ending.verdict is Verdict.OOM and is_known and not has_begun)


def _lacks_ranks(seen: Sequence[Report], wanted: int) -> bool:
    """Return whether all ranks that report have made their steps, and others have never reported anything."""
    ranks = reports.training(seen)
    known = {report.rank for report in seen if report.rank is not None}
    return bool(ranks) and min(one.steps for one in ranks) >= wanted and len(known) < reports.world_size(ranks)


def _failed(request: Request, ending: Ending) -> str:
    """Return the message for a command that failed with a bug."""
    where = f" ({ending.where})" if ending.where else ""
    ran = request.largest_passed
    help_ = "so no batch size would help"
    if ran is not None and ran < request.batch_size:
        help_ = (
            f"and batch {ran} ran: pass --max-batch {ran} if larger ones are not meant to work (a data set that ends?), or "
            "--multiple-of if only some sizes are"
        )
    alone = ALONE.format(batch_size=request.batch_size)
    return "\n".join(
        [
            f"the command failed at batch size {request.batch_size}{where}: {ending.error}",
            f"This is not about memory, {help_}. {alone}",
            *(["The end of its output:", *ending.context] if ending.context else []),
        ]
    )


def _missing(request: Request, seen: Sequence[Report], waited_s: float) -> str:
    known, world_size = len(reports.training(seen)), reports.world_size(seen)
    return MISSING.format(
        size=request.batch_size,
        seen=known,
        all=world_size,
        missing=world_size - known,
        waited=format_seconds(waited_s),
    )


def _timed_out(run: Run, seen: Sequence[Report]) -> Ending:
    places = "; ".join(
        f"{report.name} had made {count(report.steps, 'step', 'steps')}" for report in seen if report.devices
    )
    last = run.output.tail()[-1:]
    error = f"the command was ended after {format_seconds(run.elapsed_s)}"
    return Ending(verdict=Verdict.TIMED_OUT, error=": ".join([error, *filter(None, [places or "".join(last)])]))


def _peak_bytes(card: reports.Card) -> int:
    return sum(memory.peak_reserved_bytes for _, memory in card)
