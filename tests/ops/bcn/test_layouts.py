"""The passes give what the reference gives, in every memory layout of the input and of its gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import micronorm as mn
from tests.tolerances import assert_close_to_max, tolerance

TOL = tolerance("gradient", torch.float64)
LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "space first": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "expanded": lambda x: x[:1].expand(x.shape),
}


@given(
    shape=st.tuples(st.integers(1, 5), st.just(4), st.integers(1, 6), st.integers(1, 6)),
    layout=st.sampled_from(sorted(LAYOUTS)),
    g_layout=st.sampled_from(sorted(LAYOUTS)),
    statistics=st.sampled_from(["step", "sequential", "batch"]),
    activation=st.sampled_from([None, "relu"]),
)
@settings(max_examples=60)
def test_every_layout_gives_the_reference(shape, layout, g_layout, statistics, activation):
    x = LAYOUTS[layout](torch.randn(shape, dtype=torch.float64) + 1)
    g = LAYOUTS[g_layout](torch.randn(shape, dtype=torch.float64))
    results = []
    for backend in ("auto", "reference"):
        layer = mn.nn.BatchChannelNorm(4, 2, statistics=statistics, rate=0.3, backend=backend, activation=activation)
        layer._window.warned = True
        x_in = x.detach().requires_grad_()
        y = layer.double()(x_in)
        results.append((y, *torch.autograd.grad(y, (x_in, *layer.parameters()), g), layer.running_var))
    # Groups of one or two elements divide rounding by sqrt(eps), a batch of one element per channel once more.
    alone = statistics == "batch" and shape[0] * shape[2] * shape[3] == 1
    for ours, expected in zip(*results, strict=True):
        scale = max(1e5 if alone else 1e3, float(expected.detach().abs().max()))
        assert_close_to_max(ours, expected, tol=TOL, scale=scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_large_map_keeps_its_digits(dtype):
    """1×4×700×800: sums of half a million elements."""
    x = (torch.randn(1, 4, 700, 800) * 0.1 + 10).to(dtype)
    layer, exact = mn.nn.BatchChannelNorm(4, 2, rate=0.1), mn.nn.BatchChannelNorm(4, 2, rate=0.1).double()
    results = []
    for norm, data in ((layer, x), (exact, x.double())):
        data = data.detach().requires_grad_()
        y = norm(data)
        results.append((y, torch.autograd.grad(y, data, torch.sin(torch.arange(y.numel()).reshape(y.shape)).to(y))[0]))
    for ours, expected in zip(*results, strict=True):
        assert_close_to_max(ours, expected, tol=tolerance("gradient", dtype))
