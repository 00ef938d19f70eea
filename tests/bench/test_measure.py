"""Measuring: every contestant, by every route, with what it keeps."""

import pytest
import torch

from micronorm.bench import measure as module
from micronorm.bench.cases import BN, GN, MODES, ON_CPU, OURS, Case, NormMethod, choose_methods
from micronorm.bench.measure import BenchSettings, Contestant, measure, saved_bytes
from micronorm.bench.timing import Inputs

CPU = torch.device("cpu")
CASE = Case((2, 8, 24, 24), "tiny")
SETTINGS = BenchSettings(CPU, torch.float32, ("eager",), 2)


@pytest.fixture(scope="module")
def rows():
    return {row.method.key: row for row in measure(CASE, "nhwc", ON_CPU, SETTINGS)}


def test_every_method_has_a_row_with_its_quartiles(rows):
    assert list(rows) == [method.key for method in ON_CPU]
    for row in rows.values():
        assert (row.fault, row.route, row.layout) == ("", "eager", "nhwc")
        assert 0 < row.time.q25 <= row.time.median <= row.time.q75


def test_ours_and_ours_alone_was_compared_with_float64(rows):
    for row in rows.values():
        assert (row.error is not None) == row.method.is_ours


@pytest.mark.parametrize("mode", MODES)
def test_bcn_with_its_rectifier_saves_one_activation_and_a_few_numbers_per_channel(rows, mode):
    n, c, one = 2, 8, 4 * CASE.elements
    allowed = one + 64 * 8 * n * c
    assert allowed < 2 * one
    assert one <= rows[f"bcn-{mode}"].saved_bytes <= allowed
    assert rows["bn-gn"].saved_bytes >= 2 * one  # the same count does see a second activation


def test_parameters_are_not_counted_as_saved():
    layer = BN.build(8, torch.float32)
    x = torch.randn(2, 8, 3, 3, requires_grad=True)
    counted = saved_bytes(layer, list(layer.parameters()), x)
    assert saved_bytes(layer, [], x) == counted + 4 * 8


def test_a_pass_leaves_no_gradient_behind():
    contestant = Contestant(OURS[0], CASE, SETTINGS)
    x, grad = Inputs(CASE, "nchw", dtype=torch.float32, device=CPU).next()
    contestant.one_pass(x, grad)
    assert x.grad is None
    assert all(parameter.grad is None for parameter in contestant.layer.parameters())


def test_estimates_move_between_rounds_as_an_optimizer_would_move_them():
    contestant = Contestant(OURS[0], CASE, SETTINGS)
    x, grad = Inputs(CASE, "nchw", dtype=torch.float32, device=CPU).next()
    contestant.one_pass(x, grad)
    assert torch.equal(contestant.layer.running_mean, torch.zeros(8))
    contestant.commit()
    expected = 0.1 * x.detach().mean((0, 2, 3))
    assert torch.allclose(contestant.layer.running_mean, expected, atol=1e-6)


def test_what_one_contestant_raises_is_its_own_row_and_no_other_s():
    def broken(channels, dtype):
        raise RuntimeError("no such\nkernel")

    faulty = NormMethod("broken", "Broken", "train", broken)
    rows = list(measure(CASE, "nchw", [faulty, BN], SETTINGS))
    assert [(row.method.key, row.fault) for row in rows] == [("broken", "RuntimeError: no such kernel"), ("bn", "")]


def test_a_route_that_cannot_be_prepared_is_told_by_the_row(monkeypatch):
    def timer(contestant, *rest):
        if contestant.method is GN:
            raise RuntimeError("capture failed")
        return lambda: 1.0

    monkeypatch.setattr(module, "_timer", timer)
    bn, gn = measure(CASE, "nchw", [BN, GN], SETTINGS)
    assert (bn.time.median, bn.fault) == (1.0, "")
    assert (gn.time, gn.fault) == (None, "RuntimeError: capture failed")


def test_the_floor_is_told_where_the_bandwidth_is_known():
    settings = BenchSettings(CPU, torch.bfloat16, ("eager",), 2, bandwidth=1e9)
    (row,) = measure(CASE, "nchw", [OURS[0]], settings)
    assert row.floor_ms == pytest.approx(1e3 * 5 * 2 * CASE.elements / 1e9)
    assert row.floors == row.time.median / row.floor_ms


def test_methods_take_turns_in_every_round(monkeypatch):
    order = []
    monkeypatch.setattr(module, "_timer", lambda contestant, *rest: lambda: order.append(contestant.method.key) or 1.0)
    list(measure(CASE, "nchw", [BN, GN, OURS[0]], SETTINGS))
    rounds = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert len(rounds) == module.WARM_UP + SETTINGS.rounds
    assert all(sorted(r) == ["bcn-step", "bn", "gn"] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_on_a_gpu_every_contestant_runs_by_both_routes(layout):
    methods = choose_methods([], on_gpu=True)
    settings = BenchSettings(torch.device("cuda"), torch.bfloat16, ("graph", "eager"), 2, bandwidth=1e12)
    rows = list(measure(Case((4, 32, 16, 16), ""), layout, methods, settings))
    assert {(row.method.key, row.route) for row in rows} == {(m.key, r) for m in methods for r in settings.routes}
    assert [(row.method.key, row.route, row.fault) for row in rows if row.fault] == []
    assert all(row.peak_bytes > 0 for row in rows)


@pytest.mark.parametrize("large, passes", [(False, module.GRAPH_PASSES), (True, 1)])
def test_short_passes_are_captured_many_in_a_graph_and_divided_by_their_number(monkeypatch, large, passes):
    captured = []

    def capture(one_pass, passes):
        one_pass()
        captured.append(passes)
        return one_pass

    monkeypatch.setattr(module, "warm_up", lambda one_pass: captured.append("warm"))
    monkeypatch.setattr(module, "Captured", capture)
    monkeypatch.setattr(module, "device_ms", lambda call, repeats=1: 0.5 if repeats == 1 else 8.0)
    monkeypatch.setattr(module, "LARGE", 1 if large else 1e9)
    settings = BenchSettings(torch.device("cuda"), torch.float32, ("graph",), 2)
    contestant = Contestant(BN, CASE, SETTINGS)
    inputs = Inputs(CASE, "nchw", dtype=torch.float32, device=CPU)
    timer = module._timer(contestant, "graph", inputs, settings)
    assert captured == ["warm", passes]
    assert timer() == 8.0 / passes
