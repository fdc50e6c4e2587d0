"""A page for each error text that `oomprobe explain` reads, as people search for it: docs/errors.

    python scripts/error_pages.py    # writes them anew; tests/test_error_pages.py fails where they are not current

What a page says about its texts is what `oomprobe.explain` says. The pages are committed, so that the search of a repository's
host finds them too, and not only that of the site.
"""

import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import oomprobe  # noqa: E402
from oomprobe.ground.units import format_bytes  # noqa: E402

FOLDER = ROOT / "docs" / "errors"
TRACE = "Traceback (most recent call last):\n"
NEW = (
    "torch.OutOfMemoryError: {} out of memory. Tried to allocate {}. GPU 0 has a total capacity of {} of which {} is free. "
    "Including non-PyTorch memory, this process has {} memory in use. {}Of the allocated memory {} is allocated by PyTorch, "
    "and {} is reserved by PyTorch but unallocated."
)
OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate {} (GPU 0; 23.65 GiB total capacity; {} already allocated; "
    "{} free; {} {})"
)
METAL = (
    "RuntimeError: MPS backend out of memory (MPS allocated: {}, other allocations: {}, max allowed: 18.13 GiB). "
    "Tried to allocate {} on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for memory "
    "allocations (may cause system failure)."
)
ASYNC = (
    "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)\n"
    "Currently allocated     : {}\nRequested               : 2.00 GiB\nDevice limit            : 23.65 GiB\n"
    "Free (according to CUDA): {}\nPyTorch limit (set by user-supplied memory fraction)\n"
    "                        : {}"
)
IN_RESERVED = "reserved in total by PyTorch"
NO_FIGURES = "It states no figures, so that the text alone does not tell what held the memory."
OF_HOST = "The program asked the operating system for memory of the host, and there was none."

