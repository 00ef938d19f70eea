"""Weights computed once per step give the gradients of weights computed in every micro-batch."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import micronorm as mn
from micronorm.nn.passive_hook import PassiveHook
from micronorm.nn.per_step.shared_weights import SharedWeights
from tests.tolerances import assert_close_to_max

TOL = 1e-12


def plain(model, x):
    return model(x)


def gradients(model, parts, *, shared, forward=plain):
    """The gradients of a copy of the model over these micro-batches."""
    model = copy.deepcopy(model)
    weights = SharedWeights(model)

    def all_parts():
        for part in parts:
            forward(model, part).pow(2).sum().backward()

    if shared:
        with weights.shared():
            all_parts()
    else:
        all_parts()
    assert all(layer.shared_weight is None for layer in weights.layers)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_shared_is_the_same(model, x, **options):
    parts = x.split([1, 4, 2])
    expected = gradients(model, parts, shared=False, **options)
    actual = gradients(model, parts, shared=True, **options)
    assert any(value is not None for value in expected.values())
    for name, value in expected.items():
        if value is None:
            assert actual[name] is None, name
        else:
            assert_close_to_max(actual[name], value, tol=TOL)
    return actual


LAYERS = {
    "WS": mn.nn.WSConv2d(4, 6, 3, groups=2),
    "WS center": mn.nn.WSConv2d(4, 6, 3, scale=False),
    "WN": mn.WN()(nn.Conv2d(4, 6, 3)),
    "CWN": mn.CWN()(nn.Conv2d(4, 6, 3, stride=2)),
    "transposed": mn.nn.WSConvTranspose2d(4, 6, 3, groups=2, stride=2),
    "transposed CWN": mn.CWN()(nn.ConvTranspose2d(4, 6, 3)),
    "linear": mn.nn.WSLinear(8, 5),
}


@pytest.mark.parametrize("name", LAYERS)
def test_weights_and_lengths_get_the_same_gradients(name):
    found = assert_shared_is_the_same(copy.deepcopy(LAYERS[name]).double(), torch.randn(7, 4, 8, 8).double())
    assert ("length" in found) == ("WN" in name)


def test_absorbed_scales_are_part_of_the_shared_weight():
    conv = mn.nn.WSConv2d(4, 6, 3).double()
    conv.absorb()
    with torch.no_grad():
        conv.weight.mul_(1.5)
    assert_shared_is_the_same(conv, torch.randn(7, 4, 8, 8).double())


def test_a_frozen_weight_stays_without_a_gradient_and_its_length_may_still_have_one():
    model = nn.Sequential(mn.nn.WSConv2d(3, 4, 3), mn.WN()(nn.Conv2d(4, 4, 3)), mn.nn.WSConv2d(4, 4, 1)).double()
    model[0].requires_grad_(False)
    model[1].weight.requires_grad_(False)
    found = assert_shared_is_the_same(model, torch.randn(7, 3, 8, 8).double())
    assert found["0.weight"] is None
    assert found["1.weight"] is None
    assert found["1.length"] is not None


def test_a_layer_that_no_sample_reaches_gets_no_gradient():
    model = nn.Sequential(mn.nn.WSConv2d(3, 4, 3), mn.nn.WSConv2d(3, 4, 3)).double()
    found = assert_shared_is_the_same(model, torch.randn(7, 3, 8, 8).double(), forward=lambda m, x: m[0](x))
    assert found["1.weight"] is None


def test_tied_modules_and_tied_weights_add_up():
    conv, other = mn.nn.WSConv2d(4, 4, 3, padding=1), mn.nn.WSConv2d(4, 4, 3, padding=1)
    other.weight = conv.weight
    model = nn.Sequential(conv, nn.Tanh(), conv, nn.Tanh(), other).double()
    assert_shared_is_the_same(model, torch.randn(7, 4, 6, 6).double())


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_forwards_use_the_shared_weight(reentrant):
    model = nn.Sequential(mn.nn.WSConv2d(3, 4, 3), nn.Tanh(), mn.CWN()(nn.Conv2d(4, 4, 3))).double()

    def forward(net, x):
        return checkpoint(net, x.requires_grad_(), use_reentrant=reentrant)

    assert_shared_is_the_same(model, torch.randn(7, 3, 8, 8).double(), forward=forward)


def test_the_weight_is_computed_once_for_all_forwards(monkeypatch):
    conv, calls = mn.nn.WSConv2d(3, 4, 3), []
    effective = type(conv).effective_weight
    monkeypatch.setattr(type(conv), "effective_weight", lambda self: calls.append(self) or effective(self))
    with SharedWeights(conv).shared():
        for image in torch.randn(5, 1, 3, 8, 8):
            conv(image).sum().backward()
    assert len(calls) == 1


def test_an_error_leaves_no_shared_weight_behind():
    model = nn.Sequential(mn.nn.WSConv2d(3, 4, 3), mn.nn.WSConv2d(4, 4, 3)).double()
    weights, x = SharedWeights(model), torch.randn(2, 3, 8, 8).double()

    def fail():
        with weights.shared():
            model(x).sum().backward()
            raise KeyError("a column")

    with pytest.raises(KeyError, match="a column"):
        fail()
    assert all(layer.shared_weight is None for layer in weights.layers)
    assert all(leaf.grad is None for leaf in weights._leaves)
    assert model[0].weight.grad is None  # only a block that ends well hands gradients on
    assert_shared_is_the_same(model, torch.randn(7, 3, 8, 8).double())


def test_an_error_in_computing_a_weight_leaves_none_behind():
    model = nn.Sequential(mn.nn.WSConv2d(3, 4, 3), mn.nn.WSConv2d(4, 4, 3))
    weights = SharedWeights(model)
    model[1].effective_weight = lambda: (_ for _ in ()).throw(KeyError("a weight"))
    with pytest.raises(KeyError, match="a weight"), weights.shared():
        raise AssertionError("the block is not entered")
    assert model[0].shared_weight is None


def test_shared_weights_follow_the_optimizer():
    conv = mn.nn.WSConv2d(3, 4, 3).double()
    weights, x = SharedWeights(conv), torch.randn(2, 3, 8, 8).double()
    for _ in range(2):
        with weights.shared():
            assert torch.equal(conv(x), nn.functional.conv2d(x, conv.effective_weight(), conv.bias))
        with torch.no_grad():
            conv.weight.add_(torch.randn_like(conv.weight))


def test_shared_weights_follow_the_dtype_and_what_is_frozen():
    conv = mn.nn.WSConv2d(3, 4, 3)
    weights = SharedWeights(conv)
    with weights.shared():
        conv(torch.randn(1, 3, 8, 8))
    conv.double().requires_grad_(False)
    with weights.shared():
        assert conv(torch.randn(1, 3, 8, 8).double()).requires_grad is False


def test_autocast_rounds_the_shared_weight_as_it_would_each():
    model = nn.Sequential(mn.nn.WSConv2d(3, 4, 3), nn.Tanh(), mn.CWN()(nn.Conv2d(4, 4, 3)))

    def forward(net, x):
        with torch.autocast("cpu", torch.bfloat16):
            return net(x).float()

    parts = torch.randn(7, 3, 8, 8).split([1, 4, 2])
    expected = gradients(model, parts, shared=False, forward=forward)
    for name, value in gradients(model, parts, shared=True, forward=forward).items():
        assert value.dtype == torch.float32
        # Summed in float32 here, rounded to bfloat16 in each micro-batch's own gradient either way.
        assert_close_to_max(value, expected[name], tol=1e-5)


@pytest.mark.slow  # compiles
def test_compiled_layers_with_shared_weights_are_compiled_once():
    model = nn.Sequential(mn.nn.WSConv2d(3, 4, 3), nn.Tanh(), mn.WN()(nn.Conv2d(4, 4, 3))).double()
    graphs = []

    def backend(graph, example):
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, example)

    eager, weights = copy.deepcopy(model), SharedWeights(model)
    compiled, x = torch.compile(model, backend=backend, fullgraph=True), torch.randn(4, 2, 3, 8, 8).double()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, eager)]
    for _ in range(3):
        with weights.shared():
            for part in x:
                compiled(part).pow(2).sum().backward()
        for part in x:
            eager(part).pow(2).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert len(graphs) == 1
    for actual, expected in zip(model.parameters(), eager.parameters(), strict=True):
        assert_close_to_max(actual, expected, tol=1e-11)


def test_a_layer_outside_autocast_computes_in_its_own_dtype_whatever_was_shared():
    class Model(nn.Module):
        """As heads that need their digits are written."""

        def __init__(self):
            super().__init__()
            self.conv, self.head = mn.nn.WSConv2d(3, 4, 3), mn.nn.WSLinear(4, 2)

        def forward(self, x):
            y = self.conv(x).mean((2, 3))
            with torch.autocast("cpu", enabled=False):
                return self.head(y.float())

    model, x = Model(), torch.randn(2, 3, 5, 5)
    twin = copy.deepcopy(model)
    with SharedWeights(model).shared(dtype=torch.bfloat16), torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        y.sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        expected = twin(x)
        expected.sum().backward()
    assert y.dtype == torch.float32
    assert torch.equal(y, expected)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_weight_observers_get_the_weight_in_use_shared_or_not():
    conv, seen = mn.nn.WSConv2d(2, 3, 3), []
    conv.weight_observers = (PassiveHook(seen.append),)
    x = torch.randn(1, 2, 5, 5)
    conv(x)
    with SharedWeights(conv).shared():
        conv(x)
        conv(x)
    assert len(seen) == 3
    assert seen[1] is seen[2]
    assert seen[0] is not seen[1]
    assert torch.equal(seen[0], conv.effective_weight())
