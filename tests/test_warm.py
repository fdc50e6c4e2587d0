"""The warm Python does as the interpreter does."""

import os
import signal
import subprocess
import sys
import time

import pytest
from processes import environment, until

TOLD = """
import os, sys, warnings
print(sys.argv, os.getcwd(), os.environ.get("GIVEN"), sys.stdin.read(), __name__, "torch" in sys.modules, sys.warnoptions)
import torch, oomprobe
print(torch.get_num_threads(), oomprobe.__file__, [number for number in range(50) if os.path.exists(f"/proc/self/fd/{number}")])
"""
PROGRAMS = {
    "what it sees": (TOLD, 0),
    "an error": ("def f(x):\n    return x['loss']\nf({})", 1),
    "a warning": ("import warnings\nwarnings.warn('old', DeprecationWarning)", 1),
    "a status": ("import atexit, sys\natexit.register(print, 'last')\nsys.exit(7)", 7),
    "a reason": ("import sys\nsys.exit('no data')", 1),
    "a signal": ("import os\nos.kill(os.getpid(), 9)", -9),
    "a thread": ("import threading, time\nthreading.Timer(0.1, print, ['later']).start()", 0),
    "a class of its own": (
        "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))))",
        0,
    ),
}


def ended(python, words, folder):
    return subprocess.run(
        [python, "-W", "error", *words, "word"],
        cwd=folder,
        env=environment(GIVEN="1", OMP_NUM_THREADS="1"),
        input="typed",
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("kind", ["-c", "-m", ""])
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_does_as_the_interpreter_does(warm, monkeypatch, tmp_path, name, kind):
    code, status = PROGRAMS[name]
    (tmp_path / "program.py").write_text(code)
    words = {"-c": ["-c", code], "-m": ["-m", "program"], "": ["program.py"]}[kind]
    real = ended(sys.executable, words, tmp_path)
    monkeypatch.setenv("OOMPROBE_WARM_PYTHON", warm.address)
    found = ended(warm.python, words, tmp_path)
    assert (found.returncode, found.stdout, found.stderr) == (status, real.stdout, real.stderr)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_program_ends_with_who_has_started_it(warm, warm_python, tmp_path, number):
    code = f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()) + ' ')\ntime.sleep(600)"
    started = subprocess.Popen([sys.executable, "-c", code])
    pid = int(until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
    assert pid != started.pid
    started.send_signal(number)
    assert started.wait() == -number
    until(lambda: not os.path.exists(f"/proc/{pid}"))


def test_a_program_killed_at_any_age_leaves_the_server_alive(warm, warm_python):
    for age_s in [index / 2000 for index in range(0, 200, 4)]:
        started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        time.sleep(age_s)
        started.kill()
        started.wait()
    done = subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"1\n", b"")
