"""Batch-Channel Normalization in one reduction and one elementwise pass, each way. The derivation is in README.md.

Shapes: x, y and their gradients are N×C×…; names ending in _nc hold N×C numbers (or 1×C), _ngk the same as N×G×k with
k = C/G, _ng N×G×1. Everything between the passes is float64 arithmetic on those small tensors.
"""

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from micronorm.ops.bcn.passes import combine, reduce, transform
from micronorm.ops.blocks import can_block
from micronorm.ops.moments import Moments, as_ncs, bounded, compute_dtype, moments, over_space, pool, wide_dtype


class _Affine(NamedTuple):
    """The learnable part, widened: γ^b, β^b (G×k), γ^c, β^c (G×1) and the blend α (a scalar)."""

    weight: Tensor
    bias: Tensor
    group_weight: Tensor
    group_bias: Tensor
    blend: Tensor


class _Terms(NamedTuple):
    """The N×C arithmetic of the forward, which the backward needs as well."""

    distance_ngk: Tensor  # m − μ̂
    rstd_ngk: Tensor  # 1/sqrt(σ̂² + ε)
    a_ngk: Tensor  # γ^b · rstd
    av_ngk: Tensor  # a·v
    z_ngk: Tensor  # the channel-normalized mean of (n, c)
    apart_ngk: Tensor  # z − M, the distance to its group's mean
    inv_ng: Tensor  # 1/S
    gain_ng: Tensor  # γ^c·((1−α) + α/S)


def _terms(data: Moments, estimates: Moments, affine: _Affine, *, groups: int, eps: float) -> _Terms:
    mean_ngk, var_ngk, stat_mean_ngk, stat_var_ngk = (s.unflatten(1, (groups, -1)) for s in (*data, *estimates))
    distance_ngk = mean_ngk - stat_mean_ngk
    rstd_ngk = (stat_var_ngk + eps).rsqrt()
    a_ngk = affine.weight * rstd_ngk
    z_ngk = torch.addcmul(affine.bias, a_ngk, distance_ngk)
    apart_ngk = z_ngk - z_ngk.mean(-1, keepdim=True)
    av_ngk = a_ngk * var_ngk
    # Two non-negative terms: the variance within the channels, and that between their means.
    var_ng = torch.addcmul(av_ngk * a_ngk, apart_ngk, apart_ngk).mean(-1, keepdim=True)
    inv_ng = (var_ng + eps).rsqrt()
    gain_ng = affine.group_weight * torch.lerp(torch.ones_like(inv_ng), inv_ng, affine.blend)
    return _Terms(distance_ngk, rstd_ngk, a_ngk, av_ngk, z_ngk, apart_ngk, inv_ng, gain_ng)


