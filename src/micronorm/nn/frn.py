"""Filter response normalization (Singh & Krishnan 2020)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from micronorm.nn.inputs import check_count, check_eps, check_flag, check_input
from micronorm.nn.spec import NormSpec
from micronorm.ops.frn import filter_response_norm
from micronorm.ops.moments import compute_dtype


class FilterResponseNorm(nn.Module):
    """Each channel of each sample divided by its root mean square, then a learned threshold; N×C×….

    y = γ x/sqrt(ν² + |ε|) + β with ν²_nc = mean over space of x²; with `tlu` max(y, τ), which takes the place of the
    activation. On 1×1 maps x/sqrt(x² + ε) is nearly a sign: there the authors learn ε, `learnable_eps`, as
    ε = eps + |learned_eps|, one number per layer that starts at 1e-4.

    Example:
        >>> FilterResponseNorm(8)(torch.randn(2, 8, 4, 4)).min() >= 0
        tensor(True)
    """

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
        """Weight 1, bias and threshold 0, learned eps 1e-4."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)
        if self.tau is not None:
            nn.init.zeros_(self.tau)
        if self.learned_eps is not None:
            nn.init.constant_(self.learned_eps, 1e-4)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x, N×C×…; the output has its shape and dtype."""
        check_input(x, self.num_channels, "FilterResponseNorm")
        eps = self.eps
        if self.learned_eps is not None:
            eps = eps + self.learned_eps.to(compute_dtype(self.learned_eps.dtype)).abs()
        return filter_response_norm(x, self.weight, self.bias, self.tau, eps=eps)

    def extra_repr(self) -> str:
        """The arguments, for print(module)."""
        learnable = self.learned_eps is not None
        return f"{self.num_channels}, eps={self.eps}, tlu={self.tau is not None}, learnable_eps={learnable}"


@dataclass(frozen=True)
class FRN(NormSpec):
    """Filter response normalization; see `mn.nn.FilterResponseNorm`.

    With `tlu` it holds its own activation, so none follows; `learnable_eps` is for maps of 1×1.

    Example:
        >>> FRN()(8)
        FilterResponseNorm(8, eps=1e-06, tlu=True, learnable_eps=False)
    """

    eps: float = 1e-6
    tlu: bool = True
    learnable_eps: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_eps(self.eps)
        check_flag("tlu", self.tlu)
        check_flag("learnable_eps", self.learnable_eps)

    def __call__(self, num_channels: int, *, dims: int = 2) -> FilterResponseNorm:
        """A FilterResponseNorm, which takes any rank."""
        return FilterResponseNorm(num_channels, eps=self.eps, tlu=self.tlu, learnable_eps=self.learnable_eps)
