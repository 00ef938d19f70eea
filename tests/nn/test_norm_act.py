"""Norms with what follows them, and how our layers fit the `norm_layer=` of timm and torchvision."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import micronorm as mn
from micronorm.nn import BatchChannelNorm, BatchChannelNormAct, ChannelsLast, NormAct, norm_act_layer
from micronorm.nn.norm_act import can_fuse, norm_act
from micronorm.nn.passive_hook import PassiveHook
from tests.tolerances import assert_close_to_max, tolerance

timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")


def trained(layer: nn.Module) -> nn.Module:
    """The layer with an affine and statistics that are not the identity."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in layer.state_dict().items():
            if tensor.is_floating_point() and name != "blend":
                tensor.copy_(torch.rand(tensor.shape, generator=generator).to(tensor) + 0.5)
    return layer


def images(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(3, 16, 5, 4, generator=torch.Generator().manual_seed(0), dtype=dtype) * 2 + 0.3


def run(layer: nn.Module) -> tuple[torch.Tensor, ...]:
    """Output, then the gradients of the input and of every parameter."""
    x = images().requires_grad_()
    y = layer(x)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(2), dtype=y.dtype)
    return (y, *torch.autograd.grad(y, [x, *layer.parameters()], grad))


def assert_same_run(actual: nn.Module, expected: nn.Module) -> None:
    outcomes = zip(run(actual), run(expected), ("output", *["gradient"] * 5), strict=True)
    for ours, theirs, operation in outcomes:
        assert_close_to_max(ours, theirs, tol=tolerance(operation, torch.float64))


# --- BatchChannelNormAct ---------------------------------------------------------------------------------------------


def test_the_fused_relu_is_the_relu_after_the_norm():
    fused = trained(BatchChannelNormAct(16, 4, dtype=torch.float64))
    plain = BatchChannelNorm(16, 4, dtype=torch.float64)
    plain.load_state_dict(fused.state_dict())
    assert_same_run(fused, nn.Sequential(plain, nn.ReLU()))


