"""The cards that can be simulated by name: what real ones report, and where each figure comes from.

*Total* is what ``torch.cuda.get_device_properties(...).total_memory`` says, on Linux. ``nvidia-smi`` shows 0.5 to 3 %
more, Windows up to 2 % more, and each newer driver keeps a little more back (RTX 4090: 24,217, then 24,177, then 24,081
MiB). Where sources that name the card differ, the smallest is taken: a card must not be given memory that it has not.

*Context* is what one process holds beyond PyTorch's allocator. An out-of-memory text says that "this process has X in
use", of which A is allocated and B reserved but unallocated: X - A - B is the context with the kernels loaded by then.
The numbers are printed to 0.01 GiB, so it is known to about 15 MiB. Only runs with lazy loading and one rank count, and
what is printed by a card that the text does not name is taken for the card of that total. The rule: the largest of the
card's own; for a card without, the largest of its compute capability (`_CONTEXTS`).

References: ``owner/name#1`` is an issue or pull request on GitHub; "a public log" is a file in a
public repository that quotes the figure and whose address is not known. Where only rounded GiB are printed, the
low end of the rounding is taken and the source says so; a number in MiB is cut off, so the card has up to 1 MiB more.
Multiprocessors are as printed with the total, or NVIDIA's specification.
"""

from __future__ import annotations

import difflib
import re
from typing import NamedTuple

from oomprobe.errors import NoDeviceError
from oomprobe.simulation.cards import Card

_MIB = 2**20
_STATED_SIZE = re.compile(r"(?<![a-z0-9])(\d{1,4}) *g(?:i?b)?\b")
_NOISE = re.compile(r"^ *sim *:|\b(?:nvidia|geforce|tesla|graphics|card|gpu)\b|\bhbm\d\w?|sxm\d?\b|[^a-z0-9]")


class Context(NamedTuple):
    """Bytes that a process needs beyond the allocator, and who says so."""

    nbytes: int
    source: str


_L40 = Context(507 * _MIB, "measured on an L40: 11.13 GiB - 10.25 GiB - 394.50 MiB; QwenLM/Qwen3-VL#2097")
_RTX_3090 = Context(
    377_487_360,
    "measured, to the byte: total less free less reserved, 25,438,126,080 - 3,866,624 - 25,056,772,096, on a card of "
    "an RTX 3090's total that is not named; a public log",
)
_A100_40GB = Context(502 * _MIB, "measured on an A100-40GB: 14.25 GiB - 12.87 GiB - 912.01 MiB; TianheWu/CoSeR#10")
_V100_32GB = Context(
    512 * _MIB,
    "measured on a 31.73 GiB card: 30.40 GiB - 29.53 GiB - 378.92 MiB; a public log. "
    "Three others say 379 MiB, and 308 MiB is the bare context (another public log)",
)
_H100_NVL = Context(676 * _MIB, "measured on an H100 NVL: 91.91 GiB - 86.10 GiB - 5.15 GiB; ali-vilab/VACE#56")
_B200 = Context(
    713 * _MIB,
    "measured on a card of 178.35 GiB, a B200's: 168.34 GiB - 167.64 GiB - 4.62 MiB; "
    "https://github.com/stas00/ml-engineering/blob/master/debug/pytorch.md",
)
_RTX_5090 = Context(
    619 * _MIB,
    "measured on an RTX 5090: 26.89 GiB - 25.95 GiB - 343.86 MiB; TrajectoryCrafter/TrajectoryCrafter#20 "
    "(595 MiB in Wan-Video/Wan2.1#465)",
)
_PASCAL = _V100_32GB._replace(source="borrowed: no figure of a Pascal card; the V100's: " + _V100_32GB.source)

_CONTEXTS: dict[tuple[int, int], Context] = {
    (6, 0): _PASCAL,
    (6, 1): _PASCAL,
    (7, 0): _V100_32GB,
    (7, 5): Context(
        287_047_680,
        "pytorch/pytorch#86509: total less free with lazy loading, card not named; the T4's own 144 MiB is too little "
        "to go by for a chip with more multiprocessors",
    ),
    (8, 0): _A100_40GB,
    (8, 6): _RTX_3090,
    (8, 9): _L40,
    (9, 0): _H100_NVL,
    (10, 0): _B200,
    (12, 0): _RTX_5090,
}


def _card(
    name: str, full_name: str, total_bytes: int, compute_capability: tuple[int, int], multi_processor_count: int,
    source: str, context: Context | None = None,
) -> Card:  # fmt: skip
    """A card; without a measurement of its own it has its compute capability's context."""
    rule = "" if context else "by rule, the most known of its compute capability: "
    context = context or _CONTEXTS[compute_capability]
    return Card(
        name=name,
        full_name=full_name,
        total_bytes=total_bytes,
        context_bytes=context.nbytes,
        compute_capability=compute_capability,
        multi_processor_count=multi_processor_count,
        source=source,
        context_source=rule + context.source,
    )


