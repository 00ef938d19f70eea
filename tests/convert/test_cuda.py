"""Conversion on a CUDA device: everything stays there, and the law holds for the converted network."""

import copy

import pytest
import torch
import torchvision
from torch import nn

import micronorm as mn
from tests.networks import assert_same_state, pieces
from tests.tolerances import assert_close_to_max, tolerance

pytestmark = pytest.mark.gpu


def test_everything_stays_on_the_device_also_norms_that_had_no_tensors():
    model = nn.Sequential(torchvision.models.resnet18(), nn.Unflatten(1, (1000, 1)), nn.InstanceNorm1d(1000)).cuda()
    mn.convert(model, absorb=True, layer_norm=True)
    assert {t.device.type for t in [*model.parameters(), *model.buffers()]} == {"cuda"}


def test_a_warm_conversion_starts_as_the_pretrained_network_on_cuda():
    model = torchvision.models.resnet50().cuda().eval()
    x = torch.randn(2, 3, 96, 96, device="cuda")
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        expected = model(x)
        mn.convert(model, warm_steps=3)
        assert_close_to_max(model(x), expected, tol=1e-5)


def test_a_step_of_a_converted_resnet_does_not_depend_on_its_cut_on_cuda():
    torch.manual_seed(0)
    model = mn.convert(torchvision.models.resnet18(num_classes=10)).cuda().double()
    x = torch.randn(8, 3, 64, 64, device="cuda", dtype=torch.float64)
    labels = torch.arange(8, device="cuda")
    states = []
    for cut in ([8], [4, 4], [1] * 8):
        net = copy.deepcopy(model)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for part in pieces(cut):
            (nn.functional.cross_entropy(net(x[part]), labels[part], reduction="sum") / len(x)).backward()
        optimizer.step()
        states.append(net.state_dict())
    for other in states[1:]:
        assert_same_state(other, states[0], tol=tolerance("one_step", torch.float64))


def test_calibration_runs_where_the_model_is():
    norm = mn.nn.BatchChannelNorm(4).cuda()
    mn.calibrate(norm, [torch.ones(2, 4, 3, 3, device="cuda")])
    assert norm.running_mean.eq(1).all()
    assert norm.running_var.eq(0).all()
