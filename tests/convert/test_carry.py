"""What a converted layer keeps of the one it replaces, and where it starts."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import micronorm as mn
from tests.networks import SmallResNet, assert_same_state, pieces, samples
from tests.tolerances import assert_close_to_max, tolerance


def trained_looking(model: Any, *, seed: int = 0) -> Any:
    """Statistics and affine away from where they start, so that losing one shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.normal_(0, 0.3, generator=generator)
                module.running_var.uniform_(0.5, 2, generator=generator)
                if module.affine:
                    module.weight.uniform_(0.5, 1.5, generator=generator)
                    module.bias.normal_(0, 0.3, generator=generator)
    return model


def images(count: int = 2, size: int = 64) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


# --- the layer itself ------------------------------------------------------------------------------------------------


def test_statistics_and_affine_carry_over_and_parameters_stay_the_objects_they_were():
    model = trained_looking(nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16, eps=1e-3)))
    conv, old = model
    new = mn.convert(model)[1]
    assert new.weight is old.weight
    assert new.bias is old.bias
    assert model[0].weight is conv.weight
    assert model[0].bias is conv.bias
    assert torch.equal(new.running_mean, old.running_mean)
    assert torch.equal(new.running_var, old.running_var)
    assert new.eps == 1e-3


class _ScaleOnly(nn.Module):
    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_channels))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.view(-1, 1, 1)


@dataclass(frozen=True)
class _Scale(mn.NormSpec):
    layer = _ScaleOnly


def test_the_plan_says_which_part_of_the_affine_the_new_layer_has_no_place_for():
    model = trained_looking(nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)))
    reason = mn.plan(model, _Scale(), weight=None).decisions[1].reason
    assert reason == "weight carried over; bias dropped: _ScaleOnly has none of that shape"
    assert mn.plan(model, mn.GN(), weight=None).decisions[1].reason.startswith("affine carried over")


def test_an_eps_that_was_asked_for_is_used():
    model = mn.convert(nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16, eps=1e-3)), mn.BCN(eps=1e-4))
    assert model[1].eps == 1e-4


@pytest.mark.parametrize("training", [True, False])
def test_flags_hooks_dtype_and_memory_format_survive(training):
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)).to(torch.bfloat16, memory_format=torch.channels_last)
    model.train(training)
    model[1].weight.requires_grad_(False)
    seen = []
    handles = [layer.register_forward_hook(lambda *_: seen.append(1)) for layer in model]
    mn.convert(model)
    assert all(module.training is training for module in model.modules())
    assert [model[1].weight.requires_grad, model[1].bias.requires_grad] == [False, True]
    assert not model[1].group_weight.requires_grad
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model[1].running_mean.dtype == torch.float32
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    model(torch.randn(1, 3, 8, 8, dtype=torch.bfloat16))
    assert len(seen) == 2
    for handle in handles:
        handle.remove()
    model(torch.randn(1, 3, 8, 8, dtype=torch.bfloat16))
    assert len(seen) == 2


def test_a_model_on_the_meta_device_is_converted_there():
    with torch.device("meta"):
        model = torchvision.models.resnet18()
    mn.convert(model, absorb=True)
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])


def test_shared_modules_stay_shared_and_tied_weights_stay_tied():
    norm, first, second = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)
    second.weight = first.weight
    model = mn.convert(nn.Sequential(first, norm, nn.ReLU(), second, norm))
    assert model[1] is model[4]
    assert model[0].weight is model[3].weight


def test_a_norm_without_tensors_goes_where_the_model_is():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8)).double()
    mn.convert(model)
    assert model[1].weight.dtype == torch.float64
    assert model(torch.randn(1, 3, 8, 8, dtype=torch.float64)).dtype == torch.float64


def test_timm_norm_act_layers_keep_their_keys_activation_and_dropout():
    model = trained_looking(timm.create_model("regnety_002")).eval()
    keys = set(model.state_dict())
    before = copy.deepcopy(model.state_dict())
    mn.convert(model)
    added = {key.rsplit(".", 1)[1] for key in set(model.state_dict()) - keys}
    lost = {key.rsplit(".", 1)[1] for key in keys - set(model.state_dict())}
    assert added == {"group_weight", "group_bias"}
    assert lost == {"num_batches_tracked"}
    assert isinstance(model.stem.bn, mn.nn.BatchChannelNormAct)
    assert isinstance(model.stem.bn.act, nn.ReLU)
    model.load_state_dict(before)


# --- zero-initialized branches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: torchvision.models.resnet18(zero_init_residual=True, num_classes=10),
        lambda: timm.create_model("resnet18", num_classes=10),
        lambda: timm.create_model("resnet26", num_classes=10),
    ],
)
def test_a_zero_initialized_branch_starts_at_zero_and_its_gradients_are_the_size_of_batch_norms(make):
    torch.manual_seed(0)
    model = make()
    zeroed = [n for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d) and not m.weight.any()]
    assert zeroed
    x, labels = images(8), torch.arange(8) % 10
    sizes = {}
    for name, network in (("bn", copy.deepcopy(model)), ("bcn", mn.convert(copy.deepcopy(model)))):
        nn.functional.cross_entropy(network(x), labels).backward()
        sizes[name] = {key: p.grad.norm().item() for key, p in network.named_parameters() if p.grad is not None}
    converted = mn.convert(copy.deepcopy(model))
    for name in zeroed:
        layer = converted.get_submodule(name)
        assert layer.weight.eq(1).all()
        assert layer.group_weight.eq(0).all()
        assert layer.group_bias.eq(0).all()
        ratio = sizes["bcn"][f"{name}.group_weight"] / sizes["bn"][f"{name}.weight"]
        assert 0.1 < ratio < 10, (name, ratio)  # γ^b = 0 gives hundreds


