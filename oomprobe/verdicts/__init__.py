"""Classification of exceptions into verdicts."""

from oomprobe.verdicts.classify import (
    ErrorFacts,
    Evidence,
    Link,
    classify,
    classify_error,
    facts_of_error,
)

__all__ = ["ErrorFacts", "Evidence", "Link", "classify", "classify_error", "facts_of_error"]
