"""Results made by hand."""

import torch

from micronorm.bench.cases import Case, NormMethod
from micronorm.bench.results import BenchResult, BenchSettings
from micronorm.bench.timing import PASSES_AT_LEAST, Spread

CASE = Case((4, 16, 8, 8), "made by hand", "small")


def result(
    method: NormMethod, median: float | None, *, layout="nhwc", route="graph", case=CASE, floor_ms=None, **more
) -> BenchResult:
    time = None if median is None else Spread(0.9 * median, median, 1.1 * median)
    bandwidth = None if floor_ms is None else 1e3 * PASSES_AT_LEAST * 2 * case.elements / floor_ms
    settings = BenchSettings(torch.device("cpu"), torch.bfloat16, ("graph",), 15, bandwidth)
    return BenchResult(case, layout, route, method, settings, time=time, **more)
