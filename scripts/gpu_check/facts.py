"""The parts of gpu-check that look at what no recording shows: memory outside the allocator, errors, and costs.

Call each function in a process of its own.
"""

import oomprobe
from gpu_check.models import conv_net

PROBED = {"max_batch": 256, "progress": "off"}


def outside_bytes():
    """Return the memory in use that torch's allocator does not hold, after each thing that a training process does first."""
    import torch

    def training():
        model, step = conv_net()
        for _ in range(3):
            step(model, 64)

    stages = {
        "context": lambda: torch.empty(1, device="cuda"),
        "matrix product": lambda: (
            torch.ones(256, 256, device="cuda") @ torch.ones(256, 256, device="cuda")
        ),
        "convolution": lambda: torch.nn.functional.conv2d(
            torch.ones(8, 16, 64, 64, device="cuda"), torch.ones(16, 16, 3, 3, device="cuda")
        ),
        "training steps": training,
    }
    found = {}
    for name, run in stages.items():
        run()
        torch.cuda.synchronize()
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        found[name] = total_bytes - free_bytes - torch.cuda.memory_reserved()
    return found


def index_out_of_bounds():
    import torch

    torch.nn.functional.embedding(
        torch.full((1,), 9, device="cuda"), torch.zeros(4, 4, device="cuda")
    )
    torch.cuda.synchronize()


def out_of_memory():
    import torch

    nbytes = torch.cuda.get_device_properties(0).total_memory * 3 // 5
    _ = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2)]


def too_large_for_a_kernel():
    import torch

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        query = torch.zeros(70_000, 1, 8, 8, device="cuda")
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    torch.cuda.synchronize()


FAILURES = (index_out_of_bounds, out_of_memory, too_large_for_a_kernel)


def error_of(function):
    """Return what an error looks like here, what oomprobe makes of it, and whether the process can go on."""
    import torch

    torch.zeros(1, device="cuda")
    try:
        function()
    except Exception as error:
        said = {
            "type": f"{type(error).__module__}.{type(error).__name__}",
            "text": str(error)[:1000],
        }
        said["verdict"] = oomprobe.classify_error(error).name
    else:
        return {"type": None}
    for name, works in {
        "memory_can_be_read_after": lambda: torch.cuda.mem_get_info(),
        "computes_after": lambda: (torch.ones(2, device="cuda") + 1).sum().item(),
        "cache_can_be_emptied_after": torch.cuda.empty_cache,
    }.items():
        try:
            works()
            said[name] = True
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"[:200]
    return said


def cost(isolate):
    """Return what a probe takes, in this process or isolated from it."""
    result = oomprobe.probe_target("oomprobe.demo:small_gpt", isolate=isolate, **PROBED)
    return {
        "answer": result.batch_size,
        "elapsed_s": round(result.elapsed_s, 2),
        "in_steps_s": round(result.in_steps_s, 2),
        "trials": len(result.trials),
    }
