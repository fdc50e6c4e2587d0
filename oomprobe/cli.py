"""The command line: ``oomprobe run | demo | show | devices``.

The report goes to stdout. Where stdout is for a machine (``--quiet``, ``--json -``), everything for people goes to
stderr, also what the target writes to the file descriptor. Exit codes: 0 an answer; 1 nothing fits; 2 usage; 3 the
target or its step failed, or called ``sys.exit``; 4 no such device; 5 the size required does not fit; 6 no number that
could be trusted (time limit, leak, lost device); 70 an error nobody foresaw, with its traceback; 130 interrupted
(Ctrl-C); 143 terminated (SIGTERM).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING

import oomprobe
from oomprobe import errors
from oomprobe.report import trials_table
from oomprobe.scope import scope

if TYPE_CHECKING:
    import torch

    from oomprobe.options import StepFn
    from oomprobe.result import ProbeResult

DEMO_BUDGET = "cpu:384MiB"  # large enough that activations dominate, small enough for two minutes on two cores
STEP_FAILED, UNFORESEEN, INTERRUPTED = 3, 70, 130
# Options of a search, by their names in `find_max_batch`: what --require runs is no search and would ignore them.
_SEARCH_OPTIONS = {
    "min_batch": "min_batch",
    "max_batch": "max_batch",
    "multiple_of": "multiple_of",
    "steps": "steps",
    "resolution": "resolution",
    "trial_time_limit": "trial_time_limit_s",
    "global_batch": "global_batch",
    "journal": "journal",
}

_EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (errors.InvalidArgumentError, 2),
    (errors.StepFailedError, STEP_FAILED),
    (errors.NoDeviceError, 4),
    (errors.NothingFitsError, 1),
    (errors.OomProbeError, 6),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = _parser().parse_args(argv)
    arguments.owns_process = argv is None
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except errors.OomProbeError as error:
        return _explain(error, required=getattr(arguments, "require", None) is not None)
    except KeyboardInterrupt as interruption:
        _tell("interrupted", *getattr(interruption, "__notes__", ()))
        return INTERRUPTED
    except SystemExit as leaving:
        return _explain_exit(leaving)
    except BaseException as error:
        _tell("".join(traceback.format_exception(error)).rstrip())
        _tell(f"oomprobe: {type(error).__name__}, which nobody foresaw; no answer")
        return UNFORESEEN


def _run(arguments: argparse.Namespace) -> int:
    _check_run(arguments)
    machine_reads = arguments.quiet or arguments.json == "-"
    if not arguments.in_process:
        _tell("note: isolated trials are not in this version yet; they run in this process (--in-process)")
    keeping = _stdout_kept(for_good=arguments.owns_process) if machine_reads else contextlib.nullcontext(sys.stdout)
    with keeping as stdout:
        result = _probe(arguments)
        if arguments.world_size > 1 or arguments.global_batch:
            plan_options = {"global_batch": arguments.global_batch, "world_size": arguments.world_size}
            result = dataclasses.replace(result, options={**result.options, **plan_options})
        _write(sys.stderr if machine_reads else stdout, f"{result}\n")
        if arguments.json == "-":
            _write(stdout, result.to_json())
        elif arguments.quiet:
            _write(stdout, f"{result.batch_size}\n")
    if arguments.json not in (None, "-"):
        _save(result, arguments.json)
    return 0


def _check_run(arguments: argparse.Namespace) -> None:
    """Refuse before the target is built what would fail, or be ignored, after minutes of probing."""
    from oomprobe.options import check_size

    check_size("--world-size", arguments.world_size)
    for option in ("global_batch", "require"):
        if getattr(arguments, option) is not None:
            check_size(_flag(option), getattr(arguments, option))
    ignored = [_flag(option) for option in _SEARCH_OPTIONS if getattr(arguments, option) is not None]
    if arguments.require is not None and ignored:
        raise errors.InvalidArgumentError(
            f"--require runs one size and no search, so it would ignore {', '.join(ignored)}: leave that out"
        )
    if arguments.json not in (None, "-"):
        path = Path(arguments.json)
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise errors.InvalidArgumentError(
                f"--json {arguments.json!r} cannot be written: name a file in a folder that exists and may be written to"
            )


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _save(result: ProbeResult, path: str) -> None:
    try:
        result.to_json(path)
    except OSError as error:
        raise errors.InvalidArgumentError(f"--json {path!r} cannot be written: {error}") from None


@scope
def _stdout_kept(*, for_good: bool) -> Iterator[IO[str]]:
    """Give stdout to the answer alone: what anybody else writes to it, or to its descriptor, goes to stderr.

    Args:
        for_good: For the rest of the process too, where C libraries flush and ``atexit`` functions print.
    """
    stdout, kept = sys.stdout, None
    try:
        stdout.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
    except (AttributeError, OSError):  # there is no stdout or no stderr
        pass
    is_descriptor = kept is not None and _is_descriptor_1(stdout)
    answers = os.fdopen(os.dup(kept), "w", encoding="utf-8") if kept is not None and is_descriptor else stdout
    sys.stdout = sys.stderr
    try:
        yield answers
    finally:
        if answers is not stdout:
            answers.close()
        if not for_good:
            sys.stdout = stdout
            if kept is not None:
                os.dup2(kept, 1)
        if kept is not None:
            os.close(kept)


def _is_descriptor_1(stream: IO[str]) -> bool:
    try:
        return stream.fileno() == 1
    except (AttributeError, OSError, ValueError):  # a stream that tests put there
        return False


def _build(target: str) -> tuple[torch.nn.Module, StepFn]:
    from oomprobe.target import build

    try:
        return build(target)
    except (errors.OomProbeError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        error.with_traceback(_users_part(error.__traceback__))
        raise errors.target_failed(error, target) from error


def _users_part(frames: TracebackType | None) -> TracebackType | None:
    """Without the frames of this package and of the import machinery that come before the user's own."""
    here = f"{Path(__file__).parent}{os.sep}"
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(
        (here, "<frozen importlib", importlib.__file__)
    ):
        frames = frames.tb_next
    return frames


