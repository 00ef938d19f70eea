"""Specs of the norms that look at one sample: group, layer and instance normalization."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from micronorm.nn.inputs import check_eps, check_input
from micronorm.nn.spec import GroupedSpec, NormSpec


@dataclass(frozen=True)
class GN(GroupedSpec):
    """Group normalization: nn.GroupNorm, y = γ_c (x − M_ng)/sqrt(S²_ng + eps) + β_c over C/G channels and space.

    Example:
        >>> GN(groups=32)(48).num_groups
        12
    """

    eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_eps(self.eps)

    def __call__(self, num_channels: int, *, dims: int = 2) -> nn.GroupNorm:
        """nn.GroupNorm, whatever the number of spatial dimensions."""
        return nn.GroupNorm(self.groups_for(num_channels), num_channels, eps=self.eps)


@dataclass(frozen=True)
class LN(NormSpec):
    """Layer normalization over all channels and space of a sample, affine per channel: group normalization with G = 1.

    Example:
        >>> LN()(48).num_groups
        1
    """

    eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_eps(self.eps)

    def __call__(self, num_channels: int, *, dims: int = 2) -> nn.GroupNorm:
        """nn.GroupNorm of one group, whatever the number of spatial dimensions."""
        return nn.GroupNorm(1, num_channels, eps=self.eps)


class InstanceNorm(nn.GroupNorm):
    """Group normalization with one channel per group, defined also for one sample of one position (where y = bias).

    Example:
        >>> InstanceNorm(2)(torch.ones(1, 2, 1, 1)).flatten().tolist()
        [0.0, 0.0]
    """

    def __init__(
        self,
        num_channels: int,
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_channels, num_channels, eps=eps, device=device, dtype=dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize each channel of each sample."""
        check_input(input, self.num_channels, "InstanceNorm")
        # not F.group_norm: it refuses one value per group, for which torch.group_norm is defined
        return torch.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


@dataclass(frozen=True)
class IN(NormSpec):
    """Instance normalization over the space of each channel, affine per channel: group normalization with G = C.

    Example:
        >>> IN()(48).num_groups
        48
    """

    eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_eps(self.eps)

    def __call__(self, num_channels: int, *, dims: int = 2) -> InstanceNorm:
        """An nn.GroupNorm with a group per channel, whatever the number of spatial dimensions."""
        return InstanceNorm(num_channels, eps=self.eps)
