"""Batch normalization of successive micro-batches ("ghost" batch normalization) and its running statistics.

Shapes: x is N×C×…. Suffixes: _nc per sample and channel, _tc per micro-batch and channel (T = ⌈N/m⌉ of them), _c per
channel.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from micronorm.ops.bcn.estimates import Recurrence
from micronorm.ops.bcn.fused import group_norm_fused
from micronorm.ops.moments import (
    Moments,
    compute_dtype,
    moments,
    over_space,
    pool_micro_batches,
    spread_to_samples,
    wide_dtype,
)
from micronorm.ops.packed import Number


class Running(NamedTuple):
    """Running mean and variance per channel, and the number of batches they include."""

    mean: Tensor
    var: Tensor
    batches: Tensor


def scale_about(x: Tensor, mean: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Return y = scale·(x − mean) + bias in one pass; mean, scale and bias are C, 1×C or N×C, in the wide dtype."""
    dtype = compute_dtype(x.dtype)
    # The rounding error of the mean goes into the shift: with a mean of 10,000 it would be visible in a small spread.
    # The pivot carries no gradient: the identity holds for any constant pivot, and so do its derivatives.
    pivot = mean.detach().to(dtype)
    shift = bias - scale * (mean - pivot)
    y = (x.to(dtype) - over_space(pivot, x)) * over_space(scale.to(dtype), x) + over_space(shift.to(dtype), x)
    return y.to(x.dtype)


def normalize(x: Tensor, by: Moments, weight: Tensor, bias: Tensor, *, eps: float = 1e-5) -> Tensor:
    """Normalize by given moments, C, 1×C or N×C: y = weight·(x − mean)/sqrt(var + eps) + bias."""
    wide = wide_dtype(x.device)
    scale = weight.to(wide) * torch.rsqrt(by.var.to(wide) + eps)
    return scale_about(x, by.mean.to(wide), scale, bias.to(wide))


def batch_moments(instance_nc: Moments, *, micro_batch: int | None) -> tuple[Moments, Moments]:
    """Return moments of each micro-batch (T×C), and repeated for its samples (N×C); None: one batch of all N ≥ 1."""
    samples = instance_nc.mean.shape[0]
    size = samples if micro_batch is None else min(micro_batch, samples)
    batch_tc = pool_micro_batches(instance_nc, micro_batch=size)
    return batch_tc, Moments(*(spread_to_samples(p, micro_batch=size, samples=samples) for p in batch_tc))


def merge_micro_batches(x: Tensor, *, micro_batch: int | None) -> Tensor | None:
    """View x as T×C×(m·S), each micro-batch as one sample; None if m does not divide N ≥ 1 or a copy would be needed.

    In channels_last memory, which N×C has too, the samples of a micro-batch follow one another as positions do.
    """
    samples, channels = x.shape[:2]
    size = samples if micro_batch is None else micro_batch
    by_position = x.movedim(1, -1)
    if samples == 0 or samples % size or not by_position.is_contiguous():
        return None
    return by_position.view(samples // size, -1, channels).movedim(-1, 1)


def split_micro_batches(merged: Tensor, *, like: Tensor) -> Tensor:
    """Undo `merge_micro_batches`: return T×C×(m·S) in the shape of `like`."""
    return merged.movedim(1, -1).reshape(like.movedim(1, -1).shape).movedim(-1, 1)


def instance_norm_fused(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> tuple[Tensor, Moments]:
    """Normalize every (t, c) of T×C×S by its own moments, by the kernels; return y and the moments, T×C."""
    y, numbers = group_norm_fused(x, weight, bias, groups=x.shape[1], eps=eps)
    blocks = numbers[: len(Number) * x[..., 0].numel()].view(len(Number), *x.shape[:2]).to(wide_dtype(x.device))
    return y, Moments(blocks[Number.PIVOT] + blocks[Number.RESIDUE], blocks[Number.VAR])


def unbiased(batch_tc: Moments, *, samples: int, micro_batch: int | None, positions: int) -> Moments:
    """Return moments with var·n/(n − 1), n the elements per channel of each micro-batch; n = 1 keeps var."""
    size = samples if micro_batch is None else micro_batch
    start_t = torch.arange(0, samples, size, device=batch_tc.var.device)
    count_t = ((samples - start_t).clamp(max=size) * positions).to(batch_tc.var.dtype)
    correction_t = count_t / (count_t - 1).clamp(min=1)
    return Moments(batch_tc.mean, batch_tc.var * correction_t.unsqueeze(-1))


def absorb(running: Running, batch_tc: Moments, *, momentum: float | None) -> Running:
    """Return the running statistics after T successive batches: e ← (1 − a)·e + a·s_t for each.

    With momentum=None, e is the plain average of all batches so far, (n e_0 + Σ_t s_t)/(n + T), as in torch. Statistics
    carry no gradient.
    """
    steps, wide = batch_tc.mean.shape[0], batch_tc.mean.dtype
    pairs = [(old.to(wide), new.detach()) for old, new in zip(running[:2], batch_tc, strict=True)]
    if momentum is None:
        seen = running.batches.to(wide)
        mean, var = ((seen * old + new.sum(0)) / (seen + steps) for old, new in pairs)
    else:
        recurrence = Recurrence(momentum, steps, like=batch_tc.mean)
        mean, var = (recurrence.history(old, new)[-1] for old, new in pairs)
    return Running(mean, var, running.batches + steps)


def batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running: Running,
    *,
    training: bool = True,
    micro_batch: int | None = None,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    fused: bool = False,
) -> tuple[Tensor, Running]:
    """Normalize N samples, in training as ⌈N/m⌉ successive batches of m samples; None is one batch of all.

    y = weight·(x − μ_t)/sqrt(σ²_t + eps) + bias for the samples of micro-batch t, with its own mean and biased
    variance. Gradients flow through both. The running statistics move as torch's do, by the unbiased variance.
    Without `training`, and for an empty batch, the running statistics normalize and do not move. `fused` takes the
    kernels where the micro-batches can be merged: batch normalization of m samples is instance normalization of one.
    """
    if not training or x.shape[0] == 0:
        return normalize(x, Moments(running.mean, running.var), weight, bias, eps=eps), running
    merged = merge_micro_batches(x, micro_batch=micro_batch) if fused else None
    if merged is not None:
        y_tcs, batch_tc = instance_norm_fused(merged, weight, bias, eps=eps)
        y = split_micro_batches(y_tcs, like=x)
    else:
        batch_tc, batch_nc = batch_moments(moments(x), micro_batch=micro_batch)
        y = normalize(x, batch_nc, weight, bias, eps=eps)
    corrected_tc = unbiased(batch_tc, samples=x.shape[0], micro_batch=micro_batch, positions=x.shape[2:].numel())
    return y, absorb(running, corrected_tc, momentum=momentum)
