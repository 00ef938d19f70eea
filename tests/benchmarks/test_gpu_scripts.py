"""The scripts of benchmarks that measure a GPU and nothing else."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name, options", [("ws_gpu", []), ("engine_gpu", ["--data", "."])])
def test_without_a_gpu_one_line_says_so(name, options, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *options])
    with pytest.raises(SystemExit) as end:
        script.main()
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"{name}.py: error: torch finds no CUDA device")
