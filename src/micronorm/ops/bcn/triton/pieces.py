"""Device functions that the kernels share: addressing, activations and the N×C arithmetic.

The arithmetic is derived in ../README.md; `tiling.py` chooses the tiles.

Legend of names and shapes, for all files of this package:
- N, C, S, G: samples, channels, positions, groups. x, y, residual and gradients are N×C×S tensors of any strides, given
  as three numbers (n, c, s), so that one source serves contiguous and channels_last memory.
- A program computes one sample n and WIDTH = GROUPS·SIZE channels c, that is GROUPS whole groups of SIZE channels (or
  any channels, where no group is summed). CHANNELS is WIDTH rounded up to a power of two. Names ending in _c are
  vectors over these channels, names ending in _cs tiles of channels × positions; valid_c and valid_cs mask what exists.
- place = (n, c, valid_c, written_c): where a program is, and which channels it stores. sizes = (samples, channels).
- Strides of what is not adjacent in memory, and the size of what is, are given in units of ALIGN elements (C_UNIT and
  S_UNIT are those of c and s, one of them is 1). Triton then knows what they are multiples of. It detects multiples of
  16 by itself; without the units, rows of 24 channels or 4,200 positions would be read two bytes at a time.
- EARLY: the launch may begin while the one before it still runs; it waits inside (`runtime.starts_early`).
- Signatures group their parameters by meaning: pointers, sizes, strides, constants (`fmt: skip`).

Pointers, and what they point to (F is the dtype of the computation: float32, or float64 for float64 inputs):
- x_ptr, residual_ptr, y_ptr: N×C×S in the dtype of the layer's input; so are g_ptr (dL/dy), dx_ptr and dr_ptr
  (dL/dresidual).
- numbers_ptr: the packed results of a forward in F; `micronorm.ops.packed` describes them.
- parts_ptr: 2×N×pieces×C in F, the blocks of `packed.Part`. slopes_ptr: 3×N×C in F, the blocks of `packed.Slope`.
- shares_ptr: N×columns in F, one sample's part of the gradients of γ^b, β^b (C each, with estimates) and γ^c, β^c (G
  each, or C in group normalization). totals_ptr: the same summed over samples.
- norm = (mean_ptr, var_ptr, weight_ptr, bias_ptr, group_weight_ptr, group_bias_ptr, blend_ptr): the estimates (C, or
  N×C where every sample has its own), γ^b and β^b (C), γ^c and β^c (G, or C in group normalization), each in its own
  floating dtype, and the blend (one number). What a layer does not have points to `numbers` and is not read.

Two rules keep results equal to the bit. The compiler may compute a sum anew for each thread layout, in another order:
where that matters, kernels read back what they stored, after a barrier. And products that a `tl.sum` adds up are
written as tl.fma(a, b, 0): a bare product would be fused into the first addition of some lanes and rounded in others.
"""

# Called outside a kernel these raise, which is all that pyright sees of them.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from micronorm.ops.activation import ActivationKind
from micronorm.ops.bcn.triton.layout import Affine, Estimates
from micronorm.ops.packed import Number, Part

# Arguments for which Triton's code for 1 and for multiples of 16 is no faster. Without this list, every batch size
# would be compiled separately.
COUNTS = ("samples", "pieces", "blocks", "part_pieces", "groups")

# Kernels can use global constants only as constexpr.
IDENTITY, RELU, LEAKY_RELU, SILU = (tl.constexpr(kind.value) for kind in ActivationKind)
NO_ESTIMATES, SHARED, PER_SAMPLE, KEPT = (tl.constexpr(kind.value) for kind in Estimates)
NO_AFFINE, PER_GROUP, PER_CHANNEL = (tl.constexpr(kind.value) for kind in Affine)
PIVOT, RESIDUE, VAR, SCALE, OFFSET = (tl.constexpr(number.value) for number in Number)
BLOCKS = tl.constexpr(len(Number))
FIRST, SECOND = (tl.constexpr(part.value) for part in Part)
LARGEST_FLOAT32 = tl.constexpr(3.4028234663852886e38)
LARGEST_FLOAT64 = tl.constexpr(1.7976931348623157e308)


# --- where a program is ----------------------------------------------------------------------------------------------


