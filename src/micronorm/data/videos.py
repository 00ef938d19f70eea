"""Clips: which frames of a video a sample has; and video files, decoded once and kept on a device as small frames.

Video files lie in one folder per class, CLASS/clip.mp4. Legend of shapes: N clips, T frames of each sample, F frames
in all.
"""

import importlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from micronorm.data.files import find_root, fold_of, naming_broken_file, split_by_fold
from micronorm.data.samples import CROP, IMAGENET, DataSet, IndexedSamples, Standardization, Standardizer, copy_indices
from micronorm.ops.keyed import sample_keys, uniforms

FRAMES = 8
"""Frames of a sample, as in the paper."""

_TIME = int.from_bytes(b"time", "big")  # a stream of a sample's key


def choose_frames(lengths: Tensor, keys: Tensor | None) -> Tensor:
    """Return eight frames of each video, one from each of eight equal parts: N×8 int64, in the order of time.

    A video with fewer frames repeats some of them.

    Args:
        lengths: the number of frames of each video, N int64.
        keys: of the samples: the frame is drawn at random within its part. None takes the middle of each part.

    Example:
        >>> choose_frames(torch.tensor([32, 60, 5]), None)
        tensor([[ 2,  6, 10, 14, 18, 22, 26, 30],
                [ 3, 11, 18, 26, 33, 41, 48, 56],
                [ 0,  0,  1,  2,  2,  3,  4,  4]])
    """
    places = 0.5 if keys is None else uniforms(keys, FRAMES, stream=_TIME).double()
    parts = torch.arange(FRAMES, dtype=torch.float64) + places
    return (parts * lengths[:, None] / FRAMES).long()


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


SUFFIXES = (".mp4", ".mov", ".avi", ".mkv", ".webm")
"""Suffixes of video files, in upper or lower case."""
MARGIN = 9 / 8
"""Height and width of the stored frames, as a multiple of the crop."""

# FFmpeg looks at the content, and would follow a playlist or a script of other files and addresses.
_CONTAINERS_ONLY = {"format_whitelist": "mov,mp4,avi,matroska,webm", "protocol_whitelist": "file"}
_MP4_BOXES = (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide")
_MOST = 8 << 30  # bytes of all frames


class _Video(NamedTuple):
    path: Path
    label: int
    frames: Tensor


def open_videos(folder: Path | str | None, *, fold: int, size: int = 64, device: torch.device | str = "cpu") -> DataSet:
    """Decode all videos of a folder; those of one of five folds are for testing.

    A hash of the file name decides about the fold of a video. Frames are resized to a square of 9/8 of `size`, without
    regard to their shape, so that nothing at the sides is lost. Every file is read before the training starts.

    Args:
        folder: the folder of class folders, or one with a child `clips`; None for ./data and ~/data.
        fold: the fold to test on, from 0 to 4.
        size: height and width of the inputs.
        device: where the frames are kept.

    Raises:
        FileNotFoundError: fewer than two class folders have videos.
        ValueError: a video cannot be read or a class folder has none (the message has its name), a part is empty, or
            the frames need too much memory.
        ImportError: neither PyAV nor torchcodec is installed.
    """
    layout = f"at least two folders, one per class, with files {', '.join(SUFFIXES)}"
    root = find_root(
        folder,
        ("clips",),
        lambda place: sum(map(bool, find_videos(place).values())) > 1,
        title="a set of videos",
        layout=layout,
    )
    files = find_videos(root)
    empty = [name for name, paths in files.items() if not paths]
    if empty:
        raise ValueError(f"{root / empty[0]} holds no video ({', '.join(SUFFIXES)}): fill it or remove it")
    untrained = [name for name, paths in files.items() if all(fold_of(path.name) == fold for path in paths)]
    if untrained and len(untrained) < len(files):
        raise ValueError(
            f"fold {fold} of {root} has all videos of {untrained[0]}, and leaves none for training: add videos of this "
            "class, or choose another fold"
        )
    side, bytes_so_far, videos = round(size * MARGIN), 0, []
    for label, paths in enumerate(files.values()):
        for path in paths:
            videos.append(_Video(path, label, shrink_frames(decode_video(path), side)))
            bytes_so_far += videos[-1].frames.numel()
            if bytes_so_far > _MOST:
                raise ValueError(
                    f"the frames of {root} need more than {_MOST >> 30} GiB of memory; give a smaller --size, or "
                    "extract the frames into the layout of Something-Something V1"
                )
    parts = split_by_fold(videos, lambda video: video.path.name, fold=fold, where=root)
    train, test = (
        MemoryClips(
            torch.cat([video.frames for video in part]),
            torch.tensor([len(video.frames) for video in part]),
            torch.tensor([video.label for video in part]),
            standardization=IMAGENET,
            crop=size,
            augment=part is parts[0],
            device=device,
        )
        for part in parts
    )
    return DataSet(train, test, tuple(files))


def find_videos(root: Path) -> dict[str, list[Path]]:
    """Return the videos of each class folder, both sorted by name. Names that begin with a dot are hidden files."""
    folders = [place for place in _visible(root) if place.is_dir()] if root.is_dir() else []
    return {place.name: [path for path in _visible(place) if path.suffix.lower() in SUFFIXES] for place in folders}


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def decode_video(path: Path) -> Tensor:
    """Return all frames of a video, F×3×H×W uint8, by PyAV or, if it is not installed, by torchcodec.

    Frames are turned as the file says: a phone that was held upside down writes them upside down, with a flag.

    Raises:
        ValueError: the file cannot be read as a video, was cut short, or says that its frames are mirrored or oblique.
        ImportError: neither is installed.
    """
    if path.exists() and not path.is_file():  # a pipe could be read forever
        raise ValueError(f"{path} is not a regular file; replace it or delete it")
    try:
        import av
    except ImportError:
        return _decode_by_torchcodec(path)
    with naming_broken_file(path, "video"), av.open(str(path), options=_CONTAINERS_ONLY) as video:
        expected = video.streams.video[0].frames  # 0 if the file does not say it
        frames = [_turn_upright(frame) for frame in video.decode(video=0)]
    if not frames or len(frames) < expected:
        raise ValueError(
            f"{path} has {len(frames)} of {expected} frames: the file was cut short; replace it or delete it"
        )
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)


