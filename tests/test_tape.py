"""Calls cut from torch's memory history, what is predicted from their bare sizes, and what recorded stacks say."""

from pathlib import Path

import pytest

import oomprobe
from oomprobe.tape.calls import (
    ALLOCATED,
    FREED,
    KERNEL,
    RELEASED,
    SWITCHED,
    Kernel,
    RecordedCall,
    peak_bytes,
    reducing,
)
from oomprobe.tape.fit import Predictor, borrow_slopes, lines_through, recognize_reductions
from oomprobe.tape.history import Live
from oomprobe.tape.record import POOLS, STREAMS, NotRecorded, cut_calls, record_calls
from oomprobe.tape.reductions import Processors, Reduction, buffers
from oomprobe.tape.shapes import (
    Growth,
    Growths,
    ShapedTape,
    Structure,
    features,
    kinds_of_polynomials,
    learn_row,
    lines_of_row,
    take_kernels_out,
)
from oomprobe.tape.stacks import UNKNOWN, Modules, Stacks
from oomprobe.tape.timeline import gaps_of

A100 = Processors((8, 0), 108, 2048)


def asked(address, size, stream=0, **more):
    return {"action": "alloc", "addr": address, "size": size, "stream": stream, **more}


def freed(address):
    return [
        {"action": action, "addr": address, "size": 0, "stream": 0}
        for action in ("free_requested", "free_completed")
    ]


GAVE_BACK = {"action": "segment_free", "addr": 7, "size": 0, "stream": 0}
MADE = {"action": "segment_alloc", "addr": 7, "size": 0, "stream": 0}


def test_a_history_is_cut_where_calls_end():
    entries = [
        *(MADE, asked(1, 10), asked(2, 20), *freed(1)),
        *(*freed(2), asked(1, 30), *freed(100), *freed(1)),
        asked(3, 40),  # after the last call
    ]
    parts = cut_calls(entries, [(2, 1), (3, 4)])
    first, second = record_calls(parts, [99, 100], may_retry=False)
    assert first == RecordedCall(((ALLOCATED, 0, 0), (ALLOCATED, 1, 0), (FREED, 0, 0)), (10, 20))
    # The second block of the call before, and the second of those before the trial.
    assert second.events == ((FREED, 1, 1), (ALLOCATED, 0, 0), (FREED, 0, 0), (FREED, 2, 1))
    assert second.sizes == (30,)


@pytest.mark.parametrize(("may_retry", "events"), [(False, [(RELEASED, 0, 0)]), (True, [])])
def test_only_a_step_that_meets_no_retry_gives_back_segments(may_retry, events):
    entries = [asked(2, 10), GAVE_BACK, GAVE_BACK, asked(1, 10)]
    [call] = record_calls([entries], [], may_retry=may_retry)
    assert [*call.events] == [(ALLOCATED, 0, 0), *events, (ALLOCATED, 1, 0)]


def test_a_stream_is_switched_to_once():
    [call] = record_calls([[asked(1, 10, 5), asked(2, 20, 5)]], [], may_retry=False)
    assert call.events == ((SWITCHED, 5, 0), (ALLOCATED, 0, 0), (ALLOCATED, 1, 0))


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([asked(1, 10), freed(1)[0], asked(2, 10), freed(1)[1]], STREAMS),
        ([asked(1, 10, pool_id=(0, 1))], POOLS),
    ],
)
def test_what_a_tape_cannot_tell_is_refused(entries, why):
    with pytest.raises(NotRecorded, match=why):
        record_calls([entries], [], may_retry=False)


# --- bare sizes ---


def linear(batch_size, *, with_pair=True):
    """Return the backward of a linear layer of 1024 columns: its input's and bias's gradients, as an A100's history has them."""
    events, sizes = [(ALLOCATED, 0, 0), (ALLOCATED, 1, 0)], [4096 * batch_size, 4096]
    kind = Reduction(A100, 4, 4, (True, False))
    pairs = buffers(kind, (batch_size, 1024), (1024, 1), 0)
    for pair in pairs if with_pair else ():
        sizes += pair
        events += [(ALLOCATED, 2, 0), (ALLOCATED, 3, 0), (FREED, 0, 2), (FREED, 0, 3)]
    events += [(FREED, 0, 0), (FREED, 0, 1)]
    return RecordedCall(tuple(events), tuple(sizes))


@pytest.mark.parametrize("recorded", [4096, 20_000])
@pytest.mark.parametrize("size", [2, 3000, 8192, 40_000])
def test_scratch_of_reductions_follows_its_rule(recorded, size):
    """A large size shows the scratch that small ones do not have."""
    assert len(linear(2).sizes) == 2 < len(linear(recorded).sizes)
    lines = lines_through(1, [linear(1)], 2, [linear(2)])
    assert lines[0].at(recorded) != linear(recorded)
    [line] = borrow_slopes(
        lines, recorded, [recognize_reductions(linear(recorded), recorded, A100)]
    )
    assert peak_bytes([line.at(size)]) == peak_bytes([linear(size)])