CARDS: tuple[Card, ...] = (
    # Data centre
    _card("P100-16GB", "Tesla P100-PCIE-16GB", 16_269 * _MIB, (6, 0), 56,
        "measured: ultralytics 8.4.33 on torch 2.11.0+cu128 prints 16269MiB; a public log (16,281 before)"),
    _card("V100-16GB", "Tesla V100-SXM2-16GB", 16_130 * _MIB, (7, 0), 80,
        "measured: get_device_properties prints total_memory=16130MB; a public log (16,160 in nine others)"),
    _card("V100-32GB", "Tesla V100-SXM2-32GB", 32_494 * _MIB, (7, 0), 80,
        "measured: ultralytics 8.3.78 on torch 2.6.0+cu124 prints 32494MiB; a public log, and llama.cpp the same in "
        "another",
        _V100_32GB),
    _card("T4", "Tesla T4", 14_912 * _MIB, (7, 5), 40,
        "measured: ultralytics 8.4.127 on torch 2.10.0+cu128 prints 14912MiB; a public log (14.75 GiB with an older "
        "driver: hpcaitech/Open-Sora#697)",
        Context(144 * _MIB, "measured on a card of 14.56 GiB, a T4's: 14.45 GiB - 14.25 GiB - 60.81 MiB; a public "
                "log (137 MiB in another)")),
    _card("A100-40GB", "NVIDIA A100-SXM4-40GB", 42_298_834_944, (8, 0), 108,
        "measured, to the byte: deviceQuery in bottlerocket-os/bottlerocket#3873 (up to 40,514 MiB elsewhere)",
        _A100_40GB),
    _card("A100-80GB", "NVIDIA A100-SXM4-80GB", 81_038 * _MIB, (8, 0), 108,
        "measured: ultralytics 8.2.48 on torch 2.3.1+cu118 prints 81038MiB; a public log (the PCIe card: 81,049 in "
        "ekondis/mixbench#47)",
        Context(490 * _MIB, "measured on an A100 of 79.15 GiB: 42.49 GiB - 42.00 GiB - 12.66 MiB; a public log (409 "
                "MiB in HiDream-ai/VAREdit#6)")),
    _card("A10", "NVIDIA A10", 22_512 * _MIB, (8, 6), 72,
        "measured, low end of 21.99 GiB: an out-of-memory text in zai-org/CogVLM#236",
        Context(224 * _MIB, "measured on an A10, torch 2.0.1: 21.91 GiB - 21.69 GiB - 1.55 MiB; zai-org/CogVLM#236")),
    _card("A10G", "NVIDIA A10G", 22_587 * _MIB, (8, 6), 80,
        "measured: get_device_properties of torch 2.15.0.dev+cu130 prints total_memory=22587MB; a public log",
        Context(256 * _MIB, "measured on an A10G: 21.25 GiB - 21 blocks of 1 GiB; a public log")),
    _card("A40", "NVIDIA A40", 45_416 * _MIB, (8, 6), 84,
        "measured: get_device_properties prints total_memory=45416MB; a public log (ECC on)"),
    _card("L4", "NVIDIA L4", 22_563 * _MIB, (8, 9), 58,
        "measured: ultralytics 8.4.95 on torch 2.11.0+cu128 prints 22563MiB; a public log (22,693 before)",
        Context(251 * _MIB, "measured on an L4: 21.96 GiB - 21.65 GiB - 66.83 MiB; a public log")),
    _card("L40", "NVIDIA L40", 45_460 * _MIB, (8, 9), 142,
        "measured, low end of 44.40 GiB: an out-of-memory text in QwenLM/Qwen3-VL#2097",
        _L40),
    _card("L40S", "NVIDIA L40S", 45_480 * _MIB, (8, 9), 142,
        "measured, low end of 44.42 GiB: an out-of-memory text in stepfun-ai/Step-Video-T2V#8",
        Context(420 * _MIB, "measured on an L40S: 44.29 GiB - 43.88 GiB - 582 KiB; stepfun-ai/Step-Video-T2V#8")),
    _card("H20", "NVIDIA H20", 97_285 * _MIB, (9, 0), 78,
        "measured: get_device_properties prints total_memory=97285MB; a public log"),
    _card("H100-80GB", "NVIDIA H100 80GB HBM3", 81_079 * _MIB, (9, 0), 132,
        "measured: 85,017,624,576 bytes, torch 2.9.1; a public log, and llama.cpp says 81079 MiB, of which 80552 "
        "free beside a bare context in another"),
    _card("H100-PCIe", "NVIDIA H100 PCIe", 81_008 * _MIB, (9, 0), 114,
        "measured: get_device_properties of torch 2.0.1+cu117 prints total_memory=81008MB; a public log "
        "(vllm-project/vllm#27508 has an H100 of 79.11 GiB, the same)"),
    _card("H100-NVL-94GB", "NVIDIA H100 NVL", 95_226 * _MIB, (9, 0), 132,
        "measured, low end of 93.00 GiB: an out-of-memory text in ali-vilab/VACE#56",
        _H100_NVL),
    _card("H200-141GB", "NVIDIA H200", 143_156 * _MIB, (9, 0), 132,
        "measured: ultralytics 8.4.115 on torch 2.11.0+cu128 prints 143156MiB; a public log (139.72 GiB, 80 MiB "
        "less, on a card not named in another)",
        Context(671 * _MIB, "measured on a card of 139.72 GiB, taken for an H200: 139.60 GiB - 138.14 GiB - 824.86 "
                "MiB; a public log")),
    _card("B200", "NVIDIA B200", 182_631 * _MIB, (10, 0), 148,
        "measured: get_device_properties prints total_memory=182631MB; a public log (178.35 GiB and 148 "
        "multiprocessors in pytorch/ao#4002)",
        _B200),
    # Workstation
    _card("RTX-A4000", "NVIDIA RTX A4000", 15_979 * _MIB, (8, 6), 48,
        "measured, low end of 15.61 GiB: an out-of-memory text in DengKaiCQ/VGGT-Long#6",
        Context(211 * _MIB, "measured on an RTX A4000: 15.51 GiB - 15.01 GiB - 301.92 MiB; DengKaiCQ/VGGT-Long#6")),
    _card("RTX-A6000", "NVIDIA RTX A6000", 48_670 * _MIB, (8, 6), 84,
        "measured: ultralytics 8.3.59 prints 48670MiB (ECC off); ultralytics/ultralytics#19084"),
    _card("RTX-6000-Ada", "NVIDIA RTX 6000 Ada Generation", 48_497 * _MIB, (8, 9), 142,
        "measured: ultralytics 8.3.149 on torch 2.7.0+cu128 prints 48497MiB; a public log. ECC is off there: with it "
        "the card has 44.43 GiB (DINGYANB/MTVCrafter#21)",
        Context(430 * _MIB, "measured on an RTX 6000 Ada: 44.40 GiB - 43.94 GiB - 41.95 MiB; DINGYANB/MTVCrafter#21 "
                "(426 MiB on torch 2.10+cu130 in unslothai/unsloth-zoo#1053)")),
    _card("RTX-PRO-6000-96GB", "NVIDIA RTX PRO 6000 Blackwell Server Edition", 97_250 * _MIB, (12, 0), 188,
        "measured: get_device_properties of torch 2.7.1+cu128 prints total_memory=97250MB; a public log"),
    # Consumer
    _card("GTX-1080Ti", "NVIDIA GeForce GTX 1080 Ti", 11_715_084_288, (6, 1), 28,
        "measured, to the byte, with CUDA 9: deviceQuery in ethereum-mining/ethminer#536"),
    _card("RTX-2080Ti", "NVIDIA GeForce RTX 2080 Ti", 10_825 * _MIB, (7, 5), 68,
        "measured: ultralytics 8.3.109 on torch 2.6.0+cu124 prints 10825MiB; a public log (11,009 to 11,020 with "
        "older drivers)"),
    _card("RTX-3060-12GB", "NVIDIA GeForce RTX 3060", 11_910 * _MIB, (8, 6), 28,
        "measured: ultralytics 8.4.24 on torch 2.10.0+cu128 prints 11910MiB; a public log (12,045 before)"),
    _card("RTX-3070", "NVIDIA GeForce RTX 3070", 7_753 * _MIB, (8, 6), 46,
        "measured: ultralytics 8.3.75 on torch 2.6.0+cu124 prints 7753MiB; a public log (7,842 elsewhere)"),
    _card("RTX-3080-10GB", "NVIDIA GeForce RTX 3080", 10_002 * _MIB, (8, 6), 68,
        "measured: ultralytics 8.4.35 on torch 2.6.0+cu124 prints 10002MiB; a public log"),
    _card("RTX-3090", "NVIDIA GeForce RTX 3090", 24_154 * _MIB, (8, 6), 82,
        "measured: llama.cpp lists 24154 MiB; a public log (24,260 with driver 535 in ultralytics/ultralytics#5359)",
        _RTX_3090),
    _card("RTX-4060Ti-16GB", "NVIDIA GeForce RTX 4060 Ti", 15_944 * _MIB, (8, 9), 34,
        "measured: llama.cpp lists 15944 MiB, as a comment quotes it; a public log (15,947 in another)"),
    _card("RTX-4070", "NVIDIA GeForce RTX 4070", 11_994 * _MIB, (8, 9), 46,
        "measured: yolov5 on torch 1.13.0+cu117 prints 11994MiB; a public log (a new driver may say 1 % less)"),
    _card("RTX-4070Ti-SUPER", "NVIDIA GeForce RTX 4070 Ti SUPER", 15_974 * _MIB, (8, 9), 66,
        "measured: get_device_properties with driver 560 prints total_memory=15974MB; a public log"),
    _card("RTX-4080", "NVIDIA GeForce RTX 4080", 16_049 * _MIB, (8, 9), 76,
        "measured: get_device_properties prints total_memory=16049MB; a public log (a new driver may say 1 % less)"),
    _card("RTX-4090", "NVIDIA GeForce RTX 4090", 24_081 * _MIB, (8, 9), 128,
        "measured: ultralytics 8.4.101 on torch 2.5.1 prints 24081MiB; a public log (23.52 GiB with driver 560 in "
        "pytorch/torchchat#1341)",
        Context(504 * _MIB, "measured on an RTX 4090: 14.56 GiB - 13.86 GiB - 213.20 MiB; "
                "3DTopia/Phidias-Diffusion#8 (495 MiB in pytorch/torchchat#1341, 450 in "
                "Soul-AILab/SoulX-FlashTalk#5)")),
    _card("RTX-5060Ti-16GB", "NVIDIA GeForce RTX 5060 Ti", 15_841 * _MIB, (12, 0), 36,
        "measured: get_device_properties prints total_memory=15841MB; a public log"),
    _card("RTX-5080", "NVIDIA GeForce RTX 5080", 15_840 * _MIB, (12, 0), 84,
        "measured: ultralytics prints 15840MiB; a public log (llama.cpp: 15,877 in another)"),
    _card("RTX-5090", "NVIDIA GeForce RTX 5090", 32_102 * _MIB, (12, 0), 170,
        "measured: ultralytics 8.4.61 on torch 2.12.0+cu130 prints 32102MiB; a public log (33,677,180,928 bytes with "
        "driver 570 in aikitoria/open-gpu-kernel-modules#1)",
        _RTX_5090),
)  # fmt: skip


