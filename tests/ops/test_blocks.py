"""Passes in blocks give what passes in one piece give, wherever the blocks are cut."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import micronorm as mn
from micronorm.functional import moments
from micronorm.ops import blocks
from tests.tolerances import assert_close_to_max, tolerance

TOL = tolerance("gradient", torch.float64)
LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "space first": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "expanded": lambda x: x[:1].expand(x.shape),
}


def test_a_cut_covers_the_tensor_in_blocks_of_the_size_asked_for(monkeypatch):
    monkeypatch.setattr(blocks, "_BLOCK", 12)
    x = torch.arange(5 * 3 * 7).reshape(5, 3, 7)
    parts = blocks.blocks(x, blocks.cuts_of(x))
    assert torch.equal(torch.cat([p.flatten() for p in parts]).sort().values, x.flatten())
    assert max(p.numel() for p in parts) <= 12
    assert len(parts) > 5


@given(
    shape=st.tuples(st.integers(1, 5), st.just(4), st.integers(1, 6), st.integers(1, 6)),
    size=st.sampled_from([1, 5, 16, 40]),
    layout=st.sampled_from(sorted(LAYOUTS)),
    g_layout=st.sampled_from(sorted(LAYOUTS)),
    statistics=st.sampled_from(["step", "sequential", "batch"]),
    activation=st.sampled_from([None, "relu"]),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_blocks_of_any_size_give_the_reference(monkeypatch, shape, size, layout, g_layout, statistics, activation):
    monkeypatch.setattr(blocks, "_BLOCK", size)
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_moments_of_blocks_that_cut_through_space_are_pooled_by_their_size(monkeypatch, layout):
    monkeypatch.setattr(blocks, "_BLOCK", 6)
    x = LAYOUTS[layout](torch.randn(2, 3, 11, dtype=torch.float64) + 5)
    with torch.no_grad():
        mean, var = moments(x)
    assert_close_to_max(mean, x.mean(2), tol=TOL)
    assert_close_to_max(var, x.var(2, correction=0), tol=TOL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_map_of_many_blocks_keeps_the_digits_of_one(dtype):
    """1×4×700×800: more than one block of the real size, and sums of half a million elements."""
    x = (torch.randn(1, 4, 700, 800) * 0.1 + 10).to(dtype)
    layer, exact = mn.nn.BatchChannelNorm(4, 2, rate=0.1), mn.nn.BatchChannelNorm(4, 2, rate=0.1).double()
    results = []
    for norm, data in ((layer, x), (exact, x.double())):
        data = data.detach().requires_grad_()
        y = norm(data)
        results.append((y, torch.autograd.grad(y, data, torch.sin(torch.arange(y.numel()).reshape(y.shape)).to(y))[0]))
    for ours, expected in zip(*results, strict=True):
        assert_close_to_max(ours, expected, tol=tolerance("gradient", dtype))
