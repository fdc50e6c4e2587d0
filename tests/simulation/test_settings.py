import pytest

from oomprobe.allocator.settings import WITHOUT_EFFECT, AllocatorSettings
from oomprobe.errors import InvalidArgumentError
from oomprobe.ground.torch_versions import VERSION

EXPANDABLE = {"expandable_segments": True}
BY_SIZE = (8, 8, 8, 0, 2, *[1] * 11)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (" \n", {}),
        ("expandable_segments:True,", EXPANDABLE),
        ("expandable_segments:True,expandable_segments:False", {}),
        (" expandable_segments : True ,pinned_use_background_threads:True", EXPANDABLE),
        ("per_process_memory_fraction:.5", {"per_process_memory_fraction": 0.5}),
        ("backend:native,pinned_num_register_threads:8", {}),
        ("max_split_size_mb:64", {"max_split_size_mb": 64}),
        ("max_non_split_rounding_mb:32", {"max_non_split_rounding_mb": 32}),
        ("max_split_size_mb:13,large_segment_size_mb:12", {"max_split_size_mb": 13, "large_segment_size_mb": 12}),
        ("large_segment_size_mb:11", {"large_segment_size_mb": 11}),
        ("garbage_collection_threshold:0.8", {"garbage_collection_threshold": 0.8}),
        ("per_process_memory_fraction:0", {"per_process_memory_fraction": 0.0}),
        ("pinned_max_round_threshold_mb:64,pinned_max_cached_size_mb:0", {"pinned_max_round_threshold_mb": 64, "pinned_max_cached_size_mb": 0}),
        ("roundup_power2_divisions:4", {"roundup_power2_divisions": (4,) * 16}),
        ("roundup_power2_divisions:[65536:4]", {"roundup_power2_divisions": (4,) * 16}),
        ("roundup_power2_divisions:[4:8,16:2,32:1,>:1]", {"roundup_power2_divisions": BY_SIZE}),
        (",".join(f"{name}:1" for name in sorted(WITHOUT_EFFECT)), {}),
    ],
)  # fmt: skip
def test_parses_settings(text, fields):
    assert AllocatorSettings.from_text(text) == AllocatorSettings(**fields)


# In MiB, as torch's own allocator answered: a request, settings, the size of its block.
ROUNDED = {
    "up to the smallest": (0.0001, "", 512 / 2**20),
    "to a step between powers of two": (5.1, "roundup_power2_divisions:8", 5.5),
    "a power of two stays": (4, "roundup_power2_divisions:2", 4),
    "by the size's own number": (17.1, "roundup_power2_divisions:[4:8,16:2,32:1,>:1]", 24),
    "the first number is that of smaller ones": (3.1, "roundup_power2_divisions:[32:4,4:1]", 3.5),
    "small ones have no step so fine": (600 / 2**20, "roundup_power2_divisions:2", 1024 / 2**20),
    "the last is not for those below": (
        1.25,
        "roundup_power2_divisions:[>:2]",
        1.25 if VERSION >= (2, 10) else 1.5,
    ),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_requests_are_rounded_up(name):
    request, text, size = ROUNDED[name]
    settings = AllocatorSettings.from_text(text)
    for told in (settings, AllocatorSettings.from_snapshot(settings.to_snapshot())):
        assert told.rounded(int(request * 2**20)) == int(size * 2**20)


@pytest.mark.parametrize(
    ("recorded", "fields"),
    [
        ({"max_split_size": -1, "garbage_collection_threshold": 0}, {}),
        ({"max_split_size": 64 * 2**20}, {"max_split_size_mb": 64}),
        ({"garbage_collection_threshold": 0.8}, {"garbage_collection_threshold": 0.8}),
        ({"expandable_segments": True, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, EXPANDABLE),
    ],
)  # fmt: skip
def test_reads_what_a_snapshot_tells(recorded, fields):
    settings = AllocatorSettings(**fields, roundup_power2_divisions=(0,) * 16)
    assert AllocatorSettings.from_snapshot(recorded) == settings


def test_what_is_set_at_run_time_resets_three_settings():
    text = "max_split_size_mb:64,roundup_power2_divisions:4,garbage_collection_threshold:0.8"
    settings = AllocatorSettings.from_text(f"{text},expandable_segments:True")
    assert settings.updated("") == AllocatorSettings(expandable_segments=True)
    pinned = AllocatorSettings(pinned_max_round_threshold_mb=1)
    assert pinned.updated("max_split_size_mb:64").pinned_max_round_threshold_mb == 1


UNREADABLE = [
    "expandable_segments:true", "expandable_segments", "per_process_memory_fraction:x", "per_process_memory_fraction:1.5",
    "garbage_collection_threshold:1.0", "garbage_collection_threshold:0", "roundup_power2_divisions:3",
    "roundup_power2_divisions:[5:2]", "pinned_max_cached_size_mb:-1", "large_segment_size_mb:10", "max_split_size_mb:10",
    "max_non_split_rounding_mb:10", "pinned_max_round_threshold_mb:-1", "per_process_memory_fraction:-.1", "roundup_power2_divisions:0",
]  # fmt: skip
NOT_SIMULATED = ["backend:cudaMallocAsync", "segment_size:64", "throw_on_cudamalloc_oom:True"]


@pytest.mark.parametrize("item", UNREADABLE + NOT_SIMULATED)
def test_refuses_a_setting(item):
    with pytest.raises(InvalidArgumentError) as caught:
        AllocatorSettings.from_text(f"{item},expandable_segments:True")
    named, said = f"{item!r} in PYTORCH_ALLOC_CONF", str(caught.value)
    assert named in said
    assert said.endswith("cannot be read") is (item in UNREADABLE)


@pytest.mark.parametrize(
    "text",
    [
        "max_split_size_mb:11",
        "max_split_size_mb:19",
        "max_non_split_rounding_mb:11",
        "max_non_split_rounding_mb:19",
        "max_split_size_mb:30,large_segment_size_mb:40",
    ],
)
def test_refuses_a_size_below_that_of_a_large_segment(text):
    with pytest.raises(InvalidArgumentError, match=r"is too small: torch takes [24][01] or more"):
        AllocatorSettings.from_text(text)


def test_reads_the_environment_in_torchs_order(monkeypatch):
    names = ("PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    if VERSION >= (2, 10):
        names = ("PYTORCH_ALLOC_CONF", *names)
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert AllocatorSettings.from_environment() == AllocatorSettings()
    for tenths, name in enumerate(names, 3):
        monkeypatch.setenv(name, f"per_process_memory_fraction:{tenths / 10}")
        assert AllocatorSettings.from_environment().per_process_memory_fraction == tenths / 10
