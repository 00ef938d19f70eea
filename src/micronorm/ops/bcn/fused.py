"""Batch-Channel Normalization and group normalization by the Triton kernels, for autograd, compilers and exporters.

Eager code uses the autograd function `_Normalize`. Traced code uses the operators `micronorm::normalize` and
`micronorm::normalize_backward`, which call the same Python functions. Eager code does not use the operators, because a
call costs tens of microseconds, more than a small layer takes. Triton is imported when the first kernel is called.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from micronorm.ops.activation import IDENTITY, Activation, ActivationKind
from micronorm.ops.bcn.onepass import batch_channel_norm
from micronorm.ops.bcn.triton.layout import Estimates, output_like
from micronorm.ops.moments import Moments, compute_dtype
from micronorm.ops.packed import kept_blend, kept_estimates, numbers_size
from micronorm.ops.private_api import fast_apply


@cache
def kernels() -> Any:
    """Return the module `triton.run`, which is imported on first use, and Triton with it."""
    from micronorm.ops.bcn.triton import run

    return run


_NONE, _SHARED, _PER_SAMPLE, _KEPT = Estimates  # reading a member of an enum takes longer than a global


def _rule(mean: Tensor | None, weight: Tensor | None, groups: int, eps: float, activation: str, slope: float) -> Any:
    """Return the normalization as the kernels take it."""
    kind = _NONE if weight is None else _KEPT
    if mean is not None:
        kind = _SHARED if mean.ndim == 1 else _PER_SAMPLE
    return kernels().rule(kind, groups, eps, activation, slope)


_TENSORS = "Tensor? mean, Tensor? var, Tensor? weight, Tensor? bias, Tensor? group_weight, Tensor? group_bias"
_OPTIONS = "int groups, float eps, str activation, float slope, bool from_batch"


def normalize(x: Tensor, residual: Tensor | None, parts: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return y and the packed `numbers` that the backward and the window need.

    `parts` are those of `kernels().estimates`, if the estimates were derived from x. The rest are the blend and the
    arguments in `_TENSORS` and `_OPTIONS`; `from_batch` is for the backward.
    """
    norm = rest[:7]
    return kernels().forward(x, residual, parts, _rule(norm[0], norm[2], *rest[7:11]), norm)


