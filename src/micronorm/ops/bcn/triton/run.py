"""Forward and backward by the kernels: tensors in, tensors out. Importing this file imports Triton.

A small layer takes less time on the device than Python takes to describe it. Every call is therefore described by a key
of plain attributes, and what was computed for that key (strides, tiles, compiled kernels) is kept as a plan.
"""

import struct
from typing import Any

import torch
from torch import Tensor

from micronorm.ops.activation import IDENTITY, Activation
from micronorm.ops.bcn.triton.layout import Affine, Estimates, Strides, laid_out, output_strides, source, strides_of
from micronorm.ops.bcn.triton.plans import MOST_KEPT, Backward, Forward, Layer, Rule, gather_plan, rule
from micronorm.ops.moments import Moments, wide_dtype
from micronorm.ops.runtime import on_its_device

__all__ = ["backward", "estimates", "forward", "gather", "parts_size", "recompute", "rule"]

Tensors = tuple[Tensor | None, ...]
"""The tensors of a normalization: μ̂, σ̂², γ^b, β^b, γ^c, β^c and the blend; None for those it does not have.

γ^b and β^b (C each) and the blend (None stands for 1) belong to the estimates. γ^c and β^c hold G numbers with
estimates and C numbers without.
"""

_NO_TENSORS: Tensors = (None,) * 7


def _pointers(tensors: Tensors, filler: Tensor) -> list[Tensor]:
    """Return the tensors as kernels take them; the filler stands for those that do not exist and are not read."""
    # Kernels read them as contiguous, but a parameter may be a column of a matrix, or one number expanded to all.
    return [filler if t is None else t if t.is_contiguous() else t.contiguous() for t in tensors]


# --- plans ------------------------------------------------------------------------------------------------------------
#
# A plan is kept under layouts that kernels can read, so tensors whose key has a plan need no further checks. A view
# that is negated lazily, as the imaginary part of a conjugate, has the same layout and must be resolved first.

_forwards: dict[Any, Forward] = {}
_backwards: dict[Any, Backward] = {}


def _keep(plans: dict[Any, Any], key: Any, plan: Any) -> Any:
    if len(plans) >= MOST_KEPT:
        plans.clear()
    plans[key] = plan
    return plan


def _key(x: Tensor | None) -> Any:
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device)


def _norm_key(rule: Rule, tensors: Tensors) -> tuple[Any, ...]:
    """Return what launches depend on besides the input.

    The devices of one estimate and one parameter stand for all. They are part of the key because kernels that are
    compiled already are called by addresses alone.
    """
    mean, gamma = tensors[0], tensors[4]
    return (
        rule,
        None if mean is None else mean.device,
        None if gamma is None else gamma.device,
        *[None if t is None else t.dtype for t in tensors],
    )


def _layer(x: Tensor, rule: Rule, tensors: Tensors) -> tuple[Layer, Strides]:
    """Return the layer of a new plan, and the strides of an `empty_like` of x."""
    other = next((t.device for t in tensors if t is not None and t.device != x.device), None)
    if other is not None:
        raise ValueError(
            f"a norm's parameters and estimates must be on the device of its input, {x.device}, got {other}"
        )
    samples, channels = x.shape[:2]
    strides, output = strides_of(x), output_strides(x)
    assert strides is not None
    assert output is not None
    affine = Affine.PER_GROUP
    if rule.estimates == Estimates.NONE:
        affine = Affine.NONE if tensors[4] is None else Affine.PER_CHANNEL
    space = x.numel() // (samples * channels)
    has_blend = tensors[6] is not None
    return Layer(samples, channels, space, strides, x.dtype, x.device, rule, affine, has_blend), output


def _forward_plan(
    x: Tensor, residual: Tensor | None, rule: Rule, tensors: Tensors
) -> tuple[Tensor, Tensor | None, Forward]:
    """Return the tensors in layouts that kernels can read, and the launches for them."""
    x, residual = x.resolve_neg(), None if residual is None else residual.resolve_neg()
    norm = _norm_key(rule, tensors)
    plan = _forwards.get((_key(x), _key(residual), norm))
    if plan is None:
        x = source(x)
        residual = None if residual is None else laid_out(residual, like=x)
        key = (_key(x), _key(residual), norm)
        plan = _forwards.get(key)
        if plan is None:
            layer, output = _layer(x, rule, tensors)
            other = None if residual is None else strides_of(residual)
            plan = _keep(_forwards, key, Forward(layer, other, output))
    return x, residual, plan


