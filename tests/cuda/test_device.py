"""`AcceleratorDevice` with torch's CUDA allocator: which one is chosen, available memory, caps, peaks, pressure and health."""

import platform
from types import SimpleNamespace

import pytest
import torch
from bed import fail, forked
from torch import nn
from zoo import mlp

import oomprobe
from oomprobe.devices import choose_device, list_devices
from oomprobe.devices.accelerator import AcceleratorDevice
from oomprobe.devices.choose import describe_device
from oomprobe.ground import linux
from oomprobe.ground.units import parse_bytes

MIB, TIB = 2**20, 2**40


def opened(stated="cuda"):
    return choose_device(stated, nn.ReLU())


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
        take(
            300
        )  # stays in the cache, and so do 2 MiB for the byte that shows whether the allocator counts
        found = [
            device.available_bytes(),
            torch.cuda.memory_reserved(),
            device.outside_bytes(),
            device.live_bytes(),
        ]
        assert len(kept) == found.pop()
        torch.cuda.set_per_process_memory_fraction(0.25)  # as the user might
        return [n // MIB for n in (*found, device.available_bytes())]

    assert forked(seen, context="100MiB") == [924, 502, 100, 256]


@pytest.mark.parametrize("own", [1.0, 0.5, 1 / 3])
@pytest.mark.parametrize(
    "error", [None, RuntimeError("x"), KeyboardInterrupt()], ids=["none", "error", "Ctrl-C"]
)
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


def test_a_cap_costs_no_byte():
    """Some torch versions round the fraction down; the one here rounds to the nearest byte."""
    limits = range(31_160_284_221, 31_160_284_921, 7)  # some lose a byte in the division

    def seen():
        device, fractions = opened(), []
        torch.cuda.set_per_process_memory_fraction(0.9)
        own = torch.cuda.get_per_process_memory_fraction()
        torch.cuda.set_per_process_memory_fraction = lambda fraction, device: fractions.append(
            fraction
        )
        for limit_bytes in limits:
            with device.cap(limit_bytes):
                pass
        return [int(fraction * device.total_bytes) for fraction in (*fractions, own)]

    *held, own_bytes = forked(seen, memory="150109880320")
    assert (held[::2], {*held[1::2]}) == ([*limits], {own_bytes})


@pytest.mark.parametrize(("fraction", "limit_mib"), [(0.98, 400), (0.25, 256)])
def test_a_fraction_that_the_step_sets_is_held_to_the_cap(fraction, limit_mib):
    """The smaller of the two; afterwards the user's own holds again."""

    def seen():
        device = opened()
        with device.cap(400 * MIB):
            torch.cuda.set_per_process_memory_fraction(fraction)
            inside = is_limit(limit_mib)
        torch.cuda.empty_cache()
        take(600)
        return inside, [note for note in device.notes if "sets the allocator's share" in note]

    inside, notes = forked(seen, memory="1GiB", context="100MiB")
    assert inside
    assert len(notes) == 1


def test_a_torch_that_cannot_cap_is_refused():
    def seen():
        del torch.cuda.set_per_process_memory_fraction  # as torch.xpu before 2.10
        opened().available_bytes()

    with pytest.raises(
        oomprobe.UnreliableError,
        match=r"Stub GPU: torch .* cannot limit .*Use torch 2\.10 or later",
    ):
        forked(seen)


LOST = getattr(torch, "AcceleratorError", RuntimeError)  # which torch 2.6 does not have


@pytest.mark.parametrize(("error", "raised"), [(ValueError("its own"), ValueError), (None, LOST)])
def test_a_cap_that_cannot_be_lifted_hides_no_error(error, raised):
    def lost(fraction, device):
        raise LOST("CUDA error: an illegal memory access was encountered")

    def poisoned_step():
        with opened().cap(10 * MIB):
            torch.cuda.set_per_process_memory_fraction = lost
            if error:
                raise error

    with pytest.raises(raised):
        forked(poisoned_step)


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
        peaks = [
            (one.peak_allocated_bytes // MIB, one.peak_reserved_bytes // MIB) for one in usages
        ]
        return [
            (*peak, one.alloc_retries, one.under_pressure)
            for peak, one in zip(peaks, usages, strict=True)
        ]

    assert forked(seen) == [
        (10, 10, 0, False),
        (60, 60, 0, False),
        (80, 130, 0, False),
        (510, 510, 1, True),
    ]


@pytest.mark.parametrize(("free_mib", "pressed"), [(11, False), (10, True), (0, True)])
def test_a_full_card_is_under_pressure(tmp_path, free_mib, pressed):
    def seen():
        device = opened()
        device.start_trial()
        (tmp_path / "held").write_text(f"{1024 - free_mib}MiB")
        return device.usage().under_pressure

    (tmp_path / "held").touch()
    assert forked(seen, neighbour=tmp_path / "held") is pressed


@pytest.mark.parametrize(
    ("code", "healthy"), [(700, False), (710, False), (2, True)], ids=["address", "assert", "oom"]
)
def test_only_a_sticky_error_makes_it_unhealthy(code, healthy):
    def seen():
        device = AcceleratorDevice(torch.device("cuda"))
        with device.cap(1):
            first = device.healthy()  # the allocator has nothing left
        fail("launch", code=code)
        return first, device.healthy()

    assert forked(seen) == (True, healthy)


def test_its_health_does_not_depend_on_defaults():
    def probe():
        torch.set_default_device("cuda")
        healthy = []
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            torch.set_default_dtype(dtype)
            healthy.append(opened().healthy())
        result = oomprobe.find_max_batch(*mlp(torch.optim.SGD), resolution=0.2, progress="off")
        return healthy, result.batch_size, {trial.verdict for trial in result.trials}

    healthy, batch_size, verdicts = forked(probe)
    assert healthy == [True] * 3
    assert batch_size > 1000
    assert verdicts == {oomprobe.Verdict.FITS, oomprobe.Verdict.OOM}


# --- which device is chosen ---


def on(*places):
    """Return a model with a layer on each of the places."""
    return nn.Sequential(*(nn.Linear(2, 2, device=place) for place in places))


def test_the_models_device_is_chosen_and_may_be_stated():
    def seen():
        every = [(device, on("cuda:0")) for device in (None, "cuda", torch.device("cuda", 0))]
        every += [(None, on()), ("cpu", on("cpu"))]
        chosen = [str(choose_device(device, model).torch_device) for device, model in every]
        return chosen, [describe_device(device) for device in list_devices()]

    chosen, (first, second, host) = forked(seen, memory="1GiB,1GiB")
    assert chosen == ["cuda:0"] * 4 + ["cpu"]
    assert (first, second) == ("cuda:0  Stub GPU  1.00 GiB", "cuda:1  Stub GPU  1.00 GiB")
    assert host.startswith("cpu  host memory  ")


ABSENT = f"no device '{{}}' here: torch {torch.__version__} sees 2 of type cuda"
REFUSED = {
    ("xpu",): ABSENT.format("xpu"),
    (torch.device("cuda", 2),): ABSENT.format("cuda:2"),
    (
        "cuda:1:1.01GiB",
    ): "of Stub GPU requested, but only 1.00 GiB can be used: state less, such as '768MiB'",
    (
        "cuda:1",
        "cuda:0",
    ): "device='cuda:1', but the model's parameters are on cuda:0: call model.to('cuda:1') first, or leave",
    (
        "cuda",
        "cpu",
    ): "device='cuda', but the model's parameters are on cpu: call model.to('cuda:0') first",
    (
        None,
        "cpu",
        "cuda:0",
    ): "the model is on 2 devices (0.weight on cpu, 1.weight on cuda:0): oomprobe",
}


def refusal(device=None, *places):
    with pytest.raises((oomprobe.InvalidArgumentError, oomprobe.NoDeviceError)) as refused:
        choose_device(device, on(*places))
    return str(refused.value)


def test_what_cannot_be_chosen_is_refused():
    said = forked(lambda: [refusal(*asked) for asked in REFUSED], memory="1GiB,1GiB")
    for text, expected in zip(said, REFUSED.values(), strict=True):
        assert expected in text


def test_a_stated_budget_is_a_limit_and_is_named(tmp_path):
    def seen():
        stated = [opened(text) for text in ("cuda:0:256MiB", "cuda:1:0.5 GiB", "cuda:1:100 mb")]
        device = stated[0]
        for cap_bytes in (None, 300 * MIB):
            with device.cap(cap_bytes):
                assert is_limit(256)
        with stated[1].cap(300 * MIB):  # torch 2.6 makes the card that is capped the current one
            assert torch.cuda.current_device() == 0
        alone = [(str(one.torch_device), one.available_bytes()) for one in stated]
        (tmp_path / "held").write_text("900MiB")
        return alone, device.name, device.available_bytes() // MIB, device.notes

    (tmp_path / "held").touch()
    alone, *said = forked(seen, memory="1GiB,1GiB", neighbour=tmp_path / "held")
    assert alone == [("cuda:0", 256 * MIB), ("cuda:1", 512 * MIB), ("cuda:1", 10**8)]
    assert said == ["Stub GPU, 256.00 MiB of it", 124, ()]


# --- memory that is the host's, or spills there ---


def test_a_card_that_spills_is_capped_at_its_own_memory(tmp_path):
    def seen():
        platform.release = lambda: "5.15.167.4-microsoft-standard-WSL2"
        device = opened()
        alone = device.available_bytes() // MIB
        (tmp_path / "held").write_text("200MiB")
        for limit_mib, held_mib in ((None, 1336), (1400, 1336), (700, 700)):
            with device.cap(limit_mib and limit_mib * MIB):
                assert is_limit(held_mib)
        return alone, device.notes

    (tmp_path / "held").touch()
    alone, [note] = forked(seen, memory="2GiB", neighbour=tmp_path / "held")
    assert (alone, "on WSL the driver lends system memory" in note) == (1536, True)


def share_memory_with_the_host(total_bytes, name="is_integrated"):
    """Let this process's cards be such as those of a Jetson, or with the name that torch.xpu uses."""
    torch.cuda.init()
    properties = SimpleNamespace(
        name="Jetson", total_memory=total_bytes, major=8, minor=7, **{name: 1}
    )
    torch.cuda.get_device_properties = lambda device: properties


@pytest.mark.parametrize("name", ["is_integrated", "is_integrated_gpu"])
def test_memory_shared_with_the_host_needs_a_budget(name):
    def seen():
        share_memory_with_the_host(2**30, name)
        said = [refusal(device) for device in ("cuda", torch.device("cuda"), None, "cuda:1")]
        lines, device = (
            [describe_device(device) for device in list_devices()],
            opened("cuda:0:768MiB"),
        )
        linux.free_bytes = lambda: None  # another system
        said.append(refusal("cuda"))
        torch.cuda.set_per_process_memory_fraction(0.25)
        return said, lines, device.integrated, device.notes, opened().available_bytes() // MIB

    said, lines, integrated, [note], of_fraction = forked(seen, memory="1GiB,1GiB")
    why = "Jetson shares the host's memory: without a budget no allocation fails and the whole machine swaps or freezes"
    for text, typed in zip(
        said, [*["cuda:0:768MiB"] * 3, "cuda:1:768MiB", "cuda:0:384MiB"], strict=True
    ):
        assert text.startswith(f"{why} (pytorch#174358). State one: device='{typed}'")
    assert (
        lines[1]
        == "cuda:1  Jetson  1.00 GiB  shares the host's memory: state a budget, such as 'cuda:1:768MiB'"
    )
    assert (integrated, of_fraction) == (True, 256)
    assert "shares the host's memory" in note


def test_shared_memory_is_bounded_by_free_host_memory():
    def seen():
        share_memory_with_the_host(64 * TIB)
        device, own = opened("cuda:0:60TiB"), take(8 * 2**20)
        typed = refusal().partition("device='cuda:0:")[2].partition("'")[0]
        available_bytes = device.available_bytes()
        return (
            available_bytes - torch.cuda.memory_reserved(),
            parse_bytes(typed),
            linux.free_bytes(),
            len(own),
        )

    more_bytes, typed_bytes, free_bytes, own_bytes = forked(seen, memory="64TiB")
    assert own_bytes == 8 * TIB
    assert [more_bytes, typed_bytes * 4 / 3] == pytest.approx(
        [free_bytes] * 2, rel=0.3
    )  # others use it meanwhile
