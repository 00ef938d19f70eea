"""Weight Standardization of one weight or of a whole model's, by the reference or by a kernel."""

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from micronorm.ops.transforms import is_transformed
from micronorm.ops.weight import operators, reference

BACKENDS = ("auto", "reference", "triton")
TRITON = importlib.util.find_spec("triton") is not None
_OUTPUTS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def choose_backend(w: Tensor, backend: str = "auto") -> str:
    """What computes this weight's standardization: "reference" or "triton".

    "auto" is "triton" on a CUDA device where triton is installed and the weight's rows are dense in memory (contiguous
    or channels_last), "reference" otherwise and under transforms of torch.func. Asking for "triton" where it cannot be
    is an error, on a CPU too unless Triton's interpreter is active.

    Example:
        >>> choose_backend(torch.randn(8, 4, 3, 3))
        'reference'
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "reference" or (backend == "auto" and not w.is_cuda):
        return "reference"
    obstacle = _obstacle(w)
    if backend == "auto":
        return "triton" if obstacle is None else "reference"
    if obstacle is not None:
        raise ValueError(f'backend="triton" {obstacle}; leave backend="auto" for the reference there')
    return backend


def _obstacle(w: Tensor) -> str | None:
    """Why no kernel can compute this weight; None where one can."""
    if is_transformed():
        return "knows no transforms of torch.func and no forward-mode differentiation"
    if not TRITON:
        return "needs the package triton, which is not installed (pip install triton)"
    if w.device.type not in ("cuda", "cpu"):
        return f"needs a weight on a CUDA device, got one on {w.device}"
    if w.device.type == "cpu" and not _interpreted():
        return "needs a weight on a CUDA device, or TRITON_INTERPRET=1 in the environment before triton is imported"
    if type(w) not in (Tensor, nn.Parameter) or w.dtype not in _OUTPUTS:
        return f"knows plain tensors of the ordinary floating dtypes, got {type(w).__name__} of {w.dtype}"
    if not _rows_are_dense(w):
        return f"needs rows that are dense in memory, got strides {w.stride()} for shape {tuple(w.shape)}"
    return None


def _interpreted() -> bool:
    from micronorm.ops.weight import kernels

    return kernels.INTERPRETED


def _rows_are_dense(w: Tensor) -> bool:
    """Whether each output channel's weights are one run of memory, in whatever order, one channel after the other."""
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
        dtype: of the result, which is computed in float32 at least and rounded once; W's own where none is given.
        backend: "auto", "reference" or "triton"; `micronorm.ops.weight.choose_backend` says what "auto" is.

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
    """`weight_standardize` of every weight in a list: one launch for all, and one for all their gradients.

    One launch for each device and dtype among the weights that the kernel computes (`choose_backend`); those that it
    does not are computed one by one. The gradients come when that of the last Ŵ is known.

    Args:
        weights: O×… each, as for `weight_standardize`.
        center: as there, and so on.
        scale: as there.
        eps: as there.
        dtype: as there.
        backend: as there.

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
