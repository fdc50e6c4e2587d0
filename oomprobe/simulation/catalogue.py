"""Catalogue of the cards that can be simulated by name; comments give the source of each figure.

*Total* is ``torch.cuda.get_device_properties(...).total_memory`` on Linux in whole MiB: the card may have up to 1 MiB
more. ``nvidia-smi`` shows 0.5 to 3 % more, Windows up to 2 % more, and newer drivers withhold more (RTX 4090: 24,217, then
24,177, then 24,081 MiB). If sources that name the card differ, the table has the smallest figure, so that no card gets
memory it does not have; for figures rounded to GiB, it has the low end of the rounding.

*Context* is the memory that one process holds outside PyTorch's allocator. An out-of-memory message says that "this process
has X in use", of which A is allocated and B reserved but unallocated: X - A - B is the context plus the kernels loaded by
then. Messages print 0.01 GiB, so the result is accurate to about 15 MiB. Only runs with lazy loading and one rank count. A
message that does not name its card is attributed to the card with that total. The table has the largest figure for the card
itself, or, if there is none, the largest for its compute capability.

References: ``owner/name#1`` is an issue or pull request on GitHub; "log" is a file in a public repository that quotes the
figure but whose address is unknown. Multiprocessor counts are printed with the total, or come from NVIDIA's specification.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from oomprobe.errors import InvalidArgumentError, NoDeviceError
from oomprobe.ground.units import parse_bytes
from oomprobe.ground.words import nearest
from oomprobe.simulation.cards import Card, generic_card

_MIB = 2**20
LARGEST_GB = 300  # a number below it is rather a size without a unit than the name of a card
_STATED_SIZE = re.compile(r"(?<![a-z0-9])(\d{1,4}) *g(?:i?b)?\b")
_NOISE = re.compile(
    r"^ *sim *:|\b(?:nvidia|geforce|tesla|graphics|card|gpu)\b|\bhbm\d\w?|sxm\d?\b|[^a-z0-9]"
)

_MEMORY = re.compile(r"-?[\d.]+ *[kmgt]?i?b", re.IGNORECASE)
_AMD = re.compile(r"\b(?:mi-?\d{2,3}|amd|instinct|radeon|rx)", re.IGNORECASE)

_CONTEXT_MIB: dict[tuple[int, int], int] = {
    (6, 0): 512,  # no figure for a Pascal card: the V100's
    (6, 1): 512,
    (
        7,
        0,
    ): 512,  # 30.40 GiB - 29.53 GiB - 378.92 MiB on a card of 31.73 GiB: log; 379 MiB in three others
    (
        7,
        5,
    ): 274,  # total less free with lazy loading, card not named: pytorch/pytorch#86509; more than the T4's own
    (8, 0): 502,  # 14.25 GiB - 12.87 GiB - 912.01 MiB on an A100-40GB: TianheWu/CoSeR#10
    (
        8,
        6,
    ): 360,  # total less free less reserved, to the byte, on a card of an RTX 3090's total: log
    (8, 9): 507,  # 11.13 GiB - 10.25 GiB - 394.50 MiB on an L40: QwenLM/Qwen3-VL#2097
    (9, 0): 676,  # 91.91 GiB - 86.10 GiB - 5.15 GiB on an H100 NVL: ali-vilab/VACE#56
    # 168.34 GiB - 167.64 GiB - 4.62 MiB on a card of 178.35 GiB, a B200's:
    # https://github.com/stas00/ml-engineering/blob/master/debug/pytorch.md
    (10, 0): 713,
    (
        12,
        0,
    ): 619,  # 26.89 GiB - 25.95 GiB - 343.86 MiB on an RTX 5090: TrajectoryCrafter/TrajectoryCrafter#20
}


def _card(
    name: str, full_name: str, total_mib: int, compute_capability: tuple[int, int], multi_processor_count: int,
    context_mib: int | None = None,
) -> Card:  # fmt: skip
    """Return a card; the context defaults to the figure of its compute capability."""
    return Card(
        name=name,
        full_name=full_name,
        total_bytes=total_mib * _MIB,
        context_bytes=(_CONTEXT_MIB[compute_capability] if context_mib is None else context_mib)
        * _MIB,
        compute_capability=compute_capability,
        multi_processor_count=multi_processor_count,
    )


CATALOGUE: tuple[Card, ...] = (
    # --- data centre ---
    # ultralytics on torch 2.11.0+cu128 prints 16269MiB: log
    _card("P100-16GB", "Tesla P100-PCIE-16GB", 16_269, (6, 0), 56),
    # total_memory=16130MB: log
    _card("V100-16GB", "Tesla V100-SXM2-16GB", 16_130, (7, 0), 80),
    # ultralytics on torch 2.6.0+cu124, and llama.cpp, print 32494MiB: logs
    _card("V100-32GB", "Tesla V100-SXM2-32GB", 32_494, (7, 0), 80),
    # ultralytics on torch 2.10.0+cu128 prints 14912MiB: log. Context: 14.45 GiB - 14.25 GiB - 60.81 MiB, log
    _card("T4", "Tesla T4", 14_912, (7, 5), 40, 144),
    # deviceQuery in bottlerocket-os/bottlerocket#3873
    _card("A100-40GB", "NVIDIA A100-SXM4-40GB", 40_339, (8, 0), 108),
    # ultralytics on torch 2.3.1+cu118 prints 81038MiB: log. Context: 42.49 GiB - 42.00 GiB - 12.66 MiB, log
    _card("A100-80GB", "NVIDIA A100-SXM4-80GB", 81_038, (8, 0), 108, 490),
    # 21.99 GiB in zai-org/CogVLM#236. Context: 21.91 GiB - 21.69 GiB - 1.55 MiB there
    _card("A10", "NVIDIA A10", 22_512, (8, 6), 72, 224),
    # total_memory=22587MB: log. Context: 21.25 GiB - 21 blocks of 1 GiB, log
    _card("A10G", "NVIDIA A10G", 22_587, (8, 6), 80, 256),
    # total_memory=45416MB, ECC on: log
    _card("A40", "NVIDIA A40", 45_416, (8, 6), 84),
    # ultralytics on torch 2.11.0+cu128 prints 22563MiB: log. Context: 21.96 GiB - 21.65 GiB - 66.83 MiB, log
    _card("L4", "NVIDIA L4", 22_563, (8, 9), 58, 251),
    # 44.40 GiB in QwenLM/Qwen3-VL#2097
    _card("L40", "NVIDIA L40", 45_460, (8, 9), 142),
    # 44.42 GiB in stepfun-ai/Step-Video-T2V#8. Context: 44.29 GiB - 43.88 GiB - 582 KiB there
    _card("L40S", "NVIDIA L40S", 45_480, (8, 9), 142, 420),
    # total_memory=97285MB: log
    _card("H20", "NVIDIA H20", 97_285, (9, 0), 78),
    # 85,017,624,576 bytes on torch 2.9.1, and llama.cpp says 81079 MiB: logs
    _card("H100-80GB", "NVIDIA H100 80GB HBM3", 81_079, (9, 0), 132),
    # total_memory=81008MB: log; 79.11 GiB in vllm-project/vllm#27508
    _card("H100-PCIe", "NVIDIA H100 PCIe", 81_008, (9, 0), 114),
    # 93.00 GiB in ali-vilab/VACE#56
    _card("H100-NVL-94GB", "NVIDIA H100 NVL", 95_226, (9, 0), 132),
    # ultralytics on torch 2.11.0+cu128 prints 143156MiB: log. Context: 527 MiB, 685 after a matrix product and 767 after
    # training with convolutions, measured with torch 2.11.0+cu130 (tests/evidence)
    _card("H200-141GB", "NVIDIA H200", 143_156, (9, 0), 132, 767),
    # total_memory=182631MB: log; 178.35 GiB and 148 multiprocessors in pytorch/ao#4002
    _card("B200", "NVIDIA B200", 182_631, (10, 0), 148),
    # --- workstation ---
    # 15.61 GiB in DengKaiCQ/VGGT-Long#6. Context: 15.51 GiB - 15.01 GiB - 301.92 MiB there
    _card("RTX-A4000", "NVIDIA RTX A4000", 15_979, (8, 6), 48, 211),
    # ultralytics prints 48670MiB, ECC off: ultralytics/ultralytics#19084
    _card("RTX-A6000", "NVIDIA RTX A6000", 48_670, (8, 6), 84),
    # ultralytics on torch 2.7.0+cu128 prints 48497MiB, ECC off: log. With ECC, and context: 44.43 GiB, and 44.40 GiB -
    # 43.94 GiB - 41.95 MiB, in DINGYANB/MTVCrafter#21
    _card("RTX-6000-Ada", "NVIDIA RTX 6000 Ada Generation", 48_497, (8, 9), 142, 430),
    # total_memory=97250MB on torch 2.7.1+cu128: log
    _card(
        "RTX-PRO-6000-96GB", "NVIDIA RTX PRO 6000 Blackwell Server Edition", 97_250, (12, 0), 188
    ),
    # --- consumer ---
    # deviceQuery of CUDA 9 in ethereum-mining/ethminer#536
    _card("GTX-1080Ti", "NVIDIA GeForce GTX 1080 Ti", 11_172, (6, 1), 28),
    # ultralytics on torch 2.6.0+cu124 prints 10825MiB: log
    _card("RTX-2080Ti", "NVIDIA GeForce RTX 2080 Ti", 10_825, (7, 5), 68),
    # ultralytics on torch 2.10.0+cu128 prints 11910MiB: log
    _card("RTX-3060-12GB", "NVIDIA GeForce RTX 3060", 11_910, (8, 6), 28),
    # ultralytics on torch 2.6.0+cu124 prints 7753MiB: log
    _card("RTX-3070", "NVIDIA GeForce RTX 3070", 7_753, (8, 6), 46),
    # ultralytics on torch 2.6.0+cu124 prints 10002MiB: log
    _card("RTX-3080-10GB", "NVIDIA GeForce RTX 3080", 10_002, (8, 6), 68),
    # llama.cpp lists 24154 MiB: log; 24,260 with driver 535 in ultralytics/ultralytics#5359
    _card("RTX-3090", "NVIDIA GeForce RTX 3090", 24_154, (8, 6), 82),
    # llama.cpp lists 15944 MiB: log
    _card("RTX-4060Ti-16GB", "NVIDIA GeForce RTX 4060 Ti", 15_944, (8, 9), 34),
    # yolov5 on torch 1.13.0+cu117 prints 11994MiB: log (a new driver may say 1 % less)
    _card("RTX-4070", "NVIDIA GeForce RTX 4070", 11_994, (8, 9), 46),
    # total_memory=15974MB with driver 560: log
    _card("RTX-4070Ti-SUPER", "NVIDIA GeForce RTX 4070 Ti SUPER", 15_974, (8, 9), 66),
    # total_memory=16049MB: log (a new driver may say 1 % less)
    _card("RTX-4080", "NVIDIA GeForce RTX 4080", 16_049, (8, 9), 76),
    # ultralytics on torch 2.5.1 prints 24081MiB: log. Context: 14.56 GiB - 13.86 GiB - 213.20 MiB in
    # 3DTopia/Phidias-Diffusion#8; 495 MiB in pytorch/torchchat#1341
    _card("RTX-4090", "NVIDIA GeForce RTX 4090", 24_081, (8, 9), 128, 504),
    # total_memory=15841MB: log
    _card("RTX-5060Ti-16GB", "NVIDIA GeForce RTX 5060 Ti", 15_841, (12, 0), 36),
    # ultralytics prints 15840MiB: log
    _card("RTX-5080", "NVIDIA GeForce RTX 5080", 15_840, (12, 0), 84),
    # ultralytics on torch 2.12.0+cu130 prints 32102MiB: log
    _card("RTX-5090", "NVIDIA GeForce RTX 5090", 32_102, (12, 0), 170),
)


ALL = "sim:all"


def each_name(devices: Iterable[object]) -> list[object]:
    """Return the devices, and for ``"sim:all"`` the name of every card.

    Example:
        >>> len(each_name(["sim:all"])) > 30, each_name(["sim:T4", "sim:24GiB"])
        (True, ['sim:T4', 'sim:24GiB'])
    """
    every = [f"sim:{card.name}" for card in CATALOGUE]
    names: list[object] = []
    for device in devices:
        names += every if device == ALL else [device]
    return names


def card_of(device: str | int | Card) -> Card:
    """Return the card that a device names: one of the catalogue, or one of so many bytes.

    Raises:
        NoDeviceError: the catalogue has no such card.

    Example:
        >>> card_of("sim:24GiB").available_bytes, card_of("sim:4090").name
        (25769803776, 'RTX-4090')
    """
    if isinstance(device, Card):
        return device
    if isinstance(device, int):
        return generic_card(device)
    text = device.removeprefix("sim:").strip()
    if text.isdecimal():  # "4090" is a card, not a size
        return find_card(text)
    try:
        stated_bytes = parse_bytes(text)
    except InvalidArgumentError:
        if _MEMORY.fullmatch(text):
            raise
        return find_card(text)
    return generic_card(stated_bytes)


def find_card(name: str) -> Card:
    """Find a card by a name as people write it.

    Case, spaces, dashes, ``sim:``, NVIDIA, GeForce, Tesla, SXM and RTX or GTX are ignored. The memory size may be left out
    if only one card has the name; if given, it must match.

    Raises:
        NoDeviceError: No card, or more than one, has this name; the message lists similar ones.

    Example:
        >>> find_card("sim:RTX 4090").full_name, find_card("h100").name
        ('NVIDIA GeForce RTX 4090', 'H100-80GB')
    """
    key, stated = _key(name), _STATED_SIZE.search(_words_of(name))
    cards = []
    for card in CATALOGUE:
        # Cards report 0 to 9 % less than is advertised (a 24 GB A10: 21.99 GiB).
        gib = card.total_bytes / 2**30
        is_of_size = stated is None or 0.9 * int(stated[1]) <= gib <= int(stated[1])
        if is_of_size and key in (_key(card.name), _key(card.full_name)):
            cards.append(card)
    if len(cards) == 1:
        return cards[0]
    if cards:
        problem = f"is ambiguous: {' or '.join(card.name for card in cards)}"
    elif name.removeprefix("sim:").isdecimal() and int(key) < LARGEST_GB:
        problem = f"is the name of no card; did you mean 'sim:{key}GiB'?"
    elif _AMD.search(name):
        problem = (
            "is not in the catalogue, which has no AMD cards: state its memory, as in 'sim:192GiB'"
        )
    else:
        problem = f"is not in the catalogue{_similar(name)}"
    raise NoDeviceError(
        f"{name!r} {problem}\n`oomprobe devices` lists all cards; 'sim:24GiB' is one of 24 GiB"
    )


def _key(name: str) -> str:
    """Return the distinctive part of a name: ``"NVIDIA GeForce RTX 3080 10GB"`` -> ``"3080"``."""
    return (
        _NOISE.sub("", _STATED_SIZE.sub("", _words_of(name)))
        .removeprefix("rtx")
        .removeprefix("gtx")
    )


def _words_of(name: str) -> str:
    return name.lower().replace("_", " ")


def _similar(name: str) -> str:
    """Name the cards with similar names, the likeliest first: the RTX-4090 for a laptop 4090."""
    close = nearest(_key(name), [_key(card.name) for card in CATALOGUE], 5)
    names = [card.name for card in CATALOGUE if _key(card.name) in close]
    likeliest = nearest(name.removeprefix("sim:").upper(), names)
    similar = [*dict.fromkeys([*likeliest, *names])]
    return f"; similar cards: {', '.join(similar)}" if similar else ""
