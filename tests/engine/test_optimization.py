"""Schedules are functions of the step's number, and what cannot be meant is refused when it is written down."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from micronorm.engine.optimization import (
    SGD,
    AdamW,
    Constant,
    Cosine,
    Milestones,
    ParameterGroup,
    Poly,
    StepMilestones,
    Warmup,
    build_optimizer,
)


def factors(schedule, *, steps_per_epoch=5, epochs=4):
    run = range(steps_per_epoch * epochs)
    return [schedule.factor(step, steps_per_epoch=steps_per_epoch, total_steps=len(run)) for step in run]


def test_a_constant_rate_stays():
    assert factors(Constant()) == [1.0] * 20


def test_milestones_divide_the_rate_from_their_epoch_on():
    assert factors(Milestones((1, 3), 0.5)) == [1.0] * 5 + [0.5] * 10 + [0.25] * 5
    assert factors(Milestones(())) == [1.0] * 20
    assert factors(Milestones((0.5,)), steps_per_epoch=4, epochs=1) == [1, 1, 0.1, 0.1]


def test_a_cosine_falls_from_one_towards_zero():
    expected = [(1 + math.cos(math.pi * step / 20)) / 2 for step in range(20)]
    assert factors(Cosine()) == pytest.approx(expected, rel=1e-15)


def test_a_cosine_after_a_linear_rise_begins_at_one():
    expected = [(step + 1) / 10 for step in range(10)] + [(1 + math.cos(math.pi * k / 10)) / 2 for k in range(10)]
    assert factors(Cosine(2)) == pytest.approx(expected, rel=1e-15)


def test_poly_is_a_power_of_what_is_left():
    assert factors(Poly(0.9)) == pytest.approx([(1 - step / 20) ** 0.9 for step in range(20)], rel=1e-15)
    assert factors(Poly(1)) == pytest.approx([1 - step / 20 for step in range(20)], rel=1e-15)


def test_milestones_may_be_given_in_steps():
    assert factors(StepMilestones((3, 12), 0.5)) == [1.0] * 3 + [0.5] * 9 + [0.25] * 8


def test_a_linear_warm_up_rises_to_the_schedule_and_a_constant_one_stays_below_it():
    assert factors(Warmup(Constant(), steps=4))[:6] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert factors(Warmup(Constant(), epochs=0.8, start=0.2))[:5] == pytest.approx([0.4, 0.6, 0.8, 1, 1])
    assert factors(Warmup(Milestones((1,)), steps=7, start=0.1, constant=True)) == pytest.approx(
        [0.1] * 5 + [0.01] * 2 + [0.1] * 13
    )


@given(st.floats(0, 6), st.integers(1, 9), st.integers(1, 5), st.floats(0.1, 3))
def test_no_schedule_exceeds_the_rate_or_stops(warmup, steps_per_epoch, epochs, power):
    for schedule in (Cosine(warmup), Poly(power), Milestones((1, 2))):
        values = factors(schedule, steps_per_epoch=steps_per_epoch, epochs=epochs)
        assert all(0 < value <= 1 for value in values), (schedule, values)


def test_optimizers_are_torchs_with_these_values():
    weight = torch.nn.Parameter(torch.ones(2))
    sgd = SGD(0.1, momentum=0.8, weight_decay=1e-3, nesterov=True)([weight], capturable=True)
    assert type(sgd) is torch.optim.SGD
    assert {k: sgd.defaults[k] for k in ("lr", "momentum", "weight_decay", "nesterov", "dampening")} == {
        "lr": 0.1,
        "momentum": 0.8,
        "weight_decay": 1e-3,
        "nesterov": True,
        "dampening": 0,
    }
    adamw = AdamW(1e-3, betas=(0.8, 0.9), weight_decay=0.1, eps=1e-6)([weight], lr=torch.tensor(0.5), capturable=True)
    assert type(adamw) is torch.optim.AdamW
    assert {k: adamw.defaults[k] for k in ("lr", "betas", "weight_decay", "eps")} == {
        "lr": torch.tensor(0.5),
        "betas": (0.8, 0.9),
        "weight_decay": 0.1,
        "eps": 1e-6,
    }


def grouped(*groups, **options):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 2))
    return model, build_optimizer(model, SGD(0.1, weight_decay=1e-3), groups, **options)


def test_each_parameter_is_in_the_first_group_that_matches_it():
    model, optimizer = grouped(
        ParameterGroup(names="2.*", lr_factor=10.0), ParameterGroup(max_ndim=1, weight_decay=0.0)
    )
    assert [group["lr_factor"] for group in optimizer.param_groups] == [10.0, 1.0, 1.0]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [([names[id(p)] for p in g["params"]], g["weight_decay"]) for g in optimizer.param_groups]
    assert found == [
        (["2.weight", "2.bias"], 1e-3),
        (["0.bias", "1.weight", "1.bias"], 0.0),
        (["0.weight"], 1e-3),
    ]


def test_without_groups_an_optimizer_has_one():
    model, optimizer = grouped()
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]


def test_a_group_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match=r"names='head\.\*'.* matches none of the parameters"):
        grouped(ParameterGroup(names="head.*"))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Warmup(Constant()), "needs positive steps or epochs"),
        (lambda: Warmup(Constant(), steps=3, epochs=1), "needs positive steps or epochs"),
        (lambda: Warmup(Constant(), steps=3, start=2.0), "start must lie between 0 and 1"),
        (lambda: Warmup(Constant(), steps=3, constant=True), "above 0 for a constant warm-up"),
        (lambda: ParameterGroup(lr_factor=-1.0), "lr_factor must be a finite number"),
        (lambda: SGD(-0.1), "lr must be a finite number from 0 on, got -0.1"),
        (lambda: SGD(math.nan), "lr must be a finite number"),
        (lambda: SGD(0.1, weight_decay=-1), "weight_decay must"),
        (lambda: SGD(0.1, momentum=1.0), r"momentum must be at least 0 and below 1, got 1\.0"),
        (lambda: SGD(0.1, momentum=0.0, nesterov=True), "nesterov needs a momentum"),
        (lambda: AdamW(math.inf), "lr must"),
        (lambda: AdamW(1e-3, betas=(0.9, 1.0)), "betas must"),
        (lambda: AdamW(1e-3, eps=-1.0), "eps must"),
        (lambda: Milestones((3, 2)), r"and increase, got \(3, 2\)"),
        (lambda: Milestones((2, 2)), "and increase"),
        (lambda: Milestones((0, 2)), "must be positive"),
        (lambda: Milestones((1,), 0.0), "factor_each must"),
        (lambda: Milestones((1,), 1.5), "factor_each must"),
        (lambda: Cosine(-1), "warmup_epochs must not be negative, got -1"),
        (lambda: Cosine(math.nan), "warmup_epochs must"),
        (lambda: Poly(0), "power must be positive"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
