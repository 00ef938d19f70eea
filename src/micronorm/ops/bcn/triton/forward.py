"""The kernels of the forward.

In one launch: `forward_whole`. In two or three: `moments_part`, then `forward_numbers` and `forward_apply`, or
`forward_apply` alone (FINISHES). Statistics derived from the input are computed after `moments_part`, in estimates.py.
The legend of names, shapes and pointers is in pieces.py.
"""

# Called outside a kernel these raise, which is all that pyright sees of them.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from micronorm.ops.bcn.triton.loops import moments, store_output, write_output
from micronorm.ops.bcn.triton.pieces import (
    COUNTS,
    FIRST,
    SECOND,
    begin,
    both,
    load_coefficients,
    part_at,
    piece_of,
    split_mean,
    tile_at,
    whole_groups,
    write_numbers,
)


@triton.jit(do_not_specialize=COUNTS)
def forward_whole(
    x_ptr,  # N×C×S, dtype of the input
    residual_ptr,  # N×C×S, dtype of the input; x without HAS_RESIDUAL
    y_ptr,  # N×C×S, dtype of the input
    numbers_ptr,  # packed.numbers_size entries in F
    mean_ptr, var_ptr,  # C or N×C, any floating dtype
    weight_ptr, bias_ptr,  # C, any floating dtype
    group_weight_ptr, group_bias_ptr,  # G or C, any floating dtype
    blend_ptr,  # 1, any floating dtype
    samples, channels, space,
    x_n, x_c, x_s, r_n, r_c, r_s, y_n, y_c, y_s,
    EPS: tl.constexpr, ESTIMATES: tl.constexpr, AFFINE: tl.constexpr, HAS_BLEND: tl.constexpr,
    ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GROUPS: tl.constexpr,
    SIZE: tl.constexpr, CHANNELS: tl.constexpr, SPACE: tl.constexpr, STAGES: tl.constexpr, TWICE: tl.constexpr,
    ALIGN: tl.constexpr, C_UNIT: tl.constexpr, S_UNIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the whole forward. A program holds its groups on chip, or with TWICE reads them twice.

    Programs go from the last sample to the first: the layer before has left the end of x in the cache.
    """
    begin(EARLY)
    dtype: tl.constexpr = numbers_ptr.dtype.element_ty
    x = (x_n * ALIGN, x_c * C_UNIT, x_s * S_UNIT)
    r = (r_n * ALIGN, r_c * C_UNIT, r_s * S_UNIT)
    y = (y_n * ALIGN, y_c * C_UNIT, y_s * S_UNIT)
    channels, space = channels * S_UNIT, space * C_UNIT
    n, c, valid_c = whole_groups(tl.num_programs(0) - 1 - tl.program_id(0), channels, GROUPS, SIZE, CHANNELS)
    far = n.to(tl.int64)
    pointers = (x_ptr + far * x[0], residual_ptr + far * r[0], y_ptr + far * y[0])
    s = tl.arange(0, SPACE)
    valid_cs = valid_c[:, None] & (s < space)[None, :]
    if TWICE:
        first_c, mean_c, square_c = moments(pointers[0], x, (c, valid_c, 0, space), dtype, CHANNELS, SPACE, STAGES)
        raw_var_c = square_c / space
    else:
        x_cs = tl.load(tile_at(pointers[0], x, c, s), valid_cs, 0).to(dtype)
        first_c = tl.load(pointers[0] + c * x[1], valid_c, 0).to(dtype)
        t_cs = tl.where(valid_cs, x_cs - first_c[:, None], 0.0)
        mean_c = tl.sum(t_cs, 1) / space
        d_cs = tl.where(valid_cs, t_cs - mean_c[:, None], 0.0)
        raw_var_c = tl.sum(tl.fma(d_cs, d_cs, tl.zeros_like(d_cs)), 1) / space
    pivot_c, residue_c = split_mean(first_c, mean_c)
    data = (pivot_c, residue_c, raw_var_c)
    norm = (mean_ptr, var_ptr, weight_ptr, bias_ptr, group_weight_ptr, group_bias_ptr, blend_ptr)
    place, sizes = (n, c, valid_c, valid_c), (samples, channels)
    write_numbers(numbers_ptr, data, norm, place, sizes, EPS, ESTIMATES, AFFINE, HAS_BLEND, GROUPS, SIZE)
    tl.debug_barrier()  # read what the elementwise kernel would read, so that `recompute` gives the same bits
    coefficients = load_coefficients(numbers_ptr, n, c, valid_c, sizes)
    strides = (x, r, y)
    if TWICE:
        span = (c, valid_c, 0, space)
        write_output(pointers, strides, coefficients, span, ACTIVATION, SLOPE, HAS_RESIDUAL, SPACE, STAGES)
    else:
        store_output(x_cs, pointers, strides, coefficients, c, s, valid_cs, ACTIVATION, SLOPE, HAS_RESIDUAL)


@triton.jit(do_not_specialize=COUNTS)
def moments_part(
    x_ptr,  # N×C×S, dtype of the input
    parts_ptr,  # 2×N×pieces×C in F: means, then squared deviations
    samples, channels, space,
    x_n, x_c, x_s,
    pieces, piece, blocks,
    CHANNELS_LAST: tl.constexpr, ALIGN: tl.constexpr, C_UNIT: tl.constexpr, S_UNIT: tl.constexpr,
    CHANNELS: tl.constexpr, SPACE: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the mean, around the sample's first element, and the sum of squared deviations of one piece of space.

    Programs go from the end, which the layer before has written last. The elementwise pass begins where this one ends.
    """
    begin(EARLY)
    dtype: tl.constexpr = parts_ptr.dtype.element_ty
    x = (x_n * ALIGN, x_c * C_UNIT, x_s * S_UNIT)
    channels, space = channels * S_UNIT, space * C_UNIT
    n, p, b = piece_of(tl.num_programs(0) - 1 - tl.program_id(0), pieces, blocks, CHANNELS_LAST)
    c = b * CHANNELS + tl.arange(0, CHANNELS)
    valid_c = c < channels
    start = p * piece
    end = start + tl.minimum(piece, space - start)
    x_ptr += n.to(tl.int64) * x[0]
    _, mean_c, square_c = moments(x_ptr, x, (c, valid_c, start, end), dtype, CHANNELS, SPACE, STAGES)
    row, sizes = n * pieces + p, (samples, channels)
    tl.store(part_at(parts_ptr, FIRST, row, c, sizes, pieces), mean_c, valid_c)
    tl.store(part_at(parts_ptr, SECOND, row, c, sizes, pieces), square_c, valid_c)


@triton.jit
def _merged(x_ptr, x, parts_ptr, n, c, valid_c, sizes, space, pieces, piece, PIECES: tl.constexpr):
    """Return pivot, residue and variance of a sample from the moments of its pieces."""
    dtype: tl.constexpr = parts_ptr.dtype.element_ty
    first_c = tl.load(x_ptr + n.to(tl.int64) * x[0] + c * x[1], valid_c, 0).to(dtype)
    p = tl.arange(0, PIECES)
    valid_cp = valid_c[:, None] & (p < pieces)[None, :]
    row_p = n * pieces + p
    mean_cp = tl.load(part_at(parts_ptr, FIRST, row_p[None, :], c[:, None], sizes, pieces), valid_cp, 0)
    square_cp = tl.load(part_at(parts_ptr, SECOND, row_p[None, :], c[:, None], sizes, pieces), valid_cp, 0)
    count_p = tl.where(p < pieces, tl.minimum(space - p * piece, piece), 0).to(dtype)
    mean_c = tl.sum(tl.fma(mean_cp, count_p[None, :], tl.zeros_like(mean_cp)), 1) / space
    apart_cp = tl.where(valid_cp, mean_cp - mean_c[:, None], 0.0)
    var_c = tl.sum(tl.fma(apart_cp * apart_cp, count_p[None, :], square_cp), 1) / space
    pivot_c, residue_c = split_mean(first_c, mean_c)
    return pivot_c, residue_c, var_c


@triton.jit(do_not_specialize=COUNTS)
def forward_numbers(
    x_ptr,  # N×C×S, dtype of the input
    parts_ptr,  # 2×N×pieces×C in F
    numbers_ptr,  # packed.numbers_size entries in F
    mean_ptr, var_ptr,  # C or N×C, any floating dtype
    weight_ptr, bias_ptr,  # C, any floating dtype
    group_weight_ptr, group_bias_ptr,  # G or C, any floating dtype
    blend_ptr,  # 1, any floating dtype
    samples, channels, space,
    x_n, x_c,
    pieces, piece,
    EPS: tl.constexpr, ESTIMATES: tl.constexpr, AFFINE: tl.constexpr, HAS_BLEND: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, CHANNELS: tl.constexpr, PIECES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Do the N×C arithmetic of the forward, from the moments of the pieces."""
    begin(EARLY)
    n, c, valid_c = whole_groups(tl.program_id(0), channels, GROUPS, SIZE, CHANNELS)
    sizes = (samples, channels)
    data = _merged(x_ptr, (x_n, x_c), parts_ptr, n, c, valid_c, sizes, space, pieces, piece, PIECES)
    norm = (mean_ptr, var_ptr, weight_ptr, bias_ptr, group_weight_ptr, group_bias_ptr, blend_ptr)
    place = (n, c, valid_c, valid_c)
    write_numbers(numbers_ptr, data, norm, place, sizes, EPS, ESTIMATES, AFFINE, HAS_BLEND, GROUPS, SIZE)


@triton.jit(do_not_specialize=COUNTS)
def forward_apply(
    x_ptr,  # N×C×S, dtype of the input
    residual_ptr,  # N×C×S, dtype of the input; x without HAS_RESIDUAL
    y_ptr,  # N×C×S, dtype of the input
    parts_ptr,  # with FINISHES 2×N×part_pieces×C in F, then 3×CHANNELS for each program
    numbers_ptr,  # packed.numbers_size entries in F
    mean_ptr, var_ptr,  # C or N×C, any floating dtype
    weight_ptr, bias_ptr,  # C, any floating dtype
    group_weight_ptr, group_bias_ptr,  # G or C, any floating dtype
    blend_ptr,  # 1, any floating dtype
    samples, channels, space,
    x_n, x_c, x_s, r_n, r_c, r_s, y_n, y_c, y_s,
    part_pieces, part_piece, pieces, piece, blocks,
    EPS: tl.constexpr, ESTIMATES: tl.constexpr, AFFINE: tl.constexpr, HAS_BLEND: tl.constexpr,
    ACTIVATION: tl.constexpr, SLOPE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GROUPS: tl.constexpr,
    SIZE: tl.constexpr, PIECES: tl.constexpr, CHANNELS_LAST: tl.constexpr, ALIGN: tl.constexpr,
    C_UNIT: tl.constexpr, S_UNIT: tl.constexpr, CHANNELS: tl.constexpr, SPACE: tl.constexpr,
    STAGES: tl.constexpr, FINISHES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute y = act(scale·(x − pivot) + offset [+ residual]), element by element.

    FINISHES: `numbers` are not computed yet, and every program does the arithmetic of its own groups first. The
    pointers after `numbers_ptr` are read only then.
    """
    begin(EARLY)
    x = (x_n * ALIGN, x_c * C_UNIT, x_s * S_UNIT)
    r = (r_n * ALIGN, r_c * C_UNIT, r_s * S_UNIT)
    y = (y_n * ALIGN, y_c * C_UNIT, y_s * S_UNIT)
    channels, space = channels * S_UNIT, space * C_UNIT
    n, p, b = piece_of(tl.program_id(0), pieces, blocks, CHANNELS_LAST)
    c = b * CHANNELS + tl.arange(0, CHANNELS)
    valid_c = c < channels
    sizes = (samples, channels)
    if FINISHES:
        data = _merged(x_ptr, x, parts_ptr, n, c, valid_c, sizes, space, part_pieces, part_piece, PIECES)
        norm = (mean_ptr, var_ptr, weight_ptr, bias_ptr, group_weight_ptr, group_bias_ptr, blend_ptr)
        place = (n, c, valid_c, both(valid_c, p == 0))
        scale_c, offset_c = write_numbers(
            numbers_ptr, data, norm, place, sizes, EPS, ESTIMATES, AFFINE, HAS_BLEND, GROUPS, SIZE
        )
        # Other programs of this sample store the same values in `numbers`. To read back its own, each program has some
        # memory behind the parts.
        own_ptr = parts_ptr + 2 * samples * part_pieces * channels + tl.program_id(0) * (3 * CHANNELS)
        own_ptr += tl.arange(0, CHANNELS)
        tl.store(own_ptr, data[0])
        tl.store(own_ptr + CHANNELS, scale_c)
        tl.store(own_ptr + 2 * CHANNELS, offset_c)
        tl.debug_barrier()
        coefficients = (tl.load(own_ptr), tl.load(own_ptr + CHANNELS), tl.load(own_ptr + 2 * CHANNELS))
    else:
        coefficients = load_coefficients(numbers_ptr, n, c, valid_c, sizes)
    start = p * piece
    end = start + tl.minimum(piece, space - start)
    far = n.to(tl.int64)
    pointers = (x_ptr + far * x[0], residual_ptr + far * r[0], y_ptr + far * y[0])
    span = (c, valid_c, start, end)
    write_output(pointers, (x, r, y), coefficients, span, ACTIVATION, SLOPE, HAS_RESIDUAL, SPACE, STAGES)
