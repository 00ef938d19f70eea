"""Compare published networks, converted, folded and exported to ONNX, with onnxruntime's outputs. See README.md.

This script cannot be named onnx.py: `import onnx` would then import the script.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
import torchvision
from torch import Tensor, nn

import micronorm as mn
from micronorm.bench.results import provenance, write_csv

SEED = 0
PACKAGES = ("torchvision", "timm", "onnx", "onnxscript", "onnxruntime")
IMAGES = ((1, 3, 96, 128), (2, 3, 160, 96))
CLIPS = ((1, 3, 8, 64, 64), (2, 3, 16, 96, 64))
vision, segmentation = torchvision.models, torchvision.models.segmentation


@dataclass(frozen=True)
class Network:
    """How to build a network, and the two input shapes of the comparison."""

    build: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...] = IMAGES


NETWORKS = {
    "resnet50": Network(vision.resnet50),
    "resnext50_32x4d": Network(vision.resnext50_32x4d),
    "densenet121": Network(vision.densenet121),
    "efficientnet_b0": Network(vision.efficientnet_b0),
    "mobilenet_v3_large": Network(vision.mobilenet_v3_large),
    "timm/regnety_032": Network(lambda: timm.create_model("regnety_032")),
    "deeplabv3_resnet50": Network(lambda: segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None)),
    "fcn_resnet50": Network(lambda: segmentation.fcn_resnet50(weights=None, weights_backbone=None)),
    "r3d_18": Network(vision.video.r3d_18, CLIPS),
    "timm/hrnet_w18_small features_only": Network(lambda: timm.create_model("hrnet_w18_small", features_only=True)),
}


def randomize(model: nn.Module) -> None:
    """Set estimates and affines that differ between channels, as after training."""
    generator = torch.Generator().manual_seed(SEED)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator)

    with torch.no_grad():
        for norm in (m for m in model.modules() if isinstance(m, mn.nn.BatchChannelNorm)):
            norm.running_mean.copy_(noise(norm.running_mean))
            norm.running_var.copy_(0.5 + noise(norm.running_var).abs())
            for parameter in (norm.weight, norm.bias, norm.group_weight, norm.group_bias):
                parameter.add_(0.3 * noise(parameter))


def measure(name: str) -> dict[str, object]:
    """Convert, fold, export and compare one network; return its row."""
    torch.manual_seed(SEED)
    network = NETWORKS[name]
    model = mn.convert(network.build())
    randomize(model)
    first, second = (torch.randn(shape) for shape in network.shapes)
    folded = mn.fold(model)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report = mn.export.onnx(model, Path(folder) / "model.onnx", first, other_inputs=second)
        size = report.path.stat().st_size
    return {
        "model": name,
        **{f"shape_{i}": "x".join(map(str, shape)) for i, shape in enumerate(report.shapes, 1)},
        "worst": f"{report.worst:.3g}",
        "folded_worst": f"{mn.export.verify(model.eval(), folded, [first, second]):.3g}",
        "norms": sum(isinstance(module, mn.nn.BatchChannelNorm) for module in model.modules()),
        "batch_norms_left": sum(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in folded.modules()),
        "group_normalizations": report.group_normalizations,
        "opset": report.opset,
        "file_mb": f"{size / 1e6:.1f}",
        "seconds": f"{time.perf_counter() - started:.1f}",
    }


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", choices=NETWORKS, help="one network instead of all; repeatable")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--out", type=Path, help="write the rows to this CSV file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    torch.set_num_threads(args.threads)
    models = "".join(f" --model '{name}'" for name in args.model or ())
    command = f"python benchmarks/onnx_models.py --threads {args.threads}{models}"
    facts = provenance(torch.device("cpu"), command, packages=PACKAGES)
    rows = []
    for name in args.model or NETWORKS:
        row = measure(name)
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        rows.append({**row, **facts})
    if args.out is not None:
        write_csv(args.out, rows)


if __name__ == "__main__":
    main()
