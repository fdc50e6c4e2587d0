"""Savings of memory that are on while a call of the step runs: written around the user's code, and taken off again after the call.

Each does what its line to type would do. Sources: torch/amp/autocast_mode.py, torch/utils/checkpoint.py, torch/autograd/graph.py and the
parameter groups of torch/optim/adam.py.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from oomprobe.devices import Device
from oomprobe.devices.recorder import backward_wrapped
from oomprobe.errors import NotApplicableError
from oomprobe.ground.replaced import ABSENT, put, replaced
from oomprobe.records.savings import (
    ATTENTION_SAVED,
    BF16,
    CHECKPOINT,
    EXPANDABLE,
    FP16,
    FUSED,
    NO_FOREACH,
    OFFLOAD,
    Part,
    saving_of,
)

HALVES = {BF16: torch.bfloat16, FP16: torch.float16}
HAVE_FUSED = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
)  # on accelerators, in every torch since 2.6
# Methods of a model that make it recompute its blocks in backward, and which parameter takes the
# arguments of torch's `checkpoint`.
SWITCHES = {
    "activation_checkpointing_enable": "activation_checkpointing_kwargs",  # transformers
    "gradient_checkpointing_enable": "gradient_checkpointing_kwargs",  # its older versions
    "set_grad_checkpointing": "",  # timm
    "enable_gradient_checkpointing": "",  # diffusers
}
# The flags that these methods set, on the model or its modules.
FLAGS = ("gradient_checkpointing", "grad_checkpointing")
ALREADY_ON = "already on"
NO_BLOCKS = "no repeated blocks"
DROPS_OUT = (
    "attention drops out: after it, recomputing would draw other numbers than forward did. This "
    "saves only attention without dropout"
)
OTHER_BLOCKS = "the model repeats {count} blocks"
HALF_ALREADY = "its parameters are {dtype} already"
NO_FUSED = "{kind} has no fused version here"
NO_LISTS = "{kind} makes no lists of tensors"
TYPED = {
    BF16: 'with torch.autocast("{type}", torch.bfloat16): loss = ...',
    FP16: 'with torch.autocast("{type}", torch.float16): loss = ..., and a GradScaler',
    FUSED: "{optimizer}(..., fused=True)",
    NO_FOREACH: "{optimizer}(..., foreach=False)",
    OFFLOAD: "with torch.autograd.graph.save_on_cpu(pin_memory=True):",
}
OTHERS_OFF = "\nfor block in {blocks}: block.{flag} = False"
SAVING_ATTENTION = (
    "saving_attention = functools.partial(create_selective_checkpoint_contexts, [{kernels}])\n"
)
TO_SWITCH = {
    CHECKPOINT: '{"use_reentrant": False}',
    ATTENTION_SAVED: '{"use_reentrant": False, "context_fn": saving_attention}',
}
TYPED_IN_BLOCKS = {
    CHECKPOINT: "for block in {blocks}: block.forward = "
    "functools.partial(checkpoint, block.forward, use_reentrant=False)",
    ATTENTION_SAVED: "for block in {blocks}: block.forward = functools.partial(checkpoint, "
    "block.forward, use_reentrant=False, context_fn=saving_attention)",
    OFFLOAD: "saved = torch.autograd.graph.save_on_cpu(pin_memory=True)\nfor block in {blocks}: "
    "block.register_forward_pre_hook(lambda *_: saved.__enter__()), "
    "block.register_forward_hook(lambda *_: saved.__exit__(), always_call=True)",
}


class _Scope:
    """A context around forward and loss, such as autocast: entered where forward begins, and left before backward."""

    def __init__(self, name: str, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self.name, self._make = name, make
        self._context: AbstractContextManager[Any] | None = None

    def enter(self) -> None:
        """Enter it, unless it is entered."""
        if self._context is None:
            self._context = self._make()
            self._context.__enter__()

    def leave(self) -> bool:
        """Leave it, and return whether it was entered."""
        context, self._context = self._context, None
        if context is None:
            return False
        context.__exit__(None, None, None)
        return True

    def is_made_by(self, context: object) -> bool:
        return context is self._context


class Savings:
    """Savings that are on during each call of a step.

    Attributes:
        typed: What to type for each, once a call has shown it.
        blocks: That the model repeats, where one may act on some of them.
    """

    def __init__(self, saving: Sequence[str] = (), device: Device | None = None) -> None:
        # Expandable segments are a setting of the process.
        self._saving = tuple(name for name in saving if name != EXPANDABLE)
        self._type = "cuda" if device is None or device.is_simulated else device.torch_device.type
        self.typed: dict[str, str] = {}
        self._repeated: list[torch.nn.Module] = []
        self._why_not: dict[str, str] = {}  # the savings that did nothing in a call
        self._kept_kernels = set[str]()  # whose results are saved, as they are typed
        self._scopes: list[_Scope] = []
        self._scaler: Any = None
        self._hook: Any = None
        self._in_backward = False
        self._forward_calls = self._recomputed_calls = 0

    @property
    def blocks(self) -> int:
        return len(self._repeated)

    @property
    def recomputed(self) -> float:
        """Share of the forward's module calls that backward made again."""
        if not self._forward_calls:
            return 0.0
        return self._recomputed_calls / self._forward_calls

    def start_trial(self) -> None:
        """Let go of what the last trial's loss scaler held."""
        self._scaler = None

    @contextmanager
    def on(self, model: torch.nn.Module) -> Iterator[None]:
        """Turn them on for one call.

        Raises:
            NotApplicableError: one of them did nothing in the call, because it is on already, or because there is nothing to apply it to.
        """
        if not self._saving:
            yield
            return
        ways = {
            BF16: self._autocast,
            FP16: self._autocast,
            ATTENTION_SAVED: self._attention_saved,
            CHECKPOINT: self._checkpoint,
            FUSED: self._optimizer,
            NO_FOREACH: self._optimizer,
            OFFLOAD: self._offload,
        }
        self._repeated = repeated_blocks(model)
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            # The next one.
            warnings.filterwarnings("ignore", message=".*there are global hooks on modules")
            stack.enter_context(self._hooked())
            stack.enter_context(backward_wrapped(self._outside_forward))
            stack.callback(self._leave_scopes)
            for name in self._saving:
                stack.enter_context(ways[saving_of(name)](name, model))
            yield
        for reason in self._why_not.values():
            raise NotApplicableError(reason)

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        """Call `_before_forward` before each module; always by the same hook, for which torch.compile need not compile anew."""
        if self._hook is None:
            self._hook = register_module_forward_pre_hook(self._before_forward)
            self._hooks = {self._hook.id: self._hook.hooks_dict_ref()[self._hook.id]}
        self._hook.hooks_dict_ref().update(self._hooks)
        try:
            yield
        finally:
            self._hook.remove()

    # --- forward, loss and backward ---

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # the compiled module has been entered from outside already
        if self._in_backward:
            self._recomputed_calls += 1
            return
        self._forward_calls += 1
        if self._scopes and next(module.parameters(), None) is not None:
            for scope in self._scopes:
                self.typed[scope.name] = TYPED[scope.name].format(type=self._type)
                scope.enter()

    def _outside_forward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return `torch.autograd.backward` or `torch.autograd.grad`, run outside what is around forward and loss."""

        def outside(*args: Any, **kwargs: Any) -> Any:
            left = [scope for scope in self._scopes if scope.leave()]
            if self._scaler is not None and run.__name__ == "backward":
                if args:
                    args = (self._scaler.scale(args[0]), *args[1:])
                else:
                    kwargs = {**kwargs, "tensors": self._scaler.scale(kwargs["tensors"])}
            self._in_backward = True
            try:
                return run(*args, **kwargs)
            finally:
                self._in_backward = False
                if run.__name__ == "grad":  # the loss goes on, with a penalty on gradients
                    for scope in left:
                        scope.enter()

        return outside

    def _leave_scopes(self) -> None:
        for scope in self._scopes:
            scope.leave()
        self._scopes.clear()

    @contextmanager
    def _seen(self, name: str, kind: type, tells: Callable[[Any], bool]) -> Iterator[None]:
        """Notice contexts of a class that the user's own code enters outside backward, of which `tells` says that they are the saving."""
        enter = kind.__enter__  # type: ignore[attr-defined]

        def entering(context: Any) -> Any:
            is_own = any(scope.is_made_by(context) for scope in self._scopes)
            if not is_own and not self._in_backward and tells(context):
                self._why_not[name] = ALREADY_ON
            return enter(context)

        with replaced([(kind, "__enter__", entering)]):
            yield

    # --- each saving ---

    @contextmanager
    def _autocast(self, name: str, model: torch.nn.Module) -> Iterator[None]:
        sizes = Counter[torch.dtype]()
        for parameter in model.parameters():
            sizes[parameter.dtype] += parameter.nbytes
        dtype = max(sizes, key=sizes.__getitem__, default=None)  # of most parameters
        if torch.is_autocast_enabled(self._type):
            self._why_not[name] = ALREADY_ON
        if dtype in HALVES.values():
            self._why_not[name] = HALF_ALREADY.format(dtype=str(dtype).removeprefix("torch."))

        device = torch.autocast(self._type, HALVES[name]).device  # a simulated card's is the CPU's

        def is_the_saving(context: Any) -> bool:
            return bool(context._enabled) and context.device == device

        with ExitStack() as stack:
            stack.enter_context(self._seen(name, torch.autocast, is_the_saving))
            if name == FP16:
                self._scale(stack)
            self._scopes.append(_Scope(name, lambda: torch.autocast(self._type, HALVES[name])))
            yield

    def _scale(self, stack: ExitStack) -> None:
        """Scale losses until `stack` closes, and unscale gradients, as a GradScaler does."""
        if self._scaler is None:
            # A larger scale would skip first steps.
            self._scaler = torch.amp.GradScaler(self._type, init_scale=1.0)
        scaler = self._scaler

        def unscale(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            scaler.unscale_(optimizer)

        def update(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]:
                scaler.update()

        stack.callback(register_optimizer_step_pre_hook(unscale).remove)
        stack.callback(register_optimizer_step_post_hook(update).remove)

    @contextmanager
    def _attention_saved(self, name: str, model: torch.nn.Module) -> Iterator[None]:
        contexts = functools.partial(create_selective_checkpoint_contexts, self._keep_attention)
        try:
            with self._checkpoint(name, model, context_fn=contexts):
                yield
        finally:
            typed = self.typed.pop(name, "")
            if typed and self._kept_kernels:
                kernels = ", ".join(sorted(self._kept_kernels))
                self.typed[name] = SAVING_ATTENTION.format(kernels=kernels) + typed

    def _keep_attention(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if not isinstance(op, torch._ops.OpOverload) or not re.search("attention|attn", str(op)):
            return CheckpointPolicy.PREFER_RECOMPUTE
        names = (argument.name for argument in op._schema.arguments)
        if {**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p"):
            self._why_not[ATTENTION_SAVED] = DROPS_OUT
        self._kept_kernels.add(f"torch.ops.{op}")
        return CheckpointPolicy.MUST_SAVE

    @contextmanager
    def _checkpoint(self, name: str, model: torch.nn.Module, **arguments: Any) -> Iterator[None]:
        """Recompute the repeated blocks, with these arguments for torch's `checkpoint`."""
        arguments["use_reentrant"] = False
        modules = [*model.modules()]
        if any(vars(module).get(flag) is True for module in modules for flag in FLAGS):
            self._why_not[name] = ALREADY_ON
            yield
            return
        part, flag = Part.of(name), FLAGS[0]
        has_flags = {hasattr(type(block), flag) for block in self._repeated} == {True}
        with ExitStack() as stack:
            switches = (
                has_flags or not part.total
            )  # some blocks can be left out only by their flags
            if not (switches and self._switched(name, modules, stack, arguments)):
                recomputing = functools.partial(self._recomputing, arguments)
                stack.enter_context(self._in_blocks(name, model, recomputing))
            elif part.total:
                others = self._repeated[part.others]
                stack.enter_context(replaced((block, flag, False) for block in others))
                named = _in_python(model, self._repeated, part.others)
                self.typed[name] += OTHERS_OFF.format(blocks=named, flag=flag)
            yield

    @contextmanager
    def _in_blocks(
        self, name: str, model: torch.nn.Module, around: Callable[[Callable[..., Any]], Any]
    ) -> Iterator[None]:
        """Put something around the forward of each of the blocks on which a saving acts."""
        blocks, part = self._repeated, Part.of(name)
        if not blocks:
            self._why_not[name] = NO_BLOCKS
        elif part.total not in (0, len(blocks)):
            self._why_not[name] = OTHER_BLOCKS.format(count=len(blocks))
        else:
            named = _in_python(model, blocks, part.places)
            self.typed[name] = TYPED_IN_BLOCKS[saving_of(name)].format(blocks=named)
        with replaced((block, "forward", around(block.forward)) for block in blocks[part.places]):
            yield

    def _switched(
        self,
        name: str,
        modules: list[torch.nn.Module],
        stack: ExitStack,
        arguments: dict[str, Any],
    ) -> bool:
        """Let the model recompute its blocks by a method of its own, if it has one; what that sets is put back when `stack` closes."""
        of_kind = saving_of(name)
        for module in modules:
            for method, parameter in SWITCHES.items():
                is_able = getattr(module, "supports_gradient_checkpointing", True)  # transformers
                if not hasattr(type(module), method) or not is_able:
                    continue
                if of_kind == ATTENTION_SAVED and not parameter:
                    continue
                given, typed = {}, ""
                if parameter:
                    given, typed = {parameter: arguments}, TO_SWITCH[of_kind]
                before = [(module, dict(vars(module))) for module in modules]
                getattr(module, method)(**given)
                for changed, values in before:
                    for attribute, value in vars(changed).items():
                        if values.get(attribute, ABSENT) is not value:
                            stack.callback(put, changed, attribute, values.get(attribute, ABSENT))
                self.typed[name] = f"model.{method}({typed})"
                return True
        return False

    def _recomputing(
        self, arguments: dict[str, Any], forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        @functools.wraps(forward)
        def recomputing(*args: Any, **kwargs: Any) -> Any:
            if self._in_backward:  # the user's own code recomputes it
                self._why_not[CHECKPOINT] = ALREADY_ON
            return checkpoint(forward, *args, **arguments, **kwargs)

        return recomputing

    @contextmanager
    def _optimizer(self, name: str, model: torch.nn.Module) -> Iterator[None]:
        """Set flags of the optimizers that step, in their parameter groups."""
        refused: dict[str, str] = {}
        with ExitStack() as stack:

            def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
                kind = type(optimizer).__name__
                reason = _why_no_flags(name, optimizer)
                if reason:
                    refused[kind] = reason
                    return
                self.typed[name] = TYPED[name].format(optimizer=kind)
                _set_flags(name, optimizer, stack)

            hook = register_optimizer_step_pre_hook(before_step)
            try:
                yield
            finally:
                hook.remove()
        if refused and name not in self.typed:
            self._why_not[name] = "; ".join(refused.values())

    @contextmanager
    def _offload(self, name: str, model: torch.nn.Module) -> Iterator[None]:
        own = torch.autograd.graph.save_on_cpu(pin_memory=True)

        def offloading(forward: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(forward)
            def offloaded(*args: Any, **kwargs: Any) -> Any:
                with own:
                    return forward(*args, **kwargs)

            return offloaded

        with ExitStack() as stack:
            stack.enter_context(self._seen(name, type(own), lambda context: context is not own))
            if Part.of(name).total:
                stack.enter_context(self._in_blocks(name, model, offloading))
            else:
                self._scopes.append(_Scope(name, lambda: own))
            yield


def _why_no_flags(name: str, optimizer: torch.optim.Optimizer) -> str:
    """Return why an optimizer cannot be fused, or be made to work without lists of tensors; "" if it can."""
    groups, kind = optimizer.param_groups, type(optimizer).__name__
    if any(group.get("fused") for group in groups):
        return ALREADY_ON if name == FUSED else NO_LISTS.format(kind=f"a fused {kind}")
    if name == FUSED:
        is_able = type(optimizer) in HAVE_FUSED and not any(
            group.get("differentiable") for group in groups
        )
        return "" if is_able else NO_FUSED.format(kind=kind)
    if all(group.get("foreach") is False for group in groups):
        return ALREADY_ON
    return "" if all("foreach" in group for group in groups) else NO_LISTS.format(kind=kind)


def _set_flags(name: str, optimizer: torch.optim.Optimizer, stack: ExitStack) -> None:
    """Set the flags of all groups until `stack` closes; a fused step counts on the device."""
    is_fused = name == FUSED
    for group in optimizer.param_groups:
        stack.callback(group.update, {"fused": group["fused"], "foreach": group["foreach"]})
        group.update(fused=is_fused, foreach=False)
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {}) if is_fused else {}
            steps = state.get("step")
            if isinstance(steps, torch.Tensor) and steps.device != parameter.device:
                state["step"] = steps.to(parameter.device)
    if is_fused:
        stack.enter_context(replaced([(optimizer, "_step_supports_amp_scaling", True)]))


def _in_python(model: torch.nn.Module, blocks: list[torch.nn.Module], places: slice) -> str:
    """Write an expression for some of the repeated blocks, such as ``[*model.layers][:3]``."""
    names = {id(module): name for name, module in model.named_modules()}
    lists = dict.fromkeys(names[id(block)].rpartition(".")[0] for block in blocks)
    listed = [child for name in lists for child in model.get_submodule(name).children()]
    every = ", ".join(f"*model.{name}".rstrip(".") for name in lists)
    text = re.sub(r"\.(\d+)", r"[\1]", f"[{every}]")
    if listed != blocks:
        text = (
            f"[block for block in {text} if type(block).__name__ == {type(blocks[0]).__name__!r}]"
        )
    return text + f"[{places.start}:{places.stop}]".replace("None", "").removesuffix("[:]")


MOST_OF_A_STAGE = 0.75  # of the parameters of repeated stages: where blocks in them hold more, the blocks are meant


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the blocks that the model repeats: the modules of one class in its lists, such as the layers of a transformer.

    Where each of them is mostly a sequence of smaller blocks, as a stage of a convolutional net is, the blocks are the smaller ones.

    Examples:
        >>> stage = lambda: torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8)) for _ in range(3)))
        >>> len(repeated_blocks(torch.nn.Sequential(stage(), stage())))
        6
    """
    lists = [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)
    ]
    blocks = max(_by_class(lists).values(), key=_parameter_bytes, default=[])
    outer = {*map(id, blocks)}
    blocks = [block for block in blocks if outer.isdisjoint(map(id, [*block.modules()][1:]))]
    blocks = [*dict.fromkeys(blocks)]
    sequences = [
        module
        for block in blocks
        for module in block.modules()
        if isinstance(module, torch.nn.Sequential)
    ]
    smaller = max(_by_class(sequences).values(), key=_parameter_bytes, default=[])
    is_stages = _parameter_bytes(smaller) > MOST_OF_A_STAGE * _parameter_bytes(blocks)
    return smaller if is_stages and len(smaller) > len(blocks) else blocks


def _by_class(
    lists: Iterable[torch.nn.ModuleList | torch.nn.Sequential],
) -> dict[type, list[torch.nn.Module]]:
    """Return the modules in lists, by class, of those with several.

    A module without children, such as an activation, is no block.
    """
    members: dict[type, list[torch.nn.Module]] = defaultdict(list)
    for modules in lists:
        for module in modules:
            if [*module.children()]:
                members[type(module)].append(module)
    return {kind: modules for kind, modules in members.items() if len(modules) > 1}


def _parameter_bytes(modules: Iterable[torch.nn.Module]) -> int:
    return sum(parameter.nbytes for module in modules for parameter in module.parameters())
