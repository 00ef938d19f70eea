"""BCN by its name in MONAI's networks."""

import pytest
import torch
from torch import nn

import micronorm as mn
from micronorm.integrations import monai as integration

pytest.importorskip("monai")


@pytest.fixture(autouse=True)
def registered():
    integration.register()
    integration.register()  # a second call does nothing


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_network_takes_the_norm_by_name_trains_and_moves_its_estimates(dims):
    from monai.networks.nets.unet import UNet

    torch.manual_seed(0)
    options = {"in_channels": 1, "out_channels": 2, "channels": (8, 16), "strides": (2,), "act": "LEAKYRELU"}
    network = mn.convert(UNet(spatial_dims=dims, norm="bcn", **options))
    norms = [m for m in network.modules() if isinstance(m, mn.nn.BatchChannelNorm)]
    assert norms
    assert any(isinstance(m, (mn.nn.WSConv1d, mn.nn.WSConv2d, mn.nn.WSConv3d)) for m in network.modules())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    network(torch.randn(1, 1, *[8] * dims)).square().mean().backward()
    optimizer.step()
    assert all(norm.running_mean.abs().sum() > 0 for norm in norms)


def test_arguments_of_the_layer_and_affine_are_passed_on():
    from monai.networks.layers import Norm, get_norm_layer

    norm = get_norm_layer(("bcn", {"num_groups": 4, "affine": False}), spatial_dims=3, channels=16)
    assert (norm.num_channels, norm.num_groups, norm.affine) == (16, 4, False)
    assert Norm["bcn"] is Norm["bcn", 3] is mn.nn.BatchChannelNorm


def test_a_dynunet_with_bcn_obeys_the_law_with_deep_supervision():
    from monai.networks.nets.dynunet import DynUNet

    torch.manual_seed(0)
    network = mn.convert(
        DynUNet(
            spatial_dims=3,
            in_channels=1,
            out_channels=2,
            kernel_size=[3, 3, 3],
            strides=[1, 2, 2],
            upsample_kernel_size=[2, 2],
            filters=[8, 16, 16],
            norm_name=("bcn", {"affine": True}),
            deep_supervision=True,
            res_block=True,
        )
    ).double()
    batch = (torch.randn(3, 1, 8, 8, 8, dtype=torch.float64), torch.randint(0, 2, (3, 8, 8, 8)))

    def loss(model: nn.Module, part):
        volumes, labels = part
        outputs = model(volumes)
        outputs = outputs.unbind(1) if outputs.ndim == 6 else [outputs]
        losses = [nn.functional.cross_entropy(y, labels, reduction="sum") for y in outputs]
        return sum(losses[1:], losses[0]), labels.numel()

    report = mn.check_cuts(network, batch, loss)
    assert report.ok, report
    assert report.worst <= 1e-10