def _coefficients(terms: _Terms, affine: _Affine, residue_nc: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return A and B of y = A·(x − c) + B in the pass's dtype; c is the mean rounded to it, `residue` the rest."""
    scale_nc = (terms.gain_ng * terms.a_ngk).flatten(1)
    at_mean_ngk = torch.lerp(terms.z_ngk, terms.apart_ngk * terms.inv_ng, affine.blend)
    offset_nc = torch.addcmul(affine.group_bias, at_mean_ngk, affine.group_weight).flatten(1)
    return scale_nc.to(dtype), torch.addcmul(offset_nc, scale_nc, residue_nc, value=-1).to(dtype)


def _gradients(
    sum_g_nc: Tensor,
    sum_gx_nc: Tensor,
    terms: _Terms,
    affine: _Affine,
    *,
    elements: int,
    from_batch: bool,
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return the backward of `_terms` and `_coefficients`, from Σg and Σg·(x − m) per (n, c); d_ stands for dL/d.

    Returns:
        slope, curve and shift of dx = slope·g + curve·(x − m) + shift, and the gradients of the affine parameters.
    """
    distance_ngk, rstd_ngk, a_ngk, av_ngk, z_ngk, apart_ngk, inv_ng, gain_ng = terms
    alpha, gamma_g = affine.blend, affine.group_weight
    samples, groups, size = apart_ngk.shape
    d_scale_ngk, d_offset_ngk = (s.unflatten(1, (groups, size)) for s in (sum_gx_nc, sum_g_nc))

    # γ^c and β^c
    sum_scale_ng = (d_scale_ngk * a_ngk).sum(-1, keepdim=True)
    sum_offset_ng = d_offset_ngk.sum(-1, keepdim=True)
    from_group_ng = inv_ng * (sum_scale_ng + (d_offset_ngk * apart_ngk).sum(-1, keepdim=True))
    from_channel_ng = sum_scale_ng + (d_offset_ngk * z_ngk).sum(-1, keepdim=True)
    d_group_weight = torch.lerp(from_channel_ng, from_group_ng, alpha).sum(0)
    d_group_bias = sum_offset_ng.sum(0)

    # 1/S, and through it the group variance: pull = 2/k · dL/dvar
    steep_ng = alpha * gamma_g * inv_ng
    pull_ng = steep_ng * inv_ng * from_group_ng / -size
    # z: directly, and through its distance to the group mean; the data's mean gets the second part only
    through_mean_ngk = torch.addcmul(steep_ng * sum_offset_ng / -size, pull_ng, apart_ngk)
    d_z_ngk = torch.addcmul(through_mean_ngk, gain_ng, d_offset_ngk)
    d_bias = d_z_ngk.sum(0)

    d_a_ngk = torch.addcmul(torch.addcmul(gain_ng * d_scale_ngk, d_z_ngk, distance_ngk), pull_ng, av_ngk)
    d_weight = (d_a_ngk * rstd_ngk).sum(0)

    shift_ngk = through_mean_ngk * a_ngk
    curve_ngk = pull_ng * a_ngk.square()
    if from_batch:
        # The statistics are moments of the data too: dL/dμ̂ = −a·dL/dβ^b, dL/dσ̂² = −γ^b·rstd²/2 · dL/dγ^b.
        d_stat_var = d_weight * a_ngk[0] * rstd_ngk[0] / -samples
        shift_ngk = shift_ngk + torch.addcmul(d_bias * a_ngk[0] / -samples, d_stat_var, distance_ngk)
        curve_ngk = curve_ngk + d_stat_var
    slopes = ((gain_ng * a_ngk).flatten(1), curve_ngk.flatten(1) / elements, shift_ngk.flatten(1) / elements)
    return slopes, (d_weight.flatten(), d_bias.flatten(), d_group_weight.flatten(), d_group_bias.flatten())


def elementwise(x: Tensor, pivot_nc: Tensor, scale_nc: Tensor, offset_nc: Tensor, *, relu: bool) -> Tensor:
    """Return y = A·(x − c) + B without a graph: the forward's elementwise pass, which also recomputes y to the bit."""
    if can_block(x):
        return transform(x, pivot_nc, scale_nc, offset_nc, relu=relu)
    # While tracing, torch 2.11 loses the gradient of an output made by an in-place operation or by a cast that
    # changes nothing, so the last operation makes a new tensor.
    y = (x.to(pivot_nc.dtype) - over_space(pivot_nc, x)).mul_(over_space(scale_nc, x)) + over_space(offset_nc, x)
    if relu:
        y = y.clamp(min=0)
    return y if y.dtype == x.dtype else y.to(x.dtype)


class _OnePass(torch.autograd.Function):
    """Compute y = A·(x − m) + B, with a backward of its own that needs x and N×C numbers.

    The inputs are x; γ^b, β^b, γ^c, β^c and the blend; mean and variance of the data, then of the estimates; and the
    options groups, eps, from_batch and relu. Last comes the list that receives c, A and B, or None.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *inputs: Any) -> Tensor:
        tensors, ctx.options, numbers = inputs[:9], inputs[9:13], inputs[13]
        ctx.save_for_backward(x, *tensors)
        groups, eps, _, relu = ctx.options
        data, estimates = Moments(*tensors[5:7]), Moments(*tensors[7:9])
        affine = _widen(*tensors[:5], dtype=data.mean.dtype, groups=groups)
        terms = _terms(data, estimates, affine, groups=groups, eps=eps)
        pivot_nc = data.mean.to(compute_dtype(x.dtype))
        scale_nc, offset_nc = _coefficients(terms, affine, data.mean - pivot_nc, pivot_nc.dtype)
        if numbers is not None:
            numbers += (pivot_nc, scale_nc, offset_nc)
        return elementwise(x, pivot_nc, scale_nc, offset_nc, relu=relu)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors
        groups, eps, from_batch, relu = ctx.options
        data, estimates = Moments(*tensors[5:7]), Moments(*tensors[7:9])
        pivot_nc = data.mean.to(compute_dtype(x.dtype))
        if torch.is_grad_enabled():
            # create_graph: the N×C numbers must depend on x for the second backward to be right.
            data = bounded(moments(x), x.dtype)
            if from_batch:
                estimates = batch_statistics(data)
        affine = _widen(*tensors[:5], dtype=data.mean.dtype, groups=groups)
        terms = _terms(data, estimates, affine, groups=groups, eps=eps)
        residue_nc = data.mean - pivot_nc
        gate = _coefficients(terms, affine, residue_nc, pivot_nc.dtype) if relu else None
        blocked = can_block(x)
        g, sum_g_nc, sum_gt_nc = (reduce if blocked else _reduce)(grads[0], x, pivot_nc, gate)
        sum_gx_nc = torch.addcmul(sum_gt_nc, residue_nc, sum_g_nc, value=-1)
        elements = as_ncs(x).shape[-1]
        slopes, found = _gradients(sum_g_nc, sum_gx_nc, terms, affine, elements=elements, from_batch=from_batch)
        slope_nc, curve_nc, shift_nc = slopes
        shift_nc = torch.addcmul(shift_nc, curve_nc, residue_nc, value=-1)
        coefficients = (v.to(pivot_nc.dtype) for v in (slope_nc, curve_nc, shift_nc))
        dx = (combine if blocked else _combine)(g, x, pivot_nc, *coefficients, overwrite=g is not grads[0])
        own = (d.to(parameter.dtype) for d, parameter in zip(found, tensors[:4], strict=True))
        return dx.to(x.dtype), *own, *(None,) * 10


def _widen(*tensors: Tensor, dtype: torch.dtype, groups: int) -> _Affine:
    return _Affine(*(t.to(dtype).reshape((groups, -1) if t.ndim else ()) for t in tensors))


def _reduce(
    grad_y: Tensor, x: Tensor, pivot_nc: Tensor, gate: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Do `passes.reduce` in operations that autograd and tracers support."""
    t = x.to(pivot_nc.dtype) - over_space(pivot_nc, x)
    g = grad_y.to(t.dtype)
    if gate is not None:
        # Not a product: a masked infinite gradient must give 0, not NaN.
        g = torch.where(t * over_space(gate[0], t) + over_space(gate[1], t) > 0, g, 0.0)
    wide = wide_dtype(x.device)
    return g, as_ncs(g).sum(-1).to(wide), as_ncs(g * t).sum(-1).to(wide)


def _combine(
    g: Tensor, x: Tensor, pivot_nc: Tensor, slope_nc: Tensor, curve_nc: Tensor, shift_nc: Tensor, *, overwrite: bool
) -> Tensor:
    """Do `passes.combine` in operations that autograd and tracers support; `overwrite` is ignored."""
    t = x.to(pivot_nc.dtype) - over_space(pivot_nc, x)
    # t first: dx takes the memory format of x, whatever that of g
    return t * over_space(curve_nc, t) + over_space(shift_nc, t) + g.to(t.dtype) * over_space(slope_nc, t)


def batch_statistics(data: Moments) -> Moments:
    """Return the whole batch's moments (1×C) from those of its samples (N×C), for `statistics="batch"`."""
    return Moments(*(s.unsqueeze(0) for s in pool(data, dim=0)))


def no_grad_unless_traced() -> contextlib.AbstractContextManager:
    """Return a context that disables autograd for the moments, except in code that is being traced.

    The backward of `_OnePass` computes their gradient itself. torch.export, however, differentiates the forward, and
    there the moments must depend on x.
    """
    return contextlib.nullcontext() if torch.compiler.is_compiling() else torch.no_grad()


def batch_channel_norm(
    x: Tensor,
    estimates: Moments | None,
    weight: Tensor,
    bias: Tensor,
    group_weight: Tensor,
    group_bias: Tensor,
    *,
    groups: int,
    eps: float = 1e-5,
    blend: Tensor | float = 1.0,
    relu: bool = False,
    data: Moments | None = None,
    numbers: list[Tensor] | None = None,
) -> Tensor:
    """Normalize by given statistics per channel, then over groups of channels (labels `eq:bcnbn`, `eq:bcngn`).

    Args:
        x: N×C×….
        estimates: mean and variance to normalize the channels with, C numbers each, or N×C if every sample has its
            own; they get no gradient. None uses the batch's own moments, through which gradients flow.
        weight: γ^b, C numbers.
        bias: β^b, C numbers.
        group_weight: γ^c, G numbers.
        group_bias: β^c, G numbers.
        groups: G, a divisor of C.
        eps: added to both variances, inside the roots.
        blend: α; below 1 the group normalization is mixed with the identity.
        relu: fuse a rectifier; its mask is recomputed, not stored.
        data: `moments(x)`, if known already.
        numbers: a list that receives c, A and B, with which `elementwise` recomputes y.

    Example:
        >>> x, ones, zeros = torch.randn(2, 6, 4, 4), torch.ones(6), torch.zeros(6)
        >>> y = batch_channel_norm(x, Moments(zeros, ones - 1e-5), ones, zeros, ones[:2], zeros[:2], groups=2)
        >>> torch.allclose(y, torch.nn.functional.group_norm(x, 2), atol=1e-5)
        True
    """
    with no_grad_unless_traced():
        data = bounded(moments(x) if data is None else data, x.dtype)
        wide = data.mean.dtype
        if estimates is None:
            statistics = batch_statistics(data)
        else:
            # Copies: a commit may rewrite the layer's buffers before the backward reads them.
            statistics = Moments(*(e.detach().reshape(-1, e.shape[-1]).to(wide, copy=True) for e in estimates))
        alpha = torch.as_tensor(blend, dtype=wide, device=x.device).clone()
    affine = (weight, bias, group_weight, group_bias, alpha)
    y = _OnePass.apply(x, *affine, *data, *statistics, groups, eps, estimates is None, relu, numbers)
    assert isinstance(y, Tensor)
    return y
