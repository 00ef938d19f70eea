"""One launch of a kernel."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.interpreter import InterpretedFunction

from micronorm.ops.bcn.triton.forward import forward_whole

INTERPRETED = isinstance(forward_whole, InterpretedFunction)
"""Whether triton runs its kernels in Python, on the CPU (TRITON_INTERPRET=1 when it was imported)."""

# What triton itself asks torch for.
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
# torch.cuda's, without its look whether CUDA was ever used: here a tensor is on it.
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_ALIGNMENT = 15  # kernels are compiled for addresses divisible by 16


def _watched() -> bool:
    """Whether a profiler has asked triton to be told of launches."""
    hook: Any = knobs.runtime.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))


class Launch:
    """A kernel with its grid and every argument but the tensors, which are on one device at every call.

    The compiled kernel is kept and called by its addresses: for triton to find it among the compiled ones and to ask
    the driver about every tensor costs more than a small layer takes.
    """

    def __init__(
        self, kernel: Any, grid: Sequence[int], scalars: Sequence[int], constants: Mapping[str, Any], warps: int
    ) -> None:
        self.kernel, self.grid, self.warps = kernel, (*grid, 1, 1)[:3], warps
        self.scalars, self.constants = tuple(scalars), dict(constants)
        self.compiled: Any = None  # kept alive: the addresses below are its
        self.start: Any = None
        self.device: int | None = None
        self.head: tuple[Any, ...] = ()
        self.tail: tuple[Any, ...] = ()

    def __call__(self, *tensors: Tensor) -> None:
        """Launch on the current stream."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        bits = 0
        for address in addresses:
            bits |= address
        if self.compiled is None or bits & _ALIGNMENT or _watched():
            self._find(tensors, aligned=not bits & _ALIGNMENT)
        else:
            self.start(*self.grid, current_stream(self.device), *self.head, *addresses, *self.tail)

    def _find(self, tensors: tuple[Tensor, ...], *, aligned: bool) -> None:
        """Launch by triton's own way, and keep what it compiled."""
        early = starts_early(tensors[0].device)
        self.constants["EARLY"] = early
        options: dict[str, Any] = {"num_warps": self.warps} | ({"launch_pdl": True} if early else {})
        compiled = self.kernel[self.grid](*tensors, *self.scalars, **self.constants, **options)
        if aligned and isinstance(compiled, CompiledKernel):
            names = self.kernel.arg_names[len(tensors) + len(self.scalars) :]
            self.tail = (*self.scalars, *(self.constants[name] for name in names))
            self.start, self.head = _starter(compiled)
            self.device = tensors[0].device.index
            self.compiled = compiled


def _starter(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """What starts a compiled kernel, given grid and stream, and its arguments before those of the kernel itself."""
    # The function, its metadata, and no metadata and hooks of the launch, which profilers would set.
    head = (compiled.packed_metadata, None, None, None)
    launcher = compiled.run
    if getattr(launcher, "global_scratch_size", 1) == 0 == getattr(launcher, "profile_scratch_size", 1):
        # The C function within triton's launcher, whose Python part makes the scratch memory that is not needed here.
        modes = (launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)
        return launcher.launch, (compiled.function, *modes, *head)
    return launcher, (compiled.function, *head)


@lru_cache
def starts_early(device: torch.device) -> bool:
    """Whether a launch may be prepared while the one before it still runs (CUDA's programmatic dependent launch)."""
    return device.type == "cuda" and not INTERPRETED and torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache
def processors(device: torch.device) -> int:
    """How many multiprocessors work side by side."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
