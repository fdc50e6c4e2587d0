"""What a simulated card says of operators whose requests nobody has compared with torch's allocator."""

import pytest
import torch
from torch import nn

import oomprobe
from oomprobe.simulation.kernels.compared import is_compared

from .bench import Bench

MIB = 2**18  # float32 numbers in a MiB
NOTE = "not compared with torch's allocator"


@torch.library.custom_op("strangers::doubled", mutates_args=())
def doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


@doubled.register_fake
def _(tensor):
    return torch.empty_like(tensor)


def renormed():
    return torch.zeros(1024, 1024, device="cuda").renorm(2, 0, 1.0)


def renormed_far_from_the_peak():
    kept = torch.zeros(64 * MIB, device="cuda")
    del kept
    return renormed()


@pytest.mark.parametrize(
    ("step", "named"),
    [
        (renormed, "aten.renorm"),
        (lambda: doubled(torch.zeros(MIB, device="cuda")), "strangers.doubled"),
        (lambda: (renormed(), doubled(torch.zeros(16 * MIB, device="cuda"))), "strangers.doubled"),
        (renormed_far_from_the_peak, ""),
        (lambda: torch.zeros(MIB, device="cuda").relu().cumsum(0), ""),
    ],
)
def test_an_operator_that_was_not_compared_is_named_where_it_runs_near_the_peak(step, named):
    bench = Bench(None, "1GiB")
    bench.run(step)
    assert bench.device.not_compared.removeprefix(f"{NOTE}: ").partition(". If")[0] == named


def test_the_share_of_the_peak_at_risk():
    bench = Bench(None, "1GiB")
    bench.run(lambda: (torch.zeros(30 * MIB, device="cuda"), renormed()))
    assert bench.device.not_compared.endswith(
        "the peak is up to 50 % higher"
    )  # 38 MiB at the peak, of which 8 the operator's own: 21 %


def test_a_trial_forgets_the_operators_of_the_one_before():
    bench = Bench(None, "1GiB")
    bench.run(renormed)
    bench.device.start_trial()
    bench.run(lambda: torch.zeros(8 * MIB, device="cuda"))
    assert bench.device.not_compared == ""
    bench.run(lambda: torch.zeros(1, device="cuda"))
    assert bench.device.not_compared == ""


def test_a_search_says_so_once():
    model = nn.Linear(64, 64)

    @torch.no_grad()
    def step(model, batch_size):
        model(torch.zeros(batch_size, 64, device="cuda")).renorm(2, 0, 1.0)

    result = oomprobe.find_max_batch(model, step, device="sim:1GiB", progress="off")
    assert len([note for note in result.notes if NOTE in note]) == 1


def test_what_is_compared():
    aten = torch.ops.aten
    assert all(
        map(
            is_compared, (aten.mm.default, aten.mul_.Tensor, aten.view.default, aten.erfinv.default)
        )
    )
    assert not any(
        map(
            is_compared,
            (aten.renorm.default, aten._ctc_loss.default, torch.ops.strangers.doubled.default),
        )
    )
