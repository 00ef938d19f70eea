"""The backward by the kernels: whatever gradient it is given, twice, and once more differentiated."""

import copy

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from micronorm.ops.activation import check_activation
from micronorm.ops.bcn import group_norm_fused
from tests.contract.layers import as_function
from tests.ops.bcn.layers import (
    LAYOUTS,
    Case,
    assert_agree,
    data,
    expected_of,
    layer_of,
    outcome,
    poison,
    reference_of,
    set_scheme,
)
from tests.tolerances import assert_close_to_max, tolerance

CASE = Case((2, 6, 4, 5), 2, "step", "relu", "contiguous", "channels_last")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    poison(monkeypatch)


def given(x, g):
    """The same gradient, or one of its own, as autograd may hand it over."""
    one = torch.ones((), dtype=x.dtype, device=x.device)
    return {
        "expanded": one.expand(x.shape),
        "constant over space": g[..., :1, :1].expand(x.shape),
        "constant over samples": g[:1].expand(x.shape),
        **{name: LAYOUTS[name](g) for name in ("contiguous", "channels_last", "sliced", "turned", "samples inside")},
    }


@pytest.mark.parametrize("scheme", ["whole", "twice", "split", "finish"])
def test_a_gradient_may_lie_in_memory_in_any_way(device, scheme, monkeypatch):
    set_scheme(monkeypatch, scheme)
    norm = layer_of(CASE, device)
    x, residual, g = data(CASE, device)
    y = norm(x, residual=residual)
    sources = (x, residual, *norm.parameters())
    names = ("dx", "dresidual", *(f"d{name}" for name, _ in norm.named_parameters()))
    for form in given(x, g).values():
        found = dict(zip(names, torch.autograd.grad(y, sources, form, retain_graph=True), strict=True))
        expected = expected_of(norm, x, residual, form)
        assert_agree(found, {name: expected[name] for name in names})


def test_views_that_are_negated_when_read_are_read_so(device):
    norm = layer_of(CASE, device)
    x, residual, g = data(CASE, device)
    negated = [torch.complex(t.detach(), -t.detach()).conj().imag for t in (x, residual, g)]
    assert all(t.is_neg() for t in negated)
    plain = outcome(copy.deepcopy(norm), x, residual, g)
    x, residual, g = (t.detach().requires_grad_(i < 2) for i, t in enumerate(negated))
    assert_agree(outcome(norm, x, residual, g), plain)


def test_a_backward_may_run_twice_and_gives_the_same_bits(device):
    norm = layer_of(CASE, device)
    x, residual, g = data(CASE, device)
    y = norm(x, residual=residual)
    runs = [torch.autograd.grad(y, (x, residual, *norm.parameters()), g, retain_graph=True) for _ in range(2)]
    assert all(map(torch.equal, *runs))


def test_results_lie_in_memory_as_the_input_does(device):
    norm = layer_of(CASE, device)
    x, residual, g = data(CASE, device)
    y = norm(x, residual=residual)
    (dx,) = torch.autograd.grad(y, x, g)
    assert y.stride() == dx.stride() == x.stride()


def test_an_output_that_no_loss_depends_on_costs_no_backward(device, monkeypatch):
    """The second output, the numbers, has no gradient; where y has none either there is nothing to do."""
    norm = layer_of(CASE, device)
    x, _, _ = data(CASE, device)
    unused, other = norm(x), x.square().sum()
    monkeypatch.setattr("micronorm.ops.bcn.fused.normalize_backward", lambda *args: pytest.fail("it ran"))
    grads = torch.autograd.grad(other, (x, norm.weight), allow_unused=True)
    assert unused.requires_grad
    assert torch.equal(grads[0], 2 * x)
    assert grads[1] is None


def test_frozen_parameters_and_inputs_get_no_gradient(device):
    norm = layer_of(CASE, device)
    x, residual, g = data(CASE, device)
    expected = expected_of(norm, x, residual, g)
    norm.bias.requires_grad_(False)
    norm(x.detach(), residual=residual).backward(g)
    assert norm.bias.grad is None
    assert x.grad is None
    assert_close_to_max(norm.weight.grad, expected["dweight"], tol=tolerance("one_step", torch.float64))


