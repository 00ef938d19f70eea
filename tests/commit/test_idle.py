"""Estimates that never move are noticed after two optimizer steps, with the layer's name and the reason."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.utils import parametrize, prune

import micronorm as mn
from micronorm.commit import idle
from tests.commit.test_hook import assert_estimates, data, layer


def network():
    return nn.ModuleDict({"stem": nn.Conv2d(4, 4, 1), "norm": layer(rate=0.5)}).double()


def sgd(*parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def train(model, optimizer, steps=5, also=lambda x: None):
    for k in range(steps):
        optimizer.zero_grad()
        y = model["stem"](data(seed=k))
        also(y)
        model["norm"](y).sum().backward()
        optimizer.step()


def prune_nothing(norm):
    prune.identity(norm, "weight")


def parametrize_weight(norm):
    parametrize.register_parametrization(norm, "weight", nn.Softplus())


@pytest.mark.parametrize("compute", [prune_nothing, parametrize_weight])
@pytest.mark.parametrize("statistics", ["step", "sequential"])
def test_a_layer_whose_weight_is_computed_moves_like_any_other(compute, statistics):
    norm = layer(rate=0.5, statistics=statistics)
    compute(norm)
    optimizer = torch.optim.SGD(norm.parameters(), lr=0.0)
    handle = mn.attach(norm, optimizer)
    with torch.no_grad():  # as in the first pass of reentrant checkpointing
        norm(x := data(1, 4, 2, 2))
    optimizer.step()
    assert_estimates(norm, [x], 0.5)
    assert handle.report()[0].forwards == 0
    norm.requires_grad_(False)
    norm(data())
    optimizer.step()
    assert_estimates(norm, [x], 0.5)


def replace_weight(model):
    optimizer = sgd(*model.parameters())
    model["norm"].weight = nn.Parameter(model["norm"].weight.detach().clone())
    return optimizer


STALLED = {
    "all of the layer left out": (lambda m: sgd(*m["stem"].parameters()), "no optimizer holds its weight"),
    "weight left out": (
        lambda m: sgd(*(p for name, p in m.named_parameters() if name != "norm.weight")),
        "holds other parameters of the layer, but not its weight",
    ),
    "weight replaced": (replace_weight, "replaced after the optimizer was made"),
}


@pytest.mark.parametrize("make_optimizer, reason", STALLED.values(), ids=STALLED.keys())
def test_a_layer_that_no_optimizer_commits_is_named_once_after_two_steps(make_optimizer, reason):
    model = network()
    optimizer = make_optimizer(model)
    train(model, optimizer, steps=1)
    with pytest.warns(UserWarning, match=rf"^norm: the running estimates do not move.*{reason}") as caught:
        train(model, optimizer)
    assert len(caught) == 1


def test_a_model_that_was_converted_after_its_optimizer_was_made_is_named_once():
    model = nn.ModuleDict({"stem": nn.Conv2d(4, 4, 1), "norm": nn.BatchNorm2d(4)}).double()
    optimizer = sgd(*model.parameters())
    model["norm"] = mn.convert(nn.Sequential(nn.Conv2d(4, 4, 1), model["norm"]))[1]
    with pytest.warns(UserWarning, match=r"^norm: SGD holds weight and bias.*group_weight.*after the conv") as caught:
        train(model, optimizer)
    assert len(caught) == 1


def test_a_group_affine_in_another_optimizer_is_not_named(monkeypatch):
    monkeypatch.setattr(warnings, "warn", lambda *args, **kwargs: pytest.fail(str(args)))
    model = network()
    norm = model["norm"]
    other = sgd(norm.group_weight, norm.group_bias)
    train(model, sgd(*model["stem"].parameters(), norm.weight, norm.bias))
    other.step()


@pytest.mark.parametrize("frozen", [True, False])
def test_a_teacher_in_train_mode_is_named(frozen):
    model = network()
    teacher = copy.deepcopy(model["norm"]).requires_grad_(not frozen)
    with pytest.warns(UserWarning, match=r"the running estimates do not move.*teacher.*average its buffers") as caught:
        train(model, sgd(*model.parameters()), also=lambda y: teacher(y.detach()))
    assert len(caught) == 1


def test_a_compiled_frozen_teacher_is_named_too_and_compiled_once():
    counter = CompileCounter()
    model = network()
    teacher = torch.compile(copy.deepcopy(model["norm"]).requires_grad_(False), backend=counter, fullgraph=True)
    with pytest.warns(UserWarning, match=r"the running estimates do not move.*teacher.*average its buffers") as caught:
        train(model, sgd(*model.parameters()), also=lambda y: teacher(y.detach()))
    ours = [warning for warning in caught if "running estimates" in str(warning.message)]  # compilers warn, too
    assert (len(ours), counter.frame_count) == (1, 1)


def test_what_moves_or_is_meant_to_stay_is_not_named(monkeypatch):
    monkeypatch.setattr(warnings, "warn", lambda *args, **kwargs: pytest.fail(str(args)))
    model = network()
    other, pretrained, inspected, probe = (layer(rate=0.5) for _ in range(4))
    later = sgd(*other.parameters())  # steps once in ten steps, as a generator may beside its critic
    pretrained.requires_grad_(False).running_mean.fill_(1.0)
    inspected(data())
    handle = mn.attach(probe.requires_grad_(False))

    def use(y):
        other(y.detach())
        pretrained(y)
        with handle.paused():
            probe(y)
        layer().eval()(y)

    for _ in range(2):
        train(model, sgd(*model.parameters()), steps=10, also=use)
        later.step()


def test_the_reason_is_searched_for_once(monkeypatch):
    made = []
    find = idle.find_objects
    monkeypatch.setattr(idle, "find_objects", lambda kind: made.append(kind) or find(kind))
    model, other = network(), layer(rate=0.5)
    later = sgd(*other.parameters())
    for _ in range(3):
        train(model, sgd(*model.parameters()), also=lambda y: other(y.detach()))
        later.step()
    assert made == [torch.optim.Optimizer]
