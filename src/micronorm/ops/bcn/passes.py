"""The passes of `onepass.py` over x, block by block and in place, for eager code on the CPU.

Every element goes through the same operations in the same order as there, so both give the same bits if no sum is
involved. The pivot c is the mean of (n, c) rounded to the dtype of the pass.
"""

import torch
from torch import Tensor

from micronorm.ops.blocks import Cut, Scratch, blocks, cuts_of, space_of, with_space
from micronorm.ops.moments import over_space, wide_dtype


def _split(values_nc: tuple[Tensor, ...], x: Tensor, cuts: list[Cut]) -> list[list[Tensor]]:
    return [blocks(over_space(v, x), cuts) for v in values_nc]


def transform(x: Tensor, pivot_nc: Tensor, scale_nc: Tensor, offset_nc: Tensor, *, relu: bool) -> Tensor:
    """Return y = A·(x − c) + B, in x's dtype and memory format."""
    result = torch.empty_like(x)
    x, y = with_space(x), with_space(result)
    cuts = cuts_of(x)
    values = _split((pivot_nc, scale_nc, offset_nc), x, cuts)
    scratch = Scratch(pivot_nc.dtype)
    for x_block, y_block, pivot, scale, offset in zip(blocks(x, cuts), blocks(y, cuts), *values, strict=True):
        t = y_block if y.dtype == pivot.dtype else scratch.like(x_block)
        torch.sub(x_block, pivot, out=t).mul_(scale).add_(offset)
        if relu:
            t.relu_()
        if t is not y_block:
            y_block.copy_(t)
    return result


def reduce(
    grad_y: Tensor, x: Tensor, pivot_nc: Tensor, gate: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return g, Σg and Σg·(x − c) per (n, c); g is `grad_y`, masked by the ReLU if its `gate` (A, B) is given."""
    result = grad_y if gate is None else torch.empty_like(x, dtype=pivot_nc.dtype)
    x, grad_y, g = with_space(x), with_space(grad_y), with_space(result)
    cuts, space = cuts_of(x), space_of(x)
    sums = _zeros(x)
    scratch = Scratch(pivot_nc.dtype)
    small = _split((pivot_nc, *(gate or ())), x, cuts)
    for x_block, grad_block, g_block, sum_g, sum_gt, pivot, *scale_offset in zip(
        *(blocks(big, cuts) for big in (x, grad_y, g)), *(blocks(s, cuts) for s in sums), *small, strict=True
    ):
        t = torch.sub(x_block, pivot, out=scratch.like(x_block))
        if scale_offset:
            # The forward's own expression, so that the mask equals the forward's to the last bit.
            torch.mul(t, scale_offset[0], out=g_block).add_(scale_offset[1])
            # The function that autograd uses for relu: a masked infinite gradient gives 0, not NaN.
            torch.ops.aten.threshold_backward.grad_input(grad_block.to(t.dtype), g_block, 0, grad_input=g_block)
        sum_g.add_(g_block.sum(space, keepdim=True, dtype=t.dtype))
        sum_gt.add_(t.mul_(g_block).sum(space, keepdim=True))
    first, second = sums.flatten(2)
    return result, first, second


def combine(
    g: Tensor, x: Tensor, pivot_nc: Tensor, slope_nc: Tensor, curve_nc: Tensor, shift_nc: Tensor, *, overwrite: bool
) -> Tensor:
    """Return dx = P·g + Q·(x − c) + R, written to the memory of g if `overwrite`."""
    result = g if overwrite else torch.empty_like(x, dtype=pivot_nc.dtype)
    x, g, dx = with_space(x), with_space(g), with_space(result)
    cuts = cuts_of(x)
    scratch = Scratch(pivot_nc.dtype)
    for x_block, g_block, dx_block, pivot, slope, curve, shift in zip(
        *(blocks(big, cuts) for big in (x, g, dx)),
        *_split((pivot_nc, slope_nc, curve_nc, shift_nc), x, cuts),
        strict=True,
    ):
        t = torch.sub(x_block, pivot, out=scratch.like(x_block)).mul_(curve).add_(shift)
        torch.addcmul(t, g_block.to(t.dtype), slope, out=dx_block)
    return result


def _zeros(x: Tensor) -> Tensor:
    """Return two accumulators of N×C×1×…; the sums of float32 blocks are added in float64."""
    shape = (2, *x.shape[:2], *(1 for _ in space_of(x)))
    return torch.zeros(shape, dtype=wide_dtype(x.device), device=x.device)
