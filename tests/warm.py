"""A warm Python: its programs are forked from a server that has imported torch, in 0.1 s instead of 2 to 4.

`Warm()` starts the server and writes an executable, `python`, which does as the interpreter does with the same words: the same folder,
environment, descriptors, output, exit status and `sitecustomize`; a signal is passed on, and a program ends with whoever has started it.
It is no child of that one, though, so tests of processes (who is left, how much memory one took, its limits) start a real one.
So does the executable itself for options such as -I, and without the server's address in the environment.
"""

import os
import sys

ADDRESS = "OOMPROBE_WARM_PYTHON"
# What hooks wait for: its import is to be seen although it was made before.
IMPORTED_ANEW = ("torch", "numpy", "safetensors", "safetensors.torch", "oomprobe")
IMPORTED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "oomprobe.simulation.program",
    "oomprobe.cli",
)


class Warm:
    """A server, which ends with this process, and the executable that uses it, in a folder with a short name."""

    def __init__(self, folder, environment):
        import socket
        import subprocess

        self.address, self.python = str(folder / "server"), str(folder / "python")
        with open(self.python, "w") as file:
            file.write(
                f"#!{sys.executable} -IS\nimport sys\nsys.path.append({os.path.dirname(__file__)!r})\nimport warm\nwarm.client()\n"
            )
        os.chmod(self.python, 0o755)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(self.address)
            listening.listen(100)
            ends, self._ends_with = os.pipe()
            code = f"import warm; warm.serve({listening.fileno()}, {ends})"
            given = (listening.fileno(), ends)
            words = [sys.executable, "-c", code]
            subprocess.run(
                words, env=environment, pass_fds=given, start_new_session=True, check=True
            )
            os.close(ends)


# --- in place of the interpreter: few imports ---


def client():
    """Let the server run the program that this process was asked to run, and end as it does."""
    import marshal
    import signal
    import socket

    words = sys.argv[1:]
    if ADDRESS not in os.environ or what_runs(words) is None:
        os.execv(sys.executable, [sys.executable, *words])
    wire = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    wire.connect(os.environ[ADDRESS])
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    numbers = [number for number in numbers if number != wire.fileno() and is_open(number)]
    asked = sys.argv, os.getcwd(), dict(os.environ), numbers
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: wire.send(bytes([number])))
    socket.send_fds(wire, [marshal.dumps(asked)], numbers)
    for number in numbers:
        os.close(number)
    code = int(wire.recv(16) or b"70")
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def what_runs(words):
    """Return what -W is given, the kind of program ("-c", "-m" or "") and its words; None if only the interpreter runs that."""
    warned = []
    while words[:1] in (["-W"], ["-u"]):
        taken = 2 if words[0] == "-W" else 1
        warned, words = [*warned, *words[1:taken]], words[taken:]
    if words[:1] and words[0] in ("-c", "-m"):
        return warned, words[0], words[1:]
    if words and os.path.isfile(words[0]):
        return warned, "", words
    return None


# --- the server ---


