"""Batch-Channel Normalization in one reduction and one elementwise pass, each way. The derivation is in README.md.

Shapes: x, y and their gradients are N×C×…; names ending in _nc hold N×C numbers (or 1×C), _ng N×G, _ngk N×G×k with
k = C/G. Everything between the passes is float64 arithmetic on those small tensors.
"""

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from micronorm.ops.bcn.passes import combine, reduce, transform
from micronorm.ops.blocks import can_block
from micronorm.ops.moments import Moments, as_ncs, bounded, compute_dtype, moments, over_space, pool, wide_dtype


class _Affine(NamedTuple):
    """The learnable part, widened: γ^b, β^b (C), γ^c, β^c (G) and the blend α (a scalar)."""

    weight: Tensor
    bias: Tensor
    group_weight: Tensor
    group_bias: Tensor
    blend: Tensor


class _Terms(NamedTuple):
    """The N×C arithmetic of the forward, kept together because the backward needs all of it."""

    rstd_nc: Tensor  # 1/sqrt(σ̂² + ε)
    a_nc: Tensor  # γ^b · rstd
    z_nc: Tensor  # the channel-normalized mean of (n, c)
    apart_ngk: Tensor  # z − M, the distance to its group's mean
    inv_ng: Tensor  # 1/S


def _terms(data: Moments, estimates: Moments, affine: _Affine, *, groups: int, eps: float) -> _Terms:
    rstd_nc = (estimates.var + eps).rsqrt()
    a_nc = affine.weight * rstd_nc
    z_nc = a_nc * (data.mean - estimates.mean) + affine.bias
    z_ngk = z_nc.unflatten(1, (groups, -1))
    apart_ngk = z_ngk - z_ngk.mean(-1, keepdim=True)
    within_ngk = (a_nc.square() * data.var).unflatten(1, (groups, -1))
    # Two non-negative terms: the variance within the channels, and that between their means.
    var_ng = within_ngk.mean(-1) + apart_ngk.square().mean(-1)
    return _Terms(rstd_nc, a_nc, z_nc, apart_ngk, (var_ng + eps).rsqrt())


def _coefficients(terms: _Terms, affine: _Affine, groups: int) -> tuple[Tensor, Tensor]:
    """A and B of y = A·(x − m) + B."""
    alpha = affine.blend
    scale_ng = affine.group_weight * ((1 - alpha) + alpha * terms.inv_ng)
    scale_nc = (scale_ng.unsqueeze(-1) * terms.a_nc.unflatten(1, (groups, -1))).flatten(1)
    offset_ngk = _blended(terms, alpha, groups) * affine.group_weight.unsqueeze(-1) + affine.group_bias.unsqueeze(-1)
    return scale_nc, offset_ngk.flatten(1)


def _blended(terms: _Terms, alpha: Tensor, groups: int) -> Tensor:
    """(1−α)·z + α·(z − M)/S, what the group affine acts on at x = m."""
    return (1 - alpha) * terms.z_nc.unflatten(1, (groups, -1)) + alpha * terms.apart_ngk * terms.inv_ng.unsqueeze(-1)


class _Gradients(NamedTuple):
    """dx = slope·g + curve·(x − m) + shift, and the gradients of the affine parameters."""

    slope_nc: Tensor
    curve_nc: Tensor
    shift_nc: Tensor
    weight: Tensor
    bias: Tensor
    group_weight: Tensor
    group_bias: Tensor


