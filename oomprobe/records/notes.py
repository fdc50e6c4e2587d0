"""Notes: what a careful reader of a result should know, each as a sentence with what code needs beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum


class NoteKind(StrEnum):
    """What a note means for the answer."""

    REMARK = "remark"
    WARNING = "warning"  # the answer may not hold
    NOT_RESTORED = "not restored"  # a warning too: something of the user's did not come back
    COMPILES = "compiles"  # a remark: the step uses torch.compile
    NOT_COMPARED = "not compared"  # a remark on scratch memory, of which the last one counts
    WRITTEN = "written"  # a remark on files that trials wrote, of which the last one counts
    REMOVED = "removed"  # likewise, on files that trials removed
    CHANGED = "changed"  # likewise, on files that did change
    HELD = "held"  # a remark on variables that live on between calls, of which the last one counts
    LARGEST_EXAMPLES = "largest examples"  # a remark: what else is not covered, these are


_LAST_COUNTS = (
    NoteKind.NOT_COMPARED,
    NoteKind.WRITTEN,
    NoteKind.REMOVED,
    NoteKind.CHANGED,
    NoteKind.HELD,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A sentence for people, and what it is about."""

    text: str
    kind: NoteKind = NoteKind.REMARK
    sizes: tuple[
        int, ...
    ] = ()  # the batch sizes that it names: a short table of trials keeps theirs

    @property
    def warns(self) -> bool:
        """Whether the answer may not hold."""
        return self.kind in (NoteKind.WARNING, NoteKind.NOT_RESTORED)


def remark(text: str, *sizes: int) -> Note:
    """Return a note that leaves the answer as it is."""
    return Note(text=text, sizes=sizes)


def warning(text: str, *sizes: int) -> Note:
    """Return a note that says that the answer may not hold."""
    return Note(text=text, kind=NoteKind.WARNING, sizes=sizes)


class Notes:
    """Notes in the order in which they came, each text once; of kinds that grow, the last.

    Examples:
        >>> notes = Notes()
        >>> notes.add(remark("a"))
        >>> notes.extend([warning("b", 8), remark("a")])
        >>> [note.text for note in notes]
        ['a', 'b']
    """

    def __init__(self, notes: Iterable[Note] = ()) -> None:
        self._by_text: dict[str, Note] = {}
        self.extend(notes)

    def add(self, note: Note) -> None:
        """Add a note, unless it is there."""
        if note.kind in _LAST_COUNTS:
            self._by_text[note.kind] = note
        else:
            self._by_text.setdefault(note.text, note)

    def extend(self, notes: Iterable[Note]) -> None:
        """Add all of them that are not there."""
        for note in notes:
            self.add(note)

    def clear(self) -> None:
        """Forget all of them."""
        self._by_text.clear()

    def __iter__(self) -> Iterator[Note]:
        return iter([*self._by_text.values()])


_told = Notes()  # in this process, since the last trial ended


def tell(note: Note) -> None:
    """Add a note to the trial that runs now, from inside its step."""
    _told.add(note)


def take_told() -> Notes:
    """Return the notes that the step of a trial has told, and forget them."""
    notes = Notes(_told)
    _told.clear()
    return notes
