"""Statistics of single channels: activity, StatDiff, distance to BN, and the effect of normalization on moments.

Moments of samples have shape N×C, as returned by `ops.moments.moments`. Statistics over all data have C numbers.
"""

import torch
from torch import Tensor

from micronorm.ops.moments import Moments, merge, pool, wide_dtype

RARE = 0.01
"""A channel is rare if it is active in fewer than this share of its positions, but in some.

A channel with mean 0 and deviation 1, as after BN, is active in about half of its positions. At 1 % its mean lies 2.3
deviations below zero, and 99 of 100 positions give its weights no gradient.
"""


class RunningMoments:
    """Mean and variance of each channel over all batches. The result does not depend on how the data was cut.

    Example:
        >>> running = RunningMoments()
        >>> for batch in (torch.zeros(1, 2, 4), torch.ones(3, 2, 4)):
        ...     mean_nc = batch.mean(-1)
        ...     running.add(Moments(mean_nc, torch.zeros_like(mean_nc)), positions=4)
        >>> running.count, running.moments.mean, running.moments.var
        (16, tensor([0.7500, 0.7500]), tensor([0.1875, 0.1875]))
    """

    moments: Moments  # C numbers each, from the first `add` on

    def __init__(self) -> None:
        self.count = 0

    def add(self, data_nc: Moments, *, positions: int) -> None:
        """Add N samples of `positions` elements each, given by their moments (N×C)."""
        new, count = pool(data_nc, dim=0), data_nc.mean.shape[0] * positions
        before, self.count = self.count, self.count + count
        self.moments = merge(self.moments, new, share=count / self.count) if before else new


# --- activity --------------------------------------------------------------------------------------------------------


def count_positive(y: Tensor, *, axis: int = 1) -> Tensor:
    """Return the number of elements above zero in each channel: C integers.

    Example:
        >>> count_positive(torch.tensor([[[1.0, 0.0], [2.0, 3.0]], [[-1.0, 0.0], [2.0, -3.0]]]))
        tensor([1, 3])
    """
    others = [d for d in range(y.ndim) if d != axis % y.ndim]
    return (y > 0).sum(others) if others else (y > 0).long()


def rare_channels(active: Tensor) -> Tensor:
    """Return which channels are active somewhere, but in a smaller share of positions than `RARE`."""
    return (active > 0) & (active < RARE)


# --- differences between channels ------------------------------------------------------------------------------------


def stat_diff(mean: Tensor, var: Tensor, groups: int) -> Tensor:
    """Return StatDiff of every group: the deviation of its channels' means over their mean deviation (label `eq:sd`).

    StatDiff is 0 after batch normalization, because all means are equal. Take a group with StatDiff d whose channels
    are normal with equal deviations. A channel whose mean lies one deviation of the means below their average is
    positive with probability Φ(−d) after normalization: 16 % at 1, 2.3 % at 2, 0.1 % at 3.

    Args:
        mean: the means of the channels, C numbers.
        var: the variances of the channels, C numbers. The paper's σ_c is the root.
        groups: G, a divisor of C. Neighbouring channels form a group.

    Returns:
        G numbers in the widest dtype of the device. A group with equal means has 0. A group with different means and
        zero variances has infinity.

    Example:
        >>> stat_diff(torch.tensor([0.0, 4.0, 1.0, 1.0]), torch.tensor([1.0, 9.0, 1.0, 4.0]), groups=2)
        tensor([1., 0.], dtype=torch.float64)
    """
    wide = wide_dtype(mean.device)
    mean_gk, std_gk = mean.to(wide).reshape(groups, -1), var.to(wide).sqrt().reshape(groups, -1)
    # Subtract the first channel's mean, so that equal means differ by exactly 0.
    apart_gk = mean_gk - mean_gk[:, :1]
    spread_g = (apart_gk - apart_gk.mean(1, keepdim=True)).square().mean(1).sqrt()
    return torch.where(spread_g == 0, 0.0, spread_g / std_gk.mean(1))


def distance_to_bn(mean: Tensor, var: Tensor, *, eps: float = 1e-5) -> tuple[float, float]:
    """Return (σ_μ, σ_σ): the deviations, over channels, of the means and of the logarithms of the deviations.

    The two numbers are the axes of the paper's `fig:dist`, which draws log σ̂_c from a normal distribution. Batch
    normalization has (0, 0) (label `eq:bnes`).

    Args:
        mean: the means of the channels after normalization, without the affine transformation; C numbers.
        var: their variances, C numbers.
        eps: the normalization's. Deviations below √eps count as √eps, because a constant channel has log 0.

    Example:
        >>> distance_to_bn(torch.zeros(3), torch.ones(3))
        (0.0, 0.0)
        >>> distance_to_bn(torch.tensor([-2.0, 2.0]), torch.tensor([1.0, 1.0]))
        (2.0, 0.0)
    """
    wide = wide_dtype(mean.device)
    log_std = var.to(wide).clamp(min=max(eps, torch.finfo(wide).tiny)).log() / 2
    return float(mean.to(wide).std(correction=0)), float(log_std.std(correction=0))


# --- normalization of moments ----------------------------------------------------------------------------------------


def channel_normalized(data: Moments, statistics: Moments, *, eps: float) -> Moments:
    """Return the moments of (x − μ_c)/sqrt(σ²_c + eps), given those of x (N×C) and statistics of N×C, 1×C or C numbers.

    Example:
        >>> data = Moments(torch.tensor([[3.0]]), torch.tensor([[4.0]]))
        >>> channel_normalized(data, Moments(torch.tensor([1.0]), torch.tensor([4.0])), eps=0.0)
        Moments(mean=tensor([[1.]]), var=tensor([[1.]]))
    """
    inv = (statistics.var.to(data.var.dtype) + eps).rsqrt()
    return Moments((data.mean - statistics.mean) * inv, data.var * inv.square())


def group_normalized(data: Moments, *, groups: int, eps: float, blend: Tensor | float = 1.0) -> Moments:
    """Return the moments (N×C) of a sample's channels after group normalization without its affine transformation.

    The variance of a group is the mean of its channels' variances plus the variance of their means.

    Args:
        data: the moments of the samples' channels, N×C.
        groups: G, a divisor of C.
        eps: added to the variance, inside the root.
        blend: α. Below 1 the normalization is mixed with the identity, as in `BatchChannelNorm.warm`.

    Example:
        >>> group_normalized(Moments(torch.tensor([[-3.0, 3.0]]), torch.zeros(1, 2)), groups=1, eps=0.0).mean
        tensor([[-1.,  1.]])
    """
    mean_ngk, var_ngk = (part.unflatten(1, (groups, -1)) for part in data)
    apart_ngk = mean_ngk - mean_ngk.mean(-1, keepdim=True)
    inv_ng = ((var_ngk + apart_ngk.square()).mean(-1, keepdim=True) + eps).rsqrt()
    alpha = blend.to(mean_ngk) if isinstance(blend, Tensor) else blend  # a Python number does not wait for the device
    gain_ng = torch.lerp(torch.ones_like(inv_ng), inv_ng, alpha)
    return Moments(torch.lerp(mean_ngk, apart_ngk * inv_ng, alpha).flatten(1), (var_ngk * gain_ng.square()).flatten(1))