@triton.jit
def begin(EARLY: tl.constexpr):
    """Wait for the launch before this one, and allow the next one to begin."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def whole_groups(program, channels, GROUPS: tl.constexpr, SIZE: tl.constexpr, CHANNELS: tl.constexpr):
    """Return sample, channels and mask of a program that takes GROUPS whole groups."""
    WIDTH: tl.constexpr = GROUPS * SIZE
    blocks = tl.cdiv(channels, WIDTH)
    n = program // blocks
    local = tl.arange(0, CHANNELS)
    c = (program % blocks) * WIDTH + local
    return n, c, (local < WIDTH) & (c < channels)


@triton.jit
def piece_of(program, pieces, blocks, CHANNELS_LAST: tl.constexpr):
    """Return sample, piece of space and block of channels; programs of adjacent numbers are adjacent in memory."""
    rest = program // (pieces * blocks)
    inner = program % (pieces * blocks)
    if CHANNELS_LAST:
        return rest, inner // blocks, inner % blocks
    else:
        return rest, inner % pieces, inner // pieces


@triton.jit
def tile_at(ptr, strides, c, s):
    """Return the addresses of a tile of channels × positions of one sample."""
    return ptr + c[:, None] * strides[1] + s[None, :] * strides[2]


@triton.jit
def number_at(numbers_ptr, NUMBER: tl.constexpr, n, c, sizes):
    """Return the addresses of one `packed.Number` of sample n and channels c."""
    return numbers_ptr + NUMBER * (sizes[0] * sizes[1]) + (n * sizes[1] + c)


@triton.jit
def part_at(parts_ptr, PART: tl.constexpr, row, c, sizes, pieces):
    """Return the addresses of one `packed.Part` of channels c; `row` is n·pieces + the number of the piece."""
    return parts_ptr + PART * (sizes[0] * pieces * sizes[1]) + (row * sizes[1] + c)


@triton.jit
def load_moments(numbers_ptr, n, c, valid_c, sizes):
    """Return pivot, residue and variance from `numbers`."""
    pivot_c = tl.load(number_at(numbers_ptr, PIVOT, n, c, sizes), valid_c, 0)
    residue_c = tl.load(number_at(numbers_ptr, RESIDUE, n, c, sizes), valid_c, 0)
    return pivot_c, residue_c, tl.load(number_at(numbers_ptr, VAR, n, c, sizes), valid_c, 0)


@triton.jit
def load_coefficients(numbers_ptr, n, c, valid_c, sizes):
    """Return pivot, scale and offset of y = scale·(x − pivot) + offset from `numbers`."""
    pivot_c = tl.load(number_at(numbers_ptr, PIVOT, n, c, sizes), valid_c, 0)
    scale_c = tl.load(number_at(numbers_ptr, SCALE, n, c, sizes), valid_c, 0)
    return pivot_c, scale_c, tl.load(number_at(numbers_ptr, OFFSET, n, c, sizes), valid_c, 0)


@triton.jit
def estimates_at(numbers_ptr, sizes):
    """Return the address of the estimates in `numbers`: C means, then C variances."""
    return numbers_ptr + BLOCKS * sizes[0] * sizes[1]


@triton.jit
def flags_at(numbers_ptr, sizes):
    """Return the address of the N×G counts of channels whose moments are not finite."""
    return estimates_at(numbers_ptr, sizes) + 2 * sizes[1]


@triton.jit
def blend_at(numbers_ptr, sizes, SIZE: tl.constexpr):
    """Return the address of the blend, the last entry of `numbers`."""
    return flags_at(numbers_ptr, sizes) + sizes[0] * (sizes[1] // SIZE)


@triton.jit
def both(first, second):
    """Return `first & second` as a boolean mask: some versions of Triton's interpreter return an integer."""
    return (first & second) != 0


# --- activations ------------------------------------------------------------------------------------------------------


@triton.jit
def activate(u, ACTIVATION: tl.constexpr, SLOPE: tl.constexpr):
    """Return act(u)."""
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
    """Return dL/du from g = dL/dact(u). For relu and leaky_relu `u` may be act(u), which has the same sign."""
    if ACTIVATION == RELU:
        return tl.where(u <= 0, 0.0, g)
    elif ACTIVATION == LEAKY_RELU:
        return tl.where(u > 0, g, g * SLOPE)
    elif ACTIVATION == SILU:
        s = tl.sigmoid(u)
        return g * s * (1 + u * (1 - s))
    else:
        return g


# --- the N×C arithmetic -----------------------------------------------------------------------------------------------


