from hypothesis import given
from hypothesis import strategies as st

from oomprobe.anatomy import Anatomy
from oomprobe.estimates import estimates

NAMES = [
    "available / 4 / (elements of a sample + parameters)",
    "(2 x activations x batch + 3 x parameters + inputs) x 4",
    "16 bytes for each parameter, the rest for activations",
    "straight line through the smallest sizes",
    "straight line through all peaks",
]
numbers = st.integers(0, 10**12)


def found(anatomy, points=(), available=10**9, budget=9 * 10**8):
    return estimates(anatomy, points, available_bytes=available, budget_bytes=budget)


@given(numbers, numbers, numbers, numbers)
def test_each_rule_inverts_its_own_formula(parameters, sample, activations, available):
    """What a rule answers is the largest batch whose bytes, as the rule counts them, are available."""
    one = Anatomy(parameters=parameters, sample_elements=sample, activation_elements=activations)
    answers = list(found(one, available=available).values())
    needed = [
        lambda batch: batch * 4 * (sample + parameters),
        lambda batch: (2 * activations * batch + 3 * parameters + sample) * 4,
        lambda batch: 16 * parameters + batch * 4 * activations,
    ]
    for answer, needs in zip(answers[:3], needed, strict=True):
        if answer is None:
            assert needs(0) == needs(1)
        else:
            assert answer == 0 or needs(answer) <= available
            assert needs(answer + 1) > available - 4  # a quarter of an element is no room


def test_the_lines():
    """A net whose peaks bend: the line through the smallest sizes is another one."""
    straight = [(size, 10**6 + 1000 * size) for size in (1, 2, 4, 8, 16)]
    bent = [(32, 10**6 + 64_000), (64, 10**6 + 256_000)]
    answers = found(None, straight + bent, budget=2 * 10**6)
    assert list(answers) == NAMES[3:]
    assert answers[NAMES[3]] == 1000
    assert answers[NAMES[4]] < 500


def test_without_anything_there_are_no_answers():
    assert found(None) == {NAMES[3]: None, NAMES[4]: None}
    assert list(found(Anatomy(parameters=0, sample_elements=0, activation_elements=0))) == NAMES
