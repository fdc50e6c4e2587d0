"""Runs probes side by side, each in processes of its own, and sends them what the plan has for them."""

import json
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from soaking import judge, processes, worker
from soaking.judge import Ran, Violation
from soaking.plan import ABOUT_MEMORY, BETWEEN_RUNS, HOST

WATCHDOG_S = 90.0
GONE_S = {True: 12.0, False: 1.0}  # how long what a probe started may take to go, after a probe that was killed or not
TICK_S = 0.002
RUNS_EACH = 24
AT_ONCE = 3  # faults in one run


@dataclass
class Tally:
    """What happened."""

    injected: Counter = field(default_factory=Counter)  # fault
    outcomes: Counter = field(default_factory=Counter)  # (fault, outcome)
    violations: list = field(default_factory=list)  # (seed, number, text)
    probes: int = 0
    runs: int = 0
    missed: int = 0  # faults that no run met


def name_of(fault):
    if fault["kind"] == "signal":
        return f"{fault['signal']} to {fault['role']}"
    if fault["kind"] == "lie":
        return f"lie: {fault['method']}"
    if fault["kind"] == "garble":
        return f"pipe: {fault['said']}, {fault['then']}"
    return fault["kind"].replace("_", " ")


def soak(probes, *, jobs, tally, progress, watchdog_s=WATCHDOG_S):
    """Run probes to their end, `jobs` at a time."""
    processes.adopt_orphans()
    worker.warm()
    waiting, running = list(reversed(probes)), {}
    base = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                probe = waiting.pop()
                running[probe.number] = One(probe, base / str(probe.number), tally, watchdog_s).steps()
            for number, steps in list(running.items()):
                if next(steps, "over") == "over":
                    del running[number]
                    tally.probes += 1
                    progress(number, tally)
            time.sleep(TICK_S)
    finally:
        for steps in running.values():
            steps.close()
        shutil.rmtree(base, ignore_errors=True)


