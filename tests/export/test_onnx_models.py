"""Published networks through benchmarks/onnx_models.py, whose list of networks and CSV these tests hold to the law."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tolerances import tolerance

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "onnx_models.py"
RECORD = ROOT / "benchmarks" / "results" / "onnx.csv"
NETWORKS = [
    "resnet50",
    "resnext50_32x4d",
    "densenet121",
    "efficientnet_b0",
    "mobilenet_v3_large",
    "timm/regnety_032",
    "deeplabv3_resnet50",
    "fcn_resnet50",
    "r3d_18",
    "timm/hrnet_w18_small features_only",
]


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def assert_lawful(row: dict[str, str]) -> None:
    tol = tolerance("folded", torch.float32)
    assert float(row["worst"]) <= tol
    assert float(row["folded_worst"]) <= tol
    assert row["group_normalizations"] == row["norms"]
    sizes = zip(row["shape_1"].split("x"), row["shape_2"].split("x"), strict=True)
    assert [i for i, (a, b) in enumerate(sizes) if a == b] in ([1], [1, 4])  # another batch, another image


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mobilenet_v3_large", "r3d_18"])  # 2-d, 3-d; the record below has all ten
def test_a_published_network_is_the_same_function_in_onnxruntime(name, tmp_path):
    out = tmp_path / "row.csv"
    command = [sys.executable, "-W", "ignore::FutureWarning", str(SCRIPT), "--model", name, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (row,) = read(out)
    assert row["model"] == name
    assert_lawful(row)


def test_the_record_holds_every_network():
    rows = read(RECORD)
    assert [row["model"] for row in rows] == NETWORKS
    for row in rows:
        assert_lawful(row)
