"""Normalizations within a sample that contain their activation: FRN (Singh & Krishnan 2020), EvoNorm-S0 (Liu 2020)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from micronorm.nn.fingerprint import Fingerprinted
from micronorm.nn.inputs import check_count, check_eps, check_flag, check_groups, check_input
from micronorm.nn.spec import GroupedSpec, NormSpec
from micronorm.ops.frn_evonorm import evonorm_s0, filter_response_norm
from micronorm.ops.group import choose_groups


class _Norm(Fingerprinted, nn.Module):
    """Base of both layers: parameters of C numbers each."""

    initial: ClassVar[dict[str, float]]
    """The initial value of each parameter."""
    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(
        self, num_channels: int, eps: float, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        check_count("num_channels", num_channels)
        check_eps(eps)
        super().__init__()
        self.num_channels, self.eps = num_channels, eps
        for name in self.initial:
            setattr(self, name, nn.Parameter(torch.empty(num_channels, device=device, dtype=dtype)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name, value in self.initial.items():
            if self._parameters[name] is not None:
                nn.init.constant_(getattr(self, name), value)


class FilterResponseNorm(_Norm):
    """Divide each channel of each sample by its root mean square, then apply a learned threshold; x is N×C×….

    y = γ x/sqrt(ν² + ε) + β with ν²_nc = mean over space of x². On 1×1 maps x/sqrt(x² + ε) is nearly a sign.

    Args:
        num_channels: C.
        eps: added to ν², inside the root.
        tlu: return max(y, τ), which replaces the activation.
        device: as in torch.nn.
        dtype: as in torch.nn.

    Example:
        >>> FilterResponseNorm(8)(torch.randn(2, 8, 4, 4)).min() >= 0
        tensor(True)
    """

    function = ("FRN", "eps")
    initial: ClassVar = {"weight": 1.0, "bias": 0.0, "tau": 0.0}
    tau: nn.Parameter | None

    def __init__(
        self,
        num_channels: int,
        *,
        eps: float = 1e-6,
        tlu: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_flag("tlu", tlu)
        super().__init__(num_channels, eps, device, dtype)
        if not tlu:
            self.tau = None

    def forward(self, x: Tensor) -> Tensor:
        check_input(x, self.num_channels, "FilterResponseNorm")
        return filter_response_norm(x, self.weight, self.bias, self.tau, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_channels}, eps={self.eps}, tlu={self.tau is not None}"


class EvoNorm(_Norm):
    """Compute y = x·sigmoid(v·x)/sqrt(σ²_ng + eps)·γ + β; σ² is the variance of a sample's group of channels; N×C×….

    It replaces normalization and activation.

    Args:
        num_channels: C.
        num_groups: the number of groups, which must divide C; None chooses it.
        eps: added to the variance, inside the root.
        device: as in torch.nn.
        dtype: as in torch.nn.

    Example:
        >>> EvoNorm(8, 2)(torch.randn(2, 8, 4, 4)).shape
        torch.Size([2, 8, 4, 4])
    """

    function = ("EvoNormS0", "num_groups", "eps")
    initial: ClassVar = {"weight": 1.0, "bias": 0.0, "v": 1.0}
    v: nn.Parameter

    def __init__(
        self,
        num_channels: int,
        num_groups: int | None = None,
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        groups = choose_groups(num_channels) if num_groups is None else num_groups
        check_groups(num_channels, groups)
        super().__init__(num_channels, eps, device, dtype)
        self.num_groups = groups

    def forward(self, x: Tensor) -> Tensor:
        check_input(x, self.num_channels, "EvoNorm")
        return evonorm_s0(x, self.weight, self.bias, self.v, groups=self.num_groups, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_channels}, num_groups={self.num_groups}, eps={self.eps}"


@dataclass(frozen=True)
class FRN(NormSpec):
    """Filter response normalization; see `mn.nn.FilterResponseNorm`.

    Args:
        eps: added to the mean square, inside the root.
        tlu: contain the activation, so that no other follows.

    Example:
        >>> FRN()(8)
        FilterResponseNorm(8, eps=1e-06, tlu=True)
    """

    layer = FilterResponseNorm
    eps: float = 1e-6
    tlu: bool = True


@dataclass(frozen=True)
class EvoNormS0(GroupedSpec):
    """EvoNorm-S0; see `mn.nn.EvoNorm`. It contains the activation, so no other follows.

    Args:
        groups: the number of groups. A layer whose channels do not divide into so many gets fewer.
        min_channels_per_group: a group must have at least so many channels for `groups` to be taken.
        eps: added to the variance, inside the root.

    Example:
        >>> EvoNormS0()(64)
        EvoNorm(64, num_groups=32, eps=1e-05)
    """

    layer = EvoNorm
    eps: float = 1e-5
