"""Clips: which frames of a video a sample has, and clips that are kept on a device as bytes.

Legend of shapes: N clips, T frames of each sample, F frames in all.
"""

import torch
from torch import Tensor

from micronorm.data.pixels import Standardization, Standardizer
from micronorm.data.samples import CROP, IndexedSamples, copy_indices
from micronorm.ops.keyed import sample_keys, uniforms

FRAMES = 8
"""Frames of a sample, as in the paper."""

_TIME = int.from_bytes(b"time", "big")  # a stream of a sample's key


def choose_frames(lengths: Tensor, keys: Tensor | None, *, frames: int = FRAMES) -> Tensor:
    """Return T frames of each video, one from each of T equal parts: N×T int64, in the order of time.

    A video with fewer frames repeats some of them.

    Args:
        lengths: the number of frames of each video, N int64.
        keys: of the samples: the frame is drawn at random within its part. None takes the middle of each part.
        frames: T.

    Example:
        >>> choose_frames(torch.tensor([16, 30, 3]), None, frames=4)
        tensor([[ 2,  6, 10, 14],
                [ 3, 11, 18, 26],
                [ 0,  1,  1,  2]])
    """
    places = 0.5 if keys is None else uniforms(keys, frames, stream=_TIME).double()
    parts = torch.arange(frames, dtype=torch.float64) + places
    return (parts * lengths[:, None] / frames).long()


class MemoryClips(IndexedSamples):
    """Videos of bytes on a device. Batches are float32 N×T×C×crop×crop clips, standardized, and int64 labels.

    With `augment`, frames are drawn within their parts of the video, and all frames of a clip are cropped at the same
    random place; both are functions of (seed, epoch, index) alone. Without, frames and crop are central. Clips are
    never mirrored: the direction of a motion may be the class.

    Args:
        frames: of all videos one after the other, F×C×H×W uint8.
        lengths: frames of each video, N whole numbers whose sum is F.
        labels: N whole numbers.
        standardization: mean and standard deviation per channel.
        crop: height and width of a sample; None for whole frames.
        augment: whether frames and crops are random.
        device: where the frames are kept.

    Example:
        >>> pixels = torch.zeros(20, 1, 6, 6, dtype=torch.uint8)
        >>> scale = Standardization((128.0,), (64.0,))
        >>> clips = MemoryClips(pixels, torch.tensor([12, 8]), torch.tensor([0, 1]), standardization=scale, crop=4)
        >>> batch, labels = next(clips.load([(0, torch.tensor([1, 0]))], seed=0))
        >>> batch.shape, labels
        (torch.Size([2, 8, 1, 4, 4]), tensor([1, 0]))
    """

    def __init__(
        self,
        frames: Tensor,
        lengths: Tensor,
        labels: Tensor,
        *,
        standardization: Standardization,
        crop: int | None = None,
        augment: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        assert (len(frames), len(labels)) == (int(lengths.sum()), len(lengths))
        height, width = frames.shape[2:]
        crop = min(height, width) if crop is None else crop
        if not 1 <= crop <= min(height, width):
            raise ValueError(f"crop must be from 1 to {min(height, width)} for frames of {height}×{width}, got {crop}")
        self._device, self._augment = torch.device(device), augment
        self._standardize = Standardizer(standardization, self._device)
        self._lengths, self._starts = lengths, lengths.cumsum(0) - lengths
        self._labels = labels.to(self._device, torch.int64)
        # F×C×rows×columns×crop×crop: every window of every frame, as a view.
        self._windows = frames.to(self._device).unfold(2, crop, 1).unfold(3, crop, 1)

    def __len__(self) -> int:
        return len(self._lengths)

    def _batch(self, indices: Tensor, *, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
        indices = indices.cpu()
        keys = sample_keys(indices, seed=seed, epoch=epoch) if self._augment else None
        frames = self._starts[indices, None] + choose_frames(self._lengths[indices], keys)
        draws = torch.full((len(indices), 2), 0.5) if keys is None else uniforms(keys, 2, stream=CROP)
        places = (draws * torch.tensor(self._windows.shape[2:4])).long()
        top, left = (place[:, None].expand_as(frames) for place in places.unbind(1))
        frames, top, left = copy_indices(torch.stack([frames, top, left]), self._device)
        clips = self._windows[frames, :, top, left]
        return self._standardize(clips), self._labels[indices.to(self._device)]
