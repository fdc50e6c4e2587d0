"""What runs in a process of its own: one tool on one workload, a scan of all sizes, or steps at one size.

    python -m peers.child tool WORKLOAD TOOL
    python -m peers.child scan WORKLOAD
    python -m peers.child survive WORKLOAD SIZE STEPS

Prints one line of JSON.
"""

import json
import os
import statistics
import sys
import time


def tool(workload, name):
    from peers import limits, seen, state, tools

    limit, call = limits.of(workload), tools.TOOLS[name]()
    model = workload.build() if name in tools.BUILD_THEIR_OWN else workload.placed()
    job = tools.Job(workload, model, workload.optimizer(model))
    limit.warm(workload)
    before = state.taken_down(model, job.optimizer)
    answer, error = None, None
    with limit.held(workload.budget_mib):
        if name in tools.BUILD_THEIR_OWN:  # in the place of this one
            model, job = None, tools.Job(workload, None, None)
        in_use = limit.in_use()
        began_s = time.perf_counter()
        try:
            answer = call(job)
        except Exception as raised:
            error = f"{type(raised).__name__}: {' '.join(str(raised).split())[:200]}"
    seen.settled()
    wall_s = time.perf_counter() - began_s
    if isinstance(answer, tools.NotFor):
        return {"not_for": answer.why}
    notes = ()
    if isinstance(answer, tools.Noted):
        answer, notes = answer.answer, answer.notes
    return {
        "answer": answer,
        "error": error,
        "notes": list(notes),
        "wall_s": wall_s,
        "changed": state.changed(before, state.taken_down(model, job.optimizer)),
        "own_model": name in tools.BUILD_THEIR_OWN,
        **{name: max(0, now - in_use[name]) for name, now in limit.in_use().items()},
    }


def scan(workload):
    """Each size from the smallest on, in a fork of one warm process that has seen no failure; forks are forgotten."""
    from peers import limits

    limit, model = limits.of(workload), workload.placed()
    step = workload.step(workload.optimizer(model))
    limit.warm(workload)
    fits, failed_in_a_row, size = [], 0, workload.smallest
    with limit.held(workload.budget_mib):
        while failed_in_a_row < workload.scan_beyond and size <= (workload.examples or 10**6):
            child = os.fork()
            if child == 0:
                os._exit(_survives(model, step, size, workload.scan_steps))
            if os.waitpid(child, 0)[1] == 0:
                fits, failed_in_a_row = [*fits, size], 0
            else:
                failed_in_a_row += 1
            size += 1
    return {"fits": _ranges(fits)}


def _survives(model, step, size, steps):
    sys.stderr.close()
    try:
        for _ in range(steps):
            step(model, size)
    except BaseException:
        return 1
    return 0


def _ranges(sizes):
    ranges = []
    for size in sizes:
        if ranges and ranges[-1][1] == size - 1:
            ranges[-1][1] = size
        else:
            ranges.append([size, size])
    return ranges


def survive(workload, size, steps):
    from peers import limits, seen

    limit, model = limits.of(workload), workload.placed()
    step = workload.step(workload.optimizer(model))
    limit.warm(workload)
    times_s = []
    with limit.held(workload.budget_mib):
        for _ in range(int(steps)):
            began_s = time.perf_counter()
            step(model, int(size))
            seen.settled()
            times_s.append(time.perf_counter() - began_s)
    return {"step_s": statistics.median(times_s), **limit.peak()}


def main():
    from peers import cards

    kind, workload, *arguments = sys.argv[1:]
    result = {"tool": tool, "scan": scan, "survive": survive}[kind](cards.ALL[workload], *arguments)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
