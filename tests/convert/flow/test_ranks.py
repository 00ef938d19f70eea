import pytest
import torch
from torch import Tensor, nn

import micronorm as mn
from micronorm.convert.flow import trace_flow
from micronorm.convert.flow.ranks import ranks


class Model(nn.Module):
    """A layer behind a function of the input."""

    def __init__(self, function) -> None:
        super().__init__()
        self.conv, self.end, self.function = nn.Conv2d(3, 3, 1), nn.Identity(), function

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.function(self.conv(x), x))


def rank_before_the_end(model: nn.Module, **options) -> int | None:
    flow = trace_flow(model, lambda module: False, pairs=lambda *_: False, **options)
    (end,) = flow.calls[model.get_submodule("end")]
    return ranks(flow).get(end)


FUNCTIONS = {
    "a convolution": (lambda y, x: y, 4),
    "an activation": (lambda y, x: y.relu(), 4),
    "a sum": (lambda y, x: y + y.sigmoid(), 4),
    "flattened": (lambda y, x: y.flatten(1), 2),
    "flattened to tokens": (lambda y, x: y.flatten(2).transpose(1, 2), 3),
    "batch and channels flattened": (lambda y, x: y.flatten(0, 1), 3),
    "all flattened": (lambda y, x: y.flatten(), 1),
    "reshaped": (lambda y, x: y.reshape(x.shape[0], 3, -1), 3),
    "reshaped by a tuple": (lambda y, x: y.reshape((x.shape[0], -1)), 2),
    "reshaped and back": (lambda y, x: y.flatten(1).reshape_as(y), 4),
    "pooled": (lambda y, x: torch.nn.functional.adaptive_avg_pool2d(y, 1), 4),
}
UNKNOWN = {
    "the input": lambda y, x: x,
    "a sum with the input": lambda y, x: y + x,
    "reshaped to a size": lambda y, x: y.view(x.shape),
    "averaged": lambda y, x: y.mean(2),
    "a negative axis flattened": lambda y, x: y.flatten(-2),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_rank_follows_from_the_calls(name):
    function, rank = FUNCTIONS[name]
    assert rank_before_the_end(Model(function)) == rank


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_rank_that_is_not_certain_is_not_claimed(name):
    assert rank_before_the_end(Model(UNKNOWN[name])) is None


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions_norms_and_pools_say_their_rank(dims):
    layers = [getattr(nn, f"{kind}{dims}d") for kind in ("Conv", "BatchNorm", "MaxPool")]
    model = nn.Sequential(layers[0](3, 4, 1), layers[1](4), nn.SiLU(), layers[2](2), mn.nn.BatchChannelNorm(4))
    model.add_module("end", nn.Dropout())
    flow = trace_flow(model, lambda module: isinstance(module, mn.nn.BatchChannelNorm), pairs=lambda *_: False)
    assert [ranks(flow)[flow.calls[module][0]] for module in model] == [dims + 2] * 6


def test_a_run_knows_every_rank():
    def function(y: Tensor, x: Tensor) -> Tensor:
        return y.mean(2) if x.sum() < 1e9 else y

    assert rank_before_the_end(Model(function), example_inputs=torch.zeros(2, 3, 4, 4)) == 3
