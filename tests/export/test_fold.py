import copy
import functools
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import micronorm as mn
from tests.export.networks import assert_folds, kinds, randomized, trained
from tests.tolerances import assert_close_to_max, tolerance

CONVOLUTIONS = [f"Conv{d}d" for d in (1, 2, 3)]
TRANSPOSED = [f"ConvTranspose{d}d" for d in (1, 2, 3)]


def image(dims: int = 2, *, samples: int = 3, channels: int = 4, size: int = 6) -> Tensor:
    return torch.randn(samples, channels, *[size] * dims, dtype=torch.float64) * 2 + 0.5


def layer(method: str, kind: str, *args, **kwargs) -> nn.Module:
    return getattr(mn.nn.weight, method + kind)(*args, **kwargs)


def pair(channels: int = 12, **kwargs) -> nn.Sequential:
    """A convolution and its norm."""
    convolution = mn.nn.WSConv2d(4, channels, 3, **kwargs)
    return randomized(nn.Sequential(convolution, mn.nn.BatchChannelNorm(channels, 3)))


# --- each kind of layer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", CONVOLUTIONS + TRANSPOSED)
@pytest.mark.parametrize("method", ["WS", "WN", "CWN"])
def test_folding_a_convolution_and_its_norm_does_not_change_the_function(method, kind, groups, bias):
    dims = int(kind[-2])
    model = nn.Sequential(
        layer(method, kind, 4, 12, 3, stride=2, padding=1, groups=groups, bias=bias),
        mn.nn.BatchChannelNorm(12, 3),
    )
    folded = assert_folds(randomized(model), image(dims))
    assert [type(module).__name__ for module in folded] == [kind, "GroupNorm"]


@pytest.mark.parametrize("kind", CONVOLUTIONS + TRANSPOSED)
def test_the_channel_half_goes_into_plain_convolutions_too(kind):
    model = nn.Sequential(getattr(nn, kind)(4, 12, 3, groups=2), mn.nn.BatchChannelNorm(12, 3))
    assert kinds(assert_folds(randomized(model), image(int(kind[-2]))), "GroupNorm", kind) == [1, 1]


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_folding_is_exact_for_every_padding_mode(mode):
    model = randomized(
        nn.Sequential(mn.nn.WSConv2d(4, 12, 3, padding=2, padding_mode=mode), mn.nn.BatchChannelNorm(12))
    )
    assert kinds(assert_folds(model, image()), "BatchNorm2d") == [0]


@pytest.mark.parametrize("method", ["WS", "WN", "CWN"])
def test_same_padded_convolutions_fold_to_those_of_timm(method):
    model = nn.Sequential(layer(method, "Conv2dSame", 4, 12, 3, stride=2), mn.nn.BatchChannelNorm(12))
    folded = assert_folds(randomized(model), image(size=7))
    assert [type(module).__name__ for module in folded] == ["Conv2dSame", "GroupNorm"]


def test_same_padding_without_timm_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm.layers", None)
    with pytest.raises(ImportError, match="pip install timm"):
        mn.fold(mn.nn.WSConv2dSame(4, 12, 3))


def test_same_padding_with_more_padding_is_refused():
    with pytest.raises(ValueError, match="padding=0"):
        mn.fold(mn.nn.WSConv2dSame(4, 12, 3, padding=1))


@pytest.mark.parametrize("kind", [*CONVOLUTIONS, *TRANSPOSED])
def test_an_absorbed_weight_folds_with_what_it_absorbed(kind):
    convolution = layer("WS", kind, 4, 6, 3, groups=2)
    convolution.absorb()
    with torch.no_grad():
        convolution.weight.add_(torch.randn_like(convolution.weight))
    folded = assert_folds(nn.Sequential(convolution), image(int(kind[-2])))
    assert not [name for name, _ in folded.named_buffers()]


def test_a_layer_by_itself_folds():
    assert type(assert_folds(mn.nn.WSConv2d(4, 6, 3), image())) is nn.Conv2d
    assert type(assert_folds(randomized(mn.nn.BatchChannelNorm(4, 2)), image())) is nn.Sequential


