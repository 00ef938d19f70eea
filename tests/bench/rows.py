"""Rows made by hand."""

from micronorm.bench.cases import Case
from micronorm.bench.peers import Method
from micronorm.bench.rows import Row
from micronorm.bench.timing import Spread

CASE = Case((4, 16, 8, 8), "made by hand", "small")


def row(method: Method, median: float | None, *, layout: str = "nhwc", route: str = "graph", case: Case = CASE, **more):
    time = None if median is None else Spread(0.9 * median, median, 1.1 * median)
    return Row(case, layout, route, method, "bfloat16", 2, 15, time=time, **more)
