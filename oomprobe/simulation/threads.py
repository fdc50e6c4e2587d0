"""Threads that code on a simulated card starts: they have host memory, and are refused the card."""

from __future__ import annotations

import signal
import threading
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from oomprobe.errors import SimulationError
from oomprobe.ground.frames import user_line
from oomprobe.ground.replaced import Patch
from oomprobe.simulation.card_mode import CardMode
from oomprobe.simulation.fakes import CARD, requested_device

OTHER_THREAD = (
    "{line} uses the card in another thread than the main one, and only the main thread is "
    "simulated: move tensors to the card there, or probe on a real device"
)


def refusing(card_mode: CardMode) -> Patch:
    """Return the replacement that refuses the card to threads which begin."""
    thread_type: Any = threading.Thread
    begin = thread_type._bootstrap_inner

    def begin_thread(thread: threading.Thread) -> None:
        with OtherThread(card_mode):
            begin(thread)

    return thread_type, "_bootstrap_inner", begin_thread


class OtherThread(TorchFunctionMode):
    """Refuses the card to a thread that is not simulated, and ends the step that waits for it."""

    def __init__(self, card_mode: CardMode) -> None:
        super().__init__()
        self._card_mode = card_mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.__name__ != "__get__" and (
            func is torch.Tensor.cuda or any(map(self._is_on_card, tree_leaves((args, kwargs))))
        ):
            self._refuse()
        return func(*args, **kwargs)

    def _is_on_card(self, value: Any) -> bool:
        if isinstance(value, str):
            return value.partition(":")[0] == "cuda"
        if isinstance(value, torch.device):
            return requested_device(value) == CARD
        return isinstance(value, torch.Tensor) and self._card_mode.is_on_card(value)

    def _refuse(self) -> None:
        refusal = SimulationError(OTHER_THREAD.format(line=user_line()))
        self._card_mode.refused_thread = str(refusal)
        # The step may wait for ever for what this thread would have made: its time is up.
        if not self._card_mode.whole_program and callable(signal.getsignal(signal.SIGALRM)):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        raise refusal