def _fake(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    samples, channels = x.shape[:2]
    return output_like(x), x.new_empty(numbers_size(samples, channels, args[9]), dtype=compute_dtype(x.dtype))


def normalize_backward(
    grad: Tensor, x: Tensor, output: Tensor | None, numbers: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the residual (empty without one) and of the parameters, one after the other."""
    dx, residual, parameters = _backward(grad, x, output, numbers, *rest)
    return dx, x.new_empty(0) if residual is None else residual, parameters


def _backward(grad: Tensor, x: Tensor, output: Tensor | None, numbers: Tensor, *rest: Any) -> Any:
    """Do `normalize_backward`, but return None for a missing residual, which an operator cannot return."""
    rule = _rule(rest[0], rest[2], *rest[6:10])
    return kernels().backward(x, grad, output, numbers, rule, (*rest[:6], None), rest[10])


def _fake_backward(
    grad: Tensor, x: Tensor, output: Tensor | None, numbers: Tensor, *tensors: Any
) -> tuple[Tensor, Tensor, Tensor]:
    entries = sum(0 if t is None else t.shape[0] for t in tensors[2:6])
    return (
        output_like(x),
        x.new_empty(0) if output is None else output_like(x),
        x.new_empty(entries, dtype=numbers.dtype),
    )


# --- autograd --------------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, residual, _, mean, var, weight, bias, group_weight, group_bias, _, *options = inputs
    y, numbers = output
    if mean is not None and mean.ndim == 1 and not options[-1]:
        # The layer's own estimates, which a commit changes. The numbers hold copies, but in a narrower dtype.
        wider = mean.dtype.itemsize > numbers.dtype.itemsize
        mean, var = (mean.clone(), var.clone()) if wider else (None, None)
    gated = y if residual is not None and options[2] != ActivationKind.IDENTITY else None
    ctx.save_for_backward(x, gated, numbers, mean, var, weight, bias, group_weight, group_bias)
    ctx.options = options
    ctx.has_residual = residual is not None


def _gradients(ctx: Any, grad: Tensor, backward: Callable) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    if torch.is_grad_enabled():
        return _twice_differentiable(ctx, grad, saved)
    dx, residual, parameters = backward(grad, *saved, *ctx.options)
    if ctx.has_residual and saved[1] is None:  # no activation follows the addition
        residual = grad
    affine, own = saved[5:9], parameters.dtype
    parts = iter(parameters.split_with_sizes([p.numel() for p in affine if p is not None]))
    grads = [None if p is None else next(parts) if p.dtype == own else next(parts).to(p.dtype) for p in affine]
    return dx, residual if ctx.has_residual else None, None, None, None, *grads, *(None,) * 6


def _twice_differentiable(ctx: Any, grad: Tensor, saved: tuple[Any, ...]) -> tuple[Any, ...]:
    """Compute the gradients under create_graph by the one-pass form, whose backward autograd can differentiate."""
    x, output, numbers, mean, var, weight, bias, group_weight, group_bias = saved
    affine = (weight, bias, group_weight, group_bias)
    groups, eps, kind, slope, from_batch = ctx.options
    if mean is None and weight is not None:
        mean, var = kept_estimates(numbers, x.shape[0], x.shape[1])
    estimates = None if from_batch or mean is None else Moments(mean, var)
    # Only request gradients for inputs that require them; `torch.autograd.grad` raises for the others.
    wanted = [t is not None and t.requires_grad for t in (x, *saved[5:9])]
    with torch.enable_grad():
        if weight is None:
            y = _group_norm(x, group_weight, group_bias, groups, eps)
        else:
            y = batch_channel_norm(x, estimates, *affine, groups=groups, eps=eps, blend=kept_blend(numbers))
        if output is None:
            y = y if ctx.has_residual else Activation(ActivationKind(kind), slope).apply(y)
        else:  # the sign of the output gives the derivative of relu and leaky_relu
            grad = torch.where(output > 0, grad, 0.0 if kind == ActivationKind.RELU else grad * slope)
        sources = [t for t, is_wanted in zip((x, *saved[5:9]), wanted, strict=True) if is_wanted]
        found = torch.autograd.grad(y, sources, grad, create_graph=True, allow_unused=True) if sources else ()
    grads = iter(found)
    dx, *each = (next(grads) if is_wanted else None for is_wanted in wanted)
    return dx, grad if ctx.has_residual else None, None, None, None, *each, *(None,) * 6


def _group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float) -> Tensor:
    """Return torch's group norm, computed in the kernels' dtype: on CUDA its affine must not be wider than x."""
    wide = compute_dtype(x.dtype)
    affine = (None if p is None else p.to(wide) for p in (weight, bias))
    return torch.group_norm(x.to(wide), groups, *affine, eps=eps).to(x.dtype)


class _Normalize(torch.autograd.Function):
    """`normalize` as an autograd function, for eager code."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        outputs = normalize(*inputs)
        _save(ctx, inputs, outputs)
        ctx.mark_non_differentiable(outputs[1])
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if grads[0] is None:
            return (None,) * 15
        return _gradients(ctx, grads[0], _backward)


def _operator_backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    # By the operator, because this function is traced into a graph.
    return _gradients(ctx, grad, torch.ops.micronorm.normalize_backward)


# The kernels are not called under torch.func transforms, so the search for them in every argument is not needed.
_apply = fast_apply(_Normalize)

_operator = torch.library.custom_op(
    "micronorm::normalize",
    normalize,
    mutates_args=(),
    schema=f"(Tensor x, Tensor? residual, Tensor? parts, {_TENSORS}, Tensor? blend, {_OPTIONS}) -> (Tensor, Tensor)",
)
_operator.register_fake(_fake)
_operator.register_autograd(_operator_backward, setup_context=_save)
torch.library.custom_op(
    "micronorm::normalize_backward",
    normalize_backward,
    mutates_args=(),
    schema=f"(Tensor grad, Tensor x, Tensor? output, Tensor numbers, {_TENSORS}, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor)",
).register_fake(_fake_backward)


# --- the functions a layer calls -------------------------------------------------------------------------------------


def batch_channel_norm_fused(
    x: Tensor,
    estimates: Moments | tuple[None, None],
    weight: Tensor | None,
    bias: Tensor | None,
    group_weight: Tensor | None,
    group_bias: Tensor | None,
    *,
    groups: int,
    eps: float = 1e-5,
    blend: Tensor | None = None,
    activation: Activation = IDENTITY,
    residual: Tensor | None = None,
    parts: Tensor | None = None,
    from_batch: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return act(BCN(x) + residual) and the packed numbers, computed by the kernels; see `batch_channel_norm`.

    It calls the autograd function in eager code, and the operator in traced code. `parts` and the estimates may be
    those of `kernels().estimates`. With `from_batch` the estimates are the batch's own moments, through which gradients
    flow. `blend=None` stands for 1. A residual needs an activation that keeps the sign.
    """
    # With a residual the backward takes the activation's derivative from the sign of the output.
    assert residual is None or activation.keeps_sign
    norm = (*estimates, weight, bias, group_weight, group_bias, blend, groups, eps)
    if torch.compiler.is_compiling():
        kind = activation.kind.value  # operators take plain strings
        return torch.ops.micronorm.normalize(x, residual, parts, *norm, kind, activation.slope, from_batch)
    return _apply(x, residual, parts, *norm, activation.kind, activation.slope, from_batch)


def group_norm_fused(x: Tensor, weight: Tensor | None, bias: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    """Return act(GN(x) + residual) and the packed numbers, computed by the kernels.

    Weight and bias hold C numbers each. The options are groups, eps, activation and residual of
    `batch_channel_norm_fused`.
    """
    if (weight is None) != (bias is None):  # kernels take both or neither
        weight = torch.ones_like(bias) if weight is None else weight  # type: ignore[arg-type]
        bias = torch.zeros_like(weight) if bias is None else bias
    return batch_channel_norm_fused(x, (None, None), None, None, weight, bias, **options)


def elementwise_fused(x: Tensor, *rest: Tensor, activation: Activation) -> Tensor:
    """Recompute the y of a forward, to the bit, from x, the residual (if there was one) and the numbers it left."""
    *residual, numbers = rest
    return kernels().recompute(x, residual[0] if residual else None, numbers, activation)
