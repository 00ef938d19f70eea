"""The training steps of benchmarks/steps_gpu.py, without a GPU at sizes that take seconds; and its ratios."""

import csv
import importlib
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
NAME = "cifar-resnet20-4x16x16"


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield {name: importlib.import_module(name) for name in ("steps_gpu", "training_step", "step_rounds")}
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def run(scripts, monkeypatch, *arguments: str) -> None:
    command = ["steps_gpu.py", "--device", "cpu", "--workload", NAME, "--rounds", "2", "--repeats", "1", *arguments]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    scripts["steps_gpu"].main()


@pytest.mark.slow
def test_every_method_has_a_row_and_so_has_one_image_at_a_time(scripts, monkeypatch, tmp_path, capsys):
    out = tmp_path / "steps.csv"
    methods = list(scripts["training_step"].METHODS)
    run(scripts, monkeypatch, "--method", *methods, "--out", str(out))
    with out.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == methods
    assert all(row["fault"] == "" and float(row["ms"]) > 0 for row in rows)
    assert float(rows[0]["ms_to_bn"]) == float(rows[0]["ms_to_best_bn"]) == 1.0
    assert str(tmp_path) not in out.read_text()
    assert capsys.readouterr().out.count(NAME) == len(rows)


def test_a_method_that_fails_leaves_the_others_their_figures_and_ends_with_1(scripts, monkeypatch, capsys):
    step = scripts["training_step"]
    real = step.build_model

    def build(workload, method):
        if method.norm is not None:
            raise RuntimeError("no such\nkernel")
        return real(workload, method)

    monkeypatch.setattr(step, "build_model", build)
    with pytest.raises(SystemExit) as ended:
        run(scripts, monkeypatch, "--method", "BN", "BCN+WS")
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    assert "RuntimeError: no such kernel" in printed
    assert "'ms_to_bn': '1.000'" in printed


@pytest.mark.parametrize("name", ["BCN+WS", "BCN+WS shared"])
def test_one_image_at_a_time_is_the_same_step(scripts, name):
    step = scripts["training_step"]
    gradients = []
    for method in (name, f"{name} one at a time"):
        taken = step.TrainingStep(step.TINY[1], step.METHODS[method], torch.device("cpu"))
        taken()
        gradients.append(torch.cat([p.grad.flatten() for p in taken.model.parameters()]))
    whole, parts = gradients
    # bfloat16 rounds differently in the two; a sample counted twice or not at all would differ by a quarter
    assert (whole - parts).norm() <= 0.1 * whole.norm()


def test_time_is_divided_by_the_fastest_row_of_the_base(scripts):
    rows = [
        {"method": "BN", "ms": 30.0, "peak_mb": 3000.0},
        {"method": "BN", "ms": 20.0, "peak_mb": 2000.0},
        {"method": "BCN+WS", "ms": 14.0, "peak_mb": 1800.0},
        {"method": "GN", "fault": "out of memory"},
    ]
    scripts["step_rounds"]._compare(rows, "BN", {"ms": "ms_to_bn", "peak_mb": "peak_mb_to_bn"})
    assert (rows[2]["ms_to_bn"], rows[2]["peak_mb_to_bn"]) == (0.7, 0.9)
    assert rows[0]["ms_to_bn"] == 1.5
    assert "ms_to_bn" not in rows[3]


def test_the_command_is_recorded_without_the_path_it_wrote_to(scripts):
    arguments = ["--out", "/home/me/x.csv", "--tiny", "--out=/home/me/y.csv", "--rounds", "3"]
    assert scripts["step_rounds"].without_out(arguments) == ["--tiny", "--rounds", "3"]


@pytest.mark.parametrize(
    "arguments, message", [(["--device", "cuda"], "torch finds no CUDA device"), (["--rounds", "1"], "at least 2")]
)
def test_bad_arguments_are_refused(scripts, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        run(scripts, monkeypatch, *arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_batch_norm_s_network_pools_by_the_same_kernel_as_ours(scripts, monkeypatch):
    step = scripts["training_step"]
    pooled = []
    monkeypatch.setattr(step, "pool_by_kernel", lambda model: pooled.append(type(model).__name__))
    step.build_model(step.TINY[0], step.BN)
    assert pooled == ["ResNet"]