class One:
    """One probe: runs of it until every fault has happened, and one to its end without any."""

    def __init__(self, probe, place, tally, watchdog_s):
        self.probe, self.place, self.tally, self._watchdog_s = probe, place, tally, watchdog_s
        self.pending = list(probe.faults)
        self.journal = place / "journal"
        self.past = []  # faults since the journal was begun
        self.runs = 0
        self.fresh = True

    def steps(self):
        """Yields while it waits."""
        self.place.mkdir()
        while self.pending and self.runs < RUNS_EACH:
            if self.fresh:
                self._begin_anew()
            chosen = self._chosen()
            happened = yield from self._run(chosen)
            self.pending = [f for f in self.pending if f["id"] not in {h["id"] for h in happened}]
            for fault in chosen:
                if fault in self.pending:
                    self._sooner(fault)
        if not self.fresh:
            yield from self._run([])
        self.tally.missed += len(self.pending)

    def _begin_anew(self):
        with suppress(OSError):
            self.journal.unlink()
        self.past, self.fresh = [], False

    def _sooner(self, fault):
        """It did not come to it: next time earlier."""
        index = self.pending.index(fault)
        self.pending[index] = fault | {"call": fault["call"] // 2, "start_delay_s": fault.get("start_delay_s", 0) / 2}
        if "time_limit_s" in fault:
            self.pending[index]["time_limit_s"] = fault["time_limit_s"] / 3
        if fault["kind"] == "file_limit":
            self.pending[index]["bytes"] = fault["bytes"] // 3

    def _chosen(self):
        """A few of those to come, of which at most one is about memory since the journal was begun."""
        chosen, spent = [], bool(ABOUT_MEMORY & {f["kind"] for f in self.past})
        for fault in sorted(self.pending, key=lambda f: f["kind"] in BETWEEN_RUNS):
            about_memory = fault["kind"] in ABOUT_MEMORY
            if len(chosen) == AT_ONCE or (about_memory and spent) or fault["kind"] in {f["kind"] for f in chosen}:
                continue
            if fault["kind"] in BETWEEN_RUNS:
                chosen += [fault] if self.journal.exists() and self.journal.stat().st_size else []
                continue
            spent = spent or about_memory
            chosen.append(fault)
        if not chosen:
            self.fresh = True
            self._begin_anew()
            return self._chosen_first()
        return chosen

    def _chosen_first(self):
        return [f for f in self.pending if f["kind"] not in BETWEEN_RUNS][:1]

    # --- one run ---

    def _run(self, chosen):
        place = self.place / f"run-{self.runs}"
        self.runs += 1
        self.tally.runs += 1
        (place / "tmp").mkdir(parents=True)
        happened = [f for f in chosen if f["kind"] in BETWEEN_RUNS and self._damage(f)]
        options = self._options(chosen)
        faults = [f for f in chosen if f["kind"] not in BETWEEN_RUNS]
        said = {"faults": faults, "card": self.probe.card, "options": options, "probe_kind": self.probe.kind}
        said |= {"seed": self.probe.seed + self.probe.number, "temporary": str(place / "tmp"), "place": str(place)}
        (place / "run.json").write_text(json.dumps(said))
        pid = worker.start(place)
        senders = [Sender(f, pid, place) for f in faults if f["kind"] == "signal"]
        status, moved = None, _Progress(place)
        try:
            while status is None and moved.for_s() < self._watchdog_s:
                for sender in senders:
                    sender.tick()
                done, seen = os.waitpid(pid, os.WNOHANG)
                status = seen if done else None
                _reap_strangers()
                yield
            hung = self._hanging(pid, place) if status is None else ""
        finally:
            if status is None:
                processes.end([pid, *processes.marked(place)])
                os.waitpid(pid, 0)
        report = json.loads((place / "report.json").read_text()) if (place / "report.json").exists() else None
        killed = report is None or any(f["kind"] == "signal" for f in faults)
        left = yield from self._left(place, killed)
        happened += [f for f in faults if _happened(f, place, report, senders)]
        ran = Ran(
            probe=self.probe,
            status=status,
            report=report,
            happened=happened,
            past=list(self.past),
            left=left,
            asked=options,
            calls=(place / "calls").stat().st_size if (place / "calls").exists() else 0,
            confirmed=(place / "confirmed").exists(),
            sent_s={s.fault["signal"]: s.sent_s for s in senders if s.sent_s and s.fault["role"] == "probe"},
        )
        yield from self._judge(ran, hung, place)
        return happened

    def _options(self, chosen):
        options = dict(self.probe.options) | {"journal": str(self.journal)}
        for fault in chosen:
            for name in ("time_limit_s", "trial_time_limit_s"):
                if name in fault:
                    options[name] = fault[name]
        if self.probe.kind == HOST:
            options["steps"], options["confirm_steps"] = 1, 3
        return options

    def _damage(self, fault):
        """Cut the journal, or write over the midst of it."""
        data = bytearray(self.journal.read_bytes())
        if not data:
            return False
        at = int(fault["at"] * len(data))
        data[at:] = b"" if fault["kind"] == "truncated" else bytes(fault["bytes"]) + data[at + len(fault["bytes"]) :]
        self.journal.write_bytes(data)
        return True

    def _left(self, place, killed):
        """Processes that are still there, and temporary files; whoever was killed leaves its own to be ended."""
        until = time.monotonic() + GONE_S[killed]
        while (pids := processes.marked(place)) and time.monotonic() < until:
            _reap_strangers()
            yield from _pause(0.05)
        found = [f"process {pid} ({processes.command_of(pid)[:120]})" for pid in pids]
        processes.end(pids)
        files = sorted(os.listdir(place / "tmp"))
        return found + [f"temporary file {name}" for name in files]

    def _hanging(self, pid, place):
        lines = []
        for one in [pid, *processes.marked(place)]:
            with suppress(OSError):
                wchan = Path(f"/proc/{one}/wchan").read_text()
                lines.append(f"{one} {processes.state_and_parent(one)} {wchan} {processes.command_of(one)[:60]}")
        return "; ".join(lines)

    def _judge(self, ran, hung, place):
        try:
            word = judge.outcome(ran, worker.survives)
        except Violation as violation:
            word = "VIOLATION"
            self._violated(ran, f"{violation} {hung}", place)
        self.past += ran.happened
        for fault in ran.happened:
            self.tally.injected[name_of(fault)] += 1
            self.tally.outcomes[name_of(fault), word] += 1
        if not ran.happened:
            self.tally.outcomes["(none, at the end)", word] += 1
        if word == "VIOLATION" or (ran.report is not None and ran.report["how"] in ("answer", "error")):
            self.fresh = not self._to_be_resumed(ran, word)
        yield

    def _to_be_resumed(self, ran, word):
        """An answered journal is kept where damage is still to be done to it; one that ran out of time is resumed."""
        if word == "VIOLATION" or not self.journal.exists():
            return False
        if word in ("TimeLimitError", "lower, for want of time"):
            return True
        return (
            ran.report["how"] == "answer"
            and bool(ran.happened)
            and any(f["kind"] in BETWEEN_RUNS for f in self.pending)
        )

    def _violated(self, ran, text, place):
        faults = [
            (name_of(f), {k: v for k, v in f.items() if k in ("call", "value", "for_good", "short")})
            for f in ran.happened
        ]
        told = "" if ran.report is None else ran.report.get("traceback", "")[-1500:]
        with suppress(OSError):
            told += f"\n    stderr: {(place / 'err').read_text()[-600:]}"
        where = f"run {self.runs - 1} of a probe {self.probe.kind}, {self.probe.card}, {ran.asked}"
        past = [name_of(f) for f in ran.past]
        self.tally.violations.append(
            (
                self.probe.seed,
                self.probe.number,
                f"{text}\n    {where}\n    faults now: {faults}; before: {past}\n    {told}",
            )
        )


class _Progress:
    """For how long a run has called no step and ended no trial: a slow machine is no hang."""

    def __init__(self, place):
        self._place, self._seen, self._since_s, self._looked_s = place, None, time.monotonic(), 0.0

    def for_s(self):
        now = time.monotonic()
        if now - self._looked_s > 0.2:
            self._looked_s = now
            seen = sorted(os.listdir(self._place)), self._size("calls"), self._size("trials")
            if seen != self._seen:
                self._seen, self._since_s = seen, now
        return now - self._since_s

    def _size(self, name):
        with suppress(OSError):
            return os.stat(f"{self._place}/{name}").st_size
        return 0


def _pause(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        yield


class Sender:
    """Sends one signal, some time after the call that it waits for."""

    def __init__(self, fault, worker_pid, place):
        self.fault, self._worker, self._place = fault, worker_pid, place
        self._due_s, self._held = None, None  # a process that is stopped, and until when
        self.sent_s = None
        self._begun_s = time.monotonic()

    def tick(self):
        now = time.monotonic()
        if self._held is not None and now >= self._held[1]:
            processes.send(self._held[0], signal.SIGCONT)
            self._held = None
        if self.sent_s is not None:
            return
        if self._due_s is None:
            self._due_s = self._when(now)
        elif now >= self._due_s:
            self._send(now)

    def _when(self, now):
        if self.fault["call"] == 0:
            return self._begun_s + self.fault["start_delay_s"]
        with suppress(OSError):
            if os.stat(f"{self._place}/calls").st_size >= self.fault["call"]:
                return now + self.fault["delay_s"]
        return None

    def _send(self, now):
        pid = processes.target_of(self.fault["role"], self._worker, self._place)
        if pid is None or (self.fault["role"] == "probe" and os.path.exists(f"{self._place}/report.json")):
            self._due_s = now + 0.02
            return
        self.sent_s = time.monotonic()
        if not processes.send(pid, signal.Signals[self.fault["signal"]]):
            self.sent_s = None
        elif self.fault["signal"] == "SIGSTOP":
            self._held = pid, now + self.fault["held_s"]


def _happened(fault, place, report, senders):
    if fault["kind"] == "signal":
        sent_s = next(s.sent_s for s in senders if s.fault is fault)
        late = (
            report is not None
            and sent_s is not None
            and (sent_s > report["ended_s"] or fault["signal"] in report["late"])
        )
        return sent_s is not None and not (late and fault["role"] == "probe")
    if fault["kind"] == "time_limit":
        told = report or {}
        ended = any(name.endswith(".TimeLimitError") for name in told.get("classes", ()))
        return ended or any(note.startswith("time limit") for note in told.get("notes", ()))
    if fault["kind"] == "file_limit":
        return "File too large" in json.dumps(report)
    return (place / f"fault-{fault['id']}").exists()


def _reap_strangers():
    """Orphans that have ended, as init does."""
    with suppress(ChildProcessError):
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in worker.started:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)
