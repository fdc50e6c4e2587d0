"""The command line: ``oomprobe run | demo | show | compare | explain | devices``.

The report goes to stdout. If a machine reads stdout (``--quiet``, ``--json -``), everything else goes to stderr,
including what the target writes to file descriptor 1. `oomprobe.errors.EXIT_STATUSES` says what each exit status means.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, NoReturn

from oomprobe import errors
from oomprobe.errors import InvalidArgumentError
from oomprobe.ground.units import format_bytes
from oomprobe.ground.version import __version__
from oomprobe.ground.words import WIDTH, did_you_mean, visible
from oomprobe.probing.order import Order
from oomprobe.records.axis import CARDS
from oomprobe.records.epoch import Epoch, read_numbers, tokens_of
from oomprobe.records.files import is_writable, write_file
from oomprobe.records.options import Options
from oomprobe.results.blocks import Block, as_text, block_lines
from oomprobe.results.plot import NO_FORMAT, new_figure
from oomprobe.results.result import ProbeResult
from oomprobe.results.table import ProbeTable, read_result
from oomprobe.results.trials import trials_table
from oomprobe.runners.targets import name_of

STDOUT = Path("-")
LEAST_COLUMNS = 40  # of a report on a terminal
DEMO_CARD = "sim:H100-80GB"
DEMO_BUDGET = "cpu:256MiB"  # large enough for activations to dominate, small enough for half a minute on two cores


NO_TARGET = (
    "name what to probe: oomprobe run path/to/train.py:build, or a command after two dashes: "
    "oomprobe run -- python train.py --batch-size {batch}"
)
A_SCRIPT = ": to probe a script, type oomprobe run -- python {script} --batch-size {{batch}}"
NO_DASHES = " If it is part of a command, put two dashes before the command: oomprobe run [options] -- python train.py --batch-size {batch}"
WITH_COMMAS = "write --over as the argument of the step and its values: --over length=512,1024,2048, not {text} (tuples: only from Python)"
TWO_TARGETS = "a target ({target}) and a command were given: leave one out. Options of oomprobe stand before the two dashes"
WITH_FILES = (
    "write --epoch as arguments of the step and files: --epoch length=lengths.txt, not {text}"
)
OF_EPOCHS = ("epoch", "draw", "tokens", "packed", "orders", "calls")
ONE_EPOCH = "--draw, --packed, --orders and --calls are about an epoch: add --epoch NAME=FILE, or --tokens FILE, and not both"
OF_ANOTHER = "--draw is for --epoch, and --packed for --tokens"
RANKS_TWICE = "--nproc-per-node says how many ranks there are, so --world-size cannot be given too: leave it out"
CONTAMINATED = (
    "no number printed: other processes kept changing the device's memory; see the notes above"
)


SPELLED = {"isolate": "--in-process", "batch_size": "--require"}  # flags with names of their own
OF_A_SIZE = ": --require N checks one size, and --start-batch N begins the search there"
OF_A_GPU = ": --device sim:RTX-4090 simulates a GPU, and --device cuda:1 is one that is here"
OF_RANKS = ": --nproc-per-node N runs a target on N GPUs; before a command, type torchrun"
MEANT = {
    "--batch": OF_A_SIZE,
    "--batch-size": OF_A_SIZE,
    "--bs": OF_A_SIZE,
    "--card": OF_A_GPU,
    "--gpu": OF_A_GPU,
    "--gpus": OF_RANKS,
    "--num-gpus": OF_RANKS,
}
LEFT = (
    "oomprobe: the target or its step left the process, sys.exit({code!r}){place}: no answer. A "
    "target is a function that only builds the model and its step. If this is your whole script, "
    "which reads its arguments, probe the script:\n"
    "  oomprobe run -- python {script} --batch-size {{batch}}\n"
    "If only its file reads them, do so under if __name__ == '__main__'"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    whole, command = parser(), None  # the command that follows two dashes, if one does
    if not words:
        whole.print_help(sys.stderr)
        return InvalidArgumentError.exit_status
    if words[0] not in (known := [*COMMANDS, "-h", "--help", "--version"]):
        meant = did_you_mean(words[0], known)
        if words[0].endswith(".py"):
            meant = A_SCRIPT.format(script=shlex.join(words))
        elif ":" in words[0]:
            meant = f"; did you mean oomprobe run {words[0]}?"
        whole.error(f"there is no command {words[0]!r}{meant}")
    if words[0] == "run" and "--" in words:
        place = words.index("--")
        words, command = words[:place], words[place + 1 :]
    arguments, unknown = whole.parse_known_args(words)
    if unknown:
        _refuse_words(unknown, words[0], arguments.parser)
    arguments.command, arguments.owns_process = command, argv is None
    try:
        return int(arguments.act(arguments))
    except BrokenPipeError:  # the reader of the output, such as head, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # because Python flushes stdout again at exit
        return 0
    except BaseException as error:
        return explain(error, arguments)


def _refuse_words(unknown: Sequence[str], command: str, own: argparse.ArgumentParser) -> NoReturn:
    """End with the error that some words mean nothing to a command, whose own parser is given."""
    option = next((word.partition("=")[0] for word in unknown if word.startswith("-")), "")
    if not option or "{batch}" in " ".join(unknown):
        hint = NO_DASHES if command == "run" else ""
        own.error(f"what is {' '.join(unknown)}?{hint}")
    options = re.findall(r"--[a-z-]+", own.format_help())
    if option in options and option not in MEANT:
        own.error(
            f"there is no option {option} here; oomprobe {command} --help says which command has it"
        )
    meant = MEANT.get(option) or did_you_mean(option, options)
    own.error(f"there is no option {option}{meant}")


def _run(arguments: argparse.Namespace) -> int:
    options = check_run(arguments)
    keeping: contextlib.AbstractContextManager[IO[str] | None] = contextlib.nullcontext(sys.stdout)
    machine_reads = arguments.quiet or arguments.json == STDOUT
    if machine_reads:
        keeping = stdout_kept(for_good=arguments.owns_process)
    with keeping as stdout:
        try:
            probed = _probe(arguments, options)
        except errors.OomProbeError as error:
            if isinstance(error.table, ProbeTable):  # the rows that were finished
                _save(error.table, arguments)
            raise
        # Such an answer has no number that a script could take for the truth: it is explained, even to one that asks for silence.
        is_contaminated = any(result.contaminated for result in _results(probed))
        if is_contaminated or not arguments.quiet:
            stream = sys.stderr if machine_reads else stdout
            report = probed.report(verbose=arguments.verbose)
            write(stream, as_text(report, columns(stream)))
        if arguments.json == STDOUT:
            write(stdout, probed.to_json())
        elif arguments.quiet and not is_contaminated:
            write(stdout, _numbers(probed))
    if arguments.quiet:
        _tell_warnings(probed, is_contaminated)
    _save(probed, arguments)
    if arguments.quiet and is_contaminated:
        return errors.UnreliableError.exit_status
    return _exit_status(probed, arguments.require, options)


def _exit_status(
    probed: ProbeResult | ProbeTable, required: int | None, options: dict[str, Any]
) -> int:
    if isinstance(probed, ProbeResult):
        if required is None or probed.trains:
            return 0
        assert probed.epoch is not None
        if probed.epoch.deaths:
            return errors.REQUIRED_FAILS
        return errors.UnreliableError.exit_status
    is_cut_short = len(probed.rows) < len(options.get("over", {}).get(probed.axis, ()))
    if is_cut_short or any(not result.trains for result in _results(probed)):
        return errors.UnreliableError.exit_status
    size, chosen = probed.choice()
    if size is not None and chosen is None:
        return errors.REQUIRED_FAILS
    return 0 if _results(probed) else errors.NothingFitsError.exit_status


def _results(probed: ProbeResult | ProbeTable) -> list[ProbeResult]:
    """Return the results that have an answer."""
    if isinstance(probed, ProbeResult):
        return [probed]
    return [result for _, result in probed.fitting()]


def _tell_warnings(probed: ProbeResult | ProbeTable, is_contaminated: bool) -> None:
    notes = [note.text for result in _results(probed) for note in result._noted() if note.warns]
    if is_contaminated:
        notes.append(CONTAMINATED)
    elif isinstance(probed, ProbeTable):
        notes += probed.notes
    for note in dict.fromkeys(notes):
        tell(f"oomprobe: {note}")


def _numbers(probed: ProbeResult | ProbeTable) -> str:
    """Return the batch size; of a table, a line with each value and its size, ``-`` if it does not fit; or the smallest card or cheapest saving."""
    if isinstance(probed, ProbeResult):
        return f"{probed.batch_size}\n"
    required, chosen = probed.choice()
    if required is None:
        sizes = probed.batch_sizes()
        return "".join(f"{value} {sizes.get(value, '-')}\n" for value in probed.rows)
    return "" if chosen is None else f"{chosen}\n"


def _save(probed: ProbeResult | ProbeTable, arguments: argparse.Namespace) -> None:
    """Write the files that are asked for, and name each on stderr, unless that is to be quiet."""
    writers: dict[str, Callable[[Path], object]]
    writers = {"json": probed.to_json, "html": probed.to_html, "plot": probed.plot}
    for option, write_to in writers.items():
        path = vars(arguments).get(option)
        if path in (None, STDOUT):
            continue
        write_to(path)
        if not vars(arguments).get("quiet"):
            _tell_written(path)


def _tell_written(path: Path) -> None:
    with contextlib.suppress(OSError, ValueError):  # the working directory is gone, or another one
        path = path.relative_to(Path.cwd())
    tell(f"wrote {path}")


def _probe(arguments: argparse.Namespace, options: dict[str, Any]) -> ProbeResult | ProbeTable:
    from oomprobe import probe

    check: Callable[..., ProbeResult]
    search: Callable[..., ProbeResult | ProbeTable]
    if arguments.command is None:
        what, check, search = arguments.target, probe.check_target, probe.probe_target
        if options.get("isolate", True) and sys.platform != "linux":
            tell(
                "note: trials can be isolated on Linux only; they run in this process (--in-process)"
            )
            options["isolate"] = False
    else:
        what, check, search = arguments.command, probe.check_command, probe.probe_command
    if arguments.quiet and options["progress"] == "auto":
        options["progress"] = "off"
    if "batch_size" in options:
        return check(what, **options)
    global_batch, world_size = options.get("global_batch"), arguments.world_size or 1
    if global_batch is not None:
        options["global_batch"] = -(-global_batch // world_size)
    probed: ProbeResult | ProbeTable = search(what, **options)
    is_planned = global_batch is not None or world_size > 1
    if not is_planned or "nproc_per_node" in options:
        return probed
    plan = {"global_batch": global_batch, "world_size": world_size}
    if isinstance(probed, ProbeResult):
        return dataclasses.replace(probed, options={**probed.options, **plan})
    rows = dict(probed.rows)
    for value, result in probed.fitting():
        rows[value] = dataclasses.replace(result, options={**result.options, **plan})
    return dataclasses.replace(probed, rows=rows)


def _demo(arguments: argparse.Namespace) -> int:
    from oomprobe import demo
    from oomprobe.probe import find_max_batch

    here = str(demo.demo_device())
    on_card = (
        "a small GPT on a simulated H100 (real steps, no card needed)",
        demo.small_gpt,
        DEMO_CARD,
        1024,
    )
    on_host = (
        "a wide MLP in host memory (Linux holds each trial to the budget)",
        demo.wide_mlp,
        DEMO_BUDGET,
        8,
    )
    on_accelerator = (f"a small GPT on {here}", demo.small_gpt, here, 1)
    for title, build, device, multiple_of in (
        on_card,
        on_host if here == "cpu" else on_accelerator,
    ):
        print(f"--- {title} ---", flush=True)
        result = find_max_batch(
            *build(), device=device, multiple_of=multiple_of, progress=arguments.progress
        )
        report = result.report()
        first_part = dataclasses.replace(report, blocks=report.blocks[:1])
        print(as_text(first_part, columns(sys.stdout)), flush=True)
    print("Next: oomprobe run train.py:build, where build() returns (model, step_fn)")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    check_pictures(arguments)
    shown = read_result(arguments.result)
    write(sys.stdout, as_text(shown.report(verbose=arguments.verbose), columns(sys.stdout)))
    _save(shown, arguments)
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from oomprobe.results.compare import comparison, grown

    names = arguments.first, arguments.second
    first, second = map(read_result, names)
    if isinstance(first, ProbeTable) or isinstance(second, ProbeTable):
        raise InvalidArgumentError(
            "compare takes two results, and one of these is a table: oomprobe show prints it"
        )
    width = columns(sys.stdout)
    print(comparison(first, second, names, width), end="")
    if arguments.tolerance is None:
        return 0
    growth = grown(first, second, arguments.tolerance)
    if not growth:
        return 0
    print("", *block_lines(Block("above the tolerance", growth), width), sep="\n")
    return errors.REQUIRED_FAILS


def _explain(arguments: argparse.Namespace) -> int:
    from oomprobe.explaining import explain as explanation_of

    explanation = explanation_of(arguments.file, device=arguments.index)
    text = json.dumps(explanation.to_dict(), indent=1) + "\n"
    if arguments.html is not None:
        explanation.to_html(arguments.html)
        _tell_written(arguments.html)
    if arguments.json == STDOUT:
        write(sys.stdout, text)
        return 0
    write(sys.stdout, as_text(explanation.report(), columns(sys.stdout)))
    if arguments.json is not None:
        write_file(arguments.json, text.encode())
        _tell_written(arguments.json)
    return 0


def _list_devices(arguments: argparse.Namespace) -> int:
    from oomprobe.devices.choose import describe_device, list_devices
    from oomprobe.simulation.catalogue import CATALOGUE

    for device in list_devices():
        print(describe_device(device))
    print("\ncards to simulate, with torch's share of their memory (sim:24GiB gives torch 24 GiB):")
    for card in CATALOGUE:
        print(
            f"sim:{card.name:18}  {format_bytes(card.available_bytes)} of {format_bytes(card.total_bytes)}"
        )
    return 0


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], str]] = {
    "run": (
        _run,
        "probe a target: path/to/train.py:build, which returns (model, step_fn); or a command",
    ),
    "demo": (_demo, "probe two small models, on a simulated card and here"),
    "show": (_show, "print a result that was saved as JSON"),
    "compare": (_compare, "print two saved results side by side"),
    "explain": (_explain, "say why memory ran out: a snapshot of torch's, or a log; - for stdin"),
    "devices": (_list_devices, "list what can be probed"),
}
EXAMPLES = """\
examples:
  oomprobe run --device sim:RTX-4090 -- python train.py --batch-size {batch}
                                                    your script as it is, without a GPU
  oomprobe demo                                     two small models, with nothing to prepare
  oomprobe run train.py:build --device sim:24GiB    your model and step, on a simulated card
  oomprobe run --help                               all options, more examples, the exit statuses

