"""Example results: a GPU, two ranks, and one with every possible warning."""

from dataclasses import replace

from helpers import a_trial

from oomprobe.records.fit import fit_line
from oomprobe.records.trials import Phase, RankTrial, Verdict
from oomprobe.results.result import ProbeResult

GIB, MIB = 2**30, 2**20
CUDA_OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB of which "
    "1.11 GiB is free. Including non-PyTorch memory, this process has 22.51 GiB memory in use.\nsecond line"
)


def gpu_trial(batch_size, phase=Phase.GROW, cap=None, **rest):
    peak = GIB + 200 * MIB * batch_size
    step_s = 0.004 + 0.001 * batch_size
    measured = {"steps": 3, "step_s": step_s, "samples_per_s": batch_size / step_s}
    return a_trial(
        batch_size,
        phase=phase,
        cap_bytes=cap,
        peak_allocated_bytes=peak,
        peak_reserved_bytes=peak + peak // 50,
        **{**measured, **rest},
    )


def gpu_oom(batch_size, phase=Phase.GROW, cap=None, **rest):
    held = cap or 24 * GIB
    return a_trial(
        batch_size,
        Verdict.OOM,
        phase,
        cap_bytes=cap,
        peak_allocated_bytes=held - 900 * MIB,
        peak_reserved_bytes=held - 100 * MIB,
        error=CUDA_OOM,
        where="backward, model.py:142",
        **rest,
    )


def gpu():
    cap = 21 * GIB + 614 * MIB
    grow = [gpu_trial(2**power) for power in range(7)]
    bisect = [
        gpu_trial(96, Phase.BISECT, cap),
        gpu_oom(112, Phase.BISECT, cap),
        gpu_oom(104, Phase.BISECT, cap),
        gpu_oom(100, Phase.BISECT, cap),
        gpu_trial(98, Phase.BISECT, cap, alloc_retries=1),
        gpu_oom(99, Phase.BISECT, cap),
        gpu_oom(99, Phase.RECHECK, cap),
    ]
    ran = (*grow, gpu_oom(128), *bisect, gpu_trial(98, Phase.CONFIRM, cap, steps=5))
    return ProbeResult(
        batch_size=98,
        limit_batch_size=98,
        first_failing_batch_size=128,
        limited_by="memory",
        trials=ran,
        fit=fit_line([(t.batch_size, t.peak_allocated_bytes) for t in ran if t.passed], cap),
        device="NVIDIA GeForce RTX 4090",
        budget_bytes=cap,
        available_bytes=24 * GIB,
        notes=(
            "batch 98 gave its cache back once to serve a request: near the budget, steps take longer.",
        ),
        not_covered=(
            "the longest sequence of your data",
            "the evaluation step",
            "checkpoint saving",
            "other ranks",
        ),
        state_verified=True,
        estimates={"total / peak of batch 1": 117.0, "2 x parameters": None},
        options={"memory_fraction": 0.9, "global_batch": 1009, "world_size": 1},
        elapsed_s=41.2,
        in_steps_s=34.0,
    )


def ranks():
    """Two ranks, of which the second has the smaller card."""
    cap = 9 * GIB

    def of(trial, *, waited=False):
        peak, available = trial.peak_reserved_bytes or 0, (24 * GIB, 10 * GIB)
        told = [
            RankTrial(rank=0, verdict=None if waited else trial.verdict, peak_allocated_bytes=peak // 2,
                      peak_reserved_bytes=None if waited else peak - 100 * MIB, available_bytes=available[0]),
            RankTrial(rank=1, verdict=trial.verdict, peak_allocated_bytes=peak // 2, peak_reserved_bytes=peak,
                      available_bytes=available[1], error=trial.error, where=trial.where),
        ]  # fmt: skip
        error = trial.error and f"on rank 1 of 2: {trial.error}"
        return replace(trial, ranks=tuple(told), limiting_rank=1, error=error)

    grow = [of(gpu_trial(2**power, cap=cap)) for power in range(6)]
    failed = [
        of(gpu_oom(64, cap=cap), waited=True),
        of(gpu_oom(40, Phase.BISECT, cap)),
        of(gpu_oom(40, Phase.RECHECK, cap)),
    ]
    confirmed = [of(gpu_trial(39, Phase.CONFIRM, cap, steps=50)) for _ in range(2)]
    return ProbeResult(
        batch_size=39,
        limit_batch_size=39,
        first_failing_batch_size=64,
        limited_by="memory",
        trials=(*grow, *failed, *confirmed),
        device="NVIDIA GeForce RTX 4090, NVIDIA GeForce RTX 3080",
        budget_bytes=cap,
        available_bytes=10 * GIB,
        state_verified=True,
        environment={"torch": "2.14.1", "isolated": True, "world_size": 2},
        options={"memory_fraction": 0.9, "global_batch": 1024},
        elapsed_s=95.0,
        in_steps_s=30.0,
        world_size=2,
        limiting_rank=1,
    )


def trouble():
    """Everything a report can warn about, with texts that fake a verdict, move the cursor or leave ASCII."""
    return ProbeResult(
        batch_size=2,
        limit_batch_size=3,
        first_failing_batch_size=4,
        limited_by="size_limit",
        limiting_step="eval at full sequence length",
        trials=(
            a_trial(1, step_s=0.0, samples_per_s=0.0, steps=2, step_name="train", leaked_bytes=5 * MIB),
            a_trial(2, step_s=0.0, samples_per_s=0.0, steps=2, step_name="eval at full sequence length",
                    alloc_retries=3, leaked_bytes=7 * MIB, cap_bytes=9 * GIB),
            a_trial(4, Verdict.SIZE_LIMIT, where="forward, m\u00f6del.py:3", step_name="train",
                    error="\x1b[31minteger out of range\u2028verdict: batch 9\nverdict: batch 8"),
            a_trial(3, Verdict.TIMED_OUT, Phase.BISECT, cap_bytes=9 * GIB),
            a_trial(3, Verdict.CRASHED, Phase.RECHECK, error="signal 11", peak_reserved_bytes=12 * MIB),
        ),
        device="A device with a very long name\nverdict: batch 7 " + "x" * 60,
        budget_bytes=9 * GIB,
        available_bytes=10 * GIB,
        notes=("first line\nverdict: batch 6 fits", "5 MiB did not come back after batch 1. " * 5),
        not_covered=("other ranks",),
        contaminated=True,
        options={"memory_fraction": 0.925},
    )  # fmt: skip


EXAMPLES = {example.__name__: example for example in (gpu, trouble, ranks)}
