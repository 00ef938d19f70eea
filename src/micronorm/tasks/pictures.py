"""Small pictures of predictions for the record; see `micronorm.records` for their keys."""

import base64
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGEST_PICTURE = 48
"""The greatest height and width of a picture."""


def even_indices(samples: int, count: int) -> Tensor:
    """Return `count` indices, or fewer, spread evenly over all samples."""
    return torch.linspace(0, samples - 1, min(count, samples)).round().long()


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[Tensor]:
    """Set eval mode within this block; yield a parameter, whose device and dtype the inputs need."""
    was_training = model.training
    model.eval()
    try:
        yield next(model.parameters())
    finally:
        model.train(was_training)


def encode_picture(pixels: Tensor) -> dict[str, Any]:
    """Return a C×H×W uint8 picture, of 1 or 3 channels, as the record stores it."""
    channels, height, width = pixels.shape
    text = base64.b64encode(bytes(pixels.permute(1, 2, 0).flatten().tolist())).decode()
    return {"height": height, "width": width, "channels": channels, "pixels": text}


def to_picture(image: Tensor) -> Tensor:
    """Return a C×H×W image as uint8: shrunk to at most 48 pixels, and stretched to black and white.

    If it has neither 1 nor 3 channels, the first channel is shown.
    """
    shown = image.detach().float().cpu()
    shown = shown if len(shown) in (1, 3) else shown[:1]
    factor = -(-max(shown.shape[1:]) // LARGEST_PICTURE)
    shown = F.avg_pool2d(shown, factor, ceil_mode=True)
    low, high = shown.aminmax()
    return ((shown - low) / (high - low).clamp_min(1e-12) * 255).round().nan_to_num().to(torch.uint8)
