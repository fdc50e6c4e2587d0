"""Run calls of all values of an axis in turn, as training with a bucket for each value does.

Blocks that one value leaves in the allocator's cache do not fit the next, so sizes that run alone may not run in turn.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import torch

from oomprobe.errors import OomProbeError, TimeLimitError
from oomprobe.ground.allocator_settings import allocator_settings, to_expand
from oomprobe.probing.session import Session
from oomprobe.records.axis import Axis
from oomprobe.records.trials import Trial, Verdict

# Trials in different orders: sizes that ran 50 calls under the cap in one order failed within 200 in four of six others, though the
# process had the whole card (one of 16 tables on torch's CUDA allocator). With half as many calls, one of 33 tables died.
ORDERS = 2
LONG_FACTOR = 2  # times as many calls if a call now and then needs the most memory, since each value must meet it
ROUNDS = 4  # calls of each value, at least
# Of the answers, tried from the top: trials that fail end after a few calls.
SHARES = tuple(1 - part / 16 for part in range(13))
DO_NOT_RUN = (
    "training that meets all values in one process runs out of memory with the batch sizes of the rows (at {label}, in call "
    "{call}): blocks that one value leaves in the allocator's cache do not fit the next. {instead}"
)
LOSES_LESS = ". {setting} loses less"
FEWER = "The mixed sizes, at most {percent:.0f} % of them, ran {calls} calls in random order, {orders} times"
NONE_RUNS = "Nor does any share of them down to {percent:.0f} % run"
NOT_TRIED = "training that meets all values in one process was not tried: {reason}"


def mixed_sizes(
    session: Session, axis: Axis, answers: Mapping[int, int]
) -> tuple[Mapping[int, int], list[str]]:
    """Return the largest share of the answers that runs in turn, by row, and notes about it; no sizes if none was found."""
    calls = session.clock.patience.look_calls
    if session.program.is_long:
        calls *= LONG_FACTOR
    shuffle, rounds = random.Random(0), max(ROUNDS, -(-calls // len(answers)))
    orders = [shuffle.sample([*answers] * rounds, rounds * len(answers)) for _ in range(ORDERS)]
    first: dict[str, object] = {}  # failure, of the answers themselves
    for share in SHARES:
        sizes = {
            row: session.options.sizes.nearest(int(share * size)) for row, size in answers.items()
        }
        session.reporter.row(
            f"all values of {axis.name} in turn, {100 * share:.0f} % of their batch sizes"
        )
        for order in orders:
            try:
                trial = _in_turn(session, [(row, sizes[row]) for row in order])
            except OomProbeError as error:  # the rows stand without it
                return {}, [NOT_TRIED.format(reason=str(error).splitlines()[0])]
            if not trial.passed:
                if not first:
                    first = {
                        "label": axis.label(order[trial.steps % len(order)]),
                        "call": trial.steps + 1,
                    }
                break
        else:
            if not first:
                return sizes, []
            instead = FEWER.format(percent=100 * share, calls=len(orders[0]), orders=ORDERS)
            return sizes, [_note(first, instead)]
    return {}, [_note(first, NONE_RUNS.format(percent=100 * SHARES[-1]))]


def _note(first: Mapping[str, object], instead: str) -> str:
    note = DO_NOT_RUN.format(**first, instead=instead)
    setting = to_expand(allocator_settings(), torch.__version__)
    if not setting:
        return note
    return note + LOSES_LESS.format(setting=setting)


def _in_turn(session: Session, sizes: list[tuple[int, int]]) -> Trial:
    """Run one trial, cold and under the cap, whose calls have these rows and sizes."""
    request = replace(session.program.in_turn(sizes), cap_bytes=session.budget.search_cap())
    trial = session.runner.run(session.with_evidence(request)).trial
    if trial.verdict is Verdict.TIMED_OUT:
        raise TimeLimitError("the time limit passed")
    return trial
