"""Max-pooling as an operator with a gradient, which eager and compiled code call alike.

torch's own on a GPU keeps its whole input and eight bytes per output. Here one byte per output says which element of
its window was the largest.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from micronorm.ops.moments import compute_dtype
from micronorm.ops.runtime import is_plain_backward, on_device

MAX_WINDOW = 49
"""The largest product of window sizes, and of strides. The kernels are unrolled over both and take long to compile."""
_BLOCK = 256  # elements of a program, at most


class PoolWindow(NamedTuple):
    """The windows of a pooling: sizes, strides and padding along both axes.

    Example:
        >>> PoolWindow((3, 3), (2, 2), (1, 1)).output((112, 112))
        (56, 56)
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    ceil_mode: bool = False

    def numbers(self) -> list[int]:
        """Return the fields one after the other, the form that operators take."""
        return [*self.kernel, *self.stride, *self.padding, int(self.ceil_mode)]

    def output(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the size of the pooled plane, by torch's rule."""
        height, width = (self._along(axis, size[axis]) for axis in (0, 1))
        return height, width

    def _along(self, axis: int, size: int) -> int:
        kernel, stride, padding = self.kernel[axis], self.stride[axis], self.padding[axis]
        windows = (size + 2 * padding - kernel + (stride - 1 if self.ceil_mode else 0)) // stride + 1
        # The last window must begin in the plane, or in the padding before it.
        return windows - 1 if self.ceil_mode and (windows - 1) * stride >= size + padding else windows


def max_pool2d(x: Tensor, window: PoolWindow) -> Tensor:
    r"""Return the largest element of every window, by the kernels; equal to torch's `max_pool2d` to the bit.

    .. math:: y_{nchw} = \max_{i, j} x_{n, c, h s - p + i, w s - p + j}

    The gradient of each x is summed in float32 at least and rounded once, in one order except under create_graph.

    Args:
        x: N×C×H×W, not empty, in contiguous or channels_last memory; other layouts are copied.
        window: kernel sizes whose product is at most `MAX_WINDOW`, and strides likewise.

    Returns:
        N×C×H'×W', in the layout of x.
    """
    return pool(x, window.numbers())[0]


# --- the operators ---------------------------------------------------------------------------------------------------


# The operators name their schemas because torch 2.6 does not infer them from lists of numbers.
@torch.library.custom_op(
    "micronorm::max_pool2d", mutates_args=(), schema="(Tensor x, SymInt[] numbers) -> (Tensor, Tensor)"
)
def pool(x: Tensor, numbers: list[int]) -> tuple[Tensor, Tensor]:
    """Return y, and for each of its elements the place in the window: KW·row + column."""
    window = _window(numbers)
    x = x.contiguous(memory_format=_layout(x)).resolve_neg()
    y, places = _allocate(x, window)
    _launch("max_pool_forward", (x, y, places), x, y, window, rows=y.shape[2], row=y.shape[3] * _points(x))
    return y, places


@pool.register_fake
def _(x: Tensor, numbers: list[int]) -> tuple[Tensor, Tensor]:
    return _allocate(x, _window(numbers))


@torch.library.custom_op(
    "micronorm::max_pool2d_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor places, SymInt[] numbers, SymInt[] size, bool channels_last) -> Tensor",
)
def pool_backward(grad: Tensor, places: Tensor, numbers: list[int], size: list[int], channels_last: bool) -> Tensor:
    """Return the gradient of x, of this size and layout."""
    window = _window(numbers)
    dx = _empty(grad, size, channels_last)
    grad = grad.contiguous(memory_format=_layout(dx)).resolve_neg()
    # A program computes cells of one stride each; they begin in the padding.
    high, wide = (-(-(size[axis] + window.padding[axis]) // window.stride[axis]) for axis in (0, 1))
    _launch("max_pool_backward", (grad, places, dx), dx, grad, window, rows=high, row=wide * _points(dx))
    return dx


@pool_backward.register_fake
def _(grad: Tensor, places: Tensor, numbers: list[int], size: list[int], channels_last: bool) -> Tensor:
    return _empty(grad, size, channels_last)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, numbers = inputs
    ctx.save_for_backward(output[1])
    ctx.options = (numbers, list(x.shape[2:]), _layout(x) is torch.channels_last)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    (places,) = ctx.saved_tensors
    if torch.compiler.is_compiling() or is_plain_backward(grad):
        return pool_backward(grad, places, *ctx.options), None
    numbers, size, _ = ctx.options
    return scatter(grad, places, _window(numbers), size), None


pool.register_autograd(_differentiate, setup_context=_save)


def scatter(grad: Tensor, places: Tensor, window: PoolWindow, size: list[int]) -> Tensor:
    """Return the gradient of x in torch's operations, which can be differentiated and batched again."""
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


# --- memory and launches ---------------------------------------------------------------------------------------------


def _window(numbers: list[int]) -> PoolWindow:
    kh, kw, sh, sw, ph, pw, ceil_mode = numbers
    return PoolWindow((kh, kw), (sh, sw), (ph, pw), bool(ceil_mode))


def _layout(x: Tensor) -> torch.memory_format:
    """Return the layout to pool x in: channels_last if x has it, otherwise contiguous."""
    last = x.stride(1) == 1 and x.shape[1] > 1 and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def _points(x: Tensor) -> int:
    """Return how many numbers each point of a plane has: all channels in channels_last, otherwise one."""
    return x.shape[1] if _layout(x) is torch.channels_last else 1


def _allocate(x: Tensor, window: PoolWindow) -> tuple[Tensor, Tensor]:
    y = _empty(x, window.output((x.shape[2], x.shape[3])), _layout(x) is torch.channels_last)
    return y, torch.empty_like(y, dtype=torch.uint8)


def _empty(x: Tensor, size: Any, channels_last: bool) -> Tensor:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty((*x.shape[:2], *size), dtype=x.dtype, device=x.device, memory_format=layout)


def _launch(
    name: str, tensors: tuple[Tensor, ...], x: Tensor, y: Tensor, window: PoolWindow, *, rows: int, row: int
) -> None:
    """Run a kernel on `tensors`, in `rows` of `row` elements for each plane.

    Args:
        name: the kernel.
        tensors: what it reads and writes.
        x: the input or its gradient: sizes, layout and dtype.
        y: the pooled planes or their gradient.
        window: the windows.
        rows: rows of elements in a plane that are computed one by one.
        row: elements in each of them.
    """
    from micronorm.ops.pool import kernels  # imports triton

    points = _points(x)
    block = min(max(1 << (row - 1).bit_length(), 32), _BLOCK)
    blocks = -(-row // block)
    # In channels_last a lane reads 16 bytes; otherwise its elements lie apart.
    warps = max(block // (128 if points == 1 else 256), 1)
    (kh, kw), (sh, sw), (ph, pw), _ = window
    wide = kernels.WIDE[compute_dtype(x.dtype)]
    constants = {"C": points, "KH": kh, "KW": kw, "SH": sh, "SW": sw, "PH": ph, "PW": pw, "WIDE": wide, "BLOCK": block}
    planes = x.shape[0] * x.shape[1] // points
    sizes = (*x.shape[2:], *y.shape[2:], blocks)
    with on_device(x.device):
        getattr(kernels, name)[(planes * rows * blocks,)](*tensors, *sizes, **constants, num_warps=warps)
