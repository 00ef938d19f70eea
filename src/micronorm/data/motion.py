"""Generated clips of digits that move, turn, grow, and hide behind one another.

Each class is another one played backwards. A model that ignores the order of the frames cannot tell the two apart: at
best it is right half of the time.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from micronorm.data.digits import read_digits
from micronorm.data.samples import DataSet, Standardization
from micronorm.data.videos import FRAMES, MemoryClips
from micronorm.ops.keyed import integers, sample_keys, uniforms

CLASSES = (
    "right", "left", "down", "up", "clockwise", "counterclockwise", "grow", "shrink", "hide", "appear",
)  # fmt: skip
"""Class 2k + 1 is class 2k played backwards."""
TRAIN, TEST = 3000, 1000
SIZE = 24
"""Height and width of a frame."""

_SCALE = Standardization(mean=(44.0,), std=(60.0,))
_TILE = 0.35  # brightness of the tile on which a digit stands
_NOISE = 0.1  # the brightest pixel of the background
_HIDE = CLASSES.index("hide") // 2
_AT_ONCE = 500  # clips, to save memory
_DIGITS, _PATH, _PIXELS = (int.from_bytes(name, "big") for name in (b"digi", b"path", b"nois"))


def open_motion(*, device: torch.device | str = "cpu") -> DataSet:
    """Return 3,000 training and 1,000 test clips of 8 frames, 300 and 100 per class.

    Training and test clips show different digits.

    Example:
        >>> train, test, names = open_motion()
        >>> clips, labels = next(test.load([(0, torch.arange(2))], seed=0))
        >>> len(train), clips.shape, [names[label] for label in labels]
        (3000, torch.Size([2, 8, 1, 24, 24]), ['right', 'left'])
    """
    parts = []
    for part, (count, digits) in enumerate(zip((TRAIN, TEST), read_digits(), strict=True)):
        indices = torch.arange(count)
        labels = indices % len(CLASSES)
        pairs = zip(indices.split(_AT_ONCE), labels.split(_AT_ONCE), strict=True)
        clips = torch.cat([draw_motion(i, k, digits.images, seed=part) for i, k in pairs])
        lengths = torch.full((count,), FRAMES)
        parts.append(MemoryClips(clips.flatten(0, 1), lengths, labels, standardization=_SCALE, device=device))
    return DataSet(*parts, names=CLASSES)


def draw_motion(indices: Tensor, labels: Tensor, digits: Tensor, *, seed: int) -> Tensor:
    """Return the clips of these indices as N×8×1×24×24 uint8; each is a function of (seed, index, label) alone.

    Args:
        indices: N int64.
        labels: N int64, places in `CLASSES`.
        digits: K×1×8×8 images with values from −1 to 1, to choose from.
        seed: another seed gives other clips.
    """
    keys = sample_keys(indices, seed=seed, epoch=0)
    actor, other = (digits[choice] for choice in integers(keys, 2, bound=len(digits), stream=_DIGITS).unbind(1))
    noise = uniforms(keys, FRAMES * SIZE * SIZE, stream=_PIXELS).reshape(-1, FRAMES, 1, SIZE, SIZE)
    moving, resting = _paths(labels // 2, uniforms(keys, 8, stream=_PATH))
    hides = (labels // 2 == _HIDE)[:, None, None]  # behind the other tile; all others pass in front of it
    canvas = _paint(_NOISE * noise, torch.where(hides[..., None], actor, other), torch.where(hides, moving, resting))
    canvas = _paint(canvas, torch.where(hides[..., None], other, actor), torch.where(hides, resting, moving))
    clips = (255 * canvas).round().to(torch.uint8)
    return torch.where((labels % 2 == 1)[:, None, None, None, None], clips.flip(1), clips)


def _paths(kind: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Return right, down, angle and half the side of the moving and the resting tile, N×T×4 each.

    A frame reaches from −1 to 1. Kinds are pairs of classes.
    """
    across, along, far, right, down, angle, towards, side = (draw[:, None] for draw in draws.unbind(1))
    goes_right, goes_down, turns, grows, hides = (kind[:, None] == k for k in range(len(CLASSES) // 2))
    time = torch.linspace(0, 1, FRAMES)[None]
    size, tilt = 0.3 + 0.1 * side, 0.6 * (angle - 0.5)
    rest_right, rest_down = 1.1 * right - 0.55, 1.1 * down - 0.55
    travel = (0.9 + 0.4 * far) * (time - 0.5) + 0.2 * (along - 0.5)
    away, heading = (0.8 + 0.3 * far) * (1 - time), 2 * math.pi * towards
    moving = (
        torch.where(goes_right, travel, torch.where(hides, rest_right + away * heading.cos(), 1.1 * across - 0.55)),
        torch.where(goes_down, travel, torch.where(hides, rest_down + away * heading.sin(), 1.1 * towards - 0.55)),
        torch.where(turns, 2 * math.pi * angle + (1.5 + far) * time, tilt),
        torch.where(grows, size * (0.6 + (0.8 + far) * time), size),
    )
    resting = (rest_right, rest_down, -tilt, size + 0.05)
    moving, resting = (torch.stack([value.expand(-1, FRAMES) for value in tile], 2) for tile in (moving, resting))
    return moving, resting


def _paint(canvas: Tensor, digits: Tensor, path: Tensor) -> Tensor:
    """Paint a tile with a digit on each frame: N×T×1×S×S canvases, N×1×8×8 digits, N×T×4 paths."""
    right, down, angle, half = path.flatten(0, 1).unbind(1)
    cos, sin = angle.cos() / half, angle.sin() / half
    # From a place in the frame to one on the tile: subtract the tile's centre, turn back, and divide by its size.
    theta = torch.stack([cos, sin, -cos * right - sin * down, -sin, cos, sin * right - cos * down], 1).reshape(-1, 2, 3)
    tiles = torch.cat([_TILE + (1 - _TILE) * (digits + 1) / 2, torch.ones_like(digits)], 1)
    tiles = tiles.repeat_interleave(FRAMES, 0)
    grid = F.affine_grid(theta, [len(tiles), 1, SIZE, SIZE], align_corners=False)
    ink, covered = F.grid_sample(tiles, grid, align_corners=False).unflatten(0, (-1, FRAMES)).split(1, 2)
    return canvas * (1 - covered) + ink  # both fade at the edges of the tile