class Server:
    def __init__(self, listening, parent):
        import select

        self._listening, self._parent, self._poll = listening, parent, select.poll()
        self._clients, self._programs = (
            {},
            {},
        )  # (connection, pid) by its own descriptor, or by the program's
        for descriptor in (listening.fileno(), parent):
            self._poll.register(descriptor, select.POLLIN)

    def serve(self):
        """Fork a program for each connection, until the parent ends."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._parent:
                    return self.end()
                if descriptor == self._listening.fileno():
                    self._start(self._listening.accept()[0])
                elif descriptor in self._programs:
                    self._ended(descriptor)
                elif descriptor in self._clients:
                    self._signalled(descriptor)

    def end(self):
        for _, pid, _ in self._programs.values():
            kill(pid)

    def _start(self, connection):
        import marshal
        import select
        import socket

        asked, given, _, _ = socket.recv_fds(connection, 2**20, 250)
        pid = os.fork()
        if not pid:
            run(*marshal.loads(asked), given)
        for descriptor in given:
            os.close(descriptor)
        program = os.pidfd_open(pid)
        self._clients[connection.fileno()] = self._programs[program] = connection, pid, program
        for descriptor in (connection.fileno(), program):
            self._poll.register(descriptor, select.POLLIN)

    def _signalled(self, descriptor):
        connection, pid, _ = self._clients[descriptor]
        number = connection.recv(1)
        if number:
            os.kill(pid, number[0])
        else:  # whoever has started the program has ended
            self._poll.unregister(descriptor)
            kill(pid)

    def _ended(self, descriptor):
        from contextlib import suppress

        connection, pid, program = self._programs.pop(descriptor)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        del self._clients[connection.fileno()]
        for one in (connection.fileno(), program):
            with suppress(KeyError):
                self._poll.unregister(one)
        with suppress(OSError):
            connection.send(str(code).encode())
        connection.close()
        os.close(program)


def kill(pid):
    """Kill a program and what it started, even one so young that it leads no group yet."""
    import signal
    from contextlib import suppress

    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)


def run(argv, folder, environment, numbers, given):
    """Be the interpreter in a forked child: run a program from start to end."""
    import atexit
    import threading

    code = 70
    try:
        os.setsid()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        place(given, numbers)
        warned, kind, words = what_runs(argv[1:])
        prepare(argv, warned, kind, words)
        code = outcome(kind, words)
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    finally:
        os._exit(code)


def place(given, numbers):
    """Give descriptors the numbers that they have in the process that asks, and close all others."""
    import fcntl

    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 1000) for descriptor in given]
    os.closerange(0, 1000)
    for descriptor, number in zip(high, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def prepare(argv, warned, kind, words):
    """Set what the interpreter sets before a program begins."""
    import ctypes
    import importlib
    import signal
    import site
    import types
    import warnings
    from contextlib import suppress

    import torch

    with suppress(OSError, AttributeError):  # the bed's driver has read its options in the server
        ctypes.CDLL("libcuda.so.1").cudastub_configure()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED")) or "-u" in argv[1:3]
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, 1 if number == 2 or unbuffered else -1, closefd=False)  # noqa: SIM115
        if is_open(number)
        else None
        for number, mode in enumerate("rww")
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    sys.executable, sys.orig_argv, sys.argv = argv[0], argv, [kind, *words[1:]] if kind else words
    first = "" if kind else os.path.dirname(os.path.abspath(words[0]))
    more = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [first, *more]
    sys.warnoptions[:] = [*filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")), *warned]
    warnings._processoptions(sys.warnoptions)
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.meta_path.insert(
        0, Anew({name: sys.modules.pop(name) for name in IMPORTED_ANEW if name in sys.modules})
    )
    sys.modules.pop("sitecustomize", None)
    importlib.invalidate_caches()
    site.execsitecustomize()


class Anew:
    """Finds modules that were imported before, as if they were executed now."""

    def __init__(self, modules):
        self.modules = modules

    def find_spec(self, name, path=None, target=None):
        if name not in self.modules:
            return None
        import copy

        spec = copy.copy(self.modules[name].__spec__)
        spec.loader = Loader(self.modules[name])
        return spec


class Loader:
    def __init__(self, module):
        self._module = module

    def create_module(self, spec):
        return self._module

    def exec_module(self, module):
        pass


def outcome(kind, words):
    """Run the program, print the error that ends it, and return its exit status."""
    import runpy
    import traceback

    main = vars(sys.modules["__main__"])
    try:
        if kind == "-m":
            runpy._run_module_as_main(words[0])
        elif kind:
            exec(compile(words[0], "<string>", "exec"), main)
        else:
            main["__file__"] = path = os.path.abspath(words[0])
            with open(path, "rb") as file:
                source = file.read()
            exec(compile(source, path, "exec"), main)
    except SystemExit as error:
        if isinstance(error.code, int | None):
            return error.code or 0
        print(error.code, file=sys.stderr)  # noqa: T201
        return 1
    except BaseException as error:
        error.__traceback__ = error.__traceback__.tb_next  # without this function
        sys.last_type, sys.last_value, sys.last_exc = type(error), error, error
        sys.last_traceback = error.__traceback__
        if sys.excepthook is sys.__excepthook__:
            traceback.print_exception(error)
        else:
            sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def serve(listening, parent):
    """Import what programs import, then serve."""
    import gc
    import importlib
    import socket
    import warnings

    if os.fork():
        os._exit(
            0
        )  # so that the server is no child of who has started it, whose children tests count
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in IMPORTED:
            importlib.import_module(name)
    ours = {"", *map(os.path.abspath, os.environ["PYTHONPATH"].split(os.pathsep))}
    sys.path[:] = [entry for entry in sys.path if entry not in ours]
    gc.collect()
    gc.freeze()
    Server(socket.socket(fileno=listening), parent).serve()
