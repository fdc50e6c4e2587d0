import pytest
import torch
from operators import AUTOCAST, CASES
from sequences import Tensors
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import oomprobe
from oomprobe.ground.torch_versions import VERSION
from simulation.bench import Bench

MIB = 2**20
AMPERE, VOLTA, HOPPER = "A100-40GB", "V100-16GB", "H100-80GB"


def on(card, step, model=None):
    return Bench(model, card=card).run(step)


# --- attention ---


HALF, FLOAT = torch.float16, torch.float32


@pytest.mark.parametrize(
    ("card", "dtype", "case", "kind"),
    [
        (AMPERE, HALF, "plain", "FlashAttention"),
        (AMPERE, FLOAT, "plain", "EfficientAttention"),
        (AMPERE, HALF, "booleans", "EfficientAttention"),
        (AMPERE, HALF, "width_65", "FlashAttention"),  # padded
        (VOLTA, HALF, "plain", "EfficientAttention"),
        (VOLTA, FLOAT, "width_65", "Math"),
        (AMPERE, torch.float64, "plain", "Math"),
        (AMPERE, HALF, "groups", "FlashAttention"),
    ],
)
def test_the_attention_kernel_that_the_card_chooses(card, dtype, case, kind):
    def step():
        out = CASES[f"attention: {case}"](Tensors(dtype))
        names, node = [], out.grad_fn
        while node is not None:
            names.append(type(node).__name__)
            node = node.next_functions[0][0] if node.next_functions else None
        with sdpa_kernel(SDPBackend.MATH):
            by_choice = type(F.scaled_dot_product_attention(out, out, out).grad_fn).__name__
        return " ".join(names), out.shape, "Attention" in by_choice

    names, shape, is_fused = on(card, step)
    assert shape == (4, 8, 200, 65 if case == "width_65" else 64)
    assert kind in names or (kind == "Math" and "Attention" not in names)
    assert not is_fused


def test_flash_attention_refuses_what_its_grid_cannot_hold():
    windows = 64  # of seven by seven, per image
    qkv = nn.Linear(32, 96)

    def step(model, batch_size):
        x = torch.zeros(batch_size * windows, 49, 32, device="cuda", dtype=torch.float16)
        with torch.autocast("cuda"), torch.no_grad():
            q, k, v = model(x).unsqueeze(1).chunk(3, -1)
            F.scaled_dot_product_attention(q, k, v)

    result = oomprobe.find_max_batch(qkv, step, device="sim:RTX-4090", progress="off", resolution=0)
    assert (result.batch_size, result.limited_by) == (1023, "size_limit")


# --- autocast ---


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", AUTOCAST)
def test_autocast_has_cudas_operator_lists(group, dtype):
    def step():
        make = Tensors(FLOAT if group == "low" else dtype)
        with torch.autocast("cuda", dtype=dtype):
            found = {name: CASES[name](make).dtype for name in AUTOCAST[group]}
            norm = CASES["rms_norm"](make).dtype
        return found, norm

    found, norm = on(AMPERE, step)
    assert found == dict.fromkeys(AUTOCAST[group], FLOAT if group == "float32" else dtype)
    if VERSION >= (2, 12):
        assert norm is FLOAT
    elif group != "low":
        assert norm is dtype


def test_autocast_as_the_step_sees_it():
    def step():
        full = torch.zeros(64, 64, device="cuda")
        with torch.autocast(device_type="cuda"):
            state = (
                torch.is_autocast_enabled(),
                torch.is_autocast_enabled("cuda"),
                torch.get_autocast_dtype("cuda"),
            )
            mixed = (
                torch.dot(full[0], full[0].half()).dtype,
                torch.cat([full, full.half()]).dtype,
            )  # promoted
        with torch.autocast("cuda", enabled=False):
            return *state, *mixed, torch.is_autocast_enabled("cuda")

    assert on(AMPERE, step) == (True, True, torch.float16, torch.float32, torch.float32, False)


