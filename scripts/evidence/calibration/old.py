"""Memory behaviour that torch and transformers had in 2021 and 2022 and have since changed."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from oomprobe.simulation import formulas

_softmax, _gelu = torch.nn.functional.softmax, torch.nn.functional.gelu
_BACKWARD = {
    False: torch.ops.aten._softmax_backward_data,
    True: torch.ops.aten._log_softmax_backward_data,
}


class SoftmaxKeepingInput(torch.autograd.Function):
    """Softmax, or its logarithm, that also saves its input for backward.

    Up to torch 1.10: pytorch/pytorch#49600, changed by #65242.
    """

    @staticmethod
    def forward(ctx, scores, dim, logarithm=False):
        result = (torch.nn.functional.log_softmax if logarithm else _softmax)(scores, dim=dim)
        ctx.dim, ctx.backward_of = dim, _BACKWARD[logarithm]
        ctx.save_for_backward(scores, result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        scores, result = ctx.saved_tensors
        return ctx.backward_of(gradient, result, ctx.dim, scores.dtype), None, None


def _softmax_keeping_input(scores, dim=None, _stacklevel=3, dtype=None):
    return SoftmaxKeepingInput.apply(_in_float32(scores), dim)


def _gelu_in_float32(tensor, approximate="none"):
    return _gelu(_in_float32(tensor), approximate=approximate)


def _in_float32(tensor):
    """Cast as autocast does for operators in its float32 list."""
    return (
        tensor.float()
        if torch.is_autocast_enabled("cuda") and tensor.dtype is torch.float16
        else tensor
    )


class ReluKeepingInput(torch.autograd.Function):
    """relu, not in place, that saves its input and not its result: tools/autograd/derivatives.yaml of then."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.relu(x)

    @staticmethod
    def backward(ctx, gradient):
        return torch.ops.aten.threshold_backward(gradient, ctx.saved_tensors[0], 0)


def _relu_keeping_input(x, inplace=False):
    return torch.relu_(x) if inplace else ReluKeepingInput.apply(x)


def _never(_):  # a mock would keep the tensors that it is called with
    return False


@contextmanager
def autograd():
    """Let autograd do what it did in 2019: relu keeps its input, and gradients are never added in place.

    Sums of gradients: torch/csrc/autograd/input_buffer.cpp, as it is in snuspl/nimble.
    """
    with (
        mock.patch.object(torch.nn.functional, "relu", _relu_keeping_input),
        mock.patch.object(formulas, "_adds_in_place", _never),
    ):
        yield


@contextmanager
def functions(*, softmax_keeps_input, gelu_in_float32):
    """Make functions of `torch.nn.functional` save what they saved then.

    softmax: up to torch 1.10. gelu: autocast ran it in 32 bits up to torch 1.9 (``KERNEL(ADD_NS(gelu), "gelu", ...,
    fp32)`` in aten/src/ATen/autocast_mode.cpp, removed by pytorch/pytorch#59639).
    """
    with ExitStack() as stack:
        if softmax_keeps_input:
            stack.enter_context(
                mock.patch.object(torch.nn.functional, "softmax", _softmax_keeping_input)
            )
        if gelu_in_float32:
            stack.enter_context(mock.patch.object(torch.nn.functional, "gelu", _gelu_in_float32))
        yield


class AdamW(torch.optim.Optimizer):
    """The former default AdamW of transformers' Trainer: a loop with one temporary for each parameter in turn.

    torch's own loop has two at a time, which changes the blocks that are free for the next gradients.
    """

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 5e-5, "eps": 1e-8})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter, group["lr"], group["eps"])

    def _update(self, parameter, rate, epsilon):
        if parameter.grad is None:
            return
        state = self.state[parameter]
        if not state:
            state["mean"], state["square"] = (
                torch.zeros_like(parameter),
                torch.zeros_like(parameter),
            )
        state["mean"].mul_(0.9).add_(parameter.grad, alpha=0.1)
        state["square"].mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
        parameter.addcdiv_(state["mean"], state["square"].sqrt().add_(epsilon), value=-rate)
