"""A variable of a library, by its name."""

import ctypes
import shutil
import subprocess
import threading

import pytest

from oomprobe.devices import symbols

SOURCE = """
__thread int other = 5; __thread int wanted = 7; __thread long wide = 1; int everywhere = 3;
int *of_this_thread(void) { return &wanted; }
int touch(void) { return other + (int)wide + everywhere; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("library")
    (folder / "small.c").write_text(SOURCE)
    path = folder / "libsmall.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, folder / "small.c"], check=True)
    return path


def test_each_thread_has_its_own(library):
    loaded = ctypes.CDLL(str(library))
    loaded.of_this_thread.restype = ctypes.POINTER(ctypes.c_int)

    def look():
        loaded.of_this_thread()[0] = value = threading.get_ident() % 1000
        return symbols.thread_local_int(library, b"wanted").value == value

    seen = []
    thread = threading.Thread(target=lambda: seen.append(look()))
    thread.start()
    thread.join()
    assert look()
    assert look()  # where it was found before
    assert seen == [True]


@pytest.mark.parametrize("name", [b"absent", b"everywhere", b"wide", b"want"])
def test_what_is_not_a_thread_local_int_is_not_found(library, name):
    ctypes.CDLL(str(library))
    assert symbols.thread_local_int(library, name) is None


@pytest.mark.parametrize("piece", [25, 64, 1000])
def test_names_and_symbols_lie_across_pieces(library, piece, monkeypatch):
    monkeypatch.setattr(symbols, "PIECE_BYTES", piece)
    assert symbols._offset.__wrapped__(library, b"wanted") == symbols._offset(library, b"wanted") is not None


@pytest.mark.parametrize(
    "content", [b"", b"not an ELF file" * 10, b"\x7fELF\x02\x01" + bytes(20), b"\x7fELF\x02\x01" + b"\xff" * 90]
)
def test_other_files_have_none(tmp_path, content):
    other = tmp_path / "libother.so"
    other.write_bytes(content)
    assert symbols.thread_local_int(other, b"wanted") is None
    assert symbols.thread_local_int(tmp_path / "absent.so", b"wanted") is None


@pytest.mark.parametrize("error", [MemoryError(), OSError(24, "Too many open files")])
def test_what_could_not_be_read_once_is_found_another_time(library, error, monkeypatch):
    """It is asked for just when memory has run out."""

    def refuse(*_):
        raise error

    ctypes.CDLL(str(library)).of_this_thread()  # from then on this thread has one
    symbols._offset.cache_clear()
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(symbols, "_read", refuse)
        with pytest.raises(type(error)):
            symbols.thread_local_int(library, b"wanted")
    assert symbols.thread_local_int(library, b"wanted") is not None
