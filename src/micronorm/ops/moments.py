"""Means and variances that stay accurate when the mean is large against the spread.

Shapes: x is N×C×…, x_ncs the same as N×C×S (S the product of the spatial sizes); mean_nc and var_nc are N×C,
mean_ncp N×C×P for space in P pieces.

Statistics are kept in float64 if the device has it. They are N×C numbers, so this costs nothing compared with the pass
over x. In float32, the rounding of a mean near 10,000 would be visible in data whose spread is 0.01.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from micronorm.ops.blocks import Scratch, blocks, can_block, cuts_of, space_of, with_space


class Moments(NamedTuple):
    """Mean and biased variance, of any common shape."""

    mean: Tensor
    var: Tensor


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating dtype of a device: float64, or float32 on MPS, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for passes over x: float32 for half types, otherwise the dtype itself."""
    return torch.promote_types(dtype, torch.float32)


def as_ncs(x: Tensor) -> Tensor:
    """View N×C×… as N×C×S; N×C becomes N×C×1."""
    return x.unsqueeze(-1) if x.ndim == 2 else x.flatten(2)


def over_space(values_nc: Tensor, like: Tensor) -> Tensor:
    """Append singleton axes to N×C (or 1×C) numbers, so that they broadcast over the spatial axes of `like`."""
    return values_nc.reshape(values_nc.shape + (1,) * (like.ndim - 2))


def moments(x: Tensor) -> Moments:
    """Return mean and biased variance of every (n, c) over space, by two passes around the rounded mean.

    With c = round(mean(x)) and t = x − c: mean = c + mean(t) and var = mean(t²) − mean(t)². The last subtraction does
    not cancel: mean(t) is the rounding error of c, so its square is far below mean(t²).
    """
    if can_block(x):
        return _moments_by_block(with_space(x))
    x_ncs = as_ncs(x).to(compute_dtype(x.dtype))
    # The pivot carries no gradient: the identities above hold for any constant c, and so do their derivatives.
    center_nc = x_ncs.detach().mean(-1)
    t_ncs = x_ncs - center_nc.unsqueeze(-1)
    wide = wide_dtype(x.device)
    residue_nc = t_ncs.mean(-1).to(wide)
    var_nc = t_ncs.square().mean(-1).to(wide) - residue_nc.square()
    return Moments(center_nc.to(wide) + residue_nc, var_nc.clamp(min=0))


def _moments_by_block(x: Tensor) -> Moments:
    """Compute `moments` around a pivot per block; blocks that cut through space are pooled afterwards."""
    cuts, space = cuts_of(x), space_of(x)
    inner = next((cut for cut in cuts if cut.axis == 2), None)
    pieces = 1 if inner is None else inner.pieces
    dtype = compute_dtype(x.dtype)
    scratch = Scratch(dtype)
    # pivot, mean(t) and mean(t²) of every (n, c) and piece
    shape = (3, *x.shape[:2], pieces, *(1 for _ in space[1:]))
    parts = torch.empty(shape, dtype=dtype, device=x.device)
    for block, pivot, first, second in zip(blocks(x, cuts), *(blocks(p, cuts) for p in parts), strict=True):
        torch.mean(block, space, keepdim=True, dtype=dtype, out=pivot)
        t = torch.sub(block, pivot, out=scratch.like(block))
        torch.mean(t, space, keepdim=True, out=first)
        torch.mean(t.square_(), space, keepdim=True, out=second)
    pivot_ncp, residue_ncp, square_ncp = parts.flatten(3).to(wide_dtype(x.device))
    mean_ncp, var_ncp = pivot_ncp + residue_ncp, (square_ncp - residue_ncp.square()).clamp(min=0)
    if inner is None:
        return Moments(mean_ncp.squeeze(-1), var_ncp.squeeze(-1))
    # As `pool`, with the weight of each piece: the last one may be shorter.
    share_p = torch.full((pieces,), inner.step / inner.size, dtype=mean_ncp.dtype, device=x.device)
    share_p[-1] = 1 - (pieces - 1) * inner.step / inner.size
    mean_nc = mean_ncp @ share_p
    return Moments(mean_nc, (var_ncp + (mean_ncp - mean_nc.unsqueeze(-1)).square()) @ share_p)


def bounded(data: Moments, dtype: torch.dtype) -> Moments:
    """Replace variances that overflowed `dtype` by its largest number: 1/sqrt(inf)·inf would be NaN."""
    return Moments(data.mean, data.var.clamp(max=torch.finfo(compute_dtype(dtype)).max))


def pool(parts: Moments, *, dim: int) -> Moments:
    """Return the moments of the union of equally large parts along `dim`.

    The variance is the mean variance plus the variance of the means: two non-negative terms, no cancellation.
    """
    mean = parts.mean.mean(dim)
    spread = (parts.mean - mean.unsqueeze(dim)).square().mean(dim)
    return Moments(mean, parts.var.mean(dim) + spread)


def merge(first: Moments, second: Moments, *, share: float) -> Moments:
    """Return the moments of the union of two sets of elements; the second holds `share` of all elements.

    The variance is the weighted variances plus that between the two means: non-negative terms, no cancellation.
    """
    distance = second.mean - first.mean
    var = (1 - share) * first.var + share * second.var + share * (1 - share) * distance.square()
    return Moments(first.mean + share * distance, var)


def pool_micro_batches(parts_nc: Moments, *, micro_batch: int) -> Moments:
    """Return moments of successive micro-batches of m samples: N×C to ⌈N/m⌉×C; the last may hold fewer samples."""
    if micro_batch == 1:
        return parts_nc
    whole = parts_nc.mean.shape[0] // micro_batch * micro_batch
    pieces = []
    if whole:
        blocks = Moments(*(p[:whole].unflatten(0, (-1, micro_batch)) for p in parts_nc))
        pieces.append(pool(blocks, dim=1))
    if whole < parts_nc.mean.shape[0]:
        rest = pool(Moments(*(p[whole:] for p in parts_nc)), dim=0)
        pieces.append(Moments(rest.mean.unsqueeze(0), rest.var.unsqueeze(0)))
    return Moments(torch.cat([p.mean for p in pieces]), torch.cat([p.var for p in pieces]))


def spread_to_samples(per_batch: Tensor, *, micro_batch: int, samples: int) -> Tensor:
    """Repeat each micro-batch's row for its samples: ⌈N/m⌉×C to N×C."""
    return per_batch.repeat_interleave(micro_batch, dim=0)[:samples]
