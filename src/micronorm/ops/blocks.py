"""Passes over large tensors on the CPU, block by block.

An eager pass consists of several operations, each of which reads and writes memory. In blocks that fit the cache, all
but the first operation find their operands there. No temporary is as large as the tensor itself, which matters because
touching new memory pages costs more than the arithmetic.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from micronorm.ops.runtime import is_transformed

# 4 MB of float32. Measured on two cores with 1 MB of L2 each: 2 to 8 MB are alike, 0.5 MB and 16 MB about half slower.
_BLOCK = 1 << 20


class Cut(NamedTuple):
    """How one axis of a tensor is cut: its size, and the entries of each piece."""

    axis: int
    size: int
    step: int

    @property
    def pieces(self) -> int:
        """Return the number of pieces; the last one may be shorter."""
        return -(-self.size // self.step)


def can_block(x: Tensor) -> bool:
    """Return whether passes over x may work in place, block by block: on the CPU, eagerly and without autograd."""
    eager = not torch.compiler.is_compiling() and not is_transformed()
    return x.device.type == "cpu" and not torch.is_grad_enabled() and eager


def with_space(x: Tensor) -> Tensor:
    """View x with at least one spatial axis: N×C becomes N×C×1."""
    return x.unsqueeze(-1) if x.ndim == 2 else x


def space_of(x: Tensor) -> tuple[int, ...]:
    """Return the spatial axes of N×C×…."""
    return tuple(range(2, x.ndim))


def cuts_of(x: Tensor) -> list[Cut]:
    """Cut N×C×… into blocks that are contiguous in memory: along the axes with the largest strides."""
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
    """Return views of the blocks. An axis with one entry per piece is distributed; an axis of size 1 is shared."""
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
    """Working memory of one block, reused for every block of the same shape."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.memory: Tensor | None = None

    def like(self, block: Tensor) -> Tensor:
        """Return uninitialized memory of the block's shape and strides."""
        if self.memory is None or self.memory.shape != block.shape:
            self.memory = torch.empty_like(block, dtype=self.dtype)
        return self.memory
