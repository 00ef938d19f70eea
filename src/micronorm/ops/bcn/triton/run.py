"""Forward and backward by the kernels: tensors in, tensors out. Importing this imports triton.

A small layer takes less time on the device than Python takes to describe it. So every call is described once, by a key
of plain attributes, and what was worked out for it (strides, tiles, compiled kernels) is kept under that key.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from micronorm.ops.activation import IDENTITY, Activation
from micronorm.ops.bcn.triton.launch import INTERPRETED
from micronorm.ops.bcn.triton.layout import Strides, laid_out, numbers_size, output_like, strides_of
from micronorm.ops.bcn.triton.plans import Backward, Forward, Layer, gather_plan

__all__ = ["INTERPRETED", "Gradients", "Norm", "backward", "forward", "gather", "moments", "recompute"]

Estimates = Literal["none", "shared", "per sample", "kept"]

_MOST_KEPT = 4096  # descriptions; sizes that never come again must not fill the memory


class Norm(NamedTuple):
    """A normalization without its input.

    The estimates hold C numbers each ("shared"), or N×C ("per sample"); "kept" ones lie in the forward's numbers, and
    with "none" it is a group normalization. γ^b, β^b (C) and the blend (one where it is None) belong to the
    estimates; γ^c, β^c hold G numbers with them and C without.
    """

    estimates: Estimates
    mean: Tensor | None
    var: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    group_weight: Tensor | None
    group_bias: Tensor | None
    blend: Tensor | None
    groups: int
    eps: float
    activation: Activation

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All that kernels may read of it."""
        return self[1:8]

    @property
    def key(self) -> tuple[Any, ...]:
        """What launches depend on."""
        dtypes = tuple([None if t is None else t.dtype for t in self[1:8]])
        return self.estimates, self.groups, self.eps, self.activation, dtypes, *self.devices

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Of an estimate and a parameter, to stand for all: kernels that are ready are called by bare addresses."""
        mean, gamma = self.mean, self.group_weight
        return (() if mean is None else (mean.device,)) + (() if gamma is None else (gamma.device,))


def _bare(activation: Activation) -> Norm:
    """For launches that do none of the N×C arithmetic."""
    return Norm("none", None, None, None, None, None, None, None, 1, 0.0, activation)


def _layer(x: Tensor, strides: Strides, norm: Norm) -> Layer:
    samples, channels = x.shape[:2]
    estimates, groups, eps, activation, dtypes, *devices = norm.key
    apart = next((device for device in devices if device != x.device), None)
    if apart is not None:
        raise ValueError(f"a norm's parameters and estimates must be where its input is, on {x.device}, got {apart}")
    after = "none" if norm.group_weight is None else "per channel"
    return Layer(
        samples,
        channels,
        x.numel() // (samples * channels),
        strides,
        x.dtype,
        x.device,
        groups,
        eps,
        activation,
        estimates,
        after if estimates == "none" else "per group",
        dtypes,
    )


def _pointers(norm: Norm, filler: Tensor) -> list[Tensor]:
    """What kernels are given of a normalization; the filler stands for what it has not and they do not read."""
    # Their numbers lie side by side: a parameter may be a column of somebody's matrix, or one number for all channels.
    return [filler if t is None else t if t.is_contiguous() else t.contiguous() for t in norm[1:8]]


# --- descriptions that are kept --------------------------------------------------------------------------------------

_forwards: dict[Any, Forward] = {}
_backwards: dict[Any, Backward] = {}


def _kept(plans: dict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    plan = plans.get(key)
    if plan is None:
        if len(plans) >= _MOST_KEPT:
            plans.clear()
        plan = plans[key] = make()
    return plan


def _key(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device


def _forward_plan(x: Tensor, residual: Tensor | None, norm: Norm) -> Forward:
    def make() -> Forward:
        strides, output = strides_of(x), strides_of(output_like(x))
        other = None if residual is None else strides_of(residual)
        assert strides is not None
        assert output is not None
        return Forward(_layer(x, strides, norm), other, output)

    return _kept(_forwards, (_key(x), None if residual is None else _key(residual), norm.key), make)


def _backward_plan(x: Tensor, grad: Tensor, y: Tensor | None, norm: Norm, *, split: bool) -> Backward:
    def make() -> Backward:
        strides, slope, output = strides_of(x), strides_of(grad), strides_of(output_like(x))
        gate = None if y is None else strides_of(y)
        assert strides is not None
        assert slope is not None
        assert output is not None
        return Backward(_layer(x, strides, norm), slope, gate, output, split=split)

    return _kept(_backwards, (_key(x), _key(grad), None if y is None else _key(y), norm.key, split), make)


def _on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Triton launches on the current device, whatever the tensors say."""

    def called(x: Tensor, *args: Any, **options: Any) -> Any:
        if x.is_cuda and x.device.index != torch.cuda.current_device():
            with torch.cuda.device(x.device):
                return function(x, *args, **options)
        return function(x, *args, **options)

    return called