@triton.jit
def group_sum(values_c, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """Return the sum over each channel's group, at every channel; values outside the groups must be zero."""
    if SIZE == 1:
        return values_c
    elif GROUPS == 1:
        return tl.zeros_like(values_c) + tl.sum(values_c, 0)
    else:
        # SIZE and GROUPS are powers of two here, and CHANNELS is their product.
        sums = tl.sum(tl.reshape(values_c, [GROUPS, SIZE]), 1)
        return tl.reshape(tl.broadcast_to(sums[:, None], [GROUPS, SIZE]), [GROUPS * SIZE])


@triton.jit
def split_mean(pivot_c, mean_c):
    """Return pivot + mean as a number of the dtype, and what its rounding lost."""
    rounded_c = pivot_c + mean_c
    return rounded_c, (pivot_c - rounded_c) + mean_c


@triton.jit
def bounded(var_c):
    """Replace variances that overflowed by the largest number: 1/sqrt(inf)·inf would be NaN. NaN stays NaN."""
    LARGEST: tl.constexpr = LARGEST_FLOAT64 if var_c.dtype == tl.float64 else LARGEST_FLOAT32
    return tl.where(var_c > LARGEST, LARGEST, var_c)


@triton.jit
def terms(
    moments, norm, row, c, valid_c,
    EPS: tl.constexpr, ESTIMATES: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Return distance, rstd, a, z, z − M and 1/S of ../README.md; `row` is where this sample's estimates begin."""
    pivot_c, residue_c, var_c = moments
    dtype = pivot_c.dtype
    if ESTIMATES != NO_ESTIMATES:
        stat_mean_c = tl.load(norm[0] + row + c, valid_c, 0)
        stat_var_c = tl.load(norm[1] + row + c, valid_c, 0).to(dtype)
        # In the dtype of the estimates where that is wider.
        distance_c = ((pivot_c - stat_mean_c) + residue_c).to(dtype)
        rstd_c = tl.rsqrt(stat_var_c + EPS)
        a_c = tl.load(norm[2] + c, valid_c, 0).to(dtype) * rstd_c
        z_c = tl.fma(a_c, distance_c, tl.load(norm[3] + c, valid_c, 0).to(dtype))
    else:
        # Group normalization: the channels stay as they are, except for a shift that all channels of a group share.
        stat_mean_c = group_sum(tl.where(valid_c, pivot_c, 0.0), GROUPS, SIZE) / SIZE
        stat_var_c = tl.zeros_like(pivot_c) + 1
        distance_c = (pivot_c - stat_mean_c) + residue_c
        rstd_c = stat_var_c
        a_c = stat_var_c
        z_c = distance_c
    z_c = tl.where(valid_c, z_c, 0.0)
    a_c = tl.where(valid_c, a_c, 0.0)
    apart_c = tl.where(valid_c, z_c - group_sum(z_c, GROUPS, SIZE) / SIZE, 0.0)
    # Two non-negative terms: the variance within the channels, and that between their means.
    spread_c = tl.fma(a_c * a_c, var_c, apart_c * apart_c)
    inv_c = tl.rsqrt(group_sum(spread_c, GROUPS, SIZE) / SIZE + EPS)
    return stat_mean_c, stat_var_c, distance_c, rstd_c, a_c, z_c, apart_c, inv_c


@triton.jit
def load_blend(blend_ptr, dtype: tl.constexpr, HAS_BLEND: tl.constexpr):
    """Return the blend α, or 1 if the layer has none."""
    if HAS_BLEND:
        return tl.load(blend_ptr).to(dtype)
    else:
        return tl.full([], 1, dtype)


@triton.jit
def load_affine(ptr, c, valid_c, default, like_c, AFFINE: tl.constexpr, SIZE: tl.constexpr):
    """Return γ^c or β^c at every channel."""
    if AFFINE == PER_GROUP:
        return tl.load(ptr + c // SIZE, valid_c, 0).to(like_c.dtype)
    elif AFFINE == PER_CHANNEL:
        return tl.load(ptr + c, valid_c, 0).to(like_c.dtype)
    else:
        return tl.zeros_like(like_c) + default


@triton.jit
def write_numbers(
    numbers_ptr,
    moments, norm, place, sizes,
    EPS: tl.constexpr, ESTIMATES: tl.constexpr, AFFINE: tl.constexpr, HAS_BLEND: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Store all of `numbers` where `written_c`, and return scale and offset of y = scale·(x − pivot) + offset."""
    n, c, valid_c, written_c = place
    pivot_c, residue_c, raw_var_c = moments
    dtype = pivot_c.dtype
    var_c = bounded(raw_var_c)
    row = n * sizes[1] if ESTIMATES == PER_SAMPLE else 0
    stat_mean_c, stat_var_c, _, _, a_c, z_c, apart_c, inv_c = terms(
        (pivot_c, residue_c, var_c), norm, row, c, valid_c, EPS, ESTIMATES, GROUPS, SIZE
    )
    alpha = load_blend(norm[6], dtype, HAS_BLEND)
    gamma_c = load_affine(norm[4], c, valid_c, 1.0, pivot_c, AFFINE, SIZE)
    beta_c = load_affine(norm[5], c, valid_c, 0.0, pivot_c, AFFINE, SIZE)
    scale_c = gamma_c * ((1 - alpha) + alpha * inv_c) * a_c
    at_mean_c = (1 - alpha) * z_c + alpha * (apart_c * inv_c)
    offset_c = tl.fma(at_mean_c, gamma_c, beta_c) - scale_c * residue_c
    tl.store(number_at(numbers_ptr, PIVOT, n, c, sizes), pivot_c, written_c)
    tl.store(number_at(numbers_ptr, RESIDUE, n, c, sizes), residue_c, written_c)
    tl.store(number_at(numbers_ptr, VAR, n, c, sizes), var_c, written_c)
    tl.store(number_at(numbers_ptr, SCALE, n, c, sizes), scale_c, written_c)
    tl.store(number_at(numbers_ptr, OFFSET, n, c, sizes), offset_c, written_c)
    # A copy: a commit may rewrite the layer's buffers before the backward reads them. It is written even if it is never
    # read, because an operator must not return uninitialized memory.
    first_c = both(written_c, n == 0)
    kept_ptr = estimates_at(numbers_ptr, sizes) + c
    tl.store(kept_ptr, stat_mean_c, first_c)
    tl.store(kept_ptr + sizes[1], stat_var_c, first_c)
    finite_c = (pivot_c * 0 + residue_c * 0 + raw_var_c * 0) == 0
    broken_c = group_sum(tl.where(finite_c | (valid_c == 0), 0.0, 1.0), GROUPS, SIZE)
    flag_ptr = flags_at(numbers_ptr, sizes) + n * (sizes[1] // SIZE) + c // SIZE
    tl.store(flag_ptr, broken_c.to(dtype), both(written_c, c % SIZE == 0))
    blend_ptr = blend_at(numbers_ptr, sizes, SIZE) + c * 0
    tl.store(blend_ptr, tl.zeros_like(pivot_c) + alpha, both(first_c, c == 0))
    return scale_c, offset_c


@triton.jit
def gradients(
    sum_g_c, sum_gt_c,
    numbers_ptr, shares_ptr,
    norm, place, sizes, space,
    EPS: tl.constexpr, ESTIMATES: tl.constexpr, AFFINE: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Return slope, curve and shift of dx; store the sample's `shares` where `written_c`."""
    n, c, valid_c, written_c = place
    channels = sizes[1]
    pivot_c, residue_c, var_c = load_moments(numbers_ptr, n, c, valid_c, sizes)
    dtype = pivot_c.dtype
    kept_ptr = estimates_at(numbers_ptr, sizes)
    # KEPT: the layer's own estimates may have moved since the forward.
    mean_ptr = kept_ptr if ESTIMATES == KEPT else norm[0]
    var_ptr = kept_ptr + channels if ESTIMATES == KEPT else norm[1]
    row = n * channels if ESTIMATES == PER_SAMPLE else 0
    used = (mean_ptr, var_ptr, norm[2], norm[3])
    _, _, distance_c, rstd_c, a_c, z_c, apart_c, inv_c = terms(
        (pivot_c, residue_c, var_c), used, row, c, valid_c, EPS, ESTIMATES, GROUPS, SIZE
    )
    alpha = load_blend(blend_at(numbers_ptr, sizes, SIZE), dtype, ESTIMATES != NO_ESTIMATES)
    gamma_c = load_affine(norm[4], c, valid_c, 1.0, pivot_c, AFFINE, SIZE)
    d_scale_c = sum_gt_c - residue_c * sum_g_c  # Σ g·(x − m)
    mix_c = (1 - alpha) + alpha * inv_c
    gain_c = gamma_c * mix_c

    # Through 1/S to the group variance: pull = 2/k · dL/dvar.
    from_inv_c = tl.where(valid_c, gamma_c * (d_scale_c * a_c + sum_g_c * apart_c), 0.0)
    pull_c = -alpha * inv_c * inv_c * inv_c * group_sum(from_inv_c, GROUPS, SIZE) / SIZE
    # The gradient of the mean of (n, c) through z − M and the variance.
    offsets_c = group_sum(tl.where(valid_c, gamma_c * sum_g_c, 0.0), GROUPS, SIZE) / SIZE
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
            first_c = both(written_c, c % SIZE == 0)
            d_gamma_c = group_sum(tl.where(valid_c, d_gamma_c, 0.0), GROUPS, SIZE)
            d_beta_c = group_sum(tl.where(valid_c, sum_g_c, 0.0), GROUPS, SIZE)
            tl.store(row_ptr + c // SIZE, d_gamma_c, first_c)
            tl.store(row_ptr + affines + c // SIZE, d_beta_c, first_c)

    bend_c = pull_c * a_c * a_c
    # The shift is not computed from the curve. The loop converts the curve's layout, and Triton 3.6 would use the
    # converted curve, which exists only inside the loop, for a copy of the shift before it: that does not compile.
    shift_c = (through_c * a_c - bend_c * residue_c) / space
    return gain_c * a_c, bend_c / space, shift_c