def _backward_plan(
    x: Tensor, grad: Tensor, y: Tensor | None, rule: Rule, tensors: Tensors, from_batch: bool
) -> tuple[Tensor, Tensor, Tensor | None, Backward]:
    """Return the tensors in layouts that kernels can read, and the launches for them."""
    x, grad = x.resolve_neg(), grad.resolve_neg()
    norm = _norm_key(rule, tensors)
    plan = _backwards.get((_key(x), grad.stride(), grad.dtype, _key(y), norm, from_batch))
    if plan is None:
        x = source(x)
        grad = laid_out(grad, like=x)
        y = None if y is None else laid_out(y)
        key = (_key(x), grad.stride(), grad.dtype, _key(y), norm, from_batch)
        plan = _backwards.get(key)
        if plan is None:
            layer, output = _layer(x, rule, tensors)
            gate, slope = None if y is None else strides_of(y), strides_of(grad)
            assert slope is not None
            plan = _keep(_backwards, key, Backward(layer, slope, gate, output, from_batch=from_batch))
    return x, grad, y, plan


# --- the functions of this package ------------------------------------------------------------------------------------


def _parts_plan(x: Tensor, groups: int) -> tuple[Tensor, Forward]:
    """Return x as kernels can read it, and a plan whose `reduce` is that of every forward of this x and G."""
    x, _, plan = _forward_plan(x, None, rule(Estimates.NONE, groups, 0.0, *IDENTITY), _NO_TENSORS)
    return x, plan


def parts_size(x: Tensor, groups: int) -> int:
    """Return the number of entries of `parts`, the first result of `estimates`."""
    return _parts_plan(x, groups)[1].parts


