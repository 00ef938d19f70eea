"""What the kernels share. What they compute is derived in ../README.md; which tiles they get is chosen in tiling.py.

Shapes: x, y, gradients and residuals are N×C×S, addressed by three strides each, so that one source serves contiguous
and channels_last tensors. A program takes one sample and WIDTH channels, that is GROUPS whole groups of SIZE channels
(or any channels, where no group is summed); CHANNELS is WIDTH rounded up to a power of two. _c marks vectors over
those channels, _cs tiles over channels × space.

Strides of what does not lie side by side, and the size of what does, are given in units of ALIGN (C_UNIT and S_UNIT are
those of c and s, one of them 1), so that triton knows what they are multiples of. It sees for itself what is divisible
by 16; rows of 24 channels or 4,200 positions would be read two bytes at a time.

What a kernel stores of a sum need not be what it goes on with, to the bit: the compiler may compute it anew for each
layout of its threads, in another order. Where that matters, kernels read back what they stored, after a barrier. And
products that a `tl.sum` adds up are written as tl.fma(a, b, 0): a bare product would be fused into the first addition
of each lane, whose partner adds it rounded, and the lanes of one sum would hold different numbers.

EARLY: the launch was begun while the one before it still ran (launch.py).

`numbers` holds what is small: five blocks of N×C (pivot, residue, var, scale, offset), then the estimates that were
used (two blocks of C; where every sample has its own, those of the first), then N×G counts of channels whose moments
were not finite. Its dtype is the one everything is computed in: float32, or float64 for float64 inputs.
"""

# Called outside a kernel these raise, which is all that pyright sees of them.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

# Numbers whose being 1 or a multiple of 16 makes no faster code: without this every batch size would compile anew.
COUNTS = ("samples", "pieces", "blocks", "part_pieces", "groups")

# Pieces of triton.language are resolved by name inside kernels: constants must be constexpr.
IDENTITY = tl.constexpr(0)
RELU = tl.constexpr(1)
LEAKY_RELU = tl.constexpr(2)
SILU = tl.constexpr(3)

NO_ESTIMATES = tl.constexpr(0)
SHARED = tl.constexpr(1)
PER_SAMPLE = tl.constexpr(2)
KEPT = tl.constexpr(3)  # shared ones, as the forward left them in `numbers`

NO_AFFINE = tl.constexpr(0)
PER_GROUP = tl.constexpr(1)
PER_CHANNEL = tl.constexpr(2)


@triton.jit
def place(program, pieces, blocks, CHANNELS_LAST: tl.constexpr):
    """Sample, piece of space and block of channels of a program: neighbours in number are neighbours in memory."""
    rest = program // (pieces * blocks)
    inner = program % (pieces * blocks)
    if CHANNELS_LAST:
        return rest, inner // blocks, inner % blocks
    else:
        return rest, inner % pieces, inner // pieces


@triton.jit
def group_sum(values_c, GROUPS: tl.constexpr, SIZE: tl.constexpr, CHANNELS: tl.constexpr):
    """The sum over each channel's group, at every channel; values outside the groups must be zero."""
    if SIZE == 1:
        return values_c
    elif GROUPS == 1:
        return tl.zeros([CHANNELS], values_c.dtype) + tl.sum(values_c, 0)
    else:
        # SIZE and GROUPS are powers of two here, and CHANNELS their product.
        sums = tl.sum(tl.reshape(values_c, [GROUPS, SIZE]), 1)
        return tl.reshape(tl.broadcast_to(sums[:, None], [GROUPS, SIZE]), [CHANNELS])


@triton.jit
def activate(u, ACTIVATION: tl.constexpr, SLOPE: tl.constexpr):
    """act(u)."""
    if ACTIVATION == RELU:
        return tl.where(u <= 0, 0.0, u)  # NaN stays NaN
    elif ACTIVATION == LEAKY_RELU:
        return tl.where(u > 0, u, u * SLOPE)
    elif ACTIVATION == SILU:
        return u * tl.sigmoid(u)
    else:
        return u


@triton.jit
def gate(g, u, ACTIVATION: tl.constexpr, SLOPE: tl.constexpr):
    """dL/du from dL/dact(u). For the rectifiers `u` may be act(u): they keep its sign."""
    if ACTIVATION == RELU:
        return tl.where(u <= 0, 0.0, g)
    elif ACTIVATION == LEAKY_RELU:
        return tl.where(u > 0, g, g * SLOPE)
    elif ACTIVATION == SILU:
        s = tl.sigmoid(u)
        return g * s * (1 + u * (1 - s))
    else:
        return g


@triton.jit
def split_mean(pivot_c, mean_c):
    """pivot + mean as a number of the dtype and what its rounding lost."""
    rounded_c = pivot_c + mean_c
    return rounded_c, (pivot_c - rounded_c) + mean_c


@triton.jit
def bounded(var_c, MAX: tl.constexpr):
    """Variances that overflowed at the largest number: 1/sqrt(inf)·inf would be NaN. NaN stays."""
    return tl.where(var_c > MAX, MAX, var_c)


