"""Scenes with a child in them, each played in a process of its own.

Children are forked, and in the process that tests run in others have started threads. So one process imports what is
needed, starts no thread, and forks a player for each scene that it is told: ``{"scene": name, "given": {...}}``, a line
each. The player answers with a line.
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
    """Play scenes of a module until none comes."""
    scenes = importlib.import_module(module)
    for line in sys.stdin:
        told = json.loads(line)
        pid = os.fork()
        if not pid:
            signal.alarm(LONGEST_S)
            _say(getattr(scenes, told["scene"])(**told["given"]))
            os._exit(0)
        if os.waitpid(pid, 0)[1]:
            _say(None)


def _say(shown):
    sys.stdout.write(json.dumps(shown) + "\n")
    sys.stdout.flush()


class Stage:
    """That process, as a test sees it."""

    def __init__(self, module, said):
        code = f"from isolation import stage; stage.main({module!r})"
        paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
        self._said = said
        with said.open("w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", code],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def play(self, scene, **given):
        """What a scene returns."""
        self._process.stdin.write(json.dumps({"scene": scene.__name__, "given": given}) + "\n")
        self._process.stdin.flush()
        shown = json.loads(self._process.stdout.readline())
        assert shown is not None, self.said
        return shown

    @property
    def said(self):
        """What came on stderr so far."""
        return self._said.read_text()

    def close(self):
        with contextlib.closing(self._process.stdout):  # to its end others may hold it open
            self._process.stdin.close()
            self._process.wait()
