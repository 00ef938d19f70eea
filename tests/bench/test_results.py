"""Ratios to BatchNorm, tables, and CSV files."""

import errno
import os
from pathlib import Path

import pytest
import torch

from micronorm.bench.cases import BN, BN_COMPILED, BN_GN, GN, OURS
from micronorm.bench.results import (
    RATIOS,
    as_record,
    compare,
    grid,
    provenance,
    read_csv,
    remarks,
    title,
    write_csv,
)
from tests.bench.made import CASE, result

STEP = OURS[0]
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_batch_norm_s_baseline_is_its_best_of_all_routes_layouts_and_compilers():
    results = [
        result(BN, 4.0, layout="nhwc", route="eager"),
        result(BN, 2.0, layout="nhwc", route="graph", backend="torch"),
        result(BN, 3.0, layout="nchw", route="graph"),
        result(BN_COMPILED, 1.5, layout="nchw", route="graph", backend="inductor"),
        result(BN_COMPILED, None, layout="nhwc", route="graph", fault="did not compile"),
        result(GN, 0.1),
        result(STEP, 0.75, layout="nchw"),
    ]
    compare(results)
    assert results[-1].ratios["to_bn_best"] == 0.5
    assert results[-1].best == "BN>ReLU compiled graph nchw (inductor)"


def test_the_other_ratio_is_within_a_layout_and_a_route():
    results = [
        result(BN, 2.0),
        result(BN, 5.0, layout="nchw"),
        result(BN, 8.0, route="eager"),
        result(STEP, 1.0, layout="nchw"),
        result(STEP, 1.0, layout="nhwc", route="eager"),
    ]
    compare(results)
    *_, graph, eager = results
    assert graph.ratios == pytest.approx({"to_bn_best": 0.5, "to_bn": 0.2})
    assert eager.ratios == pytest.approx({"to_bn_best": 0.5, "to_bn": 0.125})


def test_without_batch_norm_there_is_no_ratio_to_it():
    results = [result(STEP, 1.0), result(GN, 2.0), result(BN, None, fault="failed")]
    compare(results)
    assert all(r.ratios == {} and r.best == "" for r in results)


def test_multiples_of_the_floor_and_of_an_activation():
    one = result(STEP, 0.5, floor_ms=0.25, saved_bytes=3 * 2 * 4 * 16 * 8 * 8)
    assert (one.floors, one.saved_activations) == (2.0, 3.0)
    without = result(STEP, None, floor_ms=0.25)
    assert (without.floors, without.saved_activations) == (None, None)


def test_a_table_has_a_line_for_every_result_and_no_empty_column():
    results = [result(BN, 2.0, backend="torch"), result(STEP, 1.0, backend="triton"), result(BN_GN, 4.0)]
    compare(results)
    assert title(CASE, results) == "4x16x8x8, 4 groups: made by hand; BN's best: BN>ReLU graph nhwc (torch)"
    columns, lines = grid(results)
    assert "÷ BN" in columns
    assert "× floor" not in columns
    assert [line[0] for line in lines] == ["BN>ReLU", "BCN+ReLU", "BN>GN>ReLU"]
    assert lines[1][-2:] == ["0.50", "0.50"]


def test_faults_stand_below_the_table():
    assert remarks([result(BN, 2.0), result(GN, None, fault="RuntimeError: out of luck")]) == [
        "gn, nhwc, graph: RuntimeError: out of luck"
    ]


def test_a_csv_file_holds_every_result_with_the_facts_of_the_run(tmp_path):
    results = [
        result(BN, 2.0, backend="torch"),
        result(STEP, 1.0, floor_ms=0.5, error=0.1),
        result(GN, None, fault="no, not here"),
    ]
    compare(results)
    facts = {"gpu": "Some GPU", "torch": "2.11", "command": "micronorm bench"}
    write_csv(tmp_path / "new" / "rows.csv", [as_record(r, facts) for r in results])
    bn, step, gn = read_csv(tmp_path / "new" / "rows.csv")
    assert (bn["backend"], bn["layout"], bn["route"], bn["shape"]) == ("torch", "nhwc", "graph", "4x16x8x8")
    assert float(step["q25_ms"]) < float(step["median_ms"]) == 1.0 < float(step["q75_ms"])
    assert (float(step["floors"]), float(step["to_bn_best"])) == (2.0, 0.5)
    assert step["bn_best"] == "BN>ReLU graph nhwc (torch)"
    assert (gn["median_ms"], gn["fault"], gn["gpu"]) == ("", "no, not here", "Some GPU")
    assert set(RATIOS) <= set(bn)


def test_columns_that_a_row_lacks_are_empty_and_a_missing_file_has_no_rows(tmp_path):
    write_csv(tmp_path / "a.csv", [{"x": 1}, {"y": 2}])
    assert read_csv(tmp_path / "a.csv") == [{"x": "1", "y": ""}, {"x": "", "y": "2"}]
    assert read_csv(tmp_path / "absent.csv") == []


def test_a_full_disk_is_named_with_the_space_it_needed_and_the_old_table_stays(monkeypatch, tmp_path):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    table = tmp_path / "a.csv"
    write_csv(table, [{"x": 1}])
    monkeypatch.setattr("micronorm.records.files.os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device \(6 bytes needed, [\d,]+ free\).*a\.csv"):
        write_csv(table, [{"x": 1}, {"x": 2}])
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]
    assert read_csv(table) == [{"x": "1"}]


def test_provenance_names_versions_and_command_and_of_a_cpu_no_gpu():
    facts = provenance(torch.device("cpu"), "python x.py", packages=("numpy", "no-such-package"))
    assert facts["torch"] == torch.__version__
    assert facts["command"] == "python x.py"
    assert facts["numpy"]
    assert (facts["gpu"], facts["cuda"], facts["no-such-package"]) == ("", "", "")


def test_the_recorded_files_have_the_columns_of_today():
    columns = set(as_record(result(BN, 1.0), provenance(torch.device("cpu"), "")))
    for name in ("norm_relu_gpu.csv", "cpu_norm_relu.csv"):
        rows = read_csv(RESULTS / name)
        dropped = {"busy_elsewhere", "to_bn_eval_gn", "to_bn_gn", "to_bn_nhwc"}  # of earlier revisions
        assert set(rows[0]) <= columns | dropped | {"copy_tb_per_s"}
        assert all(float(row["median_ms"]) > 0 for row in rows)
