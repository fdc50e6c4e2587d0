import ctypes
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
        ("max_split_size_mb:128MB", {"max_split_size_bytes": 128 * MIB}),
        ("max_split_size_mb:-1", {}),
        ("max_non_split_rounding_mb:64", {"max_non_split_rounding_bytes": 64 * MIB}),
        ("max_non_split_rounding_mb:-1", {"max_non_split_rounding_bytes": 0}),
        ("garbage_collection_threshold:0.8", {"garbage_collection_threshold": 0.8}),
        (
            "large_segment_size_mb:64",
            {"large_segment_size_bytes": 64 * MIB, "max_non_split_rounding_bytes": 64 * MIB},
        ),
        (
            "large_segment_size_mb:11,max_split_size_mb:11",
            {
                "large_segment_size_bytes": 11 * MIB,
                "max_non_split_rounding_bytes": 11 * MIB,
                "max_split_size_bytes": 11 * MIB,
            },
        ),
        ("per_process_memory_fraction:.5", {"per_process_memory_fraction": 0.5}),
        ("roundup_power2_divisions:8", {"roundup_power2_divisions": (8,) * 16}),
        ("backend:native", {}),
        ("backend:cudaMallocAsync,pinned_num_register_threads:8,new:[1,2]", {}),
    ],
)
def test_reads(text, fields):
    assert AllocatorSettings.from_text(text) == AllocatorSettings(**fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("expandable_segments:true", "expandable_segments:true is not .* it wants True or False"),
        ("expandable_segments", "'expandable_segments' is not followed by a value"),
        ("expandable_segments:True:False", "'expandable_segments' is not followed"),
        ("expandable_segments:True max_split_size_mb:128", "'expandable_segments' is not followed"),
        (",", "'' is not followed"),
        ("max_split_size_mb:19", "max_split_size_mb:19 .* 20 or more"),
        ("max_split_size_mb:x", "max_split_size_mb:x .* a whole number"),
        ("large_segment_size_mb:64,max_split_size_mb:32", "max_split_size_mb:32 .* 64 or more"),
        ("large_segment_size_mb:10", "large_segment_size_mb:10 .* more than 10"),
        ("garbage_collection_threshold:0", "garbage_collection_threshold:0 .* between 0 and 1"),
        ("garbage_collection_threshold:1.0", "garbage_collection_threshold:1.0 .* between 0 and 1"),
        ("garbage_collection_threshold:x", "garbage_collection_threshold:x .* from 0 to 1"),
        ("per_process_memory_fraction:1.1", "per_process_memory_fraction:1.1 .* from 0 to 1"),
        ("roundup_power2_divisions:3", "roundup_power2_divisions:3 .* powers of two"),
        ("roundup_power2_divisions:[64:3]", "roundup_power2_divisions:3 .* powers of two"),
        ("roundup_power2_divisions:[64]", "roundup_power2_divisions:64 .* pairs such as"),
        ("roundup_power2_divisions:[]", "roundup_power2_divisions: .* pairs such as"),
        ("roundup_power2_divisions:[64:8,", "'roundup_power2_divisions' is not followed"),
    ],
)
def test_refuses_what_torch_refuses(text, message):
    with pytest.raises(InvalidArgumentError, match=message):
        AllocatorSettings.from_text(text)


def test_the_environment_is_read_in_torchs_order(monkeypatch):
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert AllocatorSettings.from_environment() == AllocatorSettings()
    for size_mib, name in enumerate(names, 30):
        monkeypatch.setenv(name, f"max_split_size_mb:{size_mib}")
        assert AllocatorSettings.from_environment().max_split_size_bytes == size_mib * MIB


def test_power_of_two_divisions_by_size():
    settings = AllocatorSettings.from_text("roundup_power2_divisions:[256:1,512:2,>:4]")
    assert [settings.divisions(size * MIB) for size in (1, 256, 511, 512, 1023, 1024, 10**6)] == [1, 1, 1, 2, 2, 4, 4]
    assert settings.divisions(1) == 1
    assert AllocatorSettings().divisions(MIB) == 0


# torch's own parser, where this torch has it


def torchs_divisions(text):
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    function = getattr(
        library, "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm", None
    )
    if function is None or not hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        pytest.skip("this torch keeps its parser to itself")
    function.restype, function.argtypes = ctypes.c_size_t, [ctypes.c_size_t]
    torch._C._accelerator_setAllocatorSettings("roundup_power2_divisions:[1:0,>:0]")
    try:
        torch._C._accelerator_setAllocatorSettings(text)
        return tuple(function(MIB << index) for index in range(16))
    finally:
        torch._C._accelerator_setAllocatorSettings("roundup_power2_divisions:[1:0,>:0]")


powers = st.integers(0, 17).map(lambda exponent: 2**exponent)
pairs = st.tuples(powers | st.just(">"), st.sampled_from([0, 1, 2, 4, 16]))


@given(st.lists(pairs, min_size=1, max_size=5).map(lambda items: ",".join(f"{size}:{steps}" for size, steps in items)))
def test_divisions_are_read_as_torch_reads_them(items):
    text = f"roundup_power2_divisions:[{items}]"
    assert AllocatorSettings.from_text(text).roundup_power2_divisions == torchs_divisions(text)
