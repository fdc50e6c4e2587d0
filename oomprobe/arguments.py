"""The arguments of the command line, and which of them do not go together."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import oomprobe
from oomprobe.errors import InvalidArgumentError

# Options of a search, by their names in `find_max_batch`: what --require runs is no search and would ignore them.
SEARCH_OPTIONS = {
    "min_batch": "min_batch",
    "max_batch": "max_batch",
    "multiple_of": "multiple_of",
    "steps": "steps",
    "resolution": "resolution",
    "trial_time_limit": "trial_time_limit_s",
    "global_batch": "global_batch",
}


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; ``command`` is the name of the command."""
    whole = argparse.ArgumentParser(
        prog="oomprobe", description="Find the largest batch size that truly fits, by running it."
    )
    whole.add_argument("--version", action="version", version=f"oomprobe {oomprobe.__version__}")
    commands = whole.add_subparsers(required=True, metavar="COMMAND", dest="command")
    _add_run(commands.add_parser("run", help="probe a target: path/to/train.py:build, which returns (model, step_fn)"))
    _add_progress(commands.add_parser("demo", help="probe two small models with real training steps"))
    show = commands.add_parser("show", help="print a result that was saved as JSON")
    show.add_argument("result", metavar="RESULT.json")
    commands.add_parser("devices", help="list what can be probed")
    return whole


def _add_run(run: argparse.ArgumentParser) -> None:
    run.add_argument("target", metavar="TARGET", help="module:function or path/to/file.py:function")
    run.add_argument(
        "--device",
        help="cuda, cuda:1, cuda:8GiB, xpu, mps, cpu, cpu:4GiB, sim:24GiB, sim:H100-80GB (default: where the model is)",
    )
    run.add_argument("--memory-fraction", type=float, default=0.9, metavar="F", help="share of the memory (0.9)")
    run.add_argument("--min-batch", type=int, metavar="N", help="smallest size to try (1)")
    run.add_argument("--max-batch", type=int, metavar="N", help="largest size to try (no limit)")
    run.add_argument("--multiple-of", type=int, metavar="N", help="try multiples of this only (1)")
    run.add_argument("--steps", type=int, metavar="N", help="full steps in a trial (2)")
    run.add_argument("--confirm-steps", type=int, default=5, metavar="N", help="full steps to confirm the answer (5)")
    run.add_argument("--resolution", type=float, metavar="F", help="stop within this fraction (0: exact)")
    run.add_argument("--time-limit", type=float, metavar="S", help="seconds for the whole probe")
    run.add_argument("--trial-time-limit", type=float, metavar="S", help="seconds for one trial")
    run.add_argument("--global-batch", type=int, metavar="N", help="plan gradient accumulation for it")
    run.add_argument("--world-size", type=int, default=1, metavar="N", help="ranks that share the global batch (1)")
    run.add_argument("--require", type=int, metavar="N", help="only check that N survives; exit 5 when not")
    run.add_argument("--in-process", action="store_true", help="run trials in this process")
    run.add_argument("--json", metavar="PATH", help="write the result as JSON; - for stdout")
    run.add_argument("--quiet", action="store_true", help="print the batch size alone on stdout")
    _add_progress(run)


def _add_progress(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--progress", choices=("auto", "plain", "off"), default="auto", help="on stderr (auto)")


def check_run(arguments: argparse.Namespace) -> None:
    """Refuse before the target is built what would fail, or be ignored, after minutes of probing."""
    from oomprobe.options import check_size

    check_size("--world-size", arguments.world_size)
    for option in ("global_batch", "require"):
        if getattr(arguments, option) is not None:
            check_size(_flag(option), getattr(arguments, option))
    ignored = [_flag(option) for option in SEARCH_OPTIONS if getattr(arguments, option) is not None]
    if arguments.require is not None and ignored:
        raise InvalidArgumentError(
            f"--require runs one size and no search, so it would ignore {', '.join(ignored)}: leave that out"
        )
    if arguments.json not in (None, "-"):
        path = Path(arguments.json)
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise InvalidArgumentError(
                f"--json {arguments.json!r} cannot be written: name a file in a folder that exists and may be written to"
            )


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"
