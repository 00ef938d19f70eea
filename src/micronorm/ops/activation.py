"""The activations that a normalization may take into its own passes."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = ("relu", "leaky_relu", "silu")
"""The names that `activation=` of a normalization may have."""


class Activation(NamedTuple):
    """One of `ACTIVATIONS`, or None for the identity; `slope` is that of leaky_relu for negative inputs.

    Example:
        >>> Activation("leaky_relu", 0.25)(torch.tensor([-4.0, 2.0])).tolist()
        [-1.0, 2.0]
    """

    kind: str | None = None
    slope: float = 0.01

    @property
    def knows_its_sign(self) -> bool:
        """Whether the derivative can be told from the sign of the output."""
        return self.kind in (None, "relu") or (self.kind == "leaky_relu" and self.slope > 0)

    def __call__(self, x: Tensor) -> Tensor:
        """The activation of x, as a composition of torch's own functions."""
        if self.kind == "relu":
            return torch.relu(x)
        if self.kind == "leaky_relu":
            return F.leaky_relu(x, self.slope)
        return F.silu(x) if self.kind == "silu" else x


IDENTITY = Activation()
"""No activation."""


def check_activation(kind: str | None, slope: float) -> Activation:
    """An `Activation`, or the error that says what it may be."""
    if kind is not None and kind not in ACTIVATIONS:
        raise ValueError(f"activation must be None or one of {ACTIVATIONS}, got {kind!r}")
    if isinstance(slope, bool) or not isinstance(slope, int | float):
        raise TypeError(f"negative_slope must be a number, got {slope!r}")
    if not math.isfinite(slope):
        raise ValueError(f"negative_slope must be finite, got {slope!r}")
    return Activation(kind, float(slope))
