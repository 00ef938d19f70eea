"""Hostile data sets: a miniature of each format in which something was changed, and the command that trains on it.

Nothing is trained. The samples of the opened task are read, as training and evaluation would read them. Files beside
the data set must not be read, whatever the names in its lists are.
"""

import contextlib
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from PIL import Image
from torch import nn

from micronorm.engine.settings import Outcome
from micronorm.tasks import open_task
from tests.data import miniature
from tests.fuzz import values

OUTSIDE = "outside"
"""The folder beside the data set, with files that fit it."""

_SHAPES = ([1, 2, 3, 4], [[0, 0, 9, 0, 9, 9]], [1e9, 0, 1, 1])
_NAMES = (f"../{OUTSIDE}/a.jpg", f"../{OUTSIDE}/a", f"../{OUTSIDE}/v.nii.gz", "..", ".", "", "/", "~/a", "a\\b", "fifo")
_BYTES = (b"", b"\0" * 64, b"\xff\xfe\xfa text", b"#EXTM3U\n#EXTINF:1,\n/etc/hostname\n", b"ffconcat version 1.0\n")
_BYTES += (b"PK\x03\x04", b"\x80\x04cos\nsystem\n(S'false'\ntR.", b"[" * 100_000, b"{" * 64, b"v=0\nc=IN IP4 0.0.0.0\n")


def _write_volumes(root: Path) -> None:
    miniature.write_decathlon(root, count=5)


def _write_folders(root: Path) -> None:
    miniature.write_folders(root, classes=[f"c{k:02}" for k in range(20)], count=1)


SETS: Mapping[str, tuple[str, Callable[[Path], Any]]] = {
    "coco": ("coco128", lambda root: miniature.write_coco(root, official=False)),
    "nuclei": ("nuclei", miniature.write_nuclei),
    "volumes": ("hippocampus/bcn-ws-fold0", _write_volumes),
    "voc": ("voc/micro-bcn-ws-step", miniature.write_voc),
    "camvid": ("camvid", miniature.write_camvid),
    "label maps": ("label_maps", miniature.write_label_maps),
    "frames": ("tsm/bcn-ws", lambda root: miniature.write_frame_folders(root, train=2, test=1, frames=2)),
    "videos": ("clips", lambda root: miniature.write_videos(root, count=4)),
    "folders": ("tiny_imagenet", _write_folders),
    "cifar": ("cifar1/c10-bn", lambda root: miniature.write_binary(root, 10)),
}


def write(chance: random.Random, folder: Path) -> list[str]:
    """Write a data set, change something in it, and return the command that trains on it."""
    recipe, make = SETS[chance.choice(list(SETS))]
    root = folder / "data"
    make(root)
    _write_outside(folder / OUTSIDE)
    for _ in range(chance.choice((1, 1, 2, 4))):
        _damage(chance, root, folder)
    unverified = ["--unverified"] if recipe.startswith("cifar") else []
    return ["train", recipe, "--data", "data", "--out", "run", "--steps", "1", "--device", "cpu", *unverified]


def _write_outside(place: Path) -> None:
    """Write an image, a mask and a volume that fit the data sets but are not part of them."""
    place.mkdir()
    for size, name in (((32, 24), "a.jpg"), ((24, 20), "a.png"), ((32, 24), "b.jpg")):
        Image.new("L" if name.endswith("png") else "RGB", size).save(place / name)


def _damage(chance: random.Random, root: Path, folder: Path) -> None:
    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    if not files:
        return
    texts = [path for path in files if path.suffix in (".json", ".csv", ".txt")]
    file = chance.choice(texts if texts and chance.random() < 0.7 else files)
    if file in texts and chance.random() < 0.85:
        _edit(chance, file, folder)
        return
    content = file.read_bytes()
    match chance.randrange(6):
        case 0:
            file.write_bytes(content[: chance.randrange(len(content) + 1)])
        case 1:
            at = chance.randrange(len(content) + 1)
            file.write_bytes(content[:at] + chance.randbytes(8) + content[at + 8 :])
        case 2:
            file.write_bytes(chance.choice(_BYTES))
        case 3:
            other = chance.choice(files)
            file.write_bytes(other.read_bytes())
        case 4:
            file.unlink()
            chance.choice((values.pipe, Path.mkdir, lambda path: path.symlink_to(path.name), lambda path: None))(file)
        case _:
            _shrink_header(chance, file, content)


