"""Batch renormalization (Ioffe 2017, Algorithm 1): batch moments, corrected towards the running ones within limits."""

import torch
from torch import Tensor

from micronorm.ops.batch import Running, normalize, scale_about
from micronorm.ops.moments import Moments, moments, pool


def batch_renorm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running: Running,
    *,
    r_max: Tensor,
    d_max: Tensor,
    momentum: float = 0.01,
    eps: float = 1e-5,
) -> tuple[Tensor, Running]:
    """Training mode: y = weight·((x − μ_B)/σ_B·r + d) + bias, with σ = sqrt(var + eps) throughout.

    r = clip(σ_B/σ, 1/r_max, r_max) and d = clip((μ_B − μ)/σ, −d_max, d_max) carry no gradient. Then μ += α(μ_B − μ) and
    σ += α(σ_B − σ): as in the paper it is σ that moves, by the biased σ_B, and `running.var` holds σ² − eps, so that
    inference is plain batch normalization. r_max and d_max are 0-d tensors. An empty batch changes nothing.
    """
    if x.shape[0] == 0:
        return normalize(x, Moments(running.mean, running.var), weight, bias, eps=eps), running
    batch_c = pool(moments(x), dim=0)
    wide = batch_c.mean.dtype
    mean_c, sigma_c = running.mean.to(wide), torch.sqrt(running.var.to(wide) + eps)
    batch_sigma_c = torch.sqrt(batch_c.var + eps)

    r_max, d_max = r_max.to(wide), d_max.to(wide)
    r_c = (batch_sigma_c / sigma_c).detach().clamp(1 / r_max, r_max)
    d_c = ((batch_c.mean - mean_c) / sigma_c).detach().clamp(-d_max, d_max)
    gamma_c, beta_c = weight.to(wide), bias.to(wide)
    y = scale_about(x, batch_c.mean, gamma_c * r_c / batch_sigma_c, gamma_c * d_c + beta_c)

    mean_c = mean_c + momentum * (batch_c.mean.detach() - mean_c)
    sigma_c = sigma_c + momentum * (batch_sigma_c.detach() - sigma_c)
    return y, Running(mean_c, (sigma_c.square() - eps).clamp(min=0), running.batches + 1)
