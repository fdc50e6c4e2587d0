"""torch.distributed on the bed's NCCL: small payloads travel, collectives wait for every rank, communicators take memory."""

import contextlib
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import open_files, until

import oomprobe
from bed import start
from oomprobe.ground.torch_versions import VERSION

MIB = 2**20


@contextlib.contextmanager
def ranks(tmp_path, function, *, count=2, eager=True, **options):
    """Start `function(rank)` in `count` children of one process group, on a card each; those left in the list are killed."""

    def run(rank):
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        method, device_id = f"file://{tmp_path}/meeting", device if eager else None
        dist.init_process_group(
            "nccl", init_method=method, rank=rank, world_size=count, device_id=device_id
        )
        return function(rank)

    options = {"memory": ",".join(["1GiB"] * count), "shared": tmp_path / "cards", **options}
    children = [start(run, rank, **options) for rank in range(count)]
    try:
        yield children
    finally:
        for child in children:
            child.kill()
            with contextlib.suppress(Exception):
                child.result()


def results(tmp_path, function, **options):
    with ranks(tmp_path, function, **options) as children:
        return [children.pop(0).result(limit_s=30) for _ in range(len(children))]


def wait_for(path):
    until(path.exists, within_s=10, every_s=0.01)


def filled(value, count=4, dtype=torch.float32):
    return torch.full((count,), value, dtype=dtype, device="cuda")


def summed(value, group=None):
    tensor = filled(value)
    dist.all_reduce(tensor, group=group)
    return tensor.tolist()[0]


def free_mib():
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / MIB


def shared_by_ranks():
    held = [*Path("/proc/self/maps").read_text().splitlines(), *open_files().values()]
    return [line for line in held if "cudastub-nccl" in line]


def test_small_payloads_travel(tmp_path):
    def collectives(rank):
        found = {}
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8):
            tensor = filled(rank + 2, dtype=dtype)
            dist.all_reduce(tensor)
            found[dtype] = tensor.tolist()
        for operation in ("MIN", "MAX", "PRODUCT", "AVG"):
            tensor = filled(rank + 2)
            dist.all_reduce(tensor, getattr(dist.ReduceOp, operation))
            found[operation] = tensor.tolist()[0]
        exact = filled(2**62 + rank, dtype=torch.int64)
        dist.all_reduce(exact, dist.ReduceOp.MAX)
        tensor = filled(rank + 2)
        dist.broadcast(tensor, src=1)
        gathered = [filled(0), filled(0)]
        dist.all_gather(gathered, filled(rank + 2))
        parts, part = torch.tensor([1.0, 2, 3, 4], device="cuda"), filled(0, count=2)
        dist.reduce_scatter(part, [*parts.split(2)])
        exchanged = filled(0)
        dist.all_to_all_single(
            exchanged, parts + rank
        )  # in older torch by sends, which move nothing
        dist.barrier()
        objects = [None, None]
        if VERSION < (
            2,
            15,
        ):  # later the largest size is computed on the device, where kernels do nothing
            dist.all_gather_object(objects, {"rank": rank})
        lists = [
            tensor.tolist(),
            [one.tolist() for one in gathered],
            part.tolist(),
            exchanged.tolist(),
        ]
        return found, exact.tolist()[0], *lists, objects

    for rank, (found, exact, *others) in enumerate(results(tmp_path, collectives)):
        assert [found.pop(operation) for operation in ("MIN", "MAX", "PRODUCT", "AVG")] == [
            2,
            3,
            6,
            2.5,
        ]
        assert list(found.values()) == [[5] * 4] * 5
        assert exact == 2**62 + 1
        assert others == [
            [3] * 4,
            [[2] * 4, [3] * 4],
            [2, 4] if rank == 0 else [6, 8],
            others[3] if VERSION < (2, 11) else [1, 2, 2, 3] if rank == 0 else [3, 4, 4, 5],
            [{"rank": 0}, {"rank": 1}] if VERSION < (2, 15) else [None, None],
        ]


def test_a_missing_rank_makes_the_others_wait(tmp_path):
    def waits(rank):
        if rank == 1:
            wait_for(tmp_path / "looked")
            return summed(2)
        tensor = filled(1)
        work = dist.all_reduce(tensor, async_op=True)
        stream = torch.cuda.current_stream()
        stream.synchronize()  # it does not follow the collective yet
        before = stream.query(), work.is_completed()
        work.wait()
        after = stream.query(), torch.cuda.Event().query(), work.is_completed()
        (tmp_path / "looked").touch()
        torch.cuda.synchronize()
        return before, after, (stream.query(), work.is_completed()), tensor.tolist()[0]

    assert results(tmp_path, waits) == [((True, False), (False, True, False), (True, True), 3), 3]


def test_an_abort_ends_the_waiting(tmp_path):
    def aborts(rank):
        if rank == 1:
            return wait_for(tmp_path / "ended")
        before = free_mib()
        dist.all_reduce(filled(1))
        taken = before - free_of_this_card()
        waiting = threading.Thread(target=torch.cuda.synchronize)
        waiting.start()
        waiting.join(0.2)
        waited = waiting.is_alive()
        dist.group.WORLD._get_backend(torch.device("cuda")).abort()
        waiting.join(5)
        (tmp_path / "ended").touch()
        return taken, waited, waiting.is_alive(), before - free_of_this_card(), shared_by_ranks()

    def free_of_this_card():  # without freeing, which would wait
        return torch.cuda.mem_get_info()[0] / MIB

    assert results(tmp_path, aborts, nccl="64MiB")[0] == (64 + 2, True, False, 2, [])


def test_a_communicator_takes_memory(tmp_path):
    def take(rank):
        at_first, groups = free_mib(), []
        calls = [
            lambda: summed(1),
            lambda: groups.append(dist.new_group([0, 1])),
            lambda: [summed(1, groups[0]) for _ in range(2)],
            lambda: dist.destroy_process_group(groups[0]),
            dist.destroy_process_group,
        ]
        seen = [(call(), at_first - free_mib())[1] for call in calls]
        return seen, torch.cuda.memory_reserved(), shared_by_ranks()

    assert results(tmp_path, take, nccl="64MiB") == [([64, 64, 128, 64, 0], 0, [])] * 2


def test_a_communicator_that_does_not_fit(tmp_path):
    def fill(rank):
        if rank == 1:
            kept = torch.empty(1000 * MIB, dtype=torch.uint8, device="cuda")
            with pytest.raises(
                RuntimeError, match=r"unhandled cuda error(?s:.*)Cuda failure 2 'out of memory'"
            ) as error:
                dist.all_reduce(filled(1))
            assert oomprobe.classify_error(error.value) is oomprobe.Verdict.OOM
            del kept
            torch.cuda.empty_cache()
        dist.all_reduce(filled(1))  # as it fits now, the other rank's waiting ends
        torch.cuda.synchronize()

    assert results(tmp_path, fill, nccl="64MiB") == [None, None]
