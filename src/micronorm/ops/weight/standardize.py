"""Weight Standardization of one weight or of all weights of a model, by the reference or by a kernel.

For the kernels eager code uses an autograd function, which costs microseconds per call where an operator of
torch.library costs tens. Traced code uses the operator, whose outputs must not share memory. Every Ŵ and every gradient
is therefore a separate tensor in both.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from micronorm.ops.moments import compute_dtype
from micronorm.ops.private_api import fast_apply
from micronorm.ops.runtime import takes_kernel
from micronorm.ops.weight import launch, reference

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
        group, options = [weights[i] for i in places], (center, scale, eps, own if dtype is None else dtype)
        for i, out in zip(places, standardize_by_kernel(group, *options), strict=True):
            result[i] = out
    return result


def standardize_by_kernel(
    weights: Sequence[Tensor], center: bool, scale: bool, eps: float, dtype: torch.dtype
) -> Sequence[Tensor]:
    """Return Ŵ of weights of one device and dtype, for which `choose_backend` has returned "triton"."""
    if torch.compiler.is_compiling():
        return _operator(weights, center, scale, eps, dtype)[:-1]
    return _apply(center, scale, eps, dtype, *weights)


# --- the kernels as an operation with a gradient: for eager code, then for traced code -------------------------------


class _Standardize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, center: bool, scale: bool, eps: float, dtype: torch.dtype, *weights: Tensor) -> Any:
        outs = tuple(launch.outputs(weights, dtype))
        stats = launch.forward(weights, outs, center=center, scale=scale, eps=eps)
        ctx.save_for_backward(*weights, stats)
        ctx.center, ctx.scale, ctx.eps = center, scale, eps
        ctx.set_materialize_grads(False)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        *weights, stats = ctx.saved_tensors
        wanted = [g if need else None for g, need in zip(grads, ctx.needs_input_grad[4:], strict=True)]
        if torch.is_grad_enabled():  # create_graph: use operations that can be differentiated again
            options = {"center": ctx.center, "scale": ctx.scale, "eps": ctx.eps}
            dws = [
                None if g is None else reference.gradient(w, g, **options) for w, g in zip(weights, wanted, strict=True)
            ]
        else:
            dws = launch.backward(wanted, weights, stats, center=ctx.center, scale=ctx.scale)
        return None, None, None, None, *dws


# The kernels are not called under torch.func transforms, so the search for them in every argument is not needed.
_apply = fast_apply(_Standardize)


# The operators name their schemas because torch 2.6 does not infer them from lists of tensors.
@torch.library.custom_op(
    "micronorm::weight_standardize_many",
    mutates_args=(),
    schema="(Tensor[] weights, bool center, bool scale, float eps, ScalarType dtype) -> Tensor[]",
)
def _operator(weights: Sequence[Tensor], center: bool, scale: bool, eps: float, dtype: torch.dtype) -> list[Tensor]:
    """Return Ŵ of every weight, and last the statistics for the backward."""
    outs = launch.outputs(weights, dtype)
    return [*outs, launch.forward(weights, outs, center=center, scale=scale, eps=eps)]


@_operator.register_fake
def _(weights: Sequence[Tensor], center: bool, scale: bool, eps: float, dtype: torch.dtype) -> list[Tensor]:
    first = weights[0]
    stats = first.new_empty(3, sum(w.shape[0] for w in weights), dtype=compute_dtype(first.dtype))
    return [*(_like(w, dtype) for w in weights), stats]


def _like(w: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor with the strides of w.

    `torch.empty_like` of a fake tensor gives axes of size 1 other strides than that of a real tensor does. Convolutions
    choose the memory format of their output by these strides if the weight has one input channel.
    """
    return w.new_empty_strided(w.shape, w.stride(), dtype=dtype)


@torch.library.custom_op(
    "micronorm::weight_standardize_many_backward",
    mutates_args=(),
    schema="(Tensor[] grads, Tensor[] weights, Tensor stats, bool center, bool scale) -> Tensor[]",
)
def _operator_backward(
    grads: Sequence[Tensor], weights: Sequence[Tensor], stats: Tensor, center: bool, scale: bool
) -> list[Tensor]:
    """Return the gradient of every weight."""
    dws = launch.backward(grads, weights, stats, center=center, scale=scale)
    return [dw for dw in dws if dw is not None]  # none is missing: autograd gives zeros for unused outputs


@_operator_backward.register_fake
def _(grads: Sequence[Tensor], weights: Sequence[Tensor], stats: Tensor, center: bool, scale: bool) -> list[Tensor]:
    return [_like(w, w.dtype) for w in weights]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    weights, ctx.center, ctx.scale, _, _ = inputs
    ctx.save_for_backward(*weights, output[-1])


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    *weights, stats = ctx.saved_tensors
    return _operator_backward(grads[:-1], weights, stats, ctx.center, ctx.scale), None, None, None, None


_operator.register_autograd(_backward, setup_context=_setup)
