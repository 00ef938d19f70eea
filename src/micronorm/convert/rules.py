"""Which layers of torch, timm and torchvision conversion recognises as norms and convolutions, and which it refuses."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from micronorm.nn.group import GroupNorm
from micronorm.nn.weight import CONVOLUTIONS

Family = Literal["batch", "frozen", "group", "instance", "layer"]

_OF_TORCH: dict[type[nn.Module], Family] = {
    nn.BatchNorm1d: "batch",
    nn.BatchNorm2d: "batch",
    nn.BatchNorm3d: "batch",
    nn.SyncBatchNorm: "batch",
    nn.GroupNorm: "group",
    GroupNorm: "group",
    nn.InstanceNorm1d: "instance",
    nn.InstanceNorm2d: "instance",
    nn.InstanceNorm3d: "instance",
    nn.LayerNorm: "layer",
}
# Layers of timm and torchvision with their own forward, by name because the libraries may not be installed.
_NAMED: dict[str, Family] = {
    "timm.layers.norm_act.BatchNormAct2d": "batch",
    "timm.layers.norm_act.SyncBatchNormAct": "batch",
    "timm.layers.norm_act.FrozenBatchNormAct2d": "frozen",
    "timm.layers.norm_act.GroupNormAct": "group",
    "timm.layers.norm_act.GroupNorm1Act": "group",
    "timm.layers.norm.GroupNorm": "group",
    "timm.layers.norm.GroupNorm1": "group",
    "timm.layers.norm.LayerNorm": "layer",
    "timm.layers.norm.LayerNorm2d": "layer",
    "timm.layers.norm.LayerNormFp32": "layer",
    "timm.layers.norm.LayerNorm2dFp32": "layer",
    "timm.layers.norm_act.LayerNormAct": "layer",
    "timm.layers.norm_act.LayerNormAct2d": "layer",
    "torchvision.models.convnext.LayerNorm2d": "layer",
}
_CHANNELS_FIRST = ("LayerNorm2d", "LayerNorm2dFp32", "LayerNormAct2d")


@dataclass(frozen=True)
class SourceNorm:
    """A normalization layer to be converted.

    Attributes:
        module: the layer.
        family: the kind of normalization.
        channels: C.
        dims: the number of spatial dimensions; 2 if its class does not fix it.
        eps: ε.
        tail: the layers that it applies after normalizing, by their attribute (timm's `drop`, `act` and `aa`).
        channels_last: whether the channels are the last axis.
    """

    module: nn.Module
    family: Family
    channels: int
    dims: int
    eps: float
    tail: dict[str, nn.Module]
    channels_last: bool = False

    @property
    def takes_flat(self) -> bool:
        """Whether the input may be N×C."""
        return isinstance(self.module, nn.BatchNorm1d | nn.SyncBatchNorm)

    def tensor(self, name: str) -> Tensor | None:
        """Return weight, bias, running_mean or running_var; None if the layer does not have it."""
        return getattr(self.module, name, None)


def _computed_as(module: nn.Module) -> list[str]:
    """Return the full names of the module's class and of the base classes with the same forward."""
    own = type(module)
    return [f"{base.__module__}.{base.__qualname__}" for base in own.__mro__ if _forward(base) is _forward(own)]


def _forward(kind: type) -> Any:
    return getattr(kind, "forward", None)


def describe_norm(module: nn.Module) -> SourceNorm | None:
    """Return the description of a normalization layer; None for other layers and for unknown computations."""
    family = _family(module)
    if family is None or "forward" in vars(module):
        return None
    layer: Any = module
    if family == "layer":
        if len(layer.normalized_shape) != 1:
            return None
        channels = layer.normalized_shape[0]
    else:
        sizes = (getattr(layer, name, None) for name in ("num_features", "num_channels"))
        channels = next((size for size in sizes if size is not None), None)
        if channels is None:
            channels = layer.running_var.numel()
    tail = {
        name: getattr(layer, name)
        for name in ("drop", "act", "aa")
        if isinstance(getattr(layer, name, None), nn.Module)
    }
    dims = 2
    if isinstance(module, nn.InstanceNorm1d):
        dims = 1
    elif isinstance(module, nn.BatchNorm3d | nn.InstanceNorm3d):
        dims = 3
    last = family == "layer" and not any(name.endswith(_CHANNELS_FIRST) for name in _computed_as(module))
    return SourceNorm(module, family, channels, dims, float(layer.eps), tail, channels_last=last)


def _family(module: nn.Module) -> Family | None:
    for name in _computed_as(module):
        if name in _NAMED:
            return _NAMED[name]
    if type(module).__name__ == "FrozenBatchNorm2d" and isinstance(getattr(module, "running_var", None), Tensor):
        return "frozen"  # torchvision's and detectron2's
    for base, family in _OF_TORCH.items():
        if isinstance(module, base) and _forward(type(module)) is _forward(base):
            return family
    return None


def looks_like_a_norm(module: nn.Module) -> bool:
    """Return whether the layer's class descends from a norm of torch."""
    return isinstance(module, tuple(_OF_TORCH))


def refuse_reparameterized(layers: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise if a layer's weight is computed by a parametrization, which replacing the layer would lose."""
    found = []
    for name, module in layers:
        if parametrize.is_parametrized(module):
            found.append(f"{name!r} ({', '.join(type(p[0]).__name__ for p in module.parametrizations.values())})")  # type: ignore[union-attr, index]
        elif isinstance(module, CONVOLUTIONS) and module._parameters.get("weight") is None:
            found.append(
                f"{name!r} (its weight is computed by a hook, as old weight_norm, spectral_norm and pruning do)"
            )
        elif isinstance(module._parameters.get("weight"), torch.nn.parameter.UninitializedParameter):
            found.append(f"{name!r} (lazy: run one forward first)")
    if found:
        raise ValueError(
            f"these layers carry a parametrization already: {', '.join(found)}. Remove it "
            "(torch.nn.utils.parametrize.remove_parametrizations, torch.nn.utils.remove_weight_norm, prune.remove) or "
            "leave them out with filter="
        )
