"""The kernels of the backward.

In one launch: `backward_whole`. In two or three: `backward_part`, then `backward_numbers` and `backward_apply`, or
`backward_apply` alone (FINISHES). `sums.sum_samples` adds up the parameters' gradients. From them, `backward_apply`
computes what flows through the batch's own moments (FROM_BATCH). The legend of names, shapes and pointers is in
pieces.py.

g is dL/du, where u enters the activation, and t = x − pivot. `sum_g` and `sum_gt` are Σg and Σg·t over space, from
which everything else follows.
"""

# Called outside a kernel these raise, which is all that pyright sees of them.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from micronorm.ops.bcn.triton.loops import gated, store_gradient, sums, write_gradient
from micronorm.ops.bcn.triton.pieces import (
    COUNTS,
    FIRST,
    IDENTITY,
    PIVOT,
    RESIDUE,
    SECOND,
    begin,
    both,
    gradients,
    load_coefficients,
    number_at,
    part_at,
    piece_of,
    tile_at,
    whole_groups,
)
from micronorm.ops.packed import Slope

CURVE, SHIFT = tl.constexpr(Slope.CURVE.value), tl.constexpr(Slope.SHIFT.value)
SLOPE_BLOCK = tl.constexpr(Slope.SLOPE.value)


@triton.jit(do_not_specialize=COUNTS)
def backward_whole(
    x_ptr,  # N×C×S, dtype of the input
    g_ptr,  # N×C×S, dL/dy, dtype of the input
    y_ptr,  # N×C×S, dtype of the input; x without HAS_RESIDUAL
    dx_ptr,  # N×C×S, dtype of the input
    dr_ptr,  # N×C×S, dL/dresidual, dtype of the input; dx without HAS_RESIDUAL
    numbers_ptr,  # packed.numbers_size entries in F
    shares_ptr,  # N×columns in F
    mean_ptr, var_ptr,  # C or N×C, any floating dtype
    weight_ptr, bias_ptr,  # C, any floating dtype
    group_weight_ptr,  # G or C, any floating dtype
    samples, channels, space,
    x_n, x_c, x_s, g_n, g_c, g_s, y_n, y_c, y_s, d_n, d_c, d_s,
    EPS: tl.constexpr, ESTIMATES: tl.constexpr, AFFINE: tl.constexpr, ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    CHANNELS: tl.constexpr, SPACE: tl.constexpr, STAGES: tl.constexpr, TWICE: tl.constexpr, ALIGN: tl.constexpr,
    C_UNIT: tl.constexpr, S_UNIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the whole backward. A program holds its groups on chip, or with TWICE reads them twice."""
    begin(EARLY)
    dtype: tl.constexpr = numbers_ptr.dtype.element_ty
    x = (x_n * ALIGN, x_c * C_UNIT, x_s * S_UNIT)
    g = (g_n * ALIGN, g_c * C_UNIT, g_s * S_UNIT)
    y = (y_n * ALIGN, y_c * C_UNIT, y_s * S_UNIT)
    d = (d_n * ALIGN, d_c * C_UNIT, d_s * S_UNIT)
    channels, space = channels * S_UNIT, space * C_UNIT
    n, c, valid_c = whole_groups(tl.num_programs(0) - 1 - tl.program_id(0), channels, GROUPS, SIZE, CHANNELS)
    far = n.to(tl.int64)
    x_ptr += far * x[0]
    g_ptr += far * g[0]
    y_ptr += far * y[0]
    dx_ptr += far * d[0]
    dr_ptr += far * d[0]
    norm = (mean_ptr, var_ptr, weight_ptr, bias_ptr, group_weight_ptr)
    place, sizes, span = (n, c, valid_c, valid_c), (samples, channels), (c, valid_c, 0, space)
    s = tl.arange(0, SPACE)
    valid_cs = valid_c[:, None] & (s < space)[None, :]
    if TWICE:
        coefficients = load_coefficients(numbers_ptr, n, c, valid_c, sizes)
        sum_g_c, sum_gt_c = sums(
            (x_ptr, g_ptr, y_ptr, dr_ptr), (x, g, y, d), coefficients, span,
            ACTIVATION, SLOPE, HAS_RESIDUAL, CHANNELS, SPACE, STAGES,
        )  # fmt: skip
    else:
        x_cs = tl.load(tile_at(x_ptr, x, c, s), valid_cs, 0).to(dtype)
        g_cs = tl.load(tile_at(g_ptr, g, c, s), valid_cs, 0).to(dtype)
        coefficients = load_coefficients(numbers_ptr, n, c, valid_c, sizes)
        t_cs = tl.where(valid_cs, x_cs - coefficients[0][:, None], 0.0)
        g_cs = gated(g_cs, t_cs, coefficients, tile_at(y_ptr, y, c, s), valid_cs, ACTIVATION, SLOPE, HAS_RESIDUAL)
        sum_g_c = tl.sum(g_cs, 1)
        sum_gt_c = tl.sum(tl.fma(g_cs, t_cs, tl.zeros_like(g_cs)), 1)
    slopes = gradients(
        sum_g_c, sum_gt_c, numbers_ptr, shares_ptr, norm, place, sizes, space, EPS, ESTIMATES, AFFINE, GROUPS, SIZE
    )
    if TWICE and HAS_RESIDUAL:
        tl.debug_barrier()  # other threads have gated the gradient and stored it
        pointers, strides = (x_ptr, dr_ptr, dx_ptr), (x, d, d)
        write_gradient(pointers, strides, coefficients, slopes, span, IDENTITY, SLOPE, SPACE, STAGES)
    elif TWICE:
        pointers, strides = (x_ptr, g_ptr, dx_ptr), (x, g, d)
        write_gradient(pointers, strides, coefficients, slopes, span, ACTIVATION, SLOPE, SPACE, STAGES)
    else:
        if HAS_RESIDUAL:
            tl.store(tile_at(dr_ptr, d, c, s), g_cs.to(dr_ptr.dtype.element_ty), valid_cs)
        store_gradient(g_cs, t_cs, slopes, dx_ptr, d, c, s, valid_cs)


@triton.jit(do_not_specialize=COUNTS)
def backward_part(
    x_ptr,  # N×C×S, dtype of the input
    g_ptr,  # N×C×S, dL/dy, dtype of the input
    y_ptr,  # N×C×S, dtype of the input; x without HAS_RESIDUAL
    dr_ptr,  # N×C×S, dL/dresidual, dtype of the input; dx without HAS_RESIDUAL
    numbers_ptr,  # packed.numbers_size entries in F
    parts_ptr,  # 2×N×pieces×C in F: Σg, then Σg·t
    samples, channels, space,
    x_n, x_c, x_s, g_n, g_c, g_s, y_n, y_c, y_s, d_n, d_c, d_s,
    pieces, piece, blocks,
    ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, CHANNELS_LAST: tl.constexpr,
    ALIGN: tl.constexpr, C_UNIT: tl.constexpr, S_UNIT: tl.constexpr, CHANNELS: tl.constexpr,
    SPACE: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute Σg and Σg·t over one piece of space; with a residual, store its gradient g for the elementwise pass."""
    begin(EARLY)
    x = (x_n * ALIGN, x_c * C_UNIT, x_s * S_UNIT)
    g = (g_n * ALIGN, g_c * C_UNIT, g_s * S_UNIT)
    y = (y_n * ALIGN, y_c * C_UNIT, y_s * S_UNIT)
    d = (d_n * ALIGN, d_c * C_UNIT, d_s * S_UNIT)
    channels, space = channels * S_UNIT, space * C_UNIT
    n, p, b = piece_of(tl.program_id(0), pieces, blocks, CHANNELS_LAST)
    c = b * CHANNELS + tl.arange(0, CHANNELS)
    valid_c = c < channels
    coefficients = load_coefficients(numbers_ptr, n, c, valid_c, (samples, channels))
    start = p * piece
    end = start + tl.minimum(piece, space - start)
    far = n.to(tl.int64)
    pointers = (x_ptr + far * x[0], g_ptr + far * g[0], y_ptr + far * y[0], dr_ptr + far * d[0])
    sum_g_c, sum_gt_c = sums(
        pointers, (x, g, y, d), coefficients, (c, valid_c, start, end),
        ACTIVATION, SLOPE, HAS_RESIDUAL, CHANNELS, SPACE, STAGES,
    )  # fmt: skip
    row, sizes = n * pieces + p, (samples, channels)
    tl.store(part_at(parts_ptr, FIRST, row, c, sizes, pieces), sum_g_c, valid_c)
    tl.store(part_at(parts_ptr, SECOND, row, c, sizes, pieces), sum_gt_c, valid_c)


@triton.jit
def _added(parts_ptr, n, c, valid_c, sizes, pieces, PIECES: tl.constexpr):
    """Return the sums of a sample from those of its pieces."""
    p = tl.arange(0, PIECES)
    valid_cp = valid_c[:, None] & (p < pieces)[None, :]
    row_p = n * pieces + p
    sum_g_cp = tl.load(part_at(parts_ptr, FIRST, row_p[None, :], c[:, None], sizes, pieces), valid_cp, 0)
    sum_g_c = tl.sum(sum_g_cp, 1)
    sum_gt_cp = tl.load(part_at(parts_ptr, SECOND, row_p[None, :], c[:, None], sizes, pieces), valid_cp, 0)
    return sum_g_c, tl.sum(sum_gt_cp, 1)


@triton.jit(do_not_specialize=COUNTS)
def backward_numbers(
    parts_ptr,  # 2×N×pieces×C in F
    numbers_ptr,  # packed.numbers_size entries in F
    slopes_ptr,  # 3×N×C in F
    shares_ptr,  # N×columns in F
    mean_ptr, var_ptr,  # C or N×C, any floating dtype
    weight_ptr, bias_ptr,  # C, any floating dtype
    group_weight_ptr,  # G or C, any floating dtype
    samples, channels, space, pieces,
    EPS: tl.constexpr, ESTIMATES: tl.constexpr, AFFINE: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    CHANNELS: tl.constexpr, PIECES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Do the N×C arithmetic of the backward, from the sums of the pieces."""
    begin(EARLY)
    n, c, valid_c = whole_groups(tl.program_id(0), channels, GROUPS, SIZE, CHANNELS)
    norm = (mean_ptr, var_ptr, weight_ptr, bias_ptr, group_weight_ptr)
    place, sizes = (n, c, valid_c, valid_c), (samples, channels)
    sum_g_c, sum_gt_c = _added(parts_ptr, n, c, valid_c, sizes, pieces, PIECES)
    slope_c, curve_c, shift_c = gradients(
        sum_g_c, sum_gt_c, numbers_ptr, shares_ptr, norm, place, sizes, space, EPS, ESTIMATES, AFFINE, GROUPS, SIZE
    )
    tl.store(number_at(slopes_ptr, SLOPE_BLOCK, n, c, sizes), slope_c, valid_c)
    tl.store(number_at(slopes_ptr, CURVE, n, c, sizes), curve_c, valid_c)
    tl.store(number_at(slopes_ptr, SHIFT, n, c, sizes), shift_c, valid_c)


@triton.jit
def _through_batch(totals_ptr, numbers_ptr, norm, n, c, valid_c, sizes, space, EPS: tl.constexpr):
    """Return what the batch's own moments add to curve and shift, from the gradients of γ^b and β^b in `totals`."""
    pivot_c = tl.load(number_at(numbers_ptr, PIVOT, n, c, sizes), valid_c, 0)
    residue_c = tl.load(number_at(numbers_ptr, RESIDUE, n, c, sizes), valid_c, 0)
    dtype = pivot_c.dtype
    rstd_c = tl.rsqrt(tl.load(norm[1] + c, valid_c, 0).to(dtype) + EPS)
    distance_c = ((pivot_c - tl.load(norm[0] + c, valid_c, 0)) + residue_c).to(dtype)
    a_c = tl.load(norm[2] + c, valid_c, 0).to(dtype) * rstd_c
    # dL/dμ̂ = −a·dL/dβ^b and dL/dσ̂² = −a·rstd/2 · dL/dγ^b, shared by all elements of the batch
    d_var_c = -tl.load(totals_ptr + c, valid_c, 0) * a_c * rstd_c / sizes[0]
    d_mean_c = -tl.load(totals_ptr + sizes[1] + c, valid_c, 0) * a_c / sizes[0]
    curve_c = d_var_c / space
    return curve_c, tl.fma(d_var_c, distance_c, d_mean_c) / space - curve_c * residue_c


@triton.jit(do_not_specialize=COUNTS)
def backward_apply(
    x_ptr,  # N×C×S, dtype of the input
    g_ptr,  # N×C×S, dL/dy or the stored dL/dresidual, dtype of the input
    dx_ptr,  # N×C×S, dtype of the input
    parts_ptr,  # with FINISHES 2×N×part_pieces×C in F; otherwise the slopes, 3×N×C in F
    numbers_ptr,  # packed.numbers_size entries in F
    shares_ptr,  # with FINISHES N×columns in F; with FROM_BATCH their sums over the samples, columns in F
    mean_ptr, var_ptr,  # C or N×C, any floating dtype
    weight_ptr, bias_ptr,  # C, any floating dtype
    group_weight_ptr,  # G or C, any floating dtype
    samples, channels, space,
    x_n, x_c, x_s, g_n, g_c, g_s, d_n, d_c, d_s,
    part_pieces, pieces, piece, blocks,
    EPS: tl.constexpr, ESTIMATES: tl.constexpr, AFFINE: tl.constexpr, ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, ALIGN: tl.constexpr, C_UNIT: tl.constexpr, S_UNIT: tl.constexpr,
    CHANNELS: tl.constexpr, SPACE: tl.constexpr, STAGES: tl.constexpr, FINISHES: tl.constexpr,
    FROM_BATCH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute dx = slope·g + curve·(x − pivot) + shift, element by element.

    Programs go from the end: what the pass before this one read last is still in the cache.
    FINISHES: the slopes are not computed yet, and every program does the arithmetic of its own groups first.
    FROM_BATCH: the channels were normalized with the batch's own moments, through which gradients flow. The pointers
    after `numbers_ptr` are used only with one of the two.
    """
    begin(EARLY)
    x = (x_n * ALIGN, x_c * C_UNIT, x_s * S_UNIT)
    g = (g_n * ALIGN, g_c * C_UNIT, g_s * S_UNIT)
    d = (d_n * ALIGN, d_c * C_UNIT, d_s * S_UNIT)
    channels, space = channels * S_UNIT, space * C_UNIT
    n, p, b = piece_of(tl.num_programs(0) - 1 - tl.program_id(0), pieces, blocks, CHANNELS_LAST)
    c = b * CHANNELS + tl.arange(0, CHANNELS)
    valid_c = c < channels
    sizes = (samples, channels)
    if FINISHES:
        sum_g_c, sum_gt_c = _added(parts_ptr, n, c, valid_c, sizes, part_pieces, PIECES)
        norm = (mean_ptr, var_ptr, weight_ptr, bias_ptr, group_weight_ptr)
        place = (n, c, valid_c, both(valid_c, p == 0))
        slopes = gradients(
            sum_g_c, sum_gt_c, numbers_ptr, shares_ptr, norm, place, sizes, space, EPS, ESTIMATES, AFFINE, GROUPS, SIZE
        )
    else:
        slope_c = tl.load(number_at(parts_ptr, SLOPE_BLOCK, n, c, sizes), valid_c, 0)
        curve_c = tl.load(number_at(parts_ptr, CURVE, n, c, sizes), valid_c, 0)
        shift_c = tl.load(number_at(parts_ptr, SHIFT, n, c, sizes), valid_c, 0)
        if FROM_BATCH:
            norm = (mean_ptr, var_ptr, weight_ptr)
            more_curve_c, more_shift_c = _through_batch(shares_ptr, numbers_ptr, norm, n, c, valid_c, sizes, space, EPS)
            curve_c += more_curve_c
            shift_c += more_shift_c
        slopes = (slope_c, curve_c, shift_c)
    coefficients = load_coefficients(numbers_ptr, n, c, valid_c, sizes)
    start = p * piece
    end = start + tl.minimum(piece, space - start)
    far = n.to(tl.int64)
    pointers, strides = (x_ptr + far * x[0], g_ptr + far * g[0], dx_ptr + far * d[0]), (x, g, d)
    span = (c, valid_c, start, end)
    write_gradient(pointers, strides, coefficients, slopes, span, ACTIVATION, SLOPE, SPACE, STAGES)
