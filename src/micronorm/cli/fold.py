"""`micronorm fold`: a trained checkpoint as plain layers, for production."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import nn

from micronorm.cli.specs import Groups, Norm, Statistics, Weight, norm_spec, weight_spec
from micronorm.cli.targets import MISUSE, TargetError, resolve_model
from micronorm.convert import convert
from micronorm.convert.foreign import read_state
from micronorm.export import fold as fold_model
from micronorm.export import onnx as export_onnx

FAILED = 1


def fold(
    checkpoint: Annotated[
        Path, typer.Argument(help="The state dict of the converted model: .safetensors, .pt or .pth.")
    ],
    model: Annotated[str, typer.Option(help="The model it belongs to: timm:NAME, torchvision:NAME or module:factory.")],
    norm: Norm = "bcn",
    groups: Groups = None,
    weight: Weight = "ws",
    statistics: Statistics = None,
    out: Annotated[Path | None, typer.Option(help="Write the folded state dict here (.safetensors).")] = None,
    onnx: Annotated[Path | None, typer.Option(help="Write an ONNX file here, verified by onnxruntime.")] = None,
    size: Annotated[tuple[int, int], typer.Option(help="Height and width of the example image.")] = (224, 224),
    channels: Annotated[int, typer.Option(min=1, help="Channels of the example image.")] = 3,
) -> None:
    """Fold a trained checkpoint into plain layers, and write them as a state dict, as ONNX, or both."""
    try:
        if out is None and onnx is None:
            raise TargetError("say where to write: --out FILE.safetensors, --onnx FILE.onnx, or both")
        if out is not None and out.suffix != ".safetensors":
            raise TargetError(f"--out writes safetensors, got {out.name!r}")
        if not checkpoint.is_file():
            raise TargetError(f"no file {checkpoint}")
        network = resolve_model(model)
        # What the model was converted with must be said again: a state dict holds tensors, not layers.
        network = convert(network, norm_spec(norm, groups=groups, statistics=statistics), weight_spec(weight))
        network.load_state_dict(read_state(checkpoint))
        _write(fold_model(network.eval()), out, onnx, torch.randn(2, channels, *size))
    except (TargetError, ImportError, RuntimeError, TypeError, ValueError) as fault:
        typer.echo(f"micronorm fold: {fault}", err=True)
        raise typer.Exit(MISUSE if isinstance(fault, TargetError) else FAILED) from None


def _write(folded: nn.Module, out: Path | None, onnx: Path | None, example: torch.Tensor) -> None:
    if onnx is not None:
        report = export_onnx(folded, onnx, (example,))
        typer.echo(f"{onnx}: {report}")
    if out is not None:
        from safetensors.torch import save_model

        save_model(folded, str(out))
        typer.echo(f"{out}: {sum(1 for _ in folded.state_dict())} tensors")
