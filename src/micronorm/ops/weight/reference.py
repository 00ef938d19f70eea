"""Weight Standardization (Sec. `sec:ws`), Weight Normalization and Centered Weight Normalization in PyTorch operations.

Every function takes weights as O×… with one row of fan-in I per output channel, and works on each row alone, in
float32 at least, whatever the dtype of the weight and of the computation around it.
"""

from typing import Any

import torch
from torch import Tensor

from micronorm.ops.moments import Moments, compute_dtype, moments
from micronorm.ops.runtime import is_transformed


class _Standardize(torch.autograd.Function):
    """Compute Ŵ, with a closed-form backward that needs W and two numbers per row."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, center: bool, scale: bool, eps: float) -> Tensor:
        rows = _row_moments(w)
        ctx.save_for_backward(w, *rows)
        ctx.center, ctx.scale, ctx.eps = center, scale, eps
        return _standardized(w, rows, center, scale, eps)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        w, mean, var = ctx.saved_tensors
        # create_graph: the moments must depend on W for the second backward to be right.
        rows = _row_moments(w) if torch.is_grad_enabled() else Moments(mean, var)
        return _gradient(w, grads[0], rows, ctx.center, ctx.scale, ctx.eps), None, None, None


def _gradient(w: Tensor, g: Tensor, rows: Moments, center: bool, scale: bool, eps: float) -> Tensor:
    """Return dW = (g − mean(g) − Ŵ·mean(g·Ŵ))/σ, in differentiable operations."""
    what, rstd = _standardized(w, rows, center, scale, eps)
    axes = tuple(range(1, w.ndim))
    dw = g - g.mean(axes, keepdim=True) if center else g
    return (dw - what * (g * what).mean(axes, keepdim=True)) * rstd if scale else dw


def gradient(w: Tensor, g: Tensor, *, center: bool, scale: bool, eps: float) -> Tensor:
    """Return the backward of `standardize` as a differentiable function of W and g, in W's dtype."""
    wide = w.to(compute_dtype(w.dtype))
    return _gradient(wide, g.to(wide.dtype), _row_moments(wide), center, scale, eps).to(w.dtype)


def _row_moments(w: Tensor) -> Moments:
    """Return the moments of each row, shaped to broadcast against it."""
    return Moments(*(over_rows(m, w) for m in moments(w.flatten(1).unsqueeze(0))))


def over_rows(values: Tensor, like: Tensor) -> Tensor:
    """Return O numbers in a shape that broadcasts against O×…."""
    return values.reshape((-1,) + (1,) * (like.ndim - 1))


def _factor(rows: Moments, center: bool, scale: bool, eps: float) -> Tensor:
    """Return 1/σ, 1/rms or 1, according to `center` and `scale`."""
    spread = rows.var if center else rows.var + rows.mean.square()  # around the mean, or around zero
    return (spread + eps).rsqrt() if scale else torch.ones_like(rows.var)


def _standardized(w: Tensor, rows: Moments, center: bool, scale: bool, eps: float) -> tuple[Tensor, Tensor]:
    """Return Ŵ and the factor it was scaled by."""
    rstd = _factor(rows, center, scale, eps).to(w.dtype)
    if not center:
        return w * rstd, rstd
    # The mean is subtracted in two parts; the second is the rounding error of the first.
    pivot = rows.mean.detach().to(w.dtype)
    return ((w - pivot) - (rows.mean - pivot).to(w.dtype)) * rstd, rstd


def standardize(w: Tensor, *, center: bool, scale: bool, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Compute `weight_standardize` in PyTorch operations; the result is rounded once, to `dtype` (None: W's own)."""
    wide = w.to(compute_dtype(w.dtype))
    what: Any
    if is_transformed():  # transforms differentiate operations, not a custom backward
        what = _standardized(wide, _row_moments(wide), center, scale, eps)[0]
    else:
        what = _Standardize.apply(wide, center, scale, eps)
    return what.to(w.dtype if dtype is None else dtype)


def row_statistics(w: Tensor, *, center: bool, scale: bool, eps: float) -> tuple[Tensor, Tensor]:
    """Return the mean and scale that standardization removes from each row: W = scale·Ŵ + mean. Both hold O numbers."""
    wide = w.to(compute_dtype(w.dtype))
    rows = _row_moments(wide)
    rstd = _factor(rows, center, scale, eps).to(wide.dtype)
    mean = rows.mean if center else torch.zeros_like(rows.mean)
    return mean.flatten().to(wide.dtype), rstd.flatten().reciprocal()


def weight_normalize(w: Tensor, length: Tensor) -> Tensor:
    """Return g·W/‖W‖, row by row; `length` holds g, one number per output channel.

    Example:
        >>> w = weight_normalize(torch.randn(8, 4), torch.full((8,), 2.0))
        >>> torch.allclose(w.norm(dim=1), torch.full((8,), 2.0))
        True
    """
    check_weight(w)
    wide = w.to(compute_dtype(w.dtype))
    # Clamped so that a row of zeros stays zero instead of 0/0; the gradient through its norm is then zero too.
    square = wide.square().sum(tuple(range(1, w.ndim)), keepdim=True).clamp(min=torch.finfo(wide.dtype).tiny)
    return (over_rows(length.to(wide.dtype), w) * wide * square.rsqrt()).to(w.dtype)


def centered_weight_normalize(w: Tensor, length: Tensor) -> Tensor:
    """Return g·(W − mean)/‖W − mean‖ (label `eq:cwn`), row by row; `length` holds g.

    Example:
        >>> w = centered_weight_normalize(torch.randn(8, 4), torch.ones(8))
        >>> bool(w.sum(1).abs().max() < 1e-5)
        True
    """
    check_weight(w)
    centered = standardize(w.to(compute_dtype(w.dtype)), center=True, scale=False, eps=0.0)
    return weight_normalize(centered, length).to(w.dtype)


def check_weight(w: Tensor) -> None:
    """Raise an error unless the weight is floating point, O×I or O×I×kernel, with a fan-in of at least two."""
    if not w.is_floating_point():
        raise TypeError(f"weights must be floating point, got {w.dtype}")
    if w.ndim < 2:
        raise ValueError(f"weights must be O×I or O×I×kernel, got shape {tuple(w.shape)}")
    check_fan_in(w.numel() // w.shape[0] if w.shape[0] else 2)


def check_fan_in(fan_in: int) -> None:
    """Raise a ValueError for rows of one weight: centred they are zero, scaled they are constant up to sign."""
    if fan_in < 2:
        raise ValueError(
            f"the fan-in per output channel must be at least 2, got {fan_in}: one weight has no direction, so its "
            "standardized value cannot learn. Leave such a layer (depthwise 1×1) plain."
        )
