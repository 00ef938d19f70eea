"""The passes of `onepass.py` over x, block by block and in place, for eager code on the CPU.

Every element goes through the same operations in the same order as there, so both give the same bits if no sum is
involved. The pivot c is the mean of (n, c) rounded to the dtype of the pass.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from micronorm.ops.blocks import Scratch, blocks, cuts_of, space_of, with_space
from micronorm.ops.moments import over_space, wide_dtype


def _in_blocks(maps: Sequence[Tensor], numbers_nc: Iterable[Tensor]) -> Iterable[tuple[Tensor, ...]]:
    """Return for each block the views of tensors N×C×…, cut along the memory of the first, and of N×C numbers."""
    maps = list(map(with_space, maps))
    cuts = cuts_of(maps[0])
    each = maps + [over_space(numbers, maps[0]) for numbers in numbers_nc]
    return zip(*[blocks(tensor, cuts) for tensor in each], strict=True)


def transform(x: Tensor, pivot_nc: Tensor, scale_nc: Tensor, offset_nc: Tensor, *, relu: bool) -> Tensor:
    """Return y = A·(x − c) + B, in x's dtype and memory format."""
    y, scratch = torch.empty_like(x), Scratch(pivot_nc.dtype)
    for x_block, y_block, pivot, scale, offset in _in_blocks((x, y), (pivot_nc, scale_nc, offset_nc)):
        t = y_block if y.dtype == pivot.dtype else scratch.like(x_block)
        torch.sub(x_block, pivot, out=t).mul_(scale).add_(offset)
        if relu:
            t.relu_()
        if t is not y_block:
            y_block.copy_(t)
    return y


def reduce(
    grad_y: Tensor, x: Tensor, pivot_nc: Tensor, gate: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return g, Σg and Σg·(x − c) per (n, c); g is `grad_y`, masked by the ReLU if its `gate` (A, B) is given."""
    g = grad_y if gate is None else torch.empty_like(x, dtype=pivot_nc.dtype)
    # The sums of float32 blocks are added in float64.
    sums = torch.zeros((2, *x.shape[:2]), dtype=wide_dtype(x.device), device=x.device)
    scratch, space = Scratch(pivot_nc.dtype), space_of(with_space(x))
    for x_block, grad_block, g_block, sum_g, sum_gt, pivot, *scale_offset in _in_blocks(
        (x, grad_y, g), (*sums, pivot_nc, *(gate or ()))
    ):
        t = torch.sub(x_block, pivot, out=scratch.like(x_block))
        if scale_offset:
            # The forward's own expression, so that the mask equals the forward's to the last bit.
            torch.mul(t, scale_offset[0], out=g_block).add_(scale_offset[1])
            # The function that autograd uses for relu: a masked infinite gradient gives 0, not NaN.
            torch.ops.aten.threshold_backward.grad_input(grad_block.to(t.dtype), g_block, 0, grad_input=g_block)
        sum_g.add_(g_block.sum(space, keepdim=True, dtype=t.dtype))
        sum_gt.add_(t.mul_(g_block).sum(space, keepdim=True))
    return g, sums[0], sums[1]


def combine(
    g: Tensor, x: Tensor, pivot_nc: Tensor, slope_nc: Tensor, curve_nc: Tensor, shift_nc: Tensor, *, overwrite: bool
) -> Tensor:
    """Return dx = P·g + Q·(x − c) + R, written to the memory of g if `overwrite`."""
    dx, scratch = g if overwrite else torch.empty_like(x, dtype=pivot_nc.dtype), Scratch(pivot_nc.dtype)
    for x_block, g_block, dx_block, pivot, slope, curve, shift in _in_blocks(
        (x, g, dx), (pivot_nc, slope_nc, curve_nc, shift_nc)
    ):
        t = torch.sub(x_block, pivot, out=scratch.like(x_block)).mul_(curve).add_(shift)
        torch.addcmul(t, g_block.to(t.dtype), slope, out=dx_block)
    return dx
