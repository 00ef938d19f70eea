"""Batch normalization: the spec of torch's layers, and a layer that treats a batch as successive micro-batches."""

from dataclasses import dataclass

from torch import Tensor, nn

from micronorm.nn.backends import resolve_backend
from micronorm.nn.inputs import check_eps, check_micro_batch, check_momentum
from micronorm.nn.running import RunningNorm
from micronorm.nn.spec import NormSpec
from micronorm.ops.batch import Running, batch_norm


class GhostBatchNorm(RunningNorm):
    """Batch normalization over small micro-batches, computed for all of them at once.

    In training the N samples of x (N×C×…) stand for ⌈N/m⌉ successive forwards of m = `micro_batch` samples. The last
    may have fewer. y = γ (x − μ_t)/sqrt(σ²_t + eps) + β with the moments of micro-batch t. Output, gradients, running
    statistics, num_batches_tracked and state-dict keys are those of nn.BatchNorm2d called on each micro-batch in turn.
    A single element per channel, for which torch raises an error, has variance 0. Evaluation is that of BatchNorm2d. On
    CUDA devices kernels compute the training forwards of channels_last inputs if m divides N.

    Args:
        num_channels: C.
        micro_batch: m; None for all samples of a forward.
        eps: added to the variance, inside the root.
        momentum: the share of the new batch in the running statistics; None for the average of all batches.
        device: as in torch.nn.
        dtype: as in torch.nn.

    Example:
        >>> import torch
        >>> norm = GhostBatchNorm(8, micro_batch=2)
        >>> norm(torch.randn(5, 8, 4, 4)).shape
        torch.Size([5, 8, 4, 4])
        >>> norm.num_batches_tracked
        tensor(3)
    """

    def compute(self, x: Tensor) -> tuple[Tensor, Running]:
        fused = x.numel() != 0 and resolve_backend("auto", x) == "triton"
        return batch_norm(x, self.weight, self.bias, self.running(), fused=fused, **self.options())


TORCH_LAYERS: dict[int, type[nn.Module]] = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
"""torch's layer for inputs with so many spatial dimensions."""


@dataclass(frozen=True)
class BN(NormSpec):
    """Batch normalization: torch's own layer, or with `micro_batch` the GhostBatchNorm of that many samples.

    Args:
        micro_batch: the number of samples that share their moments; None for all samples of a forward.
        eps: added to the variance, inside the root.
        momentum: the share of the new batch in the running statistics; None for the average of all batches.

    Example:
        >>> type(BN()(8)).__name__
        'BatchNorm2d'
        >>> BN(micro_batch=2)(8)
        GhostBatchNorm(8, eps=1e-05, momentum=0.1, micro_batch=2)
    """

    micro_batch: int | None = None
    eps: float = 1e-5
    momentum: float | None = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_micro_batch(self.micro_batch)
        check_eps(self.eps)
        check_momentum(self.momentum)

    def __call__(self, num_channels: int, *, dims: int = 2) -> nn.Module:
        """Return nn.BatchNorm1d (`dims` 0 or 1), 2d or 3d; with `micro_batch` a GhostBatchNorm for any rank."""
        if dims not in TORCH_LAYERS:
            raise ValueError(f"BN needs 0 to 3 spatial dimensions, got dims={dims}")
        if self.micro_batch is None:
            return TORCH_LAYERS[dims](num_channels, eps=self.eps, momentum=self.momentum)
        return GhostBatchNorm(num_channels, micro_batch=self.micro_batch, eps=self.eps, momentum=self.momentum)