def find_card(name: str) -> Card:
    """Look a card up by its name as people write it.

    Case, spaces, dashes, ``sim:``, NVIDIA, GeForce, Tesla, SXM and RTX or GTX do not count. The memory may be left out
    where one card has the name, and must be right where it is given.

    Raises:
        NoDeviceError: No card has this name, or several have; the text lists those that are near.

    Example:
        >>> find_card("sim:RTX 4090").full_name, find_card("h100").name
        ('NVIDIA GeForce RTX 4090', 'H100-80GB')
    """
    key, stated = _key(name), _STATED_SIZE.search(_words(name))
    found = [card for card in CARDS if key in (_key(card.name), _key(card.full_name)) and _fits(card, stated)]
    if len(found) == 1:
        return found[0]
    if found:
        problem = f"may be {' or '.join(card.name for card in found)}"
    else:
        problem = f"is not a card of the catalogue; {_near(key)}"
    raise NoDeviceError(f"{name!r} {problem}; 'sim:24GiB' states the memory itself")


def _key(name: str) -> str:
    """What of a name tells a card: ``"NVIDIA GeForce RTX 3080 10GB"`` -> ``"3080"``."""
    return _NOISE.sub("", _STATED_SIZE.sub("", _words(name))).removeprefix("rtx").removeprefix("gtx")


def _words(name: str) -> str:
    return name.lower().replace("_", " ")


def _fits(card: Card, stated: re.Match[str] | None) -> bool:
    """Whether a size on a box may be this card's: what is reported is 0 to 9 % less (an A10 of 24 GB: 21.99 GiB)."""
    return stated is None or 0.9 * int(stated[1]) <= card.total_bytes / 2**30 <= int(stated[1])


def _near(key: str) -> str:
    """The cards of a similar name, or of one that holds the shorter of both, as the 4090 in a laptop's; else all."""
    keys = {card.name: _key(card.name) for card in CARDS}
    close = difflib.get_close_matches(key, keys.values(), n=5, cutoff=0.65)
    near = [name for name, other in keys.items() if other in close or _within(*sorted((key, other), key=len))]
    return f"near it: {', '.join(near)}" if near else f"it has {', '.join(keys)}"


def _within(shorter: str, longer: str) -> bool:
    return len(shorter) > 3 and shorter in longer  # too short a name is in everything
