"""Switchable normalization (Luo et al. 2019)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from micronorm.nn.fingerprint import Fingerprinted
from micronorm.nn.inputs import check_input, check_micro_batch
from micronorm.nn.running import RunningNorm
from micronorm.nn.spec import NormSpec
from micronorm.ops.switchable import switchable_norm, switchable_norm_inference


class SwitchableNorm(Fingerprinted, RunningNorm):
    """Normalize by a learned mixture of instance, layer and batch moments; x is N×C×….

    y = γ (x − μ)/sqrt(σ² + eps) + β with μ = Σ_k softmax(mean_weight)_k μ_k and σ² = Σ_k softmax(var_weight)_k σ²_k
    over k in (instance, layer, batch). The batch moments are those of micro-batches of `micro_batch` samples, or of the
    whole batch (None). Evaluation uses their moving averages, with the biased variance. `momentum` is the share of the
    new batch, as in torch.

    Example:
        >>> norm = SwitchableNorm(8)
        >>> norm(torch.randn(2, 8, 4, 4)).shape
        torch.Size([2, 8, 4, 4])
        >>> norm.mean_weight.softmax(0).shape
        torch.Size([3])
    """

    function = ("SN", "eps")

    def __init__(
        self,
        num_channels: int,
        *,
        micro_batch: int | None = None,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_micro_batch(micro_batch)
        super().__init__(num_channels, eps=eps, momentum=momentum, device=device, dtype=dtype)
        self.micro_batch = micro_batch
        self.mean_weight = nn.Parameter(torch.empty(3, device=device, dtype=dtype))
        self.var_weight = nn.Parameter(torch.empty(3, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.ones_(self.mean_weight)
        nn.init.ones_(self.var_weight)

    def forward(self, x: Tensor) -> Tensor:
        check_input(x, self.num_channels, "SwitchableNorm")
        parameters = (self.weight, self.bias, self.mean_weight, self.var_weight)
        if not self.training:
            return switchable_norm_inference(x, *parameters, self.running(), eps=self.eps)
        y, new = switchable_norm(
            x, *parameters, self.running(), micro_batch=self.micro_batch, momentum=self.momentum, eps=self.eps
        )
        self.move(new)
        return y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, micro_batch={self.micro_batch}"


@dataclass(frozen=True)
class SN(NormSpec):
    """Switchable normalization; see `mn.nn.SwitchableNorm`.

    `micro_batch` samples share the batch moments. With None the whole batch does, and a step depends on the cut.

    Example:
        >>> SN(micro_batch=2)(8)
        SwitchableNorm(8, eps=1e-05, momentum=0.1, micro_batch=2)
    """

    layer = SwitchableNorm
    micro_batch: int | None = None
    eps: float = 1e-5
    momentum: float | None = 0.1
