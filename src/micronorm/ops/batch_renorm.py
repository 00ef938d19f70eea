"""Batch renormalization (Ioffe 2017, Algorithm 1): batch moments, corrected towards the running ones within limits.

Shapes: x is N×C×…. Suffixes: _tc per micro-batch and channel (T = ⌈N/m⌉ of them), _nc per sample and channel, _c per
channel, _t per micro-batch.
"""

import torch
from torch import Tensor

from micronorm.ops.batch import (
    Running,
    batch_moments,
    instance_norm_fused,
    merge_micro_batches,
    normalize,
    scale_about,
    split_micro_batches,
)
from micronorm.ops.bcn.estimates import Recurrence
from micronorm.ops.moments import Moments, compute_dtype, moments, spread_to_samples


def batch_renorm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running: Running,
    *,
    r_max: Tensor,
    d_max: Tensor,
    training: bool = True,
    micro_batch: int | None = None,
    momentum: float = 0.01,
    eps: float = 1e-5,
    fused: bool = False,
) -> tuple[Tensor, Running]:
    """Renormalize N samples as ⌈N/m⌉ successive training batches of m; None: one batch of all.

    y = weight·((x − μ_B)/σ_B·r + d) + bias, with σ = sqrt(var + eps) throughout. r = clip(σ_B/σ, 1/r_max, r_max) and
    d = clip((μ_B − μ)/σ, −d_max, d_max) carry no gradient; μ and σ are the running values before the micro-batch. Then
    μ += α(μ_B − μ) and σ += α(σ_B − σ): as in the paper it is σ that moves, by the biased σ_B. `running.var` holds
    σ² − eps, so that inference is plain batch normalization.

    Args:
        x: N×C×….
        weight: C.
        bias: C.
        running: the statistics before the first micro-batch.
        r_max: the limit of r, 0-d or T.
        d_max: the limit of d, 0-d or T.
        training: if False, and for an empty batch, normalize by the running statistics, which stay as they are.
        micro_batch: samples per micro-batch; the last one may have fewer.
        momentum: α.
        eps: added to variances.
        fused: take the kernels where the micro-batches can be merged.

    Returns:
        y, and the running statistics after the last micro-batch.
    """
    samples = x.shape[0]
    if not training or samples == 0:
        return normalize(x, Moments(running.mean, running.var), weight, bias, eps=eps), running
    options = {"momentum": momentum, "eps": eps, "limits": (r_max, d_max)}
    merged = merge_micro_batches(x, micro_batch=micro_batch) if fused else None
    if merged is not None:
        normalized_tcs, batch_tc = instance_norm_fused(merged, None, None, eps=eps)
        scale_tc, shift_tc, new = _correct(batch_tc, running, weight, bias, **options)
        scale_tc, shift_tc = (value.to(compute_dtype(x.dtype)).unsqueeze(-1) for value in (scale_tc, shift_tc))
        y_tcs = torch.addcmul(shift_tc, normalized_tcs, scale_tc)
        return split_micro_batches(y_tcs.to(x.dtype), like=x), new
    batch_tc, batch_nc = batch_moments(moments(x), micro_batch=micro_batch)
    corrected_tc = _correct(batch_tc, running, weight, bias, **options)
    size = samples if micro_batch is None else min(micro_batch, samples)
    scale_nc, shift_nc = (spread_to_samples(v, micro_batch=size, samples=samples) for v in corrected_tc[:2])
    y = scale_about(x, batch_nc.mean, scale_nc * torch.rsqrt(batch_nc.var + eps), shift_nc)
    return y, corrected_tc[2]


def _correct(
    batch_tc: Moments,
    running: Running,
    weight: Tensor,
    bias: Tensor,
    *,
    limits: tuple[Tensor, Tensor],
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Running]:
    """Return weight·r and weight·d + bias of every micro-batch (T×C), and the running statistics after the last one."""
    wide = batch_tc.mean.dtype
    batch_sigma_tc = torch.sqrt(batch_tc.var + eps)
    recurrence = Recurrence(momentum, batch_tc.mean.shape[0], like=batch_tc.mean)
    # (T + 1)×C: the running values before each micro-batch, and after the last.
    mean_tc = recurrence.history(running.mean.to(wide), batch_tc.mean.detach())
    sigma_tc = recurrence.history(torch.sqrt(running.var.to(wide) + eps), batch_sigma_tc.detach())

    r_max, d_max = (limit.to(wide).reshape(-1, 1) for limit in limits)
    r_tc = (batch_sigma_tc.detach() / sigma_tc[:-1]).clamp(1 / r_max, r_max)
    d_tc = ((batch_tc.mean.detach() - mean_tc[:-1]) / sigma_tc[:-1]).clamp(-d_max, d_max)
    gamma_c, beta_c = weight.to(wide), bias.to(wide)
    var_c = (sigma_tc[-1].square() - eps).clamp(min=0)
    new = Running(mean_tc[-1], var_c, running.batches + batch_tc.mean.shape[0])
    return gamma_c * r_tc, gamma_c * d_tc + beta_c, new
