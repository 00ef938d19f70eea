"""With its dropout keyed by sample, a step does not depend on how its samples were cut up."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import micronorm as mn
from micronorm.engine.dropout import key_dropout
from micronorm.nn.per_step.keyed_dropout import KeyedDropout, KeyedDropPath, dropout_keys
from micronorm.ops.keyed import sample_keys
from tests.networks import SAMPLES, SmallResNet, assert_same_state, pieces, samples
from tests.tolerances import tolerance

CUTS = {"one by one": [1] * SAMPLES, "unequal": [7, 17]}


class DropPath(nn.Module):
    """What timm's layer looks like from outside."""

    __module__ = "timm.layers.drop"

    def __init__(self, drop_prob=0.0, scale_by_keep=True):
        super().__init__()
        self.drop_prob = drop_prob
        self.scale_by_keep = scale_by_keep

    def forward(self, x):
        mask = torch.rand(len(x), *[1] * (x.ndim - 1), dtype=x.dtype) >= self.drop_prob
        return x * mask / (1 - self.drop_prob) if self.training else x


class StochasticDepth(nn.Module):
    """What torchvision's layer looks like from outside."""

    __module__ = "torchvision.ops.stochastic_depth"

    def __init__(self, p, mode):
        super().__init__()
        self.p = p
        self.mode = mode


class Dropping(nn.Module):
    """The small network with every kind of layer that can be keyed, and one dropout in two places."""

    def __init__(self, recompute=False):
        super().__init__()
        self.net = SmallResNet(weight=mn.WS())
        self.recompute = recompute
        self.elements = nn.Dropout(0.2)
        self.channels = nn.Dropout2d(0.2)
        self.path = DropPath(0.3)

    def block(self, block, x):
        return x + self.path(block(self.elements(x)))

    def forward(self, x):
        net = self.net
        x = self.channels(F.relu(net.norm(net.stem(x))))
        x = self.run(net.block1, x)
        x = self.run(net.block2, F.relu(net.down_norm(net.down(x))))
        return net.head(self.elements(x.mean((2, 3))))

    def run(self, block, x):
        return checkpoint(self.block, block, x, use_reentrant=False) if self.recompute else self.block(block, x)


def one_step(model, cut, *, dtype=torch.float64):
    """A copy of the model after one step whose samples carry keys; its state dict with gradients."""
    model = copy.deepcopy(model).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    x, labels = samples(dtype)
    keys = sample_keys(torch.arange(SAMPLES), seed=0, epoch=2)
    torch.manual_seed(0)
    for part in pieces(cut):
        with dropout_keys(keys[part]):
            (F.cross_entropy(model(x[part]), labels[part], reduction="sum") / len(x)).backward()
    optimizer.step()
    return model.state_dict() | {f"{name}.grad": p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_a_step_with_keyed_dropout_does_not_depend_on_its_cut(cut, recompute, dtype):
    model = Dropping(recompute)
    assert key_dropout(model) == []
    assert_same_state(
        one_step(model, cut, dtype=dtype), one_step(model, [SAMPLES], dtype=dtype), tol=tolerance("one_step", dtype)
    )


def test_checkpointing_changes_nothing_of_a_keyed_step():
    model = Dropping()
    key_dropout(model)
    expected = one_step(model, [7, 17])
    model.recompute = True
    assert_same_state(one_step(model, [7, 17]), expected, tol=tolerance("one_step", torch.float64))


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_without_keying_it_depends_on_its_cut(cut):
    model = Dropping()
    with pytest.raises(AssertionError, match="relative error"):
        assert_same_state(one_step(model, cut), one_step(model, [SAMPLES]), tol=0.01)


def test_equal_models_have_equal_masks():
    torch.manual_seed(0)
    first = Dropping()
    second = copy.deepcopy(first)
    key_dropout(first)
    torch.manual_seed(9)
    key_dropout(second)
    assert_same_state(one_step(second, [SAMPLES]), one_step(first, [SAMPLES]), tol=0.0)


def test_layers_keep_rate_mode_hooks_and_places_and_get_streams_of_their_own():
    shared = nn.Dropout(0.1, inplace=True)
    model = nn.Sequential(
        shared,
        nn.Dropout1d(0.2),
        nn.Dropout2d(0.3),
        nn.Dropout3d(0.4),
        DropPath(0.5, scale_by_keep=False),
        StochasticDepth(0.6, "row"),
        shared,
    )
    calls = []
    shared.register_forward_hook(lambda *args: calls.append(1))
    model[1].eval()
    assert key_dropout(model) == []
    assert model[0] is model[6]
    dropouts, paths = list(model)[:4], list(model)[4:6]
    assert all(isinstance(m, KeyedDropout) for m in dropouts)
    assert [(m.p, m.dims) for m in dropouts] == [(0.1, 0), (0.2, 1), (0.3, 2), (0.4, 3)]
    assert all(isinstance(m, KeyedDropPath) for m in paths)
    assert [(m.drop_prob, m.scale_by_keep) for m in paths] == [(0.5, False), (0.6, True)]
    assert model[0].inplace
    assert [m.training for m in model] == [True, False, True, True, True, True, True]
    assert [m.stream for m in (*dropouts, *paths)] == list(range(6))
    model[0](torch.ones(2, 3))
    assert calls == [1]


def test_keying_twice_keys_what_is_new_with_new_streams():
    model = nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.1))
    key_dropout(model)
    first = list(model)
    model.append(nn.Dropout(0.1))
    assert key_dropout(model) == []
    assert list(model)[:2] == first
    assert [m.stream for m in model] == [0, 1, 2]


