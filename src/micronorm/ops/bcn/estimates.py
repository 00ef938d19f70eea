"""How the estimates μ̂ and σ̂² move, as pure functions on N×C numbers.

Estimates carry no gradient. `Moments` holds both the moments of data and the estimates of them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from micronorm.ops.moments import Moments, pool_micro_batches, spread_to_samples, wide_dtype

# The scan multiplies by a T×T matrix; beyond this many micro-batches it goes block by block.
_SCAN_BLOCK = 256


class Sums(NamedTuple):
    """What a window holds of one or many forwards: n elements per channel, s₁ = Σ(x − μ̂) and s₂ = Σ(x − μ̂)²."""

    elements: Tensor
    first: Tensor
    second: Tensor


def window_sums(parts_nc: Moments, *, elements: int, around: Tensor) -> Sums:
    """Sums over all samples of the first two powers of x − μ̂, from per-sample moments over `elements` elements each."""
    distance_nc = parts_nc.mean - around.to(parts_nc.mean.dtype)
    first_c = elements * distance_nc.sum(0)
    second_c = elements * (parts_nc.var + distance_nc.square()).sum(0)
    count = torch.full((1,), float(elements * parts_nc.mean.shape[0]), dtype=first_c.dtype, device=first_c.device)
    return Sums(count, first_c, second_c)


def move_by_window(estimates: Moments, sums: Sums, rate: Tensor | float) -> Moments:
    """The commit: μ̂ + r·s₁/n and σ̂² + r·(s₂/n − σ̂²), both around the old μ̂. An empty window moves nothing."""
    wide = sums.first.dtype
    mean, var = (e.to(wide) for e in estimates)
    count = sums.elements.clamp(min=1)
    moved = Moments(mean + rate * (sums.first / count), var + rate * (sums.second / count - var))
    return Moments(*(torch.where(sums.elements > 0, new, old) for new, old in zip(moved, (mean, var), strict=True)))


def move_by_batch(estimates: Moments, batch: Moments, *, elements: int, momentum: Tensor | float) -> Moments:
    """BatchNorm's running statistics: r toward the batch's mean and its *unbiased* variance.

    One element per channel has no unbiased variance; its biased one, zero, is taken.
    """
    mean, var = (e.to(batch.mean.dtype) for e in estimates)
    unbiased = batch.var * (elements / max(elements - 1, 1))
    return Moments(mean + momentum * (batch.mean - mean), var + momentum * (unbiased - var))


def scan(estimates: Moments, parts_nc: Moments, *, rate: Tensor | float, micro_batch: int) -> tuple[Moments, Moments]:
    """Algorithm 1's estimates after each of the ⌈N/m⌉ successive micro-batches that N samples stand for.

    μ̂_t = (1−r)·μ̂_{t−1} + r·m_t and σ̂²_t = (1−r)·σ̂²_{t−1} + r·(v_t + (m_t − μ̂_{t−1})²), a causal linear recurrence.

    Returns the estimates each sample is normalized with (N×C) and the final ones (C).
    """
    samples = parts_nc.mean.shape[0]
    batches_tc = pool_micro_batches(parts_nc, micro_batch=micro_batch)
    wide = wide_dtype(parts_nc.mean.device)
    last = Moments(*(e.to(wide) for e in estimates))
    blocks = []
    for mean_tc, var_tc in zip(batches_tc.mean.split(_SCAN_BLOCK), batches_tc.var.split(_SCAN_BLOCK), strict=True):
        mean_after_tc = _recur(last.mean, mean_tc, rate)
        mean_before_tc = torch.cat([last.mean.unsqueeze(0), mean_after_tc[:-1]])
        # Algorithm 1's line 2 measures around the estimate as it stood before this micro-batch.
        var_after_tc = _recur(last.var, var_tc + (mean_tc - mean_before_tc).square(), rate)
        blocks.append(Moments(mean_after_tc, var_after_tc))
        last = Moments(mean_after_tc[-1], var_after_tc[-1])
    per_sample = Moments(
        *(
            spread_to_samples(torch.cat(rows), micro_batch=micro_batch, samples=samples)
            for rows in zip(*blocks, strict=True)
        )
    )
    return per_sample, last


def _recur(start_c: Tensor, inputs_tc: Tensor, rate: Tensor | float) -> Tensor:
    """All terms of u_t = (1−r)·u_{t−1} + r·i_t, by one product with the lower-triangular matrix of powers of 1−r.

    Powers of a number in [0, 1] and a sum of non-negative weights: nothing here amplifies rounding.
    """
    steps = torch.arange(inputs_tc.shape[0], dtype=inputs_tc.dtype, device=inputs_tc.device)
    age_tt = steps.unsqueeze(1) - steps.unsqueeze(0)
    if isinstance(rate, Tensor):
        rate = rate.to(inputs_tc.dtype)  # 1 − r in float32 would forget small rates
    keep = 1 - rate
    weights_tt = torch.where(age_tt >= 0, rate * keep ** age_tt.clamp(min=0), 0.0)
    # A zero weight times inf is NaN: what is not finite must not reach back to the micro-batches before it.
    finite_tc = inputs_tc.isfinite()
    terms_tc = keep ** (steps + 1).unsqueeze(1) * start_c + weights_tt @ torch.where(finite_tc, inputs_tc, 0.0)
    spoiled_tc = finite_tc.logical_not().int().cummax(0).values.bool()
    return torch.where(spoiled_tc, torch.nan, terms_tc)
