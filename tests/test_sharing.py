"""Where a card does not simply run out: Windows, WSL, memory shared with the host, NVIDIA MPS, stated budgets."""

import ast
import re
import sys
from pathlib import Path

import pytest
import torch
from fake_accelerator import MIB, FakeModule, LedgerDevice, ledger

from oomprobe import InvalidArgumentError, find_max_batch
from oomprobe.devices import choose_device, linux, list_devices, mps, sharing
from oomprobe.devices.choose import describe_device
from oomprobe.devices.mps import MpsDevice

GIB = 2**30
WITHOUT_PARAMETERS = torch.nn.ReLU()


def opened(*, stated_bytes=None, **card):
    fake = FakeModule(**card)
    return fake, LedgerDevice(fake, stated_bytes)


def probe(ledger_parts, **options):
    device, model, step, called = ledger_parts
    called.clear()
    return find_max_batch(model, step, device=device, **{"progress": "off", "confirm_steps": 2, **options})


def holds(fake, size_bytes):
    """Whether an allocation of so much passes now, and one MiB more does not."""
    fake.alloc(size_bytes)
    fake.empty_cache()
    with pytest.raises(torch.OutOfMemoryError):
        fake.alloc(size_bytes + MIB)
    return True


# --- why ---


@pytest.mark.parametrize(
    ("system", "release", "where"),
    [
        ("win32", "10", "Windows"),
        ("linux", "5.15.167.4-microsoft-standard-WSL2", "WSL"),
        ("linux", "4.4.0-19041-Microsoft", "WSL"),
        ("linux", "6.8.0-45-generic", None),
        ("darwin", "23.6.0", None),
    ],
)
def test_where_memory_spills(monkeypatch, system, release, where):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr("platform.release", lambda: release)
    why = sharing.why_spills()
    assert why is None if where is None else f"on {where} the driver lends system memory" in why


@pytest.mark.parametrize("named", ["", "/dev/null", "/run/mps"])
@pytest.mark.parametrize("daemon", [True, False])
def test_a_daemon_is_known_by_the_environment_or_by_its_pipe(monkeypatch, tmp_path, named, daemon):
    if daemon:
        (tmp_path / "control").touch()
    monkeypatch.setattr(sharing, "MPS_PIPES", tmp_path)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", named)
    why = sharing.why_neighbours()
    expected = named == "/run/mps" or (daemon and named != "/dev/null")
    assert (why is not None) is expected
    if why is not None:
        assert "may kill its neighbours" in why
        assert (named or str(tmp_path)) in why


