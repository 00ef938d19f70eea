"""`micronorm fold`: turn a trained checkpoint into plain layers for deployment."""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from micronorm.cli.specs import Groups, Statistics, norm_spec, weight_spec
from micronorm.cli.targets import MISUSE, TargetError, resolve_model
from micronorm.convert import convert
from micronorm.convert.foreign import read_state
from micronorm.export import fold as fold_model
from micronorm.export import onnx as export_onnx

FAILED = 1
_HOW = ("model", "norm", "groups", "weight", "statistics")


def fold(
    checkpoint: Annotated[Path, typer.Argument(help="The converted model's state dict: .safetensors, .pt or .pth.")],
    model: Annotated[
        str | None, typer.Option(help="The model it was saved from: timm:NAME, torchvision:NAME or module:factory.")
    ] = None,
    norm: Annotated[str | None, typer.Option(help="The norm the model was converted to; default bcn.")] = None,
    groups: Groups = None,
    weight: Annotated[str | None, typer.Option(help="The weight it was converted to; default ws.")] = None,
    statistics: Statistics = None,
    out: Annotated[Path | None, typer.Option(help="Write the folded state dict here (.safetensors).")] = None,
    onnx: Annotated[Path | None, typer.Option(help="Write an ONNX file here, verified by onnxruntime.")] = None,
    size: Annotated[tuple[int, int], typer.Option(help="Height and width of the example image.")] = (224, 224),
    channels: Annotated[int, typer.Option(min=1, help="Channels of the example image.")] = 3,
) -> None:
    """Fold a trained checkpoint into plain layers, and write them as a state dict, as ONNX, or both.

    A state dict contains tensors but not the layers: --model, --norm, --groups, --weight and --statistics describe the
    model it was saved from. A .safetensors file may contain them as metadata of the same names.

    Exit code 0: written. 1: the checkpoint does not fit the model, or folding or export failed. 2: an option is wrong.
    """
    try:
        if out is None and onnx is None:
            raise TargetError("give --out FILE.safetensors, --onnx FILE.onnx, or both")
        if out is not None and out.suffix != ".safetensors":
            raise TargetError(f"--out writes safetensors, got {out.name!r}")
        if not checkpoint.is_file():
            raise TargetError(f"no file {checkpoint}")
        given = dict(zip(_HOW, (model, norm, groups, weight, statistics), strict=True))
        network = _rebuild(_metadata(checkpoint) | {key: value for key, value in given.items() if value is not None})
        state = read_state(checkpoint)
        has_bcn, saved_bcn = (any("group_weight" in key for key in keys) for keys in (network.state_dict(), state))
        if has_bcn and not saved_bcn:
            raise ValueError("the file contains no group_weight: it was saved from the model before its conversion")
        network.load_state_dict(state)
        _write(fold_model(network.eval()), out, onnx, torch.randn(2, channels, *size))
    except (TargetError, ImportError, RuntimeError, TypeError, ValueError) as fault:
        message = " ".join(str(fault).split())
        typer.echo(f"micronorm fold: {message[:500]}{'…' * (len(message) > 500)}", err=True)
        raise typer.Exit(MISUSE if isinstance(fault, TargetError) else FAILED) from None


def _metadata(checkpoint: Path) -> dict[str, Any]:
    if checkpoint.suffix != ".safetensors":
        return {}
    from safetensors import safe_open

    with safe_open(checkpoint, "pt") as file:
        return {key: value for key, value in (file.metadata() or {}).items() if key in _HOW}


def _rebuild(how: dict[str, Any]) -> nn.Module:
    """Build the converted network with fresh weights."""
    if "model" not in how:
        raise TargetError("give the model: --model timm:NAME, torchvision:NAME or package.module:factory")
    groups = int(how["groups"]) if "groups" in how else None
    norm = norm_spec(how.get("norm", "bcn"), groups=groups, statistics=how.get("statistics"))
    return convert(resolve_model(how["model"]), norm, weight_spec(how.get("weight", "ws")))


def _write(folded: nn.Module, out: Path | None, onnx: Path | None, example: torch.Tensor) -> None:
    if onnx is not None:
        report = export_onnx(folded, onnx, (example,))
        shapes = " and ".join("×".join(map(str, shape)) for shape in report.shapes)
        nodes = f"opset {report.opset}, {report.group_normalizations} GroupNormalization nodes"
        typer.echo(f"{onnx}: {nodes}; onnxruntime agrees to {report.worst:.1e} at {shapes}")
    if out is not None:
        from safetensors.torch import save_model

        save_model(folded, str(out))
        typer.echo(f"{out}: {len(folded.state_dict())} tensors")
