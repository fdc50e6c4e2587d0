"""`oomprobe.explain`: recordings of physical cards, logs, and files that nobody should trust."""

import functools
import io
import json
import pickle
import re
import struct
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from recordings import NAMES, Recording, segment_of, snapshot_of

import oomprobe
from oomprobe.cli import main
from oomprobe.explaining import explanation, log
from oomprobe.records.timeline import highest_moments
from oomprobe.results.html import page
from oomprobe.tape import replay, snapshot
from oomprobe.verdicts.texts import ERROR_TEXTS

GIB, MIB = 2**30, 2**20


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a log, or pickles a snapshot as torch does, and returns the path."""

    def write(contents):
        path = tmp_path / "file"
        path.write_bytes(
            contents.encode() if isinstance(contents, str) else pickle.dumps(contents, protocol=4)
        )
        return path

    return write


@pytest.fixture
def explained(written):
    return lambda contents, **options: oomprobe.explain(written(contents), **options)


# --- recordings of physical cards ---


@functools.cache
def explanation_of(name, protocol=4):
    with tempfile.NamedTemporaryFile() as file:
        file.write(pickle.dumps(snapshot_of(Recording.named(name)), protocol=protocol))
        file.flush()
        return oomprobe.explain(file.name)


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_is_replayed_as_the_card_did(name):
    recording, explanation = Recording.named(name), explanation_of(name)
    assert (
        f"Replayed {recording.blocks:,} requests: after {recording.blocks:,} of them"
        in explanation.notes[0]
    )
    if not recording.refused:
        assert explanation.cause is None
        assert explanation.requested_bytes is None
        # The recording's peak is after a request; before the first it may be higher.
        assert explanation.reserved_bytes >= recording.peak_reserved_bytes
        assert explanation.live_bytes <= explanation.least_bytes <= explanation.reserved_bytes
    else:
        assert explanation.live_bytes + explanation.requested_bytes <= explanation.least_bytes
        assert min(explanation.least_bytes, explanation.least_cap_bytes) > recording.capacity_bytes
        assert explanation.available_bytes <= recording.capacity_bytes
    assert explanation.live_bytes <= explanation.least_bytes_expandable
    assert sum(explanation.held.values()) == explanation.live_bytes
    assert ("where the segments at the end tell" in str(explanation.notes)) is bool(
        recording.begins
    )
    if recording.expandable_segments:
        assert explanation.least_bytes == explanation.least_bytes_expandable
    else:
        assert explanation.least_cap_bytes == explanation.least_bytes


@pytest.mark.parametrize(
    ("name", "cause", "requested_bytes", "advice"),
    [
        ("Constructor-Sun-b5ef67-device1", "live", 5_308_694_528, "--savings all"),
        ("h100-ragged", "fragmentation", 202_768_384, "expandable_segments:True"),
    ],
)
def test_an_error_that_a_card_recorded(name, cause, requested_bytes, advice):
    explanation = explanation_of(name)
    assert (explanation.cause, explanation.requested_bytes) == (cause, requested_bytes)
    assert advice in explanation.advice[0]
    assert replace(explanation_of(name, protocol=2), source=explanation.source) == explanation


def test_memory_over_time_shows_why_a_request_was_refused():
    explanation = explanation_of("h100-ragged")
    timeline = explanation.timeline
    at = timeline.events.index(timeline.refused)
    assert sum(sizes[at] for sizes in timeline.live_bytes.values()) == explanation.live_bytes
    assert timeline.reserved_bytes[at] == explanation.reserved_bytes
    gaps = [nbytes for segment in timeline.segments for nbytes in segment.gap_bytes]
    assert 2**18 <= min(gaps) <= max(gaps) < explanation.requested_bytes < sum(gaps)
    for segment in timeline.segments:
        ends = [*map(sum, zip(segment.starts, segment.gap_bytes, strict=True))]
        assert all(end < start for end, start in zip(ends, segment.starts[1:], strict=False))
        assert all(end <= segment.size_bytes for end in ends)


@pytest.mark.parametrize("at", [0, 777, 999])
def test_each_stretch_is_shown_where_it_is_highest(at):
    moments = highest_moments([*[1] * at, 5, *[1] * (999 - at)])
    assert at in moments
    assert len(moments) == 200


@pytest.mark.parametrize("name", NAMES)
def test_memory_over_time_has_the_peak_of_every_recording(name):
    explanation, recording = explanation_of(name), Recording.named(name)
    timeline = explanation.timeline
    totals = [sum(sizes) for sizes in zip(*timeline.live_bytes.values(), strict=True)]
    assert len(totals) == len(timeline.reserved_bytes) == len(timeline.events) <= 201
    assert all(live <= most for live, most in zip(totals, timeline.reserved_bytes, strict=True))
    assert (timeline.refused is not None) is bool(recording.refused)
    assert bool(timeline.segments) is not recording.expandable_segments
    if not recording.refused:
        assert max(totals) == explanation.live_bytes
    json.dumps(explanation.to_dict())


def test_a_page_of_a_snapshot_needs_matplotlib_and_that_of_a_log_does_not(
    explained, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(oomprobe.InvalidArgumentError, match=r"pip install 'oomprobe\[plot\]'"):
        explanation_of("h100-ragged").to_html(tmp_path / "page.html")
    log = "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 23.65 GiB total capacity)"
    explained(log).to_html(tmp_path / "log.html")
    assert "<svg" not in (tmp_path / "log.html").read_text()


def test_a_plot_of_a_snapshot_shows_what_held_memory_and_the_refusal():
    explanation = explanation_of("h100-ragged")
    over_time, segments = (draw() for draw in explanation.report().pictures.values())
    (axes,) = over_time.axes
    labels = axes.get_legend_handles_labels()[1]
    assert labels == ["without a recorded stack", "reserved", "refused"]
    (refused,) = (line for line in axes.lines if line.get_label() == "refused")
    assert [*refused.get_xdata()] == [explanation.timeline.refused] * 2
    assert segments.axes[0].get_legend_handles_labels()[1] == ["live", "gaps"]
    text = page(explanation.report())
    assert text.count("<svg") == 2
    assert text.index("<pre>export PYTORCH_CUDA_ALLOC_CONF") < text.index("<h2>Memory</h2>")
    assert "What to type" not in text  # once, to paste


def test_the_page_shows_what_the_cards_recorded():
    page = Path(__file__).parent.parent / "docs" / "explain.md"
    assert f"```console\n{explanation_of('h100-ragged')}```\n" in page.read_text()
    changes = []
    for name in NAMES:
        explanation = explanation_of(name)
        if not Recording.named(name).expandable_segments:
            changes.append(explanation.least_bytes_expandable / explanation.least_bytes - 1)
    assert len(changes) == 15
    assert sum(change < -0.05 for change in changes) == 6
    assert sum(change > 0 for change in changes) == 4
    assert round(min(changes), 3) == -0.218


def test_a_request_that_was_refused_and_then_done_without(explained):
    """As cuDNN asks for a smaller workspace, and a program that catches the error for a smaller batch."""
    snapshot, alone = snapshot_of(Recording.named("h100-ragged")), explanation_of("h100-ragged")
    first = {"action": "oom", "device_free": 2**36, "size": 2**38, "stream": 0, "frames": []}
    snapshot["device_traces"][0].insert(3, first)
    explanation = explained(snapshot)
    assert explanation.notes[1] == "2 requests were refused; this is about the last."
    same = {name: getattr(alone, name) for name in ("notes", "source", "timeline")}
    assert replace(explanation, **same) == alone


@pytest.mark.parametrize(
    ("expandable", "cause", "place"), [(0.9, "fragmentation", 0), (0.996, "cap", -1)]
)
def test_a_setting_that_saves_next_to_nothing_comes_last(
    expandable, cause, place, explained, monkeypatch
):
    def barely(history):
        # The card had a thousandth less than the requests need as recorded.
        available = max(history.reserved())  # a limit held back what was free
        return replace(
            replay.replayed(history),
            least_cap_bytes=int(available * 1.001),
            least_cap_bytes_expandable=int(available * 1.001 * expandable),
        )

    monkeypatch.setattr(explanation, "replayed", barely)
    explained_now = explained(snapshot_of(Recording.named("h100-ragged")))
    assert explained_now.cause == cause
    assert "expandable_segments" in explained_now.advice[place]
    assert ("save less than 2 %" in str(explained_now.notes)) is (cause == "cap")


SET = "PYTORCH_CUDA_ALLOC_CONF"


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({SET: ""}, f"export {SET}=expandable_segments:True"),
        ({"max_round_threshold": -1}, "export PYTORCH_ALLOC_CONF=expandable_segments:True"),
        ({SET: "pinned_use_background_threads:True", "max_round_threshold": -1}, f"export {SET}=pinned_use_background_threads:True,expandable_segments:True"),
        ({SET: "roundup_power2_divisions:[256:1,>:4]"}, f"export {SET}='roundup_power2_divisions:[256:1,>:4],expandable_segments:True'"),
        ({SET: "x:$(id)"}, f"export {SET}=expandable_segments:True"),
        ({SET: ["x"]}, f"export {SET}=expandable_segments:True"),
        ({SET: "backend:cudaMallocAsync"}, explanation.SHAPES),
    ],
)  # fmt: skip
def test_advice_keeps_the_settings_of_a_snapshot(settings, advice, explained):
    snapshot = snapshot_of(Recording.named("h100-ragged"))
    snapshot["allocator_settings"] |= settings
    assert explained(snapshot).advice[0] == advice


@pytest.mark.parametrize(
    ("name", "cause", "requested_bytes"),
    [("silmont2000-b61be4", None, None), ("h100-ragged", "unknown", 202_768_384)],
    ids=["nothing was refused", "what was live at the refusal is not known"],
)
def test_lost_events_are_told(name, cause, requested_bytes, explained):
    """A second recording of one process begins where the first one ended; what happened between is in neither."""
    snapshot = snapshot_of(Recording.named(name))
    [trace] = snapshot["device_traces"]
    snapshot["device_traces"] = [[event for event in trace if event["action"] != "free_completed"]]
    explanation = explained(snapshot)
    assert "events are missing" in explanation.notes[0]
    assert (explanation.cause, explanation.requested_bytes, explanation.least_bytes) == (
        cause,
        requested_bytes,
        None,
    )
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    assert explanation.live_bytes == sum(
        block["size"] for block in blocks if block["state"] != "inactive"
    )


# --- expandable segments, names, and files with little in them ---

FRAMES = [{"name": "forward", "filename": "/me/model.py", "line": 7}]


pages = functools.partial(segment_of, frames=FRAMES)


def served(address, nbytes):
    """Return the events of a request that is served, and freed at once."""
    event = {"addr": address, "size": nbytes, "stream": 0, "frames": FRAMES}
    return [event | {"action": action} for action in ("alloc", "free_requested", "free_completed")]


def warm(**more):
    """Return a snapshot that was recorded after the allocator had mapped all pages that it needed."""
    start, small = 2**41, 2**42
    segments = [
        pages(start, 200 * MIB, (40 * MIB, 60 * MIB), (130 * MIB, 2 * MIB)),
        pages(small, 4 * MIB, (0, 512)),
    ]
    events = (
        served(start, 30 * MIB) + served(start + 132 * MIB, 50 * MIB) + served(small + 512, MIB)
    )
    return {"segments": segments, "device_traces": [events], "allocator_settings": {}} | more


def test_pages_that_were_mapped_when_recording_began(explained):
    explanation = explained(warm())
    assert "Replayed 3 requests: after 3 of them" in explanation.notes[0]
    [_, begins] = explanation.notes
    assert begins == "62.00 MiB were live when recording began, where the segments at the end tell."
    assert explanation.live_bytes == 112 * MIB + 512
    assert explanation.least_bytes == explanation.least_bytes_expandable == 142 * MIB
    beside = pages(2**41 + 200 * MIB, 20 * MIB, (0, 512))
    explanation = explained(warm(segments=[*warm()["segments"], beside]))
    assert "Replayed 3 requests: after 3 of them" in explanation.notes[0]


def test_pages_that_were_mapped_while_recording(explained):
    """The replay asks for the blocks anew, which makes fewer gaps."""
    snapshot = warm()
    mapped = {
        "action": "segment_map",
        "addr": 2**41 + 180 * MIB,
        "size": 20 * MIB,
        "stream": 0,
        "frames": [],
    }
    snapshot["device_traces"][0].insert(3, mapped)
    explanation = explained(snapshot)
    assert "with expandable segments they are requested anew" in explanation.notes[1]
    assert explanation.least_bytes == explanation.least_bytes_expandable


def test_a_cap_counts_requests_and_not_their_pages(explained):
    """A request of 30 MiB maps 40, in which the next one lies, whatever the cap."""
    start = 2**41
    mapped = {"action": "segment_map", "addr": start, "size": 40 * MIB, "stream": 0, "frames": []}
    events = [mapped, served(start, 30 * MIB)[0], served(start + 30 * MIB, 10 * MIB)[0]]
    segments = [pages(start, 40 * MIB, (0, 30 * MIB), (30 * MIB, 10 * MIB))]
    explanation = explained(warm(segments=segments, device_traces=[events]))
    assert explanation.least_bytes == 40 * MIB
    assert explanation.least_cap_bytes == 30 * MIB
    assert "as recorded, under a cap: 30.00 MiB" in str(explanation)


@pytest.mark.parametrize(
    ("asked", "free", "cause", "available"),
    [
        (40, 2**16, "cap", 182),  # of the last page of 20 MiB, 18 may lie beyond what counts
        (20, 2**16, "fragmentation", 182),
        (30, 2, "live", 202),  # no cap: the device was full
        (20, 2, "fragmentation", 202),
    ],
)
def test_a_refusal_among_pages_has_a_cause(asked, free, cause, available, explained):
    start = 2**41
    mapped = {"action": "segment_map", "addr": start, "size": 200 * MIB, "stream": 0, "frames": []}
    refused = {
        "action": "oom",
        "device_free": free * MIB,
        "size": asked * MIB,
        "stream": 0,
        "frames": [],
    }
    held = (175 if free == 2 else 150) * MIB
    events = [mapped, served(start, held)[0], refused]
    segments = [pages(start, 200 * MIB, (0, held))]
    explanation = explained(warm(segments=segments, device_traces=[events]))
    assert (explanation.cause, explanation.available_bytes) == (cause, available * MIB)
    assert explanation.requested_bytes == asked * MIB
    assert "expandable_segments" not in str(explanation.advice)  # they are on


@pytest.mark.parametrize(("goes_back", "least_mib"), [(True, 20), (False, 40)])
def test_a_private_pool_is_replayed(goes_back, least_mib, explained):
    """What was its memory serves a request outside of it only once its segments have gone back."""
    pooled = {"size": 20 * MIB, "stream": 0, "frames": [], "pool_id": (0, 1)}
    actions = ["segment_alloc", "alloc", "free_requested", "free_completed", "segment_free"]
    events = [pooled | {"action": action, "addr": 2**41} for action in actions[: 4 + goes_back]]
    events += [event | {"pool_id": (0, 0), "addr": 2**40} for event in events[:2]]
    kept = pages(2**41, 20 * MIB) | {"segment_pool_id": (0, 1)}
    segments = [pages(2**40, 20 * MIB, (0, 20 * MIB)), *([] if goes_back else [kept])]
    segments = [segment | {"is_expandable": False} for segment in segments]
    explanation = explained(warm(segments=segments, device_traces=[events]))
    assert explanation.notes[0].startswith("Replayed 2 requests: after 2 of them")
    assert explanation.least_bytes == least_mib * MIB


@pytest.mark.parametrize(("pool", "least_mib"), [((0, 1), 20), ((1, 0), 40)])
def test_a_capture_gives_back_no_cache(pool, least_mib, explained):
    """A private pool outside of a capture makes room by what is free elsewhere."""
    plain = {"addr": 2**40, "size": 20 * MIB, "stream": 0, "frames": [], "pool_id": (0, 0)}
    actions = ["segment_alloc", "alloc", "free_requested", "free_completed"]
    events = [plain | {"action": action} for action in actions]
    events += [event | {"pool_id": pool, "addr": 2**41} for event in events[:2]]
    private = pages(2**41, 20 * MIB, (0, 20 * MIB)) | {"segment_pool_id": pool}
    segments = [pages(2**40, 20 * MIB), private]
    segments = [segment | {"is_expandable": False} for segment in segments]
    explanation = explained(warm(segments=segments, device_traces=[events]))
    assert explanation.least_bytes == least_mib * MIB


FREE = {"action": "free_completed", "addr": 2**41, "size": 512, "stream": 0, "frames": []}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"allocator_settings": {"max_split_size": 2**20}}, "settings, as the snapshot tells them, are none"),
        ({"allocator_settings": {"roundup_power2_divisions": {"256": 3}}}, "the allocator's settings"),
        ({"device_traces": []}, "no request was recorded"),
        # As _record_memory_history(True) of old versions leaves it.
        ({"device_traces": [[FREE]]}, "no request was recorded, so that this is the state at the end"),
        ({"segments": [pages(2**41, 200 * MIB), pages(2**41 + 100 * MIB, 120 * MIB, (0, 512))]}, "209715200 bytes overlaps another"),
    ],
)  # fmt: skip
def test_what_is_not_replayed_is_told(change, reason, explained):
    explanation = explained(warm() | change)
    assert reason in explanation.notes[0]
    assert explanation.least_bytes is explanation.least_bytes_expandable is None
    assert explanation.live_bytes > 0
    assert {*explanation.held} <= {"model.py:7 in forward", "without a recorded stack"}


def test_private_pools_streams_and_devices_are_named(explained):
    snapshot = warm(device_traces=[[], *warm()["device_traces"]])
    for segment in snapshot["segments"]:
        segment["device"] = 1
    snapshot["segments"].append(pages(2**20, 2 * MIB, (0, 2 * MIB)) | {"segment_pool_id": (0, 1)})
    explanation = explained(snapshot)
    assert explanation.least_bytes is not None
    assert explanation.notes[-1] == "Device 0 held 2.00 MiB at the end: --device 0 explains it."
    assert "Private pools, as CUDA graphs use them, held 2.00 MiB" in str(
        explained(snapshot, device=0).notes
    )
    for event in snapshot["device_traces"][1][:3]:
        event["stream"] = 7
    assert "Blocks of 2 streams" in str(explained(snapshot).notes)
    with pytest.raises(oomprobe.InvalidArgumentError, match="of this device"):
        explained(snapshot, device=3)


def test_long_names_leave_room_for_the_numbers(explained):
    snapshot = warm()
    for event in snapshot["device_traces"][0]:
        event["frames"] = [
            {"name": "forward", "filename": f"/else/{'deep/' * 40}\x1b[31m\n.py", "line": 7}
        ]
    explanation = explained(snapshot)
    report = str(explanation)
    assert report.isascii()
    assert "\x1b" not in report
    [line] = [line for line in report.splitlines() if ".py:7 in forward" in line and "..." in line]
    assert line.endswith("50.00 MiB  44.6%")
    assert max(map(len, report.splitlines())) <= 100
    assert "/me/model.py:7 in forward" in explanation.held  # in no folder together


@pytest.mark.parametrize(
    "file",
    [
        "/tmp/torchinductor_me-you/ab/cabc.py",
        r"C:\Python310\Lib\copy.py",
        "/env/site-packages/torch/nn/modules/linear.py",
    ],
)
def test_code_of_libraries_is_not_the_users(file, explained):
    snapshot = warm()
    for event in snapshot["device_traces"][0]:
        event["frames"] = [{"name": "call", "filename": file, "line": 1}, *FRAMES]
    assert list(explained(snapshot).held) == ["model.py:7 in forward"]


# --- logs ---

ERROR_OF_HOST = re.compile(
    r"alloc_cpu|CPUAllocator|bad_alloc|Errno 12|Unable to allocate|primitive|Torch: not enough|^$"
)
NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked} GiB. GPU 0 has a total capacity of 23.64 GiB of which "
    "{free} GiB is free. {processes}Of the allocated memory {live} GiB is allocated by PyTorch, and {unused} GiB is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=..."
)
OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate {asked} GiB (GPU 0; 23.65 GiB total capacity; {live} GiB already allocated; "
    "{free} GiB free; {processes}{unused} GiB reserved in total by PyTorch)"
)
OWN = "Including non-PyTorch memory, this process has {} GiB memory in use. "
OTHER = "Process {} has {} GiB memory in use. "


@pytest.mark.parametrize(
    ("text", "asked", "free", "processes", "live", "unused", "cause"),
    [
        (NEW, 2.00, 1.04, OWN.format(22.60), 12.0, 10.2, "fragmentation"),
        (NEW, 2.00, 1.04, OWN.format(22.60), 21.9, 0.30, "live"),
        (NEW, 2.00, 0.04, OWN.format(3.60) + OTHER.format(812, 20.00), 2.9, 0.30, "others"),
        (NEW, 2.00, 0.04, OTHER.format(812, 3.60) + OTHER.format(9, 20.00), 2.9, 0.30, "others"),
        (NEW, 2.00, 0.04, OWN.format(3.60), 2.9, 0.30, "others"),  # in use, and not by this process
        (NEW, 2.00, 11.0, OWN.format(12.6) + "12.00 GiB allowed; ", 11.9, 0.05, "cap"),
        (NEW, 2.00, 11.0, OWN.format(12.6) + "12.00 GiB allowed; ", 7.0, 4.90, "fragmentation"),
        (NEW, 2.00, 11.0, OWN.format(12.6), 11.9, 0.05, "unknown"),
        (NEW, 40.0, 1.04, OWN.format(22.60), 12.0, 10.2, "request"),
        (OLD, 2.00, 1.04, "", 12.1, 22.31, "fragmentation"),
        (OLD, 2.00, 0.04, "", 22.0, 23.20, "live"),
        (OLD, 1.20, 0.04, "", 22.0, 22.90, "live"),  # what is missing is a context, and not others
        (OLD, 2.00, 9.00, "12.00 GiB allowed; ", 11.9, 12.00, "cap"),
        (NEW, 0.30, 0.04, OWN.format(23.60), 22.5, 0.60, "live"),  # nobody else is there
        (NEW, 0.60, 0.04, OWN.format(22.8) + OTHER.format(9, 0.8), 22.2, 0.5, "live"),  # 3 % of it
        (NEW, 5.00, 0.04, OWN.format(20.0) + OTHER.format(9, 3.6), 19.5, 0.3, "live"),  # even alone
        (NEW, 2.00, 0.04, OTHER.format(812, 3.15) + OTHER.format(9, 1.0), 2.9, 0.3, "live"),
        (NEW.replace("capacity", "capacty"), 2.0, 0.07, "", 3.6, 0.3, "others"),  # torch 2.1, 2.2
    ],
)
def test_the_text_of_an_error(text, asked, free, processes, live, unused, cause, explained):
    error = text.format(asked=asked, free=free, processes=processes, live=live, unused=unused)
    explanation = explained(f"step 12\n{error}\nbye\n")
    assert explanation.cause == cause
    assert explanation.requested_bytes == int(asked * GIB)
    assert explanation.live_bytes == int(live * GIB)
    assert explanation.least_bytes is None
    assert list(explanation.held.values()) == sorted(explanation.held.values(), reverse=True)
    assert min(explanation.held.values()) > 0
    assert ("_record_memory_history" in "".join(explanation.advice)) is (text is not OLD)
    if cause == "fragmentation":
        assert "expandable_segments:True" in explanation.advice[0]


@pytest.mark.parametrize("texts", ["error_messages.json", "more_error_messages.json"])
def test_every_text_of_a_device_out_of_memory_is_read(texts, explained):
    read = 0
    for row in json.loads((Path(__file__).parent / "data" / texts).read_text()):
        if row["verdict"] == "OOM" and not ERROR_OF_HOST.search(row["message"]):
            assert explained(row["message"]).cause in {
                *("live", "fragmentation", "others", "unknown", "request", "pinned")
            }
            read += 1
    assert read > 15


@pytest.mark.parametrize("own", [OWN.format(3.60), OTHER.format(11, 3.60)])  # as in a container
def test_what_other_processes_hold_is_a_figure(own, explained):
    processes = own + OTHER.format(812, 20.00)
    held = explained(
        NEW.format(asked=2.0, free=0.04, processes=processes, live=2.9, unused=0.3)
    ).held
    assert list(held) == [
        "other processes",
        "tensors of this process",
        "this process, outside of torch's allocator",
        "reserved by torch's allocator, but not allocated",
    ]
    assert held["other processes"] == 20 * GIB
    assert held["this process, outside of torch's allocator"] == pytest.approx(0.4 * GIB, rel=0.01)


def test_the_last_of_several_errors_and_a_wrapped_line(explained):
    first = NEW.format(asked=9.0, free=1.04, processes="", live=12.0, unused=10.2)
    last = NEW.format(asked=2.0, free=1.04, processes=OWN.format(22.6), live=12.0, unused=10.2)
    explanation = explained(f"{first}\n{last[:95]}\n{last[95:180]}\n{last[180:]}")
    assert (explanation.cause, explanation.requested_bytes) == ("fragmentation", 2 * GIB)
    assert "The log has 2 such errors; this is about the last." in explanation.notes


@pytest.mark.parametrize("before", ["", "CUDA out of memory. ", "CUDA out of\nmemory. "])
def test_figures_of_the_message_before_are_not_its_own(before, explained):
    texts = []
    for asked, live in (("2.10 GiB", 22.40), ("980.00 MiB", 29.90)):
        texts.append(
            f"{before}Tried to allocate {asked} (GPU 0; 31.75 GiB total capacity; {live:.2f} GiB already "
            f"allocated; 0.10 GiB free; {live + 1:.2f} GiB reserved in total by PyTorch)\n"
        )
    explanation = explained("".join(texts))
    assert explanation.live_bytes == int(29.9 * GIB)
    assert (explanation.cause, explanation.requested_bytes) == ("live", 980 * MIB)


@pytest.mark.parametrize("asked", [5000 * "9" + " GiB", "1.2.3 GiB", "\u0663 GiB"])
def test_a_number_that_is_none_is_not_read(asked, explained):
    explanation = explained(f"CUDA out of memory. Tried to allocate {asked} (GPU 0)")
    assert (explanation.cause, explanation.requested_bytes) == ("unknown", None)


def test_more_bytes_than_there_are_end_in_a_sentence(explained):
    with pytest.raises(oomprobe.InvalidArgumentError, match="'99999999999 TiB' is not a size"):
        explained("CUDA out of memory. Tried to allocate 99999999999 TiB (GPU 0)")


class Counted:
    """A pattern that counts the characters that it is given to search, and never matches."""

    def __init__(self):
        self.characters = 0

    def search(self, text):
        self.characters += len(text)


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("loss 0.31, 4.2 GiB of memory used\n" * 10_000, 0),
        ("x" * 10**6 + " CUDA error: out of memory " + "x" * 10**6, 2400),
        ("CUDA error: out of memory\n" * 10_000, 100 * 30),
    ],
)
def test_of_a_log_only_what_may_be_an_error_is_searched(text, most, explained, monkeypatch):
    pattern = Counted()
    monkeypatch.setattr(log, "ERROR_TEXTS", [replace(ERROR_TEXTS[0], pattern=pattern)])
    monkeypatch.setattr(log, "MOST_JUDGED", 100)
    with pytest.raises(oomprobe.InvalidArgumentError, match="holds no out-of-memory error"):
        explained(text)
    assert pattern.characters <= most


# --- the command line ---


def test_explain_on_the_command_line(written, tmp_path, capsys, monkeypatch):
    path = written(warm())
    assert main(["explain", str(path), "--json", str(tmp_path / "why.json")]) == 0
    assert capsys.readouterr().out.startswith("verdict: no request was refused")
    explanation = oomprobe.explain(path)
    assert json.loads((tmp_path / "why.json").read_text()) == explanation.to_dict()
    assert main(["explain", str(path), "--html", str(tmp_path / "why.html")]) == 0
    page = (tmp_path / "why.html").read_text()
    assert "<h1>No request was refused" in page
    capsys.readouterr()
    assert main(["explain", str(path), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == explanation.to_dict()
    log = OLD.format(asked=2.0, free=1.04, processes="", live=12.1, unused=22.31)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(log.encode())))
    assert main(["explain", "-"]) == 0
    assert capsys.readouterr().out.startswith("verdict: fragmentation")


# --- files of strangers ---


def changed(*, event=None, segment=None, **more):
    """Return a pickled snapshot with other values in an event or in a segment, or with more than it has."""
    snapshot = warm(**more)
    snapshot["device_traces"][0][1] |= event or {}
    snapshot["segments"][0] |= segment or {}
    return pickle.dumps(snapshot)


WHOLE = changed()
PROTO = b"\x80\x04"
HOSTILE = {
    "a call": PROTO + b"\x8c\x08builtins\x8c\x05print\x93\x8c\x03ran\x85R.",
    "a set beside what is read": changed(more={1, 2}),
    "text opcodes": PROTO + b"I" + b"9" * 100_000 + b"\n.",
    "a memo index": PROTO + b"]r" + struct.pack("<I", 2**32 - 1) + b".",
    "a memo bomb": PROTO + b"]\x94" + b"(h\x00h\x00h\x00e" * 10_000 + b".",
    "deep tuples as a key": PROTO + b"}" + b")" + b"\x85" * 300_000 + b"Ks.",
    "deep lists": PROTO + b"]" * 300_000 + b"a" * 299_999 + b".",
    "a huge string": PROTO + b"X" + struct.pack("<I", 2**32 - 1) + b"abc.",
    "cut off": WHOLE[: len(WHOLE) // 2],
    "only a header": PROTO,
    "nothing recorded": pickle.dumps({"segments": [], "device_traces": [[]]}),
    "a negative size": changed(event={"size": -1}),
    "a size that is a text": changed(event={"size": "1"}),
    "a block that leaves its segment": changed(segment={"total_size": 1000}),
    "an unknown block": pickle.dumps({"segments": [{"device": 0}], "device_traces": []}),
    "an empty file": b"",
    "a text without an error": b"step 1\nstep 2\n",
    "a tip": b"Tip: if you see 'CUDA out of memory', lower --batch-size.\nepoch 1 done\n",
    "damaged gzip": b"\x1f\x8b\x08\x00 out of memory",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_of_a_stranger_ends_in_a_sentence(name, tmp_path, capsys):
    path = tmp_path / "file"
    path.write_bytes(HOSTILE[name])
    assert main(["explain", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "cannot be explained: " in err
    assert "Traceback" not in err
    assert "ran" not in err.split()


@pytest.mark.parametrize(
    ("limited", "limit", "said"),
    [
        (snapshot, "MOST_OBJECTS", "it has more than 9 texts and numbers"),
        (explanation, "MOST_FILE_BYTES", "it is larger than 9"),
    ],
)
def test_a_file_that_takes_too_much_memory(limited, limit, said, written, capsys, monkeypatch):
    monkeypatch.setattr(limited, limit, 9)
    assert main(["explain", str(written(warm()))]) == 2
    assert said in capsys.readouterr().err


def test_texts_and_numbers_count_as_objects(explained, monkeypatch):
    monkeypatch.setattr(snapshot, "MOST_OBJECTS", 300)
    for items in ([f"text {number}" for number in range(400)], [*range(300, 700)]):
        with pytest.raises(oomprobe.InvalidArgumentError, match="more than 300 texts and numbers"):
            explained({"segments": [], "more": items})


def test_a_folder_is_no_file(tmp_path, capsys):
    assert main(["explain", str(tmp_path)]) == 2
    assert "cannot be explained" in capsys.readouterr().err
