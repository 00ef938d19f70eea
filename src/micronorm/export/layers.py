"""Build torch's layers from ours: plain convolutions, an eval-mode BatchNorm, a GroupNorm.

All arithmetic is in float64 on the CPU, because not every device has float64.

Suffixes: _c per channel, _g per group.
"""

import copy
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from micronorm.nn import weight as ours
from micronorm.nn.batch import TORCH_LAYERS, GhostBatchNorm
from micronorm.nn.batch_renorm import BatchRenorm
from micronorm.nn.bcn import BatchChannelNorm
from micronorm.nn.reparameterized import _SameConv, rows_of
from micronorm.nn.weight import PLAIN, counterpart_kind, is_standardized_by_timm, recast
from micronorm.ops.moments import compute_dtype
from micronorm.ops.weight import over_rows

REPARAMETERIZED: frozenset[type[nn.Module]] = frozenset(
    getattr(ours, method + kind)
    for method in ("WS", "WN", "CWN")
    for kind in (*(plain.__name__ for plain in PLAIN), "Conv2dSame")
)
"""The convolution and linear layers of micronorm."""


class ChannelAffine(NamedTuple):
    """The map scale_c·(x − mean_c) + shift_c, in float64."""

    scale: Tensor
    mean: Tensor
    shift: Tensor


def _wide(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)


def _channel_parameters(norm: BatchChannelNorm | GhostBatchNorm | BatchRenorm) -> tuple[Tensor, Tensor]:
    """Return γ^b and β^b; if blend = 0, those of all of BCN, whose two halves are then affine."""
    weight_c, bias_c = _wide(norm.weight), _wide(norm.bias)
    if isinstance(norm, BatchChannelNorm) and is_batch_norm(norm):
        group_weight_c, group_bias_c = map(_wide, group_affine(norm))
        return group_weight_c * weight_c, group_weight_c * bias_c + group_bias_c
    return weight_c, bias_c


def channel_affine(norm: BatchChannelNorm) -> ChannelAffine:
    """Return the channel half of BCN as an affine map; all of BCN if blend = 0."""
    weight_c, bias_c = _channel_parameters(norm)
    return ChannelAffine(
        weight_c * torch.rsqrt(_wide(norm.running_var) + float(norm.eps)), _wide(norm.running_mean), bias_c
    )


def is_batch_norm(norm: BatchChannelNorm) -> bool:
    """Return whether the layer computes BatchNorm's function, because its warm-up has not begun."""
    return norm.blend.item() == 0


def group_affine(norm: BatchChannelNorm) -> tuple[Tensor, Tensor]:
    """Return γ^c and β^c repeated for each channel of their group."""
    size = norm.num_channels // norm.num_groups
    weight_c, bias_c = (t.detach().repeat_interleave(size) for t in (norm.group_weight, norm.group_bias))
    return weight_c, bias_c


# --- convolutions ----------------------------------------------------------------------------------------------------


def channels_out(layer: nn.Module) -> int | None:
    """Return the number of output channels, or None if no affine map can be folded into the layer."""
    layer_: Any = layer
    known = type(layer) in REPARAMETERIZED or (counterpart_kind(layer) and not is_standardized_by_timm(layer))
    if not known or layer_._parameters.get("weight") is None:  # a parametrization or a hook computes it
        return None
    return layer_.out_features if isinstance(layer, nn.Linear) else layer_.out_channels


def plain_layer(layer: nn.Module, affine: ChannelAffine | None, *, name: str) -> nn.Module | None:
    """Return the layer of torch (or timm's Conv2dSame) with the effective weight, merged with `affine` if given.

    W' = scale·Ŵ, b' = scale·(b − mean) + shift. Return None if these overflow the layer's dtype.
    """
    made, wide = _bare(layer, name), _effective_weight(layer)
    bias: Tensor | None = made._parameters.get("bias")
    if affine is not None:
        rows = rows_of(layer, wide)
        wide = rows_of(layer, rows * over_rows(affine.scale, rows))
        offset = -affine.mean if bias is None else _wide(bias) - affine.mean
        wide_bias = affine.scale * offset + affine.shift
        bias = nn.Parameter(wide_bias.to(made.weight), requires_grad=made.weight.requires_grad)
    weight = torch.empty_like(made.weight).copy_(wide)  # keeps the memory format
    if affine is not None and not (bool(weight.isfinite().all()) and bias is not None and bool(bias.isfinite().all())):
        return None
    made._parameters["weight"] = nn.Parameter(weight, requires_grad=made.weight.requires_grad)
    made._parameters["bias"] = bias
    return made


