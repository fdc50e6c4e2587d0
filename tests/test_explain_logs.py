"""`oomprobe.explain` of the texts that the world pastes: one right cause each, and no false sentence."""

import gzip
import json
import time

import pytest

import oomprobe
from oomprobe.explaining import explanation, log

GIB, MIB = 2**30, 2**20
TRACE = (
    "Traceback (most recent call last):\n"
    '  File "/me/fit.py", line 211, in main\n'
    "    loss = model(batch).mean()\n"
)
RAISED = f"{TRACE}torch.OutOfMemoryError: "


def new(asked, total, free, own, live, unused, card=0, lead="CUDA"):
    """Return the text of torch from 2.1 on; `own` is a whole sentence."""
    return (
        f"{lead} out of memory. Tried to allocate {asked}. GPU {card} has a total capacity of {total} "
        f"of which {free} is free. {own}Of the allocated memory {live} is allocated by PyTorch, and "
        f"{unused} is reserved by PyTorch but unallocated. If reserved but unallocated memory is large "
        "try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.\n"
    )


def own(size):
    return f"Including non-PyTorch memory, this process has {size} memory in use. "


IN_PIECES = new("2.00 GiB", "23.64 GiB", "1.04 GiB", own("22.60 GiB"), "12.00 GiB", "10.20 GiB")
FULL = new("2.00 GiB", "23.64 GiB", "1.04 GiB", own("22.60 GiB"), "21.90 GiB", "0.30 GiB")
NO_LIMIT = (
    "PyTorch limit (set by user-supplied memory fraction)\n"
    "                        : 17179869184.00 GiB\n"
)
ASYNC = (
    "Allocation on device 0 would exceed allowed memory. (out of memory)\n"
    "Currently allocated     : 22.10 GiB\nRequested               : 2.00 GiB\n"
    "Device limit            : 23.65 GiB\nFree (according to CUDA): 1.00 GiB\n" + NO_LIMIT
)
METAL = (
    "RuntimeError: MPS backend out of memory (MPS allocated: {}, other allocations: {}, max "
    "allowed: {}). Tried to allocate {} on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to "
    "disable upper limit for memory allocations (may cause system failure).\n"
)
CACHED = (
    "RuntimeError: CUDA out of memory. Tried to allocate 1.40 GiB (GPU 0; 15.78 GiB total capacity; "
    "11.52 GiB already allocated; 611.44 MiB free; 2.57 GiB cached)"
)
ALREADY = CACHED.replace("2.57 GiB cached", "14.09 GiB reserved in total by PyTorch")
OF_XPU = (
    "XPU out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 15.11 GiB. Of the "
    "allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is reserved by PyTorch but "
    "unallocated. Please use `empty_cache` to release all unoccupied cached memory."
)
OTHERS = new("2.14 GiB", "23.64 GiB", "71.06 MiB", own("3.95 GiB"), "3.20 GiB", "353.02 MiB")
UNSEEN = new("2.00 GiB", "23.64 GiB", "1.04 GiB", own("0 bytes"), "6.00 GiB", "512.00 MiB")
PIN = "    return data.pin_memory(device)\ntorch.AcceleratorError: CUDA error: out of memory\n"
LARGER = new("156.25 GiB", "79.14 GiB", "70.11 GiB", own("9.02 GiB"), "8.20 GiB", "310.51 MiB")
OF_HIP = new("4.50 GiB", "15.98 GiB", "1.31 GiB", "", "1.22 GiB", "160.50 MiB", lead="HIP")

