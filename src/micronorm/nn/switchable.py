"""Switchable normalization (Luo et al. 2019)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.nn.fingerprint import Fingerprinted
from micronorm.nn.running import RunningNorm
from micronorm.nn.spec import NormSpec
from micronorm.ops.batch import Running
from micronorm.ops.switchable import switchable_norm


class SwitchableNorm(Fingerprinted, RunningNorm):
    """Normalize by a learned mixture of instance, layer and batch moments; x is N×C×….

    y = γ (x − μ)/sqrt(σ² + eps) + β with μ = Σ_k softmax(mean_weight)_k μ_k and σ² = Σ_k softmax(var_weight)_k σ²_k
    over k in (instance, layer, batch). The batch moments are those of micro-batches of `micro_batch` samples, or of the
    whole batch (None). Evaluation uses their moving averages, with the biased variance.

    Args:
        num_channels: C.
        options: `micro_batch`, `eps`, `momentum`, `device` and `dtype` of `GhostBatchNorm`.

    Example:
        >>> norm = SwitchableNorm(8)
        >>> norm(torch.randn(2, 8, 4, 4)).shape
        torch.Size([2, 8, 4, 4])
        >>> norm.mean_weight.softmax(0).shape
        torch.Size([3])
    """

    function = ("SN", "eps")

    def __init__(self, num_channels: int, **options: Any) -> None:
        super().__init__(num_channels, **options)
        self.mean_weight = nn.Parameter(torch.ones(3, device=self.weight.device, dtype=self.weight.dtype))
        self.var_weight = nn.Parameter(torch.ones(3, device=self.weight.device, dtype=self.weight.dtype))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for name in ("mean_weight", "var_weight"):
            if hasattr(self, name):  # the base class calls this before they exist
                nn.init.ones_(getattr(self, name))

    def compute(self, x: Tensor) -> tuple[Tensor, Running]:
        parameters = (self.weight, self.bias, self.mean_weight, self.var_weight)
        return switchable_norm(x, *parameters, self.running(), **self.options())


@dataclass(frozen=True)
class SN(NormSpec):
    """Switchable normalization; see `mn.nn.SwitchableNorm`.

    Args:
        micro_batch: the number of samples that share the batch moments. With None the whole batch does, and a step
            depends on the cut.
        eps: added to the variance, inside the root.
        momentum: the share of the new batch in the running statistics; None for the average of all batches.

    Example:
        >>> SN(micro_batch=2)(8)
        SwitchableNorm(8, eps=1e-05, momentum=0.1, micro_batch=2)
    """

    layer = SwitchableNorm
    micro_batch: int | None = None
    eps: float = 1e-5
    momentum: float | None = 0.1