def _probe(arguments: argparse.Namespace) -> ProbeResult:
    from oomprobe.probe import check, find_max_batch

    common = {
        "device": arguments.device,
        "memory_fraction": arguments.memory_fraction,
        "confirm_steps": arguments.confirm_steps,
        "time_limit_s": arguments.time_limit,
        "progress": arguments.progress,
    }
    if arguments.require is not None:
        model, step_fn = _build(arguments.target)
        return check(model, step_fn, arguments.require, **common)
    options = {name: getattr(arguments, option) for option, name in _SEARCH_OPTIONS.items()}
    given = {name: value for name, value in options.items() if value is not None}
    if "global_batch" in given:
        given["global_batch"] = -(-arguments.global_batch // arguments.world_size)
    model, step_fn = _build(arguments.target)
    return find_max_batch(model, step_fn, **given, **common)


def _demo(arguments: argparse.Namespace) -> int:
    from oomprobe import demo
    from oomprobe.probe import find_max_batch

    device = None if demo.demo_device().type != "cpu" else DEMO_BUDGET
    for title, build in (("a convolutional net", demo.conv_net), ("a small GPT", demo.small_gpt)):
        print(f"--- {title}, real training steps ---\n", flush=True)  # noqa: T201
        model, step_fn = build()
        print(find_max_batch(model, step_fn, device=device, progress=arguments.progress), flush=True)  # noqa: T201
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from oomprobe.result import ProbeResult

    try:
        data = json.loads(Path(arguments.result).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise errors.InvalidArgumentError(f"{arguments.result} cannot be read as a result: {error}") from None
    if not isinstance(data, dict):
        raise errors.InvalidArgumentError(f"{arguments.result} is JSON, but not a result that oomprobe wrote")
    print(ProbeResult.from_dict(data))  # noqa: T201
    return 0


def _devices(arguments: argparse.Namespace) -> int:
    from oomprobe.devices.choose import describe_device, list_devices

    for device in list_devices():
        print(describe_device(device))  # noqa: T201
    return 0


def _explain(error: errors.OomProbeError, *, required: bool) -> int:
    if error.trials:
        _tell(trials_table(error.trials))
    if isinstance(error, errors.StepFailedError) and error.__cause__ is not None:
        _tell("".join(traceback.format_exception(error.__cause__)).rstrip())
    _tell(f"oomprobe: {error}")
    if required and isinstance(error, errors.NothingFitsError):
        return 5
    return next(code for kind, code in _EXIT_CODES if isinstance(error, kind))


def _explain_exit(leaving: SystemExit) -> int:
    """A target that leaves has given no answer, whatever code it left with."""
    from oomprobe.interrupts import EXIT_TERMINATED

    notes = getattr(leaving, "__notes__", ())
    if leaving.code == EXIT_TERMINATED:
        _tell("terminated", *notes)
        return EXIT_TERMINATED
    frames = traceback.extract_tb(leaving.__traceback__)
    place = f" in {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    _tell(
        *notes,
        f"oomprobe: the target or its step left the process, sys.exit({leaving.code!r}){place}: no answer. "
        "Take the call out; a target that reads sys.argv must not: those are the arguments of oomprobe",
    )
    return STEP_FAILED


def _tell(*lines: str) -> None:
    _write(sys.stderr, "\n".join(lines) + "\n")


def _write(stream: IO[str] | None, text: str) -> None:
    if stream is not None:  # Python's own where a shell closed it
        stream.write(text)
        stream.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="oomprobe", description="Find the largest batch size that truly fits, by running it."
    )
    parser.add_argument("--version", action="version", version=f"oomprobe {oomprobe.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands.add_parser("run", help="probe a target: path/to/train.py:build, which returns (model, step_fn)"))
    demo = commands.add_parser("demo", help="probe two small models with real training steps")
    _add_progress(demo)
    demo.set_defaults(command=_demo)
    show = commands.add_parser("show", help="print a result that was saved as JSON")
    show.add_argument("result", metavar="RESULT.json")
    show.set_defaults(command=_show)
    devices = commands.add_parser("devices", help="list what can be probed")
    devices.set_defaults(command=_devices)
    return parser


def _add_run(run: argparse.ArgumentParser) -> None:
    run.add_argument("target", metavar="TARGET", help="module:function or path/to/file.py:function")
    run.add_argument("--device", help="cuda, cuda:1, xpu, mps, cpu, cpu:4GiB (default: where the model is)")
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
    run.add_argument("--journal", metavar="PATH", help="not in this version yet")
    run.add_argument("--in-process", action="store_true", help="run trials in this process")
    run.add_argument("--json", metavar="PATH", help="write the result as JSON; - for stdout")
    run.add_argument("--quiet", action="store_true", help="print the batch size alone on stdout")
    _add_progress(run)
    run.set_defaults(command=_run)


def _add_progress(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--progress", choices=("auto", "plain", "off"), default="auto", help="on stderr (auto)")