def test_the_sums_over_samples_are_added_in_one_order(device):
    """No atomic additions: the same bits each time, whatever ran before."""
    norm = layer_of(CASE, device, torch.float32)
    x, residual, g = data(CASE, device, torch.float32)
    runs = []
    for _ in range(2):
        y = copy.deepcopy(norm)(x, residual=residual)
        runs.append((y, *torch.autograd.grad(norm(x, residual=residual), (x, *norm.parameters()), g)))
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("scheme", ["whole", "twice", "split"])
def test_a_samples_results_do_not_depend_on_the_others(device, scheme, monkeypatch):
    set_scheme(monkeypatch, scheme)
    norm = layer_of(CASE, device, torch.float32).eval()
    x, residual, g = data(CASE, device, torch.float32)
    for sample in (0, 1):
        other = x.detach().clone()
        other[1 - sample] = torch.randn_like(other[0]) * 100
        other[1 - sample, 0, 0, 0] = torch.inf
        results = []
        for source in (x, other.requires_grad_()):
            y = norm(source, residual=residual)
            results.append((y[sample], torch.autograd.grad(y, source, g)[0][sample]))
        assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case((1, 4, 3), 2, "step", "silu", form="eval"), marks=pytest.mark.slow),
        Case((2, 2, 3), 1, "batch", "leaky_relu", blend=0.6),
    ],
    ids=str,
)
def test_first_and_second_derivatives_agree_with_finite_differences(device, case):
    function, parameters = as_function(layer_of(case, device))
    x = data(case, device)[0]
    assert gradcheck(function, (x, *parameters), fast_mode=True)
    # The kernels have no derivative of their own: the second one is that of the one-pass form.
    if case.form == "eval":
        assert gradgradcheck(function, (x, *parameters), fast_mode=True)


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        Case((2, 2, 4, 5), 1, "sequential", "leaky_relu", "channels_last", blend=0.3),
        Case((2, 2, 4, 5), 1, "batch", None, "contiguous"),
    ],
    ids=str,
)
def test_gradients_do_not_depend_on_create_graph(device, case):
    norm = layer_of(case, device)
    x, residual, g = data(case, device)
    y = norm(x, residual=residual)
    sources = (x, residual, *norm.parameters())
    kept = torch.autograd.grad(y, sources, g, retain_graph=True)
    graphed = torch.autograd.grad(y, sources, g, create_graph=True)
    assert graphed[0].requires_grad
    for a, b in zip(kept, graphed, strict=True):
        assert_close_to_max(a, b, tol=tolerance("one_step", torch.float64), scale=max(1.0, b.abs().max().item()))


# --- group normalization ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, groups, scheme, activation, affine, added",
    [
        ((1, 12, 3, 5), 4, "whole", None, True, False),
        ((2, 12, 3, 5), 2, "pieces", "relu", True, True),
        ((2, 12, 3, 5), 3, "twice", "relu", True, True),
        ((1, 3, 7), 3, "split", "silu", False, False),
        ((2, 8), 1, "whole", "leaky_relu", True, True),
    ],
)
def test_group_normalization_by_the_kernels_is_torchs(
    device, shape, groups, scheme, activation, affine, added, monkeypatch
):
    set_scheme(monkeypatch, scheme)
    act = check_activation(activation, 0.2)
    x, residual, g = (torch.randn(shape, dtype=torch.float64, device=device) for _ in range(3))
    if scheme == "pieces":
        x = x.contiguous(memory_format=torch.channels_last)
    weight, bias = (torch.randn(shape[1], dtype=torch.float64, device=device) if affine else None for _ in range(2))
    sources = [t.requires_grad_() for t in (x, residual if added else None, weight, bias) if t is not None]
    extra = residual if added else None
    ours, _ = group_norm_fused(x, weight, bias, groups=groups, activation=act, residual=extra)
    theirs = torch.group_norm(x, groups, weight, bias)
    theirs = act.apply(theirs + residual if added else theirs)
    found, expected = ((y, *torch.autograd.grad(y, sources, g)) for y in (ours, theirs))
    for a, b in zip(found, expected, strict=True):
        assert_close_to_max(a, b, tol=tolerance("one_step", torch.float64), scale=max(1.0, b.abs().max().item()))
    again, _ = group_norm_fused(x, weight, bias, groups=groups, activation=act, residual=extra)
    gradients = torch.autograd.grad(again, sources, g, create_graph=True)
    for a, b in zip(gradients, expected[1:], strict=True):
        assert_close_to_max(a, b, tol=tolerance("one_step", torch.float64), scale=max(1.0, b.abs().max().item()))


@pytest.mark.parametrize("frozen", ["x", "parameters"])
def test_second_derivatives_of_some_need_no_gradient_of_the_others(device, frozen):
    norm = layer_of(CASE, device)
    x, residual, _ = data(CASE, device)
    norm.requires_grad_(frozen == "x")
    x.requires_grad_(frozen != "x")
    found = []
    for model in (norm, reference_of(norm).to(device)):
        wanted = list(model.parameters()) if frozen == "x" else [x]
        first = torch.autograd.grad(model(x, residual=residual).square().sum(), wanted, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), wanted))
    for a, b in zip(*found, strict=True):
        assert_close_to_max(a, b, tol=tolerance("one_step", torch.float64))
