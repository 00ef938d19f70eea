"""`micronorm diagnose`: find the layers of a network that are near an elimination singularity."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from torch import Tensor, nn

from micronorm.cli.printing import FAILED, TargetError, print_json, show_report
from micronorm.cli.targets import (
    ANY_CLASSES,
    Groups,
    Norm,
    Target,
    Weight,
    attempt,
    converted,
    find_weights,
    input_channels,
    resolve,
)
from micronorm.cli.train import find_device
from micronorm.convert.checkpoint import load_state, read_state
from micronorm.data.files import SUFFIXES, decode, require_torchvision, to_pixels
from micronorm.data.samples import IMAGENET, Standardization, Standardizer
from micronorm.diagnostics.diagnosis import Diagnosis
from micronorm.diagnostics.diagnosis import diagnose as examine
from micronorm.recipes.load import facts_beside, recorded_names

_BATCH = 32


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
        typer.Option(help="A folder of pictures, digits, or random. Use images like the training images."),
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
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Run a network over images, and report layers that lose channels, with a remedy.

    It finds channels that a ReLU keeps inactive, channels that are normalized together although their statistics differ
    too much (StatDiff), and running statistics that do not fit the images. With --norm or --weight the model is
    converted before the checkpoint is loaded. For a run directory, it also reports a collapse at the start of training.

    Exit code 0: no problem. 1: a layer has one, or training collapsed. 2: the model, the checkpoint, the data or an
    option is wrong.
    """
    file = None if checkpoint is None else find_weights(checkpoint)
    facts = {} if file is None else facts_beside(file)
    subject = resolve(target, classes=ANY_CLASSES if file is None else len(recorded_names(facts)) or None)
    place = find_device(device)
    model = converted(subject.model, norm, groups, weight)
    fresh = _is_fresh(model) and file is None
    if file is not None:
        _load(model, file)
    source, batch = _images(subject, target, data, images, size)
    collapse = facts.get("collapse")
    collapse = collapse if isinstance(collapse, str) else None
    diagnosis = replace(_examine(model.to(place), batch.to(place), by=by, fresh=fresh), collapse=collapse)
    if checkpoint is None and (fresh or target.split(":")[0] in ("torchvision", "timm", "recipe")):
        by_batches = ", and batch normalization used its batches" if fresh else ""
        diagnosis.notes.append(
            f"the weights were never trained{by_batches}: use --checkpoint to judge a trained network"
        )
    if source == "random":
        diagnosis.notes.append("random images tell little about the channels that real images use: use --data")
    if as_json:
        about = {"target": target, "checkpoint": str(checkpoint) if checkpoint else None, "data": source}
        print_json({**about, "images": len(batch), **diagnosis.to_dict()})
    else:
        shape = "×".join(map(str, batch.shape))
        _print(Console(highlight=False), f"{target} on {source}, {shape}", diagnosis, target, rows=layers)
    raise typer.Exit(0 if diagnosis.ok else FAILED)


def _load(model: nn.Module, file: Path) -> None:
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


def _images(target: Target, name: str, data: str | None, count: int, size: int | None) -> tuple[str, Tensor]:
    """Return the source of the images, and the images."""
    own: Any = target.rest[0] if target.rest else None
    while isinstance(own, tuple | list) and own:
        own = own[0]
    if data is None and isinstance(own, Tensor) and own.ndim > 1:
        return "its own batch", own[:count]
    uses_digits = target.recipe is not None and target.recipe.data == "digits"
    source = data or ("digits" if uses_digits else "random")
    known: Any = getattr(target.model, "pretrained_cfg", None)  # timm's input size and standardization
    config = known if isinstance(known, Mapping) else {}
    if size is None and source != "digits":
        size = config.get("input_size", (3, 224, 224))[-1] if name.startswith(("timm:", "torchvision:")) else 64
    standardization = None
    if config.get("mean") and config.get("std"):
        standardization = Standardization(*(tuple(255 * v for v in config[key]) for key in ("mean", "std")))
    channels = input_channels(target.model)
    return source, read_images(source, count=count, size=size, channels=channels, standardization=standardization)


