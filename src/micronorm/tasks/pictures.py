"""Pictures of predictions: small ones for classification, larger ones with label maps, boxes and masks.

See `micronorm.records` for the keys of the record that stores them.
"""

import base64
import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGEST_PICTURE = 48
"""The greatest height and width of a picture that is shown with its class."""
LARGEST_SCENE = 256
"""The greatest height and width of a picture with label maps or boxes."""
VOID_COLOUR = 255
"""The entry of the palette for pixels without a label."""

_MOST_NAMED = 12  # the names of more boxes would cover the picture


def _voc_palette() -> Tensor:
    """Return PASCAL VOC's colours: the bits of a class, lowest first, are the high bits of red, green, blue in turn."""
    classes = torch.arange(256)
    bits = [[(classes >> 3 * k + channel & 1) << 7 - k for k in range(3)] for channel in range(3)]
    return torch.stack([sum(channel, torch.zeros_like(classes)) for channel in bits], 1).to(torch.uint8)


PALETTE = _voc_palette()
"""256×3 uint8: the colour of each class, as in the masks of PASCAL VOC."""


def even_indices(samples: int, count: int) -> Tensor:
    """Return `count` indices, or fewer, spread evenly over all samples."""
    return torch.linspace(0, samples - 1, min(count, samples)).round().long()


def load_few(samples: Any, count: int) -> Iterator[Any]:
    """Yield batches of one sample, spread evenly over all samples. One sample fits into any memory."""
    return samples.load(((0, index[None]) for index in even_indices(len(samples), count)), seed=0)


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
    return stretch(F.avg_pool2d(shown, factor, ceil_mode=True))


def stretch(image: Tensor) -> Tensor:
    """Return an image as uint8, from black for its least value to white for its largest."""
    low, high = image.aminmax()
    return ((image - low) / (high - low).clamp_min(1e-12) * 255).round().nan_to_num().to(torch.uint8)


def colour_labels(labels: Tensor, *, void: int) -> Tensor:
    """Return H×W labels as a 3×H×W uint8 picture in the colours of PASCAL VOC.

    Example:
        >>> colour_labels(torch.tensor([[0, 1, 255]]), void=255)[:, 0].tolist()
        [[0, 128, 224], [0, 0, 224], [0, 0, 192]]
    """
    return PALETTE[labels.cpu().masked_fill(labels.cpu() == void, VOID_COLOUR).long()].permute(2, 0, 1)


def colour_code(entry: int) -> str:
    """Return a colour of the palette as "#800000"."""
    return "#" + bytes(PALETTE[entry].tolist()).hex()


def draw_image(image: Tensor) -> str:
    """Return a floating image of 1 or 3 channels as a small picture, stretched to black and white."""
    return encode_scene(stretch(shrink(image.detach().float().cpu())).expand(3, -1, -1))


def draw_labels(labels: Tensor, *, void: int = VOID_COLOUR) -> str:
    """Return H×W labels as a small picture in the colours of the classes."""
    size = shrink(labels[None].float()).shape[1:]
    small = F.interpolate(labels[None, None].float(), size, mode="nearest-exact")[0, 0].long()
    return encode_scene(colour_labels(small, void=void), lossless=True)


def draw_detections(
    image: Tensor,
    detection: Mapping[str, Tensor],
    names: Sequence[str] | Mapping[int, str],
    *,
    largest: int | None = None,
) -> Tensor:
    """Draw the boxes, masks and class names of one image.

    Objects of several classes get the colours of their classes. Objects of a single class get a colour each, so that
    touching objects can be told apart. The names of more than twelve boxes are left out: they would cover the picture.

    Args:
        image: 3×H×W, from 0 to 1.
        detection: `boxes` (K×4: left, top, right, bottom, in pixels) and `labels` (K); if present, `scores` (K) are
            written beside the names, and `masks` (K×H×W or K×1×H×W, from 0 to 1) are drawn where they exceed 0.5.
        names: of the classes, by label.
        largest: shrink image, boxes and masks before drawing, to at most this height and width.

    Returns:
        3×H×W uint8.

    Example:
        >>> found = {"boxes": torch.tensor([[1.0, 1.0, 6.0, 6.0]]), "labels": torch.tensor([1])}
        >>> draw_detections(torch.zeros(3, 8, 8), found, ("background", "nucleus")).shape
        torch.Size([3, 8, 8])
    """
    from PIL import Image, ImageDraw

    detection = {key: value.detach().float().cpu() for key, value in detection.items()}
    boxes, labels, masks = detection["boxes"], detection["labels"].long().tolist(), detection.get("masks")
    shown = image.detach().float().cpu()
    height, width = shown.shape[1:]
    masks = torch.zeros(len(boxes), height, width) if masks is None else masks.reshape(len(boxes), height, width)
    if largest is not None and max(height, width) > largest:
        shown = shrink(shown, largest)
        boxes = boxes / boxes.new_tensor([width, height] * 2) * boxes.new_tensor([*shown.shape[:0:-1]] * 2)
        masks = torch.stack([shrink(mask[None], largest)[0] for mask in masks]) if len(masks) else masks
    numbers = labels if len(set(labels)) > 1 else range(1, len(labels) + 1)
    colours = PALETTE[[1 + (number - 1) % 254 for number in numbers]].float()
    canvas = 255 * shown.clamp(0, 1)
    for mask, colour in zip(masks > 0.5, colours, strict=True):
        canvas[:, mask] = (canvas[:, mask] + colour[:, None]) / 2
    picture = Image.fromarray(canvas.round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy())
    draw = ImageDraw.Draw(picture)
    for box, colour in zip(boxes.tolist(), colours.int().tolist(), strict=True):
        left, top = box[:2]
        draw.rectangle((left, top, max(left, box[2]), max(top, box[3])), outline=tuple(colour))
    scores = [f" {score:.2f}" for score in detection["scores"]] if "scores" in detection else [""] * len(labels)
    for box, label, score in zip(boxes.tolist(), labels, scores, strict=True):
        if len(boxes) <= _MOST_NAMED:
            corner = (box[0] + 2, box[1] + 1)
            draw.text(corner, f"{names[label]}{score}", fill="white", stroke_width=1, stroke_fill="black")
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def shrink(image: Tensor, largest: int = LARGEST_SCENE) -> Tensor:
    """Return a floating C×H×W image whose height and width are at most `largest`, by averaging; its ratio is kept."""
    factor = min(1.0, largest / max(image.shape[1:]))
    size = [max(1, round(factor * side)) for side in image.shape[1:]]
    return F.interpolate(image[None], size, mode="area")[0]


def encode_scene(pixels: Tensor, *, lossless: bool = False) -> str:
    """Return a 3×H×W uint8 picture as base64 of a JPEG file, or of a PNG file for label maps (`lossless`).

    The pixels of pictures below 64 are repeated, so that a browser does not blur them.
    """
    from PIL import Image

    file = io.BytesIO()
    factor = max(1, LARGEST_SCENE // 2 // max(pixels.shape[1:]))
    pixels = pixels.repeat_interleave(factor, 1).repeat_interleave(factor, 2)
    image = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    if lossless:
        image.quantize(256).save(file, "PNG", optimize=True)
    else:
        image.save(file, "JPEG", quality=85)
    return base64.b64encode(file.getvalue()).decode()
