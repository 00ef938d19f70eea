"""`measure_norms`: its figures are those of the data, whatever the norm and however its activation is called."""

import copy
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import micronorm as mn
from micronorm.convert.surgery import restore_forwards
from micronorm.diagnostics.norm_stats import measure_norms
from micronorm.diagnostics.norms import stat_diff
from tests.networks import SmallResNet
from tests.tolerances import assert_close_to_max, tolerance

WIDE = torch.float64
EXACT = tolerance("output", WIDE) * 10


def images(count: int = 6, channels: int = 8) -> Tensor:
    """N×8×5×5 with channels of quite different means and deviations."""
    scale = torch.linspace(0.5, 3, channels, dtype=WIDE).view(-1, 1, 1)
    return torch.randn(count, channels, 5, 5, dtype=WIDE) * scale + torch.linspace(-2, 4, channels).view(-1, 1, 1)


def estimating(norm: Any) -> Any:
    """The norm with estimates that are not those of the data."""
    norm.running_mean.copy_(torch.linspace(-1, 1, 8))
    norm.running_var.copy_(torch.linspace(0.5, 2, 8))
    return norm


def spread(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance per channel, N×C×…."""
    dims = [d for d in range(x.ndim) if d != 1]
    return x.mean(dims), x.var(dims, correction=0)


class LayerNorm2d(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


NORMS = {
    "GroupNorm": lambda: nn.GroupNorm(2, 8),
    "our GroupNorm": lambda: mn.nn.GroupNorm(4, 8),
    "LN": lambda: mn.LN()(8),
    "IN": lambda: mn.IN()(8),
    "InstanceNorm2d": lambda: nn.InstanceNorm2d(8),
    "InstanceNorm2d by estimates": lambda: estimating(nn.InstanceNorm2d(8, track_running_stats=True)),
    "BatchNorm2d": lambda: estimating(nn.BatchNorm2d(8)),
    "BatchNorm2d of batches": lambda: nn.BatchNorm2d(8, track_running_stats=False),
    "LayerNorm of all": lambda: nn.LayerNorm((8, 5, 5)),
    "LayerNorm2d": lambda: LayerNorm2d(8),
    "GhostBatchNorm": lambda: estimating(mn.BN(micro_batch=2)(8)),
    "BCN": lambda: estimating(mn.BCN(groups=2)(8)),
}


@pytest.mark.parametrize("name", NORMS)
def test_moments_before_and_after_are_those_of_the_input_and_of_the_output_without_affine(name):
    norm = NORMS[name]().to(WIDE)
    x = images()
    seen = measure_norms(norm, x.split([4, 2]))[""]
    inputs, outputs = x, norm.eval()(x) if "batches" not in name else torch.cat([norm(p) for p in x.split([4, 2])])
    if isinstance(norm, mn.nn.BatchChannelNorm):  # its group half normalizes the result of its channel half
        inputs = F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps)
    for moments, data in ((seen.grouped, inputs), (seen.normalized, outputs)):
        mean, var = spread(data)
        assert_close_to_max(moments.mean, mean, tol=EXACT, scale=1.0)
        assert_close_to_max(moments.var, var, tol=EXACT)
    assert (seen.samples, seen.positions, seen.channels) == (6, 150, 8)
    assert_close_to_max(seen.positive, (outputs > 0).double().mean((0, 2, 3)), tol=EXACT)


@pytest.mark.parametrize("name", [name for name in NORMS if name != "LayerNorm of all"])
def test_the_affine_transformation_does_not_enter_the_distance_to_bn(name):
    norm, x = NORMS[name]().to(WIDE), images()
    before = measure_norms(norm, [x])[""].figures()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    after = measure_norms(norm, [x])[""].figures()
    for key in ("stat_diff", "stat_diff_worst", "sigma_mean", "sigma_std"):
        assert after[key] == before[key]
    assert not list(norm.parameters()) or after["active"] != before["active"]


@pytest.mark.parametrize("rows", [(4,), (4, 3), (2, 2, 3)])
def test_a_layer_norm_over_tokens_has_its_channels_last(rows):
    norm = nn.LayerNorm(8).to(WIDE)
    x = torch.randn(*rows, 8, dtype=WIDE) * 2 + torch.arange(8.0)
    seen = measure_norms(norm, [x])[""]
    flat = x.reshape(-1, 8)
    assert_close_to_max(seen.grouped.mean, flat.mean(0), tol=EXACT)
    assert_close_to_max(seen.normalized.var, norm(flat).var(0, correction=0), tol=EXACT)
    assert torch.equal(seen.positive, (norm(flat) > 0).double().mean(0))
    assert seen.figures()["groups"] == 1


def test_batch_normalization_in_training_lies_at_the_origin():
    figures = measure_norms(nn.BatchNorm2d(8, eps=1e-9).to(WIDE), images().split(3), statistics="batch")[""].figures()
    assert (figures["stat_diff"], figures["stat_diff_worst"]) == (0, 0)
    assert max(figures["sigma_mean"], figures["sigma_std"]) < 1e-8  # eps/var


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_stat_diff_of_group_normalization_is_that_of_its_input_channels(groups):
    x = images()
    seen = measure_norms(nn.GroupNorm(groups, 8).to(WIDE), [x])[""]
    expected = stat_diff(*spread(x), groups)
    assert_close_to_max(seen.stat_diff, expected, tol=EXACT)
    figures = seen.figures()
    assert figures["stat_diff"] == pytest.approx(float(expected.mean()))
    assert figures["stat_diff_worst"] == pytest.approx(float(expected.max()))


def test_stat_diff_of_bcn_is_that_of_what_its_group_half_is_given():
    x, norm = images(), mn.BCN(groups=2)(8).to(WIDE)
    assert measure_norms(norm, [x])[""].figures()["stat_diff"] > 0.5
    mn.calibrate(norm, [x])
    calibrated = measure_norms(norm, [x])[""].figures()
    assert calibrated["stat_diff_worst"] < 1e-6


def test_a_figure_has_the_keys_that_records_name():
    figures = measure_norms(nn.GroupNorm(2, 8).to(WIDE), [images()])[""].figures()
    spreads = ["stat_diff", "stat_diff_worst", "sigma_mean", "sigma_std"]
    assert list(figures) == ["kind", "norm", "channels", "groups", *spreads, "active", "dead", "rare"]
    assert (figures["kind"], figures["norm"]) == ("norm", "GroupNorm")


# --- activations -----------------------------------------------------------------------------------------------------


def test_functional_activations_are_seen_directly_and_behind_the_addition_of_a_shortcut():
    model, x = SmallResNet(mn.GN(groups=2)).double(), torch.randn(5, 3, 8, 8, dtype=WIDE)
    seen = measure_norms(model, [x])
    assert {name: (one.activation, one.residual) for name, one in seen.items()} == {
        "norm": ("relu", False),
        "block1.norm1": ("relu", False),
        "block1.norm2": ("relu", True),
        "down_norm": ("relu", False),
        "block2.norm1": ("relu", False),
        "block2.norm2": ("relu", True),
    }
    stem = F.relu(model.norm(model.stem(x)))
    block = model.block1(stem)
    assert torch.equal(seen["norm"].active, (stem > 0).double().mean((0, 2, 3)))
    assert torch.equal(seen["block1.norm2"].active, (block > 0).double().mean((0, 2, 3)))
    assert not torch.equal(seen["block1.norm2"].active, seen["block1.norm2"].positive)


@pytest.mark.parametrize("spec", [mn.BCN(groups=2), mn.GN(groups=2)])
def test_a_fused_model_is_seen_as_its_unfused_twin_is(spec):
    fused = mn.convert(torchvision.models.resnet18(num_classes=5), spec, None)
    twin = copy.deepcopy(fused)
    assert restore_forwards(twin) > 0
    x = torch.randn(3, 3, 32, 32)
    left, right = measure_norms(fused, [x]), measure_norms(twin, [x])
    assert left.keys() == right.keys()  # fused blocks compute their shortcut before the last norm
    assert all(one.activation == "relu" for one in left.values())
    for name, one in left.items():
        assert one.figures() == right[name].figures()
        assert torch.equal(one.active, right[name].active)
    assert restore_forwards(fused) > 0  # the rewritten forwards are still there


@pytest.mark.parametrize("activation", ["relu", "silu", "leaky_relu"])
def test_a_norm_with_an_activation_of_its_own_or_of_the_call_is_seen(activation):
    class Asked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = mn.nn.GroupNorm(2, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x, activation=activation)

    x = images()
    own = nn.Sequential(mn.nn.BatchChannelNorm(8, 2, activation=activation)).double()
    plain = mn.nn.BatchChannelNorm(8, 2).double()
    one = measure_norms(own, [x])["0"]
    assert (one.activation, one.residual) == (activation, False)
    assert torch.equal(one.active, (plain(x) > 0).double().mean((0, 2, 3)))
    two = measure_norms(Asked().double(), [x])["norm"]
    assert (two.activation, two.residual) == (activation, False)
    assert torch.equal(two.active, (F.group_norm(x, 2) > 0).double().mean((0, 2, 3)))


@pytest.mark.parametrize("given", ["relu", None])
def test_a_residual_given_to_the_norm_is_told_from_its_own_output(given):
    class Asked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = mn.nn.GroupNorm(2, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x, residual=torch.full_like(x, 3.0), activation=given)
            return y if given else F.relu(y)

    x = images()
    seen = measure_norms(Asked().double(), [x])["norm"]
    y = F.group_norm(x, 2)
    assert (seen.activation, seen.residual) == ("relu", True)
    assert torch.equal(seen.active, (y + 3 > 0).double().mean((0, 2, 3)))
    assert torch.equal(seen.positive, (y > 0).double().mean((0, 2, 3)))


def test_timm_s_norms_with_activations_are_seen_before_and_after_these():
    timm = pytest.importorskip("timm")
    x = images()
    for layer in (timm.layers.BatchNormAct2d(8), timm.layers.GroupNormAct(8, group_size=4)):
        norm = layer.double()
        nn.init.normal_(norm.bias)
        seen = measure_norms(norm, [x])[""]
        raw = copy.deepcopy(norm)
        raw.act = nn.Identity()
        assert (seen.activation, seen.residual) == ("relu", False)
        assert torch.equal(seen.positive, (raw.eval()(x) > 0).double().mean((0, 2, 3)))
        assert torch.equal(seen.active, seen.positive)
        assert seen.negative.max() > 0  # before the ReLU


def test_our_norms_in_the_place_of_timm_s_are_seen_so_too():
    x = images()
    norms = (mn.nn.BatchChannelNormAct(8, 2), mn.nn.NormAct(mn.nn.GroupNorm(2, 8), act=nn.ReLU()))
    for model, name in zip(norms, ("", "norm"), strict=True):
        seen = measure_norms(model.double(), [x])[name]
        assert seen.activation == "relu"
        assert seen.negative.max() > 0
        assert torch.equal(seen.active, seen.positive)


def test_where_no_activation_is_seen_the_norm_s_own_output_counts():
    model = nn.Sequential(nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 1), nn.ReLU()).double()
    x = images()
    seen = measure_norms(model, [x])["0"]
    assert seen.activation is None
    assert torch.equal(seen.active, (model[0](x) > 0).double().mean((0, 2, 3)))


def test_a_shared_norm_is_one_layer_that_sees_all_its_calls():
    norm = nn.GroupNorm(2, 8)
    model = nn.Sequential(norm, nn.ReLU(), norm, nn.ReLU()).double()
    seen = measure_norms(model, [images(3)])
    assert list(seen) == ["0"]
    assert (seen["0"].samples, seen["0"].positions, seen["0"].activation) == (6, 150, "relu")


def test_of_a_sum_only_the_summand_that_keeps_it_down_has_the_dead_channel():
    model = SmallResNet(partial(nn.GroupNorm, 2), channels=8).double()
    with torch.no_grad():
        model.block1.norm2.bias[3] = -50
    seen = measure_norms(model, [torch.randn(8, 3, 8, 8, dtype=WIDE)])
    assert seen["block1.norm2"].dead.nonzero().flatten().tolist() == [3]
    assert sum(int(one.dead.sum()) for one in seen.values()) == 1


def test_a_branch_that_starts_at_zero_has_no_dead_channel():
    model = SmallResNet(partial(nn.GroupNorm, 2), channels=8).double()
    nn.init.zeros_(model.block1.norm2.weight)
    seen = measure_norms(model, [torch.randn(8, 3, 8, 8, dtype=WIDE)])["block1.norm2"]
    assert float(seen.positive.max()) == 0
    assert int(seen.dead.sum()) == 0


# --- no trace --------------------------------------------------------------------------------------------------------


def everything(model: nn.Module) -> dict[str, Any]:
    """All that a pass could change, with the identity of what might be replaced."""
    return {
        "training": [m.training for m in model.modules()],
        "buffers": [(id(b), b._version, b.tolist()) for b in model.buffers()],
        "parameters": [(id(p), p._version, p.tolist()) for p in model.parameters()],
        "gradients": [(id(p.grad), p.grad.tolist()) for p in model.parameters() if p.grad is not None],
        "windows": [
            (w.sums.tolist(), w.counter.tolist(), w.lost.tolist(), w.paused)
            for m in model.modules()
            if (w := getattr(m, "_window", None)) is not None
        ],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "forwards": [vars(m).get("forward") for m in model.modules()],
        "random": (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),
    }


class Noisy(nn.Module):
    """Draws from everywhere, and counts in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x + 0 * (torch.rand(()) + random.random() + np.random.rand())


@pytest.mark.parametrize("statistics", ["estimates", "batch"])
@pytest.mark.parametrize("norm", [mn.BN(), mn.BN(micro_batch=2), mn.BCN(groups=2), mn.BCN(statistics="batch"), mn.GN()])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was_found(norm, statistics, fails):
    model = nn.Sequential(Noisy(), SmallResNet(norm), nn.Dropout(0.5))
    x = torch.randn(4, 3, 8, 8)
    model(x).sum().backward()  # gradients, and something in the windows
    model[1].block1.eval()
    model[1].block2.norm1.register_forward_hook(lambda *_: None)
    before = everything(model)

    def forward(model: nn.Module, batch: Tensor) -> None:
        model(batch)
        if fails:
            raise ArithmeticError("after the forward")

    if fails:
        with pytest.raises(ArithmeticError, match="after the forward"):
            measure_norms(model, [x], statistics=statistics, forward=forward)
    else:
        assert len(measure_norms(model, [x], statistics=statistics, forward=forward)) == 6
    assert everything(model) == before


def test_a_backward_that_was_pending_still_runs():
    model = SmallResNet(mn.BN()).eval()
    loss = model(torch.randn(4, 3, 8, 8)).sum()
    measure_norms(model, [torch.randn(4, 3, 8, 8)], statistics="batch")
    loss.backward()
    assert model.stem.weight.grad.abs().sum() > 0


# --- what is refused -------------------------------------------------------------------------------------------------


def test_batches_may_be_a_loader_s_pairs_and_a_forward_takes_any_other():
    norm, x = nn.GroupNorm(2, 8).double(), images()
    plain = measure_norms(norm, [x])[""].figures()
    assert measure_norms(norm, [(x, torch.zeros(6))])[""].figures() == plain
    assert (
        measure_norms(norm, [{"image": x}], forward=lambda model, batch: model(batch["image"]))[""].figures() == plain
    )


@pytest.mark.parametrize(
    "model, batches, options, error, message",
    [
        (nn.Conv2d(3, 4, 1), [], {}, ValueError, "has no group, layer, instance, batch or batch-channel normalization"),
        (nn.GroupNorm(2, 4), [], {}, ValueError, "no batch reached a normalization"),
        (nn.GroupNorm(2, 4), torch.ones(2, 4), {}, TypeError, r"write \[batch\]"),
        (nn.GroupNorm(2, 4), [], {"statistics": "running"}, ValueError, 'must be "estimates" or "batch"'),
        (nn.DataParallel(nn.GroupNorm(2, 4)), [], {}, ValueError, "pass model.module"),
        ("resnet", [], {}, TypeError, "a torch.nn.Module is needed"),
    ],
)
def test_what_cannot_be_measured_is_refused(model, batches, options, error, message):
    with pytest.raises(error, match=message):
        measure_norms(model, batches, **options)


def test_a_model_compiled_in_place_is_refused():
    model = nn.Sequential(nn.GroupNorm(2, 4))
    model[0]._compiled_call_impl = model[0]._call_impl  # what .compile() sets, without the compiler
    with pytest.raises(ValueError, match="0 is compiled"):
        measure_norms(model, [torch.ones(2, 4)])


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [mn.BCN(groups=2), mn.GN(groups=2), mn.BN()])
def test_a_gpu_gives_the_figures_of_the_cpu(norm):
    model, x = SmallResNet(norm), torch.randn(8, 3, 8, 8)
    expected = measure_norms(model, [x])
    found = measure_norms(model.cuda(), [x.cuda()])
    for name, one in expected.items():
        assert found[name].activation == one.activation
        assert_close_to_max(found[name].normalized.mean, one.normalized.mean, tol=1e-4, scale=1.0)
        assert (found[name].active - one.active).abs().max() <= 2 / one.positions  # a value may round across zero