def test_autocast_that_the_caller_has_entered_has_cudas_lists_too():
    """As where a script probes inside its own context; without a card, it is the CPU's."""
    with torch.autocast("cpu", torch.bfloat16):
        assert (
            on(AMPERE, lambda: torch.zeros(8, 8, device="cuda").bfloat16().exp().dtype)
            is torch.float32
        )


# --- workspaces ---


@pytest.mark.parametrize("card", [AMPERE, "200MiB"])
def test_convolutions_raise_only_the_upper_end_of_the_peak(card):
    model = nn.Conv2d(32, 32, 3, padding=1)
    bench = Bench(model, card)
    bench.run(lambda: model(torch.zeros(64, 32, 64, 64, device="cuda")).sum())
    usage, patches = bench.device.usage(), 64 * 32 * 9 * 64 * 64 * 4
    assert usage.peak_reserved_bytes < patches
    if card == AMPERE:
        assert patches < usage.peak_upper_bytes < 2 * patches
    else:  # no room for the workspace
        assert usage.peak_upper_bytes == 200 * MIB


@pytest.mark.parametrize(("benchmark", "left_mib"), [(True, [2, 66]), (False, [66, 66])])
def test_trying_kernels_empties_the_cache_once(monkeypatch, benchmark, left_mib):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
    bench = Bench(nn.Conv2d(1, 1, 3), card="1GiB")

    def step():
        torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        with torch.no_grad():
            bench.model(torch.zeros(1, 1, 8, 8, device="cuda"))
        return torch.cuda.memory_reserved() // MIB

    assert [bench.run(step), bench.run(step)] == left_mib
    bench.device.start_trial()  # of a fresh process, which has tried nothing
    assert bench.run(step) == left_mib[0]


@pytest.mark.parametrize(
    ("groups", "memory_format", "limited_by"),
    [
        (64, torch.channels_last, "size_limit"),
        (64, torch.contiguous_format, "max_batch"),
        (1, torch.channels_last, "max_batch"),
    ],
)
def test_cudnn_counts_channels_last_depthwise_in_32_bits(groups, memory_format, limited_by):
    model = nn.Conv2d(64, 64, 3, groups=groups, stride=4).half().eval()

    def step(model, batch_size):
        with torch.no_grad():
            model(
                torch.zeros(batch_size, 64, 512, 512, device="cuda")
                .half()
                .to(memory_format=memory_format)
            )

    result = oomprobe.find_max_batch(
        model, step, device="sim:H100-80GB", max_batch=160, progress="off"
    )
    assert (result.batch_size, result.limited_by) == (
        127 if limited_by == "size_limit" else 160,
        limited_by,
    )


def test_reflection_stops_at_32_bits():
    def step(model, batch_size):
        F.pad(
            torch.zeros(batch_size, 1024, 1024, 2, device="cuda", dtype=torch.int8),
            (1, 1, 1, 1),
            mode="reflect",
        )

    result = oomprobe.find_max_batch(
        nn.Linear(1, 1), step, device="sim:H100-80GB", max_batch=2048, progress="off", resolution=0
    )
    assert (result.batch_size, result.limited_by) == (1023, "size_limit")


# --- dtypes that CUDA refuses ---


DOUBLE = torch.float64
MIXED = {
    "linear": lambda x: F.linear(x.to(DOUBLE), x.new_empty(3, 8), x.new_empty(3)),
    "addmm": lambda x: torch.addmm(x.to(DOUBLE), x, x.new_empty(8, 8)),
    "layer norm": lambda x: F.layer_norm(x.to(HALF), (8,), x.new_ones(8)),
    "group norm": lambda x: F.group_norm(x.to(DOUBLE)[..., None], 2, x.new_ones(8)),
    "index_add": lambda x: x.index_add(0, x.new_zeros(8, dtype=torch.long), x.to(DOUBLE)),
    "cross entropy": lambda x: F.cross_entropy(x, x.new_zeros(8, dtype=torch.int32)),
}


@pytest.mark.parametrize("name", MIXED)
def test_tensors_of_several_dtypes_are_refused_as_on_a_card(name):
    with pytest.raises(RuntimeError, match="dtype"):
        on(AMPERE, lambda: MIXED[name](torch.zeros(8, 8, device="cuda")))
