"""Images with annotated objects: the batches that detectors train on, and COCO, in the official or a flat layout.

A batch is (images, targets, keys):

- images: a list of 3×H×W float32 tensors in [0, 1], each of its own size.
- targets: a list of dictionaries: "boxes" (K×4 float32, x1 y1 x2 y2 in pixels), "labels" (K int64, from 1), "masks"
  (K×H×W uint8, if the set was opened with masks) and "image" (the sample's index). K may be 0.
- keys: one random key per sample (int64 N), a function of (seed, epoch, index).

Files are checked when the set is opened, so that a broken one is named before the training starts.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from micronorm.data.files import (
    check_picture,
    decode_pixels,
    find_listed,
    find_root,
    import_optional,
    read_json,
    require_torchvision,
)
from micronorm.data.loading import FileSamples, Order
from micronorm.data.samples import CROP, FLIP, DataSet
from micronorm.ops.keyed import uniforms

Target = dict[str, Any]
DecodedBatch = tuple[list[Tensor], list[Target], Tensor]


class DetectionDecoder:
    """Images with objects. The batches are described at the top of this module.

    A subclass has a length and `annotations`: the objects of all images as a COCO dictionary, in the order of the
    samples.

    Args:
        masks: whether the targets have masks.
        train: mirror samples at random.
        axes: along which to mirror: -1 is left to right, -2 top to bottom.
    """

    annotations: Any
    aspect_ratios: Tensor | None = None

    def __init__(self, *, masks: bool, train: bool, axes: tuple[int, ...] = (-1,)) -> None:
        self._masks, self._train, self._axes = masks, train, axes

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, index: int, place: list[float]) -> tuple[Tensor, Target]:
        """Return the 3×H×W bytes and the target of a sample. Two random numbers in [0, 1) determine its crop."""
        raise NotImplementedError

    def __getitem__(self, order: Order) -> DecodedBatch:
        keys = order.keys
        places = uniforms(keys, 2, stream=CROP).tolist()
        flips = (uniforms(keys, len(self._axes), stream=FLIP) < 0.5).tolist()
        images, targets = [], []
        for index, place, mirrored in zip(order.indices, places, flips, strict=True):
            image, target = self.read(index, place)
            for mirror, axis in zip(mirrored, self._axes, strict=True):
                if mirror and self._train:
                    image, target = flip_sample(image, target, axis=axis)
            images.append(image)
            targets.append({**target, "image": index})
        return images, targets, keys

    def finish(self, batch: DecodedBatch) -> DecodedBatch:
        """Return the batch with images in [0, 1]."""
        images, targets, keys = batch
        return [image.to(torch.float32) / 255 for image in images], targets, keys


class DetectionSamples(FileSamples):
    """Images with objects that a `DetectionDecoder` reads."""

    _decoder: DetectionDecoder

    @property
    def annotations(self) -> dict[str, Any]:
        """Return the objects of all images as a COCO dictionary, for scoring, in the order of the samples."""
        return self._decoder.annotations

    @property
    def aspect_ratios(self) -> Tensor | None:
        """Return width / height of each sample, by which those of a step are ordered; None if all have one shape."""
        return self._decoder.aspect_ratios


def flip_sample(image: Tensor, target: Target, *, axis: int) -> tuple[Tensor, Target]:
    """Mirror an image with its boxes and masks.

    Args:
        image: C×H×W.
        target: with "boxes", and "masks" if there are any.
        axis: -1 for left to right, -2 for top to bottom.

    Example:
        >>> target = {"boxes": torch.tensor([[0.0, 1.0, 2.0, 3.0]])}
        >>> flip_sample(torch.zeros(3, 6, 8), target, axis=-1)[1]["boxes"].tolist()
        [[6.0, 1.0, 8.0, 3.0]]
    """
    boxes = target["boxes"].clone()
    low = 0 if axis == -1 else 1
    boxes[:, [low, low + 2]] = image.shape[axis] - boxes[:, [low + 2, low]]
    masks = {"masks": target["masks"].flip(axis)} if "masks" in target else {}
    return image.flip(axis), {**target, "boxes": boxes, **masks}


def encode_masks(masks: Tensor) -> list[str]:
    """Return K×H×W masks of 0 and 1 as K compressed run-length encodings.

    Example:
        >>> encode_masks(torch.ones(1, 2, 3))
        ['06']
    """
    # The library takes H×W×K in Fortran's order.
    columns = masks.to(torch.uint8).transpose(1, 2).contiguous().cpu().numpy().transpose(2, 1, 0)
    return [code["counts"].decode() for code in load_mask_library().encode(columns)] if len(masks) else []


def to_coco_boxes(boxes: Tensor) -> list[list[float]]:
    """Return K×4 boxes of x1, y1, x2, y2 as lists of x, y, width and height."""
    corners = boxes.double()
    return torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1).tolist()


def load_mask_library() -> Any:
    """Return `faster_coco_eval.mask`. Raise ImportError with the fix if it is not installed."""
    return import_optional("faster_coco_eval", "COCO's masks and scores", "faster-coco-eval").mask


# --- COCO's files -----------------------------------------------------------------------------------------------------

LAYOUTS = {"annotations/instances_{}2017.json": "{}2017", "instances_{}.json": "{}"}
"""The annotations and the folder of the images, for "train" and "val": the official layout and the flat one."""

_KEYS: dict[str, dict[str, Any]] = {
    "images": {"id": int, "file_name": str, "height": int, "width": int},
    "annotations": {"id": int, "image_id": int, "category_id": int, "bbox": list, "area": (int, float), "iscrowd": int},
    "categories": {"id": int, "name": str},
}
_DEFAULTS = {"area": 0, "iscrowd": 0}
"""Keys that may be left out. A missing area becomes that of the box, or of the mask if masks are read."""


def open_coco(
    folder: Path | str | None,
    *,
    masks: bool,
    workers: int = 0,
    child: str = "coco",
    test: Literal["train", "val"] = "val",
) -> DataSet:
    """Open COCO: the folder of train2017, val2017 and annotations, or of train, val and instances_{train,val}.json.

    Categories become the labels 1, 2, … in the order of their ids. Crowds and boxes without an area are not targets;
    crowds count in the score. Training images are mirrored at random, and those without an object are left out. Test
    images are all used, as they are.

    Args:
        folder: this folder, or one that contains it as `child`; None for ./data and ~/data.
        masks: whether targets have the mask of each object.
        workers: processes that decode; 0 decodes in this one.
        child: the name to look for in `folder`.
        test: the part to test on. "train" shows whether a model can memorize its images.

    Raises:
        FileNotFoundError: no such folder, or an image is missing.
        ValueError: a broken file, with its name.
    """
    require_torchvision()
    files = " or ".join(file.format("train") for file in LAYOUTS)
    layout = f"a folder with {files}, and the images beside it"
    root = find_root(folder, (child,), _find_layout, title="COCO", layout=layout)
    file = str(_find_layout(root))
    opened = []
    for part in ("train", test):
        path, images = root / file.format(part), root / LAYOUTS[file].format(part)
        annotations = _read_annotations(path, images, masks=masks)
        decoder = _CocoDecoder(annotations, images, masks=masks, train=not opened)
        if not any(len(objects.labels) for objects in decoder.objects):
            raise ValueError(
                f"{path} annotates no object in {len(annotations['images'])} images; annotate at least one"
            )
        opened.append(DetectionSamples(decoder, workers=workers))
    categories, others = (samples.annotations["categories"] for samples in opened)
    if categories != others:
        raise ValueError(f"the training and test annotations below {root} must have the same categories")
    return DataSet(*opened, names=("background", *(category["name"] for category in categories)))


def _find_layout(folder: Path) -> str | None:
    """Return the key of `LAYOUTS` whose training annotations are in a folder, or None."""
    return next((file for file in LAYOUTS if (folder / file.format("train")).is_file()), None)


def _read_annotations(file: Path, folder: Path, *, masks: bool) -> dict[str, Any]:
    """Return the file's images, checked annotations with compressed outlines, and categories in the order of ids."""
    content = _read_json(file)
    _check_images(content["images"], folder, file)  # first: a wrong size could make the mask of an outline huge
    images = {image["id"]: image for image in content["images"]}
    for part in _KEYS:
        ids = Counter(entry["id"] for entry in content[part])
        if len(ids) < len(content[part]):
            raise ValueError(f"{file} has {part} of the same id {ids.most_common(1)[0][0]}; give each its own id")
    categories = sorted(({"id": c["id"], "name": c["name"]} for c in content["categories"]), key=lambda c: c["id"])
    known = {category["id"] for category in categories}
    annotations = []
    for entry in content["annotations"]:
        try:
            if entry["image_id"] not in images:
                raise ValueError(f"image_id {entry['image_id']} is not among the images")
            if entry["category_id"] not in known:
                raise ValueError(f"category_id {entry['category_id']} is not among the categories")
            annotations.append(_check_annotation(entry, images[entry["image_id"]], masks=masks))
        except ValueError as error:
            raise ValueError(f"{file}, annotation {entry['id']}: {error}; repair it or remove it") from error
    return {"images": list(images.values()), "annotations": annotations, "categories": categories}


