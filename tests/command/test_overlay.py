"""What the trials of a command write: Python sees it, and nothing of the user's changes."""

import importlib.util
import json
import os
import posix
import random
import stat
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import oomprobe
from oomprobe.errors import SimulationError
from oomprobe.runners.command import net
from oomprobe.runners.command.files import TrialFiles
from oomprobe.runners.command.run import HERE

from .doors import NUMPY_AND_TORCH, PLAIN, make_home
from .test_runs import shell

DOORS = Path(__file__).with_name("doors.py")
HAS_LANDLOCK = pytest.mark.skipif(not net.version(), reason="the kernel has no Landlock")


def variables(folder, *, on_card=False):
    """Return the environment of a trial whose folder this is."""
    files = TrialFiles([], on_card=on_card, keeps_writes=False)
    for name in ("reports", "run", "tmp"):
        (folder / name).mkdir(parents=True)
    _, redirecting = files.redirected([], folder)
    site = {"PYTHONPATH": str(HERE / "site"), "OOMPROBE_REPORTS": str(folder / "reports")}
    return {**os.environ, **site, **redirecting, "PYTHONDONTWRITEBYTECODE": "1"}


def run_doors(folder, ways, environment):
    """Make a home for each way, and run them all; return the homes as they were and are, and what each has seen."""
    for name in ways:
        make_home(folder / name)
    before = {name: everything_in(folder / name) for name in ways}
    words = [sys.executable, DOORS, folder, *ways]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    seen = dict(map(json.loads, ended.stdout.splitlines()))
    after = {name: everything_in(folder / name) for name in ways}
    return before, after, seen


def everything_in(home):
    """Return the bytes, mode, owner, number and times of all files of a folder; but not when they were read."""
    found = {}
    for path in [home, *sorted(home.rglob("*"))]:
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else None
        times = status.st_mtime_ns, status.st_ctime_ns
        found[str(path.relative_to(home))] = (*status[:6], content, *times)
    return found


@pytest.fixture(scope="module", params=[PLAIN, NUMPY_AND_TORCH], ids=["plain", "torch"])
def doors(request, tmp_path_factory):
    """Each way, run as a program and as a trial."""
    folder = tmp_path_factory.mktemp("doors")
    alone = run_doors(folder / "alone", request.param, {**os.environ})
    in_trial = run_doors(folder / "trial", request.param, variables(folder / "own"))
    return alone, in_trial


def test_a_trial_sees_what_training_sees_and_changes_nothing(doors):
    (before, after, seen), (before_trial, after_trial, seen_in_trial) = doors
    assert [name for name in seen if after[name] == before[name]] == []  # all do write
    assert seen_in_trial == seen
    assert [name for name in seen if after_trial[name] != before_trial[name]] == []


def load_overlay():
    spec = importlib.util.spec_from_file_location("overlay", HERE / "site" / "overlay.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NAMES = [
    "a",
    "l",
    "m",
    "n",
    "d",
    "d/b",
    "d/e",
    "d/e/c",
    "d/up",
    "m/b",
    "x",
    "d/x",
    "m/x",
    "d/e/y",
    "x/z",
    "./d/b",
]
FLAGS = {
    "write": os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "append": os.O_WRONLY | os.O_CREAT | os.O_APPEND, "update": os.O_RDWR,
    "read": os.O_RDONLY, "new": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
}  # fmt: skip
CHANGES = [*FLAGS, "unlink", "rmdir", "mkdir", "rename", "link", "symlink", "chmod", "truncate"]


def change(system, root, dice):
    """Do something by chance; return what it was and what came of it."""
    name, path, other = dice.choice(CHANGES), *(f"{root}/{dice.choice(NAMES)}" for _ in range(2))
    if name in FLAGS:
        descriptor = system["open"](path, FLAGS[name], 0o666)
        if name != "read":
            os.write(descriptor, name.encode())
        os.close(descriptor)
    elif name in ("rename", "link"):
        system[name](path, other)
    elif name == "symlink":
        system[name](dice.choice(["a", "d", "x", "../a", "e/c", "/nowhere"]), path)
    elif name in ("chmod", "truncate"):
        system[name](path, 0o600)
    else:
        system[name](path)
    return name, path, other


