"""benchmarks/volume_step.py on a CPU, at a size that takes seconds."""

import csv
import importlib
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_method_has_a_row_in_both_layouts(monkeypatch, tmp_path, capsys):
    out = tmp_path / "volume.csv"
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script = importlib.import_module("volume_step")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    command = ["volume_step.py", "--device", "cpu", "--tiny", "--rounds", "2", "--repeats", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    script.main()
    with out.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["layout"]) for row in rows] == [
        (method, layout) for layout in ("nhwc", "nchw") for method in script.METHODS
    ]
    assert all(row["fault"] == "" and float(row["ms"]) > 0 for row in rows)
    assert min(float(row["ms_to_torch"]) for row in rows if row["method"] == script.TORCH) == 1.0
    assert str(tmp_path) not in out.read_text()
    assert capsys.readouterr().out.count("IN of torch") == 2
