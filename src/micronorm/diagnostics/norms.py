"""Normalization layers of any library: what each does to the moments of its input, and statistics of its channels.

Known layers are torch's and their subclasses (timm's norms with activations, torchvision's LayerNorm2d), frozen batch
normalization by its class name, our own, and layers of registered specs with a method `normalized(x)`. Moments of
samples have shape N×C, as returned by `ops.moments.moments`. Statistics over all data have C numbers.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from micronorm.nn.batch import GhostBatchNorm
from micronorm.nn.bcn import BatchChannelNorm
from micronorm.nn.spec import SPECS, NormSpec
from micronorm.ops.bcn import batch_statistics
from micronorm.ops.moments import (
    Moments,
    compute_dtype,
    merge,
    moments,
    pool,
    pool_micro_batches,
    spread_to_samples,
    wide_dtype,
)
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


# --- statistics of channels ------------------------------------------------------------------------------------------

RARE = 0.01
"""A channel is rare if it is active in fewer than this share of its positions, but in some.

A channel with mean 0 and deviation 1, as after BN, is active in about half of its positions. At 1 % its mean lies 2.3
deviations below zero, and 99 of 100 positions give its weights no gradient.
"""


class NormMoments:
    """Moments of the values that one norm normalizes together, and of its result without affine, over all forwards.

    They do not depend on how the data was cut.

    Example:
        >>> sums = NormMoments(NormLayer(nn.GroupNorm(1, 2, eps=0.0), "group", 2, 1))
        >>> for x in (torch.zeros(1, 2, 4), torch.ones(3, 2, 4)):
        ...     sums.add_input(x, moments(x))
        >>> grouped, _ = sums.halves(sums.moments)
        >>> sums.count, grouped.mean.tolist(), grouped.var.tolist()
        (16, [0.75, 0.75], [0.1875, 0.1875])
    """

    moments: Moments  # 2·C numbers each, from the first `add_input` on

    def __init__(self, norm: NormLayer) -> None:
        self.norm = norm
        self.count = 0

    def add_input(self, x: Tensor, data: Moments) -> None:
        """Add one forward, given its input N×C×… and the moments of that (N×C)."""
        both = zip(*self.norm.normalize(x, data), strict=True)
        new = pool(Moments(*(torch.cat(part, 1) for part in both)), dim=0)
        before, count = self.count, x.numel() // x.shape[1]
        self.count += count
        self.moments = merge(self.moments, new, share=count / self.count) if before else new

    def halves(self, numbers: Sequence[Tensor]) -> list[Moments]:
        """Return the two moments, given all numbers on the host."""
        return [Moments(*half) for half in zip(*(t.split(self.norm.channels) for t in numbers), strict=True)]


# --- activity --------------------------------------------------------------------------------------------------------


def count_positive(y: Tensor, *, axis: int = 1) -> Tensor:
    """Return the number of elements above zero in each channel: C integers.

    Example:
        >>> count_positive(torch.tensor([[[1.0, 0.0], [2.0, 3.0]], [[-1.0, 0.0], [2.0, -3.0]]]))
        tensor([1, 3])
    """
    others = [d for d in range(y.ndim) if d != axis % y.ndim]
    return (y > 0).sum(others) if others else (y > 0).long()


def rare_channels(active: Tensor) -> Tensor:
    """Return which channels are active somewhere, but in a smaller share of positions than `RARE`."""
    return (active > 0) & (active < RARE)


# --- differences between channels ------------------------------------------------------------------------------------


def stat_diff(mean: Tensor, var: Tensor, groups: int) -> Tensor:
    """Return StatDiff of every group: the deviation of its channels' means over their mean deviation (label `eq:sd`).

    StatDiff is 0 after batch normalization, because all means are equal. For an example, let the channels of a group
    be normal with equal deviations, and let one mean lie a deviation of the means below their average. After
    normalization this channel is positive with probability Φ(−StatDiff): 16 % at 1, 2.3 % at 2, 0.1 % at 3.

    Args:
        mean: the means of the channels, C numbers.
        var: the variances of the channels, C numbers. The paper's σ_c is the root.
        groups: G, a divisor of C. Neighbouring channels form a group.

    Returns:
        G numbers in the widest dtype of the device. A group with equal means has 0. A group with different means and
        zero variances has infinity.

    Example:
        >>> stat_diff(torch.tensor([0.0, 4.0, 1.0, 1.0]), torch.tensor([1.0, 9.0, 1.0, 4.0]), groups=2)
        tensor([1., 0.], dtype=torch.float64)
    """
    wide = wide_dtype(mean.device)
    mean_gk, std_gk = mean.to(wide).reshape(groups, -1), var.to(wide).sqrt().reshape(groups, -1)
    # Subtract the first channel's mean, so that equal means differ by exactly 0.
    apart_gk = mean_gk - mean_gk[:, :1]
    spread_g = (apart_gk - apart_gk.mean(1, keepdim=True)).square().mean(1).sqrt()
    return torch.where(spread_g == 0, 0.0, spread_g / std_gk.mean(1))


def distance_to_bn(mean: Tensor, var: Tensor, *, eps: float = 1e-5) -> tuple[float, float]:
    """Return (σ_μ, σ_σ): the deviations, over channels, of the means and of the logarithms of the deviations.

    The two numbers are the axes of the paper's `fig:dist`, which draws log σ̂_c from a normal distribution. Batch
    normalization has (0, 0) (label `eq:bnes`).

    Args:
        mean: the means of the channels after normalization, without the affine transformation; C numbers.
        var: their variances, C numbers.
        eps: the normalization's. Deviations below √eps count as √eps, because a constant channel has log 0.

    Example:
        >>> distance_to_bn(torch.zeros(3), torch.ones(3))
        (0.0, 0.0)
        >>> distance_to_bn(torch.tensor([-2.0, 2.0]), torch.tensor([1.0, 1.0]))
        (2.0, 0.0)
    """
    wide = wide_dtype(mean.device)
    log_std = var.to(wide).clamp(min=max(eps, torch.finfo(wide).tiny)).log() / 2
    return float(mean.to(wide).std(correction=0)), float(log_std.std(correction=0))


# --- normalization of moments ----------------------------------------------------------------------------------------


def channel_normalized(data: Moments, statistics: Moments, *, eps: float) -> Moments:
    """Return the moments of (x − μ_c)/sqrt(σ²_c + eps), given those of x (N×C) and statistics of N×C, 1×C or C numbers.

    Example:
        >>> data = Moments(torch.tensor([[3.0]]), torch.tensor([[4.0]]))
        >>> channel_normalized(data, Moments(torch.tensor([1.0]), torch.tensor([4.0])), eps=0.0)
        Moments(mean=tensor([[1.]]), var=tensor([[1.]]))
    """
    inv = (statistics.var.to(data.var.dtype) + eps).rsqrt()
    return Moments((data.mean - statistics.mean) * inv, data.var * inv.square())


def group_normalized(data: Moments, *, groups: int, eps: float, blend: Tensor | float = 1.0) -> Moments:
    """Return the moments (N×C) of a sample's channels after group normalization without its affine transformation.

    The variance of a group is the mean of its channels' variances plus the variance of their means.

    Args:
        data: the moments of the samples' channels, N×C.
        groups: G, a divisor of C.
        eps: added to the variance, inside the root.
        blend: α. Below 1 the normalization is mixed with the identity, as in `BatchChannelNorm.warm`.

    Example:
        >>> group_normalized(Moments(torch.tensor([[-3.0, 3.0]]), torch.zeros(1, 2)), groups=1, eps=0.0).mean
        tensor([[-1.,  1.]])
    """
    mean_ngk, var_ngk = (part.unflatten(1, (groups, -1)) for part in data)
    apart_ngk = mean_ngk - mean_ngk.mean(-1, keepdim=True)
    inv_ng = ((var_ngk + apart_ngk.square()).mean(-1, keepdim=True) + eps).rsqrt()
    alpha = blend.to(mean_ngk) if isinstance(blend, Tensor) else blend  # a Python number does not wait for the device
    gain_ng = torch.lerp(torch.ones_like(inv_ng), inv_ng, alpha)
    return Moments(torch.lerp(mean_ngk, apart_ngk * inv_ng, alpha).flatten(1), (var_ngk * gain_ng.square()).flatten(1))
