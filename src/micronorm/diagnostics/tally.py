"""What is gathered of the layers during one optimizer step, on their devices, and read from there in one transfer.

Everything adds up over micro-batches by counts, so it does not depend on how the step was cut into them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from micronorm.diagnostics.capture import Captured
from micronorm.diagnostics.channels import (
    RunningMoments,
    dead_channels,
    distance_to_bn,
    positives,
    rare_channels,
)
from micronorm.diagnostics.lipschitz import Shares, weight_shares
from micronorm.diagnostics.norms import NormLayer
from micronorm.diagnostics.statdiff import stat_diff
from micronorm.ops.bcn import batch_channel_norm
from micronorm.ops.moments import Moments, compute_dtype, moments, wide_dtype

_SAMPLE = 1024  # weights of a layer that a histogram is drawn from

Figures = dict[str, Any]


class NormTally:
    """The inputs, normalized channels and positive outputs of one norm layer."""

    def __init__(self, norm: NormLayer) -> None:
        self.norm = norm
        self._input, self._grouped, self._normalized = RunningMoments(), RunningMoments(), RunningMoments()
        self._positive: Tensor | None = None
        self._outputs = 0  # per channel

    @property
    def is_empty(self) -> bool:
        """Whether nothing was seen."""
        return self._input.count == 0

    def add(self, x: Tensor, output: Tensor, *, alone: bool) -> None:
        """Take up one forward; `alone` says that nothing was added to the output within it."""
        x = self.norm.channels_first(x)
        data = moments(x)
        passage = self.norm.pass_through(x, data)
        positions = x.numel() // data.mean.numel()
        self._input.add(data, positions=positions)
        if passage.grouped is not data:
            self._grouped.add(passage.grouped, positions=positions)
        self._normalized.add(passage.normalized, positions=positions)
        y = self.norm.channels_first(output) if alone else _own_output(self.norm, x, data)
        if y is not None and y.shape == x.shape:
            positive = positives(y)
            self._positive = positive if self._positive is None else self._positive + positive
            self._outputs += data.mean.shape[0] * positions

    def numbers(self) -> list[Tensor]:
        """What `figures` needs, on the device."""
        # Of Batch-Channel Normalization what is normalized together is no longer the input.
        grouped = self._grouped if self._grouped.count else self._input
        found = [self._input.moments.mean, *grouped.moments, *self._normalized.moments]
        return found if self._positive is None else [*found, self._positive]

    def figures(self, numbers: Sequence[Tensor]) -> Figures:
        """The row of kind "norm" of `micronorm.records`, from the numbers on the host."""
        _, mean, var, normalized_mean, normalized_var = numbers[:5]
        difference = stat_diff(mean, var, self.norm.groups)
        distance = distance_to_bn(normalized_mean, normalized_var, eps=self.norm.eps)
        row: Figures = {
            "kind": "norm",
            "norm": type(self.norm.module).__name__,
            "channels": len(mean),
            "groups": self.norm.groups,
            "stat_diff": float(difference.mean()),
            "stat_diff_worst": float(difference.max()),
            "sigma_mean": distance.sigma_mean,
            "sigma_std": distance.sigma_std,
        }
        if len(numbers) > 5:
            rate = numbers[5] / self._outputs
            row |= {
                "active": float(rate.mean()),
                "dead": int(dead_channels(rate).sum()),
                "rare": int(rare_channels(rate).sum()),
            }
        return row


def _own_output(norm: NormLayer, x: Tensor, data: Moments) -> Tensor | None:
    """What the norm gives by itself, where its forward was asked to add something; computed without a trace."""
    layer = norm.module
    if norm.family == "group":
        return torch.group_norm(x, layer.num_groups, layer.weight, layer.bias, layer.eps)
    if norm.family != "batch-channel":
        return None
    estimates = None if norm.uses_batch else Moments(layer.running_mean, layer.running_var)
    affine = (layer.weight, layer.bias, layer.group_weight, layer.group_bias)
    options: dict[str, Any] = {"groups": layer.num_groups, "eps": layer.eps, "blend": layer.blend}
    return batch_channel_norm(x, estimates, *affine, **options, data=data)


class WeightTally:
    """The gradient of the weight that a layer computes with, where that is not the gradient of its parameter."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._kept: dict[int, tuple[Tensor, Any]] = {}

    def watch(self, weight: Tensor) -> None:
        """See the gradient of an effective weight, when it comes."""
        if torch.compiler.is_compiling() or not weight.requires_grad or id(weight) in self._kept:
            return
        handle = weight.register_hook(self._add)
        if weight.is_leaf:  # a weight that micro-batches share lives on, and would show every gradient again
            self._kept[id(weight)] = weight, handle

    def _add(self, grad: Tensor) -> None:
        # A copy: the tensor may become .grad itself, and be added to by the next backward pass.
        wide = grad.detach().to(compute_dtype(grad.dtype), copy=self._sum is None)
        self._sum = wide if self._sum is None else self._sum.add_(wide)

    def clear(self) -> None:
        """Forget the gradients."""
        self._sum = None

    def close(self) -> None:
        """See no more of them."""
        for _, handle in self._kept.values():
            handle.remove()
        self._kept.clear()

    def gradient(self) -> Tensor | None:
        """The sum; None where none came."""
        return self._sum


