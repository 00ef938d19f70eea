"""Read the images that a command runs a model on: digits, a folder of pictures, or random ones."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from micronorm.cli.faults import TargetError
from micronorm.data.files import SUFFIXES, decode, require_torchvision, to_pixels
from micronorm.data.pixels import IMAGENET, Standardization


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


def random_images(count: int, *, channels: int, size: int, seed: int = 0) -> Tensor:
    """Return noise with the spectrum of photographs: amplitudes fall as 1/f, and colours vary together.

    All images together have mean 0 and standard deviation 1. White noise would not do: convolutions average it away.

    Example:
        >>> images = random_images(4, channels=3, size=32)
        >>> images.shape, round(images.std().item(), 3)
        (torch.Size([4, 3, 32, 32]), 1.0)
    """
    generator = torch.Generator().manual_seed(seed)
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
    mean, std = (torch.tensor(part).view(-1, 1, 1) for part in standardization)
    return (images - mean) / std


def _with_channels(images: Tensor, channels: int) -> Tensor:
    if images.shape[1] == channels:
        return images
    if images.shape[1] == 1:
        return images.expand(-1, channels, -1, -1)
    if channels == 1:
        return images.mean(1, keepdim=True)
    raise TargetError(f"the images have {images.shape[1]} channels, the model takes {channels}")
