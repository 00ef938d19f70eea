"""Generated clips of digits that move, turn, grow, and hide behind one another.

Each class is another one played backwards. A model that ignores the order of the frames cannot tell the two apart: at
best it is right half of the time. Frames are long exposures, so the blur of a single frame shows the line along which a
digit moves, but not which way.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from micronorm.data.digits import read_digits
from micronorm.data.samples import DataSet, IndexedSamples, Standardization, Standardizer
from micronorm.data.videos import FRAMES, MemoryClips
from micronorm.ops.keyed import integers, sample_keys, uniforms

CLASSES = (
    "right", "left", "down", "up", "clockwise", "counterclockwise", "grow", "shrink", "hide", "appear",
)  # fmt: skip
"""Class 2k + 1 is class 2k played backwards."""
TRAIN, TEST = 3000, 1000
SIZE = 24
"""Height and width of a frame."""

_SCALE = Standardization(mean=(48.0,), std=(63.0,))
_TILE = 0.35  # brightness of the tile on which a digit stands
_NOISE = 0.1  # at most added to a pixel
_HIDE = CLASSES.index("hide") // 2
_MOMENTS = 3  # per frame, whose mean is what a camera would see
_EXPOSURE = 2  # frames, so that neighbouring exposures overlap
_ALL_MOMENTS = (FRAMES + _EXPOSURE - 1) * _MOMENTS
_AT_ONCE = 100  # clips, to save memory
_TEST_SEED = 2**32 + 1  # no seed of a run: those have at most 32 bits
_DIGITS, _PATH, _PIXELS = (int.from_bytes(name, "big") for name in (b"digi", b"path", b"nois"))


def open_motion(*, device: torch.device | str = "cpu") -> DataSet:
    """Return 3,000 training and 1,000 test clips of 8 frames, 300 and 100 per class.

    Training clips are drawn anew in each epoch: a clip is a function of (seed, epoch, index). Test clips are always the
    same, and show digits that training clips never show.

    Example:
        >>> train, test, names = open_motion()
        >>> clips, labels = next(test.load([(0, torch.arange(2))], seed=0))
        >>> len(train), clips.shape, [names[label] for label in labels]
        (3000, torch.Size([2, 8, 1, 24, 24]), ['right', 'left'])
    """
    train, test = (part.images for part in read_digits())
    indices = torch.arange(TEST)
    fixed = torch.cat([_draw(part, test, seed=_TEST_SEED, epoch=0) for part in indices.split(_AT_ONCE)])
    lengths, labels = torch.full((TEST,), FRAMES), _labels(indices)
    kept = MemoryClips(fixed.flatten(0, 1), lengths, labels, standardization=_SCALE, device=device)
    return DataSet(_DrawnClips(train, device), kept, names=CLASSES)


class _DrawnClips(IndexedSamples):
    """Training clips. The CPU draws them when a batch is loaded, because another device may round differently."""

    def __init__(self, digits: Tensor, device: torch.device | str) -> None:
        self._digits, self._device = digits, torch.device(device)
        self._standardize = Standardizer(_SCALE, device)

    def __len__(self) -> int:
        return TRAIN

    def _batch(self, indices: Tensor, *, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        indices = indices.cpu()
        clips = _draw(indices, self._digits, seed=seed, epoch=epoch)
        return self._standardize(clips.to(self._device)), _labels(indices).to(self._device)


def _labels(indices: Tensor) -> Tensor:
    return indices % len(CLASSES)


def _draw(indices: Tensor, digits: Tensor, *, seed: int, epoch: int) -> Tensor:
    return draw_motion(sample_keys(indices, seed=seed, epoch=epoch), _labels(indices), digits)


def draw_motion(keys: Tensor, labels: Tensor, digits: Tensor) -> Tensor:
    """Return clips as N×8×1×24×24 uint8; each is a function of its key and label alone.

    Args:
        keys: N int64, from `sample_keys`.
        labels: N int64, places in `CLASSES`.
        digits: K×1×8×8 images with values from −1 to 1, to choose from.
    """
    actor, other = (digits[choice] for choice in integers(keys, 2, bound=len(digits), stream=_DIGITS).unbind(1))
    moving, resting = _paths(labels // 2, uniforms(keys, 8, stream=_PATH))
    hides = (labels // 2 == _HIDE)[:, None, None]  # behind the other tile; all others pass in front of it
    dark = moving.new_zeros(len(keys), 1, 1, SIZE, SIZE)
    scene = _paint(dark, torch.where(hides[..., None], actor, other), torch.where(hides, moving, resting))
    scene = _paint(scene, torch.where(hides[..., None], other, actor), torch.where(hides, resting, moving))
    frames = scene.unfold(1, _EXPOSURE * _MOMENTS, _MOMENTS).mean(-1)
    noise = uniforms(keys, FRAMES * SIZE * SIZE, stream=_PIXELS).reshape(-1, FRAMES, 1, SIZE, SIZE)
    clips = (255 * (frames + _NOISE * noise).clamp(0, 1)).round().to(torch.uint8)
    return torch.where((labels % 2 == 1)[:, None, None, None, None], clips.flip(1), clips)


def _paths(kind: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Return right, down, angle and half the side of the moving and the resting tile at M moments, N×M×4 each.

    A frame reaches from −1 to 1. Kinds are pairs of classes.
    """
    across, along, far, right, down, angle, towards, side = (draw[:, None] for draw in draws.unbind(1))
    goes_right, goes_down, turns, grows, hides = (kind[:, None] == k for k in range(len(CLASSES) // 2))
    time = torch.linspace(0, 1, _ALL_MOMENTS)[None]
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
    moving, resting = (torch.stack([value.expand(-1, _ALL_MOMENTS) for value in tile], 2) for tile in (moving, resting))
    return moving, resting


def _paint(canvas: Tensor, digits: Tensor, path: Tensor) -> Tensor:
    """Paint a tile with a digit at each moment: N×M×1×S×S canvases, N×1×8×8 digits, N×M×4 paths."""
    right, down, angle, half = path.flatten(0, 1).unbind(1)
    cos, sin = angle.cos() / half, angle.sin() / half
    # From a place in the frame to one on the tile: subtract the tile's centre, turn back, and divide by its size.
    theta = torch.stack([cos, sin, -cos * right - sin * down, -sin, cos, sin * right - cos * down], 1).reshape(-1, 2, 3)
    tiles = torch.cat([_TILE + (1 - _TILE) * (digits + 1) / 2, torch.ones_like(digits)], 1)
    tiles = tiles.repeat_interleave(_ALL_MOMENTS, 0)
    grid = F.affine_grid(theta, [len(tiles), 1, SIZE, SIZE], align_corners=False)
    ink, covered = F.grid_sample(tiles, grid, align_corners=False).unflatten(0, (-1, _ALL_MOMENTS)).split(1, 2)
    return canvas * (1 - covered) + ink  # both fade at the edges of the tile