def _effective_weight(layer: Any) -> Tensor:
    if type(layer) in REPARAMETERIZED:
        with torch.no_grad():
            wide = copy.deepcopy(layer).to("cpu", torch.float64)
            wide.backend = "reference"  # the layer's backend may be a kernel, which needs a GPU
            return wide.effective_weight()
    return _wide(layer.weight)


def _bare(layer: nn.Module, name: str) -> Any:
    """Return a layer of the plain class with the attributes and parameters of `layer` that this class has."""
    reparameterized = type(layer) in REPARAMETERIZED
    made = recast(layer, _plain_class(layer, name) if reparameterized else type(layer))
    if reparameterized:
        for attribute in ("center", "scale", "eps", "backend"):
            made.__dict__.pop(attribute, None)
        made._parameters.pop("length", None)
        for buffer in ("absorbed_mean", "absorbed_scale"):
            made._buffers.pop(buffer, None)
    return made


def _plain_class(layer: Any, name: str) -> type[nn.Module]:
    if not issubclass(type(layer), _SameConv):
        return next(plain for plain in PLAIN if isinstance(layer, plain))
    if any(layer.padding) or layer.padding_mode != "zeros":
        raise ValueError(
            f"{name!r} ({type(layer).__name__}) pads by {layer.padding} ({layer.padding_mode}) beside SAME, which "
            "timm's Conv2dSame does not; build it with padding=0"
        )
    try:
        from timm.layers import Conv2dSame
    except ImportError as fault:
        raise ImportError(
            f"{name!r} ({type(layer).__name__}) folds to timm's Conv2dSame: pip install timm, or leave SAME padding"
        ) from fault
    return Conv2dSame


# --- normalizations --------------------------------------------------------------------------------------------------


def batch_norm(norm: BatchChannelNorm | GhostBatchNorm | BatchRenorm, rank: int | None) -> nn.Module:
    """Return an eval-mode BatchNorm with the statistics and channel affine of `norm`, for inputs with `rank` axes.

    If the rank is unknown it is nn.SyncBatchNorm, the only BatchNorm of torch that accepts any rank; in eval mode it
    does not communicate. For half-precision layers the BatchNorm is float32, as under autocast: it accepts and returns
    half precision.
    """
    options = {"eps": float(norm.eps), "device": norm.weight.device, "dtype": compute_dtype(norm.weight.dtype)}
    layer = nn.SyncBatchNorm if rank is None else TORCH_LAYERS[rank - 2]
    made: Any = layer(norm.num_channels, **options)
    with torch.no_grad():
        for parameter, value in zip((made.weight, made.bias), _channel_parameters(norm), strict=True):
            parameter.copy_(value).requires_grad_(norm.weight.requires_grad)
        made.running_mean.copy_(norm.running_mean)
        made.running_var.copy_(norm.running_var)
    return made


def group_norm(norm: BatchChannelNorm) -> nn.GroupNorm:
    """Return the group half of BCN: nn.GroupNorm with γ^c and β^c repeated for each channel."""
    weight_c, bias_c = group_affine(norm)
    options = {"eps": float(norm.eps), "device": weight_c.device, "dtype": weight_c.dtype}
    made = nn.GroupNorm(norm.num_groups, norm.num_channels, **options)
    with torch.no_grad():
        for parameter, value in ((made.weight, weight_c), (made.bias, bias_c)):
            parameter.copy_(value).requires_grad_(norm.group_weight.requires_grad)
    return made


def in_a_row(**parts: nn.Module | None) -> nn.Module:
    """Return the parts as one module, without None and nn.Identity: nn.Sequential, or the only part."""
    used = OrderedDict(
        (name, part) for name, part in parts.items() if part is not None and type(part) is not nn.Identity
    )
    return nn.Sequential(used) if len(used) > 1 else next(iter(used.values()), nn.Identity())
