"""Weights that other networks standardized by their own formula, scaled so that ours gives the same Ŵ.

Everybody computes Ŵ = (W − μ)/D over the fan-in of each output channel, each with another D; ours is sqrt(var + ε) with
the biased variance. Through ε our Ŵ depends on the size of W, so a row can be multiplied by s until our Ŵ is theirs:

    s/sqrt(s²·var + ε) = 1/D   where   s² = ε/(D² − var).

This exists whenever D² > var, and the unbiased variance and their own ε both make D² larger.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from micronorm.nn.inputs import check_eps
from micronorm.nn.weight import (
    WSConv1d,
    WSConv2d,
    WSConv3d,
    WSConvTranspose1d,
    WSConvTranspose2d,
    WSConvTranspose3d,
    WSLinear,
)

Standardized = WSConv1d | WSConv2d | WSConv3d | WSConvTranspose1d | WSConvTranspose2d | WSConvTranspose3d | WSLinear


@dataclass(frozen=True, kw_only=True)
class Standardization:
    """How a network standardized its weights: Ŵ = (W − μ)/D over the fan-in I of each output channel.

    Args:
        eps: what is added for stability.
        unbiased: whether the variance divides by I − 1 (torch's default) or by I.
        eps_in_root: D = sqrt(var + eps) or, outside the root, D = sqrt(var) + eps.

    Example:
        >>> Standardization(eps=1e-6, unbiased=False, eps_in_root=True).excess(torch.tensor([0.25]), fan_in=9)
        tensor([1.0000e-06])
    """

    eps: float
    unbiased: bool
    eps_in_root: bool

    def __post_init__(self) -> None:
        check_eps(self.eps)

    def excess(self, var: Tensor, fan_in: int) -> Tensor:
        """D² − var for the biased variance `var`: a sum of terms that are not negative, so nothing cancels."""
        correction = var / (fan_in - 1) if self.unbiased else torch.zeros_like(var)
        if self.eps_in_root:
            return correction + self.eps
        return correction + 2 * self.eps * (var + correction).sqrt() + self.eps**2


AUTHORS_WS = Standardization(eps=1e-5, unbiased=True, eps_in_root=False)
"""joe-siyuan-qiao/WeightStandardization, and the DeepLab of joe-siyuan-qiao/Batch-Channel-Normalization; also mmcv."""

AUTHORS_BCN = Standardization(eps=1e-5, unbiased=True, eps_in_root=True)
"""The ImageNet networks of joe-siyuan-qiao/Batch-Channel-Normalization."""

TIMM_BIT = Standardization(eps=1e-8, unbiased=False, eps_in_root=True)
"""timm's BiT ResNetV2 family. timm's bare StdConv2d has eps=1e-6."""


@dataclass(frozen=True)
class RowScales:
    """What one weight's rows were multiplied by.

    Args:
        low: the smallest factor.
        high: the largest.
        constant_rows: how many rows have no variance. Standardized they are zero by any formula; they were left alone.
        eps: the layer's `eps` at which the factors would have had the geometric mean 1.
    """

    low: float
    high: float
    constant_rows: int
    eps: float


def rescale_rows(weight: Tensor, layer: Standardized, theirs: Standardization) -> tuple[Tensor, RowScales | None]:
    """The weight with which `layer` computes what `theirs` makes of `weight`, and the factors.

    Where the two formulas are one, the weight itself and None. ValueError where no factor exists.

    Example:
        >>> layer, w = WSConv2d(3, 8, 3), torch.randn(8, 3, 3, 3)
        >>> _ = layer.weight.data.copy_(rescale_rows(w, layer, AUTHORS_WS)[0])
        >>> std, mean = torch.std_mean(w, dim=(1, 2, 3), keepdim=True)
        >>> torch.allclose(layer.effective_weight(), (w - mean) / (std + 1e-5), atol=1e-5)
        True
    """
    if not (layer.center and layer.scale):
        raise ValueError(f"built with center={layer.center}, scale={layer.scale}; {theirs} does both")
    if theirs == Standardization(eps=layer.eps, unbiased=False, eps_in_root=True):
        return weight, None
    rows = layer.rows(weight).double()
    flat = rows.flatten(1)
    constant = flat.amax(1) == flat.amin(1)
    excess = theirs.excess(flat.var(1, correction=0), flat.shape[1])
    if layer.eps == 0 or bool((excess == 0).any()):
        raise ValueError(f"built with eps={layer.eps}, no scale of the weight gives {theirs}; build with another eps")
    scale = torch.where(constant, 1, (layer.eps / excess).sqrt())
    scaled = layer.from_rows(rows * scale.reshape(-1, *[1] * (rows.ndim - 1)))
    if not bool(scaled.to(layer.weight.dtype).isfinite().all()):
        raise ValueError(f"not finite in {layer.weight.dtype} once its rows are scaled")
    moved = excess[~constant]
    eps = moved.log().mean().exp().item() if len(moved) else layer.eps
    return scaled, RowScales(scale.min().item(), scale.max().item(), int(constant.sum()), eps)
