"""torchvision's 3-D networks: conversion, the law on clips of N×3×T×H×W, and folding."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import micronorm as mn
from tests.tolerances import assert_close_to_max, tolerance

video = pytest.importorskip("torchvision.models.video")

NAMES = ("r3d_18", "mc3_18", "r2plus1d_18")


def network(name):
    torch.manual_seed(0)
    return mn.convert(getattr(video, name)(weights=None, num_classes=3))


def loss(model, part):
    clips, labels = part
    return F.cross_entropy(model(clips), labels, reduction="sum"), len(labels)


@pytest.mark.parametrize("name", NAMES)
def test_every_norm_and_convolution_is_converted(name):
    with torch.device("meta"):
        model = network(name)
    assert not any(isinstance(module, nn.BatchNorm3d) for module in model.modules())
    assert all(isinstance(module, mn.nn.WSConv3d) for module in model.modules() if isinstance(module, nn.Conv3d))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_a_3d_network_does_not_depend_on_how_its_clips_were_cut(name):
    generator = torch.Generator().manual_seed(0)
    clips = torch.randn(3, 3, 4, 16, 16, dtype=torch.float64, generator=generator)
    report = mn.check_cuts(network(name).double(), (clips, torch.arange(3)), loss)
    assert report.ok, report


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_3d_network_folds_into_convolutions_and_group_norms(name):
    model = network(name).double()
    clips = torch.randn(2, 3, 4, 16, 16, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss(model, (clips, torch.arange(2)))[0].backward()
    optimizer.step()  # moves the estimates
    folded = mn.fold(model)
    assert not any(isinstance(module, nn.BatchNorm3d) for module in folded.modules())
    with torch.no_grad():
        assert_close_to_max(folded(clips), model.eval()(clips), tol=tolerance("folded", torch.float64))
