"""Layers that the sweep over timm and torchvision found left, lost or misplaced; each law by the smallest model."""

import pytest
import torch
from torch import nn

import micronorm as mn


@pytest.mark.parametrize("device, dtype", [("meta", torch.float32), ("cpu", torch.float64)])
def test_a_norm_without_tensors_is_converted_where_its_input_is_computed(device, dtype):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8)).to(device=device, dtype=dtype)
    norm = mn.convert(model)[1]
    tensors = [*norm.parameters(), *norm.buffers()]
    assert {(t.device.type, t.dtype) for t in tensors} == {(device, dtype)}


def test_a_norm_without_tensors_and_without_a_convolution_follows_the_model():
    model = nn.Sequential(nn.InstanceNorm2d(3), nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).to(device="meta")
    assert all(parameter.is_meta for parameter in mn.convert(model).parameters())
