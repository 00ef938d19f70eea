"""The table of known blocks: each entry computes what its class does, and fuses what the plan says."""

import importlib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers import SplitAttn
from timm.models import dla, hgnet, nextvit, resnest, senet
from timm.models import resnet as timm_resnet
from torch import nn
from torchvision.models import resnet
from torchvision.models.googlenet import BasicConv2d as GoogLeNetConv
from torchvision.models.inception import BasicConv2d as InceptionConv

import micronorm as mn
from micronorm.convert.fusion import find_block, source_digest
from micronorm.convert.known_blocks import BLOCKS, Block
from tests.convert.fused import assert_same_bits, calls, converted

NAMES = [name for name in BLOCKS if isinstance(name, str)]
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def down(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))


def halve(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(2), down(inputs, outputs))


def image(channels: int = 8, side: int = 6) -> torch.Tensor:
    return torch.randn(2, channels, side, side)


def volume(channels: int = 8) -> torch.Tensor:
    return torch.randn(2, channels, 4, 6, 4)


def nnunet_block(name: str, *sizes: int, **options: Any) -> nn.Module:
    kwargs = {"norm_op": nn.InstanceNorm3d, "norm_op_kwargs": {"affine": True}, "nonlin": nn.LeakyReLU}
    return load(f"{NNUNET}.{name}")(nn.Conv3d, *sizes, **kwargs, **options)


def monai_block(name: str, *sizes: int, **options: Any) -> nn.Module:
    return load(f"{MONAI}.{name}")(3, *sizes, kernel_size=3, norm_name=("instance", {"affine": True}), **options)


NNUNET = "dynamic_network_architectures.building_blocks.residual"
MONAI = "monai.networks.blocks.dynunet_block"


# For each entry of the table: builders of blocks that take every path of its fused forward, and their inputs.
EXAMPLES: dict[str, list[tuple[Callable[[], nn.Module], tuple[Any, ...]]]] = {
    "torchvision.models.resnet.BasicBlock": [
        (lambda: resnet.BasicBlock(8, 8), (image(),)),
        (lambda: resnet.BasicBlock(4, 8, downsample=down(4, 8)), (image(4),)),
    ],
    "torchvision.models.resnet.Bottleneck": [
        (lambda: resnet.Bottleneck(8, 2), (image(),)),
        (lambda: resnet.Bottleneck(4, 2, downsample=down(4, 8)), (image(4),)),
    ],
    "torchvision.models.resnet.ResNet": [
        (lambda: resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=3), (image(3, 32),))
    ],
    "torchvision.models.googlenet.BasicConv2d": [
        (lambda: GoogLeNetConv(8, 4, kernel_size=3), (image(),)),
    ],
    "torchvision.models.inception.BasicConv2d": [
        (lambda: InceptionConv(8, 4, kernel_size=3), (image(),)),
    ],
    "timm.models.resnet.BasicBlock": [
        (lambda: timm_resnet.BasicBlock(8, 8), (image(),)),
        (lambda: timm_resnet.BasicBlock(4, 8, downsample=down(4, 8), act_layer=nn.SiLU), (image(4),)),
        (lambda: timm_resnet.BasicBlock(8, 8, drop_path=nn.Dropout(0.5), drop_block=nn.Dropout), (image(),)),
    ],
    "timm.models.resnet.Bottleneck": [
        (lambda: timm_resnet.Bottleneck(8, 2), (image(),)),
        (lambda: timm_resnet.Bottleneck(8, 2, attn_layer="eca", drop_block=nn.Dropout), (image(),)),
        (lambda: timm_resnet.Bottleneck(4, 2, downsample=down(4, 8), drop_path=nn.Dropout(0.5)), (image(4),)),
    ],
    "timm.models.resnet.ResNet": [
        (lambda: timm_resnet.ResNet(timm_resnet.BasicBlock, [1, 1, 1, 1], num_classes=3), (image(3, 32),))
    ],
    "timm.models.dla.DlaBasic": [
        (lambda: dla.DlaBasic(8, 8), (image(), image())),
        (lambda: dla.DlaBasic(8, 8), (image(),)),
    ],
    "timm.models.dla.DlaBottleneck": [
        (lambda: dla.DlaBottleneck(8, 8), (image(), image())),
        (lambda: dla.DlaBottleneck(8, 8), (image(),)),
    ],
    "timm.models.dla.DlaRoot": [
        (lambda: dla.DlaRoot(8, 4, 1, shortcut=False), ([image(4), image(4)],)),
        (lambda: dla.DlaRoot(8, 4, 1, shortcut=True), ([image(4), image(4)],)),
    ],
    "timm.models.resnest.ResNestBottleneck": [
        (lambda: resnest.ResNestBottleneck(8, 2), (image(),)),
        (lambda: resnest.ResNestBottleneck(4, 2, radix=0, stride=2, avd=True, downsample=halve(4, 8)), (image(4),)),
        (
            lambda: resnest.ResNestBottleneck(
                4, 2, stride=2, avd_first=True, downsample=halve(4, 8), drop_path=nn.Dropout(0.5)
            ),
            (image(4),),
        ),
    ],
    "timm.layers.split_attn.SplitAttn": [
        (lambda: SplitAttn(8, norm_layer=nn.BatchNorm2d), (image(),)),
        (lambda: SplitAttn(8, radix=1, norm_layer=nn.BatchNorm2d, drop_layer=nn.Dropout), (image(),)),
    ],
    "timm.models.senet.Bottleneck": [
        (lambda: senet.SEBottleneck(8, 2, groups=1, reduction=2), (image(),)),
        (lambda: senet.SEResNetBottleneck(4, 2, groups=1, reduction=2, downsample=down(4, 8)), (image(4),)),
    ],
    "timm.models.senet.SEResNetBlock": [
        (lambda: senet.SEResNetBlock(8, 8, groups=1, reduction=2), (image(),)),
        (lambda: senet.SEResNetBlock(4, 8, groups=1, reduction=2, downsample=down(4, 8)), (image(4),)),
    ],
    "timm.models.hgnet.ConvBNAct": [
        (lambda: hgnet.ConvBNAct(8, 4, 3), (image(),)),
        (lambda: hgnet.ConvBNAct(8, 4, 3, use_act=False, use_lab=True), (image(),)),
        (lambda: hgnet.ConvBNAct(8, 4, 3, use_lab=True), (image(),)),
    ],
    "timm.models.nextvit.ConvNormAct": [(lambda: nextvit.ConvNormAct(8, 4), (image(),))],
    "timm.models.nextvit.ConvAttention": [
        (lambda: nextvit.ConvAttention(8, 4, nn.BatchNorm2d, nn.ReLU), (image(),)),
    ],
    f"{NNUNET}.BasicBlockD": [
        (lambda: nnunet_block("BasicBlockD", 8, 8, 3, 1), (volume(),)),
        (lambda: nnunet_block("BasicBlockD", 4, 8, 3, 2), (volume(4),)),
        (lambda: nnunet_block("BasicBlockD", 8, 8, 3, 1, squeeze_excitation=True), (volume(),)),
    ],
    f"{NNUNET}.BottleneckD": [(lambda: nnunet_block("BottleneckD", 4, 8, 8, 3, 2), (volume(4),))],
    f"{MONAI}.UnetResBlock": [
        (lambda: monai_block("UnetResBlock", 8, 8, stride=1), (volume(),)),
        (lambda: monai_block("UnetResBlock", 4, 8, stride=2), (volume(4),)),
    ],
    f"{MONAI}.UnetBasicBlock": [(lambda: monai_block("UnetBasicBlock", 4, 8, stride=2), (volume(4),))],
}


