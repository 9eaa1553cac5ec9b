"""Finds the norm layers, the head, or any named layers of somebody's network."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from .types import Layers

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


def head_name(model: nn.Module) -> str:
    """The name of the layer that makes the logits: the last one with a weight matrix."""
    names = [
        name
        for name, module in model.named_modules()
        if any(p.ndim >= 2 for p in module.parameters(recurse=False)) and not is_norm(module)
    ]
    if not names:
        raise ValueError(f"{type(model).__name__} has no layer with a weight matrix, so no head can be found in it")
    return names[-1]


def modules_of(model: nn.Module, layers: Layers) -> dict[str, nn.Module]:
    """The modules that `layers` stands for and that hold parameters of their own, in the order of the model."""
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
    elif layers == "norm":
        found = {name: module for name, module in everything.items() if is_norm(module)}
        if not found:
            raise ValueError(
                f'layers="norm", but {type(model).__name__} has no norm layer with weights. '
                'Pass layers="head", layers="all", or the names of the layers to perturb.'
            )
    elif layers == "head":
        found = {head_name(model): everything[head_name(model)]}
    elif layers == "all":
        found = everything
    else:
        raise ValueError(f'layers must be "norm", "head", "all", names or a function, got {layers!r}')
    if not found:
        raise ValueError(f"layers={layers!r} matches no layer with parameters in {type(model).__name__}")
    return found


def parameter_names(modules: dict[str, nn.Module]) -> list[str]:
    """The full names of the floating-point parameters that these modules hold themselves."""
    return [
        f"{name}.{parameter}" if name else parameter
        for name, module in modules.items()
        for parameter, value in module.named_parameters(recurse=False)
        if value.is_floating_point()
    ]