@pytest.mark.parametrize("rows", [2, 3000, 8192, 40_000])
def test_scratch_of_reductions_follows_shapes(rows):
    tape = ShapedTape(A100)
    ran = [1, 4096, 2, 20_000, 8000, 640]
    tape.learn([("step", (number,)) for number in ran], [*map(linear, ran), linear(1)])
    assert tape.structures == 1
    predicted = tape.call("step", (rows,), 2)
    assert peak_bytes([predicted]) == peak_bytes([linear(rows)])
    assert predicted.closed


@pytest.mark.parametrize(("item_bytes", "result_bytes"), [(4, 4), (2, 4), (2, 2)])
def test_a_reduction_is_recognized_by_its_scratch(item_bytes, result_bytes):
    rows, columns = 20_000, 1024
    kind = Reduction(A100, item_bytes, 4, (True, False))
    [pair] = buffers(kind, (rows, columns), (columns, 1), 0)
    events = [(ALLOCATED, index, 0) for index in range(4)] + [(FREED, 0, 3), (FREED, 0, 2)]
    sizes = (item_bytes * columns * rows, result_bytes * columns, *pair)
    known = recognize_reductions(RecordedCall((*events, (FREED, 0, 0)), sizes), 100, A100)
    kernel = Kernel(reducing, (kind,), 5)
    assert known.events == (*events[:2], (KERNEL, 4, (kernel, 0)), (FREED, 0, 0))
    assert known.sizes == (*sizes[:2], 0, 0, 0, rows, columns, columns, 1)
    for changed in ({"sizes": (*sizes[:3], pair[1] + 4)}, {"events": (*events[:4], (FREED, 0, 2))}):
        other = RecordedCall(**{"events": (*events,), "sizes": sizes} | changed)
        assert recognize_reductions(other, 100, A100) == other
    assert recognize_reductions(RecordedCall((*events,), sizes), 7, A100).sizes == sizes


def test_a_workspace_grows_no_faster_than_the_batch():
    predictor = Predictor()
    assert predictor.workspace_at(5) == 0
    predictor.workspace_bytes = {16: 300, 8: 100}
    found = {size: predictor.workspace_at(size) for size in (1, 8, 12, 13, 16, 32)}
    assert found == {1: 100, 8: 100, 12: 150, 13: 163, 16: 300, 32: 600}


