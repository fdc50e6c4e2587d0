"""A neighbour that makes a card small: it takes memory by plain allocations until only the budget is left, and keeps it.

    python -m peers.ballast BYTES_TO_LEAVE

A cap on an allocator would bind the process that sets it alone, and say so; a full card says no to every process, tool and
library, as it does beside a real neighbour. Prints what it left free, then waits for its standard input to end: whoever
started it lets go, or has died, and the memory is free again.
"""

import os
import subprocess
import sys
from contextlib import contextmanager

MIB = 2**20
PIECE_BYTES = 2 * MIB  # cudaMalloc maps pages of 2 MiB
ROUNDS = 64
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # each allocation is one cudaMalloc, of the size asked for


@contextmanager
def beside(budget_mib):
    """Meanwhile a process of its own leaves so much of the card free, and no more; gives the bytes it left."""
    command = [sys.executable, "-m", "peers.ballast", str(budget_mib * MIB)]
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, **UNCACHED, "PYTHONPATH": path}, **pipes) as process:
        said = process.stdout.readline().strip()
        if not said.isdigit():
            raise SystemExit(
                f"benchmark_peers: no limit on the card: {said or 'the ballast died, its words are above'}"
            )
        yield int(said)


def fill(budget_bytes, free_bytes, take):
    """Takes half of what is too much, again and again: what the driver spends on a piece is seen before the next."""
    if free_bytes() < budget_bytes:
        raise MemoryError(f"{free_bytes() / MIB:.0f} MiB are free, the budget is {budget_bytes / MIB:.0f} MiB")
    taken = []
    for _ in range(ROUNDS):
        pieces = (free_bytes() - budget_bytes) // PIECE_BYTES
        if pieces <= 0:
            break
        taken.append(take(-(-pieces // 2) * PIECE_BYTES))
    return taken


def main():
    import torch

    def free_bytes():
        return torch.cuda.mem_get_info()[0]

    def take(count):
        return torch.empty(count, dtype=torch.uint8, device="cuda")

    if not torch.cuda.is_available():
        return print(f"no CUDA device here (torch {torch.__version__})")
    try:
        taken = fill(int(sys.argv[1]), free_bytes, take)
    except MemoryError as error:
        return print(error)
    print(free_bytes(), flush=True)
    sys.stdin.read()
    return taken.clear()


if __name__ == "__main__":
    main()
