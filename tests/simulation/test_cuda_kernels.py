from contextlib import nullcontext

import pytest
import torch
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


# --- dropout ---


@pytest.mark.parametrize(
    ("dropout", "taken_bytes"),
    [
        (lambda x: F.dropout(x, 0.5), 4 * MIB + MIB),  # a mask of one byte
        (lambda x: F.dropout(x, 0.5, training=False), 0),
        (lambda x: F.dropout(x, 0.0), 0),
        (nn.Dropout().eval(), 0),
    ],
)
def test_memory_kept_by_dropout(dropout, taken_bytes):
    def step():
        x = torch.zeros(MIB, device="cuda", requires_grad=True)
        y = dropout(x)
        return torch.cuda.memory_allocated() - x.nbytes, y.shape

    assert on(AMPERE, step) == (taken_bytes, (MIB,))


# --- attention ---


def attend(dtype=torch.float16, head=64, kv_heads=8, *, mask=False, math=False, **options):
    def step():
        q, k, v = (
            torch.zeros(2, heads, 512, head, device="cuda", dtype=dtype, requires_grad=True)
            for heads in (8, kv_heads, kv_heads)
        )
        m = torch.ones(512, 512, dtype=torch.bool, device="cuda") if mask else None
        with sdpa_kernel(SDPBackend.MATH) if math else nullcontext():
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=m, **options)
        out.sum().backward()
        names, node = [], out.grad_fn
        while node is not None:
            names.append(type(node).__name__)
            node = node.next_functions[0][0] if node.next_functions else None
        return " ".join(names), out.shape

    return step


@pytest.mark.parametrize(
    ("card", "options", "kind"),
    [
        (AMPERE, {}, "FlashAttention"),
        (AMPERE, {"dtype": torch.bfloat16, "is_causal": True}, "FlashAttention"),
        (AMPERE, {"dtype": torch.float32}, "EfficientAttention"),
        (AMPERE, {"mask": True}, "EfficientAttention"),
        (AMPERE, {"head": 36}, "FlashAttention"),  # padded
        (VOLTA, {}, "EfficientAttention"),
        (VOLTA, {"dtype": torch.float32, "head": 30}, "Math"),
        (AMPERE, {"dtype": torch.float64}, "Math"),
        (AMPERE, {"math": True}, "Math"),
        (AMPERE, {"kv_heads": 2, "enable_gqa": True}, "FlashAttention"),
    ],
)
def test_the_attention_kernel_that_the_card_chooses(card, options, kind):
    names, shape = on(card, attend(**options))
    assert shape == (2, 8, 512, options.get("head", 64))
    assert kind in names or (kind == "Math" and "Attention" not in names)


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

