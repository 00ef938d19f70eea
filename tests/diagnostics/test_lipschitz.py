"""The three shares of the squared gradient sum to one, with and without ε, for each half of standardization."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import micronorm as mn
from micronorm.diagnostics.lipschitz import effective_gradients, gradient_shares, weight_layers, weight_shares
from micronorm.nn.per_step.shared_weights import SharedWeights
from micronorm.nn.reparameterized import rows_of
from micronorm.ops.weight import row_statistics
from tests.diagnostics.trained import EPS, LAYERS, loss_of, network
from tests.tolerances import assert_close_to_max

IDENTITY = 1e-10  # what the project asks of its identities in float64
HALVES = {"both": (True, True), "center": (True, False), "scale": (False, True)}


def random_pair(shape=(6, 4, 3, 3), *, offset=0.3):
    """A weight and a gradient whose means and common direction are not small."""
    w = torch.randn(shape, dtype=torch.float64) * 0.1 + offset
    return w, torch.randn(shape, dtype=torch.float64) + 2 * w + 0.5


def by_autograd(w, g, **options):
    w = w.clone().requires_grad_()
    what = mn.functional.weight_standardize(w, **options)
    return what.detach(), torch.autograd.grad(what, w, g)[0]


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("center, scale", HALVES.values(), ids=list(HALVES))
def test_each_decomposition_holds_term_by_term_against_autograd(center, scale, eps):
    w, g = random_pair()
    what, dw = by_autograd(w, g, center=center, scale=scale, eps=eps)
    shares = gradient_shares(w, g, center=center, scale=scale, eps=eps)
    for c in range(len(w)):
        row, grad, hat = w[c].flatten(), g[c].flatten(), what[c].flatten()
        fan_in, spread = len(row), row.var(correction=0) if center else row.square().mean()
        along = (2 - spread / (spread + eps)) * hat.dot(grad) ** 2 / fan_in if scale else 0.0
        mean = grad.sum() ** 2 / fan_in if center else 0.0
        rest = (spread + eps if scale else 1.0) * dw[c].square().sum()
        expected = torch.stack([torch.as_tensor(t, dtype=torch.float64) for t in (along, mean, rest)]) / grad.dot(grad)
        assert_close_to_max(torch.stack([shares.along[c], shares.mean[c], shares.rest[c]]), expected, tol=IDENTITY)
        assert abs(float(expected.sum()) - 1) < IDENTITY
    assert shares.residual.abs().max() < IDENTITY


@pytest.mark.parametrize("eps", EPS[1:])
def test_with_eps_the_paper_s_first_term_falls_short_by_the_stated_factor(eps):
    w, g = random_pair()
    shares = gradient_shares(w, g, eps=eps)
    printed = shares.along / shares.factor + shares.mean + shares.rest
    var = w.flatten(1).var(1, correction=0)
    missing = (1 - var / (var + eps)) * shares.along / shares.factor
    assert_close_to_max(1 - printed, missing, tol=IDENTITY)
    assert missing.max() > 1e-4  # or the factor could be anything


def test_a_wrong_measured_gradient_shows_in_the_residual():
    w, g = random_pair()
    _, dw = by_autograd(w, g, center=True, scale=True, eps=1e-5)
    right, wrong = (gradient_shares(w, g, grad=grad) for grad in (dw, 0.5 * dw))
    assert right.residual.abs().max() < IDENTITY
    assert_close_to_max(wrong.residual, 0.75 * right.rest, tol=IDENTITY)


def test_a_channel_without_gradient_has_no_shares_and_no_say():
    w, g = random_pair()
    g[2] = 0
    shares = gradient_shares(w, g)
    others = gradient_shares(w[[0, 1, 3, 4, 5]], g[[0, 1, 3, 4, 5]])
    assert shares.along.isnan().tolist() == [False, False, True, False, False, False]
    assert shares.totals() == pytest.approx(others.totals(), abs=IDENTITY)
    assert shares.channel_means() == pytest.approx(others.channel_means(), abs=IDENTITY)
    assert all(math.isnan(v) for v in gradient_shares(w, 0 * g).totals().values())


def test_the_layer_s_shares_are_those_of_its_whole_gradient():
    w, g = random_pair()
    totals = gradient_shares(w, g, eps=0.0).totals()
    assert totals["mean"] == pytest.approx(
        float((g.flatten(1).sum(1) ** 2 / 36).sum() / g.square().sum()), abs=IDENTITY
    )
    assert totals["along"] + totals["mean"] + totals["rest"] == pytest.approx(1, abs=IDENTITY)
    assert totals != pytest.approx(gradient_shares(w, g, eps=0.0).channel_means(), abs=1e-6)


def test_shares_of_half_weights_are_computed_in_float64():
    w, g = random_pair()
    shares = gradient_shares(w.bfloat16(), g.bfloat16())
    assert shares.along.dtype == torch.float64
    assert shares.residual.abs().max() < IDENTITY


@pytest.mark.parametrize(
    "weight, grad, options, message",
    [
        (torch.zeros(2, 3), torch.zeros(2, 4), {}, "grad_effective must have the weight's shape"),
        (torch.zeros(2, 3), torch.zeros(2, 3), {"grad": torch.zeros(3, 2)}, "grad must have the weight's shape"),
        (torch.zeros(2, 1), torch.zeros(2, 1), {}, "fan-in"),
        (torch.zeros(2, 3), torch.zeros(2, 3), {"eps": -1.0}, "eps must be finite and at least 0"),
    ],
)
def test_what_cannot_be_decomposed_is_refused(weight, grad, options, message):
    with pytest.raises(ValueError, match=message):
        gradient_shares(weight, grad, **options)


# --- over a model ----------------------------------------------------------------------------------------------------


def captured_shares(model):
    with effective_gradients(model) as captured:
        loss_of(model)().backward()
    return weight_shares(model, captured)


@pytest.mark.parametrize("steps", [0, 20], ids=["random", "trained"])
@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("center, scale", HALVES.values(), ids=list(HALVES))
def test_the_measured_gradients_of_a_network_obey_the_decomposition(center, scale, eps, steps):
    model = network(mn.WS(center=center, scale=scale, eps=eps), steps=steps)
    shares = captured_shares(model)
    assert set(LAYERS) < set(shares)
    for name in LAYERS:
        layer, found = model.get_submodule(name), shares[name]
        assert found.residual.abs().max() < IDENTITY, name
        sigma = row_statistics(rows_of(layer, layer.weight.detach()), center=center, scale=scale, eps=eps)[1]
        raw = rows_of(layer, layer.weight.grad).flatten(1)
        assert_close_to_max(found.rest, (sigma * raw.norm(dim=1)) ** 2 / found.square, tol=IDENTITY)
        assert (found.along.max() > 0) == scale
        assert (found.mean.max() > 0) == center


def test_before_batch_norm_a_gradient_has_nothing_along_the_weight():
    shares = captured_shares(network(mn.WS(), steps=3))
    assert shares["up"].along.max() < 1e-9  # norm3's own ε is all that its size is seen by
    assert shares["grouped"].along.min() > 1e-6


def test_a_plain_layer_shows_what_it_would_as_a_standardized_one_with_absorbed_statistics():
    plain = network(steps=3)
    model = copy.deepcopy(plain)
    for name in LAYERS:
        layer = mn.WS()(getattr(model, name))
        layer.absorb()
        setattr(model, name, layer)
    expected, actual = captured_shares(model), captured_shares(plain)
    for name in LAYERS:
        for term in ("along", "mean", "rest"):
            assert_close_to_max(getattr(actual[name], term), getattr(expected[name], term), tol=1e-9)


@pytest.mark.parametrize("spec, centered", [(mn.WN(), False), (mn.CWN(), True)])
def test_what_wn_and_cwn_take_along_the_weight_is_the_gradient_of_their_length(spec, centered):
    model = network(spec)
    shares = captured_shares(model)
    for name in LAYERS:
        layer, found = model.get_submodule(name), shares[name]
        assert found.residual.abs().max() < IDENTITY
        by_length = (layer.length * layer.length.grad) ** 2 / rows_of(layer, layer.weight)[0].numel() / found.square
        assert_close_to_max(found.along, by_length.detach(), tol=IDENTITY)
        assert (found.mean.max() > 0) == centered


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("inside", [True, False], ids=["sharing inside", "sharing around"])
def test_shared_weights_show_the_gradients_of_all_their_micro_batches(inside, backend):
    model = network(mn.WS(), steps=2).eval()
    loss, whole = loss_of(model), captured_shares(model)
    model.zero_grad()
    model.stem.backend = model.grouped.backend = backend
    weights = SharedWeights(model)

    def backward():
        (loss() * 0.25).backward()
        (loss() * 0.75).backward()

    if inside:
        with effective_gradients(model) as captured, weights.shared():
            backward()
    else:
        with weights.shared(), effective_gradients(model) as captured:
            backward()
    shares = weight_shares(model, captured)
    for name in whole:
        for term in ("along", "mean", "rest"):
            assert_close_to_max(getattr(shares[name], term), getattr(whole[name], term), tol=IDENTITY, scale=1.0)
        assert_close_to_max(shares[name].square, whole[name].square, tol=IDENTITY)
    assert "weight_in_use" not in vars(model.stem)
    with weights.shared():
        assert not model.stem.shared_weight._backward_hooks  # the leaf lives on from block to block


def test_a_layer_used_twice_and_checkpointed_counts_each_use_once():
    from torch.utils.checkpoint import checkpoint

    layer = mn.nn.WSConv2d(3, 3, 3, padding=1).double()
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    found = []
    for again in (layer, lambda y: checkpoint(layer, y, use_reentrant=False)):
        layer.zero_grad()
        with effective_gradients(layer) as captured:
            again(again(x).tanh()).square().sum().backward()
        found.append(captured[""].total)
    effective = layer.effective_weight().detach().requires_grad_()
    layer.shared_weight = effective
    layer(layer(x).tanh()).square().sum().backward()
    for actual in found:
        assert_close_to_max(actual, effective.grad, tol=IDENTITY)


def test_gradients_from_before_the_block_do_not_count_and_the_model_is_left_clean():
    model = network(mn.WS()).eval()
    first = captured_shares(model)
    second = captured_shares(model)  # on top of the first ones' .grad
    assert_close_to_max(second["stem"].square, first["stem"].square, tol=IDENTITY)
    assert not model.head.weight._backward_hooks
    assert not model.stem.weight._backward_hooks
    loss_of(model)().backward()


def test_layers_whose_parameter_is_not_what_they_compute_with_are_left_out():
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), nn.Conv2d(4, 4, 1, groups=4), nn.Flatten(), nn.Linear(36, 2)
    )
    assert list(weight_layers(model)) == ["3"]
    of_timm = type("StdConv2d", (nn.Conv2d,), {"__module__": "timm.layers.std_conv"})
    assert weight_layers(nn.Sequential(of_timm(3, 4, 3), nn.Conv2d(3, 4, 3))).keys() == {"1"}
    frozen = nn.Linear(3, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="Linear has no convolution or linear layer"), effective_gradients(frozen):
        pass


def test_shares_without_any_gradient_are_an_error():
    model = network(mn.WS())
    with effective_gradients(model) as captured:
        pass
    with pytest.raises(RuntimeError, match="none of 5 layers has a gradient"):
        weight_shares(model, captured)


def test_captured_gradients_are_copies():
    layer = nn.Linear(3, 2)
    with effective_gradients(layer) as captured:
        layer(torch.randn(4, 3)).sum().backward()
        before = captured[""].total.clone()
        layer.weight.grad.zero_()
    assert torch.equal(captured[""].total, before)
    assert before.abs().max() > 0
