"""Max-pooling layers of torch, computed by our kernels where they can be."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import _pair

from micronorm.nn.backends import resolve_backend
from micronorm.nn.norm_act import has_hooks
from micronorm.ops.pool import MOST_PLACES, Window, max_pool2d

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def max_pool(pool: nn.Module, x: Tensor, *, backend: str = "auto") -> Tensor:
    """pool(x), by the kernels where `pool` is a plain nn.MaxPool2d that they know and x is on a GPU.

    The result is the same to the bit. The gradient is too from one call to the next: torch's adds up the windows that
    overlap in the order in which they come.

    Args:
        pool: the layer. It is called as it is where it has hooks, dilation or `return_indices`.
        x: N×C×H×W.
        backend: "auto", or "triton" for the kernels on a CPU too, under Triton's interpreter.

    Example:
        >>> max_pool(nn.MaxPool2d(3, 2, 1), torch.randn(1, 8, 16, 16)).shape
        torch.Size([1, 8, 8, 8])
    """
    if x.ndim != 4 or x.dtype not in _DTYPES or x.numel() == 0 or resolve_backend(backend, x) != "triton":
        return pool(x)
    window = _window(pool, x)
    return pool(x) if window is None else max_pool2d(x, window)


def is_plain(pool: Any) -> bool:
    """Whether a layer is torch's max-pooling over the plane, and nobody looks at its calls.

    Example:
        >>> is_plain(nn.MaxPool2d(2)), is_plain(nn.AvgPool2d(2))
        (True, False)
    """
    return type(pool) is nn.MaxPool2d and not has_hooks(pool) and "forward" not in pool.__dict__


def _window(pool: Any, x: Tensor) -> Window | None:
    """The layer's windows, where the kernels know them; None leaves the layer to torch, and errors too."""
    if not is_plain(pool) or pool.return_indices or _pair(pool.dilation) != (1, 1):
        return None
    kernel, stride, padding = (_pair(size) for size in (pool.kernel_size, pool.stride, pool.padding))
    window = Window(kernel, stride, padding, pool.ceil_mode)
    sound = min(*kernel, *stride) > 0 and all(0 <= 2 * p <= k for p, k in zip(padding, kernel, strict=True))
    if not sound or kernel[0] * kernel[1] > MOST_PLACES:
        return None
    return window if min(window.output((x.shape[2], x.shape[3]))) > 0 else None
