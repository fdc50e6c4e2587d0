import re
from dataclasses import replace

import pytest

from oomprobe.errors import InvalidArgumentError, NoDeviceError
from oomprobe.simulation.cards import cublas_workspace_bytes, generic_card
from oomprobe.simulation.catalogue import CARDS, find_card
from oomprobe.units import parse_bytes

REFERENCE = re.compile(r"https://|[\w.-]+/[\w.-]+#\d+|a public log")
SMALL, LARGE = 8_519_680, 33_554_432

every_card = pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)


@every_card
def test_every_card_is_sane_and_sourced(card):
    assert 4 * 2**30 < card.total_bytes < 300 * 2**30
    assert 100 * 2**20 < card.context_bytes < 3 * 2**30
    assert 0 < card.available_bytes == card.total_bytes - card.context_bytes
    assert 10 < card.multi_processor_count < 200
    assert (6, 0) <= card.compute_capability <= (12, 0)
    assert REFERENCE.search(card.source)
    assert card.source.startswith(("measured", "derived"))
    assert REFERENCE.search(card.context_source)
    if stated := re.search(r"(\d+)GB", card.name):
        assert 0.9 * int(stated[1]) * 2**30 < card.total_bytes <= int(stated[1]) * 2**30


@every_card
def test_every_card_is_found_by_both_its_names(card):
    for name in (card.name, card.full_name, f"sim:{card.name}", card.name.lower(), card.name.replace("-", " ")):
        assert find_card(name) is card


def test_names_are_unique_and_the_catalogue_is_wide():
    assert len({card.name.lower() for card in CARDS}) == len(CARDS) >= 24
    assert len({card.full_name for card in CARDS}) == len(CARDS)
    assert {card.compute_capability[0] for card in CARDS} == {6, 7, 8, 9, 10, 12}


def test_an_unmeasured_card_assumes_the_worst_of_its_kind():
    with_own = {c.compute_capability: [] for c in CARDS}
    for card in CARDS:
        if not card.context_source.startswith("by rule"):
            with_own[card.compute_capability].append(card.context_bytes)
    assert sum(map(len, with_own.values())) >= 12
    assert find_card("T4").context_bytes == 144 * 2**20 < find_card("2080 Ti").context_bytes  # of one kind
    by_rule = [card for card in CARDS if card.context_source.startswith("by rule")]
    assert by_rule
    for card in by_rule:
        assert card.context_bytes >= max(with_own[card.compute_capability], default=0)


@pytest.mark.parametrize(("capability", "threads"), [((8, 0), 2048), ((8, 9), 1536), ((12, 1), 1536), ((5, 0), 2048)])
def test_threads_follow_the_compute_capability(capability, threads):
    assert replace(generic_card(1), compute_capability=capability).processors.threads == threads


WRITTEN = {
    "RTX-4090": ["sim:RTX 4090", "rtx4090", "4090", "RTX 4090 24GB", "NVIDIA GeForce RTX 4090", "nvidia_geforce_rtx_4090"],
    "H100-80GB": ["H100", "SIM: h100 sxm5", "H100 80 GB", "NVIDIA H100 80GB HBM3"],
    "H100-PCIe": ["h100pcie"], "H100-NVL-94GB": ["H100 NVL"], "H200-141GB": ["H200"],
    "B200": ["b200 180GB", "B200-192GB"], "A100-80GB": ["a100-80gb", "NVIDIA A100-SXM4-80GB"],
    "A100-40GB": ["A100 40GiB"], "V100-32GB": ["Tesla V100-SXM2-32GB"], "T4": ["tesla t4"], "A10": ["A10"],
    "A10G": ["A10G"], "L40": ["L40"], "L40S": ["L40s"], "RTX-A6000": ["A6000"], "RTX-6000-Ada": ["RTX 6000 Ada"],
    "RTX-PRO-6000-96GB": ["RTX PRO 6000"], "RTX-4060Ti-16GB": ["4060 Ti"], "GTX-1080Ti": ["1080ti"],
    "RTX-3080-10GB": ["3080"],
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_finds_cards_as_people_write_them(name):
    assert [find_card(written).name for written in WRITTEN[name]] == [name] * len(WRITTEN[name])


@pytest.mark.parametrize(
    ("name", "cards"), [("A100", ["A100-40GB", "A100-80GB"]), ("v100", ["V100-16GB", "V100-32GB"])]
)
def test_an_ambiguous_name_says_between_which(name, cards):
    with pytest.raises(NoDeviceError, match=re.escape(f"'{name}' may be {' or '.join(cards)}; ")) as raised:
        find_card(name)
    assert "'sim:24GiB' states the memory itself" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("H1000", "H100-80GB"),
        ("RTX 4095", "RTX-4090"),
        ("RTX 4090 Laptop GPU", "RTX-4090"),  # 16 GB: another card
        ("RTX 3080 12GB", "RTX-3080-10GB"),  # the memory is wrong
        ("A100-64GB", "A100-80GB"),
        ("H800", "H100-80GB"),
    ],
)
def test_an_unknown_name_lists_what_is_near(name, near):
    with pytest.raises(NoDeviceError, match=re.escape(f"{name!r} is not a card of the catalogue; near it: ")) as raised:
        find_card(name)
    assert near in str(raised.value)
    assert "'sim:24GiB' states the memory itself" in str(raised.value)


