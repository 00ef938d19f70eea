"""Video files in one folder per class, CLASS/clip.mp4, decoded once and kept in memory as small frames."""

import hashlib
import importlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from micronorm.data.clips import MemoryClips
from micronorm.data.pixels import IMAGENET

SUFFIXES = (".mp4", ".mov", ".avi", ".mkv", ".webm")
"""File names of videos end so, in upper or lower case."""
FOLDS = 5
MARGIN = 9 / 8
"""Height and width of the stored frames, as a multiple of the crop."""

# FFmpeg looks at the content, and would follow a playlist or a script of other files and addresses.
_CONTAINERS_ONLY = {"format_whitelist": "mov,mp4,avi,matroska,webm", "protocol_whitelist": "file"}
_MOST = 8 << 30  # bytes of all frames


class VideoSet(NamedTuple):
    """The training and test samples, and the names of the classes by label."""

    train: MemoryClips
    test: MemoryClips
    classes: tuple[str, ...]


class _Video(NamedTuple):
    path: Path
    label: int
    frames: Tensor


def open_videos(
    folder: Path | str, *, fold: int, size: int = 64, child: str = "clips", device: torch.device | str = "cpu"
) -> VideoSet:
    """Decode all videos of a folder; those of one of five folds are for testing.

    A hash of the file name decides about the fold of a video. Frames are resized to a square of 9/8 of `size`, without
    regard to their shape, so that nothing at the sides is lost. Every file is read before the training starts.

    Args:
        folder: the folder of class folders, or one with a child `child`.
        fold: from 0 to 4: the part that is tested on.
        size: height and width of the inputs.
        child: a folder to look into.
        device: where the frames are kept.

    Raises:
        FileNotFoundError: there are no two class folders with videos.
        ValueError: a file is no readable video, with its name; a part is empty; or the frames need too much memory.
        ImportError: neither PyAV nor torchcodec is installed.
    """
    if not 0 <= fold < FOLDS:
        raise ValueError(f"fold must be from 0 to {FOLDS - 1}, got {fold}")
    places = [Path(folder), Path(folder) / child]
    root, files = next(((place, found) for place in places if len(found := find_videos(place)) > 1), (None, {}))
    if root is None:
        raise FileNotFoundError(
            f"videos were looked for in {' and '.join(map(str, places))}: at least two folders, one per class, with "
            f"files {', '.join(SUFFIXES)}"
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
    parts = [[video for video in videos if (fold_of(video.path.name) == fold) == test] for test in (False, True)]
    if not all(parts):
        raise ValueError(
            f"fold {fold} of {root} has {len(parts[0])} training and {len(parts[1])} test videos: add more"
        )
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
    return VideoSet(train, test, tuple(files))


def fold_of(name: str) -> int:
    """Return the fold of a video by its file name: SHA-256 modulo 5.

    Example:
        >>> [fold_of(f"{k}.mp4") for k in range(8)]
        [2, 3, 1, 1, 4, 2, 4, 4]
    """
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % FOLDS


def find_videos(root: Path) -> dict[str, list[Path]]:
    """Return the videos of each class folder that has some, both sorted by name."""
    folders = sorted(place for place in root.iterdir() if place.is_dir()) if root.is_dir() else []
    found = {place.name: sorted(p for p in place.iterdir() if p.suffix.lower() in SUFFIXES) for place in folders}
    return {name: paths for name, paths in found.items() if paths}


def decode_video(path: Path) -> Tensor:
    """Return all frames of a video, F×3×H×W uint8, by PyAV or, if it is not installed, by torchcodec.

    Raises:
        ValueError: the file is no readable video, or was cut short.
        ImportError: neither is installed.
    """
    if path.exists() and not path.is_file():  # a pipe could be read forever
        raise ValueError(f"{path} is not a regular file; replace it or delete it")
    try:
        import av
    except ImportError:
        return _decode_by_torchcodec(path)
    try:
        with av.open(str(path), options=_CONTAINERS_ONLY) as video:
            expected = video.streams.video[0].frames  # 0 if the file does not say it
            frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    except Exception as error:  # of FFmpeg, for no video stream, for names of streams that are no text, …
        raise _unreadable(path, error) from error
    if not frames or len(frames) < expected:
        raise ValueError(
            f"{path} has {len(frames)} of {expected} frames: the file was cut short; replace it or delete it"
        )
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)


def _decode_by_torchcodec(path: Path) -> Tensor:
    try:
        decoders: Any = importlib.import_module("torchcodec.decoders")
    except (ImportError, RuntimeError) as error:  # RuntimeError: it finds no FFmpeg
        raise ImportError(f"video files need PyAV: pip install av (or torchcodec: {error})") from error
    try:
        return decoders.VideoDecoder(str(path))[:]
    except (RuntimeError, ValueError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> ValueError:
    why = " ".join(str(error).split())[:200]
    return ValueError(f"{path} is not a readable video ({type(error).__name__}: {why}); replace it or delete it")


def shrink_frames(frames: Tensor, side: int) -> Tensor:
    """Return F×C×H×W bytes as F×C×side×side bytes."""
    small = F.interpolate(frames.float(), (side, side), mode="bilinear", antialias=True, align_corners=False)
    return small.round().clamp(0, 255).to(torch.uint8)
