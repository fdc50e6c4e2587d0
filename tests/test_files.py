"""Files that are written whole or not at all, and read only as far as they can be one."""

import json
import math
import os
import pickle
import re
import resource
import stat
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import a_result, page_of

from oomprobe.cli import main
from oomprobe.errors import InvalidArgumentError
from oomprobe.explaining import PeakMonitor, explain
from oomprobe.records.files import read_file, write_file
from oomprobe.results.result import ProbeResult
from oomprobe.results.table import ProbeTable, read_result

pytestmark = pytest.mark.usefixtures("warm_python")

OLD, NEW = b"old" * 1000, b"new" * 2000


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "result.json"
    path.write_bytes(OLD)
    return path


@contextmanager
def limited_to(nbytes):
    """Let no file of this process grow larger, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# --- written whole, or not at all ---


@pytest.mark.parametrize("fault", [OSError(28, "full"), KeyboardInterrupt()])
@pytest.mark.parametrize("name", ["fsync", "chmod", "replace"])
def test_what_goes_wrong_leaves_the_old_file_and_no_part(path, monkeypatch, name, fault):
    def fails(*arguments):
        raise fault

    monkeypatch.setattr(os, name, fails)
    wanted = KeyboardInterrupt if isinstance(fault, KeyboardInterrupt) else InvalidArgumentError
    with pytest.raises(wanted) as raised:
        write_file(path, NEW)
    assert (path.read_bytes(), [*path.parent.iterdir()]) == (OLD, [path])
    if wanted is InvalidArgumentError:
        assert str(raised.value).startswith(f"{path} cannot be written: full; a file that was")


@pytest.mark.parametrize("old", [None, b"old"])
@pytest.mark.parametrize("write", ["to_json", "to_html", "plot", "--html", "--json"])
def test_a_full_disk_leaves_what_was_there(tmp_path, capsys, write, old):
    target, log = tmp_path / "probe.svg", tmp_path / "log"
    result, log_text = a_result(), "CUDA out of memory. Tried to allocate 2.00 GiB"
    result.to_json(tmp_path / "saved.json")
    log.write_text(log_text)
    if old is not None:
        target.write_bytes(old)
    before = {*tmp_path.iterdir()}
    if not write.startswith("--"):
        with (
            limited_to(512),
            pytest.raises(InvalidArgumentError, match="svg cannot be written: File"),
        ):
            getattr(result, write)(target)
    else:
        words = {"--html": ["show", str(tmp_path / "saved.json")], "--json": ["explain", str(log)]}
        with limited_to(512):
            assert main([*words[write], write, str(target)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"oomprobe: {target} cannot be written: File too large; ")
        assert "wrote" not in said
    assert {*tmp_path.iterdir()} == before
    assert old is None or target.read_bytes() == old


def test_a_disk_that_is_really_full(tmp_path):
    mounted = ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mounted, capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        (tmp_path / "result.json").write_bytes(OLD)
        with pytest.raises(InvalidArgumentError, match=r"No space left on device; .* 40.00 KiB"):
            write_file(tmp_path / "result.json", b"x" * 40 * 1024)
        assert [entry.read_bytes() for entry in tmp_path.iterdir()] == [OLD]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_reader_never_meets_half_a_file(path):
    texts = {OLD, *(letter * 200_000 for letter in (b"a", b"b"))}

    def writes(text):
        for _ in range(100):
            write_file(path, text)

    writers = [threading.Thread(target=writes, args=(text,)) for text in texts - {OLD}]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert path.read_bytes() in texts
    assert [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o4755, None])
def test_the_mode_is_that_of_a_plain_write(path, mode):
    if mode is None:
        path.unlink()
        (path.parent / "plain").write_bytes(NEW)
        mode = stat.S_IMODE((path.parent / "plain").stat().st_mode)
    else:
        path.chmod(mode)
    write_file(path, NEW)
    assert (stat.S_IMODE(path.stat().st_mode), path.read_bytes()) == (mode, NEW)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_the_owner_stays(path):
    os.chown(path, 12, 34)
    write_file(path, NEW)
    assert (path.stat().st_uid, path.stat().st_gid) == (12, 34)


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_followed_and_stays(path, tmp_path, exists):
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link"
    link.symlink_to("../result.json")
    if not exists:
        path.unlink()
    write_file(link, NEW)
    assert (link.readlink(), path.read_bytes()) == (Path("../result.json"), NEW)
    assert [*link.parent.iterdir()] == [link]


def test_a_device_is_written_as_it_is(tmp_path):
    write_file("/dev/null", NEW)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(InvalidArgumentError, match="/dev/full cannot be written: No space"):
        write_file("/dev/full", NEW)
    fifo, read = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: read.append(fifo.read_bytes()))
    reader.start()
    write_file(fifo, NEW)
    reader.join()
    assert (read, stat.S_ISFIFO(fifo.stat().st_mode)) == ([NEW], True)


@pytest.mark.parametrize("opened", ["| cat >", ">>"])
def test_stdout_by_name_goes_where_the_report_goes(tmp_path, opened):
    (tmp_path / "log").write_text("Tried to allocate 2.00 GiB")
    words = f"{sys.executable} -m oomprobe explain log --json /dev/stdout"
    subprocess.run(
        f"({words}; echo the end) {opened} out",
        shell=True,
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    said = (tmp_path / "out").read_text()
    assert '"requested_bytes": 2147483648' in said
    assert "the end" in said


def test_a_file_that_is_read_only_is_refused_before_the_probe(path, capsys, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith(".json"))
    with pytest.raises(SystemExit):
        main(["run", "train.py:build", "--json", str(path)])
    monkeypatch.setattr(os, "access", lambda path, mode: str(path).endswith(".json"))
    with pytest.raises(SystemExit):
        main(["run", "train.py:build", "--json", str(path)])
    assert capsys.readouterr().err.count("result.json' cannot be written") == 2


def test_explain_names_the_file_that_it_wrote(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("log").write_text("Tried to allocate 2.00 GiB")
    assert main(["explain", "log", "--json", "why.json"]) == 0
    assert capsys.readouterr().err == "wrote why.json\n"
    assert json.loads(Path("why.json").read_text())["requested_bytes"] == 2**31


@pytest.mark.parametrize("name", ["probe", "probe.xyz"])
def test_a_plot_names_its_format(tmp_path, name):
    with pytest.raises(InvalidArgumentError, match=f"the plot {name}: let the name end in .png"):
        a_result().plot(tmp_path / name)
    assert [*tmp_path.iterdir()] == []


# --- read only as far as they can be one ---


READERS = {
    "show": lambda path: main(["show", str(path)]),
    "compare": lambda path: main(["compare", str(path), str(path)]),
    "explain": lambda path: main(["explain", str(path)]),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "kind", ["folder", "zero", "fifo", "link", "huge", "deep", "number", "text"]
)
def test_what_is_no_result_ends_in_a_sentence(tmp_path, capsys, reader, kind):
    path = tmp_path / "file"
    match kind:
        case "folder":
            path.mkdir()
        case "zero":
            path = Path("/dev/zero")
        case "link":
            path.symlink_to("/dev/zero")
        case "fifo":
            os.mkfifo(path)
        case "huge":
            with open(path, "wb") as file:
                file.truncate(2**31)
        case "deep":
            path.write_text(100_000 * "[")
        case "number":
            path.write_text(f'{{"schema_version": 1, "batch_size": {5000 * "9"}}}')
        case "text":
            path.write_bytes(b"\xff\xfe\x00")
    assert READERS[reader](path) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"oomprobe: {path} cannot be ")
    if kind == "huge":
        assert "it is larger than " in said


def test_a_pipe_is_read_to_the_limit():
    reading, writing = os.pipe()
    os.write(writing, 101 * b"x")  # and it stays open: nobody waits for more
    with pytest.raises(InvalidArgumentError, match=r"larger than 100 B: less"):
        read_file(f"/dev/fd/{reading}", 100, "less")
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("name", ["/dev/stdin", "<(cat {})"])
def test_what_is_piped_is_read(tmp_path, name):
    saved = tmp_path / "saved.json"
    a_result().to_json(saved)
    command = f"{sys.executable} -m oomprobe show {name.format(saved)} < <(cat {saved})"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("verdict: batch 4 fits")


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("batch_size",), None, "batch_size is null, not a batch size"),
        (("batch_size",), 0, "batch_size is 0, not a batch size"),
        (("budget_bytes",), True, "budget_bytes is true, not a number of bytes"),
        (("trials", 1, "peak_reserved_bytes"), "x", 'trials[1].peak_reserved_bytes is "x", not'),
        (("trials", 1, "verdict"), "good", 'trials[1].verdict is "good", not one of fits, out of'),
        (("trials",), {}, "trials is an object, not a list"),
        (("fit", "r_squared"), math.nan, "fit.r_squared is NaN, not a number"),
        (("elapsed_s",), 10**400, "elapsed_s is 1000000000"),
        (("options",), {"a\x1b": [math.inf]}, r"options.a\x1b[0] is Infinity, not a number"),
        (("options",), {"multiple_of": 0}, "options.multiple_of is 0, not a batch size"),
        (("environment",), {"command": ["a"]}, "environment.command is a list, not a text"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(tmp_path, place, value, said):
    data = a_result().to_dict()
    part = data
    for step in place[:-1]:
        part = part[step]
    part[place[-1]] = value
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(data))
    for read in (read_result, PeakMonitor):
        with pytest.raises(InvalidArgumentError) as raised:
            read(path)
        assert str(raised.value).startswith(
            f"{path}: this is not a result that oomprobe wrote: {said}"
        )
    table = ProbeTable(axis="length", rows={8: a_result()}).to_dict()
    table["rows"][0]["result"] = data
    with pytest.raises(InvalidArgumentError) as raised:
        ProbeTable.from_dict(table)
    assert f"rows[0].result.{said}" in str(raised.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"segments": [{"device": 2**40}]}, "segments[0]: "),
        ({"device_traces": [[], [{"action": "alloc", "addr": 0, "size": 2**61, "stream": 0}]]},
         "device_traces[1][0]: ValueError('size is 2305843009213693952')"),
        ({"device_traces": [[]] * 2000}, "it has 2000 device_traces"),
    ],
)  # fmt: skip
def test_a_wrong_value_of_a_snapshot_is_named_with_its_place(tmp_path, change, said):
    path = tmp_path / "snapshot"
    path.write_bytes(pickle.dumps({"segments": [], **change}, protocol=4))
    with pytest.raises(InvalidArgumentError, match=re.escape(said)):
        explain(path)


def test_a_request_that_no_card_could_serve_is_explained_without_a_replay(tmp_path):
    path = tmp_path / "snapshot"
    refused = {"action": "oom", "device_free": 2**30, "size": 2**61, "stream": 0, "frames": []}
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[refused]]}, protocol=4))
    explanation = explain(path)
    assert (explanation.cause, explanation.requested_bytes) == ("live", 2**61)
    assert "Not replayed: it takes more than 2.00 TiB, which no card has." in explanation.notes


def test_a_result_without_trials_has_a_page():
    assert "no trial was run" in page_of(a_result(trials=(), fit=None))


def test_a_page_shows_what_a_browser_would_obey():
    page = page_of(a_result(notes=("a\u202eb\x1b[31m\x07", "gr\u00f6\u00dfer")))
    assert r"a\u202eb\x1b[31m\x07" in page
    assert "gr\u00f6\u00dfer" in page


def test_lists_that_would_take_minutes_to_show_are_refused():
    data = a_result().to_dict()
    data["trials"] *= 4000
    with pytest.raises(InvalidArgumentError, match="trials has 12,000 items, more than 10,000"):
        ProbeResult.from_dict(data)
    table = ProbeTable(axis="length", rows=dict.fromkeys(range(1001))).to_dict()
    with pytest.raises(InvalidArgumentError, match="rows has 1,001 items, more than 1,000"):
        ProbeTable.from_dict(table)
