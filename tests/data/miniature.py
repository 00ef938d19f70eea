"""Data sets in their official layouts with a handful of images, written by hand."""

import json
import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

BINARY = {10: "cifar-10-batches-bin", 100: "cifar-100-binary"}
PYTHON = {10: "cifar-10-batches-py", 100: "cifar-100-python"}
FILES = {
    10: ([f"data_batch_{i}" for i in range(1, 6)], ["test_batch"]),
    100: (["train"], ["test"]),
}


def records(classes: int, file: int, count: int) -> tuple[np.ndarray, list[int]]:
    """(pixels count×3072, labels) of the file with this number; the same at every call."""
    random = np.random.default_rng([classes, file])
    return random.integers(0, 256, (count, 3072), dtype=np.uint8), random.integers(0, classes, count).tolist()


def write_binary(folder: Path, classes: int, count: int = 3) -> Path:
    """The binary release, `count` records in each file."""
    place = folder / BINARY[classes]
    place.mkdir(parents=True)
    for number, name in enumerate([*FILES[classes][0], *FILES[classes][1]]):
        pixels, labels = records(classes, number, count)
        heads = [[label] if classes == 10 else [label // 5, label] for label in labels]
        rows = [bytes(head) + row.tobytes() for head, row in zip(heads, pixels, strict=True)]
        (place / f"{name}.bin").write_bytes(b"".join(rows))
    return place


def write_python(folder: Path, classes: int, count: int = 3) -> Path:
    """The Python release, `count` records in each file."""
    place = folder / PYTHON[classes]
    place.mkdir(parents=True)
    for number, name in enumerate([*FILES[classes][0], *FILES[classes][1]]):
        pixels, labels = records(classes, number, count)
        entries = {"data": pixels, "labels" if classes == 10 else "fine_labels": labels}
        (place / name).write_bytes(pickle.dumps(entries))
    meta, key = ("batches.meta", "label_names") if classes == 10 else ("meta", "fine_label_names")
    (place / meta).write_bytes(pickle.dumps({key: [str(k) for k in range(classes)]}))
    return place


def write_folders(root: Path, *, classes: Sequence[str] = ("ant", "bee", "cat"), count: int = 4) -> Path:
    """train and val with `count` images of noise per class, of several sizes, kinds and spellings; some greyscale."""
    random = np.random.default_rng(0)
    for part in ("train", "val"):
        for name in classes:
            place = root / part / name
            place.mkdir(parents=True)
            for i in range(count):
                shape = (40 + 5 * i, 64 - 3 * i) if i == 1 else (40 + 5 * i, 64 - 3 * i, 3)
                suffix = ("jpg", "JPEG", "png", "jpeg")[i % 4]
                Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8)).save(place / f"{name}_{i}.{suffix}")
    return root


def write_masked(image, mask, size, *, labels=None, seed=0, void=255):
    """Write an image, and a palette mask of labels 0 to 2 whose first row is void."""
    height, width = size
    random = np.random.default_rng(seed)
    for path in (image, mask):
        path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(image)
    values = random.integers(0, 3, size, dtype=np.uint8) if labels is None else np.full(size, labels, np.uint8)
    values[0] = void
    picture = Image.fromarray(values, mode="P")
    picture.putpalette([i % 256 for i in range(768)])
    picture.save(mask)


def write_voc(root, *, augmented=0):
    """Write a PASCAL VOC of two training images and one test image; `augmented` images are in the longer list."""
    lists = {"train": ["a", "b"], "val": ["c"]}
    if augmented:
        lists["trainaug"] = ["a", "b", *(f"d{k}" for k in range(augmented - 2))]
    (root / "ImageSets/Segmentation").mkdir(parents=True)
    for name, members in lists.items():
        (root / f"ImageSets/Segmentation/{name}.txt").write_text("\n".join(members) + "\n")
        folder = "SegmentationClassAug" if name == "trainaug" else "SegmentationClass"
        for k, member in enumerate(members):
            write_masked(root / f"JPEGImages/{member}.jpg", root / folder / f"{member}.png", (20, 24), seed=k)


def write_camvid(root, *, train=3):
    """Write a CamVid of `train` training images and two test images."""
    for part, count in (("train", train), ("test", 2)):
        for k in range(count):
            write_masked(root / f"{part}/{k}.jpg", root / f"{part}annot/{k}.png", (18, 24), seed=k, void=11)


COCO_CATEGORIES = ({"id": 1, "name": "person"}, {"id": 3, "name": "car"}, {"id": 90, "name": "toothbrush"})
COCO_SIZE = (24, 32)
SQUARE = [4.0, 4.0, 12.0, 4.0, 12.0, 12.0, 4.0, 12.0]
"""A polygon of 8×8 pixels."""


def coco_object(number, image, category, *, box=(4, 4, 8, 8), crowd=0, outline=None):
    """An annotation as COCO writes it; a square by default."""
    return {
        "id": number,
        "image_id": image,
        "category_id": category,
        "bbox": list(box),
        "area": float(box[2] * box[3]),
        "iscrowd": crowd,
        "segmentation": [SQUARE] if outline is None else outline,
    }


def coco_objects():
    """Objects of images 10 (two, one in two parts), 20 (a crowd and a box without an area) and 30 (none)."""
    height, width = COCO_SIZE
    parts = [SQUARE, [20.0, 4.0, 28.0, 4.0, 28.0, 12.0, 20.0, 12.0]]
    runs = {"size": [height, width], "counts": [0, 48, height * width - 48]}  # two columns
    return [
        coco_object(1, 10, 90),
        coco_object(2, 10, 3, box=(4, 4, 24, 8), outline=parts),
        coco_object(3, 20, 1, box=(0, 0, 2, 24), crowd=1, outline=runs),
        coco_object(4, 20, 1, box=(5, 5, 0, 3)),
        coco_object(5, 20, 3, box=(8, 2, 26, 10), outline=[[8.0, 2.0, 34.0, 2.0, 34.0, 12.0, 8.0, 12.0]]),
    ]


