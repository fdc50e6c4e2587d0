"""Every row of the ranked catalogue of faults has a test here, or a reason why it has none.

The catalogue ranks 32 ways in which a prober goes wrong; a test carries the number of its row in its name.
"""

import re
from pathlib import Path

ROWS = {
    1: "returns a size that was never run, or is known to fail",
    2: "a trial did no work",
    3: "model, optimizer, statistics or random numbers changed by probing",
    4: "a bug in the step is reported as a limit of memory",
    5: "a poisoned process keeps answering",
    6: "the text of an out-of-memory error is not recognised",
    7: "memory of a failed trial is held in the next",
    8: "the order of the search decides",
    9: "real training needs more than the trial",
    10: "one rank is out of memory, the others hang",
    11: "a neighbour moves memory in the middle of a probe",
    12: "no out-of-memory error at all: WSL, Windows, unified memory",
    13: "a limit of the size is called memory",
    14: "fails below, passes above",
    15: "the margin is on samples, or a fit is the answer",
    16: "the process of a trial is killed, aborts or leaves",
    17: "a hang",
    18: "Ctrl-C",
    19: "torch.compile changes under probing",
    20: "passes only under pressure",
    21: "an out-of-memory error wrapped in another",
    22: "a child that cannot be pickled",
    23: "orphans and zombies",
    24: "out of memory while a CUDA graph is captured",
    25: "resume, checkpoint or validation out of memory",
    26: "degenerate answers, endless loops",
    27: "state that sticks from call to call",
    28: "memory fraction, allocator or flags left changed",
    29: "retries keep tensors",
    30: "the predicate itself crashes",
    31: "neighbours killed under NVIDIA MPS",
    32: "leaks through logs",
}
NOT_HERE = {10: "ranks are refused (tests/test_options.py) until they are supported"}


def rows_with_tests():
    text = "\n".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    return {int(number) for number in re.findall(r"^def test_row_(\d\d)_\w+\(", text, re.MULTILINE)}


def test_every_row_has_a_test_or_a_reason():
    assert set(ROWS) == set(range(1, 33))
    assert rows_with_tests() | NOT_HERE.keys() == ROWS.keys()
    assert not rows_with_tests() & NOT_HERE.keys()
