"""Run scenes that fork children, each in its own process.

Pytest's process has threads, so it must not fork. A stage is a process that imports what is needed, starts no thread, and
forks a player for each scene: it reads ``{"scene": name, "given": {...}}`` and writes the scene's result, a line each.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

LONGEST_S = 60
TESTS = Path(__file__).parents[1]


def main(module):
    """Play scenes of a module until stdin ends."""
    scenes = importlib.import_module(module)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if not pid:
            signal.alarm(LONGEST_S)
            _write(getattr(scenes, request["scene"])(**request["given"]))
            os._exit(0)
        if os.waitpid(pid, 0)[1]:
            _write(None)


def _write(result):
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


class Stage:
    """That process, seen from a test."""

    def __init__(self, module, log):
        code = f"from workers import stage; stage.main({module!r})"
        paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
        self._log = log
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", code],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def play(self, scene, **given):
        """Return the result of a scene."""
        self._process.stdin.write(json.dumps({"scene": scene.__name__, "given": given}) + "\n")
        self._process.stdin.flush()
        result = json.loads(self._process.stdout.readline())
        assert result is not None, self.stderr
        return result

    @property
    def stderr(self):
        return self._log.read_text()

    def close(self):
        with contextlib.closing(self._process.stdout):  # without reading to its end, because others may hold it open
            self._process.stdin.close()
            self._process.wait()
