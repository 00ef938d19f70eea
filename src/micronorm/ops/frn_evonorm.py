"""Normalizations within a sample that contain their activation: FRN (Singh & Krishnan 2020), EvoNorm-S0 (Liu 2020).

Shapes: x is N×C×…; weight, bias, tau and v are C. Suffixes: _nc per sample and channel, _ngk the same as N×G×k.
"""

import torch
from torch import Tensor

from micronorm.ops.moments import Moments, as_ncs, compute_dtype, moments, over_space, pool, wide_dtype


def filter_response_norm(
    x: Tensor, weight: Tensor, bias: Tensor, tau: Tensor | None = None, *, eps: float = 1e-6
) -> Tensor:
    """Return y = weight·x/sqrt(ν² + eps) + bias, where ν²_nc is the mean of x² over space; max(y, tau) with a tau."""
    wide_x = x.to(compute_dtype(x.dtype))
    nu2_nc = as_ncs(wide_x).square().mean(-1).to(wide_dtype(x.device))
    y = _scaled(wide_x, nu2_nc, weight, bias, eps)
    if tau is not None:
        y = torch.maximum(y, over_space(tau.to(y.dtype), x))
    return y.to(x.dtype)


def evonorm_s0(x: Tensor, weight: Tensor, bias: Tensor, v: Tensor, *, groups: int, eps: float = 1e-5) -> Tensor:
    """Return y = x·sigmoid(v·x)/sqrt(σ²_ng + eps)·weight + bias.

    σ² is the biased variance of a sample's group of C/G channels.
    """
    channels = x.shape[1] // groups
    instance_ngk = Moments(*(p.unflatten(1, (groups, channels)) for p in moments(x)))
    var_nc = pool(instance_ngk, dim=2).var.repeat_interleave(channels, dim=1)
    wide_x = x.to(compute_dtype(x.dtype))
    gated = wide_x * torch.sigmoid(wide_x * over_space(v.to(wide_x.dtype), x))
    return _scaled(gated, var_nc, weight, bias, eps).to(x.dtype)


def _scaled(x: Tensor, square_nc: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return weight·x/sqrt(square + eps) + bias."""
    scale_nc = weight.to(square_nc.dtype) * torch.rsqrt(square_nc + eps)
    return x * over_space(scale_nc.to(x.dtype), x) + over_space(bias.to(x.dtype), x)
