"""Fused forwards and what they read from outside their modules: globals, and streams of random numbers."""

import random
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import micronorm as mn
from micronorm.convert.outside import globals_of, resolve

FLAG = True
SLOPE = 0.1
TABLE = {"scale": 2.0}
OBJECT = SimpleNamespace(scale=2.0)
IMAGE = torch.randn(2, 3, 6, 6)


class Config:
    scale = 2.0


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.relu(self.bn(self.conv(x))))

    def tail(self, x: Tensor) -> Tensor:
        return x


class ByFlag(Base):
    def tail(self, x: Tensor) -> Tensor:
        return x * 2 if FLAG else x * 3


class BySlope(Base):
    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.bn(self.conv(x)), SLOPE)


class ByTable(Base):
    def tail(self, x: Tensor) -> Tensor:
        return scaled(x)


class ByClass(Base):
    def tail(self, x: Tensor) -> Tensor:
        return x * Config.scale


class ByObject(Base):
    def tail(self, x: Tensor) -> Tensor:
        return x * OBJECT.scale


class ByNumpy(Base):
    def tail(self, x: Tensor) -> Tensor:
        return x * 2 if numpy.random.rand() < 2 else x  # the same branch in each trace


class ByPython(Base):
    def tail(self, x: Tensor) -> Tensor:
        return x * 2 if random.random() < 2 else x


def scaled(x: Tensor) -> Tensor:
    return x * TABLE["scale"]


def converted(kind: type[Base]) -> Any:
    return mn.convert(kind(), norm=mn.BCN(groups=2)).eval()


@pytest.mark.parametrize(
    "kind, name, value",
    [(ByFlag, "FLAG", False), (BySlope, "SLOPE", 0.7), (BySlope, "SLOPE", 1), (ByTable, "TABLE", {"scale": 5.0})],
)
def test_a_fused_forward_sees_that_a_global_has_changed(monkeypatch, kind, name, value):
    model = converted(kind)
    assert "forward" in vars(model)
    before = model(IMAGE)
    assert torch.equal(before, type(model).forward(model, IMAGE))
    monkeypatch.setitem(globals(), name, value)
    after = model(IMAGE)
    assert torch.equal(after, type(model).forward(model, IMAGE))
    assert not torch.equal(after, before)


def test_a_fused_forward_sees_what_was_written_into_a_global(monkeypatch):
    for kind, change in ((ByTable, lambda: TABLE.update(scale=7.0)), (ByClass, lambda: setattr(Config, "scale", 7.0))):
        monkeypatch.setitem(TABLE, "scale", 2.0)
        monkeypatch.setattr(Config, "scale", 2.0)
        model = converted(kind)
        assert "forward" in vars(model)
        before = model(IMAGE)
        change()
        assert torch.equal(model(IMAGE), before * 3.5)


@pytest.mark.parametrize(
    "kind, reason",
    [
        (ByObject, "reads the global OBJECT, a SimpleNamespace"),
        (ByNumpy, "draws random numbers outside its layers"),
        (ByPython, "draws random numbers outside its layers"),
    ],
)
def test_a_forward_that_no_comparison_could_vouch_for_is_left_as_it_is_and_the_plan_says_why(kind, reason):
    plan = mn.plan(kind(), norm=mn.BCN(groups=2))
    assert reason in str(plan)
    assert "forward" not in vars(plan.apply())


def test_the_globals_of_code_are_found_with_their_attributes():
    def function(x):
        inner = [F.relu(x) for _ in range(TABLE["scale"])]
        return torch.nn.functional.relu(x) if FLAG else inner

    names = set(globals_of(function.__code__))
    assert {("F", "relu"), ("torch", "nn", "functional", "relu"), ("FLAG",), ("TABLE",)} <= names
    assert resolve(("torch", "pi"), globals()) == (("torch", "pi"), torch.pi)
    assert resolve(("OBJECT", "scale"), globals()) == (("OBJECT",), OBJECT)
    assert resolve(("range",), globals()) == resolve(("missing",), globals()) == ((), None)
