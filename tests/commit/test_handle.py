"""`attach` and its handle."""

from typing import Any

import pytest
import torch
from torch import nn

import micronorm as mn
from tests.commit.test_hook import assert_estimates, data, layer


@pytest.fixture
def model():
    return nn.Sequential(nn.Conv2d(3, 4, 1), mn.nn.BatchChannelNorm(4, 2)).double()


def test_commit_moves_the_estimates_of_a_loop_without_an_optimizer():
    norm = layer()
    handle = mn.attach(norm, rate=0.25)
    x = data()
    norm(x)
    handle.commit()
    assert_estimates(norm, [x], 0.25)
    handle.commit()
    assert_estimates(norm, [x], 0.25)


def test_a_commit_after_the_optimizers_own_changes_nothing():
    norm = layer()
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.5)
    handle = mn.attach(norm, optimizer)
    x = data()
    norm(x)
    optimizer.step()
    handle.commit()
    assert_estimates(norm, [x], 0.5)


def test_a_manual_commit_keeps_the_window_of_a_layer_frozen_in_mid_window():
    norm = layer(rate=0.25)
    handle = mn.attach(norm)
    handle.commit()  # the rate is on the device now
    norm(data())
    norm.weight.requires_grad_(False)
    handle.commit()
    assert torch.equal(norm.running_mean, torch.zeros(4, dtype=torch.float64))
    norm.weight.requires_grad_(True)
    handle.commit()
    assert_estimates(norm, [data()], 0.25)


def test_a_manual_commit_without_any_rate_names_the_ways_out():
    handle = mn.attach(layer())
    with pytest.raises(RuntimeError, match=r"attach\(model, optimizer\).*rate="):
        handle.commit()


def test_discard_forgets_a_step_that_was_interrupted():
    norm = layer(rate=0.5)
    handle = mn.attach(norm)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.0)
    norm(data(seed=1))
    with pytest.raises(ZeroDivisionError):
        norm(data(seed=2)).sum().div(1 // 0)
    handle.discard()
    norm(data())
    optimizer.step()
    assert_estimates(norm, [data()], 0.5)


@pytest.mark.parametrize("statistics", ["step", "sequential", "batch"])
def test_paused_forwards_leave_no_trace(statistics):
    norm = layer(rate=0.5, statistics=statistics)
    handle = mn.attach(norm)
    with handle.paused(), handle.paused():
        norm(data(seed=1))
    assert torch.equal(norm.running_mean, torch.zeros(4, dtype=torch.float64))
    assert not norm._window.sums.any()
    norm(data())
    assert norm._window.forwards == 1


def test_evaluation_in_the_middle_of_a_window_is_not_gathered():
    norm = layer(rate=0.5)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.0)
    norm(data(seed=1))
    norm.eval()
    norm(data(seed=2))
    norm.train()
    norm(data(seed=3))
    optimizer.step()
    assert_estimates(norm, [data(seed=1), data(seed=3)], 0.5)


