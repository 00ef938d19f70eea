"""Forward and backward by the kernels: tensors in, tensors out. Importing this imports triton."""

import contextlib
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from micronorm.ops.activation import IDENTITY, Activation
from micronorm.ops.bcn.triton.launch import INTERPRETED
from micronorm.ops.bcn.triton.layout import Strides, laid_out, numbers_size, output_like, strides_of
from micronorm.ops.bcn.triton.plans import Backward, Layer, backward_plan, forward_plan, gather_plan

__all__ = ["INTERPRETED", "Gradients", "Norm", "backward", "forward", "gather", "moments", "recompute"]

Estimates = Literal["none", "shared", "per sample", "kept"]


class Norm(NamedTuple):
    """A normalization without its input.

    The estimates hold C numbers each ("shared"), or N×C ("per sample"); "kept" ones lie in the forward's numbers, and
    with "none" it is a group normalization. γ^b, β^b (C) and the blend belong to the estimates; γ^c, β^c hold G numbers
    with them and C without.
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


def _layer(x: Tensor, strides: Strides, norm: Norm) -> Layer:
    samples, channels = x.shape[:2]
    after = "none" if norm.group_weight is None else "per channel"
    affine = after if norm.estimates == "none" else "per group"
    return Layer(
        samples,
        channels,
        x.numel() // (samples * channels),
        strides,
        x.dtype,
        x.device,
        norm.groups,
        norm.eps,
        norm.activation,
        norm.estimates,
        affine,
        tuple([None if t is None else t.dtype for t in norm.tensors]),
    )


def _on(x: Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, whatever the tensors say."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return contextlib.nullcontext()


def _pointers(norm: Norm, filler: Tensor) -> list[Tensor]:
    """What kernels are given of a normalization; the filler stands for what it has not and they do not read."""
    return [filler if t is None else t for t in norm.tensors]


def _bare(activation: Activation) -> Norm:
    """For launches that do none of the N×C arithmetic."""
    return Norm("none", None, None, None, None, None, None, None, 1, 0.0, activation)


def moments(x: Tensor) -> Tensor:
    """Pivot, residue and variance of every (n, c), a 3×N×C tensor in the dtype of the computation."""
    with _on(x):
        x, strides = laid_out(x)
        plan = forward_plan(_layer(x, strides, _bare(IDENTITY)), None, strides)
        parts = x.new_empty(plan.parts, dtype=plan.layer.compute)
        numbers = x.new_empty((3, *x.shape[:2]), dtype=plan.layer.compute)
        plan.reduce(x, parts)
        plan.merge(x, parts, numbers)
        return numbers


def forward(x: Tensor, residual: Tensor | None, norm: Norm, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """y, and the numbers that `backward` and `gather` need; `given` are the `moments` of x, where they are known."""
    with _on(x):
        y = output_like(x)
        x, strides = laid_out(x)
        added, other = (x, None) if residual is None else laid_out(residual, like=x)
        plan = forward_plan(_layer(x, strides, norm), other, strides_of(y))
        compute = plan.layer.compute
        numbers = x.new_empty(numbers_size(x.shape[0], x.shape[1], norm.groups), dtype=compute)
        tensors = _pointers(norm, numbers)
        if given is None and plan.tile is not None:
            plan.whole(x, added, y, numbers, *tensors)
            return y, numbers
        if given is None:
            parts = x.new_empty(plan.parts, dtype=compute)
            plan.reduce(x, parts)
            plan.terms(x, parts, numbers, *tensors)
        else:
            numbers[: given.numel()].copy_(given.flatten())
            plan.terms_of_given(x, numbers, numbers, *tensors)
        plan.apply(x, added, y, numbers)
        return y, numbers


def recompute(x: Tensor, residual: Tensor | None, numbers: Tensor, activation: Activation) -> Tensor:
    """The y that `forward` gave, to the bit, from the numbers it left."""
    with _on(x):
        y = output_like(x)
        x, strides = laid_out(x)
        added, other = (x, None) if residual is None else laid_out(residual, like=x)
        layer = _layer(x, strides, _bare(activation))
        forward_plan(layer, other, strides_of(y)).apply(x, added, y, numbers)
        return y


class Gradients(NamedTuple):
    """dL/dx, dL/dresidual and those of the parameters: γ^b, β^b, γ^c, β^c one after the other."""

    x: Tensor
    residual: Tensor | None
    parameters: Tensor


def backward(grad: Tensor, x: Tensor, y: Tensor | None, numbers: Tensor, norm: Norm, *, from_batch: bool) -> Gradients:
    """The gradients; `y` is the output where a residual was added and then rectified, else None."""
    with _on(x):
        dx = output_like(x)
        x, strides = laid_out(x)
        grad, grad_strides = laid_out(grad, like=x)
        dr = gate = None
        if y is not None:
            y, gate = laid_out(y)
            dr = torch.empty_like(dx)
        layer = _layer(x, strides, norm)
        plan = backward_plan(layer, grad_strides, gate, strides_of(dx), split=from_batch)
        shares = x.new_empty((layer.samples, plan.columns), dtype=layer.compute)
        total = shares[0] if layer.samples == 1 else torch.empty_like(shares[0])
        big = (x, grad, x if y is None else y)
        results = (dx, dx if dr is None else dr)
        small = _pointers(norm, numbers)
        del small[5]  # β^c changes no gradient
        if plan.tile is not None:
            plan.whole(*big, *results, numbers, shares, *small)
            _sum_samples(plan, shares, total)
            return Gradients(dx, dr, total)
        parts = x.new_empty(plan.parts, dtype=layer.compute)
        slopes = x.new_empty((3, layer.samples, layer.channels), dtype=layer.compute)
        plan.reduce(*big, numbers, parts)
        plan.terms(parts, numbers, slopes, shares, *small)
        _sum_samples(plan, shares, total)
        if from_batch:
            plan.through_batch(numbers, slopes, total, *small[:3])
        plan.apply(*big, *results, numbers, slopes)
        return Gradients(dx, dr, total)


def _sum_samples(plan: Backward, shares: Tensor, total: Tensor) -> None:
    if plan.layer.samples > 1 and plan.columns:  # of one sample the total is the share itself
        plan.total(shares, total)


def gather(
    numbers: Tensor, around: Tensor, sums: Tensor, lost: Tensor, sizes: tuple[int, int, int], groups: int
) -> None:
    """Add a forward of N×C×S elements to its layer's window: see `micronorm.nn.window`."""
    with _on(numbers):
        gather_plan(*sizes, groups, (numbers.dtype, around.dtype, sums.dtype))(numbers, around, sums, lost)
