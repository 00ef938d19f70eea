"""One launch of a kernel. Importing this file imports Triton."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from micronorm.ops.private_api import compiled_launcher, current_stream, launch_hook_check
from micronorm.ops.runtime import starts_early

_ALIGNMENT = 15  # kernels are compiled for addresses divisible by 16
_hook_active = launch_hook_check()


class Launch:
    """A kernel with its grid and all arguments except the tensors, which are on the same device in every call.

    `constants` may have more entries than the kernel has constants: those that it names are taken. EARLY, which says
    whether the kernel may start before the one before it ends, is added here. A kernel may take numbers that change
    from call to call: `values`, floats which follow the tensors.

    After the first call the compiled kernel is started directly, by addresses. Triton's own launch looks up the
    compiled kernel and queries the driver about every tensor, which takes longer than a small layer runs.
    """

    def __init__(
        self, kernel: Any, programs: int, scalars: Sequence[int], constants: Mapping[str, Any], warps: int
    ) -> None:
        self.kernel, self.grid, self.warps = kernel, (programs, 1, 1), warps
        self.scalars = tuple(scalars)
        self.constants = {name: constants[name] for name in kernel.arg_names if name in constants}
        self.compiled: Any = None  # kept alive, because `start` belongs to it
        self.start: Any = None
        self.device: int | None = None
        self.head: tuple[Any, ...] = ()
        self.tail: tuple[Any, ...] = ()

    def __call__(self, *tensors: Tensor, values: tuple[float, ...] = ()) -> None:
        """Launch on the current stream."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        bits = 0
        for address in addresses:
            bits |= address
        if self.compiled is None or bits & _ALIGNMENT or _hook_active():
            self._launch_by_triton(tensors, values, aligned=not bits & _ALIGNMENT)
        else:
            self.start(*self.grid, current_stream(self.device), *self.head, *addresses, *values, *self.tail)

    def _launch_by_triton(self, tensors: tuple[Tensor, ...], values: tuple[float, ...], *, aligned: bool) -> None:
        """Launch by Triton's public interface, and keep the compiled kernel."""
        early = "EARLY" in self.kernel.arg_names and starts_early(tensors[0].device)
        if "EARLY" in self.kernel.arg_names:
            self.constants["EARLY"] = early
        options: dict[str, Any] = {"num_warps": self.warps} | ({"launch_pdl": True} if early else {})
        compiled = self.kernel[self.grid](*tensors, *values, *self.scalars, **self.constants, **options)
        launcher = compiled_launcher(compiled) if aligned else None
        if launcher is not None:
            names = self.kernel.arg_names[len(tensors) + len(values) + len(self.scalars) :]
            self.tail = (*self.scalars, *(self.constants[name] for name in names))
            self.start, self.head = launcher
            self.device = tensors[0].device.index
            self.compiled = compiled
