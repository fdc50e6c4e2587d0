"""Probes and the faults they are to meet, drawn from a seed: the same seed and number, the same probe."""

import random
from dataclasses import dataclass, replace

from soaking.ledger import MIB

HERE, ISOLATED, HOST = "here", "isolated", "host"
KINDS = (HERE,) * 64 + (ISOLATED,) * 31 + (HOST,) * 5
DEADLY = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM")
# What makes one trial fail, or one answer of the device untrue. A probe rechecks its deciding failure once, so there is
# at most one of these between two fresh starts.
ABOUT_MEMORY = {"oom", "leak", "neighbour", "lie"}
IN_FILE = {"disk_full", "sync_fails", "slow_store", "file_limit"}
PLANTS = ("process", "file", "open file", "flag", "hang", "answer", "exception")
BETWEEN_RUNS = {"truncated", "garbled"}  # of the journal


@dataclass(frozen=True)
class Probe:
    number: int
    seed: int
    kind: str
    card: dict
    options: dict
    faults: tuple


def probe(seed, number, faults_each):
    """Draw one."""
    draw = random.Random(f"{seed}/{number}")
    kind = KINDS[(number * 37) % len(KINDS)]  # 37 and 100 share no factor: kinds are mixed, and each has its share
    total = draw.randint(200, 4000) * MIB
    card = {
        "total": total,
        "fixed": draw.randint(1, total // 10),
        "per_sample": draw.randint(total // 3000 + 1, total // 20),
        "stair": draw.choice((0, total // 100)),
        "stride": draw.randint(2, 9),
    }
    options = {"memory_fraction": draw.choice((0.5, 0.9, 0.9, 1.0)), "multiple_of": draw.choice((1, 1, 1, 2, 3))}
    options["min_batch"] = draw.choice((1, 1, 2, 5))
    if draw.random() < 0.2:
        options["max_batch"] = draw.randint(8, 400)
    if kind == HOST:
        options = {"memory_fraction": 0.9, "min_batch": 64, "multiple_of": 64}
    faults = tuple(_fault(draw, kind) | {"id": index} for index in range(faults_each))
    return Probe(number=number, seed=seed, kind=kind, card=card, options=options, faults=faults)


def planted(seed, what):
    """A probe that does what none may, for tests of the judge."""
    return replace(probe(seed, 0, 0), faults=({"id": 0, "kind": "plant", "what": what, "call": 3},))


def _fault(draw, kind):
    makers = {
        HERE: (
            _signal,
            _signal,
            _oom,
            _leak,
            _neighbour,
            _lie,
            _lie,
            _disk,
            _disk,
            _slow,
            _journal,
            _journal,
            _limit,
            _hang,
        ),
        ISOLATED: (_signal, _signal, _signal, _signal, _garble, _garble, _oom, _lie, _disk, _journal, _limit, _hang),
        HOST: (_signal, _signal, _signal, _garble, _oom, _disk, _journal),
    }
    return draw.choice(makers[kind])(draw, kind)


def _call(draw, kind):
    return draw.choice((1, draw.randint(1, 12), draw.randint(1, 60)))


def _signal(draw, kind):
    role = "probe" if kind == HERE else draw.choice(("probe", "probe", "template", "child", "child", "grandchild"))
    return {
        "kind": "signal",
        "role": role,
        "signal": draw.choice((*DEADLY, "SIGINT", "SIGINT", "SIGSTOP")),
        "call": draw.choice((0, _call(draw, kind), _call(draw, kind))),
        "delay_s": draw.uniform(0, 0.02 if kind == HERE else 0.3),
        "start_delay_s": draw.uniform(0, 0.03 if kind == HERE else 4.0),
        "held_s": draw.uniform(0.01, 1.0),
        "detached": draw.random() < 0.5,
    }


def _garble(draw, kind):
    return {
        "kind": "garble",
        "call": _call(draw, kind),
        "said": draw.choice(("garbage", "half", "short", "checksum")),
        "bytes": [draw.randrange(256) for _ in range(draw.randint(1, 40))],
        "then": draw.choice(("go on", "exit", "die")),
    }


def _oom(draw, kind):
    return {"kind": "oom", "call": _call(draw, kind)}


def _hang(draw, kind):
    return {"kind": "hang", "call": _call(draw, kind), "trial_time_limit_s": 0.3 if kind == HERE else 2.0}


def _leak(draw, kind):
    return {"kind": "leak", "call": _call(draw, kind), "bytes": draw.choice((2, 5, 40, 400)) * MIB}


def _neighbour(draw, kind):
    return {
        "kind": "neighbour",
        "call": _call(draw, kind),
        "calls": draw.choice((1, 3, 10, 1000)),
        "share": draw.uniform(0.03, 0.6),
    }


def _lie(draw, kind):
    return {
        "kind": "lie",
        "method": draw.choice(("usage", "available_bytes", "outside_bytes", "live_bytes")),
        "value": draw.choice(("zero", "negative", "huge", "none", "raise")),
        "call": draw.choice((1, draw.randint(1, 20))),
        "for_good": draw.random() < 0.4,
    }


def _disk(draw, kind):
    if draw.random() < 0.25:
        return {"kind": "file_limit", "call": 0, "bytes": draw.randint(0, 6000)}
    return {
        "kind": draw.choice(("disk_full", "disk_full", "sync_fails")),
        "call": draw.choice((1, draw.randint(1, 30))),
        "short": draw.random() < 0.5,
        "for_good": draw.random() < 0.5,
    }


def _slow(draw, kind):
    return {"kind": "slow_store", "call": draw.randint(1, 10), "sleep_s": draw.uniform(0.001, 0.02), "for_good": True}


def _journal(draw, kind):
    return {
        "kind": draw.choice(("truncated", "garbled")),
        "call": 0,
        "at": draw.random(),
        "bytes": [draw.randrange(256) for _ in range(draw.randint(1, 60))],
    }


def _limit(draw, kind):
    longest = 0.2 if kind == HERE else 8.0
    return {"kind": "time_limit", "call": 0, "time_limit_s": draw.uniform(0.001, longest)}
