"""The backward in three launches: sums of pieces, slopes, elementwise pass. The legend of names is in backward.py."""

# Called outside a kernel these raise, which is all that pyright sees of them.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from micronorm.ops.bcn.triton.loops import sums, write_gradient
from micronorm.ops.bcn.triton.pieces import COUNTS, gradients, place


@triton.jit(do_not_specialize=COUNTS)
def backward_part(
    x_ptr,
    g_ptr,
    y_ptr,
    dr_ptr,
    numbers_ptr,
    parts_ptr,
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
    pieces,
    piece,
    blocks,
    ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    ALIGN: tl.constexpr,
    C_UNIT: tl.constexpr,
    S_UNIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    SPACE: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Σg and Σg·t over one piece of space; with a residual also its gradient g, which the elementwise pass reads."""
    if EARLY:  # not before the launch before this one is done
        gdc_wait()
        gdc_launch_dependents()
    dtype: tl.constexpr = numbers_ptr.dtype.element_ty
    x_n, x_c, x_s = x_n * ALIGN, x_c * C_UNIT, x_s * S_UNIT
    g_n, g_c, g_s = g_n * ALIGN, g_c * C_UNIT, g_s * S_UNIT
    y_n, y_c, y_s = y_n * ALIGN, y_c * C_UNIT, y_s * S_UNIT
    d_n, d_c, d_s = d_n * ALIGN, d_c * C_UNIT, d_s * S_UNIT
    channels, space = channels * S_UNIT, space * C_UNIT
    n, p, b = place(tl.program_id(0), pieces, blocks, CHANNELS_LAST)
    c = b * CHANNELS + tl.arange(0, CHANNELS)
    valid_c = c < channels
    block = samples * channels
    at = n * channels + c
    pivot_c = tl.load(numbers_ptr + at, valid_c, 0)
    scale_c = tl.load(numbers_ptr + 3 * block + at, valid_c, 0)
    offset_c = tl.load(numbers_ptr + 4 * block + at, valid_c, 0)
    start = p * piece
    sum_g_c, sum_gt_c = sums(
        x_ptr + n.to(tl.int64) * x_n,
        g_ptr + n.to(tl.int64) * g_n,
        y_ptr + n.to(tl.int64) * y_n,
        dr_ptr + n.to(tl.int64) * d_n,
        pivot_c,
        scale_c,
        offset_c,
        c,
        valid_c,
        start,
        start + tl.minimum(piece, space - start),
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
    at = (n * pieces + p) * channels + c
    tl.store(parts_ptr + at, sum_g_c, valid_c)
    tl.store(parts_ptr + samples * pieces * channels + at, sum_gt_c, valid_c)


@triton.jit
def _added(parts_ptr, n, c, valid_c, samples, channels, pieces, PIECES: tl.constexpr):
    """The sums of a sample from those of its pieces."""
    p = tl.arange(0, PIECES)
    valid_cp = valid_c[:, None] & (p < pieces)[None, :]
    at_cp = (n * pieces + p)[None, :] * channels + c[:, None]
    sum_g_c = tl.sum(tl.load(parts_ptr + at_cp, valid_cp, 0), 1)
    return sum_g_c, tl.sum(tl.load(parts_ptr + samples * pieces * channels + at_cp, valid_cp, 0), 1)


@triton.jit(do_not_specialize=COUNTS)
def backward_numbers(
    parts_ptr,
    numbers_ptr,
    slopes_ptr,
    shares_ptr,
    mean_ptr,
    var_ptr,
    weight_ptr,
    bias_ptr,
    group_weight_ptr,
    samples,
    channels,
    space,
    pieces,
    EPS: tl.constexpr,
    ESTIMATES: tl.constexpr,
    AFFINE: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    PIECES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The N×C arithmetic of the backward, from the pieces' sums."""
    if EARLY:  # not before the launch before this one is done
        gdc_wait()
        gdc_launch_dependents()
    WIDTH: tl.constexpr = GROUPS * SIZE
    blocks = tl.cdiv(channels, WIDTH)
    n = tl.program_id(0) // blocks
    local = tl.arange(0, CHANNELS)
    c = (tl.program_id(0) % blocks) * WIDTH + local
    valid_c = (local < WIDTH) & (c < channels)
    sum_g_c, sum_gt_c = _added(parts_ptr, n, c, valid_c, samples, channels, pieces, PIECES)
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
    block = samples * channels
    at = n * channels + c
    tl.store(slopes_ptr + at, slope_c, valid_c)
    tl.store(slopes_ptr + block + at, curve_c, valid_c)
    tl.store(slopes_ptr + 2 * block + at, shift_c, valid_c)


@triton.jit(do_not_specialize=COUNTS)
def backward_apply(
    x_ptr,
    g_ptr,
    dx_ptr,
    parts_ptr,
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
    d_n,
    d_c,
    d_s,
    part_pieces,
    pieces,
    piece,
    blocks,
    EPS: tl.constexpr,
    ESTIMATES: tl.constexpr,
    AFFINE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    PIECES: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    ALIGN: tl.constexpr,
    C_UNIT: tl.constexpr,
    S_UNIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    SPACE: tl.constexpr,
    STAGES: tl.constexpr,
    FINISHES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """dx = slope·g + curve·(x − pivot) + shift, element by element.

    FINISHES: the slopes are not there yet, and every program does the arithmetic of its groups from the pieces' sums
    in `parts`; else `parts` holds the slopes.
    """
    if EARLY:  # not before the launch before this one is done
        gdc_wait()
        gdc_launch_dependents()
    dtype: tl.constexpr = numbers_ptr.dtype.element_ty
    x_n, x_c, x_s = x_n * ALIGN, x_c * C_UNIT, x_s * S_UNIT
    g_n, g_c, g_s = g_n * ALIGN, g_c * C_UNIT, g_s * S_UNIT
    d_n, d_c, d_s = d_n * ALIGN, d_c * C_UNIT, d_s * S_UNIT
    channels, space = channels * S_UNIT, space * C_UNIT
    # From the end: what the pass before this one read last is still in the cache.
    n, p, b = place(tl.num_programs(0) - 1 - tl.program_id(0), pieces, blocks, CHANNELS_LAST)
    c = b * CHANNELS + tl.arange(0, CHANNELS)
    valid_c = c < channels
    block = samples * channels
    at = n * channels + c
    if FINISHES:
        sum_g_c, sum_gt_c = _added(parts_ptr, n, c, valid_c, samples, channels, part_pieces, PIECES)
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
            valid_c & (p == 0),
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
    else:
        slope_c = tl.load(parts_ptr + at, valid_c, 0)
        curve_c = tl.load(parts_ptr + block + at, valid_c, 0)
        shift_c = tl.load(parts_ptr + 2 * block + at, valid_c, 0)
    pivot_c = tl.load(numbers_ptr + at, valid_c, 0)
    scale_c = tl.load(numbers_ptr + 3 * block + at, valid_c, 0)
    offset_c = tl.load(numbers_ptr + 4 * block + at, valid_c, 0)
    start = p * piece
    write_gradient(
        x_ptr + n.to(tl.int64) * x_n,
        g_ptr + n.to(tl.int64) * g_n,
        dx_ptr + n.to(tl.int64) * d_n,
        pivot_c,
        scale_c,
        offset_c,
        slope_c,
        curve_c,
        shift_c,
        c,
        valid_c,
        start,
        start + tl.minimum(piece, space - start),
        x_c,
        x_s,
        g_c,
        g_s,
        d_c,
        d_s,
        dtype,
        ACTIVATION,
        SLOPE,
        CHANNELS,
        SPACE,
        STAGES,
    )


@triton.jit(do_not_specialize=COUNTS)
def backward_batch(
    numbers_ptr,
    slopes_ptr,
    totals_ptr,
    mean_ptr,
    var_ptr,
    weight_ptr,
    samples,
    channels,
    space,
    EPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Add what flows through the batch's own moments; `totals` begins with the gradients of γ^b and β^b."""
    if EARLY:  # not before the launch before this one is done
        gdc_wait()
        gdc_launch_dependents()
    dtype: tl.constexpr = numbers_ptr.dtype.element_ty
    n = tl.program_id(0)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    valid_c = c < channels
    block = samples * channels
    at = n * channels + c
    pivot_c = tl.load(numbers_ptr + at, valid_c, 0)
    residue_c = tl.load(numbers_ptr + block + at, valid_c, 0)
    rstd_c = tl.rsqrt(tl.load(var_ptr + c, valid_c, 0).to(dtype) + EPS)
    distance_c = ((pivot_c - tl.load(mean_ptr + c, valid_c, 0)) + residue_c).to(dtype)
    a_c = tl.load(weight_ptr + c, valid_c, 0).to(dtype) * rstd_c
    # dL/dμ̂ = −a·dL/dβ^b and dL/dσ̂² = −a·rstd/2 · dL/dγ^b, shared by all elements of the batch
    d_var_c = -tl.load(totals_ptr + c, valid_c, 0) * a_c * rstd_c / samples
    d_mean_c = -tl.load(totals_ptr + channels + c, valid_c, 0) * a_c / samples
    curve_c = d_var_c / space
    shift_c = tl.fma(d_var_c, distance_c, d_mean_c) / space - curve_c * residue_c
    curve_ptr = slopes_ptr + block + at
    shift_ptr = slopes_ptr + 2 * block + at
    tl.store(curve_ptr, tl.load(curve_ptr, valid_c, 0) + curve_c, valid_c)
    tl.store(shift_ptr, tl.load(shift_ptr, valid_c, 0) + shift_c, valid_c)