def test_a_size_off_its_line_moves_the_lines():
    """As a padded shape does: the next prediction starts from the largest size that ran."""

    def padded(batch_size):
        rows = -(-batch_size // 64) * 64
        return RecordedCall(((ALLOCATED, 0, 0), (FREED, 0, 0)), (1000 * rows,))

    predictor = Predictor(processors=A100)
    for size in (1, 2, 640):
        assert predictor.learn(size, ["step"] * 3, [padded(size)] * 3)
    assert predictor.reason == ""
    assert predictor.calls(640, ["step"]) == [padded(640)]
    assert predictor.calls(1280, ["step"])[0].sizes >= padded(640).sizes


@pytest.mark.parametrize("where", [0, 1, 2, 3])
def test_a_thread_that_frees_a_block_later_changes_no_line(where):
    """As NCCL's does with the buffer through which DDP copies a model."""

    def calls(size, where):
        """Return a call of a step that frees a block of an earlier one somewhere, and two without."""
        events = [(ALLOCATED, 0, 0), (ALLOCATED, 1, 0), (FREED, 0, 0), (FREED, 0, 1)]
        plain = RecordedCall(tuple(events), (1000 * size, 10))
        events.insert(where, (FREED, 1, 7))
        return [RecordedCall(tuple(events), (1000 * size, 10)), plain, plain]

    predictor = Predictor(processors=A100)
    for size, place in ((1, 2), (2, where)):
        assert predictor.learn(size, ["step"] * 3, calls(size, place))
    assert peak_bytes(predictor.calls(50, ["step"] * 4)) == 50_010


def test_micro_batches_are_predicted_in_turn():
    def calls(size):
        """Return two full steps of three micro-batches."""
        return [
            RecordedCall(((ALLOCATED, 0, 0), (FREED, 0, 0)), (n * size,)) for n in (5, 1, 2) * 2
        ]

    predictor = Predictor(processors=A100)
    for size in (1, 2):
        assert predictor.learn(size, ["step"] * 6, calls(size))
    assert predictor.period == 3
    assert [call.sizes for call in predictor.calls(10, ["step"] * 7)] == [
        *[(50,), (10,), (20,)] * 2,
        (50,),
    ]


def test_requests_are_numbered_anew_where_kernels_are_taken_out():
    kernel = Kernel(reducing, (Reduction(A100, 4, 4, (True, False)),), 5), 0
    events = [(ALLOCATED, 0, 0), (KERNEL, 1, kernel), (ALLOCATED, 6, 0), (FREED, 0, 6)]
    earlier = (FREED, 1, 6), (FREED, 0, 0)
    call = RecordedCall((*events, *earlier), (10, 0, 7, 8, 9, 1, 30))
    plain, kernels = take_kernels_out(call)
    assert plain.events == ((ALLOCATED, 0, 0), (ALLOCATED, 1, 0), (FREED, 0, 1), *earlier)
    assert plain.sizes == (10, 30, 0, 7, 8, 9, 1)
    assert kernels == {0: (KERNEL, 2, kernel)}


def test_calls_of_another_structure_lend_their_kernels():
    events = (ALLOCATED, 0, 0), (ALLOCATED, 1, 0)
    kernel = Kernel(reducing, (Reduction(A100, 4, 4, (True, False)),), 5)
    lender, borrower = Structure(events), Structure((*events, (FREED, 0, 0)))
    for rows in (1000, 2000, 4000):
        call = RecordedCall(events, (4096 * rows, 4096, 0, rows, 1024, 1024, 1))
        lender.learn((rows,), call, {1: (KERNEL, 2, (kernel, 0))})
    lender.fit()
    borrower.learn((2000,), RecordedCall(borrower.events, (4096 * 2000, 4096)), {})
    borrower.borrow([lender])
    assert borrower.call((3000,)).sizes == (4096 * 3000, 4096, 0, 3000, 1024, 1024, 1)


def test_polynomials_have_the_fewest_terms_first():
    assert features((4, 8, 9)) == [1, 8, 9, 64, 72, 81, 4, 32, 36, 256, 288, 324]
    assert features((4, 9), 8) == [1, 16, 256, 4, 64, 1024]
    *few, linear, every = kinds_of_polynomials((4, 8, 9))
    assert few == [[term] for term in range(12)] + [[0, term] for term in range(1, 12)]
    assert (linear, every) == ([0, 1, 2, 6, 7, 8], [*range(12)])


@pytest.mark.parametrize("count", [4, 12, 22, 31])
def test_calls_between_evaluations_are_alike_and_those_from_one_to_the_next_repeat(count):
    def asked(size, number):
        return (50 * size,) if number % 10 == 0 else (7 * size,)

    def calls(size):
        # The first makes the optimizer's state.
        sizes = [(900,), *(asked(size, number) for number in range(2, count + 1))]
        return [RecordedCall(((ALLOCATED, 0, 0), (FREED, 0, 0)), asked) for asked in sizes]

    predictor = Predictor(processors=A100)
    for size in (1, 2):
        assert predictor.learn(size, ["step"] * count, calls(size))
    assert predictor.period == (10 if count > 20 else 1)
    later = predictor.calls(3, ["step"] * 45)[1:]
    met = 45 if count > 20 else count  # those of one evaluation say nothing of the next
    assert [call.sizes for call in later[: met - 1]] == [asked(3, n) for n in range(2, met + 1)]


# --- rows of a table ---


def of_row(batch_size, length):
    """Return a call with requests for weights, activations, scores and their mask."""
    sizes = (7000, 40 * batch_size * length, 4 * batch_size * length**2, length**2)
    events = [(ALLOCATED, index, 0) for index in range(len(sizes))]
    return RecordedCall((*events, *[(FREED, 0, index) for index in range(len(sizes))]), sizes)


def predictor_of(length, call_of=of_row, sizes=(1, 2)):
    predictor = Predictor(processors=A100)
    for size in sizes:
        assert predictor.learn(size, ["step"] * 3, [call_of(size, length)] * 3)
    return predictor


def following(rows, value):
    """Return the lines of a row by those of others, which are given as (value, call, sizes)."""
    growths, last = Growths(Growth), ()
    for row, made, sizes in rows:
        last = predictor_of(row, made, sizes).lines
        learn_row(growths, row, last)
    return lines_of_row(growths, last, value)


def test_two_rows_tell_what_another_asks_for():
    """Though half the batch of twice the length has as many samples, and as large activations."""
    rows = [(128, of_row, (4, 8)), (256, of_row, (2, 4))]
    assert following(rows[:0], 512) is following(rows[:1], 512) is None
    row = predictor_of(128).following(following(rows, 512))
    assert row.calls(3, ["step"] * 8) == [of_row(3, 512)] * 8


def test_a_row_that_makes_other_requests_follows_from_none():
    def longer(batch_size, length):
        call = of_row(batch_size, length)
        return RecordedCall((*call.events, (ALLOCATED, 4, 0), (FREED, 0, 4)), (*call.sizes, 10))

    rows = [(128, of_row, (1, 2)), (256, longer, (1, 2)), (384, of_row, (1, 2))]
    assert following(rows[:2], 512) is None
    assert following(rows, 512) is not None


def test_a_trial_of_a_row_that_grows_otherwise_corrects_it():
    """As a step whose lengths are powers of what the table names."""

    def of_power(batch_size, power):
        return of_row(batch_size, 2**power)

    lines = following([(power, of_power, (1, 2)) for power in (5, 6)], 7)
    row = predictor_of(5, of_power).following(lines)
    assert row.calls(8, ["step"]) != [of_power(8, 7)]
    assert row.learn(8, ["step"] * 3, [of_power(8, 7)] * 3)
    assert row.calls(8, ["step"]) == [of_power(8, 7)]
    grown = row.calls(100, ["step"])[0].sizes
    assert grown[:3] == pytest.approx(of_power(100, 7).sizes[:3], rel=0.001)


# --- what a recording shows ---


def test_gaps_lie_between_the_live_blocks_of_a_segment():
    live = {at * 2**20: Live(2**20 - 100, 0, ()) for at in (9, 10, 12, 15, 30)}
    gaps = gaps_of(10 * 2**20, 20 * 2**20, live)
    assert [at / 2**20 for at in gaps.starts] == [1, 3, 6]
    assert [nbytes / 2**20 for nbytes in gaps.gap_bytes] == [1, 2, 14]


OWN = str(Path(oomprobe.__file__).parent)
ENGINE = ("torch::autograd::Engine::evaluate_function", "engine.cpp")
OF_MM = ("torch::autograd::generated::MmBackward0::apply", "Functions.cpp")
CALL, FORWARD = ("_wrapped_call_impl", "/torch/nn/modules/module.py"), ("forward", "/me/net.py")
TRAIN = ("main", "/me/train.py")


def stack(*places):
    named = enumerate(places, 1)
    return [{"name": name, "filename": file, "line": line} for line, (name, file) in named]


@pytest.mark.parametrize(
    ("places", "kind", "line"),
    [
        ((), UNKNOWN, UNKNOWN),
        ((OF_MM, ENGINE, TRAIN), "backward", "backward of Mm"),
        ((ENGINE, TRAIN), "backward", "backward"),
        ((("at::cuda::getCUDABlasLtWorkspace", "x.cpp"), OF_MM), "workspaces of libraries", "workspaces of libraries"),
        ((("all_reduce", "/torch/distributed/c10d.py"), TRAIN), "communication", "train.py:2 in main"),
        ((("unshard", "/torch/distributed/fsdp/param.py"), TRAIN), "outside of modules", "train.py:2 in main"),
        ((("step", "/torch/optim/adam.py"), CALL, TRAIN), "optimizer", "train.py:3 in main"),
        ((("__init__", "/torch/nn/modules/linear.py"), TRAIN), "parameters and buffers", "train.py:2 in main"),
        ((CALL, FORWARD, TRAIN), "forward", "net.py:2 in forward"),
        ((("f", "/tmp/ipykernel_7/1.py"),), "outside of modules", "1.py:1 in f"),
        ((("run", f"{OWN}/runners/local.py"), ("build", f"{OWN}/demo.py")), "outside of modules", "demo.py:2 in build"),
        ((("run", f"{OWN}/runners/local.py"), ("malloc", "alloc.cpp")), "outside of modules", "outside of modules"),
    ],
)  # fmt: skip
def test_a_stack_tells_a_kind_and_a_line_of_the_user(places, kind, line):
    frames, others = stack(*places), [stack(TRAIN, FORWARD)] * (TRAIN in places)
    stacks = Stacks([frames, *others])
    assert (stacks.kind_of(frames), stacks.line_of(frames)) == (kind, line)
    assert Stacks([frames], "before").kind_of(frames) == ("before" if kind == UNKNOWN else kind)


def test_equal_modules_are_calls_from_one_line():
    first, second, alone = (
        stack((name, f"/me/{name}.py"), CALL, FORWARD, CALL, (*FORWARD[:1], f"/me/{of}.py"), TRAIN)
        for name, of in (("a", "model"), ("b", "model"), ("c", "head"))
    )
    live = [Live(size, 0, frames) for size, frames in ((1000, first), (600, second), (1024, first))]
    live += [Live(4096, 0, alone), Live(9000, 0, stack(TRAIN)), Live(512, 0, stack(CALL, TRAIN))]
    stacks = Stacks(block.frames for block in live)
    assert stacks.equal_modules(live) == (Modules("model.py:5 in forward", 2, 1024 + 1024 + 1024),)
    live += [Live(5000, 0, alone)] * 2
    assert [calls.count for calls in stacks.equal_modules(live)] == [3, 2]
