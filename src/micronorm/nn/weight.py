"""Convolutions and linear layers that compute an effective weight in each forward, and their specs.

Each layer subclasses its torch.nn counterpart, so signatures, state-dict keys and isinstance checks stay. The
computation is in `micronorm.nn.reparameterized`.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from micronorm.nn.inputs import check_eps, check_flag
from micronorm.nn.reparameterized import _CWN, _WN, _WS, _Conv, _ConvTranspose, _Linear, _SameConv
from micronorm.nn.spec import WeightSpec

# --- the layers ------------------------------------------------------------------------------------------------------


class WSConv1d(_WS, _Conv, nn.Conv1d):
    """torch.nn.Conv1d with its weight standardized as in `WSConv2d`."""


class WSConv2d(_WS, _Conv, nn.Conv2d):
    """torch.nn.Conv2d with its weight standardized over the fan-in of each output channel.

    Args:
        args: as in torch.nn.Conv2d, like the other keyword arguments.
        center: subtract the mean.
        scale: divide by the deviation; without `center` by the root mean square.
        eps: added to the variance, inside the root.

    Example:
        >>> import torch
        >>> conv = WSConv2d(3, 8, kernel_size=3, padding=1)
        >>> conv(torch.randn(1, 3, 8, 8)).shape
        torch.Size([1, 8, 8, 8])
    """


class WSConv2dSame(_WS, _SameConv, nn.Conv2d):
    """timm's Conv2dSame (TensorFlow's SAME padding) with its weight standardized as in `WSConv2d`."""


class WSConv3d(_WS, _Conv, nn.Conv3d):
    """torch.nn.Conv3d with its weight standardized as in `WSConv2d`."""


class WSConvTranspose1d(_WS, _ConvTranspose, nn.ConvTranspose1d):
    """torch.nn.ConvTranspose1d with its weight standardized as in `WSConv2d`."""


class WSConvTranspose2d(_WS, _ConvTranspose, nn.ConvTranspose2d):
    """torch.nn.ConvTranspose2d with its weight standardized as in `WSConv2d`."""


class WSConvTranspose3d(_WS, _ConvTranspose, nn.ConvTranspose3d):
    """torch.nn.ConvTranspose3d with its weight standardized as in `WSConv2d`."""


class WSLinear(_WS, _Linear, nn.Linear):
    """torch.nn.Linear with its weight standardized as in `WSConv2d`."""


# The layers of WN and CWN are built by their specs, mn.WN()(layer); here they get their names, WNConv2d and so on.
_KINDS: dict[str, tuple[type, type]] = {
    "Conv1d": (_Conv, nn.Conv1d),
    "Conv2d": (_Conv, nn.Conv2d),
    "Conv2dSame": (_SameConv, nn.Conv2d),
    "Conv3d": (_Conv, nn.Conv3d),
    "ConvTranspose1d": (_ConvTranspose, nn.ConvTranspose1d),
    "ConvTranspose2d": (_ConvTranspose, nn.ConvTranspose2d),
    "ConvTranspose3d": (_ConvTranspose, nn.ConvTranspose3d),
    "Linear": (_Linear, nn.Linear),
}
for _prefix, _method in (("WN", _WN), ("CWN", _CWN)):
    for _kind, _bases in _KINDS.items():
        _name = _prefix + _kind
        globals()[_name] = type(_name, (_method, *_bases), {"__module__": __name__, "__doc__": _method.__doc__})


# --- the specs -------------------------------------------------------------------------------------------------------

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
PLAIN = (*CONVOLUTIONS, nn.Linear)

# Convolutions of timm with their own forward, for which we have a counterpart.
_SAME_PADDED = ("timm.layers.conv2d_same.Conv2dSame", "timm.layers.std_conv.StdConv2dSame")
_STANDARDIZED = ("timm.layers.std_conv.StdConv2d", "timm.layers.std_conv.StdConv2dSame")


def counterpart_kind(layer: nn.Module) -> str | None:
    """Return the class name of the counterpart without its prefix WS, WN or CWN; None if `layer` has no counterpart.

    A subclass has one if it does not change the computation, and so have the convolutions of timm listed above.
    """
    if "forward" in vars(layer):
        return None  # the instance has a forward of its own
    name = f"{type(layer).__module__}.{type(layer).__qualname__}"
    if name in _SAME_PADDED:
        return "Conv2dSame" if getattr(layer, "same_pad", True) else "Conv2d"
    if name in _STANDARDIZED:
        return "Conv2d"
    for kind in PLAIN:
        methods = [m for m in ("forward", "_conv_forward") if hasattr(kind, m)]
        if isinstance(layer, kind) and all(getattr(type(layer), m) is getattr(kind, m) for m in methods):
            return kind.__name__
    return None


def is_standardized_by_timm(layer: nn.Module) -> bool:
    """Return whether `layer` is a standardized convolution of timm. Our WS with its eps is the same function."""
    return f"{type(layer).__module__}.{type(layer).__qualname__}" in _STANDARDIZED


def _counterpart(layer: nn.Module, prefix: str, **options: Any) -> Any:
    """Return the counterpart of a plain layer, with the same parameters, hooks and attributes."""
    kind = counterpart_kind(layer)
    if kind is None:
        known = ", ".join(k.__name__ for k in PLAIN)
        raise TypeError(f"{prefix} has no counterpart for {type(layer).__name__}; it has those for {known}")
    made = recast(layer, globals()[prefix + kind])
    made._standardize(**options)
    return made


def recast(layer: nn.Module, kind: type[nn.Module]) -> Any:
    """Return a module of another class with the same parameters, buffers, hooks and attributes."""
    made = object.__new__(kind)
    made.__dict__.update(layer.__dict__)
    # Both share their hooks, so that handles stay valid, but not the tables that registration changes.
    for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        made.__dict__[table] = layer.__dict__[table].copy()
    return made


@dataclass(frozen=True)
class WS(WeightSpec):
    """Weight Standardization; see `mn.functional.weight_standardize`.

    Args:
        center: subtract the mean over the fan-in of each output channel.
        scale: divide by the deviation; without `center` by the root mean square.
        eps: added to the variance, inside the root.

    Example:
        >>> WS()(nn.Conv2d(3, 8, 3))
        WSConv2d(3, 8, kernel_size=(3, 3), stride=(1, 1), eps=1e-05)
    """

    center: bool = True
    scale: bool = True
    eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("center", "scale"):
            if isinstance(getattr(self, name), nn.Module):
                raise TypeError("mn.WS(...) takes options; to build a layer's counterpart write mn.WS()(layer)")
            check_flag(name, getattr(self, name))
        check_eps(self.eps)

    def __call__(self, layer: nn.Module) -> nn.Module:
        eps: Any = layer.eps if is_standardized_by_timm(layer) and self.center and self.scale else self.eps
        return _counterpart(layer, "WS", center=self.center, scale=self.scale, eps=eps)


class _LengthSpec(WeightSpec):
    def __call__(self, layer: nn.Module) -> nn.Module:
        return _counterpart(layer, type(self).__name__)


@dataclass(frozen=True)
class WN(_LengthSpec):
    """Weight Normalization, g·W/‖W‖.

    Example:
        >>> WN()(nn.Linear(4, 8)).length.shape
        torch.Size([8])
    """


@dataclass(frozen=True)
class CWN(_LengthSpec):
    """Centered Weight Normalization, g·(W − mean)/‖W − mean‖ (label `eq:cwn`).

    Example:
        >>> CWN()(nn.Linear(4, 8)).length.shape
        torch.Size([8])
    """