def _read_json(file: Path) -> dict[str, list[Mapping[str, Any]]]:
    """Return the content of a file of annotations. Raise an error with its name if a part is missing."""
    content = read_json(file)
    for part, types in _KEYS.items():
        entries = content.get(part) if isinstance(content, dict) else None
        if not isinstance(entries, list):
            raise ValueError(f"{file} is not a COCO file of instances: it has no list {part!r}")
        for k, entry in enumerate(entries):
            for key, wanted in types.items():
                if not isinstance(entry, dict) or not _fits(entry.get(key, _DEFAULTS.get(key)), wanted):
                    raise ValueError(f"{file} is not a COCO file of instances: {part}[{k}] has no valid {key!r}")
    return content


def _fits(value: Any, wanted: Any) -> bool:
    """Return whether a value has the type and, if it is a number, fits into 63 bits, as the score needs it."""
    return isinstance(value, wanted) and not (isinstance(value, (int, float)) and abs(value) >= 2**63)


def _check_annotation(entry: Mapping[str, Any], image: Mapping[str, Any], *, masks: bool) -> dict[str, Any]:
    """Return the parts of an annotation that we use. Raise ValueError without the file's name if one is wrong."""
    box = entry["bbox"]
    if len(box) != 4 or not _are_near(box, image) or min(box[2:]) < 0 or not _ends_inside(box, image):
        raise ValueError(
            f"bbox must be x, y, width and height (not two corners) in the image of {image['width']}×{image['height']} "
            f"pixels, the last two not negative, got {box}"
        )
    given = {key: entry[key] for key in _KEYS["annotations"] if key in entry}
    kept = {**_DEFAULTS, "area": box[2] * box[3], **given}
    if not kept["area"] >= 0:  # false for NaN
        raise ValueError(f"area must be a number from 0 on, got {kept['area']}")
    if masks:
        kept["segmentation"] = _encode_outline(entry, image)
        if "area" not in entry:
            kept["area"] = int(load_mask_library().area(kept["segmentation"]))
    return kept


