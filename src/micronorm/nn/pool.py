"""Max-pooling layers of torch, computed by our kernels where they can be."""

from typing import Any

import torch
from torch import Tensor, nn

from micronorm.nn.backends import resolve_backend
from micronorm.nn.norm_act import has_hooks
from micronorm.ops.pool import MOST_PLACES, Window, max_pool2d

_LARGEST = 2**31
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def max_pool(pool: nn.Module, x: Tensor, *, backend: str = "auto") -> Tensor:
    """pool(x), by the kernels where `pool` is a plain nn.MaxPool2d that they know and x is on a GPU.

    The result is the same to the bit, and nothing of x is kept for the backward.

    Args:
        pool: the layer. It is called as it is where it has hooks, dilation, `return_indices` or large windows.
        x: N×C×H×W.
        backend: "auto", or "triton" for the kernels on a CPU too, under Triton's interpreter.

    Example:
        >>> max_pool(nn.MaxPool2d(3, 2, 1), torch.randn(1, 8, 16, 16)).shape
        torch.Size([1, 8, 8, 8])
    """
    if x.ndim != 4 or x.dtype not in _DTYPES or x.numel() == 0 or resolve_backend(backend, x) != "triton":
        return pool(x)
    window = window_of(pool)
    if window is None or torch.jit.is_tracing() or not _fits(window, x):
        return pool(x)  # errors are torch's too
    return max_pool2d(x, window)


def window_of(pool: Any) -> Window | None:
    """The windows of a layer that the kernels know: torch's max-pooling over the plane, which nobody looks at.

    Example:
        >>> window_of(nn.MaxPool2d(2)), window_of(nn.AvgPool2d(2))
        (Window(kernel=(2, 2), stride=(2, 2), padding=(0, 0), ceil_mode=False), None)
    """
    if type(pool) is not nn.MaxPool2d or has_hooks(pool) or "forward" in pool.__dict__:
        return None
    kernel, padding, dilation = (_pair(size) for size in (pool.kernel_size, pool.padding, pool.dilation))
    given = pool.stride
    stride = kernel if isinstance(given, list | tuple) and not given else _pair(given)
    if kernel is None or stride is None or padding is None or dilation != (1, 1) or pool.return_indices:
        return None
    sound = min(*kernel, *stride) > 0 and all(0 <= 2 * p <= k for p, k in zip(padding, kernel, strict=True))
    few = kernel[0] * kernel[1] <= MOST_PLACES and stride[0] * stride[1] <= MOST_PLACES
    return Window(kernel, stride, padding, pool.ceil_mode) if sound and few else None


def _pair(size: Any) -> tuple[int, int] | None:
    """A size along both axes, as torch reads it; None for what it may refuse."""
    sizes = size if isinstance(size, list | tuple) else (size,)
    if not 1 <= len(sizes) <= 2 or not all(isinstance(s, int) for s in sizes):
        return None
    return sizes[0], sizes[-1]


def _fits(window: Window, x: Tensor) -> bool:
    """Whether there are windows in x, and no more numbers in the pooled planes of a sample than kernels count."""
    height, width = window.output((x.shape[2], x.shape[3]))
    return min(height, width) > 0 and x.shape[1] * height * width < _LARGEST
