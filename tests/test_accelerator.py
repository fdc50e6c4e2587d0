import ast
import inspect
import math
from pathlib import Path
from unittest.mock import Mock

import pytest
import tenacity
import torch
from fake_accelerator import CARD, ILLEGAL_ADDRESS, MIB, FakeModule, LedgerDevice, ledger

from oomprobe import DeviceLostError, Phase, Verdict, find_max_batch
from oomprobe.devices import Device, accelerator
from oomprobe.devices.accelerator import kernel_answers

H200_BYTES = 150_109_880_320  # no power of two: fractions of it are no whole bytes
AWKWARD_BYTES = 31_160_284_221  # divided by those and multiplied again, rounded down, it is one byte less


def opened(**card):
    fake = FakeModule(**card)
    return fake, LedgerDevice(fake)


def probe(ledger_parts, **options):
    device, model, step, _ = ledger_parts
    return find_max_batch(model, step, device=device, **{"progress": "off", "confirm_steps": 2, **options})


# --- the fake is like torch, and the device asks for nothing that torch lacks ---


def functions_used():
    tree = ast.parse(Path(accelerator.__file__).read_text())
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "_torch"
    }


def test_the_fake_has_every_function_the_device_uses():
    assert len(functions_used()) >= 10
    assert functions_used() <= set(dir(FakeModule))


@pytest.mark.parametrize("module", [torch.cuda, torch.xpu], ids=["cuda", "xpu"])
@pytest.mark.parametrize("name", sorted(functions_used()))
def test_torch_has_the_function_with_the_same_arguments(module, name):
    of_torch = inspect.signature(getattr(module, name)).parameters
    of_fake = inspect.signature(getattr(FakeModule(), name)).parameters
    assert [(p.name, p.default) for p in of_fake.values()] == [(p.name, p.default) for p in of_torch.values()]


def test_the_fake_refuses_what_torch_refuses():
    fake = FakeModule()
    with pytest.raises(TypeError, match="must be `float`"):
        fake.set_per_process_memory_fraction(1)
    with pytest.raises(ValueError, match="Allowed range: 0~1"):
        fake.set_per_process_memory_fraction(1.1)
    with pytest.raises(ValueError, match="Expected a cuda device"):
        fake.mem_get_info(torch.device("cpu"))


# --- what it is ---


def test_name_total_and_index():
    device = LedgerDevice(FakeModule(), device=torch.device("cuda"))
    assert isinstance(device, Device)
    assert (device.name, device.total_bytes, device.torch_device) == ("Fake Card", 1024 * MIB, CARD)
    assert LedgerDevice(FakeModule(), device=torch.device("cuda", 3)).torch_device.index == 3
    assert device.on_host is False


@pytest.mark.parametrize(
    ("properties", "integrated"),
    [({}, False), ({"is_integrated": 0}, False), ({"is_integrated": 1}, True), ({"is_integrated_gpu": True}, True)],
)
def test_integrated_is_read_under_both_of_its_names(properties, integrated):
    assert opened(**properties)[1].integrated is integrated


# --- available and outside ---


def test_available_is_free_and_own_reserved():
    fake, device = opened(outside_bytes=100 * MIB)
    own = fake.alloc(200 * MIB)
    assert device.available_bytes() == 924 * MIB
    assert device.outside_bytes() == 100 * MIB
    assert device.live_bytes() == 200 * MIB
    del own


def test_available_is_measured_after_the_cache_was_given_back():
    fake, device = opened()
    fake.alloc(300 * MIB)
    assert fake.memory_reserved() == 300 * MIB
    device.available_bytes()
    assert fake.memory_reserved() == 0
    assert fake.calls.index("synchronize") < fake.calls.index("empty_cache") < fake.calls.index("mem_get_info")


