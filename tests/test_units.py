import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomprobe.errors import InvalidArgumentError
from oomprobe.ground.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("800MB", 800_000_000),
        ("24GiB", 24 * 2**30),
        (" 1.5 kB ", 1500),
        ("0.5TiB", 2**39),
        ("9007199254740993", 2**53 + 1),  # no float has this value
    ],
)
def test_sizes_are_parsed(text, size_bytes):
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        *("", "GiB", "0", "0.4B", "-1GiB", "1e9", "1.GiB", ".5GiB", "5i", "5iB", "4 GiBs", "4PiB", "4,5GiB", "nan"),
        *("9" * 400, str(2**63), "99999999999TiB"),
    ],
)  # fmt: skip
def test_invalid_sizes_are_refused_with_an_example(text):
    with pytest.raises(InvalidArgumentError, match="write it like '24GiB'"):
        parse_bytes(text)


@given(st.integers(1, 2**50))
def test_a_formatted_size_parses_back_to_two_decimals(size_bytes):
    written = format_bytes(size_bytes)
    assert (
        abs(parse_bytes(written) - size_bytes) <= 0.005 * size_bytes + 1
    )  # parsing rounds down to whole bytes
    assert 1 <= float(written.split()[0]) <= 1024
    assert format_bytes(-size_bytes) == f"-{written}"


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0, "0 ms"),
        (0.0123, "12.3 ms"),
        (0.9996, "1 s"),
        (59.94, "59.9 s"),
        (119.9, "120 s"),
        (120, "2 min 0 s"),
        (float("nan"), "nan s"),
    ],
)
def test_durations(duration_s, text):
    assert format_seconds(duration_s) == text
