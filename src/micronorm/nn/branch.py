"""A convolution beside another branch: what the rewritten forwards of a conversion call for the two together."""

from typing import Any

import torch
from torch import Tensor, nn

from micronorm.nn.reparameterized import Reparameterized
from micronorm.nn.weight import CWNConv2d, CWNConv2dSame, WNConv2d, WNConv2dSame, WSConv2d, WSConv2dSame
from micronorm.ops.pointwise import kernel_runs, pointwise_conv_and_input
from micronorm.ops.runtime import is_transformed

JOINING = frozenset({nn.Conv2d, WSConv2d, WNConv2d, CWNConv2d, WSConv2dSame, WNConv2dSame, CWNConv2dSame})
"""Layers whose computation is known; exactly these, a subclass may have a forward of its own."""

_PLAIN = (Tensor, nn.Parameter)
_NO_PADDING = ((0, 0), "valid", "same")


def is_pointwise(conv: Any) -> bool:
    """Whether a layer made as nn.Conv2d is makes of each position's channels the output's at this position.

    Example:
        >>> is_pointwise(nn.Conv2d(8, 4, 1)), is_pointwise(nn.Conv2d(8, 4, 1, stride=2))
        (True, False)
    """
    return conv.kernel_size == (1, 1) and conv.stride == (1, 1) and conv.groups == 1 and conv.padding in _NO_PADDING


def conv_and_input(conv: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """conv(x), and x for the other branches that take it.

    Their gradient comes back through the convolution, whose backward adds it to its own before that is written. This is
    for 1×1 convolutions in half precision on a CUDA device; all others are simply called.

    Example:
        >>> y, x = conv_and_input(nn.Conv2d(8, 4, 1), torch.randn(1, 8, 2, 2))
        >>> y.shape, x.shape
        (torch.Size([1, 4, 2, 2]), torch.Size([1, 8, 2, 2]))
    """
    if not _joins(conv, x):
        return conv(x), x
    weight = conv.weight_in_use() if isinstance(conv, Reparameterized) else conv.weight
    bias = conv.bias
    return pointwise_conv_and_input(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))  # as autocast


def _joins(conv: Any, x: Tensor) -> bool:
    """Whether the two gradients can be joined. It is asked in every forward: what is mostly so comes first."""
    if torch.compiler.is_compiling() or type(x) not in _PLAIN or not x.requires_grad:
        return False
    # Not of the layer itself: where it has none, nn.Module takes microseconds to say so.
    backend = conv.__dict__.get("backend") or getattr(type(conv), "backend", "auto")
    if backend == "reference" or not (x.is_cuda or backend == "triton"):  # which Triton's interpreter runs on a CPU
        return False
    return (
        type(conv) in JOINING
        and kernel_runs(x)
        and torch.is_grad_enabled()
        and x.ndim == 4
        and x.numel() > 0
        and x.stride()[1:] == (1, x.shape[3] * x.shape[1], x.shape[1])  # channels_last, whatever the batch
        and is_pointwise(conv)
        and not _is_watched(conv)
        and _computes_in(x.dtype, conv, "cuda" if x.is_cuda else "cpu")
        and not is_transformed()
        and not torch.jit.is_tracing()
    )


def _is_watched(conv: nn.Module) -> bool:
    """Whether somebody wants the layer to be called: with hooks of any kind, or with a forward of his own."""
    hooks = (conv._forward_hooks, conv._forward_pre_hooks, conv._backward_hooks, conv._backward_pre_hooks)
    return any(hooks) or "forward" in conv.__dict__


def _computes_in(dtype: torch.dtype, conv: Any, device: str) -> bool:
    """Whether the layer, called with an input of this dtype, computes in it."""
    parameters = [conv.weight] if conv.bias is None else [conv.weight, conv.bias]
    if any(type(p) not in _PLAIN for p in parameters):
        return False
    if torch.is_autocast_enabled(device):
        # Which casts no float64.
        return torch.get_autocast_dtype(device) == dtype and all(p.dtype != torch.float64 for p in parameters)
    return all(p.dtype == dtype for p in parameters)
