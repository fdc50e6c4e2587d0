"""How long each part of a probe waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long each part of a probe waits. The values are for real machines; tests hand in shorter ones."""

    # Many calls of a step. Of 162 answers confirmed over 8 calls, 6 failed within 200 calls under the cap; over 15, 2; over 25,
    # 1; over 50, none.
    look_calls: int = 50  # of a look and of a confirmation, if time allows
    look_s: float = 10.0  # time for the calls of each, or as long as the search has taken if that is more
    host_look_s: float = 1.0  # the same on host memory, where calls are slow and answers approximate
    # Where a failure is expensive, a deciding trial keeps calling for this share of its cost: more calls see more, and a failed
    # confirmation costs two failures.
    cost_share: float = 1 / 4

    # Other processes on the device: the first wait for their memory; each further one takes twice as long, up to 16 s.
    neighbour_s: float = 2.0

    # Processes that run trials.
    ending_s: float = 2.0  # between SIGTERM and SIGKILL
    cpu_reading_s: float = 1.0  # between readings of a session's processor time
    stuck_s: float = 10.0  # a starting child that uses no processor time waits for threads that were not forked
    stuck_in_step_s: float = 60.0  # the same inside a step, which may wait for data

    # Several ranks.
    building_s: float = 600.0  # for the other ranks to build the target, once one has
    late_s: float = 300.0  # for the other ranks to end a trial that one has passed; rank 0 alone may save a checkpoint
    failing_s: float = 5.0  # for the other ranks to say that they have failed too, once one has
    returning_s: float = 30.0  # for the memory of a group that was ended to come back

    # Commands.
    failed_s: float = 5.0  # for a command to end by itself after a process of it has failed
    handling_s: float = (
        60.0  # the same after an out-of-memory error that torch may have handled itself, if no step follows
    )
    missing_s: float = 60.0  # for the ranks of other machines to report, after those of this one have made their steps

    sleep: Callable[[float], None] = time.sleep  # for memory that others are to give back


PATIENCE = Patience()
