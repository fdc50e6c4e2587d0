"""The table of error texts, with a source for each row.

A row matches a kind of message by the fixed parts from which libraries build it, in all versions of torch. Mind these
traps when changing a pattern:

- Every CUDA error ends with advice about "device-side assertions"; only "assert triggered" reports one.
- "shared memory" is a kernel's scratch space or ``/dev/shm``, never the memory that limits a batch size.
- An allocator's internal assert leaves the process unusable, except the one that means out of memory on Jetson.
- A size limit may say "out of memory" ("Tried to allocate more than 1EB memory").
- 2147483648 is a limit in one text and an ordinary two gibibytes in the next.
- A text may be one long line: every repeat has a limit, so that a search reads a few hundred characters from each place at most.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from oomprobe.records.trials import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorText:
    """One kind of error, recognised by its text, class or ``error_code``."""

    pattern: re.Pattern[str]  # lower case, matched against lower-case texts
    verdict: Verdict
    source: str  # URL, issue, header or file, or "measured" if it was provoked for this table
    ambiguous: bool = False  # whether it has other causes too, so the verdict needs evidence
    of_host: bool = False  # whether an OOM row means host memory
    only_integrated: bool = (
        False  # whether the verdict holds only on devices that share the host's memory
    )
    also: tuple[
        str, ...
    ] = ()  # classes that raise it, further to RuntimeError, MemoryError and those of `LIBRARIES`
    classes: tuple[str, ...] = ()  # of this kind, whatever their text
    codes: tuple[int, ...] = ()  # values of ``error_code`` of this kind


def _row(verdict: Verdict, source: str, *alternatives: str, **rest: Any) -> ErrorText:
    # Searching lower-case text with a lower-case pattern takes a third of the time of a search that ignores case.
    lowered = re.sub(r"(?<!\\)[A-Z]", lambda letter: letter[0].lower(), "|".join(alternatives))
    return ErrorText(pattern=re.compile(lowered), verdict=verdict, source=source, **rest)


# Packages whose exceptions are about the device even if they do not inherit from RuntimeError.
LIBRARIES = frozenset(
    {"torch", "intel_extension_for_pytorch", "triton", "cupy", "cupy_backends", "numba"}
)

POISONED, SIZE_LIMIT, OOM, BUG = Verdict.POISONED, Verdict.SIZE_LIMIT, Verdict.OOM, Verdict.BUG
_CUDA_ENUM = "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html"
_ATEN_CHECKS = "pytorch/pytorch:aten/src/ATen/cuda/Exceptions.h"
_CUDNN_ENUM = "https://docs.nvidia.com/deeplearning/cudnn/backend/latest (cudnnStatus_t)"
_UR_ENUM = "https://oneapi-src.github.io/unified-runtime/core/api.html (ur_result_t)"

# Common prefixes: "CUDA error: ", "cuda runtime error (2) : ", "CUDNN_STATUS_", "less than ".
_ERROR = r"\b(?:CUDA|HIP|Triton)(?: runtime| driver)? error[^\n]{0,300}?"
_BLAS = (
    r"(?:CUDNN|CUBLAS|CUSOLVER|CUSPARSE|CURAND|CUDSS|CUTENSOR"
    r"|HIPBLAS|HIPBLASLT|HIPSOLVER|HIPSPARSE|HIPRAND)_STATUS_"
)
_LIMIT = r"(?:>|<|<=|exceed\w{0,3}|than|at most|up to|maximum(?: of| is)?) ?"

# Strongest row first: in a chain of exceptions, the first row that matches any of them decides.
# fmt: off
ERROR_TEXTS: tuple[ErrorText, ...] = (
    # Poisoned: no later result of this process can be trusted. After these errors the context is lost: "the process must
    # be terminated and relaunched", as the enum says of all but 4, 709 (driver or context gone), 214 and 220
    # (uncorrectable ECC, NVLink). HIP uses the same numbers.
    _row(POISONED, f"{_CUDA_ENUM}; pytorch/pytorch#81620, ROCm/legacy-rocm-build#5814; rusty1s/pytorch_sparse#23",
         r"illegal memory access was encountered", r"(?:cuda|hip)ErrorIllegalAddress", r"CUDA_ERROR_ILLEGAL_ADDRESS",
         r"device-side assert triggered", r"device-side assertion failures were found on GPU",
         r"(?:cuda|hip)ErrorAssert\b", r"CUDA_ERROR_ASSERT\b",
         r"unspecified launch failure", r"(?:cuda|hip)ErrorLaunchFailure", r"CUDA_ERROR_LAUNCH_FAILED",
         r"launch timed out and was terminated", r"(?:cuda|hip)ErrorLaunchTimeOut", r"CUDA_ERROR_LAUNCH_TIMEOUT",
         r"misaligned address", r"cudaErrorMisalignedAddress", r"CUDA_ERROR_MISALIGNED",
         r"illegal instruction was encountered", r"cudaErrorIllegalInstruction", r"CUDA_ERROR_ILLEGAL_INSTRUCTION",
         r"hardware stack error", r"cudaErrorHardwareStackError", r"CUDA_ERROR_HARDWARE_STACK_ERROR",
         r"not supported on global/shared address space", r"cudaErrorInvalidAddressSpace",
         r"CUDA_ERROR_INVALID_ADDRESS_SPACE", r"invalid program counter", r"cudaErrorInvalidPc\b",
         r"CUDA_ERROR_INVALID_PC\b", r"tensor memory (?:was )?not completely", r"cudaErrorTensorMemoryLeak",
         codes=(4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911)),
    _row(POISONED, f"{_CUDA_ENUM} (4, 214, 220, 226, 709, 810, 911)",
         r"uncorrectable (?:ECC|NVLink) error", r"(?:cuda|hip)Error(?:ECCUncorrectable|ECCNotCorrectable)",
         r"cudaErrorNvlinkUncorrectable", r"CUDA_ERROR_(?:ECC|NVLINK)_UNCORRECTABLE", r"cudaErrorContained\b",
         r"invalid access of peer GPU memory over nvlink", r"driver shutting down", r"context is destroyed",
         r"(?:cuda|hip)ErrorContextIsDestroyed", r"cudaErrorCudartUnloading", r"MPS client[^\n]{0,40}terminated",
         r"cudaErrorMpsClientTerminated", r"cudaErrorExternalDevice"),
    _row(POISONED,
         "https://docs.nvidia.com/deploy/xid-errors/index.html (Xid 79); nvmlErrorString NVML_ERROR_GPU_IS_LOST",
         r"\bGPU is lost\b", r"has fallen off the bus"),
    _row(POISONED, "pytorch/pytorch#119452, #139382, #188008 (every later allocation fails too); mberr/torch-max-mem#45",
         r'(?<!NVML_SUCCESS == r )INTERNAL ASSERT FAILED at "?[^"\n]{0,300}?Alloc\w{0,60}\.(?:cpp|cu|h|mm)\b'),
    _row(POISONED, f"{_UR_ENUM}; pytorch/pytorch#177714, #190972, intel/torch-xpu-ops#1324, #3155, vladmandic/sdnext#1526",
         r"(?:UR_RESULT|ZE_RESULT|PI)_ERROR_(?:DEVICE_LOST|OUT_OF_RESOURCES|DEVICE_REQUIRES_RESET)",
         r"UR_RESULT_ERROR_UNKNOWN\b", r"\bCL_OUT_OF_RESOURCES", r"backend failed with error: 20\b"),
    _row(POISONED, "ROCm/rccl#415, ROCm/rocBLAS#775, mila-iqia/milabench#397",
         r"Memory access fault by GPU node", r"HW Exception by GPU node", r"aborting with error ?: ?HSA_STATUS_ERROR"),
    _row(POISONED, "https://developer.apple.com/documentation/metal/mtlcommandbuffererror-swift.struct/code",
         r"kIOGPUCommandBufferCallbackError(?:Timeout|Hang|PageFault|InnocentVictim|SubmissionsIgnored)"),
    _row(POISONED, "pytorch/pytorch#118369; zai-org/GLM-130B#132; ProcessGroupNCCL.cpp takes the process down",
         r"Watchdog caught collective operation timeout", r"NCCL communicator was aborted",
         r"NCCL watchdog thread terminated"),
    _row(POISONED, "https://docs.nvidia.com/cuda/curand (curandStatus_t)", r"CURAND_STATUS_PREEXISTING_FAILURE"),
    # Perhaps poisoned. "Not ready" was seen when memory ran out under WSL, in a process that continued to work.
    _row(POISONED, f"mberr/torch-max-mem#45 (memory); noonghunna/club-3090#50 (the driver was reset); {_CUDA_ENUM} (999)",
         _ERROR + r": (?:device not ready\b|unknown error)", r"(?:cuda|hip)Error(?:NotReady|Unknown)\b",
         r"CUDA_ERROR_(?:NOT_READY|UNKNOWN\b)", ambiguous=True),
    _row(POISONED, "microsoft/CNTK#1516, pytorch/pytorch#17774 (batch too large), #27588 and #36333 (mapping)",
         _BLAS + r"(?:EXECUTION_FAILED|MAPPING_ERROR)", r"CU(?:RAND_STATUS_LAUNCH_FAILURE|FFT_EXEC_FAILED)",
         r"HIPFFT_EXEC_FAILED", ambiguous=True),
    _row(POISONED,
         f"pytorch/pytorch:aten/src/THC/THCBlas.cu (1.x); cusparseGetErrorString, cusolverStatus_t 6: {_ATEN_CHECKS}",
         r"cublas runtime error ?: the GPU program failed to execute", r"cusolver error: 6,",
         r"CUDA error: execution failed when calling", ambiguous=True),
    # Not device memory, despite the words: a kernel's scratch space and the container's shared memory.
    _row(BUG, "triton/runtime/errors.py OutOfResources; triton#8182; strings of libtorch_python.so 2.13",
         r"out of resources?: ", r"/dev/shm", r"shared memory ?\(shm\)", r"(?:out of|insufficient) shared memory"),
    # Size limits that are not memory.
    _row(SIZE_LIMIT, "pytorch/pytorch:test/test_cuda.py::test_out_of_memory; #51872 (17179869183.98 GiB), #33143 (16 EiB)",
         r"Tried to allocate (?:more than 1EB|\d{7,40}(?:\.\d{1,9})? GiB|[\d.]{1,40} [PE]i?B)"),
    _row(SIZE_LIMIT, "pytorch/pytorch#80020, #155225, #51871, #144855, #158824, PR #144865",
         r"canUse32BitIndexMath", r"\b32-?bit index", r"\bINT(?:32)?_MAX\b", r"numeric_limits<int"),
    _row(SIZE_LIMIT,
         "pytorch/pytorch#84039, #143859 (MPS), #113833; PFCCLab/PaddleAPITest#483 (cublas gemm arguments); "
         "aten/src/ATen/native/mps/operations/Convolution.mm (Output channels > 65536)",
         r"\b2(?:\^|\*\*)3[12]\b", _LIMIT + r"214748364[78]\b(?! but got (?:0\b|-))", _LIMIT + r"(?:65,?53[56]|2\*\*16)\b"),
    _row(SIZE_LIMIT,
         f"pytorch/pytorch#142228, #146704; facebookresearch/xformers#845; bitsandbytes#875; {_CUDA_ENUM} (720)",
         r"invalid configuration argument", r"(?:cuda|hip)ErrorInvalidConfiguration",
         r"too many blocks in cooperative launch", r"(?:cuda|hip)ErrorCooperativeLaunchTooLarge"),
    _row(SIZE_LIMIT, "measured, torch 2.13 (numel, storage, pixel_shuffle); pytorch/pytorch#107553, PR #43755; TH/THGeneral.c",
         r"Storage size calculation overflowed", r"Stride calculation overflowed", r"storage size overflowed",
         r"integer multiplication overflow", r"int64 overflow while computing numel",
         r"invalid size, possible overflow", r"invalid memory size -- maybe an overflow",
         r"(?:\bproduct\b|\^2\))[^\n]{0,60}\boverflowed\b", also=("builtins.ValueError",)),
    _row(SIZE_LIMIT,
         "measured, torch 2.13 (quantile, multinomial; MKL_INT in libtorch_cpu.so); pytorch/pytorch#24401, #43476",
         r"\binput tensor is too large", r"\btoo large to fit into a MKL_INT\b",
         r"sizes too large for THCDeviceTensor", r"cannot exceed 2\^\d", r"kernel launch blocks must be positive"),
    _row(SIZE_LIMIT, "pytorch/pytorch#143859, #149325, #187567; aten/src/ATen/mps/MPSAllocator.mm (maxBufferLength)",
         r"total bytes of NDArray", r"NDArray dimension length", r"Invalid buffer size: [\d.]{1,40} ?[KMGT]i?B",
         r"newBuffer\w{0,60}[^\n]{0,120}must not exceed"),
    _row(SIZE_LIMIT,
         f"Comfy-Org/ComfyUI#7004 (Intel Arc: one allocation); intel/llvm#15674; intel/torch-xpu-ops#2950; {_UR_ENUM}",
         r"can NOT allocate memory block with size larger than", r"\b(?:range|offset) is out of integer limits",
         r"\b(?:range|offset) does not fit in int\b", r"sycl-id-queries-(?:fit-in-int|range)",
         r"(?:PI|CL|UR_RESULT_ERROR)\w{0,40}_INVALID_BUFFER_SIZE", r"UR_RESULT_ERROR_(?:INVALID|UNSUPPORTED)_SIZE"),
    _row(SIZE_LIMIT, "measured, numpy 2.4 (np.zeros(2**63), np.zeros(2**62))",
         r"Maximum allowed dimension exceeded", r"\Aarray is too big", also=("builtins.ValueError",)),
    _row(SIZE_LIMIT, "CPython Lib/multiprocessing/connection.py (_send_bytes), Modules/_pickle.c",
         r"'i' format requires -?2147483648", r"cannot serialize a bytes object larger than 4 GiB",
         also=("builtins.OverflowError", "struct.error")),
    # Explicitly out of memory: first the device, then the host.
    _row(OOM,
         "pytorch/pytorch:c10/cuda/CUDACachingAllocator.cpp, aten/src/ATen/mps/MPSAllocator.mm; Comfy-Org/ComfyUI#7440, "
         "intel/torch-xpu-ops#1324; composer shared_utils.py; torch/cuda/__init__.py; cupy/cupy:cupy/cuda/memory.pyx; "
         f"{_CUDA_ENUM} (2)",
         r"\b(?:CUDA|HIP|XPU|NPU|HPU|MLU|MUSA|CPU|MPS backend) out of memory\b", r"\bout of memory\.? Tried to allocate \d",
         classes=("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError", "cupy.cuda.memory.OutOfMemoryError"), codes=(2,)),
    _row(OOM, f"pytorch/pytorch:c10/cuda/CUDAException.cpp, #2187, #465, #4844 (THC); HIP driver: {_ATEN_CHECKS}",
         _ERROR + r": out of memory\b", r"\berror=2 : out of memory", r"(?:CUDA|HIP) driver error: 2\b"),
    _row(OOM, f"{_CUDA_ENUM} (2)",
         r"cudaErrorMemoryAllocation", r"hipErrorOutOfMemory", r"hipErrorMemoryAllocation",
         r"(?:CUDA|HIP)_ERROR_Out_?Of_?Memory"),
    _row(OOM, "torch/_utils.py ExceptionWrapper; torch/_inductor/runtime/triton_heuristics.py",
         r"\b(?:torch|torch\.cuda)\.OutOfMemoryError\b", r"Caught OutOfMemoryError in ",
         r"configs\. OutOfMemoryError: "),
    _row(OOM, "pytorch/pytorch:c10/cuda/CUDAMallocAsyncAllocator.cpp",
         r"would exceed allowed memory\. \(out of memory\)"),
    _row(OOM, "NVIDIA/nccl#1410 (shape); rwth-i6/returnn#1626; NVIDIA/nccl:src/include/alloc.h",
         r"(?:Cuda|HIP) failure (?:\d{1,9} )?'out of memory'", r"Failed to CUDA (?:calloc|malloc|host alloc)"),
    _row(OOM, "triton-lang/triton:third_party/nvidia/backend/driver.c, third_party/amd/backend/driver.c",
         r"Triton Error \[\w{1,20}\]: {1,9}(?:Code: 2\b|out of memory)"),
    _row(OOM, f"{_ATEN_CHECKS}; {_CUDNN_ENUM}; pytorch/pytorch#128601, QwenLM/Qwen3-VL#151",
         _BLAS + r"(?:INTERNAL_ERROR_DEVICE_)?ALLOC(?:ATION)?_FAILED", r"(?:CU|HIP)FFT_(?:ALLOC_FAILED|NO_WORKSPACE)",
         r"miopenStatusAllocFailed", r"roc\w{1,20}_status_memory_error", r"MAGMA_ERR_DEVICE_ALLOC"),
    _row(OOM, "pytorch/pytorch#24838; hoanglocla9/bert-jointly-relation-entity-extraction#3; cusolverStatus_t 2",
         r"cublas runtime error ?: resource allocation failed", r"cusolver error: 2,",
         r"CUDA error: resource allocation failed when calling"),
    _row(OOM, f"{_UR_ENUM}; intel/torch-xpu-ops#1598, #5432",
         r"_OUT_OF_DEVICE_MEMORY\b", r"(?:CL|PI|UR_RESULT)_(?:ERROR_)?MEM_OBJECT_ALLOCATION_FAILURE"),
    _row(OOM, "ggml-org/llama.cpp#22673 (Metal: Insufficient Memory); huggingface/accelerate:utils/memory.py (Gaudi)",
         r"kIOGPUCommandBufferCallbackErrorOutOfMemory", r"MODULE:PT_(?>[^\n]{0,200}?\bAllocation\b)[^\n]{0,200}?\bfailed"),
    _row(OOM, "zeliu98/CloserLook3D#33; NVIDIA/thrust#1006; cupy/cupy#1574",
         r"get_temporary_buffer failed", r"\b\w{1,80} failed(?: (?:on|to) \w{1,80}(?: \w{1,80})?)?: (?:\w{1,80}: )?out of memory\b"),
    _row(OOM, "bitsandbytes/csrc/ops.cu (see #875); ROCm/MIOpen#47; cudaGetErrorString(2)",
         r"\bout of memory at line \d{1,9} in file", r"Memory not available to allocate buffer", r"\Aout of memory\.?\s{0,9}\Z"),
    # "[enforce fail a" is the text if memory is left for only 15 characters (measured, torch 2.13).
    _row(OOM, "measured, torch 2.13 (torch.empty(2**50)); HaoMood/blinear-cnn-faster#4; xinntao/ESRGAN#34; libc10.so",
         r"DefaultCPUAllocator: (?:can't allocate|not enough) memory",
         r"enforce fail at (?:alloc_cpu|CPUAllocator)\.cpp", r"\A\[enforce fail a\Z",
         r"Torch: (?:not enough memory|unable to mmap memory)", r"C10 Out of Memory",
         r"Could not allocate memory to change", of_host=True),
    _row(OOM, "errno.h ENOMEM; https://learn.microsoft.com/en-us/windows/win32/debug/system-error-codes--1300-1699-",
         r"\[Errno 12\]", r"\[WinError (?:8|14|1455)\]", r"\bCannot allocate memory(?: \(12\)|[':]|\s{0,9}(?:\n|$))",
         of_host=True, also=("builtins.ImportError", "builtins.OSError")),
    _row(OOM, f"{_UR_ENUM}; {_CUDNN_ENUM}; https://docs.nvidia.com/cuda/nvrtc (nvrtcResult)",
         r"_OUT_OF_HOST_MEMORY\b", r"HOST_ALLOCATION_FAILED", r"NVRTC_ERROR_OUT_OF_MEMORY", r"MAGMA_ERR_HOST_ALLOC",
         r"ptxas fatal {0,9}: {0,9}Memory allocation failure", of_host=True),
    _row(OOM, "gcc:libgomp/alloc.c; OpenMathLib/OpenBLAS:driver/others/memory.c; strings of libtorch_cpu.so 2.13 (oneMKL)",
         r"libgomp: Out of memory", r"OpenBLAS[^\n]{0,300}?(?:malloc failed|allocation still failed|could not be allocated)",
         r"\bMKL\b[^\n]{0,300}?(?:Not enough memory|cannot allocate memory)", of_host=True),
    # After all other unambiguous texts, because those tell whose memory a MemoryError is about.
    _row(OOM, "https://en.cppreference.com/w/cpp/memory/new/bad_alloc; numpy/_core/_exceptions.py, measured",
         r"\bstd::bad_alloc\b", r"\Abad allocation\b", r"Unable to allocate [\d.,]{1,40} ?\w{0,9} for an array with shape",
         of_host=True, classes=("builtins.MemoryError",)),
    # Perhaps a size limit.
    _row(SIZE_LIMIT, "pytorch/pytorch#113833 (safe_downcast)", r"\Ainteger out of range\s{0,9}(?:\n|\Z)", ambiguous=True),
    _row(SIZE_LIMIT, "measured, torch 2.13 (torch.empty(2**63), fill_(2**40)); pytorch/pytorch#48114",
         r"Overflow when unpacking long", r"cannot be converted to type (?:int|int32_t|int64_t|long) without overflow",
         r"negative dimension -\d{7}", ambiguous=True, also=("builtins.TypeError",)),
    _row(SIZE_LIMIT, "measured, CPython 3.11 (b'x' * 2**63)",
         r"cannot fit 'int' into an index-sized integer", r"Python int too large to convert to C", ambiguous=True,
         also=("builtins.OverflowError",)),
    _row(SIZE_LIMIT, "pytorch/pytorch#3038, #4107, #11065 (batch too large); an unsupported dtype or stride says the same",
         _BLAS + r"NOT_SUPPORTED", r"(?:CU|HIP)FFT_INVALID_SIZE", ambiguous=True),
    _row(SIZE_LIMIT, "pytorch/pytorch#104108, cupy/cupy#10033 (larger matrices, far from full memory)",
         r"CUDA error: insufficient resources when calling", r"CUSPARSE_STATUS_INSUFFICIENT_RESOURCES", ambiguous=True),
    _row(SIZE_LIMIT,
         "fla-org/flash-linear-attention#172, PR #1077; triton-lang/triton#3299 (grid above 65535); "
         f"{_CUDA_ENUM} (701: akin to an invalid configuration)",
         _ERROR + r": invalid argument\b(?! \d)", r"(?:cuda|hip)ErrorInvalidValue", r"CUDA_ERROR_INVALID_VALUE",
         r"too many resources requested for launch", r"(?:cuda|hip)ErrorLaunchOutOfResources", ambiguous=True),
    # Perhaps out of memory.
    _row(OOM,
         "pytorch/pytorch:aten/src/ATen/native/cudnn/MHA.cpp; marqo-ai/marqo#101; pytorch/pytorch#108645; "
         "replicate/cog#1430 (a broken install says the same)",
         r"Unable to find a valid cuDNN algorithm", r"no valid convolution algorithms available",
         r"unable to find an engine to execute", r"mha_graph[^\n]{0,120}is_good\(\) to be true", ambiguous=True),
    _row(OOM, "pytorch/serve#1993; pytorch/pytorch#81620, #119420; NVIDIA/NeMo:scripts/speech_recognition/oomptimizer.py",
         _BLAS + r"(?:NOT_INITIALIZED|INTERNAL_ERROR|INITIALIZATION_FAILED)",
         r"(?:CU|HIP)FFT_(?:INTERNAL_ERROR|SETUP_FAILED)", r"roc\w{1,20}_status_internal_error", ambiguous=True),
    _row(OOM, f"pytorch/pytorch#3996; cusolverStatus_t 1 and 7, cusparseGetErrorString: {_ATEN_CHECKS}",
         r"cublas runtime error ?: (?:library not initialized|an internal operation failed)", r"cusolver error: [17],",
         r"CUDA error: (?:internal|initialization) error when calling .cusparse", ambiguous=True),
    _row(OOM, "pytorch/pytorch#60477 (the larger the batch, the likelier); ROCm/MIOpen#312, #1994 (other causes)",
         r"miopenStatus(?:UnknownError|InternalError|NotInitialized)", ambiguous=True),
    _row(OOM, "pytorch/pytorch#159594, PR #187795",
         r"operation failed due to a previous error during capture", r"(?:cuda|hip)ErrorStreamCaptureInvalidated",
         ambiguous=True),
    _row(OOM, "pytorch/pytorch#185240 (Jetson)",
         r"NVML_SUCCESS == r INTERNAL ASSERT FAILED", ambiguous=True, only_integrated=True),
    _row(OOM, "pytorch/pytorch:torch/csrc/distributed/c10d/NCCLUtils.hpp; NVIDIA/nccl#1410, #582",
         r"unhandled cuda error(?![\s\S]{0,4000}(?:Cuda|HIP) failure)", ambiguous=True),
    _row(OOM, "measured, torch 2.13 under RLIMIT_AS (oneDNN)",
         r"could not (?:create|execute) a (?:primitive|memory)", ambiguous=True, of_host=True),
    _row(OOM, "CPython Modules/_threadmodule.c; OpenBLAS:driver/others/blas_server.c; gcc:libgomp/team.c; libomp",
         r"can't start new thread", r"pthread_create failed", r"Thread creation failed",
         r"necessary resources for OMP thread", ambiguous=True, of_host=True),
    _row(OOM, "strings of libtorch_python.so 2.13; SIGKILL is what the kernel's OOM killer sends",
         r"DataLoader worker [^\n]{0,100}?killed by signal: Killed", ambiguous=True, of_host=True),
)
# fmt: on

# One of these, in lower case, is in every text of the rows of a device's memory: what has none needs no search.
OOM_WORDS = (
    *("out of memory", "outofmemory", "out_of_memory", "outof_memory", "out_ofmemory"),
    *("memoryallocation", "memory_error"),
    *("memory not available", "driver error: 2", "code: 2", "failed to cuda", "_status_", "fft_"),
    *("alloc_failed", "allocation failed", "allocfailed", "device_alloc", "out_of_device_memory"),
    *("mem_object_allocation", "module:pt_", "get_temporary_buffer", "cudnn algorithm"),
    *("convolution algorithms", "engine to execute", "mha_graph", "cublas runtime error"),
    *("cusolver error", "error when calling", "miopenstatus", "error during capture"),
    *("streamcaptureinvalidated", "nvml_success", "unhandled cuda error"),
)
