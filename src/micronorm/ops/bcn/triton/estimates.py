"""The kernels of the statistics that a forward derives from its own input, for "batch" and "sequential".

They run between the two passes of a forward, on the moments of the pieces that `moments_part` left in `parts`.
`batch_estimates` pools all samples, and `scan_estimates` runs Algorithm 1. Both compute what the layer's estimates
become. Some decisions depend on all channels: whether a micro-batch counts, and whether the estimates move. A program
that has all channels (ALONE) makes them itself. Otherwise `pool_batches` and `write_estimates` make them, in launches
before and after. If the estimates do not move, Algorithm 1 does not run, and `pool_batches` is the only launch.

The legend of names, shapes and pointers is in pieces.py. Names ending in _nc and _tc are tiles of samples × channels
and of micro-batches × channels; T = ⌈N/m⌉. W is the dtype of `found_mean`, float64. Pointers of several kernels:
- found_mean_ptr, found_var_ptr: the statistics to normalize with, in W: C numbers each, or N×C.
- new_ptr: C means, C variances and the number of samples left out, in W; not used with ALONE.
- mean_ptr, var_ptr: C, the layer's estimates, which are moved; any floating dtype.
- lost_ptr: 1 or more integers; the first counts samples that were left out.
- rate_ptr: the rate, a number in any floating dtype (HAS_RATE). Otherwise the rate is rate_high + rate_low, because
  Triton passes Python numbers as float32.
"""

# Called outside a kernel these raise, which is all that pyright sees of them.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from micronorm.ops.bcn.triton.pieces import (
    COUNTS,
    FIRST,
    LARGEST_FLOAT32,
    LARGEST_FLOAT64,
    SECOND,
    begin,
    both,
    part_at,
)


