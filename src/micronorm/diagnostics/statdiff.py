"""The statistical difference between channels that are normalized together (label `eq:sd`)."""

import torch
from torch import Tensor

from micronorm.ops.moments import wide_dtype


def stat_diff(mean: Tensor, var: Tensor, groups: int) -> Tensor:
    """StatDiff of every group: the deviation of its channels' means over the mean of their deviations (label `eq:sd`).

    0 for channels that batch normalization has normalized: their means are all the same. In a group of StatDiff d whose
    channels have one deviation and are normal, a channel whose mean lies one deviation of the means below their average
    comes out of the normalization positive with probability Φ(−d): 16 % at 1, 2.3 % at 2, 0.1 % at 3.

    Args:
        mean: the channels' means, C numbers.
        var: their variances, C numbers; the paper's σ_c is the root.
        groups: G, a divisor of C; neighbouring channels are one group, as group normalization has them.

    Returns:
        G numbers in the widest dtype of the device. A group of one channel has 0. So has one whose means are all equal,
        whatever the variances; where these are all 0 and the means are not equal it is infinite.

    Example:
        >>> stat_diff(torch.tensor([0.0, 4.0, 1.0, 1.0]), torch.tensor([1.0, 9.0, 1.0, 4.0]), groups=2)
        tensor([1., 0.], dtype=torch.float64)
    """
    if mean.ndim != 1 or mean.shape != var.shape:
        raise ValueError(f"mean and var hold C numbers each, got shapes {tuple(mean.shape)} and {tuple(var.shape)}")
    channels = mean.numel()
    if isinstance(groups, bool) or not isinstance(groups, int):
        raise TypeError(f"groups must be an int, got {groups!r}")
    if groups < 1 or channels % groups:
        raise ValueError(f"groups must divide the {channels} channels, got {groups}")
    wide = wide_dtype(mean.device)
    mean_gk, std_gk = mean.to(wide).reshape(groups, -1), var.to(wide).sqrt().reshape(groups, -1)
    # From the first channel's mean: equal means then differ by exactly nothing, whatever their rounding.
    apart_gk = mean_gk - mean_gk[:, :1]
    spread_g = (apart_gk - apart_gk.mean(1, keepdim=True)).square().mean(1).sqrt()
    return torch.where(spread_g == 0, 0.0, spread_g / std_gk.mean(1))
