"""One launch of a kernel."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.interpreter import InterpretedFunction

from micronorm.ops.bcn.triton.forward import forward_whole

INTERPRETED = isinstance(forward_whole, InterpretedFunction)
"""Whether triton runs its kernels in Python, on the CPU (TRITON_INTERPRET=1 when it was imported)."""

_ALIGNMENT = 15  # kernels are compiled for addresses divisible by 16


class Launch:
    """A kernel with its grid and every argument but the tensors.

    The compiled kernel is kept: for triton to find it among the compiled ones costs more than a small layer takes.
    """

    def __init__(
        self, kernel: Any, grid: Sequence[int], scalars: Sequence[int], constants: Mapping[str, Any], warps: int
    ) -> None:
        self.kernel, self.grid, self.warps = kernel, (*grid, 1, 1)[:3], warps
        self.scalars, self.constants = tuple(scalars), dict(constants)
        self.runner: Any = None
        self.tail: tuple[Any, ...] = ()

    def __call__(self, *tensors: Tensor) -> None:
        """Launch on the current stream."""
        aligned = not any(tensor.data_ptr() & _ALIGNMENT for tensor in tensors)
        if aligned and self.runner is not None:
            self.runner(*tensors, *self.tail)
            return
        compiled = self.kernel[self.grid](*tensors, *self.scalars, **self.constants, num_warps=self.warps)
        if aligned and isinstance(compiled, CompiledKernel):
            names = self.kernel.arg_names[len(tensors) + len(self.scalars) :]
            self.tail = (*self.scalars, *(self.constants[name] for name in names))
            self.runner = compiled[self.grid]


@lru_cache
def processors(device: torch.device) -> int:
    """How many multiprocessors work side by side."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
