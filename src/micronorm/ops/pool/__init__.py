"""Max-pooling over the plane, whose backward gives the same bits every time and keeps one byte per output."""

from micronorm.ops.pool.operators import MOST_PLACES, Window, max_pool2d

__all__ = ["MOST_PLACES", "Window", "max_pool2d"]