@pytest.mark.parametrize("name", ["", "sim:", "sim:24GiB", "MI300X", "NVIDIA", "GeForce RTX", "80GB"])
def test_a_name_near_nothing_lists_the_catalogue(name):
    with pytest.raises(NoDeviceError, match="it has P100-16GB, ") as raised:
        find_card(name)
    assert all(card.name in str(raised.value) for card in CARDS)


@pytest.mark.parametrize(
    ("capability", "torch_version", "workspace_bytes"),
    [
        ((7, 5), "2.11.0", SMALL),
        ((8, 0), "2.14.1+cu130", SMALL),
        ((8, 9), "2.13.0", SMALL),
        ((9, 0), "2.0.0", LARGE),
        ((9, 0), "2.11.0", LARGE),
        ((10, 0), "2.11.0+cu128", SMALL),
        ((10, 0), "2.12.0a0+git123", LARGE),
        ((10, 3), "2.13.0", LARGE),
        ((11, 0), "2.13.1", SMALL),
        ((11, 0), "2.14.0", LARGE),
        ((12, 0), "2.11.0", SMALL),
        ((12, 0), "2.12", LARGE),
        ((12, 0), "3.0.0", LARGE),
        ((13, 0), "2.14.0", SMALL),  # not named by the rule
    ],
)
def test_the_workspace_follows_the_card_and_the_version(capability, torch_version, workspace_bytes):
    assert cublas_workspace_bytes(capability, torch_version, {}) == workspace_bytes


@pytest.mark.parametrize(
    ("config", "workspace_bytes"),
    [
        (":4096:2:16:8", SMALL),
        (":4096:8", LARGE),
        (":16:8", 16 * 1024 * 8),
        (":0:0", 0),
        ("4096:8", LARGE),  # no pair: torch warns and keeps the default
        ("nonsense", LARGE),
        ("", LARGE),
    ],
)
def test_the_environment_overrides_the_workspace(config, workspace_bytes):
    assert cublas_workspace_bytes((9, 0), "2.13.0", {"CUBLAS_WORKSPACE_CONFIG": config}) == workspace_bytes


def test_a_card_asks_the_installed_torch_and_the_environment(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert (find_card("4090").cublas_workspace_bytes, find_card("H100").cublas_workspace_bytes) == (SMALL, LARGE)
    monkeypatch.setattr("oomprobe.simulation.cards.version", {"torch": "2.11.0"}.__getitem__)
    assert find_card("B200").cublas_workspace_bytes == SMALL
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    assert find_card("H100").cublas_workspace_bytes == 0


@pytest.mark.parametrize(
    ("size", "name"), [("24GiB", "24.0 GiB"), ("64MiB", "64.0 MiB"), ("1.5GiB", "1.5 GiB"), ("512B", "512.0 B")]
)
def test_a_generic_card_gives_all_its_memory_to_torch(size, name):
    card = generic_card(parse_bytes(size))
    assert (card.name, card.available_bytes, card.context_bytes) == (name, parse_bytes(size), 0)
    assert card.compute_capability == (8, 6)
    with pytest.raises(InvalidArgumentError, match="a card of 0 bytes is not possible"):
        generic_card(0)
