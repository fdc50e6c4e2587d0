"""The processes that run one trial together: one, or a rank each.

The process that searches is none of them, so it can always end those that wait. Each rank is a worker with the environment that
torchrun gives its ranks (torch/distributed/elastic/agent), and meets the others at a store in this process. Nothing about a trial
travels through the process group or the store.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait

from oomprobe.records.patience import PATIENCE, Patience
from oomprobe.records.trials import Call, CallRecord
from oomprobe.rules.look import Records
from oomprobe.runners.workers.exit_status import ExitStatus
from oomprobe.runners.workers.messages import Further, Message, Shown
from oomprobe.runners.workers.process import TICK_S, Idle, Process, end_all
from oomprobe.runners.workers.settling import (
    LATE,
    STUCK,
    TIMED_OUT,
    WAITED,
    Answer,
    has_failed,
    of_kind,
)

STORE_HOST = "127.0.0.1"
# Where gloo, NCCL and torch's RPC listen; otherwise on the interface that has the machine's name.
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
# Others have a patience's time to end a trial that one rank has passed, or this many times as long as that one took.
LATE_FACTOR = 10.0

FurtherOfRanks = Callable[
    [Sequence[Records]], Sequence[Call]
]  # from what every rank has shown, the calls that follow


def no_further(ranks: Sequence[Records]) -> Sequence[Call]:
    """Return no calls: for what is no trial."""
    return ()


class Crew:
    """The processes that run one trial, by rank. `store` is where ranks meet."""

    def __init__(
        self, processes: Mapping[int, Process], store: object = None, patience: Patience = PATIENCE
    ) -> None:
        self.processes, self._store, self._patience = dict(processes), store, patience
        self.has_run = False  # whether it has run a trial

    @classmethod
    def forked(cls, serve: Callable[[Connection], None], patience: Patience = PATIENCE) -> Crew:
        """Fork this process once."""
        return cls({0: Process.forked(serve, patience=patience)}, patience=patience)

    @classmethod
    def spawned(cls, ranks: int | None = None, patience: Patience = PATIENCE) -> Crew:
        """Start a worker, or one for each rank, and return while they are still importing torch."""
        if ranks is None:
            return cls({0: Process.spawned(patience=patience)}, patience=patience)
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        # Torch keeps the keys of an earlier group in a store (2.14 adds no prefix), so each crew has one of its own.
        # Given a port, torch would listen on all addresses of this machine.
        listening = socket.create_server((STORE_HOST, 0))
        store = TCPStore(
            STORE_HOST,
            listening.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=30),
            master_listen_fd=listening.detach(),
            use_libuv=False,  # torch 2.6 takes no listening socket with it
        )
        crew = cls({}, store, patience)
        try:
            for rank in range(ranks):
                label = f"[rank {rank}] " if rank else ""
                crew.processes[rank] = Process.spawned(
                    variables(rank, ranks, store.port), label, patience
                )
        except BaseException:
            crew.end()
            raise
        return crew

    def ask(
        self,
        messages: Mapping[int, Message],
        deadline_s: float | None,
        *,
        late_s: float | None = None,
        stuck_s: float | None = None,
        further: FurtherOfRanks = no_further,
    ) -> dict[int, Answer]:
        """Send each rank its message, if there is one, and return the answers in the order in which they came.

        Once a rank has failed, the others have a short time; once one has passed, they have `late_s`, or by default a multiple of what
        it took. Those that have not answered by then or by the deadline are ended, and so is one that uses no processor time for
        `stuck_s`; their exit status says why. Once every rank has shown its calls, all go on with the calls that are `further`.
        """
        started_s = time.monotonic()
        for rank, message in messages.items():
            self.processes[rank].tell(message)
        idle = {
            rank: Idle(process.session, self._patience.cpu_reading_s, stuck_s)
            for rank, process in self.processes.items()
        }
        agreement = _Agreement([*self.processes.values()], further)
        answers: dict[int, Answer] = {}
        if deadline_s is None:
            deadline_s = math.inf
        limit = deadline_s, TIMED_OUT
        while len(answers) < len(self.processes):
            waiting = {
                rank: process for rank, process in self.processes.items() if rank not in answers
            }
            wait([channel for process in waiting.values() for channel in process.channels], TICK_S)
            for rank, process in waiting.items():
                answer = process.poll()
                if isinstance(answer, Shown):
                    agreement.add(rank, answer.records)
                elif answer is not None:
                    answers[rank] = answer
                    took_s = time.monotonic() - started_s
                    limit = min(limit, self._limit_others(answer, took_s, late_s))
                elif idle[rank].is_too_long:
                    answers[rank] = process.end(STUCK)
            until_s, why = limit
            if time.monotonic() > until_s:
                self._end_late(answers, why)
        for rank in of_kind(ExitStatus, answers):
            del self.processes[rank]
        return answers

    def _end_late(self, answers: dict[int, Answer], why: str) -> None:
        """End the processes that have not answered, and add their exit status to the answers."""
        late = [rank for rank in self.processes if rank not in answers]
        if not late:
            return
        if any(map(has_failed, answers.values())):
            why = WAITED
        statuses = end_all([self.processes[rank] for rank in late], why, self._patience)
        answers |= zip(late, statuses, strict=True)

    def _limit_others(
        self, answer: Answer, took_s: float, late_s: float | None
    ) -> tuple[float, str]:
        """Return until when the other ranks may go on after one has answered, and what they are then ended for."""
        if has_failed(answer):
            return time.monotonic() + self._patience.failing_s, WAITED
        if late_s is None:
            late_s = max(self._patience.late_s, LATE_FACTOR * took_s)
        return time.monotonic() + late_s, LATE

    def end(self) -> None:
        """End all its processes at once."""
        end_all([*self.processes.values()])
        self.processes = {}


class _Agreement:
    """The ranks' agreement on how a trial goes on: once all have shown their calls, all make the calls that are `further`."""

    def __init__(self, processes: Sequence[Process], further: FurtherOfRanks) -> None:
        self._processes, self._further = processes, further
        self._shown: dict[int, list[CallRecord]] = defaultdict(list)  # by each rank in this trial
        self._asking: set[int] = set()  # ranks that wait for further calls

    def add(self, rank: int, records: Iterable[CallRecord]) -> None:
        """Add what a rank shows, and answer all ranks once each of them waits."""
        self._shown[rank] += records
        self._asking.add(rank)
        if len(self._asking) < len(self._processes):
            return
        calls = self._further([self._shown[rank] for rank in sorted(self._shown)])
        for process in self._processes:
            process.tell(Further(calls=tuple(calls)))  # if there are none, the trial ends
        self._asking.clear()


def variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank, and those that keep it on this machine.

    Examples:
        >>> values = variables(1, 8, 29500)
        >>> values["LOCAL_RANK"], values["WORLD_SIZE"], values["MASTER_PORT"]
        ('1', '8', '29500')
    """
    values: dict[str, object] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "ROLE_RANK": rank,
        "ROLE_NAME": "default",
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_WORLD_SIZE": 1,
        "ROLE_WORLD_SIZE": ranks,
        "MASTER_ADDR": STORE_HOST,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # rank 0 hosts no store
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": "oomprobe",
    }
    defaults: dict[str, object] = dict.fromkeys(INTERFACES, "lo")
    if ranks > 1:
        defaults["OMP_NUM_THREADS"] = 1
    values |= {name: value for name, value in defaults.items() if name not in os.environ}
    return {name: str(value) for name, value in values.items()}
