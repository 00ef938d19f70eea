"""Which convolutions meet a norm, where something stands between them."""

import pytest
from torch import nn

import micronorm as mn


@pytest.mark.parametrize(
    "pad, met",
    [(nn.ZeroPad2d(1), True), (nn.ConstantPad2d(1, 0.0), True), (nn.ConstantPad2d(1, 3.0), False)],
    ids=["zeros", "constant 0", "constant 3"],
)
def test_a_convolution_meets_its_norm_through_padding_with_zeros_only(pad, met):
    plan = mn.plan(nn.Sequential(nn.Conv2d(3, 8, 3), pad, nn.BatchNorm2d(8)))
    assert (plan.decisions[0].becomes == "WSConv2d") == met
