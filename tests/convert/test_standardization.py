import pytest
import torch
from torch import Tensor

import micronorm as mn
from micronorm.convert.foreign import AUTHORS_BCN, AUTHORS_WS, TIMM_BIT, Standardization, rescale_rows
from micronorm.nn.reparameterized import rows_of
from tests.tolerances import assert_close_to_max, tolerance

FORMULAS = {
    "authors' WS": AUTHORS_WS,
    "authors' BCN": AUTHORS_BCN,
    "timm's BiT": TIMM_BIT,
    "timm's StdConv2d": Standardization(eps=1e-6, unbiased=False, eps_in_root=True),
    "TensorFlow": Standardization(eps=1e-5, unbiased=False, eps_in_root=False),
}


def expected(w: Tensor, formula: Standardization) -> Tensor:
    """The formula as it reads, in float64."""
    w = w.double().flatten(1)
    var = w.var(1, correction=int(formula.unbiased), keepdim=True)
    d = (var + formula.eps).sqrt() if formula.eps_in_root else var.sqrt() + formula.eps
    return (w - w.mean(1, keepdim=True)) / d


def loaded(layer, w: Tensor, formula: Standardization):
    scaled, scales = rescale_rows(w, layer, formula)
    with torch.no_grad():
        layer.weight.copy_(scaled)
    return scales


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0, 30.0])
@pytest.mark.parametrize("fan_in", [2, 27, 4608])
@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS)
def test_our_layer_computes_with_their_standardized_weight(formula, fan_in, size, dtype):
    g = torch.Generator().manual_seed(0)
    w = (size * (torch.randn(6, fan_in, generator=g) + 0.5)).to(dtype)
    layer = mn.nn.WSLinear(fan_in, 6, dtype=dtype)
    loaded(layer, w, formula)
    assert_close_to_max(layer.effective_weight(), expected(w, formula), tol=tolerance("output", dtype, condition=2))


@pytest.mark.parametrize("kind", [mn.nn.WSConv1d, mn.nn.WSConv3d, mn.nn.WSConvTranspose2d])
def test_rows_are_those_of_the_layer(kind):
    layer = kind(4, 6, 3, groups=2, dtype=torch.float64)
    w = torch.randn_like(layer.weight) * 0.05
    loaded(layer, w, AUTHORS_WS)
    actual = rows_of(layer, layer.effective_weight()).flatten(1)
    assert_close_to_max(actual, expected(rows_of(layer, w), AUTHORS_WS), tol=tolerance("output", torch.float64))


def test_one_formula_changes_nothing():
    layer, w = mn.nn.WSLinear(5, 4, eps=1e-6), torch.randn(4, 5)
    same, scales = rescale_rows(w, layer, Standardization(eps=1e-6, unbiased=False, eps_in_root=True))
    assert same is w
    assert scales is None


def test_constant_rows_are_left_alone_and_stay_zero():
    layer = mn.nn.WSLinear(5, 3)
    w = torch.stack([torch.full((5,), 0.1), torch.zeros(5), torch.arange(5.0)])
    loaded(layer, w, AUTHORS_WS)
    assert torch.equal(layer.weight[:2], w[:2])
    assert layer.effective_weight()[1].count_nonzero() == 0
    assert_close_to_max(layer.effective_weight()[2], expected(w, AUTHORS_WS)[2], tol=tolerance("output", torch.float32))


def test_a_weight_of_constant_rows_alone_is_left_alone():
    layer, w = mn.nn.WSLinear(5, 3), torch.ones(3, 5)
    scaled, scales = rescale_rows(w, layer, AUTHORS_WS)
    assert torch.equal(scaled, w.double())
    assert (scales.low, scales.high, scales.eps) == (1, 1, layer.eps)


def test_at_the_reported_eps_the_rows_keep_their_size():
    w = 0.02 * torch.rand(16, 1, 1, 1).add(0.5) * torch.randn(16, 64, 3, 3)
    layer = mn.nn.WSConv2d(64, 16, 3)
    before = loaded(layer, w, AUTHORS_WS)
    assert before.low > 1.5  # at our eps every row grows, and learns that much more slowly
    layer.eps = before.eps
    after = loaded(layer, w, AUTHORS_WS)
    assert after.low < 1 < after.high < 1.5
    actual = layer.effective_weight().flatten(1)
    assert_close_to_max(actual, expected(w, AUTHORS_WS), tol=tolerance("output", torch.float32))


def test_a_scale_beyond_the_dtype_is_refused():
    layer = mn.nn.WSLinear(5, 3, dtype=torch.float16)
    formula = Standardization(eps=1e-16, unbiased=False, eps_in_root=True)
    with pytest.raises(ValueError, match=r"not finite in torch\.float16"):
        rescale_rows(torch.randn(3, 5), layer, formula)
