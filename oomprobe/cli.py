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
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from oomprobe import errors
from oomprobe.arguments import SEARCH_OPTIONS, check_run, parser
from oomprobe.exits import UNTRUSTED, explain
from oomprobe.streams import stdout_kept, tell, write
from oomprobe.units import format_bytes

if TYPE_CHECKING:
    from oomprobe.result import ProbeResult

DEMO_CARD = "sim:H100-80GB"
DEMO_BUDGET = "cpu:384MiB"  # large enough that activations dominate, small enough for two minutes on two cores


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = parser().parse_args(argv)
    arguments.owns_process = argv is None
    try:
        return _COMMANDS[arguments.command](arguments)
    except BaseException as error:
        return explain(error, required=getattr(arguments, "require", None) is not None)


def _run(arguments: argparse.Namespace) -> int:
    check_run(arguments)
    saved_at = None if arguments.json in (None, "-") else Path(arguments.json).absolute()  # a step may change folder
    machine_reads = arguments.quiet or arguments.json == "-"
    isolate = not arguments.in_process
    if isolate and sys.platform != "linux":
        tell("note: trials can be isolated on Linux only; they run in this process (--in-process)")
        isolate = False
    keeping = stdout_kept(for_good=arguments.owns_process) if machine_reads else contextlib.nullcontext(sys.stdout)
    with keeping as stdout:
        result = _probe(arguments, isolate=isolate)
        if arguments.world_size > 1 or arguments.global_batch:
            plan_options = {"global_batch": arguments.global_batch, "world_size": arguments.world_size}
            result = dataclasses.replace(result, options={**result.options, **plan_options})
        write(sys.stderr if machine_reads else stdout, f"{result}\n")
        if arguments.json == "-":
            write(stdout, result.to_json())
        elif arguments.quiet and not result.contaminated:
            write(stdout, f"{result.batch_size}\n")
    if saved_at is not None:
        _save(result, saved_at)
    if arguments.quiet and result.contaminated:
        tell("oomprobe: no plain number, for others on the device kept moving its memory; see the notes above")
        return UNTRUSTED
    return 0


def _save(result: ProbeResult, path: Path) -> None:
    try:
        result.to_json(path)
    except OSError as error:
        raise errors.InvalidArgumentError(f"--json {str(path)!r} cannot be written: {error}") from None


def _probe(arguments: argparse.Namespace, *, isolate: bool) -> ProbeResult:
    from oomprobe.by_name import check_target, probe_target

    common = {
        "isolate": isolate,
        "device": arguments.device,
        "memory_fraction": arguments.memory_fraction,
        "confirm_steps": arguments.confirm_steps,
        "time_limit_s": arguments.time_limit,
        "progress": arguments.progress,
    }
    if arguments.require is not None:
        return check_target(arguments.target, arguments.require, **common)
    options = {name: getattr(arguments, option) for option, name in SEARCH_OPTIONS.items()}
    given = {name: value for name, value in options.items() if value is not None}
    if "global_batch" in given:
        given["global_batch"] = -(-arguments.global_batch // arguments.world_size)
    return probe_target(arguments.target, **given, **common)


def _demo(arguments: argparse.Namespace) -> int:
    from oomprobe import demo
    from oomprobe.probe import find_max_batch

    device = None if demo.demo_device().type != "cpu" else DEMO_BUDGET
    for title, build in (("a convolutional net", demo.conv_net), ("a small GPT", demo.small_gpt)):
        print(f"--- {title}, real training steps ---\n", flush=True)  # noqa: T201
        model, step_fn = build()
        print(find_max_batch(model, step_fn, device=device, progress=arguments.progress), flush=True)  # noqa: T201
        if device is not None:
            card = find_max_batch(model, step_fn, device=DEMO_CARD, progress="off")
            print(f"and on an H100 this model would take batch {card.batch_size} (simulated)\n", flush=True)  # noqa: T201
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
    from oomprobe.simulation.cards import CARDS

    for device in list_devices():
        print(describe_device(device))  # noqa: T201
    print("\nsimulated, whether the card is here or not (sim:24GiB states the allocator's memory itself):")  # noqa: T201
    for card in CARDS:
        print(f"sim:{card.name:18}  {format_bytes(card.available_bytes)} of {format_bytes(card.total_bytes)}")  # noqa: T201
    return 0


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": _run,
    "demo": _demo,
    "show": _show,
    "devices": _devices,
}
