"""Scratch memory of kernels; expected numbers are the requests of torch 2.14.1 to its own allocator for the same call."""

import csv
from pathlib import Path

import pytest
import torch

from oomprobe.simulation.kernels.convolutions import convolution_workspace, winograd_workspace
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
    ("card", "item", "shape", "strides", "reduced", "expected"),
    [
        (A100, 4, (20000, 1024), (1024, 1), (True, False), ((113246208, 32),)),
        (H100, 4, (20000, 1024), (1024, 1), (True, False), ((138412032, 32),)),
        (ADA, 4, (20000, 1024), (1024, 1), (True, False), ((100663296, 32),)),
        (T4, 4, (20000, 1024), (1024, 1), (True, False), ((20971520, 32),)),
        (A100, 4, (20000, 1024), (1024, 1), (False, True), ()),
        (A100, 4, (20480000,), (1,), (True,), ((1728, 4),)),
        (A100, 2, (4, 100000, 9, 255), (229500000, 2295, 255, 1), (False, True, False, True), ((28080, 144),)),
        (H100, 4, (700000, 1024), (1024, 1), (True, False), ((179306496, 32),) * 2),  # beyond 2 GiB: two kernels
    ],
)  # fmt: skip
def test_partial_results_of_reductions(card, item, shape, strides, reduced, expected):
    assert (
        buffers(Reduction(Processors(*card), item, max(4, item), reduced), shape, strides, 0)
        == expected
    )


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
        (
            lambda x: forward(x, torch.empty(8, 4, 3, 3), transposed=True, groups=2),
            2 * 8 * 9 * 64 * 64,
        ),
        (lambda x: backward(x, torch.empty(16, 8, 5, 5)), 2 * 8 * 25 * 60 * 60),
        (lambda x: backward(x, torch.empty(8, 4, 3, 3), transposed=True), 2 * 4 * 9 * 64 * 64),
        (lambda x: convolution_workspace(torch.ops.aten.mm.default, (x, x)), 0),
    ],
)
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
