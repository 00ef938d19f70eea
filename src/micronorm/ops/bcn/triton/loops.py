"""The four loops over space: two that sum, two that write. The legend of names is in pieces.py.

They go over positions `start` to `end` of some channels by tiles of CHANNELS × SPACE; pointers are those of the sample.
"""

# Called outside a kernel these raise, which is all that pyright sees of them.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from micronorm.ops.bcn.triton.pieces import activate, gate


@triton.jit
def moments(
    x_ptr,
    c,
    valid_c,
    start,
    end,
    x_c,
    x_s,
    dtype: tl.constexpr,
    CHANNELS: tl.constexpr,
    SPACE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The sample's first element, the mean around it, and the sum of squared deviations, from `start` to `end`.

    The sums run around the median of three of these elements. Where their mean lies D deviations from there, taking the
    square of that distance away at the end costs D² roundings; one outlier among the three changes nothing. Thirteenths
    are not the borders of an image, as its quarters are.
    """
    part = (end - start) // 13
    low_c = tl.load(x_ptr + c * x_c + (start + 3 * part) * x_s, valid_c, 0).to(dtype)
    middle_c = tl.load(x_ptr + c * x_c + (start + 6 * part) * x_s, valid_c, 0).to(dtype)
    high_c = tl.load(x_ptr + c * x_c + (start + 10 * part) * x_s, valid_c, 0).to(dtype)
    first_c = tl.load(x_ptr + c * x_c, valid_c, 0).to(dtype)
    pivot_c = tl.maximum(tl.minimum(low_c, middle_c), tl.minimum(tl.maximum(low_c, middle_c), high_c))
    sum_cs = tl.zeros([CHANNELS, SPACE], dtype)
    square_cs = tl.zeros([CHANNELS, SPACE], dtype)
    for position in tl.range(start, end, SPACE, num_stages=STAGES):
        s = position + tl.arange(0, SPACE)
        valid_cs = valid_c[:, None] & (s < end)[None, :]
        x_cs = tl.load(x_ptr + c[:, None] * x_c + s[None, :] * x_s, valid_cs, 0).to(dtype)
        t_cs = tl.where(valid_cs, x_cs - pivot_c[:, None], 0.0)
        sum_cs += t_cs
        square_cs = tl.fma(t_cs, t_cs, square_cs)
    sum_c = tl.sum(sum_cs, 1)
    rest_c = sum_c / (end - start)
    square_c = tl.sum(square_cs, 1)
    # A sum that overflowed stays infinite, which `bounded` knows what to do with: inf − inf would be NaN.
    rest_square_c = tl.where(square_c == float("inf"), 0.0, sum_c * rest_c)
    square_c = tl.maximum(square_c - rest_square_c, 0.0, tl.PropagateNan.ALL)
    return first_c, (pivot_c - first_c) + rest_c, square_c


@triton.jit
def write_output(
    x_ptr,
    residual_ptr,
    y_ptr,
    pivot_c,
    scale_c,
    offset_c,
    c,
    valid_c,
    start,
    end,
    x_c,
    x_s,
    r_c,
    r_s,
    y_c,
    y_s,
    dtype: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    CHANNELS: tl.constexpr,
    SPACE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y = act(scale·(x − pivot) + offset [+ residual]) from `end` back to `start`: what was read last is at hand."""
    last = start + (tl.cdiv(end - start, SPACE) - 1) * SPACE
    for step in tl.range(0, end - start, SPACE, num_stages=STAGES):
        s = (last - step) + tl.arange(0, SPACE)
        valid_cs = valid_c[:, None] & (s < end)[None, :]
        x_cs = tl.load(x_ptr + c[:, None] * x_c + s[None, :] * x_s, valid_cs, 0).to(dtype)
        u_cs = tl.fma(x_cs - pivot_c[:, None], scale_c[:, None], tl.broadcast_to(offset_c[:, None], [CHANNELS, SPACE]))
        if HAS_RESIDUAL:
            u_cs += tl.load(residual_ptr + c[:, None] * r_c + s[None, :] * r_s, valid_cs, 0).to(dtype)
        y_cs = activate(u_cs, ACTIVATION, SLOPE)
        tl.store(y_ptr + c[:, None] * y_c + s[None, :] * y_s, y_cs.to(y_ptr.dtype.element_ty), valid_cs)


@triton.jit
def sums(
    x_ptr,
    g_ptr,
    y_ptr,
    dr_ptr,
    pivot_c,
    scale_c,
    offset_c,
    c,
    valid_c,
    start,
    end,
    x_c,
    x_s,
    g_c,
    g_s,
    y_c,
    y_s,
    d_c,
    d_s,
    dtype: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    CHANNELS: tl.constexpr,
    SPACE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Σg and Σg·t from `start` to `end`; with a residual also its gradient g, which the elementwise pass reads."""
    sum_g_cs = tl.zeros([CHANNELS, SPACE], dtype)
    sum_gt_cs = tl.zeros([CHANNELS, SPACE], dtype)
    for first in tl.range(start, end, SPACE, num_stages=STAGES):
        s = first + tl.arange(0, SPACE)
        valid_cs = valid_c[:, None] & (s < end)[None, :]
        x_cs = tl.load(x_ptr + c[:, None] * x_c + s[None, :] * x_s, valid_cs, 0).to(dtype)
        g_cs = tl.load(g_ptr + c[:, None] * g_c + s[None, :] * g_s, valid_cs, 0).to(dtype)
        t_cs = x_cs - pivot_c[:, None]
        if HAS_RESIDUAL:
            u_cs = tl.load(y_ptr + c[:, None] * y_c + s[None, :] * y_s, valid_cs, 0).to(dtype)
        else:
            # The very expression of the forward, so that the mask is the forward's to the last bit.
            u_cs = tl.fma(t_cs, scale_c[:, None], tl.broadcast_to(offset_c[:, None], [CHANNELS, SPACE]))
        g_cs = tl.where(valid_cs, gate(g_cs, u_cs, ACTIVATION, SLOPE), 0.0)
        if HAS_RESIDUAL:
            tl.store(dr_ptr + c[:, None] * d_c + s[None, :] * d_s, g_cs.to(dr_ptr.dtype.element_ty), valid_cs)
        sum_g_cs += g_cs
        sum_gt_cs += tl.where(valid_cs, g_cs * t_cs, 0.0)
    return tl.sum(sum_g_cs, 1), tl.sum(sum_gt_cs, 1)


@triton.jit
def write_gradient(
    x_ptr,
    g_ptr,
    dx_ptr,
    pivot_c,
    scale_c,
    offset_c,
    slope_c,
    curve_c,
    shift_c,
    c,
    valid_c,
    start,
    end,
    x_c,
    x_s,
    g_c,
    g_s,
    d_c,
    d_s,
    dtype: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr,
    CHANNELS: tl.constexpr,
    SPACE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dx = slope·g + curve·t + shift from `end` back to `start`: what was read last is at hand."""
    last = start + (tl.cdiv(end - start, SPACE) - 1) * SPACE
    for step in tl.range(0, end - start, SPACE, num_stages=STAGES):
        s = (last - step) + tl.arange(0, SPACE)
        valid_cs = valid_c[:, None] & (s < end)[None, :]
        x_cs = tl.load(x_ptr + c[:, None] * x_c + s[None, :] * x_s, valid_cs, 0).to(dtype)
        g_cs = tl.load(g_ptr + c[:, None] * g_c + s[None, :] * g_s, valid_cs, 0).to(dtype)
        t_cs = x_cs - pivot_c[:, None]
        u_cs = tl.fma(t_cs, scale_c[:, None], tl.broadcast_to(offset_c[:, None], [CHANNELS, SPACE]))
        g_cs = gate(g_cs, u_cs, ACTIVATION, SLOPE)
        shift_cs = tl.broadcast_to(shift_c[:, None], [CHANNELS, SPACE])
        dx_cs = tl.fma(g_cs, slope_c[:, None], tl.fma(t_cs, curve_c[:, None], shift_cs))
        tl.store(dx_ptr + c[:, None] * d_c + s[None, :] * d_s, dx_cs.to(dx_ptr.dtype.element_ty), valid_cs)
