"""`micronorm fold`: turn a trained checkpoint into plain layers for deployment."""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from micronorm.cli.printing import CommandFailed, TargetError, one_line
from micronorm.cli.targets import Groups, Statistics, find_weights, input_channels, norm_spec, resolve, weight_spec
from micronorm.convert import convert
from micronorm.convert.checkpoint import load_state, pack_state, read_header, read_state
from micronorm.export import fold as fold_model
from micronorm.export import onnx as export_onnx
from micronorm.export.fold import is_ours
from micronorm.recipes.load import facts_beside, recorded_names
from micronorm.recipes.load import load as load_run
from micronorm.records import write_atomically


def fold(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="A run directory of `micronorm train`, or a state dict: .safetensors, .pt, .pth."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="The model it was saved from: recipe:NAME, timm:NAME, torchvision:NAME or module:factory."),
    ] = None,
    norm: Annotated[str | None, typer.Option(help="The norm the model was converted to. Default: bcn.")] = None,
    groups: Groups = None,
    weight: Annotated[str | None, typer.Option(help="The weight it was converted to. Default: ws.")] = None,
    statistics: Statistics = None,
    out: Annotated[Path | None, typer.Option(help="Write the folded state dict here (.safetensors).")] = None,
    onnx: Annotated[Path | None, typer.Option(help="Write an ONNX file here, verified by onnxruntime.")] = None,
    size: Annotated[tuple[int, int], typer.Option(help="Height and width of the example image.")] = (224, 224),
    channels: Annotated[
        int | None, typer.Option(min=1, help="Channels of the example image. Default: those of the first convolution.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="Shape of one example instead, such as 1x32x48x32 for a volume: channels first."),
    ] = None,
    fixed_size: Annotated[
        bool, typer.Option("--fixed-size", help="The ONNX file takes this size only; the batch may change.")
    ] = False,
) -> None:
    """Fold a trained checkpoint into plain layers, and write them as a state dict, as ONNX, or both.

    A run directory records what was trained. For a state dict, --model, --norm, --groups, --weight and --statistics
    describe the model it was saved from. The metadata of a .safetensors file may name its model: a recipe, or a model
    of timm or torchvision, but no code of yours. A model that already has layers of micronorm is not converted again.

    Exit code 0: written. 1: the checkpoint does not fit the model, or folding or export failed. 2: an option is wrong.
    """
    try:
        if out is None and onnx is None:
            raise TargetError("give --out FILE.safetensors, --onnx FILE.onnx, or both")
        if out is not None and out.suffix != ".safetensors":
            raise TargetError(f"--out writes safetensors, got {out.name!r}")
        options = {"norm": norm, "groups": groups, "weight": weight, "statistics": statistics}
        network = _read(checkpoint, model, {key: value for key, value in options.items() if value is not None})
        folded = network if out is None else fold_model(network)
        if onnx is not None:
            _write_onnx(folded, onnx, _example(folded, channels, size, shape), fixed_size=fixed_size)
        if out is not None:
            write_atomically(out, pack_state(folded))
            typer.echo(f"{out}: {len(folded.state_dict())} tensors")
    except (OSError, RuntimeError, TypeError, ValueError) as fault:  # the options are right, the checkpoint is not
        raise CommandFailed(one_line(fault)) from None


def _read(checkpoint: Path, model: str | None, options: dict[str, Any]) -> nn.Module:
    """Return the trained network in eval mode."""
    if checkpoint.is_dir() and model is None and not options:
        return load_run(checkpoint)
    file = find_weights(checkpoint)
    classes = len(recorded_names(facts_beside(file))) or None
    network = _rebuild(model, options, read_header(file), classes)
    state = read_state(file)
    has_bcn, saved_bcn = (any("group_weight" in key for key in keys) for keys in (network.state_dict(), state))
    if has_bcn and not saved_bcn:
        raise ValueError(
            f"{file} contains no group_weight: it was saved before the conversion. Give a checkpoint "
            "of the converted model"
        )
    try:
        load_state(network, state)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return network.eval()


def _rebuild(model: str | None, options: dict[str, Any], header: dict[str, str], classes: int | None) -> nn.Module:
    """Build the converted network with fresh weights, from the options or, without a model, the file's metadata."""
    target = model or header.get("model")
    if target is None:
        raise TargetError("give the model: --model recipe:NAME, timm:NAME, torchvision:NAME or package.module:factory")
    network, _, recipe = resolve(target, classes=classes, from_file=model is None)
    if recipe is not None or any(map(is_ours, network.modules())):
        if options:
            unused = " and ".join(f"--{name}" for name in options)
            raise TargetError(f"{target} gives a converted model: leave out {unused}")
        return network
    weight = weight_spec(options.pop("weight", "ws"))
    return convert(network, norm_spec(options.pop("norm", "bcn"), **options), weight)


def _example(model: nn.Module, channels: int | None, size: tuple[int, int], shape: str | None) -> Tensor:
    """Return two random inputs of the model."""
    if shape is not None:
        sizes = shape.split("x")
        if len(sizes) < 2 or not all(part.isdecimal() and int(part) for part in sizes):
            raise TargetError(f"--shape is channels and sizes, such as 3x224x224 or 1x32x48x32, got {shape!r}")
        return torch.randn(2, *map(int, sizes))
    first = next((m for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)), None)
    if isinstance(first, nn.Conv1d | nn.Conv3d):
        sizes = f"{first.in_channels}x" + ("1000" if isinstance(first, nn.Conv1d) else "32x48x32")
        raise TargetError(f"the model starts with a {type(first).__name__}: give --shape, such as --shape {sizes}")
    return torch.randn(2, channels or input_channels(model), *size)


def _write_onnx(model: nn.Module, path: Path, example: Tensor, *, fixed_size: bool) -> None:
    try:
        report = export_onnx(model, path, (example,), dynamic="batch" if fixed_size else True)
    except ValueError as fault:
        if not str(fault).startswith("the model does not run on inputs"):
            raise
        text = str(fault).replace('give other_inputs, or dynamic="batch"', "use --fixed-size if it takes one size only")
        raise ValueError(text if text != str(fault) else f"{text}; give --size or --shape") from fault
    shapes = " and ".join("×".join(map(str, shape)) for shape in report.shapes)
    nodes = f"opset {report.opset}, {report.group_normalizations} GroupNormalization nodes"
    typer.echo(f"{path}: {nodes}; onnxruntime agrees to {report.worst:.1e} at {shapes}")
