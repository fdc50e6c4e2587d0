"""Scratch memory of kernels; expected numbers are the requests of torch 2.14.1 to its own allocator for the same call."""

import csv
from pathlib import Path

import pytest
import torch

from oomprobe.simulation.kernels.convolutions import convolution_workspace, winograd_workspace
from oomprobe.simulation.kernels.table import find_launch
from oomprobe.tape.calls import RESULT
from oomprobe.tape.reductions import Processors, Reduction, buffers

from .bench import Bench

WORKSPACES = Path(__file__).parents[1] / "data" / "cudnn_workspaces_v100.csv"
A100, H100, ADA, T4 = (
    ((8, 0), 108, 2048),
    ((9, 0), 132, 2048),
    ((8, 9), 128, 1536),
    ((7, 5), 40, 1024),
)


@pytest.mark.parametrize(
    ("card", "item", "shape", "strides", "offset", "reduced", "expected"),
    [
        (A100, 4, (20000, 1024), (1024, 1), 0, (True, False), ((113246208, 32),)),
        (H100, 4, (20000, 1024), (1024, 1), 0, (True, False), ((138412032, 32),)),
        (ADA, 4, (20000, 1024), (1024, 1), 0, (True, False), ((100663296, 32),)),
        (T4, 4, (20000, 1024), (1024, 1), 0, (True, False), ((20971520, 32),)),
        (A100, 4, (20000, 1024), (1024, 1), 0, (False, True), ()),
        (A100, 4, (20480000,), (1,), 0, (True,), ((1728, 4),)),
        (A100, 2, (4, 100000, 9, 255), (229500000, 2295, 255, 1), 0, (False, True, False, True), ((28080, 144),)),
        (H100, 4, (700000, 1024), (1024, 1), 0, (True, False), ((179306496, 32),) * 2),  # beyond 2 GiB: two kernels
        (A100, 4, (978, 6989), (1, 979), 0, (False, True), ((1752576, 124),)),
        (A100, 4, (32, 256, 1, 4096), (1048576, 4096, 4096, 1), 2, (True, False, False, True), ((2048, 1024),)),
        (T4, 4, (1, 19421), (1, 1), 0, (True, True), ()),
        (T4, 4, (274, 1000, 4), (4000, 4, 1), 2, (True, True, False), ((8576, 4),)),
        (T4, 4, (1448, 104, 133), (13832, 133, 1), 0, (True, False, False), ((21245952, 436),)),
        (T4, 4, (99, 237, 19), (237, 1, 23463), 0, (False, True, True), ()),
        (A100, 2, (1073741824,), (1,), 0, (True,), ((32768, 4),)),
        (A100, 2, (1073741825,), (1,), 0, (True,), ((16384, 4), (16388, 4))),
        (A100, 4, (2147483647,), (0,), 0, (True,), ((65536, 4),)),
        (A100, 4, (0, 3), (3, 1), 0, (True, False), ()),
        (T4, 2, (64, 256, 4), (4, 256, 1), 0, (True, True, False), ()),
        (A100, 4, (2, 255, 277814), (277814, 555628, 1), 0, (False, True, True), ((4328, 8),)),
        (A100, 2, (240, 16, 4, 4096), (64, 0, 1, 15360), 2, (False, True, False, True), ((14254080, 60),)),
        (A100, 4, (8, 64, 2, 256), (0, 1, 64, 128), 2, (True, False, True, True), ((524288, 4),)),
        (T4, 4, (27716, 64, 1, 1), (64, 1, 1, 1), 4, (True, False, False, True), ((3555328, 4),)),
        (T4, 4, (2, 4096, 185175), (1, 2, 8192), 0, (True, False, False), ()),
        (T4, 4, (4, 4096, 607, 256), (636485632, 155392, 256, 1), 4, (False, True, True, False), ((159121408, 8),) * 8),
        (A100, 4, (4096, 3, 2, 1000), (1, 0, 28672000, 4096), 3, (True, True, True, False), ()),
        (A100, 4, (0, 1000000), (1000000, 1), 0, (False, True), ()),
    ],
)  # fmt: skip
def test_partial_results_of_reductions(card, item, shape, strides, offset, reduced, expected):
    kind = Reduction(Processors(*card), item, max(4, item), reduced)
    assert buffers(kind, shape, strides, offset) == expected