@pytest.mark.parametrize("method", ["WS", "WN", "CWN"])
def test_a_linear_layer_takes_the_channel_half_where_its_output_is_a_row_per_sample(method):
    model = nn.Sequential(
        nn.Flatten(), layer(method, "Linear", 16, 12), mn.nn.BatchChannelNorm(12, 3), nn.ReLU(), nn.Linear(12, 2)
    )
    folded = assert_folds(randomized(model), image(1, size=4), example_inputs=True)
    assert kinds(folded, "GroupNorm", "BatchNorm1d") == [1, 0]


def test_a_linear_layer_without_known_rank_keeps_a_batch_norm():
    model = randomized(nn.Sequential(mn.nn.WSLinear(4, 12), mn.nn.BatchChannelNorm(12, 3)))
    assert kinds(assert_folds(model, torch.randn(5, 4)), "SyncBatchNorm") == [1]
    assert kinds(assert_folds(model, torch.randn(5, 4), example_inputs=True), "SyncBatchNorm", "GroupNorm") == [0, 1]


def test_a_norm_over_tokens_is_not_the_channel_half_of_a_linear_layer():
    model = randomized(nn.Sequential(mn.nn.WSLinear(4, 12), mn.nn.BatchChannelNorm(12, 3)))
    assert_folds(model, torch.randn(5, 12, 4), example_inputs=True)  # 12 tokens of 12 channels


# --- norms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [0, 1, 2, 3])
def test_a_norm_that_follows_no_layer_keeps_a_batch_norm_of_its_rank(dims):
    model = randomized(nn.Sequential(nn.ReLU(), mn.nn.BatchChannelNorm(4, 2)))
    assert kinds(assert_folds(model, image(dims)), "SyncBatchNorm") == [1]  # without a convolution no input is guessed
    name = f"BatchNorm{max(dims, 1)}d"
    assert kinds(assert_folds(model, image(dims), example_inputs=True), name, "GroupNorm") == [1, 1]


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("spec", [mn.BN(micro_batch=2), mn.BRN()], ids=["GhostBatchNorm", "BatchRenorm"])
def test_norms_that_evaluate_as_batch_norm_become_it(spec, dims):
    convolution = layer("WS", f"Conv{dims}d", 4, 12, 3)
    model = randomized(nn.Sequential(convolution, spec(12), nn.ReLU()))
    assert kinds(assert_folds(model, image(dims)), f"BatchNorm{dims}d") == [1]


def test_our_instance_norm_becomes_a_group_norm():
    for spec in (mn.IN(), mn.GN(), mn.LN()):
        folded = assert_folds(randomized(nn.Sequential(mn.nn.WSConv2d(4, 6, 3), spec(6))), image())
        assert type(folded[1]) is nn.GroupNorm
        assert vars(folded[1]).keys() == vars(nn.GroupNorm(1, 6)).keys()


@pytest.mark.parametrize("eps", [1e-3, 1e-5])
def test_both_halves_keep_the_eps(eps):
    model = nn.Sequential(mn.nn.WSConv2d(4, 12, 3), mn.nn.BatchChannelNorm(12, 3, eps=eps))
    assert assert_folds(randomized(model), image())[1].eps == eps


@pytest.mark.parametrize("statistics", ["batch", "sequential", "step"])
def test_every_mode_folds_to_its_evaluation(statistics):
    norm = mn.nn.BatchChannelNorm(12, 3, statistics=statistics, rate=0.1)
    model = randomized(nn.Sequential(mn.nn.WSConv2d(4, 12, 3), norm))
    assert_folds(trained(model, image().float()), image())


