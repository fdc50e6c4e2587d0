import pytest

from oomprobe.allocator.settings import AllocatorSettings
from oomprobe.errors import InvalidArgumentError
from oomprobe.ground.torch_versions import VERSION

EXPANDABLE = {"expandable_segments": True}


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (" \n", {}),
        ("expandable_segments:True,", EXPANDABLE),
        ("expandable_segments:True,expandable_segments:False", {}),
        (" expandable_segments : True ,pinned_use_background_threads:True", EXPANDABLE),
        ("per_process_memory_fraction:.5", {"per_process_memory_fraction": 0.5}),
        ("backend:native,pinned_num_register_threads:8,new:[1,2]", {}),
    ],
)
def test_parses_settings(text, fields):
    assert AllocatorSettings.from_text(text) == AllocatorSettings(**fields)


UNREADABLE = ["expandable_segments:true", "expandable_segments", "per_process_memory_fraction:x"]
NOT_SIMULATED = [
    "backend:cudaMallocAsync", "large_segment_size_mb:64", "max_non_split_rounding_mb:64", "max_split_size_mb:32",
    "garbage_collection_threshold:0.8", "roundup_power2_divisions:[256:1,1024:2,>:4]",
]  # fmt: skip


@pytest.mark.parametrize("item", UNREADABLE + NOT_SIMULATED)
def test_refuses_a_setting(item):
    with pytest.raises(InvalidArgumentError) as caught:
        AllocatorSettings.from_text(f"{item},new:1")
    named, said = f"{item!r} in PYTORCH_ALLOC_CONF", str(caught.value)
    assert (said == f"{named} cannot be read") is (item in UNREADABLE)
    assert (f"does not support {named}: leave it out, or probe on a real device" in said) is (
        item in NOT_SIMULATED
    )


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
