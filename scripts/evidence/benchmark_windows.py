"""Print how often a simulated card agrees with torch's allocator near the limits of loops of other projects.

    .venv-cuda/bin/python scripts/evidence/benchmark_windows.py [MEMORY] [expandable]

Runs on the CUDA bed (tests/bed/README.md). For each loop of tests/strangers.py: the answers of whole searches with
`resolution=0`, and 24 sizes around the simulated answer, each three calls in a fresh process. In a window, `.` runs and `x` runs
out of memory on both; `D` runs in simulation only, `r` on torch's allocator only.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from bed import forked
from cuda import windows
from strangers import STRANGERS

EACH_SIDE = 12
SIGNS = {(True, True): ".", (False, False): "x", (True, False): "D", (False, True): "r"}


def main():
    memory = sys.argv[1] if len(sys.argv) > 1 else "1GiB"
    settings = windows.EXPANDABLE if "expandable" in sys.argv else ""
    cells, same_peaks, verdicts, near = 0, 0, "", 0
    for name, build in STRANGERS.items():
        limit, cap_bytes = forked(windows.simulated_answer, build, memory, settings, limit_s=300)
        real, _ = forked(
            windows.answer, build, settings, memory=memory, card=windows.A100, limit_s=300
        )
        _, in_simulation, on_torchs = windows.window(
            build, limit, cap_bytes, each_side=EACH_SIDE, memory=memory, settings=settings
        )
        signs = "".join(
            SIGNS[first[0], second[0]]
            for first, second in zip(in_simulation, on_torchs, strict=True)
        )
        cells += len(signs)
        same_peaks += sum(
            first == second for first, second in zip(in_simulation, on_torchs, strict=True)
        )
        verdicts += signs
        near += abs(limit - real) <= max(1, 0.0025 * real)
        print(
            f"{name:20} {limit:7} simulated, {real:7} searched ({limit / real - 1:+.2%})  {signs}",
            flush=True,
        )
    agreeing = verdicts.count(".") + verdicts.count("x")
    print(
        f"{memory}, {settings or 'default settings'}: {agreeing} of {cells} verdicts and {same_peaks} peaks are equal;"
    )
    print(
        f"{verdicts.count('D')} run in simulation only; {near} of {len(STRANGERS)} answers within a sample or 0.25 %"
    )


if __name__ == "__main__":
    main()
