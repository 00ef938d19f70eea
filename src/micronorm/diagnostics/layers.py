"""The layers whose weights diagnostics look at, each weight seen as one row of fan-in I per output channel."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from micronorm.convert.surgery import names_of
from micronorm.nn.reparameterized import Reparameterized
from micronorm.nn.weight import counterpart_kind, is_standardized_by_timm

Filter = Callable[[nn.Module, str], bool]
"""Says of a layer and its name whether to take it, as in `mn.convert`."""

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def weight_layers(model: nn.Module, filter: Filter | None = None) -> dict[str, Any]:
    """Convolutions and linear layers by name: reparameterized ones of ours, and plain ones.

    Left out are layers of fan-in 1, layers whose `weight` is no parameter (parametrizations, old weight_norm) and
    those with a forward that is not known: their parameter's gradient need not be that of the weight they compute with.

    Example:
        >>> list(weight_layers(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1, groups=8))))
        ['0']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a torch.nn.Module is needed, got {type(model).__name__}")
    found: dict[str, Any] = {}
    for module, names in names_of(model).items():
        weight = module._parameters.get("weight")
        if weight is None or isinstance(weight, UninitializedParameter) or not _is_known(module):
            continue
        rows = rows_of(module, weight)
        if rows.numel() >= 2 * rows.shape[0] > 0 and (filter is None or filter(module, names[0])):
            found[names[0]] = module
    return found


def _is_known(module: nn.Module) -> bool:
    if isinstance(module, Reparameterized):
        return True
    return counterpart_kind(module) is not None and not is_standardized_by_timm(module)


def rows_of(layer: Any, weight: Tensor) -> Tensor:
    """A tensor in the layout of the layer's weight as O×…: transposed convolutions keep O in axis 1, per group."""
    if isinstance(layer, Reparameterized):
        return layer.rows(weight)
    return _swapped(layer, weight) if isinstance(layer, _TRANSPOSED) else weight


def from_rows(layer: Any, rows: Tensor) -> Tensor:
    """The inverse of `rows_of`."""
    if isinstance(layer, Reparameterized):
        return layer.from_rows(rows)
    return _swapped(layer, rows) if isinstance(layer, _TRANSPOSED) else rows


def over_rows(values: Tensor, like: Tensor) -> Tensor:
    """O numbers, shaped to broadcast against O×…."""
    return values.reshape((-1,) + (1,) * (like.ndim - 1))


def _swapped(layer: Any, weight: Tensor) -> Tensor:
    return weight.unflatten(0, (layer.groups, -1)).transpose(1, 2).flatten(0, 1)
