"""Filter response normalization and its thresholded linear unit (Singh & Krishnan 2020)."""

import torch
from torch import Tensor

from micronorm.ops.moments import as_ncs, compute_dtype, over_space, wide_dtype


def filter_response_norm(
    x: Tensor, weight: Tensor, bias: Tensor, tau: Tensor | None = None, *, eps: float = 1e-6
) -> Tensor:
    """Return y = weight·x/sqrt(ν² + eps) + bias, where ν²_nc is the mean of x² over space; max(y, tau) with a tau.

    x is N×C×…; weight, bias and tau are C.
    """
    dtype, wide = compute_dtype(x.dtype), wide_dtype(x.device)
    wide_x = x.to(dtype)
    nu2_nc = as_ncs(wide_x).square().mean(-1).to(wide)
    scale_nc = weight.to(wide) * torch.rsqrt(nu2_nc + eps)
    y = wide_x * over_space(scale_nc.to(dtype), x) + over_space(bias.to(dtype), x)
    if tau is not None:
        y = torch.maximum(y, over_space(tau.to(dtype), x))
    return y.to(x.dtype)
