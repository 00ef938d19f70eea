"""Conversion of partly frozen models: the frozen part keeps its function, the rest is converted."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import micronorm as mn
from micronorm.convert import Plan
from tests.tolerances import assert_close_to_max, tolerance

pytestmark = pytest.mark.filterwarnings("ignore:.*BatchNorm stays:UserWarning")
torchvision = pytest.importorskip("torchvision")
FrozenBatchNorm2d = torchvision.ops.FrozenBatchNorm2d


def draw_statistics(model: nn.Module) -> None:
    """Draw the affine and the statistics of every norm, so that replacing one changes its output."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if hasattr(module, "running_var"):
            for name, tensor in module.state_dict().items():
                if tensor.is_floating_point():
                    positive = name in ("weight", "running_var")
                    tensor.copy_(torch.rand(tensor.shape, generator=generator) + (0.5 if positive else -0.5))


def images(size: int = 32) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


def stem(model: Any) -> nn.Sequential:
    return nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool, model.layer1)


def reasons(plan: Plan) -> dict[str, str]:
    return {decision.name: decision.reason for decision in plan.decisions}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("options", [{}, {"warm_steps": 10}, {"norm": None}, {"weight": mn.CWN()}], ids=str)
def test_the_frozen_stem_of_a_resnet_computes_the_same_bits(training, options):
    model = torchvision.models.resnet18(num_classes=10)
    draw_statistics(model)
    for part in (model.conv1, model.bn1, model.layer1):
        part.requires_grad_(False)
    model.train(training)
    keys = list(stem(model).state_dict())
    expected = stem(model)(images())
    plan = mn.plan(model, **options)
    assert reasons(plan)["conv1"] == "keeps its function: it is frozen"
    if "norm" not in options:
        assert reasons(plan)["bn1"].startswith("keeps its function: it is behind Conv2d 'conv1', which is frozen")
        assert plan.totals["norms left"] == 5
        assert plan.totals["norms converted"] == 15
    plan.apply()
    assert torch.equal(stem(model)(images()), expected)
    assert list(stem(model).state_dict()) == keys
    assert type(model.layer2[0].conv1).__name__ in ("WSConv2d", "CWNConv2d")


def frozen_detector(trainable_layers: int) -> nn.Module:
    """Build fasterrcnn_resnet50_fpn as its weights come: with FrozenBatchNorm, the first stages frozen."""
    detection = torchvision.models.detection
    backbone = detection.backbone_utils.resnet_fpn_backbone(
        backbone_name="resnet50", weights=None, norm_layer=FrozenBatchNorm2d, trainable_layers=trainable_layers
    )
    return detection.FasterRCNN(backbone, num_classes=4, min_size=64, max_size=64)


def test_a_detector_with_frozen_batch_norms_is_converted_behind_its_trainable_convolutions():
    model: Any = frozen_detector(3).eval()
    body = model.backbone.body
    draw_statistics(body)
    expected = stem(body)(images())
    before = model.backbone(images())
    plan = mn.plan(model, warm_steps=10)
    why = reasons(plan)
    assert "behind Conv2d 'backbone.body.conv1', which is frozen" in why["backbone.body.bn1"]
    assert "starts from its old function and trains from here on" in why["backbone.body.layer2.0.bn1"]
    plan.apply()
    kept = [name for name, module in body.named_modules() if isinstance(module, FrozenBatchNorm2d)]
    assert len(kept) == 11  # conv1's, three in each of three blocks of layer1, and its shortcut's
    assert all(name.startswith(("bn1", "layer1")) for name in kept)
    assert all(p.requires_grad for p in body.layer2.parameters())
    assert torch.equal(stem(body)(images()), expected)
    after = model.backbone(images())
    for level in before:
        assert_close_to_max(after[level], before[level], tol=tolerance("one_step", torch.float32))


def test_without_a_warm_start_a_frozen_batch_norm_trains_from_its_affine_and_statistics():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), FrozenBatchNorm2d(8), nn.Conv2d(8, 8, 3), FrozenBatchNorm2d(8))
    draw_statistics(model)
    mean = model[3].running_mean.clone()
    model[0].requires_grad_(False)
    plan = mn.plan(model)
    assert "was frozen; trains from here on" in reasons(plan)["3"]
    plan.apply()
    assert type(model[1]) is FrozenBatchNorm2d
    assert type(model[0]) is nn.Conv2d
    assert [p.requires_grad for p in model[3].parameters()] == [True] * 4
    assert torch.equal(model[3].running_mean, mean)


class PreActivation(nn.Module):
    """Two convolutions whose sum goes to a norm, then a convolution that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.norm = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3)
        self.last = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.conv(self.norm(nn.functional.silu(self.left(x) + self.right(x)))))


@pytest.mark.parametrize(
    "frozen, kept",
    [
        (("left", "right", "norm"), True),  # the frozen part ends behind the norm
        (("left", "right"), False),  # the norm begins the part that trains
        (("left", "norm"), False),  # a trainable convolution reaches the norm
    ],
    ids=str,
)
def test_the_data_flow_decides_where_the_frozen_part_ends(frozen, kept):
    model = PreActivation()
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    mn.convert(model)
    assert isinstance(model.norm, nn.BatchNorm2d) == kept
    assert isinstance(model.last, mn.nn.BatchChannelNorm)


def test_a_trainable_norm_right_behind_a_frozen_convolution_keeps_its_function():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    model[0].requires_grad_(False)
    with pytest.warns(UserWarning, match=r"^1: BatchNorm stays.*a step depends on its split\. Call \.eval\(\)"):
        mn.convert(model)
    assert [type(layer).__name__ for layer in model] == ["Conv2d", "BatchNorm2d", "WSConv2d", "BatchChannelNorm"]


def test_a_branch_that_the_data_flow_does_not_reach_keeps_its_frozen_norm_too():
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
            self.extra = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x))

    model = mn.convert(Auxiliary())
    assert [type(layer).__name__ for layer in model.extra] == ["Conv2d", "BatchNorm2d"]


def test_a_model_that_is_frozen_as_a_whole_raises_and_the_message_says_what_to_do():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).requires_grad_(False)
    with pytest.raises(ValueError, match="Frozen layers stay; to convert them, convert first and freeze afterwards"):
        mn.convert(model)