def _gradients(
    sum_g_nc: Tensor,
    sum_gx_nc: Tensor,
    terms: _Terms,
    data: Moments,
    estimates: Moments,
    affine: _Affine,
    *,
    groups: int,
    elements: int,
    from_batch: bool,
) -> _Gradients:
    """The backward of `_terms` and `_coefficients`, from Σg and Σg·(x − m) per (n, c). A prefix d_ means dL/d."""

    def by_group(values_nc: Tensor) -> Tensor:
        return values_nc.unflatten(1, (groups, -1))

    rstd_nc, a_nc, _, apart_ngk, inv_ng = terms
    alpha, gamma_g = affine.blend, affine.group_weight
    size = apart_ngk.shape[-1]
    scale_nc, _ = _coefficients(terms, affine, groups)
    d_scale_ngk, d_offset_ngk = by_group(sum_gx_nc), by_group(sum_g_nc)

    # γ^c and β^c
    mix_ng = (1 - alpha) + alpha * inv_ng
    d_mix_ng = (d_scale_ngk * by_group(a_nc)).sum(-1)
    d_group_weight = (d_mix_ng * mix_ng + (d_offset_ngk * _blended(terms, alpha, groups)).sum(-1)).sum(0)
    d_group_bias = d_offset_ngk.sum((0, 2))

    # 1/S, and through it the group variance
    d_inv_ng = alpha * gamma_g * (d_mix_ng + (d_offset_ngk * apart_ngk).sum(-1))
    d_var_ng = -0.5 * inv_ng.pow(3) * d_inv_ng
    pull_nc = (2 / size * d_var_ng).unsqueeze(-1).expand_as(apart_ngk).flatten(1)

    # z: directly where the blend keeps it, and through its distance to the group mean
    d_apart_ngk = alpha * (gamma_g * inv_ng).unsqueeze(-1) * d_offset_ngk
    d_z_nc = (
        (1 - alpha) * gamma_g.unsqueeze(-1) * d_offset_ngk + d_apart_ngk - d_apart_ngk.mean(-1, keepdim=True)
    ).flatten(1) + pull_nc * apart_ngk.flatten(1)
    d_a_nc = (
        sum_gx_nc * (gamma_g * mix_ng).unsqueeze(-1).expand_as(apart_ngk).flatten(1)
        + pull_nc * a_nc * data.var
        + d_z_nc * (data.mean - estimates.mean)
    )
    d_weight, d_bias = (d_a_nc * rstd_nc).sum(0), d_z_nc.sum(0)

    # the data's moments; in "batch" mode the statistics are moments of the data too
    d_mean_nc = d_z_nc * a_nc - scale_nc * sum_g_nc
    d_var_nc = 0.5 * pull_nc * a_nc.square()
    if from_batch:
        samples = data.mean.shape[0]
        d_stat_mean_c = -(d_z_nc * a_nc).sum(0)
        d_stat_var_c = (-0.5 * d_a_nc * affine.weight * rstd_nc.pow(3)).sum(0)
        d_mean_nc = d_mean_nc + (d_stat_mean_c + 2 * d_stat_var_c * (data.mean - estimates.mean)) / samples
        d_var_nc = d_var_nc + d_stat_var_c / samples
    return _Gradients(
        scale_nc, 2 / elements * d_var_nc, d_mean_nc / elements, d_weight, d_bias, d_group_weight, d_group_bias
    )


class _OnePass(torch.autograd.Function):
    """y = A·(x − m) + B with the hand-written backward; saves x and N×C numbers."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        group_weight: Tensor,
        group_bias: Tensor,
        blend: Tensor,
        mean_nc: Tensor,
        var_nc: Tensor,
        stat_mean: Tensor,
        stat_var: Tensor,
        groups: int,
        eps: float,
        from_batch: bool,
        relu: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, group_weight, group_bias, blend, mean_nc, var_nc, stat_mean, stat_var)
        ctx.groups, ctx.eps, ctx.from_batch, ctx.relu = groups, eps, from_batch, relu
        affine = _widen(weight, bias, group_weight, group_bias, blend, dtype=mean_nc.dtype)
        terms = _terms(Moments(mean_nc, var_nc), Moments(stat_mean, stat_var), affine, groups=groups, eps=eps)
        pivot_nc = mean_nc.to(compute_dtype(x.dtype))
        scale_nc, offset_nc = _about_pivot(*_coefficients(terms, affine, groups), mean_nc, pivot_nc)
        if can_block(x):
            return transform(x, pivot_nc, scale_nc, offset_nc, relu=relu)
        # While tracing, torch 2.11 loses the gradient of an output made by an in-place operation or by a cast that
        # changes nothing, so the last operation makes a new tensor.
        y = (x.to(pivot_nc.dtype) - over_space(pivot_nc, x)).mul_(over_space(scale_nc, x)) + over_space(offset_nc, x)
        if relu:
            y = y.clamp(min=0)
        return y if y.dtype == x.dtype else y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, group_weight, group_bias, blend, mean_nc, var_nc, stat_mean, stat_var = ctx.saved_tensors
        data, estimates = Moments(mean_nc, var_nc), Moments(stat_mean, stat_var)
        if torch.is_grad_enabled():
            # create_graph: the N×C numbers must depend on x for the second backward to be right.
            data = bounded(moments(x), x.dtype)
            if ctx.from_batch:
                estimates = batch_statistics(data)
        affine = _widen(weight, bias, group_weight, group_bias, blend, dtype=mean_nc.dtype)
        pivot_nc = mean_nc.to(compute_dtype(x.dtype))
        residue_nc = data.mean - pivot_nc
        terms = _terms(data, estimates, affine, groups=ctx.groups, eps=ctx.eps)
        gate = None
        if ctx.relu:
            gate = _about_pivot(*_coefficients(terms, affine, ctx.groups), data.mean, pivot_nc)
        blocked = can_block(x)
        g, sum_g_nc, sum_gt_nc = (reduce if blocked else _reduce)(grads[0], x, pivot_nc, gate)
        grad = _gradients(
            sum_g_nc,
            sum_gt_nc - residue_nc * sum_g_nc,
            terms,
            data,
            estimates,
            affine,
            groups=ctx.groups,
            elements=as_ncs(x).shape[-1],
            from_batch=ctx.from_batch,
        )
        shift_nc = grad.shift_nc - grad.curve_nc * residue_nc
        coefficients = (v.to(pivot_nc.dtype) for v in (grad.slope_nc, grad.curve_nc, shift_nc))
        dx = (combine if blocked else _combine)(g, x, pivot_nc, *coefficients, overwrite=g is not grads[0])
        return (
            dx.to(x.dtype),
            grad.weight.to(weight.dtype),
            grad.bias.to(bias.dtype),
            grad.group_weight.to(group_weight.dtype),
            grad.group_bias.to(group_bias.dtype),
            *(None,) * 9,
        )


def _widen(*tensors: Tensor, dtype: torch.dtype) -> _Affine:
    return _Affine(*(t.to(dtype) for t in tensors))


def _about_pivot(scale_nc: Tensor, offset_nc: Tensor, mean_nc: Tensor, pivot_nc: Tensor) -> tuple[Tensor, Tensor]:
    """A and B of y = A·(x − c) + B in the dtype of the pass, c being the mean rounded to it."""
    return scale_nc.to(pivot_nc.dtype), (offset_nc - scale_nc * (mean_nc - pivot_nc)).to(pivot_nc.dtype)


def _reduce(
    grad_y: Tensor, x: Tensor, pivot_nc: Tensor, gate: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`passes.reduce` in operations that autograd and tracers can follow."""
    t = x.to(pivot_nc.dtype) - over_space(pivot_nc, x)
    g = grad_y.to(t.dtype)
    if gate is not None:
        # Not a product: an infinite gradient behind a closed gate is none.
        g = torch.where(t * over_space(gate[0], t) + over_space(gate[1], t) > 0, g, 0.0)
    wide = wide_dtype(x.device)
    return g, as_ncs(g).sum(-1).to(wide), as_ncs(g * t).sum(-1).to(wide)


