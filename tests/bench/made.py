"""Results made by hand."""

from micronorm.bench.cases import Case
from micronorm.bench.methods import NormMethod
from micronorm.bench.results import BenchResult
from micronorm.bench.timing import Spread

CASE = Case((4, 16, 8, 8), "made by hand", "small")


def result(method: NormMethod, median: float | None, *, layout="nhwc", route="graph", case=CASE, **more) -> BenchResult:
    time = None if median is None else Spread(0.9 * median, median, 1.1 * median)
    return BenchResult(case, layout, route, method, "bfloat16", 2, 15, time=time, **more)
