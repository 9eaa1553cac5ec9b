"""Finds the norm layers, the head, or any named layers of somebody's network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch
from torch import nn
from torch.jit import ScriptModule
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

Layers = str | Sequence[str] | Callable[[str, nn.Module], bool]
"""`"norm"`, `"head"`, `"all"`, names of modules, or a function of a module's name and the module.

`"auto"` is the norm layers, or the head of a network that has none."""


_TORCH_NORMS: tuple[type[nn.Module], ...] = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def is_norm(module: nn.Module) -> bool:
    """Whether a module scales and shifts a normalised signal.

    The classes of torch by type. Those of timm, transformers and one's own (`RmsNorm`, `LlamaRMSNorm`,
    `T5LayerNorm`, ...) derive from nothing in common: they are known by "norm" in the class name and by holding
    nothing but vectors.
    """
    if isinstance(module, _TORCH_NORMS):
        return True
    own = list(module.parameters(recurse=False))
    return "norm" in type(module).__name__.lower() and bool(own) and all(p.ndim <= 1 for p in own)


def innermost(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, DataParallel or torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def is_sharded(model: nn.Module) -> bool:
    """Whether no process has all parameters (FSDP)."""
    model = innermost(model)
    return type(model).__name__ == "FullyShardedDataParallel" or any(
        hasattr(p, "device_mesh") for p in model.parameters()
    )


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, DataParallel or torch.compile, which would get in the way."""
    model = innermost(model)
    if is_sharded(model):
        raise TypeError(
            "the model's parameters are sharded (FSDP), so no process can run it alone to look at its candidates. "
            "Use a strategy that reads the scores of training, which runs nothing extra, or select with an unsharded copy "
            "of the model: CoresetSampler(train_set, copy, ...), updated before select()."
        )
    return model


def check_ready(model: nn.Module) -> None:
    """Refuses a model whose parameters have no values yet."""
    for name, value in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(value):
            raise ValueError(
                f"{name} of {type(model).__name__} is lazy and has never been run, and a selection must not be what gives "
                "it its first values. Run the model on one batch before the first selection."
            )
        if value.is_meta:
            raise ValueError(
                f"{name} of {type(model).__name__} is on the meta device, where a tensor has no values (so are weights that "
                "accelerate has offloaded). Load the model onto a real device before the first selection, or select with "
                "a copy that is."
            )


def matrix_layers(model: nn.Module) -> list[str]:
    """The names of all layers with a weight matrix, also one behind a parametrization such as weight norm."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, ParametrizationList) or is_norm(module):
            continue
        weights = [*module.parameters(recurse=False)]
        if is_parametrized(module):
            weights += [p for parts in module.parametrizations.values() for p in parts.parameters()]
        if any(p.ndim >= 2 for p in weights):
            found.append(name)
    return found


def head_name(model: nn.Module) -> str:
    """The name of the layer that makes the logits: the last one with a weight matrix."""
    names = matrix_layers(model)
    if not names:
        raise ValueError(f"{type(model).__name__} has no layer with a weight matrix, so no head can be found in it")
    return names[-1]


def modules_of(model: nn.Module, layers: Layers) -> dict[str, nn.Module]:
    """The modules that `layers` stands for and that hold parameters of their own, in the order of the model.

    `"auto"` is the norm layers, in a network without any the head, and in one without that whatever has parameters;
    those of a scripted module cannot be replaced and are left out.
    """
    check_ready(model)
    everything = {
        name: module
        for name, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    }
    if callable(layers):
        found = {name: module for name, module in everything.items() if layers(name, module)}
    elif not isinstance(layers, str):
        missing = [name for name in layers if name not in everything]
        if missing:
            raise ValueError(
                f"layers names {missing}, which {type(model).__name__} does not have or which hold no parameters; "
                f"it has {list(everything)[:8]} ..."
            )
        found = {name: module for name, module in everything.items() if name in set(layers)}
    elif layers == "auto":
        swappable = {n: m for n, m in model.named_modules() if not isinstance(m, ScriptModule)}
        norms = {name: module for name, module in everything.items() if name in swappable and is_norm(module)}
        head = {name: swappable[name] for name in matrix_layers(model)[-1:] if name in swappable}
        rest = {name: module for name, module in everything.items() if name in swappable}
        return next((found for found in (norms, head) if parameter_names(found)), rest)
    elif layers == "norm":
        found = {name: module for name, module in everything.items() if is_norm(module)}
        if not found:
            raise ValueError(
                f'layers="norm", but {type(model).__name__} has no norm layer with weights. '
                'Pass layers="head", layers="all", or the names of the layers to perturb.'
            )
    elif layers == "head":
        found = {head_name(model): model.get_submodule(head_name(model))}
    elif layers == "all":
        found = everything
    else:
        raise ValueError(f'layers must be "norm", "head", "all", "auto", names or a function, got {layers!r}')
    if not found:
        raise ValueError(f"layers={layers!r} matches no layer with parameters in {type(model).__name__}")
    return found


def parameter_names(modules: dict[str, nn.Module]) -> list[str]:
    """The full names of the floating-point parameters that these modules hold themselves."""
    named = {
        id(value): f"{name}.{parameter}" if name else parameter
        for name, module in reversed(modules.items())
        for parameter, value in _own_parameters(module)
        if value.is_floating_point()
    }  # tied weights once, under their first name
    return list(reversed(named.values()))


def _own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    own = list(module.named_parameters(recurse=False))
    if is_parametrized(module):
        own += [(name, p) for name, p in module.named_parameters() if name.startswith("parametrizations.")]
    return own[::-1]


def device_of(model: nn.Module) -> torch.device:
    """Where its first parameter is; the CPU for a model that has none."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def devices_of(model: nn.Module) -> set[torch.device]:
    """All the devices that hold its parameters."""
    return {parameter.device for parameter in model.parameters()}


def back_through_train(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    """Calls `train` where it is somebody's own: eval mode may have done more than set a flag, such as merge weights."""
    for module, mode in modes:  # parents first, since theirs calls that of their children
        if getattr(module.train, "__func__", None) is not nn.Module.train and module.training != mode:
            module.train(mode)
