"""What a run may have answered, given what happened to it: a word for an allowed outcome, or a `Violation`."""

import signal
from dataclasses import dataclass, field

from soaking import ledger
from soaking.plan import ABOUT_MEMORY, HOST, IN_FILE

OURS = "oomprobe.errors."
LOST = ("crashed", "poisoned")
CALLS_OF_FIRST_TRIAL = 3  # one until the optimizer has stepped, and two steps; after them the baseline is taken


class Violation(Exception):
    """The run did what no fault excuses."""


@dataclass
class Ran:
    """One run, as it was seen.

    Attributes:
        probe: From `plan`.
        status: Of `os.waitpid`; None: it hung and was ended.
        report: What its process told; None: it was ended before.
        happened: Faults that really did, in this run.
        past: Faults that happened in earlier runs of the same journal.
        left: Processes and temporary files found after it.
        asked: Options of this run.
        calls: Of its step.
        confirmed: Whether a confirmation had passed.
    """

    probe: object
    status: int | None
    report: dict | None
    happened: list
    past: list
    left: list
    asked: dict
    calls: int = 1
    confirmed: bool = False
    sent_s: dict = field(default_factory=dict)  # when signals were sent to the probe, by name

    @property
    def faults(self):
        return [*self.past, *self.happened]

    def kinds(self):
        return {fault["kind"] for fault in self.faults}

    def deadly(self):
        """Faults that end a process of a trial."""
        return [f for f in self.faults if f["kind"] in ("signal", "garble", "hang")]


def outcome(ran, survives):
    """Judge a run.

    Args:
        ran: The run.
        survives: Called with a size and a budget; whether a fresh process survives it. For host memory.

    Raises:
        Violation: what it did is not allowed.
    """
    if ran.status is None:
        raise Violation("it hung")
    if ran.left:
        raise Violation(f"left behind: {', '.join(ran.left)}")
    if ran.report is None:
        return _ended_by_signal(ran)
    if ran.report["left"]:
        raise Violation(f"the process was not as before: {'; '.join(ran.report['left'])}")
    how = ran.report["how"]
    if how in ("interrupted", "left"):
        return _interrupted(ran)
    _refuse_swallowed(ran)
    return _error(ran) if how == "error" else _answer(ran, survives)


def _sent(ran):
    return {f["signal"] for f in ran.happened if f["kind"] == "signal" and f["role"] == "probe"}


def _ended_by_signal(ran):
    number = ran.status & 0x7F
    name = signal.Signals(number).name if number else f"exit code {ran.status >> 8}"
    if name not in _sent(ran):
        raise Violation(f"its process ended by {name}, which nobody sent")
    if name == "SIGTERM" and ran.calls and not ran.confirmed:
        raise Violation("SIGTERM ended it in the midst of its trials, where it has to be an orderly end")
    return f"ended by {name}"


def _interrupted(ran):
    code = ran.status >> 8
    wanted = {130: "SIGINT", 143: "SIGTERM"}.get(code)
    if wanted not in _sent(ran):
        raise Violation(f"it left with exit code {code}, and nobody sent {wanted}")
    return f"exit code {code}"


def _refuse_swallowed(ran):
    """Ctrl-C or SIGTERM well before the end has to end it."""
    for name in {"SIGINT", "SIGTERM"} & ran.sent_s.keys():
        if name not in ran.report["late"] and ran.sent_s[name] < ran.report["ended_s"] - 0.05:
            raise Violation(
                f"{name} was sent {ran.report['ended_s'] - ran.sent_s[name]:.2f} s before the end, and was lost"
            )


def _error(ran):
    report, kinds = ran.report, ran.kinds()
    name = next((c.removeprefix(OURS) for c in report["classes"] if c.startswith(OURS) and "[" not in c), None)
    if name is None or f"{OURS}OomProbeError" not in report["classes"]:
        raise Violation(f"an exception outside the contract: {report['classes'][0]}: {report['text'][:300]}")
    excuses = {
        "TimeLimitError": "time_limit_s" in ran.asked or "trial_time_limit_s" in ran.asked,
        "DeviceLostError": _lied(ran, "raise", "none"),
        "UnreliableError": bool(kinds & {"leak", "lie"}),
        "StepFailedError": bool(ran.deadly()) and _died_twice_or_early(report),
        "NothingFitsError": "lie" in kinds
        or ("neighbour" in kinds and "CONTAMINATED" in report["text"])
        or not _some_fits(ran),
        "InvalidArgumentError": bool(kinds & (IN_FILE | {"truncated", "garbled"})),
    }
    if not excuses.get(name, False):
        raise Violation(f"{name} without a reason: {report['text'][:400]}")
    return name


