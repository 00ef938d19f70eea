"""The window's share of a forward, from the numbers that the forward left; see `micronorm.nn.window`."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from micronorm.ops.bcn.triton.pieces import COUNTS


@triton.jit(do_not_specialize=COUNTS)
def gather_window(
    numbers_ptr,
    around_ptr,
    sums_ptr,
    lost_ptr,
    samples,
    channels,
    space,
    groups,
    SAMPLES: tl.constexpr,
    CHANNELS: tl.constexpr,
    FLAGS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Add n, Σ(x − μ̂) and Σ(x − μ̂)² to the window, or count the forward as lost where a moment is not finite."""
    if EARLY:  # not before the launch before this one is done
        gdc_wait()
        gdc_launch_dependents()
    wide: tl.constexpr = sums_ptr.dtype.element_ty
    block = samples * channels
    flags = samples * groups
    flag_ptr = numbers_ptr + 5 * block + 2 * channels
    broken = tl.zeros([FLAGS], numbers_ptr.dtype.element_ty)
    for first in range(0, flags, FLAGS):
        at = first + tl.arange(0, FLAGS)
        broken += tl.load(flag_ptr + at, at < flags, 0)
    whole = tl.sum(broken, 0) == 0

    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    valid_c = c < channels
    around_c = tl.load(around_ptr + c, valid_c, 0).to(wide)
    first_ptr = sums_ptr + 1 + c
    second_ptr = sums_ptr + 1 + channels + c
    before_first_c = tl.load(first_ptr, valid_c, 0)
    before_second_c = tl.load(second_ptr, valid_c, 0)
    first_nc = tl.zeros([SAMPLES, CHANNELS], wide)
    second_nc = tl.zeros([SAMPLES, CHANNELS], wide)
    for start in range(0, samples, SAMPLES):
        n = start + tl.arange(0, SAMPLES)
        valid_nc = (n < samples)[:, None] & valid_c[None, :]
        at_nc = n[:, None] * channels + c[None, :]
        pivot_nc = tl.load(numbers_ptr + at_nc, valid_nc, 0).to(wide)
        residue_nc = tl.load(numbers_ptr + block + at_nc, valid_nc, 0).to(wide)
        var_nc = tl.load(numbers_ptr + 2 * block + at_nc, valid_nc, 0).to(wide)
        distance_nc = tl.where(valid_nc, (pivot_nc - around_c[None, :]) + residue_nc, 0.0)
        first_nc += distance_nc
        second_nc += var_nc + distance_nc * distance_nc
    first_c = tl.where(whole, tl.sum(first_nc, 0) * space, 0.0)
    second_c = tl.where(whole, tl.sum(second_nc, 0) * space, 0.0)
    tl.store(first_ptr, before_first_c + first_c, valid_c)
    tl.store(second_ptr, before_second_c + second_c, valid_c)
    if tl.program_id(0) == 0:
        one = tl.arange(0, 1)
        count = (tl.zeros([1], wide) + samples) * space
        tl.store(sums_ptr + one, tl.load(sums_ptr + one) + tl.where(whole, count, 0.0))
        tl.store(lost_ptr + one, tl.load(lost_ptr + one) + tl.where(whole, 0, 1))
