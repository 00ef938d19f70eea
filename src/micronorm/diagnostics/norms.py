"""Recognize normalization layers, and compute what each does to the moments of its input.

Known layers are torch's and their subclasses (timm's norms with activations, torchvision's LayerNorm2d), frozen batch
normalization by its class name, our own, and layers of registered specs with a method `normalized(x)`.
"""

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from micronorm.diagnostics.channels import channel_normalized, group_normalized
from micronorm.nn.batch import GhostBatchNorm
from micronorm.nn.bcn import BatchChannelNorm
from micronorm.nn.spec import SPECS, NormSpec
from micronorm.ops.bcn import batch_statistics
from micronorm.ops.moments import Moments, compute_dtype, moments, pool_micro_batches, spread_to_samples
from micronorm.ops.private_api import BatchNormBase, InstanceNormBase

Family = Literal["batch", "instance", "group", "layer", "batch-channel", "registered"]

_FROZEN = ("FrozenBatchNorm", "FrozenBatchNormAct")  # class names in torchvision, detectron2 and timm, followed by 2d


def refuse_compiled(model: nn.Module) -> None:
    """Raise ValueError if a module was compiled in place, by `.compile()`."""
    compiled = [name for name, module in model.named_modules() if module._compiled_call_impl is not None]
    if compiled:
        where = ", ".join(name or "the model" for name in compiled[:4])
        raise ValueError(f"compiled code does not run hooks, and {where} is compiled; pass the model uncompiled")


class NormLayer:
    """A normalization layer of any library.

    Args:
        module: the layer.
        family: the kind of normalization.
        channels: C.
        groups: channels of one group are normalized together; C for batch and instance normalization.
        channels_last: whether the channels lie along the last axis instead of axis 1.
    """

    def __init__(self, module: Any, family: Family, channels: int, groups: int, *, channels_last: bool = False) -> None:
        self.module = module
        self.family: Family = family
        self.channels = channels
        self.groups = groups
        self.eps = float(getattr(module, "eps", 1e-5))
        self.axis = -1 if channels_last else 1
        # Frozen batch normalization has a training flag, like every module, but ignores it.
        self.frozen = family == "batch" and not isinstance(module, BatchNormBase | GhostBatchNorm)

    @property
    def by_estimates(self) -> bool:
        """Return whether the layer now normalizes channels by its running estimates."""
        if self.family not in ("batch", "instance", "batch-channel") or self.module.running_mean is None:
            return False
        return not self.uses_batch

    @property
    def trained_by_estimates(self) -> bool:
        """Return whether the layer normalizes by its running estimates in training too."""
        return self.family == "batch-channel" and self.module.statistics != "batch"

    @property
    def uses_batch(self) -> bool:
        """Return whether the layer now normalizes channels by the moments of the batch."""
        if self.family == "batch-channel":
            return self.module.training and self.module.statistics == "batch"
        if self.family != "batch" or self.frozen:
            return False
        return self.module.running_mean is None or self.module.training

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters and, if the layer normalizes by them, the running estimates, by name."""
        names = ["weight", "bias", "group_weight", "group_bias"]
        if self.by_estimates:
            names = ["running_mean", "running_var", *names]
        held = {name: getattr(self.module, name, None) for name in names}
        return {name: tensor.detach() for name, tensor in held.items() if isinstance(tensor, Tensor)}

    def estimates(self) -> Moments:
        """Return the estimates of the last forward: C numbers each, or N×C for "sequential" layers in training mode.

        A "sequential" layer changes its estimates from sample to sample; its buffers hold the last ones.
        """
        module = self.module
        scans = isinstance(module, BatchChannelNorm) and module.statistics == "sequential" and module.training
        if scans and module.weight.requires_grad and not module._window.paused and module._window.scanned:
            return module._window.scanned[-1].estimates
        return Moments(module.running_mean, module.running_var)

    def channels_first(self, x: Tensor) -> Tensor:
        """Return an input or output as N×C×…."""
        return x.movedim(-1, 1) if self.axis == -1 and x.ndim > 2 else x

    def normalize(self, x: Tensor, data: Moments) -> tuple[Moments, Moments]:
        """Return the moments (N×C) of the values that are normalized together, and of the result without affine.

        The first are those of the input, or for BCN of the input after its channel half.

        Args:
            x: the input, N×C×….
            data: its moments, N×C.
        """
        if self.family == "group":
            return data, group_normalized(data, groups=self.groups, eps=self.eps)
        if self.family == "layer":
            return data, self._layer_normalized(x, data)
        if self.family == "registered":
            return data, moments(self.module.normalized(x))
        channel = channel_normalized(data, self._statistics(data), eps=self.eps)
        if self.family != "batch-channel":
            return data, channel
        blend = self.module.blend.to(data.mean.dtype)
        return channel, group_normalized(channel, groups=self.groups, eps=self.eps, blend=blend)

    def accepts(self, x: Any) -> bool:
        """Return whether x can be an input: the channels' axis of a layer norm is known by class name only."""
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim < 2 or x.numel() == 0:
            return False
        if self.family == "layer" and len(self.module.normalized_shape) > 1:
            return x.ndim == 1 + len(self.module.normalized_shape)
        return x.shape[self.axis] == self.channels

    def _layer_normalized(self, x: Tensor, data: Moments) -> Moments:
        if len(self.module.normalized_shape) > 1:  # over channels and space: one group
            return group_normalized(data, groups=1, eps=self.eps)
        # Each position is normalized separately, so the result does not follow from the moments over space.
        last = x.movedim(1, -1).to(compute_dtype(x.dtype))
        return moments(F.layer_norm(last, (self.channels,), eps=self.eps).movedim(-1, 1))

    def _statistics(self, data: Moments) -> Moments:
        """Return the statistics that normalize the channels: C numbers each, or N×C."""
        if self.by_estimates and not (self.family == "instance" and self.module.training):
            mean, var = self.estimates()
            return Moments(mean.to(data.mean.dtype), var.to(data.mean.dtype))
        if self.family == "instance":
            return data
        if isinstance(self.module, GhostBatchNorm):
            samples = data.mean.shape[0]
            size = self.module.micro_batch or samples
            parts = pool_micro_batches(data, micro_batch=size)
            return Moments(*(spread_to_samples(part, micro_batch=size, samples=samples) for part in parts))
        return batch_statistics(data)


