"""EvoNorm-S0 (Liu et al. 2020): an activation and a normalization in one."""

import torch
from torch import Tensor

from micronorm.ops.moments import Moments, compute_dtype, moments, over_space, pool


def evonorm_s0(x: Tensor, weight: Tensor, bias: Tensor, v: Tensor, *, groups: int, eps: float = 1e-5) -> Tensor:
    """Return y = x·sigmoid(v·x)/sqrt(σ²_ng + eps)·weight + bias.

    σ² is the biased variance of a sample's group of C/G channels. x is N×C×…; weight, bias and v are C.
    """
    dtype = compute_dtype(x.dtype)
    channels = x.shape[1] // groups
    instance_ngk = Moments(*(p.unflatten(1, (groups, channels)) for p in moments(x)))
    var_nc = pool(instance_ngk, dim=2).var.repeat_interleave(channels, dim=1)
    scale_nc = weight.to(var_nc.dtype) * torch.rsqrt(var_nc + eps)
    wide_x = x.to(dtype)
    gated = wide_x * torch.sigmoid(wide_x * over_space(v.to(dtype), x))
    y = gated * over_space(scale_nc.to(dtype), x) + over_space(bias.to(dtype), x)
    return y.to(x.dtype)
