"""Table voc: DeepLabV3, its network and its figures."""

from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models.resnet import Bottleneck, ResNet

import micronorm as mn
from micronorm import recipes
from micronorm.engine.weights import load_weights
from micronorm.recipes.resnet import DeepLabV3


def test_the_backbone_has_output_stride_16_and_dilation_2_in_all_blocks_of_its_last_stage():
    network: Any = DeepLabV3((1, 1, 1, 3), classes=5)
    features = network.backbone.eval()(torch.zeros(1, 3, 64, 96))
    assert features.shape == (1, 2048, 4, 6)
    assert [block.conv2.dilation for block in network.backbone.layer4] == [(2, 2)] * 3
    assert [branch[0].dilation for branch in network.pyramid.convs[:4]] == [(1, 1), (6, 6), (12, 12), (18, 18)]


def test_the_last_convolution_stays_plain_and_every_other_one_is_standardized():
    network = recipes.find("voc/gn-ws").equip(DeepLabV3((1, 1, 1, 1), classes=5))
    plain = [name for name, module in network.named_modules() if type(module) is nn.Conv2d]
    assert plain == ["classifier"]
    assert not any(isinstance(module, nn.BatchNorm2d) for module in network.modules())


def test_the_paper_s_settings():
    settings = recipes.find("voc/bcn-ws").settings
    assert (settings.steps, settings.step_batch, settings.optimizer.lr) == (30_000, 16, 0.007)
    middle = settings.schedule.factor(15_000, steps_per_epoch=661, total_steps=30_000)
    assert middle == pytest.approx(0.5**0.9)


def test_each_row_starts_from_a_classifier_of_its_own_method():
    for row in recipes.find_table("voc").rows:
        start = recipes.find(row.start)
        assert (type(start.norm), start.weight, start.network) == (type(row.norm), row.weight, "resnet101")


def test_the_weights_of_a_classifier_fill_the_whole_backbone():
    classifier = ResNet(Bottleneck, [1, 1, 1, 1], num_classes=7)
    found = load_weights(DeepLabV3((1, 1, 1, 1), classes=3), classifier.state_dict())
    assert found.unused == ("backbone.fc.bias", "backbone.fc.weight")
    assert not any(name.startswith("backbone.") for name in (*found.missing, *found.other_shape))


@pytest.mark.slow
def test_a_step_of_a_segmenter_does_not_depend_on_its_split():
    torch.manual_seed(0)
    network = mn.convert(DeepLabV3((1, 1, 1, 1), classes=3), mn.BCN(), mn.WS()).double()
    images, labels = torch.randn(4, 3, 33, 33, dtype=torch.float64), torch.randint(0, 3, (4, 33, 33))

    def loss(model, part):
        pixels, truth = part
        return nn.functional.cross_entropy(model(pixels), truth, reduction="sum"), truth.numel()

    report = mn.check_cuts(network, (images, labels), loss)
    assert report.ok, report
