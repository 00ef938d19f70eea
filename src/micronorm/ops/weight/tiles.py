"""Weight Standardization of a few rows by one program of a Triton kernel: one read of W and one write each way.

A tile is R rows of C columns, C ≥ the fan-in, so that a row lies in registers from its only read to its only write;
longer rows are read again from the cache, C columns at a time. Statistics are three rows of numbers, one column per
output channel: the mean in two parts (a number of the arithmetic's dtype, and what its rounding lost) and 1/σ.

The block-wide sums are in one fixed order, and no two programs write the same address: equal inputs, equal bits.
"""

# Triton's language has Python's grammar, not its types.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit
def _widen(x, WIDE: tl.constexpr):
    # Half types go by way of float32, on the way back too: the interpreter knows no other.
    if x.dtype.primitive_bitwidth == 16:
        x = x.to(tl.float32)
    return x.to(WIDE)


@triton.jit
def _store(pointers, x, mask):
    if pointers.dtype.element_ty.primitive_bitwidth == 16:
        x = x.to(tl.float32)
    tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def forward_tile(
    w,
    out,
    stats,
    channels,
    rows,
    fan_in,
    EPS: tl.constexpr,
    CENTER: tl.constexpr,
    SCALE: tl.constexpr,
    WIDE: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Up to R rows that begin at `w`, to `out`; their statistics begin at `stats`, of `channels` columns."""
    r = tl.arange(0, R)
    c = tl.arange(0, C)
    here = (r < rows)[:, None] & (c < fan_in)[None, :]
    offsets = r[:, None] * fan_in + c[None, :]
    n = fan_in.to(WIDE)
    x = _widen(tl.load(w + offsets, mask=here, other=0.0), WIDE)
    pivot = tl.zeros([R], WIDE)
    residue = tl.zeros([R], WIDE)
    rstd = tl.full([R], 1.0, WIDE)
    if CENTER:
        pivot = tl.sum(x, 1) / n
        x = tl.where(here, x - pivot[:, None], 0.0)
        residue = tl.sum(x, 1) / n
        x = tl.where(here, x - residue[:, None], 0.0)
    if SCALE:
        rstd = tl.rsqrt(tl.sum(x * x, 1) / n + EPS)
    _store(out + offsets, x * rstd[:, None], here)
    tl.store(stats + r, pivot, mask=r < rows)
    tl.store(stats + channels + r, residue, mask=r < rows)
    tl.store(stats + 2 * channels + r, rstd, mask=r < rows)


@triton.jit
def forward_long(
    w,
    out,
    stats,
    channels,
    fan_in,
    EPS: tl.constexpr,
    CENTER: tl.constexpr,
    SCALE: tl.constexpr,
    WIDE: tl.constexpr,
    C: tl.constexpr,
):
    """One row of any length, in three passes. The variance is taken around the rounded mean, as in `moments`.

    The loops are written with `while`: the interpreter's `range` takes no number that was loaded.
    """
    c = tl.arange(0, C)
    n = fan_in.to(WIDE)
    zero = tl.sum(tl.zeros([C], WIDE), 0)
    pivot = zero
    residue = zero
    rstd = zero + 1.0
    if CENTER:
        total = tl.zeros([C], WIDE)
        start = 0
        while start < fan_in:
            total += _widen(tl.load(w + start + c, mask=start + c < fan_in, other=0.0), WIDE)
            start += C
        pivot = tl.sum(total, 0) / n
    if CENTER or SCALE:
        first = tl.zeros([C], WIDE)
        second = tl.zeros([C], WIDE)
        start = 0
        while start < fan_in:
            here = start + c < fan_in
            t = tl.where(here, _widen(tl.load(w + start + c, mask=here, other=0.0), WIDE) - pivot, 0.0)
            first += t
            second += t * t
            start += C
        if CENTER:
            residue = tl.sum(first, 0) / n
        if SCALE:
            rstd = tl.rsqrt(tl.maximum(tl.sum(second, 0) / n - residue * residue, 0.0) + EPS)
    start = 0
    while start < fan_in:
        here = start + c < fan_in
        x = _widen(tl.load(w + start + c, mask=here, other=0.0), WIDE)
        _store(out + start + c, ((x - pivot) - residue) * rstd, here)
        start += C
    tl.store(stats, pivot)
    tl.store(stats + channels, residue)
    tl.store(stats + 2 * channels, rstd)


@triton.jit
def backward_tile(
    w,
    g,
    dw,
    stats,
    channels,
    rows,
    fan_in,
    CENTER: tl.constexpr,
    SCALE: tl.constexpr,
    WIDE: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """dW = (g − mean(g) − Ŵ·mean(g·Ŵ))/σ for up to R rows; without `center` the first mean goes, without `scale` Ŵ."""
    r = tl.arange(0, R)
    c = tl.arange(0, C)
    here = (r < rows)[:, None] & (c < fan_in)[None, :]
    offsets = r[:, None] * fan_in + c[None, :]
    n = fan_in.to(WIDE)
    d = _widen(tl.load(g + offsets, mask=here, other=0.0), WIDE)
    if SCALE:
        x = _widen(tl.load(w + offsets, mask=here, other=0.0), WIDE)
        pivot = tl.load(stats + r, mask=r < rows, other=0.0)
        residue = tl.load(stats + channels + r, mask=r < rows, other=0.0)
        rstd = tl.load(stats + 2 * channels + r, mask=r < rows, other=0.0)
        x = ((x - pivot[:, None]) - residue[:, None]) * rstd[:, None]
        along = tl.sum(d * x, 1) / n  # beyond a row's end d is zero
        if CENTER:
            d = d - (tl.sum(d, 1) / n)[:, None]
        d = (d - x * along[:, None]) * rstd[:, None]
    else:
        d = d - (tl.sum(d, 1) / n)[:, None]
    _store(dw + offsets, d, here)


@triton.jit
def backward_long(
    w,
    g,
    dw,
    stats,
    channels,
    fan_in,
    CENTER: tl.constexpr,
    SCALE: tl.constexpr,
    WIDE: tl.constexpr,
    C: tl.constexpr,
):
    """`backward_tile` for one row of any length, in two passes."""
    c = tl.arange(0, C)
    n = fan_in.to(WIDE)
    pivot = tl.load(stats)
    residue = tl.load(stats + channels)
    rstd = tl.load(stats + 2 * channels)
    first = tl.zeros([C], WIDE)
    second = tl.zeros([C], WIDE)
    start = 0
    while start < fan_in:
        here = start + c < fan_in
        d = _widen(tl.load(g + start + c, mask=here, other=0.0), WIDE)
        first += d
        if SCALE:
            x = _widen(tl.load(w + start + c, mask=here, other=0.0), WIDE)
            second += d * (((x - pivot) - residue) * rstd)
        start += C
    mean = tl.sum(first, 0) / n
    along = tl.sum(second, 0) / n
    start = 0
    while start < fan_in:
        here = start + c < fan_in
        d = _widen(tl.load(g + start + c, mask=here, other=0.0), WIDE)
        if CENTER:
            d = d - mean
        if SCALE:
            x = _widen(tl.load(w + start + c, mask=here, other=0.0), WIDE)
            d = (d - (((x - pivot) - residue) * rstd) * along) * rstd
        _store(dw + start + c, d, here)
        start += C