@pytest.mark.parametrize("act", [nn.ReLU, nn.SiLU, nn.GELU, None])
@pytest.mark.parametrize("drop", [nn.Dropout2d, None])
def test_norms_with_activation_become_a_row_of_layers(drop, act):
    norm = mn.nn.BatchChannelNormAct(12, 3, act_layer=act, drop_layer=drop)
    folded = assert_folds(randomized(nn.Sequential(mn.nn.WSConv2d(4, 12, 3), norm)), image())
    assert kinds(folded, "GroupNorm", "BatchNorm2d") == [1, 0]
    if act is not None:
        assert kinds(folded, act.__name__) == [1]


@pytest.mark.parametrize("activation, layer", [("relu", "ReLU"), ("leaky_relu", "LeakyReLU"), ("silu", "SiLU")])
def test_a_fused_activation_becomes_a_layer(activation, layer):
    norm = mn.nn.BatchChannelNorm(12, 3, activation=activation, negative_slope=0.3)
    model = nn.Sequential(mn.nn.WSConv2d(4, 12, 3), norm)
    assert kinds(assert_folds(randomized(model), image()), layer, "GroupNorm") == [1, 1]


@pytest.mark.parametrize("spec", [mn.GN(), mn.IN(), mn.BRN(), mn.BN(micro_batch=2)], ids=repr)
def test_any_norm_with_activation_becomes_a_row_of_layers(spec):
    norm = mn.nn.norm_act_layer(spec, act_layer=nn.SiLU)(12)
    assert kinds(assert_folds(randomized(nn.Sequential(nn.Conv2d(4, 12, 3), norm)), image()), "SiLU") == [1]


@pytest.mark.parametrize(
    "module, name",
    [
        (mn.SN()(12), "SwitchableNorm"),
        (mn.FRN()(12), "FilterResponseNorm"),
        (mn.EvoNormS0()(12), "EvoNorm"),
        (mn.nn.ChannelsLast(mn.nn.BatchChannelNorm(12)), "ChannelsLast"),
        (type("Mine", (mn.nn.BatchChannelNorm,), {})(12), "Mine"),
    ],
)
def test_a_layer_without_counterpart_is_refused_by_name(module, name):
    with pytest.raises(ValueError, match=rf"'body\.1' \({name}\) has no counterpart"):
        mn.fold(nn.ModuleDict({"body": nn.Sequential(mn.nn.WSConv2d(4, 12, 3), module)}))


def test_a_model_without_layers_of_ours_is_refused():
    with pytest.raises(ValueError, match="nothing to fold: no layer of micronorm among Conv2d, Sequential"):
        mn.fold(nn.Sequential(nn.Conv2d(3, 4, 3)))
    with pytest.raises(TypeError, match=r"a torch\.nn\.Module is needed, got int"):
        mn.fold(3)


def test_wrapped_models_are_refused_with_what_to_pass_instead():
    with pytest.raises(ValueError, match=r"wrapped in DataParallel: pass model\.module"):
        mn.fold(nn.DataParallel(pair()))


# --- warming up -------------------------------------------------------------------------------------------------------


def test_a_layer_half_warm_is_refused_with_what_is_missing():
    model = nn.Sequential(mn.nn.WSConv2d(4, 12, 3), mn.nn.BatchChannelNorm(12))
    model[1].warm(4)
    trained(model, image().float())
    message = r"'1' \(BatchChannelNorm\) is still warming up: blend = 0\.25, 3 of warm_steps = 4 commits are missing"
    with pytest.raises(ValueError, match=message):
        mn.fold(model)
    for _ in range(3):
        trained(model, image().float())
    assert_folds(model, image())


def test_an_averaged_layer_that_lags_behind_its_model_is_refused_with_the_rest():
    model = pair()
    model[1].warm(4)
    model[1].blend.fill_(1 - 2e-5)
    with pytest.raises(
        ValueError, match=r"has blend = 1 - 2e-05, as an averaged copy .*: call layer\.blend\.fill_\(1\)"
    ):
        mn.fold(model)


def test_a_layer_that_has_not_begun_to_warm_up_vanishes_into_its_convolution():
    model = pair()
    model[1].warm(4)
    assert [type(module).__name__ for module in assert_folds(model, image())] == ["Conv2d", "Identity"]


