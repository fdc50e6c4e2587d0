"""A group of ranks, seen from the process that searches, which is no rank: so it can always end those that wait.

Each rank is a worker with the environment that torchrun gives its ranks (torch/distributed/elastic/agent), and meets the
others at a store in this process. Nothing about a trial travels through the group or the store.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import wait

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from oomprobe.records.patience import PATIENCE, Patience
from oomprobe.runners.workers.agreement import LATE, TIMED_OUT, WAITED, Answer, has_failed
from oomprobe.runners.workers.messages import Message
from oomprobe.runners.workers.process import TICK_S, Process, end_all

HOST = "127.0.0.1"


class Group:
    """The processes of one group, by rank."""

    def __init__(self, ranks: int, patience: Patience = PATIENCE) -> None:
        """Start the processes, and return while they are still importing torch."""
        # Torch keeps the keys of an earlier group in a store (2.14 adds no prefix), so each group has one of its own.
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
        self._patience = patience
        self.has_run = False  # whether it has run a trial
        self.processes: dict[int, Process] = {}
        try:
            for rank in range(ranks):
                label = f"[rank {rank}] " if rank else ""
                self.processes[rank] = Process.spawned(variables(rank, ranks, self._store.port), label)
        except BaseException:
            self.end()
            raise

    def ask(
        self, messages: Mapping[int, Message], deadline_s: float | None, late_s: Callable[[float], float]
    ) -> dict[int, Answer]:
        """Send each rank its message, and return the answers in the order in which they came.

        Once a rank has failed, the others have `Patience.failing_s`; once one has passed after some seconds, they have `late_s`
        of these. Those that have not answered by then, or by the deadline, are ended, and their exit status says why.
        """
        started_s = time.monotonic()
        for rank, process in self.processes.items():
            process.tell(messages[rank])
        answers: dict[int, Answer] = {}
        enough: dict[int, bool] = {}  # what ranks say that have made a call, while others are still in it
        limits = [] if deadline_s is None else [(deadline_s, TIMED_OUT)]
        while waiting := {rank: one for rank, one in self.processes.items() if rank not in answers}:
            wait([channel for process in waiting.values() for channel in process.channels], TICK_S)
            for rank, process in waiting.items():
                answer = process.poll()
                if isinstance(answer, dict) and "enough" in answer:
                    enough[rank] = answer["enough"]
                elif answer is not None:
                    answers[rank], now_s = answer, time.monotonic()
                    failed = has_failed(answer)
                    failing_s, passed_s = self._patience.failing_s, now_s - started_s
                    limits += [(now_s + failing_s, WAITED) if failed else (now_s + late_s(passed_s), LATE)]
            if len(enough) == len(self.processes):
                for process in self.processes.values():
                    process.tell({"enough": all(enough.values())})
                enough = {}
            late = [rank for rank in waiting if rank not in answers]
            if late and limits and time.monotonic() > min(limits)[0]:
                why = WAITED if any(map(has_failed, answers.values())) else min(limits)[1]
                answers |= zip(late, end_all([waiting[rank] for rank in late], why, self._patience), strict=True)
        self.processes = {rank: one for rank, one in self.processes.items() if isinstance(answers[rank], dict)}
        return answers

    def end(self) -> None:
        """End all its processes at once."""
        end_all([*self.processes.values()])
        self.processes = {}


def variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank, and that tell it where the store is.

    Example:
        >>> found = variables(1, 8, 29500)
        >>> found["LOCAL_RANK"], found["WORLD_SIZE"], found["MASTER_PORT"]
        ('1', '8', '29500')
    """
    threads = {} if "OMP_NUM_THREADS" in os.environ or ranks == 1 else {"OMP_NUM_THREADS": "1"}
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "ROLE_RANK": rank,
        "ROLE_NAME": "default",
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_WORLD_SIZE": 1,
        "ROLE_WORLD_SIZE": ranks,
        "MASTER_ADDR": HOST,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # rank 0 hosts no store
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": "oomprobe",
    }
    return {name: str(value) for name, value in values.items()} | threads
