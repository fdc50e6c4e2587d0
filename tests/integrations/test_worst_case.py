import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oomprobe import InvalidArgumentError
from oomprobe.integrations.worst_case import ALIKE, largest_first, longest_of, shapes_of, stretched


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 40), st.integers(1, 3))
def test_each_batch_has_the_longest_there_are(lengths, batch_size, count):
    data = [{"x": list(range(length))} for length in lengths]
    batches = longest_of(data).batches(batch_size, count)
    assert len(batches) == batch_size * count
    for start in range(0, len(batches), batch_size):
        got = sorted(len(batches[start + i]["x"]) for i in range(batch_size))
        if batch_size <= len(lengths):
            assert got == sorted(lengths)[-batch_size:]
        else:
            assert set(got) == set(lengths)


def test_the_longest_of_each_field_comes_first():
    """A batch is padded to the longest of each field, whichever example has it."""
    data = [
        {"a": [0] * 5, "b": [0] * 5},
        {"a": [0] * 9, "b": [0]},
        {"a": [0], "b": [0] * 8},
        {"a": [0] * 6, "b": [0] * 5},
    ]
    assert set(longest_of(data).order.indices[:2]) == {1, 2}


@pytest.mark.parametrize(
    ("value", "shapes"),
    [
        (torch.zeros(2, 3), {0: ((2, 3),)}),
        (np.zeros((4, 5)), {0: ((4, 5),)}),
        ([1, 2, 3], {0: ((3,),)}),
        ([[1], [2, 3]], {0: ((1,),), 1: ((2,),)}),
        ([np.int64(1)] * 3, {0: ((3,),)}),
        ({"a": [np.float32(1), 2], "b": np.int64(1), "c": [np.bool_(1)] * 3}, {"a": ((2,),), "b": (), "c": ((3,),)}),
        ({"a": [torch.tensor(1)] * 4, "b": [[np.int64(1)]] * 2}, {"a": ((4,),), "b": ((1,), (1,))}),
        (["a", np.str_("abc")], {0: ((1,),), 1: ((3,),)}),
        ({"a": [1, 2], "b": 1}, {"a": ((2,),), "b": ()}),
        ("some text", {0: ((9,),)}),
        (None, {0: ()}),
        ([], {}),
    ],
)
def test_shapes(value, shapes):
    assert shapes_of(value) == shapes


def test_a_text_beside_numbers_does_not_count():
    data = [{"ids": [1], "text": "x" * 99}, {"ids": [1, 2, 3], "text": "x"}]
    assert longest_of(data).order.indices[0] == 1
    assert longest_of(["a", "abc", "ab"]).order.indices == [1, 2, 0]


def test_what_could_not_be_looked_at_is_told():
    found = longest_of([[1]] * 50, scan_s=0)
    assert len(found.order.indices) == 50
    assert "1 of 50 examples of the data set were looked at in 0 s" in found.notes[0]
    assert longest_of([[1]] * 50).notes == ()


@pytest.mark.parametrize(
    "ids",
    [[1, 2, 3], (1, 2, 3), torch.tensor([1, 2, 3]), np.array([1, 2, 3]), [np.int64(i) for i in (1, 2, 3)]],
    ids=["list", "tuple", "Tensor", "ndarray", "list of np.int64"],
)
@pytest.mark.parametrize("length", [2, 3, 8])
def test_sequences_are_stretched_and_the_rest_stays(ids, length):
    one = stretched({"input_ids": ids, "label": 1}, length)
    assert type(one["input_ids"]) is type(ids)
    assert [int(i) for i in one["input_ids"]] == ([1, 2, 3] * 3)[:length]
    assert one["label"] == 1


@pytest.mark.parametrize("example", [{"image": torch.zeros(3, 4)}, [1, 2], {"label": 3}])
def test_what_has_no_sequence_cannot_be_stretched(example):
    with pytest.raises(InvalidArgumentError, match="max_length=8 cannot be made"):
        longest_of([example], max_length=8)


def stream(*examples):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(examples)

    return Stream()


def test_streams():
    with pytest.raises(InvalidArgumentError, match="only once"):
        longest_of((one for one in [{"x": [1]}]), max_length=3)
    with pytest.raises(InvalidArgumentError, match="Say max_length="):
        longest_of(stream({"x": [1]}, {"x": [1, 2]}))
    found = longest_of(stream({"x": [1]}, {"x": [1, 2]}), max_length=3)
    assert (found.examples, found.total) == ([{"x": [1, 2, 1]}], None)
    for empty in (stream(), []):
        with pytest.raises(InvalidArgumentError, match="no example"):
            longest_of(empty, max_length=3)


def test_images_of_one_size_are_not_all_looked_at():
    looked = []

    class Images:
        def __getitem__(self, index):
            looked.append(index)
            return torch.zeros(3, 8, 8), index

    order = largest_first(Images(), range(1000), 60)
    assert (order.seen, len(looked), order.complete) == (ALIKE, ALIKE, True)
    assert sorted(order.indices) == list(range(1000))


def test_what_has_no_size_is_told():
    assert "could not be told" in longest_of([None, None]).notes[0]


@given(st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=12), st.integers(1, 6))
def test_batches_of_leaders_hold_the_largest_of_each_field(sizes, batch_size):
    data = [{name: [0] * count for name, count in zip("abc", one, strict=True)} for one in sizes]
    order = longest_of(data).order
    batches = [order.batch(batch_size, number) for number in range(order.batches_of_leaders(batch_size))]
    seen = [data[index] for batch in batches for index in batch]
    for place, name in enumerate("abc"):
        assert max(len(one[name]) for one in seen) == max(one[place] for one in sizes)
    assert all(len(batch) == len(set(batch)) == min(batch_size, len(data)) for batch in batches)


def test_labels_of_several_classes_are_not_stretched():
    one = stretched({"input_ids": [1, 2, 3, 4], "attention_mask": [1, 1, 1, 1], "labels": [1.0, 0.0, 1.0]}, 6)
    assert [len(one[name]) for name in ("input_ids", "attention_mask", "labels")] == [6, 6, 3]


def test_an_example_that_cannot_be_read_is_named():
    class Broken(list):
        def __getitem__(self, index):
            return super().__getitem__(index) if index != 2 else 1 / 0

    with pytest.raises(ZeroDivisionError) as caught:
        longest_of(Broken([[1]] * 4))
    assert caught.value.__notes__ == ["oomprobe: example 2 of the data set raised this, before the first trial"]
