"""The four loops over positions: two that sum, two that write. The legend of names is in pieces.py.

They cover `span` = (c, valid_c, start, end), the positions `start` to `end` of some channels, by tiles of CHANNELS ×
SPACE. Pointers are those of the sample (N×C×S tensors, offset to sample n), strides are tuples (n, c, s).
"""

# Called outside a kernel these raise, which is all that pyright sees of them.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from micronorm.ops.bcn.triton.pieces import activate, gate, tile_at


@triton.jit
def spread(values_c, like_cs):
    """Return a vector over channels, repeated for every position of a tile."""
    return tl.broadcast_to(values_c[:, None], like_cs.shape)


@triton.jit
def moments(
    x_ptr,
    x, span,
    dtype: tl.constexpr, CHANNELS: tl.constexpr, SPACE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the sample's first element, the mean around it and the sum of squared deviations from `start` to `end`.

    The sums are taken around the median of three of these elements. If their mean lies D deviations from it, the final
    subtraction costs D² roundings, and one outlier among the three changes nothing. The three are at thirteenths of the
    range, because quarters would lie at the borders of an image.
    """
    c, valid_c, start, end = span
    part = (end - start) // 13
    low_c = tl.load(x_ptr + c * x[1] + (start + 3 * part) * x[2], valid_c, 0).to(dtype)
    middle_c = tl.load(x_ptr + c * x[1] + (start + 6 * part) * x[2], valid_c, 0).to(dtype)
    high_c = tl.load(x_ptr + c * x[1] + (start + 10 * part) * x[2], valid_c, 0).to(dtype)
    first_c = tl.load(x_ptr + c * x[1], valid_c, 0).to(dtype)
    pivot_c = tl.maximum(tl.minimum(low_c, middle_c), tl.minimum(tl.maximum(low_c, middle_c), high_c))
    sum_cs = tl.zeros([CHANNELS, SPACE], dtype)
    square_cs = tl.zeros([CHANNELS, SPACE], dtype)
    for position in tl.range(start, end, SPACE, num_stages=STAGES):
        s = position + tl.arange(0, SPACE)
        valid_cs = valid_c[:, None] & (s < end)[None, :]
        x_cs = tl.load(tile_at(x_ptr, x, c, s), valid_cs, 0).to(dtype)
        t_cs = tl.where(valid_cs, x_cs - pivot_c[:, None], 0.0)
        sum_cs += t_cs
        square_cs = tl.fma(t_cs, t_cs, square_cs)
    sum_c = tl.sum(sum_cs, 1)
    rest_c = sum_c / (end - start)
    square_c = tl.sum(square_cs, 1)
    # A sum that overflowed stays infinite, which `bounded` replaces: inf − inf would be NaN.
    rest_square_c = tl.where(square_c == float("inf"), 0.0, sum_c * rest_c)
    square_c = tl.maximum(square_c - rest_square_c, 0.0, tl.PropagateNan.ALL)
    return first_c, (pivot_c - first_c) + rest_c, square_c


@triton.jit
def store_output(
    x_cs, pointers, strides, coefficients, c, s, valid_cs,
    ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Store y = act(scale·(x − pivot) + offset [+ residual]) for one tile, with the arguments of `write_output`."""
    pivot_c, scale_c, offset_c = coefficients
    u_cs = tl.fma(x_cs - pivot_c[:, None], scale_c[:, None], spread(offset_c, x_cs))
    if HAS_RESIDUAL:
        u_cs += tl.load(tile_at(pointers[1], strides[1], c, s), valid_cs, 0).to(x_cs.dtype)
    y_cs = activate(u_cs, ACTIVATION, SLOPE)
    tl.store(tile_at(pointers[2], strides[2], c, s), y_cs.to(pointers[2].dtype.element_ty), valid_cs)


@triton.jit
def write_output(
    pointers, strides, coefficients, span,
    ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SPACE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Store y from `end` back to `start`: what was read last is still in the cache.

    `pointers` and `strides` are those of x, residual and y; `coefficients` are pivot, scale and offset.
    """
    c, valid_c, start, end = span
    last = start + (tl.cdiv(end - start, SPACE) - 1) * SPACE
    for step in tl.range(0, end - start, SPACE, num_stages=STAGES):
        s = (last - step) + tl.arange(0, SPACE)
        valid_cs = valid_c[:, None] & (s < end)[None, :]
        x_cs = tl.load(tile_at(pointers[0], strides[0], c, s), valid_cs, 0).to(coefficients[0].dtype)
        store_output(x_cs, pointers, strides, coefficients, c, s, valid_cs, ACTIVATION, SLOPE, HAS_RESIDUAL)


@triton.jit
def gated(
    g_cs, t_cs, coefficients, y_at, valid_cs,
    ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Return g = dL/du for one tile, from dL/dy and t; with a residual from the output, whose addresses are `y_at`."""
    if HAS_RESIDUAL:
        u_cs = tl.load(y_at, valid_cs, 0).to(t_cs.dtype)
    else:
        # The forward's own expression, so that the mask equals the forward's to the last bit.
        u_cs = tl.fma(t_cs, coefficients[1][:, None], spread(coefficients[2], t_cs))
    return tl.where(valid_cs, gate(g_cs, u_cs, ACTIVATION, SLOPE), 0.0)


@triton.jit
def store_gradient(g_cs, t_cs, slopes, dx_ptr, strides, c, s, valid_cs):
    """Store dx = slope·g + curve·t + shift for one tile."""
    slope_c, curve_c, shift_c = slopes
    dx_cs = tl.fma(g_cs, slope_c[:, None], tl.fma(t_cs, curve_c[:, None], spread(shift_c, t_cs)))
    tl.store(tile_at(dx_ptr, strides, c, s), dx_cs.to(dx_ptr.dtype.element_ty), valid_cs)


@triton.jit
def sums(
    pointers, strides, coefficients, span,
    ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, CHANNELS: tl.constexpr,
    SPACE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return Σg and Σg·t from `start` to `end`; with a residual, store its gradient g for the elementwise pass.

    `pointers` and `strides` are those of x, dL/dy, y and dL/dresidual.
    """
    c, valid_c, start, end = span
    x_ptr, g_ptr, y_ptr, dr_ptr = pointers
    dtype = coefficients[0].dtype
    sum_g_cs = tl.zeros([CHANNELS, SPACE], dtype)
    sum_gt_cs = tl.zeros([CHANNELS, SPACE], dtype)
    for first in tl.range(start, end, SPACE, num_stages=STAGES):
        s = first + tl.arange(0, SPACE)
        valid_cs = valid_c[:, None] & (s < end)[None, :]
        x_cs = tl.load(tile_at(x_ptr, strides[0], c, s), valid_cs, 0).to(dtype)
        g_cs = tl.load(tile_at(g_ptr, strides[1], c, s), valid_cs, 0).to(dtype)
        t_cs = x_cs - coefficients[0][:, None]
        y_at = tile_at(y_ptr, strides[2], c, s)
        g_cs = gated(g_cs, t_cs, coefficients, y_at, valid_cs, ACTIVATION, SLOPE, HAS_RESIDUAL)
        if HAS_RESIDUAL:
            tl.store(tile_at(dr_ptr, strides[3], c, s), g_cs.to(dr_ptr.dtype.element_ty), valid_cs)
        sum_g_cs += g_cs
        sum_gt_cs += tl.where(valid_cs, g_cs * t_cs, 0.0)
    return tl.sum(sum_g_cs, 1), tl.sum(sum_gt_cs, 1)


@triton.jit
def write_gradient(
    pointers, strides, coefficients, slopes, span,
    ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, SPACE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Store dx = slope·g + curve·t + shift from `end` back to `start`: what was read last is still in the cache.

    `pointers` and `strides` are those of x, the incoming gradient and dx; `slopes` are slope, curve and shift.
    """
    c, valid_c, start, end = span
    x_ptr, g_ptr, dx_ptr = pointers
    pivot_c, scale_c, offset_c = coefficients
    dtype = pivot_c.dtype
    last = start + (tl.cdiv(end - start, SPACE) - 1) * SPACE
    for step in tl.range(0, end - start, SPACE, num_stages=STAGES):
        s = (last - step) + tl.arange(0, SPACE)
        valid_cs = valid_c[:, None] & (s < end)[None, :]
        x_cs = tl.load(tile_at(x_ptr, strides[0], c, s), valid_cs, 0).to(dtype)
        g_cs = tl.load(tile_at(g_ptr, strides[1], c, s), valid_cs, 0).to(dtype)
        t_cs = x_cs - pivot_c[:, None]
        u_cs = tl.fma(t_cs, scale_c[:, None], spread(offset_c, t_cs))
        g_cs = gate(g_cs, u_cs, ACTIVATION, SLOPE)
        store_gradient(g_cs, t_cs, slopes, dx_ptr, strides[2], c, s, valid_cs)
