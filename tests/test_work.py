import shutil
import sys

import pytest
import torch
from test_linux import run_python

from oomprobe.hooks import Work, WorkCounter


def count_work(call):
    with WorkCounter() as counter:
        call()
    return counter.work


def test_operators_and_elements_are_counted():
    x, y = torch.ones(2, 3), torch.ones(3, 5)

    def call():
        x.mm(y)  # 10 elements
        (x + 1).sum()  # 6, then 1

    assert count_work(call) == Work(operators=3, elements=17)


def test_an_operator_with_several_results_counts_each_element():
    x = torch.ones(6)
    assert count_work(lambda: torch.split(x, 2)) == Work(operators=1, elements=6)
    assert count_work(lambda: torch.ones(2, 3).max(dim=1)) == Work(operators=2, elements=6 + 2 + 2)


def test_nothing_dispatched_is_nothing():
    x = torch.ones(3)
    assert count_work(lambda: [x.shape, x.dtype, 1 + 1]) == Work(operators=0, elements=0)


def test_results_that_are_no_tensors_have_no_elements():
    x = torch.ones(3)
    assert count_work(lambda: x.sum().item()) == Work(operators=2, elements=1)


def test_work_outside_the_call_is_not_counted():
    torch.ones(3) + 1
    assert count_work(lambda: None).operators == 0


def test_backward_and_the_optimizer_are_counted():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward = count_work(lambda: model(torch.ones(4, 3)).sum())
    loss = model(torch.ones(4, 3)).sum()
    backward = count_work(loss.backward)
    step = count_work(optimizer.step)
    assert min(forward.operators, backward.operators, step.operators) > 0

    def whole_step():
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()

    assert count_work(whole_step).operators >= forward.operators + backward.operators + step.operators


def a_step(uses_batch):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def step(batch_size):
        model.zero_grad()
        model(torch.ones(batch_size if uses_batch else 4, 8)).sum().backward()

    return step


@pytest.mark.parametrize("uses_batch", [False, True])
def test_a_step_that_ignores_its_batch_size_does_equal_work(uses_batch):
    step = a_step(uses_batch)
    step(1)
    small, large = [count_work(lambda size=size: step(size)) for size in (8, 64)]
    assert (small == large) is not uses_batch
    assert small.operators == large.operators
    assert (large.elements > small.elements) is uses_batch


def test_once_loaded_the_counter_imports_nothing_more():
    run_python(
        """
        import sys
        import torch
        from oomprobe.hooks import WorkCounter, preload_dynamo
        preload_dynamo()
        before = set(sys.modules)
        with WorkCounter():
            (torch.ones(3, requires_grad=True) + 1).sum().backward()
        assert set(sys.modules) == before, sorted(set(sys.modules) - before)[:5]
        """
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can hold a process to a budget")
def test_a_step_without_an_optimizer_does_not_leak():
    out = run_python(
        """
        import torch, oomprobe
        torch.set_num_threads(1)
        model = torch.nn.Linear(256, 256)

        def step(model, batch_size):
            model(torch.randn(batch_size, 256)).sum().backward()

        result = oomprobe.find_max_batch(model, step, device="cpu:64MiB", max_batch=64, progress="off")
        print(max(trial.leaked_bytes for trial in result.trials))
        """
    )
    assert int(out) < 2**20


def test_an_exception_comes_out_and_the_counter_is_off():
    def call():
        torch.ones(3)
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        count_work(call)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def test_the_result_is_what_the_call_computes_without_a_counter():
    results = []
    count_work(lambda: results.append(torch.arange(4.0).square().sum()))
    assert results[0].item() == 14


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # of torch's own compiler
def test_compiled_code_is_counted_like_the_code_as_written():
    def plain(x):
        return (x.sin() + x.cos()).sum()

    compiled = torch.compile(plain)
    expected = {size: compiled(torch.ones(size)).item() for size in (8, 64)}
    for size in (8, 64):
        x, results = torch.ones(size), []
        assert count_work(lambda x=x, r=results: r.append(compiled(x))) == count_work(lambda x=x: plain(x))
        assert results[0].item() == pytest.approx(expected[size])