def _lied(ran, *values):
    return any(f["kind"] == "lie" and f["value"] in values for f in ran.faults)


def _died_twice_or_early(report):
    """One death in a trial has to be survived; one while a target is built need not."""
    lost = [trial["batch_size"] for trial in report["trials"] if trial["verdict"] in LOST]
    return not report["trials"] or "was to be built" in report["text"] or any(lost.count(size) > 1 for size in lost)


def scan(ran, limit_bytes):
    """The truth on the ledger."""
    options = ran.asked
    return ledger.scan(
        ran.probe.card, limit_bytes, options["min_batch"], options.get("max_batch"), options["multiple_of"]
    )


def _budget(ran, total_bytes):
    return int(ran.asked["memory_fraction"] * total_bytes)


def _some_fits(ran):
    return ran.probe.kind == HOST or scan(ran, _budget(ran, ran.probe.card["total"])) is not None


def _answer(ran, survives):
    report, answer = ran.report, ran.report["batch_size"]
    if not _confirmed(report["trials"], answer):
        raise Violation(f"{answer} was answered, and no confirmation of it has passed")
    if not report["verified"]:
        raise Violation("an answer, and the state was not verified")
    if ran.probe.kind == HOST:
        return _answer_on_host(ran, answer, survives)
    total = ran.probe.card["total"]
    exact = scan(ran, _budget(ran, total))
    if answer == exact:
        return "right"
    if report["contaminated"]:
        return "contaminated"
    told_of_other = any(f["kind"] == "lie" and f["method"] == "available_bytes" for f in ran.faults)
    if told_of_other and answer == scan(ran, min(report["budget_bytes"], total)):
        return "right for the memory it was told of"
    if _neighbour_stayed(ran) and answer == scan(ran, report["budget_bytes"]):
        return "right for the memory there was"
    if exact is not None and answer < exact:
        said = _said_lower(ran, answer)
        if said:
            return said
    raise Violation(f"a wrong answer: {answer}, and the scan says {exact}; notes: {report['notes']}")


def _neighbour_stayed(ran):
    """One that was there when the memory was measured and never left; had it come later, it would have been seen."""
    return any(f["kind"] == "neighbour" and ran.calls < f["call"] + f["calls"] for f in ran.faults)


def _said_lower(ran, answer):
    """Why an answer below the truth is an honest one."""
    report = ran.report
    if any(note.startswith("time limit") for note in report["notes"]):
        return "lower, for want of time"
    leaks = [f for f in ran.faults if f["kind"] == "leak"]
    less = scan(ran, _budget(ran, ran.probe.card["total"]) - sum(f["bytes"] for f in leaks)) or 0
    if leaks and answer >= less and any(trial["leaked_bytes"] for trial in report["trials"]):
        return "lower, and the leak is named"
    if leaks and answer == less and leaks[0]["call"] <= CALLS_OF_FIRST_TRIAL:
        return "lower, by what stayed since the first trial"  # as an optimizer's state does
    if any("failed in confirmation" in note for note in report["notes"]) and ran.kinds() & ABOUT_MEMORY:
        return "lower, and the confirmation that failed is told"
    return None


def _confirmed(trials, answer):
    """By a confirmation that passed; or one whose process died, in the second try."""
    about = [(t["phase"], t["verdict"]) for t in trials if t["batch_size"] == answer]
    died = any(phase == "confirm" and verdict in (*LOST, "timed_out") for phase, verdict in about)
    return ("confirm", "fits") in about or (died and ("recheck", "fits") in about)


def _answer_on_host(ran, answer, survives):
    """Held to the budget of the answer and a tenth of slack for another layout of memory."""
    from soaking.worker import HOST_BUDGET

    if not survives(answer, HOST_BUDGET):
        raise Violation(f"a wrong answer: {answer} does not survive in a fresh process")
    if ran.asked.get("time_limit_s") is None and survives(int(answer * 1.6), _budget(ran, HOST_BUDGET)):
        if ran.kinds() & ABOUT_MEMORY and _said_lower(ran, answer):
            return "lower, and the confirmation that failed is told"
        raise Violation(f"a wrong answer: {answer}, and {int(answer * 1.6)} survives in a fresh process")
    return "right"
