"""The activations that a normalization can compute in its own passes."""

import math
from enum import StrEnum
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class ActivationKind(StrEnum):
    """An activation, from the layer to the kernel. Layers and operators accept the value, a plain string, as well."""

    IDENTITY = "identity"
    RELU = "relu"
    LEAKY_RELU = "leaky_relu"
    SILU = "silu"

    def __repr__(self) -> str:
        """Return the repr of the value, so that layers print what users pass."""
        return repr(self.value)


ACTIVATIONS = tuple(kind.value for kind in ActivationKind if kind is not ActivationKind.IDENTITY)
"""The strings that `activation=` of a normalization accepts, besides None for the identity."""

KINDS: dict[str | None, ActivationKind] = {None: ActivationKind.IDENTITY} | {k.value: k for k in ActivationKind}
"""The kind for each value of `activation=`."""


class Activation(NamedTuple):
    """An activation with its parameter.

    Args:
        kind: which activation.
        slope: the slope of leaky_relu for negative inputs.

    Example:
        >>> Activation(ActivationKind.LEAKY_RELU, 0.25).apply(torch.tensor([-4.0, 2.0])).tolist()
        [-1.0, 2.0]
    """

    kind: ActivationKind = ActivationKind.IDENTITY
    slope: float = 0.01

    @property
    def keeps_sign(self) -> bool:
        """Return whether the derivative follows from the sign of the output."""
        if self.kind == ActivationKind.LEAKY_RELU:
            return self.slope > 0
        return self.kind != ActivationKind.SILU

    def apply(self, x: Tensor) -> Tensor:
        """Return the activation of x, computed by torch's own functions.

        Not `__call__`: torch.compile of torch 2.8 and older does not trace a call of a named tuple.
        """
        if self.kind == ActivationKind.RELU:
            return torch.relu(x)
        if self.kind == ActivationKind.LEAKY_RELU:
            return F.leaky_relu(x, self.slope)
        return F.silu(x) if self.kind == ActivationKind.SILU else x


IDENTITY = Activation()
"""No activation."""


def check_activation(kind: str | None, slope: float = 0.01) -> Activation:
    """Convert the arguments `activation` and `negative_slope` of a layer.

    Args:
        kind: one of `ACTIVATIONS`, or None for the identity.
        slope: a finite number, the slope of leaky_relu for negative inputs.

    Raises:
        ValueError: the name is unknown, or the slope is not finite.
        TypeError: the slope is not a number.

    Example:
        >>> check_activation("relu").kind is ActivationKind.RELU, check_activation(None) == IDENTITY
        (True, True)
    """
    if kind not in KINDS:
        raise ValueError(f"activation must be None or one of {ACTIVATIONS}, got {kind!r}")
    # A tuple: torch.compile of torch 2.8 and older does not trace `int | float`.
    if isinstance(slope, bool) or not isinstance(slope, (int, float)):
        raise TypeError(f"negative_slope must be a number, got {slope!r}")
    if not math.isfinite(slope):
        raise ValueError(f"negative_slope must be finite, got {slope!r}")
    return Activation(KINDS[kind], float(slope))
