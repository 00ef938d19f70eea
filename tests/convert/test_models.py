"""A fixed sample of networks, at least one of each family that has something to convert: they train, and they fold.

The sweep (`make sweep`) plans every architecture there is, without computing; these compute.
tests/export/test_fold_models.py has some more, of which it says what they fold to.
"""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import micronorm as mn
from tests.tolerances import assert_close_to_max, tolerance

# The lightest of each family, and the side of its image: 64, but for models of one size and for those whose last maps
# would have so few elements that the model itself loses four digits in float32.
OF_TIMM = {
    "botnet26t_256": 256,
    "coatnet_pico_rw_224": 224,
    "convmixer_1024_20_ks9_p14": 56,
    "cpubone_nano": 64,
    "cs3darknet_focus_s": 64,
    "cspresnet50": 128,
    "darknet17": 64,
    "densenet121": 64,
    "dla46_c": 128,
    "dpn48b": 96,
    "ecaresnet26t": 64,
    "efficientformer_l1": 224,
    "efficientformerv2_s0": 224,
    "efficientnet_b0_gn": 64,
    "efficientnet_cc_b0_4e": 64,
    "efficientvit_b0": 64,
    "efficientvit_m0": 224,
    "ese_vovnet19b_slim_dw": 64,
    "fasternet_t0": 64,
    "fastvit_t8": 64,
    "fbnetc_100": 64,
    "gernet_s": 64,
    "ghostnet_050": 64,
    "ghostnetv2_100": 64,
    "halonet26t": 256,
    "hardcorenas_a": 64,
    "hgnetv2_b0": 64,
    "hrnet_w18_small": 64,
    "inception_next_atto": 64,
    "lambda_resnet26t": 128,
    "lcnet_035": 64,
    "lcnetv2_small": 64,
    "legacy_seresnet18": 64,
    "legacy_xception": 96,
    "levit_conv_128s": 224,
    "lowformer_e1": 64,
    "mixnet_s": 64,
    "mnasnet_small": 64,
    "mobilenetv1_100": 64,
    "mobilenetv2_035": 64,
    "mobilenetv3_small_050": 64,
    "mobilenetv4_conv_small_035": 64,
    "mobilenetv4_hybrid_medium": 64,
    "mobileone_s0": 128,
    "mobilevit_xxs": 64,
    "mobilevitv2_050": 64,
    "nextvit_small": 64,
    "poolformer_s12": 64,
    "poolformerv2_s12": 64,
    "regnetx_002": 64,
    "regnety_002": 64,
    "regnetz_005": 64,
    "repghostnet_050": 64,
    "repvit_m0_9": 64,
    "res2net50_48w_2s": 96,
    "resnest14d": 64,
    "resnet10t": 64,
    "resnet50_gn": 64,
    "resnetv2_18": 64,
    "resnetv2_50x1_bit": 64,
    "resnext26ts": 64,
    "rexnet_100": 64,
    "selecsls42": 64,
    "seresnet18": 64,
    "shvit_s1": 64,
    "skresnet18": 64,
    "starnet_s050": 64,
    "swiftformer_xs": 224,
    "tf_mixnet_s": 64,
    "tiny_vit_5m_224": 64,
    "tinynet_e": 64,
    "tresnet_m": 64,
    "visformer_tiny": 224,
    "vit_tiny_r_s16_p8_224": 224,
    "xception41p": 96,
    "xcit_nano_12_p16_224": 64,
}
# One network for each way of pairing and fusing; `make test-slow` has the others.
QUICK_OF_TIMM = frozenset(
    (
        "botnet26t_256",
        "efficientformerv2_s0",
        "efficientnet_b0_gn",
        "fasternet_t0",
        "regnetz_005",
        "repghostnet_050",
        "resnest14d",
        "resnet10t",
        "resnetv2_50x1_bit",
        "skresnet18",
        "tf_mixnet_s",
    )
)
QUICK_OF_TORCHVISION = frozenset(("googlenet", "mc3_18"))
OF_TORCHVISION: dict[str, tuple[int, ...]] = {
    "deeplabv3_mobilenet_v3_large": (3, 64, 64),
    "efficientnet_b0": (3, 64, 64),
    "googlenet": (3, 64, 64),
    "inception_v3": (3, 128, 128),
    "lraspp_mobilenet_v3_large": (3, 64, 64),
    "mc3_18": (3, 4, 32, 32),
    "mnasnet0_5": (3, 64, 64),
    "mobilenet_v2": (3, 64, 64),
    "quantized_resnet18": (3, 64, 64),
    "r2plus1d_18": (3, 4, 32, 32),
    "regnet_x_400mf": (3, 64, 64),
    "regnet_y_400mf": (3, 64, 64),
    "shufflenet_v2_x0_5": (3, 64, 64),
}
DETECTORS = ("fasterrcnn_mobilenet_v3_large_320_fpn", "ssdlite320_mobilenet_v3_large", "maskrcnn_resnet50_fpn_v2")
BATCH_NORMS = nn.modules.batchnorm._BatchNorm


