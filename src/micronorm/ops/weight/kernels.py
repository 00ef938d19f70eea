"""The Triton kernels of Weight Standardization: one weight by its pointer, or many by tables of addresses.

Imported on first use only, since it imports triton. `tiles.py` has the arithmetic, `tables.py` says what a block's
record holds, `launch.py` calls.
"""

# Triton's language has Python's grammar, not its types.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from micronorm.ops.weight.tiles import backward_long, backward_tile, forward_long, forward_tile

INTERPRETED = not isinstance(forward_tile, triton.runtime.JITFunction)
"""Whether kernels run on the CPU: by TRITON_INTERPRET=1 in the environment before triton was imported."""

DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


# --- one weight, by its pointer --------------------------------------------------------------------------------------


@triton.jit
def forward_one(
    w,
    out,
    stats,
    channels,
    height,
    fan_in,
    EPS: tl.constexpr,
    CENTER: tl.constexpr,
    SCALE: tl.constexpr,
    WIDE: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    LONG: tl.constexpr,
):
    """Standardize one weight of `height` rows: a program takes R of them."""
    first = tl.program_id(0) * R
    at = first.to(tl.int64) * fan_in
    if LONG:
        forward_long(w + at, out + at, stats + first, channels, fan_in, EPS, CENTER, SCALE, WIDE, C)
    else:
        rows = height - first
        forward_tile(w + at, out + at, stats + first, channels, rows, fan_in, EPS, CENTER, SCALE, WIDE, R, C)


@triton.jit
def backward_one(
    w,
    g,
    dw,
    stats,
    channels,
    height,
    fan_in,
    CENTER: tl.constexpr,
    SCALE: tl.constexpr,
    WIDE: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    LONG: tl.constexpr,
):
    """The gradient of one weight, whose `height` rows may be some of the `channels` that the statistics are of."""
    first = tl.program_id(0) * R
    at = first.to(tl.int64) * fan_in
    if LONG:
        backward_long(w + at, g + at, dw + at, stats + first, channels, fan_in, CENTER, SCALE, WIDE, C)
    else:
        rows = height - first
        backward_tile(w + at, g + at, dw + at, stats + first, channels, rows, fan_in, CENTER, SCALE, WIDE, R, C)


# --- many weights, by tables of addresses ----------------------------------------------------------------------------


@triton.jit
def _pointer(address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(TYPE), bitcast=True)
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def forward_many(
    blocks,
    outs,
    stats,
    channels,
    EPS: tl.constexpr,
    CENTER: tl.constexpr,
    SCALE: tl.constexpr,
    WIDE: tl.constexpr,
    W: tl.constexpr,
    OUT: tl.constexpr,
    RECORD: tl.constexpr,
    KINDS: tl.constexpr,
    NARROW: tl.constexpr,
    TILE: tl.constexpr,
    SHORT: tl.constexpr,
    SHORT_ROWS: tl.constexpr,
    LONG: tl.constexpr,
):
    """Standardize many weights: a program takes the rows of one record of `blocks`, to the addresses in `outs`."""
    record = blocks + tl.program_id(0) * RECORD
    address = tl.load(record)
    fan_in = tl.load(record + 1).to(tl.int32)
    rows = tl.load(record + 2).to(tl.int32)
    stats += tl.load(record + 3)
    at = tl.load(record + 4)
    kind = tl.load(record + 5)
    out_address = tl.load(outs + tl.load(record + 6)) + at * (OUT.primitive_bitwidth // 8)
    # A fan-in that is visibly a multiple of 16 lets the compiler load and store 16 bytes at a time.
    even = fan_in // 16 * 16
    for k in tl.static_range(KINDS):
        if kind == k:
            forward_tile(
                _pointer(address, W, True),
                _pointer(out_address, OUT, True),
                stats,
                channels,
                rows,
                even,
                EPS,
                CENTER,
                SCALE,
                WIDE,
                TILE // (NARROW << k) if (NARROW << k) < TILE else 1,
                NARROW << k,
            )
    if kind == KINDS:
        w = _pointer(address, W, False)
        out = _pointer(out_address, OUT, False)
        forward_tile(w, out, stats, channels, rows, fan_in, EPS, CENTER, SCALE, WIDE, SHORT_ROWS, SHORT)
    if kind == KINDS + 1:
        w = _pointer(address, W, False)
        out = _pointer(out_address, OUT, False)
        forward_long(w, out, stats, channels, fan_in, EPS, CENTER, SCALE, WIDE, LONG)


@triton.jit
def backward_many(
    blocks,
    addresses,
    count,
    stats,
    channels,
    CENTER: tl.constexpr,
    SCALE: tl.constexpr,
    WIDE: tl.constexpr,
    W: tl.constexpr,
    G: tl.constexpr,
    RECORD: tl.constexpr,
    KINDS: tl.constexpr,
    NARROW: tl.constexpr,
    TILE: tl.constexpr,
    SHORT: tl.constexpr,
    SHORT_ROWS: tl.constexpr,
    LONG: tl.constexpr,
):
    """The gradients of many weights: `addresses` holds those of the `count` incoming gradients, then of the results."""
    record = blocks + tl.program_id(0) * RECORD
    address = tl.load(record)
    fan_in = tl.load(record + 1).to(tl.int32)
    rows = tl.load(record + 2).to(tl.int32)
    stats += tl.load(record + 3)
    at = tl.load(record + 4)
    kind = tl.load(record + 5)
    owner = tl.load(record + 6)
    g_address = tl.load(addresses + owner) + at * (G.primitive_bitwidth // 8)
    dw_address = tl.load(addresses + count + owner) + at * (W.primitive_bitwidth // 8)
    even = fan_in // 16 * 16
    for k in tl.static_range(KINDS):
        if kind == k:
            backward_tile(
                _pointer(address, W, True),
                _pointer(g_address, G, True),
                _pointer(dw_address, W, True),
                stats,
                channels,
                rows,
                even,
                CENTER,
                SCALE,
                WIDE,
                TILE // (NARROW << k) if (NARROW << k) < TILE else 1,
                NARROW << k,
            )
    if kind == KINDS:
        w, g, dw = _pointer(address, W, False), _pointer(g_address, G, False), _pointer(dw_address, W, False)
        backward_tile(w, g, dw, stats, channels, rows, fan_in, CENTER, SCALE, WIDE, SHORT_ROWS, SHORT)
    if kind == KINDS + 1:
        w, g, dw = _pointer(address, W, False), _pointer(g_address, G, False), _pointer(dw_address, W, False)
        backward_long(w, g, dw, stats, channels, fan_in, CENTER, SCALE, WIDE, LONG)
