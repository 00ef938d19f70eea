"""The Triton kernels of max-pooling. Import this module on first use only: it imports triton.

A plane is H×W×C in memory: an image in channels_last, otherwise one channel of it (C = 1). A program computes part of
one row, so that it divides by sizes once; per element it divides by C, a constant. The windows have KH×KW elements, the
strides SH and SW and the padding PH and PW.
"""

# Triton's language has Python's grammar, not its types.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

WIDE = {torch.float32: tl.float32, torch.float64: tl.float64}
"""Triton's name of each dtype to compute in."""


@triton.jit
def max_pool_forward(
    x,  # planes × height × width × C
    y,  # planes × out_height × out_width × C
    places,  # as y
    height, width, out_height, out_width, blocks,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr,
    PW: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the largest element of each window, and its place in the window: KW·row + column, the first of equals."""
    line = (tl.program_id(0) // blocks).to(tl.int64)
    oh = (line % out_height).to(tl.int32)
    e = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = e < out_width * C
    top, left = oh * SH - PH, e // C * SW - PW
    x += line // out_height * height * width * C + e % C
    best = tl.full([BLOCK], float("-inf"), WIDE)
    # A window of -inf alone has its gradient at its first place, as torch's.
    place = tl.maximum(-top, 0) * KW + tl.maximum(-left, 0)
    for i in tl.static_range(KH):
        # "!= 0" makes masks boolean: some versions of Triton's interpreter return an integer for "&".
        row_is_there = ((top + i >= 0) & (top + i < height)) != 0
        for j in tl.static_range(KW):
            there = (inside & row_is_there & (left + j >= 0) & (left + j < width)) != 0
            value = tl.load(x + ((top + i) * width + left + j) * C, mask=there, other=float("-inf")).to(WIDE)
            takes = (value > best) | (value != value)
            best = tl.where(takes, value, best)
            place = tl.where(takes, i * KW + j, place)
    at = line * out_width * C + e
    tl.store(y + at, best.to(y.dtype.element_ty), mask=inside)
    tl.store(places + at, place.to(tl.uint8), mask=inside)


@triton.jit
def max_pool_backward(
    grad,  # planes × out_height × out_width × C
    places,  # as grad
    dx,  # planes × height × width × C
    height, width, out_height, out_width, blocks,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr,
    PW: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For every element of x, sum the gradients of the windows of which it was the largest, in one order.

    A program computes cells of SH×SW elements, from row a·SH − PH and column b·SW − PW on. Windows a − u, b − v reach
    them, and which of the windows' places an element has does not depend on a and b.
    """
    cells_high = (height + PH + SH - 1) // SH
    line = (tl.program_id(0) // blocks).to(tl.int64)
    image = line // cells_high
    a = (line % cells_high).to(tl.int32)
    e = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    b = e // C
    grad += image * out_height * out_width * C + e % C
    places += image * out_height * out_width * C + e % C
    dx += image * height * width * C + e % C
    for r in tl.static_range(SH):
        for s in tl.static_range(SW):
            total = tl.zeros([BLOCK], WIDE)
            for u in tl.static_range((KH - r + SH - 1) // SH):
                for v in tl.static_range((KW - s + SW - 1) // SW):
                    oh, ow = a - u, b - v
                    there = ((oh >= 0) & (oh < out_height) & (ow >= 0) & (ow < out_width)) != 0
                    at = (oh * out_width + ow) * C
                    place = tl.load(places + at, mask=there, other=255)
                    value = tl.load(grad + at, mask=there, other=0.0).to(WIDE)
                    total += tl.where(place == (r + u * SH) * KW + s + v * SW, value, 0.0)
            ih, iw = a * SH + r - PH, b * SW + s - PW
            there = ((ih >= 0) & (ih < height) & (iw >= 0) & (iw < width)) != 0
            tl.store(dx + (ih * width + iw) * C, total.to(dx.dtype.element_ty), mask=there)