def test_a_layer_that_has_not_begun_to_warm_up_becomes_batch_norm_where_no_convolution_takes_it():
    model = randomized(nn.Sequential(nn.MaxPool2d(2), mn.nn.BatchChannelNormAct(4, 2)))
    model[1].warm(4)
    folded = assert_folds(model, image(), example_inputs=True)
    assert kinds(folded, "BatchNorm2d", "GroupNorm", "ReLU") == [1, 0, 1]


# --- data flow --------------------------------------------------------------------------------------------------------


class Wired(nn.Module):
    """Two convolutions and two norms under a forward given as a function."""

    def __init__(self, wiring, *, traceable: bool = True) -> None:
        super().__init__()
        self.a, self.b = mn.nn.WSConv2d(4, 4, 3, padding=1), mn.nn.WSConv2d(4, 4, 3, padding=1)
        self.n, self.m = mn.nn.BatchChannelNorm(4, 2), mn.nn.BatchChannelNorm(4, 2)
        self.identity = nn.Identity()
        self.wiring, self.traceable = wiring, traceable
        randomized(self)

    def forward(self, x: Tensor):
        if not self.traceable and x.sum() > 1e9:
            return x
        return self.wiring(self, x)


WIRINGS = {  # the norms that keep a BatchNorm; one that is not called does
    "in a row": (lambda m, x: m.m(m.b(m.n(m.a(x)).relu())), ""),
    "an Identity between": (lambda m, x: m.m(m.identity(m.b(m.n(m.a(x))))), ""),
    "pre-activation": (lambda m, x: m.b(m.m(m.a(m.n(x)).relu() + x)), "nm"),
    "concatenated": (lambda m, x: m.n(torch.cat([m.a(x)[:, :2], x[:, :2]], 1)) + m.m(m.b(x)), "n"),
    "a convolution called twice": (lambda m, x: m.n(m.a(x)) + m.m(m.a(x.relu())), "nm"),
    "a norm called twice": (lambda m, x: m.n(m.a(x)) + m.n(m.b(x)), "nm"),
    "an output used beside its norm": (lambda m, x: (y := m.a(x)) + m.n(y), "nm"),
    "an output returned beside its norm": (lambda m, x: [y := m.a(x), m.n(y), m.m(m.b(y))], "n"),
    "something between": (lambda m, x: m.n(2 * m.a(x)) + m.m(m.b(x).relu()), "nm"),
    "changed in place": (lambda m, x: m.n(m.a(x).mul_(2)) + m.m(F.relu(m.b(x), inplace=True)), "nm"),
}


@pytest.mark.parametrize("traceable", [True, False], ids=["fx", "execution"])
@pytest.mark.parametrize("wiring", WIRINGS)
def test_only_the_sole_output_of_one_layer_takes_the_channel_half(wiring, traceable):
    forward, kept = WIRINGS[wiring]
    folded = assert_folds(Wired(forward, traceable=traceable), image(), example_inputs=None if traceable else True)
    assert [name for name in "nm" if isinstance(getattr(folded, name), nn.Sequential)] == list(kept)


def test_nothing_is_merged_where_the_order_of_layers_is_all_that_is_known():
    model = Wired(WIRINGS["in a row"][0], traceable=False)
    model.forward = functools.partial(_refusing_guesses, model)
    assert kinds(mn.fold(model), "SyncBatchNorm", "GroupNorm") == [2, 2]


def _refusing_guesses(model: Wired, x: Tensor) -> Tensor:
    if x.shape[-1] > 100:
        raise ValueError("too large")
    return Wired.forward(model, x)


def test_a_module_registered_twice_folds_to_one_module():
    shared = mn.nn.WSConv2d(4, 4, 3, padding=1)
    folded = assert_folds(nn.Sequential(shared, nn.ReLU(), shared, mn.nn.BatchChannelNorm(4)), image())
    assert folded[0] is folded[2]
    assert kinds(folded, "BatchNorm2d") == [1]


