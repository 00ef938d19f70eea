"""Standardization of a list of weights as an operation with a gradient, for eager code and for traced code.

Eager code uses an autograd function, which costs microseconds per call where an operator of torch.library costs tens.
Traced code uses the operator, whose outputs must not share memory. Every Ŵ and every gradient is therefore a separate
tensor in both.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from micronorm.ops.moments import compute_dtype
from micronorm.ops.weight import launch, reference


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


def standardize(
    weights: Sequence[Tensor], *, center: bool, scale: bool, eps: float, dtype: torch.dtype
) -> Sequence[Tensor]:
    """Return Ŵ of every weight in `dtype`; all weights have one device and dtype and dense rows."""
    if torch.compiler.is_compiling():
        return weight_standardize_many(list(weights), center, scale, eps, dtype)[:-1]
    outs: Any = _Standardize.apply(center, scale, eps, dtype, *weights)
    return outs


@torch.library.custom_op("micronorm::weight_standardize_many", mutates_args=())
def weight_standardize_many(
    weights: Sequence[Tensor], center: bool, scale: bool, eps: float, dtype: torch.dtype
) -> list[Tensor]:
    """Return Ŵ of every weight, and last the statistics for the backward."""
    outs = launch.outputs(weights, dtype)
    return [*outs, launch.forward(weights, outs, center=center, scale=scale, eps=eps)]


@weight_standardize_many.register_fake
def _(weights: Sequence[Tensor], center: bool, scale: bool, eps: float, dtype: torch.dtype) -> list[Tensor]:
    first = weights[0]
    stats = first.new_empty(3, sum(w.shape[0] for w in weights), dtype=compute_dtype(first.dtype))
    return [*(torch.empty_like(w, dtype=dtype) for w in weights), stats]


@torch.library.custom_op("micronorm::weight_standardize_many_backward", mutates_args=())
def weight_standardize_many_backward(
    grads: Sequence[Tensor], weights: Sequence[Tensor], stats: Tensor, center: bool, scale: bool
) -> list[Tensor]:
    """Return the gradient of every weight."""
    dws = launch.backward(grads, weights, stats, center=center, scale=scale)
    return [dw for dw in dws if dw is not None]  # none is missing: autograd gives zeros for unused outputs


@weight_standardize_many_backward.register_fake
def _(grads: Sequence[Tensor], weights: Sequence[Tensor], stats: Tensor, center: bool, scale: bool) -> list[Tensor]:
    return [torch.empty_like(w) for w in weights]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    weights, ctx.center, ctx.scale, _, _ = inputs
    ctx.save_for_backward(*weights, output[-1])


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    *weights, stats = ctx.saved_tensors
    return weight_standardize_many_backward(grads[:-1], weights, stats, ctx.center, ctx.scale), None, None, None, None


weight_standardize_many.register_autograd(_backward, setup_context=_setup)