def test_available_is_bounded_by_the_users_own_fraction():
    fake, device = opened(outside_bytes=100 * MIB)
    fake.set_per_process_memory_fraction(0.25)
    assert device.available_bytes() == 256 * MIB
    fake.outside_bytes = 900 * MIB
    assert device.available_bytes() == 124 * MIB


# --- the cap ---


def test_the_cap_is_the_budget_to_the_byte():
    fake, device = opened(total_bytes=H200_BYTES)
    for limit_bytes in (1, AWKWARD_BYTES, H200_BYTES // 3, H200_BYTES - 1):
        with device.cap(limit_bytes):
            assert fake.get_per_process_memory_fraction() == limit_bytes / H200_BYTES
            block = fake.alloc(limit_bytes)
            del block
            device.release()
            with pytest.raises(torch.OutOfMemoryError):
                fake.alloc(limit_bytes + 1)


@pytest.mark.parametrize("own", [1.0, 0.5, 1 / 3, math.nextafter(AWKWARD_BYTES / H200_BYTES, 1)])
def test_the_users_own_fraction_bounds_the_cap_and_comes_back_to_the_bit(own):
    fake, device = opened(total_bytes=H200_BYTES)
    if own != 1:
        fake.set_per_process_memory_fraction(own)
    before = fake.get_per_process_memory_fraction(), fake._allowed_bytes
    for round_ in range(200):
        with device.cap(10**9 + 7 * round_):
            pass
    for error in (RuntimeError("x"), KeyboardInterrupt(), torch.OutOfMemoryError("x")):
        with pytest.raises(type(error)) as raised, device.cap(10 * MIB):
            raise error
        assert raised.value is error
    with device.cap(int(own * H200_BYTES) + MIB), pytest.raises(torch.OutOfMemoryError):
        fake.alloc(int(own * H200_BYTES) + MIB)
    assert (fake.get_per_process_memory_fraction(), fake._allowed_bytes) == before


def test_a_poisoned_device_does_not_hide_the_steps_error():
    fake, device = opened()

    def poisoned_step():
        with device.cap(10 * MIB):
            fake.poison()
            raise ValueError("the step's own")

    with pytest.raises(ValueError, match="the step's own"):
        poisoned_step()


def test_a_cap_that_cannot_be_lifted_is_reported():
    fake, device = opened()
    with pytest.raises(torch.AcceleratorError), device.cap(10 * MIB):
        fake.poison()


# --- peaks, counters, pressure ---


def test_peaks_are_those_since_the_trial_began():
    fake, device = opened()
    kept = fake.alloc(10 * MIB)
    fake.alloc(500 * MIB)
    device.release()
    device.start_trial()
    assert device.usage().peak_allocated_bytes == 10 * MIB
    fake.alloc(50 * MIB)
    fake.alloc(70 * MIB)
    usage = device.usage()
    assert (usage.peak_allocated_bytes, usage.peak_reserved_bytes) == (80 * MIB, 130 * MIB)
    del kept


def test_counters_are_those_since_the_trial_began():
    fake, device = opened(total_bytes=100 * MIB)
    fake.alloc(60 * MIB)
    fake.alloc(70 * MIB)
    device.release()
    device.start_trial()
    assert (device.usage().alloc_retries, device.usage().under_pressure) == (0, False)
    fake.alloc(60 * MIB)
    fake.alloc(70 * MIB)
    device.release()
    usage = device.usage()
    assert (usage.alloc_retries, usage.under_pressure) == (1, True)


def test_out_of_memory_under_a_cap_is_pressure():
    fake, device = opened()
    device.start_trial()
    with pytest.raises(torch.OutOfMemoryError), device.cap(MIB):
        fake.alloc(2 * MIB)
    assert device.usage().under_pressure is True


@pytest.mark.parametrize(("outside_mib", "pressure"), [(1000, False), (1013, False), (1014, True), (1024, True)])
def test_next_to_nothing_free_is_pressure(outside_mib, pressure):
    fake, device = opened(outside_bytes=outside_mib * MIB)
    device.start_trial()
    assert device.usage().under_pressure is pressure
    assert fake.memory_stats_as_nested_dict()["num_ooms"] == 0


def test_an_allocator_without_counters_is_not_under_pressure(monkeypatch):
    fake, device = opened()  # torch.xpu.memory_stats counts bytes only
    monkeypatch.setattr(fake, "_counters", {})
    device.start_trial()
    assert (device.usage().alloc_retries, device.usage().under_pressure) == (0, False)


# --- health ---


def test_healthy_until_a_sticky_error():
    fake, device = opened()
    assert device.healthy() is True
    fake.poison()
    assert device.healthy() is False


@pytest.mark.parametrize(
    ("error", "healthy"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."), True),
        # what a kernel that is loaded only now raises on a full card: no OutOfMemoryError
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1.00 GB)"), True),
        (torch.AcceleratorError(ILLEGAL_ADDRESS), False),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"), False),
        (RuntimeError("something else"), False),
    ],
)
def test_only_out_of_memory_in_the_check_is_a_sign_of_life(monkeypatch, error, healthy):
    monkeypatch.setattr(accelerator.torch, "ones", Mock(side_effect=error))
    assert kernel_answers(torch.device("cpu"), lambda: None) is healthy