def _ends_inside(box: list[Any], image: Mapping[str, Any]) -> bool:
    """Return whether x + width and y + height are in the image, or 2 pixels or 2 % of its side beyond it at most."""
    ends, sides = (box[0] + box[2], box[1] + box[3]), (image["width"], image["height"])
    return all(end <= side + max(2, side / 50) for end, side in zip(ends, sides, strict=True))


def _are_near(numbers: list[Any], image: Mapping[str, Any]) -> bool:
    """Return whether these are finite numbers of pixels. The library needs memory in proportion to a polygon's size."""
    limit = 10 * (image["height"] + image["width"])
    return all(isinstance(x, (int, float)) and abs(x) <= limit for x in numbers)  # false for NaN


def _encode_outline(entry: Mapping[str, Any], image: Mapping[str, Any]) -> dict[str, Any]:
    """Return polygons or runs of pixels as a compressed run-length encoding.

    A crowd without an outline covers its box.
    """
    outline = entry.get("segmentation")
    if not outline and entry.get("iscrowd"):
        x, y, w, h = entry["bbox"]
        outline = [[x, y, x + w, y, x + w, y + h, x, y + h]]
    if not outline:
        raise ValueError("it has no segmentation, which masks need")
    counts = (_encode_polygons if isinstance(outline, list) else _encode_runs)(outline, image)
    return {"size": [image["height"], image["width"]], "counts": counts}


def _encode_polygons(polygons: list[Any], image: Mapping[str, Any]) -> str:
    for polygon in polygons:
        if not isinstance(polygon, list) or len(polygon) % 2 or len(polygon) < 6:
            points = len(polygon) / 2 if isinstance(polygon, list) else 0
            raise ValueError(f"a polygon must be 3 points or more, each of x and y, got {points:g} points")
        if not _are_near(polygon, image):
            raise ValueError("the points of a polygon must be numbers of pixels in or near the image")
    library = load_mask_library()
    return library.merge(library.frPyObjects(polygons, image["height"], image["width"]))["counts"].decode()


