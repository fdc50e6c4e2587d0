"""Results of operators on fakes are the same as those of torch's fake kernels, when they are remembered too."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from oomprobe.simulation.fakes import Results, Views

aten = torch.ops.aten


def described(value, arguments):
    """Return all that a step can see of a result, and which argument it is or shares its storage with."""
    if isinstance(value, list | tuple):
        return type(value), [described(one, arguments) for one in value]
    if not isinstance(value, FakeTensor):
        return value
    storage = value.untyped_storage()
    return (
        value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, storage.nbytes(),
        [one is value for one in arguments], [one.untyped_storage()._cdata == storage._cdata for one in arguments],
    )  # fmt: skip


SQUARE, INTEGERS = (4, 4), torch.int64
CALLS = {
    "new": (aten.mm.default, [SQUARE, SQUARE], [], {}),
    "broadcast": (aten.add.Tensor, [(4, 1), (1, 4)], [], {"alpha": 2}),
    "view": (aten.select.int, [SQUARE], [0, 2], {}),
    "views": (aten.split.Tensor, [SQUARE], [2], {}),
    "in place": (aten.add_.Tensor, [SQUARE, SQUARE], [], {}),
    "resized": (aten.resize_.default, [SQUARE], [[8, 8]], {}),
    "out": (aten.mul.out, [SQUARE, SQUARE], [], {"out": SQUARE}),
    "several": (aten.native_layer_norm.default, [SQUARE], [[4], None, None, 1e-5], {}),
    "no tensor": (aten.is_same_size.default, [SQUARE, SQUARE], [], {}),
    "nothing": (aten._foreach_add_.Scalar, [SQUARE], [1], {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_remembered_result_is_what_torch_returns(name):
    func, shapes, rest, named = CALLS[name]
    mode = FakeTensorMode()
    results = Results(mode, Views(mode))

    def call(run):
        with mode:
            tensors = [torch.empty(shape) for shape in shapes]
            kwargs = {
                key: torch.empty(value) if key == "out" else value for key, value in named.items()
            }
        arguments = [
            *tensors,
            *(value for value in kwargs.values() if isinstance(value, FakeTensor)),
        ]
        given = [tensors] if name == "nothing" else tensors
        return described(run(func, (*given, *rest), kwargs), arguments), described(
            arguments, arguments
        )

    def kernel(func, args, kwargs):
        with mode:
            return func(*args, **kwargs)

    truth = call(kernel)
    assert [call(results.run) for _ in range(3)] == [truth] * 3


def test_arguments_that_decide_about_the_result_are_told_apart():
    mode = FakeTensorMode()
    results = Results(mode, Views(mode))
    with mode:
        host, integers = torch.empty(4), torch.empty(4, dtype=INTEGERS)
        card = torch.empty(4, device=torch.device("cpu", 0))
    found = [
        results.run(aten.mul.Tensor, (one, by), {})
        for one in (integers, host, card)
        for by in (1, 1.0, True)
    ]
    assert [one.dtype for one in found] == [INTEGERS, torch.float32, INTEGERS, *[torch.float32] * 6]
    assert {one.fake_device for one in found[3:6]} == {host.fake_device} != {card.fake_device}
    assert {one.fake_device for one in found[6:]} == {card.fake_device}
    torch.set_default_dtype(torch.float64)
    try:
        assert results.run(aten.mul.Tensor, (integers, 1.0), {}).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_no_storage_is_kept_alive():
    mode, gone = FakeTensorMode(), []
    results = Results(mode, Views(mode))
    for _ in range(2):
        with mode:
            one = torch.empty(4)
        for tensor in (one, results.run(aten.neg.default, (one,), {})):
            gone.append(torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage()))
        del one, tensor
    assert all(ref.expired() for ref in gone)


def test_a_number_that_always_differs_fills_no_memory(monkeypatch):
    monkeypatch.setattr("oomprobe.simulation.fakes.MOST_RESULTS", 10)
    mode = FakeTensorMode()
    results = Results(mode, Views(mode))
    with mode:
        one = torch.empty(4)
    for number in range(25):
        assert results.run(aten.add.Tensor, (one, float(number)), {}).shape == (4,)
    assert len(results._known) == 10


class Cuts:
    """An operator that returns parts of one new storage."""

    namespace = "aten"

    def __init__(self, *cuts):
        self.cuts = cuts

    def __call__(self, tensor):
        whole = tensor.new_empty(8)
        return [whole[cut] for cut in self.cuts]


@pytest.mark.parametrize(
    "cuts", [[slice(4)], [slice(8), slice(4)]], ids=["larger than the result", "of two results"]
)
def test_a_storage_that_is_not_one_results_own_is_not_made_anew(cuts):
    mode, cut = FakeTensorMode(), Cuts(*cuts)
    results = Results(mode, Views(mode))
    with mode:
        one = torch.empty(4)
    for _ in range(2):
        storages = [part.untyped_storage() for part in results.run(cut, (one,), {})]
        assert [storage.nbytes() for storage in storages] == [32] * len(cuts)
        assert len({storage._cdata for storage in storages}) == 1


def test_a_view_is_what_the_class_of_fakes_makes():
    mode, device = FakeTensorMode(), torch.device("cpu", 0)
    mode._allow_unsafe_data_ptr_access = False
    views, meta = Views(mode), torch.empty(8, device="meta")
    for shape in ((8,), (2, 4)):
        made = views.make(
            meta.untyped_storage(), shape, torch.empty(shape).stride(), 0, torch.float32, device
        )
        with torch._C._DisableTorchDispatch():
            one = FakeTensor(mode, meta.view(shape), device)
        assert vars(made) == vars(one)
        assert described(made, [made]) == described(one, [one])
        assert str(torch._C._dispatch_keys(made)) == str(torch._C._dispatch_keys(one))
        for fake in (made, one):
            with pytest.raises(RuntimeError, match="data pointer"):
                fake.data_ptr()