@pytest.mark.parametrize("act_layer", [nn.SiLU, nn.GELU, nn.LeakyReLU], ids=lambda a: a.__name__)
def test_other_activations_follow_the_norm(act_layer):
    layer = trained(BatchChannelNormAct(16, 4, act_layer=act_layer, dtype=torch.float64))
    plain = BatchChannelNorm(16, 4, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    assert_same_run(layer, nn.Sequential(plain, act_layer()))


@pytest.mark.parametrize("arguments", [{"apply_act": False}, {"act_layer": None}], ids=str)
def test_without_an_activation_it_is_the_norm(arguments):
    layer = trained(BatchChannelNormAct(16, 4, dtype=torch.float64, **arguments))
    plain = BatchChannelNorm(16, 4, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    assert_same_run(layer, plain)


def test_arguments_of_the_activation_reach_it():
    layer = BatchChannelNormAct(16, act_layer=nn.LeakyReLU, act_kwargs={"negative_slope": 0.3}, inplace=False)
    assert (layer.act.negative_slope, layer.act.inplace) == (0.3, False)


def test_dropout_comes_between_norm_and_activation():
    layer = BatchChannelNormAct(16, 4, drop_layer=lambda: nn.Dropout(0.5), dtype=torch.float64)
    plain = BatchChannelNorm(16, 4, dtype=torch.float64)
    torch.manual_seed(0)
    y = layer(images())
    torch.manual_seed(0)
    assert torch.equal(y, F.relu(F.dropout(plain(images()), 0.5)))
    layer.eval()
    assert_close_to_max(layer(images()), F.relu(plain(images())), tol=tolerance("output", torch.float64))


@pytest.mark.parametrize("part", ["act", "drop"])
@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_a_hook_on_a_fused_part_is_called(part, kind):
    layer = BatchChannelNormAct(16, 4, inplace=False, dtype=torch.float64)
    calls = []
    handle = getattr(getattr(layer, part), f"register_{kind}")(lambda *_: calls.append(kind))
    layer(images().requires_grad_()).sum().backward()
    assert calls == [kind]
    handle.remove()
    layer(images()).sum().backward()
    assert calls == [kind]


def test_its_state_dict_is_that_of_timms_batch_norm_with_activation_and_the_group_affine():
    theirs = timm.layers.BatchNormAct2d(16).state_dict()
    ours = BatchChannelNormAct(16).state_dict()
    assert set(ours) == set(theirs) - {"num_batches_tracked"} | {"group_weight", "group_bias"}


def test_the_state_dict_of_timms_batch_norm_with_activation_loads():
    theirs = trained(timm.layers.BatchNormAct2d(16).double()).eval()
    ours = BatchChannelNormAct(16, 4, dtype=torch.float64).eval()
    ours.warm(1)  # at blend 0 the layer is the BatchNorm itself
    assert ours.load_state_dict(theirs.state_dict()) == ([], [])
    assert_close_to_max(ours(images()), theirs(images()), tol=tolerance("output", torch.float64))


def test_it_gathers_and_commits_like_the_norm():
    layer, plain = BatchChannelNormAct(16, 4), BatchChannelNorm(16, 4)
    for each in (layer, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(images(torch.float32)).sum().backward()
        optimizer.step()
    assert layer.running_mean.any()
    assert torch.equal(layer.running_mean, plain.running_mean)
    assert torch.equal(layer.running_var, plain.running_var)


# --- NormAct, ChannelsLast, norm_act_layer ---------------------------------------------------------------------------


def test_any_norm_is_followed_by_dropout_and_activation():
    norm = trained(nn.GroupNorm(4, 16)).double()
    layer = NormAct(norm, drop=nn.Dropout(0.5), act=nn.SiLU())
    torch.manual_seed(0)
    y = layer(images())
    torch.manual_seed(0)
    assert torch.equal(y, F.silu(F.dropout(norm(images()), 0.5)))
    assert torch.equal(NormAct(norm)(images()), norm(images()))


def test_the_affine_of_a_norm_with_activation_is_where_timm_looks_for_it():
    layer = NormAct(nn.GroupNorm(4, 16), act=nn.SiLU())
    nn.init.zeros_(layer.weight)
    assert not layer.norm.weight.any()
    assert layer.bias is layer.norm.bias
    assert [name for name, _ in layer.named_parameters()] == ["norm.weight", "norm.bias"]
    assert NormAct(nn.GroupNorm(4, 16, affine=False)).weight is None


def test_a_norm_over_axis_one_serves_channels_in_the_last_axis():
    norm = trained(BatchChannelNorm(16, 4, dtype=torch.float64))
    x = images()
    last = ChannelsLast(norm)(x.movedim(1, -1))
    assert last.shape == (3, 5, 4, 16)
    assert torch.equal(last.movedim(-1, 1), norm(x))
    tokens = torch.randn(2, 49, 16, dtype=torch.float64)
    assert torch.equal(ChannelsLast(norm)(tokens), norm(tokens.mT).mT)


def test_a_norm_act_layer_takes_what_timm_hands_to_one():
    make = norm_act_layer(mn.BCN(groups=4), act_layer=nn.SiLU)
    layer = make(16, inplace=True, drop_layer=nn.Dropout, device="cpu", dtype=torch.float64)
    assert isinstance(layer, BatchChannelNormAct)
    assert (layer.num_groups, layer.weight.dtype) == (4, torch.float64)
    assert isinstance(layer.act, nn.SiLU)
    assert isinstance(layer.drop, nn.Dropout)
    assert isinstance(make(16, apply_act=False).act, nn.Identity)
    assert isinstance(norm_act_layer(mn.GN())(16), NormAct)


# --- norm_layer= -----------------------------------------------------------------------------------------------------


def assert_trains_a_step(model: nn.Module, size: int = 64) -> None:
    norms = [m for m in model.modules() if isinstance(m, BatchChannelNorm)]
    assert norms
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = copy.deepcopy(model.state_dict())
    F.cross_entropy(model(torch.randn(2, 3, size, size)), torch.tensor([0, 1])).backward()
    optimizer.step()
    assert all(v.isfinite().all() for v in model.state_dict().values())
    assert all(norm.running_mean.any() for norm in norms)
    assert not torch.equal(next(model.parameters()), before[next(iter(before))])


TIMM_BY_FUNCTION = {"efficientnet_b0": nn.SiLU, "regnety_002": nn.ReLU, "mobilenetv2_100": nn.ReLU6}
TORCHVISION = ["resnet18", "mobilenet_v2", "efficientnet_b0", "regnet_y_400mf", "mobilenet_v3_small"]


@pytest.mark.parametrize(
    "norm_layer",
    [BatchChannelNorm, partial(BatchChannelNorm, rate=0.1), lambda c, **_: mn.BCN(rate=0.1)(c)],
    ids=["class", "partial", "function"],
)
def test_timm_models_with_plain_norms_take_the_class_a_partial_or_a_function(norm_layer):
    model = timm.create_model("resnet18", norm_layer=norm_layer, zero_init_last=False, num_classes=4)
    assert_trains_a_step(model)


@pytest.mark.parametrize("name", TIMM_BY_FUNCTION)
def test_timm_models_with_norm_and_activation_in_one_take_a_norm_act_layer(name):
    act = TIMM_BY_FUNCTION[name]
    model = timm.create_model(name, norm_layer=norm_act_layer(mn.BCN(), act_layer=act), num_classes=4)
    plain = timm.create_model(name, num_classes=4)
    theirs = {n: type(m.act) for n, m in plain.named_modules() if isinstance(m, timm.layers.BatchNormAct2d)}
    assert {n: type(m.act) for n, m in model.named_modules() if isinstance(m, BatchChannelNormAct)} == theirs
    assert_trains_a_step(model)


@pytest.mark.parametrize("spec", [mn.GN(), mn.FRN()], ids=lambda s: type(s).__name__)
def test_timm_models_take_a_norm_act_layer_of_any_spec(spec):
    model = timm.create_model("regnety_002", norm_layer=norm_act_layer(spec), num_classes=4)
    assert any(isinstance(m, NormAct) for m in model.modules())
    assert model(torch.randn(2, 3, 64, 64)).isfinite().all()


@pytest.mark.parametrize("name", TORCHVISION)
@pytest.mark.parametrize("norm_layer", [mn.BCN(), BatchChannelNorm], ids=["spec", "class"])
def test_torchvision_models_take_the_spec_or_the_class(name, norm_layer):
    assert_trains_a_step(getattr(torchvision.models, name)(norm_layer=norm_layer, num_classes=4))


def test_timm_refuses_a_spec_and_a_class_it_has_no_norm_act_for():
    with pytest.raises(AssertionError):
        timm.create_model("resnet18", norm_layer=mn.BCN())
    with pytest.raises(AssertionError, match="No equivalent norm_act layer for batchchannelnorm"):
        timm.create_model("efficientnet_b0", norm_layer=BatchChannelNorm)


def test_a_norm_with_a_passive_hook_stays_fused():
    norm, seen = mn.nn.GroupNorm(4, 16), []
    layer = NormAct(norm, act=nn.ReLU())
    hook = PassiveHook(lambda module, args, kwargs, output: seen.append(kwargs["activation"]))
    handle = norm.register_forward_hook(hook, with_kwargs=True)
    layer(images(torch.float32))
    assert seen == ["relu"]
    other = norm.register_forward_hook(lambda module, args, output: None)
    assert not can_fuse(norm)
    other.remove()
    handle.remove()
    assert can_fuse(norm)


# --- the function ----------------------------------------------------------------------------------------------------

RESIDUALS = {
    "of the same kind": torch.randn(2, 4, 6, 6),
    "a row": torch.randn(6),
    "one number per channel": torch.randn(1, 4, 1, 1),
    "wider": torch.randn(2, 4, 6, 6, dtype=torch.float64),
    "integers": torch.arange(6),
}


@pytest.mark.parametrize("inplace", [False, True], ids=["sum", "in place"])
@pytest.mark.parametrize("name", RESIDUALS)
def test_norm_act_adds_as_torch_broadcasts_and_promotes(name, inplace):
    norm, x, residual = BatchChannelNorm(4, 2).eval(), torch.randn(2, 4, 6, 6), RESIDUALS[name]
    expected = norm(x)
    if inplace:
        expected += residual
    else:
        expected = expected + residual
    actual = norm_act(norm, x, nn.ReLU(), residual=residual, inplace=inplace)
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected.relu())


@pytest.mark.parametrize("act", [nn.ReLU(), nn.LeakyReLU(0.3), nn.SiLU(), nn.GELU(), F.relu, F.silu, torch.tanh, None])
def test_norm_act_computes_what_the_layers_compute(act):
    x = torch.randn(2, 4, 6, 6)
    for norm in (BatchChannelNorm(4, 2), nn.BatchNorm2d(4), nn.Identity()):
        norm.eval()
        for residual in (None, x):
            y = norm(x) if residual is None else norm(x) + residual
            assert torch.equal(norm_act(norm, x, act, residual=residual), y if act is None else act(y))