def write_coco(root, *, official=True, objects=None):
    """Write a COCO of three images per part, of which the last has no object. Return the training annotations."""
    height, width = COCO_SIZE
    random = np.random.default_rng(0)
    for part in ("train", "val"):
        folder = root / (f"{part}2017" if official else part)
        folder.mkdir(parents=True)
        images = [{"id": k, "file_name": f"{k:012}.jpg", "height": height, "width": width} for k in (10, 20, 30)]
        for image in images:
            pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / image["file_name"])
        file = root / (f"annotations/instances_{part}2017.json" if official else f"instances_{part}.json")
        file.parent.mkdir(exist_ok=True)
        found = coco_objects() if objects is None else objects
        file.write_text(json.dumps({"images": images, "annotations": found, "categories": COCO_CATEGORIES[::-1]}))
    return root / ("annotations/instances_train2017.json" if official else "instances_train.json")


def write_nuclei(root, *, names="abcdef", size=(20, 24)):
    """Write images of two square nuclei, numbers 1 and 300, in 16 bits; "b", "d" and "e" are for testing."""
    random = np.random.default_rng(0)
    for folder in ("images", "labels"):
        (root / folder).mkdir(parents=True)
    for name in names:
        Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)).save(root / f"images/{name}.jpg")
        nuclei = np.zeros(size, dtype=np.uint16)
        nuclei[2:8, 3:9], nuclei[10:18, 12:20] = 1, 300
        Image.fromarray(nuclei).save(root / f"labels/{name}.png")


def write_decathlon(root, *, count=6, shape=(9, 12, 10), classes=("background", "Anterior", "Posterior")):
    """Write `count` volumes of the Medical Segmentation Decathlon. v4 is in fold 0; every second one has bytes.

    Shapes differ by volume, and intensity scales by a factor of ten thousand. A bright box is of class 1, a dark one of
    class 2.
    """
    import nibabel

    random = np.random.default_rng(0)
    entries = []
    for folder in ("imagesTr", "labelsTr"):
        (root / folder).mkdir(parents=True)
    for k in range(count):
        size = (shape[0] + k % 3, shape[1], shape[2] + k % 2)
        labels = np.zeros(size, dtype=np.uint8)
        labels[2:6, 2:6, 2:6], labels[2:6, 7:11, 2:6] = 1, 2
        image = random.normal(size=size) + np.array([0, 3, -3])[labels]
        image = np.clip(40 * image + 128, 0, 255).astype(np.uint8) if k % 2 else (1e5 * image).astype(np.float32)
        for folder, array in (("imagesTr", image), ("labelsTr", labels)):
            nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), root / folder / f"v{k}.nii.gz")
        entries.append({"image": f"./imagesTr/v{k}.nii.gz", "label": f"./labelsTr/v{k}.nii.gz"})
    content = {"labels": {str(k): name for k, name in enumerate(classes)}, "training": entries}
    (root / "dataset.json").write_text(json.dumps(content))


def write_label_maps(root, *, names=("earth", "water", "air"), void=255, size=(18, 24)):
    """Write three training and two test images with label maps, and classes.txt if there are names."""
    for part, count in (("train", 3), ("val", 2)):
        for k in range(count):
            files = root / f"{part}/images/{k}.jpg", root / f"{part}/masks/{k}.png"
            write_masked(*files, size, seed=k, void=void)
    if names:
        (root / "classes.txt").write_text("\n".join(names) + "\n")


def write_frame_folders(root, *, prefix="something-something-v1", train=4, test=2, frames=6):
    """Write a Something-Something V1 of two classes; the videos have `frames` frames or a few more."""
    classes = ("Pushing something from left to right", "Pushing something from right to left")
    root.mkdir(parents=True, exist_ok=True)
    (root / f"{prefix}-labels.csv").write_text("\n".join(classes) + "\n")
    random = np.random.default_rng(0)
    identity = 100
    for part, count in (("train", train), ("validation", test)):
        lines = []
        for k in range(count):
            place = root / f"20bn-{prefix}" / str(identity)
            place.mkdir(parents=True)
            for number in range(1, frames + k + 1):
                pixels = random.integers(0, 256, (20, 28, 3), dtype=np.uint8)
                pixels[0, 0] = identity % 256
                Image.fromarray(pixels).save(place / f"{number:05d}.jpg")
            lines.append(f"{identity};{classes[k % 2]}")
            identity += 1
        (root / f"{prefix}-{part}.csv").write_text("\n".join(lines) + "\n")
    return root


def write_video(path, *, frames=10, size=(32, 48), step=4):
    """Write an mp4 of a bright bar that moves to the right by `step` pixels a frame; negative: to the left."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as video:
        stream = video.add_stream("mpeg4", rate=10)
        stream.height, stream.width = size
        stream.pix_fmt = "yuv420p"
        for t in range(frames):
            pixels = np.full((*size, 3), 30, np.uint8)
            left = t * step if step > 0 else size[1] - 6 + t * step
            pixels[:, left : left + 6] = 220
            video.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        video.mux(stream.encode(None))


def write_videos(root, *, count=8):
    """Write `count` videos in each of two classes."""
    for name, step in (("left", -4), ("right", 4)):
        for k in range(count):
            write_video(root / name / f"{name}{k}.mp4", frames=8 + k % 3, step=step)
    return root
