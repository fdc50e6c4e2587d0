"""The files of a command's trials: a trial is no training, so nothing that it writes stays.

`site/overlay.py` makes Python change copies. `net.py` holds back other programs and libraries in C
where a simulated card trains.
"""

from __future__ import annotations

import getpass
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from oomprobe.errors import SimulationError, UnreliableError
from oomprobe.ground.words import count
from oomprobe.records.notes import Note, NoteKind, remark, warning
from oomprobe.runners.command import net
from oomprobe.runners.command.output import Output

NET = Path(net.__file__)
MOST_NAMES = 3  # of files in a sentence
MOST_LOOKED_AT = 20_000  # files, for what has changed
NOT_KEPT = "what trials write is not kept: copies took the place of {names}"
NOT_REMOVED = "what trials remove is still there: {names}"
CHANGED = (
    "{names} changed while a trial ran, and not through the command's Python: if another program "
    "that it starts, or a library in C, wrote there, let it write below {{dir}}"
)
NO_NET = (
    "this kernel has no Landlock (Linux 5.13): on the simulated card only Python was kept from "
    "your files, and what other programs wrote has no data. Let them write below {dir}"
)
DENIED = (
    "not written: simulated card ({error}). What would hold no data is redirected if Python writes "
    "it, and refused to other programs and to libraries in C: let it write below {{dir}}, or leave "
    "it out"
)
TOO_LARGE = "the command cannot be tried with your files at batch {size}: {why}"
NO_ROOM = (
    "there was no room in {folder} for what the command wrote at batch {size}, where trials write "
    "copies: set TMPDIR to a folder with more, let the command save less while you probe, or on a "
    "real card pass --keep-writes"
)
NO_DATA = (
    "The command wrote {names}: on a simulated card these are copies, and tensors in them have no "
    "values. What it read back from them may be why it failed"
)
ONLY_PYTHON = (
    "What trials write are copies ({names}), which only Python finds: if the command hands such a "
    "file to another program, let it write below {{dir}}"
)


class TrialFiles:
    """What the trials of a command do to the user's files.

    Args:
        command: Its words.
        on_card: Whether it trains on a simulated card.
        keeps_writes: Whether trials write to the user's files.
    """

    def __init__(self, command: Sequence[str], *, on_card: bool, keeps_writes: bool) -> None:
        self._command, self._on_card, self._keeps_writes = command, on_card, keeps_writes
        self._has_net = on_card and net.version() > 0
        self._written: set[Path] = set()
        self._removed: set[Path] = set()
        self._changed: set[Path] = set()
        self._denied = ""  # how the net refused something, in the words of the command

    def redirected(self, words: list[str], folder: Path) -> tuple[list[str], dict[str, str]]:
        """Return a command that writes below a folder, and the variables for it."""
        if self._keeps_writes:
            return words, {}
        caches = [*map(str, _caches(on_card=self._on_card))]
        variables = {
            "OOMPROBE_FILES": str(folder),
            "OOMPROBE_CACHES": os.pathsep.join(caches),
            "TORCHINDUCTOR_CACHE_DIR": str(_inductor_cache()),
        }
        if self._has_net:
            variables["TMPDIR"] = os.environ.get("TMPDIR", str(folder / "tmp"))
            variables["HF_HUB_DISABLE_XET"] = (
                "1"  # which is Rust: downloads by Python are redirected
            )
            allowed = [str(folder), "/dev", "/proc", "/sys", *caches]
            words = [sys.executable, "-I", "-S", str(NET), *allowed, "--", *words]
        return words, variables

    def look(self, folder: Path, began_s: float, output: Output) -> None:
        """Learn what a trial that began at a time of day has done."""
        if self._keeps_writes:
            return
        written = {*_files_below(folder / "files")}
        self._written |= written
        # What was moved away or replaced is hidden, too.
        self._removed |= {*_files_below(folder / "gone")} - written
        if self._has_net:
            self._denied = output.denied_line
        else:
            self._changed |= {*_changed_since(began_s, self._command, folder)}

    def check(self, size: int, folder: Path, words: str) -> None:
        """Raise the error of a run that failed for its files, by its words."""
        refused = folder / "refused"
        if refused.exists():
            why = refused.read_text().splitlines()[0]
            raise UnreliableError(TOO_LARGE.format(size=size, why=why))
        if self._denied and "Permission denied" in words:
            raise SimulationError(DENIED.format(error=self._denied))
        if "No space left on device" in words and not self._keeps_writes:
            raise UnreliableError(NO_ROOM.format(folder=folder, size=size))

    def hint(self, error: str) -> Iterator[str]:
        """Yield what may be the cause if the command did not find a file or what it had saved."""
        if not self._written:
            return
        if "No such file" in error:
            yield ONLY_PYTHON.format(names=_named_in_words(self._written))
        elif self._on_card:
            yield NO_DATA.format(names=_named_in_words(self._written))

    def notes(self) -> Iterator[Note]:
        """Yield what a reader should know of the trials so far."""
        for paths, sentence, kind in (
            (self._written, NOT_KEPT, NoteKind.WRITTEN),
            (self._removed, NOT_REMOVED, NoteKind.REMOVED),
            (self._changed, CHANGED, NoteKind.CHANGED),
        ):
            if paths:
                yield Note(text=sentence.format(names=_named_in_words(paths)), kind=kind)
        if self._denied:
            yield remark(DENIED.format(error=self._denied))
        if self._on_card and not self._has_net:
            yield warning(NO_NET)


