"""Forward and backward by the kernels: tensors in, tensors out. Importing this imports triton.

A small layer takes less time on the device than Python takes to describe it. So every call is described once, by a key
of plain attributes, and what was worked out for it (strides, tiles, compiled kernels) is kept under that key.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from micronorm.ops.activation import IDENTITY, Activation
from micronorm.ops.bcn.triton.launch import INTERPRETED, current_device
from micronorm.ops.bcn.triton.layout import Strides, laid_out, output_strides, source, strides_of
from micronorm.ops.bcn.triton.plans import Backward, Forward, Layer, gather_plan

__all__ = ["INTERPRETED", "Gradients", "backward", "forward", "gather", "moments", "recompute", "rule"]

Estimates = Literal["none", "shared", "per sample", "kept"]

_MOST_KEPT = 4096  # descriptions; sizes that never come again must not fill the memory


@dataclass(frozen=True, eq=False)
class Rule:
    """What a normalization does, whatever its input and its tensors: known by identity, as `rule` makes one of each.

    The estimates hold C numbers each ("shared"), or N×C ("per sample"); "kept" ones lie in the forward's numbers, and
    with "none" it is a group normalization.
    """

    estimates: Estimates
    groups: int
    eps: float
    activation: Activation


@lru_cache(maxsize=_MOST_KEPT)
def rule(estimates: Estimates, groups: int, eps: float, kind: str, slope: float) -> Rule:
    """The rule of these properties; a `kind` of activation is a string, empty for none, as operators know it."""
    return Rule(estimates, groups, eps, Activation(kind or None, slope))


Tensors = tuple[Tensor | None, ...]
"""What a rule works with: μ̂, σ̂², γ^b, β^b, γ^c, β^c and the blend, None for what is not there.

γ^b, β^b (C) and the blend (one where it is None) belong to the estimates; γ^c, β^c hold G numbers with them and C
without.
"""

_NO_TENSORS: Tensors = (None,) * 7


def _bare(activation: Activation) -> Rule:
    """For launches that do none of the N×C arithmetic."""
    return rule("none", 1, 0.0, activation.kind or "", activation.slope)


def _layer(x: Tensor, strides: Strides, rule: Rule, tensors: Tensors) -> Layer:
    samples, channels = x.shape[:2]
    apart = next((t.device for t in tensors if t is not None and t.device != x.device), None)
    if apart is not None:
        raise ValueError(f"a norm's parameters and estimates must be where its input is, on {x.device}, got {apart}")
    after = "none" if tensors[4] is None else "per channel"
    return Layer(
        samples,
        channels,
        x.numel() // (samples * channels),
        strides,
        x.dtype,
        x.device,
        rule.groups,
        rule.eps,
        rule.activation,
        rule.estimates,
        after if rule.estimates == "none" else "per group",
        tuple([None if t is None else t.dtype for t in tensors]),
    )


def _pointers(tensors: Tensors, filler: Tensor) -> list[Tensor]:
    """What kernels are given of a normalization; the filler stands for what it has not and they do not read."""
    # Their numbers lie side by side: a parameter may be a column of somebody's matrix, or one number for all channels.
    return [filler if t is None else t if t.is_contiguous() else t.contiguous() for t in tensors]


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


def _norm_key(rule: Rule, tensors: Tensors) -> tuple[Any, ...]:
    """What launches depend on besides the input.

    The devices of an estimate and a parameter stand for all: kernels that are ready are called by bare addresses.
    """
    mean, gamma = tensors[0], tensors[4]
    return (
        rule,
        None if mean is None else mean.device,
        None if gamma is None else gamma.device,
        *[None if t is None else t.dtype for t in tensors],
    )


# A plan is kept under layouts that kernels read: tensors under whose key there is one need no closer look. But a view
# that is negated when it is read, as the imaginary part of a conjugate, would be read by its address as it is.


def _forward_plan(
    x: Tensor, residual: Tensor | None, rule: Rule, tensors: Tensors
) -> tuple[Tensor, Tensor | None, Forward]:
    """The launches, and the tensors laid out for them."""
    x, residual = x.resolve_neg(), None if residual is None else residual.resolve_neg()
    plan = _forwards.get(_forward_key(x, residual, rule, tensors))
    if plan is None:
        x = source(x)
        residual = None if residual is None else laid_out(residual, like=x)
        key = _forward_key(x, residual, rule, tensors)
        plan = _kept(_forwards, key, partial(_new_forward, x, residual, rule, tensors))
    return x, residual, plan


def _forward_key(x: Tensor, residual: Tensor | None, rule: Rule, tensors: Tensors) -> tuple[Any, ...]:
    return _key(x), None if residual is None else _key(residual), _norm_key(rule, tensors)


def _new_forward(x: Tensor, residual: Tensor | None, rule: Rule, tensors: Tensors) -> Forward:
    strides, output = strides_of(x), output_strides(x)
    other = None if residual is None else strides_of(residual)
    assert strides is not None
    assert output is not None
    return Forward(_layer(x, strides, rule, tensors), other, output)


def _backward_plan(
    x: Tensor, grad: Tensor, y: Tensor | None, rule: Rule, tensors: Tensors, split: bool
) -> tuple[Tensor, Tensor, Tensor | None, Backward]:
    """The launches, and the tensors laid out for them."""
    x, grad = x.resolve_neg(), grad.resolve_neg()
    plan = _backwards.get(_backward_key(x, grad, y, rule, tensors, split))
    if plan is None:
        x = source(x)
        grad = laid_out(grad, like=x)
        y = None if y is None else laid_out(y)
        key = _backward_key(x, grad, y, rule, tensors, split)
        plan = _kept(_backwards, key, partial(_new_backward, x, grad, y, rule, tensors, split))
    return x, grad, y, plan


def _backward_key(
    x: Tensor, grad: Tensor, y: Tensor | None, rule: Rule, tensors: Tensors, split: bool
) -> tuple[Any, ...]:
    return _key(x), grad.stride(), grad.dtype, None if y is None else _key(y), _norm_key(rule, tensors), split


def _new_backward(x: Tensor, grad: Tensor, y: Tensor | None, rule: Rule, tensors: Tensors, split: bool) -> Backward:
    strides, slope, output = strides_of(x), strides_of(grad), output_strides(x)
    gate = None if y is None else strides_of(y)
    assert strides is not None
    assert slope is not None
    assert output is not None
    return Backward(_layer(x, strides, rule, tensors), slope, gate, output, split=split)


def _on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Triton launches on the current device, whatever the tensors say."""

    def called(x: Tensor, *args: Any) -> Any:
        if x.is_cuda and x.get_device() != current_device():
            with torch.cuda.device(x.device):
                return function(x, *args)
        return function(x, *args)

    return called