def _examine(model: nn.Module, images: Tensor, *, by: str, fresh: bool) -> Diagnosis:
    fault = f"the model fails on images of {'×'.join(map(str, images.shape))}"
    hint = "; try --size, or a factory whose model takes a batch of images"
    # Equal pieces: a last batch of one sample would have no batch statistics.
    pieces = images.tensor_split(-(-len(images) // _BATCH))
    statistics: Any = ("batch" if fresh else "estimates") if by == "auto" else by
    forward = lambda model, piece: attempt(lambda: model(piece), fault, hint)  # noqa: E731
    return examine(model, pieces, statistics=statistics, trained=not fresh, forward=forward)


def _print(console: Console, head: str, diagnosis: Diagnosis, target: str, *, rows: int) -> None:
    lines = [head, str(diagnosis)]
    if rows:
        lines.insert(1, f"worst layers:\n{diagnosis.table(rows)}")
    if any(finding.remedy.startswith("mn.convert") for finding in diagnosis.findings):
        lines.append(f"preview the conversion: micronorm plan {target}")
    words = [finding.layer for finding in diagnosis.findings] + ["fix:", "effect:"]
    red, green = r"\d+ LAYERS? (ARE|IS) IN TROUBLE", "No layer is near an elimination singularity"
    show_report(console, "\n".join(lines), bold=words, red=red, green=green)


def read_images(
    source: str,
    *,
    count: int,
    size: int | None,
    channels: int,
    standardization: Standardization | None = None,
) -> Tensor:
    """Return at most `count` images, N×channels×H×W in float32.

    Args:
        source: one of
            "digits": the test images of scikit-learn's digits;
            "random": see `random_images`;
            a folder: pictures at any depth, chosen evenly.
        count: how many images.
        size: height and width. None keeps those of the data, and means 224 for pictures and random images.
        channels: the model's input channels. Grey images are repeated, colours averaged.
        standardization: of pictures, in pixels from 0 to 255. None means ImageNet's.

    Raises:
        TargetError: the source does not exist, or contains no image.
    """
    if source == "digits":
        from micronorm.data.digits import read_digits

        images = read_digits().test.images[:count]
    elif source == "random":
        return random_images(count, channels=channels, size=size or 224)
    elif Path(source).is_dir():
        images = _read_folder(Path(source), count, size or 224, standardization or IMAGENET)
    else:
        raise TargetError(f"no data {source!r}: give digits, random or a folder of pictures")
    images = _with_channels(images.to(torch.float32), channels)
    if size is not None and tuple(images.shape[2:]) != (size, size):
        images = F.interpolate(images, size=(size, size), mode="bilinear", antialias=True)
    return images


def random_images(count: int, *, channels: int, size: int) -> Tensor:
    """Return noise with the spectrum of photographs: amplitudes fall as 1/f, and colours vary together.

    All images together have mean 0 and standard deviation 1. White noise would not do: convolutions average it away.

    Example:
        >>> images = random_images(4, channels=3, size=32)
        >>> images.shape, round(images.std().item(), 3)
        (torch.Size([4, 3, 32, 32]), 1.0)
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(count, 1 + channels, size, size, generator=generator)
    frequency = torch.hypot(torch.fft.fftfreq(size)[:, None], torch.fft.rfftfreq(size)[None])
    amplitude = 1 / frequency.clamp(min=1 / size)  # the mean of an image varies as its slowest wave does
    waves = torch.fft.irfft2(torch.fft.rfft2(noise) * amplitude, s=(size, size))
    images = waves[:, :1] + waves[:, 1:] / 2
    return (images - images.mean()) / images.std()


def _read_folder(folder: Path, count: int, size: int, standardization: Standardization) -> Tensor:
    from micronorm.data.folders import crop_centre

    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not files:
        raise TargetError(f"no pictures ({', '.join(SUFFIXES)}) in {folder} or below")
    chosen = [files[i * len(files) // count] for i in range(count)] if len(files) > count else files
    require_torchvision()
    images = torch.stack([to_pixels(crop_centre(decode(file), size)) for file in chosen])
    return Standardizer(standardization)(images)


def _with_channels(images: Tensor, channels: int) -> Tensor:
    if images.shape[1] == channels:
        return images
    if images.shape[1] == 1:
        return images.expand(-1, channels, -1, -1)
    if channels == 1:
        return images.mean(1, keepdim=True)
    raise TargetError(f"the images have {images.shape[1]} channels, the model takes {channels}")
