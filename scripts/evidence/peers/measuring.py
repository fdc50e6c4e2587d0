"""Run one tool on one model in a process forked before CUDA was initialised: its answer, what it ran and changed.

The cold frontier, and whether an answer lasts, are measured in such processes too.
"""

import hashlib
import multiprocessing
import os
import pickle
import random
import tempfile
import time
from functools import cache, partial
from pathlib import Path

import numpy
import torch
import torch._dynamo  # imported by the first optimizer step: once here instead of in each process
import torch.utils.checkpoint
from gpu_check.check import in_child
from zoo import runs

from peers.models import ALL, EPOCHS, LOG_VARIABLE
from peers.tools import TOOLS, Call

multiprocessing.set_start_method(
    "fork", force=True
)  # functions need not pickle, and imports are done
FRONTIER_STEPS, LASTING_STEPS = 10, 50
LONGEST_S = 300


def forked(function, *arguments, limit_s=LONGEST_S):
    """Return what the function returns in a child process; raise ChildError with how it ended otherwise."""
    answer = in_child(_quietly, function, *arguments, limit_s=limit_s)
    if "error" in answer:
        raise ChildError(" ".join(answer["error"].split())[:200])
    return answer["value"]


def _quietly(function, *arguments):
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    return {"value": function(*arguments)}


class ChildError(Exception):
    pass


def card_gib():
    return round(torch.cuda.mem_get_info()[1] / 2**30)


@cache
def lasts(name, batch_size, steps):
    """Whether a fresh process with the whole card runs that many steps."""
    return forked(partial(runs, ALL[name].target, batch_size, steps=steps))


@cache
def deaths(name, batch_size):
    """Return of how many orders training runs out of memory, each in a fresh process with the whole card."""
    ended = (forked(_dies, name, batch_size, order) for order in range(EPOCHS[name].orders))
    return sum(ended)


def _dies(name, batch_size, order):
    model, optimizer = ALL[name].build()
    step = ALL[name].varying(optimizer)
    try:
        for batch in EPOCHS[name].batches(order, batch_size):
            step(model, **batch)
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return True
    return False


def cold_frontier(name):
    """Return the largest batch size that runs ten steps in a fresh process, by doubling and bisection to 1/500.

    Some sizes fail below others that run, so doubling ends only if a size and an odd one a sixteenth above it both fail.
    """

    def runs(size):
        return lasts(name, size, FRONTIER_STEPS)

    fits, fails = 0, 1
    while further := next(filter(runs, (fails, fails * 17 // 16 + 1)), None):
        fits, fails = further, 2 * fails
    while fails - fits > max(1, fits // 500):
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if runs(middle) else (fits, middle)
    return fits


def row(tool_name, name, frontier):
    """Return all measurements of one tool on one model."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            told = forked(_ask, tool_name, name, 2 ** frontier.bit_length(), folder)
        except ChildError as error:
            return {"error": str(error)}
        events = [line.split() for line in (Path(folder) / "log").read_text().splitlines()]
    tried = [
        int(size) for event, size in events if event == "tried"
    ]  # each call of the model, also one that failed
    stepped = {int(size) for event, size in events if event == "stepped"}
    answer = told["answer"]
    return {
        **told,
        "sizes_tried": len(set(tried)),
        "work": answer and round(sum(tried) / answer, 1),
        "answer_was_run": answer in (stepped or tried),
        "lasts": answer is not None and lasts(name, answer, LASTING_STEPS),
    }


def varying_row(tool_name, name, frontier):
    """Return the answer of one tool on one model whose shapes vary, and how many trainings run out of memory there."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            told = forked(_ask, tool_name, name, 2 ** frontier.bit_length(), folder)
        except ChildError as error:
            return {"error": str(error)}
    if told["answer"] is None:
        return told
    return {**told, "orders": EPOCHS[name].orders, "deaths": deaths(name, told["answer"])}


def _ask(tool_name, name, start, folder):
    os.chdir(folder)
    os.environ[LOG_VARIABLE] = str(Path(folder) / "log")
    tool, workload = TOOLS[tool_name], ALL[name]
    model, optimizer = (None, None) if tool.builds_its_own else workload.build()
    before = state(model, optimizer)
    call = Call(name=name, workload=workload, model=model, optimizer=optimizer, start=start)
    began_s = time.perf_counter()
    try:
        answer, error = tool.call(call), None
    except Exception as raised:
        answer, error = None, f"{type(raised).__name__}: {' '.join(str(raised).split())[:200]}"
    wall_s = round(time.perf_counter() - began_s, 1)
    after = state(model, optimizer)
    return {
        "answer": answer,
        "error": error,
        "wall_s": wall_s,
        "changed": [part for part in before if before[part] != after[part]],
    }


def state(model, optimizer):
    """Return a digest of each part of the training state."""
    generators = [
        torch.get_rng_state(),
        torch.cuda.get_rng_state(),
        numpy.random.get_state(),
        random.getstate(),
    ]
    parts = {"generators": generators}
    if model is not None:
        parameters = dict(model.named_parameters())
        gradients = {name: parameter.grad for name, parameter in parameters.items()}
        parts |= {
            "weights": parameters,
            "buffers": dict(model.named_buffers()),
            "gradients": gradients,
        }
        devices = [str(parameter.device) for parameter in parameters.values()]
        parts |= {"optimizer": optimizer.state_dict(), "device": devices}
    return {
        name: hashlib.sha256(pickle.dumps(on_host(part))).hexdigest()
        for name, part in parts.items()
    }


def on_host(value):
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, dict):
        return {key: on_host(element) for key, element in value.items()}
    return [on_host(element) for element in value] if isinstance(value, list | tuple) else value
