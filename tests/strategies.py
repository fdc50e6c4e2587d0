"""Strategies for results and trials with any values."""

import dataclasses

from hypothesis import strategies as st

from oomprobe.records.epoch import Curve, EpochRecord
from oomprobe.records.fit import LinearFit
from oomprobe.records.notes import NoteKind
from oomprobe.records.timeline import Timeline
from oomprobe.records.trials import Phase, RankTrial, Trial, Verdict
from oomprobe.results.result import SCHEMA_VERSION, ProbeResult
from oomprobe.results.why import TITLES, Explanation
from oomprobe.tape.orders import Reordered
from oomprobe.tape.stacks import Modules

nbytes = st.integers(0, 2**63 - 1)
counts = nbytes | st.just(10**30)
sizes = st.integers(1, 2**63 - 1)
floats = st.floats(-1e30, 1e30)
words = st.text(max_size=30)


def maybe(strategy):
    return st.none() | strategy


BY_TYPE = {
    "bool": st.booleans(),
    "int": counts,
    "float": floats,
    "Bytes": nbytes,
    "Samples": sizes,
    "str": words,
    "Verdict": st.sampled_from(Verdict),
    "Phase": st.sampled_from(Phase),
    "tuple[str, ...]": st.lists(words, max_size=3).map(tuple),
    "tuple[int, ...]": st.lists(counts, max_size=3).map(tuple),
    "Mapping[str, NoteKind]": st.dictionaries(words, st.sampled_from(NoteKind), max_size=3),
    "Mapping[str, Plain]": st.dictionaries(words, maybe(words), max_size=3),
    "Mapping[str, float | None]": st.dictionaries(words, maybe(floats), max_size=3),
}


def built(kind, **chosen):
    """Build a dataclass from strategies for the types of its fields, except those chosen."""
    for f in dataclasses.fields(kind):
        if f.name not in chosen:
            strategy = BY_TYPE[f.type.removesuffix(" | None")]
            chosen[f.name] = maybe(strategy) if f.type.endswith("| None") else strategy
    return st.builds(kind, **chosen)


BY_TYPE["tuple[int | None, ...]"] = st.lists(maybe(sizes), max_size=3).map(tuple)
BY_TYPE["tuple[int, int]"] = st.tuples(counts, counts)
BY_TYPE["Mapping[str, int]"] = st.dictionaries(words, counts, max_size=3)
BY_TYPE["tuple[Curve, ...]"] = st.lists(
    st.tuples(counts, nbytes).map(lambda point: Curve(calls=point[:1], reserved_bytes=point[1:])),
    max_size=3,
).map(tuple)
BY_TYPE["EpochRecord"] = built(EpochRecord)
BY_TYPE["Reordered"] = built(Reordered)
BY_TYPE |= {
    "Mapping[str, str]": st.dictionaries(words, words, max_size=3),
    "Mapping[str, Bytes]": st.dictionaries(words, nbytes, max_size=3),
}
BY_TYPE["tuple[Modules, ...]"] = st.lists(built(Modules), max_size=3).map(tuple)
BY_TYPE["Timeline"] = st.tuples(counts, nbytes, words).map(
    lambda given: Timeline(events=given[:1], live_bytes={given[2]: given[1:2]})
)
BY_TYPE["Explanation"] = built(Explanation, cause=st.sampled_from([*TITLES]))
BY_TYPE["tuple[RankTrial, ...]"] = st.lists(built(RankTrial), max_size=3).map(tuple)
trials = built(Trial, accumulation_steps=st.integers(1, 64))
results = built(
    ProbeResult,
    limited_by=st.sampled_from(["memory", "host_memory", "max_batch", "size_limit"]),
    trials=st.lists(trials, max_size=6).map(tuple),
    fit=maybe(built(LinearFit)),
    options=st.fixed_dictionaries({}, optional={
        "memory_fraction": st.floats(0.01, 1),
        "multiple_of": st.integers(1, 16),
        "global_batch": maybe(st.integers(1, 2**30)),
        "world_size": st.integers(1, 8),
    }),
    breakdown=st.none(),
    world_size=st.integers(1, 8),
    schema_version=st.just(SCHEMA_VERSION),
)  # fmt: skip
