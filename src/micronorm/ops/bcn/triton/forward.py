"""The forward: one kernel where a sample's groups fit on chip; moments, numbers and an elementwise pass where not.

The legend of names is in pieces.py.
"""

# Called outside a kernel these raise, which is all that pyright sees of them.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from micronorm.ops.bcn.triton.pieces import COUNTS, activate, place, split_mean, write_numbers


@triton.jit(do_not_specialize=COUNTS)
def forward_whole(
    x_ptr,
    residual_ptr,
    y_ptr,
    numbers_ptr,
    mean_ptr,
    var_ptr,
    weight_ptr,
    bias_ptr,
    group_weight_ptr,
    group_bias_ptr,
    blend_ptr,
    samples,
    channels,
    space,
    x_n,
    x_c,
    x_s,
    r_n,
    r_c,
    r_s,
    y_n,
    y_c,
    y_s,
    EPS: tl.constexpr,
    ESTIMATES: tl.constexpr,
    AFFINE: tl.constexpr,
    HAS_BLEND: tl.constexpr,
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
    MAX: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The whole forward where a sample's groups fit on chip: x is read once."""
    if EARLY:  # not before the launch before this one is done
        gdc_wait()
        gdc_launch_dependents()
    dtype: tl.constexpr = numbers_ptr.dtype.element_ty
    x_n, x_c, x_s = x_n * ALIGN, x_c * C_UNIT, x_s * S_UNIT
    r_n, r_c, r_s = r_n * ALIGN, r_c * C_UNIT, r_s * S_UNIT
    y_n, y_c, y_s = y_n * ALIGN, y_c * C_UNIT, y_s * S_UNIT
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
    x_ptr += n.to(tl.int64) * x_n
    x_cs = tl.load(x_ptr + c[:, None] * x_c + s[None, :] * x_s, valid_cs, 0).to(dtype)
    first_c = tl.load(x_ptr + c * x_c, valid_c, 0).to(dtype)

    t_cs = tl.where(valid_cs, x_cs - first_c[:, None], 0.0)
    mean_c = tl.sum(t_cs, 1) / space
    d_cs = tl.where(valid_cs, t_cs - mean_c[:, None], 0.0)
    raw_var_c = tl.sum(tl.fma(d_cs, d_cs, tl.zeros_like(d_cs)), 1) / space
    pivot_c, residue_c = split_mean(first_c, mean_c)
    write_numbers(
        numbers_ptr,
        pivot_c,
        residue_c,
        raw_var_c,
        mean_ptr,
        var_ptr,
        weight_ptr,
        bias_ptr,
        group_weight_ptr,
        group_bias_ptr,
        blend_ptr,
        n,
        c,
        valid_c,
        valid_c,
        samples,
        channels,
        EPS,
        ESTIMATES,
        AFFINE,
        HAS_BLEND,
        GROUPS,
        SIZE,
        CHANNELS,
        MAX,
    )
    tl.debug_barrier()  # what the elementwise kernel would find, for `recompute` to give the same bits
    block = samples * channels
    at = n * channels + c
    pivot_c = tl.load(numbers_ptr + at, valid_c, 0)
    scale_c = tl.load(numbers_ptr + 3 * block + at, valid_c, 0)
    offset_c = tl.load(numbers_ptr + 4 * block + at, valid_c, 0)
    u_cs = tl.fma(x_cs - pivot_c[:, None], scale_c[:, None], tl.broadcast_to(offset_c[:, None], [CHANNELS, SPACE]))
    if HAS_RESIDUAL:
        residual_ptr += n.to(tl.int64) * r_n
        u_cs += tl.load(residual_ptr + c[:, None] * r_c + s[None, :] * r_s, valid_cs, 0).to(dtype)
    y_ptr += n.to(tl.int64) * y_n
    y_cs = activate(u_cs, ACTIVATION, SLOPE)
    tl.store(y_ptr + c[:, None] * y_c + s[None, :] * y_s, y_cs.to(y_ptr.dtype.element_ty), valid_cs)


@triton.jit(do_not_specialize=COUNTS)
def moments_part(
    x_ptr,
    parts_ptr,
    samples,
    channels,
    space,
    x_n,
    x_c,
    x_s,
    pieces,
    piece,
    blocks,
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
    """Mean, around the sample's first element, and sum of squared deviations of one piece of space.

    The sums run around the median of three of the piece's elements. Where its mean lies D deviations from there, taking
    the square of that distance away at the end costs D² roundings; one outlier among the three changes nothing.
    """
    if EARLY:  # not before the launch before this one is done
        gdc_wait()
        gdc_launch_dependents()
    dtype: tl.constexpr = parts_ptr.dtype.element_ty
    x_n, x_c, x_s = x_n * ALIGN, x_c * C_UNIT, x_s * S_UNIT
    channels, space = channels * S_UNIT, space * C_UNIT
    n, p, b = place(tl.program_id(0), pieces, blocks, CHANNELS_LAST)
    c = b * CHANNELS + tl.arange(0, CHANNELS)
    valid_c = c < channels
    x_ptr += n.to(tl.int64) * x_n
    start = p * piece
    end = tl.minimum(start + piece, space)
    quarter = (end - start) // 4
    low_c = tl.load(x_ptr + c * x_c + (start + quarter) * x_s, valid_c, 0).to(dtype)
    middle_c = tl.load(x_ptr + c * x_c + (start + 2 * quarter) * x_s, valid_c, 0).to(dtype)
    high_c = tl.load(x_ptr + c * x_c + (end - 1 - quarter) * x_s, valid_c, 0).to(dtype)
    first_c = tl.load(x_ptr + c * x_c, valid_c, 0).to(dtype)
    pivot_c = tl.maximum(tl.minimum(low_c, middle_c), tl.minimum(tl.maximum(low_c, middle_c), high_c))
    sum_cs = tl.zeros([CHANNELS, SPACE], dtype)
    square_cs = tl.zeros([CHANNELS, SPACE], dtype)
    for position in tl.range(start, end, SPACE, num_stages=STAGES, loop_unroll_factor=UNROLL):
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
    at = (n * pieces + p) * channels + c
    tl.store(parts_ptr + at, (pivot_c - first_c) + rest_c, valid_c)
    tl.store(parts_ptr + samples * pieces * channels + at, square_c, valid_c)


@triton.jit
def _merged(x_ptr, parts_ptr, n, c, valid_c, samples, channels, space, x_n, x_c, pieces, piece, PIECES: tl.constexpr):
    """The moments of a sample from those of its pieces."""
    dtype: tl.constexpr = parts_ptr.dtype.element_ty
    first_c = tl.load(x_ptr + n.to(tl.int64) * x_n + c * x_c, valid_c, 0).to(dtype)
    p = tl.arange(0, PIECES)
    valid_cp = valid_c[:, None] & (p < pieces)[None, :]
    at_cp = (n * pieces + p)[None, :] * channels + c[:, None]
    mean_cp = tl.load(parts_ptr + at_cp, valid_cp, 0)
    square_cp = tl.load(parts_ptr + samples * pieces * channels + at_cp, valid_cp, 0)
    count_p = tl.where(p < pieces, tl.minimum(space - p * piece, piece), 0).to(dtype)
    mean_c = tl.sum(tl.fma(mean_cp, count_p[None, :], tl.zeros_like(mean_cp)), 1) / space
    apart_cp = tl.where(valid_cp, mean_cp - mean_c[:, None], 0.0)
    var_c = tl.sum(tl.fma(apart_cp * apart_cp, count_p[None, :], square_cp), 1) / space
    pivot_c, residue_c = split_mean(first_c, mean_c)
    return pivot_c, residue_c, var_c


@triton.jit(do_not_specialize=COUNTS)
def moments_merge(
    x_ptr,
    parts_ptr,
    numbers_ptr,
    samples,
    channels,
    space,
    x_n,
    x_c,
    pieces,
    piece,
    CHANNELS: tl.constexpr,
    PIECES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Pivot, residue and variance alone, for statistics that are made of them before the normalization."""
    if EARLY:  # not before the launch before this one is done
        gdc_wait()
        gdc_launch_dependents()
    n = tl.program_id(0)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    valid_c = c < channels
    pivot_c, residue_c, var_c = _merged(
        x_ptr, parts_ptr, n, c, valid_c, samples, channels, space, x_n, x_c, pieces, piece, PIECES
    )
    block = samples * channels
    at = n * channels + c
    tl.store(numbers_ptr + at, pivot_c, valid_c)
    tl.store(numbers_ptr + block + at, residue_c, valid_c)
    tl.store(numbers_ptr + 2 * block + at, var_c, valid_c)


@triton.jit(do_not_specialize=COUNTS)
def forward_numbers(
    x_ptr,
    parts_ptr,
    numbers_ptr,
    mean_ptr,
    var_ptr,
    weight_ptr,
    bias_ptr,
    group_weight_ptr,
    group_bias_ptr,
    blend_ptr,
    samples,
    channels,
    space,
    x_n,
    x_c,
    pieces,
    piece,
    EPS: tl.constexpr,
    ESTIMATES: tl.constexpr,
    AFFINE: tl.constexpr,
    HAS_BLEND: tl.constexpr,
    HAS_PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    PIECES: tl.constexpr,
    MAX: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The N×C arithmetic of the forward, from the pieces' moments or from moments that lie in `numbers` already."""
    if EARLY:  # not before the launch before this one is done
        gdc_wait()
        gdc_launch_dependents()
    WIDTH: tl.constexpr = GROUPS * SIZE
    blocks = tl.cdiv(channels, WIDTH)
    program = tl.program_id(0)
    n = program // blocks
    local = tl.arange(0, CHANNELS)
    c = (program % blocks) * WIDTH + local
    valid_c = (local < WIDTH) & (c < channels)
    if HAS_PARTS:
        pivot_c, residue_c, raw_var_c = _merged(
            x_ptr, parts_ptr, n, c, valid_c, samples, channels, space, x_n, x_c, pieces, piece, PIECES
        )
    else:
        block = samples * channels
        at = n * channels + c
        pivot_c = tl.load(numbers_ptr + at, valid_c, 0)
        residue_c = tl.load(numbers_ptr + block + at, valid_c, 0)
        raw_var_c = tl.load(numbers_ptr + 2 * block + at, valid_c, 0)
    write_numbers(
        numbers_ptr,
        pivot_c,
        residue_c,
        raw_var_c,
        mean_ptr,
        var_ptr,
        weight_ptr,
        bias_ptr,
        group_weight_ptr,
        group_bias_ptr,
        blend_ptr,
        n,
        c,
        valid_c,
        valid_c,
        samples,
        channels,
        EPS,
        ESTIMATES,
        AFFINE,
        HAS_BLEND,
        GROUPS,
        SIZE,
        CHANNELS,
        MAX,
    )


@triton.jit(do_not_specialize=COUNTS)
def forward_apply(
    x_ptr,
    residual_ptr,
    y_ptr,
    parts_ptr,
    numbers_ptr,
    mean_ptr,
    var_ptr,
    weight_ptr,
    bias_ptr,
    group_weight_ptr,
    group_bias_ptr,
    blend_ptr,
    samples,
    channels,
    space,
    x_n,
    x_c,
    x_s,
    r_n,
    r_c,
    r_s,
    y_n,
    y_c,
    y_s,
    part_pieces,
    part_piece,
    pieces,
    piece,
    blocks,
    EPS: tl.constexpr,
    ESTIMATES: tl.constexpr,
    AFFINE: tl.constexpr,
    HAS_BLEND: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
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
    MAX: tl.constexpr,
    FINISHES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """y = act(scale·(x − pivot) + offset [+ residual]), element by element.

    FINISHES: the numbers are not there yet, and every program does the arithmetic of its own groups.
    """
    if EARLY:  # not before the launch before this one is done
        gdc_wait()
        gdc_launch_dependents()
    dtype: tl.constexpr = numbers_ptr.dtype.element_ty
    x_n, x_c, x_s = x_n * ALIGN, x_c * C_UNIT, x_s * S_UNIT
    r_n, r_c, r_s = r_n * ALIGN, r_c * C_UNIT, r_s * S_UNIT
    y_n, y_c, y_s = y_n * ALIGN, y_c * C_UNIT, y_s * S_UNIT
    channels, space = channels * S_UNIT, space * C_UNIT
    # From the end: what the pass before this one read last is still in the cache.
    n, p, b = place(tl.num_programs(0) - 1 - tl.program_id(0), pieces, blocks, CHANNELS_LAST)
    c = b * CHANNELS + tl.arange(0, CHANNELS)
    valid_c = c < channels
    if FINISHES:
        pivot_c, residue_c, raw_var_c = _merged(
            x_ptr, parts_ptr, n, c, valid_c, samples, channels, space, x_n, x_c, part_pieces, part_piece, PIECES
        )
        scale_c, offset_c = write_numbers(
            numbers_ptr,
            pivot_c,
            residue_c,
            raw_var_c,
            mean_ptr,
            var_ptr,
            weight_ptr,
            bias_ptr,
            group_weight_ptr,
            group_bias_ptr,
            blend_ptr,
            n,
            c,
            valid_c,
            valid_c & (p == 0),
            samples,
            channels,
            EPS,
            ESTIMATES,
            AFFINE,
            HAS_BLEND,
            GROUPS,
            SIZE,
            CHANNELS,
            MAX,
        )
        # Behind the parts a program has a place of its own, to read back what others of its sample store in `numbers`.
        own_ptr = parts_ptr + 2 * samples * part_pieces * channels + tl.program_id(0) * (3 * CHANNELS)
        own_ptr += tl.arange(0, CHANNELS)
        tl.store(own_ptr, pivot_c)
        tl.store(own_ptr + CHANNELS, scale_c)
        tl.store(own_ptr + 2 * CHANNELS, offset_c)
        tl.debug_barrier()
        pivot_c = tl.load(own_ptr)
        scale_c = tl.load(own_ptr + CHANNELS)
        offset_c = tl.load(own_ptr + 2 * CHANNELS)
    else:
        block = samples * channels
        at = n * channels + c
        pivot_c = tl.load(numbers_ptr + at, valid_c, 0)
        scale_c = tl.load(numbers_ptr + 3 * block + at, valid_c, 0)
        offset_c = tl.load(numbers_ptr + 4 * block + at, valid_c, 0)
    x_ptr += n.to(tl.int64) * x_n
    residual_ptr += n.to(tl.int64) * r_n
    y_ptr += n.to(tl.int64) * y_n
    start = p * piece
    end = tl.minimum(start + piece, space)
    for first in tl.range(start, end, SPACE, num_stages=STAGES, loop_unroll_factor=UNROLL):
        s = first + tl.arange(0, SPACE)
        valid_cs = valid_c[:, None] & (s < space)[None, :]
        x_cs = tl.load(x_ptr + c[:, None] * x_c + s[None, :] * x_s, valid_cs, 0).to(dtype)
        u_cs = tl.fma(x_cs - pivot_c[:, None], scale_c[:, None], tl.broadcast_to(offset_c[:, None], [CHANNELS, SPACE]))
        if HAS_RESIDUAL:
            u_cs += tl.load(residual_ptr + c[:, None] * r_c + s[None, :] * r_s, valid_cs, 0).to(dtype)
        y_cs = activate(u_cs, ACTIVATION, SLOPE)
        tl.store(y_ptr + c[:, None] * y_c + s[None, :] * y_s, y_cs.to(y_ptr.dtype.element_ty), valid_cs)