def shown(system, folder):
    """Return a tree, as these functions of the system show it."""
    found = []
    for name in sorted(system["listdir"](folder)):
        path = f"{folder}/{name}"
        mode = system["lstat"](path).st_mode
        content = None
        if stat.S_ISDIR(mode):
            content = shown(system, path)
        elif stat.S_ISLNK(mode):
            content = system["readlink"](path)
        else:
            descriptor = system["open"](path, os.O_RDONLY)
            content = os.read(descriptor, 1000)
            os.close(descriptor)
        found.append((name, mode, content))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_any_changes_look_as_the_system_would_make_them(tmp_path, seed):
    overlay = load_overlay()
    redirected = dict(overlay.Doors(overlay.Overlay(str(tmp_path / "own"), ())).table())
    (tmp_path / "own").mkdir()
    systems = {"alone": {name: getattr(posix, name) for name in redirected}, "trial": redirected}
    for root in map(tmp_path.joinpath, systems):
        (root / "d/e").mkdir(parents=True)
        for name in ("a", "d/b", "d/e/c"):
            (root / name).write_text(name)
        for name, target in (("l", "a"), ("m", "d"), ("n", "nowhere"), ("d/up", "../a")):
            (root / name).symlink_to(target)
    before = everything_in(tmp_path / "trial")
    for number in range(25):
        said = []
        for name, system in systems.items():
            root, dice = str(tmp_path / name), random.Random(f"{seed} {number}")
            try:
                result = change(system, root, dice)
            except OSError:
                result = "an error"
            said.append(repr((result, shown(system, root))).replace(root, "ROOT"))
        assert said[0] == said[1]
    assert everything_in(tmp_path / "trial") == before


def run_in_trial(tmp_path, code, *, before=()):
    environment = variables(tmp_path / "own", on_card=bool(before))
    words = [*before, sys.executable, "-c", code]
    return subprocess.run(
        words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )


def test_a_large_file_is_not_copied(tmp_path):
    large = tmp_path / "large"
    with open(large, "wb") as file:
        file.truncate(2**30 + 1)
    code = "open('large', 'rb').read(1); open('large', 'r+b')"
    ended = run_in_trial(tmp_path, code)
    assert "large has 1.00 GiB, and a trial changes copies of files" in ended.stderr
    assert run_in_trial_again(tmp_path, "open('large', 'wb').write(b'x')").returncode == 0
    assert large.stat().st_size == 2**30 + 1


def run_in_trial_again(tmp_path, code):
    os.rename(tmp_path / "own", tmp_path / "earlier")
    return run_in_trial(tmp_path, code)


def test_a_pipe_is_no_file_to_copy(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    code = "import os; end = os.open('pipe', os.O_RDWR | os.O_NONBLOCK); os.write(end, b'x'); print(os.read(end, 1))"
    assert run_in_trial(tmp_path, code).stdout == "b'x'\n"


def test_without_caches_nothing_is_left_alone():
    assert not load_overlay().Overlay("/own", [""]).passes("/home/x")


def test_copies_have_no_room(tmp_path, monkeypatch):
    """A file of some size is copied where the process may write none."""
    (tmp_path / "data").write_text("x" * 2**16)
    code = (
        "import errno, io, sys; overlay = sys.modules['oomprobe_overlay']\n"
        "def full(*_): raise OSError(errno.ENOSPC, 'full')\n"
        "import shutil; shutil.copyfileobj = full\n"
        "open('data', 'a')"
    )
    ended = run_in_trial(tmp_path, code)
    assert "has no room for a copy of" in ended.stderr
    assert "set TMPDIR" in (tmp_path / "own" / "refused").read_text()
    assert [*(tmp_path / "own" / "files").rglob("data*")] == []  # no part


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_what_the_user_may_not_write_is_refused_as_in_training(tmp_path):
    (tmp_path / "theirs").write_text("x")
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_mode & 0o005 != 0o005 and path.is_relative_to("/tmp"):
            path.chmod(path.stat().st_mode | 0o005)
    code = """if True:
        import os
        os.setuid(65534)
        for path in ("theirs", "new", "/usr/x"):
            try:
                open(path, "w")
            except PermissionError as error:
                print(error.filename)
    """
    ended = run_in_trial(tmp_path, code)
    assert ended.stderr == ""
    assert len(ended.stdout.split()) == 3


@HAS_LANDLOCK
def test_other_programs_are_held_back(tmp_path):
    (tmp_path / "kept").write_text("kept")
    folder = tmp_path / "own" / "run"
    before = [sys.executable, "-I", "-S", net.__file__, str(tmp_path / "own"), "/dev", "--"]
    code = f"""if True:
        import subprocess
        for words in ("cp kept new", "rm kept", "mkdir new", "mv kept new", "ln -s kept new", "truncate -s 0 kept", "tee kept", "tee -a kept"):
            assert subprocess.run(words.split(), input=b"").returncode == 1, words
        for words in ("cp kept {folder}/a", "mv {folder}/a {folder}/b", "cp kept /dev/null"):
            subprocess.run(words.split(), check=True)
        open("new", "w")
    """
    ended = run_in_trial(tmp_path, code, before=before)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "kept").read_text() == "kept"
    assert not (tmp_path / "new").exists()


def test_what_a_trial_does_to_files_is_said(tmp_path, monkeypatch):
    """By the names that the user knows; what another program writes on a real device is seen afterwards."""
    monkeypatch.chdir(tmp_path)
    for name in ("data", "old", "away", "b", "c"):
        (tmp_path / name).write_text(name)
    code = "import os; [open(n, 'a') for n in ('data', 'b', 'c', '/etc/x')]; os.unlink('old'); os.unlink('c'); open('c', 'w'); os.rename('away', 'moved')"
    command = [sys.executable, "-c", f"{code}; os.system('echo > shell.txt')", "{batch}"]
    result = oomprobe.check_command(command, 8, memory_fraction=1.0, progress="off")
    notes = [note for note in result.notes if not note.startswith("no GPU is in sight")]
    written, removed, changed = notes[:3]
    assert written.endswith("copies took the place of b, c, data and 2 files more")
    assert removed == "what trials remove is still there: away, old"
    assert changed.startswith("shell.txt changed while a trial ran")
    assert sorted(os.listdir()) == ["away", "b", "c", "data", "old", "shell.txt"]


