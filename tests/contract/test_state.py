"""State dicts, copies, pickles, devices and names of every layer."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import micronorm as mn
from tests.contract.layers import ALL, CHANNELS, HOUSE, NORMS, OURS, WEIGHTS, run

all_layers = pytest.mark.parametrize("case", ALL, ids=str)


@all_layers
def test_a_state_dict_makes_the_round_trip(case):
    layer = case.layer()
    run(layer, case.input())
    fresh = case.make().double()
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(fresh.eval()(case.input()), layer.eval()(case.input()))


@all_layers
@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_computes_the_same_and_is_independent(case, how):
    layer = case.layer()
    layer(case.input())  # something may have been gathered
    twin = how(layer)
    before = {n: t.clone() for n, t in layer.state_dict().items()}
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    twin(case.input() * 2).sum().backward()
    optimizer.step()
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name])
    assert torch.equal(how(layer).eval()(case.input()), layer.eval()(case.input()))


@all_layers
def test_a_layer_can_be_made_on_the_meta_device_and_materialized(case):
    with torch.device("meta"):
        layer = case.make()
    assert all(t.is_meta for t in layer.state_dict().values())
    out = layer(torch.empty(case.shape, device="meta"))
    assert out.is_meta
    layer.to_empty(device="cpu")
    if case in HOUSE or case in WEIGHTS:
        layer.reset_parameters()
    else:
        layer.load_state_dict(case.make().state_dict())
    y = layer(case.input(torch.float32))
    assert torch.isfinite(y).all()
    y.sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()


@all_layers
def test_the_repr_names_the_class_and_what_it_was_made_with(case):
    layer = case.layer()
    text = repr(layer)
    assert type(layer).__name__ in text
    if case in OURS and case not in HOUSE:
        return  # a user's layer may print what it likes
    assert ("eps" in text) or case in WEIGHTS
    assert "\n" not in text


@pytest.mark.parametrize("case", [c for c in NORMS if c.name.split()[0] in ("BCN", "BN", "BRN")], ids=str)
def test_the_state_dict_of_a_batch_norm_loads(case):
    bn = nn.BatchNorm2d(CHANNELS)
    with torch.no_grad():
        bn.weight.normal_()
        bn.running_mean.normal_()
        bn.running_var.uniform_(0.5, 2)
    layer = case.make()
    with torch.no_grad():
        for p in layer.parameters():
            p.fill_(7)
    assert str(layer.load_state_dict(bn.state_dict())) == "<All keys matched successfully>"
    for name in ("weight", "bias", "running_mean", "running_var"):
        assert torch.equal(getattr(layer, name), getattr(bn, name))
    if isinstance(layer, mn.nn.BatchChannelNorm):
        assert torch.equal(layer.group_weight, torch.ones(4))
        assert torch.equal(layer.group_bias, torch.zeros(4))


@pytest.mark.parametrize("case", WEIGHTS, ids=str)
def test_a_reparameterized_layer_is_its_torch_layer_with_its_keys(case):
    layer = case.layer()
    plain = next(base for base in type(layer).__mro__ if base.__module__.startswith("torch.nn"))
    assert isinstance(layer, plain)
    keys = set(layer.state_dict())
    assert keys - {"length"} == ({"weight", "bias"} if layer.bias is not None else {"weight"})
    assert ("length" in keys) == (not case.name.startswith("WS"))


@pytest.mark.parametrize("case", OURS, ids=str)
def test_eval_mode_moves_nothing(case):
    layer = case.layer().eval()
    before = {n: t.clone() for n, t in layer.state_dict().items()}
    layer(case.input())
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("case", HOUSE, ids=str)
def test_bad_input_names_the_layer_the_value_and_the_fix(case):
    layer = case.make()
    with pytest.raises(TypeError, match=r"int64.*float\(\)"):
        layer(torch.ones(2, CHANNELS, 3, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"rank 2 to 5.*unsqueeze"):
        layer(torch.randn(CHANNELS))
    with pytest.raises(ValueError, match=r"rank 2 to 5"):
        layer(torch.randn(2, CHANNELS, 1, 1, 1, 1))
    with pytest.raises(ValueError, match=rf"{CHANNELS} channels, got 3.*channels come second"):
        layer(torch.randn(2, 3, CHANNELS, CHANNELS))