def test_reductions_in_a_step_allocate_partial_results():
    bench = Bench(None, "A100-80GB")
    bench.run(lambda: torch.zeros(20000, 1024, device="cuda").sum(0))
    assert bench.peak_bytes == 20000 * 1024 * 4 + 1024 * 4 + 113246208 + 512


def test_autograd_adds_gradients_in_place_if_only_it_holds_them():
    def allocations(hook):
        def step():
            x = torch.zeros(64, 64, device="cuda", requires_grad=True) * 2
            y = x + x @ torch.zeros(64, 64, device="cuda")
            y.register_hook(hook)
            (y * y.detach()).sum().backward()

        bench = Bench(None, "1GiB")
        bench.run(step)
        return bench.device._memory.allocator.served

    assert allocations([].append) == allocations(lambda _: None) + 1


aten = torch.ops.aten
CUDNN = aten._scaled_dot_product_cudnn_attention_backward.default
AT, JOINED = torch.zeros(3, dtype=torch.long), torch.empty(4, 3)
HEADS, GROUPS = (
    torch.empty(2, heads, length, 64, dtype=torch.half) for heads, length in ((8, 100), (4, 50))
)


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "expected"),
    [
        (CUDNN, (HEADS, HEADS, HEADS), {}, (RESULT, 6400 * 65 + 256)),
        (CUDNN, (HEADS, HEADS, GROUPS), {}, (RESULT, 6400 * 65 + 256 + 2 * 102400)),
        (aten.sort.default, (torch.tensor(1.0),), {}, None),
        (aten.topk.default, (torch.tensor(1.0), 1), {}, None),
        (aten.randperm.default, (0,), {}, None),
        (aten.randperm.default, (1,), {}, (RESULT, 8, -1, 8, 4, 4, 1)),
        (aten.mv.default, (torch.empty(2, 1), torch.empty(1).as_strided((1,), (0,))), {}, None),
        (aten.mv.default, (torch.empty(2, 3), torch.empty(1).expand(3)), {}, (RESULT, 12)),
        (aten.dot.default, (torch.tensor(1.0), torch.empty(1)), {}, None),
        (aten.index.Tensor, (torch.empty(9, 9), [AT, AT]), {}, None),
        (aten.index.Tensor, (torch.empty(9, 9), [AT[:, None], AT[:2]]), {}, (48, 48, RESULT)),
        (aten.index_put.default, (torch.empty(9), [AT], torch.tensor(1.0)), {}, (4, RESULT)),
        (aten.index_put.default, (torch.empty(3), [AT.bool()], torch.tensor(1.0)), {}, None),
        (aten._chunk_cat.out, ([JOINED.half()], 0, 2), {"out": JOINED}, (RESULT,)),
        (aten._chunk_cat.out, ([JOINED.bfloat16()], 0, 2), {"out": JOINED}, (RESULT, 9 * 8)),
        (aten.max.other, (torch.empty(9), torch.empty(9)), {}, None),
        (aten.copy_.default, (torch.empty(9), torch.empty(9)), {}, None),
    ],
)  # fmt: skip
def test_what_kernels_take_beside_their_results(func, args, kwargs, expected):
    launch = find_launch(Processors(*A100), func, args, kwargs)
    assert (launch and launch.kernel.rule(*launch.kernel.fixed, *launch.numbers)) == expected


# --- workspaces of convolutions ---


def forward(
    images, weight, stride=(1, 1), padding=(0, 0), dilation=(1, 1), *, transposed=False, groups=1, of=convolution_workspace
):  # fmt: skip
    args = (images, weight, None, stride, padding, dilation, transposed, (0, 0), groups)
    return of(torch.ops.aten.convolution.default, args)


