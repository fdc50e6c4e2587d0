"""The command line: ``oomprobe run | demo | show | devices``.

The report goes to stdout. Where stdout is for a machine (``--quiet``, ``--json -``), everything for people goes to
stderr. Exit codes: 0 an answer; 1 nothing fits; 2 usage; 3 the step failed; 4 no such device; 5 the size required
does not fit; 6 no number that could be trusted (time limit, leak, lost device); 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

import oomprobe
from oomprobe import errors
from oomprobe.report import trials_table

if TYPE_CHECKING:
    from oomprobe.result import ProbeResult

DEMO_BUDGET = "cpu:384MiB"  # large enough that activations dominate, small enough for two minutes on two cores
INTERRUPTED = 130

_EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (errors.InvalidArgumentError, 2),
    (errors.StepFailedError, 3),
    (errors.NoDeviceError, 4),
    (errors.NothingFitsError, 1),
    (errors.OomProbeError, 6),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except errors.OomProbeError as error:
        return _explain(error, required=getattr(arguments, "require", None) is not None)
    except KeyboardInterrupt as interruption:
        _tell("interrupted", *getattr(interruption, "__notes__", ()))
        return INTERRUPTED


def _run(arguments: argparse.Namespace) -> int:
    machine_reads = arguments.quiet or arguments.json == "-"
    if not arguments.in_process:
        _tell("note: isolated trials are not in this version yet; they run in this process (--in-process)")
    with contextlib.redirect_stdout(sys.stderr) if machine_reads else contextlib.nullcontext():
        result = _probe(arguments)
    if arguments.world_size > 1 or arguments.global_batch:
        plan_options = {"global_batch": arguments.global_batch, "world_size": arguments.world_size}
        result = dataclasses.replace(result, options={**result.options, **plan_options})
    if arguments.json not in (None, "-"):
        result.to_json(arguments.json)
    print(result, file=sys.stderr if machine_reads else sys.stdout)
    if arguments.json == "-":
        _write(sys.stdout, result.to_json())
    elif arguments.quiet:
        _write(sys.stdout, f"{result.batch_size}\n")
    return 0


def _probe(arguments: argparse.Namespace) -> ProbeResult:
    from oomprobe.probe import check, find_max_batch
    from oomprobe.target import build

    common = {
        "device": arguments.device,
        "memory_fraction": arguments.memory_fraction,
        "confirm_steps": arguments.confirm_steps,
        "time_limit_s": arguments.time_limit,
        "progress": arguments.progress,
    }
    if arguments.require is not None:
        model, step_fn = build(arguments.target)
        return check(model, step_fn, arguments.require, **common)
    share = None if arguments.global_batch is None else -(-arguments.global_batch // arguments.world_size)
    model, step_fn = build(arguments.target)
    return find_max_batch(
        model,
        step_fn,
        min_batch=arguments.min_batch,
        max_batch=arguments.max_batch,
        multiple_of=arguments.multiple_of,
        steps=arguments.steps,
        resolution=arguments.resolution,
        trial_time_limit_s=arguments.trial_time_limit,
        journal=arguments.journal,
        global_batch=share,
        **common,
    )


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


def _tell(*lines: str) -> None:
    _write(sys.stderr, "\n".join(lines) + "\n")


def _write(stream: IO[str], text: str) -> None:
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
    run.add_argument("--min-batch", type=int, default=1, metavar="N", help="smallest size to try (1)")
    run.add_argument("--max-batch", type=int, metavar="N", help="largest size to try (no limit)")
    run.add_argument("--multiple-of", type=int, default=1, metavar="N", help="try multiples of this only (1)")
    run.add_argument("--steps", type=int, default=2, metavar="N", help="full steps in a trial (2)")
    run.add_argument("--confirm-steps", type=int, default=5, metavar="N", help="full steps to confirm the answer (5)")
    run.add_argument("--resolution", type=float, default=0.0, metavar="F", help="stop within this fraction (0: exact)")
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
