"""What this machine can run: is Triton installed, may a kernel run on a tensor, on which device and stream.

Only this file inspects the machine. Importing it does not import Triton.
"""

import contextlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from micronorm.ops.private_api import (
    current_device,
    forward_ad_level,
    functorch_transforms_active,
    is_legacy_batched,
    mark_constant,
)

LEAST_CAPABILITY = (7, 0)
LEAST_TRITON = (3, 4)  # comes with torch 2.8; older versions launch compiled kernels in another way
_EARLY_CAPABILITY = (9, 0)  # the first devices with programmatic dependent launch
_PLAIN = (Tensor, torch.nn.Parameter)


# --- may a kernel run? ------------------------------------------------------------------------------------------------

_problems: dict[tuple[str, int | None], str | None] = {}


@mark_constant
def kernel_problem(kind: str, index: int | None = None) -> str | None:
    """Return why kernels do not run on a device, or None if they do.

    Args:
        kind: the device's type, such as "cuda".
        index: the device's index.

    Example:
        >>> kernel_problem("mps") is None
        False
    """
    if (kind, index) not in _problems:
        _problems[kind, index] = _find_problem(kind, index)
    return _problems[kind, index]


def _find_problem(kind: str, index: int | None) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    version = importlib.metadata.version("triton")
    if tuple(int(part) for part in version.split(".")[:2]) < LEAST_TRITON:
        return f"kernels need triton {LEAST_TRITON[0]}.{LEAST_TRITON[1]} or newer, this is {version}"
    if kind == "cpu":
        return None if interpreted() else "kernels need a CUDA device"
    if kind != "cuda":
        return f"kernels need a CUDA device, not {kind}"
    if torch.version.hip is not None:
        return "kernels were not tried on AMD devices"
    if torch.cuda.get_device_capability(index) < LEAST_CAPABILITY:
        return f"kernels need a device of compute capability {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or newer"
    return None


def takes_kernel(backend: str, x: Tensor, own_problem: Callable[[Tensor], str | None]) -> bool:
    """Return whether a kernel computes x. "auto" takes one for CUDA tensors if it can, "triton" wherever kernels run.

    Args:
        backend: "auto" or "triton".
        x: the input.
        own_problem: returns why this kernel in particular cannot compute x, or None.

    Raises:
        ValueError: the backend is "triton", and no kernel can compute x.
    """
    if backend == "auto" and not x.is_cuda:
        return False
    problem = tensor_problem(x) or own_problem(x)
    if problem is not None and backend == "triton":
        raise ValueError(f'backend="triton" cannot compute this: {problem}; use backend="auto"')
    return problem is None


def tensor_problem(x: Tensor) -> str | None:
    """Return why no kernel can be launched on a tensor, or None if one can."""
    # Reading `x.device.type` takes torch microseconds, so the usual case goes without it.
    device = ("cuda", x.get_device()) if x.is_cuda else (x.device.type, x.device.index)
    problem = kernel_problem(*device)
    if problem is not None:
        return problem
    # Code that is being compiled calls the kernels as operators, on plain tensors.
    if type(x) not in _PLAIN and not torch.compiler.is_compiling():
        return f"kernels take plain tensors, not {type(x).__name__}"
    if is_transformed():
        return "kernels do not support torch.func transforms and forward-mode differentiation"
    return None


@cache
def interpreted() -> bool:
    """Return whether Triton runs kernels in Python on the CPU (TRITON_INTERPRET=1 when triton was imported)."""
    import triton

    return not isinstance(triton.jit(_probe), triton.runtime.JITFunction)


def _probe() -> None:
    """Do nothing. `interpreted` compiles this function to see which class `triton.jit` returns."""


# --- may a backward be computed outside of autograd? ------------------------------------------------------------------


def is_transformed() -> bool:
    """Return whether a torch.func transform or forward-mode differentiation is active.

    Then a computation must consist of plain operations. In code that is being compiled this is False: compilers handle
    transforms themselves.

    Example:
        >>> is_transformed(), torch.func.vmap(lambda x: x * is_transformed())(torch.ones(2)).tolist()
        (False, [1.0, 1.0])
    """
    if torch.compiler.is_compiling():
        return False
    return functorch_transforms_active() or forward_ad_level() >= 0


def is_plain_backward(*grads: Tensor) -> bool:
    """Return whether a kernel may compute the running backward pass, given its incoming gradients.

    It may not under `create_graph`, which differentiates the backward again, nor with `is_grads_batched`.

    Example:
        >>> with torch.no_grad():
        ...     is_plain_backward(torch.ones(2))
        True
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or is_transformed():
        return False
    return not any(map(is_legacy_batched, grads))


# --- on which device? -------------------------------------------------------------------------------------------------


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Return a context in which Triton launches on `device`; outside it uses the current device.

    Example:
        >>> with on_device(torch.device("cpu")):
        ...     pass
    """
    if device.type != "cuda" or device.index == current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function so that it launches on the device of its first argument, a tensor.

    It does what `on_device` does, without the cost of a context where the device is the current one.
    """

    def called(x: Tensor, *args: Any) -> Any:
        if x.is_cuda and x.get_device() != current_device():
            with torch.cuda.device(x.device):
                return function(x, *args)
        return function(x, *args)

    return called


def capturing(device: torch.device) -> bool:
    """Return whether the current stream of a device is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@lru_cache
def starts_early(device: torch.device) -> bool:
    """Return whether a launch may begin while the one before it still runs (programmatic dependent launch)."""
    if device.type != "cuda" or interpreted():
        return False
    return torch.cuda.get_device_capability(device) >= _EARLY_CAPABILITY


@lru_cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a CUDA device; 2 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
