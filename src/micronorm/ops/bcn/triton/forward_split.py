"""The forward in three launches: moments of pieces, numbers, elementwise pass. The legend of names is in pieces.py."""

# Called outside a kernel these raise, which is all that pyright sees of them.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from micronorm.ops.bcn.triton.loops import moments, write_output
from micronorm.ops.bcn.triton.pieces import COUNTS, place, split_mean, write_numbers


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
    EARLY: tl.constexpr,
):
    """Mean, around the sample's first element, and sum of squared deviations of one piece of space."""
    if EARLY:  # not before the launch before this one is done
        gdc_wait()
        gdc_launch_dependents()
    dtype: tl.constexpr = parts_ptr.dtype.element_ty
    x_n, x_c, x_s = x_n * ALIGN, x_c * C_UNIT, x_s * S_UNIT
    channels, space = channels * S_UNIT, space * C_UNIT
    # From the end, which the layer before has written last; the elementwise pass then begins where this one ends.
    n, p, b = place(tl.num_programs(0) - 1 - tl.program_id(0), pieces, blocks, CHANNELS_LAST)
    c = b * CHANNELS + tl.arange(0, CHANNELS)
    valid_c = c < channels
    start = p * piece
    end = start + tl.minimum(piece, space - start)
    x_ptr += n.to(tl.int64) * x_n
    _, mean_c, square_c = moments(x_ptr, c, valid_c, start, end, x_c, x_s, dtype, CHANNELS, SPACE, STAGES)
    at = (n * pieces + p) * channels + c
    tl.store(parts_ptr + at, mean_c, valid_c)
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
    n, p, b = place(tl.program_id(0), pieces, blocks, CHANNELS_LAST)
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
    start = p * piece
    write_output(
        x_ptr + n.to(tl.int64) * x_n,
        residual_ptr + n.to(tl.int64) * r_n,
        y_ptr + n.to(tl.int64) * y_n,
        pivot_c,
        scale_c,
        offset_c,
        c,
        valid_c,
        start,
        start + tl.minimum(piece, space - start),
        x_c,
        x_s,
        r_c,
        r_s,
        y_c,
        y_s,
        dtype,
        ACTIVATION,
        SLOPE,
        HAS_RESIDUAL,
        CHANNELS,
        SPACE,
        STAGES,
    )
