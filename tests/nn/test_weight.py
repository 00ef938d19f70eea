"""Layers with a reparameterized weight, and their specs."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

import micronorm as mn
from micronorm.nn import SPECS
from tests.tolerances import assert_close_to_max, tolerance

METHODS = ("WS", "WN", "CWN")
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@pytest.mark.parametrize("dims", TRANSPOSED)
@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions_standardize_each_output_channel_of_each_group(dims, groups):
    layer = getattr(mn.nn, f"WSConvTranspose{dims}d")(4, 6, 3, stride=2, padding=1, groups=groups).double()
    w = layer.weight.detach()
    expected = torch.empty_like(w)
    inputs = 4 // groups
    for group in range(groups):  # output channel o of a group reads that group's inputs only
        rows = slice(group * inputs, (group + 1) * inputs)
        for o in range(6 // groups):
            fan = w[rows, o]
            expected[rows, o] = (fan - fan.mean()) / (fan.var(correction=0) + 1e-5).sqrt()
    assert_close_to_max(layer.effective_weight(), expected, tol=1e-13)
    x = torch.randn(2, 4, *(5,) * dims, dtype=torch.float64)
    y = TRANSPOSED[dims](x, expected, layer.bias, stride=2, padding=1, groups=groups)
    assert_close_to_max(layer(x), y.detach(), tol=1e-13)
    size = [s + 1 for s in y.shape[2:]]
    assert list(layer(x, output_size=size).shape[2:]) == size


def test_a_transposed_convolution_refuses_other_padding_modes():
    layer = mn.nn.WSConvTranspose2d(4, 6, 3)
    layer.padding_mode = "reflect"
    with pytest.raises(ValueError, match="reflect"):
        layer(torch.randn(1, 4, 5, 5))


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "circular"])
def test_convolutions_keep_torchs_padding_modes(padding_mode):
    layer = mn.nn.WSConv2d(3, 4, 3, padding=1, padding_mode=padding_mode).double()
    plain = nn.Conv2d(3, 4, 3, padding=1, padding_mode=padding_mode).double()
    with torch.no_grad():
        plain.weight.copy_(layer.effective_weight())
        plain.bias.copy_(layer.bias)
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    assert torch.equal(layer(x), plain(x))


@pytest.mark.parametrize("method", METHODS)
def test_fan_in_one_is_refused_by_every_layer(method):
    for kind, args in (
        ("Conv1d", (8, 8, 1, 1, 0, 1, 8)),
        ("Conv2d", (1, 8, 1)),
        ("ConvTranspose2d", (8, 8, 1, 1, 0, 0, 8)),
        ("Linear", (1, 8)),
    ):
        with pytest.raises(ValueError, match="fan-in"):
            getattr(mn.nn.weight, method + kind)(*args)
    with pytest.raises(ValueError, match="fan-in"):
        SPECS[method]()(nn.Conv2d(8, 8, 1, groups=8))


@pytest.mark.parametrize("method", METHODS)
def test_a_spec_builds_the_counterpart_around_the_same_parameters(method):
    plain = nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2, padding_mode="circular").eval()
    made = SPECS[method]()(plain)
    assert type(made).__name__ == f"{method}Conv2d"
    assert made.weight is plain.weight
    assert made.bias is plain.bias
    assert not made.training
    for name in ("stride", "padding", "dilation", "groups", "padding_mode", "kernel_size"):
        assert getattr(made, name) == getattr(plain, name)
    if method == "WN":  # the length starts as the weight's own: nothing changes at first
        x = torch.randn(1, 4, 8, 8)
        assert torch.allclose(made(x), plain(x), atol=1e-6)


def test_a_spec_refuses_what_it_has_no_counterpart_for():
    with pytest.raises(TypeError, match=r"no counterpart for ReLU; it has those for Conv1d.*Linear"):
        mn.WS()(nn.ReLU())
    with pytest.raises(TypeError, match="WSConv2d"):
        mn.WS()(mn.nn.WSConv2d(3, 4, 3))
    with pytest.raises(ValueError, match="eps"):
        mn.WS(eps=-1.0)


@pytest.mark.parametrize("method", ["WN", "CWN"])
def test_a_plain_state_dict_sets_the_length_to_the_weights_own(method):
    plain = nn.Linear(5, 3).double()
    layer = getattr(mn.nn.weight, f"{method}Linear")(5, 3).double()
    layer.load_state_dict(plain.state_dict())
    w = plain.weight.detach()
    w = w - w.mean(1, keepdim=True) if method == "CWN" else w
    assert_close_to_max(layer.length.detach(), w.norm(dim=1), tol=1e-14)
    assert_close_to_max(layer.effective_weight(), w, tol=1e-14)
    saved = {**layer.state_dict(), "length": torch.full((3,), 2.0)}
    layer.load_state_dict(saved)
    assert torch.equal(layer.length.detach(), torch.full((3,), 2.0, dtype=torch.float64))
    layer.reset_parameters()
    assert not torch.equal(layer.length.detach(), torch.full((3,), 2.0, dtype=torch.float64))


@pytest.mark.parametrize("method", METHODS)
def test_unknown_arguments_are_refused(method):
    with pytest.raises(TypeError, match="kernel"):
        getattr(mn.nn.weight, f"{method}Conv2d")(3, 4, 3, kernel=5)
    assert "args" in inspect.signature(getattr(mn.nn.weight, f"{method}Conv2d")).parameters


def test_switches_show_in_the_repr():
    assert "center=False" in repr(mn.nn.WSConv2d(3, 4, 3, center=False))
    assert "scale" not in repr(mn.nn.WSConv2d(3, 4, 3))


def test_a_spec_that_is_given_the_layer_itself_says_how_to_call_it():
    with pytest.raises(TypeError, match=r"write mn\.WS\(\)\(layer\)"):
        mn.WS(nn.Conv2d(3, 4, 3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="scale must be True or False, got 2"):
        mn.WS(scale=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="center must be True or False"):
        mn.nn.WSConv2d(3, 4, 3, center=0)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own derivatives call it
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["Conv2d", "ConvTranspose2d"])
def test_transforms_of_torch_func_follow_the_weight(method, kind):
    layer = getattr(mn.nn.weight, f"{method}{kind}")(3, 4, 3).double()
    x, w = torch.randn(2, 3, 5, 5, dtype=torch.float64), layer.weight.detach().clone()

    def loss(w, x):
        return torch.func.functional_call(layer, {"weight": w}, (x,)).pow(3).sum()

    expected = torch.autograd.grad(layer(x).pow(3).sum(), layer.weight)[0]
    tol = tolerance("one_step", torch.float64)
    assert_close_to_max(torch.func.grad(loss)(w, x), expected, tol=tol)
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(w, x[:, None])
    assert_close_to_max(each.sum(0), expected, tol=tol)
    along = torch.randn_like(w)
    value, slope = torch.func.jvp(lambda w: loss(w, x), (w,), (along,))  # type: ignore[misc]
    assert_close_to_max(value, layer(x).pow(3).sum().detach(), tol=tol)
    assert_close_to_max(slope, (expected * along).sum(), tol=tol)
    many = torch.func.vmap(lambda w: loss(w, x))(torch.stack([w, 2 * w + along]))
    assert_close_to_max(many, torch.stack([loss(w, x), loss(2 * w + along, x)]).detach(), tol=tol)


def test_forward_mode_follows_the_weight_without_grad_too():
    layer = mn.nn.WSLinear(5, 3).double()
    x, along = torch.randn(2, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    (expected,) = torch.autograd.grad(layer(x).sum(), layer.weight)
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(layer.weight.detach(), along)
        slope = forward_ad.unpack_dual(torch.func.functional_call(layer, {"weight": dual}, (x,)).sum()).tangent
    assert_close_to_max(slope, (expected * along).sum(), tol=tolerance("one_step", torch.float64))
