"""What to type after an out-of-memory error in a log: of the right vendor, engine and version."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from oomprobe.explaining.log import OomText
from oomprobe.ground.allocator_settings import VARIABLES, to_expand

RECORD = (
    "torch.cuda.memory._record_memory_history(max_entries=1_000_000)  # before the model is made",
    'torch.cuda.memory._dump_snapshot("snapshot.pickle")  # in "except RuntimeError"',
)
# Vendors for whose devices torch records its memory's history, in this way from 2.1 on.
HAVE_RECORDING = {"nvidia", "amd"}
LARGEST = "oomprobe run -- python FILE.py --batch-size {batch}  # the largest that fits"
SAVINGS = (
    "oomprobe run FILE.py:build --savings all  # what would make this batch fit; build() returns "
    "(model, step)"
)
SHAPES = (
    "oomprobe run FILE.py:build --over length=512,1024,2048  # sizes for steps whose shapes vary"
)
UNCAP = "torch.cuda.set_per_process_memory_fraction(1.0)  # or raise the limit that set the cap"
# Which processes hold the memory, and how to choose another device.
NEIGHBOURS = {
    "nvidia": (
        "nvidia-smi  # which processes hold the memory",
        "export CUDA_VISIBLE_DEVICES=1  # another device",
    ),
    "amd": (
        "rocm-smi --showpids  # which processes hold the memory; with new drivers: amd-smi process",
        "export HIP_VISIBLE_DEVICES=1  # another device",
    ),
    "intel": (
        "xpu-smi ps  # which processes hold the memory",
        "export ZE_AFFINITY_MASK=1  # another device",
    ),
    "huawei": (
        "npu-smi info  # which processes hold the memory",
        "export ASCEND_RT_VISIBLE_DEVICES=1  # another device",
    ),
    "apple": (),
}
WATCH = {
    "nvidia": "nvidia-smi",
    "amd": "rocm-smi or amd-smi",
    "intel": "xpu-smi",
    "huawei": "npu-smi",
    "apple": "Activity Monitor",
}
# By the form of the text, which tells the version of torch.
OF_OLD_TORCH = {
    "cached": "pip install --upgrade torch  # from torch 2.1 on, expandable_segments:True helps",
    "reserved": (
        "export {variable}=max_split_size_mb:128  # torch 1.10 to 2.0; "
        "from torch 2.1 on, expandable_segments:True"
    ),
}
# c10/core/AllocatorConfig.h of torch 2.13.0 has both settings, that of 2.12.1 neither. With the first
# alone the cache could hand out too small a block: pytorch/pytorch#192722.
PINNED = (
    "export PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:64,pinned_max_cached_size_mb:64"
    "  # from torch 2.13 on",
    "DataLoader(dataset, pin_memory=False)  # or pin fewer and smaller tensors",
    "free -g; ulimit -l  # how much memory the host has, and how much of it may be pinned",
)
# Of a snapshot's settings, and what a name in them says about the version of torch.
SETTINGS_FORM = re.compile(r"[\w:.,<>\[\] -]{1,500}")
IN_SNAPSHOTS_SINCE_2_13, OLDEST = "max_round_threshold", "2.1"
# By what the message says, the first that fits.
OF_HOST = (
    (
        r"Bus error",
        "docker run --shm-size=8g ...  # a data loader hands batches over in /dev/shm",
    ),
    (
        r"DataLoader worker",
        "DataLoader(dataset, num_workers=2)  # each worker is a process with its own copies",
    ),
    (
        r"slurm|srun|OUT_OF_ME|memory limit",
        "sacct -j JOB --format=JobID,State,ReqMem,MaxRSS  # then ask for more, sbatch --mem=64G",
    ),
    (
        r"OOMKilled",
        "kubectl describe pod POD  # its limit; then raise resources.limits.memory",
    ),
    (
        r"oom-killer|Killed? process|oom-kill",
        "dmesg -T | grep -i oom  # which process the kernel ended, and what it held",
    ),
    (r"", "free -g; ulimit -v  # how much memory the host has, and this process may have"),
)
OF_ENGINES = {
    "jax": 'jax.profiler.save_device_memory_profile("memory.prof")  # which arrays hold the memory',
    "tensorflow": 'tf.config.experimental.get_memory_info("GPU:0")  # current and peak bytes',
    "llama.cpp": "llama-cli -m MODEL --n-gpu-layers 20 --ctx-size 4096  # less on the device",
    "vllm": "vllm serve MODEL --max-model-len 8192  # less memory for the KV cache",
    "cupy": "cupy.get_default_memory_pool().used_bytes()  # what its pool holds",
}


def remedies_for(error: OomText) -> tuple[str, ...]:
    """Return what to type after an error of a log, the likeliest help first."""
    cause = error.cause()
    if cause == "host":
        return (next(line for word, line in OF_HOST if re.search(word, error.line, re.IGNORECASE)),)
    if cause == "pinned":
        return PINNED
    if error.engine != "torch":
        own = OF_ENGINES[error.engine]
        return (*NEIGHBOURS[error.vendor], own) if cause == "others" else (own,)
    lines = {
        "live": (SAVINGS,),
        "request": (LARGEST,),
        "fragmentation": (*_setting_for(error), SHAPES),
        "cap": (UNCAP,),
        "others": NEIGHBOURS[error.vendor],
    }.get(cause, ())
    if error.vendor in HAVE_RECORDING and not error.old_form:
        lines = (*lines, *RECORD)
    return lines


def expansion_beside(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what to type for expandable segments beside a snapshot's settings, if they can be had.

    It calls the settings by the variable that all versions of torch read, and read first, whichever
    they came from.
    """
    version = "2.13" if IN_SNAPSHOTS_SINCE_2_13 in settings else OLDEST
    before = settings.get(VARIABLES[0])
    kept = {}
    if isinstance(before, str) and SETTINGS_FORM.fullmatch(before):
        kept = {VARIABLES[0]: before}
    variable, _, value = to_expand(kept, version).partition("=")
    return (f"export {variable}={shlex.quote(value)}",) if variable else ()


def _setting_for(error: OomText) -> tuple[str, ...]:
    """Return the setting against fragmentation that this version of torch knows, if any."""
    if error.vendor not in HAVE_RECORDING:
        return ()
    variable = error.settings or "PYTORCH_CUDA_ALLOC_CONF"
    if error.old_form:
        return (OF_OLD_TORCH[error.old_form].format(variable=variable),)
    remark = ""
    if variable == "PYTORCH_ALLOC_CONF":
        remark = "  # torch 2.9 reads only PYTORCH_CUDA_ALLOC_CONF"
    return (f"export {variable}=expandable_segments:True{remark}",)
