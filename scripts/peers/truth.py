"""The largest size that fits, where a process cannot be forked once it has come to its device (CUDA).

Each size is run in a process that has seen no failure. They are too slow to run all: sizes double until one fails, the
bracket is bisected, and then the neighbours are run, since a limit need not be a clean one. What lies between sizes that
ran is taken to fit; `tried` says which were run.
"""

NEIGHBOURS = 3


def bisected(failure, smallest):
    """Sizes that fit, as ranges, and what each size tried said: None where it ran.

    `failure(size)` runs a size and gives None, or says why not.
    """
    tried = {}

    def runs(size):
        if size not in tried:
            tried[size] = failure(size)
        return tried[size] is None

    good, bad = smallest - 1, smallest
    while runs(bad):
        good, bad = bad, 2 * bad
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if runs(middle) else (good, middle)
    for size in range(max(smallest, good - NEIGHBOURS), good + NEIGHBOURS + 1):
        runs(size)
    return {"fits": _ranges(tried), "tried": {str(size): tried[size] for size in sorted(tried)}}


def _ranges(tried):
    ranges, broken = [], True
    for size in sorted(tried):
        if tried[size] is not None:
            broken = True
        elif broken:
            ranges, broken = [*ranges, [size, size]], False
        else:
            ranges[-1][1] = size
    return ranges