def test_layers_with_rate_zero_stay():
    model = nn.Sequential(nn.Dropout(0.0), nn.Dropout2d(0.0), DropPath(0.0), StochasticDepth(0.0, "row"), nn.ReLU())
    before = list(model)
    assert key_dropout(model) == []
    assert list(model) == before


class Functional(nn.Module):
    """A rate kept for F.dropout, as torchvision's DenseNet and timm's heads have it."""

    def __init__(self, drop_rate):
        super().__init__()
        self.drop_rate = drop_rate


class Subclass(nn.Dropout):
    """May do anything."""


UNKEYED = {
    "alpha": lambda p: nn.AlphaDropout(p),
    "feature alpha": lambda p: nn.FeatureAlphaDropout(p),
    "a subclass": lambda p: Subclass(p),
    "the whole batch": lambda p: StochasticDepth(p, "batch"),
    "attention": lambda p: nn.MultiheadAttention(4, 2, dropout=p),
    "recurrent": lambda p: nn.LSTM(4, 4, num_layers=2, dropout=p),
    "functional": lambda p: Functional(p),
}


@pytest.mark.parametrize("make", UNKEYED.values(), ids=UNKEYED)
def test_chance_that_cannot_be_keyed_is_named(make):
    odd = make(0.5)
    model = nn.Sequential(nn.Dropout(0.5), odd)
    assert key_dropout(model) == ["1"]
    assert model[1] is odd
    assert key_dropout(nn.Sequential(make(0.0))) == []


@pytest.mark.parametrize(
    "odd", [nn.RReLU(), nn.FractionalMaxPool2d(2, output_size=3), nn.FractionalMaxPool3d(2, output_size=3)], ids=repr
)
def test_layers_that_are_always_random_are_named(odd):
    assert key_dropout(nn.Sequential(odd)) == ["0"]


def test_a_recurrent_layer_that_drops_nothing_is_not_named():
    lstm = nn.LSTM(4, 4)
    lstm.dropout = 0.5  # between layers, of which there is one
    assert key_dropout(nn.Sequential(lstm)) == []


def test_a_model_that_is_a_dropout_cannot_be_replaced_and_is_named():
    assert key_dropout(nn.Dropout(0.5)) == ["Dropout"]


def test_layers_of_timm_and_torchvision_are_recognised():
    timm_layers = pytest.importorskip("timm.layers")
    ops = pytest.importorskip("torchvision.ops")
    model = nn.Sequential(timm_layers.DropPath(0.1), ops.StochasticDepth(0.2, "row"), ops.StochasticDepth(0.2, "batch"))
    assert key_dropout(model) == ["2"]
    assert [m.drop_prob for m in list(model)[:2]] == [0.1, 0.2]


def test_a_network_of_torchvision_takes_a_step_that_does_not_depend_on_its_cut():
    models = pytest.importorskip("torchvision.models")
    block = models.convnext.CNBlockConfig
    net = models.ConvNeXt(
        [block(8, 16, 2), block(16, None, 1)], stochastic_depth_prob=0.5, num_classes=5, layer_scale=0.5
    )
    assert key_dropout(net) == []
    assert sum(isinstance(m, KeyedDropPath) for m in net.modules()) == 2  # the first block's rate is 0
    whole = one_step(net, [SAMPLES])
    assert_same_state(one_step(net, [7, 17]), whole, tol=tolerance("one_step", torch.float64))