LOW = {
    "linear": lambda x: F.linear(x, x), "matmul": lambda x: x @ x, "bmm": lambda x: torch.bmm(x[None], x[None]),
    "conv": lambda x: F.conv1d(x[None], x[:, :, None]), "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "mv": lambda x: torch.mv(x, x[0]), "baddbmm": lambda x: torch.baddbmm(x[None], x[None], x[None]),
    "same padding": lambda x: F.conv1d(x[None], x[:, :, None], padding="same"),
    "prelu": lambda x: F.prelu(x, x[0, :1]),
}  # fmt: skip
HIGH = {
    "softmax": lambda x: x.softmax(-1), "log_softmax": lambda x: x.log_softmax(-1), "sum": lambda x: x.sum(),
    "layer_norm": lambda x: F.layer_norm(x, (64,)), "exp": lambda x: x.exp(), "pow": lambda x: x.pow(2),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(64, dtype=torch.long, device="cuda")),
    "mse": lambda x: F.mse_loss(x, x), "cumsum": lambda x: x.cumsum(0), "norm": lambda x: torch.linalg.vector_norm(x),
    "group_norm": lambda x: F.group_norm(x[None], 4), "rsqrt": lambda x: x.rsqrt(), "softplus": lambda x: F.softplus(x),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, x), "cosine": lambda x: F.cosine_similarity(x, x),
    "upsample": lambda x: F.interpolate(x[None], scale_factor=2),
    "prod": lambda x: x.prod(), "smooth": lambda x: F.smooth_l1_loss(x, x),
}  # fmt: skip
UNCHANGED = {
    "gelu": F.gelu, "relu": F.relu, "mean": lambda x: x.mean(), "add": lambda x: x + x, "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x, x]), "pool": lambda x: F.avg_pool1d(x[None], 2), "silu": F.silu,
    "pool3": lambda x: F.avg_pool3d(x[None, None, None], (1, 2, 2)), "pad": lambda x: F.pad(x[None], (1, 1), mode="reflect"),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
}  # fmt: skip
(HIGH if VERSION >= (2, 12) else UNCHANGED)["rms"] = lambda x: F.rms_norm(x, (64,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", ["low", "high", "unchanged"])
def test_autocast_has_cudas_operator_lists(group, dtype):
    table = {"low": LOW, "high": HIGH, "unchanged": UNCHANGED}[group]

    def step():
        full = torch.zeros(64, 64, device="cuda")
        with torch.autocast("cuda", dtype=dtype):
            given = full if group == "low" else full.to(dtype)
            return {name: call(given).dtype for name, call in table.items()}

    expected = torch.float32 if group == "high" else dtype
    assert on(AMPERE, step) == dict.fromkeys(table, expected)


def test_weights_are_cast_once_and_released_at_the_end():
    model = nn.Linear(1024, 1024, bias=False)

    def step():
        x = torch.zeros(1, 1024, device="cuda")
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda"):
            model(x)
            once = torch.cuda.memory_allocated() - before
            model(x)
            twice = torch.cuda.memory_allocated() - before
        return once >= 2 * MIB, twice - once < MIB, torch.cuda.memory_allocated() - before < 9 * MIB

    assert on(AMPERE, step, model) == (True, True, True)


@pytest.mark.parametrize("autocast", [torch.autocast, torch.amp.autocast])
def test_autocast_as_the_step_sees_it(autocast):
    def step():
        full = torch.zeros(64, 64, device="cuda")
        with autocast(device_type="cuda"):
            state = torch.is_autocast_enabled(), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
            mixed = torch.dot(full[0], full[0].half()).dtype, torch.cat([full, full.half()]).dtype  # promoted
        with autocast("cuda", enabled=False):
            return *state, *mixed, torch.is_autocast_enabled("cuda")

    assert on(AMPERE, step) == (True, True, torch.float16, torch.float32, torch.float32, False)


def test_softmax_in_half_precision_makes_no_copy():
    bench = Bench()
    bench.run(lambda: torch.zeros(MIB, 4, device="cuda", dtype=torch.float16).softmax(-1, dtype=torch.float32))
    assert bench.peak_bytes == 8 * MIB + 16 * MIB


# --- workspaces ---


def test_each_thread_has_a_cublas_workspace():
    model = nn.Linear(64, 64, bias=False)

    def step():
        loss = model(torch.zeros(1, 64, device="cuda")).sum()
        forward = torch.cuda.memory_allocated()
        loss.backward()
        return forward

    weights = 64 * 64 * 4
    for card, workspace_bytes in ((AMPERE, 8_519_680), (HOPPER, 32 * MIB)):
        bench = Bench(model, card)
        assert workspace_bytes < bench.run(step) < workspace_bytes + 2 * weights
        model.weight.grad = None
        assert bench.allocated_bytes == weights + 2 * workspace_bytes


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
            model(torch.zeros(batch_size, 64, 512, 512, device="cuda").half().to(memory_format=memory_format))

    result = oomprobe.find_max_batch(model, step, device="sim:H100-80GB", max_batch=160, progress="off")
    assert (result.batch_size, result.limited_by) == (127 if limited_by == "size_limit" else 160, limited_by)


def test_reflection_stops_at_32_bits():
    def step(model, batch_size):
        F.pad(torch.zeros(batch_size, 1024, 1024, 2, device="cuda", dtype=torch.int8), (1, 1, 1, 1), mode="reflect")

    result = oomprobe.find_max_batch(
        nn.Linear(1, 1), step, device="sim:H100-80GB", max_batch=2048, progress="off", resolution=0
    )
    assert (result.batch_size, result.limited_by) == (1023, "size_limit")