# Title, who says so and when, and texts by the cause that each has.
PAGES = (
    (
        "CUDA out of memory. Tried to allocate ... GPU 0 has a total capacity of ... of which ... is free",
        "torch raises it since 2.1, when its allocator finds no room for a tensor, has emptied its cache and asked the driver again.",
        {
            "live": NEW.format("CUDA", "2.00 GiB", "23.64 GiB", "1.04 GiB", "22.60 GiB", "", "21.90 GiB", "300.00 MiB"),
            "fragmentation": NEW.format("CUDA", "2.00 GiB", "23.64 GiB", "1.04 GiB", "22.60 GiB", "", "12.00 GiB", "10.20 GiB"),
            "others": NEW.format("CUDA", "2.14 GiB", "23.64 GiB", "71.06 MiB", "3.95 GiB", "", "3.20 GiB", "353.02 MiB"),
            "cap": NEW.format("CUDA", "2.00 GiB", "23.64 GiB", "11.21 GiB", "12.43 GiB", "12.00 GiB allowed; ", "11.60 GiB", "200.00 MiB"),
            "request": NEW.format("CUDA", "156.25 GiB", "79.14 GiB", "70.11 GiB", "9.02 GiB", "", "8.20 GiB", "310.51 MiB"),
        },
    ),
    (
        "CUDA out of memory. Tried to allocate ... (GPU 0; ... total capacity; ... already allocated; ... reserved in total by PyTorch)",
        "torch 1.4 to 2.0 say so.",
        {
            "live": OLD.format("1.40 GiB", "21.52 GiB", "611.44 MiB", "22.09 GiB", IN_RESERVED),
            "fragmentation": OLD.format("1.40 GiB", "11.52 GiB", "611.44 MiB", "22.09 GiB", IN_RESERVED),
        },
    ),
    (
        "CUDA out of memory. Tried to allocate ... (GPU 0; ... total capacity; ... already allocated; ... free; ... cached)",
        "torch 1.0 to 1.3 say so. What is cached there is beyond what is allocated.",
        {
            "live": OLD.format("1.40 GiB", "21.52 GiB", "611.44 MiB", "582.00 MiB", "cached"),
            "fragmentation": OLD.format("1.40 GiB", "18.52 GiB", "611.44 MiB", "3.57 GiB", "cached"),
        },
    ),
    (
        "CUDA error: out of memory",
        f"The driver refused memory to something else than torch's allocator: a context, a kernel, a library, or pinned memory. {NO_FIGURES}",
        {"unknown": f"{TRACE}torch.AcceleratorError: CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the documentation"},
    ),
    (
        "CUDA error: out of memory with pin_memory (cudaHostAlloc)",
        "Pinned memory is memory of the host, which CUDA allocates and reports as its own.",
        {"pinned": f'{TRACE}  File "train.py", line 80, in load\n    batch = batch.pin_memory()\ntorch.AcceleratorError: CUDA error: out of memory'},
    ),
    (
        "Tried to allocate more than 1EB memory",
        "The size of one request is beyond all memory: a length may be negative, or have overflowed.",
        {"request": "RuntimeError: CUDA out of memory. Tried to allocate more than 1EB memory."},
    ),
    (
        "Allocation on device 0 would exceed allowed memory. (out of memory)",
        "torch says so where `backend:cudaMallocAsync` is set, as ComfyUI does.",
        {
            "live": ASYNC.format("22.10 GiB", "1.00 GiB", "17179869184.00 GiB"),
            "cap": ASYNC.format("10.93 GiB", "11.40 GiB", "11.82 GiB"),
        },
    ),
    (
        "HIP out of memory. Tried to allocate",
        "The same allocator, on a card of AMD.",
        {
            "live": NEW.format("HIP", "978.00 MiB", "15.98 GiB", "630.00 MiB", "15.35 GiB", "", "14.60 GiB", "160.50 MiB"),
            "fragmentation": NEW.format("HIP", "2.00 GiB", "15.98 GiB", "630.00 MiB", "15.35 GiB", "", "10.40 GiB", "4.30 GiB"),
        },
    ),
    (
        "XPU out of memory. Tried to allocate",
        "torch on a card of Intel. It does not always say how much was free.",
        {
            "live": NEW.format("XPU", "2.00 GiB", "15.11 GiB", "1.04 GiB", "14.07 GiB", "", "13.70 GiB", "200.00 MiB"),
            "unknown": "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 15.11 GiB. Of the "
            "allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated.",
        },
    ),
    (
        "MPS backend out of memory (MPS allocated: ..., other allocations: ..., max allowed: ...)",
        "torch on an Apple GPU, which shares the memory of the machine.",
        {
            "live": METAL.format("17.61 GiB", "4.05 MiB", "1.00 GiB"),
            "others": METAL.format("2.10 GiB", "15.90 GiB", "1.20 GiB"),
        },
    ),
    (
        "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
        f"The driver of an Intel card refused memory. {NO_FIGURES}",
        {"unknown": "RuntimeError: level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"},
    ),
    (
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)",
        "cuBLAS, cuDNN and other libraries take memory beside torch's allocator, which may hold the rest of the card in its cache. "
        "The same goes for `CUDNN_STATUS_ALLOC_FAILED` and `CUFFT_ALLOC_FAILED`.",
        {"unknown": "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"},
    ),
    (
        "cublas runtime error : resource allocation failed",
        "torch up to 1.1 says so where cuBLAS got no memory.",
        {"unknown": "RuntimeError: cublas runtime error : resource allocation failed at aten/src/THC/THCGeneral.cpp:228"},
    ),
    (
        "NCCL error: unhandled cuda error, Cuda failure 2 'out of memory'",
        "NCCL takes its buffers beside torch's allocator, for each communicator. Without its last line, `unhandled cuda error` may "
        "have other causes; `NCCL_DEBUG=INFO` prints it.",
        {"unknown": "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.21.5\n"
                    "Last error:\nCuda failure 2 'out of memory'"},
    ),
    (
        "Triton Error [CUDA]: out of memory",
        "A kernel of Triton was loaded, or took scratch memory, beside torch's allocator.",
        {"unknown": "RuntimeError: Triton Error [CUDA]: out of memory"},
    ),
    (
        "get_temporary_buffer failed, parallel_for failed: out of memory (Thrust)",
        "Thrust, in a sort or a scan, got no scratch memory.",
        {"unknown": "RuntimeError: temporary_buffer::allocate: get_temporary_buffer failed"},
    ),
    (
        "MIOpen Error: Memory not available to allocate buffer",
        "MIOpen, AMD's library of convolutions, got no workspace.",
        {"unknown": "MIOpen Error: handlehip.cpp:70: Memory not available to allocate buffer: 655360000"},
    ),
    (
        "Insufficient Memory (kIOGPUCommandBufferCallbackErrorOutOfMemory)",
        "Metal could not run a command, as the machine's memory was full.",
        {"unknown": "Error: command buffer exited with error status.\nInsufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"},
    ),
    (
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate ... bytes",
        f"torch says so of a tensor on the CPU. {OF_HOST}",
        {"host": "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
                 "allocate 2147483648 bytes. Error code 12 (Cannot allocate memory)"},
    ),
    (
        "numpy: Unable to allocate ... for an array with shape",
        OF_HOST,
        {"host": "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 14.9 GiB for an array with shape (2000000000,) and data type float64"},
    ),
    ("MemoryError", OF_HOST, {"host": f"{TRACE}MemoryError"}),
    ("std::bad_alloc", OF_HOST, {"host": "terminate called after throwing an instance of 'std::bad_alloc'"}),
    ("OSError: [Errno 12] Cannot allocate memory", OF_HOST, {"host": "OSError: [Errno 12] Cannot allocate memory"}),
    (
        "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED, UR_RESULT_ERROR_OUT_OF_HOST_MEMORY",
        f"A library of the device says so. {OF_HOST}",
        {"host": "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"},
    ),
    (
        "libgomp: Out of memory, OpenBLAS: memory allocation still failed",
        f"A library of the CPU says so. {OF_HOST}",
        {"host": "libgomp: Out of memory allocating 65536 bytes"},
    ),
    (
        "DataLoader worker (pid ...) is killed by signal: Killed",
        "The system ended a worker of the data loader, most often as the memory of the machine, the job or the container was used up.",
        {"host": f"{TRACE}RuntimeError: DataLoader worker (pid 5172) is killed by signal: Killed. "},
    ),
    (
        "DataLoader worker is killed by signal: Bus error. insufficient shared memory (shm)",
        "Workers hand over batches in `/dev/shm`, which containers limit to 64 MB unless they are told otherwise.",
        {"host": f"{TRACE}RuntimeError: DataLoader worker (pid 33) is killed by signal: Bus error. It is possible that dataloader's workers are "
                 "out of shared memory. Please try to raise your shared memory limit."},
    ),
    (
        "slurmstepd: error: Detected 1 oom_kill event, srun: error: Out Of Memory",
        "The job used more memory of the host than it had asked Slurm for.",
        {"host": "slurmstepd: error: Detected 1 oom_kill event in StepId=123.batch. Some of the step tasks have been OOM Killed.\n"
                 "srun: error: node1: task 0: Out Of Memory"},
    ),
    (
        "Out of memory: Killed process (the kernel's OOM killer)",
        "The kernel ended a process to free memory of the host. Its shell prints `Killed`, and the exit status is 137.",
        {"host": "Out of memory: Killed process 4242 (python) total-vm:123456kB, anon-rss:63421234kB"},
    ),
    (
        "OOMKilled, exit code 137 (Kubernetes)",
        "The container used more memory of the host than its limit.",
        {"host": "    State:      Terminated\n      Reason:   OOMKilled\n      Exit Code: 137"},
    ),
    (
        "RESOURCE_EXHAUSTED: Out of memory while trying to allocate ... bytes (JAX)",
        "XLA, under JAX, reserves most of the device in advance, and found no room in it.",
        {"unknown": "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4731502592 bytes."},
    ),
    (
        "ResourceExhaustedError: OOM when allocating tensor with shape (TensorFlow)",
        "TensorFlow reserves most of the device in advance, and found no room in it. By the allocator `cpu` it is the host's memory.",
        {
            "unknown": "ResourceExhaustedError: OOM when allocating tensor with shape[256,112,112,64] and type float on "
            "/job:localhost/device:GPU:0 by allocator GPU_0_bfc",
            "host": "ResourceExhaustedError: OOM when allocating tensor with shape[100000,100000] and type half on "
            "/job:localhost/device:CPU:0 by allocator cpu",
        },
    ),
    (
        "Allocator (GPU_0_bfc) ran out of memory trying to allocate (TensorFlow)",
        "TensorFlow warns so before it raises, and where it can go on without.",
        {"unknown": "W Allocator (GPU_0_bfc) ran out of memory trying to allocate 2.25GiB with freed_by_count=0."},
    ),
    (
        "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating ... bytes",
        "CuPy has an allocator of its own, whose cache torch cannot use.",
        {"unknown": "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 2,000,000,000 bytes (allocated so far: 512 bytes)."},
    ),
    (
        "ggml_backend_cuda_buffer_type_alloc_buffer: cudaMalloc failed: out of memory (llama.cpp)",
        "llama.cpp allocates weights and the cache of the context when it starts.",
        {"unknown": "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 5000.00 MiB on device 0: cudaMalloc failed: out of memory\n"
                    "alloc_tensor_range: failed to allocate CUDA0 buffer of size 5242880000"},
    ),
    (
        "failed to allocate CPU buffer (llama.cpp)",
        "llama.cpp keeps in the host's memory what is not on a device.",
        {"host": "alloc_tensor_range: failed to allocate CPU buffer of size 5242880000"},
    ),
    (
        "Free memory on device is less than desired GPU memory utilization (vLLM)",
        "vLLM asks for a share of the whole card when it starts, and another process holds some of it.",
        {"others": "ValueError: Free memory on device (6.51/23.64 GiB) on startup is less than desired GPU memory utilization (0.9, 21.28 GiB)."},
    ),
    (
        "No available memory for the cache blocks, KV cache is needed (vLLM)",
        "Weights and activations leave too little for the KV cache of one request of the largest length.",
        {"unknown": "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is needed, which is "
                    "larger than the available KV cache memory (7.69 GiB)."},
    ),
    (
        "Task was killed due to the node running low on memory (Ray)",
        "Ray ends tasks before the kernel does.",
        {"host": "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory."},
    ),
)  # fmt: skip