def test_a_kernel_without_landlock_is_named(monkeypatch):
    monkeypatch.setattr(net, "version", lambda: 0)
    files = TrialFiles(["python"], on_card=True, keeps_writes=False)
    assert files.redirected(["python"], Path("/own"))[0] == ["python"]
    assert [note.text.partition(" (")[0] for note in files.notes()] == [
        "this kernel has no Landlock"
    ]


@HAS_LANDLOCK
def test_what_is_refused_on_a_simulated_card_is_said_though_the_script_goes_on(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    code = """if True:
        import os, sys, torch
        os.system("echo > shell.txt")
        model = torch.nn.Linear(4, 4).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(50):
            model(torch.ones(int(sys.argv[1]), 4).cuda()).sum().backward()
            optimizer.step()
    """
    command = [sys.executable, "-c", code, "{batch}"]
    result = oomprobe.check_command(command, 1, device="sim:1GiB", progress="off")
    assert any(note.startswith("not written: simulated card (") for note in result.notes)
    assert os.listdir() == []


def test_writes_are_kept_on_request(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-c", "open('x{batch}', 'w')"]
    options = {"memory_fraction": 1.0, "progress": "off"}
    oomprobe.check_command(command, 8, keep_writes=True, **options)
    oomprobe.check_command(command, 9, **options)
    assert os.listdir() == ["x8"]
    with pytest.raises(oomprobe.InvalidArgumentError, match="files without data"):
        oomprobe.check_command(command, 8, keep_writes=True, device="sim:1GiB", **options)


def test_a_users_number_stands_for_a_name_that_is_missing(monkeypatch):
    """As in a container that runs as any user."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("getpass.getuser", Mock(side_effect=KeyError("uid not found")))
    files = TrialFiles(["python"], on_card=False, keeps_writes=False)
    _, variables_of_trial = files.redirected(["python"], Path("/own"))
    assert variables_of_trial["TORCHINDUCTOR_CACHE_DIR"].endswith(f"torchinductor_{os.getuid()}")


FAILURES = {
    "cp: cannot create regular file 'x': Permission denied": ("sim:1GiB", SimulationError, "not written: simulated card"),
    "OSError: [Errno 28] No space left on device": (None, oomprobe.UnreliableError, "set TMPDIR to a folder with more"),
    "PermissionError: [Errno 13] Permission denied: 'x'": (None, oomprobe.StepFailedError, "Permission denied"),
    "FileNotFoundError: [Errno 2] No such file or directory: 'x'": (None, oomprobe.StepFailedError, "only Python finds"),
}  # fmt: skip


@pytest.mark.parametrize("text", FAILURES)
def test_a_failure_of_files_is_no_bug_of_the_script(tmp_path, monkeypatch, text):
    device, error, said = FAILURES[text]
    monkeypatch.chdir(tmp_path)
    command = shell(f"{sys.executable} -c \"open('x', 'w')\"; echo \"{text}\" >&2; exit 1")
    with pytest.raises(error, match=said):
        oomprobe.check_command(command, 8, memory_fraction=1.0, progress="off", device=device)


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (("data",), "user's"),
        (("data", "rb"), "user's"),
        (("data", "a"), "whole"),
        (("data", "r+"), "whole"),
        (("data", "w"), "empty"),
        ((b"data", "wb"), "empty"),
        ((":memory:", "w"), "left alone"),
    ],
)
def test_a_library_gets_the_place_that_its_mode_asks_for(tmp_path, monkeypatch, arguments, place):
    """As h5py, which tests do not install."""
    module, files = load_overlay(), []
    (tmp_path / "data").write_text("kept")
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path)
    overlay = module.Overlay(str(tmp_path / "own"), ())
    overlay.redirected(lambda name, mode="r": files.append(name), 0, "name", "mode")(*arguments)
    copy = tmp_path / f"own/files{tmp_path}/data"
    expected = {"user's": "data", "whole": copy, "empty": copy, "left alone": ":memory:"}
    assert str(files[0]) == str(expected[place])
    if place in ("whole", "empty"):
        assert copy.read_text() == {"whole": "kept", "empty": ""}[place]


@HAS_LANDLOCK
def test_a_bug_long_after_a_refusal_is_the_scripts_own():
    script = "echo 'cache: Permission denied' >&2; seq 100; echo \"KeyError: 'x'\" >&2; exit 1"
    with pytest.raises(oomprobe.StepFailedError, match="KeyError: 'x'"):
        oomprobe.check_command(shell(script), 8, device="sim:1GiB", progress="off")