def _combine(
    g: Tensor, x: Tensor, pivot_nc: Tensor, slope_nc: Tensor, curve_nc: Tensor, shift_nc: Tensor, *, overwrite: bool
) -> Tensor:
    """`passes.combine` in operations that autograd and tracers can follow; `overwrite` is not for them."""
    t = x.to(pivot_nc.dtype) - over_space(pivot_nc, x)
    # t first: dx takes the memory format of x, whatever that of g
    return t * over_space(curve_nc, t) + over_space(shift_nc, t) + g.to(t.dtype) * over_space(slope_nc, t)


def batch_statistics(data: Moments) -> Moments:
    """The whole batch's moments (1×C) from those of its samples (N×C): what `"batch"` normalizes with."""
    return Moments(*(s.unsqueeze(0) for s in pool(data, dim=0)))


def watched_if_traced() -> contextlib.AbstractContextManager:
    """No gradient for what the backward knows by itself, except in code that is being traced.

    torch.export takes the function below apart and differentiates its forward; there the moments must depend on x.
    torch.compile keeps its backward, which answers None for them.
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
) -> Tensor:
    """Normalize by given statistics per channel, then over groups of channels (labels `eq:bcnbn`, `eq:bcngn`).

    Args:
        x: N×C×….
        estimates: mean and variance to normalize the channels with, C numbers each, or N×C where every sample has its
            own; no gradient flows into them. None takes the batch's own moments, and through those it does.
        weight: γ^b, C numbers.
        bias: β^b, C numbers.
        group_weight: γ^c, G numbers.
        group_bias: β^c, G numbers.
        groups: G, a divisor of C.
        eps: added to both variances, inside the roots.
        blend: α; below 1 the group normalization is mixed with the identity.
        relu: fuse a rectifier; its mask is recomputed, not stored.
        data: `moments(x)`, if they are known already.

    Example:
        >>> x, ones, zeros = torch.randn(2, 6, 4, 4), torch.ones(6), torch.zeros(6)
        >>> y = batch_channel_norm(x, Moments(zeros, ones - 1e-5), ones, zeros, ones[:2], zeros[:2], groups=2)
        >>> torch.allclose(y, torch.nn.functional.group_norm(x, 2), atol=1e-5)
        True
    """
    with watched_if_traced():
        data = bounded(moments(x) if data is None else data, x.dtype)
        wide = data.mean.dtype
        if estimates is None:
            statistics = batch_statistics(data)
        else:
            # Copies: a commit may rewrite the layer's buffers before the backward reads them.
            statistics = Moments(*(e.detach().reshape(-1, e.shape[-1]).to(wide, copy=True) for e in estimates))
        alpha = torch.as_tensor(blend, dtype=wide, device=x.device).clone()
    affine = (weight, bias, group_weight, group_bias, alpha)
    y = _OnePass.apply(x, *affine, *data, *statistics, groups, eps, estimates is None, relu)
    assert isinstance(y, Tensor)
    return y
