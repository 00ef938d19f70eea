"""Weight standardization and its relatives, against the equations, timm and each other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import micronorm as mn
from micronorm.functional import centered_weight_normalize, weight_normalize, weight_standardize
from tests.tolerances import assert_close_to_max

shapes = st.sampled_from([(3, 2), (4, 5, 3), (2, 3, 3, 3), (2, 2, 1, 2, 3)])
eps_values = st.sampled_from([0.0, 1e-8, 1e-5, 1e-2, 1.0])


def weight(shape, *, mean=0.3, std=0.7):
    return torch.randn(shape, dtype=torch.float64) * std + mean


@given(shape=shapes, eps=eps_values)
def test_a_standardized_row_sums_to_zero_and_its_squares_to_the_fan_in(shape, eps):
    w = weight(shape)
    rows, fan_in = weight_standardize(w, eps=eps).flatten(1), w[0].numel()
    var = w.flatten(1).var(1, correction=0)
    assert_close_to_max(rows.sum(1), torch.zeros(shape[0]), tol=1e-13, scale=fan_in)
    assert_close_to_max(rows.square().sum(1), fan_in * var / (var + eps), tol=1e-13)


@given(shape=shapes, eps=eps_values, shift=st.floats(-10, 10), factor=st.floats(0.01, 100))
def test_it_is_invariant_to_shifts_always_and_to_scale_without_eps(shape, eps, shift, factor):
    w = weight(shape)
    assert_close_to_max(weight_standardize(w + shift, eps=eps), weight_standardize(w, eps=eps), tol=1e-12)
    assert_close_to_max(weight_standardize(w * factor, eps=0.0), weight_standardize(w, eps=0.0), tol=1e-12)


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("scale", [True, False])
def test_center_and_scale_are_the_papers_two_equations(center, scale):
    w = weight((4, 3, 3, 3))
    rows = w.flatten(1)
    expected = rows - rows.mean(1, keepdim=True) if center else rows
    if scale:
        expected = expected / (expected.square().mean(1, keepdim=True) + 1e-5).sqrt()
    assert_close_to_max(weight_standardize(w, center=center, scale=scale).flatten(1), expected, tol=1e-14)


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("scale", [True, False])
def test_the_backward_is_the_closed_form(center, scale):
    """Labels eq:12 and eq:13, with the mean of g·Ŵ where the paper writes ⟨Ŵ, g⟩/I."""
    w = weight((4, 6)).requires_grad_()
    g = torch.randn_like(w)
    out = weight_standardize(w, center=center, scale=scale)
    (dw,) = torch.autograd.grad(out, w, g)
    spread = w.var(1, correction=0, keepdim=True) if center else w.square().mean(1, keepdim=True)
    sigma = (spread + 1e-5).sqrt() if scale else torch.ones(4, 1)
    expected = g - g.mean(1, keepdim=True) if center else g
    expected = (expected - out * (g * out).mean(1, keepdim=True)) / sigma if scale else expected
    assert_close_to_max(dw, expected.detach(), tol=1e-13)


@given(mean=st.sampled_from([1.0, 100.0, 1e4]), seed=st.integers(0, 5))
@settings(max_examples=15)
def test_float32_rows_far_from_zero_keep_their_digits(mean, seed):
    torch.manual_seed(seed)
    w = (torch.randn(4, 50) * 0.1 + mean).float()
    exact = weight_standardize(w.double())
    # the subtraction of a mean that float32 cannot hold is exact: only the products round
    assert_close_to_max(weight_standardize(w), exact, tol=8 * torch.finfo(torch.float32).eps)


def test_it_equals_timms_standardized_convolution_at_matched_eps():
    timm_layers = pytest.importorskip("timm.layers")
    theirs = timm_layers.StdConv2d(6, 8, 3, padding=1, groups=2, eps=1e-6).double()
    ours = mn.nn.WSConv2d(6, 8, 3, padding=1, groups=2, bias=False, eps=1e-6).double()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 6, 5, 5, dtype=torch.float64)
    y = torch.randn(2, 8, 5, 5, dtype=torch.float64)
    assert_close_to_max(ours(x), theirs(x), tol=1e-13)
    for layer in (ours, theirs):
        layer(x).backward(y)
    assert_close_to_max(ours.weight.grad, theirs.weight.grad, tol=1e-12)


@given(shape=shapes)
def test_weight_normalization_gives_each_row_its_length(shape):
    w, length = weight(shape), torch.rand(shape[0], dtype=torch.float64) + 0.5
    assert_close_to_max(weight_normalize(w, length).flatten(1).norm(dim=1), length, tol=1e-13)
    centered = centered_weight_normalize(w, length).flatten(1)
    assert_close_to_max(centered.norm(dim=1), length, tol=1e-13)
    assert_close_to_max(centered.sum(1), torch.zeros(shape[0]), tol=1e-12, scale=1.0)


def test_centered_weight_normalization_of_length_root_fan_in_is_standardization():
    w = weight((4, 3, 2, 2))
    length = torch.full((4,), 12.0**0.5, dtype=torch.float64)
    assert_close_to_max(centered_weight_normalize(w, length), weight_standardize(w, eps=0.0), tol=1e-13)


def test_bad_weights_are_refused_with_the_value():
    with pytest.raises(ValueError, match=r"fan-in.*at least 2, got 1"):
        weight_standardize(torch.randn(4, 1, 1, 1))
    with pytest.raises(ValueError, match=r"O×I.*\(4,\)"):
        weight_standardize(torch.randn(4))
    with pytest.raises(TypeError, match="int64"):
        weight_standardize(torch.ones(4, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="eps"):
        weight_standardize(torch.randn(4, 4), eps=float("nan"))
    assert weight_standardize(torch.randn(0, 4)).shape == (0, 4)
