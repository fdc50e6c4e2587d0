import re
from dataclasses import replace

import pytest

import oomprobe
from oomprobe.errors import InvalidArgumentError, NoDeviceError
from oomprobe.ground import torch_versions
from oomprobe.ground.units import parse_bytes
from oomprobe.simulation.cards import generic_card
from oomprobe.simulation.catalogue import CATALOGUE, find_card

SMALL, LARGE = 8_519_680, 33_554_432


@pytest.mark.parametrize("card", CATALOGUE, ids=lambda card: card.name)
def test_every_card_is_plausible_and_found_by_both_names(card):
    assert 4 * 2**30 < card.total_bytes < 300 * 2**30
    assert 100 * 2**20 < card.context_bytes < 3 * 2**30
    assert card.available_bytes == card.total_bytes - card.context_bytes
    assert 10 < card.multi_processor_count < 200
    if stated := re.search(r"(\d+)GB", card.name):
        assert 0.9 * int(stated[1]) * 2**30 < card.total_bytes <= int(stated[1]) * 2**30
    for name in (
        card.name,
        card.full_name,
        f"sim:{card.name}",
        card.name.lower(),
        card.name.replace("-", " "),
    ):
        assert find_card(name) is card


def test_a_measured_context_overrides_the_default():
    assert find_card("T4").context_bytes == 144 * 2**20 < find_card("2080 Ti").context_bytes


@pytest.mark.parametrize(
    ("capability", "threads"), [((8, 0), 2048), ((8, 9), 1536), ((12, 1), 1536), ((5, 0), 2048)]
)
def test_threads_follow_the_compute_capability(capability, threads):
    assert replace(generic_card(1), compute_capability=capability).processors.threads == threads


SPELLINGS = {
    "RTX-4090": ["sim:RTX 4090", "rtx4090", "4090", "RTX 4090 24GB", "NVIDIA GeForce RTX 4090", "nvidia_geforce_rtx_4090"],
    "H100-80GB": ["H100", "SIM: h100 sxm5", "H100 80 GB", "NVIDIA H100 80GB HBM3"],
    "H100-PCIe": ["h100pcie"], "H100-NVL-94GB": ["H100 NVL"], "B200": ["b200 180GB", "B200-192GB"],
    "A100-80GB": ["a100-80gb", "NVIDIA A100-SXM4-80GB"], "A100-40GB": ["A100 40GiB"], "T4": ["tesla t4"],
    "RTX-A6000": ["A6000"], "RTX-PRO-6000-96GB": ["RTX PRO 6000"], "RTX-4060Ti-16GB": ["4060 Ti"], "GTX-1080Ti": ["1080ti"],
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_finds_cards_as_people_write_them(name):
    assert {find_card(spelling).name for spelling in SPELLINGS[name]} == {name}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("A100", "is ambiguous: A100-40GB or A100-80GB"),
        ("RTX 4095", "is not in the catalogue; similar cards: RTX-4090, .*"),
        ("A100-80", "is not in the catalogue; similar cards: A100-80GB, A100-40GB, .*"),
        ("MI300X", "is not in the catalogue, which has no AMD cards: .* 'sim:192GiB'"),
        (
            "RTX 4090 Laptop GPU",
            "is not in the catalogue; similar cards: RTX-4090",
        ),  # 16 GB: another card
        (
            "RTX 3080 12GB",
            "is not in the catalogue; similar cards: .*RTX-3080-10GB.*",
        ),  # wrong memory size
        ("H800", "is not in the catalogue; similar cards: .*H100-80GB.*"),
        ("", "is not in the catalogue"),
        ("80", "is the name of no card; did you mean 'sim:80GiB'[?]"),
        ("960", "is not in the catalogue; similar cards: .*"),
    ],
)
def test_an_unknown_name_lists_similar_cards(name, problem):
    with pytest.raises(
        NoDeviceError, match=f"^{name!r} {problem}\n.*; 'sim:24GiB' is one of 24 GiB$"
    ):
        find_card(name)


@pytest.mark.parametrize(
    ("card", "config", "workspace_bytes"),
    [
        ("T4", None, SMALL),
        ("H100", None, LARGE),
        ("B200", None, LARGE),
        ("H100", ":4096:2:16:8", SMALL),
        ("H100", ":0:0", 0),
        ("H100", "4096:8", LARGE),  # no pair: torch warns and keeps the default
    ],
)
def test_cublas_workspace_size(monkeypatch, card, config, workspace_bytes):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch_versions, "VERSION", (2, 14))
    if config is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    assert find_card(card).cublas_workspace_bytes == workspace_bytes


def test_a_card_may_leave_less_to_the_allocator():
    whole = oomprobe.SimulatedDevice("sim:A100-40GB")
    card = oomprobe.SimulatedDevice("sim:A100-40GB", available_bytes=12 * 2**30)
    assert card.available_bytes() == 12 * 2**30 < whole.available_bytes()
    assert (card.total_bytes, card.name) == (whole.total_bytes, whole.name)
    assert oomprobe.SimulatedDevice(
        "A100-40GB", available_bytes=whole.total_bytes
    ).available_bytes() == (whole.total_bytes)


@pytest.mark.parametrize("available_bytes", [0, -1, 2**40])
def test_a_card_cannot_leave_what_it_does_not_have(available_bytes):
    with pytest.raises(InvalidArgumentError, match=r"is not between 1 and the .* bytes of"):
        oomprobe.SimulatedDevice("sim:A100-40GB", available_bytes=available_bytes)


def test_a_generic_card_leaves_all_its_memory_to_torch():
    card = generic_card(parse_bytes("1.5GiB"))
    assert (card.name, card.available_bytes, card.context_bytes) == (
        "1.5 GiB",
        parse_bytes("1.5GiB"),
        0,
    )
    with pytest.raises(InvalidArgumentError, match="a card of 0 bytes is not possible"):
        generic_card(0)
