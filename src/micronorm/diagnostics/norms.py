"""Which layers normalize, and what normalization does to the moments of their input.

Torch's layers and whatever descends from them (timm's norms with activations, torchvision's LayerNorm2d), frozen batch
normalization by its name, and our own.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from micronorm.diagnostics.channels import channel_normalized, group_normalized
from micronorm.nn.batch import GhostBatchNorm
from micronorm.nn.bcn import BatchChannelNorm
from micronorm.ops.bcn import batch_statistics
from micronorm.ops.moments import Moments, compute_dtype, moments, pool_micro_batches, spread_to_samples

Family = Literal["batch", "instance", "group", "layer", "batch-channel"]

_FROZEN = ("FrozenBatchNorm", "FrozenBatchNormAct")  # of torchvision, detectron2 and timm, with 2d behind


@dataclass(frozen=True)
class Passage:
    """One call of a norm, as moments of samples and channels (N×C).

    `grouped` is what is normalized together: the input, for Batch-Channel Normalization the input after its channel
    half. `normalized` is the result. Both are without any affine transformation.
    """

    grouped: Moments
    normalized: Moments


class NormLayer:
    """A normalization layer, whoever wrote it."""

    def __init__(self, module: Any, family: Family, channels: int, groups: int, *, channels_last: bool = False) -> None:
        self.module = module
        self.family: Family = family
        self.channels = channels
        self.groups = groups
        """Channels of one group are normalized together; a group per channel for batch and instance normalization."""
        self.eps = float(module.eps)
        self.axis = -1 if channels_last else 1
        """That of the channels in the input and the output."""
        # Frozen batch normalization has a training flag as every module does, and no use for it.
        self.frozen = family == "batch" and not isinstance(module, _BatchNorm | GhostBatchNorm)

    @property
    def by_estimates(self) -> bool:
        """Whether its channels are normalized by statistics it keeps, not by those of what it sees."""
        if self.family not in ("batch", "instance", "batch-channel") or self.module.running_mean is None:
            return False
        return not self.uses_batch

    @property
    def uses_batch(self) -> bool:
        """Whether, as it stands now, its channels are normalized by the moments of the batch."""
        if self.family == "batch-channel":
            return self.module.training and self.module.statistics == "batch"
        if self.family != "batch" or self.frozen:
            return False
        return self.module.running_mean is None or self.module.training

    def numbers(self) -> dict[str, Tensor]:
        """The parameters it computes with, and the estimates where it normalizes by them, by name."""
        names = ["weight", "bias", "group_weight", "group_bias"]
        if self.by_estimates:
            names = ["running_mean", "running_var", *names]
        held = {name: getattr(self.module, name, None) for name in names}
        return {name: tensor.detach() for name, tensor in held.items() if isinstance(tensor, Tensor)}

    def estimates(self) -> Moments:
        """The estimates that its last forward normalized with: C numbers each, N×C for "sequential" layers in training.

        Those move their estimates from sample to sample, and what stands in the buffers afterwards is the last.
        """
        module = self.module
        scans = isinstance(module, BatchChannelNorm) and module.statistics == "sequential" and module.training
        if scans and module.weight.requires_grad and not module._window.paused and module._window.scanned:
            return module._window.scanned[-1].estimates
        return Moments(module.running_mean, module.running_var)

    def channels_first(self, x: Tensor) -> Tensor:
        """An input or output as N×C×…."""
        return x.movedim(-1, 1) if self.axis == -1 and x.ndim > 2 else x

    def pass_through(self, x: Tensor, data: Moments) -> Passage:
        """What the layer does to an input, N×C×…, whose moments are known."""
        if self.family == "group":
            return Passage(data, group_normalized(data, groups=self.groups, eps=self.eps))
        if self.family == "layer":
            return Passage(data, self._layer_normalized(x, data))
        channel = channel_normalized(data, self._statistics(data), eps=self.eps)
        if self.family != "batch-channel":
            return Passage(data, channel)
        blend = self.module.blend.to(data.mean.dtype)
        return Passage(channel, group_normalized(channel, groups=self.groups, eps=self.eps, blend=blend))

    def _layer_normalized(self, x: Tensor, data: Moments) -> Moments:
        if len(self.module.normalized_shape) > 1:  # over channels and space: one group
            return group_normalized(data, groups=1, eps=self.eps)
        # Each position by itself: no function of the moments over space.
        last = x.movedim(1, -1).to(compute_dtype(x.dtype))
        return moments(F.layer_norm(last, (self.channels,), eps=self.eps).movedim(-1, 1))

    def _statistics(self, data: Moments) -> Moments:
        """What the channels are normalized with: C numbers each, or N×C."""
        if self.by_estimates and not (self.family == "instance" and self.module.training):
            mean, var = self.estimates()
            return Moments(mean.to(data.mean.dtype), var.to(data.mean.dtype))
        if self.family == "instance":
            return data
        if isinstance(self.module, GhostBatchNorm):
            size = self.module.micro_batch
            parts = pool_micro_batches(data, micro_batch=size)
            samples = data.mean.shape[0]
            return Moments(*(spread_to_samples(part, micro_batch=size, samples=samples) for part in parts))
        return batch_statistics(data)


def read_norm(module: nn.Module) -> NormLayer | None:
    """The layer as a `NormLayer`; None where it is no normalization, or one that is not known.

    Example:
        >>> norm = read_norm(nn.GroupNorm(4, 16))
        >>> norm.family, norm.channels, norm.groups
        ('group', 16, 4)
        >>> read_norm(nn.ReLU()) is None
        True
    """
    layer: Any = module
    if isinstance(module, BatchChannelNorm):
        return NormLayer(module, "batch-channel", module.num_channels, module.num_groups)
    if isinstance(module, GhostBatchNorm):
        return NormLayer(module, "batch", module.num_channels, module.num_channels)
    if isinstance(module, _BatchNorm | _InstanceNorm):
        if module.num_features == 0:  # lazy, and has seen nothing yet
            return None
        family: Family = "batch" if isinstance(module, _BatchNorm) else "instance"
        return NormLayer(module, family, module.num_features, module.num_features)
    if isinstance(module, nn.GroupNorm):
        return NormLayer(module, "group", module.num_channels, module.num_groups)
    if isinstance(module, nn.LayerNorm):
        return _layer_norm(module)
    if type(module).__name__.startswith(_FROZEN) and isinstance(getattr(module, "running_var", None), Tensor):
        channels = layer.running_var.numel()
        return NormLayer(module, "batch", channels, channels) if hasattr(module, "eps") else None
    return None


def _layer_norm(module: nn.LayerNorm) -> NormLayer:
    shape: Any = module.normalized_shape
    # timm's and torchvision's LayerNorm2d, and what timm builds from it, move the channels themselves.
    first = len(shape) > 1 or any("2d" in base.__name__ for base in type(module).__mro__)
    return NormLayer(module, "layer", shape[0], 1, channels_last=not first)


def fits(norm: NormLayer, x: Any) -> bool:
    """Whether an input is of the shape the layer was read for; those of layer norms are known only by their names."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2 or x.numel() == 0:
        return False
    if norm.family == "layer" and len(norm.module.normalized_shape) > 1:
        return x.ndim == 1 + len(norm.module.normalized_shape)
    return x.shape[norm.axis] == norm.channels
