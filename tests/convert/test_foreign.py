"""The authors' layers are written here from their equations and named as in their repositories; ours must agree."""

import os
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import StdConv2d
from torch import Tensor, nn
from torchvision.models import resnet18

import micronorm as mn
from micronorm.convert.foreign import AUTHORS_BCN, AUTHORS_WS, TIMM_BIT, Standardization, load_foreign
from tests.tolerances import assert_close_to_max, tolerance

GROUPS = 4
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


# --- the originals ---------------------------------------------------------------------------------------------------


class TheirConv(nn.Conv2d):
    """(W − μ)/(σ + 1e-5), or (W − μ)/sqrt(σ² + 1e-5), with the unbiased σ²."""

    def __init__(self, *args, in_root: bool, **kwargs):
        super().__init__(*args, **kwargs)
        self.in_root = in_root

    def forward(self, input: Tensor) -> Tensor:
        centred = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        var = centred.square().sum((1, 2, 3), keepdim=True) / (self.weight[0].numel() - 1)
        return self._conv_forward(
            input, centred / ((var + 1e-5).sqrt() if self.in_root else var.sqrt() + 1e-5), self.bias
        )


class TheirEstimates(nn.Module):
    """Algorithm 1 with a rate kept in a buffer, `estbn_moving_speed`, which their code leaves at 0."""

    def __init__(self, channels: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.register_buffer("num_batches_tracked", torch.tensor(0))
        self.register_buffer("estbn_moving_speed", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        def along(t: Tensor) -> Tensor:
            return t[:, None, None]

        if self.training:
            r = self.estbn_moving_speed
            mean = x.detach().mean((0, 2, 3))
            square = (x.detach() - along(self.running_mean)).square().mean((0, 2, 3))
            self.running_mean += r * (mean - self.running_mean)
            self.running_var += r * (square - self.running_var)
        normal = (x - along(self.running_mean)) / along(self.running_var + 1e-5).sqrt()
        return along(self.weight) * normal + along(self.bias)


class TheirNorm(nn.Module):
    """The group half, with its affine of 1×G×1, around a child of any of their names."""

    def __init__(self, channels: int, *, groups: int = GROUPS, child: str = "pbn", estimate: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, groups, 1))
        self.bias = nn.Parameter(torch.zeros(1, groups, 1))
        self.child = child
        self.add_module(child, TheirEstimates(channels) if estimate else nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = getattr(self, self.child)(x).reshape(len(x), self.weight.shape[1], -1)
        centred = y - y.mean(2, keepdim=True)
        normal = centred / (centred.square().mean(2, keepdim=True) + 1e-5).sqrt()
        return (self.weight * normal + self.bias).reshape(x.shape)


class Net(nn.Module):
    """A residual block between a stem and a classifier, named as in their ResNet."""

    def __init__(self, conv: Callable, norm: Callable):
        super().__init__()
        self.conv1, self.bn1 = conv(3, 8, 3, padding=1, bias=False), norm(8)
        block = nn.Module()
        block.conv1, block.bn1 = conv(8, 16, 3, stride=2, padding=1, bias=False), norm(16)
        block.conv2, block.bn2 = conv(16, 16, 3, padding=1, groups=2, bias=False), norm(16)
        block.downsample = nn.Sequential(conv(8, 16, 1, stride=2, bias=False), norm(16))
        self.layer1 = nn.ModuleList([block])
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        for block in self.layer1:
            y = block.bn2(block.conv2(block.bn1(block.conv1(x)).relu()))
            x = (y + block.downsample(x)).relu()
        return self.fc(x.mean((2, 3)))


def scrambled(model: Any, seed: int = 0) -> Any:
    """Every parameter and estimate at random; weights as small as trained ones, with a mean, rows of unequal size."""
    g = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        with torch.no_grad():
            if tensor.ndim > 3:
                rows = torch.rand(len(tensor), 1, 1, 1, generator=g) * 0.05 + 0.005
                tensor.copy_(rows * torch.randn(tensor.shape, generator=g) + 0.02)
            elif name.endswith("running_var") or (name.endswith("weight") and tensor.ndim != 2):
                tensor.copy_(torch.rand(tensor.shape, generator=g) + 0.5)
            elif tensor.is_floating_point() and not name.endswith("speed"):
                tensor.copy_(torch.randn(tensor.shape, generator=g) * 0.3)
    return model


def theirs(*, in_root: bool = True, **norm) -> Net:
    return scrambled(Net(partial(TheirConv, in_root=in_root), partial(TheirNorm, **norm)))


def ours(eps: float = 1e-5, dtype: torch.dtype = torch.float32, **norm) -> Net:
    norm_layer = partial(mn.nn.BatchChannelNorm, num_groups=GROUPS, **norm)
    return Net(partial(mn.nn.WSConv2d, eps=eps), norm_layer).to(dtype)


def image(dtype: torch.dtype = torch.float32, n: int = 6) -> Tensor:
    return torch.randn(n, 3, 12, 12, generator=torch.Generator().manual_seed(1)).to(dtype)


def assert_same(actual: nn.Module, expected: nn.Module, dtype: torch.dtype, x: Tensor | None = None) -> None:
    """`actual` in the dtype under test against `expected` in float64, on the same input."""
    x = image(dtype) if x is None else x.to(dtype)
    assert_close_to_max(actual(x), expected.double()(x.double()), tol=tolerance("one_step", dtype))


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def assert_untouched(model: nn.Module, before: dict[str, Tensor]) -> None:
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


# --- the authors' networks -------------------------------------------------------------------------------------------

FORMULAS = pytest.mark.parametrize("in_root, formula", [(False, AUTHORS_WS), (True, AUTHORS_BCN)], ids=["WS", "BCN"])


@DTYPES
@FORMULAS
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_the_large_batch_network_computes_what_theirs_did(tmp_path, dtype, in_root, formula, training):
    original = theirs(in_root=in_root)
    wrapped = {f"module.{key}": value for key, value in original.state_dict().items()}
    path = tmp_path / "model_best.pth.tar"
    torch.save({"epoch": 90, "state_dict": wrapped, "acc": 75.1, "best_acc": 75.2, "optimizer": {"state": {}}}, path)
    model = ours(statistics="batch", dtype=dtype)
    report = load_foreign(model, path, standardization=formula)
    assert report.prefix == "module."
    assert set(report.loaded) == set(model.state_dict())
    assert set(report.rescaled) == {"conv1", "layer1.0.conv1", "layer1.0.conv2", "layer1.0.downsample.0"}
    assert_same(model.train(training), original.train(training), dtype)
    if training:  # BatchNorm2d's running statistics move alike
        for name in ("bn1", "layer1.0.downsample.1"):
            for leaf in ("running_mean", "running_var"):
                moved, expected = model.get_submodule(name), original.get_submodule(name).pbn
                assert_close_to_max(getattr(moved, leaf), getattr(expected, leaf), tol=tolerance("one_step", dtype))


def test_the_formula_makes_a_difference():
    original, model = theirs(in_root=True).eval(), ours().eval()
    load_foreign(model, original.state_dict(), standardization=AUTHORS_WS)
    with pytest.raises(AssertionError, match="relative error"):
        assert_same(model, original, torch.float32)


@DTYPES
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_the_network_of_estimates_computes_what_theirs_did(dtype, training):
    original = theirs(child="bn", estimate=True)
    model = ours(dtype=dtype)
    report = load_foreign(model, original.state_dict(), standardization=AUTHORS_BCN)
    assert report.renamed["bn1.bn.running_var"] == "bn1.running_var"
    assert {"bn1.bn.num_batches_tracked", "bn1.bn.estbn_moving_speed"} <= set(report.dropped)
    assert report.unmoved == ()
    assert_same(model.train(training), original.train(training), dtype)


def test_the_sequential_mode_goes_on_as_their_estimates_would_at_the_same_rate():
    original = theirs(child="bn", estimate=True)
    model = ours(statistics="sequential", rate=0.25, micro_batch=6, dtype=torch.float64)
    load_foreign(model, original.state_dict(), standardization=AUTHORS_BCN)
    for module in original.modules():
        if isinstance(module, TheirEstimates):
            module.estbn_moving_speed.fill_(0.25)
    for _ in range(3):
        assert_same(model, original, torch.float64)


def test_estimates_that_never_moved_are_reported():
    original = theirs(child="bn", estimate=True)
    original.bn1.bn.running_mean.zero_()
    original.bn1.bn.running_var.fill_(1)
    report = load_foreign(ours(), original.state_dict(), standardization=AUTHORS_BCN)
    assert report.unmoved == ("bn1",)
    assert "1 layers with estimates that never moved" in str(report)


def test_a_torchvision_resnet_of_our_layers_takes_their_resnet():
    # Their l_resnet18 has torchvision's names, 32 groups everywhere and their GN in the place of BatchNorm2d.
    original = resnet18(num_classes=10, norm_layer=partial(TheirNorm, groups=32))
    model = resnet18(num_classes=10, norm_layer=mn.BCN(groups=32))
    for net, make in ((original, partial(TheirConv, in_root=True)), (model, mn.nn.WSConv2d)):
        replace(net, nn.Conv2d, make)
    load_foreign(model, scrambled(original).state_dict(), standardization=AUTHORS_BCN)
    x = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert_same(model.eval(), original.eval(), torch.float32, x)


@DTYPES
def test_group_normalization_with_standardized_weights_needs_no_renaming(dtype):
    original = scrambled(Net(partial(TheirConv, in_root=False), partial(nn.GroupNorm, GROUPS)))
    model = Net(mn.nn.WSConv2d, mn.GN(groups=GROUPS)).to(dtype)
    report = load_foreign(
        model, {f"module.{k}": v for k, v in original.state_dict().items()}, standardization=AUTHORS_WS
    )
    assert report.renamed == {}
    assert_same(model, original, dtype)


def test_a_network_without_standardized_weights_needs_no_formula():
    original = scrambled(Net(nn.Conv2d, TheirNorm))
    model = Net(nn.Conv2d, partial(mn.nn.BatchChannelNorm, num_groups=GROUPS)).double()
    assert load_foreign(model, original.state_dict()).rescaled == {}
    assert_same(model.eval(), original.eval(), torch.float64)


def test_a_norm_alone_is_a_model_too():
    original = scrambled(TheirNorm(8)).eval()
    model = mn.nn.BatchChannelNorm(8, GROUPS).double().eval()
    model.warm(3)
    load_foreign(model, original.state_dict())
    assert model.warm_steps == 0  # theirs is BCN in full
    assert_same(model, original, torch.float64, torch.randn(2, 8, 5, 5))


def test_batch_norm_files_without_a_counter_load():
    original = scrambled(Net(nn.Conv2d, nn.BatchNorm2d)).eval()
    state = {key: value for key, value in original.state_dict().items() if "tracked" not in key}
    model = Net(nn.Conv2d, nn.BatchNorm2d).double().eval()
    report = load_foreign(model, state)
    assert set(report.loaded) == set(state)
    assert_same(model, original, torch.float64)


# --- timm ------------------------------------------------------------------------------------------------------------


def replace(net: nn.Module, kind: type[nn.Conv2d], make: Callable) -> None:
    """Put make(…) in the place of every convolution whose class is `kind` itself."""
    for name, old in list(net.named_modules()):
        if type(old) is kind:
            parent, _, leaf = name.rpartition(".")
            settings = (old.kernel_size, old.stride, old.padding, old.dilation, old.groups, old.bias is not None)
            net.get_submodule(parent).register_module(leaf, make(old.in_channels, old.out_channels, *settings))


@pytest.mark.parametrize("eps", [1e-8, 1e-5], ids=["their eps", "our eps"])
@pytest.mark.parametrize("name", ["resnetv2_50x1_bit", pytest.param("resnetv2_101x1_bit", marks=pytest.mark.slow)])
def test_timm_bit_networks_compute_what_they_did(tmp_path, name, eps):
    original = scrambled(timm.create_model(name, pretrained=False, num_classes=7)).eval()
    path = tmp_path / "model.safetensors"
    save_file(original.state_dict(), path)
    model = timm.create_model(name, pretrained=False, num_classes=7).eval()
    replace(model, StdConv2d, partial(mn.nn.WSConv2d, eps=eps))
    report = load_foreign(model, path, standardization=TIMM_BIT)
    assert report.renamed == {}
    assert bool(report.rescaled) == (eps != 1e-8)  # with the eps of the file not a bit of the weights changes
    if eps == 1e-8:
        assert_untouched(model, original.state_dict())
    x = torch.randn(1, 3, 48, 48, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert_same(model, original, torch.float32, x)


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", ["state_dict", "model", "model_state_dict", None])
@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod."])
def test_what_wraps_a_state_dict_does_not_change_what_is_loaded(tmp_path, wrap, prefix):
    original = theirs()
    state = {prefix + key: value for key, value in original.state_dict().items()}
    path = tmp_path / "checkpoint.pth"
    torch.save({wrap: state, "iteration": 3} if wrap else state, path, _use_new_zipfile_serialization=wrap is None)
    model = ours(dtype=torch.float64).eval()
    report = load_foreign(model, path, standardization=AUTHORS_BCN)
    assert report.prefix == prefix
    assert_same(model, original.eval(), torch.float64)


def test_a_model_inside_a_wrapper_keeps_its_prefix():
    original, model = theirs(), nn.Sequential()
    model.add_module("module", ours(dtype=torch.float64))
    report = load_foreign(
        model, {f"module.{k}": v for k, v in original.state_dict().items()}, standardization=AUTHORS_BCN
    )
    assert report.prefix == ""
    assert_same(model.eval(), original.eval(), torch.float64)


class Trap:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
def test_nothing_that_a_file_brings_is_executed(tmp_path, form):
    path, marker = tmp_path / "checkpoint.pth", tmp_path / "executed"
    state = {"state_dict": theirs().state_dict(), "args": Trap(marker)}
    if form == "pickle":
        path.write_bytes(pickle.dumps(state, protocol=2))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=form == "zip")
    model = ours()
    before = bits(model)
    with pytest.raises(ValueError, match=r"checkpoint\.pth is not a state dict of torch\.save, or contains code"):
        load_foreign(model, path, standardization=AUTHORS_BCN)
    assert not marker.exists()
    assert_untouched(model, before)


@pytest.mark.parametrize("name", ["a.safetensors", "a.pth"])
def test_a_file_that_is_none_is_refused_by_name(tmp_path, name):
    (tmp_path / name).write_bytes(b"not a checkpoint at all")
    with pytest.raises(ValueError, match=name):
        load_foreign(ours(), tmp_path / name, standardization=AUTHORS_BCN)


def test_a_file_of_something_else_is_refused_by_name(tmp_path):
    torch.save([torch.zeros(2)], tmp_path / "list.pth")
    with pytest.raises(ValueError, match=r"list\.pth holds a list, not a state dict"):
        load_foreign(ours(), tmp_path / "list.pth", standardization=AUTHORS_BCN)


# --- refusals --------------------------------------------------------------------------------------------------------


def without(state: dict, *keys: str) -> dict:
    return {key: value for key, value in state.items() if key not in keys}


def renamed(state: dict, old: str, new: str) -> dict:
    return {key.replace(old, new): value for key, value in state.items()}


REFUSALS: dict[str, tuple[Callable[[dict], dict], str]] = {
    "missing weight": (lambda s: without(s, "fc.bias"), r"missing in the file: 'fc\.bias'"),
    "missing estimate": (lambda s: without(s, "bn1.pbn.running_var"), r"missing in the file: 'bn1\.running_var'"),
    "missing group affine": (lambda s: without(s, "bn1.weight"), r"missing in the file: 'bn1\.group_weight'"),
    "missing layer": (
        lambda s: {key: value for key, value in s.items() if not key.startswith("bn1.")},
        r"missing in the file: 'bn1\.weight', 'bn1\.bias', 'bn1\.group_weight'",
    ),
    "unexpected": (lambda s: s | {"extra.weight": torch.ones(1)}, r"in the file but not in the model: 'extra\.weight'"),
    "unexpected in a norm": (
        lambda s: s | {"bn1.pbn.surprise": torch.ones(1)},
        r"in the file but not in the model: 'bn1\.pbn\.surprise'",
    ),
    "shape": (lambda s: s | {"fc.weight": torch.ones(4, 16)}, r"fc\.weight: shape \(4, 16\) in the file, \(5, 16\)"),
    "channels": (lambda s: s | {"bn1.pbn.bias": torch.ones(8, 1)}, r"bn1\.bias: shape \(8, 1\) in the file, \(8,\)"),
    "groups": (
        lambda s: s | {"bn1.weight": torch.ones(1, 2, 1)},
        r"bn1\.group_weight: shape \(2,\) in the file",
    ),
    "kind": (lambda s: s | {"fc.bias": torch.ones(5, dtype=torch.long)}, r"fc\.bias: torch\.int64 in the file"),
    "unknown naming": (
        lambda s: renamed(s, "pbn", "inner"),
        r"in the file but not in the model: 'bn1\.inner\.weight'",
    ),
    "two namings": (
        lambda s: s | {"bn1.bn.weight": torch.ones(8)},
        r"in the file but not in the model: 'bn1\.bn\.weight'",
    ),
    "batch normalization": (
        lambda s: without_groups(s),
        r"missing in the file: 'bn1\.group_weight', 'bn1\.group_bias'",
    ),
    "our own": (lambda s: ours().state_dict(), r"bn1\.group_weight: the file is micronorm's own, for model"),
    "not finite": (
        lambda s: s | {"conv1.weight": torch.full((8, 3, 3, 3), torch.nan)},
        r"conv1\.weight: not finite in torch\.float32",
    ),
    "no state dict": (lambda s: {"epoch": 3, "weights": s}, r"'epoch', 'weights' in it are no tensors"),
    "empty": (lambda s: {"state_dict": {}}, r"it is empty"),
}


def without_groups(state: dict) -> dict:
    """What the same network with BatchNorm2d alone would have saved."""
    grouped = {key.rsplit(".pbn.", 1)[0] for key in state if ".pbn." in key}
    kept = {key: value for key, value in state.items() if key.rpartition(".")[0] not in grouped}
    return renamed(kept, ".pbn.", ".")


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_named_and_the_model_stays_as_it_was(case):
    spoil, message = REFUSALS[case]
    model = ours()
    before = bits(model)
    with pytest.raises(ValueError, match=message):
        load_foreign(model, spoil(theirs().state_dict()), standardization=AUTHORS_BCN)
    assert_untouched(model, before)


@pytest.mark.parametrize(
    "model, formula, message",
    [
        (ours(), None, r"'conv1', .* standardize their weights, and a file does not say how"),
        (ours(eps=0), AUTHORS_BCN, r"conv1\.weight: built with eps=0, no scale of the weight gives"),
        (ours(), Standardization(eps=0, unbiased=False, eps_in_root=True), r"conv1\.weight: built with eps=1e-05, no"),
        (
            Net(partial(mn.nn.WSConv2d, center=False), partial(mn.nn.BatchChannelNorm, num_groups=GROUPS)),
            AUTHORS_BCN,
            r"conv1\.weight: built with center=False, scale=True; .* does both",
        ),
        (
            Net(mn.nn.WSConv2d, partial(mn.nn.BatchChannelNorm, num_groups=GROUPS, eps=1e-3)),
            AUTHORS_BCN,
            r"bn1: built with eps=0\.001, the authors' is 1e-05",
        ),
    ],
    ids=["no formula", "our eps is 0", "their eps is 0", "half a standardization", "another eps of the norm"],
)
def test_a_model_that_cannot_compute_what_theirs_did_is_refused(model, formula, message):
    before = bits(model)
    with pytest.raises(ValueError, match=message):
        load_foreign(model, theirs().state_dict(), standardization=formula)
    assert_untouched(model, before)