def _shrink_header(chance: random.Random, file: Path, content: bytes) -> None:
    """Overwrite sizes in a header: of a NIfTI file inside its gzip, else anywhere in the first 64 bytes."""
    if file.name.endswith(".nii.gz"):
        import gzip

        header = bytearray(gzip.decompress(content))
        at = chance.choice((0, 40, 42, 44, 46, 48, 70, 72, 108, 112, 116, 252, 280, 344))
        number = chance.choice((-1, 0, 2, 4, 7, 8, 127, 255, 32767, -32768))
        header[at : at + 2] = number.to_bytes(2, "little", signed=True)
        if chance.random() < 0.3:
            header[at : at + 4] = b"\x00\x00\xc0\x7f"  # a NaN
        file.write_bytes(gzip.compress(bytes(header), compresslevel=1))
        return
    at = chance.randrange(min(64, len(content) + 1))
    file.write_bytes(content[:at] + b"\xff\xff" + content[at + 2 :])


def _edit(chance: random.Random, file: Path, folder: Path) -> None:
    """Change a value of a JSON file, or a line of a list."""
    names = (*_NAMES, str(folder / OUTSIDE / "a.jpg"), str(folder / OUTSIDE / "a"))
    text = file.read_text("utf-8", errors="replace")
    if file.suffix == ".json":
        with contextlib.suppress(ValueError, RecursionError):
            file.write_text(json.dumps(values.changed(chance, json.loads(text), (*values.VALUES, *_SHAPES, *names))))
        return
    lines = text.splitlines() or [""]
    k = chance.randrange(len(lines))
    lines[k] = chance.choice(
        (*names, lines[k] + ";", ";" + lines[k], "", "\x0b", "é" * 300, f"../{lines[k]}", lines[0])
    )
    file.write_text("\n".join(lines) + "\n")


# --- reading it -------------------------------------------------------------------------------------------------------

_opened: list[str] | None = None


def _note_opened(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open" and isinstance(arguments[0], str):
        _opened.append(arguments[0])


sys.addaudithook(_note_opened)  # hooks stay as long as the process


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Read samples where a training would start, and check that no file outside of the data set was opened."""
    global _opened
    opened = _opened = []
    try:
        with (
            mock.patch("micronorm.recipes.recipe.Recipe.build", return_value=nn.Linear(1, 1)),
            mock.patch("micronorm.recipes.run.open_task", _open_any_number_of_classes),
            mock.patch("micronorm.recipes.run.train", _read_samples),
            mock.patch("micronorm.recipes.run.records.write_predictions"),
        ):
            yield
    finally:
        _opened = None
    outside = (folder / OUTSIDE).resolve()
    read = [name for name in opened if Path(name).resolve().is_relative_to(outside)]
    assert not read, f"read {read[0]}, which is not part of the data set"


def _open_any_number_of_classes(*arguments: Any, classes: Any, **options: Any) -> Any:
    """Open a task. The miniatures have fewer classes than the data sets of the recipes."""
    task = open_task(*arguments, **options)
    task.examples = lambda *_, **__: []
    return task


def _read_samples(model: nn.Module, task: Any, *_: Any, **__: Any) -> Outcome:
    for samples in (task.train, task.test):
        shares = [(epoch, torch.arange(min(3, len(samples)))) for epoch in (0, 1)]
        for _batch in samples.load(shares, seed=0):
            pass
    return Outcome(steps=0, figures={}, digest="", finished=True, checkpoint=None)
