import itertools
import math
import textwrap
from dataclasses import asdict, replace

import pytest
from helpers import same_as_golden
from hypothesis import given, settings
from hypothesis import strategies as st

from oomprobe.records.sizes import Sizes
from oomprobe.records.trials import Phase
from oomprobe.rules.search import Reply, find, look_size, nearness

BILLION = 10**9
MANY = 2_000  # calls; no search over the sizes of these tests needs nearly as many
EVERY_SIZE = Sizes(first=1, last=None, step=1)


def search(
    ask, sizes=EVERY_SIZE, *, capped=True, late=lambda good, bad: False, look=None, **options
):
    return find(ask, sizes, capped=capped, out_of_time=late, look=look, **options)


class Memory:
    """An oracle that records its calls: sizes up to `limit` fit with all the memory, up to `capped_limit` under the cap.

    Calls numbered in `fails_at`, and confirmations of the sizes in `fails_confirming`, fail all the same. A look finds that sizes above
    `late_limit` fail in a later call, as a confirmation does. `more(size, phase)` is what replies say besides.
    """

    def __init__(
        self,
        limit,
        capped_limit=None,
        *,
        shows_peak=False,
        fails_at=(),
        fails_confirming=(),
        late_limit=None,
        tolerance=0.0,
        more=None,
    ):
        self.limit = limit
        self.capped_limit = limit if capped_limit is None else capped_limit
        self.shows_peak, self.fails_at, self.fails_confirming = (
            shows_peak,
            fails_at,
            fails_confirming,
        )
        self.late_limit, self.tolerance, self.more = (
            late_limit,
            tolerance,
            more or (lambda size, phase: {}),
        )
        self.calls, self.looked = [], []

    def __call__(self, size, phase, *, capped):
        assert len(self.calls) < MANY, "the search does not end"
        if self.late_limit is not None and phase is Phase.CONFIRM:
            self.capped_limit = self.late_limit
        passed = size <= (self.capped_limit if capped else self.limit)
        if len(self.calls) in self.fails_at or (
            phase is Phase.CONFIRM and size in self.fails_confirming
        ):
            passed = False
        self.calls.append((size, phase, capped, passed))
        within_cap = passed and self.shows_peak and size <= self.capped_limit
        return Reply(passed=passed, within_cap=within_cap, **self.more(size, phase))

    def look(self, size):
        assert size < self.limit
        self.looked.append(size)
        passed, varies = size <= self.late_limit, self.late_limit < self.limit
        if passed:
            self.limit = self.capped_limit = self.late_limit
        return Reply(passed=passed, varies=varies, tolerance=self.tolerance)

    def trials(self, *phases):
        return [(size, capped) for size, phase, capped, _ in self.calls if phase in phases]

    def confirmed(self, size):
        return any(call[0] == size and call[1] is Phase.CONFIRM and call[3] for call in self.calls)


def largest_up_to(limit, sizes):
    """Return the largest allowed size up to `limit`, or None."""
    top = limit if sizes.last is None else min(limit, sizes.last)
    top -= top % sizes.step
    return top if top >= sizes.first else None


@st.composite
def allowed_sizes(draw, most):
    step = draw(st.integers(1, 64))
    first = draw(st.integers(1, most))
    last = draw(st.none() | st.integers(first + step, most + 2 * step + 64))
    return Sizes.between_limits(first, last, step)


@st.composite
def memories(draw, most):
    limit = draw(st.integers(0, most))
    capped_limit = draw(
        st.just(limit) | st.integers(0, limit) | st.integers(max(0, limit - 3), limit)
    )
    return Memory(limit, capped_limit, shows_peak=draw(st.booleans()))


# --- Sizes ---


@given(st.integers(1, 300), st.none() | st.integers(1, 300), st.integers(1, 40))
def test_limits_are_rounded_inwards_to_multiples(low, high, step):
    sizes = Sizes.between_limits(low, high, step)
    inside = [n for n in range(low, (high or 1000) + 1) if n % step == 0]
    if inside:
        assert sizes.first == inside[0]
        assert high is None or sizes.last == inside[-1]
    else:
        assert sizes.last < sizes.first
    assert (sizes.last is None) == (high is None)


# --- how a command is searched: growing under the cap from a guess, certain failures, two confirmations ---

CERTAIN = {
    "more": lambda size, phase: {"is_certain": True}
}  # an allocator's out-of-memory errors in fresh processes
COMMAND = {"grows_capped": True, "confirmations": 2, "resolution": 1 / 64}