def randomized(model: Any) -> Any:
    """The model with statistics and affines that are nothing special, so that a lost one shows; in place."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, BATCH_NORMS):
                module.running_mean.normal_(std=0.5)
                module.running_var.uniform_(0.5, 2)
                module.weight.add_(torch.randn_like(module.weight), alpha=0.2)
                module.bias.normal_(std=0.2)
    return model


def tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def take_a_step(model: nn.Module, *inputs: Any) -> None:
    """Forward and backward in training mode, and a step of SGD with which the estimates move."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    norms = [m for m in model.modules() if isinstance(m, mn.nn.BatchChannelNorm)]
    before = [norm.running_mean.clone() for norm in norms]
    model.train()
    losses = [t.square().mean() for t in tensors(model(*inputs))]
    sum(losses[1:], losses[0]).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert not [name for name, grad in gradients.items() if not bool(grad.isfinite().all())]
    optimizer.step()
    assert any(not torch.equal(norm.running_mean, old) for norm, old in zip(norms, before, strict=True))


def assert_folds(
    model: nn.Module, *inputs: Tensor, dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32)
) -> None:
    """In eval mode the outputs are finite, and those of the folded model, whose 3-D convolutions take every norm in."""
    for dtype in dtypes:
        whole, x = copy.deepcopy(model).to(dtype).eval(), [i.to(dtype) for i in inputs]
        folded = mn.fold(whole)
        with torch.no_grad():
            expected, actual = tensors(whole(*x)), tensors(folded(*x))
        assert expected
        for a, e in zip(actual, expected, strict=True):
            assert_close_to_max(a, e, tol=tolerance("folded", dtype))
        assert not any(isinstance(module, nn.BatchNorm3d) for module in folded.modules())


def converted(model: nn.Module) -> nn.Module:
    model = mn.convert(randomized(model))
    assert not [name for name, module in model.named_modules() if isinstance(module, BATCH_NORMS)]
    return model


@pytest.mark.parametrize(
    "name", [name if name in QUICK_OF_TIMM else pytest.param(name, marks=pytest.mark.slow) for name in OF_TIMM]
)
def test_a_network_of_timm_trains_on_one_image_and_folds(name):
    side = OF_TIMM[name]
    model, x = converted(timm.create_model(name, num_classes=10)), torch.randn(1, 3, side, side)
    take_a_step(model, x)
    assert_folds(model, x)


# torchvision: Inception and GoogLeNet say so where init_weights is not given
@pytest.mark.filterwarnings("ignore:The default weight initialization of:FutureWarning")
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK_OF_TORCHVISION else pytest.param(name, marks=pytest.mark.slow) for name in OF_TORCHVISION],
)
def test_a_network_of_torchvision_trains_on_one_sample_and_folds(name):
    options: dict[str, Any] = {"aux_logits": False} if name == "inception_v3" else {}
    if name.startswith(("deeplab", "lraspp")):
        options["weights_backbone"] = None
    model = converted(torchvision.models.get_model(name, weights=None, num_classes=10, **options))
    x = torch.randn(1, *OF_TORCHVISION[name])
    take_a_step(model, x)
    assert_folds(model, x)


@pytest.mark.slow
def test_optical_flow_trains_on_one_pair_and_folds():
    model, pair = converted(torchvision.models.optical_flow.raft_small()), torch.rand(2, 1, 3, 128, 128)
    take_a_step(model, *pair)
    with torch.no_grad():  # it keeps what its last forward correlated, which after training cannot be copied
        model.eval()(*pair)
    assert_folds(model, *pair, dtypes=[torch.float32])  # it samples at coordinates of float32


@pytest.mark.parametrize(
    "name", [n if n.startswith("faster") else pytest.param(n, marks=pytest.mark.slow) for n in DETECTORS]
)
def test_a_detector_trains_on_one_image_and_its_features_fold(name):
    sizes: dict[str, Any] = {} if name.startswith("ssd") else {"min_size": 96, "max_size": 96}
    options = {"weights": None, "weights_backbone": None, "num_classes": 3}
    model: Any = converted(torchvision.models.get_model(name, **options, **sizes))
    image = torch.rand(3, 96, 96)
    target = {"boxes": torch.tensor([[8.0, 8.0, 60.0, 60.0]]), "labels": torch.tensor([1])}
    target["masks"] = torch.ones(1, 96, 96, dtype=torch.uint8)
    take_a_step(model, [image], [target])
    model.eval()
    with torch.no_grad():
        assert all(bool(t.isfinite().all()) for t in tensors(model([image])))
    # Detections are cut off at a score, which a rounding may cross; features are not.
    assert_folds(model.backbone, image[None])