def _files_below(root: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(root):
        yield from ("/" / (Path(folder) / name).relative_to(root) for name in names)


def _inductor_cache() -> Path:
    """The folder that torch.compile uses: a trial has a folder of its own for temporary files."""
    user = str(os.getuid())
    with suppress(KeyError, OSError):  # a container's user may have no name
        user = getpass.getuser()
    default = Path(tempfile.gettempdir(), f"torchinductor_{user}")
    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", default))


def _caches(*, on_card: bool) -> list[Path]:
    """Return the caches of libraries, which trials share with training.

    On a simulated card only those into which no program writes what a model computed, and that are
    there: what is not Python could not make them.
    """
    home, given = Path.home(), os.environ.get
    cache = Path(given("XDG_CACHE_HOME", home / ".cache"))
    hugging_face = Path(given("HF_HOME", cache / "huggingface"))
    caches = [
        Path(given("HF_HUB_CACHE", hugging_face / "hub")),
        Path(given("TORCH_HOME", cache / "torch")),
        Path(given("TRITON_CACHE_DIR", home / ".triton")),
        Path(given("MPLCONFIGDIR", home / ".config/matplotlib")),
        cache / "matplotlib",
        Path(given("CUDA_CACHE_PATH", home / ".nv")),
        _inductor_cache(),
    ]
    if on_card:
        return [*map(Path.resolve, filter(Path.is_dir, caches))]
    caches += [cache, hugging_face]
    caches += [Path(given("HF_DATASETS_CACHE", cache)), Path(given("TORCH_EXTENSIONS_DIR", cache))]
    return [*map(Path.resolve, caches)]


def _changed_since(time_s: float, words: Sequence[str], besides: Path) -> list[Path]:
    """Return files that changed in the working directory, and in folders that a command names.

    Of many thousands of files only some are looked at. `besides` is left out.
    """
    roots = {Path.cwd(), *(Path(word.rpartition("=")[2]).absolute() for word in words)}
    changed, seen, left_out = set(), 0, (".", "__pycache__", besides.name)
    for root in sorted(roots):
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if not name.startswith(left_out)]
            if seen > MOST_LOOKED_AT:
                break
            seen += len(names)
            for name in names:
                path = Path(folder, name)
                with suppress(OSError):  # it may be gone again
                    if path.lstat().st_ctime > time_s:
                        changed.add(path)
    return sorted(changed)


def _named_in_words(paths: Iterable[Path]) -> str:
    """Return paths as a reader names them, those in the working directory first."""
    here = f"{Path.cwd()}/"
    names = sorted(str(path).removeprefix(here) for path in paths)
    names.sort(key=lambda name: name.startswith("/"))
    more = len(names) - MOST_NAMES
    if more > 0:
        return f"{', '.join(names[:MOST_NAMES])} and {count(more, 'file', 'files')} more"
    return ", ".join(names)
