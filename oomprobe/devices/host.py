"""Host memory: a CPU model, held to a budget by the operating system, so that allocations fail for real.

``RLIMIT_AS`` limits the address space of this process, so torch's own CPU allocator fails with its own error and no
OOM killer comes. Address space is not memory: thread pools reserve far more of it than they use (64 cold threads:
1.4 GiB for 21 MiB), which is why the budget begins at the *warm* process, after one step at the smallest size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from oomprobe.devices import heap, linux, onednn
from oomprobe.devices.accelerator import kernel_answers
from oomprobe.devices.base import Usage
from oomprobe.devices.limits import address_space, left_by_own_limits
from oomprobe.devices.resident import ResidentPeak
from oomprobe.errors import InvalidArgumentError, NoDeviceError
from oomprobe.scope import scope
from oomprobe.units import byte_unit, format_bytes

# What a cold process may add in address space alone: a stack (8 MiB) and a malloc arena (64 MiB) for each thread.
THREAD_ADDRESS_SPACE_BYTES = 80 * 2**20
# A heap that has grown before fragments less than a fresh one, and a probe has many trials to be lucky in: with the
# holes plugged, one of a convolutional net ran 1663 where fresh processes ran 1214 to 1318; charged for what is free in
# the heap, up to a quarter of the cap, it stayed below them (scripts/host_truth.py, 384 MiB). Charged is what there was
# before the first failure: plugged, each later trial adds its own holes, or a failed allocation an arena of 64 MiB, to
# those of the others, and a model that hardly uses the heap was charged a quarter after twenty trials.
HISTORY_SHARE = 1 / 4
# Room for a step that only makes oneDNN's primitives: doubling asks for at most twice what fits.
PRIME_FACTOR = 4


class HostDevice:
    """The memory of this machine, or a stated part of it.

    Args:
        stated_bytes: Address space beyond the warm process; None: what the machine and its cgroup have free.

    Raises:
        NoDeviceError: this is not Linux.
        InvalidArgumentError: more was stated than is free now.
    """

    on_host = True

    def __init__(self, stated_bytes: int | None = None) -> None:
        free = linux.free_bytes()
        if sys.platform != "linux" or free is None:
            raise NoDeviceError(
                f"host memory can be probed on Linux only, and this is {sys.platform}: only there can the system hold "
                "a process to a budget (RLIMIT_AS). Use device='cuda' or 'mps'"
            )
        if stated_bytes is not None and stated_bytes > free:
            raise InvalidArgumentError(
                f"{format_bytes(stated_bytes)} of host memory were asked for, and {format_bytes(free)} are free now: "
                "beyond that no allocation fails, the system's OOM killer ends the process. Use device='cpu' for what "
                f"is free, or state less, such as 'cpu:{_round_size(free)}'"
            )
        self.torch_device = torch.device("cpu")
        self.name = "host memory" if stated_bytes is None else f"host memory, {format_bytes(stated_bytes)} of it"
        self.total_bytes = linux.machine_bytes("MemTotal") or free
        self._stated_bytes = stated_bytes
        self._available_bytes = free if stated_bytes is None else stated_bytes
        self._resident_base = self._mapped_bytes = 0
        self._live_bytes = self._holes_bytes = self._state_in_it_bytes = 0  # when what is available was sampled
        self._state_bytes: Callable[[], int] = lambda: 0
        self._cap_bytes = self._available_bytes
        self._limit_bytes = 0  # of the address space, in the last trial
        self._made_by_plugs = 0  # free in the heap only because plugs grew it into an arena's reserve: no history
        self._history_bytes: int | None = None  # once a trial has failed, what was charged for it
        self._peak = ResidentPeak()

    @scope
    def counting(self, state_bytes: Callable[[], int]) -> Iterator[None]:
        """For one probe, which tells what gradients and optimizer state hold."""
        self._state_bytes, before = state_bytes, self._state_bytes
        try:
            yield
        finally:
            self._state_bytes = before

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def warm(self, step: Callable[[], object]) -> None:
        self._run_once(step, self.warming_bytes())
        onednn.is_sound()  # looked for once while there is memory to look
        self._resident_base = (linux.process_bytes("VmRSS") or 0) - _mapped_bytes()
        self.sample()

    def warming_bytes(self) -> int:
        """Room for a first step: all that is free, and what threads reserve without using it."""
        slack = torch.get_num_threads() * THREAD_ADDRESS_SPACE_BYTES + 2**30
        return (linux.free_bytes() or 0) + slack

    def sample(self) -> None:
        """Once the process is warm: what it may use beyond what it has."""
        if self._stated_bytes is None:
            self._available_bytes = linux.free_bytes() or self._available_bytes
        self._available_bytes = min([self._available_bytes, *left_by_own_limits()])
        self._live_bytes, self._holes_bytes = self.live_bytes(), heap.free_in_heap_bytes()
        self._state_in_it_bytes = self._state_bytes()

    def prime(self, step: Callable[[], object]) -> None:
        """Let oneDNN make its primitives for a new shape while there is room, where the budget is a small one.

        Without memory for code it fails in ways that are not about the size: an error that stays (see `onednn`), and
        primitives with a missing kernel, which end the process (seen in its brgemm backward convolution). Its code
        takes 256 KiB a kernel, so large budgets hardly ever meet this, and small ones can spare the room.
        """
        room = PRIME_FACTOR * self._available_bytes
        if not torch.backends.mkldnn.enabled or room > (linux.free_bytes() or 0):
            return
        self._run_once(step, room)

    def _run_once(self, step: Callable[[], object], room_bytes: int) -> None:
        """Run a step outside any trial; a failure is left to its trial, and must not poison that."""
        failed = False
        try:
            with address_space((linux.process_bytes("VmSize") or 0) + room_bytes):
                step()
        except Exception:
            failed = True
        if failed:
            self.healthy()
        self.release()

    def available_bytes(self) -> int:
        return self._available_bytes

    @scope
    def cap(self, limit_bytes: int | None) -> Iterator[None]:
        self._cap_bytes = self._available_bytes if limit_bytes is None else limit_bytes
        room = max(0, self._cap_bytes + self._missing_bytes() - self._later_bytes())
        held = self._in_new_space if min(left_by_own_limits(), default=room + 1) > room else self._in_what_is_left
        with held(room):
            yield

    @scope
    def _in_new_space(self, room_bytes: int) -> Iterator[None]:
        """With the holes of the heap plugged: a trial begins as in a fresh process."""
        free_before = heap.free_in_heap_bytes()
        history = max(0, free_before - self._made_by_plugs) if self._history_bytes is None else self._history_bytes
        room_bytes -= min(history, int(HISTORY_SHARE * self._cap_bytes))
        plugs = heap.Plugs()
        size = linux.process_bytes("VmSize") or 0
        try:
            with address_space(size):
                plugs.fill()
            self._limit_bytes = size + room_bytes
            with address_space(self._limit_bytes, room_bytes):
                yield
        except Exception:
            self._history_bytes = history
            raise
        finally:
            left_by_trial = heap.free_in_heap_bytes()
            plugs.drain()
            made = heap.free_in_heap_bytes() - left_by_trial - free_before
            self._made_by_plugs = max(0, self._made_by_plugs + made)

    @scope
    def _in_what_is_left(self, room_bytes: int) -> Iterator[None]:
        """Under a limit of the user's own, that holes count against: plugged, each trial would leave less to the next."""
        holes = max(0, heap.free_in_heap_bytes() - self._holes_bytes)
        room_bytes = max(0, room_bytes - holes)
        self._limit_bytes = (linux.process_bytes("VmSize") or 0) + room_bytes
        with address_space(self._limit_bytes, room_bytes):
            yield

    def _missing_bytes(self) -> int:
        """What the warm process had and this one has not, as gradients after a failure: the step makes them again."""
        return max(0, self._live_bytes - self.live_bytes())

    def _later_bytes(self) -> int:
        """State that came after the process was warm, with the first use of a parameter: training at this size pays for it."""
        return max(0, self._state_bytes() - self._state_in_it_bytes)

    def start_trial(self) -> None:
        # Pages of libraries come in as they are first needed, 15 MiB with a first failure's trace: the trial has no part in them.
        self._mapped_bytes = _mapped_bytes()
        self._peak.start()

    def usage(self) -> Usage:
        return self._peak.usage(
            base_bytes=self._resident_base + self._mapped_bytes,
            limit_bytes=self._limit_bytes,
            cap_bytes=self._cap_bytes,
        )

    def live_bytes(self) -> int:
        return heap.malloced_bytes() or linux.process_bytes("VmRSS") or 0

    def holes_bytes(self) -> int:
        return heap.free_in_heap_bytes()

    def outside_bytes(self) -> None:
        return None

    def synchronize(self) -> None:
        """Steps on the host are done when they return."""

    def release(self) -> None:
        heap.trim_heap()

    def healthy(self) -> bool:
        self.release()  # under a limit of the user's own what a failed step freed is still in the heap, and nothing else free
        if not kernel_answers(self.torch_device, self.synchronize):
            return False
        return onednn.is_sound()


def _mapped_bytes() -> int:
    """Resident pages of files."""
    return linux.process_bytes("RssFile") or 0


def _round_size(free_bytes: int) -> str:
    """Three quarters of what is free, as one would type it: what is free now is less in a moment."""
    share = free_bytes * 3 // 4
    unit, factor = byte_unit(share)
    return f"{share // factor}{unit}"