What is measured: README.md and docs/ in the repository. The functions: help("oomprobe.probe") in Python.
"""
EXAMPLES_OF_RUN = """\
examples:
  oomprobe run --device sim:RTX-4090 -- python train.py --batch-size {batch}
  oomprobe run train.py:build --multiple-of 8 --json a.json --html a.html
  oomprobe run train.py:build --savings all --require 64 --device sim:RTX-4090
  oomprobe run --start-batch 16 -- torchrun --nproc-per-node 8 train.py --batch-size {batch}

exit statuses:
""" + "\n".join(f"{status:5}  {meaning}" for status, meaning in errors.EXIT_STATUSES.items())
HELP = {
    "--require": "only check that batch size N fits; exit 5 if it does not; of several cards, name the smallest on which it does, and of "
    "savings the cheapest",
    "--savings": "find out what would make a batch fit: run the step with each saving of memory, all or NAME,NAME",
    "--world-size": "ranks that share the global batch, one of which is probed (1)",
    "--over": "make a table: the largest size for each value of an argument of the step, such as length=512,1024,2048",
    "--epoch": "find the largest size that trains with these shapes in many orders: arguments of the step, and files with a number "
    "for each example of the data set, as NAME=FILE,NAME=FILE",
    "--draw": "with --epoch: a batch is padded to its longest example, or its examples add up (longest)",
    "--tokens": "find the largest number of tokens in a batch, with the lengths of the examples in FILE",
    "--packed": "with --tokens: examples follow each other without padding",
    "--orders": "with --epoch or --tokens: orders that are tried (40)",
    "--calls": "with --epoch or --tokens: calls of each order (1000)",
    "--device": "cuda, cuda:1, cuda:8GiB, xpu, mps, cpu, cpu:4GiB, sim:24GiB, sim:H100-80GB (default: where the model is); for a table of "
    "simulated cards, names with commas, or sim:all",
    "--device N": "the index of a device in a snapshot (that on which a request was refused)",
    "--nproc-per-node": "run each trial on N ranks of this machine, as torchrun would; gpu: on every GPU; on a simulated card, "
    "the first of N ranks of DDP",
    "--in-process": "run trials in this process",
    "--tolerance": "exit 5 if memory grew, or the answer fell, by more, such as 2%%",
    "--keep-writes": "trials of a command change your files; otherwise Python changes copies",
    "--passes-after": "a command whose processes report nothing passes after S seconds (last resort)",
    "--json": "write the result as JSON; - for stdout",
    "--html": "write a self-contained page (with plots, for which it needs matplotlib)",
    "--plot": "draw memory against batch size (needs matplotlib)",
    "--quiet": "print only the batch size, and errors and warnings on stderr",
    "--verbose": "add all trials, fit, estimates, and what is not covered in full",
    "--progress": "progress lines on stderr (auto)",
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; ``act`` is the function of the command, and ``parser`` its own parser."""
    as_typed, about = (
        argparse.RawDescriptionHelpFormatter,
        "Find the largest batch size that truly fits, by running it.",
    )
    whole = argparse.ArgumentParser(
        prog="oomprobe", description=about, epilog=EXAMPLES, formatter_class=as_typed
    )
    whole.add_argument("--version", action="version", version=f"oomprobe {__version__}")
    commands, own = whole.add_subparsers(required=True, metavar="COMMAND", title="commands"), {}
    for name, (act, meaning) in COMMANDS.items():
        own[name] = commands.add_parser(
            name, help=meaning, description=f"{meaning[0].upper()}{meaning[1:]}."
        )
        own[name].set_defaults(act=act, parser=own[name])
    own["show"].add_argument("result", metavar="RESULT.json")
    own["compare"].add_argument("first", metavar="A.json")
    own["compare"].add_argument("second", metavar="B.json")
    own["explain"].add_argument("file", metavar="FILE")
    own["explain"].add_argument(
        "--device", type=int, metavar="N", dest="index", help=HELP["--device N"]
    )
    run = own["run"]
    run.usage = "%(prog)s [options] TARGET\n       %(prog)s [options] -- COMMAND ... {batch} ..."
    run.description = (
        "Probe a target, or a command in whose arguments {batch} stands for the batch size."
    )
    run.epilog, run.formatter_class = EXAMPLES_OF_RUN, as_typed
    run.add_argument(
        "target", metavar="TARGET", nargs="?", help="module:function or path/to/file.py:function"
    )
    groups = {
        name: run.add_argument_group(name) for name in ("search", "memory", "where", "output")
    }
    search, _, where, output = groups.values()

    def add(place: argparse._ActionsContainer, flag: str, **more: Any) -> None:
        # One that is not given is not passed on either, so that its default is stated in Python alone.
        place.add_argument(flag, **{"help": HELP.get(flag), "default": argparse.SUPPRESS} | more)

    for option in dataclasses.fields(Options):
        metavar, group = option.metadata["metavar"], groups[option.metadata["group"]]
        kind: dict[str, Any] = {"action": "store_true"}
        if metavar:
            kinds = {"N": int, "SIZE": str}
            kind = {"metavar": metavar, "type": kinds.get(metavar, float)}
        add(group, _flag(option.name), dest=option.name, help=option.metadata["help"], **kind)
    add(search, "--require", type=_parse_size, metavar="N", default=None)
    add(search, "--world-size", type=_parse_size, metavar="N", default=None)
    add(search, "--over", type=_parse_axis, action="append", metavar="NAME=V,V,...")
    add(search, "--savings", metavar="all|NAME,NAME")
    add(search, "--epoch", type=_parse_files, metavar="NAME=FILE,...")
    add(search, "--draw", choices=("longest", "sum"))
    add(search, "--tokens", type=Path, metavar="FILE")
    add(search, "--packed", action="store_true")
    add(search, "--orders", type=_parse_size, metavar="N")
    add(search, "--calls", type=_parse_size, metavar="N")
    add(where, "--device")
    add(
        where,
        "--nproc-per-node",
        type=lambda words: words if words == "gpu" else _parse_size(words),
        metavar="N",
    )
    add(where, "--in-process", action="store_false", dest="isolate")
    add(where, "--passes-after", type=float, metavar="S", dest="passes_after_s")
    add(where, "--keep-writes", action="store_true")
    add(own["compare"], "--tolerance", type=_parse_tolerance, metavar="SHARE", default=None)
    for place in (output, own["explain"]):
        add(place, "--json", type=_parse_file, metavar="FILE", default=None)
    add(output, "--quiet", action="store_true", default=False)
    for place in (output, own["show"], own["explain"]):
        add(place, "--html", type=_parse_file, metavar="FILE", default=None)
    for place in (output, own["show"]):
        add(place, "--plot", type=_parse_file, metavar="FILE", default=None)
        add(place, "--verbose", action="store_true", default=False)
    for place in (output, own["demo"]):
        add(place, "--progress", choices=("auto", "plain", "off"), default="auto")
    return whole