def _encode_runs(runs: Any, image: Mapping[str, Any]) -> str:
    size = [image["height"], image["width"]]
    counts = runs.get("counts") if isinstance(runs, dict) else None
    if not isinstance(counts, (list, str)) or runs.get("size") != size:
        raise ValueError(f"segmentation must be polygons, or runs of pixels with counts and size {size}")
    library = load_mask_library()
    if isinstance(counts, list):
        if not all(isinstance(run, int) and run >= 0 for run in counts) or sum(counts) != size[0] * size[1]:
            raise ValueError(f"the runs of pixels must add up to the {size[0] * size[1]} of the image")
        return library.frPyObjects({"counts": counts, "size": size}, *size)["counts"].decode()
    try:
        library.decode([{"counts": counts, "size": size}])
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"the compressed runs of pixels do not fill the image ({error})") from error
    return counts


def _check_images(images: list[Mapping[str, Any]], folder: Path, file: Path) -> None:
    """Raise an error for the first image that is missing, cut short, or of another size than the file says."""
    for image in images:
        path = find_listed(folder, image["file_name"], file)
        if not path.is_file():
            raise FileNotFoundError(
                f"no image at {path}: {file} names it {image['file_name']!r}, and names are relative to {folder}"
            )
        size = check_picture(path)
        if size != (image["width"], image["height"]):
            raise ValueError(
                f"{path} has {size[0]}×{size[1]} pixels, but {image['width']}×{image['height']} in {file}; "
                "the annotations belong to another version of the image, or to the image before it was turned as its "
                "EXIF orientation says"
            )


class _Objects(NamedTuple):
    """The objects of an image: boxes (K×4, x1 y1 x2 y2, within the image), labels, and compressed outlines."""

    boxes: np.ndarray
    labels: np.ndarray
    outlines: list[Any]


class _CocoDecoder(DetectionDecoder):
    """Reads images, and makes targets of their annotations."""

    def __init__(self, annotations: dict[str, Any], folder: Path, *, masks: bool, train: bool) -> None:
        super().__init__(masks=masks, train=train)
        labels = {category["id"]: k for k, category in enumerate(annotations["categories"], 1)}
        by_image = defaultdict(list)
        for entry in annotations["annotations"]:
            by_image[entry["image_id"]].append(entry)
        pairs = [(image, _find_objects(by_image[image["id"]], image, labels)) for image in annotations["images"]]
        pairs = [(image, objects) for image, objects in pairs if len(objects.labels) or not train]
        images = [image for image, _ in pairs]
        entries = [entry for image in images for entry in by_image[image["id"]]]
        self.annotations = {**annotations, "images": images, "annotations": entries}
        self.objects = [objects for _, objects in pairs]
        self.aspect_ratios = torch.tensor([image["width"] / image["height"] for image in images])
        self._paths = [folder / image["file_name"] for image in images]

    def __len__(self) -> int:
        return len(self._paths)

    def read(self, index: int, place: list[float]) -> tuple[Tensor, Target]:
        """Return a whole image and its target."""
        image = decode_pixels(self._paths[index])
        boxes, labels, outlines = self.objects[index]
        target = {"boxes": torch.tensor(boxes), "labels": torch.tensor(labels)}
        if self._masks and outlines:
            masks = torch.from_numpy(load_mask_library().decode(outlines))  # H×W×K
            target["masks"] = masks.permute(2, 0, 1).contiguous()
        elif self._masks:
            target["masks"] = torch.zeros(0, *image.shape[1:], dtype=torch.uint8)
        return image, target


def _find_objects(entries: list[dict[str, Any]], image: Mapping[str, Any], labels: Mapping[int, int]) -> _Objects:
    """Return the objects of an image, except crowds and boxes that have no area within the image."""
    boxes = np.array([entry["bbox"] for entry in entries], dtype=np.float64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    boxes = boxes.clip(0, [image["width"], image["height"]] * 2).astype(np.float32)
    single = np.array([not entry["iscrowd"] for entry in entries], dtype=bool)
    kept = np.flatnonzero(single & (boxes[:, 2:] > boxes[:, :2]).all(1))
    outlines = [entries[k].get("segmentation") for k in kept]
    return _Objects(boxes[kept], np.array([labels[entries[k]["category_id"]] for k in kept], np.int64), outlines)
