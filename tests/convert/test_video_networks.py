"""torchvision's 3-D networks: conversion, and the law on clips of N×3×T×H×W. test_models.py folds them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import micronorm as mn

video = pytest.importorskip("torchvision.models.video")

NAMES = ("r3d_18", "mc3_18", "r2plus1d_18")


@pytest.mark.parametrize("name", NAMES)
def test_every_norm_and_convolution_is_converted(name):
    with torch.device("meta"):
        model = mn.convert(getattr(video, name)(weights=None, num_classes=3))
    assert not any(isinstance(module, nn.BatchNorm3d) for module in model.modules())
    assert all(isinstance(module, mn.nn.WSConv3d) for module in model.modules() if isinstance(module, nn.Conv3d))


def loss(model, part):
    clips, labels = part
    return F.cross_entropy(model(clips), labels, reduction="sum"), len(labels)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_a_3d_network_does_not_depend_on_how_its_clips_were_cut(name):
    model = getattr(video, name)(weights=None, num_classes=3)
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        del stage[1]  # which repeats the first block
    generator = torch.Generator().manual_seed(0)
    clips = torch.randn(3, 3, 4, 16, 16, dtype=torch.float64, generator=generator)
    report = mn.check_cuts(mn.convert(model).double(), (clips, torch.arange(3)), loss)
    assert report.ok, report