def backward(images, weight, *, transposed=False, groups=1):
    args = (
        images,
        images,
        weight,
        None,
        (1, 1),
        (0, 0),
        (1, 1),
        transposed,
        (0, 0),
        groups,
        [True] * 3,
    )
    return convolution_workspace(torch.ops.aten.convolution_backward.default, args)


@pytest.mark.parametrize(
    ("workspace", "values"),
    [
        (lambda x: forward(x, torch.empty(16, 8, 5, 5), padding=(1, 1)), 2 * 8 * 25 * 62 * 62),
        (lambda x: forward(x, torch.empty(16, 8, 3, 3), stride=(2, 2)), 2 * 8 * 9 * 31 * 31),
        (lambda x: forward(x, torch.empty(16, 8, 3, 3), dilation=(2, 2)), 2 * 8 * 9 * 60 * 60),
        (lambda x: forward(x, torch.empty(8, 4, 3, 3), transposed=True), 2 * 4 * 9 * 64 * 64),
        (lambda x: forward(x, torch.empty(8, 4, 3, 3), transposed=True, groups=2), 2 * 8 * 9 * 64 * 64),
        (lambda x: backward(x, torch.empty(16, 8, 5, 5)), 2 * 8 * 25 * 60 * 60),
        (lambda x: backward(x, torch.empty(8, 4, 3, 3), transposed=True), 2 * 4 * 9 * 64 * 64),
        (lambda x: convolution_workspace(torch.ops.aten.mm.default, (x, x)), 0),
    ],
)  # fmt: skip
def test_unfolded_patches_of_64x64_images(workspace, values):
    assert workspace(torch.empty(2, 8, 64, 64)) == 4 * values
    assert workspace(torch.empty(2, 8, 64, 64, dtype=torch.float16)) == 2 * values


@pytest.mark.parametrize("padding", [0, 1])
def test_winograd_may_want_more_than_patches(padding):
    images, weight = torch.empty(2, 8, 64, 64), torch.empty(64, 8, 3, 3)
    assert forward(images, weight, padding=(padding, padding)) == 4 * 36 * (
        2 * 16 * 16 * (8 + 64) + 8 * 64
    )


@pytest.mark.parametrize(
    ("dtype", "recorded_bytes"),  # on an H200, by vit_base_patch16_224 with 64 images
    [(torch.float16, 73_793_552), (torch.float32, 93_061_264)],
)
def test_a_convolution_may_copy_its_input_result_and_weight(dtype, recorded_bytes):
    images = torch.empty(64, 3, 224, 224, dtype=dtype, device="meta")
    weight = torch.empty(768, 3, 16, 16, dtype=dtype, device="meta")
    assert 0 <= forward(images, weight, stride=(16, 16)) - recorded_bytes < 2**15


def test_workspaces_recorded_on_a_card():
    """All are within what a convolution may want; ten of twelve plain ones of 3x3 are Winograd's, up to the block's rounding."""
    plain = []
    for row in csv.DictReader(
        line for line in WORKSPACES.read_text().splitlines() if not line.startswith("#")
    ):
        numbers = {name: int(value) for name, value in row.items() if name != "kind"}
        channels, height, kernel, stride = (
            numbers[name] for name in ("channels", "height", "kernel", "stride")
        )
        images = torch.empty(numbers["images"], channels, height, height, device="meta")
        weight = torch.empty(numbers["out_channels"], channels, kernel, kernel, device="meta")
        arguments = images, weight, (stride, stride), (kernel // 2,) * 2
        assert numbers["block_bytes"] <= forward(*arguments) + 2**20, row
        if winograd := forward(*arguments, of=winograd_workspace):
            plain.append(0 <= numbers["block_bytes"] - winograd < 2**20)
    assert sorted(plain) == [False] * 2 + [True] * 10
