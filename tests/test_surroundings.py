import subprocess
import sys

import pytest

PRECISIONS = [
    "torch.backends.fp32_precision",
    "torch.backends.cuda.matmul.fp32_precision",
    "torch.backends.mkldnn.matmul.fp32_precision",
    "torch.backends.cudnn.conv.fp32_precision",
    "torch.backends.cudnn.rnn.fp32_precision",
]
SCRIPT = """
import sys, torch
from oomprobe.state import Keeper
flag, before, step = sys.argv[1:]
def all_flags():
    b = torch.backends
    owners = (b, b.cuda.matmul, b.cudnn, b.cudnn.conv, b.cudnn.rnn, b.mkldnn, b.mkldnn.matmul, b.mkldnn.conv)
    return [owner.fp32_precision for owner in owners]
exec(before)
then = all_flags()
kept = Keeper(torch.nn.Linear(1, 1), [], [], "cpu")
exec(step)
changed = kept.differences()
kept.put_back()
assert all_flags() == then, (all_flags(), then)
assert kept.differences() == [], kept.differences()
assert bool(changed) == bool(step), changed
"""


def run(flag, before, step):
    done = subprocess.run([sys.executable, "-c", SCRIPT, flag, before, step], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("flag", PRECISIONS)
def test_the_newer_precision_flags_set_by_the_user_and_by_the_step(flag):
    run(flag, f"{flag} = 'ieee'", f"{flag} = 'tf32'")


@pytest.mark.parametrize("flag", PRECISIONS)
def test_the_newer_precision_flags_set_by_the_user_alone(flag):
    run(flag, f"{flag} = 'ieee'", "")


@pytest.mark.parametrize(
    ("before", "step"),
    [
        ("", "torch.backends.cuda.matmul.fp32_precision = 'tf32'"),
        ("torch.set_float32_matmul_precision('high')", "torch.backends.cuda.matmul.fp32_precision = 'ieee'"),
        ("torch.set_float32_matmul_precision('high')", "torch.set_float32_matmul_precision('medium')"),
        ("torch.backends.cuda.matmul.fp32_precision = 'ieee'", "torch.set_float32_matmul_precision('medium')"),
        ("", "torch.backends.cudnn.allow_tf32 = False"),
        ("", "torch.backends.fp32_precision = 'tf32'; torch.set_float32_matmul_precision('high')"),
    ],
)
def test_the_two_precision_interfaces_mixed(before, step):
    run("", before, step)


FLAGS = [
    ("torch.is_anomaly_check_nan_enabled()", "torch.set_anomaly_enabled(torch.is_anomaly_enabled(), check_nan=False)"),
    ("torch.backends.mkldnn.deterministic", "torch.backends.mkldnn.deterministic = True"),
    (
        "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()",
        "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)",
    ),
    ("torch.is_autocast_enabled('cuda')", "torch.set_autocast_enabled('cuda', True)"),
]
OTHER_SCRIPT = """
import sys, torch
from oomprobe.state import Keeper
read, step = sys.argv[1:]
then = eval(read)
kept = Keeper(torch.nn.Linear(1, 1), [], [], "cpu")
exec(step)
assert eval(read) != then
assert kept.differences(), "it was not seen to change"
kept.put_back()
assert eval(read) == then, (eval(read), then)
assert kept.differences() == [], kept.differences()
"""


@pytest.mark.parametrize(("read", "step"), FLAGS)
def test_a_second_flag_beside_one_that_is_kept(read, step):
    """Set with the first by the same call, or of the same kind."""
    done = subprocess.run([sys.executable, "-c", OTHER_SCRIPT, read, step], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
