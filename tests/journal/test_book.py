import errno
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_import import imported_by
from test_result import trials

from oomprobe.errors import InvalidArgumentError
from oomprobe.journal import Journal, Key
from oomprobe.journal.records import MAGIC, pack, unpack
from oomprobe.result import Phase, Trial
from oomprobe.verdict import Verdict

QUESTION = {"device": "cpu", "options": {"steps": 2, "max_batch": None}}
ROOT = Path(__file__).parents[1]


def key(size, phase=Phase.GROW, **rest):
    return Key(**{"batch_size": size, "phase": phase, "steps": 2, "cap_bytes": None, **rest})


def trial(size, verdict=Verdict.FITS, phase=Phase.GROW, **rest):
    return Trial(batch_size=size, verdict=verdict, phase=phase, **rest)


def opened(path, question=QUESTION, waits=None):
    journal = Journal.open(path, retry_sleep=(waits if waits is not None else []).append)
    journal.ask(question)
    return journal


def ran(journal, size, nothing_stepped=False, **rest):
    journal.begin(key(size), evidence={"oom_kills": 0, "boot_id": "b"})
    journal.end(key(size), trial(size, **rest), nothing_stepped=nothing_stepped)


def records(path):
    return [record for line in path.read_bytes().split(b"\n") if (record := unpack(line))]


def recalled(journal, *sizes):
    return [journal.recall(key(size)) for size in sizes]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "probe.jsonl"


class Disk:
    """Makes writes to one file fail: each answer is an errno, a number of bytes after which it comes, or None."""

    def __init__(self, monkeypatch, journal):
        self.fd, self.writes, self.syncs = journal._file._fd, [], []
        self._write, self._sync = os.write, os.fsync
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(os, "fsync", self.sync)

    def write(self, fd, data):
        if fd == self.fd and self.writes:
            answer = self.writes.pop(0)
            if isinstance(answer, tuple):
                part, number = answer
                self.writes.insert(0, number)
                return self._write(fd, data[:part])
            if answer:
                raise OSError(answer, os.strerror(answer))
        return self._write(fd, data)

    def sync(self, fd):
        if fd == self.fd and self.syncs and (answer := self.syncs.pop(0)):
            raise OSError(answer, os.strerror(answer))
        return self._sync(fd)


# --- writing and resuming ---


def test_trials_are_recalled_in_their_order_once_each(path):
    with opened(path) as journal:
        assert not journal.resumed
        ran(journal, 1, nothing_stepped=True)
        ran(journal, 2)
        ran(journal, 1, verdict=Verdict.OOM, error="no room \udc80 \u2028")
        assert journal.recall(key(1)) is None  # of this process: asked again, it is to be run again
    with opened(path) as journal:
        assert journal.resumed
        assert recalled(journal, 1, 2, 1, 1) == [
            (trial(1), True),
            (trial(2), False),
            (trial(1, Verdict.OOM, error="no room \udc80 \u2028"), False),
            None,
        ]
        assert journal.skipped_lines == 0
        assert journal.notes == ()


@pytest.mark.parametrize(
    "other", [{"phase": Phase.BISECT}, {"steps": 3}, {"cap_bytes": 0}, {"accumulation_steps": 2}, {"size": 2}]
)
def test_every_part_of_a_key_counts(path, other):
    with opened(path) as journal:
        ran(journal, 1)
    with opened(path) as journal:
        assert journal.recall(key(**{"size": 1, **other})) is None
        assert journal.recall(key(1)) is not None


@given(trial=trials, nothing_stepped=st.booleans())
def test_every_trial_comes_back_as_it_was(tmp_path_factory, trial, nothing_stepped):
    path = tmp_path_factory.mktemp("journal") / "j"
    with opened(path) as journal:
        journal.end(key(1), trial, nothing_stepped=nothing_stepped)
    with opened(path) as journal:
        assert journal.recall(key(1)) == (trial, nothing_stepped)


def test_a_third_process_recalls_what_two_have_run(path):
    for size in (1, 2, 1):
        with opened(path) as journal:
            ran(journal, size)
    with opened(path) as journal:
        assert None not in recalled(journal, 1, 2, 1)
        assert len({record["n"] for record in records(path)}) == len(records(path)) == 7