def test_a_constant_bias_moves_to_the_groups_and_any_other_is_carried_as_it_is():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    nn.init.zeros_(model[1].weight)
    model[1].bias.data = torch.tensor([1.0, 1, 1, 1, -2, -2, -2, -2])
    plan = mn.plan(copy.deepcopy(model), mn.BCN(groups=2))
    assert "γ^c = 0" in plan.decisions[1].reason
    converted = plan.apply()[1]  # type: ignore[index]
    assert converted.group_bias.tolist() == [1, -2]
    assert converted.bias.eq(0).all()
    model[1].bias.data[0] = 5
    plan = mn.plan(model, mn.BCN(groups=2))
    assert "bias varies within groups: carried as it is" in plan.decisions[1].reason
    converted = plan.apply()[1]  # type: ignore[index]
    assert converted.bias[0] == 5
    assert converted.weight.eq(0).all()


# --- from a pretrained network ---------------------------------------------------------------------------------------


def test_an_absorbed_convolution_starts_as_it_was():
    for layer in (
        nn.Conv2d(4, 6, 3, groups=2),
        nn.ConvTranspose2d(4, 6, 3, groups=2),
        nn.Linear(4, 6),
        nn.Conv3d(4, 6, 2),
    ):
        for spec in (mn.WS(), mn.WS(center=False), mn.WS(scale=False)):
            made = spec(layer.double())
            made.absorb()  # type: ignore[operator]
            expected = layer.weight.detach()
            assert_close_to_max(made.effective_weight(), expected, tol=1e-14)  # type: ignore[operator]


def test_absorbed_buffers_are_saved_and_restored():
    layer = mn.nn.WSConv2d(3, 8, 3)
    fresh = mn.nn.WSConv2d(3, 8, 3)
    assert set(layer.state_dict()) == {"weight", "bias"}
    layer.absorb()
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh.effective_weight(), layer.effective_weight())
    assert "absorbed" in repr(fresh)


WARM = {  # test_preserved.py has others, in float64
    "torchvision resnet18": lambda: torchvision.models.resnet18(zero_init_residual=True),
    "timm repvgg": lambda: timm.create_model("repvgg_a0"),
    "timm resnest": lambda: timm.create_model("resnest14d"),
}


@pytest.mark.parametrize("name", WARM)
def test_a_warm_conversion_starts_as_the_pretrained_network(name):
    torch.manual_seed(0)
    model = trained_looking(WARM[name]()).eval()
    x = images()
    with torch.no_grad():
        expected = model(x)
        mn.convert(model, warm_steps=7)
        assert_close_to_max(model(x), expected, tol=1e-5)


def small_batch_norm_network() -> nn.Module:
    torch.manual_seed(0)
    return trained_looking(SmallResNet(norm=mn.BN())).double()


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_the_law_holds_at_every_blend(steps_before):
    model = mn.convert(small_batch_norm_network(), warm_steps=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for k in range(steps_before):
        one_step(model, optimizer, [24], seed=k)
    assert {layer.blend.item() for layer in bcn_layers(model)} == {steps_before / 4}
    results = []
    for cut in ([24], [7, 17], [1] * 24):
        twin = copy.deepcopy(model)
        one_step(twin, torch.optim.SGD(twin.parameters(), lr=0.02), cut, seed=9)
        results.append(twin.state_dict())
    for other in results[1:]:
        assert_same_state(other, results[0], tol=tolerance("one_step", torch.float64))


def test_after_its_warm_up_every_layer_is_plain_and_the_blend_survives_a_checkpoint():
    model = mn.convert(small_batch_norm_network(), warm_steps=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for k in range(2):
        one_step(model, optimizer, [24], seed=k)
    resumed = mn.convert(small_batch_norm_network(), warm_steps=4)
    resumed.load_state_dict(model.state_dict())
    assert {layer.blend.item() for layer in bcn_layers(resumed)} == {0.5}
    for k in range(3):
        one_step(model, optimizer, [24], seed=k)
    assert {layer.blend.item() for layer in bcn_layers(model)} == {1.0}


def bcn_layers(model: nn.Module) -> list[mn.nn.BatchChannelNorm]:
    return [module for module in model.modules() if isinstance(module, mn.nn.BatchChannelNorm)]


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, cut: list[int], *, seed: int) -> None:
    x, labels = samples(seed=seed)
    optimizer.zero_grad()
    for part in pieces(cut):
        (nn.functional.cross_entropy(model(x[part]), labels[part], reduction="sum") / len(x)).backward()
    optimizer.step()