def _turn_upright(frame: Any) -> np.ndarray:
    """Return the pixels of PyAV's frame, H×W×3, turned as its display matrix says."""
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is not None:
        a, b, _, c, d = np.frombuffer(matrix, np.int32)[:5].astype(float)  # right goes to (a, b), down to (c, d)
        if a * d <= b * c or frame.rotation % 90:
            raise ValueError(
                "its frames are to be mirrored, or turned by no multiple of 90°; write them as they are to be seen: "
                "ffmpeg -i OLD NEW"
            )
    return np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)  # both counter-clockwise


def _decode_by_torchcodec(path: Path) -> Tensor:
    try:
        decoders: Any = importlib.import_module("torchcodec.decoders")
    except (ImportError, RuntimeError) as error:  # RuntimeError: it finds no FFmpeg
        raise ImportError(f"video files need PyAV: pip install av (or torchcodec: {error})") from error
    with naming_broken_file(path, "video"):
        with path.open("rb") as file:
            start = file.read(12)
        # torchcodec has no list of allowed formats.
        if start[4:8] not in _MP4_BOXES and not start.startswith((b"RIFF", b"\x1aE\xdf\xa3")):
            raise ValueError("it does not begin like an MP4, MOV, AVI, MKV or WebM file")
        decoder = decoders.VideoDecoder(str(path))
    if not hasattr(decoder.metadata, "rotation"):  # since 0.11 it has this, and turns the frames itself
        raise ImportError("torchcodec before 0.11 does not turn the videos of phones upright: pip install av")
    with naming_broken_file(path, "video"):
        return decoder[:]


def shrink_frames(frames: Tensor, side: int) -> Tensor:
    """Return F×C×H×W bytes as F×C×side×side bytes."""
    small = F.interpolate(frames.float(), (side, side), mode="bilinear", antialias=True, align_corners=False)
    return small.round().clamp(0, 255).to(torch.uint8)
