"""Max-pooling as an operation with a gradient: for eager code, and for code that is traced.

torch's own on a GPU keeps its whole input and eight bytes per output. Here one byte per output says which element of
its window was the largest.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from micronorm.ops.device import on_device
from micronorm.ops.moments import compute_dtype
from micronorm.ops.transforms import is_plain_backward

MAX_WINDOW = 49
"""Of a window, and elements between one window and the next: kernels are unrolled, and take seconds to compile."""
_BLOCK = 256  # elements of a program, at most


class Window(NamedTuple):
    """The windows of a pooling: sizes, strides and padding along both axes.

    Example:
        >>> Window((3, 3), (2, 2), (1, 1)).output((112, 112))
        (56, 56)
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    ceil_mode: bool = False

    def output(self, size: tuple[int, int]) -> tuple[int, int]:
        """The size of the pooled plane, by torch's rule."""
        height, width = (self._along(axis, size[axis]) for axis in (0, 1))
        return height, width

    def _along(self, axis: int, size: int) -> int:
        kernel, stride, padding = self.kernel[axis], self.stride[axis], self.padding[axis]
        windows = (size + 2 * padding - kernel + (stride - 1 if self.ceil_mode else 0)) // stride + 1
        # The last window must begin in the plane, or in the padding before it.
        return windows - 1 if self.ceil_mode and (windows - 1) * stride >= size + padding else windows


def max_pool2d(x: Tensor, window: Window) -> Tensor:
    r"""The largest element of every window, by the kernels; as `torch.nn.functional.max_pool2d`, to the bit.

    .. math:: y_{nchw} = \max_{i, j} x_{n, c, h s - p + i, w s - p + j}

    The gradient of each x is summed in float32 at least and rounded once, in one order except under create_graph.

    Args:
        x: N×C×H×W, not empty, in contiguous or channels_last memory; other layouts are copied.
        window: kernel sizes whose product is at most `MAX_WINDOW`, and strides likewise.

    Returns:
        N×C×H'×W', in the layout of x.
    """
    if torch.compiler.is_compiling():
        return pool(x, *window)[0]
    y: Any = _MaxPool.apply(x, window)
    return y


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Window) -> Tensor:
        y, places = _forward(x, window)
        ctx.save_for_backward(places)
        ctx.window, ctx.size, ctx.layout = window, x.shape[2:], _layout(x)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (places,) = ctx.saved_tensors
        if is_plain_backward(*grads):
            return _backward(grads[0], places, ctx.window, ctx.size, ctx.layout), None
        return scatter(grads[0], places, ctx.window, ctx.size), None


def scatter(grad: Tensor, places: Tensor, window: Window, size: tuple[int, int]) -> Tensor:
    """The gradient of x in torch's operations."""
    high, wide = (
        torch.arange(grad.shape[2 + axis], device=grad.device) * window.stride[axis] - window.padding[axis]
        for axis in (0, 1)
    )
    place = places.long()
    rows, columns = high[:, None] + place // window.kernel[1], wide + place % window.kernel[1]
    flat = (rows * size[1] + columns).reshape(*grad.shape[:2], -1)
    wider = grad.reshape(*grad.shape[:2], -1).to(compute_dtype(grad.dtype))
    total = wider.new_zeros(*grad.shape[:2], size[0] * size[1]).scatter_add(2, flat, wider)
    return total.to(grad.dtype).reshape(*grad.shape[:2], *size)


# --- the kernels -----------------------------------------------------------------------------------------------------