@on_its_device
def estimates(
    x: Tensor, running: Moments, lost: Tensor, rate: Tensor | float, groups: int, micro_batch: int, moves: bool
) -> tuple[Tensor, Moments, Moments | None]:
    """Compute the statistics to normalize x with from x itself, and move the running ones in place.

    Args:
        x: N×C×….
        running: mean and variance, C numbers each.
        lost: integers on the device; the first counts samples that do not contribute to the running statistics.
        rate: how far the running statistics move, limited to [0, 1].
        groups: G of the normalization that follows.
        micro_batch: samples per micro-batch of Algorithm 1, as `scan`. 0: the moments of the whole batch, by which the
            running ones move as in `move_by_batch`.
        moves: whether the running statistics move. If not, Algorithm 1's estimates are not computed.

    Returns:
        `parts`, which `forward` takes; mean and variance to normalize with, C numbers each or N×C; and the moments of
        the T = ⌈N/m⌉ micro-batches, T×C each, or None for a whole batch. All but `parts` are in float64.
    """
    x, plan = _parts_plan(x, groups)
    samples, channels, _ = plan.layer.counts
    wide = wide_dtype(x.device)
    parts = x.new_empty(plan.parts, dtype=plan.compute)
    plan.reduce(x, parts)
    if isinstance(rate, Tensor) and rate.device != x.device:
        rate = float(rate)
    pointer, values = (rate, (0.0, 0.0)) if isinstance(rate, Tensor) else (parts, _split_number(rate))
    mean, var = (r if r.is_contiguous() else r.contiguous() for r in running)
    pool, compute, write = plan.estimates(
        micro_batch, moves, isinstance(rate, Tensor), mean.dtype, var.dtype, pointer.dtype
    )
    batches = -(-samples // micro_batch) if micro_batch else 0
    shape = (samples, channels) if micro_batch else (channels,)
    found = Moments(x.new_empty(shape, dtype=wide), x.new_empty(shape, dtype=wide))
    new = found.mean if pool is None and write is None else x.new_empty(2 * channels + 1 + batches, dtype=wide)
    data = None
    if micro_batch:
        data = Moments(*(x.new_empty((batches, channels), dtype=wide) for _ in range(2)))
    if pool is not None:
        pool(x, parts, *(data or ()), new, var)
    if compute is not None:
        compute(x, parts, *(data or ()), *found, new, mean, var, lost, pointer, values=values)
    if write is not None:
        write(new, mean, var, lost)
    if moves:
        for written, own in zip((mean, var), running, strict=True):
            if written is not own:
                own.copy_(written)
    return parts, found, data


def _split_number(value: float) -> tuple[float, float]:
    """Return a number as a sum of two float32 numbers, the form in which Triton passes Python's."""
    high = struct.unpack("f", struct.pack("f", value))[0]
    return high, value - high


@on_its_device
def forward(
    x: Tensor, residual: Tensor | None, parts: Tensor | None, rule: Rule, norm: Tensors
) -> tuple[Tensor, Tensor]:
    """Return y and the numbers that `backward` and `gather` need; `parts` are those of `estimates`, if they exist."""
    x, residual, plan = _forward_plan(x, residual, rule, norm)
    added = x if residual is None else residual
    compute = plan.compute
    y = torch.empty_like(x)
    numbers = x.new_empty(plan.size, dtype=compute)
    tensors = _pointers(norm, numbers)
    if parts is None and plan.tile is not None:
        plan.whole(x, added, y, numbers, *tensors)
        return y, numbers
    if parts is None:
        parts = x.new_empty(plan.parts, dtype=compute)
        plan.reduce(x, parts)
    if plan.finishing is not None:
        plan.finish(x, added, y, parts, numbers, *tensors)
        return y, numbers
    plan.terms(x, parts, numbers, *tensors)
    plan.apply(x, added, y, numbers, numbers, *tensors)
    return y, numbers


@on_its_device
def recompute(x: Tensor, residual: Tensor | None, numbers: Tensor, activation: Activation) -> Tensor:
    """Return the y that `forward` gave, to the bit, from the numbers it left."""
    elementwise = rule(Estimates.NONE, 1, 0.0, *activation)  # it does no N×C arithmetic
    x, residual, plan = _forward_plan(x, residual, elementwise, _NO_TENSORS)
    y = torch.empty_like(x)
    plan.apply(x, x if residual is None else residual, y, numbers, numbers, *_pointers(_NO_TENSORS, numbers))
    return y


@on_its_device
def backward(
    x: Tensor, grad: Tensor, y: Tensor | None, numbers: Tensor, rule: Rule, norm: Tensors, from_batch: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return dL/dx, dL/dresidual, and the gradients of γ^b, β^b, γ^c and β^c one after the other.

    `y` is the output if a residual was added and then activated. Otherwise it is None, and so is dL/dresidual.
    """
    x, grad, y, plan = _backward_plan(x, grad, y, rule, norm, from_batch)
    dx = torch.empty_like(x)
    dr = None if y is None else torch.empty_like(x)
    layer, columns = plan.layer, plan.columns
    shares = numbers.new_empty(layer.samples * columns)
    total = shares if layer.samples == 1 else numbers.new_empty(columns)
    output, added = (x, dx) if y is None or dr is None else (y, dr)
    small = _pointers(norm, numbers)[:5]  # β^c changes no gradient, and the blend is in the numbers
    if plan.tile is not None:
        plan.whole(x, grad, output, dx, added, numbers, shares, *small)
        _sum_samples(plan, shares, total)
        return dx, dr, total
    parts = numbers.new_empty(plan.parts)
    plan.reduce(x, grad, output, added, numbers, parts)
    gated = grad if dr is None else dr
    if plan.finishing is not None:
        plan.finish(x, gated, dx, parts, numbers, shares, *small)
        _sum_samples(plan, shares, total)
        return dx, dr, total
    slopes = numbers.new_empty((3, layer.samples, layer.channels))
    plan.terms(parts, numbers, slopes, shares, *small)
    _sum_samples(plan, shares, total)
    plan.apply(x, gated, dx, slopes, numbers, total, *small)
    return dx, dr, total


def _sum_samples(plan: Backward, shares: Tensor, total: Tensor) -> None:
    if plan.layer.samples > 1 and plan.columns:  # the share of a single sample is the total
        plan.total(shares, total)


@on_its_device
def gather(
    numbers: Tensor, around: Tensor, sums: Tensor, lost: Tensor, sizes: tuple[int, int, int], groups: int
) -> None:
    """Add a forward of N×C×S elements to the sums of its layer's window, from the numbers it left."""
    key = (*sizes, groups, numbers.device, numbers.dtype, around.dtype, sums.dtype)
    gather_plan(*key)(numbers, around.contiguous(), sums, lost)
