"""Which implementation computes a layer that has several."""

from typing import NamedTuple

import torch

BACKENDS = ("auto", "reference")
"""What `backend=` of `BatchChannelNorm` may be."""

KERNELS: tuple[str, ...] = tuple(name for name in BACKENDS if name not in ("auto", "reference"))
"""Those that are kernels of our own, for which a device must fit."""

_FORMS = {
    "one-pass": "plain PyTorch operations, one reduction and one elementwise pass each way",
    "reference": "the plain equations in PyTorch operations, differentiated by autograd",
}


class Choice(NamedTuple):
    """A form of the computation, and why it is taken."""

    backend: str
    reason: str


def resolve_backend(backend: str) -> str:
    """The form that a layer with this `backend` computes in: "one-pass" or "reference".

    Example:
        >>> resolve_backend("auto")
        'one-pass'
    """
    return "one-pass" if backend == "auto" else backend


def explain_backend(device: torch.device | str) -> Choice:
    """The form that `backend="auto"` takes on a device, and why.

    Example:
        >>> explain_backend("cpu").backend
        'one-pass'
    """
    chosen = resolve_backend("auto")
    kind = torch.device(device).type
    kernels = (
        f"the kernels ({', '.join(KERNELS)}) are not taken on {kind}" if KERNELS else "no Triton kernel is built yet"
    )
    return Choice(chosen, f"{_FORMS[chosen]}; {kernels}")
