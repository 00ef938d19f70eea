"""Who drew random numbers: the call itself or one of its children."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from micronorm.check.runs import named_members
from micronorm.check.trace import Tracer

DRAWS = {"torch": lambda: torch.rand(1), "numpy": lambda: np.random.rand(), "random": random.random}


class Draws(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        self.draw()
        return x


class Between(nn.Module):
    """Code of its own after a child."""

    def __init__(self, child, draw):
        super().__init__()
        self.child, self.draw = child, draw

    def forward(self, x):
        x = self.child(x)
        self.draw()
        return x


def nothing():
    return None


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
@pytest.mark.parametrize("by_child, by_parent", [(False, False), (True, False), (False, True), (True, True)])
def test_random_numbers_are_put_down_to_the_call_whose_own_code_drew_them(draw, by_child, by_parent):
    model = Between(Draws(draw if by_child else nothing), draw if by_parent else nothing)
    tracer = Tracer(named_members(model, None), [])
    with tracer.part(2) as trace:
        model(torch.ones(2, 3))
    (parent,) = trace.calls("model")
    (child,) = trace.calls("child")
    assert (child.draws, parent.draws, trace.root.draws) == (by_child, by_parent, False)
    tracer.close()
    assert not model._forward_hooks
