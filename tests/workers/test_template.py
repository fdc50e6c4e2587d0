"""Workers that are forked from a process which has made their imports: they begin as new interpreters do, and end like them."""

import ast
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from processes import children, is_gone, open_files, until, with_all_below

from oomprobe.records.axis import NO_AXIS
from oomprobe.records.options import Options
from oomprobe.records.patience import PATIENCE, Patience
from oomprobe.runners.workers.exit_status import ExitStatus
from oomprobe.runners.workers.forking import STARTS_THREADS, _first_imports
from oomprobe.runners.workers.messages import Ready
from oomprobe.runners.workers.runner import workers
from oomprobe.runners.workers.template import SURROUNDINGS_CHANGED, Template

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="processes are isolated on Linux only"
)


@pytest.fixture
def target(tmp_path):
    """Return a function that writes a target which notes what its process is."""

    def write(first="", build=""):
        file, log = tmp_path / "train.py", tmp_path / "log"
        text = f"""
            {first}
            import os, random
            import numpy as np
            import torch
            build_of = os.getpid(), os.getppid(), os.getsid(0), random.random(), np.random.rand(), torch.initial_seed()

            def build():
                with open({str(log)!r}, "a") as notes:
                    print(*build_of, torch.cuda._is_in_bad_fork(), file=notes)
                {build}
                model = torch.nn.Linear(4, 4)
                return model, lambda model, n: model(torch.randn(n, 4)).sum().backward()
        """
        file.write_text(textwrap.dedent(text))
        return f"{file}:build", lambda: [line.split() for line in log.read_text().splitlines()]

    return write


def test_workers_begin_as_new_interpreters_do(target):
    files = open_files()
    name, notes = target()
    source = workers(name, "cpu", Options(max_batch=4), NO_AXIS, PATIENCE)
    source.template.wait(time.monotonic() + 60)
    crews = [source.start() for _ in range(3)]
    for crew in crews:
        [answer] = crew.ask({0: source.task}, None).values()
        assert isinstance(answer, Ready)
        crew.end()
    source.template.end()
    assert open_files() == files
    for pid, keeper, session, *_, in_bad_fork in notes():
        assert (session, in_bad_fork) == (keeper, "False")
        assert is_gone(int(pid))
        assert is_gone(int(keeper))
    for drawn in [*zip(*notes(), strict=True)][3:6]:
        assert len({*drawn}) == 3


FORKS_AN_ORPHAN = """
    worker = os.getpid()
    if not os.fork():
        os.setsid()
        if not os.fork():
            with open({orphans!r}, "a") as notes:
                print(worker, os.getpid(), file=notes)
            import time
            time.sleep(60)
        os._exit(0)
    os.wait()
"""


def test_a_worker_is_ended_with_all_that_it_started_and_no_other(target, tmp_path):
    orphans = tmp_path / "orphans"
    forking = textwrap.indent(
        textwrap.dedent(FORKS_AN_ORPHAN.format(orphans=str(orphans))), " " * 16
    ).strip()
    name, _ = target(build=forking)
    source = workers(name, "cpu", Options(max_batch=4), NO_AXIS, PATIENCE)
    source.template.wait(time.monotonic() + 60)
    crews = [source.start() for _ in range(2)]
    for crew in crews:
        [answer] = crew.ask(source.tasks, None).values()
        assert isinstance(answer, Ready)
    until(lambda: orphans.exists() and orphans.read_text().count("\n") == 2)
    orphan_of = dict(map(int, line.split()) for line in orphans.read_text().splitlines())
    first, second = (
        next(orphan for worker, orphan in orphan_of.items() if worker in children(session))
        for session in (crew.processes[0].session for crew in crews)
    )
    crews[0].end()
    until(lambda: is_gone(first))
    assert not is_gone(second)
    crews[1].end()
    until(lambda: is_gone(second))
    source.end()


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("why", ["timed out", "stuck"])
def test_a_worker_that_hangs_says_where(target, why):
    """Though its keeper is in its session, and gets no signal."""
    name, _ = target(build="import time; time.sleep(60)")
    patience = Patience(cpu_reading_s=0.2)
    source = workers(name, "cpu", Options(max_batch=4), NO_AXIS, patience)
    source.template.wait(time.monotonic() + 60)
    deadline_s, stuck_s = (time.monotonic() + 1, None) if why == "timed out" else (None, 1.0)
    [status] = source.start().ask(source.tasks, deadline_s, stuck_s=stuck_s).values()
    assert (status.why, status.signal) == (why, signal.SIGTERM)
    assert status.where().startswith("train.py:")
    source.end()


