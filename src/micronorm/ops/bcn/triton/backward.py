"""The backward: one kernel where a sample's groups fit on chip; sums, numbers and an elementwise pass where not.

The legend of names is in pieces.py. With g = dL/du, u being what enters the activation, every kernel works on
t = x − pivot; `sum_g` and `sum_gt` are Σg and Σg·t over space, from which all else follows. `shares` holds one row of
numbers per sample, its part of the gradients of γ^b, β^b (C each, where there are estimates) and of γ^c, β^c (one per
group, or per channel in group normalization); `slopes` holds three blocks of N×C: dx = slope·g + curve·t + shift.
"""

# Called outside a kernel these raise, which is all that pyright sees of them.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from micronorm.ops.bcn.triton.pieces import (
    COUNTS,
    KEPT,
    NO_AFFINE,
    NO_ESTIMATES,
    PER_CHANNEL,
    PER_GROUP,
    PER_SAMPLE,
    gate,
    group_sum,
    kept_blend,
    mixing,
    place,
    post,
    terms,
)


@triton.jit
def _gradients(
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
    written_c,
    samples,
    channels,
    space,
    EPS: tl.constexpr,
    ESTIMATES: tl.constexpr,
    AFFINE: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """slope, curve and shift of dx; stores the sample's shares of the parameters' gradients where `written_c`."""
    dtype: tl.constexpr = numbers_ptr.dtype.element_ty
    block = samples * channels
    at = n * channels + c
    pivot_c = tl.load(numbers_ptr + at, valid_c, 0)
    residue_c = tl.load(numbers_ptr + block + at, valid_c, 0)
    var_c = tl.load(numbers_ptr + 2 * block + at, valid_c, 0)
    if ESTIMATES == KEPT:  # the layer's own may have moved since
        mean_ptr = numbers_ptr + 5 * block
        var_ptr = mean_ptr + channels
    _, _, distance_c, rstd_c, a_c, z_c, apart_c, inv_c = terms(
        pivot_c,
        residue_c,
        var_c,
        mean_ptr,
        var_ptr,
        weight_ptr,
        bias_ptr,
        n * channels if ESTIMATES == PER_SAMPLE else 0,
        c,
        valid_c,
        EPS,
        ESTIMATES,
        GROUPS,
        SIZE,
        CHANNELS,
    )
    alpha = mixing(kept_blend(numbers_ptr, samples, channels, SIZE), dtype, ESTIMATES != NO_ESTIMATES)
    gamma_c = post(group_weight_ptr, c, valid_c, 1.0, dtype, AFFINE, SIZE, CHANNELS)
    d_scale_c = sum_gt_c - residue_c * sum_g_c  # Σ g·(x − m)
    mix_c = (1 - alpha) + alpha * inv_c
    gain_c = gamma_c * mix_c

    # Through 1/S to the group variance: pull = 2/k · dL/dvar.
    from_inv_c = tl.where(valid_c, gamma_c * (d_scale_c * a_c + sum_g_c * apart_c), 0.0)
    pull_c = -alpha * inv_c * inv_c * inv_c * group_sum(from_inv_c, GROUPS, SIZE, CHANNELS) / SIZE
    # What the mean of (n, c) feels through z − M and the variance.
    offsets_c = group_sum(tl.where(valid_c, gamma_c * sum_g_c, 0.0), GROUPS, SIZE, CHANNELS) / SIZE
    through_c = tl.fma(pull_c, apart_c, -alpha * inv_c * offsets_c)
    d_z_c = tl.fma(gain_c, sum_g_c, through_c)
    d_a_c = tl.fma(gain_c, d_scale_c, tl.fma(d_z_c, distance_c, pull_c * a_c * var_c))

    if ESTIMATES != NO_ESTIMATES or AFFINE != NO_AFFINE:
        affines = channels // SIZE if AFFINE == PER_GROUP else channels
        before = 2 * channels if ESTIMATES != NO_ESTIMATES else 0
        row_ptr = shares_ptr + n * (before + 2 * affines)
        if ESTIMATES != NO_ESTIMATES:
            tl.store(row_ptr + c, d_a_c * rstd_c, written_c)
            tl.store(row_ptr + channels + c, d_z_c, written_c)
        row_ptr += before
        d_gamma_c = tl.fma(d_scale_c * a_c, mix_c, sum_g_c * ((1 - alpha) * z_c + alpha * (apart_c * inv_c)))
        if AFFINE == PER_CHANNEL:
            tl.store(row_ptr + c, d_gamma_c, written_c)
            tl.store(row_ptr + affines + c, sum_g_c, written_c)
        if AFFINE == PER_GROUP:
            first_c = written_c & (c % SIZE == 0)
            d_gamma_c = group_sum(tl.where(valid_c, d_gamma_c, 0.0), GROUPS, SIZE, CHANNELS)
            d_beta_c = group_sum(tl.where(valid_c, sum_g_c, 0.0), GROUPS, SIZE, CHANNELS)
            tl.store(row_ptr + c // SIZE, d_gamma_c, first_c)
            tl.store(row_ptr + affines + c // SIZE, d_beta_c, first_c)

    curve_c = pull_c * a_c * a_c / space
    shift_c = through_c * a_c / space - curve_c * residue_c
    return gain_c * a_c, curve_c, shift_c


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
    program = tl.program_id(0)
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
    slope_c, curve_c, shift_c = _gradients(
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
    UNROLL: tl.constexpr,
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
    x_ptr += n.to(tl.int64) * x_n
    g_ptr += n.to(tl.int64) * g_n
    y_ptr += n.to(tl.int64) * y_n
    dr_ptr += n.to(tl.int64) * d_n
    start = p * piece
    sum_g_cs = tl.zeros([CHANNELS, SPACE], dtype)
    sum_gt_cs = tl.zeros([CHANNELS, SPACE], dtype)
    end = tl.minimum(start + piece, space)
    for first in tl.range(start, end, SPACE, num_stages=STAGES, loop_unroll_factor=UNROLL):
        s = first + tl.arange(0, SPACE)
        valid_cs = valid_c[:, None] & (s < space)[None, :]
        x_cs = tl.load(x_ptr + c[:, None] * x_c + s[None, :] * x_s, valid_cs, 0).to(dtype)
        g_cs = tl.load(g_ptr + c[:, None] * g_c + s[None, :] * g_s, valid_cs, 0).to(dtype)
        t_cs = x_cs - pivot_c[:, None]
        if HAS_RESIDUAL:
            u_cs = tl.load(y_ptr + c[:, None] * y_c + s[None, :] * y_s, valid_cs, 0).to(dtype)
        else:
            u_cs = tl.fma(t_cs, scale_c[:, None], tl.broadcast_to(offset_c[:, None], [CHANNELS, SPACE]))
        g_cs = tl.where(valid_cs, gate(g_cs, u_cs, ACTIVATION, SLOPE), 0.0)
        if HAS_RESIDUAL:
            tl.store(dr_ptr + c[:, None] * d_c + s[None, :] * d_s, g_cs.to(dr_ptr.dtype.element_ty), valid_cs)
        sum_g_cs += g_cs
        sum_gt_cs += tl.where(valid_cs, g_cs * t_cs, 0.0)
    at = (n * pieces + p) * channels + c
    tl.store(parts_ptr + at, tl.sum(sum_g_cs, 1), valid_c)
    tl.store(parts_ptr + samples * pieces * channels + at, tl.sum(sum_gt_cs, 1), valid_c)


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
    slope_c, curve_c, shift_c = _gradients(
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
    UNROLL: tl.constexpr,
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
        slope_c, curve_c, shift_c = _gradients(
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
    far = n.to(tl.int64)
    start = p * piece
    end = tl.minimum(start + piece, space)
    for first in tl.range(start, end, SPACE, num_stages=STAGES, loop_unroll_factor=UNROLL):
        s = first + tl.arange(0, SPACE)
        valid_cs = valid_c[:, None] & (s < space)[None, :]
        x_cs = tl.load(x_ptr + far * x_n + c[:, None] * x_c + s[None, :] * x_s, valid_cs, 0).to(dtype)
        g_cs = tl.load(g_ptr + far * g_n + c[:, None] * g_c + s[None, :] * g_s, valid_cs, 0).to(dtype)
        t_cs = x_cs - pivot_c[:, None]
        u_cs = tl.fma(t_cs, scale_c[:, None], tl.broadcast_to(offset_c[:, None], [CHANNELS, SPACE]))
        g_cs = gate(g_cs, u_cs, ACTIVATION, SLOPE)
        at_cs = far * d_n + c[:, None] * d_c + s[None, :] * d_s
        shift_cs = tl.broadcast_to(shift_c[:, None], [CHANNELS, SPACE])
        dx_cs = tl.fma(g_cs, slope_c[:, None], tl.fma(t_cs, curve_c[:, None], shift_cs))
        tl.store(dx_ptr + at_cs, dx_cs.to(dx_ptr.dtype.element_ty), valid_cs)


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
