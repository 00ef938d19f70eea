"""The operators of the kernels for compilers and exporters, and layers that are compiled with them."""

import copy

import pytest
import torch
from torch import nn

import micronorm as mn
from micronorm.ops.activation import check_activation
from micronorm.ops.bcn import batch_channel_norm_fused, elementwise_fused
from micronorm.ops.moments import Moments
from tests.ops.bcn.layers import Case, data, layer_of, outcome, set_scheme
from tests.tolerances import assert_close_to_max, tolerance

CASES = [
    Case((2, 6, 3, 5), 2, "step", "relu", "contiguous"),
    Case((2, 6, 3, 5), 3, "sequential", None, layout="channels_last", blend=0.3),
    Case((2, 6, 7), 2, "batch", "silu"),
]
OPERATORS = torch.ops.micronorm


def arguments(device, *, residual=True, activation="relu", from_batch=False, rows=None, dtype=torch.float32):
    """Of `micronorm::normalize`."""
    x, added = (torch.randn(2, 6, 3, 3, dtype=dtype, device=device).requires_grad_() for _ in range(2))
    mean = torch.randn(*(rows or ()), 6, device=device)
    affine = [torch.randn(n, device=device).requires_grad_() for n in (6, 6, 2, 2)]
    last = (2, 1e-5, activation, 0.01, from_batch)
    return (x, added if residual else None, None, mean, mean.exp(), *affine, None, *last)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(
            {"residual": False, "activation": "silu", "dtype": torch.bfloat16, "from_batch": True},
            marks=pytest.mark.slow,
        ),
        pytest.param({"residual": True, "activation": "identity", "rows": (2,)}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_normalize_passes_opcheck(device, options):
    torch.library.opcheck(OPERATORS.normalize.default, arguments(device, **options))


def test_group_normalization_passes_opcheck(device):
    x, weight, bias = (torch.randn(s, device=device).requires_grad_() for s in ((2, 6, 3), 6, 6))
    args = (x, None, None, None, None, None, None, weight, bias, None, 2, 1e-5, "relu", 0.01, False)
    torch.library.opcheck(OPERATORS.normalize.default, args)


def test_the_other_operators_pass_opcheck(device):
    args = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments(device)]
    x, mean, rest = args[0], args[3], (*args[3:9], *args[10:])  # the blend lies in the numbers
    y, numbers = OPERATORS.normalize(*args)
    g = torch.randn_like(y)
    torch.library.opcheck(OPERATORS.normalize_backward.default, (g, x, y, numbers, *rest))
    norm = layer_of(Case((2, 6, 3, 3), 2), device)
    window = norm._window
    sizes = (2, 6, 9, 2)
    args = (numbers, mean, *sizes, window.sums, window.lost, window.counter)
    torch.library.opcheck(OPERATORS.gather_numbers.default, args)


@pytest.mark.parametrize("statistics, micro_batch", [("batch", None), ("sequential", 1)])
def test_the_operator_of_the_estimates_passes_opcheck(device, statistics, micro_batch):
    norm = layer_of(Case((2, 6, 3, 3), 2, statistics), device)
    window, x = norm._window, torch.randn(2, 6, 3, 3, device=device)
    args = (x, norm.running_mean, norm.running_var, 2, micro_batch, window.lost, window.counter)
    # The other checks compare two runs of the operator, but every run moves the estimates.
    torch.library.opcheck(OPERATORS.estimates_from_input.default, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_layers_give_what_eager_ones_give_without_a_break(device, case):
    norm = layer_of(case, device)
    twin = copy.deepcopy(norm)
    twin.compile(fullgraph=True, backend="aot_eager")
    for _ in range(2):  # the second forward starts from statistics that the first one moved
        inputs = data(case, device)
        expected, found = outcome(norm, *inputs), outcome(twin, *inputs)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            tol, scale = tolerance("one_step", torch.float64), max(1.0, value.abs().max().item())
            assert_close_to_max(found[name], value, tol=tol, scale=scale)


@pytest.mark.parametrize("statistics", ["step", "batch"])
def test_compiled_layers_are_not_recompiled_by_steps_pauses_or_commits(device, statistics):
    graphs = 0

    def counting(graph, _):
        nonlocal graphs
        graphs += 1
        return graph.forward

    norm = mn.nn.BatchChannelNorm(4, 2, statistics=statistics, backend="triton")
    model = nn.Sequential(nn.Conv2d(3, 4, 1), norm).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = mn.attach(model, optimizer)
    compiled = torch.compile(model, fullgraph=True, backend=counting)
    x = torch.randn(2, 3, 3, 3, device=device)
    for _ in range(3):
        compiled(x).sum().backward()
        with handle.paused():
            compiled(x)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.7
    assert graphs == 1


@pytest.mark.skipif(torch.__version__ < "2.7", reason="torch 2.6 exports no gradient across a change of grad mode")
def test_an_exported_graph_has_the_layers_outputs_and_gradients(device):
    case = Case((2, 6, 3, 5), 2, "step", "relu")
    norm = layer_of(case, device)
    twin = copy.deepcopy(norm)  # kept: an exported graph gathers for its layer as long as that lives
    x, _, g = data(case, device)
    exported = torch.export.export(twin, (x.detach(),)).module()
    found, expected = ((y, *torch.autograd.grad(y, x, g)) for y in (exported(x), norm(x)))
    for a, b in zip(found, expected, strict=True):
        assert_close_to_max(a, b, tol=tolerance("one_step", torch.float64))


# --- the functions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("added, scheme", [(True, "whole"), (False, "whole"), (True, "twice"), (False, "split")])
def test_an_output_is_made_again_to_the_bit_from_the_numbers_it_left(device, added, scheme, monkeypatch):
    set_scheme(monkeypatch, scheme)
    x, residual = (torch.randn(2, 6, 3, 5, device=device) for _ in range(2))
    rest = (residual,) if added else ()
    act = check_activation("leaky_relu", 0.2)
    estimates = Moments(torch.zeros(6, device=device), torch.ones(6, device=device))
    affine = [torch.randn(n, device=device) for n in (6, 6, 2, 2)]
    y, numbers = batch_channel_norm_fused(
        x, estimates, *affine, groups=2, activation=act, residual=next(iter(rest), None)
    )
    assert torch.equal(elementwise_fused(x, *rest, numbers, activation=act), y)
