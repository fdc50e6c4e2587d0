"""malloc's own figures, and plugs, on the C library that is here."""

import ctypes

import pytest
from test_linux import run_python

from oomprobe.devices import heap

MIB = 2**20


def test_malloced_bytes_sees_10_mib_to_the_page():
    before = heap.malloced_bytes()
    if before is None:
        pytest.skip("this C library has no mallinfo2")
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    block = libc.malloc(ctypes.c_size_t(10 * MIB))
    held = heap.malloced_bytes() - before
    libc.free(block)
    assert held == pytest.approx(10 * MIB, abs=64 * 1024)
    assert heap.malloced_bytes() - before < 64 * 1024


@pytest.fixture
def asked_anew():
    asked = heap._library, heap._mallinfo2
    for each in asked:
        each.cache_clear()
    yield
    for each in asked:
        each.cache_clear()


def test_a_c_library_without_these_functions_is_no_error(monkeypatch, asked_anew):
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: object())
    heap.trim_heap()
    assert heap.malloced_bytes() is None
    assert heap.free_in_heap_bytes() == 0


# --- plugs ---

WITH_HOLES = """
    import ctypes, resource
    from oomprobe.devices import heap, linux
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: blocks up to 32 MiB go to the heap, as in a process with a history
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [libc.malloc(ctypes.c_size_t(4 * 2**20)) for _ in range(20)]
    kept, freed = blocks[1::2], blocks[::2]
    for block in freed:
        libc.free(block)
    holes = heap.free_in_heap_bytes()
    assert holes > 32 * 2**20, holes
    used, size = heap.malloced_bytes(), linux.process_bytes("VmSize")
    before = resource.getrlimit(resource.RLIMIT_AS)
    plugs = heap.Plugs()
    resource.setrlimit(resource.RLIMIT_AS, (size, before[1]))
    plugs.fill()
    resource.setrlimit(resource.RLIMIT_AS, before)
"""


def test_plugs_fill_the_holes_of_the_heap_and_the_address_space_does_not_grow():
    run_python(
        WITH_HOLES
        + """
    assert linux.process_bytes("VmSize") <= size + 2**20, (size, linux.process_bytes("VmSize"))
    assert heap.malloced_bytes() - used > 0.9 * holes, (heap.malloced_bytes() - used, holes)
    assert heap.free_in_heap_bytes() < 2 * 2**20, heap.free_in_heap_bytes()
    assert linux.process_bytes("VmRSS") < size  # nothing was written to them
    """
    )


def test_plugs_drain_to_the_last_byte():
    run_python(
        WITH_HOLES
        + """
    plugs.drain()
    assert heap.malloced_bytes() <= used + 64 * 1024, (heap.malloced_bytes(), used)
    plugs.drain()
    """
    )


def test_a_heap_of_ten_thousand_small_holes_is_plugged_though_no_list_of_them_could_grow():
    run_python(
        """
    import ctypes, resource
    from oomprobe.devices import heap, linux
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [libc.malloc(ctypes.c_size_t(20 * 1024)) for _ in range(20_000)]
    for block in blocks[::2]:
        libc.free(block)
    holes, used = heap.free_in_heap_bytes(), heap.malloced_bytes()
    plugs, limits = heap.Plugs(), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (linux.process_bytes("VmSize"), limits[1]))
    plugs.fill()
    resource.setrlimit(resource.RLIMIT_AS, limits)
    assert heap.malloced_bytes() - used > 0.75 * holes, (heap.malloced_bytes() - used, holes)  # 16 of each 20 KiB
    plugs.drain()
    assert heap.malloced_bytes() <= used + 64 * 1024, (heap.malloced_bytes(), used)
    """
    )


@pytest.mark.parametrize("threads", [3, 100], ids=["an arena each", "as many arenas as malloc makes"])
@pytest.mark.parametrize("live_on", [True, False])
def test_no_arena_that_this_thread_reaches_has_a_hole_left(threads, live_on):
    run_python(
        f"""
    import ctypes, os, resource, threading, time
    from oomprobe.devices import heap, linux
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    threads_before = len(os.listdir("/proc/self/task"))
    together, ready, end = threading.Barrier({threads}), threading.Barrier({threads} + 1), threading.Event()
    def leave_holes():
        blocks = [libc.malloc(ctypes.c_size_t(2**20)) for _ in range(12)]
        together.wait(20)
        for block in blocks[:-1]:
            libc.free(block)
        ready.wait(20)
        {live_on} and end.wait(20)
    threads = [threading.Thread(target=leave_holes, daemon=True) for _ in range({threads})]
    for thread in threads: thread.start()
    ready.wait(20)
    while not {live_on} and len(os.listdir("/proc/self/task")) > threads_before:
        time.sleep(0.01)  # a thread that was joined still has its arena for a moment
    assert heap.free_in_heap_bytes() > {threads} * 10 * 2**20, heap.free_in_heap_bytes()
    plugs, limits = heap.Plugs(), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (linux.process_bytes("VmSize"), limits[1]))
    plugs.fill()
    got = 0  # nothing that grows: no memory is left for a list either
    for _ in range(1000):
        got += bool(libc.malloc(heap.SMALLEST_HOLE_BYTES))
    resource.setrlimit(resource.RLIMIT_AS, limits)
    assert not got, got
    end.set()
    """
    )
