"""Weight Standardization of one weight or of all weights of a model, by the reference or by a kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor

from micronorm.ops.runtime import takes_kernel
from micronorm.ops.weight import operators, reference

BACKENDS = ("auto", "reference", "triton")
_OUTPUTS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def choose_backend(w: Tensor, backend: str = "auto") -> str:
    """Return what computes this weight's standardization: "reference" or "triton".

    "auto" is "triton" on a CUDA device that runs kernels, if the weight's rows are dense in memory (contiguous or
    channels_last). Otherwise, and under torch.func transforms, it is "reference".

    Raises:
        ValueError: the backend is unknown, or is "triton" and no kernel can compute this weight.

    Example:
        >>> choose_backend(torch.randn(8, 4, 3, 3))
        'reference'
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    return "triton" if backend != "reference" and takes_kernel(backend, w, _weight_problem) else "reference"


def _weight_problem(w: Tensor) -> str | None:
    """Return why no kernel can compute this weight, or None if one can."""
    if w.dtype not in _OUTPUTS:
        return f"kernels take floating dtypes of at least 16 bits, got {w.dtype}"
    if not _rows_are_dense(w):
        return f"kernels need rows that are dense in memory, got strides {w.stride()} for shape {tuple(w.shape)}"
    return None


def _rows_are_dense(w: Tensor) -> bool:
    """Return whether the weights of each output channel are contiguous in memory, one channel after the other."""
    if w.numel() == 0:
        return False
    if w.is_contiguous():
        return True
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return w.ndim in formats and w.is_contiguous(memory_format=formats[w.ndim])


def weight_standardize(
    w: Tensor,
    *,
    center: bool = True,
    scale: bool = True,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Standardize each output channel's weights over their fan-in (labels `eq:6`, `eq:epsilon`).

    .. math::
        \hat W = \frac{W - \mu}{\sqrt{\mathrm{var} + \epsilon}}

    with the biased variance. `center` alone subtracts the mean (`eq:9`); `scale` alone divides the raw weight by
    sqrt(mean W² + ε) (`eq:10`); neither returns W.

    Args:
        w: O×…, at least two axes and a fan-in of at least 2.
        center: subtract the mean.
        scale: divide by the standard deviation (or the root mean square, without `center`).
        eps: added inside the root.
        dtype: of the result, which is computed in float32 at least and rounded once. None is the dtype of W.
        backend: "auto", "reference" or "triton"; see `micronorm.ops.weight.choose_backend`.

    Example:
        >>> w = weight_standardize(torch.randn(8, 4, 3, 3))
        >>> bool(w.sum((1, 2, 3)).abs().max() < 1e-4)
        True
    """
    return weight_standardize_many([w], center=center, scale=scale, eps=eps, dtype=dtype, backend=backend)[0]


def weight_standardize_many(
    weights: Sequence[Tensor],
    *,
    center: bool = True,
    scale: bool = True,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> list[Tensor]:
    """Standardize every weight in a list: one launch for all of them, and one for all their gradients.

    Weights that the kernel computes (see `choose_backend`) take one launch per device and dtype. The others are
    computed one by one. The gradients are computed when the gradient of the last Ŵ is known.

    Args:
        weights: O×… each; this and the rest as in `weight_standardize`.
        center: subtract the mean.
        scale: divide by the standard deviation.
        eps: added inside the root.
        dtype: of the results.
        backend: "auto", "reference" or "triton".

    Example:
        >>> a, b = weight_standardize_many([torch.randn(8, 4), torch.randn(2, 3, 3, 3)], dtype=torch.bfloat16)
        >>> a.dtype, b.shape
        (torch.bfloat16, torch.Size([2, 3, 3, 3]))
    """
    for w in weights:
        reference.check_weight(w)
    if not eps >= 0:
        raise ValueError(f"eps must not be negative, got {eps!r}")
    if dtype is not None and dtype not in _OUTPUTS:
        raise TypeError(f"dtype must be a floating dtype of at least 16 bits, got {dtype}")
    if not center and not scale:
        return [w if dtype is None else w.to(dtype) for w in weights]
    together: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    result = list(weights)
    for i, w in enumerate(weights):
        if choose_backend(w, backend) == "triton":
            together.setdefault((w.device, w.dtype), []).append(i)
        else:
            result[i] = reference.standardize(w, center=center, scale=scale, eps=eps, dtype=dtype)
    for (_, own), places in together.items():
        outs = operators.standardize(
            [weights[i] for i in places], center=center, scale=scale, eps=eps, dtype=own if dtype is None else dtype
        )
        for i, out in zip(places, outs, strict=True):
            result[i] = out
    return result