def test_figures_are_recalled_the_last_of_each_name(path):
    with opened(path) as journal:
        journal.measured(available_bytes=1, outside_bytes=None)
        journal.measured(available_bytes=2)
        assert dict(journal.figures) == {"available_bytes": 2, "outside_bytes": None}
    with opened(path) as journal:
        assert dict(journal.figures) == {"available_bytes": 2, "outside_bytes": None}
        with pytest.raises(TypeError):
            journal.figures["available_bytes"] = 3


def test_a_record_is_on_the_disk_before_begin_and_end_return(path, monkeypatch):
    synced, sync = [], os.fsync
    with opened(path) as journal:
        monkeypatch.setattr(os, "fsync", lambda fd: (sync(fd), synced.append(path.read_bytes())))
        journal.begin(key(1), evidence={})
        assert unpack(synced[-1].splitlines()[-1])["kind"] == "begin"
        journal.end(key(1), trial(1), nothing_stepped=False)
        assert unpack(synced[-1].splitlines()[-1])["kind"] == "end"
        assert len(synced) == 2


# --- deaths ---


def test_trials_that_their_process_did_not_survive(path):
    for oom_kills in (3, 4):
        with opened(path) as journal:
            journal.begin(key(8), evidence={"oom_kills": oom_kills, "boot_id": "b"})
            assert journal.deaths(key(9)) == ()
    with opened(path) as journal:
        assert journal.deaths(key(8)) == ({"oom_kills": 3, "boot_id": "b"}, {"oom_kills": 4, "boot_id": "b"})
        assert journal.recall(key(8)) is None


def test_a_process_that_is_killed(path):
    code = (
        "import os, signal, journal.test_book as t\n"
        f"journal = t.opened({str(path)!r})\n"
        "t.ran(journal, 1)\n"
        "journal.begin(t.key(2), evidence={'oom_kills': 7})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60).returncode == -9
    with opened(path) as journal:
        assert journal.deaths(key(2)) == ({"oom_kills": 7},)
        assert journal.recall(key(1)) == (trial(1), False)


def test_what_ended_or_was_abandoned_is_no_death(path):
    with opened(path) as journal:
        ran(journal, 1)
        journal.begin(key(2), evidence={})
        journal.abandon(key(3))  # another one: says nothing of this
        journal.abandon(key(2))
        journal.abandon(key(2))
    assert [record["kind"] for record in records(path)] == ["question", "begin", "end", "begin", "abandon"]
    with opened(path) as journal:
        assert journal.deaths(key(1)) == journal.deaths(key(2)) == ()


def test_a_process_that_went_on_has_survived_the_trial_before(path):
    """Where the line of its end is damaged, the trial is run again, and not called a death."""
    with opened(path) as journal:
        ran(journal, 1)
        ran(journal, 2)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], lines[2].replace(b"fits", b"bug!"), *lines[3:]]))
    with opened(path) as journal:
        assert journal.skipped_lines == 1
        assert recalled(journal, 1, 2) == [None, (trial(2), False)]
        assert journal.deaths(key(1)) == ()


def test_a_death_is_answered_by_a_trial_that_ended_after_it(path):
    with opened(path) as journal:
        ran(journal, 1)
        journal.begin(key(1), evidence={"oom_kills": 1})
    with opened(path) as journal:
        assert journal.deaths(key(1)) == ({"oom_kills": 1},)
        journal.end(key(1), trial(1, Verdict.CRASHED), nothing_stepped=False)  # a verdict: nothing was run
        assert journal.deaths(key(1)) == ()
    with opened(path) as journal:
        assert journal.deaths(key(1)) == ()
        assert [r[0].verdict for r in recalled(journal, 1, 1)] == [Verdict.FITS, Verdict.CRASHED]


# --- the question ---


def test_another_question_is_refused_and_the_journal_left_as_it_is(path):
    opened(path, {**QUESTION, "model": "a" * 500, "gone": 1}).close()
    before = path.read_bytes()
    with Journal.open(path) as journal, pytest.raises(InvalidArgumentError) as refused:
        journal.ask({"device": "cuda", "options": {"steps": 2, "max_batch": 10**600, "more": {}}, "model": "b"})
    text = str(refused.value)
    assert "device: 'cpu' in the journal, 'cuda' now" in text
    assert "options.max_batch: None in the journal, a number of 1994 bits now" in text
    assert "options.more: nothing in the journal, {} now" in text
    assert "gone: 1 in the journal, nothing now" in text
    assert "options.steps" not in text
    assert max(map(len, text.splitlines())) < 200
    assert "Delete it" in text
    assert "name another file" in text
    assert path.read_bytes() == before


