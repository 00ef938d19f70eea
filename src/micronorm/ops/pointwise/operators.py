"""A 1×1 convolution that hands on its input, so that its backward sees the gradients of both branches.

Where x goes to a 1×1 convolution and elsewhere too, autograd adds dy·W and the other gradient: three passes over
memory, after the one that wrote dy·W. Here the other gradient comes in as that of a second output, x again, and is
added to the product before it is written.
"""

import functools
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from micronorm.ops.runtime import is_plain_backward, on_device

_HALF = (torch.float16, torch.bfloat16)  # float32 follows torch's switches for TF32
_PLAIN = (Tensor, nn.Parameter)
_LEAST_CAPABILITY = (8, 0)  # products of bfloat16, and shared memory for the tiles
_MANY_ROWS = 32768  # from here on smaller tiles fill the device, and were measured to be faster


def kernel_runs(x: Tensor) -> bool:
    """Whether the kernel computes with tensors of x's kind: of half precision, on a device that multiplies these.

    Example:
        >>> kernel_runs(torch.ones(1))
        False
    """
    return x.dtype in _HALF and type(x) in _PLAIN and _runs_on("cuda" if x.is_cuda else x.device.type, x.get_device())


@functools.cache
def _runs_on(kind: str, index: int) -> bool:
    if kind not in ("cuda", "cpu") or importlib.util.find_spec("triton") is None:
        return False
    if kind == "cpu":
        return _kernels().INTERPRETED
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= _LEAST_CAPABILITY


def pointwise_conv_and_input(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """F.conv2d(x, weight, bias) for a 1×1 kernel, and x again for whatever else takes it.

    The same numbers as without it. The gradient of x is the sum of both outputs' shares, by one kernel where
    `kernel_runs` on them, summed in float32 and rounded once. The second output is a view of x.

    Args:
        x: N×C×H×W.
        weight: K×C×1×1, of x's dtype.
        bias: K numbers of x's dtype.

    Example:
        >>> x = torch.randn(1, 8, 4, 4, requires_grad=True)
        >>> y, again = pointwise_conv_and_input(x, torch.randn(2, 8, 1, 1))
        >>> y.shape, torch.equal(again, x)
        (torch.Size([1, 2, 4, 4]), True)
    """
    if weight.ndim != 4 or weight.shape[2:] != (1, 1):
        raise ValueError(f"a K×C×1×1 weight is needed, got one of shape {tuple(weight.shape)}; F.conv2d takes others")
    outputs: Any = _ConvAndInput.apply(x, weight, bias)
    return outputs


class _ConvAndInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        return F.conv2d(x, weight, bias), x  # of which autograd makes a view that nobody may write to

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        dy, other = grads
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        if not needs_x:
            other = None
        if dy is None:
            return other, None, None
        x, weight = ctx.saved_tensors
        joined = None if other is None or not _by_kernel(dy, other, weight) else data_gradient_and(dy, weight, other)
        wanted = (needs_x and joined is None, needs_weight, needs_bias)
        dx, dw, dbias = _convolution_backward(dy, x, weight, wanted) if any(wanted) else (None, None, None)
        if joined is None:
            joined = dx if other is None or dx is None else dx + other
        return joined, dw, dbias


def _by_kernel(dy: Tensor, other: Tensor, weight: Tensor) -> bool:
    """Whether the kernel adds these."""
    return (
        is_plain_backward(dy, other)
        and all(kernel_runs(t) for t in (dy, other, weight))
        and dy.numel() > 0
        and other.numel() > 0
    )


def _convolution_backward(dy: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, ...]) -> Any:
    """What autograd computes for a convolution, and can differentiate again."""
    once, none = [1, 1], [0, 0]
    return torch.ops.aten.convolution_backward(
        dy, x, weight, [weight.shape[0]], once, none, once, False, none, 1, list(wanted)
    )


def data_gradient_and(dy: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    """Σ_k dy_k·W_k + other, in memory of its own, by the kernel: where `kernel_runs` on all three.

    Args:
        dy: N×K×H×W, at least one element.
        weight: K×C×1×1.
        other: N×C×H×W, at least one element.
    """
    kernels = _kernels()
    dy, other = _as_rows(dy), _as_rows(other)
    depth, columns = weight.shape[:2]
    matrix = weight.reshape(depth, columns).contiguous().resolve_neg()
    rows = dy.numel() // depth
    dx = torch.empty_like(other)
    tile = _tile(rows, columns)
    grid = (-(-rows // tile["BLOCK_ROWS"]) * -(-columns // tile["BLOCK_COLUMNS"]),)
    even = {
        "EVEN_DEPTH": depth % tile["BLOCK_DEPTH"] == 0,
        "EVEN_COLUMNS": columns % tile["BLOCK_COLUMNS"] == 0,
        "WIDE": kernels.INTERPRETED,
    }
    with on_device(dx.device):
        kernels.product_and_other[grid](dy, matrix, other, dx, rows, depth, columns, **even, **tile)
    return dx


def _tile(rows: int, columns: int) -> dict[str, int]:
    """The tile of a program. The depth of a step is the same for all: by it a sum is cut, whatever the batch."""
    height, warps, stages = (64, 4, 2) if rows >= _MANY_ROWS else (128, 8, 3)
    width = 64 if columns < 128 else 128
    blocks = {"BLOCK_ROWS": height, "BLOCK_COLUMNS": width, "BLOCK_DEPTH": 64}
    return blocks | {"num_warps": warps, "num_stages": stages}


def _as_rows(gradient: Tensor) -> Tensor:
    """A gradient as rows of channels, one after the other in memory: expanded and sliced ones are copied."""
    return gradient.contiguous(memory_format=torch.channels_last).resolve_neg()


def _kernels() -> Any:
    """On first use: importing the module imports triton."""
    from micronorm.ops.pointwise import kernels

    return kernels