def _parse_size(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, not {text}")
    return int(text)


def _parse_axis(text: str) -> tuple[str, list[object]]:
    axis = re.fullmatch(r"([^=]+)=([^(]+)", text)
    if axis is None:
        raise argparse.ArgumentTypeError(WITH_COMMAS.format(text=text))
    values: list[object] = [*axis[2].split(",")]
    for place, value in enumerate(axis[2].split(",")):
        for kind in (float, int):  # a whole number is both
            with contextlib.suppress(ValueError):
                values[place] = kind(value)
    return axis[1], values


def _parse_files(text: str) -> dict[str, Path]:
    files = {}
    for part in text.split(","):
        name, _, file = part.partition("=")
        if not name.isidentifier() or not file:
            raise argparse.ArgumentTypeError(WITH_FILES.format(text=text))
        files[name] = Path(file)
    return files


def _parse_tolerance(text: str) -> float:
    from oomprobe.results.compare import stated_tolerance

    try:
        return stated_tolerance(text)
    except InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parse_file(text: str) -> Path:
    """Return the absolute path of a file to write, because a step may change the working directory."""
    if text == "-":
        return STDOUT
    path = Path(text).absolute()
    if not is_writable(path):
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written: name a file in a folder that may be written to"
        )
    return path


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that were given for a function of `oomprobe.probe`, by their names there.

    Several devices are the values of a table of cards. With a `batch_size`, the function is a check.
    """
    own = {"act", "parser", "command", "owns_process", "target", "world_size", "require"}
    own |= {"json", "html", "plot", "quiet", "verbose"}
    given = {name: value for name, value in vars(arguments).items() if name not in own}
    over: dict[str, list[object]] = {}
    for name, values in given.pop("over", ()):
        over.setdefault(name, []).extend(values)
    if cards := _cards(arguments):
        over[CARDS] = cards
        del given["device"]
    if over:
        given["over"] = over
    if arguments.require is not None:
        is_of_table = over or "savings" in given
        given["require" if is_of_table else "batch_size"] = arguments.require
    drawn = {name: given.pop(name) for name in OF_EPOCHS if name in given}
    if drawn:
        given["epoch"] = _epoch(**drawn)
    return given


def _epoch(
    *,
    epoch: dict[str, Path] | None = None,
    tokens: Path | None = None,
    packed: bool | None = None,
    draw: Literal["longest", "sum"] | None = None,
    **numbers: int,
) -> Epoch:
    """Return the epoch that options of the command line state."""
    if (epoch is None) == (tokens is None):
        raise InvalidArgumentError(ONE_EPOCH)
    if (packed and tokens is None) or (draw and epoch is None):
        raise InvalidArgumentError(OF_ANOTHER)
    if tokens is not None:
        return tokens_of(read_numbers(tokens), packed=bool(packed), **numbers)
    assert epoch is not None
    values = {name: read_numbers(file) for name, file in epoch.items()}
    return Epoch(values, draw=draw or "longest", **numbers)


def _cards(arguments: argparse.Namespace) -> list[object]:
    """Return the devices if these are several: names with commas, or all cards that can be simulated."""
    names: list[object] = [*getattr(arguments, "device", "").split(",")]
    if "sim:all" in names:
        from oomprobe.simulation.catalogue import each_name  # imports torch

        return each_name(names)
    return names if len(names) > 1 else []


def check_run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options, unless they would only fail, or be ignored, after minutes of probing; torch is not imported.

    Raises:
        InvalidArgumentError: they would.
    """
    target, is_of_command = arguments.target, arguments.command is not None
    if is_of_command and target is not None:
        raise InvalidArgumentError(TWO_TARGETS.format(target=target))
    if not is_of_command:
        if target is None:
            raise InvalidArgumentError(NO_TARGET)
        name_of(target)  # raises
    options = given_options(arguments)
    Order.of({}, of="command" if is_of_command else "target", **options)  # raises
    if arguments.world_size and "nproc_per_node" in options:
        raise InvalidArgumentError(RANKS_TWICE)
    check_pictures(arguments)
    return options


