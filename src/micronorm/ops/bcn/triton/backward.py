"""The backward in one launch, and the sum over samples after it. The legend of names is in pieces.py.

With g = dL/du, u being what enters the activation, every kernel works on
t = x − pivot; `sum_g` and `sum_gt` are Σg and Σg·t over space, from which all else follows. `shares` holds one row of
numbers per sample, its part of the gradients of γ^b, β^b (C each, where there are estimates) and of γ^c, β^c (one per
group, or per channel in group normalization); `slopes` holds three blocks of N×C: dx = slope·g + curve·t + shift.
"""

# Called outside a kernel these raise, which is all that pyright sees of them.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from micronorm.ops.bcn.triton.loops import sums, write_gradient
from micronorm.ops.bcn.triton.pieces import COUNTS, IDENTITY, gate, gradients


@triton.jit(do_not_specialize=COUNTS)
def backward_whole(
    x_ptr,
    g_ptr,
    y_ptr,
    dx_ptr,
    dr_ptr,
    numbers_ptr,
    shares_ptr,
    mean_ptr,
    var_ptr,
    weight_ptr,
    bias_ptr,
    group_weight_ptr,
    samples,
    channels,
    space,
    x_n,
    x_c,
    x_s,
    g_n,
    g_c,
    g_s,
    y_n,
    y_c,
    y_s,
    d_n,
    d_c,
    d_s,
    EPS: tl.constexpr,
    ESTIMATES: tl.constexpr,
    AFFINE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    SPACE: tl.constexpr,
    ALIGN: tl.constexpr,
    C_UNIT: tl.constexpr,
    S_UNIT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The whole backward where a sample's groups fit on chip: x and the gradient are read once."""
    if EARLY:  # not before the launch before this one is done
        gdc_wait()
        gdc_launch_dependents()
    dtype: tl.constexpr = numbers_ptr.dtype.element_ty
    x_n, x_c, x_s = x_n * ALIGN, x_c * C_UNIT, x_s * S_UNIT
    g_n, g_c, g_s = g_n * ALIGN, g_c * C_UNIT, g_s * S_UNIT
    y_n, y_c, y_s = y_n * ALIGN, y_c * C_UNIT, y_s * S_UNIT
    d_n, d_c, d_s = d_n * ALIGN, d_c * C_UNIT, d_s * S_UNIT
    channels, space = channels * S_UNIT, space * C_UNIT
    WIDTH: tl.constexpr = GROUPS * SIZE
    blocks = tl.cdiv(channels, WIDTH)
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    n = program // blocks
    local = tl.arange(0, CHANNELS)
    c = (program % blocks) * WIDTH + local
    valid_c = (local < WIDTH) & (c < channels)
    s = tl.arange(0, SPACE)
    valid_cs = valid_c[:, None] & (s < space)[None, :]
    far = n.to(tl.int64)
    x_cs = tl.load(x_ptr + far * x_n + c[:, None] * x_c + s[None, :] * x_s, valid_cs, 0).to(dtype)
    g_cs = tl.load(g_ptr + far * g_n + c[:, None] * g_c + s[None, :] * g_s, valid_cs, 0).to(dtype)
    block = samples * channels
    at = n * channels + c
    pivot_c = tl.load(numbers_ptr + at, valid_c, 0)
    t_cs = tl.where(valid_cs, x_cs - pivot_c[:, None], 0.0)
    if HAS_RESIDUAL:
        u_cs = tl.load(y_ptr + far * y_n + c[:, None] * y_c + s[None, :] * y_s, valid_cs, 0).to(dtype)
    else:
        scale_c = tl.load(numbers_ptr + 3 * block + at, valid_c, 0)
        offset_c = tl.load(numbers_ptr + 4 * block + at, valid_c, 0)
        # The very expression of the forward, so that the mask is the forward's to the last bit.
        u_cs = tl.fma(t_cs, scale_c[:, None], tl.broadcast_to(offset_c[:, None], [CHANNELS, SPACE]))
    g_cs = tl.where(valid_cs, gate(g_cs, u_cs, ACTIVATION, SLOPE), 0.0)
    slope_c, curve_c, shift_c = gradients(
        tl.sum(g_cs, 1),
        tl.sum(tl.fma(g_cs, t_cs, tl.zeros_like(g_cs)), 1),
        numbers_ptr,
        shares_ptr,
        mean_ptr,
        var_ptr,
        weight_ptr,
        bias_ptr,
        group_weight_ptr,
        n,
        c,
        valid_c,
        valid_c,
        samples,
        channels,
        space,
        EPS,
        ESTIMATES,
        AFFINE,
        GROUPS,
        SIZE,
        CHANNELS,
    )
    at_cs = far * d_n + c[:, None] * d_c + s[None, :] * d_s
    if HAS_RESIDUAL:
        tl.store(dr_ptr + at_cs, g_cs.to(dr_ptr.dtype.element_ty), valid_cs)
    dx_cs = tl.fma(
        g_cs, slope_c[:, None], tl.fma(t_cs, curve_c[:, None], tl.broadcast_to(shift_c[:, None], [CHANNELS, SPACE]))
    )
    tl.store(dx_ptr + at_cs, dx_cs.to(dx_ptr.dtype.element_ty), valid_cs)


@triton.jit(do_not_specialize=COUNTS)
def backward_twice(
    x_ptr,
    g_ptr,
    y_ptr,
    dx_ptr,
    dr_ptr,
    numbers_ptr,
    shares_ptr,
    mean_ptr,
    var_ptr,
    weight_ptr,
    bias_ptr,
    group_weight_ptr,
    samples,
    channels,
    space,
    x_n,
    x_c,
    x_s,
    g_n,
    g_c,
    g_s,
    y_n,
    y_c,
    y_s,
    d_n,
    d_c,
    d_s,
    EPS: tl.constexpr,
    ESTIMATES: tl.constexpr,
    AFFINE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    SPACE: tl.constexpr,
    STAGES: tl.constexpr,
    ALIGN: tl.constexpr,
    C_UNIT: tl.constexpr,
    S_UNIT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The whole backward of a sample's groups that do not fit on chip: all is read twice, then from the cache."""
    if EARLY:  # not before the launch before this one is done
        gdc_wait()
        gdc_launch_dependents()
    dtype: tl.constexpr = numbers_ptr.dtype.element_ty
    x_n, x_c, x_s = x_n * ALIGN, x_c * C_UNIT, x_s * S_UNIT
    g_n, g_c, g_s = g_n * ALIGN, g_c * C_UNIT, g_s * S_UNIT
    y_n, y_c, y_s = y_n * ALIGN, y_c * C_UNIT, y_s * S_UNIT
    d_n, d_c, d_s = d_n * ALIGN, d_c * C_UNIT, d_s * S_UNIT
    channels, space = channels * S_UNIT, space * C_UNIT
    WIDTH: tl.constexpr = GROUPS * SIZE
    blocks = tl.cdiv(channels, WIDTH)
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    n = program // blocks
    local = tl.arange(0, CHANNELS)
    c = (program % blocks) * WIDTH + local
    valid_c = (local < WIDTH) & (c < channels)
    far = n.to(tl.int64)
    x_ptr += far * x_n
    g_ptr += far * g_n
    y_ptr += far * y_n
    dx_ptr += far * d_n
    dr_ptr += far * d_n
    block = samples * channels
    at = n * channels + c
    pivot_c = tl.load(numbers_ptr + at, valid_c, 0)
    scale_c = tl.load(numbers_ptr + 3 * block + at, valid_c, 0)
    offset_c = tl.load(numbers_ptr + 4 * block + at, valid_c, 0)
    sum_g_c, sum_gt_c = sums(
        x_ptr,
        g_ptr,
        y_ptr,
        dr_ptr,
        pivot_c,
        scale_c,
        offset_c,
        c,
        valid_c,
        0,
        space,
        x_c,
        x_s,
        g_c,
        g_s,
        y_c,
        y_s,
        d_c,
        d_s,
        dtype,
        ACTIVATION,
        SLOPE,
        HAS_RESIDUAL,
        CHANNELS,
        SPACE,
        STAGES,
    )
    slope_c, curve_c, shift_c = gradients(
        sum_g_c,
        sum_gt_c,
        numbers_ptr,
        shares_ptr,
        mean_ptr,
        var_ptr,
        weight_ptr,
        bias_ptr,
        group_weight_ptr,
        n,
        c,
        valid_c,
        valid_c,
        samples,
        channels,
        space,
        EPS,
        ESTIMATES,
        AFFINE,
        GROUPS,
        SIZE,
        CHANNELS,
    )
    if HAS_RESIDUAL:  # gated and stored by the sums, by other threads
        tl.debug_barrier()
        g_ptr, g_c, g_s = dr_ptr, d_c, d_s
        LATER: tl.constexpr = IDENTITY
    else:
        LATER: tl.constexpr = ACTIVATION
    write_gradient(
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
        0,
        space,
        x_c,
        x_s,
        g_c,
        g_s,
        d_c,
        d_s,
        dtype,
        LATER,
        SLOPE,
        CHANNELS,
        SPACE,
        STAGES,
    )


@triton.jit(do_not_specialize=COUNTS)
def sum_samples(
    shares_ptr, totals_ptr, samples, columns, SAMPLES: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr
):
    """The sum over samples of every column, in one order whatever the grid."""
    if EARLY:  # not before the launch before this one is done
        gdc_wait()
        gdc_launch_dependents()
    dtype: tl.constexpr = shares_ptr.dtype.element_ty
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([SAMPLES, COLUMNS], dtype)
    for first in range(0, samples, SAMPLES):
        n = first + tl.arange(0, SAMPLES)
        valid = (n < samples)[:, None] & (column < columns)[None, :]
        sums += tl.load(shares_ptr + n[:, None] * columns + column[None, :], valid, 0)
    tl.store(totals_ptr + column, tl.sum(sums, 0), column < columns)
