"""The Triton kernel of a 1×1 convolution's data gradient with another gradient added: a matrix product.

Imported on first use only, since it imports triton. `operators.py` calls it.
"""

# Triton's language has Python's grammar, not its types.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit
def product_and_other(
    dy,
    weight,
    other,
    dx,
    rows,
    depth,
    columns,
    EVEN_DEPTH: tl.constexpr,
    EVEN_COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """dx = dy · weight + other, of rows×depth, depth×columns and rows×columns numbers; one tile of dx per program.

    Every number is one sum in float32, over blocks of the depth in their order, rounded once: it depends on its own row
    only, and on no other program. WIDE converts the operands first, for an interpreter that knows no bfloat16.
    """
    across = tl.cdiv(columns, BLOCK_COLUMNS)
    tile = tl.program_id(0)
    row = (tile // across).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = (tile % across) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    step = tl.arange(0, BLOCK_DEPTH)
    in_rows = row[:, None] < rows
    in_columns = column[None, :] < columns
    left = dy + row[:, None] * depth + step[None, :]
    right = weight + step.to(tl.int64)[:, None] * columns + column[None, :]
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for first in range(0, depth, BLOCK_DEPTH):
        if EVEN_DEPTH:
            a = tl.load(left, mask=in_rows, other=0.0)
        else:
            a = tl.load(left, mask=in_rows & (first + step[None, :] < depth), other=0.0)
        if EVEN_DEPTH and EVEN_COLUMNS:
            b = tl.load(right)
        elif EVEN_DEPTH:
            b = tl.load(right, mask=in_columns, other=0.0)
        else:
            b = tl.load(right, mask=in_columns & (first + step[:, None] < depth), other=0.0)
        if WIDE:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total)
        left += BLOCK_DEPTH
        right += BLOCK_DEPTH * columns
    at = row[:, None] * columns + column[None, :]
    written = in_rows if EVEN_COLUMNS else in_rows & in_columns
    total += tl.load(other + at, mask=written, other=0.0).to(tl.float32)
    tl.store(dx + at, total.to(dx.dtype.element_ty), mask=written)


INTERPRETED = not isinstance(product_and_other, triton.runtime.JITFunction)
"""Whether kernels run on the CPU: by TRITON_INTERPRET=1 in the environment before triton was imported."""