def test_tied_weights_fold_by_themselves():
    model = nn.Sequential(mn.nn.WSConv2d(4, 4, 3), mn.nn.BatchChannelNorm(4), nn.Conv2d(4, 4, 3))
    model[2].weight = model[0].weight
    folded = assert_folds(randomized(model), image())
    assert torch.equal(folded[2].weight, model[2].weight)


def test_a_convolution_whose_weight_is_used_directly_takes_no_channel_half():
    def forward(m, x):
        return m.n(m.plain(x)) + m.plain.weight.mean() + m.m(m.b(x))

    model = Wired(forward)
    model.plain = nn.Conv2d(4, 4, 3, padding=1)
    assert isinstance(assert_folds(model, image()).n, nn.Sequential)


def test_a_raw_weight_that_the_model_computes_with_is_refused():
    with pytest.raises(ValueError, match=r"'a' \(WSConv2d\) is called, but the model also reads its weight"):
        mn.fold(Wired(lambda m, x: m.b(x) + m.a.weight.mean()))


# --- what is left as it was -------------------------------------------------------------------------------------------


def test_the_old_model_is_untouched():
    model = trained(pair(), image().float())
    model[0].eval()
    model.register_forward_hook(lambda *_: None)
    before = copy.deepcopy(model.state_dict())
    flags = [module.training for module in model.modules()]
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    window = model[1]._window.sums.clone()
    folded = mn.fold(model)
    with torch.no_grad():
        for tensor in (*folded.parameters(), *folded.buffers()):
            tensor.fill_(7)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert flags == [module.training for module in model.modules()]
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert torch.equal(window, model[1]._window.sums)
    assert len(model._forward_hooks) == 1
    assert not any(module.training for module in folded.modules())


def test_hooks_of_others_stay_behind():
    model, called = pair(), []
    for module in model.modules():
        module.register_forward_hook(lambda *_: called.append("after"))
        module.register_forward_pre_hook(lambda *_: called.append("before"))
    mn.fold(model)(image().float())
    assert called == []
    model(image().float())
    assert called  # on the old model they run


