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
def steps():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("steps_gpu")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def run(steps, monkeypatch, *arguments: str) -> None:
    command = ["steps_gpu.py", "--device", "cpu", "--tiny", "--workload", NAME, "--rounds", "2", *arguments]
    monkeypatch.setattr(sys, "argv", command)
    before = torch.backends.cudnn.benchmark
    try:
        steps.main()
    finally:
        torch.backends.cudnn.benchmark = before


@pytest.mark.slow
def test_every_method_has_a_row_and_so_has_one_image_at_a_time(steps, monkeypatch, tmp_path, capsys):
    out = tmp_path / "steps.csv"
    run(steps, monkeypatch, "--no-compile", "--out", str(out))
    with out.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    expected = [("step", method.name) for method in steps.chosen_methods("both")] + [("literal", "BCN+WS")]
    assert [(row["what"], row["method"]) for row in rows] == expected
    assert all(row["fault"] == "" and float(row["ms"]) > 0 for row in rows)
    assert float(rows[0]["to_bn_best"]) == 1.0
    assert float(rows[-1]["batched_over_literal"]) > 0
    assert str(tmp_path) not in out.read_text()
    assert capsys.readouterr().out.count(NAME) >= 2 * len(rows)


def test_statistics_are_compared_with_those_of_the_step(steps, monkeypatch, capsys):
    run(steps, monkeypatch, "--statistics", "step", "batch", "sequential")
    printed = capsys.readouterr().out
    for name in ("batch", "sequential"):
        assert f'{NAME}, eager: "{name}" ' in printed
    assert "literal" not in printed


def test_a_method_of_ours_that_fails_leaves_the_others_their_figures_and_ends_with_1(steps, monkeypatch, capsys):
    step = importlib.import_module("training_step")
    real = step.build_model

    def build(workload, method):
        if method.is_ours:
            raise RuntimeError("no such\nkernel")
        return real(workload, method)

    monkeypatch.setattr(step, "build_model", build)
    with pytest.raises(SystemExit) as ended:
        run(steps, monkeypatch, "--no-compile", "--no-literal", "--weights", "plain")
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    assert "RuntimeError: no such kernel" in printed
    assert "img/s" in printed


@pytest.mark.parametrize("weights", ["PLAIN", "SHARED"])
def test_one_image_at_a_time_is_the_same_step(steps, weights):
    workload = steps.TINY[1]
    gradients = []
    for way in ("__call__", "literal"):
        step = steps.TrainingStep(workload, getattr(steps, weights), torch.device("cpu"))
        getattr(step, way)()
        gradients.append(torch.cat([p.grad.flatten() for p in step.model.parameters()]))
    whole, parts = gradients
    # bfloat16 rounds differently in the two; a sample counted twice or not at all would differ by a quarter
    assert (whole - parts).norm() <= 0.1 * whole.norm()


def result(steps, method, route, ms, peak=None, what="step"):
    return steps.StepTiming(steps.WORKLOADS[0], method, route, what, ms=(ms, ms, ms), peak=peak)


def test_time_is_divided_by_batch_norm_s_best_and_memory_by_its_own_route(steps):
    rows = [
        result(steps, steps.BN, "eager", 30.0, 3000),
        result(steps, steps.BN, "graph", 20.0, 2000),
        result(steps, steps.BN_COMPILED, "graph", 16.0, 1500),
        result(steps, steps.PLAIN, "graph", 14.0, 1800),
        result(steps, steps.PLAIN, "eager", 60.0, 2400),
        result(steps, steps.PLAIN, "graph", 1400.0, what="literal"),
    ]
    steps.compare(rows)
    assert rows[3].ratios == {"to_bn_best": 14 / 16, "to_bn": 0.7, "peak_to_bn": 0.9}
    assert rows[3].bn_best == "BN compiled, graph"
    assert rows[4].ratios == {"to_bn_best": 60 / 16, "to_bn": 2.0, "peak_to_bn": 0.8}
    assert rows[5].ratios == {"batched_over_literal": 100.0}


def test_the_command_is_recorded_without_the_path_it_wrote_to(steps):
    arguments = ["--out", "/home/me/x.csv", "--tiny", "--out=/home/me/y.csv", "--rounds", "3"]
    assert importlib.import_module("step_rounds").without_out(arguments) == ["--tiny", "--rounds", "3"]


@pytest.mark.parametrize(
    "arguments, message", [([], "torch finds no CUDA device"), (["--device", "cpu", "--rounds", "1"], "at least 2")]
)
def test_bad_arguments_are_refused(steps, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        steps.parse_arguments(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_both_are_compiled_once_for_all_routes_while_the_budget_lasts(steps, monkeypatch, capsys):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: compiled.append(dynamic) or model)
    monkeypatch.setattr(steps, "chosen_methods", lambda weights, statistics: [steps.BN])
    run(steps, monkeypatch, "--no-literal")
    assert compiled == [False, False]
    printed = capsys.readouterr().out
    assert "BN compiled" in printed
    assert "BCN+WS shared compiled" in printed
    run(steps, monkeypatch, "--no-literal", "--budget", "0")
    assert compiled == [False, False]
    assert f"{NAME}: not compiled, 0 s are over" in capsys.readouterr().out


def test_the_report_lists_plain_loops_first_then_captured_steps_then_single_images(steps):
    results = [
        result(steps, steps.PLAIN, "graph", 1.0, what="literal"),
        result(steps, steps.BN, "graph", 1.0),
        result(steps, steps.BN, "eager", 1.0),
    ]
    assert [(r.what, r.route) for r in steps.eager_first(results)] == [
        ("step", "eager"),
        ("step", "graph"),
        ("literal", "graph"),
    ]


def test_batch_norm_s_network_pools_by_the_same_kernel_as_ours(steps, monkeypatch):
    step = importlib.import_module("training_step")
    pooled = []
    monkeypatch.setattr(step, "pool_by_kernel", lambda model: pooled.append(type(model).__name__))
    step.build_model(steps.TINY[0], steps.BN)
    assert pooled == ["ResNet"]