def as_norm_layer(module: nn.Module) -> NormLayer | None:
    """Return the module as a `NormLayer`, or None if it is not a known normalization.

    Example:
        >>> norm = as_norm_layer(nn.GroupNorm(4, 16))
        >>> norm.family, norm.channels, norm.groups
        ('group', 16, 4)
        >>> as_norm_layer(nn.ReLU()) is None
        True
    """
    layer: Any = module
    if isinstance(module, BatchChannelNorm):
        return NormLayer(module, "batch-channel", module.num_channels, module.num_groups)
    if isinstance(module, GhostBatchNorm):
        return NormLayer(module, "batch", module.num_channels, module.num_channels)
    if isinstance(module, BatchNormBase | InstanceNormBase):
        if module.num_features == 0:  # a lazy layer before its first input
            return None
        family: Family = "batch" if isinstance(module, BatchNormBase) else "instance"
        return NormLayer(module, family, layer.num_features, layer.num_features)
    if isinstance(module, nn.GroupNorm):
        return NormLayer(module, "group", module.num_channels, module.num_groups)
    if isinstance(module, nn.LayerNorm):
        shape: Any = module.normalized_shape
        # LayerNorm2d of timm and torchvision, and its subclasses, take channels in axis 1.
        first = len(shape) > 1 or any("2d" in base.__name__ for base in type(module).__mro__)
        return NormLayer(module, "layer", shape[0], 1, channels_last=not first)
    if type(module).__name__.startswith(_FROZEN) and isinstance(getattr(module, "running_var", None), Tensor):
        channels = layer.running_var.numel()
        return NormLayer(module, "batch", channels, channels) if hasattr(module, "eps") else None
    registered = {spec.layer for spec in SPECS.values() if issubclass(spec, NormSpec)}
    if type(module) in registered and callable(getattr(module, "normalized", None)):
        groups = getattr(module, "num_groups", layer.num_channels)
        return NormLayer(module, "registered", layer.num_channels, groups)
    return None
