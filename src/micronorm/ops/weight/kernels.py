"""The Triton kernels of Weight Standardization: one weight by its pointer, or many by tables of addresses.

Imported on first use only, since it imports Triton. `tiles.py` has the arithmetic and the legend of names, `tables.py`
makes the tables, `launch.py` launches.
"""

# Triton's language has Python's grammar, not its types.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from micronorm.ops.packed import Record
from micronorm.ops.weight.tiles import backward_long, backward_tile, forward_long, forward_tile

DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
ADDRESS, FAN_IN, ROWS, COLUMN, OFFSET, KIND, OWNER, _ = (tl.constexpr(field.value) for field in Record)
RECORD = tl.constexpr(len(Record))


# --- one weight, by its pointer ---------------------------------------------------------------------------------------


@triton.jit
def forward_one(
    w_ptr,  # O×I in the weight's dtype
    out_ptr,  # O×I in the dtype of the result
    stats_ptr,  # 3×channels in WIDE
    channels, height, fan_in,
    EPS: tl.constexpr, CENTER: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Standardize one weight of `height` rows; a program takes R of them."""
    first = tl.program_id(0) * R
    at = first.to(tl.int64) * fan_in
    w_ptr, out_ptr, stats_ptr = w_ptr + at, out_ptr + at, stats_ptr + first
    if LONG:
        forward_long(w_ptr, out_ptr, stats_ptr, channels, fan_in, EPS, CENTER, SCALE, WIDE, C)
    else:
        forward_tile(w_ptr, out_ptr, stats_ptr, channels, height - first, fan_in, EPS, CENTER, SCALE, WIDE, R, C)


@triton.jit
def backward_one(
    w_ptr,  # O×I in the weight's dtype
    g_ptr,  # O×I in the gradient's dtype
    dw_ptr,  # O×I in the weight's dtype
    stats_ptr,  # 3×channels in WIDE, offset to this weight's first column
    channels, height, fan_in,
    CENTER: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    LONG: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one weight; the statistics may have more `channels` than its `height` rows."""
    first = tl.program_id(0) * R
    at = first.to(tl.int64) * fan_in
    w_ptr, g_ptr, dw_ptr, stats_ptr = w_ptr + at, g_ptr + at, dw_ptr + at, stats_ptr + first
    if LONG:
        backward_long(w_ptr, g_ptr, dw_ptr, stats_ptr, channels, fan_in, CENTER, SCALE, WIDE, C)
    else:
        backward_tile(w_ptr, g_ptr, dw_ptr, stats_ptr, channels, height - first, fan_in, CENTER, SCALE, WIDE, R, C)


# --- many weights, by tables of addresses -----------------------------------------------------------------------------


@triton.jit
def _pointer(address, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(TYPE), bitcast=True)
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _read_record(blocks_ptr):
    """Return the fields of this program's `packed.Record`, without the padding."""
    record_ptr = blocks_ptr + tl.program_id(0) * RECORD
    address = tl.load(record_ptr + ADDRESS)
    fan_in = tl.load(record_ptr + FAN_IN).to(tl.int32)
    rows = tl.load(record_ptr + ROWS).to(tl.int32)
    column, at, kind = tl.load(record_ptr + COLUMN), tl.load(record_ptr + OFFSET), tl.load(record_ptr + KIND)
    return address, fan_in, rows, column, at, kind, tl.load(record_ptr + OWNER)


@triton.jit
def forward_many(
    blocks_ptr,  # B×8 int64, a packed.Record per program
    outs_ptr,  # one int64 address per weight: O×I in OUT
    stats_ptr,  # 3×channels in WIDE
    channels,
    EPS: tl.constexpr, CENTER: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr, W: tl.constexpr,
    OUT: tl.constexpr, KINDS: tl.constexpr, NARROW: tl.constexpr, TILE: tl.constexpr, SHORT: tl.constexpr,
    SHORT_ROWS: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Standardize many weights of dtype W; a program takes the rows of one record."""
    address, fan_in, rows, column, at, kind, owner = _read_record(blocks_ptr)
    stats_ptr += column
    out_address = tl.load(outs_ptr + owner) + at * (OUT.primitive_bitwidth // 8)
    # A fan-in that is visibly a multiple of 16 lets the compiler load and store 16 bytes at a time.
    even = fan_in // 16 * 16
    for k in tl.static_range(KINDS):
        if kind == k:
            forward_tile(
                _pointer(address, W, True),
                _pointer(out_address, OUT, True),
                stats_ptr,
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
        w_ptr, out_ptr = _pointer(address, W, False), _pointer(out_address, OUT, False)
        forward_tile(w_ptr, out_ptr, stats_ptr, channels, rows, fan_in, EPS, CENTER, SCALE, WIDE, SHORT_ROWS, SHORT)
    if kind == KINDS + 1:
        w_ptr, out_ptr = _pointer(address, W, False), _pointer(out_address, OUT, False)
        forward_long(w_ptr, out_ptr, stats_ptr, channels, fan_in, EPS, CENTER, SCALE, WIDE, LONG)


@triton.jit
def backward_many(
    blocks_ptr,  # B×8 int64, a packed.Record per program
    addresses_ptr,  # 2×count int64: addresses of the incoming gradients (O×I in G), then of the results (O×I in W)
    stats_ptr,  # 3×channels in WIDE
    count, channels,
    CENTER: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr, W: tl.constexpr, G: tl.constexpr,
    KINDS: tl.constexpr, NARROW: tl.constexpr, TILE: tl.constexpr, SHORT: tl.constexpr,
    SHORT_ROWS: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of `count` weights of dtype W; a program takes the rows of one record."""
    address, fan_in, rows, column, at, kind, owner = _read_record(blocks_ptr)
    stats_ptr += column
    g_address = tl.load(addresses_ptr + owner) + at * (G.primitive_bitwidth // 8)
    dw_address = tl.load(addresses_ptr + count + owner) + at * (W.primitive_bitwidth // 8)
    even = fan_in // 16 * 16
    for k in tl.static_range(KINDS):
        if kind == k:
            backward_tile(
                _pointer(address, W, True),
                _pointer(g_address, G, True),
                _pointer(dw_address, W, True),
                stats_ptr,
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
        w_ptr, g_ptr, dw_ptr = (
            _pointer(address, W, False),
            _pointer(g_address, G, False),
            _pointer(dw_address, W, False),
        )
        backward_tile(w_ptr, g_ptr, dw_ptr, stats_ptr, channels, rows, fan_in, CENTER, SCALE, WIDE, SHORT_ROWS, SHORT)
    if kind == KINDS + 1:
        w_ptr, g_ptr, dw_ptr = (
            _pointer(address, W, False),
            _pointer(g_address, G, False),
            _pointer(dw_address, W, False),
        )
        backward_long(w_ptr, g_ptr, dw_ptr, stats_ptr, channels, fan_in, CENTER, SCALE, WIDE, LONG)