def test_the_same_question_in_other_types_is_the_same(path):
    opened(path, {"a": (1, 2), "b": float("nan"), "c": 1, "d": Phase.GROW, 5: Path("x")}).close()
    with opened(path, {"d": "grow", "c": 1.0, "b": float("nan"), "a": (1, 2), 5: Path("x")}) as journal:
        assert journal.resumed


def test_asking_twice_in_one_process(path):
    with opened(path) as journal:
        journal.ask(QUESTION)
        with pytest.raises(InvalidArgumentError, match="device"):
            journal.ask({**QUESTION, "device": "cuda"})
    assert len(records(path)) == 1


def test_another_version_is_refused(path):
    path.write_bytes(pack({"oomprobe_journal": 2, "n": 0, "session": 0, "kind": "question", "question": {}}))
    with pytest.raises(InvalidArgumentError, match="schema version 2, and this oomprobe writes 1: delete it"):
        Journal.open(path)
    with pytest.raises(InvalidArgumentError, match="schema version"):  # and not that another probe has it
        Journal.open(path)


# --- damage ---


def whole_journal(path):
    """Two processes: trials, figures, an interrupt, a death."""
    with opened(path) as journal:
        ran(journal, 1)
        journal.measured(available_bytes=5)
        ran(journal, 2)
        journal.begin(key(4), evidence={"oom_kills": 1})
    with opened(path) as journal:
        ran(journal, 4, verdict=Verdict.OOM)
        journal.begin(key(3), evidence={})
        journal.abandon(key(3))
        ran(journal, 1, verdict=Verdict.OOM)
    return [(1, Verdict.FITS), (2, Verdict.FITS), (4, Verdict.OOM), (1, Verdict.OOM)]


def all_recalled(journal):
    found = {}
    for size in (1, 2, 3, 4, 9):
        while (one := journal.recall(key(size))) is not None:
            found.setdefault(size, []).append(one[0].verdict)
    return found


def by_size(ended):
    found = {}
    for size, verdict in ended:
        found.setdefault(size, []).append(verdict)
    return found


