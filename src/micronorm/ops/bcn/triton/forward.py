"""The forward in one launch, which reads x once where its groups fit on chip. The legend of names is in pieces.py.

Programs go from the last sample to the first: the end of x is what the layer before has left in the cache.
"""

# Called outside a kernel these raise, which is all that pyright sees of them.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from micronorm.ops.bcn.triton.loops import moments, write_output
from micronorm.ops.bcn.triton.pieces import COUNTS, activate, split_mean, write_numbers


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
    program = tl.num_programs(0) - 1 - tl.program_id(0)
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
def forward_twice(
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
    STAGES: tl.constexpr,
    ALIGN: tl.constexpr,
    C_UNIT: tl.constexpr,
    S_UNIT: tl.constexpr,
    MAX: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The whole forward where a sample's groups do not fit on chip: x is read twice, the second time from the cache."""
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
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    n = program // blocks
    local = tl.arange(0, CHANNELS)
    c = (program % blocks) * WIDTH + local
    valid_c = (local < WIDTH) & (c < channels)
    x_ptr += n.to(tl.int64) * x_n
    first_c, mean_c, square_c = moments(x_ptr, c, valid_c, 0, space, x_c, x_s, dtype, CHANNELS, SPACE, STAGES)
    pivot_c, residue_c = split_mean(first_c, mean_c)
    raw_var_c = square_c / space
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
    write_output(
        x_ptr,
        residual_ptr + n.to(tl.int64) * r_n,
        y_ptr + n.to(tl.int64) * y_n,
        pivot_c,
        scale_c,
        offset_c,
        c,
        valid_c,
        0,
        space,
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
