"""Filter response normalization (Singh & Krishnan 2020)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from micronorm.nn.fingerprint import Fingerprinted
from micronorm.nn.inputs import check_count, check_eps, check_flag, check_input
from micronorm.nn.spec import NormSpec
from micronorm.ops.frn import filter_response_norm


class FilterResponseNorm(Fingerprinted, nn.Module):
    """Divide each channel of each sample by its root mean square, then apply a learned threshold; x is N×C×….

    y = γ x/sqrt(ν² + ε) + β with ν²_nc = mean over space of x². With `tlu` the output is max(y, τ), which replaces
    the activation. On 1×1 maps x/sqrt(x² + ε) is nearly a sign.

    Example:
        >>> FilterResponseNorm(8)(torch.randn(2, 8, 4, 4)).min() >= 0
        tensor(True)
    """

    function = ("FRN", "eps")

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
        check_count("num_channels", num_channels)
        check_eps(eps)
        check_flag("tlu", tlu)
        super().__init__()
        self.num_channels = num_channels
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(num_channels, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_channels, device=device, dtype=dtype))
        self.tau = nn.Parameter(torch.empty(num_channels, device=device, dtype=dtype)) if tlu else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
        if self.tau is not None:
            nn.init.zeros_(self.tau)

    def forward(self, x: Tensor) -> Tensor:
        check_input(x, self.num_channels, "FilterResponseNorm")
        return filter_response_norm(x, self.weight, self.bias, self.tau, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_channels}, eps={self.eps}, tlu={self.tau is not None}"


@dataclass(frozen=True)
class FRN(NormSpec):
    """Filter response normalization; see `mn.nn.FilterResponseNorm`.

    With `tlu` it contains the activation, so no other follows.

    Example:
        >>> FRN()(8)
        FilterResponseNorm(8, eps=1e-06, tlu=True)
    """

    layer = FilterResponseNorm
    eps: float = 1e-6
    tlu: bool = True
