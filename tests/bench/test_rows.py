"""What a figure is compared with, and the rows as CSV."""

import csv
import io
from pathlib import Path

import pytest

from micronorm.bench.peers import BN, BN_COMPILED, BN_EVAL_GN, BN_GN, FUSED, GN, SYNC_BN
from micronorm.bench.rows import RATIOS, best_batch_norm, compare, describe, read_csv, to_csv
from tests.bench.rows import row

STEP = FUSED[0]
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_batch_norm_s_baseline_is_its_best_row_of_all_routes_layouts_and_compilers():
    rows = [
        row(BN, 4.0, layout="nhwc", route="eager"),
        row(BN, 2.0, layout="nhwc", route="graph", backend="native"),
        row(BN, 3.0, layout="nchw", route="graph"),
        row(BN_COMPILED, 1.5, layout="nchw", route="graph", backend="inductor"),
        row(BN_COMPILED, None, layout="nhwc", route="graph", fault="did not compile"),
        row(SYNC_BN, 0.5),
        row(GN, 0.1),
        row(STEP, 0.75, layout="nchw"),
    ]
    assert best_batch_norm(rows) is rows[3]
    compare(rows)
    assert rows[-1].ratios["to_bn_best"] == 0.5
    assert rows[-1].best == describe(rows[3]) == "BN>ReLU compiled graph nchw (inductor)"


def test_the_other_ratios_are_within_a_route():
    rows = [
        row(BN, 2.0),
        row(BN, 5.0, layout="nchw"),
        row(BN, 8.0, route="eager"),
        row(BN_GN, 3.0, layout="nchw"),
        row(BN_EVAL_GN, 4.0, layout="nchw"),
        row(STEP, 1.0, layout="nchw"),
        row(STEP, 1.0, layout="nhwc", route="eager"),
    ]
    compare(rows)
    *_, graph, eager = rows
    assert graph.ratios == pytest.approx(
        {"to_bn_best": 0.5, "to_bn_nhwc": 0.5, "to_bn": 0.2, "to_bn_gn": 1 / 3, "to_bn_eval_gn": 0.25}
    )
    assert eager.ratios == pytest.approx({"to_bn_best": 0.5, "to_bn_nhwc": 0.125, "to_bn": 0.125})


def test_without_batch_norm_there_is_no_ratio_to_it():
    rows = [row(STEP, 1.0), row(GN, 2.0), row(BN, None, fault="failed")]
    compare(rows)
    assert all(r.ratios == {} and r.best == "" for r in rows)


def test_multiples_of_the_floor_and_of_an_activation():
    one = row(STEP, 0.5, floor_ms=0.25, saved_bytes=3 * 2 * 4 * 16 * 8 * 8)
    assert (one.floors, one.saved_activations) == (2.0, 3.0)
    without = row(STEP, None, floor_ms=0.25)
    assert (without.floors, without.saved_activations) == (None, None)


def test_a_csv_holds_every_row_with_what_it_says_of_the_run():
    rows = [row(BN, 2.0, backend="cudnn"), row(STEP, 1.0, floor_ms=0.5, error=0.1), row(GN, None, fault="no, not here")]
    compare(rows)
    facts = {"gpu": "Some GPU", "torch": "2.11", "date": "2025-01-01", "revision": None, "command": "micronorm bench"}
    read = list(csv.DictReader(io.StringIO(to_csv(rows, facts))))
    assert len(read) == 3
    bn, step, gn = read
    assert (bn["backend"], bn["layout"], bn["route"], bn["shape"]) == ("cudnn", "nhwc", "graph", "4x16x8x8")
    assert float(step["median_ms"]) == 1.0
    assert float(step["q25_ms"]) < 1.0 < float(step["q75_ms"])
    assert float(step["floors"]) == 2.0
    assert float(step["to_bn_best"]) == 0.5
    assert step["bn_best"] == "BN>ReLU graph nhwc (cudnn)"
    assert (gn["median_ms"], gn["fault"]) == ("", "no, not here")
    assert all((r["gpu"], r["revision"]) == ("Some GPU", "") for r in read)
    assert set(RATIOS) <= set(bn)


def test_the_cpu_s_record_of_earlier_versions_can_be_read():
    old = read_csv(RESULTS / "cpu_norm_relu.csv")
    new = set(next(csv.reader(io.StringIO(to_csv([row(BN, 1.0)], {})))))
    facts = {"cpu", "cores", "threads", "torch", "python", "date", "command"}
    assert set(old[0]) - facts <= new  # each of its columns still means the same
    assert {r["shape"] for r in old} == {"16x64x56x56", "1x256x100x168", "128x16x32x32"}
    assert all(float(r["median_ms"]) > 0 for r in old)