# text, cause, engine, requested bytes, what the report says, what it must not say
CASES = {
    "cached of torch 1.3": (CACHED, "fragmentation", "torch", 1503238553, "14.09 GiB by torch", "PYTORCH"),
    "reserved of torch 1.10": (ALREADY, "fragmentation", "torch", 1503238553, "export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128", "export PYTORCH_CUDA_ALLOC_CONF=exp"),
    "old, and others must hold 30 GiB": ("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 31.75 GiB total capacity; 612.33 MiB already allocated; 14.75 MiB free; 622.00 MiB reserved in total by PyTorch)", "others", "torch", 20 * MIB, "nvidia-smi", "live tensors"),
    "cuBLAS": (f"{TRACE}RuntimeError: cuBLAS: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "unknown", "torch", None, "CUBLAS_STATUS_ALLOC_FAILED", "live tensors"),
    "in pieces": (RAISED + IN_PIECES, "fragmentation", "torch", 2 * GIB, "export PYTORCH_ALLOC_CONF=expandable_segments:True", "other processes"),
    "capacty": (RAISED + OTHERS.replace("capacity", "capacty"), "others", "torch", int(2.14 * GIB), "nvidia-smi", "live tensors"),
    "AMD": (RAISED + OF_HIP, "others", "torch", int(4.5 * GIB), "rocm-smi", "nvidia-smi"),
    "Intel before free was stated": (RAISED + OF_XPU, "unknown", "torch", 8 * GIB, "xpu-smi", "  free"),
    "Intel": (RAISED + FULL.replace("CUDA", "XPU"), "live", "torch", 2 * GIB, "--savings all", "torch.cuda"),
    "Metal, its own": (METAL.format("17.61 GB", "4.05 MB", "18.13 GB", "1024.00 MB"), "live", "torch", GIB, "--savings all", "nvidia-smi"),
    "Metal, others": (METAL.format("2.10 GB", "42.90 GB", "45.90 GB", "1.20 GB"), "others", "torch", int(1.2 * GIB), "allocations outside of torch's allocator", "other processes"),
    "Metal, more than its cap": (METAL.format("1.00 GB", "1.00 GB", "18.00 GB", "18.50 GB"), "request", "torch", int(18.5 * GIB), "one request is larger", "nvidia-smi"),
    "as large as the card": (RAISED + new("23.64 GiB", "23.64 GiB", "1.04 GiB", own("22.60 GiB"), "21.90 GiB", "0.30 GiB"), "live", "torch", int(23.64 * GIB), "--savings all", "one request is larger"),
    "no limit": (ASYNC, "live", "torch", 2 * GIB, "would exceed allowed memory", "It is: B"),
    "a limit": (ASYNC.replace("22.10", "10.93").replace("1.00 GiB", "11.40 GiB").replace("17179869184.00", "11.82"), "cap", "torch", 2 * GIB, "set_per_process_memory_fraction", "savings"),
    "unseen by the driver": (RAISED + UNSEEN, "unknown", "torch", 2 * GIB, "did not see", "other processes hold the memory"),
    "seen but for rounding": (RAISED + IN_PIECES.replace("22.60", "22.18"), "fragmentation", "torch", 2 * GIB, "expandable_segments:True", "did not see"),
    "larger than the card": (RAISED + LARGER, "request", "torch", int(156.25 * GIB), "one request is larger", "live tensors"),
    "1EB": (f"{RAISED}CUDA out of memory. Tried to allocate more than 1EB memory.", "request", "torch", None, "1EB", "live tensors"),
    "pinned": (TRACE + PIN, "pinned", "torch", None, "pinned_max_round_threshold_mb", "nvidia-smi"),
    "the host's allocator": (f"{TRACE}RuntimeError: [enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 133205862400 bytes.", "host", "host", 133205862400, "the host's memory", "nvidia-smi"),
    "C++": (f"{TRACE}RuntimeError: std::bad_alloc\n", "host", "host", None, "the host's memory", "nvidia-smi"),
    "an array": ("numpy.core._exceptions._ArrayMemoryError: Unable to allocate 14.9 GiB for an array with shape (2000000000,)", "host", "host", int(14.9 * GIB), "free -g", "nvidia-smi"),
    "MemoryError": (f"{TRACE}MemoryError\n", "host", "host", None, "free -g", "nvidia-smi"),
    "a worker of a loader": (f"{TRACE}RuntimeError: DataLoader worker (pid 5172) is killed by signal: Killed. ", "host", "host", None, "num_workers=2", "nvidia-smi"),
    "shared memory": (f"{TRACE}RuntimeError: DataLoader worker (pid 33) is killed by signal: Bus error. It is possible that ...", "host", "host", None, "--shm-size", "nvidia-smi"),
    "Slurm": ("slurmstepd: error: Detected 1 oom_kill event in StepId=123.batch. Some of the step tasks have been OOM Killed.\nsrun: error: node1: task 0: Out Of Memory\n", "host", "host", None, "sbatch --mem", "2 such errors"),
    "the kernel": ("[12345.7] Out of memory: Killed process 4242 (python) total-vm:123456kB, anon-rss:63421234kB\n", "host", "host", None, "dmesg", "nvidia-smi"),
    "Kubernetes": ("    State:  Terminated\n      Reason:       OOMKilled\n      Exit Code:    137\n", "host", "host", None, "kubectl describe", "nvidia-smi"),
    "at the first byte": ("OOMKilled\n", "host", "host", None, "kubectl describe", "nvidia-smi"),
    "JAX": ("jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4731502592 bytes.", "unknown", "jax", 4731502592, "JAX, not torch", "torch.cuda"),
    "TensorFlow": ("tensorflow.python.framework.errors_impl.ResourceExhaustedError: OOM when allocating tensor with shape[256,112,112,64] and type float on /job:localhost/device:GPU:0 by allocator GPU_0_bfc", "unknown", "tensorflow", 822083584, "TensorFlow, not torch", "torch.cuda"),
    "llama.cpp": ("ggml_backend_cuda_buffer_type_alloc_buffer: allocating 5000.00 MiB on device 0: cudaMalloc failed: out of memory\nalloc_tensor_range: failed to allocate CUDA0 buffer of size 5242880000\n", "unknown", "llama.cpp", 5000 * MIB, "llama.cpp, not torch", "such errors"),
    "TensorFlow on the host": ("ResourceExhaustedError: OOM when allocating tensor with shape[100000,100000] and type half on /job:localhost/device:CPU:0 by allocator cpu", "host", "tensorflow", 20_000_000_000, "free -g", "the device's memory:"),
    "llama.cpp's pool": ("CUDA error: out of memory\n  current device: 0, in function alloc at ggml-cuda.cu:291\n", "unknown", "llama.cpp", None, "llama.cpp, not torch", "torch.cuda"),
    "CuPy": ("cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 2,000,000,000 bytes (allocated so far: 512 bytes).", "unknown", "cupy", 2_000_000_000, "CuPy, not torch", "torch.cuda"),
    "vLLM at its start": ("ValueError: Free memory on device (6.51/23.64 GiB) on startup is less than desired GPU memory utilization (0.9, 21.28 GiB).", "others", "vllm", int(21.28 * GIB), "nvidia-smi", "torch.cuda"),
    "vLLM's cache": ("ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is needed, which is larger than the available KV cache memory (7.69 GiB).", "unknown", "vllm", 16 * GIB, "--max-model-len", "torch.cuda"),
}  # fmt: skip


@pytest.fixture
def explained(tmp_path):
    def explain(contents):
        path = tmp_path / "train.log"
        path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
        return oomprobe.explain(path)

    return explain


@pytest.mark.parametrize("name", CASES)
def test_each_text_has_one_cause(name, explained):
    text, cause, engine, requested_bytes, said, not_said = CASES[name]
    explanation = explained(text)
    report = " ".join(str(explanation).split())
    assert (explanation.cause, explanation.engine) == (cause, engine)
    assert explanation.requested_bytes == requested_bytes
    assert said in report
    assert not_said not in report
    by_figures = engine == "torch" and cause not in ("request", "pinned")
    assert ("Likely, not certain" in report) is by_figures
    assert ("all that it states is above" in report) is (engine not in ("torch", "host"))
    assert "None" not in report
    assert max(map(len, str(explanation).splitlines())) <= 100
    json.dumps(explanation.to_dict())


def test_a_torch_that_cannot_record_is_not_told_to(explained):
    for text, is_told in ((CACHED, False), (ALREADY, False), (RAISED + IN_PIECES, True)):
        explanation = explained(text)
        assert ("_record_memory_history" in "".join(explanation.advice)) is is_told
        assert ("record one the next time" in "".join(explanation.notes)) is is_told


def test_figures_without_a_unit_of_nothing_and_of_the_second_report(explained):
    assert explained(CASES["vLLM at its start"][0]).free_bytes == int(6.51 * GIB)
    assert explained(OF_XPU).live_bytes == 0
    twice = f"XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory.\n\n{CASES['JAX'][0]}"
    assert explained(twice).requested_bytes == 4731502592


def test_tensorflow_states_a_shape_and_a_type(explained):
    text = CASES["TensorFlow"][0]
    kinds = {8: "double int64 complex64", 4: "float", 2: "half bfloat16", 1: "bool int8 uint8"}
    for item_bytes, kind in ((nbytes, kind) for nbytes in kinds for kind in kinds[nbytes].split()):
        of_kind = explained(text.replace("type float", f"type {kind}"))
        assert of_kind.requested_bytes == item_bytes * 256 * 112 * 112 * 64
    assert explained(text.replace("256,112", f"{10**11},{10**11}")).requested_bytes == 2**63 - 1


def test_no_advice_empties_the_cache(explained):
    for text, *_ in CASES.values():
        advice = "\n".join(explained(text).advice)
        assert "empty_cache" not in advice
        assert "roundup" not in advice


# --- whatever the file is ---

LINES = f"step 12\n{RAISED}{IN_PIECES}"
COLOURED = LINES.replace("2.00", "\x1b[1;36m2.00\x1b[0m").replace("GPU 0", "GPU \x1b[1m0\x1b[0m")
WRAPPED = LINES.replace(" is ", "\nis ").replace("of memory. ", "of memory.\n")
FILES = {
    "colours": COLOURED.encode(),
    "a mark": b"\xef\xbb\xbf" + LINES.encode(),
    "UTF-16": LINES.encode("utf-16"),
    "UTF-16 without a mark": LINES.encode("utf-16-le"),
    "UTF-16, big end first": LINES.encode("utf-16-be"),
    "gzip": gzip.compress(LINES.encode()),
    "Windows' lines": LINES.replace("\n", "\r\n").encode(),
    "a progress bar": f"  1%| | 1/9\r  2%| | 2/9\r{LINES}".encode(),
    "wrapped": WRAPPED.encode(),
    "wrapped in an object": json.dumps({"message": WRAPPED}).encode(),
    "wrapped by srun": b"".join(f"0: {line}\n".encode() for line in WRAPPED.split("\n")),
    "framed": "\n".join(f"\u2502 {line} \u2502" for line in LINES.split("\n")).encode(),
    "a logger of objects": json.dumps({"level": "error", "message": LINES}).encode(),
    "a list of lines": json.dumps({"exception": LINES.split("\n")}).encode(),
    "far back in an object": json.dumps({"arguments": "-v " * 200, "message": LINES}).encode(),
    "a container": b"".join(
        json.dumps({"log": f"{line}\n"}).encode() + b"\n" for line in LINES.split("\n")
    ),
    "Kubernetes": b"".join(
        f"2024-05-05T10:00:00.123456789Z stderr F {line}\n".encode() for line in LINES.split("\n")
    ),
    "srun --label": b"".join(f"0: {line}\n".encode() for line in LINES.split("\n")),
}


@pytest.mark.parametrize("name", FILES)
def test_whatever_the_file_is(name, explained):
    explanation = explained(FILES[name])
    assert (explanation.cause, explanation.requested_bytes) == ("fragmentation", 2 * GIB)
    assert explanation.live_bytes == 12 * GIB


def test_figures_in_objects_of_one_line_each(explained):
    lines = [json.dumps({"log": f"{line}\n"}) for line in ASYNC.split("\n")]
    assert explained("\n".join(lines)).live_bytes == int(22.1 * GIB)


def test_a_gzip_file_is_unpacked_up_to_a_limit(explained, monkeypatch):
    monkeypatch.setattr(explanation, "MOST_LOG_BYTES", 1000)
    with pytest.raises(oomprobe.InvalidArgumentError, match="when unpacked: pass its end"):
        explained(gzip.compress(b"x" * 10**6))
    log = LINES.ljust(1000)
    for contents in (log.encode(), gzip.compress(log.encode())):
        assert explained(contents).cause == "fragmentation"
    with pytest.raises(oomprobe.InvalidArgumentError, match="a log may have 1000 B: pass its end"):
        explained(f"{log}.")


# --- which message, and whether the run went on ---

SKIPPED = f"WARNING batch 812 skipped: {IN_PIECES}"
DIED = f"{TRACE}torch.AcceleratorError: CUDA error: out of memory\n"
GROWN = IN_PIECES.replace("2.00", "3.00")
NCCL = (
    f"{TRACE}torch.distributed.DistBackendError: NCCL error in: x.cpp:1251, unhandled cuda error, "
    "NCCL version 2.19.3\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
    "Cuda failure 2 'out of memory'\n"
)


@pytest.mark.parametrize(
    ("text", "cause", "count", "went_on", "ended_with"),
    [
        (LINES, "fragmentation", 1, False, ""),
        (IN_PIECES, "fragmentation", 1, None, ""),
        (f"{SKIPPED}epoch 3: loss 0.4\n{TRACE}KeyError: 'ids'\n", "fragmentation", 1, True, "KeyError: 'ids'"),
        (f"{LINES}Decreasing batch size to: 32.\nepoch 1 loss 0.2\n", "fragmentation", 1, True, ""),
        (f"{LINES}  1%| | 12/1170 [00:51<1:20:40]\n", "fragmentation", 1, False, ""),
        (f"[rank0]: torch.OutOfMemoryError: {IN_PIECES}[rank1]: step 7 loss 0.2\n", "fragmentation", 1, False, ""),
        (f"{LINES}wandb: Run summary: train/loss 0.3\n", "fragmentation", 1, False, ""),
        (f"{SKIPPED}epoch 4 done\n{DIED}", "unknown", 2, False, ""),
        (f"{LINES}epoch 4 done\n{RAISED}{FULL}", "live", 2, False, ""),
        (f"{IN_PIECES}{FULL}", "live", 2, None, ""),
        (f"{RAISED}{IN_PIECES}{RAISED}{GROWN}", "fragmentation", 2, False, ""),
        (f"!!! Exception !!! {ASYNC}{TRACE}torch.OutOfMemoryError: {ASYNC}", "live", 1, None, ""),
        ("CUDA out of memory with batch=16. Reducing to batch=8 and retrying.\n1/100 7.1G\n", "unknown", 1, True, ""),
        (f"{RAISED}{FULL}{DIED}", "unknown", 2, False, ""),
        (f"{RAISED}{FULL}CUDA error: out of memory\n", "live", 1, False, ""),
        (NCCL, "unknown", 1, False, ""),
        (f"{DIED}Search for `cudaErrorMemoryAllocation' in the docs\n", "unknown", 1, False, ""),
    ],
)  # fmt: skip
def test_how_the_run_ended(text, cause, count, went_on, ended_with, explained):
    explanation = explained(text)
    assert explanation.cause == cause
    assert (explanation.went_on, explanation.ended_with) == (went_on, ended_with)
    counted = [note for note in explanation.notes if "such errors" in note]
    assert counted == ([f"The log has {count} such errors; this is about the last."] * (count > 1))
    assert ("!! The run went on" in str(explanation)) is (went_on is True)
    assert ended_with in str(explanation)


RANKS = "".join(
    f"[rank{rank}]: torch.OutOfMemoryError: {text}" for rank, text in ((2, IN_PIECES), (0, FULL))
)
LAUNCHER = (
    "Root Cause (first observed failure):\n  rank      : {} (local_rank: 0)\n  exitcode  : 1\n"
)


@pytest.mark.parametrize(
    ("text", "cause", "ranks"),
    [
        (RANKS, "fragmentation", {"rank 2": "fragmentation", "rank 0": "live"}),
        (RANKS + LAUNCHER.format(7), "fragmentation", {"rank 2": "fragmentation", "rank 0": "live"}),
        (RANKS + LAUNCHER.format(0), "live", {"rank 2": "fragmentation", "rank 0": "live"}),
        (f"{IN_PIECES}{FULL.replace('GPU 0', 'GPU 1')}", "fragmentation", {"GPU 0": "fragmentation", "GPU 1": "live"}),
        (f"1: OutOfMemoryError: {IN_PIECES}0: OutOfMemoryError: {FULL}", "fragmentation", {"rank 1": "fragmentation", "rank 0": "live"}),
        (f"[rank2]: {FULL}[rank0]: {FULL}", "live", {"rank 2": "live", "rank 0": "live"}),
        (f"[rank2]: {IN_PIECES}[rank0]: {FULL}[rank2]: {GROWN}", "live", {"rank 0": "live", "rank 2": "fragmentation"}),
        (f"[rank2]: {IN_PIECES}{'.' * 20_001}\n[rank0]: {FULL}", "live", {"rank 0": "live"}),
        (f"{RANKS}epoch 2 done\n[rank1]: {FULL}", "live", {"rank 1": "live"}),
    ],
)  # fmt: skip
def test_each_rank_has_a_line(text, cause, ranks, explained):
    explanation = explained(text)
    assert explanation.cause == cause
    assert list(explanation.ranks.items()) == list(ranks.items())
    for rank in ranks:
        assert (f"  - {rank}: " in str(explanation)) is (len(ranks) > 1)
    about = next(rank for rank in ranks if ranks[rank] == cause)
    assert (f"; this is about that of {about}." in str(explanation.notes)) is (len(ranks) > 1)


@pytest.mark.parametrize(
    "line",
    [
        "Tip: if you see 'CUDA out of memory', lower --batch-size.",
        "Reduce the batch size to avoid CUDA out of memory errors",
        "a longer sequence may cause CUDA out of memory",
        '    if "CUDA out of memory" in str(error):',
        "    except torch.OutOfMemoryError:",
        "RuntimeError: could not create a primitive",  # it may have run out of memory, or not
    ],
)
def test_a_line_that_only_quotes_an_error_is_none(line, explained):
    with pytest.raises(oomprobe.InvalidArgumentError, match="holds no out-of-memory error"):
        explained(f"step 1\n{line}\nepoch 1 done\n")
    assert explained(f"{line}\n{RAISED}{IN_PIECES}").cause == "fragmentation"


def test_a_step_that_failed_is_no_advice(explained):
    """Words that stand in advice stand before real errors, too."""
    for lead in ("failed to run step 3: ", "unable to get a batch: "):
        assert explained(f"ERROR {lead}{IN_PIECES}").cause == "fragmentation"


def test_room_that_nobody_used_is_told(explained):
    room = new("2.00 GiB", "23.64 GiB", "11.00 GiB", own("12.60 GiB"), "11.90 GiB", "0.05 GiB")
    report = " ".join(str(explained(RAISED + room)).split())
    assert "More was free than was asked for" in report
    assert "Other processes may hold" not in report
    for free, is_room in (("2068.00 MiB", True), ("2067.00 MiB", False)):  # a segment's rounding
        text = RAISED + room.replace("11.00 GiB is", f"{free} is")
        assert ("More was free" in str(explained(text).notes)) is is_room
    capped = room.replace("Of the allocated", "12.00 GiB allowed; Of the allocated")
    assert "More was free" not in " ".join(str(explained(RAISED + capped)).split())


def test_what_a_launcher_or_a_caught_error_says_is_no_end(explained):
    caught = f"{SKIPPED}{TRACE}KeyError: 'ids'\nepoch 5 loss 0.1\n"
    assert explained(caught).ended_with == ""
    launched = f"{SKIPPED}epoch 5 loss 0.1\n{TRACE}ValueError: nan\nChildFailedError: \n"
    assert explained(launched).ended_with == "ValueError: nan"


# --- long logs ---


def test_an_error_is_read_among_many_hints(explained, monkeypatch):
    monkeypatch.setattr(log, "MOST_JUDGED", 50)
    hints = "http_status_code 200, fft_size 512\n" * 200
    assert explained(f"{RAISED}{IN_PIECES}{hints}").cause == "fragmentation"


@pytest.mark.parametrize(
    "unit",
    [
        "step 3 loss 0.31, 4.2 GiB of memory used\n",
        "out of memory ",
        "Tried to allocate ",
        "OpenBLAS ",
        "RESOURCE_EXHAUSTED: ",
        f"WARNING skipped: {IN_PIECES}",
        "\x1b[",
        '{"level": 3, "message": "CUDA out of memory"}\n',
        "  1%| | 1/9\r",
    ],
)
def test_a_long_log_takes_seconds(unit, explained):
    text = unit * (8 * 10**6 // len(unit))
    started = time.process_time()
    assert explained(f"{text}\n{RAISED}{IN_PIECES}").requested_bytes == 2 * GIB
    assert time.process_time() - started < 5


def test_more_errors_than_are_read_are_at_least_so_many(explained, monkeypatch):
    monkeypatch.setattr(log, "MOST_JUDGED", 8)
    text = "".join(f"skipped: {IN_PIECES}step {step}\n" for step in range(20))
    [counted] = [note for note in explained(text).notes if "such errors" in note]
    assert counted.startswith("The log has at least ")
