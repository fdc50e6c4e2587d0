"""Files of a program on a simulated card: what has no values is not written over a file that has some."""

from __future__ import annotations

import functools
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from oomprobe.ground.frames import user_line
from oomprobe.ground.replaced import Patch
from oomprobe.simulation.card_mode import CardMode
from oomprobe.simulation.device_mode import Ones
from oomprobe.simulation.fakes import CARD, requested_device

SKIPPED = (
    "{line} saves tensors of the simulated card, which have no values: nothing was written, because the file may be a checkpoint. Below "
    "{{dir}} it would be"
)


class Files:
    """Answers what saves and loads tensors.

    Args:
        folder: Below it, simulated tensors are written, by their shapes and dtypes.
        card_mode: What knows which tensors are simulated, and gets the notes.
    """

    def __init__(self, folder: Path, card_mode: CardMode) -> None:
        self._folder, self._card_mode = folder.resolve(), card_mode
        self._save, self._load = torch.save, torch.load
        self._device: torch.device | None = None  # where tensors that are loaded go

    def patches(self) -> Iterator[Patch]:
        """Yield replacements for attributes, each with its owner and name."""
        yield torch, "save", self.save
        yield torch, "load", self.load
        name = "_rebuild_meta_tensor_no_storage"
        yield torch._utils, name, self._rebuild(getattr(torch._utils, name))
        for name in ("save", "savez", "savez_compressed"):
            yield np, name, functools.partial(self.save_arrays, getattr(np, name))

    def answer_safetensors(self, module: Any) -> None:
        """Replace what the module ``safetensors.torch`` saves and loads with; it reads the addresses of tensors."""
        for name in ("save_file", "save_model"):
            setattr(module, name, functools.partial(self.save_tensors, getattr(module, name)))
        module.load_file = functools.partial(self.load_tensors, module.load_file)

    def save(self, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        """Answer `torch.save`."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            if not self._has_simulated(obj):
                self._save(obj, f, *args, **kwargs)
                return
            if self._may_write(f):
                module = SimpleNamespace(
                    **{**vars(pickle), "Pickler": _pickler(self._card_mode, [])}
                )
                self._save(obj, f, **{**kwargs, "pickle_module": module})

    def load(self, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Answer `torch.load`; a tensor that was written without data has none again, and is on the card unless it is mapped elsewhere."""
        self._device = CARD if map_location is None else None
        if isinstance(map_location, str | int | torch.device):
            self._device = requested_device(map_location)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            loaded = self._load(f, "cpu", *args, **kwargs)
        return loaded if map_location is None else tree_map_only(torch.Tensor, self._loaded, loaded)

    def _loaded(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._device == CARD:
            self._card_mode.put_on_card(tensor)
        return tensor

    def _rebuild(self, rebuild: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Make what rebuilds a tensor without data, inside a module too, return one of the simulation."""

        @functools.wraps(rebuild)  # which pickle looks for
        def rebuild_without_data(
            dtype: torch.dtype, size: Any, stride: Any, requires_grad: bool
        ) -> torch.Tensor:
            with self._card_mode.fake_mode:
                fake = torch.empty_strided(size, stride, dtype=dtype)
            return self._loaded(fake).requires_grad_(requires_grad)

        return rebuild_without_data

    def save_arrays(
        self, save: Callable[..., None], file: Any, *arrays: Any, **kwargs: Any
    ) -> None:
        """Answer numpy's functions that save."""
        leaves = tree_leaves((arrays, kwargs))
        is_simulated = any(isinstance(leaf, Ones) for leaf in leaves) or self._has_simulated(leaves)
        if not is_simulated or self._may_write(file):
            save(file, *arrays, **kwargs)

    def save_tensors(
        self, save: Callable[..., None], tensors: Any, filename: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Answer the functions of safetensors that save; simulated tensors are written as `torch.save` would."""
        if not self._has_simulated(tensors):
            save(tensors, filename, *args, **kwargs)
            return
        if isinstance(tensors, torch.nn.Module):
            tensors = tensors.state_dict()
        self.save(tensors, filename)

    def load_tensors(self, load: Callable[..., Any], filename: Any, device: Any = "cpu") -> Any:
        """Answer ``safetensors.torch.load_file``."""
        if zipfile.is_zipfile(filename):
            with open(filename, "rb") as file:  # by its name, torch.load would ask safetensors
                return self.load(file, device)
        return {name: tensor.to(device) for name, tensor in load(filename).items()}

    def _may_write(self, file: Any) -> bool:
        """Whether a file is below the folder, or only a buffer; take a note if it is not."""
        name = getattr(file, "name", file)
        if not isinstance(name, str | os.PathLike) or self._folder in Path(name).resolve().parents:
            return True
        self._card_mode.notes[SKIPPED.format(line=user_line())] = None
        return False

    def _has_simulated(self, value: Any) -> bool:
        """Whether what would be saved has tensors without values: those on the card, and large ones that were never filled."""
        simulated: list[torch.Tensor] = []
        with (
            open(os.devnull, "wb") as nowhere,
            suppress(Exception),
        ):  # whoever saves it will say why it cannot be pickled
            _pickler(self._card_mode, simulated)(nowhere).dump(value)
        return bool(simulated)


def _pickler(card_mode: CardMode, simulated: list[torch.Tensor]) -> type[pickle.Pickler]:
    """Return a class that pickles simulated tensors by their shapes, and takes note of them."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or card_mode.fakes.has_values(value):
                return NotImplemented
            simulated.append(value)
            if isinstance(value, torch.nn.Parameter):
                return torch._utils._rebuild_parameter, (
                    value.detach(),
                    value.requires_grad,
                    OrderedDict(),
                )
            geometry = value.dtype, value.size(), value.stride(), value.requires_grad
            return torch._utils._rebuild_meta_tensor_no_storage, geometry

    return Pickler