def test_intels_cards_have_no_daemon_of_nvidias(monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/run/mps")
    assert sharing.cap_reasons("xpu") == ()
    assert opened()[1].notes == sharing.cap_reasons("cuda") != ()


def test_an_ordinary_card_has_no_notes_and_no_cap():
    fake, device = opened()
    assert device.notes == ()
    fake.calls.clear()
    with device.cap(None):
        assert fake.calls == []


# --- a card that must be capped ---


@pytest.fixture
def must_be_capped(monkeypatch):
    monkeypatch.setattr(sharing, "cap_reasons", lambda kind: ("memory spills here",))


@pytest.mark.usefixtures("must_be_capped")
def test_no_limit_is_what_is_available():
    fake, device = opened(outside_bytes=24 * MIB, spilled_bytes=10 * GIB)
    fake.alloc(300 * MIB)  # in the cache, and to be given back
    with device.cap(None):
        assert holds(fake, 1000 * MIB)
    assert fake.get_per_process_memory_fraction() == 1.0
    fake.outside_bytes = 224 * MIB  # a neighbour came
    for limit_bytes, held_bytes in ((None, 800 * MIB), (900 * MIB, 800 * MIB), (700 * MIB, 700 * MIB)):
        with device.cap(limit_bytes):
            assert holds(fake, held_bytes)


@pytest.mark.usefixtures("must_be_capped")
def test_what_spilled_already_is_no_memory_of_the_card():
    fake, device = opened(spilled_bytes=10 * GIB)
    block = fake.alloc(1500 * MIB)
    assert device.available_bytes() == 1024 * MIB
    del block


@pytest.mark.usefixtures("must_be_capped")
@pytest.mark.parametrize("memory_fraction", [0.9, 1.0])
def test_a_probe_on_a_card_that_spills_stops_at_the_card(memory_fraction):
    card = ledger(fixed_bytes=100 * MIB, outside_bytes=24 * MIB, spilled_bytes=20 * GIB)
    result = probe(card, memory_fraction=memory_fraction)
    assert 900 >= result.limit_batch_size >= result.batch_size == int(memory_fraction * 1000) - 100
    assert "memory spills here" in result.notes


# --- a stated budget ---


def test_a_stated_budget_bounds_and_is_named():
    fake, device = opened(stated_bytes=256 * MIB)
    assert device.name == "Fake Card, 256.00 MiB of it"
    assert device.total_bytes == 1024 * MIB
    assert device.notes == ()
    assert device.available_bytes() == 256 * MIB
    fake.outside_bytes = 900 * MIB
    assert device.available_bytes() == 124 * MIB
    fake.outside_bytes = 0
    device.available_bytes()
    for limit_bytes in (None, 300 * MIB):
        with device.cap(limit_bytes):
            assert holds(fake, 256 * MIB)
    assert fake.get_per_process_memory_fraction() == 1.0


def test_a_probe_within_a_stated_budget():
    result = probe(ledger(stated_bytes=256 * MIB), memory_fraction=1.0)
    assert result.batch_size == result.limit_batch_size == 256 - 64
    assert result.device == "Fake Card, 256.00 MiB of it"


@pytest.mark.parametrize(
    ("text", "index", "size"),
    [
        ("{}:256MiB", 0, 256 * MIB),
        ("{}:1:256MiB", 1, 256 * MIB),
        ("{}:0:0.5 GiB", 0, GIB // 2),
        ("{}:1:100 mb", 1, 10**8),
        ("{}:1", 1, GIB),
        ("{}", 0, GIB),
    ],
)
@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_budget_after_the_device(cards, kind, text, index, size):
    cards.kind = kind
    device = choose_device(text.format(kind), WITHOUT_PARAMETERS)
    assert (device.torch_device, device.available_bytes()) == (torch.device(kind, index), size)


@pytest.mark.parametrize("text", ["cuda:2GiB", "cuda:1:1.01GiB"])
def test_more_than_the_card_has(cards, text):
    match = r"of Fake Card were asked for, and all of it is 1.00 GiB: state less, such as '768MiB'"
    with pytest.raises(InvalidArgumentError, match=match):
        choose_device(text, WITHOUT_PARAMETERS)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("cuda:8GiBs", "'8GiBs' is not a size in memory"),
        ("cuda:0GiB", "'0GiB' is not a size in memory"),
        ("cuda:8GiB:1", "not a device that torch knows"),
        ("cuda:1:8", "not a device that torch knows"),
        ("cuda:1:2:8GiB", "not a device that torch knows"),
        ("cuda:GiB", "not a device that torch knows"),
        (":8GiB", "not a device that torch knows"),
        ("cuda:1.5", "not a device that torch knows"),
    ],
)
def test_no_budget(cards, text, match):
    with pytest.raises(InvalidArgumentError, match=match):
        choose_device(text, WITHOUT_PARAMETERS)


# --- a device that shares the host's memory ---


@pytest.mark.parametrize("name", ["is_integrated", "is_integrated_gpu"])
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda"), None])
def test_shared_memory_needs_a_budget(cards, name, device):
    cards.properties[name] = 1
    cards.free = GIB // 2
    with pytest.raises(InvalidArgumentError) as raised:
        choose_device(device, WITHOUT_PARAMETERS)
    text = str(raised.value)
    assert "the whole machine swaps or freezes (pytorch#174358)" in text
    assert "512.00 MiB are available now" in text
    typed = re.search(r"device='([^']+)'", text)[1]
    assert typed == f"cuda:{1 if device == 'cuda:1' else 0}:384MiB"
    assert choose_device(typed, WITHOUT_PARAMETERS).available_bytes() == 384 * MIB


@pytest.mark.parametrize(("free", "typed"), [(None, "384MiB"), (400 * GIB, "768MiB"), (0, "1B")])
def test_what_is_advised_can_be_typed(cards, free, typed):
    cards.properties["is_integrated"] = True
    cards.free = free
    with pytest.raises(InvalidArgumentError, match=f"device='cuda:0:{typed}'"):
        choose_device("cuda", WITHOUT_PARAMETERS)
    choose_device(f"cuda:0:{typed}", WITHOUT_PARAMETERS)