def explained(text):
    with tempfile.NamedTemporaryFile("w", suffix=".log") as log:
        log.write(text)
        log.flush()
        return oomprobe.explain(log.name)


def file_name(title):
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") + ".md"


def section(cause, text):
    """Return what a page says of one text: all of it but the cause is what `oomprobe.explain` says."""
    explanation = explained(text)
    verdict = explanation.report().verdict
    parts = [
        f"## {verdict[0].upper()}{verdict[1:]}",
        f"```text\n{text}\n```",
        f"Cause: `{cause}`",
    ]
    if explanation.held:
        held = (f"{name}: {format_bytes(nbytes)}" for name, nbytes in explanation.held.items())
        parts.append(f"What held the memory: {'; '.join(held)}.")
    if explanation.advice:
        lines = (line.partition("  # ") for line in explanation.advice)
        typed = [f"- `{command}`{comment and ': '}{comment}" for command, _, comment in lines]
        parts.append("\n".join(["What to type:\n", *typed]))
    return "\n\n".join([*parts, *explanation.notes[1:]])  # the first repeats the text


def pages():
    """Return the text of each page, by its file's name."""
    contents = {}
    index = []
    for title, about, texts in PAGES:
        name = file_name(title)
        causes = ", ".join(f"`{cause}`" for cause in texts)
        index.append(f"| [{title}]({name}) | {causes} |")
        parts = [f"# {title}", about, *(section(cause, text) for cause, text in texts.items())]
        parts.append(
            "This is what `oomprobe explain train.log` says of these texts. [It reads your log, too](../explain.md).\n\n"
            "Next: [all error texts](README.md), [causes](../explain.md#causes)"
        )
        contents[name] = "\n\n".join(parts) + "\n"
    contents["README.md"] = (
        "# Error texts\n\n"
        "What people paste when memory has run out, and the [causes](../explain.md#causes) that each text can have. "
        "`oomprobe explain train.log` reads yours.\n\n"
        "| text | cause |\n|---|---|\n"
        + "\n".join(index)
        + "\n\nNext: [why it ran out](../explain.md)\n"
    )
    return contents


if __name__ == "__main__":
    for old in FOLDER.glob("*.md"):
        old.unlink()
    FOLDER.mkdir(exist_ok=True)
    for name, content in pages().items():
        (FOLDER / name).write_text(content, encoding="utf-8")
