"""The kernels that sum over samples: the window's share of a forward, and the parameters' gradients.

The legend of names, shapes and pointers is in pieces.py.
"""

# Called outside a kernel these raise, which is all that pyright sees of them.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from micronorm.ops.bcn.triton.pieces import COUNTS, begin, both, flags_at, load_moments


@triton.jit(do_not_specialize=COUNTS)
def gather_window(
    numbers_ptr,  # packed.numbers_size entries in F
    around_ptr,  # C, the layer's running mean, any floating dtype
    sums_ptr,  # 1 + 2·C in float64 (or the window's dtype): n, Σ(x − μ̂), Σ(x − μ̂)²
    lost_ptr,  # 1 or more integers; the first counts samples that were left out
    samples, channels, space, groups,
    SAMPLES: tl.constexpr, CHANNELS: tl.constexpr, FLAGS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add a forward to its layer's window, and count the samples left out because a moment is not finite."""
    begin(EARLY)
    wide: tl.constexpr = sums_ptr.dtype.element_ty
    sizes = (samples, channels)
    flag_ptr = flags_at(numbers_ptr, sizes)
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    valid_c = c < channels
    around_c = tl.load(around_ptr + c, valid_c, 0).to(wide)
    first_ptr = sums_ptr + 1 + c
    second_ptr = sums_ptr + 1 + channels + c
    before_first_c = tl.load(first_ptr, valid_c, 0)
    before_second_c = tl.load(second_ptr, valid_c, 0)
    first_nc = tl.zeros([SAMPLES, CHANNELS], wide)
    second_nc = tl.zeros([SAMPLES, CHANNELS], wide)
    left_out_n = tl.zeros([SAMPLES], tl.int32)
    for start in range(0, samples, SAMPLES):
        n = start + tl.arange(0, SAMPLES)
        broken_nf = tl.zeros([SAMPLES, FLAGS], numbers_ptr.dtype.element_ty)
        for first in range(0, groups, FLAGS):
            g = first + tl.arange(0, FLAGS)
            valid_ng = both((n < samples)[:, None], (g < groups)[None, :])
            broken_nf += tl.load(flag_ptr + n[:, None] * groups + g[None, :], valid_ng, 0)
        whole_n = tl.sum(broken_nf, 1) == 0
        left_out_n += tl.where(whole_n, 0, 1)
        valid_nc = both((n < samples)[:, None], valid_c[None, :])
        pivot_nc, residue_nc, var_nc = load_moments(numbers_ptr, n[:, None], c[None, :], valid_nc, sizes)
        distance_nc = (pivot_nc.to(wide) - around_c[None, :]) + residue_nc.to(wide)
        counted_nc = both(valid_nc, whole_n[:, None])
        distance_nc = tl.where(counted_nc, distance_nc, 0.0)
        first_nc += distance_nc
        second_nc += tl.where(counted_nc, var_nc.to(wide), 0.0) + distance_nc * distance_nc
    tl.store(first_ptr, before_first_c + tl.sum(first_nc, 0) * space, valid_c)
    tl.store(second_ptr, before_second_c + tl.sum(second_nc, 0) * space, valid_c)
    if tl.program_id(0) == 0:
        one = tl.arange(0, 1)
        left_out = tl.sum(left_out_n, 0)
        count = (tl.zeros([1], wide) + (samples - left_out)) * space
        tl.store(sums_ptr + one, tl.load(sums_ptr + one) + count)
        tl.store(lost_ptr + one, tl.load(lost_ptr + one) + left_out)


@triton.jit(do_not_specialize=COUNTS)
def sum_samples(
    shares_ptr,  # N×columns in F
    totals_ptr,  # columns in F
    samples, columns,
    SAMPLES: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sum every column over the samples, in one order whatever the grid."""
    begin(EARLY)
    dtype: tl.constexpr = shares_ptr.dtype.element_ty
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([SAMPLES, COLUMNS], dtype)
    for first in range(0, samples, SAMPLES):
        n = first + tl.arange(0, SAMPLES)
        valid = (n < samples)[:, None] & (column < columns)[None, :]
        total += tl.load(shares_ptr + n[:, None] * columns + column[None, :], valid, 0)
    tl.store(totals_ptr + column, tl.sum(total, 0), column < columns)
