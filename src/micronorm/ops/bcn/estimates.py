"""Updates of the estimates μ̂ and σ̂², as pure functions on N×C numbers.

Estimates carry no gradient. `Moments` holds moments of data as well as estimates.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from micronorm.ops.moments import Moments, pool_micro_batches, spread_to_samples, wide_dtype

# The scan multiplies by a T×T matrix. More micro-batches than this are processed in blocks.
_SCAN_BLOCK = 256


class Sums(NamedTuple):
    """The content of a window: n elements per channel, s₁ = Σ(x − μ̂) and s₂ = Σ(x − μ̂)², over some forwards."""

    elements: Tensor
    first: Tensor
    second: Tensor


def window_sums(parts_nc: Moments, *, elements: int, around: Tensor) -> tuple[Sums, Tensor]:
    """Return sums of x − μ̂ and its square, from per-sample moments over `elements` elements each.

    A sample whose own sums are not finite is left out, so that what is left out does not depend on the other samples of
    the forward. The second result is the number of these samples.
    """
    distance_nc = parts_nc.mean - around.to(parts_nc.mean.dtype)
    square_nc = elements * (parts_nc.var + distance_nc.square())
    finite_n1 = square_nc.isfinite().all(1, keepdim=True)
    first_c = elements * torch.where(finite_n1, distance_nc, 0.0).sum(0)
    second_c = torch.where(finite_n1, square_nc, 0.0).sum(0)
    samples = finite_n1.sum(0)
    return Sums(elements * samples.to(first_c.dtype), first_c, second_c), len(finite_n1) - samples


def shift_sums(sums: Sums, distance: Tensor) -> Sums:
    """Return the sums measured from a mean that lies `distance` below the one they are measured from.

    Σ(x − μ + d) = s₁ + n·d and Σ(x − μ + d)² = s₂ + 2·d·s₁ + n·d². With d = 0 they are the same to the bit.
    """
    shift = sums.elements * distance
    return Sums(sums.elements, sums.first + shift, sums.second + distance * (2 * sums.first + shift))


def move_by_window(estimates: Moments, sums: Sums, rate: Tensor | float, *, mixture: bool = False) -> Moments:
    """Return the commit: μ̂ + r·s₁/n and σ̂² + r·(s₂/n − σ̂²), around the old μ̂. An empty window changes nothing.

    With `mixture`, σ̂² also loses r²·(s₁/n)²: it is the variance around the new μ̂. At small r the term is negligible.
    """
    wide = sums.first.dtype
    mean, var = (e.to(wide) for e in estimates)
    count = sums.elements.clamp(min=1)
    offset, second = sums.first / count, sums.second / count
    if mixture:
        second = second - rate * offset.square()
    moved = Moments(mean + rate * offset, var + rate * (second - var))
    return Moments(*(torch.where(sums.elements > 0, new, old) for new, old in zip(moved, (mean, var), strict=True)))


def move_by_batch(estimates: Moments, batch: Moments, *, elements: int, momentum: Tensor | float) -> Moments:
    """Move the estimates as BatchNorm does: by `momentum` to the batch's mean and its *unbiased* variance.

    One element per channel has no unbiased variance; its biased variance, zero, is used.
    """
    mean, var = (e.to(batch.mean.dtype) for e in estimates)
    unbiased = batch.var * (elements / max(elements - 1, 1))
    return Moments(mean + momentum * (batch.mean - mean), var + momentum * (unbiased - var))


def scan(estimates: Moments, parts_nc: Moments, *, rate: Tensor | float, micro_batch: int) -> tuple[Moments, Tensor]:
    """Return Algorithm 1's estimates after each of the ⌈N/m⌉ successive micro-batches of N samples.

    μ̂_t = (1−r)·μ̂_{t−1} + r·m_t and σ̂²_t = (1−r)·σ̂²_{t−1} + r·(v_t + (m_t − μ̂_{t−1})²), a causal linear recurrence.
    A micro-batch whose moments overflow the estimates' dtype, or are NaN, changes no estimate.

    Returns:
        The estimates that each sample is normalized with (N×C), and the number of samples in micro-batches left out.
        The estimates of the last sample are the final ones.
    """
    samples = parts_nc.mean.shape[0]
    batches_tc = pool_micro_batches(parts_nc, micro_batch=micro_batch)
    square_tc = batches_tc.var + batches_tc.mean.square()
    taken_t = (square_tc < torch.finfo(estimates.var.dtype).max).all(1)  # NaN compares false
    count_t = taken_t.cumsum(0)
    # Move the micro-batches that count to the front. The others share one more row, which is cut off.
    place_t = torch.where(taken_t, count_t - 1, len(taken_t))
    batches_tc = Moments(*(torch.zeros_like(torch.cat([b, b[:1]])).index_copy(0, place_t, b)[:-1] for b in batches_tc))
    wide = wide_dtype(parts_nc.mean.device)
    last = Moments(*(e.to(wide) for e in estimates))
    recurrence = Recurrence(rate, min(batches_tc.mean.shape[0], _SCAN_BLOCK), like=batches_tc.mean)
    blocks = [Moments(*(e.unsqueeze(0) for e in last))]
    for mean_tc, var_tc in zip(batches_tc.mean.split(_SCAN_BLOCK), batches_tc.var.split(_SCAN_BLOCK), strict=True):
        means_tc = recurrence.history(last.mean, mean_tc)
        # Algorithm 1's line 2 measures around the estimate as it stood before this micro-batch.
        vars_tc = recurrence.history(last.var, var_tc + (mean_tc - means_tc[:-1]).square())
        blocks.append(Moments(means_tc[1:], vars_tc[1:]))
        last = Moments(means_tc[-1], vars_tc[-1])
    rows = Moments(*(torch.cat(parts) for parts in zip(*blocks, strict=True)))
    # Row k holds the estimates after the first k micro-batches that count.
    rows = Moments(*(r[count_t] for r in rows))
    per_sample = Moments(*(spread_to_samples(r, micro_batch=micro_batch, samples=samples) for r in rows))
    taken_n = spread_to_samples(taken_t, micro_batch=micro_batch, samples=samples)
    return per_sample, samples - taken_n.sum()


class Recurrence:
    """Solve u_t = (1−r)·u_{t−1} + r·i_t for t = 1 … T by one product with the lower-triangular matrix of powers of 1−r.

    The weights are non-negative powers of a number in [0, 1], so rounding errors are not amplified.
    """

    def __init__(self, rate: Tensor | float, steps: int, *, like: Tensor) -> None:
        if isinstance(rate, Tensor):
            rate = rate.to(like.dtype)  # 1 − r in float32 would lose small rates
        powers_t = (1 - rate) ** torch.arange(steps + 1, dtype=like.dtype, device=like.device)
        self.decay_t1 = powers_t[1:].unsqueeze(1)
        # Row t holds r·(1−r)^(t−s) at s ≤ t: each row is the row above, shifted by one place.
        reach = torch.cat([torch.zeros_like(powers_t[2:]), rate * powers_t[:-1]])
        self.weights_tt = reach.unfold(0, steps, 1).flip(1)

    def history(self, start_c: Tensor, inputs_tc: Tensor) -> Tensor:
        """Return u_0 … u_T from u_0 and i_1 … i_T; the last block of a scan may be shorter than T."""
        steps = inputs_tc.shape[0]
        after_tc = torch.addmm(self.decay_t1[:steps] * start_c, self.weights_tt[:steps, :steps], inputs_tc)
        return torch.cat([start_c.unsqueeze(0), after_tc])
