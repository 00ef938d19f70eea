"""How tensors lie in memory, as kernels see it: N×C×S by three strides. Needs no triton."""

import torch
from torch import Tensor

Strides = tuple[int, int, int]

_FARTHEST = 2**31  # kernels count within a sample in 32 bits


def strides_of(x: Tensor) -> Strides | None:
    """The strides of x seen as N×C×S; None where its spatial axes are not one, or reach too far for kernels."""
    shape, strides = x.shape, x.stride()
    space_stride, extent = 1, 1
    for axis in range(len(strides) - 1, 1, -1):
        size, stride = shape[axis], strides[axis]
        if size == 1:
            continue
        if extent == 1:
            space_stride = stride
        elif stride != space_stride * extent:
            return None
        extent *= size
    if (shape[1] - 1) * strides[1] >= _FARTHEST or (extent - 1) * space_stride >= _FARTHEST:
        return None  # part of a huge tensor
    return strides[0], strides[1], space_stride


def laid_out(x: Tensor, like: Tensor | None = None) -> Tensor:
    """x, or a dense copy of it (in the memory format of `like`) where it cannot be read as N×C×S."""
    if x.is_contiguous() or strides_of(x) is not None:
        return x
    copy = torch.empty_like(x if like is None else like, dtype=x.dtype)
    return copy.copy_(x) if strides_of(copy) is not None else x.contiguous()


def source(x: Tensor) -> Tensor:
    """x, or a copy of it, that kernels can read and whose `empty_like` they can write, an `output_like` of x."""
    x = laid_out(x)
    return x if output_strides(x) is not None else x.contiguous()


def output_strides(x: Tensor) -> Strides | None:
    """The strides of an `empty_like` of x, as those of x."""
    return strides_of(torch.empty_like(x, device="meta"))


def output_like(x: Tensor) -> Tensor:
    """An empty tensor for the result: dense, in the memory format of x where kernels can write that."""
    y = torch.empty_like(x)
    if y.is_contiguous() or strides_of(y) is not None:
        return y
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def numbers_size(samples: int, channels: int, groups: int) -> int:
    """How many numbers a forward leaves; see pieces.py."""
    return 5 * samples * channels + 2 * channels + samples * groups + 1