@triton.jit
def terms(
    pivot_c,
    residue_c,
    var_c,
    mean_ptr,
    var_ptr,
    weight_ptr,
    bias_ptr,
    row,
    c,
    valid_c,
    EPS: tl.constexpr,
    ESTIMATES: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """distance, rstd, a, z, z − M and 1/S of ../README.md; `row` is where this sample's estimates begin."""
    dtype = pivot_c.dtype
    if ESTIMATES != NO_ESTIMATES:
        stat_mean_c = tl.load(mean_ptr + row + c, valid_c, 0)
        stat_var_c = tl.load(var_ptr + row + c, valid_c, 0).to(dtype)
        # In the dtype of the estimates where that is wider.
        distance_c = ((pivot_c - stat_mean_c) + residue_c).to(dtype)
        rstd_c = tl.rsqrt(stat_var_c + EPS)
        a_c = tl.load(weight_ptr + c, valid_c, 0).to(dtype) * rstd_c
        z_c = tl.fma(a_c, distance_c, tl.load(bias_ptr + c, valid_c, 0).to(dtype))
    else:
        # Group normalization: the channels stay as they are, but for a shift that all of a group share.
        stat_mean_c = group_sum(tl.where(valid_c, pivot_c, 0.0), GROUPS, SIZE, CHANNELS) / SIZE
        stat_var_c = tl.zeros([CHANNELS], dtype) + 1
        distance_c = (pivot_c - stat_mean_c) + residue_c
        rstd_c = stat_var_c
        a_c = stat_var_c
        z_c = distance_c
    z_c = tl.where(valid_c, z_c, 0.0)
    a_c = tl.where(valid_c, a_c, 0.0)
    apart_c = tl.where(valid_c, z_c - group_sum(z_c, GROUPS, SIZE, CHANNELS) / SIZE, 0.0)
    # Two non-negative terms: the variance within the channels, and that between their means.
    spread_c = tl.fma(a_c * a_c, var_c, apart_c * apart_c)
    inv_c = tl.rsqrt(group_sum(spread_c, GROUPS, SIZE, CHANNELS) / SIZE + EPS)
    return stat_mean_c, stat_var_c, distance_c, rstd_c, a_c, z_c, apart_c, inv_c


@triton.jit
def mixing(blend_ptr, dtype: tl.constexpr, HAS_BLEND: tl.constexpr):
    """The blend α; one where there is none."""
    if HAS_BLEND:
        return tl.load(blend_ptr).to(dtype)
    else:
        return tl.full([], 1, dtype)


@triton.jit
def kept_blend(numbers_ptr, samples, channels, SIZE: tl.constexpr):
    """Where the forward leaves the blend it used, at the end of `numbers`."""
    return numbers_ptr + 5 * samples * channels + 2 * channels + samples * (channels // SIZE)


@triton.jit
def post(
    ptr, c, valid_c, default, dtype: tl.constexpr, AFFINE: tl.constexpr, SIZE: tl.constexpr, CHANNELS: tl.constexpr
):
    """The affine after the group normalization, at every channel."""
    if AFFINE == PER_GROUP:
        return tl.load(ptr + c // SIZE, valid_c, 0).to(dtype)
    elif AFFINE == PER_CHANNEL:
        return tl.load(ptr + c, valid_c, 0).to(dtype)
    else:
        return tl.zeros([CHANNELS], dtype) + default


@triton.jit
def write_numbers(
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
    written_c,
    samples,
    channels,
    EPS: tl.constexpr,
    ESTIMATES: tl.constexpr,
    AFFINE: tl.constexpr,
    HAS_BLEND: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    MAX: tl.constexpr,
):
    """Coefficients of y = scale·(x − pivot) + offset, stored with all that the backward needs where `written_c`."""
    dtype = pivot_c.dtype
    var_c = bounded(raw_var_c, MAX)
    stat_mean_c, stat_var_c, _, _, a_c, z_c, apart_c, inv_c = terms(
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
    alpha = mixing(blend_ptr, dtype, HAS_BLEND)
    gamma_c = post(group_weight_ptr, c, valid_c, 1.0, dtype, AFFINE, SIZE, CHANNELS)
    beta_c = post(group_bias_ptr, c, valid_c, 0.0, dtype, AFFINE, SIZE, CHANNELS)
    scale_c = gamma_c * ((1 - alpha) + alpha * inv_c) * a_c
    at_mean_c = (1 - alpha) * z_c + alpha * (apart_c * inv_c)
    offset_c = tl.fma(at_mean_c, gamma_c, beta_c) - scale_c * residue_c
    block = samples * channels
    at = n * channels + c
    tl.store(numbers_ptr + at, pivot_c, written_c)
    tl.store(numbers_ptr + block + at, residue_c, written_c)
    tl.store(numbers_ptr + 2 * block + at, var_c, written_c)
    tl.store(numbers_ptr + 3 * block + at, scale_c, written_c)
    tl.store(numbers_ptr + 4 * block + at, offset_c, written_c)
    # A copy: a commit may rewrite the layer's buffers before the backward reads them. Written even where nobody reads
    # it: no number that an operator returns may be left to chance.
    first_c = written_c & (n == 0)
    tl.store(numbers_ptr + 5 * block + c, stat_mean_c, first_c)
    tl.store(numbers_ptr + 5 * block + channels + c, stat_var_c, first_c)
    finite_c = (pivot_c * 0 + residue_c * 0 + raw_var_c * 0) == 0
    broken_c = group_sum(tl.where(finite_c | (valid_c == 0), 0.0, 1.0), GROUPS, SIZE, CHANNELS)
    flag_ptr = numbers_ptr + 5 * block + 2 * channels + n * (channels // SIZE) + c // SIZE
    tl.store(flag_ptr, broken_c.to(dtype), written_c & (c % SIZE == 0))
    tl.store(
        kept_blend(numbers_ptr, samples, channels, SIZE) + c * 0,
        tl.zeros([CHANNELS], dtype) + alpha,
        first_c & (c == 0),
    )
    return scale_c, offset_c


@triton.jit
def gradients(
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
