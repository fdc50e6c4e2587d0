import pytest
import torch

from oomprobe.simulation.workspaces import of_convolution

_aten = torch.ops.aten


def forward(images, weight, stride=(1, 1), padding=(0, 0), dilation=(1, 1), *, transposed=False, groups=1):
    args = (images, weight, None, stride, padding, dilation, transposed, (0, 0), groups)
    return of_convolution(_aten.convolution.default, args)


def backward(images, weight, *, transposed=False, groups=1):
    args = (images, images, weight, None, (1, 1), (0, 0), (1, 1), transposed, (0, 0), groups, [True] * 3)
    return of_convolution(_aten.convolution_backward.default, args)


@pytest.mark.parametrize(
    ("asked", "values"),
    [
        (lambda x: forward(x, torch.empty(16, 8, 3, 3)), 2 * 8 * 9 * 8 * 8),
        (lambda x: forward(x, torch.empty(16, 8, 3, 3), padding=(1, 1)), 2 * 8 * 9 * 10 * 10),
        (lambda x: forward(x, torch.empty(16, 8, 3, 3), stride=(2, 2)), 2 * 8 * 9 * 4 * 4),
        (lambda x: forward(x, torch.empty(16, 8, 3, 3), dilation=(2, 2)), 2 * 8 * 9 * 6 * 6),
        (lambda x: forward(x, torch.empty(16, 8, 1, 1)), 0),  # a product of matrices
        (lambda x: forward(x, torch.empty(8, 4, 3, 3), transposed=True), 2 * 4 * 9 * 10 * 10),
        (lambda x: forward(x, torch.empty(8, 4, 3, 3), transposed=True, groups=2), 2 * 8 * 9 * 10 * 10),
        (lambda x: backward(x, torch.empty(16, 8, 3, 3)), 2 * 8 * 9 * 8 * 8),
        (lambda x: backward(x, torch.empty(8, 4, 3, 3), transposed=True), 2 * 4 * 9 * 10 * 10),
        (lambda x: of_convolution(_aten.mm.default, (x, x)), 0),
    ],
)
def test_the_patches_of_images_of_ten_by_ten(asked, values):
    assert asked(torch.empty(2, 8, 10, 10)) == 4 * values
    assert asked(torch.empty(2, 8, 10, 10, dtype=torch.float16)) == 2 * values
