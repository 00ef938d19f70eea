"""Compute a model's max-pooling layers by the kernels of `micronorm.ops.pool` on a GPU."""

from typing import Any

import torch
from torch import Tensor, nn

from micronorm.convert.surgery import has_own_forward, set_forward
from micronorm.nn.backends import resolve_backend
from micronorm.ops.pool import MAX_WINDOW, PoolWindow, max_pool2d

_LARGEST = 2**31  # the kernels count the outputs of a sample in 32 bits
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def pool_by_kernel(model: nn.Module) -> int:
    """Let the kernels compute every max-pooling layer of the model that they can; return the number of these layers.

    Each such nn.MaxPool2d gets another forward, whose outputs equal torch's to the bit. It keeps one byte per output
    for the backward pass, and not the input. Inputs on other devices still go to torch. `mn.convert` does this unless
    `fuse=False`; benchmarks call it for the networks they compare with.

    Example:
        >>> pool_by_kernel(nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2)))
        1
    """
    layers = [module for module in model.modules() if can_pool(module)]
    for layer in layers:
        use_kernel(layer)
    return len(layers)


def can_pool(module: nn.Module) -> bool:
    """Return whether the module is an nn.MaxPool2d with windows that the kernels support."""
    return type(module) is nn.MaxPool2d and not has_own_forward(module) and _window(module) is not None


def use_kernel(layer: nn.Module) -> None:
    """Replace the forward of one nn.MaxPool2d."""
    set_forward(layer, _forward)


def _forward(self: Any, input: Tensor) -> Tensor:
    window = _window(self)
    if window is None or not isinstance(input, Tensor) or not _is_supported(input, window):
        return type(self).forward(self, input)
    return max_pool2d(input, window)


def _is_supported(x: Tensor, window: PoolWindow) -> bool:
    if x.ndim != 4 or x.dtype not in _DTYPES or x.numel() == 0 or torch.jit.is_tracing():
        return False
    height, width = window.output((x.shape[2], x.shape[3]))
    fits = min(height, width) > 0 and x.shape[1] * height * width < _LARGEST
    return fits and resolve_backend("auto", x) == "triton"


def _window(pool: Any) -> PoolWindow | None:
    """Return the windows of an nn.MaxPool2d, or None if the kernels do not support them."""
    kernel, padding, dilation = (_pair(size) for size in (pool.kernel_size, pool.padding, pool.dilation))
    stride = kernel if isinstance(pool.stride, (list, tuple)) and not pool.stride else _pair(pool.stride)
    if kernel is None or stride is None or padding is None or dilation != (1, 1) or pool.return_indices:
        return None
    # torch raises an error for other sizes and paddings.
    valid = min(*kernel, *stride) > 0 and all(0 <= 2 * p <= k for p, k in zip(padding, kernel, strict=True))
    small = kernel[0] * kernel[1] <= MAX_WINDOW and stride[0] * stride[1] <= MAX_WINDOW
    return PoolWindow(kernel, stride, padding, pool.ceil_mode) if valid and small else None


def _pair(size: Any) -> tuple[int, int] | None:
    """Return a size along both axes, or None if it is not one or two integers."""
    sizes = size if isinstance(size, (list, tuple)) else (size,)
    if not 1 <= len(sizes) <= 2 or not all(isinstance(s, int) for s in sizes):
        return None
    return sizes[0], sizes[-1]
