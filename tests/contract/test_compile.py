"""torch.compile(fullgraph=True) in training: the same numbers, no graph break, no recompilation between steps."""

import copy

import pytest
import torch
from torch import nn

import micronorm as mn
from tests.contract.layers import CHANNELS, NORMS, WEIGHTS, run
from tests.tolerances import assert_close_to_max, tolerance

pytestmark = pytest.mark.slow  # to compile takes seconds per layer

# one standardized layer per kind of forward is enough: the reparameterization is the same code
COMPILED = NORMS + [c for c in WEIGHTS if c.name.endswith(("Conv2d", "ConvTranspose1d", "Linear"))]
BCN = [c for c in NORMS if c.name.startswith("BCN")]


def run_compiled_names(result):
    return {name.removeprefix("_orig_mod."): value for name, value in result.items()}


@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_compiled_training_gives_the_same_without_graph_breaks(case):
    assert_same(case, "aot_eager")


@pytest.mark.parametrize("case", [c for c in BCN if "micro_batch" not in c.name], ids=str)
def test_compiled_training_by_inductor_gives_the_same(case):
    assert_same(case, "inductor")


def assert_same(case, backend):
    layer = case.layer()
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend=backend)
    for _ in range(2):  # the second forward starts from statistics the first one moved
        result, expected = run_compiled_names(run(compiled, case.input())), run(layer, case.input())
        assert result.keys() == expected.keys()
        for name, value in expected.items():
            tol = tolerance("gradient", torch.float64)
            assert_close_to_max(result[name], value, tol=tol, scale=1 + value.abs().max())


@pytest.mark.parametrize("statistics", ["step", "sequential", "batch"])
def test_compiled_layers_are_not_recompiled_by_steps_rates_pauses_or_commits(statistics):
    graphs = 0

    def counting(graph, _):
        nonlocal graphs
        graphs += 1
        return graph.forward

    model = nn.Sequential(nn.Conv2d(3, CHANNELS, 1), mn.nn.BatchChannelNorm(CHANNELS, 4, statistics=statistics))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = mn.attach(model, optimizer)
    compiled = torch.compile(model, fullgraph=True, backend=counting)
    x = torch.randn(2, 3, 4, 4)
    compiled(x).sum().backward()
    first = graphs
    for k in range(5):
        compiled(x).sum().backward()
        if k == 2:
            with handle.paused():
                compiled(x)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.7
    assert graphs == first == 1


def test_compiled_layers_meet_the_guard_too():
    norm = mn.nn.BatchChannelNorm(CHANNELS, 4)
    mn.attach(norm, max_forwards=2)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, CHANNELS, 3, 3)
    compiled(x)
    compiled(x)
    with pytest.raises(RuntimeError, match="has gathered 2 training forwards"):
        compiled(x)


def test_a_compiled_sequential_layer_without_a_learning_rate_raises():
    norm = mn.nn.BatchChannelNorm(CHANNELS, 4, statistics="sequential")
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"mn\.attach"):
        compiled(torch.randn(2, CHANNELS, 3, 3))
