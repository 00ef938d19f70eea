"""The benchmark, run as a user runs it, at shapes that take no time."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHAPES = ["2x8x24x24", "3x4x5x7"]
LAYOUTS = ["nchw", "nhwc"]
MODES = ["step", "sequential", "batch"]
METHODS = [(name, mode) for name in ("BCN+ReLU", "BCN then ReLU") for mode in MODES] + [
    ("BN>GN>ReLU", "train"),
    ("BN>GN>ReLU", "eval"),
    ("BN>ReLU", "train"),
    ("GN>ReLU", "train"),
]
PEERS = {"to_bn_gn": ("BN>GN>ReLU", "train"), "to_bn_eval_gn": ("BN>GN>ReLU", "eval"), "to_bn": ("BN>ReLU", "train")}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[str, list[dict[str, str]]]:
    """What one run of two rounds printed, and its rows."""
    out = tmp_path_factory.mktemp("results") / "tiny.csv"
    shapes = [argument for shape in SHAPES for argument in ("--shape", shape)]
    done = run("--repeats", "2", "--threads", "1", "--memory-format", "both", "--out", str(out), *shapes)
    assert done.returncode == 0, done.stderr
    with out.open(newline="", encoding="utf-8") as file:
        return done.stdout, list(csv.DictReader(file))


def activation_bytes(shape: str) -> int:
    n, c, h, w = map(int, shape.split("x"))
    return 4 * n * c * h * w


def test_every_method_is_measured_at_every_shape_and_layout(finished):
    _, rows = finished
    got = [(r["shape"], r["layout"], r["method"], r["mode"]) for r in rows]
    expected = [(shape, layout, *method) for shape in SHAPES for layout in LAYOUTS for method in METHODS]
    assert sorted(got) == sorted(expected)


def test_quartiles_enclose_the_median(finished):
    _, rows = finished
    for r in rows:
        assert 0 < float(r["q25_ms"]) <= float(r["median_ms"]) <= float(r["q75_ms"])


@pytest.mark.parametrize("column", PEERS)
def test_a_ratio_is_that_of_the_medians(finished, column):
    _, rows = finished
    median = {(r["shape"], r["layout"], r["method"], r["mode"]): float(r["median_ms"]) for r in rows}
    for r in rows:
        peer = median[(r["shape"], r["layout"], *PEERS[column])]
        assert float(r[column]) == pytest.approx(float(r["median_ms"]) / peer, rel=1e-3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bcn_with_its_rectifier_saves_one_activation_and_a_few_numbers_per_channel(finished, mode, layout):
    _, rows = finished
    n, c = 2, 8  # at 2×8×24×24, where a second activation would not pass
    one = activation_bytes(SHAPES[0])
    allowed = one + 64 * 8 * n * c
    assert allowed < 2 * one
    at = [r for r in rows if (r["shape"], r["layout"], r["mode"]) == (SHAPES[0], layout, mode)]
    saved = {r["method"]: int(r["saved_bytes"]) for r in at}
    assert one <= saved["BCN+ReLU"] <= allowed
    assert saved["BCN then ReLU"] >= 2 * one  # the same count does see a second activation


def test_a_row_tells_how_to_repeat_it_and_not_whose_machine_it_was(finished, tmp_path):
    _, rows = finished
    for r in rows:
        assert r["command"] == (
            "python benchmarks/run.py --repeats 2 --threads 1 --memory-format both --shape 2x8x24x24 --shape 3x4x5x7"
        )
        assert all(r[name] for name in ("cpu", "cores", "threads", "torch", "python", "date", "dtype", "groups"))
        assert r["date"].endswith("+00:00")
        assert str(tmp_path.parent) not in "".join(r.values())


def test_the_table_shows_every_row(finished):
    printed, rows = finished
    lines = [line for line in printed.splitlines() if line.startswith(("BCN", "BN", "GN"))]
    assert len(lines) == len(rows)


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--repeats", "1"], "at least 2 for quartiles, got 1"),
        (["--shape", "2x8x24"], "four positive sizes as in 16x64x56x56, got '2x8x24'"),
    ],
)
def test_bad_arguments_are_refused(arguments, complaint):
    done = run(*arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
