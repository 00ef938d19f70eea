"""The choice of the implementation that computes a normalization layer."""

from typing import NamedTuple

import torch
from torch import Tensor

from micronorm.ops.runtime import is_transformed, kernel_problem, takes_kernel

BACKENDS = ("auto", "reference", "one-pass", "triton")
"""The values that `backend=` of a normalization accepts."""

_LARGEST = 2**31  # kernels index the elements of a sample, and the statistics of all samples, with 32 bits
_NUMBERS = 8  # statistics for every (n, c), at most


class Choice(NamedTuple):
    """A backend, and the reason why it is used."""

    backend: str
    reason: str


def check_backend(backend: str) -> str:
    """Return the backend, or raise a ValueError if it is unknown."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    return backend


def resolve_backend(backend: str, x: Tensor) -> str:
    """Return the backend that computes a layer with this setting on x: "triton", "one-pass" or "reference".

    Raises:
        ValueError: the backend is unknown, or is "triton" and kernels cannot compute this input.
    """
    if backend not in ("auto", "triton"):
        return check_backend(backend)  # an attribute may have been set since the layer was made
    if backend == "auto" and is_transformed():
        return "reference"  # autograd can differentiate it; the one-pass form has its own backward
    return "triton" if takes_kernel(backend, x, _size_problem) else "one-pass"


def _size_problem(x: Tensor) -> str | None:
    """Return why a tensor is too large for the kernels, or None if it is not."""
    shape, count = x.shape, x.numel()
    if count // shape[0] >= _LARGEST:
        return f"a sample of {count // shape[0]} elements is too large for kernels, which index with 32 bits"
    if _NUMBERS * shape[0] * shape[1] >= _LARGEST:
        return (
            f"{shape[0]} samples of {shape[1]} channels have too many statistics for kernels, which index with 32 bits"
        )
    return None


def explain_backend(device: torch.device | str) -> Choice:
    """Return the backend that `backend="auto"` uses on a device, and why."""
    device = torch.device(device)
    problem = kernel_problem(device.type, device.index)
    if device.type == "cuda" and problem is None:
        return Choice("triton", "fused Triton kernels")
    form = "plain PyTorch operations, one reduction and one elementwise pass each way"
    return Choice("one-pass", f"{form}; {problem or 'the interpreter of kernels is for tests'}")
