"""Videos as folders of JPEG files: the official layout of Something-Something V1 and of Jester.

    20bn-something-something-v1/ID/00001.jpg, 00002.jpg, …
    something-something-v1-labels.csv        one class per line
    something-something-v1-train.csv         ID;class
    something-something-v1-validation.csv

Jester has the prefixes 20bn-jester-v1 and jester-v1.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from micronorm.data.files import check_picture, decode, find_root, read_lines, require_torchvision
from micronorm.data.loading import FileSamples, Order
from micronorm.data.samples import CROP, IMAGENET, DataSet, Standardizer
from micronorm.data.videos import FRAMES, choose_frames
from micronorm.ops.keyed import uniforms

PREFIXES = {"something": "something-something-v1", "jester": "jester-v1"}
"""The beginning of the names of a data set's files."""
SIDES = (0.66, 1.0)
"""Range of the side of a training crop, as a share of the frame's shorter side."""
TEST_SIDE = 224 / 256


class FrameFolder(NamedTuple):
    """A video: the folder of its frames, their number, and its label."""

    path: str
    length: int
    label: int


def open_frame_folders(folder: Path | str | None, *, name: str, size: int = 224, workers: int = 0) -> DataSet:
    """Open Something-Something V1 or Jester. The validation set is the test set.

    Every folder is listed, and the last frame of every video is checked, before the training starts.

    Args:
        folder: the folder with the label file, or one with a child of the data set's name; None for ./data and ~/data.
        name: "something" or "jester".
        size: height and width of the inputs.
        workers: processes that decode; 0 decodes in this one.

    Raises:
        FileNotFoundError: the data set, a list, a folder or a frame is missing.
        ValueError: a list or a file is broken, with its name.
    """
    prefix = PREFIXES[name]
    layout = (
        f"a folder with {prefix}-labels.csv, {prefix}-train.csv, {prefix}-validation.csv and the frames in "
        f"20bn-{prefix}/ID/00001.jpg, …"
    )
    holds = lambda place: (place / f"{prefix}-labels.csv").is_file()  # noqa: E731
    root = find_root(folder, (prefix, name), holds, title=prefix, layout=layout)
    classes = tuple(read_lines(root / f"{prefix}-labels.csv"))
    if len(set(classes)) < len(classes):
        raise ValueError(f"{root / f'{prefix}-labels.csv'} has a class twice")
    parts = []
    for part in ("train", "validation"):
        videos = read_split(root / f"{prefix}-{part}.csv", root / f"20bn-{prefix}", classes)
        parts.append(FileSamples(_FrameDecoder(videos, size=size, augment=part == "train"), workers=workers))
    return DataSet(*parts, names=classes)


def read_split(path: Path, frames: Path, classes: Sequence[str]) -> list[FrameFolder]:
    """Return the videos that a file lists as ID;class, one per line. Raise an error if a video is not complete."""
    labels = {name: label for label, name in enumerate(classes)}
    found = []
    for number, line in enumerate(read_lines(path), 1):
        identity, _, name = line.partition(";")
        if name not in labels or not identity.isalnum():
            raise ValueError(f"{path}, line {number}: an ID, a semicolon and a class were expected, got {line!r}")
        place = frames / identity
        found.append(FrameFolder(str(place), count_frames(place), labels[name]))
    return found


def count_frames(folder: Path) -> int:
    """Return the number of frames 00001.jpg, 00002.jpg, … in a folder. Raise an error if one is missing or broken."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder} with the frames of a video")
    names = {name for name in os.listdir(folder) if name.endswith(".jpg")}
    missing = next((name for k in range(1, len(names) + 1) if (name := frame_name(k)) not in names), None)
    if missing or not names:
        raise FileNotFoundError(
            f"{folder} must have the frames 00001.jpg, 00002.jpg, …; it has {len(names)} and lacks "
            f"{missing or frame_name(1)}"
        )
    check_picture(folder / frame_name(len(names)))  # where an interrupted extraction ends
    return len(names)


def frame_name(number: int) -> str:
    """Return the file name of a frame; numbers begin at 1."""
    return f"{number:05d}.jpg"


class _FrameDecoder:
    """Videos in folders of frames. Batches are float32 N×8×3×size×size clips, standardized, and int64 labels.

    With `augment`, frames are drawn within eight equal parts of the video, and all frames of a clip have the same
    random square crop; both are functions of (seed, epoch, index) alone. Without, frames and crop are central. Clips
    are never mirrored: "pushing something from left to right" would become another class.
    """

    def __init__(self, videos: Sequence[FrameFolder], *, size: int, augment: bool) -> None:
        if size < 1:
            raise ValueError(f"size must be positive, got {size}")
        require_torchvision()
        self._standardize = Standardizer(IMAGENET)
        self._paths = [video.path for video in videos]
        self._lengths, self._labels = (torch.tensor(column) for column in list(zip(*videos, strict=True))[1:])
        self._size, self._augment = size, augment

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, order: Order) -> tuple[Tensor, Tensor]:
        keys, count = order.keys if self._augment else None, len(order.indices)
        chosen = choose_frames(self._lengths[order.indices], keys)
        crops = [None] * count if keys is None else uniforms(keys, 3, stream=CROP).tolist()
        clips = torch.empty(count, FRAMES, 3, self._size, self._size, dtype=torch.uint8)
        for n, (index, frames, draws) in enumerate(zip(order.indices, chosen.tolist(), crops, strict=True)):
            for t, frame in enumerate(frames):
                clips[n, t] = self._frame(Path(self._paths[index], frame_name(frame + 1)), draws)
        return clips, self._labels[order.indices]

    def finish(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return standardized clips and their labels."""
        clips, labels = batch
        return self._standardize(clips), labels

    def _frame(self, path: Path, draws: Sequence[float] | None) -> Tensor:
        from torchvision.transforms.v2 import functional as transforms

        image = decode(path)
        share, down, right = (TEST_SIDE, 0.5, 0.5) if draws is None else draws
        if draws is not None:
            share = SIDES[0] + (SIDES[1] - SIDES[0]) * share
        side = max(1, round(share * min(image.size)))
        top, left = int(down * (image.height - side + 1)), int(right * (image.width - side + 1))
        image = transforms.resized_crop(image, top, left, side, side, size=[self._size, self._size])
        return transforms.pil_to_tensor(image)
