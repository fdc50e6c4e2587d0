import pytest

from oomprobe.errors import InvalidArgumentError
from oomprobe.simulation.settings import AllocatorSettings

MIB = 2**20
EXPANDABLE = {"expandable_segments": True}


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (" \n", {}),
        ("expandable_segments:True,", EXPANDABLE),
        ("expandable_segments:True,expandable_segments:False", {}),
        (" expandable_segments : True ,max_split_size_mb:128", {**EXPANDABLE, "max_split_size_bytes": 128 * MIB}),
        ("max_split_size_mb:-1", {}),
        ("garbage_collection_threshold:0.8", {"garbage_collection_threshold": 0.8}),
        ("per_process_memory_fraction:.5", {"per_process_memory_fraction": 0.5}),
        ("roundup_power2_divisions:8", {"roundup_power2_divisions": (8,) * 16}),
        (
            "roundup_power2_divisions:[256:1,1024:2,>:4],expandable_segments:True",
            {"roundup_power2_divisions": (1,) * 9 + (0, 2) + (4,) * 5, **EXPANDABLE},
        ),
        ("backend:native,pinned_num_register_threads:8,new:[1,2]", {}),
    ],
)
def test_parses_settings(text, fields):
    assert AllocatorSettings.from_text(text) == AllocatorSettings(**fields)


@pytest.mark.parametrize(
    "item",
    [
        "expandable_segments:true",
        "expandable_segments",
        "max_split_size_mb:x",
        "garbage_collection_threshold:x",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:[64]",
    ],
)
def test_refuses_invalid_settings(item):
    with pytest.raises(InvalidArgumentError) as caught:
        AllocatorSettings.from_text(f"{item},new:1")
    assert str(caught.value) == f"{item!r} in PYTORCH_ALLOC_CONF cannot be read"


@pytest.mark.parametrize(
    "item", ["backend:cudaMallocAsync", "large_segment_size_mb:64", "max_non_split_rounding_mb:64"]
)
def test_refuses_settings_that_are_not_simulated(item):
    with pytest.raises(InvalidArgumentError, match=rf"does not support '{item}' .* probe on a real device"):
        AllocatorSettings.from_text(item)


def test_reads_the_environment_in_torchs_order(monkeypatch):
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert AllocatorSettings.from_environment() == AllocatorSettings()
    for size_mib, name in enumerate(names, 30):
        monkeypatch.setenv(name, f"max_split_size_mb:{size_mib}")
        assert AllocatorSettings.from_environment().max_split_size_bytes == size_mib * MIB
