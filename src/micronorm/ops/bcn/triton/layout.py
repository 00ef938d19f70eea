"""What the kernels assume about a normalization and about memory: N×C×S tensors, given by three strides.

Importing this file does not import Triton.
"""

from enum import StrEnum

import torch
from torch import Tensor

Strides = tuple[int, int, int]

_FARTHEST = 2**31  # kernels index within a sample with 32 bits


class Estimates(StrEnum):
    """The statistics that the channels are normalized with."""

    NONE = "none"  # group normalization
    SHARED = "shared"  # C numbers each
    PER_SAMPLE = "per sample"  # N×C numbers each
    KEPT = "kept"  # shared ones, which the forward has copied to `numbers`


class Affine(StrEnum):
    """The size of the affine parameters γ^c and β^c after the group normalization."""

    NONE = "none"
    PER_GROUP = "per group"
    PER_CHANNEL = "per channel"


def strides_of(x: Tensor) -> Strides | None:
    """Return the strides of x as N×C×S, or None if its spatial axes are not one axis or reach too far for kernels."""
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
    """Return x, or a dense copy (in the memory format of `like`) if kernels cannot read it as N×C×S."""
    if x.is_contiguous() or strides_of(x) is not None:
        return x
    copy = torch.empty_like(x if like is None else like, dtype=x.dtype)
    return copy.copy_(x) if strides_of(copy) is not None else x.contiguous()


def source(x: Tensor) -> Tensor:
    """Return x, or a copy, such that kernels can read it and can write its `empty_like`."""
    x = laid_out(x)
    return x if output_strides(x) is not None else x.contiguous()


def output_strides(x: Tensor) -> Strides | None:
    """Return the strides of an `empty_like` of x as N×C×S."""
    return strides_of(torch.empty_like(x, device="meta"))


def output_like(x: Tensor) -> Tensor:
    """Return an empty tensor for the result: dense, in the memory format of x if kernels can write that."""
    y = torch.empty_like(x)
    if y.is_contiguous() or strides_of(y) is not None:
        return y
    return torch.empty_like(x, memory_format=torch.contiguous_format)
