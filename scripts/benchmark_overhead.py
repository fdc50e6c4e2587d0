"""How much of a probe's time is spent outside the user's steps, on the demo nets. Target: under 10 %.

python scripts/benchmark_overhead.py
"""

import oomprobe
from oomprobe import demo
from oomprobe.cli import DEMO_BUDGET


def main():
    device = None if demo.demo_device().type != "cpu" else DEMO_BUDGET
    print("model      trials  batch  probe_s  in_steps_s  outside")
    for build in (demo.conv_net, demo.small_gpt):
        model, step = build()
        result = oomprobe.find_max_batch(model, step, device=device, progress="off")
        outside = 1 - result.in_steps_s / result.elapsed_s
        print(
            f"{build.__name__:9}  {len(result.trials):6}  {result.batch_size:5}  {result.elapsed_s:7.1f}  "
            f"{result.in_steps_s:10.1f}  {outside:7.1%}"
        )


if __name__ == "__main__":
    main()
