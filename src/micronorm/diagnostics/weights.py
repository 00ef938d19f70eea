"""Find the layers with a weight, view a weight as one row per output channel, and measure its use of input channels."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from micronorm.convert.surgery import names_of
from micronorm.nn.reparameterized import Reparameterized
from micronorm.nn.weight import counterpart_kind, is_standardized_by_timm
from micronorm.ops.moments import wide_dtype

PAPER_RESNET50 = 0.55
"""The paper's mean of `input_use` over the layers of a ResNet-50 trained on ImageNet."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
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


# --- the use of input channels ---------------------------------------------------------------------------------------


@torch.no_grad()
def input_uses(model: nn.Module) -> dict[str, float]:
    """Return min |ω_c|₁ / mean |ω_c|₁ over the input channels c of each convolution and linear layer, by name.

    ω_c are the weights applied to c. 0 means that some input channel is not used: an elimination singularity, as
    defined by weights. 1 means that all are used alike. The paper finds that trained networks are far from 0, and that
    channels are eliminated by ReLU instead. Reparameterized layers are measured by their effective weight. Lazy layers
    without a weight are left out.

    Example:
        >>> from statistics import mean
        >>> uses = input_uses(nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1)))
        >>> list(uses), uses["0"], 0 < mean(uses.values()) <= 1
        (['0', '2'], 1.0, True)
    """
    return {name: use for name, module in model.named_modules() if (use := _input_use(module)) is not None}


def _input_use(module: nn.Module) -> float | None:
    if not isinstance(module, (*_CONVOLUTIONS, *_TRANSPOSED, nn.Linear)):
        return None
    weight = module.effective_weight() if isinstance(module, Reparameterized) else module.weight
    if not isinstance(weight, Tensor) or torch.nn.parameter.is_lazy(weight) or weight.numel() == 0:
        return None
    groups = 1 if isinstance(module, nn.Linear) else module.groups
    if isinstance(module, _TRANSPOSED):  # (groups·I)×(O/groups)×…: each row is one input channel
        weight, groups = weight.transpose(0, 1), 1
    # groups × outputs of a group × inputs of a group × taps
    parts = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
    use = parts.to(wide_dtype(weight.device)).abs().sum((1, 3)).flatten()
    mean = use.mean()
    return float(use.min() / mean) if mean > 0 else 0.0
