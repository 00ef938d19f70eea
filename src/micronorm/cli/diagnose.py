"""`micronorm diagnose`: find the layers of a network that are near an elimination singularity."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import typer
from rich.console import Console
from torch import Tensor, nn

from micronorm import records
from micronorm.cli.pictures import read_images
from micronorm.cli.progress import show_report
from micronorm.cli.specs import Groups, Norm, Weight, converted
from micronorm.cli.targets import TargetError, input_channels, resolve
from micronorm.convert.checkpoint import load_state, read_state
from micronorm.data.pixels import Standardization
from micronorm.diagnostics.diagnosis import Diagnosis
from micronorm.diagnostics.diagnosis import diagnose as examine
from micronorm.engine.journal import WEIGHTS
from micronorm.recipes import find

FOUND = 1
"""The exit code if a layer has a problem."""

_BATCH = 32


class _Subject(NamedTuple):
    """A model, the images that its factory returned, and the data set of its recipe."""

    model: nn.Module
    images: Tensor | None = None
    data: str | None = None


def diagnose(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="timm:NAME, torchvision:NAME, recipe:NAME or package.module:factory. A factory returns a model, "
            "or (model, batch, …) with images first in the batch.",
        ),
    ],
    checkpoint: Annotated[
        Path | None, typer.Option(help="A run directory, or a state dict: .safetensors, .pt or .pth.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="A folder of pictures, digits, or random. Use images like those of its training."),
    ] = None,
    images: Annotated[int, typer.Option(min=1, help="The number of images; at least 32 to judge channels.")] = 128,
    size: Annotated[int | None, typer.Option(min=1, help="The height and width of the images.")] = None,
    norm: Norm = "none",
    groups: Groups = None,
    weight: Weight = "none",
    by: Annotated[
        Literal["auto", "estimates", "batch"],
        typer.Option(
            help="What BatchNorm uses: its running statistics (estimates), or those of each batch of 32 images. auto: "
            "the batch if the network was never trained."
        ),
    ] = "auto",
    layers: Annotated[int, typer.Option(min=0, help="The number of worst layers to list.")] = 10,
    device: Annotated[str, typer.Option(help="The device to run on.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Run a network over images, and report layers that lose channels, with a remedy.

    It finds channels that a ReLU keeps inactive, channels that are normalized together although their statistics differ
    too much (StatDiff), and running statistics that do not fit the images. With --norm or --weight the model is
    converted before the checkpoint is loaded. For a run directory, it also reports a collapse at the start of training.

    Exit code 0: no problem. 1: a layer has one, or training collapsed. 2: the model, the checkpoint, the data or an
    option is wrong.
    """
    subject = _resolve(target)
    model = converted(subject.model, norm, groups, weight)
    fresh = _is_fresh(model) and checkpoint is None
    if checkpoint is not None:
        _load(model, checkpoint)
    source, batch = _images(subject, target, data, images, size)
    collapse = None if checkpoint is None else _collapse(checkpoint)
    diagnosis = replace(_examine(model, batch, device, by=by, fresh=fresh), collapse=collapse)
    if checkpoint is None and (fresh or target.split(":")[0] in ("torchvision", "timm", "recipe")):
        by_batches = ", and batch normalization used its batches" if fresh else ""
        diagnosis.notes.append(
            f"the weights were never trained{by_batches}: use --checkpoint to judge a trained network"
        )
    if source == "random":
        diagnosis.notes.append("random images tell little about the channels that real images use: use --data")
    if as_json:
        facts = {"target": target, "checkpoint": str(checkpoint) if checkpoint else None, "data": source}
        typer.echo(json.dumps({**facts, "images": len(batch), **diagnosis.to_dict()}, indent=1, ensure_ascii=False))
    else:
        shape = "×".join(map(str, batch.shape))
        _print(Console(highlight=False), f"{target} on {source}, {shape}", diagnosis, target, rows=layers)
    raise typer.Exit(0 if diagnosis.ok else FOUND)


def _resolve(target: str) -> _Subject:
    made = resolve(target)
    if isinstance(made, nn.Module):
        uses_digits = target.startswith("recipe:") and find(target.removeprefix("recipe:")).data == "digits"
        return _Subject(made, data="digits" if uses_digits else None)
    model = made[0] if made else None
    if not isinstance(model, nn.Module):
        raise TargetError(f"{target} must return a model or a tuple that starts with one, got {type(model).__name__}")
    first: Any = made[1] if len(made) > 1 else None
    while isinstance(first, tuple | list) and first:
        first = first[0]
    return _Subject(model, images=first if isinstance(first, Tensor) and first.ndim > 1 else None)


