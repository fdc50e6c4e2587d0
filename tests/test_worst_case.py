from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from zoo import training_step

import oomprobe
from oomprobe import InvalidArgumentError
from oomprobe.worst_case import SAME_SHAPE_EXAMPLES, largest_first, shapes_of


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 40), st.integers(1, 3))
def test_each_batch_holds_the_longest_examples(lengths, batch_size, count):
    batches = largest_first([{"x": list(range(length))} for length in lengths]).batches(
        batch_size, count
    )
    assert len(batches) == batch_size * count
    for start in range(0, len(batches), batch_size):
        got = sorted(len(batches[start + i]["x"]) for i in range(batch_size))
        if batch_size <= len(lengths):
            assert got == sorted(lengths)[-batch_size:]
        else:
            assert set(got) == set(lengths)


@given(st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=12), st.integers(1, 6))
def test_two_batches_hold_the_largest_of_each_field(sizes, batch_size):
    """A batch is padded to the longest of each field."""
    data = [{name: [0] * count for name, count in zip("abc", one, strict=True)} for one in sizes]
    order = largest_first(data)
    batches = [order.batch(batch_size, number) for number in range(2)]
    assert all(len(batch) == len(set(batch)) == min(batch_size, len(data)) for batch in batches)
    assert order.has_largest(3) is any(map(any, sizes))
    if order.has_largest(batch_size):
        seen = [data[index] for batch in batches for index in batch]
        for place, name in enumerate("abc"):
            assert max(len(one[name]) for one in seen) == max(one[place] for one in sizes)


@pytest.mark.parametrize(
    ("value", "shapes"),
    [
        (torch.zeros(2, 3), {0: ((2, 3),)}),
        (np.zeros((4, 5)), {0: ((4, 5),)}),
        ([1, 2, 3], {0: ((3,),)}),
        ([[1], [2, 3]], {0: ((1,),), 1: ((2,),)}),
        (
            {"a": [np.float32(1), 2], "b": np.int64(1), "c": [np.bool_(1)] * 3},
            {"a": ((2,),), "b": (), "c": ((3,),)},
        ),
        ({"a": [torch.tensor(1)] * 4, "b": [[np.int64(1)]] * 2}, {"a": ((4,),), "b": ((1,), (1,))}),
        (["a", np.str_("abc")], {0: ((1,),), 1: ((3,),)}),
        ({"ids": [1, 2], "text": "not counted next to numbers"}, {"ids": ((2,),)}),
        (None, {0: ()}),
        ([], {}),
        ((Image.new("RGB", (4, 3)), 1), {0: ((4, 3),), 1: ()}),
    ],
    ids=lambda value: None if isinstance(value, tuple) else str(value),
)
def test_shapes(value, shapes):
    assert shapes_of(value) == shapes


@pytest.mark.parametrize(
    ("data", "scan_s", "said"),
    [
        ([[1]] * 50, 30.0, None),
        ([[1]] * 50, 0.0, "1 of 50 examples of the data set were scanned in 0 s"),
        ([None, None], 30.0, "have no size that can be read"),
    ],
    ids=["all seen", "no time", "no size"],
)
def test_unknown_sizes_are_reported(data, scan_s, said):
    order = largest_first(data, scan_s)
    with nullcontext() if said is None else pytest.warns(UserWarning, match=said):
        oomprobe.worst_case_batches(data, scan_s=scan_s)
    assert sorted(order.indices) == list(range(len(data)))
    assert order.has_largest(1) is (said is None)
    assert [said in note for note in order.notes()] == ([] if said is None else [True])


def test_images_of_one_size_are_not_all_scanned():
    looked = []

    class Images(list):
        def __getitem__(self, index):
            looked.append(index)
            return torch.zeros(3, 8, 8), index

    order = largest_first(Images(range(1000)))
    assert (order.scanned, len(looked), order.complete) == (
        SAME_SHAPE_EXAMPLES,
        SAME_SHAPE_EXAMPLES,
        True,
    )
    assert sorted(order.indices) == list(range(1000))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield [1]

    def __len__(self):
        return 1


@pytest.mark.parametrize(
    ("dataset", "scan_s", "size", "said"),
    [
        (Stream(), 1, 1, "is a stream"),  # although it has a length
        ([], 1, 1, "no example"),
        ([[1]], -1, 1, "scan_s must be a number of seconds, at least 0, not -1"),
        ([[1]], 1, 0, "batch_size must be"),
    ],
    ids=["a stream", "no example", "no time", "no size"],
)
def test_refused(dataset, scan_s, size, said):
    with pytest.raises(InvalidArgumentError, match=said):
        oomprobe.worst_case_batches(dataset, scan_s=scan_s)(size)


def test_an_example_that_raises_is_named():
    class Broken(list):
        def __getitem__(self, index):
            return super().__getitem__(index) if index != 2 else 1 / 0

    with pytest.raises(ZeroDivisionError) as caught:
        largest_first(Broken([[1]] * 4))
    assert caught.value.__notes__ == [
        "oomprobe: example 2 of the data set raised this, before the first trial"
    ]


# --- batches for a step of one's own ---


def padded(examples):
    return {
        "tokens": torch.nn.utils.rnn.pad_sequence(
            [one["tokens"] for one in examples], batch_first=True
        ),
        "count": 1,
    }


def sentences(*lengths):
    return [{"tokens": torch.zeros(length, dtype=torch.long)} for length in lengths]


def test_examples_are_read_once_for_all_batches():
    reads = []

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            reads.append(index)
            return torch.zeros(index + 1), index

    batches = oomprobe.worst_case_batches(Data(), collate_fn=len)
    scanned = len(reads)
    assert [batches(3), batches(2), batches(5)] == [3, 2, 5]
    assert len(reads) == scanned + 3


def test_batches_on_a_device():
    batches = oomprobe.worst_case_batches(sentences(3, 9), padded).to("meta")
    assert (batches(2)["tokens"].device.type, batches(2)["count"]) == ("meta", 1)

    class Batch(dict):
        def to(self, device):
            return device

    assert oomprobe.worst_case_batches(sentences(3), lambda _: Batch()).to("cuda:1")(1) == "cuda:1"


def test_a_step_on_a_simulated_card():
    model = torch.nn.EmbeddingBag(10, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = oomprobe.worst_case_batches(sentences(3, 1000, 20), padded).to("cuda")
    step = training_step(optimizer, lambda batch_size: batches(batch_size)["tokens"], torch.sum)
    result = oomprobe.find_max_batch(
        model, step, device="sim:64MiB", progress="off", resolution=0.1
    )
    assert result.limited_by == "memory"
    assert (
        "worst_case_batches made the batches of the step, of the largest examples of its data set"
        in result.notes
    )
    assert not any("longest sequence" in item for item in result.not_covered)


@pytest.mark.parametrize("has_largest", [True, False])
def test_another_process_tells_that_its_batches_were_the_largest(has_largest):
    model = torch.nn.Linear(4, 4)
    batches = oomprobe.worst_case_batches([torch.zeros(length, 4) for length in (1, 3)], torch.cat)
    batches(2)  # outside of any step, which proves nothing

    def step(model, batch_size):
        model(batches(batch_size) if has_largest else torch.zeros(batch_size, 4)).sum().backward()

    result = oomprobe.check(model, step, 2, device="cpu:1GiB", progress="off")
    assert any("worst_case_batches made" in note for note in result.notes) is has_largest
    assert any("longest sequence" in item for item in result.not_covered) is not has_largest