def test_a_journal_cut_at_any_byte_is_a_prefix_and_can_be_written(path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # thousands of them
    ended = whole_journal(path)
    data = path.read_bytes()
    prefixes = [by_size(ended[:count]) for count in range(len(ended) + 1)]
    seen = []
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        with opened(path) as journal:
            found = all_recalled(journal)
            assert found in prefixes, cut
            seen.append(prefixes.index(found))
            assert journal.figures in ({}, {"available_bytes": 5})
            assert journal.skipped_lines <= 1
            assert journal.deaths(key(4)) in (
                (),
                ({"oom_kills": 1},),
                ({"oom_kills": 1}, {"oom_kills": 0, "boot_id": "b"}),
            )
            ran(journal, 9)
        with opened(path) as journal:
            assert journal.resumed
            assert all_recalled(journal) == {**found, 9: [Verdict.FITS]}, cut
            assert path.read_bytes().startswith(data[:cut])
    assert seen == sorted(seen)
    assert seen[-1] == len(ended)


@given(data=st.data())
def test_a_garbled_journal_never_tells_a_wrong_value(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("journal") / "j"
    whole = by_size(whole_journal(path))
    content = bytearray(path.read_bytes())
    first = content.index(b"\n") + 1
    for _ in range(data.draw(st.integers(1, 5))):
        content[data.draw(st.integers(first, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content))
    with opened(path) as journal:
        for size, verdicts in all_recalled(journal).items():
            rest = iter(whole[size])
            assert all(verdict in rest for verdict in verdicts)
        ran(journal, 9)
    with opened(path) as journal:
        assert journal.recall(key(9)) is not None


def test_lines_that_are_damaged_are_counted(path):
    whole_journal(path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = b"\xff\x00\n"
    lines[5] = lines[5][:20] + b"\n"
    empty = b',"crc":"%08x"}\n' % zlib.crc32(b"}")  # a checksum alone may be right
    path.write_bytes(b"".join(lines) + b"\n" + empty + b"[" * 100_000)
    with opened(path) as journal:
        assert journal.skipped_lines == 4


def test_records_that_make_no_sense_are_counted(path):
    opened(path).close()
    with path.open("ab") as file:
        file.write(pack({"n": 1, "session": 0, "kind": "end", "key": {"batch_size": []}, "trial": {}}))
        file.write(pack({"n": 2, "session": 0, "kind": "begin", "key": {**key(1).to_dict(), "new": 1}, "evidence": {}}))
        file.write(pack({"n": 3, "session": 0, "kind": "from the future"}))
        file.write(pack({"no number": 3}))
    with opened(path) as journal:
        assert journal.skipped_lines == 3
        assert journal.deaths(key(1)) == ()


def test_a_file_saved_with_windows_line_ends_is_read(path):
    whole_journal(path)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    with opened(path) as journal:
        assert journal.skipped_lines == 0
        assert len(all_recalled(journal)) == 3


# --- writes that fail ---


def test_what_may_pass_is_tried_again(path, monkeypatch):
    waits = []
    journal = opened(path, waits=waits)
    disk = Disk(monkeypatch, journal)
    for number in (errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT, errno.EIO, errno.ESTALE):
        disk.writes = [(7, number), number]
        ran(journal, 1)
    journal.close()
    assert len(waits) == 10
    assert waits[1] > waits[0] > 0
    assert journal.notes == ()
    with opened(path) as journal:
        assert len(all_recalled(journal)[1]) == 5
        assert journal.skipped_lines == 5


def test_after_a_sync_that_failed_the_record_is_written_again_and_counts_once(path, monkeypatch):
    journal = opened(path)
    disk = Disk(monkeypatch, journal)
    disk.syncs = [None, errno.EIO, errno.EIO]
    ran(journal, 1)
    journal.close()
    assert [record["kind"] for record in records(path)] == ["question", "begin", "end", "end", "end"]
    with opened(path) as journal:
        assert all_recalled(journal) == {1: [Verdict.FITS]}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
@pytest.mark.parametrize("at", [0, 5])
@pytest.mark.parametrize("call", ["begin", "end"])
def test_a_journal_that_cannot_be_written_costs_no_probe(path, monkeypatch, number, at, call):
    with opened(path) as journal:
        ran(journal, 1)
        journal.measured(available_bytes=5)
    waits = []
    journal = opened(path, waits=waits)
    assert journal.recall(key(1)) is not None
    ran(journal, 2)
    before = path.read_bytes()
    disk = Disk(monkeypatch, journal)
    disk.writes = [None] * (call == "end") + ([(at, number)] if at else [number]) + [number] * 9
    ran(journal, 4)
    left = len(disk.writes)
    ran(journal, 8)
    journal.measured(available_bytes=6)
    assert len(disk.writes) == left  # nothing more was tried
    assert len(waits) == (2 if number == errno.EIO else 0)
    (note,) = journal.notes
    assert "stopped at trial 3 (batch 4)" in note
    assert os.strerror(number) in note
    assert "a resume would begin there" in note
    assert dict(journal.figures) == {"available_bytes": 6}
    journal.close()
    monkeypatch.undo()
    assert path.read_bytes() == before
    with opened(path) as journal:
        assert all_recalled(journal) == {1: [Verdict.FITS], 2: [Verdict.FITS]}
        assert journal.deaths(key(4)) == ()  # it ran; only its end could not be written


def test_figures_that_are_found_within_a_trial_are_taken_back_with_it(path, monkeypatch):
    journal = opened(path)
    journal.begin(key(1), evidence={})
    journal.measured(available_bytes=1)
    Disk(monkeypatch, journal).writes = [errno.ENOSPC]
    journal.end(key(1), trial(1), nothing_stepped=False)
    journal.close()
    with opened(path) as journal:
        assert journal.deaths(key(1)) == ()


def test_a_journal_that_stopped_still_answers(path, monkeypatch):
    with opened(path) as journal:
        ran(journal, 1)
        ran(journal, 2)
        journal.begin(key(3), evidence={"oom_kills": 1})
    with opened(path) as journal:
        Disk(monkeypatch, journal).writes = [errno.ENOSPC]
        journal.measured(available_bytes=1)
        assert "stopped at trial 1 because" in journal.notes[0]
        assert None not in recalled(journal, 1, 2)
        assert journal.deaths(key(3)) == ({"oom_kills": 1},)


def test_a_file_that_cannot_be_cut_either_has_no_lines_glued_together(path, monkeypatch):
    journal = opened(path)

    def refuse(*args):
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(os, "ftruncate", refuse)
    Disk(monkeypatch, journal).writes = [None, (9, errno.ENOSPC)]
    ran(journal, 1)
    journal.close()
    with opened(path) as journal:
        ran(journal, 2)
        assert journal.skipped_lines == 1
    with opened(path) as journal:
        assert recalled(journal, 1, 2) == [None, (trial(2), False)]


@pytest.mark.parametrize("failing", ["writes", "syncs"])
@pytest.mark.parametrize(("number", "tries"), [(errno.ENOSPC, 1), (errno.EIO, 3)])
def test_a_first_record_that_cannot_be_written_is_an_error(path, monkeypatch, failing, number, tries):
    waits = []
    with Journal.open(path, retry_sleep=waits.append) as journal:
        disk = Disk(monkeypatch, journal)
        setattr(disk, failing, [number] * tries)
        with pytest.raises(InvalidArgumentError, match=f"{path}.*{os.strerror(number)}.*make room"):
            journal.ask(QUESTION)
        assert len(waits) == tries - 1
    assert path.read_bytes() == b""
    assert not opened(path).resumed


@pytest.mark.parametrize("after", [0, 30, 10**6])
def test_an_interrupt_within_a_write_glues_nothing_and_is_no_death(path, monkeypatch, after):
    journal = opened(path)
    write = os.write

    def interrupted(fd, data):
        monkeypatch.undo()
        write(fd, data[:after])
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        journal.begin(key(1), evidence={})
    journal.abandon(key(1))
    ran(journal, 2)
    journal.close()
    written = ["question", *["begin"] * (after > 30), "abandon", "begin", "end"]
    assert [record["kind"] for record in records(path)] == written
    with opened(path) as journal:
        assert journal.deaths(key(1)) == ()
        assert journal.recall(key(2)) == (trial(2), False)
        assert journal.skipped_lines == (after == 30)


def test_an_interrupt_within_the_end_is_no_death(path, monkeypatch):
    journal = opened(path)
    journal.begin(key(1), evidence={})

    def interrupted(fd, data):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        journal.end(key(1), trial(1), nothing_stepped=False)
    journal.abandon(key(1))
    journal.close()
    with opened(path) as journal:
        assert journal.deaths(key(1)) == ()


def test_closing_twice_closes_nothing_of_others(path):
    journal = opened(path)
    fd = journal._file._fd
    journal.close()
    reused = os.open(path, os.O_RDONLY)
    assert reused == fd
    journal.close()
    os.close(reused)  # raises where it was closed


# --- what it imports and keeps ---


@pytest.mark.parametrize("module", ["", ".past", ".records", ".opening", ".differences", ".fingerprint"])
def test_it_imports_no_torch(module):
    assert "torch" not in imported_by(f"import oomprobe.journal{module}")


def test_nothing_is_open_after_close_and_closing_never_fails(path, monkeypatch):
    before = set(os.listdir("/proc/self/fd"))
    journal = opened(path)
    fd, sync = journal._file._fd, os.close
    assert set(os.listdir("/proc/self/fd")) - before

    def close(which):
        sync(which)
        if which == fd:
            raise OSError(errno.EIO, "no")

    monkeypatch.setattr(os, "close", close)
    journal.close()
    journal.close()
    monkeypatch.undo()
    assert not set(os.listdir("/proc/self/fd")) - before
    ran(journal, 1)  # says nothing, and breaks nothing
    journal.measured(available_bytes=1)
    assert [record["kind"] for record in records(path)] == ["question"]


def test_the_first_line_says_what_it_is(path):
    opened(path).close()
    line = path.read_bytes()
    assert line.startswith(MAGIC + b"1,")
    assert json.loads(line)["question"] == QUESTION