def _forward(x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    kernels, layout = _kernels(), _layout(x)
    x = x.contiguous(memory_format=layout).resolve_neg()
    y = _empty(x, window.output((x.shape[2], x.shape[3])), layout)
    places = torch.empty_like(y, dtype=torch.uint8)
    planes, points = _planes(x, layout)
    blocks, options = _tiles(y.shape[3] * points, layout)
    sizes, constants = (*x.shape[2:], *y.shape[2:], blocks), _constants(x, points, window)
    with on_device(x.device):
        kernels.max_pool_forward[(planes * y.shape[2] * blocks,)](x, y, places, *sizes, **constants, **options)
    return y, places


def _backward(
    grad: Tensor, places: Tensor, window: Window, size: tuple[int, int], layout: torch.memory_format
) -> Tensor:
    kernels = _kernels()
    grad = grad.contiguous(memory_format=layout).resolve_neg()
    dx = _empty(grad, size, layout)
    planes, points = _planes(dx, layout)
    high, wide = (-(-(size[axis] + window.padding[axis]) // window.stride[axis]) for axis in (0, 1))  # cells
    blocks, options = _tiles(wide * points, layout)
    sizes, constants = (*size, *grad.shape[2:], blocks), _constants(dx, points, window)
    with on_device(grad.device):
        kernels.max_pool_backward[(planes * high * blocks,)](grad, places, dx, *sizes, **constants, **options)
    return dx


def _kernels() -> Any:
    """On first use: importing the module imports triton."""
    from micronorm.ops.pool import kernels

    return kernels


def _layout(x: Tensor) -> torch.memory_format:
    """The layout to pool x in: the one it has, or the nearer one."""
    last = x.stride(1) == 1 and x.shape[1] > 1 and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def _empty(x: Tensor, size: tuple[int, int], layout: torch.memory_format) -> Tensor:
    return torch.empty((*x.shape[:2], *size), dtype=x.dtype, device=x.device, memory_format=layout)


def _planes(x: Tensor, layout: torch.memory_format) -> tuple[int, int]:
    """How many planes x is made of, and how many numbers each of their points has."""
    samples, channels = x.shape[:2]
    return (samples, channels) if layout is torch.channels_last else (samples * channels, 1)


def _tiles(row: int, layout: torch.memory_format) -> tuple[int, dict[str, int]]:
    """How many programs a row of so many elements takes, and their size."""
    block = min(max(1 << (row - 1).bit_length(), 32), _BLOCK)
    # Lanes that read 16 bytes each, or elements that lie apart.
    lanes = 256 if layout is torch.channels_last else 128
    return -(-row // block), {"BLOCK": block, "num_warps": max(block // lanes, 1)}


def _constants(x: Tensor, points: int, window: Window) -> dict[str, Any]:
    (kh, kw), (sh, sw), (ph, pw), _ = window
    wide = _kernels().WIDE[compute_dtype(x.dtype)]
    return {"C": points, "KH": kh, "KW": kw, "SH": sh, "SW": sw, "PH": ph, "PW": pw, "WIDE": wide}


# --- operators, for compilers and exporters --------------------------------------------------------------------------


@torch.library.custom_op("micronorm::max_pool2d", mutates_args=())
def pool(x: Tensor, kernel: list[int], stride: list[int], padding: list[int], ceil_mode: bool) -> tuple[Tensor, Tensor]:
    """y, and the place of each in its window."""
    return _forward(x, _window(kernel, stride, padding, ceil_mode))


@pool.register_fake
def _(x: Tensor, kernel: list[int], stride: list[int], padding: list[int], ceil_mode: bool) -> tuple[Tensor, Tensor]:
    window = _window(kernel, stride, padding, ceil_mode)
    y = _empty(x, window.output((x.shape[2], x.shape[3])), _layout(x))
    return y, torch.empty_like(y, dtype=torch.uint8)


@torch.library.custom_op("micronorm::max_pool2d_backward", mutates_args=())
def pool_backward(
    grad: Tensor,
    places: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    size: list[int],
    channels_last: bool,
) -> Tensor:
    """The gradient of x, of this size and layout."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return _backward(grad, places, _window(kernel, stride, padding, False), (size[0], size[1]), layout)


@pool_backward.register_fake
def _(
    grad: Tensor,
    places: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    size: list[int],
    channels_last: bool,
) -> Tensor:
    return _empty(grad, (size[0], size[1]), torch.channels_last if channels_last else torch.contiguous_format)


def _window(kernel: list[int], stride: list[int], padding: list[int], ceil_mode: bool) -> Window:
    return Window((kernel[0], kernel[1]), (stride[0], stride[1]), (padding[0], padding[1]), ceil_mode)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, *window, _ = inputs
    ctx.save_for_backward(output[1])
    ctx.options = (*window, list(x.shape[2:]), _layout(x) is torch.channels_last)


def _operator_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    (places,) = ctx.saved_tensors
    return pool_backward(grad, places, *ctx.options), None, None, None, None


pool.register_autograd(_operator_backward, setup_context=_setup)
