"""The command line on CUDA, with forked workers; test_ranks.py starts it as a user does."""

import contextlib
import io
import json

from bed import forked
from zoo import target

from oomprobe.cli import main

from .ranks import forking


def typed(*words, memory="1GiB"):
    """Return exit status and stdout of `oomprobe ...` on the bed."""

    def run():
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            return main(words), stdout.getvalue()

    return forked(forking, run, memory=memory, limit_s=120)


def test_devices():
    status, stdout = typed("devices", memory="1GiB,24GiB")
    assert status == 0
    assert [line.split("  ")[:3] for line in stdout.splitlines()[:2]] == [
        ["cuda:0", "Stub GPU", "1.00 GiB"],
        ["cuda:1", "Stub GPU", "24.00 GiB"],
    ]


def test_run(tmp_path):
    at = tmp_path / "result.json"
    options = ["--start-batch=64", "--resolution=0.2", f"--json={at}", "--breakdown"]
    status, stdout = typed("run", target(tmp_path, name="gpt"), *options)
    result = json.loads(at.read_text())
    assert status == 0
    assert f"batch {result['batch_size']} fits" in stdout
    assert (result["limited_by"], result["environment"]["isolated"]) == ("memory", True)
    assert "where the memory went" in stdout
    assert result["breakdown"]["peak_reserved_bytes"] == result["trials"][-1]["peak_reserved_bytes"]
