"""Which implementation computes a layer that has several."""

import importlib.metadata
import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor

from micronorm.ops.transforms import is_transformed

BACKENDS = ("auto", "reference", "one-pass", "triton")
"""What `backend=` of a normalization may be."""

KERNELS: tuple[str, ...] = ("triton",)
"""Those that are kernels of our own, for which a device must fit."""

_FORMS = {
    "triton": "fused Triton kernels",
    "one-pass": "plain PyTorch operations, one reduction and one elementwise pass each way",
    "reference": "the plain equations in PyTorch operations, differentiated by autograd",
}

_PLAIN = (Tensor, torch.nn.Parameter)
_LARGEST = 2**31  # kernels count the elements of a sample, and the numbers of all samples, in 32 bits
_NUMBERS = 8  # at most so many for every (n, c)
_LEAST_CAPABILITY = (7, 0)
_LEAST_TRITON = (3, 4)  # compiled kernels are called in its way; it comes with torch 2.8


class Choice(NamedTuple):
    """A form of the computation, and why it is taken."""

    backend: str
    reason: str


def check_backend(backend: str) -> str:
    """The backend itself; ValueError for a word that is none.

    Example:
        >>> check_backend("one-pass")
        'one-pass'
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    return backend


def resolve_backend(backend: str, x: Tensor) -> str:
    """The form that a layer with this `backend` computes in on x: "triton", "one-pass" or "reference".

    Example:
        >>> resolve_backend("auto", torch.randn(1, 8, 4, 4))
        'one-pass'
    """
    if backend not in ("auto", "triton"):
        return check_backend(backend)  # an attribute may have been set since the layer was made
    transformed = is_transformed()
    if backend == "auto" and transformed:
        return "reference"  # which autograd differentiates: the one-pass form has a backward of its own
    if backend == "auto" and not x.is_cuda:
        return "one-pass"
    problem = _device_problem(x) or _tensor_problem(x, transformed) or _size_problem(x)
    if problem is None:
        return "triton"
    if backend == "triton":
        raise ValueError(f'backend="triton" cannot compute this: {problem}; "auto" takes what can')
    return "one-pass"


def kernel_problem(kind: str, index: int | None = None) -> str | None:
    """Why the kernels do not run on a device, given by its type and index; None where they do.

    Example:
        >>> kernel_problem("mps") is None
        False
    """
    if (kind, index) not in _problems:
        _problems[kind, index] = _look_for_problem(kind, index)
    return _problems[kind, index]


# What torch.compiler.assume_constant_result does, which would import the compiler: tracing takes the answer as it is.
kernel_problem._dynamo_marked_constant = True  # type: ignore[attr-defined]
_problems: dict[tuple[str, int | None], str | None] = {}


def _look_for_problem(kind: str, index: int | None) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    version = importlib.metadata.version("triton")
    if tuple(int(part) for part in version.split(".")[:2]) < _LEAST_TRITON:
        return f"kernels need triton {_LEAST_TRITON[0]}.{_LEAST_TRITON[1]} or newer, this is {version}"
    if kind == "cpu":
        from micronorm.ops.bcn.triton.run import INTERPRETED

        return None if INTERPRETED else "kernels need a CUDA device"
    if kind != "cuda":
        return f"kernels need a CUDA device, not {kind}"
    if torch.version.hip is not None:
        return "kernels were not tried on AMD devices"
    if torch.cuda.get_device_capability(index) < _LEAST_CAPABILITY:
        return f"kernels need a device of compute capability {_LEAST_CAPABILITY[0]}.{_LEAST_CAPABILITY[1]} or newer"
    return None


def _device_problem(x: Tensor) -> str | None:
    """Why the kernels do not run where this tensor is."""
    if x.is_cuda:  # the usual case: to spell a device's type takes torch microseconds
        return kernel_problem("cuda", x.get_device())
    return kernel_problem(x.device.type, x.device.index)


def _tensor_problem(x: Tensor, transformed: bool) -> str | None:
    """Why the kernels cannot be launched on this tensor; code that is being compiled gets them as operators."""
    if type(x) not in _PLAIN and not torch.compiler.is_compiling():
        return f"kernels take plain tensors, not {type(x).__name__}"
    if transformed:
        return "kernels know no transforms of torch.func and no forward-mode differentiation"
    return None


def _size_problem(x: Tensor) -> str | None:
    """Why the kernels cannot count what there is of this tensor."""
    shape, count = x.shape, x.numel()
    if count // shape[0] >= _LARGEST:
        return f"a sample of {count // shape[0]} elements is more than kernels count in 32 bits"
    if _NUMBERS * shape[0] * shape[1] >= _LARGEST:
        return f"{shape[0]} samples of {shape[1]} channels have more means than kernels count in 32 bits"
    return None


def explain_backend(device: torch.device | str) -> Choice:
    """The form that `backend="auto"` takes on a device, and why.

    Example:
        >>> explain_backend("cpu").backend
        'one-pass'
    """
    device = torch.device(device)
    problem = kernel_problem(device.type, device.index)
    if device.type == "cuda" and problem is None:
        return Choice("triton", _FORMS["triton"])
    return Choice("one-pass", f"{_FORMS['one-pass']}; {problem or 'the interpreter of kernels is for tests'}")
