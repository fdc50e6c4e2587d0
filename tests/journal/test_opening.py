import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import oomprobe
from journal.test_book import key, opened, ran
from oomprobe.errors import InvalidArgumentError
from oomprobe.journal import Journal, records


@pytest.fixture
def path(tmp_path):
    return tmp_path / "probe.jsonl"


def refused(path, match):
    with pytest.raises(InvalidArgumentError, match=match) as raised:
        Journal.open(path)
    assert raised.value.__cause__ is None
    assert not isinstance(path, str | Path) or repr(str(path)) in str(raised.value)


# --- who may write ---


def test_a_second_probe_is_refused_until_the_first_has_closed(path):
    with opened(path):
        refused(path, "another probe is writing it")
        refused(path, "another probe is writing it")
    opened(path).close()


def test_another_process_is_refused(path):
    code = f"from oomprobe.journal import Journal\nJournal.open({str(path)!r})"
    with opened(path):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "another probe is writing it" in done.stderr


def test_a_worker_that_was_forked_meanwhile_does_not_keep_the_lock(path):
    journal = opened(path)
    inherited = os.dup(journal._file._fd)  # as a fork has it
    journal.close()
    opened(path).close()
    os.close(inherited)


def test_without_fcntl_there_is_no_lock(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)  # an import of it fails
    with opened(path), opened(path):
        pass


def test_a_file_system_without_locks_has_none(path, monkeypatch):
    class Lockless:
        LOCK_EX = LOCK_NB = LOCK_UN = 0

        @staticmethod
        def flock(fd, how):
            raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(records, "_fcntl", lambda: Lockless)
    opened(path).close()


# --- where ---


def test_places_where_nothing_can_be_written(tmp_path):
    refused(tmp_path, r"is a folder: name a file in it, '.*probe\.jsonl'")
    refused(tmp_path / "none" / "j", r"there is no folder '.*none'\. Make it \(mkdir -p")
    refused("", "cannot be written")
    refused("a\0b", "cannot be written")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file" / "j", "cannot be written")
    for what in (3, None, object(), True):
        refused(what, "journal must be a path")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_place_that_may_not_be_written(path, monkeypatch, number):
    def refuse(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    refused(path, f"{os.strerror(number)}.*in a folder that you may write to")


@pytest.mark.parametrize("device", ["/dev/full", "/dev/null", "/dev/zero", "/dev/tty"])
def test_devices_are_refused(device):
    if os.path.exists(device):
        refused(device, "is no plain file")


def test_a_fifo_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    refused(tmp_path / "fifo", "is no plain file")


def test_bytes_and_strings_and_paths_are_paths(path):
    for one in (path, str(path), os.fsencode(path)):
        opened(one).close()
    assert os.listdir(path.parent) == [path.name]


def test_a_link_to_a_file_that_is_not_there_yet(path):
    os.symlink(path, path.with_name("link"))
    opened(path.with_name("link")).close()
    assert path.read_bytes() != b""


# --- what is there already ---


@pytest.mark.parametrize(
    "content",
    [
        b"my notes",
        b"{}",
        b'{"batch_size": 8}\n',
        b"{\n  \"batch_size\": 8\n}\n",
        b"\0" * 100,
        b"\n\nnotes",
        b'{"oomprobe_journalist":1}\n',
    ],
)  # fmt: skip
def test_what_is_no_journal_is_left_as_it_is(path, content):
    path.write_bytes(content)
    refused(path, "name another file")
    assert path.read_bytes() == content


def test_a_large_file_that_is_no_journal_is_not_read(path):
    with path.open("wb") as file:
        file.truncate(2**40)  # sparse
    refused(path, "no journal of oomprobe, so it is left as it is")


def test_a_journal_whose_first_line_is_damaged_is_left_as_it_is(path):
    with opened(path) as journal:
        ran(journal, 1)
    content = path.read_bytes().replace(b"cpu", b"gpu", 1)
    path.write_bytes(content)
    refused(path, "does not begin with a whole record of a journal.*delete it, or name another file")
    assert path.read_bytes() == content


def test_beginnings_of_our_first_line_count_as_empty(path):
    with opened(path) as journal:
        ran(journal, 1)
    whole = path.read_bytes()
    head = whole.index(b"\n")
    for beginning in (b"", b"\n", whole[:1], whole[:19], whole[: head - 1], whole[:9] + b"\n" + whole[: head - 9]):
        path.write_bytes(beginning)
        with opened(path) as journal:
            assert not journal.resumed
            ran(journal, 1)
        with opened(path) as journal:
            assert journal.resumed
            assert journal.recall(key(1)) is not None


def test_a_first_line_that_only_lacks_its_end_is_whole(path):
    opened(path).close()
    path.write_bytes(path.read_bytes()[:-1])
    with opened(path) as journal:
        assert journal.resumed
        ran(journal, 1)
    with opened(path) as journal:
        assert journal.skipped_lines == 0


def test_a_file_that_cannot_be_read(path, monkeypatch):
    opened(path).close()

    def refuse(*args):
        raise OSError(errno.EIO, "bad block")

    monkeypatch.setattr("oomprobe.journal.opening._refuse_others", refuse)
    refused(path, "cannot be read .bad block.")
    monkeypatch.undo()
    opened(path).close()  # and nothing of it was left open


# --- a new file ---


def test_the_folder_of_a_new_file_is_synced_once(path, monkeypatch):
    kinds, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (kinds.append(stat.S_ISDIR(os.fstat(fd).st_mode)), sync(fd)))
    opened(path).close()
    assert kinds == [True, False]
    opened(path).close()
    assert kinds == [True, False]


def test_a_file_system_that_cannot_sync_folders(path, monkeypatch):
    sync = os.fsync

    def refuse(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "no")
        sync(fd)

    monkeypatch.setattr(os, "fsync", refuse)
    opened(path).close()


def test_nothing_stays_open_where_opening_is_refused(path):
    path.write_text("notes")
    before = set(os.listdir("/proc/self/fd"))
    refused(path, "no journal")
    assert set(os.listdir("/proc/self/fd")) == before
    with opened(path.with_name("other")):
        held = set(os.listdir("/proc/self/fd"))
        refused(path.with_name("other"), "another probe")
        assert set(os.listdir("/proc/self/fd")) == held


@pytest.mark.parametrize("isolate", [False, True])
def test_ctrl_c_just_after_it_was_opened_leaves_it_closed(tmp_path, monkeypatch, isolate):
    path = tmp_path / "probe.jsonl"
    opens = Journal.open.__func__

    def opened_and_interrupted(cls, *args, **kwargs):
        journal = opens(cls, *args, **kwargs)
        os.kill(os.getpid(), signal.SIGINT)
        return journal

    monkeypatch.setattr(Journal, "open", classmethod(opened_and_interrupted))
    (tmp_path / "train.py").write_text("import torch\ndef build():\n    return torch.nn.Linear(1, 1), lambda m, n: m")
    with pytest.raises(KeyboardInterrupt):
        oomprobe.probe_target(
            f"{tmp_path}/train.py:build", isolate=isolate, device="cpu:1GiB", journal=path, progress="off"
        )
    held = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert str(path) not in held
