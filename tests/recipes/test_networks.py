"""The plain networks: their sizes, their start, and what conversion makes of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import micronorm
from micronorm.recipes.networks import NETWORKS, build_network


def parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


# In millions, as the literature prints them; He et al. give 0.27, 0.85 and 1.7 for their CIFAR networks.
@pytest.mark.parametrize(
    "name, classes, millions, digits",
    [
        ("cifar-resnet20", 10, 0.27, 2),
        ("cifar-resnet56", 10, 0.86, 2),  # 0.85 without the projections
        ("cifar-resnet110", 10, 1.7, 1),
        ("cifar-resnet18", 10, 11.17, 2),
        ("resnet50", 1000, 25.56, 2),
        ("resnet101", 1000, 44.55, 2),
        ("resnext50-32x4d", 1000, 25.03, 2),
        ("resnext101-32x4d", 1000, 44.18, 2),
    ],
)
def test_a_network_has_as_many_parameters_as_the_literature_says(name, classes, millions, digits):
    with torch.device("meta"):
        network = build_network(name, classes=classes)
    assert round(parameters(network) / 1e6, digits) == millions


@pytest.mark.parametrize(
    "name, convolutions",
    [("cifar-resnet20", 19), ("cifar-resnet56", 55), ("cifar-resnet110", 109), ("cifar-resnet18", 17)],
)
def test_depth_counts_the_convolutions_beside_the_projections_and_the_classifier(name, convolutions):
    network = build_network(name, classes=10)
    kernels = [module.kernel_size for module in network.modules() if isinstance(module, nn.Conv2d)]
    assert kernels.count((3, 3)) == convolutions
    assert kernels.count((1, 1)) == len(kernels) - convolutions == len(network.stages) - 1


@pytest.mark.parametrize("name", ["digits", "cifar-resnet20", "cifar-resnet18"])
def test_every_stage_but_the_first_halves_the_image(name):
    network = build_network(name, classes=7)
    size = 8 if name == "digits" else 32
    x = network.norm(network.conv(torch.randn(2, network.conv.in_channels, size, size)))
    for stage in network.stages.children():
        x = stage(x)
        assert x.shape[2:] == (size, size)
        size //= 2
    assert network.classifier(x.mean((2, 3))).shape == (2, 7)


def test_the_network_of_the_digits_is_three_blocks_of_16_32_and_64_channels():
    network = build_network("digits", classes=10)
    shapes = [tuple(module.weight.shape) for module in network.modules() if isinstance(module, nn.Conv2d)]
    stem, *blocks = shapes
    assert stem == (16, 1, 3, 3)
    assert blocks == [
        *[(16, 16, 3, 3)] * 2,
        *[(32, 16, 3, 3), (32, 32, 3, 3), (32, 16, 1, 1)],
        *[(64, 32, 3, 3), (64, 64, 3, 3), (64, 32, 1, 1)],
    ]
    assert parameters(network) == 77_754


def test_convolutions_start_from_kaimings_distribution_over_the_fan_out():
    network = build_network("cifar-resnet18", classes=10)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1]
            assert module.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.1)


def test_the_last_norm_of_each_imagenet_block_starts_at_zero_and_no_other():
    network = build_network("resnet50", classes=10)
    for name, module in network.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            assert bool((module.weight == 0).all()) == name.endswith(".bn3"), name


def test_an_unknown_network_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"no network 'resnet34'; there are digits, .*resnext101-32x4d"):
        build_network("resnet34", classes=10)
    assert "digits" in NETWORKS


def test_without_torchvision_only_its_own_networks_are_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.models.resnet", None)
    with pytest.raises(ImportError, match="pip install torchvision"):
        build_network("resnet50", classes=10)
    build_network("digits", classes=10)


def test_importing_the_recipes_does_not_import_torchvision():
    told = "import sys, micronorm.recipes; print('torchvision' in sys.modules, 'sklearn' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(Path(micronorm.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", told], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["False", "False"]