class WeightNumbers:
    """The shares and norms of all weights that have a gradient, as they are before the optimizer moves them."""

    def __init__(
        self, model: nn.Module, layers: Mapping[str, Any], tallies: Mapping[str, WeightTally], *, samples: bool
    ) -> None:
        captured = {}
        for name, layer in layers.items():
            effective = tallies[name].gradient() if name in tallies else layer.weight.grad
            if effective is not None and layer.weight.grad is not None:
                captured[name] = Captured(effective)
        self.shares: dict[str, Shares] = {}
        if captured:
            self.shares = weight_shares(model, captured, filter=lambda _, name: name in captured)
        weights = [layers[name].weight for name in self.shares]
        self._grads: Sequence[Tensor] = torch._foreach_norm([weight.grad for weight in weights]) if weights else ()
        self._samples = [_sample(weight) if samples else weight.new_empty(0) for weight in weights]

    def numbers(self, scale: Tensor | None) -> dict[str, list[Tensor]]:
        """What `figures` needs, on the device. `scale` is what gradients are multiplied by."""
        found = {}
        for (name, shares), grad, sample in zip(self.shares.items(), self._grads, self._samples, strict=True):
            grad = grad if scale is None else grad / scale.to(grad.device)
            found[name] = [*(getattr(shares, field) for field in _tensors(shares)), grad, sample]
        return found

    def figures(self, name: str, numbers: Sequence[Tensor]) -> Figures:
        """The row of kind "weight" of `micronorm.records`, from the numbers on the host."""
        *values, grad, _ = numbers
        shares = self.shares[name]
        on_host: dict[str, Any] = dict(zip(_tensors(shares), values, strict=True))
        # The gradient's own norm: what was seen of the effective weight may carry a loss scale, or be a sum.
        return replace(shares, **on_host).figures() | {"grad": float(grad)}


def _tensors(shares: Shares) -> list[str]:
    return [field.name for field in fields(shares) if isinstance(getattr(shares, field.name), Tensor)]


def _sample(weight: Tensor) -> Tensor:
    """Up to `_SAMPLE` numbers at equal distances in memory; a copy, since the optimizer is about to move them."""
    flat = weight.detach()
    if not flat.is_contiguous():  # any dense layout holds the same numbers; a view of them costs nothing
        flat = flat.permute(sorted(range(flat.ndim), key=flat.stride, reverse=True))
    flat = flat.reshape(-1)
    return flat[:: -(-flat.numel() // _SAMPLE)].clone()


def to_host(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors in float64 on the CPU, by one transfer per device."""
    tensors = list(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(i)
    found: dict[int, Tensor] = {}
    for device, places in by_device.items():
        parts = [tensors[i] for i in places]
        flat = torch.cat([part.reshape(-1).to(wide_dtype(device)) for part in parts]).to("cpu", torch.float64)
        sizes = [part.numel() for part in parts]
        for i, part, values in zip(places, parts, flat.split(sizes), strict=True):
            found[i] = values.reshape(part.shape)
    return [found[i] for i in range(len(tensors))]