@triton.jit
def _moments(
    x_ptr, parts_ptr, n, c, valid, x, sizes, cut,
    wide: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """Return the mean and the variance of samples × channels from the moments of the pieces; n and c broadcast.

    The means of the pieces are summed around that of the first piece. In W this costs no digits of float32 moments.
    """
    space, pieces, piece = cut
    first = tl.load(x_ptr + n.to(tl.int64) * x[0] + c * x[1], valid, 0).to(wide)
    start = tl.load(part_at(parts_ptr, FIRST, n * pieces, c, sizes, pieces), valid, 0).to(wide)
    total = tl.zeros(valid.shape, wide)
    square = tl.zeros(valid.shape, wide)
    for base in range(0, pieces, UNROLLED):
        for k in tl.static_range(UNROLLED):
            p = base + k
            exists = both(valid, p < pieces)
            count = tl.maximum(tl.minimum(space - p * piece, piece), 0).to(wide)
            part = tl.load(part_at(parts_ptr, FIRST, n * pieces + p, c, sizes, pieces), exists, 0).to(wide)
            apart = tl.where(exists, part - start, 0.0)
            total += apart * count
            square += apart * apart * count
            square += tl.load(part_at(parts_ptr, SECOND, n * pieces + p, c, sizes, pieces), exists, 0).to(wide)
    share = 1 / (tl.full([], 0, wide) + space)  # a division per element would take longer than the rest
    rest = total * share
    var = tl.maximum(square * share - rest * rest, 0.0, tl.PropagateNan.ALL)
    # As `pieces.bounded`, for the dtype that the forward computes in.
    LARGEST: tl.constexpr = LARGEST_FLOAT64 if parts_ptr.dtype.element_ty == tl.float64 else LARGEST_FLOAT32
    return first + (start + rest), tl.where(var > LARGEST, LARGEST, var)


@triton.jit
def _rate(rate_ptr, rate_high, rate_low, wide: tl.constexpr, HAS_RATE: tl.constexpr):
    """Return the rate, limited to [0, 1]."""
    rate = tl.load(rate_ptr).to(wide) if HAS_RATE else tl.full([], 0, wide) + rate_high + rate_low
    return tl.minimum(tl.maximum(rate, 0.0), 1.0)


@triton.jit
def _write(mean_c, var_c, left_out, c, valid_c, mean_ptr, var_ptr, lost_ptr, samples):
    """Write the new estimates of all channels if they are finite in the layer's dtype, and count what was left out."""
    one = tl.arange(0, 1)
    lost = tl.load(lost_ptr + one)
    mean_c = mean_c.to(mean_ptr.dtype.element_ty)
    var_c = var_c.to(var_ptr.dtype.element_ty)
    broken_c = tl.where((mean_c * 0 == 0) & (var_c * 0 == 0), 0, 1)
    finite = tl.sum(tl.where(valid_c, broken_c, 0), 0) == 0
    tl.store(mean_ptr + c, mean_c, both(valid_c, finite))
    tl.store(var_ptr + c, var_c, both(valid_c, finite))
    tl.store(lost_ptr + one, lost + (left_out + tl.where(finite, 0, samples)))


@triton.jit(do_not_specialize=COUNTS)
def write_estimates(
    new_ptr, mean_ptr, var_ptr, lost_ptr,
    samples, channels,
    CHANNELS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Write the layer's estimates, in one program."""
    begin(EARLY)
    c = tl.arange(0, CHANNELS)
    valid_c = c < channels
    mean_c = tl.load(new_ptr + c, valid_c, 0)
    var_c = tl.load(new_ptr + channels + c, valid_c, 0)
    left_out = tl.load(new_ptr + 2 * channels).to(tl.int32)
    _write(mean_c, var_c, left_out, c, valid_c, mean_ptr, var_ptr, lost_ptr, samples)


@triton.jit
def _leave(mean_c, var_c, left_out, c, valid_c, new_ptr, channels):
    """Store the new estimates of some channels for `write_estimates`."""
    tl.store(new_ptr + c, mean_c, valid_c)
    tl.store(new_ptr + channels + c, var_c, valid_c)
    if tl.program_id(0) == 0:
        tl.store(new_ptr + 2 * channels, tl.full([], 0, new_ptr.dtype.element_ty) + left_out)


@triton.jit(do_not_specialize=COUNTS)
def batch_estimates(
    x_ptr,  # N×C×S, dtype of the input
    parts_ptr,  # 2×N×pieces×C in F
    found_mean_ptr, found_var_ptr,  # C in W
    new_ptr,  # 2·C + 1 in W
    mean_ptr, var_ptr, lost_ptr, rate_ptr,
    rate_high, rate_low,
    samples, channels, space,
    x_n, x_c,
    pieces, piece,
    HAS_RATE: tl.constexpr, MOVES: tl.constexpr, ALONE: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    UNROLLED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the moments of the whole batch, and with MOVES the running statistics after it, as BatchNorm does."""
    begin(EARLY)
    wide: tl.constexpr = found_mean_ptr.dtype.element_ty
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    valid_c = c < channels
    x, sizes, cut = (x_n, x_c), (samples, channels), (space, pieces, piece)
    old_mean_c = tl.load(mean_ptr + c, valid_c, 0).to(wide)
    old_var_c = tl.load(var_ptr + c, valid_c, 0).to(wide)
    rate = _rate(rate_ptr, rate_high, rate_low, wide, HAS_RATE)
    mean_c = tl.zeros([CHANNELS], wide)
    square_c = tl.zeros([CHANNELS], wide)
    for start in range(0, samples, ROWS):
        n = (start + tl.arange(0, ROWS))[:, None]
        valid_nc = both(n < samples, valid_c[None, :])
        mean_nc, var_nc = _moments(x_ptr, parts_ptr, n, c[None, :], valid_nc, x, sizes, cut, wide, UNROLLED)
        count = tl.minimum(samples - start, ROWS).to(wide)
        own_mean_c = tl.sum(tl.where(valid_nc, mean_nc, 0.0), 0) / count
        apart_nc = mean_nc - own_mean_c[None, :]
        own_square_c = tl.sum(tl.where(valid_nc, tl.fma(apart_nc, apart_nc, var_nc), 0.0), 0)
        # Merge with the rows before: two non-negative terms.
        distance_c = own_mean_c - mean_c
        share = count / (start + count)
        mean_c = tl.fma(distance_c, share + tl.zeros_like(distance_c), mean_c)
        square_c += tl.fma(distance_c * distance_c, share * start + tl.zeros_like(distance_c), own_square_c)
    var_c = square_c / samples
    tl.store(found_mean_ptr + c, mean_c, valid_c)
    tl.store(found_var_ptr + c, var_c, valid_c)
    if MOVES:
        # The unbiased variance; one element has none, and its biased variance is used.
        elements = (tl.zeros([1], wide) + samples) * space
        unbiased_c = var_c * (elements / tl.maximum(elements - 1, 1.0))
        mean_c = old_mean_c + rate * (mean_c - old_mean_c)
        var_c = old_var_c + rate * (unbiased_c - old_var_c)
        if ALONE:
            _write(mean_c, var_c, 0, c, valid_c, mean_ptr, var_ptr, lost_ptr, samples)
        else:
            _leave(mean_c, var_c, 0, c, valid_c, new_ptr, channels)


@triton.jit
def _after(decay, added, next_decay, next_added):
    """Return u → a·u + b of one step of a linear recurrence after those before it."""
    return decay * next_decay, tl.fma(added, next_decay, next_added)


@triton.jit
def _solve(start_c, inputs_tc, taken_tc, rate):
    """Return u_t = (1 − r)·u_{t−1} + r·i_t for all t, from u_0; micro-batches that do not count change nothing."""
    added_tc = tl.where(taken_tc, rate * inputs_tc, 0.0)
    decay_tc = tl.where(taken_tc, 1 - rate, 1.0)
    decay_tc, added_tc = tl.associative_scan((decay_tc, added_tc), 0, _after)
    return tl.fma(decay_tc, tl.broadcast_to(start_c[None, :], added_tc.shape), added_tc)


@triton.jit
def _pooled(
    x_ptr, parts_ptr, n_t, c, valid_c, x, sizes, cut, micro_batch,
    wide: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    """Return mean and variance of micro-batches, whose first samples are n_t, by sums around that sample's mean."""
    valid_tc = both(n_t < sizes[0], valid_c[None, :])
    center_tc, var_tc = _moments(x_ptr, parts_ptr, n_t, c[None, :], valid_tc, x, sizes, cut, wide, UNROLLED)
    first_tc = tl.zeros(valid_tc.shape, wide)
    for j in range(1, micro_batch):
        exists = both(n_t + j < sizes[0], valid_c[None, :])
        mean_tc, own_tc = _moments(x_ptr, parts_ptr, n_t + j, c[None, :], exists, x, sizes, cut, wide, UNROLLED)
        distance_tc = tl.where(exists, mean_tc - center_tc, 0.0)
        first_tc += distance_tc
        var_tc += tl.where(exists, tl.fma(distance_tc, distance_tc, own_tc), 0.0)
    share_t = 1 / tl.maximum(tl.minimum(sizes[0] - n_t, micro_batch), 1).to(wide)
    rest_tc = first_tc * share_t
    return center_tc + rest_tc, tl.maximum(var_tc * share_t - rest_tc * rest_tc, 0.0, tl.PropagateNan.ALL)


@triton.jit
def _broken(mean_tc, var_tc, valid_c, var_ptr):
    """Return how many channels of each micro-batch are NaN or overflow the dtype of the layer's estimates."""
    LARGEST: tl.constexpr = LARGEST_FLOAT64 if var_ptr.dtype.element_ty == tl.float64 else LARGEST_FLOAT32
    fits_tc = tl.fma(mean_tc, mean_tc, var_tc) < LARGEST  # NaN compares false
    return tl.sum(tl.where(fits_tc | (valid_c[None, :] == 0), 0, 1), 1)


@triton.jit(do_not_specialize=COUNTS)
def pool_batches(
    x_ptr,  # N×C×S, dtype of the input
    parts_ptr,  # 2×N×pieces×C in F
    data_mean_ptr, data_var_ptr,  # T×C in W: the moments of the micro-batches
    new_ptr,  # 2·C + 1 + T in W; the last T are the channels of each micro-batch that do not fit
    var_ptr,
    samples, channels, space,
    x_n, x_c,
    pieces, piece, micro_batch,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, UNROLLED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the moments of the micro-batches, and find those that do not count; a program takes ROWS of them."""
    begin(EARLY)
    wide: tl.constexpr = new_ptr.dtype.element_ty
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid_t = t * micro_batch < samples
    x, sizes, cut = (x_n, x_c), (samples, channels), (space, pieces, piece)
    broken_t = tl.zeros([ROWS], tl.int32)
    for first in range(0, channels, CHANNELS):
        c = first + tl.arange(0, CHANNELS)
        valid_c = c < channels
        mean_tc, var_tc = _pooled(
            x_ptr, parts_ptr, t[:, None] * micro_batch, c, valid_c, x, sizes, cut, micro_batch, wide, UNROLLED
        )
        at_tc = t[:, None] * channels + c[None, :]
        valid_tc = both(valid_t[:, None], valid_c[None, :])
        tl.store(data_mean_ptr + at_tc, mean_tc, valid_tc)
        tl.store(data_var_ptr + at_tc, var_tc, valid_tc)
        broken_t += _broken(mean_tc, var_tc, valid_c, var_ptr)
    tl.store(new_ptr + 2 * channels + 1 + t, broken_t.to(wide), valid_t)


@triton.jit
def _repeat(ptr, values_tc, n_t, c, valid_c, sizes, micro_batch):
    """Store the values of each micro-batch for all of its samples."""
    for j in range(micro_batch):
        n = n_t + j
        tl.store(ptr + n * sizes[1] + c[None, :], values_tc, both(n < sizes[0], valid_c[None, :]))


@triton.jit(do_not_specialize=COUNTS)
def scan_estimates(
    x_ptr,  # N×C×S, dtype of the input
    parts_ptr,  # 2×N×pieces×C in F
    data_mean_ptr, data_var_ptr,  # T×C in W: the moments of the micro-batches
    found_mean_ptr, found_var_ptr,  # N×C in W
    new_ptr,  # 2·C + 1 + T in W
    mean_ptr, var_ptr, lost_ptr, rate_ptr,
    rate_high, rate_low,
    samples, channels, space,
    x_n, x_c,
    pieces, piece, micro_batch,
    HAS_RATE: tl.constexpr, ALONE: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    UNROLLED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute Algorithm 1's estimates after each micro-batch of m samples, ROWS micro-batches at a time."""
    begin(EARLY)
    wide: tl.constexpr = found_mean_ptr.dtype.element_ty
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    valid_c = c < channels
    x, sizes, cut = (x_n, x_c), (samples, channels), (space, pieces, piece)
    rate = _rate(rate_ptr, rate_high, rate_low, wide, HAS_RATE)
    start_mean_c = tl.load(mean_ptr + c, valid_c, 0).to(wide)
    last_mean_c = start_mean_c
    last_var_c = tl.load(var_ptr + c, valid_c, 0).to(wide)
    row = tl.arange(0, ROWS)
    left_out_t = tl.zeros([ROWS], tl.int32)
    for start in range(0, tl.cdiv(samples, micro_batch), ROWS):
        t = start + row
        n_t = t[:, None] * micro_batch  # the first sample of each micro-batch
        valid_t = t * micro_batch < samples
        valid_tc = both(valid_t[:, None], valid_c[None, :])
        at_tc = t[:, None] * channels + c[None, :]
        if ALONE:
            mean_tc, var_tc = _pooled(x_ptr, parts_ptr, n_t, c, valid_c, x, sizes, cut, micro_batch, wide, UNROLLED)
            tl.store(data_mean_ptr + at_tc, mean_tc, valid_tc)
            tl.store(data_var_ptr + at_tc, var_tc, valid_tc)
            taken_t = _broken(mean_tc, var_tc, valid_c, var_ptr) == 0
        else:
            mean_tc = tl.load(data_mean_ptr + at_tc, valid_tc, 0)
            var_tc = tl.load(data_var_ptr + at_tc, valid_tc, 0)
            taken_t = tl.load(new_ptr + 2 * channels + 1 + t, valid_t, 0) == 0
        size_t = tl.minimum(samples - t * micro_batch, micro_batch)
        left_out_t += tl.where(taken_t | (valid_t == 0), 0, size_t)
        taken_tc = both(valid_tc, taken_t[:, None])
        after_tc = _solve(last_mean_c, mean_tc, taken_tc, rate)
        _repeat(found_mean_ptr, after_tc, n_t, c, valid_c, sizes, micro_batch)
        tl.debug_barrier()  # the estimates before each micro-batch are those that other threads have stored
        before_tc = tl.load(found_mean_ptr + (n_t - 1) * channels + c[None, :], both(valid_tc, n_t > 0), 0)
        # Algorithm 1's line 2 measures around the estimate before this micro-batch.
        distance_tc = mean_tc - tl.where(n_t > 0, before_tc, start_mean_c[None, :])
        after_var_tc = _solve(last_var_c, tl.fma(distance_tc, distance_tc, var_tc), taken_tc, rate)
        _repeat(found_var_ptr, after_var_tc, n_t, c, valid_c, sizes, micro_batch)
        last_mean_c = tl.sum(tl.where((row == ROWS - 1)[:, None], after_tc, 0.0), 0)
        last_var_c = tl.sum(tl.where((row == ROWS - 1)[:, None], after_var_tc, 0.0), 0)
    left_out = tl.sum(left_out_t, 0)
    if ALONE:
        _write(last_mean_c, last_var_c, left_out, c, valid_c, mean_ptr, var_ptr, lost_ptr, samples)
    else:
        _leave(last_mean_c, last_var_c, left_out, c, valid_c, new_ptr, channels)
