"""Published networks in onnxruntime: two of them exported anew, and the record of ten held to the same law."""

import csv
from pathlib import Path

import pytest
import torch
import torchvision

import micronorm as mn
from tests.export.networks import randomized
from tests.tolerances import tolerance

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "onnx.csv"
NETWORKS = [
    "resnet50",
    "resnext50_32x4d",
    "densenet121",
    "efficientnet_b0",
    "mobilenet_v3_large",
    "timm/regnety_032",
    "deeplabv3_resnet50",
    "fcn_resnet50",
    "r3d_18",
    "timm/hrnet_w18_small features_only",
]
# how to build it, and two inputs with another batch and image size
EXPORTED = {
    "mobilenet_v3_small": (torchvision.models.mobilenet_v3_small, (1, 3, 64, 96), (2, 3, 96, 64)),
    "r3d_18": (torchvision.models.video.r3d_18, (1, 3, 4, 32, 32), (2, 3, 8, 48, 32)),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch.onnx's own
@pytest.mark.parametrize("name", EXPORTED)
def test_a_published_network_is_the_same_function_in_onnxruntime(name, tmp_path):
    build, *shapes = EXPORTED[name]
    model = randomized(mn.convert(build()))
    first, second = (torch.randn(shape) for shape in shapes)
    report = mn.export.onnx(model, tmp_path / "model.onnx", first, other_inputs=second)
    assert report.worst <= tolerance("folded", torch.float32)
    assert report.group_normalizations == sum(isinstance(m, mn.nn.BatchChannelNorm) for m in model.modules())


def test_the_record_holds_every_network():
    with RECORD.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["model"] for row in rows] == NETWORKS
    for row in rows:
        assert max(float(row["worst"]), float(row["folded_worst"])) <= tolerance("folded", torch.float32)
        assert row["group_normalizations"] == row["norms"]
        sizes = zip(row["shape_1"].split("x"), row["shape_2"].split("x"), strict=True)
        assert [i for i, (a, b) in enumerate(sizes) if a == b] in ([1], [1, 4])  # another batch, another image
