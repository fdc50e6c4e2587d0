"""`AcceleratorDevice` with torch's CUDA allocator: available memory, caps, peaks, pressure and health."""

import pytest
import torch
from bed import fail, forked
from zoo import mlp

import oomprobe
from oomprobe.devices import choose_device
from oomprobe.devices.accelerator import AcceleratorDevice

MIB = 2**20


def opened(stated="cuda"):
    return choose_device(stated, torch.nn.ReLU())


def take(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def is_limit(mib):
    """Return whether `mib` can be allocated, but not two MiB more."""
    take(mib)
    torch.cuda.empty_cache()
    try:
        take(mib + 2)
    except torch.OutOfMemoryError:
        return True
    return False


def test_available_is_free_and_reserved_memory():
    def seen():
        device, kept = opened(), take(200)
        take(300)  # stays in the cache, and so do 2 MiB for the byte that shows whether the allocator counts
        found = [device.available_bytes(), torch.cuda.memory_reserved(), device.outside_bytes(), device.live_bytes()]
        assert len(kept) == found.pop()
        torch.cuda.set_per_process_memory_fraction(0.25)  # as the user might
        return [n // MIB for n in (*found, device.available_bytes())]

    assert forked(seen, context="100MiB") == [924, 502, 100, 256]


@pytest.mark.parametrize("own", [1.0, 0.5, 1 / 3])
@pytest.mark.parametrize("error", [None, RuntimeError("x"), KeyboardInterrupt()], ids=["none", "error", "Ctrl-C"])
def test_a_cap_is_enforced_below_the_users_fraction(own, error):
    def capped():
        device, most = opened(), int(own * 512) * 2
        torch.cuda.set_per_process_memory_fraction(own)
        before = torch.cuda.get_per_process_memory_fraction()
        for asked, held in ((100, 100), (most + 2, most), (None, most)):
            try:
                with device.cap(None if asked is None else asked * MIB):
                    assert is_limit(held)
                    if error:
                        raise error
            except type(error) as raised:
                assert raised is error  # noqa: PT017
        for odd_bytes in range(10 * MIB, 10 * MIB + 700, 7):
            with device.cap(odd_bytes):
                pass
        return before, torch.cuda.get_per_process_memory_fraction()

    before, after = forked(capped)
    assert before == after


def test_peaks_and_counters_start_with_the_trial():
    def seen():
        device, kept = opened(), take(10)
        with device.cap(600 * MIB):
            for mib in (400, 500):  # the second empties the cache that the first left
                take(mib)
            device.release()
            device.start_trial()
            usages = [device.usage()]
            for mib in (50, 70, 500):
                take(mib)
                usages.append(device.usage())
        assert len(kept)
        peaks = [(one.peak_allocated_bytes // MIB, one.peak_reserved_bytes // MIB) for one in usages]
        return [(*peak, one.alloc_retries, one.under_pressure) for peak, one in zip(peaks, usages, strict=True)]

    assert forked(seen) == [(10, 10, 0, False), (60, 60, 0, False), (80, 130, 0, False), (510, 510, 1, True)]


@pytest.mark.parametrize(("free_mib", "pressed"), [(11, False), (10, True), (0, True)])
def test_a_full_card_is_under_pressure(tmp_path, free_mib, pressed):
    def seen():
        device = opened()
        device.start_trial()
        (tmp_path / "held").write_text(f"{1024 - free_mib}MiB")
        return device.usage().under_pressure

    (tmp_path / "held").touch()
    assert forked(seen, neighbour=tmp_path / "held") is pressed


@pytest.mark.parametrize(("code", "healthy"), [(700, False), (710, False), (2, True)], ids=["address", "assert", "oom"])
def test_only_a_sticky_error_makes_it_unhealthy(code, healthy):
    def seen():
        device = AcceleratorDevice(torch.device("cuda"))
        with device.cap(1):
            first = device.healthy()  # the allocator has nothing left
        fail("launch", code=code)
        return first, device.healthy()

    assert forked(seen) == (True, healthy)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_its_health_does_not_depend_on_defaults(dtype):
    def probe():
        torch.set_default_dtype(dtype)
        torch.set_default_device("cuda")
        result = oomprobe.find_max_batch(*mlp(torch.optim.SGD), resolution=0.2, progress="off")
        return result.batch_size, {trial.verdict for trial in result.trials}

    batch_size, verdicts = forked(probe)
    assert batch_size > 1000
    assert verdicts == {oomprobe.Verdict.FITS, oomprobe.Verdict.OOM}


def test_a_stated_budget_is_a_limit_and_is_named(tmp_path):
    def seen():
        device = opened("cuda:0:256MiB")
        for cap_bytes in (None, 300 * MIB):
            with device.cap(cap_bytes):
                assert is_limit(256)
        alone = device.available_bytes() // MIB
        (tmp_path / "held").write_text("900MiB")
        return device.name, alone, device.available_bytes() // MIB, device.notes

    (tmp_path / "held").touch()
    assert forked(seen, neighbour=tmp_path / "held") == ("Stub GPU, 256.00 MiB of it", 256, 124, ())
