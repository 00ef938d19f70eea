"""Max-pooling over the plane by Triton kernels; the backward needs one byte per output and nothing of the input.

`micronorm.convert.known_blocks` decides which layers use it.
"""

from micronorm.ops.pool.operators import MAX_WINDOW, PoolWindow, max_pool2d

__all__ = ["MAX_WINDOW", "PoolWindow", "max_pool2d"]