def load(name: str) -> type:
    module, _, cls = name.rpartition(".")
    pytest.importorskip(module.partition(".")[0])
    return getattr(importlib.import_module(module), cls)


def skip_changed_source(name: str) -> None:
    """Skip a block that another version of its library changed: conversion leaves it unfused (a test below)."""
    library, cls = name.partition(".")[0], load(name)
    pinned = f"{library}=={version(library).partition('+')[0]}" in CONSTRAINTS.read_text().split()
    if not pinned and source_digest(cls, BLOCKS[name].method) not in BLOCKS[name].source.split():
        pytest.skip(f"{library} {version(library)} has another {name}")


@pytest.mark.parametrize("name", NAMES)
def test_the_source_of_a_known_block_is_the_one_its_fused_forward_was_written_for(name):
    skip_changed_source(name)
    block = BLOCKS[name]
    assert source_digest(load(name), block.method) in block.source.split()


@pytest.mark.filterwarnings("ignore:.*normalizes over groups of:UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_a_known_block_computes_the_bits_of_its_class_and_fuses_what_the_plan_says(name):
    skip_changed_source(name)
    for build, inputs in EXAMPLES[name]:
        model, said = converted(build, weight=None)
        assert any(isinstance(m, load(name)) and find_block(m) is BLOCKS[name] for m in model.modules())
        fused = sum(text.startswith("with ") for text in said.values())
        assert sum(map(bool, calls(model, *inputs))) == fused
        assert_same_bits(model, *inputs)


def test_a_stem_with_gradient_checkpointing_runs_the_forward_of_its_class():
    model = mn.convert(timm_resnet.ResNet(timm_resnet.BasicBlock, [1, 1, 1, 1], num_classes=3))
    model.set_grad_checkpointing()
    assert calls(model, image(3, 32))[0] == {}


def test_a_block_with_another_source_stays_unfused_and_the_plan_says_so(monkeypatch):
    name = "torchvision.models.resnet.BasicBlock"
    monkeypatch.setitem(BLOCKS, name, Block(BLOCKS[name].forward, BLOCKS[name].fuses, source="0" * 12))
    model, said = converted(lambda: resnet.BasicBlock(8, 8))
    why = "the source of BasicBlock.forward is not the one that the fused form was written for"
    assert said == {"bn1": why, "bn2": why}
    assert not any(calls(model, image()))


def test_a_class_without_source_has_no_digest():
    made: Any = type("Made", (nn.Module,), {"forward": eval("lambda self, x: x")})
    assert source_digest(made, "forward") is None
    assert source_digest(made, "missing") is None