def test_a_command_takes_at_most_14_runs_from_a_guess_up_to_four_times_too_small():
    runs = []
    for limit in range(100, 1001):
        for factor in (1, 2, 3, 4):
            memory = Memory(limit, shows_peak=True, **CERTAIN)
            answer = search(memory, start=limit // factor, **COMMAND).batch_size
            assert limit - limit / 64 - 1 <= answer <= limit
            runs.append(len(memory.calls))
    assert max(runs) <= 14


# --- from the size of another row of a table ---


def test_the_expected_size_changes_the_cost_but_not_the_answer():
    shares = (1 / 16, 1 / 4, 0.9, 1, 1.1, 4, 16)
    for limit, expected, step in itertools.product((1, 2, 3, 17, 100, 1023, 5000), shares, (1, 8)):
        sizes = Sizes(first=step, last=None, step=step)
        alone, from_a_row = Memory(limit * step), Memory(limit * step)
        search(alone, sizes)
        found = search(
            from_a_row, sizes, start=round(expected * limit * step), known=Reply(passed=True)
        )
        assert found.batch_size == limit * step
        assert all(capped for _, _, capped, _ in from_a_row.calls)
        if 0.9 <= expected <= 1.1 and limit > 10:
            assert len(from_a_row.calls) <= 0.65 * len(
                alone.calls
            )  # 0.69 if the strides were as long as the size


# --- exact on every monotone limit ---


STARTS = st.none() | st.integers(1, 2 * BILLION)


@settings(max_examples=300)
@given(
    memories(BILLION),
    allowed_sizes(BILLION),
    st.booleans(),
    STARTS,
    st.booleans(),
    st.integers(1, 2),
)
def test_answer_and_bracket_are_exact_from_any_start(
    memory, sizes, capped, start, grows_capped, confirmations
):
    found = search(
        memory,
        sizes,
        capped=capped,
        start=start,
        grows_capped=grows_capped,
        confirmations=confirmations,
    )
    assert found.batch_size == largest_up_to(memory.capped_limit if capped else memory.limit, sizes)
    assert found.transient == ()
    assert found.unconfirmed in (
        (),
        (sizes.first,),
    )  # the first, when it is the only choice, is left to confirmation
    uncapped = {size: passed for size, _, under_cap, passed in memory.calls if not under_cap}
    assert found.limit == max((size for size, *_, passed in memory.calls if passed), default=None)
    assert found.first_failing == min(
        (size for size, passed in uncapped.items() if not passed), default=None
    )
    if found.limit is not None and found.first_failing is not None:
        assert found.limit < found.first_failing
    if not grows_capped:
        searched = memory.trials(Phase.GROW, Phase.BISECT)
        assert len(searched) == len(set(searched)), "a size ran twice at one cap"
    assert capped or not any(under_cap for _, _, under_cap, _ in memory.calls)
    assert_the_answer_was_run(memory, found, sizes, capped)
    if found.batch_size not in (None, sizes.last):
        assert (found.batch_size + sizes.step, capped) in memory.trials(*Phase)


# --- the number of trials ---


@settings(max_examples=300)
@given(memories(BILLION), st.none() | st.integers(1, BILLION), st.booleans())
def test_a_billion_takes_few_trials(memory, last, capped):
    found = search(memory, Sizes(first=1, last=last, step=1), capped=capped)
    if found.limit is not None:  # the last of the four looks past holes
        assert (
            len(memory.trials(Phase.GROW, Phase.BISECT))
            <= 2 * math.ceil(math.log2(found.limit)) + 4
        )


# --- transient failures ---


@given(memories(2_000), allowed_sizes(2_000), st.booleans())
def test_one_transient_failure_changes_no_answer(memory, sizes, capped):
    capped_limit = memory.capped_limit if capped else memory.limit
    search(memory, sizes, capped=capped)
    before_confirmation = len([1 for call in memory.calls if call[1] is not Phase.CONFIRM])
    for call in range(before_confirmation):
        shaken = Memory(
            memory.limit, memory.capped_limit, shows_peak=memory.shows_peak, fails_at=[call]
        )
        assert search(shaken, sizes, capped=capped).batch_size == largest_up_to(
            capped_limit, sizes
        ), call


# --- confirmation ---


@given(memories(BILLION), allowed_sizes(BILLION), st.data())
def test_a_failed_confirmation_moves_down(memory, sizes, data):
    exact = largest_up_to(memory.capped_limit, sizes)
    if exact is None:
        return
    sound = data.draw(st.integers(sizes.first - 1, exact - 1), label="largest that is confirmed")
    memory.fails_confirming = range(sound + 1, exact + 1)
    found = search(memory, sizes)
    assert found.unconfirmed[0] == exact
    if found.batch_size is None:
        assert (found.deciding, largest_up_to(sound, sizes)) == (sizes.first, None)
    else:
        assert found.batch_size <= largest_up_to(sound, sizes) < found.deciding
        assert found.deciding - found.batch_size <= max(
            sizes.step, found.batch_size / 128 + sizes.step / 2
        )
        assert memory.confirmed(found.batch_size)


class Lengthening(Memory):
    """A late call needs more memory. Trials meet it once a confirmation has, and are as long from then on."""

    is_long = False

    def __call__(self, size, phase, *, capped):
        confirms = phase is Phase.CONFIRM
        self.capped_limit = self.late_limit if confirms or self.is_long else self.limit
        reply = super().__call__(size, phase, capped=capped)
        lengthens = confirms and not reply.passed and not self.is_long
        self.is_long |= lengthens
        return replace(reply, lengthens=lengthens, tolerance=self.tolerance)


@given(st.integers(2, BILLION), allowed_sizes(BILLION), st.data(), st.integers(1, 2), st.booleans())
def test_a_late_failure_is_followed_by_longer_trials(
    limit, sizes, data, confirmations, failures_cost
):
    late = data.draw(st.integers(0, limit - 1), label="late limit")
    tolerance = data.draw(st.sampled_from([0.0, 1 / 32]), label="tolerance")
    memory = Lengthening(limit, late_limit=late, tolerance=tolerance)
    found = search(memory, sizes, confirmations=confirmations, failures_cost=failures_cost)
    if largest_up_to(limit, sizes) is None or largest_up_to(late, sizes) == largest_up_to(
        limit, sizes
    ):
        assert found.unconfirmed in ((), (sizes.first,))
        return
    exact = largest_up_to(late, sizes)
    phases = [phase for _, phase, *_ in memory.calls]
    assert Phase.RECHECK not in phases[phases.index(Phase.CONFIRM) :]  # a pass would prove nothing
    if exact is None:
        assert found.batch_size is None
        return
    assert len(found.unconfirmed) == 1
    assert len(memory.trials(Phase.CONFIRM)) == 1 + confirmations
    assert found.batch_size == found.limit <= exact < found.deciding
    assert found.deciding - found.batch_size <= max(
        sizes.step, found.batch_size / (32 if tolerance else 128)
    )


# --- the look ---


@given(st.integers(2, BILLION), st.data(), st.booleans())
def test_a_look_that_varies_takes_back_what_passed(limit, data, capped):
    late = data.draw(st.integers(1, limit - 1), label="late limit")
    memory = Memory(limit, late_limit=late)
    found = search(memory, capped=capped, look=memory.look)
    assert (found.batch_size, found.limit) == (late, late)
    assert (memory.trials(Phase.RECHECK), found.transient) == ([], ())  # a pass would prove nothing


@given(st.integers(2, BILLION), st.booleans())
def test_a_look_that_does_not_vary_changes_nothing(limit, capped):
    memory, alone = Memory(limit, late_limit=limit), Memory(limit)
    assert search(memory, capped=capped, look=memory.look) == search(alone, capped=capped)
    assert (memory.calls, len(memory.looked)) == (alone.calls, 1)


# --- resolution ---


@given(memories(BILLION), st.floats(0, 0.99))
def test_bisecting_stops_when_the_bracket_is_narrow_enough(memory, resolution):
    found = search(memory, resolution=resolution)
    exact = memory.capped_limit or None
    if exact is None:
        assert found.batch_size is None
        return
    assert memory.confirmed(found.batch_size)
    assert found.batch_size <= exact < found.deciding
    assert found.deciding - found.batch_size <= max(1, resolution * found.batch_size)


# --- arbitrary oracles ---


class Arbitrary:
    """Gives arbitrary replies, but no size above `end` passes."""

    def __init__(self, reply, end):
        self.reply, self.end, self.calls = reply, end, []

    def __call__(self, size, phase, *, capped):
        assert len(self.calls) < MANY, "the search does not end"
        reply = self.reply(len(self.calls), size, phase, capped)
        if size > self.end:
            reply = Reply(passed=False)
        self.calls.append((size, phase, capped, reply.passed))
        return reply


def assert_the_answer_was_run(oracle, found, sizes, capped):
    passed = [
        (size, under_cap)
        for size, phase, under_cap, passed in oracle.calls
        if phase is Phase.CONFIRM and passed
    ]
    if found.batch_size is None:
        assert passed == []
    else:
        assert (found.batch_size, capped) in passed
        assert found.deciding is None or found.deciding > found.batch_size
    for size, *_ in oracle.calls:
        assert size % sizes.step == 0
        assert sizes.first <= size
        assert sizes.last is None or size <= sizes.last


replies = st.builds(
    Reply,
    passed=st.booleans(),
    within_cap=st.booleans(),
    grows_no_further=st.sampled_from([False] * 9 + [True]),
    varies=st.booleans(),
    is_certain=st.booleans(),
    lengthens=st.booleans(),
    tolerance=st.sampled_from([0.0, 1 / 32]),
)


@settings(max_examples=300)
@given(
    st.lists(replies, min_size=1, max_size=60),
    st.sets(st.integers(0, 60), max_size=3),
    allowed_sizes(3_000),
    st.integers(0, 5_000),
    st.booleans(),
    st.booleans(),
    STARTS,
    st.booleans(),
)
def test_any_sequence_of_replies(
    sequence, late_after, sizes, end, capped, looks, start, grows_capped
):
    oracle = Arbitrary(lambda call, *_: sequence[call % len(sequence)], end)
    found = search(
        oracle,
        sizes,
        capped=capped,
        late=lambda good, bad: len(oracle.calls) in late_after,
        look=(lambda size: oracle(size, Phase.GROW, capped=False)) if looks else None,
        start=start,
        grows_capped=grows_capped,
    )
    assert_the_answer_was_run(oracle, found, sizes, capped)


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize(  # growing ends at the hole of the first
    ("holes", "limit"),
    [
        ({1024}, 1100),
        ({1000, 1040}, 1500),
        ({1536}, 2047),
        (set(range(995, 1001)), 2047),
        ({512, 700, 990}, 1000),
    ],
)
def test_the_search_looks_past_holes(holes, limit, capped):
    """Holes are sizes that fail below the limit."""
    oracle = Arbitrary(
        lambda call, size, phase, under_cap: Reply(passed=size <= limit and size not in holes), 4096
    )
    found = search(oracle, capped=capped)
    assert 0.99 * limit <= found.batch_size <= limit
    assert found.batch_size < found.deciding
    assert not found.transient
    assert len(oracle.calls) <= 2 * 11 + 3 + 8  # grow and bisect, rechecks and confirmation, holes
    assert (
        max(size for size, *_ in oracle.calls) <= 2048 * 65 // 64
    )  # little above what failed with all the memory


class LatePorous(Lengthening):
    """Of trials that have become long, sizes fail too that lie below the limit."""

    holes = ()

    def __call__(self, size, phase, *, capped):
        reply = super().__call__(size, phase, capped=capped)
        return replace(reply, passed=reply.passed and not (self.is_long and size in self.holes))


@pytest.mark.parametrize("tolerance", [0.0, 1 / 64, 1 / 32])
@pytest.mark.parametrize("holes", [range(1215, 1221), range(1218, 1224)])
def test_the_search_looks_past_holes_once_trials_are_long(holes, tolerance):
    memory = LatePorous(1300, late_limit=1240, tolerance=tolerance)
    memory.holes = holes
    assert 1240 * (1 - 1 / 128) <= search(memory).batch_size <= 1240


# --- holes at a coarse resolution ---


RESOLUTIONS = [0, 1 / 128, 1 / 64, 0.05]


class Porous(Memory):
    """Some sizes below the limit fail: those in `runs`, which are given as fractions of the limit."""

    def __init__(self, limit, runs=()):
        super().__init__(round(limit / 0.9), limit, shows_peak=True, **CERTAIN)
        self.failing = [(low * limit, high * limit) for low, high in runs]

    def __call__(self, size, phase, *, capped):
        reply = super().__call__(size, phase, capped=capped)
        is_hole = any(low <= size <= high for low, high in self.failing)
        return replace(
            reply, passed=reply.passed and not is_hole, within_cap=reply.within_cap and not is_hole
        )


def answer_of(memory, resolution, start=None):
    """Search like a command if a `start` is given, otherwise as in one process."""
    options = {} if start is None else {**COMMAND, "start": start}
    return search(memory, **{**options, "resolution": resolution}).batch_size


@st.composite
def runs_of_failing_sizes(draw):
    runs, at = [], draw(st.floats(0.3, 0.95))
    while at < 1:
        end = at * (1 + draw(st.floats(0, 1 / 128)))
        runs.append((at, end))
        at = end * (1 + draw(st.floats(1 / 32, 1 / 4)))
    return [(low, high) for low, high in runs if high < 1]


@settings(max_examples=300)
@given(
    st.sampled_from(RESOLUTIONS),
    st.integers(1_000, 2_000_000),
    runs_of_failing_sizes(),
    st.none() | st.floats(0.25, 1.5),
)
def test_no_resolution_stops_below_a_narrow_hole(resolution, limit, runs, guess):
    answer = answer_of(
        Porous(limit, runs), resolution, start=None if guess is None else round(guess * limit)
    )
    assert limit * (1 - resolution - 1 / 64) - 1 <= answer <= limit


def test_a_hole_that_a_replay_has_seen_does_not_run():
    memory = Porous(1300, [(0.98, 0.986)])  # 1274 to 1281
    memory.more = lambda size, phase: {"is_expected": phase is not Phase.RECHECK}
    answer = search(memory).batch_size
    assert answer > 1281
    (decided,) = memory.trials(Phase.RECHECK)
    assert decided[0] > answer


@pytest.mark.parametrize(
    ("largest", "size"), [(1, 1), (8, 1), (64, 4), (256, 16), (512, 16), (1024, 32), (4096, 128)]
)
def test_the_look_is_at_a_thirty_second_of_at_least_16_samples(largest, size):
    assert look_size(EVERY_SIZE, largest) == size


@pytest.mark.parametrize(
    ("expected", "answer", "near"),
    [(100, 100, 1 / 64), (100, 95, 1 / 10), (100, 300, 1 / 4), (100, 10, 1 / 4)],
)
def test_the_first_stride_is_twice_as_far_as_the_last_size_was_off(expected, answer, near):
    assert nearness(expected, answer) == pytest.approx(near)
    memory = Memory(2000)
    search(memory, start=1000, known=Reply(passed=True), near=near)
    assert memory.calls[1][0] == 1000 + int(near * 1000)


# --- which size comes next, written out ---

LOOKED, KNOWN = Reply(passed=True, varies=True, tolerance=1 / 32, guess=70), Reply(passed=True)
FROM_2, FROM_3, FROM_8 = (Sizes(first=step, last=None, step=step) for step in (2, 3, 8))
SEARCHES = {  # the limit with all the memory, under the cap, and what else differs
    "plain": (100, 90, {}),
    "peaks show": (100, 90, {"shows_peak": True}),
    "no cap": (100, 100, {"capped": False}),
    "no margin": (100, 100, {}),
    "multiples of 8": (1000, 900, {"sizes": FROM_8}),
    "a last size": (1000, 900, {"sizes": Sizes(first=1, last=500, step=1)}),
    "from 64": (100, 90, {"start": 64}),
    "from 300": (100, 90, {"start": 300}),
    "from 300 down": (3, 2, {"start": 300, "sizes": Sizes(first=2, last=None, step=1)}),
    "only the first": (1, 1, {}),
    "only the first, which fails under the cap": (1, 0, {}),
    "nothing": (0, 0, {}),
    "nothing under the cap": (5, 0, {}),
    "coarse": (1000, 900, {"resolution": 1 / 16}),
    "coarse, and met exactly": (70, 70, {"resolution": 1 / 4}),
    "growing by 4": (500, 500, {"capped": False, "more": lambda size, phase: {"grows_by": 4 if size < 64 else 2}}),
    "memory is no limit": (BILLION, BILLION, {"more": lambda size, phase: {"grows_no_further": size == 64}}),
    "memory is no limit below a failure":
        (8, 8, {"sizes": FROM_3, "start": 6, "capped": False, "fails_at": [0], "more": lambda size, phase: {"grows_no_further": True}}),
    "failures are certain": (20, 20, {**CERTAIN}),
    "a command": (100, 90, {"start": 32, **COMMAND}),
    "a command from a guess": (20, 20, {"start": 16, "shows_peak": True, **COMMAND, **CERTAIN}),
    "a command from a guess that fails": (20, 20, {"start": 64, "shows_peak": True, **COMMAND, **CERTAIN}),
    "a command that fits nowhere": (0, 0, {"start": 16, **COMMAND, **CERTAIN}),
    "a command, its second confirmation fails":
        (100, 100, {"start": 50, **COMMAND, **CERTAIN, "resolution": 0, "fails_at": [12]}),
    "failures cost": (1000, 900, {"start": 300, "grows_capped": True, "failures_cost": True}),
    "failures cost, near an expected limit": (1000, 1000, {"start": 1000, "known": KNOWN, "failures_cost": True}),
    "near an expected limit": (1000, 900, {"start": 880, "known": KNOWN, "near": 1 / 32}),
    "near the last size": (BILLION, BILLION, {"start": 60, "known": KNOWN, "sizes": Sizes(first=1, last=64, step=1)}),
    "expected far above": (1000, 900, {"start": 1500, "known": KNOWN, "near": 1 / 8}),
    "expected to vary": (1000, 900, {"start": 880, "known": replace(LOOKED, guess=None), "near": 1 / 8}),
    "a look that is steady": (1000, 900, {"look": lambda size: KNOWN}),
    "a look that varies": (1000, 900, {"look": lambda size: replace(LOOKED, guess=700)}),
    "a look that varies, where replays failed":
        (1000, 900, {"look": lambda size: replace(LOOKED, guess=None), "more": lambda size, phase: {"is_expected": phase is Phase.GROW}}),
    "a look that varies, at its own guess": (1000, 900, {"look": lambda size: replace(LOOKED, guess=16)}),
    "a look that varies, expected high": (1000, 900, {"look": lambda size: replace(LOOKED, guess=1200)}),
    "a look that fails": (1000, 900, {"look": lambda size: Reply(passed=size < 4, varies=size < 4, guess=20)}),
    "a look that fails twice": (1500, 1500, {"late_limit": 1}),
    "a look that never passes": (1500, 1500, {"late_limit": 0}),
    "a look that varies, below a last size":
        (1000, 1000, {"look": lambda size: replace(LOOKED, guess=600), "sizes": Sizes(first=1, last=800, step=1)}),
    "a look that varies, where the last size fails":
        (1000, 700, {"look": lambda size: replace(LOOKED, guess=750), "sizes": Sizes(first=1, last=800, step=1)}),
    "a look without failures that are certain": (20, 20, {"look": lambda size: KNOWN, "start": 20, "known": KNOWN}),
    "a look, and failures are certain":
        (20, 20, {"look": lambda size: replace(KNOWN, is_certain=True), "start": 20, "known": KNOWN}),
    "a first failure that passes": (100, 90, {"fails_at": [0]}),
    "a failure that passes": (100, 90, {"fails_at": [10]}),
    "a failure of growing that passes, far below the limit": (500, 500, {"fails_at": [4]}),
    "a failure that passes, as the step varies":
        (11, 11, {"fails_at": [8], "more": lambda size, phase: {"varies": phase is Phase.RECHECK}}),
    "a failed confirmation": (1000, 900, {"fails_confirming": (900, 893)}),
    "a failed confirmation, from which trials are longer":
        (1000, 900, {"fails_confirming": (900,), "more": lambda size, phase: {"lengthens": phase is Phase.CONFIRM}}),
    "a failed confirmation of the first": (1, 1, {"fails_confirming": (1,)}),
    "a failed confirmation of the first that passes": (2, 2, {"sizes": FROM_2, "fails_at": [4]}),
    "no time": (1000, 900, {"late": lambda good, bad: bad - good < 100}),
    "no time for holes": (1111, 1000, {"late": lambda good, bad: True, "shows_peak": True, "resolution": 1 / 64}),
}  # fmt: skip
OF_MEMORY = ("shows_peak", "fails_at", "fails_confirming", "late_limit", "more")


def test_which_size_comes_next():
    """Each trial: the phase's letter, the size, whether it ran, and ' under the cap."""
    lines = []
    for name, (limit, capped_limit, options) in SEARCHES.items():
        memory = Memory(
            limit, capped_limit, **{key: options[key] for key in OF_MEMORY if key in options}
        )
        options = {key: value for key, value in options.items() if key not in OF_MEMORY}
        if memory.late_limit is not None:
            options["look"] = memory.look
        answer = search(memory, **options)
        tried = [
            f"{phase.value[0]}{size}{'+' if passed else '-'}{chr(39) if capped else ''}"
            for size, phase, capped, passed in memory.calls
        ]
        found = {
            key: value
            for key, value in {**asdict(answer), "looked": memory.looked}.items()
            if value not in (None, (), [])
        }
        lines += [
            f"{name}: {found}",
            *textwrap.wrap(" ".join(tried), 96, initial_indent="    ", subsequent_indent="    "),
        ]
    same_as_golden("\n".join(lines) + "\n", "searches.txt")
