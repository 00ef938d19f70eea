"""Scale weights that other networks standardize by another formula, so that ours gives the same Ŵ.

All formulas compute Ŵ = (W − μ)/D over the fan-in of each output channel, with different D. Ours is sqrt(var + ε) with
the biased variance. Because of ε our Ŵ depends on the scale of W. A factor s on a row gives their Ŵ:

    s/sqrt(s²·var + ε) = 1/D   with   s² = ε/(D² − var).

It exists if D² > var; both the unbiased variance and an ε of their own make D² larger.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from micronorm.nn.inputs import check_eps
from micronorm.nn.reparameterized import _WS as Standardized


@dataclass(frozen=True, kw_only=True)
class Standardization:
    """The formula by which a network standardizes its weights: Ŵ = (W − μ)/D over the fan-in I of each output channel.

    Args:
        eps: the constant added for stability.
        unbiased: whether the variance divides by I − 1 (torch's default) or by I.
        eps_in_root: D = sqrt(var + eps) or, outside the root, D = sqrt(var) + eps.
    """

    eps: float
    unbiased: bool
    eps_in_root: bool

    def __post_init__(self) -> None:
        check_eps(self.eps)

    def excess(self, var: Tensor, fan_in: int) -> Tensor:
        """Return D² − var for the biased variance `var`, as a sum of non-negative terms, so that nothing cancels."""
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
    """The factors on the rows of one weight. Constant rows, which every formula standardizes to zero, are not scaled.

    Attributes:
        low: the smallest factor.
        high: the largest factor.
        eps: the `eps` of the layer with which the factors would have the geometric mean 1.
    """

    low: float
    high: float
    eps: float


def rescale_rows(weight: Tensor, layer: Standardized, theirs: Standardization) -> tuple[Tensor, RowScales | None]:
    """Return the weight with which `layer` computes the Ŵ that `theirs` computes from `weight`, and the factors.

    The factors are None, and the weight is returned unchanged, if the two formulas are the same.

    Raises:
        ValueError: if no such factors exist.
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
    return scaled, RowScales(scale.min().item(), scale.max().item(), eps)
