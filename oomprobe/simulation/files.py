"""Files of a program on a simulated card: tensors without values are saved by their shapes."""

from __future__ import annotations

import functools
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from oomprobe.ground.replaced import Patch
from oomprobe.simulation.card_mode import CardMode
from oomprobe.simulation.fakes import CARD, requested_device


class Files:
    """Answers what saves and loads tensors. The command's overlay decides where files are written.

    Args:
        card_mode: What knows which tensors are simulated.
    """

    def __init__(self, card_mode: CardMode) -> None:
        self._card_mode = card_mode
        self._save, self._load = torch.save, torch.load
        self._device: torch.device | None = None  # where tensors that are loaded go

    def patches(self) -> Iterator[Patch]:
        """Yield replacements for attributes, each with its owner and name."""
        data_ptr, data_ptr_of_tensor = torch.UntypedStorage.data_ptr, torch.Tensor.data_ptr

        def address(storage: torch.UntypedStorage) -> int:
            """Answer with a number of its own: programs tell by it which tensors share memory."""
            storage = self._card_mode.fakes.on_its_card(storage)
            return data_ptr(storage) if storage.device.type != "meta" else storage._cdata

        def address_in(tensor: torch.Tensor) -> int:
            """Answer for a tensor as for the storage in which it begins."""
            if self._card_mode.fakes.has_values(tensor):
                return data_ptr_of_tensor(tensor)
            offset_bytes = int(tensor.storage_offset()) * tensor.element_size()
            return tensor.untyped_storage().data_ptr() + offset_bytes

        yield torch, "save", self.save
        yield torch, "load", self.load
        name = "_rebuild_meta_tensor_no_storage"
        yield torch._utils, name, self._rebuild(getattr(torch._utils, name))
        yield torch.UntypedStorage, "data_ptr", address
        yield torch.Tensor, "data_ptr", address_in
        for owner in (torch.Tensor, torch.nn.Parameter):
            yield owner, "__reduce_ex__", self._reduce(owner.__reduce_ex__)

    def answer_safetensors(self, module: Any) -> None:
        """Replace what the module ``safetensors.torch`` saves and loads with; it reads the addresses of tensors."""
        for name in ("save_file", "save_model"):
            setattr(module, name, functools.partial(self.save_tensors, getattr(module, name)))
        module.load_file = functools.partial(self.load_tensors, module.load_file)

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Answer `torch.save`."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            self._save(*args, **kwargs)

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

    def _reduce(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        """Make a tensor without values pickle as its shape, by `pickle` as by `torch.save`."""

        @functools.wraps(reduce)
        def reduce_without_data(tensor: torch.Tensor, protocol: Any) -> Any:
            if self._card_mode.fakes.has_values(tensor):
                return reduce(tensor, protocol)
            if isinstance(tensor, torch.nn.Parameter):
                parts: Any = (tensor.detach(), tensor.requires_grad, OrderedDict())
                return torch._utils._rebuild_parameter, parts
            geometry = tensor.dtype, tensor.size(), tensor.stride(), tensor.requires_grad
            return torch._utils._rebuild_meta_tensor_no_storage, geometry

        return reduce_without_data

    def save_tensors(
        self, save: Callable[..., None], tensors: Any, filename: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Answer the functions of safetensors that save; simulated tensors are written as `torch.save` would."""
        by_name = tensors.state_dict() if isinstance(tensors, torch.nn.Module) else tensors
        if all(map(self._card_mode.fakes.has_values, by_name.values())):
            save(tensors, filename, *args, **kwargs)
        else:
            self.save(by_name, filename)

    def load_tensors(self, load: Callable[..., Any], filename: Any, device: Any = "cpu") -> Any:
        """Answer ``safetensors.torch.load_file``."""
        if zipfile.is_zipfile(filename):
            with open(filename, "rb") as file:  # by its name, torch.load would ask safetensors
                return self.load(file, device)
        return {name: tensor.to(device) for name, tensor in load(filename).items()}
