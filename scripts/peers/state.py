"""What a call must leave as it was, taken down as hashes: before, after, and what differs."""

import hashlib
import pickle
import random

import numpy
import torch


def _digest(value):
    sha = hashlib.sha256()

    def add(part):
        if isinstance(part, torch.Tensor):
            sha.update(f"{part.dtype}{tuple(part.shape)}".encode() + part.detach().cpu().contiguous().numpy().tobytes())
        elif isinstance(part, dict):
            for key in part:
                sha.update(repr(key).encode())
                add(part[key])
        elif isinstance(part, list | tuple):
            for element in part:
                add(element)
        else:
            sha.update(pickle.dumps(part))

    add(value)
    return sha.hexdigest()


def taken_down(model, optimizer):
    """Hashes by name; without a model, of what is the process's."""
    of_process = {
        "torch's generator": _digest([torch.get_rng_state(), _card_s_generator()]),
        "numpy's generator": _digest(pickle.dumps(numpy.random.get_state())),
        "Python's generator": _digest(random.getstate()),
    }
    return of_process if model is None else _of_training(model, optimizer) | of_process


def _of_training(model, optimizer):
    return {
        "weights": _digest(dict(model.named_parameters())),
        "buffers": _digest(dict(model.named_buffers())),
        "gradients": _digest({name: p.grad for name, p in model.named_parameters()}),
        "modes": _digest([module.training for module in model.modules()]),
        "device": _digest([str(p.device) for p in model.parameters()]),
        "optimizer": _digest(optimizer.state_dict()),
    }


def _card_s_generator():
    return torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def changed(before, after):
    return [name for name in after if before[name] != after[name]]
