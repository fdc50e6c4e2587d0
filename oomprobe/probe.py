"""`find_max_batch`, `find_max_batches` and `check`, and the same for targets and commands: options in, result out.

The result is made once the session is closed, because closing it restores the state and sets `state_verified`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, Never, Unpack, overload

import torch

from oomprobe.devices import Device
from oomprobe.errors import FramesHidden, check_size
from oomprobe.probing.cards import search_cards
from oomprobe.probing.epochs import check_epoch
from oomprobe.probing.finish import finish
from oomprobe.probing.opening import open_command, open_model, open_target
from oomprobe.probing.order import CheckOptions, Order, SearchOptions, refuse_unknown
from oomprobe.probing.savings import search_savings
from oomprobe.probing.session import Session
from oomprobe.probing.summary import result_of
from oomprobe.probing.tables import Rows
from oomprobe.records.axis import CARDS, NO_AXIS
from oomprobe.records.epoch import Epoch, tokens_of
from oomprobe.records.options import RESOLUTION, Options, Steps
from oomprobe.records.savings import ALL
from oomprobe.results.log import logged
from oomprobe.results.progress import Progress
from oomprobe.results.result import ProbeResult
from oomprobe.results.table import ProbeTable
from oomprobe.rules.search import Found
from oomprobe.runners.targets import name_of


def find_max_batch(
    model: torch.nn.Module,
    step_fn: Steps,
    *,
    device: str | torch.device | Device | None = None,
    memory_fraction: float = 0.9,
    min_batch: int = 1,
    max_batch: int | None = None,
    multiple_of: int = 1,
    start_batch: int | None = None,
    steps: int = 1,
    confirm_steps: int | None = None,
    preserve: Iterable[Any] = (),
    global_batch: int | None = None,
    resolution: float = RESOLUTION,
    time_limit_s: float | None = None,
    trial_time_limit_s: float | None = None,
    host_memory: str | None = None,
    breakdown: bool = False,
    progress: Progress = "auto",
    epoch: Epoch | Mapping[str, Epoch] | None = None,
    **misspelt: Never,
) -> ProbeResult:
    """Find the largest batch size that truly fits, by running it.

    The batch size doubles until a step runs out of memory. Up to 50 calls of a small size then tell how many calls each
    trial must make, because many loops do something large at every n-th call. The allocator is capped at
    `memory_fraction` of the available memory, and bisection finds the largest size that passes. The deciding failure is
    retried once, and the answer is confirmed with up to 50 calls, or until calls repeat exactly. The model and the step's own
    counters, lists and caches are restored; the notes name what cannot be.

    Args:
        model: The model, already on its device.
        step_fn: ``step_fn(model, batch_size)`` runs one full optimisation step: make a batch, forward, backward,
            optimizer step. A mapping, ``{"train": f, "eval": g}``, names several; each trial runs all of them.
        device: None for the device of the parameters (an error if that is the CPU beside an accelerator), or "cuda", "cuda:1",
            "xpu", "mps", "cpu", "cpu:4GiB" (of address space on top of what this process already uses), "sim:24GiB" or
            "sim:H100-80GB" (a simulated card: needs no GPU, and the model stays in host memory), a torch.device, or a `Device`.
        memory_fraction: Share of the memory available to this process that the answer may use, in (0, 1].
        min_batch: Smallest size to try, at least 1.
        max_batch: Largest size to try, at least `min_batch`; None for no limit but memory. If it
            runs, so does half of it: a step that takes the same memory there ignores its size.
        multiple_of: Try only multiples of this, at least 1.
        start_batch: Size at which to begin, between `min_batch` and `max_batch`; None for `min_batch`. From there the size
            doubles, or halves if it fails: a good guess saves trials, a bad one costs some, and the answer is the same.
        steps: Full steps per trial, at least 1, after a first step that creates the optimizer state. A simulated device
            makes at least `confirm_steps` where it repeats calls, which costs nothing.
        confirm_steps: Fewest full steps that confirm the answer, at least 1; None for 3, or 5 if nothing has shown what later
            calls need (`check`, host memory, an adapter). The confirmation makes up to 50 calls: as many as fit in 10 s, or in
            the time that the search took (on host memory, in 1 s). It ends earlier if calls repeat exactly.
        preserve: Further objects to restore: tensors, or objects with ``state_dict()`` and ``load_state_dict()``. Objects
            that the step closes over, refers to by global name, or is a method of are found automatically, and so are
            the values that your own code holds in them.
        global_batch: Samples per optimizer step, at least 1. The planned micro-batch is run with gradient accumulation.
        resolution: Stop bisecting when the bracket is within this fraction of the size, in [0, 1); 0 for exact. At 1/128, sizes
            up to 255 are exact, and larger answers less than 1 % too low. At any resolution the search looks past holes, which
            are sizes that fail although larger ones run.
        time_limit_s: Seconds for the whole probe, above 0; None for no limit. A step that hangs inside a single C call
            is not interrupted.
        trial_time_limit_s: Seconds for one trial, above 0; None for no limit.
        host_memory: Host memory that a size may take, such as "64GiB": pinned memory as torch takes
            it, and on a simulated card other tensors of 1 MiB or more; None for no limit but that
            of the machine. With a limit, a step that takes host memory runs at every size.
        breakdown: Run one more step at the answer to record what held the memory (`ProbeResult.breakdown`).
        progress: "auto" (on stderr: a live line on a terminal and in a notebook, otherwise a line for each trial), "plain",
            "off", or a function that is called with each `Trial`.
        epoch: The shapes of a data set's batches, for training whose lengths vary: the answer trains in many orders of them
            (`ProbeResult.epoch`). The step gets their numbers by name, ``step_fn(model, batch_size, length=...)``. Of several
            named steps, a mapping of those that have one.
        **misspelt: Refused, by the name of the nearest option.

    Returns:
        The answer and all the evidence for it.

    Raises:
        InvalidArgumentError: an argument is wrong; nothing was run. A TypeError too where there is no such option.
        NoDeviceError: the device is not available to this process.
        NothingFitsError: not even the smallest size fits.
        StepFailedError: the step has a bug; raised from its own exception.
        DeviceLostError: a sticky CUDA error; this process can no longer use the device.
        TimeLimitError: the time limit passed before a size was confirmed.
        UnreliableError: the step did no work, ignored its batch size, or got fewer examples than asked for; memory was not
            freed, or the state could not be restored.

    Examples:
        >>> model = torch.nn.Linear(256, 256)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def step(model, batch_size):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(batch_size, 256)).square().mean().backward()
        ...     optimizer.step()
        >>> result = find_max_batch(model, step, device="cpu:1GiB", max_batch=64, progress="off")
        >>> result.batch_size, result.limited_by, result.state_verified
        (64, 'max_batch', True)
    """
    with FramesHidden():
        refuse_unknown(misspelt)
        options = Options(
            memory_fraction=memory_fraction,
            min_batch=min_batch,
            max_batch=max_batch,
            multiple_of=multiple_of,
            start_batch=start_batch,
            steps=steps,
            confirm_steps=confirm_steps,
            global_batch=global_batch,
            resolution=resolution,
            time_limit_s=time_limit_s,
            trial_time_limit_s=trial_time_limit_s,
            host_memory=host_memory,
            breakdown=breakdown,
        )
        order = Order(
            options=options,
            device=device,
            preserve=preserve,
            progress=progress,
            axis=NO_AXIS.drawing(epoch),
        )
        with open_model(
            order, model, step_fn
        ) as session:  # `_answer` would be one more frame above the step
            answer = finish(session, session.find())
        return logged(result_of(session, answer))


def find_max_batches(
    model: torch.nn.Module,
    step_fn: Steps,
    over: Mapping[str, Iterable[Any]] | None = None,
    *,
    require: int | None = None,
    **options: Unpack[SearchOptions],
) -> ProbeTable:
    """Find the largest batch size for each value of one argument of the step, such as each length of a sequence, or on each card.

    Each row of the table is a whole search, and its answer is run and confirmed as in `find_max_batch`. From the second row
    on, a search begins near its answer. Whatever does not depend on the value is learned once: which optimizers step, how
    many calls a trial must make, and the memory that libraries take.

    With a list as `device`, the rows are simulated cards: ``device=["sim:RTX-4090", "sim:L40S"]``, or ``["sim:all"]``. The step runs on
    the largest card of each compute capability, and on the others its allocations are replayed, which takes no time. The answer
    is that of a search on this card; its trials are marked as replayed.

    Args:
        model: The model, already on its device.
        step_fn: ``step_fn(model, batch_size, length=...)``, or a mapping of several. You choose the name of the extra argument.
        over: The argument's name and its values, ``{"length": [512, 1024, 2048]}``: numbers, tuples such as ``(640, 480)``,
            or any other hashable values. They are searched in this order. None for a table of cards.
        require: Of cards: name the smallest on which this batch size runs, and run the answer there.
        **options: Those of `find_max_batch`, for each row; but `start_batch` is for the first row, and `time_limit_s` for the
            whole table. With an `epoch`, rows are buckets, an example goes to the smallest that holds it, and the answers are
            lowered together until orders that mix all rows train. When that time is over, the table has the rows that are finished.

    Returns:
        The results by value; None for a value with which nothing fits.

    Raises:
        InvalidArgumentError: an argument is wrong, or `over` has several axes; nothing was run.
        TimeLimitError: the time limit passed before any row was finished.
        OomProbeError: as for `find_max_batch`. The text names the row, and ``.table`` has the rows that were finished.

    Examples:
        >>> model = torch.nn.Linear(32, 32)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> def step(model, batch_size, length):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(batch_size, length, 32)).square().mean().backward()
        ...     optimizer.step()
        >>> table = find_max_batches(model, step, {"length": [8, 16]}, device="sim:1GiB", max_batch=64, progress="off")
        >>> table.batch_sizes()
        {8: 64, 16: 64}
    """
    with FramesHidden():
        given = dict(options)
        if isinstance(devices := given.get("device"), list | tuple) or devices == "sim:all":
            over = {**(over or {}), CARDS: [devices] if isinstance(devices, str) else devices}
            del given["device"]
        order = Order.of(given, over={} if over is None else over, require=require)
        return _table(order, partial(open_model, model=model, step_fn=step_fn))


def find_max_tokens(
    model: torch.nn.Module,
    step_fn: Steps,
    lengths: Sequence[float],
    packed: bool = False,
    *,
    calls: int = 1000,
    orders: int = 40,
    seed: int = 0,
    **options: Unpack[SearchOptions],
) -> ProbeResult:
    """Find the largest number of tokens in a batch, for training whose batches hold tokens rather than examples.

    With padding, a batch takes examples while examples times the longest stay within the number; packed, while their sum does.
    The answer trains in all of many orders, as that of `find_max_batch` with an epoch does.

    Args:
        model: The model, already on its device.
        step_fn: ``step_fn(model, batch_size, length)``: it gets how many examples, and the longest, or with `packed` the sum.
        lengths: The length of each example of the data set.
        packed: Whether examples follow each other without padding.
        calls: Calls of each order, at least 1.
        orders: Orders that are tried, at least 1.
        seed: Of the orders, as in `Epoch`.
        **options: Those of `find_max_batch`, whose sizes count tokens here; `global_batch` means nothing.

    Returns:
        A result whose `batch_size` counts tokens, and whose `unit` is "tokens".

    Raises:
        InvalidArgumentError: an argument is wrong, or an example is longer than `max_batch`.
        OomProbeError: as for `find_max_batch`.

    Examples:
        >>> model = torch.nn.Linear(32, 32)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def step(model, batch_size, length):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(batch_size, length, 32, device="cuda")).square().mean().backward()
        ...     optimizer.step()
        >>> lengths = [10, 20, 40] * 100
        >>> result = find_max_tokens(model, step, lengths, calls=20, orders=2, device="sim:64MiB", progress="off")
        >>> result.unit, result.epoch.deaths
        ('tokens', 0)
    """
    with FramesHidden():
        epoch = tokens_of(lengths, packed=packed, calls=calls, orders=orders, seed=seed)
        return _answer(open_model(Order.of({**options, "epoch": epoch}), model, step_fn))


def find_savings(
    model: torch.nn.Module,
    step_fn: Steps,
    batch_size: int | None = None,
    savings: str | Sequence[str] = ALL,
    **options: Unpack[SearchOptions],
) -> ProbeTable:
    """Find out what would make a batch size fit, by running the step with each saving of memory.

    Each row of the table is a whole search in which every call of the step runs with a saving, as if you had written it, and without
    it again afterwards: ``expandable_segments``, ``bf16_autocast`` or ``fp16_autocast`` (whichever the card's attention kernels
    take), ``checkpoint`` of the repeated blocks, ``checkpoint_attention_saved``, ``fused_optimizer``, ``no_foreach``,
    ``offload_activations``. What is on already, or has nothing to apply to, is named and not run. With all savings, the best two
    follow together and, if `batch_size` is given, further pairs until three rows run it. Where that size does not run as is,
    ``checkpoint first K of N``, ``last K of N`` and the same of
    ``offload_activations`` are the fewest of the model's repeated blocks with which it runs.

    Rows stand from the cheapest: on a card by the time of a step, elsewhere settings and kernels, then what computes less again,
    then what takes less pinned memory for copies.

    Args:
        model: The model, already on its device.
        step_fn: ``step_fn(model, batch_size)`` or a mapping of several, as in `find_max_batch`.
        batch_size: The size that is to run, at which the rows are compared; None for the answer without savings.
        savings: "all", or names as a list or separated by commas; ``"bf16_autocast+checkpoint"`` runs two together.
        **options: Those of `find_max_batch`, for each row; but `time_limit_s` is for the whole table.

    Returns:
        The results by name; `ProbeTable.at` compares them, and `ProbeTable.cheapest` chooses.

    Raises:
        InvalidArgumentError: an argument is wrong; nothing was run.
        OomProbeError: as for `find_max_batch`, of the step as it is.

    Examples:
        >>> model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(8)))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> def step(model, batch_size):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(batch_size, 512, device="cuda")).square().mean().backward()
        ...     optimizer.step()
        >>> options = {"device": "sim:256MiB", "multiple_of": 64, "progress": "off"}
        >>> table = find_savings(model, step, savings="checkpoint,fused_optimizer", **options)
        >>> table.batch_sizes()
        {'as is': ..., 'fused_optimizer': ..., 'checkpoint': ...}
        >>> table.cheapest(table.rows["as is"].batch_size)
        'as is'
    """
    with FramesHidden():
        if batch_size is not None:
            check_size("batch_size", batch_size)
        order = Order.of(options, savings=savings, require=batch_size)
        return _table(order, partial(open_model, model=model, step_fn=step_fn))


def check(
    model: torch.nn.Module, step_fn: Steps, batch_size: int, **options: Unpack[CheckOptions]
) -> ProbeResult:
    """Check that one size fits, by running a confirmed trial under the cap; the result's `batch_size` is that size.

    Half of a size that fits runs too, to show that the step uses its batch size.

    `options` are those of `find_max_batch` that concern no search: `device`, `memory_fraction`, `multiple_of` (of the size, and of
    half of it), `confirm_steps`, `preserve`, `time_limit_s`, `host_memory`, `breakdown`, `progress` and `epoch`.

    Raises:
        NothingFitsError: the size does not fit.
        OomProbeError: as for `find_max_batch`.

    Examples:
        >>> model = torch.nn.Linear(8, 8)
        >>> step = lambda model, batch_size: model(torch.randn(batch_size, 8)).sum().backward()
        >>> check(model, step, 32, device="cpu:1GiB", progress="off").batch_size
        32
    """
    with FramesHidden():
        return _answer(
            open_model(Order.of(options, batch_size=batch_size), model, step_fn), batch_size
        )


@overload
def probe_target(
    target: str | Callable[[], Any],
    *,
    over: None = None,
    savings: None = None,
    isolate: bool = ...,
    nproc_per_node: int | Literal["gpu"] | None = ...,
    **options: Unpack[SearchOptions],
) -> ProbeResult: ...


@overload
def probe_target(
    target: str | Callable[[], Any],
    *,
    savings: str | Sequence[str],
    require: int | None = ...,
    isolate: bool = ...,
    nproc_per_node: int | Literal["gpu"] | None = ...,
    **options: Unpack[SearchOptions],
) -> ProbeTable: ...


@overload
def probe_target(
    target: str | Callable[[], Any],
    *,
    over: Mapping[str, Iterable[Any]],
    require: int | None = ...,
    isolate: bool = ...,
    nproc_per_node: int | Literal["gpu"] | None = ...,
    **options: Unpack[SearchOptions],
) -> ProbeTable: ...


def probe_target(
    target: str | Callable[[], Any],
    *,
    over: Mapping[str, Iterable[Any]] | None = None,
    savings: str | Sequence[str] | None = None,
    require: int | None = None,
    isolate: bool = True,
    nproc_per_node: int | Literal["gpu"] | None = None,
    **options: Unpack[SearchOptions],
) -> ProbeResult | ProbeTable:
    """Find the largest batch size for the model and step that a target builds.

    A target can be built again, so its trials run in child processes, which may die from a sticky CUDA error, the system's
    OOM killer, or a library that exits. On host memory each trial is a process of its own, forked from one that has built
    the target. On an accelerator one child runs trial after trial while it is healthy, and this process opens no CUDA
    context. A simulated card takes no memory, so it is probed in this process.

    With `nproc_per_node`, each trial runs on that many ranks of this machine, one accelerator each; a size fits only if it
    fits on every rank. The target does what a script does under ``torchrun``: ``init_process_group``, ``set_device``, DDP or
    ``fully_shard``. All batch sizes are per rank; `global_batch` counts the samples of all ranks. On a simulated card, only
    the first rank runs, and only under DDP.

    Args:
        target: ``module:function`` or ``path/to/file.py:function``, or such a function itself; it takes no arguments and
            returns ``(model, step_fn)``.
        over: Make a table of the answers for these values; see `find_max_batches`.
        savings: Make a table of the answers with each of these savings of memory; see `find_savings`.
        require: Only with ``over={"device": [...]}``, see `find_max_batches`; or with `savings`, the `batch_size` of `find_savings`.
        isolate: Run trials in child processes (Linux only); False to build the target and run the trials in this process.
        nproc_per_node: Ranks, at least 1, or "gpu" for as many as there are accelerators; None for one process without a
            group.
        **options: Those of `find_max_batch`. With isolation, a custom `Device` must be picklable, and `preserve` is refused.

    Returns:
        The answer and all the evidence for it; with `over`, a table of such answers.

    Raises:
        InvalidArgumentError: the target cannot be found or imported in another process, or does not return a model and
            a step; or trials cannot be isolated here; or this process is a rank itself, or the ranks made no group.
        NoDeviceError: there are fewer accelerators than ranks, or none.
        StepFailedError: the step or the target has a bug, or its process died twice at one size with no sign that memory was
            the cause.
        UnreliableError: a rank was still in the step long after another had finished it.
        OomProbeError: as for `find_max_batch`.

    Examples:
        >>> probe_target("oomprobe.demo:small_gpt", device="sim:16GiB", resolution=0.5, progress="off").limited_by
        'memory'
    """
    with FramesHidden():
        order = Order.of(
            options,
            of="target",
            over=over,
            savings=savings,
            require=require,
            isolate=isolate,
            nproc_per_node=nproc_per_node,
        )
        name = name_of(target)
        opened = partial(open_target, name=name, isolate=isolate, nproc_per_node=nproc_per_node)
        if over is None and savings is None:
            return _answer(opened(order), target=name)
        ranks = nproc_per_node if isinstance(nproc_per_node, int) else 1
        return _table(order, opened, target=name, ranks=ranks)


def check_target(
    target: str | Callable[[], Any],
    batch_size: int,
    *,
    isolate: bool = True,
    nproc_per_node: int | Literal["gpu"] | None = None,
    **options: Unpack[CheckOptions],
) -> ProbeResult:
    """Check that one size fits for a target; see `probe_target` and `check` for arguments and errors.

    Examples:
        >>> check_target("oomprobe.demo:wide_mlp", 8, device="sim:1GiB", progress="off").budget_bytes
        966367641
    """
    with FramesHidden():
        here: dict[str, Any] = {"isolate": isolate, "nproc_per_node": nproc_per_node}
        order = Order.of(options, of="target", batch_size=batch_size, **here)
        name = name_of(target)
        return _answer(open_target(order, name, **here), batch_size, name)


@overload
def probe_command(
    command: Sequence[str],
    *,
    passes_after_s: float | None = ...,
    keep_writes: bool = ...,
    savings: None = None,
    **options: Unpack[SearchOptions],
) -> ProbeResult: ...


@overload
def probe_command(
    command: Sequence[str],
    *,
    passes_after_s: float | None = ...,
    keep_writes: bool = ...,
    savings: str | Sequence[str],
    require: int | None = ...,
    **options: Unpack[SearchOptions],
) -> ProbeTable: ...


def probe_command(
    command: Sequence[str],
    *,
    passes_after_s: float | None = None,
    keep_writes: bool = False,
    savings: str | Sequence[str] | None = None,
    require: int | None = None,
    **options: Unpack[SearchOptions],
) -> ProbeResult | ProbeTable:
    """Find the largest batch size with which a command runs, whatever launches it (Linux only).

    Each trial is a run of the command, as cold as training. It passes once every rank has made `steps` optimizer steps after
    the first, goes on to 50 while that costs little, and is then ended together with everything that it started. A
    ``sitecustomize`` module in front of PYTHONPATH makes the processes report their steps and peaks, and holds torch's
    allocator to the margin. The answer is confirmed in two further runs of up to 50 steps each.

    Args:
        command: The program and its arguments, in which ``{batch}`` stands for the batch size, and ``{dir}`` for a folder that
            is removed after the trial. The environment variable OOMPROBE_BATCH holds the size too.
        passes_after_s: For commands whose processes cannot report: a trial passes once it has run this many seconds, whatever
            it has done. None: such a trial passes when the command exits with 0.
        keep_writes: Whether trials change your files. Otherwise Python changes copies, which go
            after each trial.
        savings: ``"expandable_segments"``, for a table with and without this setting of the
            environment; all other savings need a target.
        require: Only with `savings`: the `batch_size` of `find_savings`.
        **options: Those of `find_max_batch`, except `preserve` and `breakdown`.
            `device` is None, for the devices that the command chooses, or a simulated card for each of its processes that trains, such as ``"sim:24GiB"``. `resolution` is 1/64 by
            default, and the plan for `global_batch` is printed but not run.

    Returns:
        The answer and all the evidence for it.

    Raises:
        InvalidArgumentError: the program cannot be run, or does not use the batch size; nothing was run.
        StepFailedError: the command failed with an error that is not about memory.
        UnreliableError: it ignores the batch size, ended before enough steps, or could not be held to the margin.
        SimulationError: it needs what a simulated card does not have, or did not use it.
        OomProbeError: as for `find_max_batch`.

    Examples:
        >>> probe_command(["python", "train.py"])
        Traceback (most recent call last):
        oomprobe.errors.InvalidArgumentError: the command does not use the batch size: ...
    """
    with FramesHidden():
        order = Order.of(
            options,
            of="command",
            savings=savings,
            require=require,
            passes_after_s=passes_after_s,
            keep_writes=keep_writes,
        )
        opened = partial(
            open_command, command=command, passes_after_s=passes_after_s, keep_writes=keep_writes
        )
        if savings is None:
            return _answer(opened(order))
        return _table(order, opened)


def check_command(
    command: Sequence[str],
    batch_size: int,
    *,
    passes_after_s: float | None = None,
    keep_writes: bool = False,
    **options: Unpack[CheckOptions],
) -> ProbeResult:
    """Check that a command runs with one size; see `probe_command` and `check` for arguments and errors.

    Examples:
        >>> check_command(["python3", "-c", "[0] * {batch}"], 8, memory_fraction=1.0, progress="off").batch_size
        8
    """
    with FramesHidden():
        own: dict[str, Any] = {"passes_after_s": passes_after_s, "keep_writes": keep_writes}
        order = Order.of(options, of="command", batch_size=batch_size, **own)
        return _answer(open_command(order, command, **own), batch_size)


def _answer(
    opened: AbstractContextManager[Session],
    batch_size: int | None = None,
    target: str | None = None,
) -> ProbeResult:
    """Search, or check one size."""
    with opened as session:
        if batch_size is None:
            answer = finish(session, session.find())
        elif not session.axis.epochs:
            answer = finish(session, session.confirm_only(batch_size))
        else:
            session.confirm_only(batch_size)
            check_epoch(session, batch_size)
            answer = Found(batch_size=batch_size)
    return logged(result_of(session, answer, target))


def _table(
    order: Order,
    opened: Callable[[Order], AbstractContextManager[Session]],
    *,
    target: str | None = None,
    ranks: int = 1,
) -> ProbeTable:
    """Search for each row of a table of cards, of savings or of values."""
    if order.axis.name == CARDS:
        return logged(search_cards(order, opened, ranks=ranks, target=target))
    if order.savings is not None:
        return logged(search_savings(order, opened, target))
    with Rows(order.axis, target) as rows, opened(order) as session:
        rows.search(session)
    return logged(rows.table())
