"""Device functions for Weight Standardization: one program computes a few rows, with one read and one write of W.

A tile is R rows of C columns, C ≥ the fan-in, so that a row stays in registers between its read and its write. Longer
rows are read again from the cache, C columns at a time.

Legend, for this file and kernels.py (O output channels, I fan-in, WIDE the dtype of the computation):
- w_ptr, dw_ptr: rows of I elements in the weight's dtype. out_ptr (Ŵ): the same in the dtype of the result. g_ptr
  (dL/dŴ): the same in the dtype of the incoming gradient.
- stats_ptr: 3×`channels` in WIDE, the rows of `packed.RowStat`, offset to the column of the first output channel.

Every sum has one fixed order, and no two programs write the same address: equal inputs give equal bits.
"""

# Triton's language has Python's grammar, not its types.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from micronorm.ops.packed import RowStat

PIVOT, RESIDUE, RSTD = (tl.constexpr(row.value) for row in RowStat)


@triton.jit
def _widen(x, WIDE: tl.constexpr):
    """Convert to WIDE; half types by way of float32, the only conversion that the interpreter has."""
    if x.dtype.primitive_bitwidth == 16:
        x = x.to(tl.float32)
    return x.to(WIDE)


@triton.jit
def _store(pointers, x, mask):
    """Store in the dtype of the pointers; half types by way of float32, as in `_widen`."""
    if pointers.dtype.element_ty.primitive_bitwidth == 16:
        x = x.to(tl.float32)
    tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def forward_tile(
    w_ptr, out_ptr, stats_ptr,
    channels, rows, fan_in,
    EPS: tl.constexpr, CENTER: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Standardize up to R rows, and store their statistics."""
    r = tl.arange(0, R)
    c = tl.arange(0, C)
    here = (r < rows)[:, None] & (c < fan_in)[None, :]
    offsets = r[:, None] * fan_in + c[None, :]
    n = fan_in.to(WIDE)
    x = _widen(tl.load(w_ptr + offsets, mask=here, other=0.0), WIDE)
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
    _store(out_ptr + offsets, x * rstd[:, None], here)
    tl.store(stats_ptr + PIVOT * channels + r, pivot, mask=r < rows)
    tl.store(stats_ptr + RESIDUE * channels + r, residue, mask=r < rows)
    tl.store(stats_ptr + RSTD * channels + r, rstd, mask=r < rows)


@triton.jit
def forward_long(
    w_ptr, out_ptr, stats_ptr,
    channels, fan_in,
    EPS: tl.constexpr, CENTER: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Standardize one row of any length in three passes. The variance is taken around the rounded mean.

    The loops use `while`, because the interpreter's `range` does not accept a number that was loaded.
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
            total += _widen(tl.load(w_ptr + start + c, mask=start + c < fan_in, other=0.0), WIDE)
            start += C
        pivot = tl.sum(total, 0) / n
    if CENTER or SCALE:
        first = tl.zeros([C], WIDE)
        second = tl.zeros([C], WIDE)
        start = 0
        while start < fan_in:
            here = start + c < fan_in
            t = tl.where(here, _widen(tl.load(w_ptr + start + c, mask=here, other=0.0), WIDE) - pivot, 0.0)
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
        x = _widen(tl.load(w_ptr + start + c, mask=here, other=0.0), WIDE)
        _store(out_ptr + start + c, ((x - pivot) - residue) * rstd, here)
        start += C
    tl.store(stats_ptr + PIVOT * channels, pivot)
    tl.store(stats_ptr + RESIDUE * channels, residue)
    tl.store(stats_ptr + RSTD * channels, rstd)


@triton.jit
def backward_tile(
    w_ptr, g_ptr, dw_ptr, stats_ptr,
    channels, rows, fan_in,
    CENTER: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Compute dW = (g − mean(g) − Ŵ·mean(g·Ŵ))/σ for up to R rows; without CENTER or SCALE their terms vanish."""
    r = tl.arange(0, R)
    c = tl.arange(0, C)
    here = (r < rows)[:, None] & (c < fan_in)[None, :]
    offsets = r[:, None] * fan_in + c[None, :]
    n = fan_in.to(WIDE)
    d = _widen(tl.load(g_ptr + offsets, mask=here, other=0.0), WIDE)
    if SCALE:
        x = _widen(tl.load(w_ptr + offsets, mask=here, other=0.0), WIDE)
        pivot = tl.load(stats_ptr + PIVOT * channels + r, mask=r < rows, other=0.0)
        residue = tl.load(stats_ptr + RESIDUE * channels + r, mask=r < rows, other=0.0)
        rstd = tl.load(stats_ptr + RSTD * channels + r, mask=r < rows, other=0.0)
        x = ((x - pivot[:, None]) - residue[:, None]) * rstd[:, None]
        along = tl.sum(d * x, 1) / n  # beyond a row's end d is zero
        if CENTER:
            d = d - (tl.sum(d, 1) / n)[:, None]
        d = (d - x * along[:, None]) * rstd[:, None]
    else:
        d = d - (tl.sum(d, 1) / n)[:, None]
    _store(dw_ptr + offsets, d, here)


@triton.jit
def backward_long(
    w_ptr, g_ptr, dw_ptr, stats_ptr,
    channels, fan_in,
    CENTER: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Compute `backward_tile` for one row of any length, in two passes."""
    c = tl.arange(0, C)
    n = fan_in.to(WIDE)
    pivot = tl.load(stats_ptr + PIVOT * channels)
    residue = tl.load(stats_ptr + RESIDUE * channels)
    rstd = tl.load(stats_ptr + RSTD * channels)
    first = tl.zeros([C], WIDE)
    second = tl.zeros([C], WIDE)
    start = 0
    while start < fan_in:
        here = start + c < fan_in
        d = _widen(tl.load(g_ptr + start + c, mask=here, other=0.0), WIDE)
        first += d
        if SCALE:
            x = _widen(tl.load(w_ptr + start + c, mask=here, other=0.0), WIDE)
            second += d * (((x - pivot) - residue) * rstd)
        start += C
    mean = tl.sum(first, 0) / n
    along = tl.sum(second, 0) / n
    start = 0
    while start < fan_in:
        here = start + c < fan_in
        d = _widen(tl.load(g_ptr + start + c, mask=here, other=0.0), WIDE)
        if CENTER:
            d = d - mean
        if SCALE:
            x = _widen(tl.load(w_ptr + start + c, mask=here, other=0.0), WIDE)
            d = (d - (((x - pivot) - residue) * rstd) * along) * rstd
        _store(dw_ptr + start + c, d, here)
        start += C
