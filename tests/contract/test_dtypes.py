"""Every dtype against float64 of the rounded input, by the one tolerance table; autocast; narrow layers."""

import copy

import pytest
import torch
from torch import nn

from tests.contract.layers import ALL, NORMS, OURS, WEIGHTS, run
from tests.tolerances import assert_close_to_max, tolerance

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.parametrize("case", OURS + WEIGHTS, ids=str)
@dtypes
def test_every_dtype_agrees_with_float64_of_the_rounded_input(case, dtype):
    layer = case.layer(dtype)
    exact = copy.deepcopy(layer).double()
    x = case.input(dtype)
    y = exact(x.double())
    exact = copy.deepcopy(layer).double()
    torch.manual_seed(2)
    g = torch.randn(y.shape, dtype=torch.float64).to(dtype)
    result, expected = run(layer, x, g), run(exact, x.double(), g.double())
    assert result["y"].dtype == result["x.grad"].dtype == dtype
    for name, value in expected.items():
        operation = "gradient" if name.endswith(".grad") else "output"
        # statistics are float32 whatever the activations are
        kind = torch.float32 if name.startswith(("running", "before")) else dtype
        # a convolution in half precision accumulates and rounds by torch's own rules, one eps per operand more
        slack = 2.0 if case in WEIGHTS and dtype != torch.float32 else 1.0
        assert_close_to_max(result[name], value, tol=tolerance(operation, kind, condition=slack))


@pytest.mark.parametrize("case", ALL, ids=str)
def test_autocast_computes_statistics_and_standardized_weights_in_float32(case):
    layer = case.layer(torch.float32)
    expected = copy.deepcopy(layer)(case.input(torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(case.input(torch.float32))
    y.float().sum().backward()
    assert_close_to_max(y.detach(), expected.detach(), tol=8 * torch.finfo(torch.bfloat16).eps)
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in layer.parameters())
    if case in WEIGHTS:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(layer.effective_weight(), copy.deepcopy(layer).effective_weight())
            assert layer.effective_weight().dtype == torch.float32


@pytest.mark.parametrize("case", OURS, ids=str)
def test_half_leaves_the_statistics_in_float32_and_double_widens_them(case):
    layer = case.layer(torch.float32)
    running = {n: b.clone() for n, b in layer.named_buffers() if b.is_floating_point()}
    for narrow in (torch.float16, torch.bfloat16):
        layer.to(narrow)
        assert all(p.dtype == narrow for p in layer.parameters())
        for name, value in running.items():
            assert torch.equal(layer.get_buffer(name), value)
    layer.double()
    assert all(layer.get_buffer(name).dtype == torch.float64 for name in running)


@pytest.mark.parametrize("case", NORMS + WEIGHTS, ids=str)
def test_half_inputs_with_a_mean_of_their_own_keep_their_spread(case):
    """bfloat16 near 64 counts in halves: the layer must not lose more than the input did."""
    if case.torchs_own:
        pytest.skip("torch's own arithmetic")
    x = (case.input() + 64).to(torch.bfloat16)
    layer = case.layer(torch.float32)
    exact = copy.deepcopy(layer).double()(x.double())
    y = layer.to(torch.bfloat16)(x) if case in WEIGHTS else layer(x)
    if isinstance(layer, nn.Module) and case in WEIGHTS:
        exact = copy.deepcopy(layer).double()(x.double())
    # the products of a convolution are of the size of the mean, whatever cancels between them
    scale = 64.0 * 4 if case in WEIGHTS else None
    assert_close_to_max(y.detach(), exact.detach(), tol=tolerance("output", torch.bfloat16), scale=scale)
