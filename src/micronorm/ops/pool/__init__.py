"""Max-pooling over the plane, whose backward needs one byte per output and nothing of the input."""

from micronorm.ops.pool.operators import MAX_WINDOW, Window, max_pool2d

__all__ = ["MAX_WINDOW", "Window", "max_pool2d"]