def test_a_wrong_value_is_not_healthy(monkeypatch):
    monkeypatch.setattr(accelerator.torch, "ones", lambda *args, **kwargs: torch.zeros(1))
    assert kernel_answers(torch.device("cpu"), lambda: None) is False


# --- a whole probe over the fake: the truth is known to the sample ---


@pytest.mark.parametrize("memory_fraction", [0.9, 0.8, 0.33])
def test_the_answer_is_exact_and_the_margin_is_memory(memory_fraction):
    parts = ledger(fixed_bytes=100 * MIB, outside_bytes=37 * MIB)
    result = probe(parts, memory_fraction=memory_fraction)
    available = (1024 - 37) * MIB
    assert result.available_bytes == available
    assert result.budget_bytes == int(memory_fraction * available)
    assert result.batch_size == (result.budget_bytes - 100 * MIB) // MIB
    assert result.limited_by == "memory"
    answers = [t for t in result.trials if t.batch_size == result.batch_size and t.phase is Phase.CONFIRM]
    assert [t.passed for t in answers] == [True]
    assert answers[0].cap_bytes == result.budget_bytes
    assert answers[0].peak_reserved_bytes <= memory_fraction * available
    above = [t for t in result.trials if t.batch_size == result.batch_size + 1]
    assert above
    assert {(t.verdict, t.cap_bytes) for t in above} == {(Verdict.OOM, result.budget_bytes)}
    assert result.state_verified
    assert not result.contaminated


def test_available_is_sampled_after_the_first_trial_that_passed():
    def load_kernels(fake, batch_size, call):
        fake.outside_bytes = max(fake.outside_bytes, 50 * MIB)

    result = probe(ledger(fixed_bytes=100 * MIB, before_alloc=load_kernels))
    assert result.available_bytes == (1024 - 50) * MIB
    assert result.batch_size == (int(0.9 * (1024 - 50) * MIB) - 100 * MIB) // MIB


def test_at_one_the_answer_is_the_limit():
    result = probe(ledger(fixed_bytes=100 * MIB, outside_bytes=37 * MIB), memory_fraction=1.0)
    assert result.batch_size == result.limit_batch_size == 1024 - 37 - 100
    assert result.first_failing_batch_size == result.batch_size + 1
    assert {t.cap_bytes for t in result.trials} == {result.available_bytes}  # the driver's edge is never reached