def check_pictures(arguments: argparse.Namespace) -> None:
    """Raise InvalidArgumentError if matplotlib is missing, or cannot write a file of the name that `--plot` gives."""
    if arguments.html or arguments.plot:
        formats = new_figure(1).canvas.get_supported_filetypes()
        if arguments.plot and arguments.plot.suffix[1:].lower() not in formats:
            raise InvalidArgumentError(NO_FORMAT.format(name=arguments.plot.name))


def _flag(name: str) -> str:
    return SPELLED.get(name, f"--{name.removesuffix('_s').replace('_', '-')}")


def _flag_here(arguments: argparse.Namespace, name: str) -> str:
    """Return the flag of an option; the name itself if it is one of another function, which the target calls."""
    flag = _flag(name)
    if flag == "--epoch" and hasattr(arguments, "tokens"):
        return "--tokens"  # which make an epoch too
    return flag if flag in arguments.parser.format_help() else name


def explain(error: BaseException, arguments: argparse.Namespace) -> int:
    """Print why a command ended, and return its exit code."""
    notes = getattr(error, "__notes__", ())
    if isinstance(error, KeyboardInterrupt):
        tell("interrupted", *notes)
        return errors.INTERRUPTED
    if isinstance(error, SystemExit):
        if error.code == errors.EXIT_TERMINATED:
            tell("terminated", *notes)
            return errors.EXIT_TERMINATED
        # Whatever its exit code, a target that exits has given no answer.
        frames = traceback.extract_tb(error.__traceback__)
        place = f" in {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        file = (getattr(arguments, "target", None) or "").rpartition(":")[0]
        script = file if file.endswith(".py") else "train.py"
        tell(*notes, LEFT.format(code=error.code, place=place, script=script))
        return errors.StepFailedError.exit_status
    if not isinstance(error, errors.OomProbeError):
        tell(errors.traceback_of(error))
        tell(
            f"oomprobe: unexpected internal error ({type(error).__name__}), no answer; please report it"
        )
        return errors.UNFORESEEN
    if isinstance(error.table, ProbeTable):
        tell(f"the rows that were finished:\n{error.table}")
    if error.trials:
        tell(trials_table(error.trials))
    if isinstance(error, errors.StepFailedError) and error.__cause__ is not None:
        tell(errors.traceback_of(error.__cause__))
    text = str(error)
    if isinstance(error, InvalidArgumentError):
        text = error.spelled(partial(_flag_here, arguments))
    tell(f"oomprobe: {text}")
    is_required = getattr(arguments, "require", None) is not None
    if is_required and isinstance(error, errors.NothingFitsError):
        return errors.REQUIRED_FAILS
    return error.exit_status


