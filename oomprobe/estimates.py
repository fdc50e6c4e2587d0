"""What rules of thumb would have answered: a diagnostic beside what was measured, never the answer."""

from __future__ import annotations

from collections.abc import Iterable

from oomprobe.anatomy import Anatomy
from oomprobe.fit import fit_line

ELEMENT_BYTES = 4  # the rules mean single precision
SMALLEST = 16  # the sizes that a straight line is drawn through: 1, 2, 4, 8, 16
# Single precision and AdamW: weights 4, gradients 4, two moments 8.
# Source: https://huggingface.co/docs/transformers/model_memory_anatomy
PARAMETER_BYTES = 16


def estimates(
    anatomy: Anatomy | None, points: Iterable[tuple[int, int]], *, available_bytes: int, budget_bytes: int
) -> dict[str, float | None]:
    """The answers of rules that people find when they search, by the words they are known in.

    Args:
        anatomy: What was counted; None: what needs it is left out.
        points: Pairs of batch size and peak in bytes, of passing trials.
        available_bytes: Memory that the process may use.
        budget_bytes: What the lines are asked to stay within.

    Returns:
        By name; None where a rule gives none.

    Source:
        The first: https://stackoverflow.com/questions/46654424. The second counts forward and backward activations, and
        parameters with their gradients and momentum. The third is the table of the documentation named above, with what
        it leaves for activations. The fourth is what Ultralytics' AutoBatch fits.

    Example:
        >>> anatomy = Anatomy(parameters=1000, sample_elements=100, activation_elements=500)
        >>> found = estimates(anatomy, [], available_bytes=10**6, budget_bytes=9 * 10**5)
        >>> for name, size in found.items():
        ...     print(f"{name}: {size}")
        available / 4 / (elements of a sample + parameters): 227
        (2 x activations x batch + 3 x parameters + inputs) x 4: 246
        16 bytes for each parameter, the rest for activations: 492
        straight line through the smallest sizes: None
        straight line through all peaks: None
    """
    points = list(points)
    small, line = (fit_line(some, budget_bytes) for some in ([p for p in points if p[0] <= SMALLEST], points))
    return {
        **(_by_counting(anatomy, available_bytes) if anatomy else {}),
        "straight line through the smallest sizes": small.predicted_max_batch if small else None,
        "straight line through all peaks": line.predicted_max_batch if line else None,
    }


def _by_counting(anatomy: Anatomy, available_bytes: int) -> dict[str, float | None]:
    elements = available_bytes // ELEMENT_BYTES
    left = elements - 3 * anatomy.parameters - anatomy.sample_elements
    left_by_table = available_bytes - PARAMETER_BYTES * anatomy.parameters
    return {
        "available / 4 / (elements of a sample + parameters)": _share(
            elements, anatomy.sample_elements + anatomy.parameters
        ),
        "(2 x activations x batch + 3 x parameters + inputs) x 4": _share(left, 2 * anatomy.activation_elements),
        "16 bytes for each parameter, the rest for activations": _share(
            left_by_table, ELEMENT_BYTES * anatomy.activation_elements
        ),
    }


def _share(whole: int, part: int) -> int | None:
    return max(0, whole // part) if part > 0 else None