# --- what the room is for --------------------------------------------------------------------------------------------


@_on_its_device
def moments(x: Tensor) -> Tensor:
    """Pivot, residue and variance of every (n, c), a 3×N×C tensor in the dtype of the computation."""
    x, _, plan = _forward_plan(x, None, _bare(IDENTITY), _NO_TENSORS)
    parts = x.new_empty(plan.parts, dtype=plan.layer.compute)
    numbers = x.new_empty((3, *x.shape[:2]), dtype=plan.layer.compute)
    plan.reduce_alone(x, parts)
    plan.merge(x, parts, numbers)
    return numbers


@_on_its_device
def forward(
    x: Tensor, residual: Tensor | None, given: Tensor | None, rule: Rule, norm: Tensors
) -> tuple[Tensor, Tensor]:
    """y, and the numbers that `backward` and `gather` need; `given` are the `moments` of x, where they are known."""
    x, residual, plan = _forward_plan(x, residual, rule, norm)
    added = x if residual is None else residual
    compute = plan.compute
    y = torch.empty_like(x)
    numbers = x.new_empty(plan.size, dtype=compute)
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
    x, residual, plan = _forward_plan(x, residual, _bare(activation), _NO_TENSORS)
    y = torch.empty_like(x)
    plan.apply(x, x if residual is None else residual, y, numbers, numbers, *_pointers(_NO_TENSORS, numbers))
    return y


class Gradients(NamedTuple):
    """dL/dx, dL/dresidual and those of the parameters: γ^b, β^b, γ^c, β^c one after the other."""

    x: Tensor
    residual: Tensor | None
    parameters: Tensor


@_on_its_device
def backward(
    x: Tensor, grad: Tensor, y: Tensor | None, numbers: Tensor, rule: Rule, norm: Tensors, from_batch: bool
) -> Gradients:
    """The gradients; `y` is the output where a residual was added and then rectified, else None."""
    x, grad, y, plan = _backward_plan(x, grad, y, rule, norm, from_batch)
    dx = torch.empty_like(x)
    dr = None if y is None else torch.empty_like(x)
    layer, columns = plan.layer, plan.columns
    shares = numbers.new_empty(layer.samples * columns)
    total = shares if layer.samples == 1 else numbers.new_empty(columns)
    output, added = (x, dx) if y is None or dr is None else (y, dr)
    small = _pointers(norm, numbers)[:5]  # β^c changes no gradient, and the blend lies in the numbers
    if plan.tile is not None:
        plan.whole(x, grad, output, dx, added, numbers, shares, *small)
        _sum_samples(plan, shares, total)
        return Gradients(dx, dr, total)
    parts = numbers.new_empty(plan.parts)
    plan.reduce(x, grad, output, added, numbers, parts)
    gated = grad if dr is None else dr
    if plan.finishing is not None:
        plan.finish(x, gated, dx, parts, numbers, shares, *small)
        _sum_samples(plan, shares, total)
        return Gradients(dx, dr, total)
    slopes = numbers.new_empty((3, layer.samples, layer.channels))
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