@pytest.mark.parametrize(("fixed_mib", "asked_again"), [(100, False), (500, True)])
def test_a_size_within_the_budget_is_not_run_again(fixed_mib, asked_again):
    # 900 MiB of budget: doubling ends at 512, which peaks at 612 MiB, or at 1012 MiB
    card = ledger(fixed_bytes=fixed_mib * MIB, total_bytes=4096 * MIB)
    result = probe(card, memory_fraction=900 / 4096, max_batch=512)
    assert result.limit_batch_size >= 512
    bisected = [t.batch_size for t in result.trials if t.phase is Phase.BISECT]
    assert (512 in bisected) is asked_again


def test_the_users_own_fraction_bounds_the_probe():
    parts = ledger(fixed_bytes=1000 * MIB, per_sample_bytes=50 * MIB, total_bytes=H200_BYTES)
    fake = parts[0].fake
    fake.set_per_process_memory_fraction(1 / 3)
    before = fake._allowed_bytes
    result = probe(parts)
    assert result.budget_bytes == pytest.approx(0.9 * H200_BYTES / 3, abs=2)
    assert result.batch_size == (result.budget_bytes - 1000 * MIB) // (50 * MIB)
    assert fake._allowed_bytes == before


# --- neighbours and leaks ---


def neighbour(grows_to_mib):
    def grow(fake, batch_size, call):
        if call == 12:
            fake.outside_bytes = grows_to_mib * MIB

    return grow


@pytest.mark.parametrize(("grows_to_mib", "contaminated"), [(10, False), (500, False), (600, True)])
def test_a_neighbour_that_grows_while_probing_is_told(grows_to_mib, contaminated, monkeypatch):
    monkeypatch.setattr("oomprobe.session.WAIT", tenacity.wait_none())
    result = probe(ledger(before_alloc=neighbour(grows_to_mib)))
    assert result.contaminated is contaminated
    assert any("came while probing" in note for note in result.notes)


def test_a_leak_is_found_to_the_byte():
    kept = []

    def keep(fake, batch_size, call):
        if call == 6:
            kept.append(fake.alloc(5 * MIB))

    result = probe(ledger(before_alloc=keep))
    assert {t.leaked_bytes for t in result.trials if t.leaked_bytes} == {5 * MIB}
    assert result.trials[0].leaked_bytes == 0


# --- other ends than out of memory ---


def test_poison_ends_everything_and_the_error_carries_the_state():
    def illegal_access(fake, batch_size, call):
        if batch_size > 20:
            fake.poison()
            raise torch.AcceleratorError(ILLEGAL_ADDRESS)

    device, model, step, called = ledger(after_alloc=illegal_access)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(DeviceLostError, match=r"(?s)no further verdict.*oomprobe run") as raised:
        find_max_batch(model, step, device=device, progress="off")
    error = raised.value
    assert [t.batch_size for t in error.trials] == [1, 2, 4, 8, 16, 32]
    assert [t.verdict for t in error.trials] == [Verdict.FITS] * 5 + [Verdict.POISONED]
    assert "illegal memory access" in error.trials[-1].error
    assert called.count(32) == 1
    assert called[-1] == 32
    assert error.snapshot["model"].keys() == before.keys()
    assert all(torch.equal(error.snapshot["model"][name], before[name]) for name in before)


def test_a_bug_on_a_device_that_died_is_no_bug():
    def die(fake, batch_size, call):
        if batch_size > 20:
            fake.poison()
            raise ValueError("a value read from a dead device")

    with pytest.raises(DeviceLostError) as raised:
        probe(ledger(after_alloc=die))
    assert raised.value.trials[-1].verdict is Verdict.POISONED


def test_poison_found_while_measuring_is_reported():
    device, model, step, _ = ledger()
    device.fake.synchronize = lambda device=None: None  # the step looks fine
    real = device.fake.empty_cache

    def empty_cache():
        device.fake.poison()
        real()

    device.fake.empty_cache = empty_cache
    with pytest.raises(DeviceLostError) as raised:
        find_max_batch(model, step, device=device, progress="off")
    assert raised.value.snapshot["model"].keys() == model.state_dict().keys()
