"""Filter response normalization (Singh & Krishnan 2020)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from micronorm.nn.fingerprint import Fingerprinted
from micronorm.nn.inputs import check_count, check_eps, check_flag, check_input
from micronorm.nn.spec import NormSpec
from micronorm.ops.frn import filter_response_norm
from micronorm.ops.moments import compute_dtype


class FilterResponseNorm(Fingerprinted, nn.Module):
    """Divide each channel of each sample by its root mean square, then apply a learned threshold; x is N×C×….

    y = γ x/sqrt(ν² + |ε|) + β with ν²_nc = mean over space of x². With `tlu` the output is max(y, τ), which replaces
    the activation. On 1×1 maps x/sqrt(x² + ε) is nearly a sign. For these the authors learn ε (`learnable_eps`):
    ε = eps + |learned_eps|, one number per layer that starts at 1e-4.

    Example:
        >>> FilterResponseNorm(8)(torch.randn(2, 8, 4, 4)).min() >= 0
        tensor(True)
    """

    function = ("FRN", "eps")

    tau: nn.Parameter | None
    learned_eps: nn.Parameter | None

    def __init__(
        self,
        num_channels: int,
        *,
        eps: float = 1e-6,
        tlu: bool = True,
        learnable_eps: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_count("num_channels", num_channels)
        check_eps(eps)
        check_flag("tlu", tlu)
        check_flag("learnable_eps", learnable_eps)
        super().__init__()
        self.num_channels = num_channels
        self.eps = eps

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.weight = parameter(num_channels)
        self.bias = parameter(num_channels)
        self.register_parameter("tau", parameter(num_channels) if tlu else None)
        self.register_parameter("learned_eps", parameter() if learnable_eps else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
        if self.tau is not None:
            nn.init.zeros_(self.tau)
        if self.learned_eps is not None:
            nn.init.constant_(self.learned_eps, 1e-4)

    def forward(self, x: Tensor) -> Tensor:
        check_input(x, self.num_channels, "FilterResponseNorm")
        eps = self.eps
        if self.learned_eps is not None:
            eps = eps + self.learned_eps.to(compute_dtype(self.learned_eps.dtype)).abs()
        return filter_response_norm(x, self.weight, self.bias, self.tau, eps=eps)

    def extra_repr(self) -> str:
        learnable = self.learned_eps is not None
        return f"{self.num_channels}, eps={self.eps}, tlu={self.tau is not None}, learnable_eps={learnable}"


@dataclass(frozen=True)
class FRN(NormSpec):
    """Filter response normalization; see `mn.nn.FilterResponseNorm`.

    With `tlu` it contains the activation, so no other follows. `learnable_eps` is for 1×1 maps.

    Example:
        >>> FRN()(8)
        FilterResponseNorm(8, eps=1e-06, tlu=True, learnable_eps=False)
    """

    layer = FilterResponseNorm
    eps: float = 1e-6
    tlu: bool = True
    learnable_eps: bool = False