class Collecting(nn.Module):
    """Returns what its hooks collected, as timm's FeatureHookNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(pair(), nn.Conv2d(12, 4, 1), pair(6))
        self.seen: list[Tensor] = []
        self.body[0][0].register_forward_hook(functools.partial(self.collect))
        self.body[0][1].register_forward_hook(self.collect)

    def collect(self, module, args, output) -> None:
        self.seen.append(output)

    def forward(self, x: Tensor) -> list[Tensor]:
        self.seen.clear()
        return [self.body(x), *self.seen]


def test_hooks_of_the_model_itself_go_on_seeing_what_they_saw():
    model = Collecting()
    folded = assert_folds(model, image(), example_inputs=True)
    assert kinds(folded, "BatchNorm2d") == [1]  # the hooked convolution's output must stay as it was
    assert folded.seen is not model.seen


# --- dtypes and layouts -----------------------------------------------------------------------------------------------


def test_dtype_device_memory_format_and_requires_grad_stay():
    model = pair().to(memory_format=torch.channels_last)
    model[0].weight.requires_grad_(False)
    folded = mn.fold(model)
    assert folded[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not folded[0].weight.requires_grad
    assert {p.dtype for p in folded.parameters()} == {torch.float32}
    assert {p.dtype for p in mn.fold(model.double()).parameters()} == {torch.float64}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_models_fold(dtype):
    model = randomized(nn.Sequential(nn.MaxPool2d(1), mn.nn.BatchChannelNorm(4, 2), *pair()))
    x = image().to(dtype)
    expected = copy.deepcopy(model).double().eval()(x.double())
    actual = mn.fold(model.to(dtype))(x)
    assert actual.dtype == dtype
    # a dozen roundings to half a unit, where the layers themselves do two
    assert_close_to_max(actual, expected, tol=8 * tolerance("output", dtype))


def test_a_scale_beyond_the_dtype_stays_in_a_batch_norm():
    model = pair().half()
    model[1].running_var.fill_(1e-12)
    model[1].eps = 1e-14
    folded = mn.fold(model)
    assert kinds(folded, "BatchNorm2d") == [1]
    assert folded[0].weight.isfinite().all()


# --- degenerate cases -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 4, 1, 1), (1, 4, 5, 5), (0, 4, 5, 5), (7, 4, 1, 1)], ids=str)
def test_one_sample_one_position_and_no_sample_fold(shape):
    model = randomized(nn.Sequential(mn.nn.WSConv2d(4, 12, 1), mn.nn.BatchChannelNorm(12, 3)))
    assert_folds(model, torch.randn(shape, dtype=torch.float64))


def test_one_value_per_group_is_refused_by_torch():
    folded = mn.fold(nn.Sequential(mn.nn.WSConv2d(4, 12, 1), mn.nn.BatchChannelNorm(12, 12)))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        folded(torch.randn(1, 4, 1, 1))


def test_one_channel_per_group_folds():
    model = randomized(nn.Sequential(mn.nn.WSConv2d(4, 12, 1), mn.nn.BatchChannelNorm(12, 12)))
    assert_folds(model, image())


def ultralytics_scale(conv: nn.Module, norm: nn.Module) -> torch.Tensor:
    """Return the diagonal matrix with which Ultralytics' fuse multiplies a convolution's weight."""
    return torch.diag(norm.weight.div(torch.sqrt(norm.eps + norm.running_var)))


@pytest.mark.parametrize("fuse", [fuse_conv_bn_eval, ultralytics_scale])
def test_tools_that_fold_batch_norm_fail_loudly_on_bcn(fuse):
    model = mn.convert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))).eval()
    with pytest.raises(RuntimeError, match=r"mn\.fold\(model\)"):
        fuse(*model)
    fuse(nn.Conv2d(3, 8, 3).eval(), nn.BatchNorm2d(8).eval())  # which they may fold


def add_a_bias(conv: nn.Module, norm: nn.Module) -> None:
    """Do what Ultralytics' fuse does with a convolution that has no bias, after scaling its weight."""
    conv.register_parameter("bias", nn.Parameter(torch.zeros_like(norm.running_mean)))


@pytest.mark.parametrize("fuse, bias", [(fuse_conv_bn_eval, False), (fuse_conv_bn_eval, True), (add_a_bias, False)])
@pytest.mark.parametrize("weight", [mn.WS(), mn.WN(), mn.CWN()], ids=str)
def test_tools_that_fold_batch_norm_fail_loudly_on_a_standardized_weight(fuse, bias, weight):
    model = mn.convert(nn.Sequential(nn.Conv2d(3, 8, 3, bias=bias), nn.BatchNorm2d(8)), None, weight).eval()
    with pytest.raises(RuntimeError, match=r"mn\.fold\(model\)"):
        fuse(*model)
    assert_folds(model.double(), image(channels=3))


@pytest.mark.parametrize("training", [True, False])
def test_weight_and_bias_may_be_replaced_for_other_reasons(training):
    conv, other = (mn.nn.WSConv2d(3, 8, 3).train(training) for _ in range(2))
    conv.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(conv.weight, other.weight)
    conv.bias = nn.Parameter(torch.ones(8))
    conv.weight = nn.Parameter(conv.weight[:4].detach())  # pruned
    conv.bias = nn.Parameter(conv.bias[:4].detach())
    conv.train().weight = nn.Parameter(torch.ones(4, 3, 3, 3))
    conv.bias = nn.Parameter(torch.ones(4))


def test_eps_is_a_number_for_everything_else():
    norm = mn.nn.BatchChannelNorm(8, eps=1e-3)
    assert (norm.eps, repr(norm.eps), norm.eps * 2, type(float(norm.eps))) == (1e-3, "0.001", 2e-3, float)
    norm.eps = 1e-2
    assert copy.deepcopy(norm).eps == 1e-2
    assert all(type(layer.eps) is float for layer in mn.fold(nn.Sequential(norm)).modules() if hasattr(layer, "eps"))
