"""What single channels do: how often they are active, and how far their statistics are from those BN would give them.

Shapes: moments of samples are N×C, as `ops.moments.moments` gives them; what is known of a channel over all the data is
C numbers. Everything here is arithmetic on such small tensors: one pass over the activations gave them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from micronorm.ops.moments import Moments, merge, pool, wide_dtype

RARE = 0.01
"""A channel that is active in less than this share of its positions, but in some, is under-represented.

Normalized to mean 0 and deviation 1, as BN has it, a channel is active in about half. At 1 % its mean lies 2.3
deviations below zero, and 99 of 100 positions give its weights no gradient.
"""


class RunningMoments:
    """Mean and variance of each channel over all batches so far, merged by counts: stable, and however they were cut.

    Example:
        >>> running = RunningMoments()
        >>> for batch in (torch.zeros(1, 2, 4), torch.ones(3, 2, 4)):
        ...     mean_nc = batch.mean(-1)
        ...     running.add(Moments(mean_nc, torch.zeros_like(mean_nc)), positions=4)
        >>> running.count, running.moments.mean, running.moments.var
        (16, tensor([0.7500, 0.7500]), tensor([0.1875, 0.1875]))
    """

    def __init__(self) -> None:
        self.count = 0
        self._data: Moments | None = None

    @property
    def moments(self) -> Moments:
        """What was seen, C numbers each. RuntimeError where nothing was."""
        if self._data is None:
            raise RuntimeError("nothing was added yet, there are no moments")
        return self._data

    def add(self, data_nc: Moments, *, positions: int) -> None:
        """Take up N samples of `positions` elements each, given by their moments (N×C)."""
        samples = data_nc.mean.shape[0]
        if samples == 0 or positions == 0:
            return
        new, count = pool(data_nc, dim=0), samples * positions
        total = self.count + count
        self._data = new if self._data is None else merge(self._data, new, share=count / total)
        self.count = total


def positives(y: Tensor, *, axis: int = 1) -> Tensor:
    """How many elements of each channel are above zero: C whole numbers.

    Example:
        >>> positives(torch.tensor([[[1.0, 0.0], [2.0, 3.0]], [[-1.0, 0.0], [2.0, -3.0]]]))
        tensor([1, 3])
    """
    others = [d for d in range(y.ndim) if d != axis % y.ndim]
    return (y > 0).sum(others) if others else (y > 0).long()


def dead_channels(rate: Tensor) -> Tensor:
    """Which channels (C booleans) were never active, given the share of active positions of each.

    Example:
        >>> dead_channels(torch.tensor([0.0, 0.001, 0.5]))
        tensor([ True, False, False])
    """
    return rate == 0


def rare_channels(rate: Tensor, *, below: float = RARE) -> Tensor:
    """Which channels (C booleans) are under-represented: active somewhere, but in a smaller share than `below`.

    Example:
        >>> rare_channels(torch.tensor([0.0, 0.001, 0.5]))
        tensor([False,  True, False])
    """
    if not 0 < below < 1:
        raise ValueError(f"below is a share between 0 and 1, got {below}")
    return (rate > 0) & (rate < below)


class DistanceToBN(NamedTuple):
    """The (σ_μ, σ_σ) of normalized channels; (0, 0) is batch normalization (labels `eq:bnes` and `fig:dist`)."""

    sigma_mean: float
    sigma_std: float


def distance_to_bn(mean: Tensor, var: Tensor, *, eps: float = 1e-5) -> DistanceToBN:
    """The spread over channels of the means, and of the logarithms of the deviations, of normalized channels.

    Of the logarithms because the paper draws log σ̂_c from a normal distribution of deviation σ_σ: the two numbers are
    the axes of its `fig:dist`. Spread is the standard deviation over channels.

    Args:
        mean: means of the channels after normalization, before the affine transformation; C numbers.
        var: their variances, C numbers.
        eps: that of the normalization. A deviation below √eps counts as √eps: a constant channel has 0, whose logarithm
            is infinite, and what lies below is the work of eps.

    Example:
        >>> distance_to_bn(torch.zeros(3), torch.ones(3))
        DistanceToBN(sigma_mean=0.0, sigma_std=0.0)
        >>> distance_to_bn(torch.tensor([-2.0, 2.0]), torch.tensor([1.0, 1.0]))
        DistanceToBN(sigma_mean=2.0, sigma_std=0.0)
    """
    if mean.ndim != 1 or mean.shape != var.shape:
        raise ValueError(f"mean and var hold C numbers each, got shapes {tuple(mean.shape)} and {tuple(var.shape)}")
    if not eps >= 0:
        raise ValueError(f"eps must not be below 0, got {eps}")
    wide = wide_dtype(mean.device)
    log_std = var.to(wide).clamp(min=max(eps, torch.finfo(wide).tiny)).log() / 2
    return DistanceToBN(
        *(float((values - values.mean()).square().mean().sqrt()) for values in (mean.to(wide), log_std))
    )


# --- normalization on moments ----------------------------------------------------------------------------------------


def channel_normalized(data: Moments, statistics: Moments, *, eps: float) -> Moments:
    """Moments of (x − μ_c)/sqrt(σ²_c + eps) from those of x: N×C, with statistics of N×C, 1×C or C numbers.

    Batch normalization by whichever statistics; instance normalization with the data's own.

    Example:
        >>> data = Moments(torch.tensor([[3.0]]), torch.tensor([[4.0]]))
        >>> channel_normalized(data, Moments(torch.tensor([1.0]), torch.tensor([4.0])), eps=0.0)
        Moments(mean=tensor([[1.]]), var=tensor([[1.]]))
    """
    inv = (statistics.var.to(data.var.dtype) + eps).rsqrt()
    return Moments((data.mean - statistics.mean) * inv, data.var * inv.square())


def group_normalized(data: Moments, *, groups: int, eps: float, blend: Tensor | float = 1.0) -> Moments:
    """Moments (N×C) of a sample's channels after group normalization without its affine, from those before it.

    The group's variance is the mean of its channels' variances plus the variance of their means: every channel of the
    group is scaled by the same number, so a channel far from the others pushes them together.

    Args:
        data: N×C moments of the samples' channels.
        groups: G, a divisor of C.
        eps: added to the variance, inside the root.
        blend: α; below 1 the normalization is mixed with the identity, as `BatchChannelNorm.warm` does.

    Example:
        >>> group_normalized(Moments(torch.tensor([[-3.0, 3.0]]), torch.zeros(1, 2)), groups=1, eps=0.0).mean
        tensor([[-1.,  1.]])
    """
    mean_ngk, var_ngk = (part.unflatten(1, (groups, -1)) for part in data)
    apart_ngk = mean_ngk - mean_ngk.mean(-1, keepdim=True)
    inv_ng = ((var_ngk + apart_ngk.square()).mean(-1, keepdim=True) + eps).rsqrt()
    alpha = blend.to(mean_ngk) if isinstance(blend, Tensor) else blend  # a number stays one: no wait for the device
    gain_ng = torch.lerp(torch.ones_like(inv_ng), inv_ng, alpha)
    return Moments(torch.lerp(mean_ngk, apart_ngk * inv_ng, alpha).flatten(1), (var_ngk * gain_ng.square()).flatten(1))