def test_the_report_names_layers_and_says_how_far_back_estimates_look(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    handle = mn.attach(model, optimizer)
    model(torch.randn(2, 3, 4, 4, dtype=torch.float64))
    report = handle.report()
    row = report[0]
    assert (row.name, row.statistics, row.rate, row.steps) == ("1", "step", 0.02, 50)
    assert (row.forwards, row.elements) == (1, 32)
    assert "0.02" in str(report)
    assert "50" in str(report)


def test_the_rate_of_an_optimizer_that_is_not_attached_is_known_from_its_first_step_on():
    norm = layer()
    handle = mn.attach(norm)
    unknown = handle.report()[0]
    assert (unknown.rate, unknown.steps) == (None, None)
    assert "no step yet" in str(handle.report())
    for lr in (0.02, 0.0, torch.tensor(0.5)):
        optimizer = torch.optim.SGD(norm.parameters(), lr=lr)
        norm(data())
        optimizer.step()
        assert handle.report()[0].rate == lr


@pytest.mark.parametrize("name", ["a", "a_name_longer_than_its_heading"])
def test_the_columns_of_the_report_stand_under_their_headings(name):
    head, line = str(mn.attach(nn.ModuleDict({name: layer()}), rate=0.05).report()).splitlines()
    for heading, entry in (("statistics", "step"), ("rate", "0.05"), ("1/rate = steps", "20"), ("lost", "0 samples")):
        assert line.startswith(entry, head.index(heading))


def test_a_handle_names_its_layers_and_says_if_it_is_detached(model):
    several = mn.attach(nn.Sequential(*(layer() for _ in range(5))))
    assert repr(several) == "<Handle of BatchChannelNorm layers 0, 1, 2, …>"
    handle = mn.attach(model)
    handle.detach()
    assert repr(handle) == "<Handle of BatchChannelNorm layers 1; detached>"


def test_weights_of_zero_are_named_in_one_warning_where_nothing_waits_for_the_device():
    norms = [layer() for _ in range(6)]
    model = nn.Sequential(*norms)
    for norm in norms[:5]:
        nn.init.zeros_(norm.weight)
    with pytest.warns(UserWarning, match=r"0, 1, 2, 3 and 1 more is all zero.*set group_weight to zero") as attached:
        handle = mn.attach(model)
    with pytest.warns(UserWarning, match="is all zero") as reported:
        handle.report()
    assert len(attached) == len(reported) == 1
    model(data())  # a forward warns of nothing
    model[:5].requires_grad_(False)  # what is frozen at zero stays there
    handle.report()


def test_the_report_of_a_rate_of_zero_looks_back_forever():
    assert mn.attach(layer(), rate=0.0).report()[0].steps == float("inf")


def test_detach_restores_what_was_before(model):
    norm = model[1]
    first = mn.attach(model, rate=0.5, max_forwards=7)
    second = mn.attach(model, rate=0.25)
    assert norm._window.rate == 0.25
    second.detach()
    assert (norm._window.rate, norm._window.control.max_forwards) == (0.5, 7)
    first.detach()
    assert norm._window.rate == "lr"


def test_detaching_out_of_order_leaves_nothing_in_force(model):
    first, second = mn.attach(model, rate=0.5), mn.attach(model, rate=0.25)
    first.detach()
    second.detach()
    assert model[1]._window.rate == "lr"
    second.detach()  # again: nothing


def test_controls_of_deleted_handles_do_not_pile_up(model):
    norm = model[1]
    kept = mn.attach(model, rate=0.125)
    for _ in range(50):
        mn.attach(model, rate=0.25)
    assert len(norm._window.controls) <= 2
    last = mn.attach(model, rate=0.5)
    last.detach()
    assert norm._window.rate == 0.25  # its handle is gone, so it stays in force
    kept.detach()
    assert norm._window.rate == 0.25


def test_layers_that_need_no_rate_need_no_optimizer_to_commit():
    model = nn.Sequential(layer(statistics="batch"), layer())
    model[1].weight.requires_grad_(False)
    handle = mn.attach(model)
    model(data())
    handle.commit()
    assert handle.report()[0].rate == 0.1  # BatchNorm's momentum


def test_the_learning_rate_is_found_again_when_groups_are_rearranged():
    norm, other = layer(statistics="sequential"), nn.Linear(2, 2)
    groups = [{"params": other.parameters(), "lr": 0.9}, {"params": norm.parameters(), "lr": 0.25}]
    optimizer = torch.optim.SGD(groups)
    mn.attach(norm, optimizer)
    current: Any = norm._window.control.learning_rate
    assert current() == 0.25
    optimizer.param_groups.reverse()
    assert current() == 0.25
    optimizer.param_groups.pop()
    assert current() == 0.25


def test_only_the_attached_optimizer_commits(model):
    norm = model[1]
    mine, other = (torch.optim.SGD(model.parameters(), lr=0.5) for _ in range(2))
    handle = mn.attach(model, mine)
    model(torch.randn(2, 3, 4, 4, dtype=torch.float64))
    other.step()
    assert norm._window.forwards == 1
    mine.step()
    assert norm._window.forwards == 0
    handle.detach()
    model(torch.randn(2, 3, 4, 4, dtype=torch.float64))
    other.step()
    assert norm._window.forwards == 0


def test_several_optimizers_may_be_attached():
    model = nn.Sequential(layer(statistics="sequential"), layer(statistics="sequential"))
    optimizers = [torch.optim.SGD(part.parameters(), lr=lr) for part, lr in zip(model, (0.5, 0.25), strict=True)]
    mn.attach(model, optimizers)
    x = data(1, 4, 2, 2)
    model[0](x)
    model[1](x)
    assert_estimates(model[0], [x], 0.5)
    assert_estimates(model[1], [x], 0.25)


def test_an_optimizer_that_dropped_the_weight_is_reported():
    norm = layer(statistics="sequential")
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.5)
    mn.attach(norm, optimizer)
    norm.weight = nn.Parameter(norm.weight.detach().clone())
    with pytest.raises(
        RuntimeError, match=r"no attached optimizer holds the weight of BatchChannelNorm any more.*attach again"
    ):
        norm(data())


def test_bad_arguments_are_refused_with_their_value_and_the_fix(model):
    with pytest.raises(ValueError, match=r"Sequential holds no BatchChannelNorm among its 2 modules"):
        mn.attach(nn.Sequential(nn.ReLU()))
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"holds 2 parameters, but the weight of none.*'1'.*model\.parameters\(\)"):
        mn.attach(model, stranger)
    for rate in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
            mn.attach(model, rate=rate)
    with pytest.raises(TypeError, match="'fast'"):
        mn.attach(model, rate="fast")
    with pytest.raises(ValueError, match="max_forwards"):
        mn.attach(model, max_forwards=0)
    with pytest.raises(TypeError, match="optimizer must be"):
        mn.attach(model, 3)  # type: ignore[arg-type]
    assert model[1]._window.control.name == ""  # nothing half-done was left behind