def test_a_killed_keeper_ends_its_worker_and_no_other(target, tmp_path):
    name, _ = target(build="import subprocess; subprocess.Popen(['sleep', '60'])")
    source = workers(name, "cpu", Options(max_batch=4), NO_AXIS, PATIENCE)
    source.template.wait(time.monotonic() + 60)
    crew, spared = source.start(), source.start()
    for one in (crew, spared):
        [answer] = one.ask(source.tasks, None).values()
        assert isinstance(answer, Ready)
    below = with_all_below(crew.processes[0].session)
    assert len(below) == 4  # the keeper, the worker, its child for a trial, and the sleeper
    os.kill(below[0], signal.SIGKILL)
    [status] = crew.ask({}, None).values()
    assert (status.signal, status.why) == (signal.SIGKILL, None)
    assert all(map(is_gone, below))
    assert not any(map(is_gone, with_all_below(spared.processes[0].session)))
    spared.end()
    source.end()


def test_a_template_until_the_environment_has_changed_and_until_it_has_died(monkeypatch):
    template, changing = (Template.of("oomprobe.demo:wide_mlp") for _ in range(2))
    for one in (template, changing):
        one.wait(time.monotonic() + 60)
        assert one.refusal == ""
    worker = template.process(PATIENCE)
    os.kill(*until(lambda: children(worker.session)), signal.SIGSEGV)
    status = until(lambda: worker.poll())
    assert isinstance(status, ExitStatus)
    assert status.signal == signal.SIGSEGV
    assert status.peak_resident_bytes > 2**20

    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    changing.process(PATIENCE).end()
    assert changing.how == f"started anew: {SURROUNDINGS_CHANGED}"
    changing.end()
    monkeypatch.undo()

    for keeper in children():
        os.kill(*children(keeper), signal.SIGKILL)
    worker = template.process(PATIENCE)
    assert "has ended" in template.how
    assert worker.poll() is None
    assert worker.end().peak_resident_bytes > 2**20


STARTS_A_THREAD = (
    "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
)
MAPS_CUDA = "import mmap, os; library = mmap.mmap(os.open({library!r}, os.O_RDONLY), 4096, prot=mmap.PROT_READ)"


@pytest.mark.usefixtures("warm_python")
def test_a_process_whose_import_has_loaded_cudas_driver_is_not_forked(target, tmp_path):
    library = tmp_path / "libcuda.so.1"
    library.write_bytes(b"0" * 4096)
    (tmp_path / "spoiling.py").write_text(MAPS_CUDA.format(library=str(library)))
    name, _ = target(first="import spoiling")
    script = f"""
        import sys, sysconfig
        sys.path.insert(0, {str(tmp_path)!r})
        sysconfig.get_path = lambda name: {str(tmp_path)!r}
        from oomprobe.runners.workers.forking import _prepare
        print(_prepare({name!r}), "spoiling" in sys.modules)
    """
    told = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert told.stdout.endswith("loads CUDA's driver True\n")


@pytest.mark.usefixtures("warm_python")
def test_one_that_must_not_be_forked_becomes_the_first_worker(target, monkeypatch):
    """An import that starts a thread, of a module that is called installed."""
    name, notes = target(first="import this")
    folder = Path(name).parent
    (folder / "this.py").write_text(STARTS_A_THREAD)
    monkeypatch.syspath_prepend(str(folder))
    source = workers(name, "cpu", Options(max_batch=4), NO_AXIS, PATIENCE)
    source.template.wait(time.monotonic() + 60)
    assert source.template.how == f"started anew: {STARTS_THREADS}"
    for crew in [source.start(), source.start()]:
        [answer] = crew.ask({0: source.task}, None).values()
        assert isinstance(answer, Ready)
        crew.end()
    source.template.end()
    assert len({worker[0] for worker in notes()}) == 2


@pytest.mark.parametrize(
    ("source", "imports"),
    [
        (
            '"""Train."""\nfrom __future__ import annotations\nimport math, torch\nfrom torch import nn',
            3,
        ),
        (
            "import torch\nimport os\nos.environ['A'] = '1'\nimport tenacity",
            2,
        ),  # which tenacity may read
        ("import torch\nimport model\nimport tenacity", 1),  # the user's own code
        ("x = 1\nimport torch", 0),
        ("import torch\nthis is no Python", 0),
    ],
)
def test_only_the_first_imports_of_installed_packages_are_made_beforehand(
    source, imports, tmp_path
):
    file = tmp_path / "train.py"
    file.write_text(source)
    (tmp_path / "model.py").touch()
    made = [*_first_imports(f"{file}:build")]
    assert len(made) == imports
    assert all(isinstance(statement, (ast.Import, ast.ImportFrom)) for statement in made)