def _collapse(checkpoint: Path) -> str | None:
    """Return how the run that wrote the checkpoint collapsed at its start; None if it did not or there is no record."""
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    if not (folder / records.FACTS).is_file():
        return None
    found = records.read(folder, rows=False).facts.get("collapse")
    return found if isinstance(found, str) else None


def _load(model: nn.Module, checkpoint: Path) -> None:
    """Load the state dict of a file, or of a run directory."""
    file = checkpoint / WEIGHTS if checkpoint.is_dir() else checkpoint
    if not file.is_file():
        raise TargetError(f"{file} does not exist")
    state = read_state(file)
    try:
        load_state(model, state)
    except ValueError as error:
        raise TargetError(
            f"{file}: {error}. If it was saved from a converted model, use --norm, --groups and --weight"
        ) from error


def _is_fresh(model: nn.Module) -> bool:
    """Return whether the model has running statistics and all have their initial values, mean 0 and variance 1."""
    pairs = [(getattr(m, "running_mean", None), getattr(m, "running_var", None)) for m in model.modules()]
    kept = [(mean, var) for mean, var in pairs if isinstance(mean, Tensor) and isinstance(var, Tensor)]
    return bool(kept) and all(bool((mean == 0).all() and (var == 1).all()) for mean, var in kept)


def _images(subject: _Subject, target: str, data: str | None, count: int, size: int | None) -> tuple[str, Tensor]:
    """Return the source of the images, and the images."""
    if data is None and subject.images is not None:
        return "its own batch", subject.images[:count]
    source = data or subject.data or "random"
    known: Any = getattr(subject.model, "pretrained_cfg", None)  # timm's input size and standardization
    config = known if isinstance(known, Mapping) else {}
    if size is None and source != "digits":
        size = config.get("input_size", (3, 224, 224))[-1] if target.startswith(("timm:", "torchvision:")) else 64
    standardization = None
    if config.get("mean") and config.get("std"):
        standardization = Standardization(*(tuple(255 * v for v in config[key]) for key in ("mean", "std")))
    channels = input_channels(subject.model)
    return source, read_images(source, count=count, size=size, channels=channels, standardization=standardization)


def _examine(model: nn.Module, images: Tensor, device: str, *, by: str, fresh: bool) -> Diagnosis:
    try:
        place = torch.device(device)
        if place.type == "meta":
            raise TargetError("--device meta computes no values; use cpu or cuda")
        model.to(place)
    except (RuntimeError, AssertionError) as error:
        raise TargetError(f"--device {device}: {error}") from error
    # Equal pieces: a last batch of one sample would have no batch statistics.
    pieces = images.to(place).tensor_split(-(-len(images) // _BATCH))
    statistics = ("batch" if fresh else "estimates") if by == "auto" else by
    try:
        return examine(model, pieces, statistics=statistics, trained=not fresh, forward=_call)  # type: ignore[arg-type]
    except _ModelFault as fault:
        shape, error = "×".join(map(str, images.shape)), fault.__cause__
        raise TargetError(
            f"the model fails on images of {shape} ({type(error).__name__}: {error}); try --size, or a factory whose "
            "model takes a batch of images"
        ) from error


class _ModelFault(Exception):
    """An exception from the model's forward."""


def _call(model: nn.Module, images: Tensor) -> None:
    try:
        model(images)
    except Exception as error:  # any model may raise anything
        raise _ModelFault from error


def _print(console: Console, head: str, diagnosis: Diagnosis, target: str, *, rows: int) -> None:
    lines = [head, str(diagnosis)]
    if rows:
        lines.insert(1, f"worst layers:\n{diagnosis.table(rows)}")
    if any(finding.remedy.startswith("mn.convert") for finding in diagnosis.findings):
        lines.append(f"preview the conversion: micronorm plan {target}")
    words = [finding.layer for finding in diagnosis.findings] + ["fix:", "effect:"]
    red, green = r"\d+ LAYERS? (ARE|IS) IN TROUBLE", "No layer is near an elimination singularity"
    show_report(console, "\n".join(lines), bold=words, red=red, green=green)