def tell(*lines: str) -> None:
    """Write lines to stderr, which may have been closed; what they quote may come from anywhere."""
    with contextlib.suppress(OSError):
        write(sys.stderr, visible("\n".join(lines) + "\n"))


def write(stream: IO[str] | None, text: str) -> None:
    """Write and flush, unless the shell closed the stream."""
    if stream is not None:
        stream.write(text)
        stream.flush()


def columns(stream: IO[str] | None) -> int:
    """Return the columns of a report: those of a job log, or fewer on a terminal that has fewer."""
    if stream is None or not stream.isatty():
        return WIDTH
    return min(WIDTH, max(LEAST_COLUMNS, os.get_terminal_size(stream.fileno()).columns or WIDTH))


@contextlib.contextmanager
def stdout_kept(*, for_good: bool) -> Iterator[IO[str]]:
    """Reserve stdout for the answer, on the stream returned; all other writes to it or its descriptor go to stderr.

    With `for_good` this lasts until the process ends, because C libraries flush and ``atexit`` functions print then.
    """
    stdout, kept = sys.stdout, None
    if sys.stderr is None:  # it was closed, so the copy of stdout would take its descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with contextlib.suppress(AttributeError, OSError):  # stdout or stderr may be closed
        stdout.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
    answers = stdout
    if kept is not None and stdout is sys.__stdout__:  # tests put other streams there
        answers = os.fdopen(os.dup(kept), "w", encoding="utf-8")
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