def test_a_fraction_of_the_users_own_is_a_budget(cards):
    cards.properties["is_integrated"] = True
    cards.fraction = 0.25
    assert choose_device("cuda", WITHOUT_PARAMETERS).available_bytes() == 256 * MIB
    cards.free = 100 * MIB
    assert choose_device("cuda", WITHOUT_PARAMETERS).available_bytes() == 100 * MIB


def test_shared_memory_is_bounded_by_what_the_host_has(monkeypatch):
    monkeypatch.setattr(linux, "free_bytes", lambda: 100 * MIB)
    fake, device = opened(stated_bytes=512 * MIB, is_integrated=1)
    own = fake.alloc(50 * MIB)  # the host counts this as used
    assert device.available_bytes() == 150 * MIB
    with device.cap(None), pytest.raises(torch.OutOfMemoryError):
        fake.alloc(101 * MIB)
    monkeypatch.setattr(linux, "free_bytes", lambda: None)  # nobody says
    assert device.available_bytes() == 512 * MIB
    [note] = device.notes
    assert "shares the host's memory" in note
    del own


def test_the_hosts_memory_is_no_concern_of_a_card_with_its_own(monkeypatch):
    monkeypatch.setattr(linux, "free_bytes", lambda: MIB)
    assert opened()[1].available_bytes() == 1024 * MIB


def test_devices_that_lack_a_budget_are_listed(cards):
    cards.properties["is_integrated"] = True
    lines = [describe_device(device) for device in list_devices()]
    assert lines[1] == "cuda:1  Fake Card  1.00 GiB  shares the host's memory: state a budget, such as 'cuda:1:768MiB'"
    cards.fraction = 0.5
    assert describe_device(list_devices()[0]) == "cuda:0  Fake Card  1.00 GiB"


def test_a_probe_on_shared_memory(monkeypatch):
    monkeypatch.setattr(linux, "free_bytes", lambda: 4 * GIB)
    result = probe(ledger(is_integrated=1, stated_bytes=512 * MIB), memory_fraction=1.0)
    assert result.batch_size == 512 - 64
    assert any(note.startswith("no trial ran without a cap") for note in result.notes)


# --- Apple ---


@pytest.fixture
def metal(monkeypatch):
    """`torch.mps` on a Mac with 16 GiB; returns the fractions that were set."""
    fractions = []
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 16 * GIB)
    monkeypatch.setattr(torch.mps, "set_per_process_memory_fraction", fractions.append)
    monkeypatch.setattr(torch.mps, "synchronize", lambda: None)
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: None)
    monkeypatch.delenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", raising=False)
    return fractions


@pytest.mark.parametrize(
    ("stated", "name", "note"),
    [
        (None, "Apple MPS", "the working set that Metal recommends, 16.00 GiB"),
        (8 * GIB, "Apple MPS, 8.00 GiB of it", "the budget that was stated, 8.00 GiB"),
    ],
)
def test_a_mac_is_held_to_what_was_stated_or_metal_recommends(metal, stated, name, note):
    device, available = MpsDevice(stated), stated or 16 * GIB
    assert (device.name, device.available_bytes(), device.total_bytes) == (name, available, 16 * GIB)
    assert note in device.notes[0]
    for limit_bytes in (None, 0, 4 * GIB, 12 * GIB):
        with device.cap(limit_bytes):
            assert metal[-1] == min(available if limit_bytes is None else limit_bytes, available) / (16 * GIB)
        assert metal[-1] == 1.7
    with pytest.raises(InvalidArgumentError, match="Metal recommends"):
        MpsDevice(17 * GIB)


@pytest.mark.parametrize("text", ["mps:8GiB", "mps:0:8GiB"])
def test_a_budget_on_a_mac_is_typed_the_same_way(cards, metal, text):
    cards.kind = "mps"
    assert choose_device(text, WITHOUT_PARAMETERS).available_bytes() == 8 * GIB


def test_torch_mps_has_what_is_used():
    used = set(re.findall(r"torch\.mps\.(\w+)", ast.unparse(ast.parse(Path(mps.__file__).read_text()))))
    assert len(used) > 4
    assert all(hasattr(torch.mps, name) for name in used)
