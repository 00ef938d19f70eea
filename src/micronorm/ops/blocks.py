"""Passes over large tensors, block by block.

An eager pass is several operations, each reading and writing memory. Cut into blocks that fit the cache, all but the
first find their operands there, and no temporary is as large as the tensor itself: touching fresh pages costs more
than the arithmetic.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from micronorm.ops.runtime import is_transformed

# 4 MB of float32. Measured on two cores with 1 MB of L2 each: 2 to 8 MB are alike, 0.5 MB and 16 MB about half slower.
_BLOCK = 1 << 20


class Cut(NamedTuple):
    """One axis of a tensor, and the number of entries each piece of it takes."""

    axis: int
    size: int
    step: int

    @property
    def pieces(self) -> int:
        """How many pieces; the last one may be shorter."""
        return -(-self.size // self.step)


def can_block(x: Tensor) -> bool:
    """Whether passes over x may work in place, block by block: eagerly on the CPU, and with nobody recording."""
    eager = not torch.compiler.is_compiling() and not is_transformed()
    return x.device.type == "cpu" and not torch.is_grad_enabled() and eager


def with_space(x: Tensor) -> Tensor:
    """View x with at least one spatial axis: N×C becomes N×C×1."""
    return x.unsqueeze(-1) if x.ndim == 2 else x


def space_of(x: Tensor) -> tuple[int, ...]:
    """The spatial axes of N×C×…."""
    return tuple(range(2, x.ndim))


def cuts_of(x: Tensor) -> list[Cut]:
    """How to cut N×C×… into blocks that lie in one piece of memory: along the axes with the largest strides."""
    cuts, elements = [], x.numel()
    for axis in sorted(range(3), key=x.stride, reverse=True):
        if elements <= _BLOCK:
            break
        size = x.shape[axis]
        elements //= size
        step = min(size, max(1, _BLOCK // elements))
        elements *= step
        if step < size:
            cuts.append(Cut(axis, size, step))
    return cuts


def blocks(x: Tensor, cuts: list[Cut]) -> list[Tensor]:
    """Views of the blocks. An axis with one entry per piece gives each its own; a singleton is shared by all."""
    parts = [x]
    for cut in cuts:
        have = x.shape[cut.axis]
        if have in (cut.size, cut.pieces):
            step = cut.step if have == cut.size else 1
            parts = [piece for part in parts for piece in part.split(step, cut.axis)]
        else:
            assert have == 1
            parts = [part for part in parts for _ in range(cut.pieces)]
    return parts


class Scratch:
    """One block's worth of working memory, used again for every block of the same shape."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.memory: Tensor | None = None

    def like(self, block: Tensor) -> Tensor:
        """Uninitialized memory of the block's shape and strides."""
        if self.memory is None or self.memory.shape != block.shape:
            self.memory = torch.empty_like(block, dtype=self.dtype)
        return self.memory
