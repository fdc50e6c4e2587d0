"""Hold a command to some folders, in every language: ``python net.py FOLDER ... -- COMMAND ...``.

It writes below these only. Landlock (Linux 5.13, https://docs.kernel.org/userspace-api/landlock.html)
refuses all else to the command and to what it starts, with EACCES. It needs no privilege, and knows
no modes, owners and times of files. Where the kernel has none, the command runs without: `version`
says so beforehand. This is a program of its own, like the keeper.
"""

import ctypes
import os
import sys

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # system calls: the same on all processors
OF_VERSION, PATH_BENEATH, PR_SET_NO_NEW_PRIVS = 1, 1, 38
# Rights (linux/landlock.h): to write to a file, and to remove and make files of each kind; since
# version 2 to move them between folders, since 3 to cut them.
WRITES, MOVES, CUTS = 1 << 1 | 0b1_1111_1111 << 4, 1 << 13, 1 << 14

_libc = ctypes.CDLL(None, use_errno=True)


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"  # which Python 3.14 asks for where structures are packed
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def version() -> int:
    """Return the version of the kernel's Landlock; 0 if it has none or it is off."""
    number: int = _libc.syscall(CREATE_RULESET, None, 0, OF_VERSION)
    return max(0, number)


def hold(folders: list[str]) -> None:
    """Let this process and its descendants write below these folders only, if they exist."""
    rights = WRITES
    if version() >= 2:
        rights |= MOVES
    if version() >= 3:
        rights |= CUTS
    handled = ctypes.c_uint64(rights)
    rules = _libc.syscall(CREATE_RULESET, ctypes.byref(handled), ctypes.sizeof(handled), 0)
    if rules < 0:
        return
    for folder in filter(os.path.isdir, folders):
        beneath = _Beneath(rights, os.open(folder, os.O_PATH))
        _libc.syscall(ADD_RULE, rules, PATH_BENEATH, ctypes.byref(beneath), 0)
        os.close(beneath.folder)
    _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _libc.syscall(RESTRICT_SELF, rules, 0)
    os.close(rules)


if __name__ == "__main__":
    end = sys.argv.index("--")
    hold(sys.argv[1:end])
    try:
        os.execvp(sys.argv[end + 1], sys.argv[end + 1 :])
    except OSError as error:
        sys.exit(f"{sys.argv[end + 1]} cannot be started: {error}")