# --- what the room is for --------------------------------------------------------------------------------------------


@_on_its_device
def moments(x: Tensor) -> Tensor:
    """Pivot, residue and variance of every (n, c), a 3×N×C tensor in the dtype of the computation."""
    x = laid_out(x)
    plan = _forward_plan(x, None, _bare(IDENTITY))
    parts = x.new_empty(plan.parts, dtype=plan.layer.compute)
    numbers = x.new_empty((3, *x.shape[:2]), dtype=plan.layer.compute)
    plan.reduce_alone(x, parts)
    plan.merge(x, parts, numbers)
    return numbers


@_on_its_device
def forward(x: Tensor, residual: Tensor | None, norm: Norm, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """y, and the numbers that `backward` and `gather` need; `given` are the `moments` of x, where they are known."""
    y = output_like(x)
    x = laid_out(x)
    added = x if residual is None else laid_out(residual, like=x)
    plan = _forward_plan(x, None if residual is None else added, norm)
    compute = plan.layer.compute
    numbers = x.new_empty(numbers_size(x.shape[0], x.shape[1], norm.groups), dtype=compute)
    tensors = _pointers(norm, numbers)
    if given is None and plan.tile is not None:
        plan.whole(x, added, y, numbers, *tensors)
        return y, numbers
    if given is None:
        parts = x.new_empty(plan.parts, dtype=compute)
        plan.reduce(x, parts)
        if plan.finishing is not None:
            plan.finish(x, added, y, parts, numbers, *tensors)
            return y, numbers
        plan.terms(x, parts, numbers, *tensors)
    else:
        numbers[: given.numel()].copy_(given.flatten())
        plan.terms_of_given(x, numbers, numbers, *tensors)
    plan.apply(x, added, y, numbers, numbers, *tensors)
    return y, numbers


@_on_its_device
def recompute(x: Tensor, residual: Tensor | None, numbers: Tensor, activation: Activation) -> Tensor:
    """The y that `forward` gave, to the bit, from the numbers it left."""
    y = output_like(x)
    x = laid_out(x)
    added = x if residual is None else laid_out(residual, like=x)
    plan = _forward_plan(x, None if residual is None else added, _bare(activation))
    plan.apply(x, added, y, numbers, numbers, *_pointers(_bare(activation), numbers))
    return y


class Gradients(NamedTuple):
    """dL/dx, dL/dresidual and those of the parameters: γ^b, β^b, γ^c, β^c one after the other."""

    x: Tensor
    residual: Tensor | None
    parameters: Tensor


@_on_its_device
def backward(x: Tensor, grad: Tensor, y: Tensor | None, numbers: Tensor, norm: Norm, *, from_batch: bool) -> Gradients:
    """The gradients; `y` is the output where a residual was added and then rectified, else None."""
    dx = output_like(x)
    x = laid_out(x)
    grad = laid_out(grad, like=x)
    y = None if y is None else laid_out(y)
    dr = None if y is None else torch.empty_like(dx)
    plan = _backward_plan(x, grad, y, norm, split=from_batch)
    layer = plan.layer
    shares = x.new_empty(layer.samples * plan.columns, dtype=layer.compute)
    total = shares if layer.samples == 1 else x.new_empty(plan.columns, dtype=layer.compute)
    output, added = (x, dx) if y is None or dr is None else (y, dr)
    small = _pointers(norm, numbers)[:5]  # β^c changes no gradient, and the blend lies in the numbers
    if plan.tile is not None:
        plan.whole(x, grad, output, dx, added, numbers, shares, *small)
        _sum_samples(plan, shares, total)
        return Gradients(dx, dr, total)
    parts = x.new_empty(plan.parts, dtype=layer.compute)
    plan.reduce(x, grad, output, added, numbers, parts)
    gated = grad if dr is None else dr
    if plan.finishing is not None:
        plan.finish(x, gated, dx, parts, numbers, shares, *small)
        _sum_samples(plan, shares, total)
        return Gradients(dx, dr, total)
    slopes = x.new_empty((3, layer.samples, layer.channels), dtype=layer.compute)
    plan.terms(parts, numbers, slopes, shares, *small)
    _sum_samples(plan, shares, total)
    if from_batch:
        plan.through_batch(numbers, slopes, total, *small[:3])
    plan.apply(x, gated, dx, slopes, numbers, shares, *small)
    return Gradients(dx, dr, total)


def _sum_samples(plan: Backward, shares: Tensor, total: Tensor) -> None:
    if plan.layer.samples > 1 and plan.columns:  # of one sample the total is the share itself
        plan.total(shares, total)


@_on_its_device
def gather(
    numbers: Tensor, around: Tensor, sums: Tensor, lost: Tensor, sizes: tuple[int, int, int], groups: int
) -> None:
    """Add a forward of N×C×S elements to its layer's window: see `micronorm.nn.window`."""
    key = (*sizes, groups, numbers.device, numbers.dtype, around.dtype, sums.dtype)
    gather_plan(*key)(numbers, around.contiguous(), sums, lost)
