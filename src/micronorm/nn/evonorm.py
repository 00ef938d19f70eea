"""EvoNorm-S0 (Liu et al. 2020)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from micronorm.nn.fingerprint import Fingerprinted
from micronorm.nn.inputs import check_eps, check_groups, check_input
from micronorm.nn.spec import GroupedSpec
from micronorm.ops.evonorm import evonorm_s0
from micronorm.ops.group import choose_groups


class EvoNorm(Fingerprinted, nn.Module):
    """Compute y = x·sigmoid(v·x)/sqrt(σ²_ng + eps)·γ + β; σ² is the variance of a sample's group of channels; N×C×….

    It replaces normalization and activation. `num_groups` must divide the channels; None chooses it.

    Example:
        >>> EvoNorm(8, 2)(torch.randn(2, 8, 4, 4)).shape
        torch.Size([2, 8, 4, 4])
    """

    function = ("EvoNormS0", "num_groups", "eps")

    def __init__(
        self,
        num_channels: int,
        num_groups: int | None = None,
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_channels = num_channels
        self.num_groups = choose_groups(num_channels) if num_groups is None else num_groups
        check_groups(num_channels, self.num_groups)
        check_eps(eps)
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(num_channels, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_channels, device=device, dtype=dtype))
        self.v = nn.Parameter(torch.empty(num_channels, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
        nn.init.ones_(self.v)

    def forward(self, x: Tensor) -> Tensor:
        check_input(x, self.num_channels, "EvoNorm")
        return evonorm_s0(x, self.weight, self.bias, self.v, groups=self.num_groups, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_channels}, num_groups={self.num_groups}, eps={self.eps}"


@dataclass(frozen=True)
class EvoNormS0(GroupedSpec):
    """EvoNorm-S0; see `mn.nn.EvoNorm`. It contains the activation, so no other follows.

    Example:
        >>> EvoNormS0()(64)
        EvoNorm(64, num_groups=32, eps=1e-05)
    """

    layer = EvoNorm
    eps: float = 1e-5
