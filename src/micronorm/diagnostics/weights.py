"""Find the layers with a weight, and view a weight as one row per output channel."""

from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from micronorm.convert.surgery import names_of
from micronorm.nn.reparameterized import Reparameterized
from micronorm.nn.weight import counterpart_kind, is_standardized_by_timm

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def weight_layers(model: nn.Module) -> dict[str, Any]:
    """Return convolutions and linear layers by name, plain or reparameterized by this library.

    Layers of fan-in 1 are left out. So are layers whose `weight` is not a parameter (parametrizations, old weight_norm)
    and layers with an unknown forward, because they may compute with another weight than their parameter.

    Example:
        >>> list(weight_layers(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1, groups=8))))
        ['0']
    """
    found: dict[str, Any] = {}
    for module, names in names_of(model).items():
        weight = module._parameters.get("weight")
        if weight is None or isinstance(weight, UninitializedParameter) or not _is_known(module):
            continue
        rows = rows_of(module, weight)
        if rows.numel() >= 2 * rows.shape[0] > 0:
            found[names[0]] = module
    return found


def _is_known(module: nn.Module) -> bool:
    if isinstance(module, Reparameterized):
        return True
    return counterpart_kind(module) is not None and not is_standardized_by_timm(module)


def rows_of(layer: Any, weight: Tensor) -> Tensor:
    """Return a tensor in the weight's layout as O×…, or one of rows in the weight's layout.

    Transposed convolutions keep O in axis 1, per group. The exchange of the axes is its own inverse.
    """
    if not isinstance(layer, _TRANSPOSED):
        return weight
    return weight.unflatten(0, (layer.groups, -1)).transpose(1, 2).flatten(0, 1)


def over_rows(values: Tensor, like: Tensor) -> Tensor:
    """Return O numbers in a shape that broadcasts against O×…."""
    return values.reshape((-1,) + (1,) * (like.ndim - 1))
